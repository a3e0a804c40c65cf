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

from r3async.learner.optimizer import local

if TYPE_CHECKING:
    from r3async.data.records import Sample
    from r3async.learner.backend import LearnerBackend
    from r3async.learner.batch.packing import MicroBatch

Loss = Callable[[int, torch.Tensor, torch.Tensor], Any]
MODULUS = 2**64
OF_RANKS = ("logprobs", "gradients", "weights", "moments")
"""In the order in which a step makes them."""
STAGES = ("trajectories", "advantages", "packing", *OF_RANKS, "metrics")
"""In the order in which a step makes them; `metrics` follow from all, and their differences have names."""


def digest_of(name: str, value: np.ndarray | torch.Tensor) -> int:
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


def summed(digests: Iterable[int]) -> int:
    return sum(digests) % MODULUS


class Digests:
    """Of one rank, of one minibatch at a time."""

    def __init__(self) -> None:
        self._found = dict.fromkeys(OF_RANKS, 0)

    def add(self, stage: str, name: str, value: np.ndarray | torch.Tensor) -> None:
        self._found[stage] = (self._found[stage] + digest_of(name, value)) % MODULUS

    def before(self, loss: Loss) -> Loss:
        """`loss`, which is given the log-probs of a micro-batch and their entropies, with a look at them."""

        def looked(index: int, logprobs: torch.Tensor, entropies: torch.Tensor) -> Any:
            self.add("logprobs", str(index), logprobs)
            return loss(index, logprobs, entropies)

        return looked

    def gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Summed over ranks, before clipping."""
        for index, gradient in enumerate(gradients):
            self.add("gradients", str(index), local(gradient))

    def take(self, backend: LearnerBackend) -> dict[str, int]:
        """Those of the minibatch that has just been trained, with the optimizer as it is now; the next one begins."""
        for index, tensors in enumerate(backend.optimizer.states()):
            for kind, tensor in tensors.items():
                self.add("weights" if kind == "master" else "moments", f"{index} {kind}", tensor)
        for bias in backend.biases:
            self.add("weights", bias.name, bias.tensor)
        found, self._found = self._found, dict.fromkeys(OF_RANKS, 0)
        return found


def of_samples(samples: Sequence[Sample]) -> int:
    """Of the columns that a step adds to them: advantages, weights in the loss, episodes. One digest a column: there may be
    hundreds of short samples."""
    which = " ".join(f"{sample.sample_id}:{len(sample.table)}" for sample in samples)
    return summed(
        digest_of(f"{name} {which}", np.concatenate([sample.table[name] for sample in samples]))
        for name in ("advantages", "loss_weights", "episode", "place")
        if samples
    )


def of_packing(micro_batches: Sequence[Sequence[MicroBatch]]) -> int:
    """Which samples are in which micro-batch of which rank, and where."""
    return summed(
        digest_of(f"{rank} {at} {' '.join(m.sample_ids)}", _places(m))
        for rank, mine in enumerate(micro_batches)
        for at, m in enumerate(mine)
    )


def _places(m: MicroBatch) -> np.ndarray:
    prefixes: Any = np.zeros(0) if m.prefixes is None else m.prefixes
    return np.concatenate([np.asarray(m.cu_seqlens, np.int64), np.asarray(prefixes, np.int64).reshape(-1)])
