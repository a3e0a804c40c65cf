"""The device on which the GPU checks run, and their models and samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from r3async.config import Config, config_from_dict
from r3async.data.model_shape import parse_model_shape
from r3async.data.tokens import Sample, TokenTable

TINY = {"vocab_size": 1024, "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}
LAYERS_OF_30B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""Four of the 48 layers of Qwen3-30B-A3B, and its vocabulary: 3.1 B parameters."""
OTHERS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Place:
    """The device and directory of the GPU checks.

    Attributes:
        out: Directory of the results.
        small: Use shapes and counts that a CPU handles within seconds.
    """

    out: Path
    small: bool

    @property
    def cuda(self) -> bool:
        return torch.cuda.is_available()

    @property
    def device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16"]:
        """The engine's dtype; float32 on CPU, because routes of bfloat16 and float32 differ."""
        return "float32" if self.small else "bfloat16"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def model(self, name: str, dtype: str = "float32", seed: int = 0) -> Path:
        """Return the directory of a random Qwen3-MoE, `tiny` or `layers-of-30b`, made once."""
        shape = TINY if name == "tiny" or self.small else LAYERS_OF_30B
        return make_model(
            self.out / "models" / f"{name}-{dtype}-{seed}", dtype, seed, self.device, **shape
        )


def make_model(path: Path, dtype: str, seed: int, device: str, **shape: Any) -> Path:
    """Make a model whose random weights give distinct log-probs and decisive routers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    if (path / "tokenizer.json").exists():
        return path
    torch.manual_seed(seed)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(OTHERS | shape)))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Any wider, a router gives random experts gates that add up to zero, and so does
                # its backward pass.
                parameter.normal_(
                    0, 8 / parameter.shape[1] ** 0.5 if name.endswith("gate.weight") else 0.05
                )
            else:
                parameter.fill_(1)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")  # last, so that a directory with it is complete
    return path


def make_samples(seed: int, lengths: Sequence[int], model: Path) -> list[Sample]:
    """Make samples of random tokens: three quarters sampled by version 0, with random routes for 95
    % of the tokens."""
    shape = parse_model_shape(json.loads((model / "config.json").read_text()))
    layers = len(shape.moe_layers)
    experts = shape.num_experts
    top_k = shape.top_k
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(lengths):
        sampled = np.arange(n) >= min(8, n // 2)
        table = TokenTable(
            {
                "token_ids": rng.integers(0, shape.vocab_size, n).astype(np.int32),
                "loss_mask": sampled,
                "rollout_logprobs": np.where(sampled, rng.normal(-3, 1, n), 0).astype(np.float32),
                "policy_version": np.where(sampled, 0, -1).astype(np.int32),
                "turn": np.where(sampled, 0, -1).astype(np.int32),
                "rewards": np.zeros(n, np.float32),
                "advantages": np.where(sampled, rng.normal(size=n), 0).astype(np.float32),
                "routed_experts": np.argsort(rng.random((n, layers, experts)), -1)[
                    ..., :top_k
                ].astype(np.uint8),
                "routing_recorded": rng.random(n) < 0.95,
            }
        )
        out.append(Sample(f"s{i}", table, 1.0))
    return out


def make_config(budget: int, **learner: Any) -> Config:
    """Make a configuration of one rank with micro-batches of `budget` tokens."""
    own = {"lr": 1e-3, "max_tokens_per_micro_batch": budget}
    return config_from_dict(
        {
            "learner": own | learner,
            "routing": {"min_recorded_fraction": 0.0},
            "episode": {"max_total_tokens": budget, "max_prompt_tokens": budget // 2},
        }
    )
