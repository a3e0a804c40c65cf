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
from r3async.learner.shares import UNSHARDED, RowShare

SkipCause = Literal["", "no_contrast", "not_finite", "trust_region"]
"""Why a step made no update: no trained token has an advantage, a number was not finite, or the drift was beyond
`rollout_kl.max`. Empty: it made one."""


@dataclass(frozen=True)
class OptimizerUpdate:
    """`grad_norm`: global L2 norm before clipping, 0 where none was taken. `lr`: of this step. With a `cause` nothing changed:
    no weight, no moment, no step count. `step_share`: of the step that was made; less than 1 where `rollout_kl.limit`
    shortened it. `predicted_drift`: the served drift that it leads to, where that was measured. `served_drift_estimate`: the
    estimate of that before it, in a step that did not measure it."""

    grad_norm: float
    lr: float
    cause: SkipCause = ""
    step_share: float = 1.0
    predicted_drift: float | None = None
    served_drift_estimate: float | None = None


Gradients = Sequence[Tensor]


def compute_squared_norm(gradients: Gradients) -> float:
    """Sum of squares of all elements, of one rank that holds everything."""
    return float(torch.stack(torch._foreach_norm(gradients)).double().square().sum()) if gradients else 0.0


ADAM_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps of a parameter; the moments have its shape, the step is one number."""


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compute_learning_rate(config: LearnerConfig, updates_done: int, updates_total: int) -> float:
    """Of the update after `updates_done` ones, of `updates_total` in the run: `lr` times a share that rises in a line over
    `warmup_steps` updates and then, with `lr_schedule`, falls to `min_lr_ratio` at update `updates_total`, and stays there."""
    warm_up = config.warmup_steps
    if updates_done < warm_up:
        return config.lr * ((updates_done + 1) / warm_up)
    if config.lr_schedule == "constant":
        return config.lr
    # From the first update at full rate, where `done` is 0, to the last one, where it is 1.
    done = min(1.0, max(0, updates_done - max(0, warm_up - 1)) / max(1, updates_total - 1 - max(0, warm_up - 1)))
    share = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def count_updates(config: Config) -> int:
    """Optimizer updates of a run in which none is skipped."""
    return config.steps * config.schedule.updates_per_step


class MasterAdamW:
    """AdamW (decoupled weight decay, arXiv 1711.05101) over `parameters`, which keep their dtype.

    Parameters below float32 get a float32 master copy: gradients of micro-batches accumulate in it, as soon as each is
    made and whatever the order of forward and backward passes, and the update is made on it, so that small updates are not
    rounded away. Parameters with fewer than two dimensions (norms) get no weight decay. The learning rate follows from the number
    of steps made alone (`compute_learning_rate`), so a restored optimizer goes on with the same; `updates_total`: how many
    there will be.

    Where there are several ranks, `reduce_gradients` sums each gradient, in the order of `parameters`, over the ranks that
    hold a copy of the parameter, in place, and `compute_squared_norm` gives the sum of squares over the whole model. With
    `reduce_gradients`, a parameter without a gradient has zeros, since the other ranks expect it to take part. `on_change` is
    called whenever the parameters have new values.

    `shares`, of each parameter: the rows that this rank updates, and has masters and moments of. Then `reduce_gradients` may sum
    these rows alone, and `gather_parameters` fills, in place, the other rows in from the ranks that updated them. Both get
    everything that is trained.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        config: LearnerConfig,
        *,
        updates_total: int = 0,
        reduce_gradients: Callable[[Gradients], None] | None = None,
        squared_norm: Callable[[Gradients], float] = compute_squared_norm,
        shares: Sequence[RowShare] = (),
        gather_parameters: Callable[[Sequence[Tensor]], None] = lambda parameters: None,
        on_change: Callable[[], None] = lambda: None,
    ):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.shares = shares or [UNSHARDED] * len(self.parameters)
        self._masters: list[Tensor] = []
        self._gradient_holders: list[Tensor | _GradientHolder] = []
        """Whose `grad` is the gradient of the whole parameter, in float32: the parameter, its master, or neither."""
        for parameter, share in zip(self.parameters, self.shares, strict=True):
            exact, whole = parameter.dtype == torch.float32, share.num_ranks == 1
            if exact and whole:
                master: Tensor = parameter
            else:  # of a float32 parameter it shares the memory
                part = share.select_rows(parameter.detach())
                master = Parameter(part if exact else part.float())
            self._masters.append(master)
            self._gradient_holders.append(parameter if exact else master if whole else _GradientHolder())
            if not exact:
                parameter.register_post_accumulate_grad_hook(partial(_accumulate_gradient, self._gradient_holders[-1]))
        self._reduce_gradients, self._squared_norm = reduce_gradients, squared_norm
        self._gather_parameters, self._on_change = gather_parameters, on_change
        self._max_norm, self._config, self._updates_total = config.max_grad_norm, config, updates_total
        self.update_count = 0
        self._last_stepped: list[Tensor] = []
        """The masters that the last step changed."""
        self.on_gradients: Callable[[Gradients], object] = lambda gradients: None
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
        self._host_moments = HostMoments(self._adam) if config.offload_moments else None

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return compute_learning_rate(self._config, self.update_count, self._updates_total)

    @torch.no_grad()
    def step(self) -> OptimizerUpdate:
        """Reduce, clip, update, clear gradients. With a gradient norm that is not finite it only clears them."""
        lr = self.lr
        if self._reduce_gradients is not None:
            for parameter, summed in zip(self.parameters, self._gradient_holders, strict=True):
                if summed.grad is None:
                    summed.grad = torch.zeros_like(parameter, dtype=torch.float32)
            self._reduce_gradients([s.grad for s in self._gradient_holders if s.grad is not None])
        norm = math.sqrt(self._squared_norm([s.grad for s in self._gradient_holders if s.grad is not None]))
        for master, share, summed in zip(self._masters, self.shares, self._gradient_holders, strict=True):
            if master is not summed and summed.grad is not None and master.numel():
                master.grad = share.select_rows(summed.grad)
        gradients = [m.grad for m in self._masters if m.grad is not None]
        self.on_gradients(gradients)
        finite = math.isfinite(norm)
        if finite:
            if norm > self._max_norm:
                torch._foreach_mul_(gradients, self._max_norm / (norm + 1e-6))
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._last_stepped = [m for m in self._masters if m.grad is not None]
            if self._host_moments is None:
                self._adam.step()
            else:
                self._host_moments.step(self._masters)
            self.update_count += 1
            self._write_parameters()
        self.zero_grad()
        return OptimizerUpdate(norm, lr, "" if finite else "not_finite")

    @torch.no_grad()
    def shorten_step(self, current_share: float, new_share: float) -> None:
        """Make `new_share` of the last step, of which `current_share` is made: parameters become `old + share * (new - old)`.

        That is AdamW's step with `new_share` times the learning rate, as its weight decay is multiplied by that rate too. So the
        moments and the step count stay as the whole step left them: they are averages over gradients, and these were seen,
        however far one then goes. `old` is not kept: the step follows from the moments, up to the rounding of float32.
        Element by element, so that it is the same however parameters are divided among ranks.
        """
        moved = {id(m) for m in self._last_stepped}
        for group in self._adam.param_groups:
            (beta1, beta2), decay, rate = group["betas"], group["weight_decay"], group["lr"]
            for master in (m for m in group["params"] if id(m) in moved):
                adam = self._adam.state[master]
                count, value = float(adam["step"]), to_local(master.detach())
                with (
                    self._host_moments.moments_on_device(master)
                    if self._host_moments is not None
                    else contextlib.nullcontext()
                ):
                    scale = to_local(adam["exp_avg_sq"]).sqrt().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
                    step = to_local(adam["exp_avg"]).div(scale).mul_(rate / (1 - beta1**count))
                value.add_(step, alpha=current_share).div_(1 - current_share * rate * decay)
                value.mul_(1 - new_share * rate * decay).sub_(step, alpha=new_share)
        self._write_parameters()

    def _write_parameters(self) -> None:
        """Parameters become their masters, those of all ranks. Collective if there are `shares`."""
        for parameter, share, master in zip(self.parameters, self.shares, self._masters, strict=True):
            if parameter.dtype != master.dtype:
                share.select_rows(parameter.detach()).copy_(master)
        self._gather_parameters([p.detach() for p in self.parameters])
        self._on_change()

    def skip_step(self, cause: SkipCause) -> OptimizerUpdate:
        """No step: forget the gradients."""
        self.zero_grad()
        return OptimizerUpdate(0.0, self.lr, cause)

    def iter_states(self) -> Iterator[dict[str, Tensor]]:
        """For each parameter, in order, what later steps depend on: `master` and, if it was ever updated, Adam's `exp_avg`,
        `exp_avg_sq` and `step`. The tensors themselves, of this rank's share; they change with the next step."""
        for master in self._masters:
            yield {"master": to_local(master.detach())} | self._adam_state(master)

    def _adam_state(self, master: Tensor) -> dict[str, Tensor]:
        adam = self._adam.state.get(master, {})
        if self._host_moments is not None:
            adam = {**adam, **self._host_moments.get_moments(master)}
        return {name: to_local(adam[name]) for name in ADAM_STATE_KEYS if name in adam}

    @torch.no_grad()
    def load_states(self, states: Iterable[Mapping[str, Tensor]], update_count: int) -> None:
        """Resume as if `update_count` had been made and `iter_states()` were that, but with the `master` of the whole parameter,
        whatever its share. Parameters become their masters; no gradient is left. Not collective."""
        self.zero_grad()
        self.update_count = update_count
        self._adam.state.clear()
        if self._host_moments is not None:
            self._host_moments.clear_moments()
        own = zip(self.parameters, self._masters, self.shares, strict=True)
        for (parameter, master, share), saved in zip(own, states, strict=True):
            to_local(master.detach()).copy_(share.select_rows(saved["master"]))
            if parameter is not master:
                parameter.copy_(saved["master"])
            if "step" in saved:
                # As Adam makes them: the fused kernel wants the count on the parameter's device.
                count = saved["step"].to(master.device, copy=True)
                moments = {
                    name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in ADAM_STATE_KEYS[1:]
                }
                for name, moment in moments.items():
                    to_local(moment).copy_(saved[name])
                self._adam.state[master] = {"step": count, **moments}
                if self._host_moments is not None:
                    self._host_moments.offload_moments(master)
        self._on_change()

    def zero_grad(self) -> None:
        """Forget accumulated gradients."""
        for each in (*self.parameters, *self._masters, *self._gradient_holders):
            each.grad = None


class _GradientHolder:
    """Of the gradients of a parameter, in float32."""

    grad: Tensor | None = None


@torch.no_grad()
def _accumulate_gradient(summed: Tensor | _GradientHolder, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if summed.grad is None:
        summed.grad = parameter.grad.float()
    else:
        summed.grad.add_(parameter.grad)
    parameter.grad = None
