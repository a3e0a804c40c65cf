"""The loss of one micro-batch, and the sums that become the metrics of a step.

`loss = sum over tokens (policy loss + coef * KL(rollout || learner)) / denominator`

The denominator is the number of trained tokens of the *whole step*, known before its first micro-batch: gradients of the
micro-batches add up to that of the step, however its samples were packed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
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

    @staticmethod
    def names() -> list[str]:
        """The sums in the order of `values`."""
        return [f.name for f in fields(ObjectiveSums)]

    @staticmethod
    def zero() -> ObjectiveSums:
        """Of no token at all."""
        return ObjectiveSums(*(torch.zeros((), dtype=torch.float64) for _ in fields(ObjectiveSums)))

    def values(self) -> np.ndarray:
        """float64 `[n]` on the host, by one transfer."""
        return torch.stack([getattr(self, name) for name in self.names()]).cpu().numpy()

    def metrics(self) -> dict[str, float]:
        """See `metrics_of`."""
        return self.metrics_of(self.values())

    @staticmethod
    def metrics_of(values: np.ndarray) -> dict[str, float]:
        """Means over trained tokens (nats), from `values` summed over micro-batches and ranks (`ratio_max`: their maximum).

        `loss/policy + loss/rollout_kl` is the loss; `ratio/ess` is `(sum w)^2 / (n sum w^2)` of the uncapped ratios, 1 when
        all are equal. All are 0 if no token was trained.
        """
        s = dict(zip(ObjectiveSums.names(), values.tolist(), strict=True))
        n = max(s["tokens"], 1.0)
        return {
            "loss/policy": s["policy"] / n,
            "loss/rollout_kl": s["rollout_kl"] / n,
            "rollout_kl/k1": s["k1"] / n,
            "rollout_kl/k2": s["k2"] / n,
            "rollout_kl/k3": s["k3"] / n,
            "ratio/max": s["ratio_max"],
            "ratio/ess": s["ratio"] ** 2 / (n * s["ratio_squared"]) if s["ratio_squared"] else 0.0,
            "entropy/mean": s["entropy"] / n,
        }


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
