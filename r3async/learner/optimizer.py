"""AdamW with warm-up, global-norm clipping and fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from r3async.config import Config, LearnerConfig

Cause = Literal["", "no_contrast", "not_finite", "trust_region"]
"""Why a step made no update: no trained token has an advantage, a number was not finite, or the drift was beyond
`rollout_kl.max`. Empty: it made one."""


@dataclass(frozen=True)
class Update:
    """`grad_norm`: global L2 norm before clipping, 0 where none was taken. `lr`: of this step. With a `cause` nothing changed:
    no weight, no moment, no step count."""

    grad_norm: float
    lr: float
    cause: Cause = ""


Gradients = Sequence[Tensor]


def squared_norm(gradients: Gradients) -> float:
    """Sum of squares of all elements, of one rank that holds everything."""
    return float(torch.stack(torch._foreach_norm(gradients)).double().square().sum()) if gradients else 0.0


MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps of a parameter; the moments have its shape, the step is one number."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def learning_rate(config: LearnerConfig, made: int, total: int) -> float:
    """Of the update after `made` ones, of `total` in the run: `lr` times a share that rises in a line over `warmup_steps`
    updates and then, with `lr_schedule`, falls to `min_lr_ratio` at update `total`, and stays there."""
    warm_up = config.warmup_steps
    if made < warm_up:
        return config.lr * ((made + 1) / warm_up)
    if config.lr_schedule == "constant":
        return config.lr
    # From the first update at full rate, where `done` is 0, to the last one, where it is 1.
    done = min(1.0, max(0, made - max(0, warm_up - 1)) / max(1, total - 1 - max(0, warm_up - 1)))
    share = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def total_updates(config: Config) -> int:
    """Optimizer updates of a run in which none is skipped."""
    return config.steps * config.schedule.minibatches_per_step


class MasterAdamW:
    """AdamW (decoupled weight decay, arXiv 1711.05101) over `parameters`, which keep their dtype.

    Parameters below float32 get a float32 master copy: gradients of micro-batches accumulate in it, as soon as each is
    made and whatever the order of forward and backward passes, and the update is made on it, so that small updates are not
    rounded away. Parameters with fewer than two dimensions (norms) get no weight decay. The learning rate follows from the number
    of steps made alone (`learning_rate`), so a restored optimizer goes on with the same; `total`: how many there will be.

    Where there are several ranks, `reduce_gradients` sums each gradient, in the order of `parameters`, over the ranks that
    hold a copy of the parameter, in place, and `squared_norm` gives the sum of squares over the whole model. With
    `reduce_gradients`, a parameter without a gradient has zeros, since the other ranks expect it to take part. `changed` is
    called whenever the parameters have new values.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        config: LearnerConfig,
        *,
        total: int = 0,
        reduce_gradients: Callable[[Gradients], None] | None = None,
        squared_norm: Callable[[Gradients], float] = squared_norm,
        changed: Callable[[], None] = lambda: None,
    ):
        self._model = [p for p in parameters if p.requires_grad]
        self._masters: list[Tensor] = [
            p if p.dtype == torch.float32 else Parameter(p.detach().float()) for p in self._model
        ]
        self._pairs = [(p, m) for p, m in zip(self._model, self._masters, strict=True) if p is not m]
        for parameter, master in self._pairs:
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
        self._reduce, self._squared_norm, self._changed = reduce_gradients, squared_norm, changed
        self._max_norm, self._config, self._total = config.max_grad_norm, config, total
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
        return learning_rate(self._config, self.steps, self._total)

    @torch.no_grad()
    def step(self) -> Update:
        """Reduce, clip, update, clear gradients. With a gradient norm that is not finite it only clears them."""
        lr = self.lr
        if self._reduce is not None:
            for master in self._masters:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
            self._reduce([m.grad for m in self._masters if m.grad is not None])
        gradients = [m.grad for m in self._masters if m.grad is not None]
        norm = math.sqrt(self._squared_norm(gradients))
        finite = math.isfinite(norm)
        if finite:
            if norm > self._max_norm:
                torch._foreach_mul_(gradients, self._max_norm / (norm + 1e-6))
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self.steps += 1
            for parameter, master in self._pairs:
                parameter.copy_(master)
            self._changed()
        self.clear()
        return Update(norm, lr, "" if finite else "not_finite")

    def skip(self, cause: Cause) -> Update:
        """No step: forget the gradients."""
        self.clear()
        return Update(0.0, self.lr, cause)

    def states(self) -> Iterator[dict[str, Tensor]]:
        """For each parameter, in order, what later steps depend on: `master` and, if it was ever updated, Adam's `exp_avg`,
        `exp_avg_sq` and `step`. The tensors themselves, of this rank; they change with the next step."""
        for master in self._masters:
            adam = self._adam.state.get(master, {})
            yield {"master": local(master.detach())} | {name: local(adam[name]) for name in MOMENTS if name in adam}

    @torch.no_grad()
    def restore(self, states: Iterable[Mapping[str, Tensor]], steps: int) -> None:
        """Resume as if `steps` had been made and `states()` were that; parameters become their masters. No gradient is left."""
        self.clear()
        self.steps = steps
        self._adam.state.clear()
        for parameter, master, saved in zip(self._model, self._masters, states, strict=True):
            local(master.detach()).copy_(saved["master"])
            if parameter is not master:
                parameter.copy_(master)
            if "step" in saved:
                # As Adam makes them: the fused kernel wants the count on the parameter's device.
                count = saved["step"].to(master.device, copy=True)
                moments = {name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in MOMENTS[1:]}
                for name, moment in moments.items():
                    local(moment).copy_(saved[name])
                self._adam.state[master] = {"step": count, **moments}
        self._changed()

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for tensor in (*self._model, *self._masters):
            tensor.grad = None


@torch.no_grad()
def _move_gradient(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None
