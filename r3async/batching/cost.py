"""What a sample costs to train, from its length: the two coefficients, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3async.engines.base import moe_geometry


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
    c = config.get("text_config", config)
    if not c.keys() >= {"hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"}:
        return Cost()
    h, heads, layers = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
    head = c.get("head_dim") or h // heads
    rope = c.get("qk_rope_head_dim") or 0
    d_qk = c["qk_nope_head_dim"] + rope if c.get("qk_nope_head_dim") else head
    d_v = c.get("v_head_dim") or head
    if rank := c.get("kv_lora_rank"):
        q_rank = c.get("q_lora_rank")
        query = q_rank * (h + heads * d_qk) if q_rank else h * heads * d_qk
        projections = query + h * (rank + rope) + rank * heads * (d_qk - rope + d_v)
    else:
        kv_heads = c.get("num_key_value_heads") or heads
        projections = h * (heads * d_qk + kv_heads * (d_qk + d_v))
    projections += h * heads * d_v

    routing, moe_layers = moe_geometry(c)
    width = c.get("moe_intermediate_size") or c.get("intermediate_size") or 0
    shared = width * (c.get("n_shared_experts") or 0) + (c.get("shared_expert_intermediate_size") or 0)
    moe = 3 * h * (width * routing.top_k + shared) + h * routing.num_experts if routing else 0
    dense = 3 * h * (c.get("intermediate_size") or 0)
    weights = layers * projections + len(moe_layers) * moe + (layers - len(moe_layers)) * dense + h * c["vocab_size"]

    kinds = c.get("layer_types") or ["full_attention"] * layers
    windows = kinds.count("sliding_attention") * (c.get("sliding_window") or 0)
    attention = heads * (d_qk + d_v)
    return Cost(
        linear=2.0 * (weights + attention * windows), quadratic=float(attention * kinds.count("full_attention"))
    )
