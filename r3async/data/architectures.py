"""The models that learners train, one declaration each: what a `config.json` does not say of them, and how their checkpoints
name what they hold. No other place knows a model by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

QueryNorm = Literal["", "head", "whole"]
"""Of queries and keys: none, each head by itself, or all heads of a token together."""

EXPERT_BIAS_SUFFIX = "e_score_correction_bias"
"""How names of tensors end that decide, with the scores, which experts are chosen. They are float32 in models of any dtype, in
engines too: a rounded one chooses other experts."""


SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


class ModelArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type` of transformers. A value that begins with `$` is the key of `config.json` that has it."""

    title: str
    example_models: str
    """Published models of it."""
    size_keys: tuple[str, ...] = (*SIZE_KEYS, "num_key_value_heads")
    """Keys of `config.json` for which transformers takes values of its own where they are missing: such a file describes another
    model than its weights are."""
    expert_count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Keys of the number of experts: transformers reads any of them, and no other. A mixture has one of them."""
    qkv_bias: bool | str = False
    query_norm: QueryNorm = ""
    query_norm_key: str = ""
    """Of `config.json`: whether there is `query_norm`."""
    router_score: Literal["softmax", "sigmoid", "logits"] = "softmax"
    """What a router makes of its logits. With `sigmoid` a bias of each expert decides who is chosen, and not the gates. With
    `logits` the chosen ones get a softmax among themselves."""
    has_sinks_and_biases: bool = False
    """Attention has sinks, and its output, routers and experts have biases."""
    normalized_gates: bool | str = "$norm_topk_prob"
    """Whether gates of the chosen experts add up to 1."""
    moe_module: str = "mlp"
    """Of a layer: name of its mixture of experts in a checkpoint; empty for models that have none."""
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Of an expert: gate, up, down."""
    shared_experts_module: str = ""
    """Of a mixture: its shared experts, one block."""
    shared_gate_module: str = ""
    """Of a mixture: the gate of the shared experts."""
    engine_unsupported_reason: str = ""
    """Why vLLM cannot generate with it in a run. Empty: its log-probs and routes are transformers', before and after an update of
    its weights."""
    engine_config: Mapping[str, Any] = {}
    """Keys of `config.json` without which vLLM takes it for another model, and says nothing. transformers does not need them."""
    required_config: Mapping[str, Any] = {}
    """Keys of `config.json` that other backends than transformers itself take with this value alone."""

    def resolve_flag(self, declaration: bool | str, config: Mapping[str, Any]) -> bool:
        """What a declaration that may be a key means for that `config.json`."""
        return bool(config.get(declaration[1:])) if isinstance(declaration, str) else declaration

    def resolve_query_norm(self, config: Mapping[str, Any]) -> QueryNorm:
        """Which of them that `config.json` has."""
        return self.query_norm if not self.query_norm_key or config.get(self.query_norm_key) else ""


_NO_BIAS = {"attention_bias": False, "attention_dropout": 0}
_SILU_NO_DROPOUT = {"hidden_act": "silu", "attention_dropout": 0}
_NO_WINDOW = {"use_sliding_window": False}
_KV_HEADS_KEY, _EXPERT_WIDTH_KEY = "num_key_value_heads", "moe_intermediate_size"
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
        engine_config={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
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
"""By `model_type`: what both backends train, each held to transformers' own model by a test."""

TORCH_ONLY_ARCHITECTURES: dict[str, ModelArchitecture] = {
    "gpt_oss": ModelArchitecture(
        title="gpt-oss",
        example_models="gpt-oss-20b, gpt-oss-120b, with weights in bfloat16",
        size_keys=(*SIZE_KEYS, _KV_HEADS_KEY, "num_experts_per_tok", "head_dim", "layer_types", "sliding_window"),
        qkv_bias=True,
        router_score="logits",
        normalized_gates=True,
        has_sinks_and_biases=True,
        engine_unsupported_reason="vLLM copies sinks and experts past its own loader, so that they would keep their old weights",
    ),
}
"""What the backend `torch` alone trains, held to transformers' own model by a test like the rest. A checkpoint of it has all
experts of a layer in one tensor, with biases, which the links between checkpoints and Megatron do not divide."""

RECURRENT_MODEL_TYPES = (
    *(
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "kimi_linear",
        "nemotron_h",
        "jamba",
        "bamba",
    ),
    *("minimax", "olmo_hybrid", "recurrent_gemma", "mamba", "falcon_mamba"),
)
"""By `model_type`: some or all layers keep a state in place of attention."""

UNSUPPORTED_MODEL_TYPES: dict[str, str] = {
    "deepseek_v2": "its routers take gates from scores in which groups of experts are masked, so routes cannot be replayed",
    "gemma2": "its attention scores are soft-capped, which packed attention does not do",
    "phimoe": "its routers choose by a rule of their own, so routes cannot be replayed",
    **dict.fromkeys(RECURRENT_MODEL_TYPES, "its recurrent layers would mix the samples of a micro-batch"),
}
"""By `model_type`: what no backend trains, and why."""


def find_architecture(model_type: str) -> ModelArchitecture | None:
    """What is declared of a `model_type`."""
    return ARCHITECTURES.get(model_type) or TORCH_ONLY_ARCHITECTURES.get(model_type)


def list_supported_types() -> str:
    """The `model_type`s of both backends, for a message."""
    return ", ".join(ARCHITECTURES)
