"""The summary of a run in a dozen numbers, for the terminal and the head of the report."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from r3async.data.metrics import (
    METRICS,
    MetricStats,
    compute_end_windows,
    find_new_name,
    finite_or_none,
    format_stat_label,
)
from r3async.record.events import format_event_details
from r3async.record.reading import EVALUATION_FILE, parse_schedule, read_run_config, read_run_files
from r3async.schedule.run_ahead import compute_staleness_bound
from r3async.schedule.update_monitor import ALL_EPISODES_FAILED, ZERO_VARIANCE, explain_no_update
from r3async.views.charts import EVALUATION_REWARD
from r3async.views.evaluation_charts import parse_evaluations
from r3async.views.number_formats import format_number, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.table import Table


DRIFT_TABLE_PARTS = 10
"""Number of parts of a run in the table of drift."""
UNFINISHED = "unfinished"
"""Status of a run that is still training, or ended without an event."""
NOT_TRAINED = "not trained"
"""Status of a run that finished its steps, none of which updated the weights."""
STATUS_KINDS = {"finished": "good", "stopped": "warn", "failed": "bad", NOT_TRAINED: "bad"}
KIND_COLORS = {"good": "green", "warn": "yellow", "bad": "red"}
"""Terminal color of each kind."""


MAX_ERRORS_SHOWN = 5
"""Maximum number of error kinds shown on a terminal."""
MAX_FAILURE_KINDS = 50
"""Maximum number of error kinds that are counted separately."""


@dataclass
class FailureKind:
    """A kind of error that made attempts at episodes fail.

    Errors are of one kind if they were raised at the same place in user code, or have the same text
    except for numbers.

    Attributes:
        text: Task, group and error of the first failure.
    """

    text: str
    count: int = 0
    lost_episodes: int = 0
    """Number of episodes lost to this error after their last attempt."""
    tasks: set[Any] = field(default_factory=set)

    def to_text(self) -> str:
        times = "once" if self.count == 1 else f"{self.count} times"
        lost = (
            f"{self.lost_episodes} episode{'' if self.lost_episodes == 1 else 's'}"
            if self.lost_episodes
            else "no episode"
        )
        of = f" of {len(self.tasks)} tasks" if len(self.tasks) > 1 else ""
        return f"{self.text}; {times}, {lost}{of} lost"


def get_failure_key(event: dict[str, Any]) -> str:
    """Return a key that is equal for all events of one `FailureKind`; "" for any other event."""
    if event.get("event") not in ("episode_failed", "episode_abandoned"):
        return ""
    error = str(event.get("error", ""))
    place = str(event.get("place", ""))
    words = f"{place} {error.partition(':')[0]}" if place else re.sub(r"\d+", "0", error)
    return f"{event.get('by', '')}: {words}"


@dataclass
class RunHistory:
    """The counts of a run's incidents, built with `add_event` from its events in the order in which
    they were written.

    A life of a run lasts from one start of the conductor to the next.
    """

    starts: int = 0
    generators_lost: int = 0
    """Number of generator processes that ended unexpectedly; each is restarted."""
    ranks_restarted: int = 0
    """Number of restarts of the learner's ranks after one of them was lost."""
    run_restarts: int = 0
    """Number of lives that followed one without a regular end, because a process was lost that
    the run depends on."""
    failed_episodes: int = 0
    """Number of episodes that failed in their last attempt. Their groups were
    trained without them."""
    refused_trajectories: int = 0
    """Number of trajectories that the learner refused and will never train."""
    failures: dict[str, FailureKind] = field(default_factory=dict)
    """Failures by kind, in the order in which the kinds first occurred."""
    _ended: bool = False

    def add_event(self, event: dict[str, Any]) -> bool:
        """Count an event. Returns False if it is one more failure of a known kind."""
        match event.get("event"):
            case "conductor_started":
                self.run_restarts += bool(self.starts) and not self._ended
                self.starts += 1
                self._ended = False
            case "run_finished":
                self._ended = True
            case "generator_lost":
                self.generators_lost += 1
            case "ranks_restarted":
                self.ranks_restarted += 1
            case "episode_abandoned":
                self.failed_episodes += 1
            case "trajectory_refused":
                self.refused_trajectories += 1
        kind = get_failure_key(event)
        return not kind or self._count_failure(kind, event)

    def _count_failure(self, kind: str, event: dict[str, Any]) -> bool:
        new = kind not in self.failures
        if new and len(self.failures) >= MAX_FAILURE_KINDS:
            kind = "others"
            new = "others" not in self.failures
        if new:
            self.failures[kind] = FailureKind(
                "other errors" if kind == "others" else _describe_failure(event)
            )
        failure = self.failures[kind]
        failure.count += 1
        failure.lost_episodes += event.get("event") == "episode_abandoned"
        failure.tasks.add(str(event.get("task_seed", "")))
        return new

    def describe_event(self, event: dict[str, Any]) -> str:
        """Return the details of an event as text; for a failure, also how often it occurred."""
        failure = self.failures.get(get_failure_key(event))
        return format_event_details(event) if failure is None else failure.to_text()


