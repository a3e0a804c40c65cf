"""What several data-parallel ranks do together: FSDP2 over the model, and sums over ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from r3async.checkpoint.tensors import Place
from r3async.learner.base import LearnerError
from r3async.learner.optimizer import Gradients, local, squared_norm
from r3async.learner.ranks import Ranks
from r3async.learner.state import Held
from r3async.learner.torch.model import PackedModel


def join(dp: int) -> Ranks:
    """Raises `LearnerError` if the default process group does not have `dp` (`learner.parallel.dp`) ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != dp:
        raise LearnerError(
            f"learner.parallel.dp is {dp}, but {world} rank{'s' * (world != 1)} of torch.distributed run"
            f"{'s' * (world == 1)}: start as many learner processes as that setting says"
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return Ranks(dist.get_rank() if world > 1 else 0, world, device)


def sharded_norm(ranks: Ranks, gradients: Gradients) -> float:
    """Sum of squares over all shards."""
    mine = squared_norm([local(g) for g in gradients])
    return float(ranks.reduce(np.asarray([mine]), "sum")[0])


def shard(model: PackedModel, ranks: Ranks, dtype: torch.dtype) -> None:
    """Divide every parameter, held in float32, among the ranks; each layer is put together in `dtype` while it runs.

    Gradients are summed over ranks, not averaged, in float32: the loss is already divided by the global denominator.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    # Inputs stay as they are: they follow the embedding's dtype, and temperatures are float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Plain sums on every backend, NCCL's pre-multiplied ones among them.
            module.set_force_sum_reduction_for_comms(True)


def settle(model: PackedModel) -> None:
    """Free the parameters that were put together for a pass without a backward, or for one that failed.

    Otherwise the next pass would not see what the optimizer writes meanwhile. Gradients under way are lost.
    """
    if isinstance(model, FSDPModule):
        # FSDP's own reset (of torch 2.13) forgets the gradients of parameters that are whole at this moment, and would add
        # them to those of the next pass.
        model.zero_grad()
        model.reset_iter_state()


def whole(tensor: Tensor, dtype: torch.dtype, ranks: Ranks) -> Tensor | None:
    """The whole of a weight in `dtype` (integers stay as they are), in host memory of rank 0; None elsewhere. Collective."""
    tensor = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu() if ranks.rank == 0 else None


def places(model: PackedModel, rank: int) -> list[Held]:
    """Where this rank's part of each trained parameter lies in the whole, in the optimizer's order."""
    out = []
    for name, parameter in model.causal.named_parameters():
        if not parameter.requires_grad:
            continue
        place = Place.whole(name, parameter.shape)
        if isinstance(parameter, DTensor):
            # FSDP divides the first dimension evenly, the last ranks getting less, or nothing.
            rows = -(-parameter.shape[0] // parameter.device_mesh.size())
            size = tuple(parameter.to_local().shape)
            offset = (min(rank * rows, parameter.shape[0]), *(0 for _ in size[1:]))
            place = Place(name, tuple(parameter.shape), offset, size)
        out.append(Held((place,), writes=isinstance(parameter, DTensor) or rank == 0))
    return out
