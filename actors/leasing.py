"""A generator's leases: asked for as soon as there is room, played beside each other, and told of when they are over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from actors.waiting import wait_until
from r3async.config import Config
from r3async.engines.base import Engine
from r3async.episodes.group import GroupPlayer
from r3async.scheduling.admission import GroupLease
from r3async.scheduling.concurrency import Concurrency
from r3async.scheduling.pace import useful_places

LOOK_SECONDS = 0.25
"""Between two looks, at most, at what the engine does."""
HEARTBEAT_SECONDS = 1.0
"""Between two calls, at most: whoever is silent is taken for dead."""

T = TypeVar("T")


class IdleCounter:
    """Since it was made: places for episodes times seconds, all and those that stood empty because no slot was free; and
    seconds, all and those in which the engine had no request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all = self._empty = self._seconds = self._engine_idle = 0.0
        self._at = clock()

    def passed(self, places: float, empty: float, requests: float) -> None:
        """Since the last call there were so many."""
        now = self._clock()
        seconds, self._at = now - self._at, now
        self._all += places * seconds
        self._empty += empty * seconds
        self._seconds += seconds
        self._engine_idle += 0.0 if requests else seconds

    def counters(self) -> dict[str, float]:
        return {
            "places_all": self._all,
            "places_empty": self._empty,
            "engine_all": self._seconds,
            "engine_idle": self._engine_idle,
        }


class Leasing:
    """Calls `lease(room, stats, wait)` (`Conductor.lease`) whenever an episode is over or leases have come, and as a heartbeat; a
    call that finds nothing waits there. `play(lease)` plays one. `load()`: further `stats`. `check()` raises what ends it."""

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float],
        engine: Engine,
        player: GroupPlayer,
        *,
        lease: Callable[[int, dict[str, float], float], Coroutine[Any, Any, dict[str, Any]]],
        play: Callable[[GroupLease], Coroutine[Any, Any, None]],
        load: Callable[[], Mapping[str, float]],
        check: Callable[[], None],
    ):
        settings = config.generator
        self._clock, self._engine, self._player = clock, engine, player
        self._lease, self._play, self._load, self._check = lease, play, load, check
        self._heartbeat = min(HEARTBEAT_SECONDS, config.supervise.silence_seconds / 4)
        self._concurrency = Concurrency(settings.concurrency_min, settings.concurrency, clock)
        self._idle = IdleCounter(clock)
        self._useful = useful_places(config.schedule, settings.count)
        self._calls: list[asyncio.Task[dict[str, Any]]] = []
        """Not answered yet. One that a later call has overtaken is answered at once."""
        self._playing: list[asyncio.Task[None]] = []
        self._more, self._blocked, self._news = True, False, True
        self._due = clock()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """An episode is over, or `check` has something."""
        self._news = True
        self._woken.set()

    async def run(self, stopping: Callable[[], bool]) -> None:
        """Until nothing is left to play, or it is `stopping` (`wake` it then)."""
        try:
            while (self._more or self._playing or self._calls) and not stopping():
                if self._news or self._clock() >= self._due:
                    self._ask()
                await self._wait()
                self._take_answers()
                finished = [task for task in self._playing if task.done()]
                self._playing = [task for task in self._playing if not task.done()]
                for task in finished:
                    task.result()
                self._check()
        finally:
            left = [*self._playing, *self._calls]
            for given_up in left:
                given_up.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def stats(self) -> dict[str, float]:
        """What the conductor is told."""
        stats = self._engine.stats()
        limit = self._concurrency.observe(stats, self._player.playing)
        return {**stats, "limit": limit, **self._load(), **self._idle.counters()}

    def _ask(self) -> None:
        self._news, self._due = False, self._clock() + self._heartbeat
        stats = self.stats()
        room = max(0, int(stats["limit"]) - self._player.playing) if self._more else 0
        self._calls.append(self._begin(self._lease(room, stats, self._heartbeat if room else 0.0)))

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._woken.set())
        return task

    async def _wait(self) -> None:
        """Until something has happened, or it is time for a look."""
        places = min(self._concurrency.limit, self._useful)
        empty = max(0, places - self._player.playing) if self._blocked else 0
        requests = self._engine.stats()["running"]
        await wait_until(self._woken, min(LOOK_SECONDS, max(0.0, self._due - self._clock())))
        self._woken.clear()
        self._idle.passed(places, empty, requests)

    def _take_answers(self) -> None:
        answered = [task for task in self._calls if task.done()]
        self._calls = [task for task in self._calls if not task.done()]
        for task in answered:
            answer = task.result()
            self._more, self._blocked = answer["more"], answer["blocked"]
            for lease in msgspec.msgpack.decode(answer["leases"], type=list[GroupLease]):
                self._playing.append(self._begin(self._play(lease)))
                self._news = True
