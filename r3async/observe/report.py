"""`report.html`: a finished or running run on one page that needs nothing but itself, not even a network; or several runs.

The page's look is in `report.html`, `report.css` and `report.js` beside this file; what is on it, in the `report_*.py`. All text
that comes from a run is escaped: model output and configuration are shown, never interpreted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from r3async.observe import report_compare as compare
from r3async.observe import report_parts as parts
from r3async.observe.charts import describe_charts, describe_more
from r3async.observe.events import read_events
from r3async.observe.jsonl import read_objects
from r3async.observe.maps import describe_maps
from r3async.observe.metrics import read_metrics
from r3async.observe.report_drift import describe_ages, drift_table
from r3async.observe.report_episodes import conversations_section, tokens_section
from r3async.observe.report_evaluation import describe_evaluation, describe_evaluations, read_evaluations
from r3async.observe.report_timeline import describe_timeline, timeline_card
from r3async.observe.summary import RunSummary, read_run_config, summarize_records
from r3async.observe.timeline import Span, read_timeline, spans_from_metrics


class RunRecord(msgspec.Struct):
    """What a run wrote, read once."""

    run_dir: Path
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    config: dict[str, Any]
    summary: RunSummary
    spans: list[Span]
    derived: bool
    """The spans were worked out from the metrics."""

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord:
        """Missing, empty and torn files are fine."""
        rows, events = read_metrics(run_dir / "metrics.jsonl"), read_events(run_dir / "events.jsonl")
        config = read_run_config(run_dir)
        spans = read_timeline(run_dir)
        summary = summarize_records(run_dir, rows, events, config)
        return cls(run_dir, rows, events, config, summary, spans or spans_from_metrics(rows, events), not spans)


def write_report(run_dir: Path, *others: Path, path: Path | None = None) -> Path:
    """Write `path` (default: `run_dir/report.html`) from what the run recorded so far, and return it.

    With `others`, the page compares all of them. The file appears whole or not at all.
    """
    runs = [RunRecord.read(Path(directory)) for directory in (run_dir, *others)]
    body, data = _compared(runs) if others else _one(runs[0])
    where = ", ".join(str(run.run_dir) for run in runs)
    body.append(f"<footer>Written {time.strftime('%Y-%m-%d %H:%M:%S')} by r3async from {escape(where)}</footer>")
    drawn = any(data[kind] for kind in ("charts", "maps", "more", "ages", "timeline"))
    values = {
        "title": escape(f"{' · '.join(run.summary.name for run in runs)} · r3async"),
        "body": "\n".join(part for part in body if part),
        "data": _json(data),
        "plotly": _plotly() if drawn else "",
        "style": _beside("report.css"),
        "script": _beside("report.js"),
    }
    path = path or Path(run_dir) / "report.html"
    aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    aside.write_text(_fill(_beside("report.html"), values), "utf-8", "replace")
    aside.replace(path)
    return path


def _one(run: RunRecord) -> tuple[list[str], dict[str, Any]]:
    charts, series = describe_charts(run.rows, run.summary.staleness_bound)
    evaluation, evaluated = describe_evaluation(read_evaluations(run.run_dir), run.rows)
    charts[1:1], series = evaluation, series | evaluated  # beside the reward, which is the first
    more, columns, constants = describe_more(run.rows)
    maps = describe_maps(list(read_objects(run.run_dir / "routing.jsonl")))
    ages = describe_ages(run.run_dir, run.rows, run.summary.staleness_bound)
    timeline = describe_timeline(run.spans, derived=run.derived)
    body = [
        parts.header(run.summary),
        parts.figures(run.summary),
        parts.chart_cards(charts),
        parts.map_cards([*maps, ages] if ages else maps),
        timeline_card(timeline, run.spans),
        drift_table(run.rows),
        parts.events(run.events, run.summary),
        conversations_section(run.run_dir / "episodes.jsonl"),
        tokens_section(run.run_dir),
        parts.more_charts(more, constants),
        parts.config(run.config),
        parts.environment(run.events),
    ]
    return body, {
        "steps": _steps(run.rows),
        "series": series | columns,
        "charts": _drawn(charts),
        "more": _drawn(more),
        "maps": _drawn(maps),
        "ages": ages,
        "timeline": timeline,
    }


def _compared(runs: Sequence[RunRecord]) -> tuple[list[str], dict[str, Any]]:
    names = compare.distinct([run.summary.name for run in runs], [run.run_dir for run in runs])
    charts, series = compare.describe_overlays([run.rows for run in runs], names)
    evaluations = [read_evaluations(run.run_dir) for run in runs]
    evaluation, evaluated = describe_evaluations(evaluations, names, [compare.color(i) for i in range(len(runs))])
    charts, series = [*evaluation, *charts], series | evaluated
    body = [
        compare.header(names, [run.summary for run in runs]),
        compare.figures([run.summary for run in runs], names),
        compare.chart_cards(charts, names),
        compare.time_table([run.spans for run in runs], names),
        compare.config_table([run.config for run in runs], names),
        compare.episodes([run.run_dir for run in runs], names),
    ]
    longest = max(runs, key=lambda run: len(run.rows))
    return body, {
        "steps": _steps(longest.rows),
        "series": series,
        "charts": _drawn(charts),
        "more": [],
        "maps": [],
        "ages": None,
        "timeline": None,
    }


def _drawn(described: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in each.items() if k != "caption"} for each in described]


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _fill(template: str, values: dict[str, str]) -> str:
    # In one pass over the template: a run's text that happens to look like a mark of ours stays text.
    pieces = template.split("@@")
    return "".join(values[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _json(data: Any) -> str:
    """JSON that can stand inside a script element."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def _steps(rows: Sequence[dict[str, Any]]) -> list[Any]:
    return [row.get("step", index + 1) for index, row in enumerate(rows)]
