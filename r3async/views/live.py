"""A run as a served page shows it: its files are read from where the last look stopped, and only when somebody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from r3async.record.catalogue import finite_or_none
from r3async.record.reading import EVALUATION_FILE, convert_valid, damaged_config_event, read_run_config
from r3async.record.timeline import FILE, Span
from r3async.views.browse import EpisodeIndex, EpisodeQuery, make_environment_lookup
from r3async.views.episodes import StepVersions
from r3async.views.follow import FollowedFile
from r3async.views.report import RunRecord

MAX_SPANS, MAX_EVENTS = 20_000, 20_000
"""The newest; the first of a run are in its files."""


class LiveRun:
    """`revision`: grows with every look that found something new. `is_gone`: its directory is not there any more."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.name = run_dir, run_dir.resolve().name
        self.revision, self.is_gone = 0, False
        self._files = {name: FollowedFile(run_dir / name) for name in (FILE, "events.jsonl", "metrics.jsonl")}
        self._files |= {name: FollowedFile(run_dir / name) for name in ("routing.jsonl", EVALUATION_FILE)}
        self._rows: list[dict[str, Any]] = []
        self._routing: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._config: dict[str, Any] = {}
        self._find_environment = make_environment_lookup({})
        self._episodes = EpisodeIndex(run_dir)

    def read_new(self) -> int:
        """Take in what was written since the last look. Returns `revision`."""
        gone = not self.run_dir.is_dir()
        if not self._config:
            self._config = read_run_config(self.run_dir)
            self._find_environment = make_environment_lookup(self._config)
        read = {name: file.read_new() for name, file in self._files.items()}
        new = {name: found for name, (found, _) in read.items()}
        _append_step_lines(self._rows, new["metrics.jsonl"])
        _append_step_lines(self._routing, new["routing.jsonl"])
        self._evaluations += new[EVALUATION_FILE]
        self._events.extend(new["events.jsonl"])
        self._spans.extend(span for span in convert_valid(new[FILE], Span) if span.start <= span.end)
        told = self._episodes.read_new(self._find_environment)
        skipped = [event for _, events in read.values() for event in events] + self._episodes.skipped_events
        self._episodes.skipped_events = []
        if not self.revision:
            skipped += damaged_config_event(self.run_dir)
        self._events.extend(skipped)
        if any(new.values()) or skipped or told or gone != self.is_gone or not self.revision:
            self.revision += 1
        self.is_gone = gone
        return self.revision

    def close(self) -> None:
        self._episodes.close()
        for file in self._files.values():
            file.close()

    def make_record(self) -> RunRecord:
        """All of it as a page wants it."""
        spans = sorted(self._spans, key=lambda span: span.start)
        return RunRecord(
            self.run_dir, self._rows, list(self._events), self._config, spans, self._routing, self._evaluations
        )

    def render_episode_list(self, query: EpisodeQuery) -> str:
        """See `EpisodeIndex.render_list`."""
        return self._episodes.render_list(query, self._step_versions())

    def render_episode(self, key: str, *, group: bool) -> str | None:
        """See `EpisodeIndex.render_episode`."""
        return self._episodes.render_episode(key, self._step_versions(), group=group)

    def _step_versions(self) -> StepVersions:
        return StepVersions.from_rows(self._rows, self.make_record().staleness_bound)


def _append_step_lines(rows: list[dict[str, Any]], lines: Iterable[dict[str, Any]]) -> None:
    """Add lines of steps. A resume goes back: a step that comes again takes the place of all from it on."""
    for line in lines:
        step = finite_or_none(line.get("step"))
        while step is not None and rows and (last := finite_or_none(rows[-1].get("step"))) is not None and last >= step:
            rows.pop()
        rows.append(line)
