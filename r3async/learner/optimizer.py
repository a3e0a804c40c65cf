"""AdamW with warm-up, global-norm clipping and fp32 master weights."""

from __future__ import annotations

import contextlib
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
from r3async.learner.offload import HostMoments
from r3async.learner.shares import WHOLE, Share

Cause = Literal["", "no_contrast", "not_finite", "trust_region"]
"""Why a step made no update: no trained token has an advantage, a number was not finite, or the drift was beyond
`rollout_kl.max`. Empty: it made one."""


@dataclass(frozen=True)
class Update:
    """`grad_norm`: global L2 norm before clipping, 0 where none was taken. `lr`: of this step. With a `cause` nothing changed:
    no weight, no moment, no step count. `share`: of the step that was made; less than 1 where `rollout_kl.limit` shortened it.
    `predicted`: the served drift that it leads to, where that was measured. `served`: the estimate of that before it, in a step
    that did not measure it."""

    grad_norm: float
    lr: float
    cause: Cause = ""
    share: float = 1.0
    predicted: float | None = None
    served: float | None = None


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
    return config.steps * config.schedule.updates_per_step


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

    `shares`, of each parameter: the rows that this rank updates, and has masters and moments of. Then `reduce_gradients` may sum
    these rows alone, and `gather` fills, in place, the other rows in from the ranks that updated them. Both get everything that
    is trained.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        config: LearnerConfig,
        *,
        total: int = 0,
        reduce_gradients: Callable[[Gradients], None] | None = None,
        squared_norm: Callable[[Gradients], float] = squared_norm,
        shares: Sequence[Share] = (),
        gather: Callable[[Sequence[Tensor]], None] = lambda parameters: None,
        changed: Callable[[], None] = lambda: None,
    ):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.shares = shares or [WHOLE] * len(self.parameters)
        self._masters: list[Tensor] = []
        self._sums: list[Tensor | _Sum] = []
        """Whose `grad` is the gradient of the whole parameter, in float32: the parameter, its master, or neither."""
        for parameter, share in zip(self.parameters, self.shares, strict=True):
            exact, whole = parameter.dtype == torch.float32, share.ranks == 1
            if exact and whole:
                master: Tensor = parameter
            else:  # of a float32 parameter it shares the memory
                part = share.of(parameter.detach())
                master = Parameter(part if exact else part.float())
            self._masters.append(master)
            self._sums.append(parameter if exact else master if whole else _Sum())
            if not exact:
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, self._sums[-1]))
        self._reduce, self._squared_norm = reduce_gradients, squared_norm
        self._gather, self._changed = gather, changed
        self._max_norm, self._config, self._total = config.max_grad_norm, config, total
        self.steps = 0
        self._moved: list[Tensor] = []
        """The masters that the last step changed."""
        self.look: Callable[[Gradients], object] = lambda gradients: None
        """Called with the gradients of each step, summed over ranks and not clipped yet."""
        decayed = [m for m in self._masters if m.ndim >= 2]
        plain = [m for m in self._masters if m.ndim < 2]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._away = HostMoments(self._adam) if config.offload_moments else None

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._config, self.steps, self._total)

    @torch.no_grad()
    def step(self) -> Update:
        """Reduce, clip, update, clear gradients. With a gradient norm that is not finite it only clears them."""
        lr = self.lr
        if self._reduce is not None:
            for parameter, summed in zip(self.parameters, self._sums, strict=True):
                if summed.grad is None:
                    summed.grad = torch.zeros_like(parameter, dtype=torch.float32)
            self._reduce([s.grad for s in self._sums if s.grad is not None])
        norm = math.sqrt(self._squared_norm([s.grad for s in self._sums if s.grad is not None]))
        for master, share, summed in zip(self._masters, self.shares, self._sums, strict=True):
            if master is not summed and summed.grad is not None and master.numel():
                master.grad = share.of(summed.grad)
        gradients = [m.grad for m in self._masters if m.grad is not None]
        self.look(gradients)
        finite = math.isfinite(norm)
        if finite:
            if norm > self._max_norm:
                torch._foreach_mul_(gradients, self._max_norm / (norm + 1e-6))
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._moved = [m for m in self._masters if m.grad is not None]
            if self._away is None:
                self._adam.step()
            else:
                self._away.step(self._masters)
            self.steps += 1
            self._publish()
        self.clear()
        return Update(norm, lr, "" if finite else "not_finite")

    @torch.no_grad()
    def shorten(self, made: float, share: float) -> None:
        """Make `share` of the last step, of which `made` is made: parameters become `old + share * (new - old)`.

        That is AdamW's step with `share` times the learning rate, as its weight decay is multiplied by that rate too. So the
        moments and the step count stay as the whole step left them: they are averages over gradients, and these were seen,
        however far one then goes. `old` is not kept: the step follows from the moments, up to the rounding of float32.
        Element by element, so that it is the same however parameters are divided among ranks.
        """
        moved = {id(m) for m in self._moved}
        for group in self._adam.param_groups:
            (beta1, beta2), decay, rate = group["betas"], group["weight_decay"], group["lr"]
            for master in (m for m in group["params"] if id(m) in moved):
                adam = self._adam.state[master]
                count, value = float(adam["step"]), local(master.detach())
                with self._away.borrowed(master) if self._away is not None else contextlib.nullcontext():
                    scale = local(adam["exp_avg_sq"]).sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
                    step = local(adam["exp_avg"]).div(scale).mul_(rate / (1 - beta1**count))
                value.add_(step, alpha=made).div_(1 - made * rate * decay)
                value.mul_(1 - share * rate * decay).sub_(step, alpha=share)
        self._publish()

    def _publish(self) -> None:
        """Parameters become their masters, those of all ranks. Collective if there are `shares`."""
        for parameter, share, master in zip(self.parameters, self.shares, self._masters, strict=True):
            if parameter.dtype != master.dtype:
                share.of(parameter.detach()).copy_(master)
        self._gather([p.detach() for p in self.parameters])
        self._changed()

    def skip(self, cause: Cause) -> Update:
        """No step: forget the gradients."""
        self.clear()
        return Update(0.0, self.lr, cause)

    def states(self) -> Iterator[dict[str, Tensor]]:
        """For each parameter, in order, what later steps depend on: `master` and, if it was ever updated, Adam's `exp_avg`,
        `exp_avg_sq` and `step`. The tensors themselves, of this rank's share; they change with the next step."""
        for master in self._masters:
            yield {"master": local(master.detach())} | self._moments(master)

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        adam = self._adam.state.get(master, {})
        if self._away is not None:
            adam = {**adam, **self._away.of(master)}
        return {name: local(adam[name]) for name in MOMENTS if name in adam}

    @torch.no_grad()
    def restore(self, states: Iterable[Mapping[str, Tensor]], steps: int) -> None:
        """Resume as if `steps` had been made and `states()` were that, but with the `master` of the whole parameter, whatever
        its share. Parameters become their masters; no gradient is left. Not collective."""
        self.clear()
        self.steps = steps
        self._adam.state.clear()
        if self._away is not None:
            self._away.forget()
        own = zip(self.parameters, self._masters, self.shares, strict=True)
        for (parameter, master, share), saved in zip(own, states, strict=True):
            local(master.detach()).copy_(share.of(saved["master"]))
            if parameter is not master:
                parameter.copy_(saved["master"])
            if "step" in saved:
                # As Adam makes them: the fused kernel wants the count on the parameter's device.
                count = saved["step"].to(master.device, copy=True)
                moments = {name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in MOMENTS[1:]}
                for name, moment in moments.items():
                    local(moment).copy_(saved[name])
                self._adam.state[master] = {"step": count, **moments}
                if self._away is not None:
                    self._away.put_away(master)
        self._changed()

    def clear(self) -> None:
        """Forget accumulated gradients."""
        for each in (*self.parameters, *self._masters, *self._sums):
            each.grad = None


class _Sum:
    """Of the gradients of a parameter, in float32."""

    grad: Tensor | None = None


@torch.no_grad()
def _move_gradient(summed: Tensor | _Sum, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if summed.grad is None:
        summed.grad = parameter.grad.float()
    else:
        summed.grad.add_(parameter.grad)
    parameter.grad = None
