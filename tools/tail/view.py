"""Render a run for `r3async tail` as lines of rich text of a given width, from
`FollowedRun`. Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import numpy as np
from rich.text import Text

from r3async.data.metrics import METRICS, Metric, sort_metrics
from r3async.schedule.update_monitor import explain_no_update
from r3async.views.charts import CHARTS, EVALUATION_REWARD, PASS_AT_PREFIX, Chart
from r3async.views.evaluation_charts import find_number_suffixes
from r3async.views.follow import FollowedRun
from r3async.views.number_formats import format_number, format_percent, format_seconds
from r3async.views.summary import KIND_COLORS, STATUS_KINDS

from .draw import draw_bar, draw_plot, draw_sparkline

LABEL_WIDTH = 13
VALUE_WIDTH = 8
NOTE_WIDTH = 25
SHOW_SILENCE_SECONDS = 60.0
"""Seconds without news after which the silence is shown."""

LEVEL_COLORS = {"warning": "yellow", "error": "red", "critical": "red"}
CURVE_COLORS = {"blue": "cyan", "orange": "yellow", "green": "green", "violet": "magenta"}
"""Terminal colours for a report's colours."""


def clip_line(text: Text | str, width: int) -> Text:
    """Clip to one line of at most `width` cells, with a mark at the end if something is missing."""
    line = Text(text) if isinstance(text, str) else text.copy()
    line.truncate(max(width, 0), overflow="ellipsis")
    return line