def _describe_failure(event: dict[str, Any]) -> str:
    known = (("task seed", "task_seed"), ("group", "group"), ("", "by"))
    who = ", ".join(f"{label} {event[key]}".strip() for label, key in known if key in event)
    place = f" ({event['place']})" if "place" in event else ""
    return f"{who or event.get('episode', 'an episode')}: {event.get('error', '')}{place}"


def sum_restarting_counter(values: Sequence[float]) -> int:
    """Return the total of a counter that restarts at 0 with its process.

    It is the sum of the last value before each decrease, and of the last value.
    """
    falls = zip(values, [*values[1:], -1.0], strict=True) if values else ()
    return int(sum(value for value, after in falls if after < value))


class RunSummary(msgspec.Struct, kw_only=True):
    """The summary of a run. Numbers that the run does not have (yet) are None.

    `summary["reward/mean"]` returns the statistics of a metric of the catalogue.
    """

    name: str
    status: str
    """Status: `finished`, `not trained`, `stopped` (on request), `failed` or `unfinished`."""
    reason: str = ""
    """Reason of a failure, or why nothing was trained."""
    steps: int = 0
    updates: int | None = None
    """Number of optimizer updates of these steps."""
    steps_with_zero_variance: int = 0
    steps_failed: int = 0
    """Number of steps in which every episode failed."""
    steps_skipped: int = 0
    """Number of steps without an update for another reason."""
    planned_steps: int | None = None
    started_at: float | None = None
    duration_seconds: float | None = None
    stats: dict[str, MetricStats] = {}
    """Statistics of each metric that a comparison shows."""
    last_evaluation_reward: float | None = None
    """Mean reward of the evaluation after the latest step that has one."""
    staleness_bound: int | None = None
    """Maximum age of trained tokens, in versions, that the schedule guarantees."""
    history: RunHistory = msgspec.field(default_factory=RunHistory)
    """Incidents in all lives of the run."""
    rejected_messages: int = 0
    """Number of messages that did not validate, in all lives of the run."""
    duplicate_trajectories: int = 0
    """Number of duplicate trajectories in all lives of the run."""
    warnings: int = 0
    errors: int = 0

    def __getitem__(self, metric: str) -> MetricStats:
        now = find_new_name(metric)
        if now:
            raise KeyError(f"no run has {metric!r}: it is {now!r} now")
        return self.stats.get(metric, MetricStats())

    @property
    def status_kind(self) -> str:
        return STATUS_KINDS.get(self.status, "")

    @property
    def is_stale(self) -> bool:
        """True if a token older than the bound was trained, which is a bug."""
        oldest = self["staleness/max"].max
        return (
            oldest is not None
            and self.staleness_bound is not None
            and oldest > self.staleness_bound
        )

    @property
    def progress_text(self) -> str:
        of = f" of {self.planned_steps}" if self.planned_steps else ""
        return f"{self.steps}{of} steps in {format_seconds(self.duration_seconds)}"


class Headline(NamedTuple):
    """One of the most important results of a run, as text. `kind` is `good`,
    `warn`, `bad` or empty."""

    label: str
    value: str
    note: str
    kind: str = ""


