"""Micro-batches: the samples that `micro_batch_plan.py` puts together, as one sequence without
padding. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from r3async.data.supports import SupportSets
from r3async.data.tokens import Sample, SchemaError, TokenTable
from r3async.learner.micro_batch_plan import (
    CostModel,
    PackingError,
    plan_micro_batches,
    sum_lockstep_cost,
)
from r3async.learner.shared_prefixes import (
    PrefixOverlap,
    compute_size_and_cost,
    expand_prefixes,
    find_prefix_overlap,
    merge_by_prefix,
)

PARTS_PER_RANK = 4
"""Parts of a rank's work: with several ranks, families of no more than one part
are tried as well."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples laid end to end.

    Attributes:
        table: Every column of the samples, `[N]` rows.
        cu_seqlens: int32 `[S + 1]`; sample `s` is rows `cu_seqlens[s]:cu_seqlens[s + 1]`.
        temperatures: float32 `[S]`.
        sample_ids: One per sample; segments beyond them are padding, which is not trained, replays
            nothing and counts in no metric.
        prefixes: None, or int32 `[S, 2]` where samples share rows: sample `s` begins with the first
            `prefixes[s, 1]` tokens of the earlier sample `prefixes[s, 0]`, and its own rows hold
            only what follows them, at least one token.
        alternatives: None, or int64 `[A, 2]`: a row, and a token that could have followed it. Where
            rows of tokens to score are given, row `-1 - a` is alternative `a`.
    """

    table: TokenTable
    cu_seqlens: np.ndarray
    temperatures: np.ndarray
    sample_ids: tuple[str, ...]
    prefixes: np.ndarray | None = None
    alternatives: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.table)

    @property
    def num_real_tokens(self) -> int:
        """The number of rows before the padding."""
        return int(self.cu_seqlens[len(self.sample_ids)])

    @property
    def num_shared_tokens(self) -> int:
        """The number of tokens of the samples that have no row of their own."""
        return 0 if self.prefixes is None else int(self.prefixes[:, 1].sum())

    @property
    def segment_lengths(self) -> np.ndarray:
        """The number of rows that each sample has itself, without shared ones."""
        return np.diff(self.cu_seqlens)

    @property
    def positions(self) -> np.ndarray:
        """int32 `[N]`: the position of each row in its sample, 0, 1, ..."""
        begins = (
            self.cu_seqlens[:-1]
            if self.prefixes is None
            else self.cu_seqlens[:-1] - self.prefixes[:, 1]
        )
        return (np.arange(self.num_tokens) - np.repeat(begins, self.segment_lengths)).astype(
            np.int32
        )

    @property
    def first_rows(self) -> np.ndarray:
        """int `[F]`: the rows of samples' first tokens, padding left out; a sample that shares
        its first has none."""
        starts = self.cu_seqlens[: len(self.sample_ids)]
        return starts if self.prefixes is None else starts[self.prefixes[: len(starts), 1] == 0]

    @cached_property
    def expanded_samples(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the whole samples, see `expand_prefixes`."""
        if self.prefixes is None:
            return np.arange(self.num_tokens), self.cu_seqlens.astype(np.int64)
        return expand_prefixes(self.cu_seqlens, self.prefixes)

    def previous_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return int64 `[M]`: the rows of the tokens before those at `rows`, whose
        logits predict them.

        No token at `rows` may be a sample's first.
        """
        if self.alternatives is not None:
            out = np.asarray(rows, np.int64).copy()
            out[rows < 0] = self.alternatives[-1 - rows[rows < 0], 0]
            of_samples = replace(self, alternatives=None)
            out[rows >= 0] = of_samples.previous_rows(rows[rows >= 0])
            return out
        if self.prefixes is None:
            return rows - 1
        whole, edges = self.expanded_samples
        previous = np.arange(-1, self.num_tokens - 1)
        (branches,) = np.nonzero(self.prefixes[:, 1])
        previous[self.cu_seqlens[branches]] = whole[
            edges[branches] + self.prefixes[branches, 1] - 1
        ]
        return previous[rows]

    def scored_ids(self, rows: np.ndarray) -> np.ndarray:
        """Return int64 `[M]`: the tokens at `rows`, alternatives too."""
        ids = self.table["token_ids"].astype(np.int64)
        if self.alternatives is not None:
            ids = np.append(ids, self.alternatives[::-1, 1])
        return ids[rows]

    def scored_temperatures(self, rows: np.ndarray) -> np.ndarray:
        """Return float32 `[M]`: the sampling temperatures of the tokens at `rows`, alternatives
        too."""
        temperatures = self.token_temperatures
        if self.alternatives is not None:
            temperatures = np.append(temperatures, temperatures[self.alternatives[::-1, 0]])
        return temperatures[rows]

    @cached_property
    def row_multiplicity(self) -> np.ndarray | None:
        """int64 `[N]`: the number of samples that each row is a token of; None if every row
        belongs to one sample."""
        return (
            None
            if self.prefixes is None
            else np.bincount(self.expanded_samples[0], minlength=self.num_tokens)
        )

    @property
    def support(self) -> SupportSets | None:
        """The column `support` of all rows; None if the table has none."""
        table = self.table
        return table["support"] if "support" in table else None  # noqa: SIM401 - not a dictionary

    @property
    def token_temperatures(self) -> np.ndarray:
        """The sampling temperature of each row, float32 `[N]`."""
        return np.repeat(self.temperatures, self.segment_lengths)


def collate_samples(samples: Sequence[Sample], shared: np.ndarray | None = None) -> MicroBatch:
    """Return one micro-batch of all samples, in order. Raises `PackingError` naming the sample
    whose columns differ.

    `shared` int `[S]` is the number of tokens that each sample has in common with the start of the
    sample before it; it gives up its own rows for them.
    """
    try:
        table = TokenTable.concat([s.table for s in samples], shared)
    except SchemaError as error:
        names = list(samples[0].table) if samples else []
        odd = next(
            (s.sample_id for s in samples if list(s.table) != names),
            samples[0].sample_id if samples else "none",
        )
        raise PackingError(f"sample {odd}: {error}") from error
    lengths = np.asarray([len(s.table) for s in samples], np.int64) - (
        0 if shared is None else shared
    )
    return MicroBatch(
        table=table,
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        temperatures=np.asarray([s.temperature for s in samples], np.float32),
        sample_ids=tuple(s.sample_id for s in samples),
        prefixes=None
        if shared is None
        else np.stack([np.arange(len(samples)) - 1, shared], axis=1).astype(np.int32),
    )


def make_padding_batch(micro_batch: MicroBatch, tokens: int = 1) -> MicroBatch:
    """Return a micro-batch of padding only, with all columns of `micro_batch`, for a rank that has
    run out of samples."""
    m = micro_batch
    return _append_padding(
        MicroBatch(m.table.slice_rows(0, 0), np.zeros(1, np.int32), m.temperatures[:0], ()), tokens
    )


def pad_to_multiple(micro_batch: MicroBatch, multiple: int) -> MicroBatch:
    """Return the micro-batch, padded at the end to a multiple of `multiple` tokens."""
    extra = -micro_batch.num_tokens % multiple
    return _append_padding(micro_batch, extra) if extra else micro_batch


def _append_padding(micro_batch: MicroBatch, tokens: int) -> MicroBatch:
    m = micro_batch
    total = micro_batch.num_tokens + tokens
    edges = np.append(m.cu_seqlens, np.int32(total))
    temperatures = np.append(m.temperatures, np.float32(1.0))
    prefixes = (
        None if m.prefixes is None else np.append(m.prefixes, np.zeros((1, 2), np.int32), axis=0)
    )
    return MicroBatch(
        m.table.pad_to(total), edges, temperatures, m.sample_ids, prefixes, m.alternatives
    )


def pack_samples(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    whole_episodes: bool = False,
    share_prefixes: bool = False,
) -> list[MicroBatch]:
    """Pack all samples into micro-batches of at most `max_tokens` tokens, for one rank."""
    return pack_for_ranks(
        samples, max_tokens, whole_episodes=whole_episodes, share_prefixes=share_prefixes
    )[0]


def pack_for_ranks(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    ranks: int = 1,
    cost: CostModel | None = None,
    whole_episodes: bool = False,
    share_prefixes: bool = False,
) -> list[list[MicroBatch]]:
    """Pack the samples of a minibatch for the data-parallel ranks.

    Every sample is trained once, and all ranks get the same number of micro-batches. A rank that
    runs out of samples is given padding of one row, because the others wait for it in every forward
    and backward pass. Raises `PackingError` for a sample longer than `max_tokens`, or for samples
    whose columns differ.

    Args:
        whole_episodes: Keep the samples of an episode (column `episode`) in one micro-batch, if
            they fit into one.
        share_prefixes: Store rows that samples of one micro-batch have in common only once, unless
            the model keeps a state.
    """
    cost = cost or CostModel()
    units = (
        _group_by_episode(samples, max_tokens)
        if whole_episodes
        else [[i] for i in range(len(samples))]
    )
    # Or `plan_micro_batches` says which does not.
    fits = all(len(s.table) <= max_tokens for s in samples)
    shared = share_prefixes and fits and not cost.keeps_state
    likeness = find_prefix_overlap(samples) if shared else None
    if likeness is None:
        lengths = [sum(len(samples[i].table) for i in unit) for unit in units]
        planned = [
            [[i for unit in m for i in units[unit]] for m in mine]
            for mine in plan_micro_batches(lengths, max_tokens=max_tokens, ranks=ranks, cost=cost)
        ]
    else:
        planned = _plan_with_prefixes(units, likeness, max_tokens, ranks, cost)
    if not samples:
        return [[] for _ in range(ranks)]
    # Collates no rows of every sample: differing columns are found here, not when ranks
    # wait for each other.
    padding = make_padding_batch(
        collate_samples([Sample(s.sample_id, s.table.slice_rows(0, 0)) for s in samples])
    )
    return [
        [_collate_members(samples, m, likeness) if m else padding for m in mine] for mine in planned
    ]


def _collate_members(
    samples: Sequence[Sample], members: Sequence[int], likeness: PrefixOverlap | None
) -> MicroBatch:
    """Return the micro-batch of these samples, in the order in which they share most, if
    they share anything."""
    if likeness is not None:
        order, shared = likeness.sort_members(members)
        if shared.any():
            return collate_samples([samples[i] for i in order], shared)
    return collate_samples([samples[i] for i in members])


def _plan_with_prefixes(
    units: Sequence[Sequence[int]],
    likeness: PrefixOverlap,
    max_tokens: int,
    ranks: int,
    cost: CostModel,
) -> list[list[list[int]]]:
    """Return, for each rank, its micro-batches as lists of sample indices.

    Samples that share prefixes are kept together as far as that makes the step shorter. Families
    are large units that divide less evenly, so smaller ones are tried as well.
    """
    share = max(1, int(likeness.lengths.sum()) // (PARTS_PER_RANK * ranks))
    best: tuple[float, int, list[list[list[int]]]] | None = None
    for capacity in (max_tokens, min(max_tokens, share), 0) if ranks > 1 else (max_tokens,):
        joined = merge_by_prefix(units, likeness, capacity)
        sizes = [compute_size_and_cost(unit, likeness, cost) for unit in joined]
        planned = [
            [[i for unit in m for i in joined[unit]] for m in mine]
            for mine in plan_micro_batches(
                [size for size, _ in sizes],
                max_tokens=max_tokens,
                ranks=ranks,
                cost=cost,
                costs=[each for _, each in sizes],
            )
        ]
        waited = sum_lockstep_cost(
            [[compute_size_and_cost(m, likeness, cost)[1] for m in mine] for mine in planned]
        )
        if best is None or (waited, len(planned[0])) < best[:2]:
            best = waited, len(planned[0]), planned
    assert best is not None
    return best[2]


def _group_by_episode(samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
    """Return the indices of samples that stay together.

    These are the samples of an episode of at most `max_tokens` tokens; other samples stay alone.
    """
    members: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        known = "episode" in sample.table and len(sample.table)
        members.setdefault(int(sample.table["episode"][0]) if known else -1 - index, []).append(
            index
        )
    units: list[list[int]] = []
    for of in members.values():
        fits = sum(len(samples[i].table) for i in of) <= max_tokens
        units += [of] if fits else [[i] for i in of]
    return units
