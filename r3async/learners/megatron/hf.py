"""Qwen3-MoE between its Hugging Face checkpoint and Megatron, both ways, from one list of correspondences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from r3async.learners.base import LearnerError
from r3async.learners.megatron.modules import HiddenStatesModel


@dataclass(frozen=True)
class ModelShape:
    """What a checkpoint's `config.json` says, as far as this backend needs it."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    expert_size: int
    experts: int
    top_k: int
    normalize_gates: bool
    norm_eps: float
    rope_theta: float
    vocab_size: int
    max_positions: int
    tied: bool
    moe_pattern: tuple[bool, ...]
    """Per layer: whether its MLP is a mixture of experts."""

    @property
    def moe_layers(self) -> list[int]:
        """Numbers, from 1, of the MoE layers."""
        return [i + 1 for i, moe in enumerate(self.moe_pattern) if moe]


def read_shape(directory: Path) -> ModelShape:
    """Read `config.json`. Raises `LearnerError` naming what this backend does not support."""
    path = directory / "config.json"
    if not path.is_file():
        raise LearnerError(f"{directory} has no config.json: `model.path` must be a Hugging Face model directory")
    model_type = json.loads(path.read_text()).get("model_type")
    if model_type != "qwen3_moe":
        raise LearnerError(
            f"{directory}: model type {model_type!r} is not supported by learner.backend=megatron, only 'qwen3_moe'"
        )
    from transformers.models.qwen3_moe import Qwen3MoeConfig

    c = Qwen3MoeConfig.from_pretrained(directory)
    rope = dict(c.rope_parameters or {})
    supported = {
        "attention_bias": (c.attention_bias, False),
        "use_sliding_window": (c.use_sliding_window, False),
        "attention_dropout": (c.attention_dropout, 0),
        "hidden_act": (c.hidden_act, "silu"),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1), 1),
    }
    for key, (value, only) in supported.items():
        if value != only:
            raise LearnerError(
                f"{directory}: `{key}` = {value!r} is not supported by learner.backend=megatron, only {only!r}"
            )
    layers = range(c.num_hidden_layers)
    pattern = tuple(
        i not in c.mlp_only_layers and c.num_experts > 0 and (i + 1) % c.decoder_sparse_step == 0 for i in layers
    )
    return ModelShape(
        hidden_size=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        intermediate_size=c.intermediate_size,
        expert_size=c.moe_intermediate_size,
        experts=c.num_experts,
        top_k=c.num_experts_per_tok,
        normalize_gates=c.norm_topk_prob,
        norm_eps=c.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        vocab_size=c.vocab_size,
        max_positions=c.max_position_embeddings,
        tied=c.tie_word_embeddings,
        moe_pattern=pattern,
    )


