"""What `r3async tail` shows of a run, as lines of text for a given width. Pure: from `FollowedRun` to `rich.text.Text`."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import numpy as np
from rich.text import Text

from r3async.record.catalogue import METRICS, Metric, in_order
from r3async.schedule.health import why_no_update
from r3async.tools.tail.draw import bar, plot, spark
from r3async.views.charts import CHARTS, EVALUATED, PASSES, Chart, numbers_after
from r3async.views.follow import FollowedRun
from r3async.views.summary import COLORS, KINDS, format_number, format_percent, format_seconds

LABEL, VALUE, NOTE = 12, 8, 25
SILENT_SECONDS = 60.0
"""Nothing written for so long is shown."""

LEVELS = {"warning": "yellow", "error": "red", "critical": "red"}
CURVES = {"blue": "cyan", "orange": "yellow", "green": "green", "violet": "magenta"}
"""Of a report's colours, the terminal's."""


def clip(text: Text | str, width: int) -> Text:
    """One line of at most `width` cells, its end marked where something is missing."""
    line = Text(text) if isinstance(text, str) else text.copy()
    line.truncate(max(width, 0), overflow="ellipsis")
    return line


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def header(run: FollowedRun, width: int, *, held: bool = False, window: int | None = None) -> list[Text]:
    """Two lines: what runs and how far it is."""
    planned, phase = run.planned_steps, run.phase
    left = run.left_seconds
    first = Text(f" {run.name} ", style="bold")
    first.append(
        f" {phase} ", style=f"reverse {'cyan' if phase == 'training' else COLORS.get(KINDS.get(phase, ''), 'blue')}"
    )
    if held:
        first.append(" held ", style="reverse yellow")
    if window:
        first.append(f" last {window} steps ", style="reverse")
    if run.silent_seconds > SILENT_SECONDS:
        first.append(f" nothing written for {format_seconds(run.silent_seconds)}", style="yellow")
    if run.reason:
        first.append(f" {run.reason.splitlines()[0]}", style="red")
    when = f"{format_seconds(run.elapsed_seconds)}" + ("" if left is None else f", about {format_seconds(left)} left")
    steps = f"step {run.step}" + (f" of {planned}" if planned else "")
    cells = max(10, width - len(steps) - len(when) - 8)
    second = Text(f" {steps}  ", style="bold")
    if planned:
        done = min(1.0, run.step / planned)
        filled = round(done * cells)
        second.append("━" * filled, style="cyan").append("─" * (cells - filled), style="dim")
    second.append(f"  {when}", style="dim")
    return [clip(first, width), clip(second, width)]


Shown = tuple[str, str, str]
"""Value, note and style of a gauge."""


def _figure(run: FollowedRun, known: Metric) -> Shown:
    return format_number(run.metrics.last(known.name)), known.unit, ""


def _reward(run: FollowedRun, known: Metric) -> Shown:
    rewards = run.metrics.values(known.name)
    rewards = rewards[np.isfinite(rewards)]
    note = ""
    if len(rewards):
        note = f"began at {format_number(float(rewards[:3].mean()))}, top {format_number(float(rewards.max()))}"
    return format_number(run.metrics.last(known.name)), note, "bold green"


def _evaluated(run: FollowedRun) -> Shown:
    """Of the newest evaluation, of its first set."""
    last = run.evaluations.last
    most = max(numbers_after(PASSES, run.evaluations), key=int, default="")
    solved = f"pass@{most} {format_number(last(PASSES + most), 2)}" if most else ""
    note = _join(f"step {format_number(last('step'))}", solved)
    return format_number(last(EVALUATED)), note, "bold"


def _contrast(run: FollowedRun, known: Metric) -> Shown:
    without, groups = run.metrics.last("advantage/zero_variance_groups"), run.metrics.last("batch/groups")
    value = "-" if without is None or groups is None else f"{groups - without:.0f} of {groups:.0f}"
    why = why_no_update(run.rows[-1]) if run.rows else ""
    return value, f"no update: {why}" if why else "groups differ within", "bold red" if why else ""


def _drift(run: FollowedRun, known: Metric) -> Shown:
    served = run.metrics.last("served_kl/k3") if run.setting("algorithm.rollout_kl.measure") == "served" else None
    drift = run.metrics.last(known.name) if served is None else served
    target = run.setting("algorithm.rollout_kl.target")
    limit, coef = run.setting("algorithm.rollout_kl.max"), run.metrics.last("rollout_kl/coef")
    style = "bold"
    if drift is not None and limit is not None and drift > limit:
        style = "bold red"
    elif drift is not None and target is not None:
        style = "bold yellow" if drift > 2 * target else "bold green"
    note = _join(
        known.unit if target is None else f"target {format_number(target)}",
        "" if limit is None else f"limit {format_number(limit)}",
        "" if coef is None else f"coef {format_number(coef, 2)}",
    )
    return format_number(drift, 2), note, style


def _age(run: FollowedRun, known: Metric) -> Shown:
    oldest, bound = run.metrics.last("staleness/max"), run.age_bound
    note = "" if oldest is None else f"oldest {format_number(oldest)}"
    note += "" if bound is None else f" of {bound} allowed"
    over = oldest is not None and bound is not None and oldest > bound
    return format_number(run.metrics.last(known.name), 2), note, "bold red" if over else "bold"


def _routes(run: FollowedRun, known: Metric) -> Shown:
    recorded, lowest = run.metrics.last("routing/recorded_fraction"), run.metrics.last("routing/agreement_min")
    note = _join(
        "" if recorded is None else f"recorded {format_percent(recorded)}",
        "" if lowest is None else f"min {100 * lowest:.0f} %",
    )
    return format_percent(run.metrics.last(known.name)), note, "bold"


def _learner(run: FollowedRun, known: Metric) -> Shown:
    step, wait = run.metrics.last("learner/step_seconds"), run.metrics.last(known.name)
    return format_seconds(step), "" if wait is None else f"a step; waited {format_seconds(wait)}", ""


def _weights(run: FollowedRun, known: Metric) -> Shown:
    version, update = run.metrics.last("version"), run.metrics.last(known.name)
    pause = format_seconds(run.metrics.last("weights/pause_seconds"))
    note = "" if update is None else f"in {format_seconds(update)}, pause {pause}"
    return "-" if version is None else f"v{version:.0f}", note, ""


def _slots(run: FollowedRun, known: Metric) -> Shown:
    return _filled(run.metrics.last(known.name), run.slots, "taken")


def _buffer(run: FollowedRun, known: Metric) -> Shown:
    return _filled(run.metrics.last(known.name), run.setting("schedule.groups_per_step"), "ready")


def _filled(number: float | None, of: int | None, what: str) -> Shown:
    value = "-" if number is None else f"{number:.0f}" + (f" of {of}" if of else "")
    return value, f"{bar(number / of, 10)} groups {what}" if number is not None and of else "", ""


def _arrived(run: FollowedRun, known: Metric) -> Shown:
    again, rejected = run.metrics.last("transport/duplicates"), run.metrics.last("transport/rejected")
    note = "" if rejected is None else f"{again or 0:.0f} again, {rejected:.0f} rejected"
    return format_number(run.metrics.last(known.name)), note, "yellow" if rejected else ""


def _generators(run: FollowedRun, known: Metric) -> Shown:
    restarts = run.history.generators_lost + run.history.run_restarts
    count = run.wanted or run.setting("generator.count") or len(run.generators)
    lost = [name for name, state in run.generators.items() if state == "lost"]
    playing = len(run.generators) - len(lost)
    silent = [name for name, state in run.generators.items() if state == "silent"]
    note = "ended" if run.ended else "playing" if playing else "loading"
    if lost or (silent and not run.ended):
        note = _join(*(f"{', '.join(names)} {state}" for names, state in ((lost, "lost"), (silent, "silent")) if names))
    note = _join(note, f"{restarts} restart{'' if restarts == 1 else 's'}")
    style = "bold red" if lost else "yellow" if restarts or silent else ""
    return f"{playing} of {count}", note, style


GAUGES = [known for known in METRICS.values() if known.gauge]
"""The lines of the overview: the metrics that the catalogue gives one."""
SAYS: dict[str, Callable[[FollowedRun, Metric], Shown]] = {
    "reward": _reward,
    "contrast": _contrast,
    "drift": _drift,
    "age": _age,
    "routes agree": _routes,
    "learner": _learner,
    "weights": _weights,
    "slots": _slots,
    "buffer": _buffer,
    "arrived": _arrived,
    "generators": _generators,
}
"""What a gauge shows that is more than its metric's last value."""


