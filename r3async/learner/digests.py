"""Digests of what a step goes through, stage by stage: two runs of it part at the first that differs.

A digest is a number of 64 bits. Those of several tensors, micro-batches or ranks are summed, each with its name in it, so that no
order matters. Bits count: `-0.0` is not `0.0`. They are of one layout of ranks, and of another they say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from r3async.learner.optimizer import to_local

if TYPE_CHECKING:
    from r3async.data.tokens import Sample
    from r3async.learner.backend import LearnerBackend
    from r3async.learner.batch import MicroBatch

ScoreCallback = Callable[[int, torch.Tensor, torch.Tensor], Any]
DIGEST_MODULUS = 2**64
RANK_STAGES = ("logprobs", "gradients", "weights", "moments")
"""In the order in which a step makes them."""
DIGEST_STAGES = ("trajectories", "advantages", "packing", *RANK_STAGES, "metrics")
"""In the order in which a step makes them; `metrics` follow from all, and their differences have names."""


def compute_digest(name: str, value: np.ndarray | torch.Tensor) -> int:
    """Of its name, dtype, shape and bits."""
    array = (
        value.detach().cpu().contiguous()
        if isinstance(value, torch.Tensor)
        else np.ascontiguousarray(value).reshape(-1)
    )
    hashed = xxhash.xxh3_64(f"{name} {array.dtype} {tuple(value.shape)}".encode())
    plain: Any = (
        array.reshape(-1).view(torch.uint8).numpy() if isinstance(array, torch.Tensor) else array.view(np.uint8)
    )
    hashed.update(plain)
    return hashed.intdigest()


def sum_digests(digests: Iterable[int]) -> int:
    return sum(digests) % DIGEST_MODULUS


class StageDigests:
    """Of one rank, of one minibatch at a time."""

    def __init__(self) -> None:
        self._digests = dict.fromkeys(RANK_STAGES, 0)

    def add(self, stage: str, name: str, value: np.ndarray | torch.Tensor) -> None:
        self._digests[stage] = (self._digests[stage] + compute_digest(name, value)) % DIGEST_MODULUS

    def wrap_loss(self, loss: ScoreCallback) -> ScoreCallback:
        """`loss`, which is given the log-probs of a micro-batch and their entropies, with a look at them."""

        def looked(index: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> Any:
            self.add("logprobs", str(index), logprobs)
            return loss(index, logprobs, entropies)

        return looked

    def add_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Summed over ranks, before clipping."""
        for index, gradient in enumerate(gradients):
            self.add("gradients", str(index), to_local(gradient))

    def pop_digests(self, backend: LearnerBackend) -> dict[str, int]:
        """Those of the minibatch that has just been trained, with the optimizer as it is now; the next one begins."""
        for index, tensors in enumerate(backend.optimizer.iter_states()):
            for kind, tensor in tensors.items():
                self.add("weights" if kind == "master" else "moments", f"{index} {kind}", tensor)
        for bias in backend.expert_biases:
            self.add("weights", bias.name, bias.tensor)
        found, self._digests = self._digests, dict.fromkeys(RANK_STAGES, 0)
        return found


def digest_samples(samples: Sequence[Sample]) -> int:
    """Of the columns that a step adds to them: advantages, weights in the loss, episodes. One digest a column: there may be
    hundreds of short samples."""
    which = " ".join(f"{sample.sample_id}:{len(sample.table)}" for sample in samples)
    return sum_digests(
        compute_digest(f"{name} {which}", np.concatenate([sample.table[name] for sample in samples]))
        for name in ("advantages", "loss_weights", "episode", "place")
        if samples
    )


def digest_packing(micro_batches: Sequence[Sequence[MicroBatch]]) -> int:
    """Which samples are in which micro-batch of which rank, and where."""
    return sum_digests(
        compute_digest(f"{rank} {at} {' '.join(m.sample_ids)}", _packing_layout(m))
        for rank, mine in enumerate(micro_batches)
        for at, m in enumerate(mine)
    )


def _packing_layout(m: MicroBatch) -> np.ndarray:
    prefixes: Any = np.zeros(0) if m.prefixes is None else m.prefixes
    return np.concatenate([np.asarray(m.cu_seqlens, np.int64), np.asarray(prefixes, np.int64).reshape(-1)])
