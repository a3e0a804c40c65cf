"""Ranks of the Megatron backend: the layout, and the collectives of one step
outside of the model."""

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
from r3async.learner.gradient_reducer import GradientReducer, Gradients
from r3async.learner.megatron.context_parallel import ContextParallelGroup
from r3async.learner.megatron.weights import ParameterMapping
from r3async.learner.rank_group import RankGroup
from r3async.learner.results import LearnerError
from r3async.learner.row_shares import (
    UNSHARDED,
    RowShare,
    add_summed_share,
    all_gather_shares,
    iter_buckets,
    reduce_scatter_shares,
)


@dataclass(frozen=True)
class MegatronRankGroup(RankGroup):
    """This rank's position in the layout. Megatron's order of ranks: tp varies fastest,
    then cp, dp and pp."""

    parallel: ParallelConfig
    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int
    owns_default_group: bool
    created_groups: tuple[dist.ProcessGroup, ...]
    """Process groups that were created for this layout, if it did not exist before."""

    @property
    def is_batch_reporter(self) -> bool:
        return self.tp_rank == self.cp_rank == self.pp_rank == 0

    @property
    def is_loss_reporter(self) -> bool:
        return self.pp_rank == self.parallel.pp - 1 and self.tp_rank == self.cp_rank == 0

    @property
    def context_parallel(self) -> ContextParallelGroup | None:
        """The ranks that divide each micro-batch's tokens; None without context parallelism."""
        p = self.parallel
        return (
            ContextParallelGroup(self.cp_rank, p.cp, ps.get_context_parallel_group())
            if p.cp > 1
            else None
        )

    def close(self) -> None:
        """Undo what `init_model_parallel` did."""
        if not dist.is_initialized():
            return
        if self.created_groups and ps.model_parallel_is_initialized():
            ps.destroy_model_parallel()
        if self.owns_default_group:
            dist.destroy_process_group()
            return
        # Megatron destroys the groups that it made for gloo by name, and only forgets the others.
        # Each keeps threads and sockets until it is destroyed.
        for group in self.created_groups:
            if group in _list_process_groups():
                dist.destroy_process_group(group)


def _list_process_groups() -> list[dist.ProcessGroup]:
    """Return every process group of this process."""
    return list(dist.distributed_c10d._world.pg_map)


