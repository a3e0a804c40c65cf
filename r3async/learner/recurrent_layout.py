"""Packed samples as recurrent layers need them: the borders between samples, and their chunks.

Planned once per micro-batch and used by every layer.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from r3async.learner.deterministic_gather import DeterministicGather
from r3async.learner.device_upload import upload_array

LONGEST_SINGLE_CHUNK = 64
"""A sample of at most so many tokens is one chunk, and needs no recurrent state."""
CHUNK_TOKENS = 32
"""The length of the chunks of longer samples."""
CHUNK_LENGTH_STEP = 8
"""Lengths of single chunks are multiples of this, so that few lengths occur."""


class RecurrentLayout:
    """The samples of one micro-batch, laid end to end at `cu_seqlens` (int `[S + 1]`).

    No chunk has tokens of two samples, and how a sample is cut depends on its own length only, so
    that its results do not depend on the others. Chunks of one length are a group. In a group the
    first chunks of all samples come first, then the second ones and so on, always with the samples
    of most chunks first: the predecessors of the chunks of one step are the first chunks of the
    step before.

    Attributes:
        groups: (tokens of a chunk, number of chunks in each step) of each group.
    """

    def __init__(self, cu_seqlens: np.ndarray, device: torch.device):
        self._cu_seqlens = cu_seqlens.astype(np.int64)
        self._device = device
        self._total = int(cu_seqlens[-1])
        self._lengths = np.diff(self._cu_seqlens)
        self._indexes: dict[int, tuple[DeterministicGather, Tensor]] = {}
        counts = -(-self._lengths // CHUNK_TOKENS)
        widths = np.full_like(counts, CHUNK_TOKENS)
        short = self._lengths <= LONGEST_SINGLE_CHUNK
        counts[short] = 1
        widths[short] = -(-self._lengths[short] // CHUNK_LENGTH_STEP) * CHUNK_LENGTH_STEP
        self.groups: list[tuple[int, tuple[int, ...]]] = []
        self._rows: list[np.ndarray] = []
        for width in np.unique(widths[self._lengths > 0]).tolist():
            (members,) = np.nonzero((widths == width) & (self._lengths > 0))
            members = members[np.argsort(-counts[members], kind="stable")]
            steps = [members[counts[members] > j] for j in range(counts[members[0]])]
            self.groups.append((width, tuple(map(len, steps))))
            self._rows += [self._find_rows(some, j, width) for j, some in enumerate(steps)]

    def _find_rows(self, samples: np.ndarray, step: int, width: int) -> np.ndarray:
        """Return the packed row of each token of the samples' chunks at `step`, int
        `[samples, width]`.

        Behind its end a sample's first row stands in, as `-1 - row`: any finite value will do, as
        nothing depends on it.
        """
        at = step * width + np.arange(width)
        starts = self._cu_seqlens[samples, None]
        return np.where(at < self._lengths[samples, None], starts + at, -1 - starts)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each row in its sample: int64 `[N]`."""
        starts = np.repeat(self._cu_seqlens[:-1], self._lengths)
        return upload_array(np.arange(self._total) - starts, self._device)

    @cached_property
    def sample_numbers(self) -> Tensor:
        """The sample of each row: int32 `[N]`."""
        numbers = np.arange(len(self._lengths), dtype=np.int32)
        return upload_array(np.repeat(numbers, self._lengths), self._device)

    @cached_property
    def edges(self) -> Tensor:
        """The borders of the samples: int64 `[S + 1]`."""
        return upload_array(self._cu_seqlens.copy(), self._device)

    def _index_heads(self, heads: int) -> tuple[DeterministicGather, Tensor]:
        """Return the gather of `cut_chunks` and the slots of `join_chunks` for rows of that many
        heads."""
        if heads not in self._indexes:
            head = np.arange(heads)[:, None]
            parts = []
            for rows in self._rows:
                row = np.where(rows < 0, -1 - rows, rows)[:, None] * heads + head
                parts.append(np.where(rows[:, None] < 0, -1 - row, row).reshape(-1))
            index = np.concatenate(parts)
            (own,) = np.nonzero(index >= 0)
            slots = np.empty(self._total * heads, np.int64)
            slots[index[own]] = own
            gather = DeterministicGather.from_index(index, self._total * heads, self._device)
            self._indexes[heads] = gather, upload_array(slots, self._device)
        return self._indexes[heads]

    def cut_chunks(self, rows: Tensor) -> list[Tensor]:
        """Return the chunks of packed `rows [N, heads, D]`, `[chunks, heads, tokens, D]` of each
        group."""
        heads, size = rows.shape[1:]
        gather, _ = self._index_heads(heads)
        shapes = [(sum(steps), heads, width, size) for width, steps in self.groups]
        parts = gather(rows.reshape(-1, size)).split([n * h * w for n, h, w, _ in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def join_chunks(self, chunks: list[Tensor]) -> Tensor:
        """Return the packed rows of `chunks`: the reverse of `cut_chunks`."""
        heads = chunks[0].shape[1]
        size = chunks[0].shape[-1]
        parts = [chunk.reshape(-1, size) for chunk in chunks]
        padded = parts[0] if len(parts) == 1 else torch.cat(parts)
        _, slots = self._index_heads(heads)
        return padded.index_select(0, slots).view(self._total, heads, size)
