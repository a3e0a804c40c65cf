"""A run in a dozen numbers, for the terminal and the head of the report."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from r3async.config import ScheduleConfig
from r3async.observe.events import read_events
from r3async.observe.history import counted, history_of
from r3async.observe.metrics import read_metrics
from r3async.observe.report_evaluation import REWARD, read_evaluations
from r3async.scheduling.admission import age_bound
from r3async.scheduling.updates import NO_CONTRAST, why_no_update

if TYPE_CHECKING:
    from rich.table import Table

FIRST_STEPS, LAST_STEPS = 3, 10
NOT_TRAINED = "not trained"
"""Status of a run that made its steps, and none of them an update of the weights."""


class RunSummary(msgspec.Struct, kw_only=True):
    """None where a run has no such number (yet). Means are over steps; "last" is the mean of the last ten."""

    name: str
    status: str
    """`finished`, `not trained`, `stopped` (on request), `failed`, or `unfinished` (still running, or ended without a word)."""
    reason: str = ""
    """Of a failure, or why nothing was trained."""
    steps: int = 0
    updates: int | None = None
    """Optimizer updates of these steps."""
    steps_without_contrast: int = 0
    steps_skipped: int = 0
    """Without an update for another reason."""
    planned_steps: int | None = None
    started_at: float | None = None
    duration_seconds: float | None = None
    reward_first: float | None = None
    """Mean reward of the first three steps."""
    reward_last: float | None = None
    """Mean reward of the last ten steps."""
    reward_best: float | None = None
    """Highest mean reward of a step."""
    evaluation_last: float | None = None
    """Mean reward of the evaluation after the latest step that has one."""
    drift: float | None = None
    """KL(rollout ‖ learner), estimator k3, nats per token: mean of the last ten steps."""
    drift_max: float | None = None
    """The same, of the worst step."""
    staleness_mean: float | None = None
    staleness_max: float | None = None
    staleness_bound: int | None = None
    """What the schedule promises, and `staleness_max` may not exceed."""
    agreement: float | None = None
    recorded_fraction: float | None = None
    generated_tokens_per_second: float | None = None
    trained_tokens_per_second: float | None = None
    update_seconds: float | None = None
    pause_seconds: float | None = None
    restarts: int = 0
    """Generators that were lost and started again, in all lives of the run; so the next three."""
    run_restarts: int = 0
    """Of the whole run, without a word from anybody."""
    failed_episodes: int = 0
    refused: int = 0
    """Trajectories that the learner will never train."""
    rejected: int = 0
    """Messages that did not validate."""
    duplicates: int = 0
    warnings: int = 0
    errors: int = 0

    @property
    def stale(self) -> bool:
        """Whether a token older than the bound was trained: a bug."""
        return (
            self.staleness_max is not None
            and self.staleness_bound is not None
            and self.staleness_max > self.staleness_bound
        )


def _values(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if isinstance(row.get(name), (int, float))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration as plain data, {} if there is none: runs of other releases can be read too."""
    try:
        return tomllib.loads((Path(run_dir) / "config.toml").read_text())
    except (OSError, ValueError):
        return {}


def ended_as(event: dict[str, Any]) -> tuple[str, str] | None:
    """Status and reason that an event gives its run; None if the event does not end one."""
    if event.get("event") == "run_failed":
        return "failed", str(event.get("error", ""))
    if event.get("event") != "run_finished":
        return None
    untrained = event.get("updates") == 0 and event.get("steps")
    reason = f"no step made an update ({event.get('without_update') or 'before a resume'})" if untrained else ""
    return "stopped" if event.get("stopped") else NOT_TRAINED if untrained else "finished", reason


def _status(events: Sequence[dict[str, Any]]) -> tuple[str, str]:
    return next((end for event in reversed(events) if (end := ended_as(event))), ("unfinished", ""))


def summarize(run_dir: Path) -> RunSummary:
    """Read the run's files. Whatever is missing or torn is left out; this never raises for an unfinished run."""
    run_dir = Path(run_dir)
    rows, events = read_metrics(run_dir / "metrics.jsonl"), read_events(run_dir / "events.jsonl")
    return summarize_records(run_dir, rows, events, read_run_config(run_dir))


def read_schedule(config: dict[str, Any]) -> ScheduleConfig | None:
    """Of a run's configuration as plain data, also one of another release; None if it has none."""
    found = config.get("schedule")
    if not isinstance(found, dict) or "max_staleness" not in found:
        return None
    known = {field.name for field in msgspec.structs.fields(ScheduleConfig)}
    try:
        return msgspec.convert({name: value for name, value in found.items() if name in known}, ScheduleConfig)
    except msgspec.ValidationError:
        return None


