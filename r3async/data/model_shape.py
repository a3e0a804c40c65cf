"""The shape of a model, read from its `config.json`. No other module reads these numbers.

Only numbers are read here: those from which plans, costs, ranks and records of routes are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from r3async.data.layer_kinds import (
    COMMON_KEYS,
    RecurrentMixer,
    list_layer_kinds,
    measure_recurrent_mixer,
    use_common_keys,
)
from r3async.data.models import ARCHITECTURES, ModelArchitecture, QueryNorm, find_architecture

if TYPE_CHECKING:
    from r3async.config import LearnerConfig, ParallelConfig


class ModelShapeError(ValueError):
    """Error for a `config.json` that lacks required numbers, or a parallel layout that
    does not fit them."""


class RoutingShape(msgspec.Struct, frozen=True):
    """Shape of the routes that an engine records. `layers` counts the MoE layers only; `has_gates`
    is True if gates are recorded beside the experts."""

    layers: int
    top_k: int
    num_experts: int
    has_gates: bool = False

    @property
    def column_sizes(self) -> dict[str, int]:
        """The sizes of the inner dimensions of columns of routes, by their names."""
        return {
            "layers": self.layers,
            "top_k": self.top_k,
            "gates": self.top_k if self.has_gates else 0,
        }


EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

MAX_LAYERS = 512
MAX_VOCABULARY = 2**24
MAX_SIZE = 2**20
MAX_EXPERTS = 2**16
MAX_EXPERTS_OF_ALL_LAYERS = 2**17
MAX_POSITIONS = 2**31 - 1
"""Largest positions: tokens of a sample are counted in int32."""
SIZE_BOUNDS: dict[str, tuple[int, int]] = {
    "num_hidden_layers": (1, MAX_LAYERS),
    "vocab_size": (1, MAX_VOCABULARY),
    "max_position_embeddings": (1, MAX_POSITIONS),
    "sliding_window": (0, MAX_POSITIONS),
    **dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"),
            *(
                "num_attention_heads",
                "num_key_value_heads",
                "kv_lora_rank",
                "q_lora_rank",
                "v_head_dim",
            ),
        ),
        (1, MAX_SIZE),
    ),
    **dict.fromkeys(
        (
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "shared_expert_intermediate_size",
            "n_shared_experts",
        ),
        (0, MAX_SIZE),
    ),
    **dict.fromkeys(EXPERT_COUNT_KEYS, (0, MAX_EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), (1, MAX_EXPERTS)),
    "decoder_sparse_step": (1, MAX_LAYERS),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), (0, MAX_LAYERS)),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), (-1, MAX_VOCABULARY)),
}
"""Smallest and largest value of each size in a `config.json`. They are far beyond every published
model, so that a slip is named and nothing is counted for minutes."""
NULLABLE_SIZES = ("num_key_value_heads", "head_dim", "q_lora_rank", "sliding_window", "layer_types")
"""Sizes for which null means something: as many as heads, `hidden_size` / heads, none."""
NUMBER_KEYS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor")
"""Keys of a `config.json` whose values are positive numbers."""
FLAG_KEYS = (
    *("tie_word_embeddings", "norm_topk_prob", "attention_bias", "qkv_bias", "mlp_bias"),
    *("use_qk_norm", "use_sliding_window"),
)


def check_size_keys(config: Mapping[str, Any], architecture: ModelArchitecture) -> None:
    """Raise `ModelShapeError` if a `config.json` lacks a size: transformers would silently take
    its own default."""
    missing = _list_missing(config, architecture.size_keys)
    # Some families have models without a mixture among those with.
    may_have_mixtures = architecture.moe_module and not missing
    if may_have_mixtures and list_layer_kinds(config, has_experts=True).mixtures:
        experts = "|".join(architecture.expert_count_keys)
        missing = _list_missing(config, (experts, *architecture.mixture_size_keys))
    if missing:
        raise ModelShapeError(
            f"config.json has no {name_key(missing[0])}, for which transformers would take a value "
            "of its own: add the one that the weights have"
        )


def _list_missing(config: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    def is_given(key: str) -> bool:
        return config.get(key) is not None or (key in NULLABLE_SIZES and key in config)

    return [each for each in keys if not any(map(is_given, each.split("|")))]


def name_key(key: str) -> str:
    """Return a key of `COMMON_KEYS`, or several with `|` between them, with all its names, for a
    message."""
    names = [name for one in key.split("|") for name in (one, *COMMON_KEYS.get(one, ()))]
    return " or ".join(repr(name) for name in names)


def check_size_values(config: Mapping[str, Any]) -> None:
    """Raise `ModelShapeError` for a size in a `config.json` that no model can have: of another
    type, or out of `SIZE_BOUNDS`. Keys that are missing or null are not judged."""
    for key, (least, most) in SIZE_BOUNDS.items():
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelShapeError(
                f"config.json has `{key}` = {value!r:.80}, which is no whole number"
            )
        if not least <= value <= most:
            raise ModelShapeError(
                f"config.json has `{key}` = {value!r:.24}, which must be {least} to {most}"
            )
    for key in NUMBER_KEYS:
        value = config.get(key)
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            raise ModelShapeError(
                f"config.json has `{key}` = {value!r:.80}, which is no positive number"
            )
    for key in FLAG_KEYS:
        value = config.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelShapeError(
                f"config.json has `{key}` = {value!r:.80}, which is neither true nor false"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_layer_lists(config: Mapping[str, Any]) -> None:
    layers = config.get("num_hidden_layers") or 0
    dense = config.get("mlp_only_layers")
    kinds = config.get("layer_types")
    if dense is not None and not (
        isinstance(dense, list)
        and all(type(index) is int and 0 <= index < max(layers, 1) for index in dense)
    ):
        raise ModelShapeError(
            f"config.json has `mlp_only_layers` = {dense!r:.80}, which is no list of layers from 0 "
            f"to {layers - 1}"
        )
    if kinds is not None and not (
        isinstance(kinds, list)
        and len(kinds) == layers
        and all(isinstance(kind, str) for kind in kinds)
    ):
        raise ModelShapeError(
            f"config.json has `layer_types` = {kinds!r:.80}, which does not name the kind of each "
            f"of {layers} layers"
        )
    frequency = config.get("moe_layer_freq")
    if frequency is None or (type(frequency) is int and 1 <= frequency <= MAX_LAYERS):
        return
    if (
        not isinstance(frequency, list)
        or len(frequency) != layers
        or not set(map(repr, frequency)) <= {"0", "1"}
    ):
        raise ModelShapeError(
            f"config.json has `moe_layer_freq` = {frequency!r:.80}, which is neither a number from "
            f"1 nor a list with 0 or 1 for each of {layers} layers"
        )


def _check_size_relations(config: Mapping[str, Any]) -> None:
    """Raise `ModelShapeError` for sizes of a `config.json` that are at odds with each other."""
    _check_layer_lists(config)
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads")
    has_own_heads = config.get("head_dim") or config.get("qk_rope_head_dim")
    if not has_own_heads and config["hidden_size"] < config["num_attention_heads"]:
        raise ModelShapeError(
            f"config.json has no `head_dim`, and `num_attention_heads` = {heads} is more than "
            f"`hidden_size` = {config['hidden_size']}"
        )
    if heads and groups and heads % groups and not config.get("qk_rope_head_dim"):
        raise ModelShapeError(
            f"config.json has `num_key_value_heads` = {groups}, which does not divide "
            f"`num_attention_heads` = {heads}"
        )
    experts = next((count for key in EXPERT_COUNT_KEYS if (count := config.get(key))), 0)
    if experts * (config.get("num_hidden_layers") or 0) > MAX_EXPERTS_OF_ALL_LAYERS:
        raise ModelShapeError(
            f"config.json has {experts} experts in {config['num_hidden_layers']} layers, and "
            f"{MAX_EXPERTS_OF_ALL_LAYERS} may be in all together"
        )
    chosen = config.get("num_experts_per_tok")
    if experts > 1 and chosen and chosen > experts:
        raise ModelShapeError(
            f"config.json has `num_experts_per_tok` = {chosen}, and only {experts} experts"
        )
    expert_groups = config.get("n_group")
    chosen_groups = config.get("topk_group")
    if expert_groups is None and chosen_groups is None:
        return
    if expert_groups is None or chosen_groups is None:
        missing = "n_group" if expert_groups is None else "topk_group"
        raise ModelShapeError(
            f"config.json has no {name_key(missing)}, for which transformers would take a value of "
            "its own: add the one that the weights have"
        )
    if chosen_groups > expert_groups or (experts and experts % expert_groups):
        raise ModelShapeError(
            f"config.json has `n_group` = {expert_groups} and `topk_group` = {chosen_groups}, "
            f"which do not divide its {experts} experts"
        )


def take_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a `config.json` that describes the language model, with common keys (see
    `use_common_keys`). Raises `ModelShapeError` like `check_size_values`."""
    inner = config.get("text_config", config)
    if not isinstance(inner, Mapping):
        raise ModelShapeError(f"config.json has `text_config` = {inner!r:.80}, which is no object")
    kind = inner.get("model_type", "")
    if not isinstance(kind, str):
        raise ModelShapeError(f"config.json has `model_type` = {kind!r:.80}, which is no text")
    known = kind in ARCHITECTURES
    # transformers reads a declared model's own keys only, so another name would be overlooked.
    common = dict(inner) if known else use_common_keys(inner)
    check_size_values(common)
    return common


