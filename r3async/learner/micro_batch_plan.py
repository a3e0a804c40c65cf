"""The plan: which samples go into which micro-batch of which data-parallel rank. Pure.

Ranks wait for each other in every micro-batch, so a step takes the time of the costliest
micro-batch at each index:

lockstep efficiency = total cost / (ranks · Σ_j max_r cost(micro-batch j of rank r))

The planner raises it, using the fewest micro-batches that the token cap allows. A *round* is the
micro-batches of all ranks at one index; its *level* is the cost of its costliest one.

1. `find_round_levels` finds levels whose sum is the least that any plan could have: a linear
   programme, solved by filling up (see there). It plans for slightly more work than there is
   (`LEVEL_SLACKS`), as nothing packs perfectly.
2. Rounds are filled under cap and level, each time with the longest sample that fits: first-fit
   decreasing, one micro-batch after another (Johnson 1973), so that the micro-batches of one round
   are alike. The last round takes the rest, longest first, each to the rank with the least (LPT,
   Graham 1969).
3. Two simpler plans are made as well: all micro-batches of first-fit decreasing in order of cost,
   and ranks that are balanced first and packed one by one (`apart`), which is best where many
   samples are cut at the same length.
4. The plan with the shortest wait is kept. A plan is abandoned as soon as it cannot be the best:
   its wait so far exceeds the total wait of the best plan, less the remaining work in equal shares.
   Micro-batches of a round are assigned so that the ranks' totals are close, too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np

from r3async.data.model_shape import ModelShapeError, parse_model_shape

Bin = list[int]

LEVEL_SLACKS = (0.03, 0.08, 0.01, 0.05, 0.0, 0.02, 0.12, 0.2, 0.5)
"""Relative slacks of the levels, ordered by gain with many samples. The more samples, the less
the choice matters."""
PLANNING_BUDGET = 20_000
"""Number of samples and micro-batches that are packed under levels in one plan, over all slacks."""
EXACT_FIT_ROUNDS = 200
"""Number of rounds from which on no exact fit is tried: one round saved is then less
than half a percent."""
MAX_PAIRS = 24
"""Number of pairs of samples tried to fill one micro-batch to the last token, when plain
first-fit needs too many."""


# -- the cost of a sample --------------------------------------------------------------------------


@dataclass(frozen=True)
class CostModel:
    """The cost of a sample of `n` tokens, `linear * n + quadratic * n²`, in any unit:
    only ratios matter."""

    linear: float = 1.0
    quadratic: float = 0.0
    keeps_state: bool = False
    """True for a model with layers that keep a state: its samples cannot share a prefix."""

    def __post_init__(self) -> None:
        if not (self.linear > 0 and self.quadratic >= 0):
            raise ValueError(
                f"`linear` must be greater than 0 and `quadratic` not negative, got {self}"
            )

    def estimate_costs(self, lengths: np.ndarray) -> np.ndarray:
        """Return the costs of samples of these lengths: float64, in the shape of `lengths`."""
        n = np.asarray(lengths, np.float64)
        return (self.linear + self.quadratic * n) * n


def build_cost_model(config: Mapping[str, Any]) -> CostModel:
    """Return the FLOPs of the forward pass over one sample as a cost model, from a Hugging
    Face `config.json`.

    The backward pass takes twice as many. A multiply-add is 2 FLOPs. With `h` hidden size, `a`
    heads, `g` key-value heads, `d_qk` and `d_v` head dimensions:

    * linear, per layer: 2 h (a d_qk + g (d_qk + d_v) + a d_v) for the projections; 2 · 3 h w for a
      gated feed-forward of width `w`, where an MoE layer has w = top_k · expert width + shared
      width, and 2 h · experts for its router; and once 2 h · vocabulary for the logits. Latent
      attention (MLA) projects through its low ranks instead.
    * quadratic, per layer with full attention: Σ_t 2 a (d_qk + d_v) t over the t = 1..n keys that
      token t sees, which is a (d_qk + d_v) n². A layer with a sliding window sees at most the
      window, and is linear. A layer that keeps a state counts by its parameters.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), table 1, with a causal mask, active experts only,
    grouped-query and gated layers; Chowdhery et al. 2022 (arXiv 2204.02311), appendix B, counts
    attention without the mask. Embedding lookup, norms and activation functions are left out, as in
    these sources. If a configuration describes its shape in another way, the cost is the number of
    tokens: a plan is then less even, but just as correct.
    """
    try:
        s = parse_model_shape(config)
    except ModelShapeError:
        return CostModel()
    h = s.hidden_size
    heads = s.num_heads
    d_qk = s.qk_dim
    d_v = s.value_dim
    if s.kv_rank:
        query = s.query_rank * (h + heads * d_qk) if s.query_rank else h * heads * d_qk
        projections = (
            query + h * (s.kv_rank + s.rope_dim) + s.kv_rank * heads * (d_qk - s.rope_dim + d_v)
        )
    else:
        projections = h * (heads * d_qk + s.num_kv_heads * (d_qk + d_v))
    projections += h * heads * d_v
    moe = s.matrices_per_expert * h * s.expert_width * s.top_k + s.router_parameters
    weights = (
        len(s.attention_layers) * projections
        + len(s.recurrent_layers) * s.recurrent_mixer.parameters
        + len(s.moe_layers) * moe
        + len(s.dense_layers) * s.mlp_parameters
        + s.embedding_parameters
    )
    attention = heads * (d_qk + d_v)
    return CostModel(
        linear=2.0 * (weights + attention * s.window_tokens),
        quadratic=float(attention * s.full_attention_layers),
        keeps_state=bool(s.recurrent_layers),
    )


# -- the plan of micro-batches ---------------------------------------------------------------------


class PackingError(ValueError):
    """An error for samples that cannot be packed as requested."""


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    ranks: int = 1,
    cost: CostModel | None = None,
    costs: Sequence[float] | None = None,
) -> list[list[Bin]]:
    """Return, for each rank, its micro-batches as lists of indices into `lengths`.

    A micro-batch has at most `max_tokens` tokens. Every index is in one micro-batch. All ranks have
    the same number of micro-batches, costliest first; some may be empty. The wait at each
    micro-batch is as short as the planner can make it (see the head of the file), with as few
    micro-batches as it can find.

    `costs` are the costs of the samples, if they are not what `cost` gives for their lengths.
    Raises `PackingError` if one sample alone is longer than `max_tokens`.
    """
    if ranks < 1:
        raise ValueError(f"`ranks` must be 1 or more, got {ranks}")
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(sizes, kind="stable")
    if len(sizes) and sizes[order[-1]] > max_tokens:
        index = int(order[-1])
        raise PackingError(
            f"sample {index} has {lengths[index]} tokens, more than "
            f"learner.max_tokens_per_micro_batch = {max_tokens}: raise that, or lower "
            "episode.max_total_tokens"
        )
    cost = cost or CostModel()
    each = cost.estimate_costs(sizes) if costs is None else np.asarray(costs, np.float64)
    work = _StepPlanner(sizes[order], each[order], max_tokens, ranks, cost)
    of = order.tolist()
    return [[sorted([of[s] for s in m]) for m in mine] for mine in work.plan_lockstep()]


def sum_lockstep_cost(costs: Sequence[Sequence[float]]) -> float:
    """Return the total cost that the ranks wait for, given the cost of each
    micro-batch of each rank."""
    return float(sum(max(of_rank) for of_rank in zip(*costs, strict=True)))


def find_round_levels(
    lengths: np.ndarray,
    *,
    max_tokens: int,
    ranks: int,
    count: int,
    cost: CostModel,
    total_cost: float,
) -> np.ndarray:
    """Return float64 `[count]`: the levels with the least sum that micro-batches of cost
    `total_cost` in all allow.

    Let y_1 >= y_2 >= ... be the costs of a plan's micro-batches. The i-th of them holds no more
    than `u_i`, the cost of a full one whose longest sample is the i-th longest of all (its
    quadratic part is convex, so greatest if the other samples are as long as they may be); and no
    less than the i-th longest sample where that is over half the cap, as no two of those are
    together. The levels of any plan are, sorted, at least M_j = y_{j · ranks}, so

        Σ_j Σ_r min(M_j, u_{j · ranks + r}) >= total_cost,    M_j >= cost of that single sample,

    and the least Σ_j M_j under this is a bound on every plan. Each sum over r is concave in M_j,
    with a slope of the number of micro-batches that can still follow: so levels are raised where
    most can, until the work is done. Work beyond the most possible is left undone.
    """
    n = np.sort(np.asarray(lengths, np.float64))[::-1][: count * ranks]
    alone = cost.estimate_costs(n)
    rest = max_tokens - n
    crowded = 2 * n <= max_tokens
    most = cost.linear * max_tokens + cost.quadratic * np.where(
        crowded, n * max_tokens, n**2 + rest**2
    )
    least = np.where(crowded, 0.0, alone)
    least[:1] = alone[:1]
    missing = (0, count * ranks - len(n))
    level = np.pad(least, missing)[::ranks].copy()
    caps = np.pad(most, missing).reshape(count, ranks)

    need = total_cost - np.minimum(level[:, None], caps).sum()
    steps = np.diff(
        np.sort(np.maximum(caps, level[:, None]), axis=1), axis=1, prepend=level[:, None]
    )
    for r in range(ranks):
        follow = ranks - r
        gain = follow * steps[:, r].sum()
        if gain >= need:
            return level + steps[:, r] * (max(need, 0.0) / gain if gain else 0.0)
        level += steps[:, r]
        need -= gain
    return level


class _SamplePool:
    """The samples that are not placed yet, found by length in nearly constant time.

    `samples` ascend in length. `_below[i + 1]` leads, over some steps, to `j + 1` of the last
    sample `j <= i` that is left (disjoint sets with path halving, Tarjan & van Leeuwen 1984).
    """

    def __init__(self, samples: list[int], lengths: list[int], costs: list[float]):
        self.samples = samples
        self.lengths = [lengths[s] for s in samples]
        self.costs = [costs[s] for s in samples]
        self._below = list(range(len(samples) + 1))

    def find_last(self, end: int) -> int:
        """Return the index of the last sample left before `end`, or -1."""
        below = self._below
        while below[end] != end:
            below[end] = end = below[below[end]]
        return end - 1

    def find_fitting(self, free: int, level: float, end: int) -> int:
        """Return the index, below `end`, of the longest sample within `free` tokens and
        cost `level`; or -1."""
        end = bisect_right(self.lengths, free, 0, end)
        return self.find_last(end if level == np.inf else bisect_right(self.costs, level, 0, end))

    def list_remaining(self) -> list[int]:
        """Return the samples that are left, in order of length."""
        return [s for i, s in enumerate(self.samples, 1) if self._below[i] == i]

    def remove(self, indices: Iterable[int]) -> None:
        for at in indices:
            self._below[at + 1] = at

    def find_pair(self, free: int, slack: int, excluded: int) -> tuple[int, ...]:
        """Return the indices of two samples, neither of them `excluded`, that leave less than
        `slack` of `free`.

        They are the best of about `MAX_PAIRS` tried; the result is empty if none fits.
        """
        best: tuple[int, ...] = ()
        end = bisect_right(self.lengths, free // 2)
        for start in range(end, 0, -max(1, end // MAX_PAIRS)):
            short = self.find_last(start)
            if short >= 0 and short != excluded:
                long = self.find_fitting(free - self.lengths[short], np.inf, len(self.samples))
                long = self.find_last(long) if long == excluded else long
                left = free - self.lengths[short] - self.lengths[long]
                if long > short and left < slack:
                    best = (long, short)
                    slack = left
        return best


class _StepPlanner:
    """One step's samples, sorted by length, and the ways to divide them."""

    def __init__(
        self, lengths: np.ndarray, costs: np.ndarray, max_tokens: int, ranks: int, cost: CostModel
    ):
        self.sorted_lengths = lengths
        self.max_tokens = max_tokens
        self.ranks = ranks
        self.cost = cost
        self.lengths: list[int] = lengths.tolist()
        self.costs: list[float] = costs.tolist()
        # Costs are searched like lengths: no sample has a higher ceiling than a longer one.
        self._cost_ceilings: list[float] = np.maximum.accumulate(costs).tolist()
        self.total_cost = sum(self.costs)

    def plan_lockstep(self) -> list[list[Bin]]:
        bins = self.pack_fewest()
        if self.ranks == 1:
            return [sorted(bins, key=self.bin_cost, reverse=True)]
        packed = self.arrange_rounds(bins)
        apart = self.pack_ranks_separately()
        # Ties go to the lower number: a plan under levels is even where first-fit
        # leaves ranks empty.
        best = min((self.lockstep_cost(packed), 1, packed), (self.lockstep_cost(apart), 2, apart))
        for slack in (
            LEVEL_SLACKS[: max(1, PLANNING_BUDGET // (len(self.lengths) + len(bins)))]
            if bins
            else ()
        ):
            found = self.pack_under_levels(self.find_levels(len(packed), slack), limit=best[0])
            if found is not None:
                best = min(best, (self.lockstep_cost(found), 0, found), key=itemgetter(0, 1))
        return self.assign_to_ranks(best[2])

    def find_levels(self, count: int, slack: float) -> list[float]:
        work = self.total_cost * (1 + slack)
        return find_round_levels(
            self.sorted_lengths,
            max_tokens=self.max_tokens,
            ranks=self.ranks,
            count=count,
            cost=self.cost,
            total_cost=work,
        ).tolist()

    def bin_cost(self, members: Bin) -> float:
        return sum([self.costs[s] for s in members])

    def lockstep_cost(self, rounds: list[list[Bin]]) -> float:
        return sum(max(map(self.bin_cost, bins)) for bins in rounds)

    def pack_fewest(self) -> list[Bin]:
        """Pack all samples into as few micro-batches as first-fit decreasing needs.

        Use an exact fit instead, if it saves a round and there are few.
        """
        bins = self.fill_all(self.make_pool())
        possible = max(
            -(-sum(self.lengths) // self.max_tokens),
            sum(2 * n > self.max_tokens for n in self.lengths),
        )
        if EXACT_FIT_ROUNDS > -(-len(bins) // self.ranks) > -(-possible // self.ranks):
            bins = min(bins, self.fill_all(self.make_pool(), exact=True), key=len)
        return bins

    def make_pool(self, samples: Iterable[int] | None = None) -> _SamplePool:
        """Return a pool of all samples, or of some, in ascending order."""
        return _SamplePool(
            list(range(len(self.lengths)) if samples is None else samples),
            self.lengths,
            self._cost_ceilings,
        )

    def fill_all(self, pool: _SamplePool, *, exact: bool = False) -> list[Bin]:
        bins = []
        while members := self.fill_bin(pool, exact=exact):
            bins.append(members)
        return bins

    def fill_bin(self, pool: _SamplePool, level: float = np.inf, *, exact: bool = False) -> Bin:
        """Fill a micro-batch: the longest sample in the pool, then always the longest that fits
        cap and `level`.

        With `exact`, the last one may be replaced by two that leave fewer tokens free: gaps are
        filled with small samples, which are too useful to leave gaps with.
        """
        found: list[int] = []  # descending indices in the pool
        free = self.max_tokens
        end = len(pool.samples)
        while (end := pool.find_fitting(free, level, end)) >= 0:
            found.append(end)
            free -= pool.lengths[end]
            level -= pool.costs[end]
        pool.remove(found[:-1])
        pair = (
            pool.find_pair(free + pool.lengths[found[-1]], free, excluded=found[-1])
            if exact and free and found[1:]
            else ()
        )
        found[-1:] = pair or found[-1:]
        pool.remove(found[-1 - bool(pair) :])
        return [pool.samples[i] for i in found]

    def arrange_rounds(self, bins: list[Bin]) -> list[list[Bin]]:
        """Put micro-batches of similar cost at the same index, and add empty ones to
        complete the last round."""
        bins = sorted(bins, key=self.bin_cost, reverse=True)
        bins += [[] for _ in range(-len(bins) % self.ranks)]
        return [bins[i : i + self.ranks] for i in range(0, len(bins), self.ranks)]

    def pack_ranks_separately(self) -> list[list[Bin]]:
        """Divide samples among the ranks for equal cost (LPT); pack each rank's first-fit
        decreasing, costliest first."""
        mine: list[list[int]] = [[] for _ in range(self.ranks)]
        loads = [(0.0, rank) for rank in range(self.ranks)]  # a heap
        for sample in range(len(self.lengths) - 1, -1, -1):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + self.costs[sample], rank))
            mine[rank].append(sample)
        packed = [
            sorted(self.fill_all(self.make_pool(own[::-1])), key=self.bin_cost, reverse=True)
            for own in mine
        ]
        return [list(bins) for bins in zip_longest(*packed, fillvalue=[])]

    def pack_under_levels(self, levels: list[float], limit: float) -> list[list[Bin]] | None:
        """Pack all samples in rounds under these levels, where the last round takes the rest.

        Returns None if they do not fit, or if the ranks wait longer than `limit`.
        """
        pool = self.make_pool()
        rounds = []
        waited = 0.0
        rest = self.total_cost
        for level in levels[:-1]:
            # The longest remaining sample must fit into some round.
            longest = pool.find_last(len(self.lengths))
            level = max(level, self._cost_ceilings[longest] if longest >= 0 else 0.0)
            rounds.append([self.fill_bin(pool, level) for _ in range(self.ranks)])
            done = [self.bin_cost(m) for m in rounds[-1]]
            waited = waited + max(done)
            rest = rest - sum(done)
            if waited + rest / self.ranks > limit * (1 + 1e-12):
                return None
        last = self.fill_last_round(pool)
        if last is not None:
            return [*rounds, last]
        rounds.append([self.fill_bin(pool) for _ in range(self.ranks)])
        return None if pool.list_remaining() else rounds

    def fill_last_round(self, pool: _SamplePool) -> list[Bin] | None:
        """Divide the pool into one micro-batch per rank.

        The longest sample comes first, and each goes to the rank with the least cost that has
        capacity for it. Returns None if a sample fits nowhere.
        """
        divided: list[Bin] = [[] for _ in range(self.ranks)]
        free = [self.max_tokens] * self.ranks
        loads = [(0.0, rank) for rank in range(self.ranks)]  # a heap
        samples = pool.list_remaining()
        shortest = self.lengths[samples[0]] if samples else 0
        for sample in reversed(samples):
            length = self.lengths[sample]
            full = []
            while loads and free[loads[0][1]] < length:
                full.append(heapq.heappop(loads))
            if not loads:
                return None
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + self.costs[sample], rank))
            free[rank] -= length
            divided[rank].append(sample)
            for entry in full:
                if free[entry[1]] >= shortest:
                    heapq.heappush(loads, entry)
        return divided

    def assign_to_ranks(self, rounds: list[list[Bin]]) -> list[list[Bin]]:
        """Assign each round's micro-batches to the ranks.

        The costliest goes to the rank with the least so far. The costliest round comes first, so
        that insufficient memory shows at once.
        """
        divided: list[list[Bin]] = [[] for _ in range(self.ranks)]
        totals = [0.0] * self.ranks
        costed = [
            sorted(
                zip(map(self.bin_cost, bins), bins, strict=True), key=itemgetter(0), reverse=True
            )
            for bins in rounds
        ]
        for bins in sorted(costed, key=lambda bins: bins[0][0], reverse=True):
            idle_first = sorted(range(self.ranks), key=totals.__getitem__)
            for rank, (cost, members) in zip(idle_first, bins, strict=True):
                divided[rank].append(members)
                totals[rank] += cost
        return divided
