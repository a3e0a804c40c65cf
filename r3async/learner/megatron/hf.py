"""What a checkpoint's `config.json` says, and Megatron's configuration of the same model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from r3async.config import LearnerConfig
from r3async.data.architectures import ARCHITECTURES, Architecture, supported
from r3async.data.model_shape import ModelShape, read_shape
from r3async.learner import LearnerError


class Rotary(msgspec.Struct, frozen=True):
    """Rotary positions: a value of each pair turns by its frequency times the position. `frequencies`: of the pairs that turn,
    the first ones of a head. `scale`: of cosine and sine. `interleaved`: a pair's values are neighbours, and not half a head
    apart."""

    frequencies: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


class TrainedShape(ModelShape, frozen=True, kw_only=True):
    """And what this backend needs besides."""

    rotary: Rotary
    norm_eps: float
    padding: int | None
    """The token whose embedding is never trained, or None."""
    normalize_gates: bool = True
    scaling: float = 1.0
    """Of gates."""
    groups: tuple[int, int] | None = None
    """Experts are in so many groups, and so many of these are chosen first."""
    attention_scale: float | None = None
    """Of scores of queries and keys; None: one over the root of a head's size."""
    further_layers: bool = False
    """The checkpoint may have layers beyond `layers`, for multi-token prediction, which are not trained."""

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.kind]

    @property
    def moe_pattern(self) -> list[bool]:
        """Per layer: whether its MLP is a mixture of experts."""
        return [i in self.moe_layers for i in range(self.layers)]

    @property
    def biased_choice(self) -> bool:
        """Whether a bias of each expert decides who is chosen."""
        return bool(self.moe_layers) and self.architecture.score == "sigmoid"

    def tensor_names(self) -> set[str]:
        """Names of all tensors of a checkpoint of this model."""
        names = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if self.tied else {"lm_head.weight"})
        norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        for i, moe in enumerate(self.moe_pattern):
            inside = norms + self._attention_names() + (self._mixture_names() if moe else _gated("mlp."))
            names |= {f"model.layers.{i}.{name}" for name in inside}
        return names

    def _attention_names(self) -> list[str]:
        if self.kv_rank:
            query = ["q_a_proj", "q_a_layernorm", "q_b_proj"] if self.query_rank else ["q_proj"]
            parts = [*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
        else:
            parts = ["q_proj", "k_proj", "v_proj", "o_proj"] + ["q_norm", "k_norm"] * bool(self.query_norm)
        biases = [f"self_attn.{x}_proj.bias" for x in "qkv" if self.qkv_bias]
        return [f"self_attn.{part}.weight" for part in parts] + biases

    def _mixture_names(self) -> list[str]:
        a = self.architecture
        names = [f"{a.mixture}.gate.weight"]
        names += [f"{a.mixture}.experts.{e}.{x}.weight" for e in range(self.experts) for x in a.projections]
        if self.shared_width:
            names += _gated(f"{a.mixture}.{a.shared}.")
        if self.shared_gate:
            names.append(f"{a.mixture}.{a.shared_gate}.weight")
        if self.biased_choice:
            names.append(f"{a.mixture}.{CHOICE_BIAS}")
        return names


CHOICE_BIAS = "gate.e_score_correction_bias"


def _gated(prefix: str) -> list[str]:
    return [f"{prefix}{x}.weight" for x in ("gate_proj", "up_proj", "down_proj")]


def read_model(directory: Path) -> TrainedShape:
    """Read `config.json`. Raises `LearnerError` naming what this backend does not support."""
    path = directory / "config.json"
    if not path.is_file():
        raise LearnerError(f"{directory} has no config.json: `model.path` must be a Hugging Face model directory")
    kind = json.loads(path.read_text()).get("model_type")
    if kind not in ARCHITECTURES:
        raise LearnerError(
            f"{directory}: model type {kind!r} is not supported by learner.backend=megatron, only {supported()}"
        )
    from transformers import AutoConfig

    loaded = AutoConfig.from_pretrained(directory, local_files_only=True)
    config, architecture = loaded.to_dict(), ARCHITECTURES[kind]
    for key, only in architecture.only.items():
        if (value := config.get(key, only)) != only:
            raise LearnerError(
                f"{directory}: `{key}` = {value!r} is not supported by learner.backend=megatron, only {only!r}"
            )
    shape = read_shape(config)
    padding = config.get("pad_token_id")
    return TrainedShape(
        **msgspec.structs.asdict(shape),
        rotary=_rotary(directory, loaded, config, shape),
        norm_eps=config["rms_norm_eps"],
        # transformers' own modules: a negative one counts from the end, as `torch.nn.Embedding` has it.
        padding=None if padding is None else padding % shape.vocab,
        normalize_gates=architecture.value(architecture.normalized, config),
        scaling=config.get("routed_scaling_factor") or 1.0,
        groups=_groups(directory, config),
        attention_scale=_attention_scale(config, shape),
        further_layers=bool(config.get("num_nextn_predict_layers")),
    )


TURNED_BY = ("default", "linear", "yarn", "llama3")
"""Kinds of rotary positions that do not depend on the length of the input."""


def _rotary(directory: Path, loaded: Any, config: dict[str, Any], shape: ModelShape) -> Rotary:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind not in TURNED_BY:
        raise LearnerError(
            f"{directory}: `rope_type` = {kind!r} is not supported by learner.backend=megatron, only {', '.join(TURNED_BY)}"
        )
    interleaved = bool(shape.kv_rank and config.get("rope_interleave", True))
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](loaded, torch.device("cpu"))
        return Rotary(tuple(frequencies.tolist()), float(scale), interleaved)
    size = shape.rope_dim or int(shape.head_dim * rope.get("partial_rotary_factor", 1.0))
    theta = float(rope.get("rope_theta", 10000.0))
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return Rotary(tuple(frequencies.tolist()), interleaved=interleaved)


