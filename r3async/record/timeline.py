"""The timeline of a run: `run_dir/timeline.jsonl`, to which all processes append spans of
their activities.

Each line is one object: `who` (`learner`, `generator-0`, `transport`, `weights`), `what`
(`train`, `wait`, `play`, …), `start` and `end` in unix seconds, and `step` and `version`
where they are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from r3async.record.reading import TIMELINE_FILE, convert_valid, read_json_objects
from r3async.world import Files, World
from r3async.world.appending import AppendFile
from r3async.world.real import REAL_WORLD

FILE = TIMELINE_FILE


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

    If it is not enabled, nothing is measured, opened or written. `clock` returns unix seconds, so
    that processes agree; it defaults to the clock of `world`.
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
        self.actor = actor
        self._clock = clock or world.clock.time
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
        """Measure the body as a span: `with timeline.measure_span("train", step=3): …`. Written
        also if the body raises."""
        return nullcontext() if self._file is None else self._record_span(activity, step, version)

    @contextmanager
    def _record_span(self, activity: str, step: int | None, version: int | None) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.add_span(activity, start, self._clock(), step=step, version=version)

    def add_span(
        self, activity: str, start: float, end: float, *, actor: str = "", **facts: Any
    ) -> None:
        """Write a span that was measured elsewhere.

        Args:
            activity: Kind of activity, `Span.what`.
            start: Start in unix seconds.
            end: End in unix seconds.
            actor: `Span.who`, if it is not this process.
            **facts: Further fields of `Span`.
        """
        if self._file is not None:
            self._file.append(
                msgspec.json.encode(Span(actor or self.actor, activity, start, end, **facts))
            )


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
