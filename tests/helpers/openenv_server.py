"""Servers of openenv-core on one port, for tests: `python openenv_server.py PORT`.

`/text` says all texts so far, and `/slow` takes a minute for that; `/number` and `/board` have actions of one number and
of two; `/tools` has tools of its own.
"""

import sys
import time

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Said(Action):
    text: str


class Number(Action):
    value: int


class Move(Action):
    row: int
    column: int


class Seen(Observation):
    text: str = ""
    history: tuple[str, ...] = ()


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    slow = False

    def reset(self, seed=None, episode_id=None, label="", **kwargs):
        self.history = [f"{label}{seed}"]
        return Seen(text=f"task {self.history[0]}")

    def step(self, action, timeout_s=None, **kwargs):
        said = [str(value) for name, value in action.model_dump().items() if name != "metadata"]
        if self.slow:
            time.sleep(60)
        if said == ["fail"]:
            raise RuntimeError("no luck")
        self.history.append(" ".join(said))
        return Seen(
            text=" ".join(self.history), history=tuple(self.history), reward=len(self.history), done=said == ["end"]
        )

    @property
    def state(self):
        return State()


class SlowGame(Game):
    slow = True


def make_tools_app():
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Tools(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            server = FastMCP("sums")

            @server.tool()
            def add(a: int, b: int) -> str:
                """The sum of two numbers."""
                return str(a + b)

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation()

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return Observation()

        @property
        def state(self):
            return State()

    return create_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=4)


app = FastAPI()
for path, game, action in (
    ("/text", Game, Said),
    ("/slow", SlowGame, Said),
    ("/number", Game, Number),
    ("/board", Game, Move),
):
    app.mount(path, create_app(game, action, Seen, max_concurrent_envs=4))
app.mount("/tools", make_tools_app())
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