def _groups(directory: Path, config: dict[str, Any]) -> tuple[int, int] | None:
    count, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if count == 1:
        return None
    if config["num_experts_per_tok"] != 2 * chosen:
        # transformers weighs a group by its two best experts, and Megatron by as many as are chosen of each.
        raise LearnerError(
            f"{directory}: `topk_group` = {chosen} is not supported by learner.backend=megatron, only half of "
            f"`num_experts_per_tok` = {config['num_experts_per_tok']}"
        )
    return count, chosen


def _attention_scale(config: dict[str, Any], shape: ModelShape) -> float | None:
    """Latent attention with YaRN scales scores, where other models scale cosine and sine."""
    rope = config.get("rope_parameters") or {}
    all_dim = rope.get("mscale_all_dim") or 0
    if not shape.kv_rank or not all_dim or rope.get("rope_type", "default") == "default":
        return None
    factor = rope["factor"]
    scale = 1.0 if factor <= 1 else 0.1 * all_dim * math.log(factor) + 1.0
    return shape.qk_dim**-0.5 * scale * scale


RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Megatron's settings for `learner.recompute`."""


def transformer_config(shape: TrainedShape, learner: LearnerConfig) -> TransformerConfig:
    """Megatron's configuration of that model.

    Gates that are normalised over the chosen experts are Megatron's softmax *after* top-k, and their opposite is
    `moe_router_pre_softmax`: softmax over all experts, then top-k. Megatron always normalises sigmoids.
    """
    parallel, dtype = learner.parallel, getattr(torch, learner.dtype)
    groups, chosen = shape.groups or (None, None)
    return TransformerConfig(
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        # Micro-batches are packed by tokens: each has its own length, and stages send it on.
        variable_seq_lengths=parallel.pp > 1,
        # Losses are divided by global denominators already, and not by the number of micro-batches.
        calculate_per_token_loss=True,
        **RECOMPUTE[learner.recompute],
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.width,
        moe_ffn_hidden_size=shape.expert_width or None,
        num_moe_experts=shape.experts or None,
        moe_layer_freq=[int(moe) for moe in shape.moe_pattern] if shape.moe_layers else 1,
        moe_router_topk=shape.top_k or 1,
        moe_router_pre_softmax=not shape.normalize_gates,
        moe_router_score_function=shape.architecture.score,
        moe_router_enable_expert_bias=shape.biased_choice,
        moe_router_num_groups=groups,
        moe_router_group_topk=chosen,
        moe_router_topk_scaling_factor=shape.scaling if shape.scaling != 1 else None,
        moe_shared_expert_intermediate_size=shape.shared_width or None,
        moe_shared_expert_gate=shape.shared_gate,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        # A fused router returns before it looks at recorded routes.
        moe_router_fusion=False,
        # With one rank the all-gather dispatcher gathers nothing; the all-to-all one keeps its bookkeeping. With several,
        # only the all-to-all one allows ranks to have different numbers of tokens.
        moe_token_dispatcher_type="allgather" if parallel.world == 1 else "alltoall",
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=bool(shape.query_norm),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        cuda_graph_scope=[],  # its default is deprecated, with a warning
        # Weights are made on the host, uninitialised, and then loaded.
        use_cpu_initialization=True,
        perform_initialization=False,
    )
