"""Ranks: who holds what, and the collectives of one step outside of the model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from torch import Tensor

from r3async.config import ParallelConfig
from r3async.learner import LearnerError
from r3async.learner.backend import Ranks
from r3async.learner.megatron.links import Link
from r3async.learner.optimizer import Gradients

BUCKET_ELEMENTS = 2**26
"""Gradient elements that are reduced by one collective: 256 MiB in float32."""


@dataclass(frozen=True)
class Layout(Ranks):
    """This rank's place. Megatron's order of ranks: tp varies fastest, then dp, then pp."""

    parallel: ParallelConfig
    tp_rank: int
    dp_rank: int
    pp_rank: int
    owns_group: bool
    made: tuple[dist.ProcessGroup, ...]
    """Groups that were made for this layout, if it was not there before."""

    @property
    def is_first_copy(self) -> bool:
        return self.tp_rank == self.pp_rank == 0

    @property
    def holds_loss(self) -> bool:
        return self.pp_rank == self.parallel.pp - 1 and self.tp_rank == 0

    def close(self) -> None:
        """Undo what `start` did."""
        if not dist.is_initialized():
            return
        if self.made and ps.model_parallel_is_initialized():
            ps.destroy_model_parallel()
        if self.owns_group:
            dist.destroy_process_group()
            return
        # Megatron only forgets its groups; each of gloo's keeps threads and sockets until it is destroyed.
        for group in self.made:
            if group in _groups():
                dist.destroy_process_group(group)


def _groups() -> list[dist.ProcessGroup]:
    """Every process group of this process."""
    return list(dist.distributed_c10d._world.pg_map)


@contextlib.contextmanager
def _one_group_of_the_same_ranks(device: torch.device) -> Iterator[None]:
    """Inside, on CPU, a process group that has the ranks of an earlier one is that one.

    Megatron makes twenty, most of them alike. Each of gloo's has two threads that wake up a hundred times a second: together
    they cost 2 % of a core, in a run that only waits. Groups of nccl overlap, and stay apart.
    """
    made: dict[Any, dist.ProcessGroup] = {}
    make = dist.new_group

    def shared(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        key = tuple(ranks or range(dist.get_world_size())), kwargs.get("backend") or dist.get_backend()
        if key not in made:
            made[key] = make(ranks, *args, **kwargs)
        return made[key]

    if device.type != "cpu":
        yield
        return
    dist.new_group = shared  # every rank asks for the same groups in the same order
    try:
        yield
    finally:
        dist.new_group = make


def start(parallel: ParallelConfig, device: torch.device) -> Layout:
    """Set up Megatron's groups over the default process group, which is made here if there is none: a world of one, over a
    store in memory, without any port.

    Raises `LearnerError` if the process group has another size than `learner.parallel` says.
    """
    owns_group = not dist.is_initialized()
    if owns_group:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        if dist.get_world_size() != parallel.world:
            p = parallel
            raise LearnerError(
                f"learner.parallel wants dp {p.dp} x tp {p.tp} x pp {p.pp} = {p.world} ranks, but there "
                f"{'is' if dist.get_world_size() == 1 else 'are'} {dist.get_world_size()}"
            )
        before = _groups()
        if not ps.model_parallel_is_initialized():
            with _one_group_of_the_same_ranks(device):
                ps.initialize_model_parallel(
                    tensor_model_parallel_size=parallel.tp,
                    pipeline_model_parallel_size=parallel.pp,
                    expert_model_parallel_size=parallel.ep,
                    # Experts are divided whole: tensor-parallel ranks take different ones, or different tokens.
                    expert_tensor_parallel_size=1,
                )
            # Nothing draws random numbers: there is no dropout, and weights are loaded.
            tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise
    return Layout(
        dist.get_rank(),
        parallel.world,
        torch.device("cpu"),
        parallel,
        ps.get_tensor_model_parallel_rank(),
        ps.get_data_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        owns_group,
        tuple(group for group in _groups() if group not in before),
    )


class GradientSum:
    """Sums gradients over the ranks that hold a copy of a parameter.

    Losses are divided by global denominators, so sums, not means, are the gradient of the whole step. Sequence-parallel
    ranks see different tokens: what they hold in common (norms, routers) gets a part of its gradient on each. Experts are
    copied among all ranks of a stage that do not divide them.
    """

    def __init__(self, links: Sequence[Link], layout: Layout):
        p = layout.parallel
        tp, dp = ps.get_tensor_model_parallel_group(), ps.get_data_parallel_group()
        expert_dp = ps.get_expert_data_parallel_group()
        self._world = p.world
        self._groups: list[list[dist.ProcessGroup]] = []
        """Of each link: over whose ranks its gradient is summed, one group after the other."""
        self._counts: list[int] = []
        """Of each link: how many ranks hold a copy."""
        for link in links:
            if link.expert:
                groups = [(expert_dp, p.dp * p.tp // p.ep)]
            elif link.dim is not None:
                groups = [(dp, p.dp)]
            else:
                groups = [(dp, p.dp), (tp, p.tp)]
            if link.twice:
                groups.append((ps.get_embedding_group(), 2))
            self._groups.append([g for g, n in groups if n > 1])
            self._counts.append(math.prod(n for _, n in groups))

    def reduce(self, gradients: Gradients) -> None:
        """In place; `gradients` in the order of the links, all of them there."""
        for depth in range(max(map(len, self._groups), default=0)):
            by_group: dict[Any, list[Tensor]] = {}
            for gradient, groups in zip(gradients, self._groups, strict=True):
                if len(groups) > depth:
                    by_group.setdefault(groups[depth], []).append(gradient)
            # Every rank of a group has the same parameters, so the order of groups is the only thing to agree on.
            for group in sorted(by_group, key=lambda g: tuple(dist.get_process_group_ranks(g))):
                for bucket in _buckets(by_group[group]):
                    flat = torch.cat([g.reshape(-1) for g in bucket])
                    dist.all_reduce(flat, group=group)
                    for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                        gradient.copy_(part.view_as(gradient))

    def squared_norm(self, gradients: Gradients) -> float:
        """Sum of squares over the whole model, from gradients that have been reduced: what is held by several ranks counts
        once."""
        norms = torch.stack(torch._foreach_norm(gradients)).double().cpu()
        weights = torch.tensor([1.0 / count for count in self._counts], dtype=torch.float64)
        total = (norms.square() * weights).sum()
        if self._world > 1:
            dist.all_reduce(total)
        return float(total)


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if buckets[-1] and held + tensor.numel() > BUCKET_ELEMENTS:
            buckets.append([])
            held = 0
        buckets[-1].append(tensor)
        held += tensor.numel()
    return buckets
