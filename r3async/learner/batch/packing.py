"""Samples packed into micro-batches of at most a given number of tokens, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from r3async.data.records import Sample, SchemaError, TokenTable
from r3async.learner.batch.planner import Cost, PackingError, plan


@dataclass(frozen=True)
class MicroBatch:
    """Samples laid end to end.

    `table`: every column of the samples, `[N]` rows. `cu_seqlens`: int32 `[S + 1]`, sample `s` is rows
    `cu_seqlens[s]:cu_seqlens[s + 1]`. `temperatures`: float32 `[S]`. `sample_ids`: one per sample; segments beyond them are
    padding, which trains nothing, replays nothing and is in no metric.
    """

    table: TokenTable
    cu_seqlens: np.ndarray
    temperatures: np.ndarray
    sample_ids: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return len(self.table)

    @property
    def real_tokens(self) -> int:
        """Rows before the padding."""
        return int(self.cu_seqlens[len(self.sample_ids)])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.cu_seqlens)

    @property
    def positions(self) -> np.ndarray:
        """int32 `[N]`: 0, 1, ... within each sample."""
        return (np.arange(self.tokens) - np.repeat(self.cu_seqlens[:-1], self.lengths)).astype(np.int32)

    @property
    def token_temperatures(self) -> np.ndarray:
        """float32 `[N]`."""
        return np.repeat(self.temperatures, self.lengths)


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """One micro-batch of all samples, in order. Raises `PackingError` naming the sample whose columns differ."""
    try:
        table = TokenTable.concat([s.table for s in samples])
    except SchemaError as error:
        names = list(samples[0].table) if samples else []
        odd = next(
            (s.sample_id for s in samples if list(s.table) != names), samples[0].sample_id if samples else "none"
        )
        raise PackingError(f"sample {odd}: {error}") from error
    lengths = [len(s.table) for s in samples]
    return MicroBatch(
        table=table,
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        temperatures=np.asarray([s.temperature for s in samples], np.float32),
        sample_ids=tuple(s.sample_id for s in samples),
    )


def padding_like(micro_batch: MicroBatch, tokens: int = 1) -> MicroBatch:
    """A micro-batch of nothing but padding, for a rank that has run out of samples: every column that `micro_batch` has."""
    m = micro_batch
    return _with_padding(MicroBatch(m.table.slice(0, 0), np.zeros(1, np.int32), m.temperatures[:0], ()), tokens)


def aligned(micro_batch: MicroBatch, multiple: int) -> MicroBatch:
    """The micro-batch with padding behind it, up to a multiple of `multiple` tokens."""
    extra = -micro_batch.tokens % multiple
    return _with_padding(micro_batch, extra) if extra else micro_batch


def _with_padding(micro_batch: MicroBatch, tokens: int) -> MicroBatch:
    m, total = micro_batch, micro_batch.tokens + tokens
    edges, temperatures = np.append(m.cu_seqlens, np.int32(total)), np.append(m.temperatures, np.float32(1.0))
    return MicroBatch(m.table.padded(total), edges, temperatures, m.sample_ids)


def pack(samples: Sequence[Sample], max_tokens: int, *, whole_episodes: bool = False) -> list[MicroBatch]:
    """All samples in micro-batches of at most `max_tokens` tokens, for one rank."""
    return pack_for_ranks(samples, max_tokens, whole_episodes=whole_episodes)[0]


def pack_for_ranks(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    ranks: int = 1,
    cost: Cost | None = None,
    whole_episodes: bool = False,
) -> list[list[MicroBatch]]:
    """What each data-parallel rank trains: every sample once, and the same number of micro-batches for all.

    With `whole_episodes` the samples of an episode (column `episode`) are in one micro-batch, if they fit into one.
    A rank that runs out is given padding of one row, because the others wait for it in every forward and backward pass.
    Raises `PackingError` for a sample longer than `max_tokens`, or for samples whose columns differ.
    """
    units = _episodes(samples, max_tokens) if whole_episodes else [[i] for i in range(len(samples))]
    planned = plan(
        [sum(len(samples[i].table) for i in unit) for unit in units], max_tokens=max_tokens, ranks=ranks, cost=cost
    )
    if not samples:
        return [[] for _ in range(ranks)]
    # No rows of every sample: that all have the same columns is found out here, not when ranks wait for each other.
    padding = padding_like(collate([Sample(s.sample_id, s.table.slice(0, 0)) for s in samples]))
    return [
        [collate([samples[i] for unit in m for i in units[unit]]) if m else padding for m in mine] for mine in planned
    ]


def _episodes(samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
    """Indices of samples that stay together: those of an episode of at most `max_tokens` tokens; others each alone."""
    members: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        known = "episode" in sample.table and len(sample.table)
        members.setdefault(int(sample.table["episode"][0]) if known else -1 - index, []).append(index)
    units: list[list[int]] = []
    for of in members.values():
        fits = sum(len(samples[i].table) for i in of) <= max_tokens
        units += [of] if fits else [[i] for i in of]
    return units
