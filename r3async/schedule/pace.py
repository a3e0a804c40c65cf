"""The balance of generation and training.

The balance is measured over the last steps. The learner is idle while it waits for groups (the
buffer ran dry). A generator's places are idle while they are empty because no slot is free (the
buffer is full); places that slots could never fill (`useful_concurrency`) do not count. The
throughput of a side that never waited would be its output over the share of time in which it
worked:

ratio = (episodes finished / (1 - idle share of generation)) / (episodes trained / (1 - idle share
of training))

Below 1, generation is the slower side; above 1, training is. Pure: the clock is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from r3async.config import ScheduleConfig
from r3async.world import EventReporter

PACE_SECONDS = 60.0
"""Seconds that one side waits for the other before an event names the slower side."""
PACE_STEPS = 16
"""Number of the latest steps that are evaluated together."""
IDLE_THRESHOLD = 0.3
"""Idle share from which a side counts as waiting."""
ONE_SIDED_RATIO = 2.0
"""Factor by which one side must be idle longer than the other to be waiting for it, and not
both for a slot."""


class StepPace(msgspec.Struct, frozen=True):
    """Report of one step. Times are in seconds, and for generation summed over all
    places for episodes."""

    seconds: float
    """Time from the end of the step before to the end of this one."""
    waited_seconds: float
    """Part of this time in which the learner waited for groups."""
    finished_episodes: int
    """Episodes that arrived."""
    trained_episodes: int
    """Episodes that were trained."""
    idle_share: float
    """Idle share of generation: places times time empty because no slot was free, over all
    places times time."""


class PaceVerdict(msgspec.Struct, frozen=True):
    """An event about the side that is waited for: its name, and figures and advice for the user."""

    event: str
    facts: dict[str, float | str]


class IdleShareMeter:
    """Meter of the idle share of something that every generator has (places for
    episodes, an engine)."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}
        self._idle = self._total = 0.0

    def add_counters(self, owner: str, idle: float, total: float) -> None:
        """Add the counters of an owner.

        They count seconds since its process began, times the number of places or engines. Counters
        that are smaller than before come from a new process.
        """
        before = self._seen.get(owner, (0.0, 0.0))
        if total < before[1]:
            before = (0.0, 0.0)
        self._idle += idle - before[0]
        self._total += total - before[1]
        self._seen[owner] = (idle, total)

    @property
    def has_reports(self) -> bool:
        """True if any counters were added since the last `take_share`."""
        return self._total > 0

    def take_share(self) -> float:
        """Return the share that was idle since the last call."""
        share = self._idle / self._total if self._total > 0 else 0.0
        self._idle = self._total = 0.0
        return min(1.0, max(0.0, share))


