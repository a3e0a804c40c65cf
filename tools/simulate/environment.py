"""What simulated episodes play: it takes a while, now and then a long one, and rarely raises. Nothing blocks."""

from __future__ import annotations

import asyncio
import random
import zlib

from r3async.envs import Action, Message, StepResult


class Errand:
    """A task is a few letters; the reward depends on the answers alone, but of one task in `flat` (0: of none) it is always 1.
    There are so many `tasks` (0: without end).

    `seconds`: of a call, at most; one in `tail` calls takes ten times as long, and one in `failing` raises (0: none). A call that
    is made again draws again: by the time at which it is made.
    """

    def __init__(
        self, turns: int = 2, seconds: float = 1.0, tail: int = 20, failing: int = 0, flat: int = 0, tasks: int = 0
    ):
        self._turns, self._seconds, self._tail, self._failing, self._share = turns, seconds, tail, failing, flat
        self._left, self._answers, self._flat = turns, "", False
        self.size = tasks or None

    async def reset(self, task_seed: int) -> list[Message]:
        self._left, self._answers = self._turns, f"{task_seed}"
        self._flat = self._share > 0 and zlib.crc32(self._answers.encode()) % self._share == 0
        await self._work()
        return [Message("user", "".join(random.Random(task_seed).choices("abcdef", k=4)))]

    async def step(self, action: Action) -> StepResult:
        self._answers += f"/{action.text}"
        await self._work()
        self._left -= 1
        if self._left:
            return StepResult(0.0, [Message("user", "more")])
        return StepResult(1.0 if self._flat else zlib.crc32(self._answers.encode()) % 1000 / 1000, done=True)

    async def _work(self) -> None:
        rng = random.Random(f"{self._answers}/{asyncio.get_running_loop().time():.6f}")
        long = self._tail and rng.randrange(self._tail) == 0
        await asyncio.sleep(rng.uniform(0, self._seconds) * (10 if long else 1))
        if self._failing and rng.randrange(self._failing) == 0:
            raise RuntimeError("this errand failed, on purpose")
