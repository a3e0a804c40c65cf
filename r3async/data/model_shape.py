"""What a model consists of, from its `config.json`: the one reader of its numbers. They are never looked up elsewhere.

Only numbers are read here: what a plan, a cost, a rank or a record of routes is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from r3async.data.architectures import Architecture, QueryNorm, declared

if TYPE_CHECKING:
    from r3async.config import LearnerConfig, ParallelConfig


class ShapeError(ValueError):
    """A `config.json` without the numbers that are needed, or a layout that does not fit them."""


class RoutingShape(msgspec.Struct, frozen=True):
    """Geometry of the routes an engine records: MoE layers only."""

    layers: int
    top_k: int
    num_experts: int


ANY_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_sizes(config: Mapping[str, Any], known: Architecture) -> None:
    """Raise `ShapeError` if a `config.json` leaves a size to transformers, which fills in its own and says nothing."""
    missing = [key for key in known.sizes if key not in config]
    if known.mixture and not set(known.experts) & set(config):
        missing.append("' or '".join(known.experts))
    if missing:
        raise ShapeError(
            f"config.json has no '{missing[0]}', for which transformers would take a value of its own: add the one that the "
            "weights have"
        )


def moe_geometry(config: Mapping[str, Any]) -> tuple[RoutingShape | None, list[int]]:
    """Routing shape and indices of the MoE layers, from a Hugging Face `config.json`; `(None, [])` for a dense model. Raises
    `ShapeError` for a mixture that is described by other words, or without its sizes."""
    config = config.get("text_config", config)
    known = declared(config.get("model_type", ""))
    if known:
        check_sizes(config, known)
    experts = next((n for k in (known.experts if known else ANY_EXPERTS) if (n := config.get(k))), 0)
    if experts < 2:
        return None, []
    if missing := [key for key in ("num_hidden_layers", "num_experts_per_tok") if not isinstance(config.get(key), int)]:
        raise ShapeError(f"config.json has no {missing[0]!r} that is a number, so its routes cannot be told")
    dense = set(config.get("mlp_only_layers") or ()) | set(range(config.get("first_k_dense_replace") or 0))
    step = config.get("decoder_sparse_step") or 1
    frequency = config.get("moe_layer_freq") or 1
    layers = [
        i
        for i in range(config["num_hidden_layers"])
        if i not in dense
        and (i + 1) % step == 0
        and (frequency[i] if isinstance(frequency, list) else i % frequency == 0)
    ]
    return RoutingShape(layers=len(layers), top_k=config["num_experts_per_tok"], num_experts=experts), layers


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of a decoder with grouped-query attention and gated feed-forward layers, some of them mixtures of experts."""

    name: str
    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Of a dense layer's feed-forward."""
    vocab: int
    tied: bool
    positions: int
    moe_layers: tuple[int, ...] = ()
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    shared_width: int = 0
    """Of all shared experts of a layer together."""
    qk_dim: int = 0
    """Of a head's query and key, and `value_dim` of its value: `head_dim`, but in latent attention (MLA)."""
    value_dim: int = 0
    kv_rank: int = 0
    """Latent attention: of the projection that keys and values share; `rope_dim` of a head's rotated part; `query_rank` 0 if
    queries have no low projection."""
    query_rank: int = 0
    rope_dim: int = 0
    full_layers: int = 0
    """Layers whose attention sees every token before."""
    windows: int = 0
    """Tokens that the layers with a sliding window see, together."""
    qkv_bias: bool = False
    query_norm: QueryNorm = ""
    shared_gate: bool = False
    """Whether a gate weighs a layer's shared experts."""
    biased: bool = False
    """Whether attention has sinks, and its output, routers and experts have biases."""

    @property
    def routing(self) -> RoutingShape | None:
        return RoutingShape(len(self.moe_layers), self.top_k, self.experts) if self.moe_layers else None

    @property
    def attention(self) -> int:
        """Parameters of one layer's projections, with biases: what tensor parallelism divides."""
        out = self.heads * self.value_dim * self.hidden
        if self.kv_rank:
            query = self.heads * self.qk_dim * (self.query_rank or self.hidden)
            return out + query + self.kv_rank * self.heads * (self.qk_dim - self.rope_dim + self.value_dim)
        qkv = self.head_dim * (self.heads + 2 * self.kv_heads)
        return out + self.hidden * qkv + qkv * self.qkv_bias + (self.hidden + self.heads) * self.biased

    @property
    def norms(self) -> int:
        """Of one layer; with latent attention, its projections to low ranks too: what tensor parallelism does not divide."""
        if self.kv_rank:
            low = (self.hidden + 1) * (self.query_rank + self.kv_rank) + self.hidden * self.rope_dim
            return 2 * self.hidden + low
        of_queries = {"": 0, "head": 2, "whole": self.heads + self.kv_heads}[self.query_norm]
        return 2 * self.hidden + of_queries * self.head_dim

    @property
    def experts_of_layer(self) -> int:
        """Parameters of all routed experts of one MoE layer."""
        biases = (2 * self.expert_width + self.hidden) * self.biased
        return self.experts * (3 * self.hidden * self.expert_width + biases)

    @property
    def shared_experts(self) -> int:
        """Parameters of one MoE layer's."""
        return 3 * self.hidden * self.shared_width

    @property
    def router(self) -> int:
        """Of one MoE layer, with shared experts and their gate."""
        return self.hidden * (self.experts + self.shared_gate) + self.experts * self.biased + self.shared_experts

    @property
    def dense(self) -> int:
        """Parameters of one dense layer's feed-forward."""
        return 3 * self.hidden * self.width

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.embedding * (1 if self.tied else 2) + self.hidden + sum(map(self.layer, range(self.layers)))

    @property
    def active(self) -> int:
        """Of these, those that one token uses."""
        unused = (self.experts - self.top_k) * 3 * self.hidden * self.expert_width
        return self.parameters - unused * len(self.moe_layers)

    def layer(self, index: int) -> int:
        """Parameters of one layer."""
        inner = self.experts_of_layer + self.router if index in self.moe_layers else self.dense
        return self.attention + self.norms + inner

    def of_rank(self, learner: LearnerConfig, stage: int) -> int:
        """Parameters that a Megatron rank of pipeline stage `stage` holds: see `parts_of_rank`."""
        return sum(self.parts_of_rank(learner, stage).values())

    def parts_of_rank(self, learner: LearnerConfig, stage: int) -> dict[str, int]:
        """Parameters of each part that a Megatron rank of pipeline stage `stage` holds: attention, dense layers, shared experts
        and the vocabulary divided by tp, experts by ep, layers by pp; norms and routers are on every rank. Tied embeddings are on
        the first and the last stage."""
        p = learner.parallel
        here = range(stage * self.layers // p.pp, (stage + 1) * self.layers // p.pp)
        moe = sum(i in self.moe_layers for i in here)
        last, first = stage == p.pp - 1, stage == 0
        vocabulary = -(-self.vocab // p.tp) * self.hidden
        return {
            "attention": self.attention * len(here) // p.tp,
            "dense": self.dense * (len(here) - moe) // p.tp,
            "shared experts": self.shared_experts * moe // p.tp,
            "experts": self.experts_of_layer * moe // p.ep,
            "routers": (self.router - self.shared_experts) * moe,
            "norms": self.norms * len(here) + self.hidden * last,
            "vocabulary": vocabulary * (first + last - (self.tied and first and last)),
        }

    def check_divides(self, parallel: ParallelConfig) -> None:
        """Raise `ShapeError` if the ranks of `learner.parallel` cannot share this model."""
        p = parallel
        sizes = [
            ("tp", p.tp, self.kv_heads, "key/value heads"),
            ("tp", p.tp, self.heads, "heads"),
            ("pp", p.pp, self.layers, "layers"),
        ]
        if len(self.moe_layers) < self.layers:
            sizes.append(("tp", p.tp, self.width, "units of a dense layer"))
        if self.moe_layers:
            sizes.append(("ep", p.ep, self.experts, "experts"))
        if self.shared_width:
            sizes.append(("tp", p.tp, self.shared_width, "units of its shared experts"))
        for key, ranks, size, what in sizes:
            if size % ranks:
                raise ShapeError(f"learner.parallel.{key} = {ranks} does not divide the model's {size} {what}")
        heads, groups = self.heads // p.tp, self.kv_heads // p.tp
        if heads % p.cp or (groups % p.cp and p.cp % groups):
            raise ShapeError(
                f"learner.parallel.cp = {p.cp} does not divide the {heads} heads of a rank, or neither divides its {groups} "
                "key/value heads nor is a multiple of them"
            )
        if p.tp > 1 and self.query_norm == "whole":
            raise ShapeError(
                f"learner.parallel.tp = {p.tp}, but the model normalises all heads of a query together: set it to 1"
            )
        if p.ep > 1 and not self.moe_layers:
            raise ShapeError(f"learner.parallel.ep = {p.ep}, but the model has no experts to divide: set it to 1")


NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def read_shape(config: Mapping[str, Any], name: str = "the model") -> ModelShape:
    """The shape that a Hugging Face `config.json` describes. Raises `ShapeError` if its numbers are not there."""
    c = config.get("text_config", config)
    if missing := [key for key in NEEDED if key not in c]:
        raise ShapeError(f"config.json of {name} has no {missing[0]!r}")
    routing, moe_layers = moe_geometry(c)
    expert_width = c.get("moe_intermediate_size") or c.get("intermediate_size") or 0
    layers, heads = c["num_hidden_layers"], c["num_attention_heads"]
    rope_dim = c.get("qk_rope_head_dim") or 0
    head_dim = c.get("head_dim") or rope_dim or c["hidden_size"] // heads
    kinds = c.get("layer_types") or ["full_attention"] * layers
    known = declared(c.get("model_type", "")) or Architecture(title="", models="")
    return ModelShape(
        name=name,
        kind=str(config.get("model_type", "")),
        layers=layers,
        hidden=c["hidden_size"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        width=c.get("intermediate_size") or 0,
        vocab=c["vocab_size"],
        tied=bool(c.get("tie_word_embeddings", False)),
        positions=c.get("max_position_embeddings") or 0,
        moe_layers=tuple(moe_layers),
        experts=routing.num_experts if routing else 0,
        top_k=routing.top_k if routing else 0,
        expert_width=expert_width if routing else 0,
        shared_width=expert_width * (c.get("n_shared_experts") or 0) + (c.get("shared_expert_intermediate_size") or 0),
        qk_dim=c["qk_nope_head_dim"] + rope_dim if c.get("qk_nope_head_dim") else head_dim,
        value_dim=c.get("v_head_dim") or head_dim,
        kv_rank=c.get("kv_lora_rank") or 0,
        query_rank=c.get("q_lora_rank") or 0,
        rope_dim=rope_dim,
        full_layers=kinds.count("full_attention"),
        windows=kinds.count("sliding_attention") * (c.get("sliding_window") or 0),
        qkv_bias=known.value(known.qkv_bias, {"qkv_bias": True, **c}),
        query_norm=known.norm_of_queries(c),
        shared_gate=bool(known.shared_gate),
        biased=known.biased,
    )
