"""One form of the log-probs in this process: its time, and the most memory that it had."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from r3async.learner.logprobs import token_logprobs, whole_vocabulary
from r3async.tools.bench.jobs import job_main, progress
from r3async.tools.bench.loss import LossDone, LossJob


def naive(hidden: Tensor, matrix: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """Every logit of every token at once, in float32."""
    return whole_vocabulary((hidden @ matrix.T).float() / temperatures[:, None], targets, False)[0]


def chunked(hidden: Tensor, matrix: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    """As the learner does it."""
    return token_logprobs(lambda h: h @ matrix.T, hidden, targets, temperatures, len(matrix))[0]


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {"naive": naive, "chunked": chunked}


def forget_peak() -> None:
    """The peak counts from now: what importing torch once needed is no part of a form (Linux, proc(5), `clear_refs`)."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_mib(field: str) -> float:
    """Resident memory of this process, MiB: `VmRSS` now, `VmHWM` at its peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


def main(directory: Path) -> None:
    job = msgspec.json.decode((directory / "job.json").read_bytes(), type=LossJob)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, job.dtype)
    hidden = torch.randn(job.tokens, job.hidden_size, generator=generator).to(dtype).requires_grad_()
    matrix = (0.05 * torch.randn(job.vocab_size, job.hidden_size, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(job.vocab_size, (job.tokens,), generator=generator)
    temperatures = torch.ones(job.tokens)
    # Gradients of the inputs are no part of the form either: both need them.
    hidden.grad, matrix.grad = torch.zeros_like(hidden), torch.zeros_like(matrix)
    forget_peak()
    before, seconds, loss = memory_mib("VmRSS"), [], 0.0
    for repeat in range(job.repeats):
        progress(directory, f"{job.form}: {repeat + 1} of {job.repeats}")
        hidden.grad.zero_()
        matrix.grad.zero_()
        began = time.perf_counter()
        mean = -FORMS[job.form](hidden, matrix, targets, temperatures).mean()
        mean.backward()
        seconds.append(time.perf_counter() - began)
        loss = float(mean.detach())
    done = LossDone(memory_mib("VmHWM") - before, seconds, loss, float(hidden.grad.float().norm()))
    (directory / "done.json").write_bytes(msgspec.json.encode(done))


if __name__ == "__main__":
    job_main(main)
