"""Which samples make up which micro-batch of which data-parallel rank. Pure, and deterministic.

Ranks wait for each other in every micro-batch, so a step takes the time of the costliest micro-batch at each index:

    lockstep efficiency = total cost / (ranks · Σ_j max_r cost(micro-batch j of rank r))

How it is raised, at the least number of micro-batches that the token cap allows. A *round* is the micro-batches of all
ranks at one index; its *level* is the cost of its costliest one.

1. `levels` finds levels whose sum is the least that any plan could have: a linear programme, solved by filling up
   (see there). With a little more work to do than there is (`SLACK`), as nothing packs perfectly.
2. Rounds are filled under cap and level with the longest sample that fits, again and again: first-fit decreasing, one
   micro-batch after another (Johnson 1973), so that the micro-batches of one round are alike. The last round takes the
   rest, longest first, each to the rank with the least (LPT, Graham 1969).
3. The best of all slacks is kept. Micro-batches of a round are dealt so that the ranks' totals are near too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from r3async.data.model_shape import ShapeError, read_shape

Bin = list[int]

SLACK = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.5)
PAIRS = 24
"""Pairs of samples that are tried to fill one micro-batch to the last token, when plain first-fit needs too many."""


# -- what a sample costs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """A sample of `n` tokens costs `linear * n + quadratic * n²`, in any unit: only ratios matter."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if not (self.linear > 0 and self.quadratic >= 0):
            raise ValueError(f"`linear` must be greater than 0 and `quadratic` not negative, got {self}")

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """float64, of the shape of `lengths`."""
        n = np.asarray(lengths, np.float64)
        return (self.linear + self.quadratic * n) * n

    def longest(self, budget: float) -> float:
        """The length that costs `budget`; 0 if that is negative."""
        if budget <= 0:
            return 0.0
        # The positive root of q n² + l n - budget, in the form that is exact for q = 0 and does not cancel.
        return float(2 * budget / (self.linear + (self.linear**2 + 4 * self.quadratic * budget) ** 0.5))


def cost_model(config: Mapping[str, Any]) -> Cost:
    """FLOPs of the forward pass over one sample, from a Hugging Face `config.json`. The backward pass is twice that.

    A multiply-add is 2 FLOPs. With `h` hidden size, `a` heads, `g` key-value heads, `d_qk` and `d_v` head dimensions:

    * linear, per layer: 2 h (a d_qk + g (d_qk + d_v) + a d_v) for the projections; 2 · 3 h w for a gated feed-forward of
      width `w`, where an MoE layer has w = top_k · expert width + shared width, and 2 h · experts for its router; and once
      2 h · vocabulary for the logits. Latent attention (MLA) projects through its low ranks instead.
    * quadratic, per layer with full attention: Σ_t 2 a (d_qk + d_v) t over the t = 1..n keys that token t sees, which is
      a (d_qk + d_v) n². A layer with a sliding window sees at most the window, and is linear; so is linear attention.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), table 1, with a causal mask, active experts only, grouped-query and gated
    layers; Chowdhery et al. 2022 (arXiv 2204.02311), appendix B, counts attention without the mask. Embedding lookup, norms
    and activation functions are left out, as they are there. A configuration that names its shape otherwise costs its
    tokens: a plan is then less even, and as right.
    """
    try:
        s = read_shape(config)
    except ShapeError:
        return Cost()
    h, heads, d_qk, d_v = s.hidden, s.heads, s.qk_dim, s.value_dim
    if s.kv_rank:
        query = s.query_rank * (h + heads * d_qk) if s.query_rank else h * heads * d_qk
        projections = query + h * (s.kv_rank + s.rope_dim) + s.kv_rank * heads * (d_qk - s.rope_dim + d_v)
    else:
        projections = h * (heads * d_qk + s.kv_heads * (d_qk + d_v))
    projections += h * heads * d_v
    moe, dense = 3 * h * s.expert_width * s.top_k + s.router, s.dense
    mixtures = len(s.moe_layers)
    weights = s.layers * projections + mixtures * moe + (s.layers - mixtures) * dense + s.embedding
    attention = heads * (d_qk + d_v)
    return Cost(linear=2.0 * (weights + attention * s.windows), quadratic=float(attention * s.full_layers))


# -- which samples are trained together ---------------------------------------------------------------------------------


class PackingError(ValueError):
    """Samples that cannot be packed as asked."""


