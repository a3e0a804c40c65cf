"""Learners of any size and any rank, whose tensors have no memory and which run without other ranks: only shapes are
real."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from r3async.config import Config


def end_groups() -> None:
    """End the process groups of another module's learner that was not closed: a process has one default group."""
    if dist.is_initialized():
        ps.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def alone_of(world: int, rank: int) -> Iterator[None]:
    """Make a process group of `world` ranks in which this is `rank` and no other exists: collectives change nothing."""
    make, adam = dist.new_group, torch.optim.AdamW

    def new_group(ranks: Any = None, *args: Any, **settings: Any) -> dist.ProcessGroup:
        return make(ranks, *args, **{**settings, "backend": "fake"})

    def gather(out: list[Any], mine: Any, *args: Any, **settings: Any) -> None:
        out[:] = [mine] * len(out)

    with pytest.MonkeyPatch.context() as patch:
        # The fused kernel looks at values.
        patch.setattr(torch.optim, "AdamW", lambda groups, **settings: adam(groups, **{**settings, "fused": False}))
        patch.setattr(dist, "new_group", new_group)
        patch.setattr(dist, "all_gather_object", gather)
        end_groups()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        patch.setattr(torch.nn.Module, "to", lambda module, device: module)  # all is where it is made
        try:
            yield
        finally:
            end_groups()


@contextmanager
def megatron_rank(config: Config, path: Path, rank: int) -> Iterator[Any]:
    """Yield the learner that `MegatronLearner.from_pretrained` makes on that rank. Weights are not read."""
    from r3async.learner.megatron import backend

    described = backend.read_model_shape(path)  # numbers that it computes are not shapes
    with alone_of(config.learner.parallel.world_size, rank), pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(backend, "read_model_shape", lambda source: described)
        patch.setattr(backend, "load_weights", lambda *args: None)
        patch.setattr(backend, "open_model_files", lambda directory: {})
        learner = backend.MegatronLearner.from_pretrained(config, path)
        try:
            yield learner
        finally:
            learner.close()


@contextmanager
def torch_rank(config: Config, path: Path, rank: int) -> Iterator[Any]:
    """Yield the learner that `TorchLearner.from_pretrained` makes on that rank."""
    from r3async.learner.torch import backend
    from r3async.learner.torch.model import PackedModel, build_empty_model

    with alone_of(config.learner.parallel.world_size, rank), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "load_model", build_empty_model)
        patch.setattr(backend, "fill_sharded_model", lambda *args: None)
        patch.setattr(backend, "open_model_files", lambda directory: {})
        patch.setattr(PackedModel, "find_routers", lambda model, device: None)  # nothing has a value
        learner = backend.TorchLearner.from_pretrained(config, path)
        try:
            yield learner
        finally:
            learner.close()


def updated(optimizer: Any) -> dict[str, int]:
    """Return the bytes of the optimizer's parts after an update of all that it trains; those of gradients are as
    it gets them."""
    gradients = []

    def compute_squared_norm(summed: list[torch.Tensor]) -> float:
        gradients.extend(local(g).nbytes for g in summed)
        return 1.0  # nothing has a value

    optimizer.reducer.compute_squared_norm = compute_squared_norm
    for parameter in optimizer.parameters:
        if parameter.dtype == torch.float32 and not optimizer.reducer.keeps_shares:
            parameter.grad = torch.empty_like(parameter)
        else:
            parameter.sum().backward()  # what is below float32 is summed as it comes
    with torch.no_grad():
        optimizer.step()
    states = list(optimizer.iter_states())
    held = {local(p).untyped_storage()._cdata for p in optimizer.parameters}
    return {
        "gradients": sum(gradients),
        "masters": sum(s["master"].nbytes for s in states if s["master"].untyped_storage()._cdata not in held),
        "moments": sum(t.nbytes for s in states for name, t in s.items() if name.startswith("exp_avg")),
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    from r3async.learner.row_shares import to_local

    return to_local(tensor.detach())