@contextlib.contextmanager
def _reuse_equal_groups(device: torch.device) -> Iterator[None]:
    """Reuse, inside this block and on CPU, an earlier process group that has the same ranks.

    Megatron makes twenty, most of them alike. Each of gloo's has two threads that wake up a hundred
    times a second: together they cost 2 % of a core, in a run that only waits. Groups of nccl
    overlap, and stay separate.
    """
    made: dict[Any, dist.ProcessGroup] = {}
    make = dist.new_group

    def shared(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> dist.ProcessGroup:
        key = (
            tuple(ranks or range(dist.get_world_size())),
            kwargs.get("backend") or dist.get_backend(),
        )
        if key not in made:
            made[key] = make(ranks, *args, **kwargs)
        return made[key]

    if device.type != "cpu":
        yield
        return
    dist.new_group = shared  # every rank creates the same groups in the same order
    try:
        yield
    finally:
        dist.new_group = make


def init_model_parallel(parallel: ParallelConfig, device: torch.device) -> MegatronRankGroup:
    """Set up Megatron's groups over the default process group.

    If there is none, it is created here: a world of one, over a store in memory, without any port.
    Raises `LearnerError` if the process group has another size than `learner.parallel` says.
    """
    owns_group = not dist.is_initialized()
    if owns_group:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        if dist.get_world_size() != parallel.world_size:
            p = parallel
            raise LearnerError(
                f"learner.parallel wants dp {p.dp} x cp {p.cp} x tp {p.tp} x pp {p.pp} = "
                f"{p.world_size} ranks, but there {'is' if dist.get_world_size() == 1 else 'are'} "
                f"{dist.get_world_size()}"
            )
        before = _list_process_groups()
        if not ps.model_parallel_is_initialized():
            with _reuse_equal_groups(device):
                ps.initialize_model_parallel(
                    tensor_model_parallel_size=parallel.tp,
                    pipeline_model_parallel_size=parallel.pp,
                    context_parallel_size=parallel.cp,
                    expert_model_parallel_size=parallel.ep,
                    # Experts are divided whole: tensor-parallel ranks take different ones, or
                    # different tokens.
                    expert_tensor_parallel_size=1,
                )
            # Nothing draws random numbers: there is no dropout, and weights are loaded.
            tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise
    return MegatronRankGroup(
        dist.get_rank(),
        parallel.world_size,
        torch.device("cpu"),
        parallel,
        ps.get_tensor_model_parallel_rank(),
        ps.get_context_parallel_rank(),
        ps.get_data_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        owns_group,
        tuple(group for group in _list_process_groups() if group not in before),
    )


class MegatronGradientReducer(GradientReducer):
    """Sums gradients over the ranks that hold a copy of a parameter.

    Losses are divided by global denominators, so sums, not means, are the gradient of the whole
    step. Sequence-parallel and context-parallel ranks see different tokens: each computes a part of
    the gradient of the parameters that they have in common. Experts are copied among all ranks of a
    stage that do not divide them.

    Data-parallel copies divide the rows of a gradient among them (`shares`): each sums its own
    rows, over all ranks that have a part of the gradient. With `sharded` that is all, and
    `gather_parameters` gives a rank the parameters that others update. Otherwise every copy is
    given the whole sum. So both have the same sums, bit by bit, on any number of ranks. With
    `keeps_shares` ranks sum rows after every backward pass (`add_gradient`) and keep their own
    alone: the gradients that the other methods get are those of shares.
    """

    def __init__(
        self,
        links: Sequence[ParameterMapping],
        layout: MegatronRankGroup,
        *,
        sharded: bool = False,
        keeps_shares: bool = False,
    ):
        p = layout.parallel
        tp = ps.get_tensor_model_parallel_group()
        dp = ps.get_data_parallel_group(with_context_parallel=True)
        copies = p.dp * p.cp
        expert_dp = ps.get_expert_data_parallel_group()
        self._world = p.world_size
        self._sharded = sharded
        self.sums_gradients = p.world_size > 1
        self.keeps_shares = keeps_shares
        self._dp_groups: list[dist.ProcessGroup | None] = []
        """The data-parallel ranks that hold copies of each link's parameter; None if
        there is one copy."""
        self._extra_groups: list[list[dist.ProcessGroup]] = []
        """The groups over which each link's gradient is summed after that, one after the other."""
        self._norm_weights: list[float] = []
        """One divided by the number of ranks that hold the same rows, for each link."""
        for link in links:
            groups = [(expert_dp, copies * p.tp // p.ep) if link.is_expert else (dp, copies)]
            if not link.is_expert and link.tp_dim is None:
                groups.append((tp, p.tp))
            if link.is_on_two_stages:
                groups.append((ps.get_embedding_group(), 2))
            (first, several), *rest = groups
            self._dp_groups.append(first if several > 1 else None)
            self._extra_groups.append([g for g, n in rest if n > 1])
            self._norm_weights.append(1.0 / math.prod(n for _, n in rest))
        self._local_shares = [
            UNSHARDED if g is None else RowShare(dist.get_rank(g), dist.get_world_size(g))
            for g in self._dp_groups
        ]
        self.shares = self._local_shares if sharded else [UNSHARDED] * len(self._local_shares)

    def add_gradient(self, index: int, total: Tensor, gradient: Tensor) -> None:
        """Add to `total`, this rank's rows of the parameter of link `index`, what all copies have
        of its gradient.

        Collective, in the order in which a backward pass computes gradients: it is the same on all
        ranks, as they run the same model on as many micro-batches.
        """
        group = self._dp_groups[index]
        if group is not None:
            add_summed_share(total, gradient, group)

    def reduce_gradients(self, gradients: Gradients) -> None:
        """Reduce `gradients` in place; they must all be present, in the order of the links."""
        if not self.keeps_shares:
            for group, some in _iter_by_group(gradients, self._dp_groups):
                reduce_scatter_shares(some, group)
        parts = self._select_shares(gradients)
        for depth in range(max(map(len, self._extra_groups), default=0)):
            there = [
                groups[depth] if len(groups) > depth else None for groups in self._extra_groups
            ]
            for group, some in _iter_by_group(parts, there):
                _all_reduce_buckets(some, group)
        if not self._sharded:
            self._gather_shares(gradients)

    def gather_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Gather each rank's rows of the parameters, in the order of the links, on all ranks
        that hold copies.

        Collective, if `sharded`.
        """
        if self._sharded:
            self._gather_shares(parameters)

    def _gather_shares(self, tensors: Sequence[Tensor]) -> None:
        for group, some in _iter_by_group(tensors, self._dp_groups):
            all_gather_shares(some, group)

    def _select_shares(self, gradients: Gradients) -> list[Tensor]:
        if self.keeps_shares:
            return list(gradients)
        return [
            share.select_rows(gradient)
            for share, gradient in zip(self._local_shares, gradients, strict=True)
        ]

    def compute_squared_norm(self, gradients: Gradients) -> float:
        """Return the sum of squares over the whole model, from gradients that have been reduced.

        Values held by several ranks count once. A rank uses its own rows alone, so that the result
        does not depend on which ranks have the others.
        """
        parts = self._select_shares(gradients)
        norms = (
            torch.stack(torch._foreach_norm(parts)).double().cpu()
            if parts
            else torch.zeros(0, dtype=torch.float64)
        )
        weights = torch.tensor(self._norm_weights, dtype=torch.float64)
        total = (norms.square() * weights).sum()
        if self._world > 1:
            dist.all_reduce(total)
        return float(total)


def _iter_by_group(
    tensors: Sequence[Tensor], groups: Sequence[dist.ProcessGroup | None]
) -> Iterator[tuple[dist.ProcessGroup, list[Tensor]]]:
    """Yield each group with its tensors.

    Every rank of a group has the same parameters, so the ranks need to agree only on the
    order of groups.
    """
    found: dict[Any, list[Tensor]] = {}
    for tensor, group in zip(tensors, groups, strict=True):
        if group is not None:
            found.setdefault(group, []).append(tensor)
    for group in sorted(found, key=lambda g: tuple(dist.get_process_group_ranks(g))):
        yield group, found[group]


def _all_reduce_buckets(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    for bucket in iter_buckets(tensors):
        flat = torch.cat([t.reshape(-1) for t in bucket])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))