def read_moe_layers(config: Mapping[str, Any]) -> tuple[RoutingShape | None, list[int]]:
    """Return the routing shape and the indices of the MoE layers, from a Hugging
    Face `config.json`.

    The result is `(None, [])` for a dense model. Raises `ModelShapeError` for a mixture that is
    described by other keys, or without its sizes.
    """
    config = take_text_config(config)
    known = find_architecture(config.get("model_type", ""))
    if known:
        check_size_keys(config, known)
    experts = _count_experts(config, known)
    if experts < 2:
        return None, []
    missing = [
        key
        for key in ("num_hidden_layers", "num_experts_per_tok")
        if not isinstance(config.get(key), int)
    ]
    if missing:
        raise ModelShapeError(
            f"config.json has no {name_key(missing[0])} that is a number, so its routes cannot be "
            "told"
        )
    _check_layer_lists(config)
    layers = list(list_layer_kinds(config, has_experts=True).mixtures)
    if not layers:
        return None, []
    return RoutingShape(
        layers=len(layers), top_k=config["num_experts_per_tok"], num_experts=experts
    ), layers


def _count_experts(config: Mapping[str, Any], known: ModelArchitecture | None) -> int:
    keys = known.expert_count_keys if known else EXPERT_COUNT_KEYS
    return next((number for key in keys if (number := config.get(key))), 0)


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of a decoder with grouped-query attention and gated feed-forward layers, some of them
    expert mixtures."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    """Width of a dense layer's feed-forward."""
    vocab_size: int
    tied_embeddings: bool
    max_positions: int
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    shared_width: int = 0
    """Width of all shared experts of a layer together."""
    qk_dim: int = 0
    """Size of a head's query and key: `head_dim`, except in latent attention (MLA)."""
    value_dim: int = 0
    """Size of a head's value: `head_dim`, except in latent attention (MLA)."""
    kv_rank: int = 0
    """Rank of the projection that keys and values share in latent attention."""
    query_rank: int = 0
    """Rank of the low projection of queries in latent attention; 0 if queries have none."""
    rope_dim: int = 0
    """Size of the rotated part of a head in latent attention."""
    attention_layers: tuple[int, ...] = ()
    recurrent_layers: tuple[int, ...] = ()
    """Layers that keep a state. They may have attention as well."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a feed-forward that is no mixture of experts."""
    recurrent_mixer: RecurrentMixer = RecurrentMixer()
    """Sizes of one layer's recurrent or convolutional mixer."""
    has_gated_experts: bool = True
    """True if an expert, and a dense feed-forward, has a gate beside its two matrices."""
    has_gated_attention: bool = False
    """True if queries come with a gate of the same size for attention's output."""
    full_attention_layers: int = 0
    """Number of layers whose attention sees every earlier token."""
    window_tokens: int = 0
    """Number of tokens that the layers with a sliding window see, summed over these layers."""
    qkv_bias: bool = False
    query_norm: QueryNorm = ""
    has_shared_gate: bool = False
    """True if a gate weighs a layer's shared experts."""
    has_sinks_and_biases: bool = False
    """True if attention has sinks, and its output, the routers and the experts have biases."""

    @property
    def routing_shape(self) -> RoutingShape | None:
        """The shape of the routes; None for a dense model."""
        return (
            RoutingShape(len(self.moe_layers), self.top_k, self.num_experts)
            if self.moe_layers
            else None
        )

    @property
    def attention_parameters(self) -> int:
        """The number of parameters of one layer's projections, with biases, which tensor
        parallelism divides."""
        out = self.num_heads * self.value_dim * self.hidden_size
        if self.kv_rank:
            query = self.num_heads * self.qk_dim * (self.query_rank or self.hidden_size)
            return (
                out
                + query
                + self.kv_rank * self.num_heads * (self.qk_dim - self.rope_dim + self.value_dim)
            )
        queries = self.num_heads * (1 + self.has_gated_attention)
        qkv = self.head_dim * (queries + 2 * self.num_kv_heads)
        return (
            out
            + self.hidden_size * qkv
            + qkv * self.qkv_bias
            + (self.hidden_size + self.num_heads) * self.has_sinks_and_biases
        )

    @property
    def norm_parameters(self) -> int:
        """The number of parameters of one layer that tensor parallelism does not divide: its norms
        and, in latent attention, the projections to low ranks."""
        if self.kv_rank:
            low = (self.hidden_size + 1) * (
                self.query_rank + self.kv_rank
            ) + self.hidden_size * self.rope_dim
            return 2 * self.hidden_size + low
        of_queries = {"": 0, "head": 2, "whole": self.num_heads + self.num_kv_heads}[
            self.query_norm
        ]
        return 2 * self.hidden_size + of_queries * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """The number of parameters of all routed experts of one MoE layer."""
        biases = (2 * self.expert_width + self.hidden_size) * self.has_sinks_and_biases
        return self.num_experts * (
            self.matrices_per_expert * self.hidden_size * self.expert_width + biases
        )

    @property
    def matrices_per_expert(self) -> int:
        """The number of matrices of an expert, and of a dense layer's feed-forward."""
        return 2 + self.has_gated_experts

    @property
    def shared_expert_parameters(self) -> int:
        """The number of parameters of all shared experts of one MoE layer."""
        return self.matrices_per_expert * self.hidden_size * self.shared_width

    @property
    def router_parameters(self) -> int:
        """The number of parameters of one MoE layer's router, with its shared
        experts and their gate."""
        return (
            self.hidden_size * (self.num_experts + self.has_shared_gate)
            + self.num_experts * self.has_sinks_and_biases
            + self.shared_expert_parameters
        )

    @property
    def mlp_parameters(self) -> int:
        """The number of parameters of one dense layer's feed-forward."""
        return self.matrices_per_expert * self.hidden_size * self.mlp_width

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the whole model."""
        return (
            self.embedding_parameters * (1 if self.tied_embeddings else 2)
            + self.hidden_size
            + sum(map(self.layer_parameters, range(self.num_layers)))
        )

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token uses."""
        each = self.matrices_per_expert * self.hidden_size * self.expert_width
        unused = (self.num_experts - self.top_k) * each
        return self.num_parameters - unused * len(self.moe_layers)

    def layer_parameters(self, index: int) -> int:
        """Return the number of parameters of one layer."""
        parts = (
            (self.attention_layers, self.attention_parameters),
            (self.recurrent_layers, self.recurrent_mixer.parameters),
            (self.moe_layers, self.expert_parameters + self.router_parameters),
            (self.dense_layers, self.mlp_parameters),
        )
        norms = self.norm_parameters if index in self.attention_layers else 2 * self.hidden_size
        return norms + sum(number for layers, number in parts if index in layers)

    def rank_parameters(self, learner: LearnerConfig, stage: int) -> int:
        """Return the number of parameters that a Megatron rank of pipeline stage `stage` holds.

        It is the sum of `rank_parameters_by_part`.
        """
        return sum(self.rank_parameters_by_part(learner, stage).values())

    def rank_parameters_by_part(self, learner: LearnerConfig, stage: int) -> dict[str, int]:
        """Return the number of parameters of each part that a Megatron rank of pipeline
        stage `stage` holds.

        Attention, dense layers, shared experts and the vocabulary are divided by tp, experts by
        ep, and layers by pp; norms and routers are on every rank. Tied embeddings are on the first
        and the last stage.
        """
        p = learner.parallel
        here = range(stage * self.num_layers // p.pp, (stage + 1) * self.num_layers // p.pp)
        moe = sum(i in self.moe_layers for i in here)
        last = stage == p.pp - 1
        first = stage == 0
        vocabulary = -(-self.vocab_size // p.tp) * self.hidden_size
        return {
            "attention": self.attention_parameters * len(here) // p.tp,
            "dense": self.mlp_parameters * (len(here) - moe) // p.tp,
            "shared experts": self.shared_expert_parameters * moe // p.tp,
            "experts": self.expert_parameters * moe // p.ep,
            "routers": (self.router_parameters - self.shared_expert_parameters) * moe,
            "norms": self.norm_parameters * len(here) + self.hidden_size * last,
            "vocabulary": vocabulary * (first + last - (self.tied_embeddings and first and last)),
        }

    def check_parallelism(self, parallel: ParallelConfig) -> None:
        """Raise `ModelShapeError` if the ranks of `learner.parallel` cannot share this model."""
        p = parallel
        sizes = [
            ("tp", p.tp, self.num_kv_heads, "key/value heads"),
            ("tp", p.tp, self.num_heads, "heads"),
            ("pp", p.pp, self.num_layers, "layers"),
        ]
        if len(self.moe_layers) < self.num_layers:
            sizes.append(("tp", p.tp, self.mlp_width, "units of a dense layer"))
        if self.moe_layers:
            sizes.append(("ep", p.ep, self.num_experts, "experts"))
        if self.shared_width:
            sizes.append(("tp", p.tp, self.shared_width, "units of its shared experts"))
        for key, ranks, size, what in sizes:
            if size % ranks:
                raise ModelShapeError(
                    f"learner.parallel.{key} = {ranks} does not divide the model's {size} {what}"
                )
        heads = self.num_heads // p.tp
        groups = self.num_kv_heads // p.tp
        if heads % p.cp or (groups % p.cp and p.cp % groups):
            raise ModelShapeError(
                f"learner.parallel.cp = {p.cp} does not divide the {heads} heads of a rank, or "
                f"neither divides its {groups} key/value heads nor is a multiple of them"
            )
        if p.tp > 1 and self.query_norm == "whole":
            raise ModelShapeError(
                f"learner.parallel.tp = {p.tp}, but the model normalises all heads of a query "
                "together: set it to 1"
            )
        if p.ep > 1 and not self.moe_layers:
            raise ModelShapeError(
                f"learner.parallel.ep = {p.ep}, but the model has no experts to divide: set it to 1"
            )


def _read_recurrent_mixer(c: Mapping[str, Any], name: str) -> RecurrentMixer:
    try:
        return measure_recurrent_mixer(c)
    except (KeyError, TypeError) as error:
        raise ModelShapeError(
            f"config.json of {name} has layers that keep a state, and lacks a size of them: {error}"
        ) from error


REQUIRED_KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def parse_model_shape(config: Mapping[str, Any], name: str = "the model") -> ModelShape:
    """Return the shape that a Hugging Face `config.json` describes. Raises `ModelShapeError` if
    it lacks a number."""
    c = take_text_config(config)
    missing = [key for key in REQUIRED_KEYS if c.get(key) is None]
    if missing:
        raise ModelShapeError(f"config.json of {name} has no {name_key(missing[0])}")
    routing, _ = read_moe_layers(c)
    _check_size_relations(c)
    expert_width = c.get("moe_intermediate_size") or c.get("intermediate_size") or 0
    layers = c["num_hidden_layers"]
    heads = c["num_attention_heads"]
    rope_dim = c.get("qk_rope_head_dim") or 0
    head_dim = c.get("head_dim") or rope_dim or c["hidden_size"] // heads
    kinds = list_layer_kinds(c, has_experts=routing is not None)
    known = find_architecture(c.get("model_type", "")) or ModelArchitecture(
        title="", example_models=""
    )
    each_shared = c.get("moe_shared_expert_intermediate_size") or expert_width
    return ModelShape(
        name=name,
        model_type=str(config.get("model_type", "")),
        num_layers=layers,
        hidden_size=c["hidden_size"],
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp_width=(c.get("intermediate_size") or c.get("shared_intermediate_size") or 0)
        if kinds.dense
        else 0,
        vocab_size=c["vocab_size"],
        tied_embeddings=bool(c.get("tie_word_embeddings", known.tied_by_default)),
        max_positions=c.get("max_position_embeddings") or 0,
        moe_layers=kinds.mixtures,
        num_experts=routing.num_experts if routing else 0,
        top_k=routing.top_k if routing else 0,
        expert_width=expert_width if routing else 0,
        shared_width=each_shared * (c.get("n_shared_experts") or 0)
        + (c.get("shared_expert_intermediate_size") or c.get("shared_intermediate_size") or 0),
        qk_dim=c["qk_nope_head_dim"] + rope_dim if c.get("qk_nope_head_dim") else head_dim,
        value_dim=c.get("v_head_dim") or head_dim,
        kv_rank=c.get("kv_lora_rank") or 0,
        query_rank=c.get("q_lora_rank") or 0,
        rope_dim=rope_dim,
        attention_layers=kinds.attention,
        recurrent_layers=kinds.recurrent,
        dense_layers=kinds.dense,
        recurrent_mixer=_read_recurrent_mixer(c, name) if kinds.recurrent else RecurrentMixer(),
        has_gated_experts=known.has_gated_experts,
        has_gated_attention=known.has_gated_attention,
        full_attention_layers=len(kinds.attention) - kinds.windows,
        window_tokens=kinds.windows * (c.get("sliding_window") or 0),
        qkv_bias=known.resolve_flag(known.qkv_bias, {"qkv_bias": True, **c}),
        query_norm=known.resolve_query_norm(c),
        has_shared_gate=bool(known.shared_gate_module),
        has_sinks_and_biases=known.has_sinks_and_biases,
    )
