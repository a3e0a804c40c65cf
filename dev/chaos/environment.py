"""An environment whose processes can be killed. It blocks, has several turns, is quick, and
raises now and then."""

from __future__ import annotations

import random
import time
import zlib

from r3async.envs import Action, Message, StepResult

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class UnsteadyEnvironment:
    """An environment whose task is a few letters. The reward, 0 or 1, depends on the bytes of
    the answers alone."""

    def __init__(self, turns: int = 2, seconds: float = 0.02, failing: float = 0.01):
        """Create the environment.

        Args:
            turns: Number of turns of an episode.
            seconds: Maximum duration of a call.
            failing: Probability that a call raises, like a broken connection: the next try
                may well succeed.
        """
        self._turns = turns
        self._seconds = seconds
        self._failing = failing
        self._rng = random.Random()
        self._answers = ""
        self._left = turns

    def reset(self, task_seed: int) -> list[Message]:
        self._answers = ""
        self._left = self._turns
        self._do_work()
        return [Message("user", "".join(random.Random(task_seed).choices(LETTERS, k=6)))]

    def step(self, action: Action) -> StepResult:
        self._do_work()
        self._answers += action.text
        self._left -= 1
        if self._left:
            return StepResult(0.0, [Message("user", "more")])
        return StepResult(float(zlib.crc32(self._answers.encode()) & 1), done=True)

    def oracle(self) -> str:
        return "a"

    def _do_work(self) -> None:
        time.sleep(self._rng.uniform(0, self._seconds))
        if self._rng.random() < self._failing:
            raise ConnectionError("this environment fails now and then, on purpose")
