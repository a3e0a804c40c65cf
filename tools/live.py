"""The live line of a run: what loads, then step, reward, drift, staleness and speed."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PLAIN_EVERY_SECONDS = 5.0


def describe_step(row: dict[str, Any]) -> str:
    """One readable line of a metrics row."""

    def number(name: str) -> float:
        value = row.get(name)
        return float("nan") if value is None else float(value)

    return (
        f"reward {number('reward/mean'):.3f}  drift k3 {number('rollout_kl/k3'):.1e}  "
        f"age {number('staleness/mean'):.2f}/{number('staleness/max'):.0f}  "
        f"agree {number('routing/agreement'):.3f}  "
        f"gen {number('throughput/generated_tokens_per_second'):,.0f} tok/s  "
        f"train {number('throughput/trained_tokens_per_second'):,.0f} tok/s"
    )


class LiveView:
    """A progress line on a terminal; plain lines, one a step, in a pipe or file."""

    def __init__(self, console: Console, steps: int):
        self.console = self._console = console
        self._steps = steps
        self._shown_step, self._shown_phase, self._shown_at = 0, "", 0.0
        self._restarts = 0
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

    def say(self, line: str) -> None:
        """A line that stays, whatever the view."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def phase(self, text: str) -> None:
        """What happens now, before the first step and after the last."""
        if self._progress:
            self._progress.update(self._task, description=text)
        now = time.monotonic()
        if not self._progress and (text != self._shown_phase or now - self._shown_at > PLAIN_EVERY_SECONDS):
            self._console.print(f"[{time.strftime('%H:%M:%S')}] {text}", highlight=False, markup=False, soft_wrap=True)
            self._shown_phase, self._shown_at = text, now
        self._shown_phase = text

    def show(self, status: dict[str, Any]) -> None:
        """A status of the conductor."""
        row = status["last"]
        restarts = sum(g["restarts"] for g in status["generators"])
        if restarts > self._restarts:
            self._restarts = restarts
            self.say(f"a generator died and is being restarted (restarts so far: {restarts}); the run goes on")
        if not row or status["phase"] != "training":
            self.phase(status["phase"])
        if row and row["step"] != self._shown_step:
            self._shown_step = row["step"]
            line = describe_step(row)
            if self._progress:
                self._progress.update(self._task, completed=row["step"], description=line)
            else:
                self._console.print(
                    f"step {row['step']:>4}/{self._steps}  {line}", highlight=False, markup=False, soft_wrap=True
                )
