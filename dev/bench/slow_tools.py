"""The environment of case `c` of `bench e2e`: letters to reverse, and slow tools."""

from __future__ import annotations

import asyncio
import itertools
import random

from r3async.envs import Action, Message, StepResult
from r3async.envs.builtin import ReverseText

_EPISODES = itertools.count()
"""Counter of this process's episodes, so that no two wait alike, not even in one group."""


class SlowTools:
    """The `reverse-text` environment, with answers that take
    `min(median * exp(sigma * N(0, 1)), longest)` seconds.

    Log-normal latencies are heavy-tailed: with `sigma = 1`, one call in a hundred takes ten times
    the median. Observations are `observation` characters longer, as tool outputs are.
    """

    def __init__(
        self,
        letters: int = 4,
        turns: int = 3,
        median: float = 0.4,
        sigma: float = 1.0,
        longest: float = 8.0,
        observation: int = 0,
    ):
        if min(median, sigma, longest) < 0:
            raise ValueError("median, sigma and longest must not be negative")
        self._game = ReverseText(letters, turns)
        self._median = median
        self._sigma = sigma
        self._longest = longest
        self._padding = "." * observation
        self._rng = random.Random(next(_EPISODES))

    def oracle(self) -> str:
        return self._game.oracle()

    def _pad_messages(self, messages: list[Message]) -> list[Message]:
        return [Message(m.role, self._padding + m.content) for m in messages]

    async def reset(self, task_seed: int) -> list[Message]:
        return self._pad_messages(await self._game.reset(task_seed))

    async def step(self, action: Action) -> StepResult:
        seconds = self._median * self._rng.lognormvariate(0.0, self._sigma)
        await asyncio.sleep(min(seconds, self._longest))
        result = await self._game.step(action)
        return StepResult(result.reward, self._pad_messages(result.messages), result.done)
