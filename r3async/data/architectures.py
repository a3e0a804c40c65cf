"""The models that learners train, one declaration each: what a `config.json` does not say of them, and how their checkpoints
name what they hold. No other place knows a model by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

QueryNorm = Literal["", "head", "whole"]
"""Of queries and keys: none, each head by itself, or all heads of a token together."""

CHOICE_BIAS = "e_score_correction_bias"
"""How names of tensors end that decide, with the scores, which experts are chosen. They are float32 in models of any dtype, in
engines too: a rounded one chooses other experts."""


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type` of transformers. A value that begins with `$` is the key of `config.json` that has it."""

    title: str
    models: str
    """Published models of it."""
    sizes: tuple[str, ...] = (*SIZES, "num_key_value_heads")
    """Keys of `config.json` for which transformers takes values of its own where they are missing: such a file describes another
    model than its weights are."""
    experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Keys of the number of experts: transformers reads any of them, and no other. A mixture has one of them."""
    qkv_bias: bool | str = False
    query_norm: QueryNorm = ""
    query_norm_key: str = ""
    """Of `config.json`: whether there is `query_norm`."""
    score: Literal["softmax", "sigmoid", "logits"] = "softmax"
    """What a router makes of its logits. With `sigmoid` a bias of each expert decides who is chosen, and not the gates. With
    `logits` the chosen ones get a softmax among themselves."""
    biased: bool = False
    """Attention has sinks, and its output, routers and experts have biases."""
    normalized: bool | str = "$norm_topk_prob"
    """Whether gates of the chosen experts add up to 1."""
    mixture: str = "mlp"
    """Of a layer: name of its mixture of experts in a checkpoint; empty for models that have none."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Of an expert: gate, up, down."""
    shared: str = ""
    """Of a mixture: its shared experts, one block."""
    shared_gate: str = ""
    """Of a mixture: the gate of the shared experts."""
    engine_lacks: str = ""
    """Why vLLM cannot generate with it in a run. Empty: its log-probs and routes are transformers', before and after an update of
    its weights."""
    engine_keys: Mapping[str, Any] = {}
    """Keys of `config.json` without which vLLM takes it for another model, and says nothing. transformers does not need them."""
    only: Mapping[str, Any] = {}
    """Keys of `config.json` that other backends than transformers itself take with this value alone."""

    def value(self, declared: bool | str, config: Mapping[str, Any]) -> bool:
        """What a declaration that may be a key means for that `config.json`."""
        return bool(config.get(declared[1:])) if isinstance(declared, str) else declared

    def norm_of_queries(self, config: Mapping[str, Any]) -> QueryNorm:
        """Which of them that `config.json` has."""
        return self.query_norm if not self.query_norm_key or config.get(self.query_norm_key) else ""


_NO_BIAS = {"attention_bias": False, "attention_dropout": 0}
_PLAIN = {"hidden_act": "silu", "attention_dropout": 0}
_NO_WINDOW = {"use_sliding_window": False}
_KV, _EXPERT_WIDTH = "num_key_value_heads", "moe_intermediate_size"
_MIXED = (
    "num_experts_per_tok",
    _EXPERT_WIDTH,
    "n_shared_experts",
    "first_k_dense_replace",
)
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_BIASED_CHOICE: dict[str, Any] = {
    "experts": ("n_routed_experts", "num_local_experts"),
    "score": "sigmoid",
    "normalized": True,
    "shared": "shared_experts",
}

