"""Supervised training steps: cross entropy of the tokens in `loss_mask`, the mean
over the whole step.

Model, packing and optimizer are the same as in a step of reinforcement learning (`trainer.py`), but
there are no routes to replay: routers use their own choice. `r3async sft` and the start model of
`model.init` use these steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from r3async.learner.backend import find_predicted_rows
from r3async.learner.micro_batches import MicroBatch

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


def run_supervised_step(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch]
) -> dict[str, float]:
    """Make one update over this rank's micro-batches, and return its metrics. Collective.

    With a gradient that is not finite, weights and moments stay as they are. If a pass fails, it
    leaves nothing behind.
    """
    prepared = _prepare_pass(backend, micro_batches)
    if not prepared.num_trained:
        update = backend.optimizer.skip_step("zero_variance")
        return prepared.build_metrics(math.nan) | {
            "grad_norm": 0.0,
            "lr": update.lr,
            "optimizer/updates": 0.0,
        }
    try:
        loss = prepared.run_pass(backward=True)
        update = backend.optimizer.step()
        backend.replay.pop_counts()
    except BaseException:
        backend.abort_step()
        raise
    made = float(not update.cause)
    return prepared.build_metrics(loss) | {
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
    prepared = _prepare_pass(backend, micro_batches)
    with backend.forward_only():
        return prepared.run_pass(backward=False) * max(
            prepared.num_trained, 1.0
        ), prepared.num_trained


def _prepare_pass(backend: LearnerBackend, micro_batches: Sequence[MicroBatch]) -> _SupervisedPass:
    """Pad the micro-batches, and count tokens over all ranks. Collective."""
    batches = backend.pad_for_parallel(micro_batches)
    rows = [find_predicted_rows(m, trained_only=True) for m in batches]
    real = sum(m.num_real_tokens + m.num_shared_tokens for m in batches)
    counts = [sum(map(len, rows)), real, sum(bool(m.sample_ids) for m in batches)]
    mine = np.asarray(counts, np.float64) * backend.ranks.is_batch_reporter
    return _SupervisedPass(backend, batches, rows, *backend.ranks.all_reduce(mine, "sum").tolist())


@dataclass(frozen=True)
class _SupervisedPass:
    """The micro-batches of one pass, and the trained rows of each.

    Over all ranks there are `num_trained` trained tokens, `num_tokens` tokens, and
    `num_micro_batches` that are not padding only.
    """

    backend: LearnerBackend
    micro_batches: list[MicroBatch]
    trained_rows: list[np.ndarray]
    num_trained: float
    num_tokens: float
    num_micro_batches: float

    def run_pass(self, *, backward: bool) -> float:
        """Run the pass and return the mean of -log p over all trained tokens."""
        total = 0.0
        weight = 1 / max(self.num_trained, 1.0)

        def finish(index: int, logprobs: Tensor, _: Tensor) -> Tensor:
            nonlocal total
            loss = -logprobs.sum() * weight
            total += loss.item()
            return loss

        self.backend.run_micro_batches(
            self.micro_batches, self.trained_rows, finish, replay=False, backward=backward
        )
        ranks = self.backend.ranks
        return float(ranks.all_reduce(np.asarray([total * ranks.is_loss_reporter]), "sum")[0])

    def build_metrics(self, loss: float) -> dict[str, float]:
        return {
            "loss/answers": loss,
            "batch/tokens": self.num_tokens,
            "batch/trained_tokens": self.num_trained,
            "batch/micro_batches": self.num_micro_batches,
        }
