"""The loss of one micro-batch, and the sums that become the metrics of a step.

`loss = sum over tokens (policy loss + coef * KL(rollout || learner)) / denominator`

The denominator is the number of trained tokens of the *whole step*, known before its first micro-batch: gradients of the
micro-batches add up to that of the step, however its samples were packed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from r3async.algorithms.kl import ESTIMATORS, k1, k2, k3
from r3async.algorithms.policy_loss import POLICY_LOSSES
from r3async.config import AlgorithmConfig


@dataclass
class ObjectiveSums:
    """Sums over trained tokens, float64 scalars on the loss's device; add them over micro-batches."""

    tokens: Tensor
    policy: Tensor
    rollout_kl: Tensor
    k1: Tensor
    k2: Tensor
    k3: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    entropy: Tensor

    def __add__(self, other: ObjectiveSums) -> ObjectiveSums:
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        added["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)
        return ObjectiveSums(**added)

    def metrics(self) -> dict[str, float]:
        """Means over trained tokens (nats). `loss/policy + loss/rollout_kl` is the loss; `ratio/ess` is
        `(sum w)^2 / (n sum w^2)` of the uncapped ratios, 1 when all are equal."""
        names = [f.name for f in fields(self)]
        values = torch.stack([getattr(self, name) for name in names]).tolist()  # one transfer from the device
        return _metrics(**dict(zip(names, values, strict=True)))


def _metrics(
    tokens: float = 0.0,
    policy: float = 0.0,
    rollout_kl: float = 0.0,
    k1: float = 0.0,
    k2: float = 0.0,
    k3: float = 0.0,
    ratio: float = 0.0,
    ratio_squared: float = 0.0,
    ratio_max: float = 0.0,
    entropy: float = 0.0,
) -> dict[str, float]:
    n = max(tokens, 1.0)
    return {
        "loss/policy": policy / n,
        "loss/rollout_kl": rollout_kl / n,
        "rollout_kl/k1": k1 / n,
        "rollout_kl/k2": k2 / n,
        "rollout_kl/k3": k3 / n,
        "ratio/max": ratio_max,
        "ratio/ess": ratio * ratio / (n * ratio_squared) if ratio_squared else 0.0,
        "entropy/mean": entropy / n,
    }


EMPTY_METRICS: dict[str, float] = _metrics()
"""The same metrics of a step that trained no token: all 0."""


def objective(
    logprobs: Tensor,
    entropies: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: int,
    config: AlgorithmConfig,
) -> tuple[Tensor, ObjectiveSums]:
    """Scalar loss of one micro-batch, and its sums.

    `logprobs` float32 `[M]`: learner's log-probs of the tokens, the only argument that receives gradient. `entropies`,
    `rollout_logprobs`, `advantages` float32 `[M]`; `mask` bool `[M]`: tokens that count, the others may hold anything
    (NaN too). `denominator`: trained tokens of the whole step, at least 1.
    """
    if denominator < 1:
        raise ValueError(f"denominator is {denominator}: a step without trained tokens has no loss")
    policy = POLICY_LOSSES[config.policy_loss](logprobs, rollout_logprobs, advantages, mask, config.ratio_cap)
    delta = torch.where(mask, logprobs - rollout_logprobs, 0.0)
    kl = config.rollout_kl.coef * ESTIMATORS[config.rollout_kl.estimator](delta)
    loss = (policy + kl).sum() / denominator

    exact = delta.detach().double()
    ratio = torch.where(mask, exact.exp(), 0.0)
    sums = ObjectiveSums(
        tokens=mask.sum(dtype=torch.float64),
        policy=policy.detach().sum(dtype=torch.float64),
        rollout_kl=kl.detach().sum(dtype=torch.float64),
        k1=k1(exact).sum(),
        k2=k2(exact).sum(),
        k3=k3(exact).sum(),
        ratio=ratio.sum(),
        ratio_squared=ratio.square().sum(),
        ratio_max=ratio.max() if len(ratio) else ratio.sum(),
        entropy=torch.where(mask, entropies.detach(), 0.0).sum(dtype=torch.float64),
    )
    return loss, sums
