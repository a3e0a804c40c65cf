"""The timeline of a run: `run_dir/timeline.jsonl`, to which all processes append spans of their activities.

Each line is one object: `who` (`learner`, `generator-0`, `transport`, `weights`), `what` (`train`, `wait`, `play`, …),
`start` and `end` in unix seconds, and `step` and `version` where they are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec

from r3async.record.reading import TIMELINE_FILE, convert_valid, read_json_objects
from r3async.record.routes import EpisodeId, parse_episode_id
from r3async.rollout.engine import Engine, Generation, GenerationRequest
from r3async.world import Files, Processes, World
from r3async.world.appending import AppendFile
from r3async.world.real import REAL_WORLD

FILE = TIMELINE_FILE
LAG_WINDOW_SAMPLES = 1200
"""Number of event loop lag samples in the window of `LagMeter`: one minute."""


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One activity of a process, from `start` to `end`.

    Attributes:
        who: Process or part of it that was active.
        what: Kind of activity.
        start: Start in unix seconds.
        end: End in unix seconds.
        turn: Turn of an engine call in its episode, from 0.
        tokens: Tokens that an engine call sampled.
        prompt: Prompt tokens of an engine call beyond those fed before.
        running: Average number of requests that ran during an engine call, including itself.
    """

    who: str
    what: str
    start: float
    end: float
    step: int | None = None
    version: int | None = None
    turn: int | None = None
    tokens: int | None = None
    prompt: int | None = None
    running: float | None = None


class Timeline:
    """A writer of the spans of one process; each span is written when it ends.

    If it is not enabled, nothing is measured, opened or written. `clock` returns unix seconds, so that processes agree;
    it defaults to the clock of `world`.
    """

    def __init__(
        self,
        run_dir: Path,
        actor: str,
        *,
        enabled: bool = True,
        world: World = REAL_WORLD,
        clock: Callable[[], float] | None = None,
    ):
        self.actor, self._clock = actor, clock or world.clock.time
        self._file = AppendFile(Path(run_dir) / FILE, world=world) if enabled else None

    @property
    def is_enabled(self) -> bool:
        return self._file is not None

    def now(self) -> float:
        """Return the current time in unix seconds, by the clock of the spans."""
        return self._clock()

    def measure_span(
        self, activity: str, *, step: int | None = None, version: int | None = None
    ) -> AbstractContextManager[None]:
        """Measure the body as a span: `with timeline.measure_span("train", step=3): …`. Written also if the body raises."""
        return nullcontext() if self._file is None else self._record_span(activity, step, version)

    @contextmanager
    def _record_span(self, activity: str, step: int | None, version: int | None) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.add_span(activity, start, self._clock(), step=step, version=version)

    def add_span(self, activity: str, start: float, end: float, *, actor: str = "", **facts: Any) -> None:
        """Write a span that was measured elsewhere.

        Args:
            activity: Kind of activity, `Span.what`.
            start: Start in unix seconds.
            end: End in unix seconds.
            actor: `Span.who`, if it is not this process.
            **facts: Further fields of `Span`.
        """
        if self._file is not None:
            self._file.append(msgspec.json.encode(Span(actor or self.actor, activity, start, end, **facts)))


def read_timeline(run_dir: Path, *, files: Files = REAL_WORLD.files) -> list[Span]:
    """Read the spans of a run, in order of their start. Lines that are no spans are skipped."""
    return parse_spans(read_json_objects(Path(run_dir) / FILE, files=files))


def parse_spans(lines: Iterable[dict[str, Any]]) -> list[Span]:
    """Return the spans among `lines`, in order of their start."""
    spans = [span for span in convert_valid(lines, Span) if span.start <= span.end]
    return sorted(spans, key=lambda span: span.start)