def make_headlines(summary: RunSummary) -> list[Headline]:
    """Build the headlines of a run that has steps, in the order in which people look at them."""
    number = format_number
    percent = format_percent
    seconds = format_seconds
    reward = summary["reward/mean"]
    drift = summary["rollout_kl/k3"]
    oldest = summary["staleness/max"].max
    age = summary["staleness/mean"].mean
    bound = summary.staleness_bound
    history = summary.history
    generated, trained = (
        summary[f"throughput/{name}_tokens_per_second"].mean for name in ("generated", "trained")
    )
    rose = (
        reward.first_mean is not None
        and reward.last_mean is not None
        and reward.last_mean > reward.first_mean
    )
    lost = history.failed_episodes + history.refused_trajectories + summary.rejected_messages
    restarts = history.generators_lost + history.ranks_restarted + history.run_restarts
    noise = summary.warnings + summary.errors
    log = Headline(
        "log",
        str(noise),
        f"{summary.warnings} warnings, {summary.errors} errors",
        "bad" if summary.errors else "warn" if noise else "",
    )
    recorded = summary["routing/recorded_fraction"].mean
    agreement = []
    agreed = summary["routing/agreement"].mean
    if agreed is not None:  # a model or a run may have no routes
        agreement = [
            Headline("routing agreement", percent(agreed), f"routes recorded: {percent(recorded)}")
        ]
    answers = summary["loss/answers"]
    held_out = summary["loss/answers_held_out"]
    if answers.first_mean is not None and reward.first_mean is None:  # nothing was generated
        fell = answers.last_mean is not None and answers.last_mean < answers.first_mean
        return [
            Headline(
                "answers",
                f"{number(answers.first_mean)} → {number(answers.last_mean)} nats",
                (
                    f"{' → '.join(_label_end_windows(answers))}; held out "
                    f"{number(held_out.last_value)}"
                ),
                "good" if fell else "",
            ),
            Headline("trained", f"{number(trained)} tokens/s", "of answers"),
            log,
        ]
    return [
        Headline(
            "reward",
            f"{number(reward.first_mean)} → {number(reward.last_mean)}",
            f"{' → '.join(_label_end_windows(reward))}; best step {number(reward.max)}",
            "good" if rose else "",
        ),
        Headline(
            "drift",
            f"{number(drift.last_mean, 2)} nats",
            f"k3, {_label_end_windows(drift)[1]}; worst step {number(drift.max, 2)}",
        ),
        Headline(
            "oldest token",
            f"{number(oldest)} {'version' if oldest == 1 else 'versions'}",
            "no bound recorded" if bound is None else f"{bound} allowed; mean {number(age, 2)}",
            "bad" if summary.is_stale else "",
        ),
        *agreement,
        Headline(
            "generated", f"{number(generated)} tokens/s", f"{number(trained)} tokens/s trained"
        ),
        Headline(
            "weight update",
            seconds(summary["timing/weight_update_seconds"].mean),
            f"engines paused {seconds(summary['timing/engine_pause_seconds'].mean)}",
        ),
        Headline(
            "restarts",
            str(restarts),
            f"{history.generators_lost} of generators, "
            + (
                f"{history.ranks_restarted} of the learner's ranks, "
                if history.ranks_restarted
                else ""
            )
            + f"{history.run_restarts} of the run",
            "warn" if restarts else "",
        ),
        Headline(
            "lost",
            str(lost),
            f"{history.failed_episodes} episodes failed, {history.refused_trajectories} "
            f"trajectories refused, {summary.rejected_messages} messages rejected",
            "warn" if lost else "",
        ),
        log,
    ]


def _label_end_windows(stats: MetricStats) -> tuple[str, str]:
    """Describe the steps over which `first_mean` and `last_mean` are taken."""
    first, last = compute_end_windows(stats.count)
    return f"first {first}", f"last {last} step{'s' if last > 1 else ''}"


def get_status_change(event: dict[str, Any]) -> tuple[str, str] | None:
    """Return the status and reason that an event gives its run; None if it changes neither.

    A run that starts again after an end is unfinished.
    """
    if event.get("event") in ("conductor_started", "learner_started"):
        return UNFINISHED, ""
    if event.get("event") == "run_failed":
        return "failed", str(event.get("error", ""))
    if event.get("event") != "run_finished":
        return None
    untrained = event.get("updates") == 0 and event.get("steps")
    reason = (
        f"no step made an update ({event.get('without_update') or 'before a resume'})"
        if untrained
        else ""
    )
    return "stopped" if event.get("stopped") else NOT_TRAINED if untrained else "finished", reason


def summarize_run(run_dir: Path) -> RunSummary:
    """Read a run's files and summarize them. Missing and torn data is left out; an unfinished
    run never raises."""
    run_dir = Path(run_dir)
    (rows, events, evaluations), skipped = read_run_files(
        run_dir, "metrics.jsonl", "events.jsonl", EVALUATION_FILE
    )
    return summarize_records(
        run_dir, rows, [*events, *skipped], read_run_config(run_dir), parse_evaluations(evaluations)
    )


