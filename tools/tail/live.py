"""The live line of a run: its loading phases, then step, reward, drift, staleness,
speed, and time left."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from r3async.data.metrics import finite_or_none
from r3async.schedule.update_monitor import explain_no_update
from r3async.views.number_formats import format_seconds

PLAIN_EVERY_SECONDS = 5.0
PACE_STEPS = 50
"""Steps whose mean time tells how much time is left."""


def describe_step(row: dict[str, Any]) -> str:
    """Describe a metrics row in one line. `tok/s` is generated > trained; for a supervised run,
    answers trained."""

    def number(name: str) -> float:
        value = finite_or_none(row.get(name))
        return float("nan") if value is None else value

    def thousands(name: str) -> str:
        return f"{number(name) / 1000:.1f}k"

    if "loss/answers" in row:
        held_out = (
            f"held out {number('loss/answers_held_out'):.4f}  "
            if "loss/answers_held_out" in row
            else ""
        )
        return (
            f"loss {number('loss/answers'):.4f}  {held_out}lr {number('lr'):.1e}  norm "
            f"{number('grad_norm'):.2f}  "
            + (f"epoch {number('data/epochs'):.2f}  " if "data/epochs" in row else "")
            + f"tok/s {thousands('throughput/trained_tokens_per_second')}"
        ) + ("" if row.get("optimizer/updates", 1) else "  no update")
    return (
        (f"reward {number('reward/mean'):.3f}  " if "reward/mean" in row else "")
        + f"drift {number('rollout_kl/k3'):.0e}  "
        f"staleness {number('staleness/mean'):.1f}, max {number('staleness/max'):.0f}  "
        + (
            f"agreement {100 * number('routing/agreement'):.0f} %  "
            if "routing/agreement" in row
            else ""
        )
        + f"tok/s {thousands('throughput/generated_tokens_per_second')}>"
        f"{thousands('throughput/trained_tokens_per_second')}"
    ) + (f"  no update: {why}" if (why := explain_no_update(row)) else "")


class StepPace:
    """The pace of a run, from the times of its last steps."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self._step = 0

    def add_step(self, row: dict[str, Any]) -> None:
        """Add the row of a step. Steps that are made again after a restart begin a new pace."""
        step = int(finite_or_none(row.get("step")) or 0)
        if step != self._step + 1:
            self._times.clear()
        self._step = step
        when = finite_or_none(row.get("time"))
        if when is not None:
            self._times.append(when)

    def describe(self, steps: int | None) -> str:
        """Describe the last step's seconds and the time left of `steps`; empty if only
        one step is known."""
        if len(self._times) < 2:
            return ""
        pace = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        left = (
            f", {format_seconds(pace * (steps - self._step))} left"
            if steps is not None and steps > self._step
            else ""
        )
        return f"  {format_seconds(self._times[-1] - self._times[-2])}{left}"


def describe_evaluation(row: dict[str, Any]) -> str:
    """Describe a row of `evaluation.jsonl` in one line: each set's mean reward, standard error,
    and last pass@k."""
    sets = [name.removesuffix("/reward_mean") for name in row if name.endswith("/reward_mean")]
    parts = []
    for prefix in sets[1:] or sets:  # the first figures repeat those of the first set
        name = prefix.removeprefix("evaluation").removeprefix("/")
        text = f"{name} reward {_format_figure(row, f'{prefix}/reward_mean')}".strip()
        if row.get(f"{prefix}/reward_error") is not None:
            text += f" ± {_format_figure(row, f'{prefix}/reward_error')}"
        passes = [name for name in row if name.startswith(f"{prefix}/pass@")]
        if passes:
            text += f", {passes[-1].rpartition('/')[2]} {_format_figure(row, passes[-1])}"
        parts.append(text)
    return f"evaluation after step {row.get('step', '?')}: {'; '.join(parts)}"


def _format_figure(row: dict[str, Any], name: str) -> str:
    value = finite_or_none(row.get(name))
    return "-" if value is None else f"{value:.3f}"


BEYOND_LIMIT_NOTE = (
    "     served drift is above algorithm.rollout_kl.limit with the shortest step, too: lower "
    "learner.lr or schedule.max_staleness (each such step is an event drift_beyond_limit)"
)


class LiveView:
    """A view with one line per step and, on a terminal, a moving line below: the current phase,
    progress and time."""

    def __init__(self, console: Console, steps: int):
        self.console = console
        self._steps = steps
        self.shown_step = 0
        self._pace = StepPace()
        self._shown_phase = ""
        self._shown_at = 0.0
        self._restarts = 0
        self._warned_of_limit = False
        self._last_evaluation_time = 0.0
        """End time of the last evaluation that was shown."""
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed}/{task.total}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> LiveView:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress:
            self._progress.stop()

    def print_line(self, line: str) -> None:
        """Print a line that stays, whatever the view."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show_phase(self, text: str) -> None:
        """Show the current phase, before the first step and after the last."""
        if self._progress:
            self._progress.update(self._task, description=text)
        now = time.monotonic()
        if not self._progress and (
            text != self._shown_phase or now - self._shown_at > PLAIN_EVERY_SECONDS
        ):
            self.print_line(f"[{time.strftime('%H:%M:%S')}] {text}")
            self._shown_phase = text
            self._shown_at = now

    def set_total_steps(self, steps: int) -> None:
        """Set the total number of steps."""
        self._steps = steps
        if self._progress:
            self._progress.update(self._task, total=steps)

    def rewind_to_step(self, step: int) -> None:
        """Go back to `step`, from which the run resumes; it was shown already, or comes from
        an earlier start."""
        self.shown_step = step
        self._restarts = 0
        if self._progress:
            self._progress.update(self._task, completed=step)

    def show_status(self, status: dict[str, Any]) -> None:
        """Show a status of the conductor."""
        restarts = sum(g["restarts"] for g in status["generators"])
        # For some, the connection was lost, and not the process.
        self._restarts = min(self._restarts, restarts)
        if restarts > self._restarts:
            self._restarts = restarts
            self.print_line(
                f"a generator was lost and begins again (restarts so far: {restarts}); "
                "the run continues"
            )
        if status["phase"] != "training" or not self.shown_step:
            self.show_phase(status["phase"])
        for row in status["rows"]:
            if row["step"] <= self.shown_step:
                continue
            self.show_row(row, describe_step(row), status["phase"])
        for row in status.get("evaluations", ()):
            if row["time"] > self._last_evaluation_time:
                self._last_evaluation_time = row["time"]
                self.print_line(describe_evaluation(row))

    def show_row(self, row: dict[str, Any], text: str, phase: str = "training") -> None:
        """Show a step, which `text` describes."""
        self.shown_step = row["step"]
        self._pace.add_step(row)
        self.print_line(f"{row['step']:>4}/{self._steps}  {text}{self._pace.describe(self._steps)}")
        if row.get("optimizer/beyond_limit") and not self._warned_of_limit:
            self._warned_of_limit = True
            self.print_line(BEYOND_LIMIT_NOTE)
        if self._progress:
            self._progress.update(self._task, completed=row["step"], description=phase)
