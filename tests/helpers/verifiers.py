"""Tasksets of the package verifiers, for tests. It finds them by module name, so they are written where Python
looks."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

TASKSETS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)
"""
SINGLE = (
    TASKSETS
    + """
class Config(vf.TasksetConfig):
    size: int = 4

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(self.config.size):
            yield Sum(Data(prompt=f"{i}+{i}=", system_prompt="add", answer=str(2 * i)), self.config.task)

__all__ = ["Sums"]
"""
)
MULTI = (
    TASKSETS
    + '''
class Patient(Sum):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0 and trace.last_reply == "pass"

class Sums(vf.Taskset[Patient, vf.TasksetConfig]):
    INFINITE = True
    def load(self):
        i = 0
        while True:
            yield Patient(Data(prompt=f"{i}+{i}=", answer=str(2 * i)), self.config.task)
            i += 1

class CoachConfig(vf.EnvConfig):
    pupil: vf.AgentConfig = vf.AgentConfig()

class Coach(vf.Env[CoachConfig]):
    """Asks again until the answer is right, three times at most."""
    async def run(self, task, agents):
        async with agents.pupil.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply == task.data.answer:
                    break
                if segment.last_reply == "burn":
                    raise RuntimeError("the coach burnt out")
                segment = await interaction.turn("try again")

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("effort", 0.5)

__all__ = ["Sums", "Coach"]
'''
)
TWO_AGENTS = (
    SINGLE.replace('__all__ = ["Sums"]', "")
    + """
class PairConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()

class Pair(vf.Env[PairConfig]):
    async def run(self, task, agents):
        pass

__all__ = ["Sums", "Pair"]
"""
)

TOOLS = '''
import verifiers.v1 as vf

class Counted(vf.State):
    asked: int = 0

class Prices(vf.Toolset[vf.ToolsetConfig, Counted]):
    async def setup_task(self, task):
        self.price = int(task.answer)

    @vf.tool
    def look_up(self, name: str) -> str:
        """The price of a thing."""
        if name == "nothing":
            raise ValueError("no such thing")
        self.state.asked += 1
        return f"{name} costs {self.price}"

class Data(vf.TaskData):
    answer: str

class Price(vf.Task[Data, Counted, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Prices(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward
    async def looked_up(self, trace) -> float:
        calls = [call for m in trace.messages if m.role == "assistant" for call in m.tool_calls or []]
        assert all(call.name == "prices_look_up" for call in calls)
        return 0.25 * trace.state.asked + 0.125 * len(calls)

class Shop(vf.Taskset[Price, vf.TasksetConfig]):
    def load(self):
        for i in range(4):
            yield Price(Data(prompt="What does tea cost?", answer=str(10 + i)), self.config.task)

__all__ = ["Shop"]

if __name__ == "__main__":
    Prices.run()
'''
SHARED_TOOLS = (
    TOOLS.replace("self, task):\n        self.price = int(task.answer)", "self):\n        self.price = os.getpid()")
    .replace("setup_task", "setup")
    .replace("import verifiers", "import os\nimport verifiers")
    .replace("@classmethod\n    def toolsets", "@classmethod\n    def of_task")
    .replace(
        "    def load(self):",
        "    def toolsets(self, config):\n        return [Prices(vf.ToolsetConfig())]\n\n    def load(self):",
    )
)
"""The same tools for all episodes: the price is the id of their process."""


@contextlib.contextmanager
def tasksets_in(folder: Path) -> Iterator[None]:
    """Make `vf_single_sums`, `vf_coached_sums`, `vf_pair_sums`, `vf_shop` and `vf_shared_shop` importable in the block."""
    texts = {
        "single_sums": SINGLE,
        "coached_sums": MULTI,
        "pair_sums": TWO_AGENTS,
        "shop": TOOLS,
        "shared_shop": SHARED_TOOLS,
    }
    for name, text in texts.items():
        (folder / f"vf_{name}.py").write_text(text)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