def compute_busy_shares(spans: Sequence[Span]) -> dict[tuple[str, str], float]:
    """Return by (who, what) the share of the time from the start of the first span to the last end.

    Overlapping spans of one kind count once.
    """
    if not spans:
        return {}
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    totals: dict[tuple[str, str], float] = {}
    until: dict[tuple[str, str], float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        key = (span.who, span.what)
        start = max(span.start, until.get(key, span.start))
        totals[key] = totals.get(key, 0.0) + max(0.0, span.end - start)
        until[key] = max(until.get(key, span.end), span.end)
    return {key: total / whole if whole > 0 else 0.0 for key, total in totals.items()}


# -- engine calls ------------------------------------------------------------------------------------------------------


def time_engine_calls(engine: Engine, timeline: Timeline) -> Engine:
    """Wrap `engine` to write its calls to the timeline, and when it has requests (`busy`).

    In each group, the calls of one episode are measured. Returns `engine` itself if the timeline is not enabled.
    """
    return cast(Engine, _TimedEngine(engine, timeline)) if timeline.is_enabled else engine


class _TimedEngine:
    """An engine whose `generate` writes spans; every other attribute is the wrapped engine's."""

    def __init__(self, engine: Engine, timeline: Timeline):
        self._engine, self._timeline = engine, timeline
        self._running = 0
        self._busy_from = self._counted_until = timeline.now()
        self._request_seconds = 0.0
        """Integral of the number of running requests over time, in request-seconds, up to `_counted_until`."""
        self._last_calls: dict[str, tuple[EpisodeId, float, int]] = {}
        """Last call of each trajectory, the time of its answer, and the tokens that the engine had by then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        which = parse_episode_id(request.request_id)
        self._change_running(1)
        try:
            if which is None or which.episode_index:
                return await self._engine.generate(request)
            return await self._generate_timed(which, request)
        finally:
            self._change_running(-1)

    def _change_running(self, delta: int) -> float:
        """Add `delta` to the number of running requests, and return the current time."""
        now = self._timeline.now()
        self._request_seconds += self._running * (now - self._counted_until)
        if not self._running:
            self._busy_from = now
        self._running, self._counted_until = self._running + delta, now
        if not self._running:
            self._timeline.add_span("busy", self._busy_from, now)
        return now

    async def _generate_timed(self, episode_id: EpisodeId, request: GenerationRequest) -> Generation:
        began, fed = self._change_running(0), 0
        beside = self._request_seconds
        before = self._last_calls.pop(episode_id.trajectory_id, None)
        if before is not None and before[0].sample_or_turn == episode_id.sample_or_turn - 1:
            self._timeline.add_span("environment", before[1], began)
            fed = before[2]
        generation = await self._engine.generate(request)
        ended, prompt, tokens = self._change_running(0), len(request.prompt_ids), len(generation.token_ids)
        running = (self._request_seconds - beside) / (ended - began) if ended > began else self._running
        self._timeline.add_span(
            "call",
            began,
            ended,
            turn=episode_id.sample_or_turn,
            tokens=tokens,
            prompt=max(0, prompt - fed),
            running=running,
        )
        self._last_calls[episode_id.trajectory_id] = episode_id, ended, prompt + tokens
        while len(self._last_calls) > 1024:  # nothing removes a trajectory after its last call
            del self._last_calls[next(iter(self._last_calls))]
        return generation


# -- processor time ----------------------------------------------------------------------------------------------------


class CounterGrowth:
    """The growth of process counters since each was first read.

    A counter that restarts with its process counts from the first value read after the restart.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self.totals: dict[str, float] = {}

    def add(self, name: str, value: float, role: str) -> None:
        """Record that the counter `name` is now at `value`, and add its growth to the total of `role`."""
        before = self._last.get(name, value)
        self._last[name] = value
        self.totals[role] = self.totals.get(role, 0.0) + max(0.0, value - before)


class StageTimer:
    """The time that this process spends in each stage (`world/stages.py`), as metrics of its `role`.

    `cpu/ROLE_STAGE_seconds` add up to the processor time of the process; `wall/ROLE_STAGE_seconds` are wall times of
    its event loop.
    """

    def __init__(self, role: str, processes: Processes = REAL_WORLD.processes):
        self._role, self._processes = role, processes
        self._last_totals: dict[str, float] = {}

    def total_seconds(self) -> dict[str, float]:
        """Return the seconds since the event loop was first measured; a simulated process has none."""
        kinds = zip(("cpu", "wall"), self._processes.stage_seconds(), strict=True)
        return {
            f"{kind}/{self._role}_{name}_seconds": seconds for kind, spent in kinds for name, seconds in spent.items()
        }

    def read_increment(self) -> dict[str, float]:
        """Return the seconds spent since the last call."""
        before, self._last_totals = self._last_totals, self.total_seconds()
        return {name: seconds - before.get(name, 0.0) for name, seconds in self._last_totals.items()}


# -- event loops -------------------------------------------------------------------------------------------------------


class LagMeter:
    """A meter of event loop lag over the last minute: how late a sleeping task wakes up.

    `own` lag is the part during which the loop's thread was computing. While it measures, the loop's time is also
    booked to stages.
    """

    METRIC_NAMES = ("p50_ms", "p99_ms", "max_ms", "own_p99_ms", "own_max_ms")

    def __init__(self, processes: Processes = REAL_WORLD.processes):
        self._processes = processes
        self._lags: deque[float] = deque(maxlen=LAG_WINDOW_SAMPLES)
        self._computing: deque[float] = deque(maxlen=LAG_WINDOW_SAMPLES)
        self._stop_measuring: Callable[[], None] | None = None

    def start(self) -> None:
        """Measure on the running event loop until `stop`. Idempotent."""
        if self._stop_measuring is None:
            self._stop_measuring = self._processes.measure_event_loop(self.add)

    def stop(self) -> None:
        if self._stop_measuring is not None:
            self._stop_measuring()
            self._stop_measuring = None

    def add(self, seconds: float, computing_seconds: float = 0.0) -> None:
        self._lags.append(max(0.0, seconds))
        self._computing.append(max(0.0, computing_seconds))

    def collect_metrics(self) -> dict[str, float]:
        """Return the lag in milliseconds by `METRIC_NAMES`; zeros before the first measurement."""
        lags, own = sorted(self._lags) or [0.0], sorted(self._computing) or [0.0]

        def quantile(values: list[float], q: float) -> float:
            return 1000 * values[round(q * (len(values) - 1))]

        found = (
            quantile(lags, 0.5),
            quantile(lags, 0.99),
            quantile(lags, 1.0),
            quantile(own, 0.99),
            quantile(own, 1.0),
        )
        return dict(zip(self.METRIC_NAMES, found, strict=True))
