"""Finds the stage that makes no progress while it has work. Pure; the clock is injected.

A run that hangs says nothing by itself. Each stage (playing, sending, training, publishing, installing) reports
how much it has done so far and how much waits for it. A stage with work that has done nothing for its limit has stalled. One
without work is never blamed: it waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec


class Stall(msgspec.Struct, frozen=True):
    """`stage` has done nothing for `seconds`, though `waiting` units of work wait for it."""

    stage: str
    seconds: float
    limit: float
    done: int
    waiting: int


class _Seen(msgspec.Struct):
    done: int
    waiting: int
    since: float
    reported: bool = False


class Watchdog:
    """`limits`: seconds that each stage may go without progress. A stage that is not named has `default`."""

    def __init__(self, clock: Callable[[], float], default: float, limits: Mapping[str, float] | None = None):
        self._clock, self._default, self._limits = clock, default, dict(limits or {})
        if min([default, *self._limits.values()]) <= 0:
            raise ValueError("limits must be positive")
        self._seen: dict[str, _Seen] = {}

    def see(self, stage: str, done: int, waiting: int) -> None:
        """`done` only grows while a stage's process lives; one that is smaller is a new process, which is progress too."""
        now, seen = self._clock(), self._seen.get(stage)
        if seen is None:
            self._seen[stage] = _Seen(done, waiting, now)
            return
        if done != seen.done or not waiting or not seen.waiting:
            seen.since, seen.reported = now, False
        seen.done, seen.waiting = done, waiting

    def forget(self, stage: str) -> None:
        """The stage has ended."""
        self._seen.pop(stage, None)

    def stalled(self) -> list[Stall]:
        """Stages over their limits, in the order in which they were first seen."""
        now = self._clock()
        out = []
        for stage, seen in self._seen.items():
            limit = self._limits.get(stage, self._default)
            if seen.waiting and now - seen.since >= limit:
                out.append(Stall(stage, now - seen.since, limit, seen.done, seen.waiting))
        return out

    def news(self) -> list[Stall]:
        """Those of `stalled` that were not reported before; reported again after the stage has moved and stalled again."""
        fresh = [stall for stall in self.stalled() if not self._seen[stall.stage].reported]
        for stall in fresh:
            self._seen[stall.stage].reported = True
        return fresh

    def describe(self) -> dict[str, dict[str, float]]:
        """By stage: `done`, `waiting` and `still_for` seconds. For the event and for the user."""
        now = self._clock()
        return {
            stage: {"done": s.done, "waiting": s.waiting, "still_for": now - s.since} for stage, s in self._seen.items()
        }
