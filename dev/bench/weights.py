"""The benchmark `bench weights`: the cost of new weights in a real run: the learner's pause, writing, transfer, load,
the engine's pause."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import msgspec

from dev.bench.jobs import Say, table
from dev.bench.training import metrics_of, train_apart
from r3async.config import Config, load_config
from r3async.data.container import decode_safetensors_header

TIMEOUT = 1800.0
WARM_UP = 2
"""Number of updates that do not count, because processes warm up in them."""


class WeightsJob(msgspec.Struct, frozen=True):
    """A run of `updates` steps, each of which publishes, with a random model of this size in `dtype`."""

    updates: int
    layers: int
    hidden_size: int
    experts: int
    expert_hidden_size: int
    dtype: str
    on_update: str
    backend: str

    def config(self) -> Config:
        """Return the configuration of the run. Raises `ConfigError`."""
        return load_config(
            "quickstart",
            [
                "name=bench",
                f"steps={self.updates + WARM_UP}",
                "schedule.prompts_per_step=4",
                "schedule.group_size=4",
                "generator.kv_cache_gib=0.25",
                f"generator.dtype={self.dtype}",
                f"generator.on_update={self.on_update}",
                f"weights.backend={self.backend}",
                "routing.trace=off",
                "model.init.max_warm_steps=1",
                f"model.init.layers={self.layers}",
                f"model.init.hidden_size={self.hidden_size}",
                f"model.init.experts={self.experts}",
                f"model.init.expert_hidden_size={self.expert_hidden_size}",
            ],
        )


class Figure(msgspec.Struct, frozen=True):
    """Seconds of one part of an update."""

    median: float
    maximum: float


class Report(msgspec.Struct, frozen=True):
    """The report of `bench weights`, over all updates but the first two, in which processes warm up.

    Attributes:
        tensors: number of tensors of a version; an expert has three.
        ms_per_tensor: median milliseconds per tensor, of the parts that handle each of them.
        overlap: share of a publication (snapshot and write) in which the learner trained.
        paused_share: share of the generator's time in which it was paused, at the end of the run.
    """

    benchmark: str
    job: WeightsJob
    bytes: int
    tensors: int
    updates: int
    seconds: dict[str, Figure]
    ms_per_tensor: dict[str, float]
    overlap: float
    paused_share: float


PARTS = {
    "snapshot": "weights/snapshot_seconds",
    "write": "weights/write_seconds",
    "transfer": "weights/transfer_seconds",
    "load": "weights/load_seconds",
    "pause": "weights/pause_seconds",
    "update": "weights/update_seconds",
    "step": "learner/step_seconds",
}
"""Metrics by the name of their part of an update."""
EACH = ("snapshot", "write", "transfer", "load", "pause")
"""Parts that handle each tensor."""


def run(job: WeightsJob, say: Say) -> Report:
    """Make the run in a separate process, and read its metrics. Raises `BenchError`, `ConfigError`."""
    config = job.config()
    say(f"weights: {job.updates} updates, {job.layers} layers of {job.experts} experts, {job.dtype}, {job.on_update}")
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        train_apart(config, Path(scratch), timeout=TIMEOUT, say=say)
        rows = metrics_of(config, Path(scratch))[WARM_UP:]
        tensors = sum(map(_tensors, sorted(Path(scratch).rglob("init/*.safetensors"))))
    seconds = {part: [row[name] for row in rows] for part, name in PARTS.items()}
    paused, overlapped = sum(seconds["snapshot"]), sum(seconds["write"])
    return Report(
        "weights",
        job,
        bytes=int(rows[-1]["weights/bytes"]),
        tensors=tensors,
        updates=len(rows),
        seconds={part: Figure(median(values), max(values)) for part, values in seconds.items()},
        ms_per_tensor={part: 1e3 * median(seconds[part]) / tensors for part in EACH},
        overlap=overlapped / (paused + overlapped),
        paused_share=rows[-1]["weights/paused_share"],
    )


def _tensors(path: Path) -> int:
    return len(decode_safetensors_header(path.read_bytes())[0])


def render(report: Report) -> str:
    """Format the report as a table for people."""
    job = report.job
    each = {part: f"{1e3 * ms:.1f}" for part, ms in report.ms_per_tensor.items()}
    rows = [
        (part, f"{1e3 * f.median:.1f}", f"{1e3 * f.maximum:.1f}", each.get(part, ""))
        for part, f in report.seconds.items()
    ]
    lines = [
        f"{report.tensors} tensors, {report.bytes / 1e6:.1f} MB in {job.dtype}; {report.updates} updates; "
        f"on_update = {job.on_update}, {job.backend}",
        *table(("part", "median ms", "max ms", "us a tensor"), rows),
        f"of a publication {report.overlap:.0%} overlapped training; paused share {report.paused_share:.2%}",
    ]
    return "\n".join(lines)
