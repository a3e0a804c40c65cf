"""The benchmark `bench loss`: memory and time of log-probs from hidden states, in chunks against all logits at once in
float32."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from dev.bench.jobs import Say, forget_peak, memory_mib, progress, run_job, table

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT = 600.0


class LossJob(msgspec.Struct, frozen=True):
    """A measurement of one `form`: `tokens` are trained, of a model with `hidden_size` and `vocab_size`; hidden states
    and matrix are in `dtype`."""

    form: str
    tokens: int
    hidden_size: int
    vocab_size: int
    dtype: str
    repeats: int


class LossDone(msgspec.Struct, frozen=True):
    """The figures of one form: `peak_mib`, memory above that of the inputs; `seconds` of each forward and backward
    pass."""

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
    """Measure each form in a separate process, so that neither finds memory that the other left."""
    sizes = (512, 64, 16_384, "float32", 2) if quick else (2048, 512, 128_256, "bfloat16", 3)
    done = {}
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        for form in ("naive", "chunked"):
            job = LossJob(form, *sizes)
            say(f"{form}: {job.tokens} tokens, vocabulary of {job.vocab_size:,}")
            place = Path(scratch) / form
            done[form] = run_job(f"{__name__}:measure", job, LossDone, place, timeout=TIMEOUT, say=say)
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
    """Format the report as a table for people."""
    j = report.job
    rows = [
        (name, f"{d.peak_mib:,.0f}", f"{median(d.seconds):.2f}", f"{d.loss:.5f}", f"{d.gradient_norm:.5f}")
        for name, d in (("naive", report.naive), ("chunked", report.chunked))
    ]
    lines = [
        f"{j.tokens} tokens, hidden size {j.hidden_size}, vocabulary {j.vocab_size:,}, {j.dtype}; forward and backward",
        *table(("form", "peak MiB", "seconds", "loss", "gradient"), rows),
        f"chunked / naive: memory {report.memory_ratio:.3f}, time {report.time_ratio:.2f}",
    ]
    return "\n".join(lines)


# -- in the job's process ----------------------------------------------------------------------------------------------


def forms() -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]:
    """Return the forms by name: functions of hidden states, vocabulary matrix, targets and temperatures that return
    log-probs."""
    import torch

    from r3async.learner.kernels import token_logprobs

    def naive(hidden: Tensor, matrix: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Compute every logit of every token at once, in float32."""
        every = torch.log_softmax((hidden @ matrix.T).float() / temperatures[:, None], dim=-1)
        return every.gather(1, targets[:, None])[:, 0]

    def chunked(hidden: Tensor, matrix: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Compute the log-probs as the learner does."""
        return token_logprobs(matrix, hidden, targets, temperatures)[0]

    return {"naive": naive, "chunked": chunked}


def measure(job: LossJob, directory: Path) -> LossDone:
    """Measure one form with random numbers of a fixed seed."""
    import torch

    form = forms()[job.form]
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, job.dtype)
    hidden = torch.randn(job.tokens, job.hidden_size, generator=generator).to(dtype).requires_grad_()
    matrix = (0.05 * torch.randn(job.vocab_size, job.hidden_size, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(job.vocab_size, (job.tokens,), generator=generator)
    temperatures = torch.ones(job.tokens)
    # Gradients of the inputs do not count either: both forms need them.
    hidden.grad, matrix.grad = torch.zeros_like(hidden), torch.zeros_like(matrix)
    forget_peak()  # what importing torch once needed is no part of a form
    before, seconds, loss = memory_mib("VmRSS"), [], 0.0
    for repeat in range(job.repeats):
        progress(directory, f"{job.form}: {repeat + 1} of {job.repeats}")
        hidden.grad.zero_()
        matrix.grad.zero_()
        began = time.perf_counter()
        mean = -form(hidden, matrix, targets, temperatures).mean()
        mean.backward()
        seconds.append(time.perf_counter() - began)
        loss = float(mean.detach())
    return LossDone(memory_mib("VmHWM") - before, seconds, loss, float(hidden.grad.float().norm()))
