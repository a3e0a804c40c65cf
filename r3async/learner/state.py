"""The learner's state in a checkpoint: captured from all ranks, and restored on any layout.

Every tensor of the optimizer is named as in a model's checkpoint, whatever the ranks:
`master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` for each weight `NAME` of the model, `step/NAME`
for how often it was updated, `expert_bias/NAME` for an expert bias, `rng/DEVICE/RANK`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from r3async.checkpoint.manifest import CheckpointError
from r3async.checkpoint.rank_files import (
    LearnerMetadata,
    LearnerStateReader,
    RankState,
    SliceValues,
    TensorSlice,
)
from r3async.learner.expert_biases import ExpertBias
from r3async.learner.row_shares import to_local
from r3async.learner.shard_slice import ShardSlice

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


@torch.no_grad()
def capture_learner_state(backend: LearnerBackend) -> RankState:
    """Return a copy, in host memory, of everything of this rank that later steps depend on.

    This is: float32 weights, Adam's moments and step counts, the trust region's controller, random
    number generators. Values that several ranks hold are captured by one of them.
    """
    pieces = []
    for held, tensors in zip(backend.owned_slices(), backend.optimizer.iter_states(), strict=True):
        if not held.is_writer:
            continue
        for kind, tensor in tensors.items():
            if kind == "step":
                # Among the ranks that divide a tensor, the one that has its beginning
                # writes the step.
                pieces += [
                    SliceValues(_step_place(place), _copy_to_host(tensor))
                    for place in held.places
                    if not any(place.offset)
                ]
                continue
            for place, part in zip(held.places, held.layout.split(tensor), strict=True):
                inside = part[tuple(slice(n) for n in place.size)]
                pieces.append(
                    SliceValues(replace(place, name=f"{kind}/{place.name}"), _copy_to_host(inside))
                )
    for bias in backend.expert_biases:
        if bias.is_writer:
            pieces.append(SliceValues(_bias_place(bias), _copy_to_host(bias.tensor)))
    for name, numbers in _rng_states(backend.ranks.rank):
        pieces.append(SliceValues(TensorSlice.full_tensor(name, numbers.shape), numbers))
    facts = LearnerMetadata(
        backend=backend.name,
        model=_config_digest(backend),
        steps=backend.optimizer.update_count,
        world=backend.ranks.world_size,
        trust_region=backend.trust_region.state_dict(),
    )
    return RankState(backend.ranks.rank, facts, pieces)


def restore_learner_state(
    backend: LearnerBackend, parts: LearnerStateReader, *, with_optimizer: bool = True
) -> None:
    """Restore a learner, see `LearnerBackend.restore_state`.

    Raises `CheckpointError` if the state is of another model or backend, or if a tensor is missing.
    """
    facts = parts.metadata
    if facts.backend != backend.name:
        raise CheckpointError(
            f'it was written by learner.backend = "{facts.backend}", which names tensors in its '
            "own way: set that back, or `r3async export` the model and start from it"
        )
    if facts.model != _config_digest(backend):
        raise CheckpointError(
            f"it is of another model: the config.json in {backend.model_path} is not the one it "
            "was written with"
        )
    backend.optimizer.load_states(
        _read_optimizer_states(backend, parts, with_optimizer), facts.steps if with_optimizer else 0
    )
    for bias in backend.expert_biases:
        if (
            _bias_place(bias).name in parts
        ):  # checkpoints from before biases were updated have none: the start model's are right
            bias.tensor.copy_(parts.read_slice(_bias_place(bias)))
    if not with_optimizer:
        return
    backend.trust_region.load_state_dict(facts.trust_region)
    if facts.world == backend.ranks.world_size:
        _restore_rng_states(backend.ranks.rank, parts)


def _read_optimizer_states(
    backend: LearnerBackend, parts: LearnerStateReader, optimizer: bool
) -> Iterator[dict[str, Tensor]]:
    """Yield, for each parameter, the state that `MasterAdamW.load_states` takes."""

    def values(kind: str, held: ShardSlice, like: Tensor) -> Tensor:
        pairs = zip(held.places, held.layout.split(like), strict=True)
        return held.layout.join(
            [
                _pad_rows(parts.read_slice(replace(p, name=f"{kind}/{p.name}")), part)
                for p, part in pairs
            ]
        )

    own = zip(backend.owned_slices(), backend.optimizer.iter_states(), strict=True)
    for held, parameter, (mine, now) in zip(
        backend.trained_slices(), backend.optimizer.parameters, own, strict=True
    ):
        out = {"master": values("master", held, to_local(parameter.detach()))}
        if optimizer and mine.places and f"step/{mine.places[0].name}" in parts:
            out |= {kind: values(kind, mine, now["master"]) for kind in ("exp_avg", "exp_avg_sq")}
            out["step"] = parts.read_slice(_step_place(mine.places[0]))
        yield out


def _pad_rows(values: Tensor, part: Tensor) -> Tensor:
    """Add zeros where a rank has rows that only pad its share: such rows never change."""
    return (
        F.pad(values, (0, 0, 0, part.shape[0] - values.shape[0]))
        if values.shape != part.shape
        else values
    )


def _config_digest(backend: LearnerBackend) -> str:
    """Return the SHA-256 of `config.json`, which determines the tensors' names and shapes."""
    return hashlib.sha256((backend.model_path / "config.json").read_bytes()).hexdigest()


def _bias_place(bias: ExpertBias) -> TensorSlice:
    return TensorSlice.full_tensor(f"expert_bias/{bias.name}", bias.tensor.shape)


def _step_place(place: TensorSlice) -> TensorSlice:
    return TensorSlice.full_tensor(f"step/{place.name}", ())


def _copy_to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _rng_states(rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield torch's random number states.

    Nothing uses them today: no model trained here has dropout, and weights are loaded.
    """
    yield f"rng/cpu/{rank}", torch.get_rng_state()
    if torch.cuda.is_available():
        yield f"rng/cuda/{rank}", torch.cuda.get_rng_state()


def _restore_rng_states(rank: int, parts: LearnerStateReader) -> None:
    for name, now in _rng_states(rank):
        if name in parts:
            numbers = parts.read_slice(TensorSlice.full_tensor(name, now.shape), torch.uint8)
            try:
                torch.set_rng_state(numbers) if "/cpu/" in name else torch.cuda.set_rng_state(
                    numbers
                )
            except RuntimeError as error:
                raise CheckpointError(f"{name}: {error}") from error
