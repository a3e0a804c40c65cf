"""Digests of the stages of a step: two runs of the same step diverge at the first stage
whose digests differ.

A digest is a number of 64 bits. Digests of several tensors, micro-batches or ranks are summed, each
with its name hashed in, so that order does not matter. Every bit counts: `-0.0` is not `0.0`.
Digests can be compared only between runs with the same layout of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from r3async.learner.row_shares import to_local

if TYPE_CHECKING:
    from r3async.data.tokens import Sample
    from r3async.learner.expert_biases import ExpertBias
    from r3async.learner.micro_batches import MicroBatch
    from r3async.learner.optimizer import MasterAdamW

DIGEST_MODULUS = 2**64
RANK_STAGES = ("logprobs", "gradients", "weights", "moments")
"""The stages that each rank digests, in the order of a step."""
DIGEST_STAGES = ("trajectories", "advantages", "packing", *RANK_STAGES, "metrics")
"""All stages, in the order of a step; `metrics` follow from all the others, and their
differences have names."""


def compute_digest(name: str, value: np.ndarray | torch.Tensor) -> int:
    """Return the digest of a tensor's name, dtype, shape and bits."""
    array = (
        value.detach().cpu().contiguous()
        if isinstance(value, torch.Tensor)
        else np.ascontiguousarray(value).reshape(-1)
    )
    hashed = xxhash.xxh3_64(f"{name} {array.dtype} {tuple(value.shape)}".encode())
    plain: Any = (
        array.reshape(-1).view(torch.uint8).numpy()
        if isinstance(array, torch.Tensor)
        else array.view(np.uint8)
    )
    hashed.update(plain)
    return hashed.intdigest()


def sum_digests(digests: Iterable[int]) -> int:
    return sum(digests) % DIGEST_MODULUS


class StageDigests:
    """The digests of one rank's stages, for one minibatch at a time."""

    def __init__(self) -> None:
        self._digests = dict.fromkeys(RANK_STAGES, 0)

    def add(self, stage: str, name: str, value: np.ndarray | torch.Tensor) -> None:
        self._digests[stage] = (self._digests[stage] + compute_digest(name, value)) % DIGEST_MODULUS

    def add_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add gradients that are summed over ranks and not clipped yet."""
        for index, gradient in enumerate(gradients):
            self.add("gradients", str(index), to_local(gradient))

    def pop_digests(
        self, optimizer: MasterAdamW, expert_biases: Sequence[ExpertBias]
    ) -> dict[str, int]:
        """Return the digests of the minibatch that has just been trained, and start the next one.

        They include the optimizer's state as it is now.
        """
        for index, tensors in enumerate(optimizer.iter_states()):
            for kind, tensor in tensors.items():
                self.add("weights" if kind == "master" else "moments", f"{index} {kind}", tensor)
        for bias in expert_biases:
            self.add("weights", bias.name, bias.tensor)
        found = self._digests
        self._digests = dict.fromkeys(RANK_STAGES, 0)
        return found


def digest_samples(samples: Sequence[Sample]) -> int:
    """Return the digest of the columns that a step adds to samples: advantages, weights in
    the loss, episodes.

    Each column is digested once over all samples, as there may be hundreds of short ones.
    """
    which = " ".join(f"{sample.sample_id}:{len(sample.table)}" for sample in samples)
    return sum_digests(
        compute_digest(
            f"{name} {which}", np.concatenate([sample.table[name] for sample in samples])
        )
        for name in ("advantages", "loss_weights", "episode", "place")
        if samples
    )


def digest_packing(micro_batches: Sequence[Sequence[MicroBatch]]) -> int:
    """Return the digest of the packing: the samples in each micro-batch of each rank, and
    their positions."""
    return sum_digests(
        compute_digest(f"{rank} {at} {' '.join(m.sample_ids)}", _packing_layout(m))
        for rank, mine in enumerate(micro_batches)
        for at, m in enumerate(mine)
    )


def _packing_layout(m: MicroBatch) -> np.ndarray:
    prefixes: Any = np.zeros(0) if m.prefixes is None else m.prefixes
    return np.concatenate(
        [np.asarray(m.cu_seqlens, np.int64), np.asarray(prefixes, np.int64).reshape(-1)]
    )
