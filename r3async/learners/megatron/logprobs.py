"""Log-probs of given tokens from hidden states, without holding all logits at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**25
"""Logits (tokens x vocabulary) that exist at once in float32: 128 MiB."""


def token_logprobs(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    vocab_size: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """float32 `[M]` log-prob of each target under `softmax(logits / temperature)`, and its entropy (no gradient), in nats.

    `hidden [M, H]`, `targets` int64 `[M]`, `temperatures` float32 `[M]`. If all logits are more than `chunk_elements`, they
    are made chunk by chunk, and made again in the backward pass.
    """
    rows = max(1, chunk_elements // vocab_size)
    if len(hidden) <= rows:
        return _logprobs(logits, hidden, targets, temperatures)
    parts = [
        checkpoint(_logprobs, logits, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _logprobs(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    everything = torch.log_softmax(logits(hidden).float() / temperatures[:, None], dim=-1)
    with torch.no_grad():
        # A log-prob of minus infinity has probability 0 and adds nothing.
        entropies = torch.special.entr(everything.exp()).sum(dim=-1)
    return everything.gather(1, targets[:, None])[:, 0], entropies