ARCHITECTURES: dict[str, Architecture] = {
    "qwen3_moe": Architecture(
        title="Qwen3-MoE",
        models="Qwen3-30B-A3B, Qwen3-235B-A22B",
        sizes=(*SIZES, _KV, "num_experts_per_tok", _EXPERT_WIDTH),
        query_norm="head",
        only=_PLAIN | _NO_BIAS | _NO_WINDOW,
    ),
    "qwen2_moe": Architecture(
        title="Qwen2-MoE",
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        sizes=(*SIZES, _KV, "num_experts_per_tok", _EXPERT_WIDTH, "shared_expert_intermediate_size"),
        experts=("num_experts",),
        qkv_bias="$qkv_bias",
        shared="shared_expert",
        shared_gate="shared_expert_gate",
        only=_PLAIN | _NO_WINDOW,
    ),
    "olmoe": Architecture(
        title="OLMoE",
        models="OLMoE-1B-7B",
        sizes=(*SIZES, "num_experts_per_tok"),
        query_norm="whole",
        only=_PLAIN | _NO_BIAS | {"clip_qkv": None},
    ),
    "mixtral": Architecture(
        title="Mixtral",
        models="Mixtral-8x7B, Mixtral-8x22B",
        sizes=(*SIZES, _KV, "num_experts_per_tok"),
        normalized=True,
        mixture="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        only=_PLAIN | {"sliding_window": None},
    ),
    "deepseek_v3": Architecture(
        title="DeepSeek-V3",
        models="DeepSeek-V3, DeepSeek-R1, Moonlight-16B-A3B",
        sizes=(*SIZES, _KV, *_MIXED, *_LATENT),
        **_BIASED_CHOICE,
        engine_keys={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        only=_PLAIN | _NO_BIAS | {"norm_topk_prob": True},
    ),
    "glm4_moe": Architecture(
        title="GLM-4.5-MoE",
        models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
        sizes=(*SIZES, _KV, *_MIXED),
        qkv_bias="$attention_bias",
        query_norm="head",
        query_norm_key="use_qk_norm",
        **_BIASED_CHOICE,
        only=_PLAIN | {"norm_topk_prob": True},
    ),
    "qwen3": Architecture(
        title="Qwen3",
        models="Qwen3-0.6B … Qwen3-32B",
        sizes=(*SIZES, _KV, "head_dim"),
        query_norm="head",
        mixture="",
        only=_PLAIN | _NO_BIAS | _NO_WINDOW,
    ),
    "qwen2": Architecture(
        title="Qwen2",
        models="Qwen2.5-0.5B … Qwen2.5-72B",
        qkv_bias=True,
        mixture="",
        only=_PLAIN | _NO_WINDOW,
    ),
    "llama": Architecture(
        title="Llama",
        models="Llama-3.1, Llama-3.2, Llama-3.3",
        sizes=SIZES,
        mixture="",
        only=_PLAIN | _NO_BIAS | {"mlp_bias": False},
    ),
}
"""By `model_type`: what both backends train, each held to transformers' own model by a test."""

TORCH_ONLY: dict[str, Architecture] = {
    "gpt_oss": Architecture(
        title="gpt-oss",
        models="gpt-oss-20b, gpt-oss-120b, with weights in bfloat16",
        sizes=(*SIZES, _KV, "num_experts_per_tok", "head_dim", "layer_types", "sliding_window"),
        qkv_bias=True,
        score="logits",
        normalized=True,
        biased=True,
        engine_lacks="vLLM copies sinks and experts past its own loader, so that they would keep their old weights",
    ),
}
"""What the backend `torch` alone trains, held to transformers' own model by a test like the rest. A checkpoint of it has all
experts of a layer in one tensor, with biases, which the links between checkpoints and Megatron do not divide."""

RECURRENT = (
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

REFUSED: dict[str, str] = {
    "deepseek_v2": "its routers take gates from scores in which groups of experts are masked, so routes cannot be replayed",
    "gemma2": "its attention scores are soft-capped, which packed attention does not do",
    "phimoe": "its routers choose by a rule of their own, so routes cannot be replayed",
    **dict.fromkeys(RECURRENT, "its recurrent layers would mix the samples of a micro-batch"),
}
"""By `model_type`: what no backend trains, and why."""


def declared(kind: str) -> Architecture | None:
    """What is declared of a `model_type`."""
    return ARCHITECTURES.get(kind) or TORCH_ONLY.get(kind)


def supported() -> str:
    """The `model_type`s of both backends, for a message."""
    return ", ".join(ARCHITECTURES)
