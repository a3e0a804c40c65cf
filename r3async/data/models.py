"""Declarations of the models that learners train, and the shape of a model read from
its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

QueryNorm = Literal["", "head", "whole"]
"""Normalisation of queries and keys: none, each head separately, or all heads of
a token together."""

EXPERT_BIAS_SUFFIX = "e_score_correction_bias"
EXPERT_BIAS_SUFFIXES = (EXPERT_BIAS_SUFFIX, "expert_bias")
"""Suffixes of the names of tensors that decide, together with the scores, which experts are
chosen. They are float32 in models of any dtype, in engines too: a rounded one would
choose other experts."""


SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


class ModelArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of one `model_type` of transformers. A value that begins with `$` names the
    key of `config.json` that holds the real value."""

    title: str
    example_models: str
    """Published models of this type."""
    size_keys: tuple[str, ...] = (*SIZE_KEYS, "num_key_value_heads")
    """Keys that `config.json` must have, or one of several with `|` between them. Where one is
    missing, transformers fills in its own default, and the file then describes another model than
    the weights."""
    mixture_size_keys: tuple[str, ...] = ()
    """Further such keys of those models of the family that have mixtures of experts."""
    tied_by_default: bool = False
    """True if input and output embeddings are the same unless `config.json` says otherwise."""
    expert_count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Keys of the number of experts. transformers reads any of them, and no other; a mixture
    has one of them."""
    qkv_bias: bool | str = False
    query_norm: QueryNorm = ""
    query_norm_key: str = ""
    """Key of `config.json` that says whether `query_norm` applies; empty if it always does."""
    router_score: Literal["softmax", "sigmoid", "logits"] = "softmax"
    """Function that turns a router's logits into scores. With `sigmoid`, a bias of each expert
    affects which experts are chosen, but not the gates. With `logits`, the gates are a softmax over
    the chosen experts only."""
    has_sinks_and_biases: bool = False
    """True if attention has sinks, and its output, the routers and the experts have biases."""
    has_gated_experts: bool = True
    """True if an expert, and a dense feed-forward, has a gate beside its two matrices."""
    has_gated_attention: bool = False
    """True if queries come with a gate of the same size for attention's output."""
    normalized_gates: bool | str = "$norm_topk_prob"
    """True if the gates of the chosen experts add up to 1."""
    moe_module: str = "mlp"
    """Name of a layer's mixture of experts in a checkpoint; empty for models that have none."""
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections."""
    shared_experts_module: str = ""
    """Name of a mixture's shared experts, which form one block."""
    shared_gate_module: str = ""
    """Name of the gate of a mixture's shared experts."""
    required_config: Mapping[str, Any] = {}
    """Keys of `config.json` for which backends other than transformers itself support
    only this value."""

    def resolve_flag(self, declaration: bool | str, config: Mapping[str, Any]) -> bool:
        """Return the value of a declaration, which may be a key, for a model with
        this `config.json`."""
        return bool(config.get(declaration[1:])) if isinstance(declaration, str) else declaration

    def resolve_query_norm(self, config: Mapping[str, Any]) -> QueryNorm:
        """Return the query normalisation of a model with this `config.json`."""
        return self.query_norm if not self.query_norm_key or config.get(self.query_norm_key) else ""


_NO_BIAS = {"attention_bias": False, "attention_dropout": 0}
_SILU_NO_DROPOUT = {"hidden_act": "silu", "attention_dropout": 0}
_NO_WINDOW = {"use_sliding_window": False}
_KV_HEADS_KEY = "num_key_value_heads"
_EXPERT_WIDTH_KEY = "moe_intermediate_size"
_SHARED_MOE_KEYS = (
    "num_experts_per_tok",
    _EXPERT_WIDTH_KEY,
    "n_shared_experts",
    "first_k_dense_replace",
)
_MLA_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_SIGMOID_ROUTING: dict[str, Any] = {
    "expert_count_keys": ("n_routed_experts", "num_local_experts"),
    "router_score": "sigmoid",
    "normalized_gates": True,
    "shared_experts_module": "shared_experts",
}