def transformer_config(shape: ModelShape, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of that model, on one rank.

    `norm_topk_prob` (gates normalised over the chosen experts) is Megatron's softmax *after* top-k, and its opposite is
    `moe_router_pre_softmax`: softmax over all experts, then top-k.
    """
    return TransformerConfig(
        num_layers=len(shape.moe_pattern),
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        moe_ffn_hidden_size=shape.expert_size,
        num_moe_experts=shape.experts if any(shape.moe_pattern) else None,
        moe_layer_freq=[int(moe) for moe in shape.moe_pattern],
        moe_router_topk=shape.top_k,
        moe_router_pre_softmax=not shape.normalize_gates,
        moe_router_score_function="softmax",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        # A fused router returns before it looks at recorded routes.
        moe_router_fusion=False,
        # With one rank the all-gather dispatcher gathers nothing; the all-to-all one keeps its bookkeeping.
        moe_token_dispatcher_type="allgather",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
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


@dataclass(frozen=True)
class Link:
    """One Megatron parameter and the checkpoint tensors it is made of; `join` and `split` are inverse to each other."""

    parameter: Parameter
    names: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]


def links(model: HiddenStatesModel, shape: ModelShape) -> Iterator[Link]:
    """Every parameter of the model, once, with layer names by global layer number."""

    def same(parameter: Parameter, name: str) -> Link:
        return Link(parameter, (name,), lambda tensors: tensors[0], lambda weight: [weight])

    def stacked(parameter: Parameter, prefix: str) -> Link:
        """fc1 is the gate projection over the up projection."""
        names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
        return Link(parameter, names, torch.cat, lambda weight: list(weight.chunk(2)))

    groups, per_group, dim = shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim

    def join_qkv(tensors: list[Tensor]) -> Tensor:
        """Megatron keeps the query heads of a group next to its key and value head."""
        return torch.cat([t.unflatten(0, (groups, -1)) for t in tensors], dim=1).flatten(0, 1)

    def split_qkv(weight: Tensor) -> list[Tensor]:
        parts = weight.unflatten(0, (groups, -1)).split([per_group * dim, dim, dim], dim=1)
        return [part.flatten(0, 1) for part in parts]

    yield same(model.embedding.word_embeddings.weight, "model.embed_tokens.weight")
    for layer in model.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        attention, mlp = layer.self_attention, layer.mlp
        yield same(layer.input_layernorm.weight, f"{prefix}input_layernorm.weight")
        names = tuple(f"{prefix}self_attn.{x}_proj.weight" for x in "qkv")
        yield Link(attention.linear_qkv.weight, names, join_qkv, split_qkv)
        yield same(attention.q_layernorm.weight, f"{prefix}self_attn.q_norm.weight")
        yield same(attention.k_layernorm.weight, f"{prefix}self_attn.k_norm.weight")
        yield same(attention.linear_proj.weight, f"{prefix}self_attn.o_proj.weight")
        yield same(layer.pre_mlp_layernorm.weight, f"{prefix}post_attention_layernorm.weight")
        if isinstance(mlp, MoELayer):
            yield same(mlp.router.weight, f"{prefix}mlp.gate.weight")
            for e, expert in zip(mlp.local_expert_indices, mlp.experts.local_experts, strict=True):
                yield stacked(expert.linear_fc1.weight, f"{prefix}mlp.experts.{e}.")
                yield same(expert.linear_fc2.weight, f"{prefix}mlp.experts.{e}.down_proj.weight")
        else:
            yield stacked(mlp.linear_fc1.weight, f"{prefix}mlp.")
            yield same(mlp.linear_fc2.weight, f"{prefix}mlp.down_proj.weight")
    yield same(model.decoder.final_layernorm.weight, "model.norm.weight")
    if not shape.tied:
        yield same(model.output_layer.weight, "lm_head.weight")


class Checkpoint(Mapping[str, Tensor]):
    """Tensors of the safetensors files of a directory, by name, read when asked for."""

    def __init__(self, directory: Path):
        self._files = {}
        self._where = {}
        for path in sorted(directory.glob("*.safetensors")):
            self._files[path] = safe_open(path, framework="pt")
            self._where.update(dict.fromkeys(self._files[path].keys(), path))
        if not self._files:
            raise LearnerError(f"{directory} has no .safetensors file")

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._where[name]].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


@torch.no_grad()
def load_weights(model: HiddenStatesModel, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Fill every parameter. Raises `LearnerError` naming tensors that are missing, misshapen or not of this model."""
    plan = list(links(model, shape))
    needed = {name for link in plan for name in link.names}
    # A tied checkpoint may still hold the output matrix, which is the embedding again.
    allowed = needed | ({"lm_head.weight"} if shape.tied else set())
    missing, unknown = sorted(needed - set(tensors)), sorted(set(tensors) - allowed)
    for what, names in (("lacks", missing), ("has tensors that Qwen3-MoE has not:", unknown)):
        if names:
            rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise LearnerError(f"the checkpoint {what} {', '.join(names[:4])}{rest}")
    assert {id(p) for p in model.parameters()} == {id(link.parameter) for link in plan}, "a parameter has no link"
    for link in plan:
        weight = link.join([tensors[name] for name in link.names])
        if weight.shape != link.parameter.shape:
            raise LearnerError(
                f"{' + '.join(link.names)}: shape {tuple(weight.shape)}, config.json means {tuple(link.parameter.shape)}"
            )
        link.parameter.copy_(weight)


@torch.no_grad()
def export_weights(model: HiddenStatesModel, shape: ModelShape) -> dict[str, Tensor]:
    """Copies of all weights under their checkpoint names, contiguous, on the model's device."""
    return {
        name: part.clone(memory_format=torch.contiguous_format)
        for link in links(model, shape)
        for name, part in zip(link.names, link.split(link.parameter.detach()), strict=True)
    }
