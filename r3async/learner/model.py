"""The shape of a declared model, read from `config.json`, and its checkpoint's tensors; for the
Megatron backend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from r3async.config import LearnerConfig
from r3async.data.checkpoint_forms import (
    CheckpointFormError,
    is_prediction_tensor,
    list_weight_files,
    read_quantized_form,
)
from r3async.data.model_shape import ModelShape, ModelShapeError, parse_model_shape
from r3async.data.models import (
    ARCHITECTURES,
    EXPERT_BIAS_SUFFIX,
    ModelArchitecture,
    list_supported_types,
)
from r3async.learner.adapter_targets import select_targets
from r3async.learner.dequantized_files import DequantizedFile
from r3async.learner.results import LearnerError
from r3async.untrusted import decode_python_json

TensorShapes = dict[str, tuple[int, ...]]
"""Shapes of tensors, by name."""


class RotarySettings(msgspec.Struct, frozen=True):
    """Rotary positions: a value of each pair turns by its frequency times the position.

    Attributes:
        frequencies: Frequencies of the pairs that turn, the first ones of a head.
        scale: Factor of cosine and sine.
        interleaved: A pair's values are neighbours, instead of half a head apart.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


class MegatronModelShape(ModelShape, frozen=True, kw_only=True):
    """A model's shape, and the further settings that this backend needs."""

    rotary: RotarySettings
    norm_eps: float
    padding_token: int | None
    """The token whose embedding is never trained, or None."""
    normalizes_gates: bool = True
    gate_scale: float = 1.0
    """Factor of the gates."""
    expert_groups: tuple[int, int] | None = None
    """Number of groups of experts, and number of groups that are chosen first;
    None without groups."""
    attention_scale: float | None = None
    """Factor of the scores of queries and keys; None: one over the root of a head's size."""
    has_extra_layers: bool = False
    """True if the checkpoint may have layers beyond `num_layers`, for multi-token prediction, which
    are not trained."""

    @property
    def architecture(self) -> ModelArchitecture:
        return ARCHITECTURES[self.model_type]

    @property
    def moe_pattern(self) -> list[bool]:
        """A list that is True for each layer whose MLP is a mixture of experts."""
        return [i in self.moe_layers for i in range(self.num_layers)]

    @property
    def has_expert_biases(self) -> bool:
        """True if a bias of each expert takes part in the choice of experts."""
        return bool(self.moe_layers) and self.architecture.router_score == "sigmoid"

    def list_tensor_shapes(self) -> TensorShapes:
        """Return the shapes of all tensors of a checkpoint of this model."""
        shapes: TensorShapes = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        norms: TensorShapes = dict.fromkeys(
            ("input_layernorm.weight", "post_attention_layernorm.weight"), (self.hidden_size,)
        )
        attention = self._attention_shapes()
        mixture = self._moe_shapes() if self.moe_layers else {}
        for i, moe in enumerate(self.moe_pattern):
            inside = (
                norms | attention | (mixture if moe else self._mlp_shapes("mlp.", self.mlp_width))
            )
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in inside.items()}
        return shapes

    def _attention_shapes(self) -> TensorShapes:
        h = self.hidden_size
        heads = self.num_heads
        shapes: TensorShapes = {"o_proj.weight": (h, heads * self.value_dim)}
        if self.kv_rank:
            wide = heads * self.qk_dim
            if self.query_rank:
                shapes |= {
                    "q_a_proj.weight": (self.query_rank, h),
                    "q_a_layernorm.weight": (self.query_rank,),
                }
                shapes |= {"q_b_proj.weight": (wide, self.query_rank)}
            else:
                shapes |= {"q_proj.weight": (wide, h)}
            both = self.qk_dim - self.rope_dim + self.value_dim
            shapes |= {"kv_a_proj_with_mqa.weight": (self.kv_rank + self.rope_dim, h)}
            shapes |= {
                "kv_a_layernorm.weight": (self.kv_rank,),
                "kv_b_proj.weight": (heads * both, self.kv_rank),
            }
        else:
            for x, count in (("q", heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
                rows = count * self.head_dim
                shapes |= {f"{x}_proj.weight": (rows, h)} | (
                    {f"{x}_proj.bias": (rows,)} if self.qkv_bias else {}
                )
                if self.query_norm and x != "v":
                    shapes[f"{x}_norm.weight"] = (
                        rows if self.query_norm == "whole" else self.head_dim,
                    )
        return {f"self_attn.{name}": shape for name, shape in shapes.items()}

    def _moe_shapes(self) -> TensorShapes:
        a = self.architecture
        inside = f"{self.architecture.moe_module}."
        shapes: TensorShapes = {f"{inside}gate.weight": (self.num_experts, self.hidden_size)}
        for e in range(self.num_experts):
            shapes |= self._mlp_shapes(
                f"{inside}experts.{e}.", self.expert_width, a.expert_projections
            )
        if self.shared_width:
            shapes |= self._mlp_shapes(f"{inside}{a.shared_experts_module}.", self.shared_width)
        if self.has_shared_gate:
            shapes[f"{inside}{a.shared_gate_module}.weight"] = (1, self.hidden_size)
        if self.has_expert_biases:
            shapes[f"{inside}gate.{EXPERT_BIAS_SUFFIX}"] = (self.num_experts,)
        return shapes

    def _mlp_shapes(
        self, prefix: str, width: int, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    ) -> TensorShapes:
        gate, up, down = (f"{prefix}{name}.weight" for name in names)
        return {
            gate: (width, self.hidden_size),
            up: (width, self.hidden_size),
            down: (self.hidden_size, width),
        }


def check_tensor_shapes(shape: MegatronModelShape, found: Mapping[str, Sequence[int]]) -> None:
    """Raise `LearnerError` naming tensors of a checkpoint that are missing, misshapen or
    not of this model."""
    needed = shape.list_tensor_shapes()
    # A tied checkpoint may still hold the output matrix, which is the embedding again.
    allowed = set(needed) | ({"lm_head.weight"} if shape.tied_embeddings else set())
    missing = sorted(set(needed) - set(found))
    unknown = sorted(set(found) - allowed)
    if shape.has_extra_layers:
        unknown = [name for name in unknown if not is_prediction_tensor(name, shape.num_layers)]
    for what, names in (
        ("lacks", missing),
        (f"has tensors that are not of {shape.architecture.title}:", unknown),
    ):
        if names:
            rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise LearnerError(f"the checkpoint {what} {', '.join(names[:4])}{rest}")
    for name, expected in needed.items():
        if tuple(found[name]) != expected:
            raise LearnerError(f"{name}: shape {tuple(found[name])}, config.json means {expected}")


def list_extra_tensors(shape: MegatronModelShape, names: Iterable[str]) -> list[str]:
    """Return those `names` of a checkpoint's tensors that belong to layers for multi-token
    prediction."""
    return [name for name in names if is_prediction_tensor(name, shape.num_layers)]


def open_model_files(directory: Path) -> dict[str, Any]:
    """Return, for each tensor of a directory's safetensors files, by name, the open
    file that has it. Quantized tensors are read dequantized.

    The files are read, not mapped: what was read of them does not stay in the process's memory.
    Raises `LearnerError`.
    """
    try:
        opened = [
            safe_open(path, framework="pt", backend="pread")
            for path in list_weight_files(directory)
        ]
        form = read_quantized_form(decode_python_json((directory / "config.json").read_bytes()))
    except CheckpointFormError as error:
        raise LearnerError(f"{directory}: {error}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise LearnerError(f"{directory}: its weights cannot be read: {error}") from error
    if not opened:
        raise LearnerError(f"{directory} has no .safetensors file")
    files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
    return files if form is None else DequantizedFile(files, form).list_tensors()


def read_tensor_shapes(files: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the shapes of the tensors of `open_model_files`, without reading any tensor."""
    return {name: file.get_slice(name).get_shape() for name, file in files.items()}


def check_model_directory(directory: Path, learner: LearnerConfig) -> None:
    """Check all that can be known before a model is loaded with these settings.
    Raises `LearnerError`."""
    shape = read_model_shape(directory)
    try:
        shape.check_parallelism(learner.parallel)
    except ModelShapeError as error:
        raise LearnerError(str(error)) from error
    check_tensor_shapes(shape, read_tensor_shapes(open_model_files(directory)))
    if learner.lora.rank:
        select_targets(learner, _list_adaptable_modules(shape))


def _list_adaptable_modules(shape: MegatronModelShape) -> list[tuple[str, bool]]:
    """Return the names of the matrices that may have adapters: those of layers. Each comes with
    whether it is a router's."""
    router = f".{shape.architecture.moe_module}.gate.weight"
    return [
        (name.removesuffix(".weight"), bool(shape.moe_layers) and name.endswith(router))
        for name, sizes in shape.list_tensor_shapes().items()
        if len(sizes) == 2 and name.startswith("model.layers.")
    ]


def _check_gates(shape: MegatronModelShape, directory: Path) -> None:
    if (
        shape.moe_layers
        and shape.top_k == 1
        and shape.normalizes_gates
        and shape.architecture.router_score == "softmax"
    ):
        raise LearnerError(
            f"{directory}: one expert a token, with gates that are normalised to 1, gives its "
            'routers no gradient, and megatron-core refuses it: set `learner.backend` = "torch"'
        )


def read_model_shape(directory: Path) -> MegatronModelShape:
    """Read `config.json`. Raises `LearnerError` naming what this backend does not support."""
    path = directory / "config.json"
    if not path.is_file():
        raise LearnerError(
            f"{directory} has no config.json: `model.path` must be a Hugging Face model directory"
        )
    described = decode_python_json(path.read_bytes())
    kind = described.get("model_type")
    if "text_config" in described:
        raise LearnerError(
            f"{directory}: model type {kind!r} has more than a text model, which "
            'learner.backend=megatron would not carry along: set `learner.backend` = "torch"'
        )
    if kind not in ARCHITECTURES:
        raise LearnerError(
            f"{directory}: model type {kind!r} is not supported by learner.backend=megatron, only "
            f"{list_supported_types()}"
        )
    from transformers import AutoConfig

    loaded = AutoConfig.from_pretrained(directory, local_files_only=True)
    config = loaded.to_dict()
    architecture = ARCHITECTURES[kind]
    for key, only in architecture.required_config.items():
        value = config.get(key, only)
        if value != only:
            raise LearnerError(
                f"{directory}: `{key}` = {value!r} is not supported by "
                f"learner.backend=megatron, only {only!r}"
            )
    try:
        shape = parse_model_shape(config)
    except ModelShapeError as error:
        raise LearnerError(f"{directory}: {error}") from error
    padding = config.get("pad_token_id")
    made = MegatronModelShape(
        **msgspec.structs.asdict(shape),
        rotary=_read_rotary(directory, loaded, config, shape),
        norm_eps=config["rms_norm_eps"],
        # As in transformers' own modules, a negative one counts from the end, like in
        # `torch.nn.Embedding`.
        padding_token=None if padding is None else padding % shape.vocab_size,
        normalizes_gates=architecture.resolve_flag(architecture.normalized_gates, config),
        gate_scale=config.get("routed_scaling_factor") or 1.0,
        expert_groups=_read_expert_groups(directory, config),
        attention_scale=_compute_attention_scale(config, shape),
        has_extra_layers=bool(config.get("num_nextn_predict_layers")),
    )
    _check_gates(made, directory)
    return made


ROTARY_KINDS = ("default", "linear", "yarn", "llama3")
"""Kinds of rotary positions that do not depend on the length of the input."""


def _read_rotary(
    directory: Path, loaded: Any, config: dict[str, Any], shape: ModelShape
) -> RotarySettings:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROTARY_KINDS:
        raise LearnerError(
            f"{directory}: `rope_type` = {kind!r} is not supported by learner.backend=megatron, "
            f"only {', '.join(ROTARY_KINDS)}"
        )
    interleaved = bool(shape.kv_rank and config.get("rope_interleave", True))
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](loaded, torch.device("cpu"))
        return RotarySettings(tuple(frequencies.tolist()), float(scale), interleaved)
    size = shape.rope_dim or int(shape.head_dim * rope.get("partial_rotary_factor", 1.0))
    theta = float(rope.get("rope_theta", 10000.0))
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return RotarySettings(tuple(frequencies.tolist()), interleaved=interleaved)


def _read_expert_groups(directory: Path, config: dict[str, Any]) -> tuple[int, int] | None:
    count = config.get("n_group") or 1
    chosen = config.get("topk_group") or 1
    if count == 1:
        return None
    if config["num_experts_per_tok"] != 2 * chosen:
        # transformers scores a group by its two best experts, and Megatron by as many as are
        # chosen from each.
        raise LearnerError(
            f"{directory}: `topk_group` = {chosen} is not supported by learner.backend=megatron, "
            f"only half of `num_experts_per_tok` = {config['num_experts_per_tok']}"
        )
    return count, chosen


def _compute_attention_scale(config: dict[str, Any], shape: ModelShape) -> float | None:
    """Return the scale of scores in latent attention with YaRN; None for other models, which scale
    cosine and sine."""
    rope = config.get("rope_parameters") or {}
    all_dim = rope.get("mscale_all_dim") or 0
    if not shape.kv_rank or not all_dim or rope.get("rope_type", "default") == "default":
        return None
    factor = rope["factor"]
    scale = 1.0 if factor <= 1 else 0.1 * all_dim * math.log(factor) + 1.0
    return shape.qk_dim**-0.5 * scale * scale
