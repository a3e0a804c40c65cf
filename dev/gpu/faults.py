"""Faults that only a GPU shows, planted to see that the tests on the emulated device find them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from r3async.learner import token_logprobs
from r3async.learner.backend import TokenScores
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.megatron.experts import GroupedExperts
from r3async.learner.micro_batches import MicroBatch


def leave_index_on_host() -> None:
    """Select scores by an index that is on the CPU: CUDA takes it, but uploads it
    while the host waits."""
    _change_logprobs(lambda logprobs: logprobs[torch.arange(len(logprobs))])


def read_every_loss() -> None:
    """Read a number of each micro-batch back to the host, as a line that prints the loss would."""
    _change_logprobs(lambda logprobs: logprobs + 0 * logprobs.mean().item())


def _change_logprobs(change: Callable[[Tensor], Tensor]) -> None:
    score = MegatronLearner.score_tokens

    def score_tokens(
        self: MegatronLearner, output: Tensor, micro_batch: MicroBatch, rows: np.ndarray
    ) -> TokenScores:
        logprobs, entropies = score(self, output, micro_batch, rows)
        return change(logprobs), entropies

    MegatronLearner.score_tokens = score_tokens  # type: ignore[method-assign]


def forget_upload() -> None:
    """Leave the tokens of a micro-batch on the CPU."""
    MegatronLearner._to_device = lambda self, array: torch.from_numpy(array)  # type: ignore[method-assign]


def be_blackwell() -> None:
    """Be a device on which torch leaves gradients of experts without a token unwritten."""
    torch.cuda.get_device_capability = lambda device=None: (10, 0)


def copy_rows_in_float32() -> None:
    """Compute with the rows that are sent to experts as float32 rounded back: equal
    values, two copies."""
    forward = GroupedExperts.forward

    def forward_copied_rows(
        self: GroupedExperts, tokens: Tensor, counts: Tensor, gates: Tensor
    ) -> tuple[Tensor, None]:
        return forward(self, tokens.float().to(tokens.dtype), counts, gates)

    GroupedExperts.forward = forward_copied_rows  # type: ignore[method-assign]


def take_small_chunks() -> None:
    """Compute logits of few rows at a time: an eighth of the micro-batch, as 220 rows are of one
    of 2,048."""
    token_logprobs.choose_chunk_elements = lambda device: 20 * 128


FAULTS: dict[str, Callable[[], None]] = {
    "blackwell": be_blackwell,
    "index-on-host": leave_index_on_host,
    "item-in-loop": read_every_loss,
    "forgotten-upload": forget_upload,
    "float32-rows": copy_rows_in_float32,
    "small-chunks": take_small_chunks,
}


def plant_fault(name: str) -> None:
    """Plant a fault into this process."""
    FAULTS[name]()