class IdleTimeCounter:
    """Counter of a generator's idle time since the counter's creation.

    It counts places for episodes times seconds (all, and those empty because no slot was free), and
    seconds (all, and those in which the engine had no request).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total = self._empty = self._seconds = self._engine_idle = 0.0
        self._at = clock()

    def add_interval(self, places: float, empty: float, running_requests: float) -> None:
        """Count the time since the last call, with the places, empty places and running requests
        there were in it."""
        now = self._clock()
        seconds = now - self._at
        self._at = now
        self._total += places * seconds
        self._empty += empty * seconds
        self._seconds += seconds
        self._engine_idle += 0.0 if running_requests else seconds

    def read_counters(self, paused_seconds: float) -> dict[str, float]:
        """Return the counters, with metrics of the engine's wall time.

        `paused_seconds` is the time for which the engine was paused for new weights.
        """
        return {
            "places_all": self._total,
            "places_empty": self._empty,
            "engine_all": self._seconds,
            "engine_idle": self._engine_idle,
            "wall/engine_idle_seconds": self._engine_idle,
            "wall/engine_install_seconds": paused_seconds,
            "wall/engine_steps_seconds": max(
                0.0, self._seconds - self._engine_idle - paused_seconds
            ),
        }


class PaceAnalyzer:
    """Analyzer of the last steps, which finds the side that is waited for.

    A verdict needs at least `patience` seconds of observed steps, and is given once
    until it changes.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._steps: deque[StepPace] = deque(maxlen=PACE_STEPS)
        self._last_event = ""

    def observe_step(self, step: StepPace) -> tuple[dict[str, float], PaceVerdict | None]:
        """Add a step, and return the metrics as of this step, and a verdict if
        there is a new one."""
        self._steps.append(step)
        metrics = self.compute_metrics()
        verdict = self._find_verdict(metrics)
        last = self._last_event
        self._last_event = verdict.event if verdict else ""
        return metrics, verdict if verdict and verdict.event != last else None

    def compute_metrics(self) -> dict[str, float]:
        """Return `pace/ratio`, `learner/idle_share` and `generator/idle_share` over
        the latest steps."""
        seconds = max(sum(s.seconds for s in self._steps), 1e-9)
        learner = min(1.0, sum(s.waited_seconds for s in self._steps) / seconds)
        generator = min(1.0, sum(s.idle_share * s.seconds for s in self._steps) / seconds)
        generation = sum(s.finished_episodes for s in self._steps) / max(1 - generator, 1e-3)
        training = sum(s.trained_episodes for s in self._steps) / max(1 - learner, 1e-3)
        return {
            "pace/ratio": generation / max(training, 1e-9),
            "learner/idle_share": learner,
            "generator/idle_share": generator,
        }

    def _find_verdict(self, metrics: dict[str, float]) -> PaceVerdict | None:
        seconds = sum(s.seconds for s in self._steps)
        if len(self._steps) < PACE_STEPS // 2 or seconds < self._patience:
            return None
        ratio = metrics["pace/ratio"]
        learner = metrics["learner/idle_share"]
        generator = metrics["generator/idle_share"]
        if learner >= IDLE_THRESHOLD and learner >= ONE_SIDED_RATIO * generator:
            event = "pace_generation_bound"
            hint = (
                f"the learner waited for {learner:.0%} of the last {seconds:.0f} s: give "
                "generation more (generator.count, generator.concurrency, faster engines), about "
                f"{1 / max(ratio, 1e-3):.1f} times what it has, or the learner less"
            )
        elif generator >= IDLE_THRESHOLD and generator >= ONE_SIDED_RATIO * learner:
            event = "pace_training_bound"
            hint = (
                f"{generator:.0%} of the generators' places stood empty for the last "
                f"{seconds:.0f} s because every slot was taken: give the learner more "
                f"(learner.parallel, learner.threads), about {max(ratio, 1e-3):.1f} times what it "
                "has, or generation less"
            )
        elif min(generator, learner) >= IDLE_THRESHOLD:
            event = "pace_slots_bound"
            hint = (
                f"the learner waited for {learner:.0%} of the last {seconds:.0f} s, and "
                f"{generator:.0%} of the generators' places stood empty because every slot was "
                "taken: more resources help neither; a larger schedule.window (if single episodes "
                "are late) or schedule.max_staleness does"
            )
        else:
            return None
        numbers = {name: round(value, 3) for name, value in metrics.items()}
        return PaceVerdict(event, {**numbers, "seconds": round(seconds, 1), "hint": hint})


class PaceMonitor:
    """Monitor that gathers the reports of generators and steps, and finds the side that
    waits for the other.

    `report_warning(event, **facts)` is called if that lasts.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        report_warning: EventReporter,
        clock: Callable[[], float],
    ):
        self._schedule = schedule
        self._report_warning = report_warning
        self._clock = clock
        self._places = IdleShareMeter()
        self._engines = IdleShareMeter()
        self._pace = PaceAnalyzer(PACE_SECONDS)
        self._last_step_end: float | None = None
        self._idle_share = self._engine_idle_share = 0.0
        self._last_received = 0
        """Trajectories that the learner had received when the last step ended."""

    def report_generator(self, generator_id: str, stats: Mapping[str, float]) -> None:
        """Add the counters of a generator's places and of its engine."""
        self._places.add_counters(generator_id, stats["places_empty"], stats["places_all"])
        self._engines.add_counters(generator_id, stats["engine_idle"], stats["engine_all"])

    def record_step(self, step: int, groups: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record a step that has just ended, and return its metrics.

        The first step is left out, because it waited for the run to begin.

        Args:
            step: Number of the step.
            groups: Number of groups that it consumed.
            metrics: Metrics that the learner reported of it.
        """
        now = self._clock()
        before = self._last_step_end
        received = int(metrics["transport/received"])
        known = self._last_received
        self._last_step_end = now
        self._last_received = received
        if self._places.has_reports:  # otherwise, between two reports, the last value stays
            self._idle_share = self._places.take_share()
        if self._engines.has_reports:
            self._engine_idle_share = self._engines.take_share()
        engines = {"generator/engine_idle_share": self._engine_idle_share}
        if before is None:
            return engines
        figures, verdict = self._pace.observe_step(
            StepPace(
                seconds=now - before,
                waited_seconds=metrics["timing/wait_seconds"],
                finished_episodes=received - known,
                trained_episodes=groups * self._schedule.group_size,
                idle_share=self._idle_share,
            )
        )
        # Without staleness the two sides take turns, as configured.
        expected = (
            self._schedule.max_staleness == 0
            and verdict is not None
            and verdict.event == "pace_slots_bound"
        )
        if verdict is not None and not expected:
            self._report_warning(verdict.event, step=step, **verdict.facts)
        return figures | engines
