"""What the layers of a model consist of, read from its `config.json` in the words of its family.

Families have different names for the same number, and different ways to say which layers are
mixtures of experts and which keep a state in place of attention. No other module knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

COMMON_KEYS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("layers_block_type",),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_k"),
    "num_experts": ("moe_num_experts",),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "first_k_dense_replace": ("num_dense_layers", "moe_layer_start_index"),
    "n_group": ("num_expert_group",),
    "max_position_embeddings": ("model_max_length",),
    "layer_types": ("layers_block_type", "hybrid_override_pattern"),
    "linear_conv_kernel_dim": ("short_conv_kernel_size",),
}
"""Other names of a key, by the name that most families have and that is read here. Ernie 4.5,
Hunyuan, LFM2, Kimi Linear, Ling and Nemotron-H have them."""
PATTERN_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""Letters of Nemotron-H's `hybrid_override_pattern`, one for each layer."""

RECURRENT_KINDS = ("linear_attention", "mamba", "conv", "recurrent", "kda")
"""Kinds of layers, in `layer_types`, that keep a state in place of attention."""
FEED_FORWARD_KINDS = ("moe", "mlp")
"""Kinds of layers that are a feed-forward alone, as in Nemotron-H; its other layers have none."""


class LayerKinds(msgspec.Struct, frozen=True):
    """Indices of the layers that have each part. A layer may have attention and a state."""

    attention: tuple[int, ...]
    recurrent: tuple[int, ...]
    mixtures: tuple[int, ...]
    dense: tuple[int, ...]
    """Layers with a feed-forward that is no mixture of experts."""
    windows: int
    """Number of layers whose attention sees a sliding window."""


def use_common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text part of a `config.json` with common keys in place of a family's own.

    Lists of a number for each layer become that number if all are alike. `num_hidden_layers` is
    taken from the list of layers where that alone says it.
    """
    common = dict(config)
    blocks = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if common.get("num_hidden_layers") is None and isinstance(blocks, list | str):
        common["num_hidden_layers"] = len(blocks)
    for key, others in COMMON_KEYS.items():
        for other in others:
            if common.get(key) is None and common.get(other) is not None:
                common[key] = common.pop(other)
    for key in ("num_experts_per_tok", "n_shared_experts", "moe_intermediate_size"):
        values = common.get(key)
        if isinstance(values, list) and values and all(each == values[0] for each in values):
            common[key] = values[0]
    pattern = common.get("layer_types")
    if isinstance(pattern, str):
        common["layer_types"] = [PATTERN_LETTERS.get(letter, letter) for letter in pattern]
    common.update(_read_delta_attention(common.get("linear_attn_config")))
    return common


def _read_delta_attention(nested: Any) -> dict[str, Any]:
    """Return the keys that transformers has for Kimi Linear's nested ones."""
    if not isinstance(nested, Mapping):
        return {}
    names = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    return {ours: nested[name] for name, ours in names.items() if name in nested}


def list_layer_kinds(config: Mapping[str, Any], *, has_experts: bool) -> LayerKinds:
    """Return what each layer has, from `use_common_keys`; `num_hidden_layers` must be a number."""
    layers = range(config["num_hidden_layers"])
    kinds = _list_mixers(config, len(layers))
    alone = [kind in FEED_FORWARD_KINDS for kind in kinds]
    recurrent = [i for i in layers if kinds[i] in RECURRENT_KINDS]
    # Falcon-H1 has both in each layer.
    both = config.get("model_type") == "falcon_h1"
    mixtures = _list_mixtures(config, kinds) if has_experts else []
    has_feed_forward = alone if any(alone) else [True] * len(layers)
    return LayerKinds(
        attention=tuple(i for i in layers if not alone[i] and (both or i not in recurrent)),
        recurrent=tuple(layers if both else recurrent),
        mixtures=tuple(mixtures),
        dense=tuple(i for i in layers if has_feed_forward[i] and i not in mixtures),
        windows=kinds.count("sliding_attention"),
    )


