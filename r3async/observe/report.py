"""`report.html`: a finished or running run on one page that needs nothing but itself, not even a network.

The page's look is in `report.html` beside this file. All text that comes from a run is escaped here: model output and
configuration are shown, never interpreted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import Config, to_dict
from r3async.observe.charts import describe_charts, finite
from r3async.observe.events import event_details, read_events
from r3async.observe.jsonl import read_objects
from r3async.observe.maps import describe_maps
from r3async.observe.metrics import METRICS, read_metrics
from r3async.observe.summary import (
    RunSummary,
    format_number,
    format_percent,
    format_seconds,
    read_run_config,
    summarize_records,
)

MAX_EVENTS, MAX_EPISODES, MAX_TURNS, MAX_TEXT = 200, 6, 8, 1200


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from what the run recorded so far, and return its path.

    The file appears whole or not at all. Missing, empty and torn files are fine: the page says what there is not.
    """
    run_dir = Path(run_dir)
    rows, events = read_metrics(run_dir / "metrics.jsonl"), read_events(run_dir / "events.jsonl")
    config = read_run_config(run_dir)
    summary = summarize_records(run_dir, rows, events, config)
    charts, series = describe_charts(rows, summary.staleness_bound)
    maps = describe_maps(list(read_objects(run_dir / "routing.jsonl")))
    body = "\n".join(
        [
            _header(summary),
            _figures(summary),
            _chart_cards(charts),
            _map_cards(maps),
            _events(events, summary),
            _episodes(run_dir / "episodes.jsonl"),
            _config(config),
            f"<footer>Written {time.strftime('%Y-%m-%d %H:%M:%S')} by r3async from {escape(str(run_dir))}</footer>",
        ]
    )
    data = {
        "steps": _steps(rows),
        "series": series,
        "charts": [{k: v for k, v in c.items() if k != "caption"} for c in charts],
        "maps": [{k: v for k, v in m.items() if k != "caption"} for m in maps],
    }
    values = {
        "title": escape(f"{summary.name} · r3async"),
        "body": body,
        "data": _json(data),
        "plotly": _plotly([*charts, *maps]),
    }
    path, aside = run_dir / "report.html", run_dir / ".report.html.tmp"
    aside.write_text(_fill(Path(__file__).with_name("report.html").read_text("utf-8"), values), "utf-8", "replace")
    aside.replace(path)
    return path


def _fill(template: str, values: dict[str, str]) -> str:
    # In one pass over the template: a run's text that happens to look like a mark of ours stays text.
    parts = template.split("@@")
    return "".join(values[part] if index % 2 else part for index, part in enumerate(parts))


