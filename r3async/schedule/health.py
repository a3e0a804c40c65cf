"""The health of generators, the stages of a run that make no progress, and the steps that made no update.

Pure; the clock is injected.

    STARTING ──loaded──► STALE ──installed──► HEALTHY ◄─answer── SUSPECT
        ▲                  ▲                     │  │               │
        │                  └──published too far──┘  └─silent────────┘
        └──────────restart, after a back-off── LOST ◄──process ended, from any state

Only a HEALTHY generator takes leases. A STALE one has an engine but no current weights. A SUSPECT one has been silent
for a while, and keeps what it has. LOST is a process that has ended, or whose connection broke.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from r3async.world import EventReporter


class HealthState(enum.StrEnum):
    """State of a generator; the module docstring has the transitions."""

    STARTING = "starting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    LOST = "lost"


class RestartsExhausted(RuntimeError):
    """Error for a process that was lost more often than it may be restarted."""


class GeneratorHealth:
    """Health of one generator. Times are in seconds of `clock`.

    Args:
        silence_seconds: Silence after which it is SUSPECT.
        backoff_seconds: Wait before the first restart; doubled for each further one.
        max_backoff_seconds: Maximum wait before a restart.
        forgive_seconds: Time healthy in one stretch after which the wait is that of the first restart again.
        max_restarts: Maximum number of restarts in all.
        on_change: Function that is called when the state changes.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        silence_seconds: float = 30.0,
        backoff_seconds: float = 1.0,
        max_backoff_seconds: float = 60.0,
        forgive_seconds: float = 600.0,
        max_restarts: int = 8,
        on_change: Callable[[], object] = lambda: None,
    ):
        if min(silence_seconds, backoff_seconds, max_backoff_seconds, forgive_seconds) <= 0 or max_restarts < 0:
            raise ValueError("silence, backoff, backoff_max and forgive must be positive, max_restarts not negative")
        self._clock, self._silence_seconds, self._max_restarts = clock, silence_seconds, max_restarts
        self._backoff_seconds, self._max_backoff_seconds, self._forgive_seconds = (
            backoff_seconds,
            max_backoff_seconds,
            forgive_seconds,
        )
        self._state, self._on_change = HealthState.STARTING, on_change
        self.version = -1
        """Version of its weights; -1 while it has none."""
        self.restarts = 0
        self._recent_losses = 0
        """Losses that count for the back-off."""
        self._last_heartbeat = clock()
        self._healthy_since: float | None = None
        self._lost_at = 0.0

    @property
    def state(self) -> HealthState:
        return self._state

    @state.setter
    def state(self, state: HealthState) -> None:
        if state is not self._state:
            self._state = state
            self._on_change()

    @property
    def can_lease(self) -> bool:
        return self.state is HealthState.HEALTHY

    def mark_loaded(self) -> None:
        """Record that its engine is up, without usable weights yet. Raises `ValueError` unless it was STARTING."""
        self._require_state(HealthState.STARTING)
        self.state = HealthState.STALE
        self._last_heartbeat = self._clock()

    def mark_installed(self, version: int, newest_version: int) -> None:
        """Record that it installed `version`: HEALTHY if that is `newest_version`, else STALE.

        Raises `ValueError` if it is STARTING or LOST, or versions go backwards.
        """
        if self.state in (HealthState.STARTING, HealthState.LOST):
            raise ValueError(f"a generator that is {self.state} cannot install weights")
        if version < self.version:
            raise ValueError(f"version {version} installed after version {self.version}: versions only go up")
        self.version = version
        self._last_heartbeat = self._clock()
        if version >= newest_version:
            if self.state is not HealthState.HEALTHY:
                self._healthy_since = self._last_heartbeat
            self.state = HealthState.HEALTHY
        else:
            self._change_state(HealthState.STALE)

    def note_answer(self) -> None:
        """Record that it sent something or answered. SUSPECT becomes HEALTHY again.

        Ignored while LOST: a late answer revives nothing.
        """
        if self.state is HealthState.LOST:
            return
        self._last_heartbeat = self._clock()
        if self.state is HealthState.SUSPECT:
            self.state, self._healthy_since = HealthState.HEALTHY, self._last_heartbeat

    def check_silence(self) -> bool:
        """Look at the clock, and return True if it has become SUSPECT just now."""
        if self.state is HealthState.HEALTHY and self._clock() - self._last_heartbeat > self._silence_seconds:
            self._change_state(HealthState.SUSPECT)
            return True
        return False

    @property
    def silent_seconds(self) -> float:
        """The seconds since its last heartbeat or answer."""
        return self._clock() - self._last_heartbeat

    def mark_lost(self) -> None:
        """Record that its process has ended, and that its weights are lost with it. Idempotent."""
        if self.state is HealthState.LOST:
            return
        self._change_state(HealthState.LOST)
        self.version, self._lost_at = -1, self._clock()
        self._recent_losses += 1

    @property
    def seconds_to_restart(self) -> float:
        """The seconds until it should be restarted; 0 if now. Raises `ValueError` unless it is LOST."""
        self._require_state(HealthState.LOST)
        wait = min(self._backoff_seconds * 2.0 ** min(self._recent_losses - 1, 62), self._max_backoff_seconds)
        return max(0.0, self._lost_at + wait - self._clock())

    def begin_restart(self) -> None:
        """Record that it is started again. Raises `RestartsExhausted`, or `ValueError` unless it is LOST."""
        self._require_state(HealthState.LOST)
        if self.restarts >= self._max_restarts:
            raise RestartsExhausted(f"lost {self.restarts + 1} times, {self._max_restarts} restarts are allowed")
        self.restarts += 1
        self.state, self._last_heartbeat = HealthState.STARTING, self._clock()

    def undo_loss(self) -> None:
        """Take back a loss: the process that was taken for lost answers again, and was not restarted."""
        self._require_state(HealthState.STALE)
        self.restarts, self._recent_losses = self.restarts - 1, self._recent_losses - 1

    def _change_state(self, state: HealthState) -> None:
        since, self._healthy_since = self._healthy_since, None
        if since is not None and self._clock() - since >= self._forgive_seconds:
            self._recent_losses = 0
        self.state = state

    def _require_state(self, state: HealthState) -> None:
        if self.state is not state:
            raise ValueError(f"a generator that is {self.state} is not {state}")


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

    Each stage (playing, sending, training, publishing, installing) reports how much it has done so far and how much
    waits for it. A stage with work that has done nothing for its limit has stalled. A stage without work is never
    blamed: it waits for another.

    Args:
        default: Limit, in seconds, of a stage that is neither in `limits` nor observed with a limit.
        limits: Seconds that each stage may go without progress.
    """

    def __init__(self, clock: Callable[[], float], default: float, limits: Mapping[str, float] | None = None):
        self._clock, self._default, self._limits = clock, default, dict(limits or {})
        if min([default, *self._limits.values()]) <= 0:
            raise ValueError("limits must be positive")
        self._stages: dict[str, _StageProgress] = {}
        self._done = self._with_work = 0
        """Totals over all stages: the work done, and the number of stages with waiting work."""

    def observe_stage(self, stage: str, done: int, waiting: int, limit: float | None = None) -> None:
        """Record the progress of a stage.

        Args:
            stage: Name of the stage.
            done: Work done so far. It only grows while the stage's process lives; a smaller value comes from a new
                process, which is progress too.
            waiting: Units of work that wait for the stage.
            limit: Seconds that the stage may go without progress from now on.
        """
        now, seen = self._clock(), self._stages.get(stage)
        if seen is None:
            seen = self._stages[stage] = _StageProgress(0, 0, now, now)
        elif done != seen.done or not waiting or not seen.waiting:
            seen.since, seen.reported = now, False
        self._add_to_totals(seen, -1)
        seen.done, seen.waiting, seen.limit, seen.observed_at = done, waiting, limit, now
        self._add_to_totals(seen, 1)

    def pause_stage(self, stage: str) -> None:
        """Leave out the time since the stage was last observed or paused: nobody knows what it did."""
        now, seen = self._clock(), self._stages.get(stage)
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

    def total_others(self, besides: str) -> tuple[int, int]:
        """Return the totals over all stages but one: the work done, and the number of stages with waiting work."""
        left_out = self._stages.get(besides)
        if left_out is None:
            return self._done, self._with_work
        return self._done - left_out.done, self._with_work - bool(left_out.waiting)

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
        """Return `done`, `waiting` and `still_for` seconds of each stage, for the event and for the user."""
        now = self._clock()
        return {
            stage: {"done": s.done, "waiting": s.waiting, "still_for": now - s.since}
            for stage, s in self._stages.items()
        }


ZERO_VARIANCE = "zero variance"
ALL_EPISODES_FAILED = "every episode failed"
DRIFT_TOO_LARGE = "drift beyond algorithm.rollout_kl.max"
GRADIENT_NOT_FINITE = "gradient not finite"


def explain_no_update(metrics: Mapping[str, Any]) -> str:
    """Return why a step made no update, from its metrics or its row; empty if it made one, or if they do not say."""
    if metrics.get("optimizer/updates", 1):
        return ""
    if metrics.get("optimizer/zero_variance"):
        episodes, failed = _count_ended_episodes(metrics)
        return ALL_EPISODES_FAILED if episodes and failed == episodes else ZERO_VARIANCE
    return DRIFT_TOO_LARGE if metrics.get("optimizer/broken") else GRADIENT_NOT_FINITE


def _count_ended_episodes(metrics: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many episodes a step took, and how many of them had failed for good."""
    ended = {name: value for name, value in metrics.items() if "/ended_" in name and name.startswith("episode/")}
    return int(sum(ended.values())), int(ended.get("episode/ended_error", 0))