def _join_parts(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def render_header(
    run: FollowedRun, width: int, *, is_held: bool = False, window: int | None = None
) -> list[Text]:
    """Render two lines: the run with its phase, and its progress."""
    planned = run.planned_steps
    phase = run.phase
    left = run.remaining_seconds
    first = Text(f" {run.name} ", style="bold")
    first.append(
        f" {phase} ",
        style=(
            "reverse "
            f"{'cyan' if phase == 'training' else KIND_COLORS.get(STATUS_KINDS.get(phase, ''), 'blue')}"
        ),
    )
    if is_held:
        first.append(" held ", style="reverse yellow")
    if window:
        first.append(f" last {window} steps ", style="reverse")
    if run.silent_seconds > SHOW_SILENCE_SECONDS:
        first.append(f" nothing written for {format_seconds(run.silent_seconds)}", style="yellow")
    if run.reason:
        first.append(f" {run.reason.splitlines()[0]}", style="red")
    when = f"{format_seconds(run.elapsed_seconds)}" + (
        "" if left is None else f", about {format_seconds(left)} left"
    )
    steps = f"step {run.step}" + (f" of {planned}" if planned else "")
    cells = max(10, width - len(steps) - len(when) - 8)
    second = Text(f" {steps}  ", style="bold")
    if planned:
        done = min(1.0, run.step / planned)
        filled = round(done * cells)
        second.append("━" * filled, style="cyan").append("─" * (cells - filled), style="dim")
    second.append(f"  {when}", style="dim")
    return [clip_line(first, width), clip_line(second, width)]


GaugeText = tuple[str, str, str]
"""Value, note and style of a gauge."""


def _format_value(run: FollowedRun, metric: Metric) -> GaugeText:
    return format_number(run.metrics.last_value(metric.name)), metric.unit, ""


def _format_reward(run: FollowedRun, metric: Metric) -> GaugeText:
    rewards = run.metrics.get_values(metric.name)
    rewards = rewards[np.isfinite(rewards)]
    note = ""
    if len(rewards):
        note = (
            f"began at {format_number(float(rewards[:3].mean()))}, top "
            f"{format_number(float(rewards.max()))}"
        )
    return format_number(run.metrics.last_value(metric.name)), note, "bold green"


def _format_evaluation(run: FollowedRun) -> GaugeText:
    """Format the first set of the newest evaluation."""
    last = run.evaluations.last_value
    most = max(find_number_suffixes(PASS_AT_PREFIX, run.evaluations), key=int, default="")
    solved = f"pass@{most} {format_number(last(PASS_AT_PREFIX + most), 2)}" if most else ""
    note = _join_parts(f"step {format_number(last('step'))}", solved)
    return format_number(last(EVALUATION_REWARD)), note, "bold"


def _format_zero_variance(run: FollowedRun, metric: Metric) -> GaugeText:
    flat = run.metrics.last_value("advantage/zero_variance_groups")
    groups = run.metrics.last_value("batch/groups")
    value = "-" if flat is None or groups is None else f"{flat:.0f} of {groups:.0f}"
    why = explain_no_update(run.recent_rows[-1]) if run.recent_rows else ""
    return value, f"no update: {why}" if why else "groups", "bold red" if why else ""


def _format_drift(run: FollowedRun, metric: Metric) -> GaugeText:
    is_served = run.get_setting("algorithm.rollout_kl.measure") == "served"
    served = run.metrics.last_value("rollout_kl/served_k3") if is_served else None
    drift = run.metrics.last_value(metric.name) if served is None else served
    target = run.get_setting("algorithm.rollout_kl.target")
    limit = run.get_setting("algorithm.rollout_kl.max")
    coef = run.metrics.last_value("rollout_kl/coef")
    style = "bold"
    if drift is not None and limit is not None and drift > limit:
        style = "bold red"
    elif drift is not None and target is not None:
        style = "bold yellow" if drift > 2 * target else "bold green"
    note = _join_parts(
        metric.unit if target is None else f"target {format_number(target)}",
        "" if limit is None else f"limit {format_number(limit)}",
        "" if coef is None else f"coef {format_number(coef, 2)}",
    )
    return format_number(drift, 2), note, style


def _format_staleness(run: FollowedRun, metric: Metric) -> GaugeText:
    oldest = run.metrics.last_value("staleness/max")
    bound = run.staleness_bound
    note = "" if oldest is None else f"oldest {format_number(oldest)}"
    note += "" if bound is None else f" of {bound} allowed"
    over = oldest is not None and bound is not None and oldest > bound
    return (
        format_number(run.metrics.last_value(metric.name), 2),
        note,
        "bold red" if over else "bold",
    )


def _format_agreement(run: FollowedRun, metric: Metric) -> GaugeText:
    recorded = run.metrics.last_value("routing/recorded_fraction")
    lowest = run.metrics.last_value("routing/agreement_min")
    note = _join_parts(
        "" if recorded is None else f"recorded {format_percent(recorded)}",
        "" if lowest is None else f"min {100 * lowest:.0f} %",
    )
    return format_percent(run.metrics.last_value(metric.name)), note, "bold"


def _format_learner(run: FollowedRun, metric: Metric) -> GaugeText:
    step = run.metrics.last_value("timing/train_seconds")
    wait = run.metrics.last_value(metric.name)
    return (
        format_seconds(step),
        "" if wait is None else f"a step; waited {format_seconds(wait)}",
        "",
    )


def _format_weights(run: FollowedRun, metric: Metric) -> GaugeText:
    version = run.metrics.last_value("version")
    update = run.metrics.last_value(metric.name)
    pause = format_seconds(run.metrics.last_value("timing/engine_pause_seconds"))
    note = "" if update is None else f"in {format_seconds(update)}, pause {pause}"
    return "-" if version is None else f"v{version:.0f}", note, ""


def _format_slots(run: FollowedRun, metric: Metric) -> GaugeText:
    return _format_filled(run.metrics.last_value(metric.name), run.slot_count, "taken")


def _format_buffer(run: FollowedRun, metric: Metric) -> GaugeText:
    return _format_filled(
        run.metrics.last_value(metric.name), run.get_setting("schedule.prompts_per_step"), "ready"
    )


def _format_filled(number: float | None, total: int | None, label: str) -> GaugeText:
    value = "-" if number is None else f"{number:.0f}" + (f" of {total}" if total else "")
    return (
        value,
        f"{draw_bar(number / total, 10)} groups {label}" if number is not None and total else "",
        "",
    )


def _format_received(run: FollowedRun, metric: Metric) -> GaugeText:
    again = run.metrics.last_value("transport/duplicates")
    rejected = run.metrics.last_value("transport/rejected")
    note = "" if rejected is None else f"{again or 0:.0f} again, {rejected:.0f} rejected"
    return format_number(run.metrics.last_value(metric.name)), note, "yellow" if rejected else ""


def _format_generators(run: FollowedRun, metric: Metric) -> GaugeText:
    restarts = run.history.generators_lost + run.history.run_restarts
    count = (
        run.requested_generators or run.get_setting("generator.count") or len(run.generator_states)
    )
    lost = [name for name, state in run.generator_states.items() if state == "lost"]
    playing = len(run.generator_states) - len(lost)
    silent = [name for name, state in run.generator_states.items() if state == "silent"]
    note = "ended" if run.has_ended else "generating" if playing else "loading"
    if lost or (silent and not run.has_ended):
        note = _join_parts(
            *(
                f"{', '.join(names)} {state}"
                for names, state in ((lost, "lost"), (silent, "silent"))
                if names
            )
        )
    note = _join_parts(note, f"{restarts} restart{'' if restarts == 1 else 's'}")
    style = "bold red" if lost else "yellow" if restarts or silent else ""
    return f"{playing} of {count}", note, style


GAUGE_METRICS = [known for known in METRICS.values() if known.gauge]
"""Metrics that have a line in the overview, according to the catalogue."""
GAUGE_FORMATTERS: dict[str, Callable[[FollowedRun, Metric], GaugeText]] = {
    "reward": _format_reward,
    "zero variance": _format_zero_variance,
    "drift": _format_drift,
    "staleness": _format_staleness,
    "routing agreement": _format_agreement,
    "learner": _format_learner,
    "weights": _format_weights,
    "slots": _format_slots,
    "buffer": _format_buffer,
    "arrived": _format_received,
    "generators": _format_generators,
}
"""Formatters of gauges that show more than their metric's last value."""


def format_gauge(run: FollowedRun, metric: Metric) -> GaugeText:
    return GAUGE_FORMATTERS.get(metric.gauge, _format_value)(run, metric)


def describe_gauges(width: int) -> list[str]:
    """Describe each gauge in the catalogue's words."""
    return [
        line
        for known in GAUGE_METRICS
        for line in textwrap.wrap(
            known.description,
            width,
            initial_indent=f" {known.gauge:<{LABEL_WIDTH + 2}}",
            subsequent_indent=" " * (LABEL_WIDTH + 3),
        )
    ]


def render_overview(run: FollowedRun, width: int, window: int | None = None) -> list[Text]:
    """Render the gauges, one per line, with sparklines over the last `window` steps (or all) in the
    remaining cells."""
    lines = []
    free = width - LABEL_WIDTH - VALUE_WIDTH - NOTE_WIDTH - 6

    def add(label: str, shown: GaugeText, values: np.ndarray) -> None:
        value, note, style = shown
        line = Text(f" {label:<{LABEL_WIDTH}} ", style="dim")
        line.append(f"{value:>{VALUE_WIDTH}}", style=f"not dim {style}")
        line.append(f"  {note:<{NOTE_WIDTH}} ")
        line.truncate(width - max(free, 0), overflow="ellipsis", pad=True)
        if free >= 8:
            line.append(draw_sparkline(values, free), style="not dim cyan")
        lines.append(clip_line(line, width))

    for known in GAUGE_METRICS:
        add(known.gauge, format_gauge(run, known), run.metrics.get_values(known.name, window))
        if known.gauge == "reward" and run.evaluations.row_count:
            add("evaluated", _format_evaluation(run), run.evaluations.get_values(EVALUATION_REWARD))
    return lines


def render_event(run: FollowedRun, event: dict[str, Any]) -> Text:
    level = str(event.get("level", ""))
    at = event.get("time")
    clock = (
        time.strftime("%H:%M:%S", time.localtime(at))
        if isinstance(at, (int, float))
        else "--:--:--"
    )
    line = Text(f" {clock} ", style="dim")
    line.append(f"{event.get('role', '')!s} ", style="not dim")
    line.append(f"{event.get('event', '')!s}", style=f"not dim bold {LEVEL_COLORS.get(level, '')}")
    details = " ".join(run.history.describe_event(event).split())
    return line.append(f" {details}") if details else line


def render_events(
    run: FollowedRun, width: int, count: int, *, warnings_only: bool = False
) -> list[Text]:
    """Render the last events, one per line, the newest at the end.

    Args:
        warnings_only: Show only warnings and errors.
    """
    shown = [e for e in run.events if not warnings_only or e.get("level") in LEVEL_COLORS]
    if not shown:
        return [Text(" no warnings" if warnings_only else " no events yet", style="dim")]
    return [clip_line(render_event(run, event), width) for event in shown[-count:]]


def render_rule(title: str, width: int) -> Text:
    return Text(f"─ {title} ".ljust(width, "─"), style="dim")


def format_events_title(run: FollowedRun, warnings_only: bool = False) -> str:
    noise = _join_parts(f"{run.warnings} warnings", f"{run.errors} errors")
    return f"warnings and errors ({noise})" if warnings_only else f"events ({noise})"


def render_charts(
    run: FollowedRun, width: int, height: int, window: int | None = None
) -> list[Text]:
    """Render as many of the report's charts as fit, two beside each other if they
    are wide enough."""
    across = 2 if width >= 80 else 1
    down = max(1, min(height // 9, -(-len(CHARTS) // across)))
    each = width // across
    tall = height // down
    lines: list[Text] = []
    for first in range(0, down * across, across):
        cells = [
            _render_chart(run, chart, each, tall, window)
            for chart in CHARTS[first : first + across]
        ]
        for parts in zip(*cells, strict=True):
            line = Text()
            for part in parts:
                part.pad_right(max(0, each - part.cell_len))
                line.append_text(part)
            lines.append(line)
    return lines


def find_threshold(chart: Chart, run: FollowedRun) -> Any:
    """Return the value that the curve should stay at or below, if there is one."""
    return (
        run.staleness_bound
        if chart.shows_bound
        else run.get_setting(chart.target_setting)
        if chart.target_setting
        else None
    )


def _render_chart(
    run: FollowedRun, chart: Chart, width: int, height: int, window: int | None
) -> list[Text]:
    lines = [line for line in chart.lines if not line.points]
    title = Text(" " * 8 + ", ".join(filter(None, (chart.title.lower(), chart.unit))), style="bold")
    if len(lines) > 1:
        title.append(":")
        for line in lines:
            title.append(f" {line.label}", style=CURVE_COLORS[line.color])
    curves = [
        (run.metrics.get_values(line.metric, window), CURVE_COLORS[line.color])
        for line in reversed(lines)
    ]
    floor = None if chart.has_log_scale or chart.is_share else 0.0
    body = draw_plot(
        curves,
        width - 2,
        height - 2,
        log=chart.has_log_scale,
        floor=floor,
        threshold=find_threshold(chart, run),
    )
    return [clip_line(title, width - 1), *body, Text()]


def render_metrics(
    run: FollowedRun, width: int, window: int | None = None, limit: int = 10_000
) -> list[Text]:
    """Render every metric of the run, by prefix, with its label and unit if known; at
    most `limit` lines."""
    lines: list[Text] = []
    for group, found in groupby(sort_metrics(run.metrics), key=lambda known: known.group):
        lines.append(render_rule(group, width))
        lines += [_render_metric(run, known, width, window) for known in found]
    return lines[:limit] or [Text(" no step was finished yet", style="dim")]


def _render_metric(run: FollowedRun, metric: Metric, width: int, window: int | None) -> Text:
    line = Text(" ").append_text(clip_line(metric.label.removeprefix(f"{metric.group}/"), 24))
    line.pad_right(max(0, 26 - line.cell_len))
    line.append(f"{format_number(run.metrics.last_value(metric.name)):>10} ", style="bold")
    line.append_text(clip_line(metric.unit, 13))
    line.pad_right(max(0, 52 - line.cell_len))
    free = width - 53
    curve = draw_sparkline(run.metrics.get_values(metric.name, window), free) if free >= 8 else ""
    return clip_line(line.append(curve, "cyan"), width)


def to_plain_text(lines: Iterable[Text]) -> str:
    return "\n".join(line.plain.rstrip() for line in lines)