ARCHITECTURES: dict[str, ModelArchitecture] = {
    "qwen3_moe": ModelArchitecture(
        title="Qwen3-MoE",
        example_models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        size_keys=(*SIZE_KEYS, _KV_HEADS_KEY, "num_experts_per_tok", _EXPERT_WIDTH_KEY),
        query_norm="head",
        required_config=_SILU_NO_DROPOUT | _NO_BIAS | _NO_WINDOW,
    ),
    "qwen2_moe": ModelArchitecture(
        title="Qwen2-MoE",
        example_models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        size_keys=(
            *SIZE_KEYS,
            _KV_HEADS_KEY,
            "num_experts_per_tok",
            _EXPERT_WIDTH_KEY,
            "shared_expert_intermediate_size",
        ),
        expert_count_keys=("num_experts",),
        qkv_bias="$qkv_bias",
        shared_experts_module="shared_expert",
        shared_gate_module="shared_expert_gate",
        required_config=_SILU_NO_DROPOUT | _NO_WINDOW,
    ),
    "olmoe": ModelArchitecture(
        title="OLMoE",
        example_models="OLMoE-1B-7B",
        size_keys=(*SIZE_KEYS, "num_experts_per_tok"),
        query_norm="whole",
        required_config=_SILU_NO_DROPOUT | _NO_BIAS | {"clip_qkv": None},
    ),
    "mixtral": ModelArchitecture(
        title="Mixtral",
        example_models="Mixtral-8x7B, Mixtral-8x22B",
        size_keys=(*SIZE_KEYS, _KV_HEADS_KEY, "num_experts_per_tok"),
        normalized_gates=True,
        moe_module="block_sparse_moe",
        expert_projections=("w1", "w3", "w2"),
        required_config=_SILU_NO_DROPOUT | {"sliding_window": None},
    ),
    "deepseek_v3": ModelArchitecture(
        title="DeepSeek-V3",
        example_models="DeepSeek-V3, DeepSeek-R1, Moonlight-16B-A3B",
        size_keys=(*SIZE_KEYS, _KV_HEADS_KEY, *_SHARED_MOE_KEYS, *_MLA_KEYS),
        **_SIGMOID_ROUTING,
        required_config=_SILU_NO_DROPOUT | _NO_BIAS | {"norm_topk_prob": True},
    ),
    "glm4_moe": ModelArchitecture(
        title="GLM-4.5-MoE",
        example_models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
        size_keys=(*SIZE_KEYS, _KV_HEADS_KEY, *_SHARED_MOE_KEYS),
        qkv_bias="$attention_bias",
        query_norm="head",
        query_norm_key="use_qk_norm",
        **_SIGMOID_ROUTING,
        required_config=_SILU_NO_DROPOUT | {"norm_topk_prob": True},
    ),
    "qwen3": ModelArchitecture(
        title="Qwen3",
        example_models="Qwen3-0.6B … Qwen3-32B",
        size_keys=(*SIZE_KEYS, _KV_HEADS_KEY, "head_dim"),
        query_norm="head",
        moe_module="",
        required_config=_SILU_NO_DROPOUT | _NO_BIAS | _NO_WINDOW,
    ),
    "qwen2": ModelArchitecture(
        title="Qwen2",
        example_models="Qwen2.5-0.5B … Qwen2.5-72B",
        qkv_bias=True,
        moe_module="",
        required_config=_SILU_NO_DROPOUT | _NO_WINDOW,
    ),
    "llama": ModelArchitecture(
        title="Llama",
        example_models="Llama-3.1, Llama-3.2, Llama-3.3",
        size_keys=SIZE_KEYS,
        moe_module="",
        required_config=_SILU_NO_DROPOUT | _NO_BIAS | {"mlp_bias": False},
    ),
}
"""Models that both backends train, keyed by `model_type`. A test compares each with
transformers' own model."""

