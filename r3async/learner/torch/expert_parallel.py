"""Expert parallelism of the torch backend: ranks have whole experts, and tokens go to them and back.

In transformers 5 the experts of a layer are one module with stacked parameters `[experts, ...]`,
whose forward takes hidden states `[N, H]`, chosen experts `[N, K]` and their gates `[N, K]`. Each
rank keeps a part of the stacks, and runs that forward on the rows which chose its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from r3async.data.model_shape import RoutingShape
from r3async.learner.results import LearnerError
from r3async.learner.stacked_experts import ExpertDispatch


def divide_experts(
    layers: Iterable[nn.Module], shape: RoutingShape | None, mesh: DeviceMesh
) -> list[nn.Module]:
    """Leave each rank of `mesh` a part of the experts of each mixture, and exchange tokens in their
    forward passes, which are collective from then on. Returns the modules that have experts.

    Parameters become DTensors of the whole shape, without memory where they had none. Raises
    `LearnerError` if the experts are not stacked, or cannot be divided.
    """
    experts = find_expert_modules(layers, shape.num_experts if shape else 0)
    if shape is None or len(experts) != shape.layers:
        raise LearnerError(
            f"learner.parallel.ep = {mesh.size()}: {len(experts)} of the model's "
            f"{shape.layers if shape else 0} mixtures have their experts as stacked matrices, "
            "which ranks could divide: set it to 1"
        )
    if shape.num_experts % mesh.size():
        raise LearnerError(
            f"learner.parallel.ep = {mesh.size()} does not divide the model's {shape.num_experts} "
            "experts"
        )
    for module in experts:
        for name, parameter in list(module.named_parameters(recurse=False)):
            # No rank sends values: there are none yet.
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.num_experts = shape.num_experts // mesh.size()
        module.forward = partial(
            _forward_on_owners, module.forward, module, shape.num_experts, mesh
        )
    return experts


def find_expert_modules(layers: Iterable[nn.Module], num_experts: int) -> list[nn.Module]:
    """Return the modules of `layers` that have `num_experts` experts as stacks of matrices."""
    found = []
    for module in (each for layer in layers for each in layer.modules()):
        stacks = list(module.parameters(recurse=False))
        if any(p.ndim == 3 for p in stacks) and all(len(p) == num_experts for p in stacks):
            found.append(module)
    return found


def _forward_on_owners(
    forward: Callable[..., Any],
    module: nn.Module,
    num_experts: int,
    mesh: DeviceMesh,
    hidden: Tensor,
    chosen: Tensor,
    gates: Tensor,
) -> Tensor:
    """Return the weighted sums of the experts' outputs `[N, H]`, each computed by its owner.

    The host has to know how many rows it sends and receives: it reads them once a layer.
    """
    group = mesh.get_group()
    mask = torch.zeros(len(hidden), num_experts, dtype=torch.bool, device=hidden.device)
    dispatch = ExpertDispatch(mask.scatter_(1, chosen, True), chosen.shape[1])
    arriving = torch.empty_like(dispatch.expert_counts)
    dist.all_to_all_single(arriving, dispatch.expert_counts, group=group)
    by_rank = torch.stack([dispatch.expert_counts, arriving]).view(2, mesh.size(), -1).sum(dim=2)
    sent, received = by_rank.tolist()
    total = sum(received)

    rows = _SendRows.apply(dispatch.dispatch_rows(hidden), sent, received, group)
    owned = torch.arange(num_experts, device=hidden.device) % (num_experts // mesh.size())
    ids = owned.repeat_interleave(arriving, output_size=total)
    if not total:
        # Experts without a row still take part in the backward pass: one of zeros keeps them in it.
        rows = F.pad(rows, (0, 0, 0, 1))
        ids = owned[:1]
    with _local_parameters(module):
        outputs = forward(rows, ids[:, None], torch.ones_like(ids[:, None], dtype=rows.dtype))
    returned = _SendRows.apply(outputs[:total], received, sent, group)

    scattered = gates.new_zeros(len(hidden), num_experts).scatter(1, chosen, gates)
    weighted = returned * dispatch.gather_gates(scattered)[:, None]
    return dispatch.combine_outputs(weighted).to(hidden.dtype)


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Let the module compute with this rank's part of its parameters."""
    whole = dict(module._parameters)
    module._parameters.update({name: p.to_local() for name, p in whole.items() if p is not None})
    try:
        yield
    finally:
        module._parameters.update(whole)


class _SendRows(torch.autograd.Function):
    """Send `sent[r]` rows to each rank `r` of `group`, in order, and return the `received[r]` rows
    from each."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.exchange = (received, sent, group)
        return _exchange_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange_rows(grads[0], *ctx.exchange), None, None, None


def _exchange_rows(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
