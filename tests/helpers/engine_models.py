"""Tiny random models in sizes that vLLM's kernels for the CPU take, of all families that it serves."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers import architectures as ha
from tests.helpers.engine import VOCABULARY, make_model
from tests.helpers.models import save_random

SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "hidden_size": 128, "intermediate_size": 128}
EXPERTS = {"moe_intermediate_size": 64}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
MORE = {
    "qwen3_moe": {"head_dim": 32} | EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "deepseek_v3": LATENT | EXPERTS,
    "glm4_moe": {"head_dim": 64} | EXPERTS,
    "qwen3": {"head_dim": 32},
    "gpt_oss": {"head_dim": 32},
    "llama/linear": {"hidden_size": 1024, "num_hidden_layers": 1},
}
"""The engine's kernels on CPU take heads of 32 values and more, of latent attention 576, and pad experts to a multiple of 32. An
output layer of 2^18 weights, which are the embedding's, is packed."""

DELTA_NET = {
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": ha.EXPERTS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
"""Its kernels take heads of 64 values; of 32, the first request would fail."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET,
    "granitemoehybrid": {
        "intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_local_experts": ha.EXPERTS,
        "layer_types": ["mamba", "mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_chunk_size": 64,
        "attention_multiplier": 0.17,
    },
}
"""Families whose engine on CPU computes in bfloat16 only."""
CENTRES = {"A_log": -1.0, "dt_bias": -1.5}
"""With decays of about 0.9, a state reaches back over many tokens, so that an error in it shows."""
ADDS_ONE = ("qwen3_next", "qwen3_5_moe_text")
"""Families whose norms add 1 to their weights, except for the one inside the recurrent mixer."""


def make_engine_model(directory: Path, variant: str, seed: int, dtype: str = "float32", **changes: Any) -> Path:
    """Save a random model whose routers decide clearly, with a tokenizer. Each tensor depends on `seed`, and has numbers of
    `dtype`."""
    sizes = SIZES | MORE.get(variant, MORE.get(variant.partition("/")[0], {}))
    if variant in HYBRIDS:
        settings = ha.SHARED | sizes | HYBRIDS[variant] | changes
        save_random(directory, AutoConfig.for_model(variant, **settings))
    else:
        ha.make_model(directory, variant, **(sizes | changes))
    file = directory / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        spread = 0.5 if name.endswith(("gate.weight", "router.weight", "router.layer.weight")) else 0.1
        if tensor.dim() == 1:
            spread = 0.3
        noise = spread * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(find_centre(variant, name, tensor.dim()) + noise)
        tensors[name] = tensor.to(getattr(torch, dtype)).float()
    save_file(tensors, file, metadata={"format": "pt"})
    for part in make_model(directory / "tokenizer").glob("tok*"):
        shutil.copy(part, directory)
    return directory


def find_centre(variant: str, name: str, dimensions: int) -> float:
    if dimensions > 1 or name.endswith("e_score_correction_bias"):
        return 0.0
    if variant in ADDS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        return 0.0
    return CENTRES.get(name.rpartition(".")[2], 1.0)


class ChosenExperts(TorchFunctionMode):
    """Records the experts that routers of `top_k` of `experts` choose, `[tokens, top_k]` each."""

    def __init__(self, top_k: int, experts: int):
        super().__init__()
        self.chosen: list[torch.Tensor] = []
        self._top_k, self._experts = top_k, experts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.topk, torch.Tensor.topk):
            ids = result.indices
            if (args[0].shape[-1], ids.shape[-1]) == (self._experts, self._top_k):
                self.chosen.append(ids.reshape(-1, self._top_k))
        return result


class PlainModel:
    """An engine's model in transformers, in float32 and one sample at a time."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.directory / "model.safetensors")

    @torch.no_grad()
    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs of the tokens after the first, `[T - 1]`, and the sorted routes, `[T, layers, top_k]`."""
        described = json.loads((self.directory / "config.json").read_text())
        experts = next(
            (described[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in described), 0
        )
        tokens = torch.as_tensor(ids, dtype=torch.long)[None]
        with ChosenExperts(described.get("num_experts_per_tok", 0), experts) as routers:
            logits = self.model(tokens, use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()
        if not routers.chosen:
            return logprobs, np.empty((len(ids), 0, 0), np.int64)
        return logprobs, np.sort(torch.stack(routers.chosen, 1).numpy(), -1)
