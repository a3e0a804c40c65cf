"""`bench loss`: memory and time of log-probs from hidden states, by chunks, against all logits at once in float32."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import msgspec

from r3async.tools.bench.jobs import Say, run_job

TIMEOUT = 600.0


class LossJob(msgspec.Struct, frozen=True):
    """`tokens` are trained, of a model with `hidden_size` and `vocab_size`; hidden states and matrix in `dtype`."""

    form: str
    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    repeats: int


class LossDone(msgspec.Struct, frozen=True):
    """One form: `peak_mib`, memory above what the inputs take; `seconds` of each forward and backward pass."""

    peak_mib: float
    seconds: list[float]
    loss: float
    gradient_norm: float


class Report(msgspec.Struct, frozen=True):
    """Both forms on the same numbers. Ratios are chunked over naive."""

    benchmark: str
    job: LossJob
    naive: LossDone
    chunked: LossDone
    memory_ratio: float
    time_ratio: float
    gradient_difference: float


def run(quick: bool, say: Say) -> Report:
    """Measure each form in a process of its own, so that neither finds memory that the other left."""
    sizes = (512, 64, 16_384, "float32", 2) if quick else (2048, 512, 128_256, "bfloat16", 3)
    done = {}
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        for form in ("naive", "chunked"):
            directory = Path(scratch) / form
            directory.mkdir()
            job = LossJob(form, *sizes)
            (directory / "job.json").write_bytes(msgspec.json.encode(job))
            say(f"{form}: {job.tokens} tokens, vocabulary of {job.vocab_size:,}")
            run_job("r3async.tools.bench.loss_job", directory, timeout=TIMEOUT, say=say)
            done[form] = msgspec.json.decode((directory / "done.json").read_bytes(), type=LossDone)
    naive, chunked = done["naive"], done["chunked"]
    return Report(
        "loss",
        job,
        naive,
        chunked,
        memory_ratio=chunked.peak_mib / naive.peak_mib,
        time_ratio=median(chunked.seconds) / median(naive.seconds),
        gradient_difference=abs(chunked.gradient_norm - naive.gradient_norm) / naive.gradient_norm,
    )


def render(report: Report) -> str:
    """A table for people."""
    j = report.job
    rows = [
        f"{j.tokens} tokens, hidden size {j.hidden_size}, vocabulary {j.vocab_size:,}, {j.dtype}; forward and backward",
        f"{'':<10}{'peak MiB':>12}{'seconds':>10}{'loss':>12}{'gradient':>12}",
    ]
    for name, done in (("naive", report.naive), ("chunked", report.chunked)):
        rows.append(
            f"{name:<10}{done.peak_mib:>12,.0f}{median(done.seconds):>10.2f}{done.loss:>12.5f}{done.gradient_norm:>12.5f}"
        )
    rows.append(f"chunked / naive: memory {report.memory_ratio:.3f}, time {report.time_ratio:.2f}")
    return "\n".join(rows)
