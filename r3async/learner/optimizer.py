"""AdamW with warm-up, global-norm clipping and fp32 master weights, sharded and offloaded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from r3async.config import Config, LearnerConfig
from r3async.learner.gradient_reducer import GradientReducer, Gradients
from r3async.learner.host_moments import HostMoments
from r3async.learner.row_shares import UNSHARDED, RowShare, to_local

SkipCause = Literal["", "zero_variance", "not_finite", "trust_region"]
"""The reason why a step made no update: no trained token has an advantage, a number was not finite,
or the drift was beyond `rollout_kl.max`. Empty: it made one."""


@dataclass(frozen=True)
class OptimizerUpdate:
    """The outcome of an optimizer step. With a `cause` nothing changed: no weight, no
    moment, no step count.

    Attributes:
        grad_norm: Global L2 norm before clipping; 0 if none was computed.
        lr: Learning rate of this step.
        step_share: Share of the step that was made; less than 1 where
            `rollout_kl.limit` shortened it.
        predicted_drift: The served drift that the step leads to, where that was measured.
        is_beyond_limit: True if that is above `rollout_kl.limit`, although the step was shortened
            as far as it may be.
        served_drift_estimate: The estimate of served drift before the step, in a step that
            did not measure it.
    """

    grad_norm: float
    lr: float
    cause: SkipCause = ""
    step_share: float = 1.0
    predicted_drift: float | None = None
    is_beyond_limit: bool = False
    served_drift_estimate: float | None = None


@dataclass(frozen=True)
class AdamSettings:
    """Settings of AdamW for the next steps, in place of the configuration's.

    Attributes:
        max_grad_norm: Gradients are clipped to this norm; infinite: they are not.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


ADAM_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
"""Names of Adam's state of a parameter; the moments have its shape, the step is one number."""


class OptimizerState(NamedTuple):
    """The state of an optimizer: float32 values, Adam's moments and gradients of this
    rank's share of each parameter, on its device."""

    values: list[Tensor]
    adam: list[dict[str, Tensor]]
    gradients: list[Tensor | None]
    update_count: int


def compute_learning_rate(config: LearnerConfig, updates_done: int, updates_total: int) -> float:
    """Return the learning rate of the update after `updates_done` ones, of
    `updates_total` in the run.

    It is `lr` times a share that rises linearly over `warmup_steps` updates and then, with
    `lr_schedule`, falls to `min_lr_ratio` at update `updates_total`, and stays there.
    """
    warm_up = config.warmup_steps
    if updates_done < warm_up:
        return config.lr * ((updates_done + 1) / warm_up)
    if config.lr_schedule == "constant":
        return config.lr
    # `done` goes from 0 at the first update at full rate to 1 at the last one.
    done = min(
        1.0,
        max(0, updates_done - max(0, warm_up - 1))
        / max(1, updates_total - 1 - max(0, warm_up - 1)),
    )
    share = 1 - done if config.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def count_updates(config: Config) -> int:
    """Return the number of optimizer updates of a run in which none is skipped."""
    return config.steps * config.schedule.updates_per_step


