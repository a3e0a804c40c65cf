"""What vLLM makes of a model's `config.json`, by `model_type`: keys that it needs or does not read,
and models that it cannot run.

Found with vLLM 0.30 by comparing its log-probs and routes with those of transformers. On GPUs
nothing was run; where a reason is said to be that of the CPU build, its source is, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from r3async.data.layer_kinds import list_layer_kinds, use_common_keys


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of vLLM for one `model_type`. Nothing is refused where none are declared."""

    unsupported_reason: str = ""
    """Reason why vLLM cannot run it."""
    cpu_unsupported_reason: str = ""
    """Reason why vLLM's CPU build cannot run it, or computes another model."""
    cpu_dtype_reason: str = ""
    """Reason why vLLM's CPU build runs it in bfloat16 only."""
    cpu_head_dims: tuple[int, ...] = ()
    """Sizes of a head of linear attention, equal for keys and values, that vLLM's CPU build has
    kernels for."""
    needed_config: Mapping[str, Any] = {}
    """Keys without which vLLM takes it for another model, or does not load it. transformers does
    not write them. `list_needed_config` has more, whose values follow from others."""
    unread_config: Mapping[str, Any] = {}
    """Keys that vLLM does not read: it computes with these values, which transformers takes where a
    key is missing. A list is repeated for all layers."""
    imports_torchvision: bool = False
    """True if vLLM's class is that of a model with images."""

    def has_cpu_kernel(self, config: Mapping[str, Any]) -> bool:
        """Return whether vLLM's CPU build has a kernel for the heads of linear attention."""
        dims = [config.get(f"linear_{part}_head_dim", 128) for part in ("key", "value")]
        return not self.cpu_head_dims or (dims[0] == dims[1] and dims[0] in self.cpu_head_dims)

    def iter_differences(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the keys of a `config.json` that vLLM does not read and that have another value
        than it computes with, and that value."""
        for key, value in self.unread_config.items():
            found = config.get(key, value)
            if isinstance(value, list) and isinstance(found, list):
                value = [value[layer % len(value)] for layer in range(len(found))]
            if found != value:
                yield key, value


_CPU_CONVOLUTION = "its recurrent layers have no kernels of another precision there"
_CPU_HEAD_DIMS = (64, 128)

ENGINE_MODELS: dict[str, EngineModel] = {
    **dict.fromkeys(
        # The output projection of attention never has a bias.
        ("qwen3", "qwen3_moe"),
        EngineModel(unread_config={"attention_bias": False}),
    ),
    "deepseek_v3": EngineModel(
        needed_config={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        unread_config={
            "attention_bias": False,
            # It is that of the latent norms, too, for which transformers always takes 1e-6.
            "rms_norm_eps": 1e-6,
            "rope_interleave": True,
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe": EngineModel(unread_config={"tie_word_embeddings": False}),
    "qwen2_moe": EngineModel(unread_config={"qkv_bias": True, "use_sliding_window": False}),
    "mixtral": EngineModel(unread_config={"hidden_act": "silu"}),
    "olmoe": EngineModel(
        unread_config={
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": False,
            "clip_qkv": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
        }
    ),
    "qwen3_next": EngineModel(
        cpu_dtype_reason=_CPU_CONVOLUTION,
        cpu_head_dims=_CPU_HEAD_DIMS,
        unread_config={"attention_bias": False, "tie_word_embeddings": False},
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        EngineModel(
            cpu_dtype_reason=_CPU_CONVOLUTION,
            cpu_head_dims=_CPU_HEAD_DIMS,
            unread_config={"attention_bias": False},
            imports_torchvision=True,
        ),
    ),
    "granitemoehybrid": EngineModel(
        cpu_dtype_reason=_CPU_CONVOLUTION, unread_config={"time_step_limit": [0.0, math.inf]}
    ),
    "gpt_oss": EngineModel(
        cpu_dtype_reason="its attention with sinks has no kernel of another precision there",
        unread_config={
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4_5_moe": EngineModel(
        cpu_unsupported_reason=(
            "its router there leaves out the bias with which this model chooses experts"
        )
    ),
    "minimax_m2": EngineModel(
        cpu_unsupported_reason="its router there has no sigmoid scores without groups",
        needed_config={"scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "kimi_linear": EngineModel(needed_config={"mla_use_nope": True}),
    "nemotron_h": EngineModel(
        cpu_unsupported_reason="its experts there must have a gate, and this model's have none"
    ),
    "jamba": EngineModel(
        cpu_unsupported_reason=(
            "its Mamba-1 layers read a weight that is packed there, and fail at the first request"
        )
    ),
    "lfm2_moe": EngineModel(
        cpu_unsupported_reason=(
            "its convolution there takes a width of 4 only, and this model's have 3"
        )
    ),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        EngineModel(cpu_unsupported_reason="it has no sparse attention there"),
    ),
    "bailing_hybrid": EngineModel(
        unsupported_reason="it has no class by the name that transformers writes for this model"
    ),
    **dict.fromkeys(
        ("bamba", "minimax"), EngineModel(unsupported_reason="it was removed in version 0.23")
    ),
}


COMPARED_MODEL_TYPES = (
    *("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "deepseek_v3", "glm4_moe"),
    *("qwen3", "qwen2", "llama", "gpt_oss", "qwen3_next", "qwen3_5_moe", "granitemoehybrid"),
)
"""Models of which tests compare vLLM's log-probs and routes on CPU with those of transformers,
before and after updates."""


def find_engine_model(model_type: str) -> EngineModel:
    """Return the declaration of a `model_type`, or one that refuses nothing. A text model that is
    part of a larger one is declared with it."""
    return ENGINE_MODELS.get(model_type.removesuffix("_text")) or EngineModel()


def list_needed_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that vLLM needs in the `config.json` of a text model, with the values that
    its weights were made with.

    Published files have them all. transformers computes the same model from keys of its own, and
    writes these alone where it made the model.
    """
    kind = str(config.get("model_type"))
    needed = dict(find_engine_model(kind).needed_config)
    derived: dict[str, Any] = {}
    if kind == "kimi_linear":
        derived = _derive_kimi_keys(use_common_keys(config))
    elif kind == "minimax_m2":
        derived = _derive_minimax_keys(config)
    return needed | {key: value for key, value in derived.items() if config.get(key) is None}


def _derive_kimi_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = ("num_hidden_layers", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if any(config.get(key) is None for key in sizes):
        return {}
    layers, heads, size, kernel = (config[key] for key in sizes)
    kinds = list_layer_kinds(config, has_experts=True)
    return {
        "first_k_dense_replace": min(kinds.mixtures, default=layers),
        # Layers are counted from 1.
        "linear_attn_config": {
            "full_attn_layers": [layer + 1 for layer in kinds.attention],
            "kda_layers": [layer + 1 for layer in kinds.recurrent],
            "num_heads": heads,
            "head_dim": size,
            "short_conv_kernel_size": kernel,
        },
    }


def _derive_minimax_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    return {"rotary_dim": round(rotated * config["head_dim"])} if config.get("head_dim") else {}