def gauge(run: FollowedRun, known: Metric) -> Shown:
    return SAYS.get(known.gauge, _figure)(run, known)


def gauge_help(width: int) -> list[str]:
    """What each gauge is about, in the catalogue's words."""
    return [
        line
        for known in GAUGES
        for line in textwrap.wrap(
            known.docs, width, initial_indent=f" {known.gauge:<{LABEL + 2}}", subsequent_indent=" " * (LABEL + 3)
        )
    ]


def overview(run: FollowedRun, width: int, window: int | None = None) -> list[Text]:
    """The gauges, one a line, with sparklines over the last `window` steps (or all) in the cells that are left."""
    lines = []
    free = width - LABEL - VALUE - NOTE - 6

    def add(label: str, shown: Shown, values: np.ndarray) -> None:
        value, note, style = shown
        line = Text(f" {label:<{LABEL}} ", style="dim")
        line.append(f"{value:>{VALUE}}", style=f"not dim {style}")
        line.append(f"  {note:<{NOTE}} ")
        line.truncate(width - max(free, 0), overflow="ellipsis", pad=True)
        if free >= 8:
            line.append(spark(values, free), style="not dim cyan")
        lines.append(clip(line, width))

    for known in GAUGES:
        add(known.gauge, gauge(run, known), run.metrics.values(known.name, window))
        if known.gauge == "reward" and run.evaluations.rows:
            add("evaluated", _evaluated(run), run.evaluations.values(EVALUATED))
    return lines


