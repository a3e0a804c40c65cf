"""Sums and maxima over the tokens of each sequence (episode) of a packed micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, mask: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """float64 `[S]`: sums of `values` `[M]` over each sequence's tokens where `mask` is True; 0 for a sequence without."""
    kept = torch.where(mask, values.double(), 0.0)
    return torch.zeros(sequences, dtype=torch.float64, device=values.device).index_add_(0, sequence, kept)


def segment_count(mask: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """float64 `[S]`: the number of each sequence's tokens where `mask` is True."""
    return segment_sum(torch.ones_like(mask, dtype=torch.float64), mask, sequence, sequences)


def segment_mean(values: Tensor, mask: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """float64 `[S]`: as `segment_sum`, divided by the number of tokens."""
    return segment_sum(values, mask, sequence, sequences) / segment_count(mask, sequence, sequences).clamp(min=1)


def segment_max(values: Tensor, mask: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """float64 `[S]`: the largest of `values` of each sequence's tokens where `mask` is True, at least 0."""
    kept = torch.where(mask, values.double(), 0.0)
    out = torch.zeros(sequences, dtype=torch.float64, device=values.device)
    return out.scatter_reduce_(0, sequence, kept, "amax")