def _json(data: Any) -> str:
    """JSON that can stand inside a script element."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plotly(drawings: Sequence[dict[str, Any]]) -> str:
    if not drawings:
        return ""
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def _steps(rows: Sequence[dict[str, Any]]) -> list[Any]:
    return [row.get("step", index + 1) for index, row in enumerate(rows)]


def _header(summary: RunSummary) -> str:
    kind = {"finished": "good", "failed": "bad", "stopped": "warn"}.get(summary.status, "")
    of = f" of {summary.planned_steps}" if summary.planned_steps else ""
    started = ""
    if summary.started_at is not None:
        started = f"started {time.strftime('%Y-%m-%d %H:%M', time.localtime(summary.started_at))}, "
    text = (
        f"<header><h1>{escape(summary.name)}</h1><span class='chip {kind}'>{escape(summary.status)}</span></header>\n"
        f"<p class='sub'>{started}{summary.steps}{of} steps in {format_seconds(summary.duration_seconds)}</p>"
    )
    if summary.status == "failed":
        text += f"\n<div class='notice'>{escape(summary.reason or 'The run failed without a reason.')}</div>"
    if not summary.steps:
        text += (
            "\n<div class='notice quiet'>No step was finished, so there is nothing to draw yet. "
            "The events below and the files in <code>logs/</code> say how far the run came.</div>"
        )
    return text


def _figures(summary: RunSummary) -> str:
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
            str(summary.restarts),
            f"{summary.rejected} messages rejected; {noisy} {'warning or error' if noisy == 1 else 'warnings and errors'}",
        ),
    ]
    return f"<div class='figures'>{''.join(cards)}</div>"


def _chart_cards(charts: Sequence[dict[str, Any]]) -> str:
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


def _map_cards(maps: Sequence[dict[str, Any]]) -> str:
    cards = [
        f"<section class='card chart'><h3>{escape(each['title'])}</h3><p>{escape(each['caption'])}</p>"
        f"<div class='plot' id='{each['id']}'></div></section>"
        for each in maps
    ]
    return f"<h2>Routing<small>by MoE layer</small></h2>\n<div class='charts'>{''.join(cards)}</div>" if cards else ""


def _swatch(line: dict[str, Any]) -> str:
    dash = {"": "solid", "dot": "dotted", "dash": "dashed"}[line["dash"]]
    docs, kind = escape(METRICS[line["metric"]].docs, quote=True), "points" if line["points"] else ""
    style = f"--swatch:var(--{line['color']});--dash:{dash}"
    return f"<span class='{kind}' style='{style}' title='{docs}'>{escape(line['label'])}</span>"


def _events(events: Sequence[dict[str, Any]], summary: RunSummary) -> str:
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


def _episodes(path: Path) -> str:
    """A few episodes, from the first to the last step."""
    found = [e for e in read_objects(path) if isinstance(e.get("turns"), list)]
    if not found:
        return ""
    count = min(MAX_EPISODES, len(found))
    chosen = [found[round(i * (len(found) - 1) / max(1, count - 1))] for i in range(count)]
    cards = "".join(_episode(e) for e in chosen)
    return (
        f"<h2>Episodes<small>{count} of {len(found)}, first to last</small></h2>\n<div class='episodes'>{cards}</div>"
    )


def _episode(episode: dict[str, Any]) -> str:
    turns = [t for t in episode["turns"] if isinstance(t, dict)]
    said = []
    for turn in turns[:MAX_TURNS]:
        said.append(_say(turn.get("user"), "say"))
        said.append(_say(turn.get("assistant"), "say policy"))
        if (earned := finite(turn.get("reward"))) is not None:
            said.append(f"<div class='earned'>reward {format_number(earned)}</div>")
    if len(turns) > MAX_TURNS:
        said.append(f"<div class='earned'>and {len(turns) - MAX_TURNS} more turns</div>")
    reward = finite(episode.get("reward"))
    kind = "" if reward is None else "good" if reward >= 0.8 else "warn" if reward >= 0.4 else "bad"
    chip = f"<span class='chip {kind}'>reward {format_number(reward)}</span>"
    top = f"<div class='top'><span>step {escape(str(episode.get('step', '?')))}</span>{chip}</div>"
    return f"<article class='card episode'>{top}{''.join(said)}</article>"


def _say(text: Any, kind: str) -> str:
    text = "" if text is None else str(text)
    if not text:
        return f"<div class='{kind} empty'>nothing</div>"
    return f"<div class='{kind}'>{escape(text[:MAX_TEXT])}{' …' if len(text) > MAX_TEXT else ''}</div>"


def _config(config: dict[str, Any]) -> str:
    """Section by section; what differs from the defaults of this release stands out."""
    if not config:
        return ""
    defaults = to_dict(Config())
    top = {k: v for k, v in config.items() if not isinstance(v, dict)}
    sections = [("run", top, {k: v for k, v in defaults.items() if not isinstance(v, dict)})]
    sections += [(k, _flat(v), _flat(defaults.get(k, {}))) for k, v in config.items() if isinstance(v, dict)]
    cards = []
    for name, values, usual in sections:
        lines = "".join(
            f"<dt{mark}>{escape(key)}</dt><dd{mark}>{escape(_text(value))}</dd>"
            for key, value in values.items()
            for mark in [" class='set'" if key not in usual or not _same(usual[key], value) else ""]
        )
        if lines:
            cards.append(f"<section class='card section'><h3>{escape(name)}</h3><dl>{lines}</dl></section>")
    return f"<h2>Configuration<small>bold: not the default</small></h2>\n<div class='config'>{''.join(cards)}</div>"


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items() if isinstance(section, dict) else ():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _same(one: Any, other: Any) -> bool:
    return (
        (list(one) == list(other))
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
        else one == other
    )


def _text(value: Any) -> str:
    return '""' if value == "" else value if isinstance(value, str) else msgspec.json.encode(value).decode()
