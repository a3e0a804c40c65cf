"""One update on one minibatch, as most tests of a learner make it."""

from collections.abc import Sequence

from r3async.learner import MinibatchResult
from r3async.learner.backend import LearnerBackend
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.train_step import train_step


def train_minibatch(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
) -> MinibatchResult:
    """Make a step of one minibatch, and return the result of its first update. Collective."""
    return train_step(backend, [micro_batches], version=version, trace=trace)[0]
