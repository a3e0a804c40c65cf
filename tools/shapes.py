"""The shape of the model that a configuration names.

So that a plan can be made where the weights are not, the numbers of some published models are here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r3async.config import Config, ConfigError, LearnerConfig
from r3async.data.model_shape import ModelShape, ShapeError, read_shape

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

INIT_VOCABULARY = 264
"""256 bytes and six special tokens, in eights: of a model that `model.init` makes."""


def check_trained(shape: ModelShape, learner: LearnerConfig) -> None:
    """Raise `ConfigError` if the ranks of `learner.parallel` cannot share this model, or its backend not train it."""
    if learner.backend == "megatron" and shape.kind != "qwen3_moe":
        raise ConfigError(
            f'`learner.backend` = "megatron" trains qwen3_moe and no {shape.kind} ({shape.name}): set it to "torch"'
        )
    try:
        shape.check_divides(learner.parallel)
    except ShapeError as error:
        raise ConfigError(f"{shape.name}: {error}") from error


def planned_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a `config.json` describes. Raises `ConfigError` if its numbers are not there."""
    try:
        return read_shape(config, name)
    except ShapeError as error:
        raise ConfigError(f"{error}: its memory cannot be planned") from error


def shape_of(config: Config) -> tuple[ModelShape, str]:
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
        return planned_shape(made, "model.init"), "model.init: made when the run starts"
    file, name = Path(path) / "config.json", Path(path).name
    if file.is_file():
        return planned_shape(json.loads(file.read_text()), name), str(file)
    if name in PUBLISHED:
        return planned_shape(PUBLISHED[name], name), f"the published shape of {name}; {path} is not on this machine"
    raise ConfigError(
        f"`model.path` = {path!r}: no config.json there, and no published shape is known for {name!r} "
        f"(known: {', '.join(PUBLISHED)})"
    )
