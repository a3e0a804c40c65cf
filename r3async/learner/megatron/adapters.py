"""What of a Megatron model is trained: all of it, all but its routers, or adapters (`learner.lora`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from r3async.config import Config
from r3async.learner.lora import Adapters, Candidate, Divided, targeted
from r3async.learner.megatron.links import Link, held
from r3async.learner.megatron.modules import HiddenStatesModel


def adapt(model: HiddenStatesModel, linked: Sequence[Link], config: Config) -> Adapters | None:
    """Leave gradients to what is trained, and make the adapters, if there are any. Collective. Raises `LearnerError` for targets
    that name nothing on any rank."""
    learner, routers = config.learner, _routers(model)
    if learner.freeze_router:
        for link in linked:
            link.parameter.requires_grad_(id(link.parameter) not in routers)
    if not learner.lora.rank:
        return None
    matrices = [
        Candidate(
            link.parameter,
            held(link, sharded=learner.shard_optimizer),
            _divided(link),
            id(link.parameter) in routers,
        )
        for link in linked
        # Only the vocabulary has padded rows.
        if link.parameter.ndim >= 2 and link.rows is None and link.parameter.requires_grad
    ]
    names = {(name, one.router) for one in matrices for name in one.names}
    if learner.parallel.world > 1:  # a rank has the layers of its stage, and its experts
        everywhere: list[set[tuple[str, bool]]] = [set()] * learner.parallel.world
        dist.all_gather_object(everywhere, names)
        names = set().union(*everywhere)
    chosen = targeted(learner.lora, names)
    adapted = {id(one.parameter) for one in matrices if chosen & set(one.names)}
    for link in linked:
        link.parameter.requires_grad_(id(link.parameter) in adapted)
    if model.pre_process:
        # Recomputed layers are fed forward again only if their input has a gradient.
        model.embedding.register_forward_hook(_with_gradient)
    return Adapters(matrices, chosen, learner.lora, seed=config.seed, dtype=getattr(torch, learner.dtype))


def _with_gradient(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_(torch.is_grad_enabled())


def _routers(model: HiddenStatesModel) -> set[int]:
    layers = [layer for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer)]
    return {id(p) for layer in layers for p in layer.mlp.router.parameters()}


def _divided(link: Link) -> Divided:
    return None if link.dim is None else ("rows", "columns")[link.dim]


def trained_links(linked: Sequence[Link]) -> list[Link]:
    """Those whose parameters are not frozen."""
    return [link for link in linked if link.parameter.requires_grad]


def adapter_links(adapters: Adapters, linked: Sequence[Link]) -> list[Link]:
    """As if adapters were parameters: over which ranks their gradients are summed. What all of a weight's ranks have whole is
    summed like a weight that is not divided."""
    of = {id(link.parameter): link for link in linked}
    out = []
    for parameter, _, candidate, shared in adapters.trained():
        link = of[id(candidate.parameter)]
        out.append(replace(link, parameter=parameter, dim=None if shared else link.dim))
    return out
