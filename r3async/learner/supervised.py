"""Supervised training steps: cross entropy of the tokens in `loss_mask`, the mean
over the whole step.

Model, packing and optimizer are the same as in a step of reinforcement learning (`train_step.py`),
but there are no routes to replay: routers use their own choice. `r3async sft` and the start model
of `model.init` use these steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from r3async.learner.backend import find_predicted_rows
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.minibatch import TrainableMinibatch
from r3async.learner.train_step import forward_backward, optim_step

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


def run_supervised_step(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch]
) -> dict[str, float]:
    """Make one update over this rank's micro-batches, and return its metrics. Collective.

    With a gradient that is not finite, weights and moments stay as they are. If a pass fails, it
    leaves nothing behind.
    """
    minibatch = _count_tokens(backend, micro_batches)
    if not minibatch.num_trained:
        update = backend.optimizer.skip_step("zero_variance")
        return minibatch.build_metrics(math.nan) | {
            "grad_norm": 0.0,
            "lr": update.lr,
            "optimizer/updates": 0.0,
        }
    forward_backward(backend, minibatch)
    loss = minibatch.reduce_loss()
    update = optim_step(backend)
    made = float(not update.cause)
    return minibatch.build_metrics(loss) | {
        "grad_norm": update.grad_norm,
        "lr": update.lr,
        "optimizer/updates": made,
        "optimizer/skipped": 1.0 - made,
    }


def compute_supervised_loss(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch]
) -> tuple[float, float]:
    """Return the sum of -log p over the tokens in `loss_mask`, and their number, over all ranks.

    A forward-only pass. Collective.
    """
    minibatch = _count_tokens(backend, micro_batches)
    with backend.forward_only():
        for index, _, logprobs, entropies in backend.iter_scores(
            minibatch.micro_batches, minibatch.trained_rows, replay=False
        ):
            if logprobs is not None and entropies is not None:
                minibatch.compute_micro_batch_loss(index, logprobs, entropies)
    return minibatch.reduce_loss() * max(minibatch.num_trained, 1.0), minibatch.num_trained


def _count_tokens(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch]
) -> SupervisedMinibatch:
    """Pad the micro-batches, and count tokens over all ranks. Collective."""
    batches = backend.pad_for_parallel(micro_batches)
    rows = [find_predicted_rows(m, trained_only=True) for m in batches]
    real = sum(m.num_real_tokens + m.num_shared_tokens for m in batches)
    counts = [sum(map(len, rows)), real, sum(bool(m.sample_ids) for m in batches)]
    mine = np.asarray(counts, np.float64) * backend.ranks.is_batch_reporter
    trained, tokens, num_batches = backend.ranks.all_reduce(mine, "sum").tolist()
    return SupervisedMinibatch(
        backend.ranks, batches, rows, trained, None, False, tokens, num_batches
    )


@dataclass
class SupervisedMinibatch(TrainableMinibatch):
    """The micro-batches of one update on this rank, whose loss is cross entropy.

    Over all ranks there are `num_tokens` tokens, and `num_micro_batches` that are not padding only.
    """

    num_tokens: float
    num_micro_batches: float
    replays_routes = False
    _loss: float = field(init=False, default=0.0)

    def compute_micro_batch_loss(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """Return the micro-batch's part of the mean of -log p over all trained tokens."""
        loss = -logprobs.sum() * (1 / max(self.num_trained, 1.0))
        self._loss += loss.item()
        return loss

    def reduce_loss(self) -> float:
        """Return the mean of -log p over all trained tokens of all ranks. Collective; after the
        last `compute_micro_batch_loss`."""
        mine = np.asarray([self._loss * self.ranks.is_loss_reporter])
        return float(self.ranks.all_reduce(mine, "sum")[0])

    def build_metrics(self, loss: float) -> dict[str, float]:
        return {
            "loss/answers": loss,
            "batch/tokens": self.num_tokens,
            "batch/trained_tokens": self.num_trained,
            "batch/micro_batches": self.num_micro_batches,
        }