class MasterAdamW:
    """AdamW (decoupled weight decay, arXiv 1711.05101) over `parameters`, which keep their dtype.

    Parameters below float32 get a float32 master copy. Gradients of micro-batches accumulate in it
    as soon as each is computed, whatever the order of forward and backward passes. The update is
    made on it, so that small updates are not rounded away. Parameters with fewer than two
    dimensions (norms) get no weight decay. The learning rate follows from the number of steps made
    alone (`compute_learning_rate`), so a restored optimizer continues with the same one.

    Args:
        updates_total: The number of updates that the run will make.
        reducer: How ranks exchange gradients; by default, one rank has everything.
        on_change: Called whenever the parameters have new values.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        config: LearnerConfig,
        *,
        updates_total: int = 0,
        reducer: GradientReducer | None = None,
        on_change: Callable[[], None] = lambda: None,
    ):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.reducer = reducer or GradientReducer()
        self.shares = self.reducer.shares or [UNSHARDED] * len(self.parameters)
        self._masters: list[Tensor] = []
        self._gradient_holders: list[Tensor | _GradientHolder] = []
        """One object per parameter, whose `grad` is the gradient of the whole
        parameter, in float32, or with `reducer.keeps_shares` of its share. It is the parameter,
        its master, or neither."""
        for index, (parameter, share) in enumerate(zip(self.parameters, self.shares, strict=True)):
            exact = parameter.dtype == torch.float32
            whole = share.num_ranks == 1
            if exact and whole:
                master: Tensor = parameter
            else:  # the master of a float32 parameter shares its memory
                part = share.select_rows(parameter.detach())
                master = Parameter(part if exact else part.float())
            self._masters.append(master)
            if self.reducer.keeps_shares and not whole:
                holder = _GradientHolder()
                self._gradient_holders.append(holder)
                parameter.register_post_accumulate_grad_hook(
                    partial(
                        _scatter_gradient, holder, share, partial(self.reducer.add_gradient, index)
                    )
                )
                continue
            self._gradient_holders.append(
                parameter if exact else master if whole else _GradientHolder()
            )
            if not exact:
                parameter.register_post_accumulate_grad_hook(
                    partial(_accumulate_gradient, self._gradient_holders[-1])
                )
        self._on_change = on_change
        self._max_norm = config.max_grad_norm
        self._settings: AdamSettings | None = None
        self._config = config
        self._updates_total = updates_total
        self.update_count = 0
        self._last_stepped: list[Tensor] = []
        """The masters that the last step changed."""
        self.on_gradients: Callable[[Gradients], object] = lambda gradients: None
        """Callback for the gradients of each step, summed over ranks and not clipped yet."""
        decayed = [m for m in self._masters if m.ndim >= 2]
        plain = [m for m in self._masters if m.ndim < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._host_moments = HostMoments(self._adam) if config.offload_moments else None

    def use_settings(self, settings: AdamSettings) -> None:
        """Make the next steps with these settings."""
        self._settings = settings
        self._max_norm = settings.max_grad_norm
        for group, decay in zip(self._adam.param_groups, (settings.weight_decay, 0.0), strict=True):
            group.update(betas=settings.betas, eps=settings.eps, weight_decay=decay)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        if self._settings is not None:
            return self._settings.lr
        return compute_learning_rate(self._config, self.update_count, self._updates_total)

    @torch.no_grad()
    def step(self) -> OptimizerUpdate:
        """Reduce, clip, update, clear gradients. With a gradient norm that is not finite,
        only clear them."""
        lr = self.lr
        if self.reducer.sums_gradients:
            for parameter, share, summed in zip(
                self.parameters, self.shares, self._gradient_holders, strict=True
            ):
                if summed.grad is None:
                    whole = parameter.detach()
                    kept = share.select_rows(whole) if self.reducer.keeps_shares else whole
                    summed.grad = torch.zeros_like(kept, dtype=torch.float32)
            self.reducer.reduce_gradients(
                [s.grad for s in self._gradient_holders if s.grad is not None]
            )
        reduced = [s.grad for s in self._gradient_holders if s.grad is not None]
        norm = math.sqrt(self.reducer.compute_squared_norm(reduced))
        for master, share, summed in zip(
            self._masters, self.shares, self._gradient_holders, strict=True
        ):
            if master is not summed and summed.grad is not None and master.numel():
                master.grad = (
                    summed.grad if self.reducer.keeps_shares else share.select_rows(summed.grad)
                )
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
        """Change the share of the last step that is made from `current_share` to `new_share`.

        Parameters become `old + share * (new - old)`. That is AdamW's step with `new_share` times
        the learning rate, as its weight decay is multiplied by that rate too. So the moments and
        the step count stay as the whole step left them: they are averages over gradients that were
        seen, whatever the length of the step. `old` is not kept: the step follows from the moments,
        up to the rounding of float32. It works element by element, so the result is the same
        however parameters are divided among ranks.
        """
        moved = {id(m) for m in self._last_stepped}
        for group in self._adam.param_groups:
            beta1, beta2 = group["betas"]
            decay = group["weight_decay"]
            rate = group["lr"]
            for master in (m for m in group["params"] if id(m) in moved):
                adam = self._adam.state[master]
                count = float(adam["step"])
                value = to_local(master.detach())
                with (
                    self._host_moments.moments_on_device(master)
                    if self._host_moments is not None
                    else contextlib.nullcontext()
                ):
                    scale = (
                        to_local(adam["exp_avg_sq"])
                        .sqrt()
                        .div_(math.sqrt(1 - beta2**count))
                        .add_(group["eps"])
                    )
                    step = to_local(adam["exp_avg"]).div(scale).mul_(rate / (1 - beta1**count))
                value.add_(step, alpha=current_share).div_(1 - current_share * rate * decay)
                value.mul_(1 - new_share * rate * decay).sub_(step, alpha=new_share)
        self._write_parameters()

    def _write_parameters(self) -> None:
        """Copy the masters to the parameters, those of all ranks. Collective if
        there are `shares`."""
        for parameter, share, master in zip(
            self.parameters, self.shares, self._masters, strict=True
        ):
            if parameter.dtype != master.dtype:
                share.select_rows(parameter.detach()).copy_(master)
        self.reducer.gather_parameters([p.detach() for p in self.parameters])
        self._on_change()

    def skip_step(self, cause: SkipCause) -> OptimizerUpdate:
        """Discard the gradients without a step."""
        self.zero_grad()
        return OptimizerUpdate(0.0, self.lr, cause)

    def iter_states(self) -> Iterator[dict[str, Tensor]]:
        """Yield, for each parameter in order, the state that later steps depend on.

        It has `master` and, if the parameter was ever updated, Adam's `exp_avg`,
        `exp_avg_sq` and `step`. These are the tensors themselves, of this rank's share; they
        change with the next step.
        """
        for master in self._masters:
            yield {"master": to_local(master.detach())} | self._adam_state(master)

    def _adam_state(self, master: Tensor) -> dict[str, Tensor]:
        adam = self._adam.state.get(master, {})
        if self._host_moments is not None:
            adam = {**adam, **self._host_moments.get_moments(master)}
        return {name: to_local(adam[name]) for name in ADAM_STATE_KEYS if name in adam}

    @torch.no_grad()
    def load_states(self, states: Iterable[Mapping[str, Tensor]], update_count: int) -> None:
        """Resume as if `update_count` updates had been made and `iter_states()` were `states`.

        Unlike there, `master` is that of the whole parameter, whatever its share. Parameters become
        their masters; no gradient is left. Not collective.
        """
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
                # Created as Adam does: the fused kernel needs the count on the parameter's device.
                count = saved["step"].to(master.device, copy=True)
                moments = {
                    name: torch.zeros_like(master, memory_format=torch.preserve_format)
                    for name in ADAM_STATE_KEYS[1:]
                }
                for name, moment in moments.items():
                    to_local(moment).copy_(saved[name])
                self._adam.state[master] = {"step": count, **moments}
                if self._host_moments is not None:
                    self._host_moments.offload_moments(master)
        self._on_change()

    @torch.no_grad()
    def take_state(self) -> OptimizerState:
        """Take the state out, for `put_state`. The parameters keep their values, and next steps
        begin without moments."""
        assert self._host_moments is None, "`learner.offload_moments` is set"
        state = OptimizerState(
            [to_local(master.detach()).clone() for master in self._masters],
            [self._adam.state.pop(master, {}) for master in self._masters],
            [holder.grad for holder in self._gradient_holders],
            self.update_count,
        )
        self.zero_grad()
        self.update_count = 0
        return state

    @torch.no_grad()
    def put_state(self, state: OptimizerState) -> None:
        """Continue with a state that `take_state` took out. Collective if there are `shares`."""
        self.zero_grad()
        self.update_count = state.update_count
        self._adam.state.clear()
        for master, values, adam, holder, gradient in zip(
            self._masters,
            state.values,
            state.adam,
            self._gradient_holders,
            state.gradients,
            strict=True,
        ):
            to_local(master.detach()).copy_(values)
            if adam:
                self._adam.state[master] = adam
            holder.grad = gradient
        self._write_parameters()

    @contextlib.contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """Be without the accumulated gradients in a block, which leaves none of its own."""
        kept = [holder.grad for holder in self._gradient_holders]
        self.zero_grad()
        try:
            yield
        finally:
            for holder, gradient in zip(self._gradient_holders, kept, strict=True):
                holder.grad = gradient

    def zero_grad(self) -> None:
        """Discard accumulated gradients."""
        for each in (*self.parameters, *self._masters, *self._gradient_holders):
            each.grad = None


class _GradientHolder:
    """A holder of a parameter's gradient, in float32."""

    grad: Tensor | None = None


@torch.no_grad()
def _accumulate_gradient(summed: Tensor | _GradientHolder, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if summed.grad is None:
        summed.grad = parameter.grad.float()
    else:
        summed.grad.add_(parameter.grad)
    parameter.grad = None


@torch.no_grad()
def _scatter_gradient(
    summed: _GradientHolder,
    share: RowShare,
    add: Callable[[Tensor, Tensor], None],
    parameter: Tensor,
) -> None:
    assert parameter.grad is not None
    if summed.grad is None:
        summed.grad = torch.zeros_like(share.select_rows(parameter.detach()), dtype=torch.float32)
    add(summed.grad, parameter.grad)
    parameter.grad = None
