"""The stages of a run that make no progress. Pure; the clock is injected."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec


class Stall(msgspec.Struct, frozen=True):
    """A stage that has done nothing for `seconds`, though `waiting` units of work wait for it."""

    stage: str
    seconds: float
    limit: float
    done: int
    waiting: int


class _StageProgress(msgspec.Struct):
    done: int
    waiting: int
    since: float
    observed_at: float
    limit: float | None = None
    reported: bool = False


class Watchdog:
    """Watchdog over the stages of a run, because a run that hangs reports nothing.

    Each stage (playing, sending, training, publishing, installing) reports how much it has done so
    far and how much waits for it. A stage with work that has done nothing for its limit has
    stalled. A stage without work is never blamed: it waits for another.

    Args:
        default: Limit, in seconds, of a stage that is neither in `limits` nor
            observed with a limit.
        limits: Seconds that each stage may go without progress.
    """

    def __init__(
        self, clock: Callable[[], float], default: float, limits: Mapping[str, float] | None = None
    ):
        self._clock = clock
        self._default = default
        self._limits = dict(limits or {})
        if min([default, *self._limits.values()]) <= 0:
            raise ValueError("limits must be positive")
        self._stages: dict[str, _StageProgress] = {}
        self._done = self._with_work = 0
        """Totals over all stages: the work done, and the number of stages with waiting work."""

    def observe_stage(
        self, stage: str, done: int, waiting: int, limit: float | None = None
    ) -> None:
        """Record the progress of a stage.

        Args:
            stage: Name of the stage.
            done: Work done so far. It only grows while the stage's process lives; a smaller value
                comes from a new process, which is progress too.
            waiting: Units of work that wait for the stage.
            limit: Seconds that the stage may go without progress from now on.
        """
        now = self._clock()
        seen = self._stages.get(stage)
        if seen is None:
            seen = self._stages[stage] = _StageProgress(0, 0, now, now)
        elif done != seen.done or not waiting or not seen.waiting:
            seen.since = now
            seen.reported = False
        self._add_to_totals(seen, -1)
        seen.done = done
        seen.waiting = waiting
        seen.limit = limit
        seen.observed_at = now
        self._add_to_totals(seen, 1)

    def pause_stage(self, stage: str) -> None:
        """Leave out the time since the stage was last observed or paused: nobody
        knows what it did."""
        now = self._clock()
        seen = self._stages.get(stage)
        if seen is not None:
            seen.since += now - seen.observed_at
            seen.observed_at = now

    def forget_stage(self, stage: str) -> None:
        """Forget a stage that has ended."""
        seen = self._stages.pop(stage, None)
        if seen is not None:
            self._add_to_totals(seen, -1)

    def _add_to_totals(self, seen: _StageProgress, times: int) -> None:
        self._done += times * seen.done
        self._with_work += times * bool(seen.waiting)

    def total_others(self, *besides: str) -> tuple[int, int]:
        """Return the totals over all stages but these: the work done, and the number of stages
        with waiting work."""
        left_out = [self._stages[stage] for stage in besides if stage in self._stages]
        return (
            self._done - sum(seen.done for seen in left_out),
            self._with_work - sum(bool(seen.waiting) for seen in left_out),
        )

    def find_stalls(self) -> list[Stall]:
        """Return the stages over their limits, in the order in which they were first seen."""
        now = self._clock()
        out = []
        for stage, seen in self._stages.items():
            limit = self._limits.get(stage, self._default) if seen.limit is None else seen.limit
            if seen.waiting and now - seen.since >= limit:
                out.append(Stall(stage, now - seen.since, limit, seen.done, seen.waiting))
        return out

    def take_new_stalls(self) -> list[Stall]:
        """Return the stalls that were not reported before.

        A stage is reported again after it has moved and stalled again.
        """
        fresh = [stall for stall in self.find_stalls() if not self._stages[stall.stage].reported]
        for stall in fresh:
            self._stages[stall.stage].reported = True
        return fresh

    def describe_stages(self) -> dict[str, dict[str, float]]:
        """Return `done`, `waiting` and `still_for` seconds of each stage, for the event
        and for the user."""
        now = self._clock()
        return {
            stage: {"done": s.done, "waiting": s.waiting, "still_for": now - s.since}
            for stage, s in self._stages.items()
        }
