"""The configuration section `model`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from r3async.config.section import PositiveFloat, Section, Seed, SignedFloat

INIT_MAX_POSITIONS = 32_768
"""Positions of a model that is made at the start. They cost no weights: positions are rotary."""


class InitShape(msgspec.Struct, frozen=True):
    """Numbers of a Qwen3-MoE that is made at the start."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    expert_hidden_size: int = 64

    def build_model_config(self, vocab_size: int, rope_theta: float) -> dict[str, Any]:
        """Build the model's `config.json`, as transformers has it, without the tokenizer's ids."""
        return {
            "model_type": "qwen3_moe",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.hidden_size // self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_hidden_size,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "max_position_embeddings": INIT_MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
            "tie_word_embeddings": False,
        }


INIT_SHAPES = {
    "small": InitShape(),
    "tiny": InitShape(hidden_size=32, layers=2, expert_hidden_size=32),
}
"""Values of `model.init.size`."""


class InitConfig(Section):
    """A small random Qwen3-MoE, created and warmed up on the environment's oracle when
    `model.path` is not given."""

    size: Literal["small", "tiny"] = "small"
    """`small`: 4 layers of 128 values, 8 experts, top-2. `tiny`: 2 layers of 32 values, for
    `generator.engine` = "scripted"."""
    seed: Seed = 0
    """Seed of the random weights and the warm-up, separate from the run's `seed`."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary positions."""
    warm_reward: SignedFloat = 0.4
    """Mean sampled reward at which supervised steps stop."""
    max_warm_steps: int = 2000

    @property
    def shape(self) -> InitShape:
        return INIT_SHAPES[self.size]


class ModelConfig(Section):
    path: str = ""
    """Hugging Face model with a chat template: a directory, or a name on the hub
    (docs/models.md#where-a-model-is). Empty: one is created from `init`."""
    init: InitConfig = msgspec.field(default_factory=InitConfig)
    head_dtype: Literal["float32", "model"] = "float32"
    """Precision of the logits in engine and learner. `model` rounds the products with the output
    matrix to `generator.dtype` and `learner.dtype`."""