_LAYER_KINDS_KEY = "layer_types|full_attention_interval|linear_attn_config"
_HYBRID_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_DELTA_KEYS = (_KV_HEADS_KEY, "head_dim", _LAYER_KINDS_KEY, "linear_num_value_heads")
_MAMBA2_KEYS = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_HYBRID_MOE_KEYS = (
    *_HYBRID_SIZE_KEYS,
    *_DELTA_KEYS,
    "num_experts_per_tok",
    _EXPERT_WIDTH_KEY,
    "shared_expert_intermediate_size",
)
_DELTA_MLA_KEYS = (
    *_HYBRID_SIZE_KEYS,
    "intermediate_size",
    _KV_HEADS_KEY,
    "num_experts_per_tok",
    _EXPERT_WIDTH_KEY,
    "n_shared_experts",
    "n_group",
    *(key for key in _MLA_KEYS if key != "q_lora_rank"),
    "linear_num_heads|linear_attn_config",
    "linear_conv_kernel_dim|linear_attn_config",
)
_QWEN_HYBRID: dict[str, Any] = {
    "query_norm": "head",
    "has_gated_attention": True,
    "shared_experts_module": "shared_expert",
    "shared_gate_module": "shared_expert_gate",
}

TORCH_ONLY_ARCHITECTURES: dict[str, ModelArchitecture] = {
    "gpt_oss": ModelArchitecture(
        title="gpt-oss",
        example_models="gpt-oss-20b, gpt-oss-120b",
        size_keys=(
            *SIZE_KEYS,
            _KV_HEADS_KEY,
            "num_experts_per_tok",
            "head_dim",
            "layer_types",
            "sliding_window",
        ),
        qkv_bias=True,
        router_score="logits",
        normalized_gates=True,
        has_sinks_and_biases=True,
    ),
    "qwen3_5_moe": ModelArchitecture(
        title="Qwen3.5-MoE",
        example_models="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, Qwen3.5-122B-A10B",
        size_keys=_HYBRID_MOE_KEYS,
        **_QWEN_HYBRID,
    ),
    "qwen3_next": ModelArchitecture(
        title="Qwen3-Next",
        example_models="Qwen3-Next-80B-A3B",
        size_keys=_HYBRID_MOE_KEYS,
        **_QWEN_HYBRID,
    ),
    "qwen3_5": ModelArchitecture(
        title="Qwen3.5",
        example_models="Qwen3.5-0.8B … Qwen3.5-27B",
        size_keys=(*_HYBRID_SIZE_KEYS, "intermediate_size", *_DELTA_KEYS),
        query_norm="head",
        moe_module="",
        has_gated_attention=True,
    ),
    "nemotron_h": ModelArchitecture(
        title="Nemotron-H",
        example_models="Nemotron-3-Nano-30B-A3B, Nemotron-H-8B",
        size_keys=(
            *_HYBRID_SIZE_KEYS,
            "intermediate_size",
            _KV_HEADS_KEY,
            "head_dim",
            "mamba_num_heads",
            "mamba_head_dim",
        ),
        expert_count_keys=("n_routed_experts", "num_local_experts"),
        router_score="sigmoid",
        moe_module="mixer",
        has_gated_experts=False,
        mixture_size_keys=(
            "n_shared_experts",
            _EXPERT_WIDTH_KEY,
            "moe_shared_expert_intermediate_size",
        ),
    ),
    "kimi_linear": ModelArchitecture(
        title="Kimi Linear",
        example_models="Kimi-Linear-48B-A3B",
        size_keys=(*_DELTA_MLA_KEYS, _LAYER_KINDS_KEY, "mlp_layer_types|first_k_dense_replace"),
        router_score="sigmoid",
        moe_module="block_sparse_moe",
    ),
    "bailing_hybrid": ModelArchitecture(
        title="Ling hybrid",
        example_models="Ling-2.5, Ring-2.5",
        size_keys=_DELTA_MLA_KEYS,
        router_score="sigmoid",
    ),
    "minimax": ModelArchitecture(
        title="MiniMax-01",
        example_models="MiniMax-Text-01, MiniMax-M1",
        size_keys=(
            *_HYBRID_SIZE_KEYS,
            "intermediate_size",
            _KV_HEADS_KEY,
            "layer_types|attn_type_list",
        ),
        moe_module="block_sparse_moe",
    ),
    "lfm2_moe": ModelArchitecture(
        title="LFM2-MoE",
        example_models="LFM2-8B-A1B",
        size_keys=(
            *_HYBRID_SIZE_KEYS,
            "intermediate_size",
            _EXPERT_WIDTH_KEY,
            _KV_HEADS_KEY,
            "first_k_dense_replace",
            "layer_types",
            "conv_L_cache",
        ),
        query_norm="head",
        router_score="sigmoid",
        moe_module="feed_forward",
        tied_by_default=True,
    ),
    "granitemoehybrid": ModelArchitecture(
        title="Granite 4",
        example_models="Granite-4.0-H-Small, Granite-4.0-H-Tiny",
        size_keys=(
            *_HYBRID_SIZE_KEYS,
            "intermediate_size",
            "shared_intermediate_size",
            "layer_types",
            *_MAMBA2_KEYS,
        ),
        router_score="logits",
        moe_module="block_sparse_moe",
    ),
    "jamba": ModelArchitecture(
        title="Jamba",
        example_models="Jamba-v0.1, Jamba-1.5",
        size_keys=(
            *_HYBRID_SIZE_KEYS,
            "intermediate_size",
            _KV_HEADS_KEY,
            "expert_layer_period",
            "expert_layer_offset",
            "attn_layer_period",
            "attn_layer_offset",
        ),
        moe_module="feed_forward",
    ),
    "olmo_hybrid": ModelArchitecture(
        title="OLMo-Hybrid",
        example_models="Olmo-Hybrid-7B",
        size_keys=(
            *_HYBRID_SIZE_KEYS,
            "intermediate_size",
            "layer_types",
            "linear_num_value_heads",
        ),
        query_norm="whole",
        moe_module="",
    ),
    "bamba": ModelArchitecture(
        title="Bamba",
        example_models="Bamba-9B",
        size_keys=(*_HYBRID_SIZE_KEYS, "intermediate_size", _KV_HEADS_KEY, *_MAMBA2_KEYS),
        moe_module="",
    ),
    "falcon_h1": ModelArchitecture(
        title="Falcon-H1",
        example_models="Falcon-H1-0.5B … Falcon-H1-34B",
        size_keys=(
            *_HYBRID_SIZE_KEYS,
            "intermediate_size",
            _KV_HEADS_KEY,
            "mamba_d_ssm",
            *_MAMBA2_KEYS,
        ),
        moe_module="",
    ),
    "minimax_m2": ModelArchitecture(
        title="MiniMax-M2",
        example_models="MiniMax-M2, MiniMax-M2.1",
        size_keys=(*_HYBRID_SIZE_KEYS, "intermediate_size", _KV_HEADS_KEY, "head_dim"),
        query_norm="whole",
        router_score="sigmoid",
        moe_module="block_sparse_moe",
    ),
    "ernie4_5_moe": ModelArchitecture(
        title="ERNIE-4.5-MoE",
        example_models="ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B",
        size_keys=(
            *_HYBRID_SIZE_KEYS,
            "intermediate_size",
            _KV_HEADS_KEY,
            "num_experts_per_tok",
            _EXPERT_WIDTH_KEY,
            "n_shared_experts",
            "first_k_dense_replace",
        ),
        tied_by_default=True,
    ),
    "hunyuan_v1_moe": ModelArchitecture(
        title="Hunyuan-MoE",
        example_models="Hunyuan-A13B",
        size_keys=(*_HYBRID_SIZE_KEYS, "intermediate_size"),
        query_norm="head",
    ),
}
"""Models that only the backend `torch` trains, keyed by `model_type` and compared with
transformers' own model by a test like the rest. Their checkpoints have all experts of a layer in
one tensor, with biases, which the links between checkpoints and Megatron do not divide."""

UNSUPPORTED_MODEL_TYPES: dict[str, str] = {
    "deepseek_v2": (
        "its routers take gates from scores in which groups of experts are masked, so routes "
        "cannot be replayed"
    ),
    "gemma2": "its attention scores are soft-capped, which packed attention does not do",
    "phimoe": "its routers choose by a rule of their own, so routes cannot be replayed",
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        "its sparse attention chooses keys among all samples of a micro-batch",
    ),
}
"""Reasons why no backend trains a model, keyed by `model_type`."""


def find_architecture(model_type: str) -> ModelArchitecture | None:
    """Return the declaration of a `model_type`, or None if there is none. A text model that is part
    of a larger one is declared with it."""
    kind = model_type.removesuffix("_text")
    return ARCHITECTURES.get(kind) or TORCH_ONLY_ARCHITECTURES.get(kind)


def list_supported_types() -> str:
    """Return the `model_type`s that both backends train, as text for a message."""
    return ", ".join(ARCHITECTURES)
