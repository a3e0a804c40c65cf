"""What `r3async tail` shows of a run, as lines of text for a given width. Pure: from `FollowedRun` to `rich.text.Text`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from r3async.observe.events import event_details
from r3async.observe.follow import FollowedRun
from r3async.observe.metrics import METRICS
from r3async.observe.summary import NOT_TRAINED, format_number, format_percent, format_seconds
from r3async.scheduling.updates import why_no_update
from tools.tail_draw import bar, plot, spark

LABEL, VALUE, NOTE = 12, 8, 25
SILENT_SECONDS = 60.0
"""Nothing written for so long is told."""

COLORS = {"finished": "green", "stopped": "yellow", "failed": "red", NOT_TRAINED: "red", "training": "cyan"}
LEVELS = {"warning": "yellow", "error": "red", "critical": "red"}
NOT_DRAWN = ("step", "version", "time")


class Gauge(NamedTuple):
    """One line of the overview. `style` colours the value; `curve` is the metric of the sparkline, if it has one."""

    label: str
    curve: str
    value: str
    note: str = ""
    style: str = ""


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
    first.append(f" {phase} ", style=f"reverse {COLORS.get(phase, 'blue')}")
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
    room = max(10, width - len(steps) - len(when) - 8)
    second = Text(f" {steps}  ", style="bold")
    if planned:
        done = min(1.0, run.step / planned)
        filled = round(done * room)
        second.append("━" * filled, style="cyan").append("─" * (room - filled), style="dim")
    second.append(f"  {when}", style="dim")
    return [clip(first, width), clip(second, width)]


def gauges(run: FollowedRun) -> list[Gauge]:
    """The overview, in the order in which people look."""
    return [_reward(run), _contrast(run), _drift(run), _staleness(run), _routing(run), *_speed(run), _learner(run), _weights(run),
            *_queues(run), _transport(run), _generators(run)]  # fmt: skip


def _reward(run: FollowedRun) -> Gauge:
    rewards = run.metrics.values("reward/mean")
    rewards = rewards[np.isfinite(rewards)]
    note = ""
    if len(rewards):
        note = f"began at {format_number(float(rewards[:3].mean()))}, top {format_number(float(rewards.max()))}"
    return Gauge("reward", "reward/mean", format_number(run.metrics.last("reward/mean")), note, "bold green")


def _contrast(run: FollowedRun) -> Gauge:
    without, groups = run.metrics.last("advantage/zero_variance_groups"), run.metrics.last("batch/groups")
    value = "-" if without is None or groups is None else f"{groups - without:.0f} of {groups:.0f}"
    why = why_no_update(run.rows[-1]) if run.rows else ""
    note = f"no update: {why}" if why else "groups differ within"
    return Gauge("contrast", "advantage/zero_variance_share", value, note, "bold red" if why else "")


def _drift(run: FollowedRun) -> Gauge:
    last = run.metrics.last
    drift, target = last("rollout_kl/k3"), run.setting("algorithm.rollout_kl.target")
    limit, coef = run.setting("algorithm.rollout_kl.max"), last("rollout_kl/coef")
    style = "bold"
    if drift is not None and limit is not None and drift > limit:
        style = "bold red"
    elif drift is not None and target is not None:
        style = "bold yellow" if drift > 2 * target else "bold green"
    note = _join(
        "nats" if target is None else f"target {format_number(target)}",
        "" if limit is None else f"limit {format_number(limit)}",
        "" if coef is None else f"coef {format_number(coef, 2)}",
    )
    return Gauge("drift", "rollout_kl/k3", format_number(drift, 2), note, style)


def _staleness(run: FollowedRun) -> Gauge:
    oldest, bound = run.metrics.last("staleness/max"), run.age_bound
    note = "" if oldest is None else f"oldest {format_number(oldest)}"
    note += "" if bound is None else f" of {bound} allowed"
    over = oldest is not None and bound is not None and oldest > bound
    value = format_number(run.metrics.last("staleness/mean"), 2)
    return Gauge("age", "staleness/mean", value, note, "bold red" if over else "bold")


def _routing(run: FollowedRun) -> Gauge:
    last = run.metrics.last
    recorded, lowest = last("routing/recorded_fraction"), last("routing/agreement_min")
    note = _join(
        "" if recorded is None else f"recorded {format_percent(recorded)}",
        "" if lowest is None else f"min {100 * lowest:.0f} %",
    )
    return Gauge("routes agree", "routing/agreement", format_percent(last("routing/agreement")), note, "bold")


def _speed(run: FollowedRun) -> list[Gauge]:
    return [
        Gauge(name, metric, format_number(run.metrics.last(metric)), "tokens/s")
        for name in ("generated", "trained")
        for metric in [f"throughput/{name}_tokens_per_second"]
    ]


def _learner(run: FollowedRun) -> Gauge:
    step, wait = run.metrics.last("learner/step_seconds"), run.metrics.last("learner/wait_seconds")
    note = "" if wait is None else f"a step; waited {format_seconds(wait)}"
    return Gauge("learner", "learner/wait_seconds", format_seconds(step), note)


def _weights(run: FollowedRun) -> Gauge:
    last = run.metrics.last
    version, update, pause = last("version"), last("weights/update_seconds"), last("weights/pause_seconds")
    note = "" if update is None else f"in {format_seconds(update)}, pause {format_seconds(pause)}"
    return Gauge("weights", "weights/update_seconds", "-" if version is None else f"v{version:.0f}", note)


def _queues(run: FollowedRun) -> list[Gauge]:
    taken, slots = run.metrics.last("slots/taken"), run.slots
    ready, needed = run.metrics.last("buffer/ready_groups"), run.setting("schedule.groups_per_step")
    found = []
    for label, metric, number, of, what in (
        ("slots", "slots/taken", taken, slots, "taken"),
        ("buffer", "buffer/ready_groups", ready, needed, "ready"),
    ):
        value = "-" if number is None else f"{number:.0f}" + (f" of {of}" if of else "")
        note = f"{bar(number / of, 10)} groups {what}" if number is not None and of else ""
        found.append(Gauge(label, metric, value, note))
    return found


def _transport(run: FollowedRun) -> Gauge:
    again, rejected = run.metrics.last("transport/duplicates"), run.metrics.last("transport/rejected")
    note = "" if rejected is None else f"{again or 0:.0f} again, {rejected:.0f} rejected"
    value = format_number(run.metrics.last("transport/received"))
    return Gauge("arrived", "", value, note, "yellow" if rejected else "")


def _generators(run: FollowedRun) -> Gauge:
    restarts = run.history.generators_lost + run.history.run_restarts
    count = run.setting("generator.count") or len(run.generators)
    dead = [name for name, state in run.generators.items() if state == "dead"]
    playing = len(run.generators) - len(dead)
    silent = [name for name, state in run.generators.items() if state == "silent"]
    note = "ended" if run.ended else "playing" if playing else "loading"
    if dead or (silent and not run.ended):
        note = _join(*(f"{', '.join(names)} {state}" for names, state in ((dead, "dead"), (silent, "silent")) if names))
    note = _join(note, f"{restarts} restart{'' if restarts == 1 else 's'}")
    style = "bold red" if dead else "yellow" if restarts or silent else ""
    return Gauge("generators", "", f"{playing} of {count}", note, style)


def overview(run: FollowedRun, width: int, window: int | None = None) -> list[Text]:
    """The gauges, one a line, with sparklines over the last `window` steps (or all) in what room is left."""
    lines = []
    room = width - LABEL - VALUE - NOTE - 6
    for gauge in gauges(run):
        line = Text(f" {gauge.label:<{LABEL}} ", style="dim")
        line.append(f"{gauge.value:>{VALUE}}", style=f"not dim {gauge.style}")
        line.append(f"  {gauge.note:<{NOTE}} ")
        line.truncate(width - max(room, 0), overflow="ellipsis", pad=True)
        if room >= 8:
            line.append(spark(run.metrics.values(gauge.curve, window), room), style="not dim cyan")
        lines.append(clip(line, width))
    return lines


def event_line(event: dict[str, Any]) -> Text:
    level = str(event.get("level", ""))
    at = event.get("time")
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, (int, float)) else "--:--:--"
    line = Text(f" {clock} ", style="dim")
    line.append(f"{event.get('role', '')!s} ", style="not dim")
    line.append(f"{event.get('event', '')!s}", style=f"not dim bold {LEVELS.get(level, '')}")
    details = " ".join(event_details(event).split())
    return line.append(f" {details}") if details else line


def event_lines(run: FollowedRun, width: int, count: int, *, loud: bool = False) -> list[Text]:
    """The last events, a line each, the newest at the end. `loud`: only warnings and errors."""
    shown = [e for e in run.events if not loud or e.get("level") in LEVELS]
    if not shown:
        return [Text(" no warnings" if loud else " no events yet", style="dim")]
    return [clip(event_line(event), width) for event in shown[-count:]]


def rule(title: str, width: int) -> Text:
    return Text(f"─ {title} ".ljust(width, "─"), style="dim")


def events_title(run: FollowedRun, loud: bool = False) -> str:
    noise = _join(f"{run.warnings} warnings", f"{run.errors} errors")
    return f"warnings and errors ({noise})" if loud else f"events ({noise})"


class Drawing(NamedTuple):
    title: str
    lines: Sequence[tuple[str, str]]
    """Metrics and their colours."""
    log: bool = False
    floor: float | None = None
    line: Callable[[FollowedRun], Any] = lambda run: None


DRAWINGS = (
    Drawing("reward", [("reward/mean", "green")]),
    Drawing(
        "drift, nats",
        [("rollout_kl/k3", "cyan")],
        log=True,
        line=lambda run: run.setting("algorithm.rollout_kl.target"),
    ),
    Drawing(
        "tokens/s: [green]generated[/] [cyan]trained[/]",
        [("throughput/generated_tokens_per_second", "green"), ("throughput/trained_tokens_per_second", "cyan")],
        floor=0.0,
    ),
    Drawing(
        "age, versions: mean, [yellow]oldest[/], [red]allowed[/]",
        [("staleness/max", "yellow"), ("staleness/mean", "cyan")],
        floor=0.0,
        line=lambda run: run.age_bound,
    ),
    Drawing("routes that agree", [("routing/agreement", "cyan")]),
    Drawing(
        "learner, s: [cyan]step[/] [yellow]waiting[/]",
        [("learner/wait_seconds", "yellow"), ("learner/step_seconds", "cyan")],
        floor=0.0,
    ),
    Drawing("gradient norm", [("grad_norm", "cyan")]),
    Drawing("entropy, nats", [("entropy/mean", "cyan")]),
)


def charts(run: FollowedRun, width: int, height: int, window: int | None = None) -> list[Text]:
    """As many charts as there is room for, two beside each other where they are wide enough."""
    across = 2 if width >= 80 else 1
    down = max(1, min(height // 9, -(-len(DRAWINGS) // across)))
    each, tall = width // across, height // down
    lines: list[Text] = []
    for first in range(0, down * across, across):
        cells = [_chart(run, drawing, each, tall, window) for drawing in DRAWINGS[first : first + across]]
        for parts in zip(*cells, strict=True):
            line = Text()
            for part in parts:
                part.pad_right(max(0, each - part.cell_len))
                line.append_text(part)
            lines.append(line)
    return lines


def _chart(run: FollowedRun, drawing: Drawing, width: int, height: int, window: int | None) -> list[Text]:
    title = clip(Text(" " * 8).append_text(Text.from_markup(drawing.title, style="bold")), width - 1)
    target = drawing.line(run)
    curves = [(run.metrics.values(name, window), color) for name, color in drawing.lines]
    body = plot(curves, width - 2, height - 2, log=drawing.log, floor=drawing.floor, line=target)
    return [title, *body, Text()]


def metric_lines(run: FollowedRun, width: int, window: int | None = None, limit: int = 10_000) -> list[Text]:
    """Every metric the run has, by prefix, with the labels and units that are known; `limit` lines of that."""
    known = {name: index for index, name in enumerate(METRICS)}
    groups: dict[str, list[str]] = {}
    for name in sorted(run.metrics, key=lambda name: (known.get(name, len(known)), name)):
        if name not in NOT_DRAWN:
            groups.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
    if not groups:
        return [Text(" no step was finished yet", style="dim")]
    lines: list[Text] = []
    for prefix, names in groups.items():
        lines.append(rule(prefix or "step", width))
        lines += [_metric_line(run, name, width, window) for name in names[: max(0, limit - len(lines))]]
        if len(lines) >= limit:
            break
    return lines[:limit]


def _metric_line(run: FollowedRun, name: str, width: int, window: int | None) -> Text:
    metric = METRICS.get(name)
    label = metric.label if metric else name.partition("/")[2] or name
    line = Text(" ").append_text(clip(label, 24))
    line.pad_right(max(0, 26 - line.cell_len))
    line.append(f"{format_number(run.metrics.last(name)):>10} ", style="bold")
    line.append_text(clip(metric.unit if metric else "", 13))
    line.pad_right(max(0, 52 - line.cell_len))
    room = width - 53
    return clip(line.append(spark(run.metrics.values(name, window), room), "cyan") if room >= 8 else line, width)


def plain(lines: Iterable[Text]) -> str:
    return "\n".join(line.plain.rstrip() for line in lines)