def plan(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    ranks: int = 1,
    cost: Cost | None = None,
) -> list[list[Bin]]:
    """For each rank its micro-batches, each a list of indices into `lengths`, at most `max_tokens` tokens together.

    Every index is in one micro-batch. All ranks have the same number of them, some perhaps empty, costliest first.

    The wait at each micro-batch is as short as can be found (see the module), with as few micro-batches as can be found.
    Raises `PackingError` if one sample alone is longer than `max_tokens`.
    """
    if ranks < 1:
        raise ValueError(f"`ranks` must be 1 or more, got {ranks}")
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(sizes, kind="stable")
    if len(sizes) and sizes[order[-1]] > max_tokens:
        index = int(order[-1])
        raise PackingError(
            f"sample {index} has {lengths[index]} tokens, more than learner.max_tokens_per_micro_batch = {max_tokens}: "
            "raise that, or lower episode.max_total_tokens"
        )
    work = _Work(sizes[order], max_tokens, ranks, cost or Cost())
    return [[sorted(order[m].tolist()) for m in mine] for mine in work.in_lockstep()]


def levels(lengths: np.ndarray, *, max_tokens: int, ranks: int, count: int, cost: Cost, work: float) -> np.ndarray:
    """float64 `[count]`: the levels with the least sum under which micro-batches of cost `work` in all might exist.

    Let y_1 >= y_2 >= ... be the costs of a plan's micro-batches. The i-th of them holds no more than `u_i`, the cost of a
    full one whose longest sample is the i-th longest of all (its quadratic part is convex, so greatest if the other samples
    are as long as they may be); and no less than the i-th longest sample where that is over half the cap, as no two of
    those are together. The levels of any plan are, sorted, at least M_j = y_{j · ranks}, so

        Σ_j Σ_r min(M_j, u_{j · ranks + r}) >= work,    M_j >= cost of that single sample,

    and the least Σ_j M_j under this is a bound on every plan. Each sum over r is concave in M_j, with a slope of the number
    of micro-batches that can still follow: so levels are raised where most can, until the work is done. What is asked
    for beyond the most possible is not done.
    """
    n = np.sort(np.asarray(lengths, np.float64))[::-1][: count * ranks]
    alone, rest = cost.of(n), max_tokens - n
    crowded = 2 * n <= max_tokens
    most = cost.linear * max_tokens + cost.quadratic * np.where(crowded, n * max_tokens, n**2 + rest**2)
    least = np.where(crowded, 0.0, alone)
    least[:1] = alone[:1]
    missing = (0, count * ranks - len(n))
    level = np.pad(least, missing)[::ranks].copy()
    caps = np.pad(most, missing).reshape(count, ranks)

    need = work - np.minimum(level[:, None], caps).sum()
    steps = np.diff(np.sort(np.maximum(caps, level[:, None]), axis=1), axis=1, prepend=level[:, None])
    for r in range(ranks):
        follow = ranks - r
        gain = follow * steps[:, r].sum()
        if gain >= need:
            return level + steps[:, r] * (max(need, 0.0) / gain if gain else 0.0)
        level += steps[:, r]
        need -= gain
    return level


