"""A run as a served page shows it: its files are read from where the last look stopped, and only when somebody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from r3async.record.catalogue import finite
from r3async.record.reading import EVALUATION, converted, damaged_config_event, read_run_config
from r3async.record.timeline import FILE, Span
from r3async.views.browse import Episodes, Query, environment_of
from r3async.views.episodes import Ages
from r3async.views.follow import FollowedFile
from r3async.views.report import RunRecord

SPANS_KEPT, EVENTS_KEPT = 20_000, 20_000
"""The newest; the first of a run are in its files."""


class LiveRun:
    """`revision`: grows with every look that found something new. `gone`: its directory is not there any more."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.name = run_dir, run_dir.resolve().name
        self.revision, self.gone = 0, False
        self._files = {name: FollowedFile(run_dir / name) for name in (FILE, "events.jsonl", "metrics.jsonl")}
        self._files |= {name: FollowedFile(run_dir / name) for name in ("routing.jsonl", EVALUATION)}
        self._rows: list[dict[str, Any]] = []
        self._routing: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._config: dict[str, Any] = {}
        self._environment = environment_of({})
        self._episodes = Episodes(run_dir)

    def look(self) -> int:
        """Take in what was written since the last look. Returns `revision`."""
        gone = not self.run_dir.is_dir()
        if not self._config:
            self._config = read_run_config(self.run_dir)
            self._environment = environment_of(self._config)
        read = {name: file.read_new() for name, file in self._files.items()}
        new = {name: found for name, (found, _) in read.items()}
        _go_on(self._rows, new["metrics.jsonl"])
        _go_on(self._routing, new["routing.jsonl"])
        self._evaluations += new[EVALUATION]
        self._events.extend(new["events.jsonl"])
        self._spans.extend(span for span in converted(new[FILE], Span) if span.start <= span.end)
        told = self._episodes.look(self._environment)
        skipped = [event for _, events in read.values() for event in events] + self._episodes.skipped
        self._episodes.skipped = []
        if not self.revision:
            skipped += damaged_config_event(self.run_dir)
        self._events.extend(skipped)
        if any(new.values()) or skipped or told or gone != self.gone or not self.revision:
            self.revision += 1
        self.gone = gone
        return self.revision

    def close(self) -> None:
        self._episodes.close()
        for file in self._files.values():
            file.close()

    def record(self) -> RunRecord:
        """All of it as a page wants it."""
        spans = sorted(self._spans, key=lambda span: span.start)
        return RunRecord(
            self.run_dir, self._rows, list(self._events), self._config, spans, self._routing, self._evaluations
        )

    def listed(self, query: Query) -> str:
        """See `Episodes.listed`."""
        return self._episodes.listed(query, self._ages())

    def opened(self, key: str, *, group: bool) -> str | None:
        """See `Episodes.opened`."""
        return self._episodes.opened(key, self._ages(), group=group)

    def _ages(self) -> Ages:
        return Ages.of(self._rows, self.record().age_bound)


def _go_on(kept: list[dict[str, Any]], lines: Iterable[dict[str, Any]]) -> None:
    """Add lines of steps. A resume goes back: a step that comes again takes the place of all from it on."""
    for line in lines:
        step = finite(line.get("step"))
        while step is not None and kept and (last := finite(kept[-1].get("step"))) is not None and last >= step:
            kept.pop()
        kept.append(line)
