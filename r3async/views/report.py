"""The report of one or several finished or running runs: a self-contained page, `report.html`, that
needs no network.

`charts.py` and `report_drawings.py` compute what is drawn; the templates `report*.html`,
`report.css` and `report.js` define the look. All text that comes from a run is escaped: model
output and configuration are shown, never interpreted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from r3async.record.reading import (
    EPISODES_FILE,
    EVALUATION_FILE,
    TIMELINE_FILE,
    parse_schedule,
    read_run_config,
    read_run_files,
)
from r3async.record.timeline import Span, parse_spans
from r3async.schedule.run_ahead import compute_staleness_bound
from r3async.views.charts import (
    PASS_AT_K_CHART,
    X_AXES,
    ChartLine,
    build_charts,
    build_other_charts,
    build_overlay_charts,
    make_x_columns,
    pick_color,
)
from r3async.views.episodes import (
    TOKEN_COLORINGS,
    StepVersions,
    read_conversations,
    read_traced_samples,
    select_colorings,
)
from r3async.views.evaluation_charts import (
    add_pass_chart,
    build_evaluation_charts,
    find_evaluated_sets,
    make_evaluation_line,
    parse_evaluations,
)
from r3async.views.report_drawings import build_route_maps, build_staleness_histogram
from r3async.views.report_tables import (
    MAX_EVENTS,
    list_processes,
    list_software,
    make_config_sections,
    make_event_lines,
    make_names_distinct,
    make_settings_table,
    make_stats_table,
    make_time_table,
)
from r3async.views.report_timeline import build_timeline, summarize_waits
from r3async.views.summary import RunSummary, make_drift_table, make_headlines, summarize_records
from r3async.views.templates import TEMPLATES
from r3async.world.files import replace_file

MAX_CURVE_ROWS = 2000
"""Maximum number of rows that curves draw; longer runs are thinned to evenly spaced rows."""


class LivePage(msgspec.Struct, frozen=True):
    """The data that a served page needs in addition to a written one.

    Attributes:
        token: Token in the page's URLs.
        query: Query of this page.
        links: Names and queries of all pages.
        missing_runs: Runs whose directories do not exist any more.
    """

    token: str
    cursor: str
    query: str
    links: Sequence[tuple[str, str]]
    missing_runs: Sequence[str] = ()


class RunRecord(msgspec.Struct):
    """The records that a run has written so far. `routing` and `evaluations` are lines of the
    files of that name."""

    run_dir: Path
    rows: Sequence[dict[str, Any]]
    events: Sequence[dict[str, Any]]
    config: dict[str, Any]
    spans: Sequence[Span]
    routing: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]

    @classmethod
    def from_directory(cls, run_dir: Path) -> RunRecord:
        """Read the files of a run, which may be missing, empty, torn or damaged. Skipped
        lines become events."""
        names = (
            "metrics.jsonl",
            "events.jsonl",
            "routing.jsonl",
            EVALUATION_FILE,
            TIMELINE_FILE,
            EPISODES_FILE,
        )
        (rows, events, routing, evaluations, spans, _), skipped = read_run_files(run_dir, *names)
        config = read_run_config(run_dir)
        return cls(
            run_dir, rows, [*events, *skipped], config, parse_spans(spans), routing, evaluations
        )

    @property
    def staleness_bound(self) -> int | None:
        """The maximum age of a trained token, in versions; None if no schedule is recorded."""
        schedule = parse_schedule(self.config)
        return None if schedule is None else compute_staleness_bound(schedule)

    def make_summary(self) -> RunSummary:
        return summarize_records(
            self.run_dir, self.rows, self.events, self.config, parse_evaluations(self.evaluations)
        )

    def select_curves(
        self, started: float | None
    ) -> tuple[Sequence[dict[str, Any]], dict[str, list[Any]]]:
        """Return the rows that curves draw, and their positions on each axis."""
        axes = make_x_columns(self.rows, started)
        return _thin_column(self.rows), {
            name: _thin_column(column) for name, column in axes.items()
        }


def _thin_column(column: Sequence[Any]) -> Any:
    """Return the column, thinned to evenly spaced values and the last one if it is longer than
    `MAX_CURVE_ROWS`."""
    every = -(-len(column) // MAX_CURVE_ROWS) or 1
    return column if every == 1 else [*column[:-1:every], column[-1]]


def write_report(run_dir: Path, *others: Path, path: Path | None = None) -> Path:
    """Write `path` (default: `run_dir/report.html`) from what the run recorded so
    far, and return it.

    With `others`, the page compares all runs. The file is replaced atomically.
    """
    runs = [RunRecord.from_directory(Path(directory)) for directory in (run_dir, *others)]
    text = render_comparison_page(runs) if others else render_run_page(runs[0])
    path = path or Path(run_dir) / "report.html"
    replace_file(path, text.encode("utf-8", "replace"))
    return path


def render_run_page(run: RunRecord, live: LivePage | None = None) -> str:
    """Render the page of a run, as HTML."""
    summary = run.make_summary()
    bound = summary.staleness_bound
    rows, axes = run.select_curves(summary.started_at)
    curves = build_charts(rows, bound)
    more, constants = build_other_charts(rows)
    sets = _collect_evaluations(run.evaluations)
    evaluation = build_evaluation_charts(sets, [axes] * len(sets), rows)
    for line, found in sets:
        add_pass_chart(
            evaluation,
            line,
            found,
            f"{PASS_AT_K_CHART.title}: {line.label}" if len(sets) > 1 else PASS_AT_K_CHART.title,
        )
    page = {
        "summary": summary,
        "started": summary.started_at
        and time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.started_at)),
        "headlines": make_headlines(summary) if summary.steps else [],
        "waits": summarize_waits(run.spans),
        "drift": make_drift_table(run.rows),
        "events": (noise := make_event_lines(run.events, summary))[-MAX_EVENTS:],
        "noise": "the run wrote no events" if not run.events else len(noise) or "none",
        **(_read_examples(run, bound) if live is None else {"modes": TOKEN_COLORINGS}),
        "groups": [
            (name, list(of)) for name, of in groupby(more.charts, key=lambda chart: chart["group"])
        ],
        "constants": constants,
        "config": make_config_sections(run.config),
        "processes": list_processes(run.events),
        "software": list_software(),
    }
    data = {
        "series": curves.series | evaluation.series | more.series | axes,
        # The reward is the first chart.
        "charts": [*curves.charts[:1], *evaluation.charts, *curves.charts[1:]],
        "more": more.charts,
        "maps": build_route_maps(run.routing),
        "ages": build_staleness_histogram(run.rows, bound),
        "timeline": build_timeline(run.spans),
    }
    return _render_page("report_run.html", page, data, [run], [summary], live)


def _read_examples(run: RunRecord, bound: int | None) -> dict[str, Any]:
    """Read a few example episodes and samples for a written report; a live page offers all
    of them instead."""
    samples, kept, problems = read_traced_samples(
        run.run_dir, StepVersions.from_rows(run.rows, bound)
    )
    conversations, played = read_conversations(run.run_dir / "episodes.jsonl")
    return {
        "conversations": conversations,
        "played": played,
        "samples": samples,
        "kept": kept,
        "problems": problems,
        "modes": select_colorings(samples),
    }


def _collect_evaluations(
    lines: Sequence[dict[str, Any]],
) -> list[tuple[ChartLine, list[dict[str, Any]]]]:
    """Return a chart line and the evaluations of each set that was evaluated."""
    sets = find_evaluated_sets(lines)
    if not sets:
        return [(make_evaluation_line("evaluation", "orange"), parse_evaluations(lines))]
    return [
        (
            make_evaluation_line(name, pick_color(index + 1), f"{name}:"),
            parse_evaluations(lines, name),
        )
        for index, name in enumerate(sets)
    ]


def render_comparison_page(runs: Sequence[RunRecord], live: LivePage | None = None) -> str:
    """Render the page that compares several runs, as HTML."""
    summaries = [run.make_summary() for run in runs]
    names = make_names_distinct(
        [summary.name for summary in summaries], [run.run_dir for run in runs]
    )
    drawn = [
        run.select_curves(summary.started_at) for run, summary in zip(runs, summaries, strict=True)
    ]
    axes = [columns for _, columns in drawn]
    curves = build_overlay_charts([rows for rows, _ in drawn], names, axes)
    lines = [
        make_evaluation_line(name, pick_color(index), f"{index}:")
        for index, name in enumerate(names)
    ]
    evaluation = build_evaluation_charts(
        list(zip(lines, [parse_evaluations(run.evaluations) for run in runs], strict=True)), axes
    )
    page = {
        "runs": [(name, pick_color(i), summaries[i]) for i, name in enumerate(names)],
        "figures": make_stats_table(summaries),
        "shares": make_time_table([run.spans for run in runs]),
        "settings": make_settings_table([run.config for run in runs]),
        "conversations": [read_conversations(run.run_dir / "episodes.jsonl", 2)[0] for run in runs],
    }
    data = {
        "series": curves.series | evaluation.series,
        "charts": [*evaluation.charts, *curves.charts],
        "more": [],
        "maps": [],
        "ages": None,
        "timeline": None,
    }
    return _render_page("report_compare.html", page, data, runs, summaries, live)


def _render_page(
    template: str,
    page: dict[str, Any],
    data: dict[str, Any],
    runs: Sequence[RunRecord],
    summaries: Sequence[RunSummary],
    live: LivePage | None,
) -> str:
    return TEMPLATES.get_template(template).render(
        page,
        title=" · ".join(summary.name for summary in summaries),
        data=data,
        drawn=live is not None
        or any(data[kind] for kind in ("charts", "more", "maps", "ages", "timeline")),
        axes=[
            axis for axis in X_AXES if any(name.endswith(f"x/{axis}") for name in data["series"])
        ],
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        where=", ".join(str(run.run_dir) for run in runs),
        live=live,
    )