def _collect_values(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [value for row in rows if (value := finite_or_none(row.get(name))) is not None]


def _sum_seconds(times: Sequence[float], events: Sequence[dict[str, Any]]) -> float:
    """Sum the seconds between `times` of records, without those from the end of a start to the
    next start."""
    starts = {
        event.get("time")
        for event in events
        if event.get("event") == "lineage_began" and event.get("role") == "driver"
    }
    return sum(b - a for a, b in pairwise(sorted(times)) if b not in starts)


def summarize_records(
    run_dir: Path,
    rows: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    config: dict[str, Any],
    evaluations: Sequence[dict[str, Any]],
) -> RunSummary:
    """Summarize records that were read from a run's files. `evaluations` are from
    `parse_evaluations`."""
    status, reason = next(
        (end for event in reversed(events) if (end := get_status_change(event))), (UNFINISHED, "")
    )
    times = _collect_values(events, "time") + _collect_values(rows, "time")
    history = RunHistory()
    levels = [event.get("level") for event in events if history.add_event(event)]
    schedule = parse_schedule(config)
    updates = _collect_values(rows, "optimizer/updates")
    kept_from = [explain_no_update(row) for row in rows]
    return RunSummary(
        name=os.path.basename(os.path.realpath(run_dir)),
        status=status,
        reason=reason,
        steps=len(rows),
        updates=int(sum(updates)) if updates else None,
        steps_with_zero_variance=kept_from.count(ZERO_VARIANCE),
        steps_failed=kept_from.count(ALL_EPISODES_FAILED),
        steps_skipped=sum(why not in ("", ZERO_VARIANCE, ALL_EPISODES_FAILED) for why in kept_from),
        planned_steps=steps if isinstance(steps := config.get("steps"), int) else None,
        started_at=min(times) if times else None,
        duration_seconds=_sum_seconds(times, events) if times else None,
        stats={
            metric.name: MetricStats.from_rows(rows, metric.name)
            for metric in METRICS.values()
            if metric.comparison_stats
        },
        last_evaluation_reward=evaluations[-1][EVALUATION_REWARD] if evaluations else None,
        staleness_bound=compute_staleness_bound(schedule) if schedule else None,
        history=history,
        rejected_messages=sum_restarting_counter(_collect_values(rows, "transport/rejected")),
        duplicate_trajectories=sum_restarting_counter(
            _collect_values(rows, "transport/duplicates")
        ),
        warnings=levels.count("warning"),
        errors=levels.count("error") + levels.count("critical"),
    )


# -- parts of a run --------------------------------------------------------------------------------


def make_drift_table(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Build the table of drift: `titles` of columns, and `lines` of steps and cells.

    The lines are ten parts of the run, then the whole run. Metrics that were never measured are
    left out. Returns None if no drift was measured.
    """
    asked = [(known, of) for known in METRICS.values() for of in known.part_stats.split()]
    columns = [
        (known, of)
        for known, of in asked
        if MetricStats.from_rows(rows, known.name).mean is not None
    ]
    if not any(known.unit == "nats" for known, _ in columns):
        return None
    edges = [
        len(rows) * part // min(DRIFT_TABLE_PARTS, len(rows))
        for part in range(min(DRIFT_TABLE_PARTS, len(rows)) + 1)
    ]
    parts = [(_format_step_range(rows[a:b]), rows[a:b]) for a, b in pairwise(edges)]
    parts += [("all", rows)] if len(parts) > 1 else []
    lines = [
        (
            steps,
            [
                format_number(getattr(MetricStats.from_rows(part, known.name), of))
                for known, of in columns
            ],
        )
        for steps, part in parts
    ]
    return {"titles": [format_stat_label(known, of) for known, of in columns], "lines": lines}


def _format_step_range(part: Sequence[dict[str, Any]]) -> str:
    first = part[0].get("step", "?")
    last = part[-1].get("step", "?")
    return f"{first}" if first == last else f"{first} – {last}"


def format_summary(summary: RunSummary) -> Table:
    """Format a summary as a table for `rich.print`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=summary.name,
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        padding=(0, 2),
    )
    table.add_column(style="dim")
    table.add_column()
    lines = [
        Headline("status", summary.status, summary.reason, summary.status_kind),
        Headline("progress", summary.progress_text, ""),
    ]
    idle = summary.steps_with_zero_variance + summary.steps_failed + summary.steps_skipped
    if summary.updates is not None and (idle or not summary.updates):
        why = (
            f"steps without one: {summary.steps_with_zero_variance} had zero variance, "
            f"{summary.steps_skipped} were skipped"
        ) + (f", of {summary.steps_failed} every episode failed" if summary.steps_failed else "")
        lines.append(
            Headline("updates", str(summary.updates), why, "warn" if summary.updates else "bad")
        )
    lines += make_headlines(summary) if summary.steps else []
    failures = sorted(summary.history.failures.values(), key=lambda failure: -failure.count)
    lines += [
        Headline("error", failure.to_text(), "", "warn") for failure in failures[:MAX_ERRORS_SHOWN]
    ]
    lines += (
        [Headline("", f"and {more} other errors", "")]
        if (more := len(failures) - MAX_ERRORS_SHOWN) > 0
        else []
    )
    for line in lines:
        text = f"{line.value}; {line.note}" if line.note else line.value
        table.add_row(line.label, Text(text, style=KIND_COLORS.get(line.kind, "")))
    return table