def summarize_records(
    run_dir: Path, rows: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], config: dict[str, Any]
) -> RunSummary:
    status, reason = _status(events)
    times = _values(events, "time") + _values(rows, "time")
    reward, drift = _values(rows, "reward/mean"), _values(rows, "rollout_kl/k3")
    ages = _values(rows, "staleness/max")
    levels = [event.get("level") for event in events]
    evaluations, schedule = read_evaluations(run_dir), read_schedule(config)
    updates = _values(rows, "optimizer/updates")
    kept_from = [why_no_update(row) for row in rows]

    history = history_of(events)
    return RunSummary(
        name=run_dir.resolve().name,
        status=status,
        reason=reason,
        steps=len(rows),
        updates=int(sum(updates)) if updates else None,
        steps_without_contrast=kept_from.count(NO_CONTRAST),
        steps_skipped=sum(why not in ("", NO_CONTRAST) for why in kept_from),
        planned_steps=config.get("steps"),
        started_at=min(times) if times else None,
        duration_seconds=max(times) - min(times) if times else None,
        reward_first=_mean(reward[:FIRST_STEPS]),
        reward_last=_mean(reward[-LAST_STEPS:]),
        reward_best=max(reward, default=None),
        evaluation_last=evaluations[-1][REWARD] if evaluations else None,
        drift=_mean(drift[-LAST_STEPS:]),
        drift_max=max(drift, default=None),
        staleness_mean=_mean(_values(rows, "staleness/mean")),
        staleness_max=max(ages, default=None),
        staleness_bound=age_bound(schedule) if schedule else None,
        agreement=_mean(_values(rows, "routing/agreement")),
        recorded_fraction=_mean(_values(rows, "routing/recorded_fraction")),
        generated_tokens_per_second=_mean(_values(rows, "throughput/generated_tokens_per_second")),
        trained_tokens_per_second=_mean(_values(rows, "throughput/trained_tokens_per_second")),
        update_seconds=_mean(_values(rows, "weights/update_seconds")),
        pause_seconds=_mean(_values(rows, "weights/pause_seconds")),
        restarts=history.generators_lost,
        run_restarts=history.run_restarts,
        failed_episodes=history.failed_episodes,
        refused=history.refused,
        rejected=counted(_values(rows, "transport/rejected")),
        duplicates=counted(_values(rows, "transport/duplicates")),
        warnings=levels.count("warning"),
        errors=levels.count("error") + levels.count("critical"),
    )


def format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, plain where that is readable: 0.941, 1,234, 3.2e-05."""
    if value is None:
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.2g}"


def format_percent(value: float | None) -> str:
    return "-" if value is None else "100 %" if value >= 1 else f"{min(100 * value, 99.9):.1f} %"


def format_summary(summary: RunSummary) -> Table:
    """For `rich.print`."""
    from rich.table import Table
    from rich.text import Text

    color = {"finished": "green", "stopped": "yellow", "failed": "red", NOT_TRAINED: "red"}.get(summary.status, "cyan")
    table = Table(
        title=summary.name, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2)
    )
    table.add_column(style="dim")
    table.add_column()

    def add(label: str, text: str, style: str = "") -> None:
        table.add_row(label, Text(text, style=style))

    of = f" of {summary.planned_steps}" if summary.planned_steps else ""
    add("status", summary.status + (f": {summary.reason}" if summary.reason else ""), color)
    add("steps", f"{summary.steps}{of} in {format_seconds(summary.duration_seconds)}")
    idle = summary.steps_without_contrast + summary.steps_skipped
    if summary.updates is not None and (idle or not summary.updates):
        why = (
            f"steps without one: {summary.steps_without_contrast} had no contrast, {summary.steps_skipped} were skipped"
        )
        add("updates", f"{summary.updates}; {why}", "yellow" if summary.updates else "red")
    if summary.steps:
        add("reward", f"{format_number(summary.reward_first)} → {format_number(summary.reward_last)}", "bold")
        add("drift", f"{format_number(summary.drift)} nats (worst step {format_number(summary.drift_max)})")
        bound = "" if summary.staleness_bound is None else f", allowed {summary.staleness_bound}"
        age = f"mean {format_number(summary.staleness_mean)}, oldest {format_number(summary.staleness_max)}{bound}"
        add("staleness", age, "red" if summary.stale else "")
        routes = f"{format_percent(summary.agreement)} agree, {format_percent(summary.recorded_fraction)} recorded"
        add("routing", routes)
        generated, trained = summary.generated_tokens_per_second, summary.trained_tokens_per_second
        add("tokens/s", f"{format_number(generated)} generated, {format_number(trained)} trained")
        update = f"{format_seconds(summary.update_seconds)}, engines paused {format_seconds(summary.pause_seconds)}"
        add("weight update", update)
        restarts = f"{summary.restarts} of generators, {summary.run_restarts} of the run"
        add("restarts", restarts, "yellow" if summary.restarts or summary.run_restarts else "")
        failed = f"{summary.failed_episodes} episodes failed, {summary.refused} trajectories refused"
        if summary.failed_episodes or summary.refused:
            add("lost", failed, "yellow")
        add("rejected", f"{summary.rejected} messages", "yellow" if summary.rejected else "")
    if summary.warnings or summary.errors:
        add("log", f"{summary.warnings} warnings, {summary.errors} errors", "red" if summary.errors else "yellow")
    return table
