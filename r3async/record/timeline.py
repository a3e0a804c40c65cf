"""Who did what when: `run_dir/timeline.jsonl`, to which all processes of a run append spans.

A line is one object: `who` (`learner`, `generator-0`, `transport`, `weights`), `what` (`train`, `wait`, `play`, …), `start` and
`end` in unix seconds, and where they are known `step` and `version`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from r3async.record.jsonl import read_objects
from r3async.world import Files, World
from r3async.world.appending import AppendFile
from r3async.world.real import REAL

FILE = "timeline.jsonl"


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """`start`, `end`: unix seconds. Of an engine call: its `turn` in the episode (from 0), the `tokens` that were sampled, those
    that its `prompt` had beyond what was fed before, and the requests that were `running` meanwhile, on average, itself among
    them."""

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
    """Writes the spans of one process, each when it ends. Where it is not `enabled` nothing is measured, opened or written.

    `clock`: unix seconds, so that processes agree; the world's if not given.
    """

    def __init__(
        self,
        run_dir: Path,
        who: str,
        *,
        enabled: bool = True,
        world: World = REAL,
        clock: Callable[[], float] | None = None,
    ):
        self.who, self._clock = who, clock or world.clock.time
        self._file = AppendFile(Path(run_dir) / FILE, world=world) if enabled else None

    @property
    def enabled(self) -> bool:
        return self._file is not None

    def now(self) -> float:
        """Unix seconds, as its spans have them."""
        return self._clock()

    def span(self, what: str, *, step: int | None = None, version: int | None = None) -> AbstractContextManager[None]:
        """What is done inside: `with timeline.span("train", step=3): …`. Written also where it raises."""
        return nullcontext() if self._file is None else self._measured(what, step, version)

    @contextmanager
    def _measured(self, what: str, step: int | None, version: int | None) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.add(what, start, self._clock(), step=step, version=version)

    def add(self, what: str, start: float, end: float, *, who: str = "", **facts: Any) -> None:
        """What was measured elsewhere; `who`: somebody else than this process. `facts`: further fields of `Span`."""
        if self._file is not None:
            self._file.append(msgspec.json.encode(Span(who or self.who, what, start, end, **facts)))


def read_timeline(run_dir: Path, *, files: Files = REAL.files) -> list[Span]:
    """The spans in order of their beginning; what is none is passed over."""
    spans = []
    for entry in read_objects(Path(run_dir) / FILE, files=files):
        try:
            span = msgspec.convert(entry, Span)
        except msgspec.ValidationError:
            continue
        if span.start <= span.end:
            spans.append(span)
    return sorted(spans, key=lambda span: span.start)


def busy_shares(spans: Sequence[Span]) -> dict[tuple[str, str], float]:
    """By (who, what): the share of the time from the first span to the last end. Spans of one kind that overlap count once."""
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