def event_line(run: FollowedRun, event: dict[str, Any]) -> Text:
    level = str(event.get("level", ""))
    at = event.get("time")
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, (int, float)) else "--:--:--"
    line = Text(f" {clock} ", style="dim")
    line.append(f"{event.get('role', '')!s} ", style="not dim")
    line.append(f"{event.get('event', '')!s}", style=f"not dim bold {LEVELS.get(level, '')}")
    details = " ".join(run.history.details(event).split())
    return line.append(f" {details}") if details else line


def event_lines(run: FollowedRun, width: int, count: int, *, loud: bool = False) -> list[Text]:
    """The last events, a line each, the newest at the end. `loud`: only warnings and errors."""
    shown = [e for e in run.events if not loud or e.get("level") in LEVELS]
    if not shown:
        return [Text(" no warnings" if loud else " no events yet", style="dim")]
    return [clip(event_line(run, event), width) for event in shown[-count:]]


def rule(title: str, width: int) -> Text:
    return Text(f"─ {title} ".ljust(width, "─"), style="dim")


def events_title(run: FollowedRun, loud: bool = False) -> str:
    noise = _join(f"{run.warnings} warnings", f"{run.errors} errors")
    return f"warnings and errors ({noise})" if loud else f"events ({noise})"


def charts(run: FollowedRun, width: int, height: int, window: int | None = None) -> list[Text]:
    """As many of the report's charts as fit, two beside each other where they are wide enough."""
    across = 2 if width >= 80 else 1
    down = max(1, min(height // 9, -(-len(CHARTS) // across)))
    each, tall = width // across, height // down
    lines: list[Text] = []
    for first in range(0, down * across, across):
        cells = [_chart(run, chart, each, tall, window) for chart in CHARTS[first : first + across]]
        for parts in zip(*cells, strict=True):
            line = Text()
            for part in parts:
                part.pad_right(max(0, each - part.cell_len))
                line.append_text(part)
            lines.append(line)
    return lines


def held_to(chart: Chart, run: FollowedRun) -> Any:
    """The value that the curve should stay at or below, if there is one."""
    return run.age_bound if chart.bound else run.setting(chart.target) if chart.target else None


def _chart(run: FollowedRun, chart: Chart, width: int, height: int, window: int | None) -> list[Text]:
    lines = [line for line in chart.lines if not line.points]
    title = Text(" " * 8 + ", ".join(filter(None, (chart.title.lower(), chart.unit))), style="bold")
    if len(lines) > 1:
        title.append(":")
        for line in lines:
            title.append(f" {line.label}", style=CURVES[line.color])
    curves = [(run.metrics.values(line.metric, window), CURVES[line.color]) for line in reversed(lines)]
    floor = None if chart.log or chart.share else 0.0
    body = plot(curves, width - 2, height - 2, log=chart.log, floor=floor, line=held_to(chart, run))
    return [clip(title, width - 1), *body, Text()]


def metric_lines(run: FollowedRun, width: int, window: int | None = None, limit: int = 10_000) -> list[Text]:
    """Every metric the run has, by prefix, with the labels and units that are known; `limit` lines of that."""
    lines: list[Text] = []
    for group, found in groupby(in_order(run.metrics), key=lambda known: known.group):
        lines.append(rule(group, width))
        lines += [_metric_line(run, known, width, window) for known in found]
    return lines[:limit] or [Text(" no step was finished yet", style="dim")]


def _metric_line(run: FollowedRun, known: Metric, width: int, window: int | None) -> Text:
    line = Text(" ").append_text(clip(known.label.removeprefix(f"{known.group}/"), 24))
    line.pad_right(max(0, 26 - line.cell_len))
    line.append(f"{format_number(run.metrics.last(known.name)):>10} ", style="bold")
    line.append_text(clip(known.unit, 13))
    line.pad_right(max(0, 52 - line.cell_len))
    free = width - 53
    curve = spark(run.metrics.values(known.name, window), free) if free >= 8 else ""
    return clip(line.append(curve, "cyan"), width)


def plain(lines: Iterable[Text]) -> str:
    return "\n".join(line.plain.rstrip() for line in lines)
