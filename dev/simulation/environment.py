"""The environment of simulated episodes. Calls take a while, sometimes a long while, and rarely
raise; none blocks.

The environments of a generator run in a helper process beside it, which may end, hang or be late
(`EnvironmentProcess`)."""

from __future__ import annotations

import asyncio
import random
import zlib
from typing import Any
from weakref import WeakKeyDictionary

from dev.simulation.history import EpisodeFailed
from dev.simulation.loop import CURRENT_PROCESS, VirtualProcess
from r3async.envs import Action, EnvironmentFailed, Message, StepResult


class EnvironmentProcess:
    """A process of environments, like those of `envs.pool`. When it ends, all its episodes fail,
    and another one replaces it.

    Attributes:
        hangs: True if the process does not answer any more.
        late: Additional seconds that each answer takes.
        lost: Reason why the process has ended; "" if it has not.
    """

    def __init__(self) -> None:
        self.hangs = False
        self.late = 0.0
        self.lost = ""
        self._calls: dict[asyncio.Future[None], None] = {}

    async def do_work(self, seconds: float, limit: float) -> None:
        """Work for `seconds`. Raises `EnvironmentFailed` if the process ends, or if the work takes
        longer than `limit` seconds, after which the process is ended."""
        loop = asyncio.get_running_loop()
        if self.lost:
            raise EnvironmentFailed(self.lost)
        call = loop.create_future()
        self._calls[call] = None
        timer = loop.call_later(seconds + self.late, self._answer_call, call)
        try:
            async with asyncio.timeout(limit):
                await call
        except TimeoutError as error:
            self.end_process(f"the call took longer than {limit:g} s")
            raise EnvironmentFailed(self.lost) from error
        finally:
            timer.cancel()
            del self._calls[call]

    def _answer_call(self, call: asyncio.Future[None]) -> None:
        if not self.hangs and not call.done():
            call.set_result(None)

    def end_process(self, why: str) -> None:
        self.lost = self.lost or why
        for call in self._calls:
            if not call.done():
                call.set_exception(EnvironmentFailed(self.lost))


_ENVIRONMENT_PROCESSES: WeakKeyDictionary[VirtualProcess, EnvironmentProcess] = WeakKeyDictionary()


def environment_process_of(process: VirtualProcess) -> EnvironmentProcess:
    """Return the process of environments beside a generator's process, or a new one
    if that was lost."""
    found = _ENVIRONMENT_PROCESSES.get(process)
    if found is None or found.lost:
        found = _ENVIRONMENT_PROCESSES[process] = EnvironmentProcess()
    return found


class LetterTask:
    """An environment whose task is a few letters. The reward depends on the answers alone.

    A call that is repeated draws its duration and failure again, from the time at which it is made.

    Args:
        turns: Turns of an episode.
        seconds: Maximum seconds of a usual call.
        tail: One call in `tail` takes ten times as long; 0 for none.
        failing: One call in `failing` raises; 0 for none.
        flat: One task in `flat` always has reward 1; 0 for none.
        tasks: Number of tasks; 0 for no limit.
        limit: Maximum seconds of any call, like `env.step_timeout`.
    """

    def __init__(
        self,
        turns: int = 2,
        seconds: float = 1.0,
        tail: int = 20,
        failing: int = 0,
        flat: int = 0,
        tasks: int = 0,
        limit: float = 60.0,
    ):
        self._turns = turns
        self._seconds = seconds
        self._tail = tail
        self._failing = failing
        self._share = flat
        self._left = turns
        self._answers = ""
        self._flat = False
        self._limit = limit
        self._seed = 0
        self._helper = EnvironmentProcess()
        self.size = tasks or None

    async def reset(self, task_seed: int) -> list[Message]:
        self._seed = task_seed
        self._left = self._turns
        self._answers = f"{task_seed}"
        self._flat = self._share > 0 and zlib.crc32(self._answers.encode()) % self._share == 0
        process = CURRENT_PROCESS.get()
        if process is not None:
            self._helper = environment_process_of(process)
        await self._do_work()
        return [Message("user", "".join(random.Random(task_seed).choices("abcdef", k=4)))]

    async def step(self, action: Action) -> StepResult:
        self._answers += f"/{action.text}"
        await self._do_work()
        self._left -= 1
        if self._left:
            return StepResult(0.0, [Message("user", "more")])
        return StepResult(
            1.0 if self._flat else zlib.crc32(self._answers.encode()) % 1000 / 1000, done=True
        )

    async def _do_work(self) -> None:
        rng = random.Random(f"{self._answers}/{asyncio.get_running_loop().time():.6f}")
        long = self._tail and rng.randrange(self._tail) == 0
        try:
            await self._helper.do_work(
                rng.uniform(0, self._seconds) * (10 if long else 1), self._limit
            )
            if self._failing and rng.randrange(self._failing) == 0:
                raise RuntimeError("this errand failed, on purpose")
        except Exception:
            process: Any = CURRENT_PROCESS.get()
            see_event = getattr(getattr(process, "simulation", None), "see_event", None)
            if see_event is not None:  # it is watched
                see_event(EpisodeFailed, process.name, self._seed)
            raise
