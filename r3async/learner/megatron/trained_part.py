"""The trained part of a Megatron model: all, all but its routers, or adapters (`learner.lora`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from r3async.config import Config
from r3async.learner.adapter_targets import select_targets
from r3async.learner.lora import AdapterCandidate, LoraAdapters, ShardedDim
from r3async.learner.megatron.model import HiddenStatesModel
from r3async.learner.megatron.weights import ParameterMapping, locate_shard


def build_adapters(
    model: HiddenStatesModel, mappings: Sequence[ParameterMapping], config: Config
) -> LoraAdapters | None:
    """Freeze what is not trained, and create the adapters, if there are any.

    Collective. Raises `LearnerError` for targets that name nothing on any rank.
    """
    learner = config.learner
    routers = _router_parameter_ids(model)
    if learner.freeze_router:
        for link in mappings:
            link.parameter.requires_grad_(id(link.parameter) not in routers)
    if not learner.lora.rank:
        return None
    matrices = [
        AdapterCandidate(
            link.parameter,
            locate_shard(link, sharded=learner.shard_optimizer),
            _sharded_dim(link),
            id(link.parameter) in routers,
        )
        for link in mappings
        # Only the vocabulary has padded rows.
        if link.parameter.ndim >= 2 and link.unpadded_rows is None and link.parameter.requires_grad
    ]
    names = {(name, one.is_router) for one in matrices for name in one.module_names}
    if learner.parallel.world_size > 1:  # a rank has the layers of its stage, and its experts
        everywhere: list[set[tuple[str, bool]]] = [set()] * learner.parallel.world_size
        dist.all_gather_object(everywhere, names)
        names = set().union(*everywhere)
    chosen = select_targets(learner, names)
    adapted = {id(one.parameter) for one in matrices if chosen & set(one.module_names)}
    for link in mappings:
        link.parameter.requires_grad_(id(link.parameter) in adapted)
    if model.pre_process:
        # Recomputed layers run forward again only if their input has a gradient.
        model.embedding.register_forward_hook(_require_gradient)
    return LoraAdapters(
        matrices,
        chosen,
        learner.lora,
        seed=config.seed,
        dtype=getattr(torch, learner.dtype),
        served_dtype=getattr(torch, config.generator.dtype),
    )


def _require_gradient(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_(torch.is_grad_enabled())


def _router_parameter_ids(model: HiddenStatesModel) -> set[int]:
    layers = [layer for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)]
    return {id(p) for layer in layers for p in layer.mlp.router.parameters()}


def _sharded_dim(link: ParameterMapping) -> ShardedDim:
    return None if link.tp_dim is None else ("rows", "columns")[link.tp_dim]


def select_trained_mappings(linked: Sequence[ParameterMapping]) -> list[ParameterMapping]:
    """Return the mappings whose parameters are not frozen."""
    return [link for link in linked if link.parameter.requires_grad]


def build_adapter_mappings(
    adapters: LoraAdapters, linked: Sequence[ParameterMapping]
) -> list[ParameterMapping]:
    """Return mappings of the adapters as if they were parameters: they say over which ranks their
    gradients are summed.

    A factor that all of a weight's ranks have whole is summed like a weight that is not divided.
    """
    of = {id(link.parameter): link for link in linked}
    out = []
    for parameter, _, candidate, shared in adapters.list_parameters():
        link = of[id(candidate.parameter)]
        out.append(replace(link, parameter=parameter, tp_dim=None if shared else link.tp_dim))
    return out
