"""Environments that a user might bring, well and badly behaved, for tests. They are loaded by `module:Class`."""

import gc
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from r3async.envs import Action, Message, StepResult


class Echo:
    """A blocking environment, in which the answer says what its process does next. It rewards an answer that repeats
    the task's number."""

    def __init__(self, mark: str = ""):
        self.mark = mark

    def reset(self, task_seed: int) -> str:
        self.seed, self.turn = task_seed, 0
        return f"{task_seed} in {os.getpid()}"

    def oracle(self) -> str:
        return str(self.seed + self.turn)

    def step(self, action: Action) -> StepResult:
        match action.text:
            case "hang":
                time.sleep(600)
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "quit":
                sys.exit("no licence")
            case "raise":
                raise ValueError("the dice rolled off the table")
            case "nonsense":
                return "no result"  # type: ignore[return-value]
            case "half a character":
                return StepResult(0.0, [Message("user", "\ud800")])
            case "half a reply":
                _stop_within_a_reply()
            case "no reply":
                _own_channel().sendall(struct.pack("!Q", 2) + b"\xa1\xff")
        if action.text.startswith("use a tool that hangs"):
            mark = action.text.rpartition(" ")[2]
            script = f"echo $$ > {mark}~; mv {mark}~ {mark}; exec sleep 600"
            subprocess.run(["/bin/sh", "-c", script], env={}, start_new_session=True)
        if action.text.startswith("repeat"):
            return StepResult(0.0, [Message("user", action.text.removeprefix("repeat"))])
        right, self.turn = action.text == self.oracle(), self.turn + 1
        return StepResult(right / 2, [] if self.turn == 2 else [Message("user", "again")], self.turn == 2)

    def close(self) -> None:
        if self.mark:
            with Path(self.mark).open("a") as file:
                file.write("closed\n")


class Unseeded:
    """A blocking environment that ignores the seed of its task: it draws from the generators of the whole process, and
    from a set, in each of its methods."""

    def __init__(self) -> None:
        self.made = self._draw()

    def _draw(self) -> str:
        order = " ".join({"heron", "ibis", "jay", "kite", "lark", "merlin"})
        hash_seed = os.environ.get("PYTHONHASHSEED")
        return f"{random.random()} {np.random.random()} {order} seed {hash_seed}"

    def reset(self, task_seed: int) -> str:
        return f"{self.made} {self._draw()}"

    def step(self, action: Action) -> StepResult:
        return StepResult(0.0, [Message("user", self._draw())], metrics={"pid": os.getpid()})


def _own_channel() -> socket.socket:
    (channel,) = (each for each in gc.get_objects() if isinstance(each, socket.socket))
    return channel


def _stop_within_a_reply() -> None:
    """Make this process of a pool write the length of a reply and half of the reply, and then be stopped."""
    _own_channel().sendall(struct.pack("!Q", 100) + b"x" * 50)
    os.kill(os.getpid(), signal.SIGSTOP)


class Stubborn:
    """A blocking environment that can be constructed where the run is set up, but not in a process of the pool."""

    def __init__(self) -> None:
        if "pytest" not in sys.modules:
            raise RuntimeError("not in this process")

    def reset(self, task_seed: int) -> str:
        return "?"

    def step(self, action: Action) -> StepResult:
        return StepResult(0.0, done=True)


class Awaiting:
    """An environment of `async def` methods, which is played in the process that calls it."""

    async def reset(self, task_seed: int) -> list[Message]:
        return [Message("user", str(os.getpid()))]

    async def step(self, action: Action) -> StepResult:
        return StepResult(1.0, done=True)


def half_for_trying(answer: str, row: dict[str, Any]) -> float:
    """Score an answer, as a reward function of rows does."""
    return 1.0 if answer == row["solution"] else 0.5


def one_argument(answer: str) -> float:
    return 0.0


def three_arguments(completion: str, answer: str, difficulty: int) -> float:
    return 0.0


def first_free(observation: str, rng: Any) -> str:
    """Play the first move on offer, as a textarena opponent."""
    return "[" + observation.rpartition("Available Moves: '[")[2][0] + "]"


def register_gymnasium_games() -> None:
    import gymnasium

    class Parrot(gymnasium.Env):  # type: ignore[type-arg]
        """A game with text in and text out: repeat the word."""

        observation_space = gymnasium.spaces.Text(8)
        action_space = gymnasium.spaces.Text(4, charset="abcd")

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            self.word = "".join("abcd"[i] for i in self.np_random.integers(0, 4, 3))
            return self.word, {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", float(action == self.word), True, False, {}

    if "Parrot-v0" not in gymnasium.registry:
        gymnasium.register("Parrot-v0", entry_point=lambda **settings: Parrot(**settings))


register_gymnasium_games()