class UpdateMonitor:
    """Monitor that counts the steps of a run, as far as this process sees them, by the reason why they made no update.

    Steps with zero variance are due to the task or the policy, and no fault: there is one event, `zero_variance`, when
    they begin, and one, `variance_returned`, when they end. They neither count as skipped nor end a series of skipped
    steps.
    The same holds for steps of which every episode failed, which begin with `every_episode_failed`: `TaskFailures`
    checks how many may fail.

    Args:
        max_skipped: Number of skipped steps in a row that are tolerated (`supervise.max_skipped_steps`).
        report_warning: Function that is called with an event's name and its fields.
        report_info: Function that is called with an event's name and its fields.
    """

    def __init__(self, max_skipped: int, report_warning: EventReporter, report_info: EventReporter):
        self._max_skipped, self._report_warning, self._report_info = max_skipped, report_warning, report_info
        self._steps_with_zero_variance = 0
        """Number of steps with zero variance since the last other one."""
        self._skipped: list[tuple[int, str]] = []
        """Steps in a row that had advantages and made no update, each with the reason."""
        self._reason_counts: Counter[str] = Counter()
        self._episodes = self._failed_episodes = 0

    def record_step(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Record a step, once after each, and return why the run must end; empty if it need not."""
        why = explain_no_update(metrics)
        self._reason_counts[why] += 1
        episodes, failed = _count_ended_episodes(metrics)
        self._episodes, self._failed_episodes = self._episodes + episodes, self._failed_episodes + failed
        if why in (ZERO_VARIANCE, ALL_EPISODES_FAILED):
            self._steps_with_zero_variance += 1
            if self._steps_with_zero_variance == 1 and why == ALL_EPISODES_FAILED:
                self._report_warning(
                    "every_episode_failed", step=step, episodes=episodes, hint="see the events episode_abandoned"
                )
            elif self._steps_with_zero_variance == 1:
                self._report_warning(
                    "zero_variance",
                    step=step,
                    groups=int(metrics["batch/groups"]),
                    groups_without=int(metrics["advantage/zero_variance_groups"]),
                    trained_tokens=int(metrics["batch/trained_tokens"]),
                    episodes_failed=failed,
                    hint="no update is made until scores differ within a group: look at the reward and at how hard the "
                    "tasks are, or raise schedule.group_size",
                )
            return ""
        if self._steps_with_zero_variance:
            self._report_info("variance_returned", step=step, steps_without=self._steps_with_zero_variance)
            self._steps_with_zero_variance = 0
        if not why:
            self._skipped.clear()
            return ""
        self._skipped.append((step, why))
        return self._describe_skipped() if len(self._skipped) > self._max_skipped else ""

    def _describe_skipped(self) -> str:
        first, last = self._skipped[0][0], self._skipped[-1][0]
        return (
            f"{len(self._skipped)} steps in a row made no update, more than supervise.max_skipped_steps = {self._max_skipped}: "
            f"{_format_counts(Counter(why for _, why in self._skipped))} (steps {first} to {last}). Lower learner.lr, or "
            "begin from "
            f"a checkpoint before step {first}; the events step_skipped and trust_region_broke have each step's figures"
        )

    def describe_failure(self) -> str:
        """Return why a run without an update has failed, and was not merely idle: most of its episodes failed.

        The result is empty if it has not failed.
        """
        if 2 * self._failed_episodes <= self._episodes:
            return ""
        return f"no step made an update, and {self._failed_episodes} of {self._episodes} episodes failed"

    def describe_no_updates(self) -> str:
        """Return what the steps without an update lacked, as `12 x zero variance, 1 x gradient not finite`.

        The result is empty if there was no such step.
        """
        return _format_counts(Counter({why: steps for why, steps in self._reason_counts.items() if why}))


def _format_counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{steps} x {why}" for why, steps in reasons.most_common())
