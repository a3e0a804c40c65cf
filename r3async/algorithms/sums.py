"""What a step reports of its loss: sums over trained tokens that add up over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor


@dataclass
class ObjectiveSums:
    """float64 scalars on the loss's device. All are sums, except those that `maxima` names."""

    tokens: Tensor
    policy: Tensor
    rollout_kl: Tensor
    reference_kl: Tensor
    entropy_term: Tensor
    k1: Tensor
    k2: Tensor
    k3: Tensor
    reference_k3: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    entropy: Tensor

    def __add__(self, other: ObjectiveSums) -> ObjectiveSums:
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        added |= {name: torch.maximum(getattr(self, name), getattr(other, name)) for name in self.maxima()}
        return ObjectiveSums(**added)

    @staticmethod
    def names() -> list[str]:
        """The sums in the order of `values`."""
        return [f.name for f in fields(ObjectiveSums)]

    @staticmethod
    def maxima() -> list[str]:
        """The names that combine by their maximum, not by their sum."""
        return ["ratio_max"]

    @staticmethod
    def zero(device: torch.device | str = "cpu") -> ObjectiveSums:
        """Of no token at all."""
        return ObjectiveSums(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(ObjectiveSums)))

    def values(self) -> np.ndarray:
        """float64 `[n]` on the host, by one transfer."""
        return torch.stack([getattr(self, name) for name in self.names()]).cpu().numpy()

    def metrics(self) -> dict[str, float]:
        """See `metrics_of`."""
        return self.metrics_of(self.values())

    @staticmethod
    def metrics_of(values: np.ndarray) -> dict[str, float]:
        """From `values` combined over micro-batches and ranks. `loss/*` (sums of weighted terms) add up to the loss; the
        others are means over trained tokens, in nats. `ratio/ess` is `(sum w)^2 / (n sum w^2)` of the uncapped ratios, 1
        when all are equal. All are 0 if no token was trained.
        """
        s = dict(zip(ObjectiveSums.names(), values.tolist(), strict=True))
        n = max(s["tokens"], 1.0)
        return {
            "loss/policy": s["policy"],
            "loss/rollout_kl": s["rollout_kl"],
            "loss/reference_kl": s["reference_kl"],
            "loss/entropy": s["entropy_term"],
            "rollout_kl/k1": s["k1"] / n,
            "rollout_kl/k2": s["k2"] / n,
            "rollout_kl/k3": s["k3"] / n,
            "reference_kl/k3": s["reference_k3"] / n,
            "ratio/max": s["ratio_max"],
            "ratio/ess": s["ratio"] ** 2 / (n * s["ratio_squared"]) if s["ratio_squared"] else 0.0,
            "entropy/mean": s["entropy"] / n,
        }