class _Pool:
    """Samples that are not placed yet. A sample is its position in `lengths`, which are ascending."""

    def __init__(self, lengths: list[int]):
        self._length_of = lengths
        self.lengths, self.samples = lengths.copy(), list(range(len(lengths)))

    def take(self, limit: float) -> int | None:
        """Remove the longest that is not longer than `limit`."""
        at = bisect_right(self.lengths, limit) - 1
        return self._remove(at) if at >= 0 else None

    def put_back(self, sample: int) -> None:
        at = bisect_left(self.samples, sample)
        self.samples.insert(at, sample)
        self.lengths.insert(at, self._length_of[sample])

    def take_pair(self, free: int, slack: int) -> list[int]:
        """Remove two that leave less than `slack` of `free`: the best of about `PAIRS` tried, or none."""
        best: tuple[int, ...] = ()
        end = bisect_right(self.lengths, free // 2)
        for short in range(0, end, max(1, end // PAIRS)):
            long = bisect_right(self.lengths, free - self.lengths[short]) - 1
            left = free - self.lengths[short] - self.lengths[long]
            if long > short and left < slack:
                best, slack = (long, short), left
        return [self._remove(at) for at in best]

    def _remove(self, at: int) -> int:
        del self.lengths[at]
        return self.samples.pop(at)


class _Work:
    """One step's samples, sorted by length, and the ways to divide them."""

    def __init__(self, lengths: np.ndarray, max_tokens: int, ranks: int, cost: Cost):
        self.sorted, self.max_tokens, self.ranks, self.cost = lengths, max_tokens, ranks, cost
        self.lengths: list[int] = lengths.tolist()
        self.costs: list[float] = cost.of(lengths).tolist()
        self.total = sum(self.costs)

    def in_lockstep(self) -> list[list[Bin]]:
        bins = self.fewest()
        if self.ranks == 1:
            return [sorted(bins, key=self.of, reverse=True)]
        packed = self.in_rounds(bins)
        found = [self.under(self.levels(len(packed), slack)) for slack in SLACK if packed]
        # Of equals the first: one under levels is even where first-fit leaves ranks empty.
        return self.dealt(min([r for r in found if r is not None] + [packed], key=self.waited))

    def levels(self, count: int, slack: float) -> list[float]:
        work = self.total * (1 + slack)
        return levels(
            self.sorted, max_tokens=self.max_tokens, ranks=self.ranks, count=count, cost=self.cost, work=work
        ).tolist()

    def of(self, members: Bin) -> float:
        return sum(self.costs[s] for s in members)

    def waited(self, rounds: list[list[Bin]]) -> float:
        return sum(max(self.of(m) for m in bins) for bins in rounds)

    def fewest(self) -> list[Bin]:
        """All samples in as few micro-batches as first-fit decreasing needs, or an exact fit if that spares a round."""
        bins = self.all_filled(exact=False)
        possible = max(-(-sum(self.lengths) // self.max_tokens), sum(2 * n > self.max_tokens for n in self.lengths))
        if -(-len(bins) // self.ranks) > -(-possible // self.ranks):
            bins = min(bins, self.all_filled(exact=True), key=len)
        return bins

    def all_filled(self, *, exact: bool) -> list[Bin]:
        pool, bins = _Pool(self.lengths), []
        while pool.samples:
            bins.append(self.filled(pool, exact=exact))
        return bins

    def filled(self, pool: _Pool, level: float = np.inf, *, exact: bool = False) -> Bin:
        """A micro-batch of the longest sample in the pool, then always the longest one that fits under cap and `level`.

        With `exact` the last one may be replaced by two that leave fewer tokens free: small samples are what gaps are filled
        with, and too good for leaving gaps.
        """
        members: Bin = []
        free, limit = self.max_tokens, float(self.max_tokens)
        while (sample := pool.take(limit)) is not None:
            members.append(sample)
            free -= self.lengths[sample]
            level -= self.costs[sample]
            limit = min(free, self.cost.longest(level)) if level < np.inf else free
        if exact and free and len(members) > 1:
            pair = pool.take_pair(free + self.lengths[members[-1]], free)
            if pair:
                pool.put_back(members.pop())
                members += pair
        return members

    def in_rounds(self, bins: list[Bin]) -> list[list[Bin]]:
        """Micro-batches of near cost at the same index; empty ones make up for what is missing."""
        bins = sorted(bins, key=self.of, reverse=True)
        bins += [[] for _ in range(-len(bins) % self.ranks)]
        return [bins[i : i + self.ranks] for i in range(0, len(bins), self.ranks)]

    def under(self, least: list[float]) -> list[list[Bin]] | None:
        """All samples in rounds under these levels, the last of which is what it turns out to be; None if they do not fit."""
        pool, rounds = _Pool(self.lengths), []
        for level in least[:-1]:
            # The longest sample that is left has to go somewhere.
            level = max(level, self.costs[pool.samples[-1]] if pool.samples else 0.0)
            rounds.append([self.filled(pool, level) for _ in range(self.ranks)])
        last = self.spread(pool)
        if last is not None:
            return [*rounds, last]
        rounds.append([self.filled(pool) for _ in range(self.ranks)])
        return None if pool.samples else rounds

    def spread(self, pool: _Pool) -> list[Bin] | None:
        """What is in the pool in one micro-batch per rank, longest sample first, each to the rank with the least cost of those
        with capacity for it. None if one fits nowhere."""
        divided: list[Bin] = [[] for _ in range(self.ranks)]
        free = [self.max_tokens] * self.ranks
        loads = [(0.0, rank) for rank in range(self.ranks)]  # a heap
        shortest = pool.lengths[0] if pool.lengths else 0
        for sample in reversed(pool.samples):
            length, full = self.lengths[sample], []
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

    def dealt(self, rounds: list[list[Bin]]) -> list[list[Bin]]:
        """Each round's micro-batches among the ranks, the costliest to the rank with the least so far. Costliest round
        first: memory that does not suffice is then found out at once."""
        divided: list[list[Bin]] = [[] for _ in range(self.ranks)]
        totals = [0.0] * self.ranks
        for bins in sorted(rounds, key=lambda bins: max(self.of(m) for m in bins), reverse=True):
            idle_first = sorted(range(self.ranks), key=totals.__getitem__)
            for rank, members in zip(idle_first, sorted(bins, key=self.of, reverse=True), strict=True):
                divided[rank].append(members)
                totals[rank] += self.of(members)
        return divided
