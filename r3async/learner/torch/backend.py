"""The backend on transformers: `TorchLearner`, for any mixture of experts, with rollout routing
replay and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate

from r3async.checkpoint.rank_files import TensorSlice
from r3async.config import Config, LearnerConfig
from r3async.data.models import find_architecture
from r3async.learner.adapter_targets import select_targets
from r3async.learner.backend import LearnerBackend, TokenScores
from r3async.learner.deterministic_gather import DeterministicGather
from r3async.learner.device_upload import upload_array
from r3async.learner.expert_biases import ExpertBias
from r3async.learner.gradient_reducer import GradientReducer, Gradients
from r3async.learner.lora import AdapterCandidate, LoraAdapters, ShardedDim
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.model import open_model_files, read_tensor_shapes
from r3async.learner.model_directory import log_checkpoint_form
from r3async.learner.optimizer import MasterAdamW, count_updates
from r3async.learner.rank_group import SINGLE_RANK, RankGroup
from r3async.learner.replay import MicroBatchRoutes, RoutingReplay
from r3async.learner.results import LearnerError
from r3async.learner.row_shares import to_local
from r3async.learner.shard_slice import ShardSlice
from r3async.learner.token_logprobs import select_supports
from r3async.learner.torch.checkpoint_names import CheckpointNames
from r3async.learner.torch.described import read_model_config
from r3async.learner.torch.expert_parallel import divide_experts
from r3async.learner.torch.model import (
    PackedInputs,
    PackedModel,
    build_empty_model,
    fill_sharded_model,
    load_model,
    return_freed_blocks,
)
from r3async.learner.torch.routers import attach_replay


class TorchLearner(LearnerBackend):
    """A learner backend whose model is built by transformers.

    One process trains alone. With `learner.parallel.dp` processes, in the default process group
    (gloo or nccl), every parameter is divided among them by FSDP2, in float32: the shards are the
    master weights. Each process reads its shards alone.
    """

    name = "torch"

    def __init__(
        self,
        config: Config,
        model_path: Path,
        ranks: RankGroup,
        model: PackedModel,
        replay: RoutingReplay,
        adapters: LoraAdapters | None = None,
    ):
        self.model = model
        trained = adapters.list_parameters() if adapters else []
        shared = [one.is_replicated for one in trained]
        super().__init__(
            config,
            model_path,
            ranks,
            vocab_size=model.vocab_size,
            replay=replay,
            optimizer=MasterAdamW(
                [one.parameter for one in trained] or model.parameters(),
                config.learner,
                updates_total=count_updates(config),
                reducer=FsdpGradientReducer(ranks, shared),
                on_change=adapters.merge_weights if adapters else lambda: None,
            ),
            parameters=model.parameters(),
            adapters=adapters,
            expert_biases=[
                ExpertBias(name, column, tensor, ranks.rank == 0)
                for column, (name, tensor) in enumerate(model.find_expert_biases())
            ],
        )

    @classmethod
    def from_pretrained(
        cls, config: Config, model_path: Path, *, frozen: bool = False
    ) -> TorchLearner:
        """Load the model, with the other ranks where there are any; nothing of a
        `frozen` one is trained.

        Raises `LearnerError` for a model that this backend would train wrongly.
        """
        ranks = detect_rank_group(config.learner.parallel.dp)
        source = Path(model_path)
        if ranks.device.type == "cpu":
            torch.set_num_threads(config.learner.threads)
        dtype = getattr(torch, config.learner.dtype)
        described = read_model_config(source)
        shared = ranks.world_size > 1
        if shared:
            causal = build_empty_model(source, torch.float32)
        else:
            with return_freed_blocks():
                causal = load_model(source, dtype)
        model = PackedModel(causal, described, max_total_tokens=config.episode.max_total_tokens)
        if shared:
            shard_model(model, ranks, dtype, config.learner.parallel.ep)
            with return_freed_blocks():
                fill_sharded_model(causal, source, ranks.device)
                model.find_routers(ranks.device)
        else:
            model.find_routers(torch.device("cpu"))
            model.to(ranks.device)
        model.entropy_gradient = config.algorithm.entropy_coef != 0
        model.float32_head = config.model.head_dtype == "float32"
        replay = RoutingReplay.for_full_model(
            model.routing,
            enabled=config.routing.replay != "off",
            device=ranks.device,
            is_recomputed=config.learner.recompute != "none",
        )
        if model.routing:
            known = find_architecture(causal.config.model_type)
            logits = known is not None and known.router_score == "logits"
            attach_replay(model.routers, model.routing, replay, logits=logits)
        model.enable_recompute(config.learner.recompute)
        chosen = freeze_parameters(model, config.learner)
        if frozen:
            model.requires_grad_(False)
        adapters = None
        if config.learner.lora.rank:
            adapters = LoraAdapters(
                find_adapter_candidates(model, ranks, config.learner),
                chosen,
                config.learner.lora,
                seed=config.seed,
                dtype=dtype,
                served_dtype=getattr(torch, config.generator.dtype),
            )
        learner = cls(config, source, ranks, model, replay, adapters)
        names = CheckpointNames(causal, open_model_files(source))
        model.published_names = names.published
        learner.carried = names.carried
        if ranks.rank == 0 and not frozen:
            log_checkpoint_form(source, learner.carried)
        return learner

    def forward(
        self, micro_batch: MicroBatch, rows: np.ndarray, routes: MicroBatchRoutes | None
    ) -> TokenScores:
        """Return the scores themselves: FSDP shards a module whose forward is the whole pass."""
        m = micro_batch
        device = self.ranks.device
        return self.model(
            PackedInputs.from_micro_batch(m, device),
            upload_array(m.scored_ids(rows), device),
            DeterministicGather.from_index(m.previous_rows(rows), m.num_tokens, device),
            upload_array(m.scored_temperatures(rows), device),
            routes,
            select_supports(m.support, rows),
        )

    def score_tokens(self, output: Any, micro_batch: MicroBatch, rows: np.ndarray) -> TokenScores:
        return output

    def reset_forward_state(self) -> None:
        """Free the parameters that FSDP gathered for a pass without a backward, or for
        one that failed.

        Otherwise the next pass would not see what the optimizer writes meanwhile. Raises
        `LearnerError` if gradients wait for the optimizer: they would be lost.
        """
        if isinstance(self.model, FSDPModule):
            if any(parameter.grad is not None for parameter in self.optimizer.parameters):
                raise LearnerError(
                    "with learner.backend=torch and several ranks, a forward-only pass would lose "
                    "the gradients of the backward passes before it: make it before them, or after "
                    "the optimizer's step"
                )
            # FSDP's own reset (in torch 2.13) overlooks the gradients of parameters that are whole
            # at this moment, and would add them to those of the next pass.
            self.model.zero_grad()
            self.model.reset_iter_state()

    def parameter_slices(self) -> list[ShardSlice]:
        named = self.model.causal_lm.named_parameters()
        return [
            locate_shard(name, parameter, self.ranks)
            for name, parameter in named
            if parameter.requires_grad
        ]

    def export_weights(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Return the snapshot in host memory."""
        dtype = getattr(torch, self.config.learner.dtype)
        return self.model.collect_checkpoint_tensors(
            partial(gather_tensor, ranks=self.ranks), dtype, copy=copy
        )

    def iter_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights a layer at a time, whole on the rank whose turn it is."""
        dtype = getattr(torch, self.config.learner.dtype)
        for number, names in enumerate(self.model.group_names_by_layer()):
            gather = partial(
                gather_tensor, ranks=self.ranks, target_rank=number % self.ranks.world_size
            )
            yield from self.model.collect_checkpoint_tensors(
                gather, dtype, copy=False, names=names
            ).items()


def detect_rank_group(dp: int) -> RankGroup:
    """Return this process's rank group.

    Raises `LearnerError` if the default process group does not have `dp`
    (`learner.parallel.dp`) ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != dp:
        raise LearnerError(
            f"learner.parallel.dp is {dp}, but {world} rank{'s' if world != 1 else ''} of "
            "torch.distributed run"
            f"{'s' if world == 1 else ''}: start as many learner processes as that setting says"
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return RankGroup(dist.get_rank() if world > 1 else 0, world, device)


def locate_shard(name: str, parameter: Tensor, ranks: RankGroup) -> ShardSlice:
    """Return the position of this rank's part of that parameter."""
    if not isinstance(parameter, DTensor):
        return ShardSlice(
            (TensorSlice.full_tensor(name, parameter.shape),), is_writer=ranks.rank == 0
        )
    # The first dimension is divided evenly, the last ranks getting less, or nothing: experts among
    # the last dimension of the mesh first, and what is left by FSDP among the first.
    mesh = parameter.device_mesh
    first = 0
    rows = parameter.shape[0]
    for dim in reversed(range(mesh.ndim)):
        part = -(-rows // mesh.size(dim))
        before = min(mesh.get_local_rank(dim) * part, rows)
        first += before
        rows = min(part, rows - before)
    size = tuple(parameter.to_local().shape)
    offset = (first, *(0 for _ in size[1:]))
    return ShardSlice((TensorSlice(name, tuple(parameter.shape), offset, size),))


def find_adapter_candidates(
    model: PackedModel, ranks: RankGroup, config: LearnerConfig
) -> list[AdapterCandidate]:
    """Return the parameters that may be adapted: matrices, and stacks of them."""
    ends = {
        id(m.weight)
        for m in (model.causal_lm.get_input_embeddings(), model.causal_lm.get_output_embeddings())
    }
    routers = {id(p) for router in model.routers for p in router.parameters()}
    convolutions = {
        id(p) for m in model.modules() if isinstance(m, torch.nn.Conv1d) for p in m.parameters()
    }
    out = []
    for name, p in model.causal_lm.named_parameters():
        router = id(p) in routers
        if (
            p.ndim < 2
            or id(p) in ends | convolutions
            or name.endswith("bias")
            or (router and config.freeze_router)
        ):
            continue
        divided: ShardedDim = (
            ("rows" if p.ndim == 2 else "matrices") if ranks.world_size > 1 else None
        )
        owner = model.causal_lm.get_submodule(name.rpartition(".")[0])
        linear = owner if type(owner) is torch.nn.Linear and ranks.world_size == 1 else None
        out.append(AdapterCandidate(p, locate_shard(name, p, ranks), divided, router, linear))
    return out


def freeze_parameters(model: PackedModel, config: LearnerConfig) -> set[str]:
    """Freeze what is not trained, and return the names of the matrices that have adapters.
    Raises `LearnerError`."""
    if not config.lora.rank:
        for router in model.routers if config.freeze_router else ():
            router.requires_grad_(False)
        return set()
    matrices = find_adapter_candidates(model, SINGLE_RANK, config)
    chosen = select_targets(
        config, [(name, one.is_router) for one in matrices for name in one.module_names]
    )
    adapted = {id(one.parameter) for one in matrices if chosen & set(one.module_names)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in adapted)
    return chosen


class FsdpGradientReducer(GradientReducer):
    """Sums the gradients of parameters that each rank has whole: FSDP has already summed those of
    weights."""

    def __init__(self, ranks: RankGroup, is_replicated: Sequence[bool]):
        self._ranks = ranks
        self._is_replicated = is_replicated
        self.sums_gradients = any(is_replicated)

    def reduce_gradients(self, gradients: Gradients) -> None:
        mine = [g for g, whole in zip(gradients, self._is_replicated, strict=True) if whole]
        total = torch.cat([g.reshape(-1) for g in mine])
        dist.all_reduce(total)
        for gradient, part in zip(mine, total.split([g.numel() for g in mine]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def compute_squared_norm(self, gradients: Gradients) -> float:
        counted = gradients
        # Values that each rank has whole count once.
        if self._ranks.rank and self._is_replicated:
            pairs = zip(gradients, self._is_replicated, strict=True)
            counted = [gradient for gradient, whole in pairs if not whole]
        mine = super().compute_squared_norm([to_local(g) for g in counted])
        return float(self._ranks.all_reduce(np.asarray([mine]), "sum")[0])


def shard_model(model: PackedModel, ranks: RankGroup, dtype: torch.dtype, ep: int) -> None:
    """Divide every parameter, held in float32, among the ranks; each layer is gathered in
    `dtype` while it runs, of its experts the 1 / `ep` that this rank computes.

    Ranks next to each other exchange tokens. Parameters without memory stay without. Raises
    `LearnerError` if experts cannot be divided.

    Gradients are summed over ranks, not averaged, in float32: the loss is already divided by the
    global denominator.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    # Inputs stay as they are: they follow the embedding's dtype, and temperatures are float32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if ep > 1:
        grid = init_device_mesh(
            ranks.device.type, (ranks.world_size // ep, ep), mesh_dim_names=("replicas", "experts")
        )
        for module in divide_experts(model.layers, model.routing, grid["experts"]):
            fully_shard(module, mesh=grid["replicas"], mp_policy=policy)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for trial in (PackedModel._find_leaks, PackedModel._trial_forward):
        register_fsdp_forward_method(model, trial.__name__)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Plain sums on every backend, also instead of NCCL's pre-multiplied ones.
            module.set_force_sum_reduction_for_comms(True)


def gather_tensor(
    tensor: Tensor, dtype: torch.dtype, ranks: RankGroup, target_rank: int = 0
) -> Tensor | None:
    """Return a whole weight in `dtype`, in host memory of rank `target_rank`; None elsewhere.

    Integers keep their dtype. Collective.
    """
    tensor = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype)
    if isinstance(tensor, DTensor):
        placements = list(tensor.placements)
        for dim in range(tensor.device_mesh.ndim):  # torch warns of several at once
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
        tensor = tensor.to_local()
    return tensor.cpu() if ranks.rank == target_rank else None


# A check with a model built without memory: it finds what loading would refuse before
# anything starts.


def check_buildable(config: Config, path: Path) -> None:
    """Build the model without memory, run it as far as shapes go, and compare the tensors that its
    files name alike.

    Raises `LearnerError` for a model that this backend would train wrongly, and for
    `learner.lora.targets` that name nothing. What only values show (changed logits, masked scores)
    is not detected.
    """
    # Without values, bfloat16 is the only precision with a kernel for matrices of experts.
    described = read_model_config(path)
    causal = build_empty_model(path, torch.bfloat16)
    model = PackedModel(causal, described, max_total_tokens=config.episode.max_total_tokens)
    model.find_routers(torch.device("meta"))
    found = read_tensor_shapes(open_model_files(path))
    for name, parameter in causal.named_parameters():
        if parameter.ndim <= 2 and name in found and tuple(found[name]) != tuple(parameter.shape):
            raise LearnerError(
                f"{name}: shape {tuple(found[name])}, config.json means {tuple(parameter.shape)}"
            )
    if config.learner.lora.rank:
        freeze_parameters(model, config.learner)
