"""Megatron's configuration of a model, and the mapping of its weights to and from Hugging
Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Parameter

from r3async.checkpoint.rank_files import TensorSlice
from r3async.data.models import EXPERT_BIAS_SUFFIX
from r3async.learner.megatron.model import HiddenStatesModel
from r3async.learner.model import MegatronModelShape, check_tensor_shapes, read_tensor_shapes
from r3async.learner.results import LearnerError
from r3async.learner.shard_slice import ShardSlice
from r3async.learner.tensor_layout import (
    WHOLE_TENSOR,
    ConcatenatedPair,
    InterleavedRows,
    StackedPairs,
    StackedTensors,
    TensorLayout,
)


@dataclass(frozen=True)
class ParameterMapping:
    """One Megatron parameter of this rank and the checkpoint tensors that it consists of.

    Attributes:
        layout: How the parameter consists of this rank's parts of the tensors.
        tp_dim: The dimension along which each of the tensors is divided among the tensor-parallel
            ranks; None if every rank has all of them.
        unpadded_rows: Number of rows of the whole tensor, where ranks pad it with zeros to
            share it evenly.
        is_expert: The parameter belongs to an expert.
        is_on_two_stages: Two pipeline stages have the parameter (an embedding that is also
            the output matrix).
        is_second_copy: This is the second of these two copies.
    """

    parameter: Parameter
    tensor_names: tuple[str, ...]
    layout: TensorLayout
    tp_dim: int | None = None
    unpadded_rows: int | None = None
    is_expert: bool = False
    is_on_two_stages: bool = False
    is_second_copy: bool = False

    def local_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole checkpoint tensor."""
        if self.tp_dim is None:
            return tensor
        ranks = ps.get_tensor_model_parallel_world_size()
        if self.unpadded_rows is not None and self.unpadded_rows % ranks:
            tensor = F.pad(tensor, (0, 0, 0, -self.unpadded_rows % ranks))
        if tensor.shape[self.tp_dim] % ranks:
            raise LearnerError(
                f"{self.tensor_names[0]}: {tensor.shape[self.tp_dim]} rows or columns cannot be "
                f"divided among {ranks} ranks"
            )
        return tensor.chunk(ranks, self.tp_dim)[ps.get_tensor_model_parallel_rank()]

    def gather_full(self, part: Tensor) -> Tensor:
        """Return the whole tensor from every tensor-parallel rank's part. Collective,
        if it is divided."""
        if self.tp_dim is None:
            return part
        if ps.get_tensor_model_parallel_world_size() == 1:
            return part[: self.unpadded_rows]
        parts = [torch.empty_like(part) for _ in range(ps.get_tensor_model_parallel_world_size())]
        dist.all_gather(parts, part.contiguous(), group=ps.get_tensor_model_parallel_group())
        return torch.cat(parts, self.tp_dim)[: self.unpadded_rows]


def locate_shard(link: ParameterMapping, *, sharded: bool = False) -> ShardSlice:
    """Return the position of this rank's parts of that parameter in the tensors of a checkpoint.

    With `sharded`, each data-parallel copy writes its share, instead of the first copy
    writing everything.
    """
    rank = ps.get_tensor_model_parallel_rank()
    ranks = ps.get_tensor_model_parallel_world_size()
    places = []
    for name, part in zip(
        link.tensor_names, link.layout.split(link.parameter.detach()), strict=True
    ):
        shape = list(part.shape)
        offset = [0] * part.ndim
        size = list(part.shape)
        if link.tp_dim is not None:
            shape[link.tp_dim] = link.unpadded_rows or size[link.tp_dim] * ranks
            offset[link.tp_dim] = min(rank * size[link.tp_dim], shape[link.tp_dim])
            # Rows that only pad the ranks' shares are not in any checkpoint.
            size[link.tp_dim] = min(size[link.tp_dim], shape[link.tp_dim] - offset[link.tp_dim])
        places.append(TensorSlice(name, tuple(shape), tuple(offset), tuple(size)))
    divided = link.tp_dim is not None
    copy = (
        ps.get_expert_data_parallel_rank()
        if link.is_expert
        else ps.get_data_parallel_rank(with_context_parallel=True)
    )
    mine = (sharded or copy == 0) and (divided or link.is_expert or rank == 0)
    return ShardSlice(tuple(places), link.layout, is_writer=mine and not link.is_second_copy)


def map_tensor(parameter: Parameter, name: str, **how: Any) -> ParameterMapping:
    """Map a parameter that is one tensor of the checkpoint."""
    return ParameterMapping(parameter, (name,), WHOLE_TENSOR, **how)


def map_gate_up(parameter: Parameter, prefix: str, **how: Any) -> ParameterMapping:
    """Map a feed-forward input: fc1 is the gate projection over the up projection."""
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    return ParameterMapping(parameter, names, ConcatenatedPair(), **how)


