"""The live view of a run as a page. Files are read from where the last read stopped, and only
when somebody looks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from r3async.data.metrics import finite_or_none
from r3async.record.reading import (
    EVALUATION_FILE,
    convert_valid,
    make_config_events,
    read_run_config,
)
from r3async.record.timeline import FILE, Span
from r3async.views.episode_search import EpisodeIndex, EpisodeQuery, make_environment_lookup
from r3async.views.episodes import StepVersions
from r3async.views.follow import FollowedFile
from r3async.views.report import RunRecord

MAX_SPANS = 20_000
MAX_EVENTS = 20_000
"""Maximum numbers of spans and events kept in memory; older ones are in the run's files."""


class LiveRun:
    """A run that the live view serves.

    Attributes:
        revision: Number that grows with every read that finds something new.
        is_gone: True if the directory of the run does not exist any more.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.name = os.path.basename(os.path.realpath(run_dir))
        self.revision = 0
        self.is_gone = False
        self._files = {
            name: FollowedFile(run_dir / name) for name in (FILE, "events.jsonl", "metrics.jsonl")
        }
        self._files |= {
            name: FollowedFile(run_dir / name) for name in ("routing.jsonl", EVALUATION_FILE)
        }
        self._rows: list[dict[str, Any]] = []
        self._routing: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._config: dict[str, Any] = {}
        self._find_environment = make_environment_lookup({})
        self._episodes = EpisodeIndex(run_dir)

    def read_new(self) -> int:
        """Read everything written since the last call. Returns `revision`."""
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
        self._spans.extend(
            span for span in convert_valid(new[FILE], Span) if span.start <= span.end
        )
        told = self._episodes.read_new(self._find_environment)
        skipped = [
            event for _, events in read.values() for event in events
        ] + self._episodes.skipped_events
        self._episodes.skipped_events = []
        if not self.revision:
            skipped += make_config_events(self.run_dir)
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
        """Return all data of the run in the form that a page needs."""
        spans = sorted(self._spans, key=lambda span: span.start)
        return RunRecord(
            self.run_dir,
            self._rows,
            list(self._events),
            self._config,
            spans,
            self._routing,
            self._evaluations,
        )

    def render_episode_list(self, query: EpisodeQuery) -> str:
        """Render a page of the episodes that match `query`, as HTML
        (`EpisodeIndex.render_list`)."""
        return self._episodes.render_list(query, self._step_versions())

    def render_episode(self, key: str, *, group: bool) -> str | None:
        """Render an episode or its group as HTML; None if it is unknown
        (`EpisodeIndex.render_episode`)."""
        return self._episodes.render_episode(key, self._step_versions(), group=group)

    def _step_versions(self) -> StepVersions:
        return StepVersions.from_rows(self._rows, self.make_record().staleness_bound)


def _append_step_lines(rows: list[dict[str, Any]], lines: Iterable[dict[str, Any]]) -> None:
    """Append lines of steps. A step that a resume repeats replaces the old lines of that step
    and all later ones."""
    for line in lines:
        step = finite_or_none(line.get("step"))
        while (
            step is not None
            and rows
            and (last := finite_or_none(rows[-1].get("step"))) is not None
            and last >= step
        ):
            rows.pop()
        rows.append(line)
