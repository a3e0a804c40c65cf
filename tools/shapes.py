"""What a model consists of, from its `config.json`: parameters by part, and by rank of the learner.

Reads the numbers only. So that a plan can be made where the weights are not, the numbers of some published models are here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import Config, ConfigError, LearnerConfig
from r3async.engines.base import RoutingShape, moe_geometry

_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
    },
    "Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
    "Qwen2.5-7B-Instruct": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}
"""From the models' own `config.json`: huggingface.co/Qwen/NAME/blob/main/config.json."""

BIASED = ("qwen2", "qwen2_moe")
"""Model types whose query, key and value projections have a bias, whatever `config.json` says."""
NORMED = ("qwen3", "qwen3_moe")
"""Model types that normalise queries and keys by head."""
INIT_VOCABULARY = 264
"""256 bytes and six special tokens, in eights: of a model that `model.init` makes."""


class Shape(msgspec.Struct, frozen=True):
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

    @property
    def routing(self) -> RoutingShape | None:
        return RoutingShape(len(self.moe_layers), self.top_k, self.experts) if self.moe_layers else None

    @property
    def attention(self) -> int:
        """Parameters of one layer's projections, with biases: what tensor parallelism divides."""
        qkv = self.head_dim * (self.heads + 2 * self.kv_heads)
        return self.hidden * qkv + self.heads * self.head_dim * self.hidden + qkv * (self.kind in BIASED)

    @property
    def norms(self) -> int:
        """Of one layer."""
        return 2 * self.hidden + 2 * self.head_dim * (self.kind in NORMED)

    @property
    def experts_of_layer(self) -> int:
        """Parameters of all routed experts of one MoE layer."""
        return self.experts * 3 * self.hidden * self.expert_width

    @property
    def router(self) -> int:
        """Of one MoE layer, with shared experts and their gate: what every rank of the stage has."""
        return self.hidden * self.experts + (3 * self.hidden * self.shared_width)

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
        """Parameters that a Megatron rank of pipeline stage `stage` holds: attention, dense layers and the vocabulary divided
        by tp, experts by ep, layers by pp; norms and routers are on every rank. Tied embeddings are on the first and the
        last stage."""
        p = learner.parallel
        here = range(stage * self.layers // p.pp, (stage + 1) * self.layers // p.pp)
        moe = sum(i in self.moe_layers for i in here)
        shared = (self.attention * len(here) + self.dense * (len(here) - moe)) // p.tp
        total = shared + self.norms * len(here) + moe * (self.router + self.experts_of_layer // p.ep)
        last, first = stage == p.pp - 1, stage == 0
        vocabulary = -(-self.vocab // p.tp) * self.hidden
        total += vocabulary * (first + last - (self.tied and first and last))
        return total + self.hidden * last

    def check_divides(self, learner: LearnerConfig) -> None:
        """Raise `ConfigError` if the ranks of `learner.parallel` can not share this model, or its backend not train it."""
        p = learner.parallel
        if learner.backend == "megatron" and self.kind != "qwen3_moe":
            raise ConfigError(
                f'`learner.backend` = "megatron" trains qwen3_moe and no {self.kind} ({self.name}): set it to "torch"'
            )
        sizes = [
            ("tp", p.tp, self.kv_heads, "key/value heads"),
            ("tp", p.tp, self.heads, "heads"),
            ("pp", p.pp, self.layers, "layers"),
        ]
        if len(self.moe_layers) < self.layers:
            sizes.append(("tp", p.tp, self.width, "units of a dense layer"))
        if self.moe_layers:
            sizes.append(("ep", p.ep, self.experts, "experts"))
        for key, ranks, size, what in sizes:
            if size % ranks:
                raise ConfigError(f"`learner.parallel.{key}` = {ranks} does not divide {self.name}'s {size} {what}")
        if p.ep > 1 and not self.moe_layers:
            raise ConfigError(f"`learner.parallel.ep` = {p.ep}, but {self.name} has no experts to divide: set it to 1")


def read_shape(config: Mapping[str, Any], name: str) -> Shape:
    """The shape that a Hugging Face `config.json` describes. Raises `ConfigError` if its numbers are not there."""
    c = config.get("text_config", config)
    needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    if missing := [key for key in needed if key not in c]:
        raise ConfigError(f"config.json of {name} has no {missing[0]!r}: its memory can not be planned")
    routing, layers = moe_geometry(c)
    width = c.get("moe_intermediate_size") or c.get("intermediate_size") or 0
    return Shape(
        name=name,
        kind=str(config.get("model_type", "")),
        layers=c["num_hidden_layers"],
        hidden=c["hidden_size"],
        heads=c["num_attention_heads"],
        kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
        head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        width=c.get("intermediate_size") or 0,
        vocab=c["vocab_size"],
        tied=bool(c.get("tie_word_embeddings", False)),
        positions=c.get("max_position_embeddings") or 0,
        moe_layers=tuple(layers),
        experts=routing.num_experts if routing else 0,
        top_k=routing.top_k if routing else 0,
        expert_width=width if routing else 0,
        shared_width=width * (c.get("n_shared_experts") or 0) + (c.get("shared_expert_intermediate_size") or 0),
    )


def shape_of(config: Config) -> tuple[Shape, str]:
    """The model of a run, and where its numbers are from. Raises `ConfigError` if they are nowhere."""
    path = config.model.path
    if not path:
        i = config.model.init
        made = {
            "model_type": "qwen3_moe",
            "hidden_size": i.hidden_size,
            "num_hidden_layers": i.layers,
            "num_attention_heads": i.heads,
            "num_key_value_heads": i.kv_heads,
            "head_dim": i.hidden_size // i.heads,
            "intermediate_size": 2 * i.hidden_size,
            "num_experts": i.experts,
            "num_experts_per_tok": i.top_k,
            "moe_intermediate_size": i.expert_hidden_size,
            "vocab_size": INIT_VOCABULARY,
            "max_position_embeddings": i.max_positions,
        }
        return read_shape(made, "model.init"), "model.init: made when the run starts"
    file, name = Path(path) / "config.json", Path(path).name
    if file.is_file():
        return read_shape(json.loads(file.read_text()), name), str(file)
    if name in PUBLISHED:
        return read_shape(PUBLISHED[name], name), f"the published shape of {name}; {path} is not on this machine"
    raise ConfigError(
        f"`model.path` = {path!r}: no config.json there, and no published shape is known for {name!r} "
        f"(known: {', '.join(PUBLISHED)})"
    )