def _list_mixers(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer's mixer, or the layer's own."""
    kinds = config.get("layer_types")
    if kinds:
        return list(kinds)
    nested = config.get("linear_attn_config")
    if isinstance(nested, Mapping) and "kda_layers" in nested:
        # Kimi Linear counts from 1.
        states = {number - 1 for number in nested["kda_layers"]}
    elif config.get("attn_layer_period"):
        period = config["attn_layer_period"]
        offset = config.get("attn_layer_offset") or 0
        states = {i for i in range(layers) if i % period != offset}
    elif config.get("attn_layer_indices") is not None:
        states = set(range(layers)) - set(config["attn_layer_indices"])
    elif config.get("attn_type_list"):
        states = {i for i, kind in enumerate(config["attn_type_list"]) if not kind}
    elif every := config.get("full_attention_interval") or config.get("layer_group_size"):
        states = {i for i in range(layers) if (i + 1) % every}
    else:
        states = set()
    return ["linear_attention" if i in states else "full_attention" for i in range(layers)]


def _list_mixtures(config: Mapping[str, Any], kinds: list[str]) -> list[int]:
    """Return the indices of the layers that are mixtures of experts, in a model that has some."""
    layers = range(len(kinds))
    if any(kind in FEED_FORWARD_KINDS for kind in kinds):
        return [i for i in layers if kinds[i] == "moe"]
    feed_forwards = config.get("mlp_layer_types")
    if feed_forwards:
        return [i for i in layers if feed_forwards[i] == "sparse"]
    if config.get("expert_layer_period"):
        period = config["expert_layer_period"]
        offset = config.get("expert_layer_offset") or 0
        return [i for i in layers if i % period == offset]
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or config.get("moe_layer_interval") or 1
    frequency = config.get("moe_layer_freq") or 1
    first = config.get("first_k_dense_replace") or 0
    last = config.get("moe_layer_end_index", -1)
    return [
        i
        for i in layers
        if i not in dense
        and first <= i <= (len(layers) if last in (-1, None) else last)
        and (i + 1) % step == 0
        and (frequency[i] if isinstance(frequency, list) else i % frequency == 0)
    ]


def count_recurrent_parameters(config: Mapping[str, Any]) -> int:
    """Return the number of parameters of one layer's recurrent or convolutional mixer, from
    `use_common_keys`; 0 for a kind that is not known. Raises `KeyError` for a missing size."""
    c = config
    hidden = c["hidden_size"]
    if c.get("linear_num_value_heads"):
        return _count_delta_rule(c, hidden)
    if c.get("linear_num_heads"):
        return _count_channel_delta_rule(c, hidden)
    if c.get("mamba_num_heads") or c.get("mamba_n_heads"):
        return _count_mamba2(c, hidden)
    if c.get("mamba_dt_rank") or c.get("mamba_expand"):
        return _count_mamba1(c, hidden)
    if c.get("conv_L_cache"):
        return 4 * hidden * hidden + hidden * c["conv_L_cache"]
    # Lightning attention of MiniMax-01.
    inner = c["num_attention_heads"] * (c.get("head_dim") or hidden // c["num_attention_heads"])
    return 5 * hidden * inner + inner


def _count_delta_rule(c: Mapping[str, Any], hidden: int) -> int:
    """Qwen3-Next, Qwen3.5, OLMo-Hybrid."""
    heads = c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = heads * c["linear_value_head_dim"]
    projections = hidden * (2 * keys + 3 * values + 2 * heads)
    convolution = (2 * keys + values) * c["linear_conv_kernel_dim"]
    return projections + convolution + 2 * heads + c["linear_value_head_dim"]


def _count_channel_delta_rule(c: Mapping[str, Any], hidden: int) -> int:
    """Kimi Linear and Ling: a decay for each channel, and a gate of the output. Kimi Linear has
    both from low ranks."""
    heads = c["linear_num_heads"]
    size = c["linear_head_dim"]
    inner = heads * size
    gate = size * (hidden + inner) if c.get("model_type") == "kimi_linear" else hidden * inner
    return (
        hidden * (4 * inner + heads)
        + 2 * gate
        + 3 * inner * c["linear_conv_kernel_dim"]
        + heads
        + inner
        + size
    )


def _count_mamba2(c: Mapping[str, Any], hidden: int) -> int:
    """Nemotron-H, Granite 4, Bamba, Falcon-H1."""
    heads = c.get("mamba_num_heads") or c["mamba_n_heads"]
    size = c.get("mamba_head_dim") or c["mamba_d_head"]
    groups = c.get("mamba_n_groups") or c["n_groups"]
    state = c.get("mamba_d_state") or c["ssm_state_size"]
    kernel = c.get("mamba_d_conv") or c["conv_kernel"]
    inner = heads * size
    convolved = inner + 2 * groups * state
    norm = inner if c.get("mamba_rms_norm", c.get("model_type") != "falcon_h1") else 0
    return hidden * (2 * inner + convolved + heads) + convolved * (kernel + 1) + 3 * heads + norm


def _count_mamba1(c: Mapping[str, Any], hidden: int) -> int:
    """Jamba."""
    inner = c["mamba_expand"] * hidden
    state = c["mamba_d_state"]
    rank = c.get("mamba_dt_rank") or "auto"
    rank = -(-hidden // 16) if rank == "auto" else rank
    projections = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner
    return projections + inner * (c["mamba_d_conv"] + state + 3) + rank + 2 * state
