"""The rows of metrics.jsonl: a step's row is written when the weights trained in it are installed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.observe.metrics import MetricsWriter

RECENT = 256


class StepBook:
    """Keeps what the learner reported until the delivery's figures are known, then writes the whole row.

    `report(event, **fields)` hears of metrics that are not finite. Rates are over the wall time between two rows.
    """

    def __init__(self, run_dir: Path, report: Callable[..., object], clock: Callable[[], float] = time.monotonic):
        self._writer = MetricsWriter(run_dir)
        self._episodes = run_dir / "episodes.jsonl"
        self._report, self._clock = report, clock
        self._pending: list[dict[str, Any]] = []
        self._written_at, self._tokens = clock(), 0
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def since(self, step: int) -> list[dict[str, Any]]:
        """Rows after `step`, as far back as the last `RECENT`."""
        return [row for row in self._recent if row["step"] > step]

    def restart_clock(self) -> None:
        """Rates of the next row count from now."""
        self._written_at = self._clock()

    def waits_for(self, version: int) -> bool:
        """A row waits for the delivery of `version`, or of an older one."""
        return any(row["version"] <= version for row in self._pending)

    @property
    def empty(self) -> bool:
        return not self._pending

    def add(self, step: int, version: int, metrics: dict[str, Any], previews: Sequence[dict[str, Any]]) -> None:
        """A step was made; `version` is what it made. Episode previews are written at once."""
        self._pending.append({"step": step, "version": version, **metrics})
        with self._episodes.open("ab") as file:
            for preview in previews:
                said = preview["messages"]
                pairs = zip(said[::2], said[1::2], preview["rewards"], strict=False)
                turns = [{"user": u["content"], "assistant": a["content"], "reward": r} for u, a, r in pairs]
                file.write(msgspec.json.encode({"step": step, "reward": preview["reward"], "turns": turns}) + b"\n")

    def amend(self, version: int, figures: dict[str, Any]) -> None:
        """What became known later of the last step that made `version`."""
        [row for row in self._pending if row["version"] == version][-1].update(figures)

    def delivered(self, version: int, generated_tokens: int, figures: dict[str, Any]) -> None:
        """Write the rows of all versions up to `version`. `generated_tokens` is the total since the run began."""
        ready = [row for row in self._pending if row["version"] <= version]
        self._pending = [row for row in self._pending if row["version"] > version]
        # Steps that made one version together have one rate.
        now = self._clock()
        seconds = max(now - self._written_at, 1e-9)
        trained = sum(row["batch/trained_tokens"] for row in ready)
        rates = {
            "throughput/generated_tokens_per_second": max(0, generated_tokens - self._tokens) / seconds,
            "throughput/trained_tokens_per_second": trained / seconds,
        }
        if ready:
            self._written_at, self._tokens = now, generated_tokens
        for row in ready:
            row |= {"time": time.time(), **rates, **figures}
            odd = self._writer.write(row)
            if odd:
                self._report("metric_not_finite", step=row["step"], metrics=odd)
            self._recent.append(row)
