"""AdamW with warm-up, global-norm clipping and fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from r3async.config import LearnerConfig


@dataclass(frozen=True)
class StepReport:
    """`grad_norm`: global L2 norm before clipping. `lr`: of this step. `skipped`: the norm was not finite, nothing changed."""

    grad_norm: float
    lr: float
    skipped: bool


class MasterAdamW:
    """AdamW (decoupled weight decay, arXiv 1711.05101) over `parameters`, which keep their dtype.

    Parameters below float32 get a float32 master copy: gradients of micro-batches accumulate in it and the update is made
    on it, so that small updates are not rounded away. Call `accumulate` after each micro-batch's backward, then `step`.
    Parameters with fewer than two dimensions (norms) get no weight decay. The learning rate rises linearly over
    `warmup_steps` steps.
    """

    def __init__(self, parameters: Iterable[Parameter], config: LearnerConfig):
        self._model = [p for p in parameters if p.requires_grad]
        self._masters: list[Tensor] = [
            p if p.dtype == torch.float32 else Parameter(p.detach().float()) for p in self._model
        ]
        self._pairs = [(p, m) for p, m in zip(self._model, self._masters, strict=True) if p is not m]
        self._max_norm, self._lr, self._warmup = config.max_grad_norm, config.lr, config.warmup_steps
        self.steps = 0
        decayed = [m for m in self._masters if m.ndim >= 2]
        plain = [m for m in self._masters if m.ndim < 2]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._lr * min(1.0, (self.steps + 1) / self._warmup) if self._warmup > 0 else self._lr

    @torch.no_grad()
    def accumulate(self) -> None:
        """Move the gradients of low-precision parameters into their masters."""
        for parameter, master in self._pairs:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> StepReport:
        """Clip, update, clear gradients. With a gradient norm that is not finite it only clears them."""
        lr = self.lr
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._max_norm))
        skipped = not math.isfinite(norm)
        if not skipped:
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self.steps += 1
            for parameter, master in self._pairs:
                parameter.copy_(master)
        self.clear()
        return StepReport(norm, lr, skipped)

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for tensor in (*self._model, *self._masters):
            tensor.grad = None
