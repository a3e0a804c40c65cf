"""The rows of metrics.jsonl of a server: one for each optimizer step of a client, with the names of
a run's metrics, for `r3async tail` and `r3async report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from r3async.record.reading import read_json_objects
from r3async.record.step_writer import MetricsFile
from r3async.tinker.backend import LossBatch
from r3async.tinker.protocol import TrainResult
from r3async.world import World

MEANS = {
    "k3:mean": "rollout_kl/k3",
    "routes/agreement:mean": "routing/agreement",
    "routes/recorded:mean": "routing/recorded_fraction",
    "staleness:mean": "staleness/mean",
}
"""Metrics of a training request, and their names in a row: means over its targets."""


@dataclass
class _StepSums:
    """What a client has trained since its last step. `weighted` has sums of `MEANS` over targets,
    and the number of targets."""

    targets: int = 0
    loss: float = 0.0
    is_supervised: bool = True
    version: int = 0
    oldest: float | None = None
    weighted: dict[str, tuple[float, int]] = field(default_factory=dict)


class StepRows:
    """Writes the rows. Steps of all clients are counted together."""

    def __init__(self, directory: Path, world: World):
        rows = read_json_objects(directory / "metrics.jsonl", files=world.files)
        self._step = max((int(row["step"]) for row in rows if "step" in row), default=0)
        self._versions = {row["client"]: int(row["version"]) for row in rows if "client" in row}
        """The newest version of each client that has a row."""
        self._file = MetricsFile(directory, world=world)
        self._clock = world.clock
        self._written_at = world.clock.monotonic()
        self._sampled_tokens = 0
        self._sums: dict[str, _StepSums] = {}

    def begin_model(self, model_id: str) -> None:
        """Begin a model, or one that is restored, which has no gradient yet."""
        self._sums.pop(model_id, None)

    def add_sampled(self, tokens: int) -> None:
        self._sampled_tokens += tokens

    def add_training(self, model_id: str, batch: LossBatch, result: TrainResult) -> None:
        """Add a `forward_backward`."""
        sums = self._sums.setdefault(model_id, _StepSums())
        targets = sum(values.size for values in result.logprobs)
        sums.targets += targets
        sums.loss += result.metrics["loss:sum"]
        sums.is_supervised &= batch.loss_fn == "cross_entropy"
        sums.version = batch.version + 1
        for name, row_name in MEANS.items():
            if name in result.metrics:
                total, count = sums.weighted.get(row_name, (0.0, 0))
                sums.weighted[row_name] = total + result.metrics[name] * targets, count + targets
        oldest = result.metrics.get("staleness:max")
        if oldest is not None:
            sums.oldest = max(oldest, sums.oldest or 0.0)

    def write_step(self, model_id: str, lr: float, update: dict[str, float]) -> None:
        """Write the row of an optimizer step, after which the next one begins. A step that is made
        again, to restore its model, has its row already."""
        sums = self._sums.pop(model_id, _StepSums())
        if 0 < sums.version <= self._versions.get(model_id, 0):
            return
        self._versions[model_id] = sums.version
        now = self._clock.monotonic()
        seconds = max(now - self._written_at, 1e-9)
        self._step += 1
        row = {
            "step": self._step,
            "version": sums.version,
            "time": self._clock.time(),
            "client": model_id,
            "lr": lr,
            **update,
            "optimizer/updates": 1.0 - update["optimizer/skipped"],
            "loss/answers" if sums.is_supervised else "loss/policy": sums.loss
            / max(sums.targets, 1),
            **{name: total / count for name, (total, count) in sums.weighted.items()},
            "batch/trained_tokens": sums.targets,
            "timing/step_seconds": seconds,
            "throughput/generated_tokens_per_second": self._sampled_tokens / seconds,
            "throughput/trained_tokens_per_second": sums.targets / seconds,
        }
        if sums.oldest is not None:
            row["staleness/max"] = sums.oldest
        self._written_at = now
        self._sampled_tokens = 0
        self._file.write(row)

    def close(self) -> None:
        self._file.close()
