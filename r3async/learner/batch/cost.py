"""What a sample costs to train, from its length: the two coefficients, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3async.data.model_shape import ShapeError, read_shape


@dataclass(frozen=True)
class Cost:
    """A sample of `n` tokens costs `linear * n + quadratic * n²`, in any unit: only ratios matter."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if not (self.linear > 0 and self.quadratic >= 0):
            raise ValueError(f"`linear` must be greater than 0 and `quadratic` not negative, got {self}")

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """float64, of the shape of `lengths`."""
        n = np.asarray(lengths, np.float64)
        return (self.linear + self.quadratic * n) * n

    def longest(self, budget: float) -> float:
        """The length that costs `budget`; 0 if that is negative."""
        if budget <= 0:
            return 0.0
        # The positive root of q n² + l n - budget, in the form that is exact for q = 0 and does not cancel.
        return float(2 * budget / (self.linear + (self.linear**2 + 4 * self.quadratic * budget) ** 0.5))


def cost_model(config: Mapping[str, Any]) -> Cost:
    """FLOPs of the forward pass over one sample, from a Hugging Face `config.json`. The backward pass is twice that.

    A multiply-add is 2 FLOPs. With `h` hidden size, `a` heads, `g` key-value heads, `d_qk` and `d_v` head dimensions:

    * linear, per layer: 2 h (a d_qk + g (d_qk + d_v) + a d_v) for the projections; 2 · 3 h w for a gated feed-forward of
      width `w`, where an MoE layer has w = top_k · expert width + shared width, and 2 h · experts for its router; and once
      2 h · vocabulary for the logits. Latent attention (MLA) projects through its low ranks instead.
    * quadratic, per layer with full attention: Σ_t 2 a (d_qk + d_v) t over the t = 1..n keys that token t sees, which is
      a (d_qk + d_v) n². A layer with a sliding window sees at most the window, and is linear; so is linear attention.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), table 1, with a causal mask, active experts only, grouped-query and gated
    layers; Chowdhery et al. 2022 (arXiv 2204.02311), appendix B, counts attention without the mask. Embedding lookup, norms
    and activation functions are left out, as they are there. A configuration that names its shape otherwise costs its
    tokens: a plan is then less even, and as right.
    """
    try:
        s = read_shape(config)
    except ShapeError:
        return Cost()
    h, heads, d_qk, d_v = s.hidden, s.heads, s.qk_dim, s.value_dim
    if s.kv_rank:
        query = s.query_rank * (h + heads * d_qk) if s.query_rank else h * heads * d_qk
        projections = query + h * (s.kv_rank + s.rope_dim) + s.kv_rank * heads * (d_qk - s.rope_dim + d_v)
    else:
        projections = h * (heads * d_qk + s.kv_heads * (d_qk + d_v))
    projections += h * heads * d_v
    moe, dense = 3 * h * s.expert_width * s.top_k + s.router, s.dense
    mixtures = len(s.moe_layers)
    weights = s.layers * projections + mixtures * moe + (s.layers - mixtures) * dense + s.embedding
    attention = heads * (d_qk + d_v)
    return Cost(linear=2.0 * (weights + attention * s.windows), quadratic=float(attention * s.full_layers))