def map_parameters(
    model: HiddenStatesModel, shape: MegatronModelShape
) -> Iterator[ParameterMapping]:
    """Yield a mapping for every parameter of this rank's part of the model, once, with global layer
    numbers in names."""
    pipeline = ps.get_pipeline_model_parallel_world_size()
    vocabulary = {"tp_dim": 0, "unpadded_rows": shape.vocab_size}
    if model.pre_process:
        twice = shape.tied_embeddings and pipeline > 1
        yield map_tensor(
            model.embedding.word_embeddings.weight,
            "model.embed_tokens.weight",
            is_on_two_stages=twice,
            **vocabulary,
        )
    for layer in model.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        yield map_tensor(layer.input_layernorm.weight, f"{prefix}input_layernorm.weight")
        attention = _map_latent_attention if shape.kv_rank else _map_attention
        yield from attention(layer.self_attention, f"{prefix}self_attn.", shape)
        yield map_tensor(layer.pre_mlp_layernorm.weight, f"{prefix}post_attention_layernorm.weight")
        if isinstance(layer.mlp, MoELayer):
            yield from _map_moe(layer.mlp, f"{prefix}{shape.architecture.moe_module}.", shape)
        else:
            yield from _map_mlp(layer.mlp, f"{prefix}mlp.")
    if model.post_process:
        yield map_tensor(model.decoder.final_layernorm.weight, "model.norm.weight")
        if not shape.tied_embeddings:
            yield map_tensor(model.output_layer.weight, "lm_head.weight", **vocabulary)
        elif pipeline > 1:
            yield map_tensor(
                model.output_layer.weight,
                "model.embed_tokens.weight",
                is_on_two_stages=True,
                is_second_copy=True,
                **vocabulary,
            )


def _map_attention(
    attention: Any, prefix: str, shape: MegatronModelShape
) -> Iterator[ParameterMapping]:
    """Yield the mappings of attention with grouped queries."""
    ranks = ps.get_tensor_model_parallel_world_size()
    groups = shape.num_kv_heads // ranks
    per_group = shape.num_heads // shape.num_kv_heads
    dim = shape.head_dim
    # The query heads of a group are next to its key and value head.
    layout = InterleavedRows(groups, (per_group * dim, dim, dim))

    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        names = tuple(f"{prefix}{x}_proj.{kind}" for x in "qkv")
        yield ParameterMapping(getattr(attention.linear_qkv, kind), names, layout, tp_dim=0)
    if shape.query_norm:
        yield map_tensor(attention.q_layernorm.weight, f"{prefix}q_norm.weight")
        yield map_tensor(attention.k_layernorm.weight, f"{prefix}k_norm.weight")
    yield map_tensor(attention.linear_proj.weight, f"{prefix}o_proj.weight", tp_dim=1)


def _map_latent_attention(
    attention: Any, prefix: str, shape: MegatronModelShape
) -> Iterator[ParameterMapping]:
    """Yield the mappings of multi-head latent attention: every rank has the
    projections to low ranks."""
    if shape.query_rank:
        yield map_tensor(attention.linear_q_down_proj.weight, f"{prefix}q_a_proj.weight")
        yield map_tensor(attention.q_layernorm.weight, f"{prefix}q_a_layernorm.weight")
        yield map_tensor(attention.linear_q_up_proj.weight, f"{prefix}q_b_proj.weight", tp_dim=0)
    else:
        yield map_tensor(attention.linear_q_up_proj.weight, f"{prefix}q_proj.weight", tp_dim=0)
    yield map_tensor(attention.linear_kv_down_proj.weight, f"{prefix}kv_a_proj_with_mqa.weight")
    yield map_tensor(attention.kv_layernorm.weight, f"{prefix}kv_a_layernorm.weight")
    yield map_tensor(attention.linear_kv_up_proj.weight, f"{prefix}kv_b_proj.weight", tp_dim=0)
    yield map_tensor(attention.linear_proj.weight, f"{prefix}o_proj.weight", tp_dim=1)


def _map_mlp(mlp: Any, prefix: str) -> Iterator[ParameterMapping]:
    yield map_gate_up(mlp.linear_fc1.weight, prefix, tp_dim=0)
    yield map_tensor(mlp.linear_fc2.weight, f"{prefix}down_proj.weight", tp_dim=1)


