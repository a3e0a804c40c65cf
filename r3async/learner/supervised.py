"""A step of supervised training: cross entropy of the tokens in `loss_mask`, the mean over all of the step.

The same model, packing and optimizer as a step of reinforcement learning (`trainer.py`), without routes to replay: routers choose
by themselves. `r3async sft` and the start model of `model.init` are made of these steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from r3async.learner.backend import predicted
from r3async.learner.batch.packing import MicroBatch

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


def supervised_step(backend: LearnerBackend, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """One update over this rank's micro-batches, and its metrics. Collective. With a gradient that is not finite, weights and
    moments stay as they are. Whatever a pass fails with leaves nothing behind."""
    prepared = _answers(backend, micro_batches)
    if not prepared.trained:
        update = backend.optimizer.skip("no_contrast")
        return prepared.metrics(math.nan) | {"grad_norm": 0.0, "lr": update.lr, "optimizer/updates": 0.0}
    try:
        loss = prepared.run(backward=True)
        update = backend.optimizer.step()
        backend.replay.take_counts()
    except BaseException:
        backend.forget()
        raise
    made = float(not update.cause)
    return prepared.metrics(loss) | {
        "grad_norm": update.grad_norm,
        "lr": update.lr,
        "optimizer/updates": made,
        "optimizer/skipped": 1.0 - made,
    }


def supervised_loss(backend: LearnerBackend, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
    """Of a forward-only pass: the sum of -log p over the tokens in `loss_mask`, and how many there are, over all ranks.
    Collective."""
    prepared = _answers(backend, micro_batches)
    with backend.forward_only():
        return prepared.run(backward=False) * max(prepared.trained, 1.0), prepared.trained


def _answers(backend: LearnerBackend, micro_batches: Sequence[MicroBatch]) -> _Answers:
    """Collective."""
    batches = backend.aligned(micro_batches)
    rows = [predicted(m, trained=True) for m in batches]
    real = sum(m.real_tokens + m.shared_tokens for m in batches)
    counts = [sum(map(len, rows)), real, sum(bool(m.sample_ids) for m in batches)]
    mine = np.asarray(counts, np.float64) * backend.ranks.is_first_copy
    return _Answers(backend, batches, rows, *backend.ranks.reduce(mine, "sum").tolist())


@dataclass(frozen=True)
class _Answers:
    """The micro-batches of one pass, and which rows of each are trained. Of all ranks: `trained` tokens, all `tokens`, and
    `passes` that are not padding only."""

    backend: LearnerBackend
    batches: list[MicroBatch]
    rows: list[np.ndarray]
    trained: float
    tokens: float
    passes: float

    def run(self, *, backward: bool) -> float:
        """The mean of -log p over all trained tokens."""
        total, weight = 0.0, 1 / max(self.trained, 1.0)

        def finish(index: int, logprobs: Tensor, _: Tensor) -> Tensor:
            nonlocal total
            loss = -logprobs.sum() * weight
            total += loss.item()
            return loss

        self.backend.feed(self.batches, self.rows, finish, replay=False, backward=backward)
        ranks = self.backend.ranks
        return float(ranks.reduce(np.asarray([total * ranks.holds_loss]), "sum")[0])

    def metrics(self, loss: float) -> dict[str, float]:
        return {
            "loss/answers": loss,
            "batch/tokens": self.tokens,
            "batch/trained_tokens": self.trained,
            "batch/micro_batches": self.passes,
        }
