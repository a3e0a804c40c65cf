"""`bench weights`: what new weights cost: the learner's pause, writing, transfer, load, the engine's pause, in a real run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import msgspec

from r3async.tools.bench.jobs import Say, run_job

TIMEOUT = 1800.0


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


class Figure(msgspec.Struct, frozen=True):
    """Seconds of one part of an update."""

    median: float
    maximum: float


class Report(msgspec.Struct, frozen=True):
    """Over all updates but the first two, in which processes warm up.

    `overlap`: share of a publication (snapshot and write) in which the learner went on. `paused_share`: of the generator's
    time, at the end of the run.
    """

    benchmark: str
    job: WeightsJob
    bytes: int
    updates: int
    seconds: dict[str, Figure]
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
"""Name here, and metric."""
WARM_UP = 2


def run(job: WeightsJob, say: Say) -> Report:
    """Make the run in a process of its own, and read its metrics."""
    from r3async.record.reading import read_objects

    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        directory = Path(scratch)
        (directory / "job.json").write_bytes(msgspec.json.encode(job))
        say(
            f"weights: {job.updates} updates, {job.layers} layers of {job.experts} experts, {job.dtype}, {job.on_update}"
        )
        run_job("r3async.tools.bench.weights_job", directory, timeout=TIMEOUT, say=say)
        rows = read_objects(directory / "runs" / "bench" / "metrics.jsonl")[WARM_UP:]
    seconds = {part: [row[name] for row in rows] for part, name in PARTS.items()}
    stood, went_on = sum(seconds["snapshot"]), sum(seconds["write"])
    return Report(
        "weights",
        job,
        bytes=int(rows[-1]["weights/bytes"]),
        updates=len(rows),
        seconds={part: Figure(median(values), max(values)) for part, values in seconds.items()},
        overlap=went_on / (stood + went_on),
        paused_share=rows[-1]["weights/paused_share"],
    )


def render(report: Report) -> str:
    """A table for people."""
    job = report.job
    rows = [
        f"{report.bytes / 1e6:.1f} MB in {job.dtype}; {report.updates} updates; on_update = {job.on_update}, {job.backend}",
        f"{'':<12}{'median ms':>12}{'max ms':>12}",
    ]
    rows += [f"{part:<12}{1e3 * f.median:>12.1f}{1e3 * f.maximum:>12.1f}" for part, f in report.seconds.items()]
    rows.append(f"of a publication {report.overlap:.0%} overlapped training; paused share {report.paused_share:.2%}")
    return "\n".join(rows)