def _map_moe(mlp: MoELayer, prefix: str, shape: MegatronModelShape) -> Iterator[ParameterMapping]:
    a = shape.architecture
    gate, up, down = a.expert_projections
    yield map_tensor(mlp.router.weight, f"{prefix}gate.weight")
    here = [f"{prefix}experts.{e}." for e in mlp.local_expert_indices]
    yield ParameterMapping(
        mlp.experts.weight1,
        tuple(f"{expert}{name}.weight" for expert in here for name in (gate, up)),
        StackedPairs(len(here)),
        is_expert=True,
    )
    names = tuple(f"{expert}{down}.weight" for expert in here)
    yield ParameterMapping(mlp.experts.weight2, names, StackedTensors(), is_expert=True)
    if mlp.shared_experts is not None:
        yield from _map_mlp(mlp.shared_experts, f"{prefix}{a.shared_experts_module}.")
        if shape.has_shared_gate:
            yield map_tensor(
                mlp.shared_experts.gate_weight, f"{prefix}{a.shared_gate_module}.weight"
            )


def map_expert_biases(
    model: HiddenStatesModel, shape: MegatronModelShape
) -> list[ParameterMapping]:
    """Return the mappings of the expert biases of this rank's routers, which take part in the
    choice of experts.

    A bias has no gradient, and stays float32.
    """
    if not shape.has_expert_biases:
        return []
    mixtures = {
        layer.layer_number - 1: layer.mlp
        for layer in model.decoder.layers
        if isinstance(layer.mlp, MoELayer)
    }
    where = shape.architecture.moe_module
    return [
        map_tensor(m.router.expert_bias, f"model.layers.{i}.{where}.gate.{EXPERT_BIAS_SUFFIX}")
        for i, m in mixtures.items()
    ]


@torch.no_grad()
def load_weights(
    mappings: Sequence[ParameterMapping], shape: MegatronModelShape, files: Mapping[str, Any]
) -> None:
    """Fill every parameter from `open_model_files`.

    Raises `LearnerError` naming tensors that are missing, misshapen or not of this model.
    """
    check_tensor_shapes(shape, read_tensor_shapes(files))
    for link in mappings:
        try:
            weight = link.layout.join(
                [link.local_part(files[name].get_tensor(name)) for name in link.tensor_names]
            )
        except RuntimeError as error:
            raise LearnerError(
                f"{' + '.join(link.tensor_names)} do not fit together: {error}"
            ) from error
        if weight.shape != link.parameter.shape:
            raise LearnerError(
                f"{' + '.join(link.tensor_names)}: shape {tuple(weight.shape)}, config.json means "
                f"{tuple(link.parameter.shape)}"
            )
        link.parameter.copy_(weight)


@torch.no_grad()
def iter_owned_weights(
    mappings: Sequence[ParameterMapping],
    value: Callable[[Parameter], Tensor] = lambda parameter: parameter.detach(),
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights, or `value` of them, that this rank exports: over all ranks, each
    weight comes once.

    Tensor- and data-parallel ranks that share a parameter take turns. The tensors are views of the
    parameters where possible. Collective.
    """
    expert = ps.get_expert_data_parallel_rank() == 0
    tensor = ps.get_tensor_model_parallel_rank()
    data = ps.get_data_parallel_rank(with_context_parallel=True)
    tensors = ps.get_tensor_model_parallel_world_size()
    datas = ps.get_data_parallel_world_size(with_context_parallel=True)
    turn = 0
    for link in mappings:
        if link.is_second_copy:
            continue
        if not link.is_expert:
            turn += 1
            if turn // tensors % datas != data:
                continue  # alike on all ranks that divide a tensor
        mine = expert if link.is_expert else turn % tensors == tensor
        for name, part in zip(
            link.tensor_names, link.layout.split(value(link.parameter)), strict=True
        ):
            whole = link.gather_full(part)
            if mine:
                yield name, whole


@torch.no_grad()
def gather_weights(
    mappings: Sequence[ParameterMapping],
    value: Callable[[Parameter], Tensor] = lambda parameter: parameter.detach(),
    *,
    copy: bool = True,
) -> dict[str, Tensor]:
    """Return copies of all weights, or of `value` of them, by their checkpoint names: on rank 0,
    nothing elsewhere.

    Copies are contiguous. Collective. With one rank the copies are on the model's device, with
    several on the host. Without `copy`, the tensors are views of the parameters where possible.
    """
    form = torch.contiguous_format
    mine = {
        n: t.clone(memory_format=form) if copy else t
        for n, t in iter_owned_weights(mappings, value)
    }
    return mine if dist.get_world_size() == 1 else _gather_to_first_rank(mine)


def _gather_to_first_rank(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    rank = dist.get_rank()
    world = dist.get_world_size()
    described: list[list[tuple[str, torch.Size, torch.dtype]]] = [[] for _ in range(world)]
    dist.all_gather_object(described, [(name, t.shape, t.dtype) for name, t in mine.items()])
    everything = {name: t.cpu() for name, t in mine.items()} if rank == 0 else {}
    for source in range(1, world):
        for name, size, dtype in described[source]:
            if rank == source:
                dist.send(mine[name].cpu(), 0)
            elif rank == 0:
                everything[name] = torch.empty(size, dtype=dtype)
                dist.recv(everything[name], source)
    return everything
