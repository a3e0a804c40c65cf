"""One minibatch on one rank: which of its tokens are trained, with which denominators, and the loss of each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from r3async.config import Config
from r3async.learner import LearnerError, RouteTrace
from r3async.learner.backend import ALONE, Ranks
from r3async.learner.batch.packing import MicroBatch
from r3async.learner.figures import DRIFT_ROWS, ObjectiveSums, drift_sums
from r3async.learner.losses.objective import TokenBatch, objective, takes_episodes
from r3async.learner.optimizer import Cause
from r3async.learner.replay import MicroBatchRoutes
from r3async.learner.scattered import Columns, gathered, joined, of_episodes, spread


class TokenCounts(NamedTuple):
    """Of one micro-batch, or of a minibatch over all ranks: numbers of tokens, but for the last.

    `trained`. `recorded`: trained ones whose input, the token before, has recorded routes. `credited`: those with an advantage
    that is not 0. `dropped`: to be trained, but for a rollout log-prob that is not finite. `fed`: of all samples, of which
    `fed_recorded` have recorded routes, and `shared` have no row of their own but
    another sample's. `micro_batches`: those that are not padding only.
    """

    trained: float
    recorded: float
    credited: float
    dropped: float
    fed: float
    fed_recorded: float
    shared: float
    micro_batches: float

    @property
    def recorded_fraction(self) -> float:
        return self.recorded / max(self.trained, 1.0)

    @property
    def recorded_fraction_fed(self) -> float:
        return self.fed_recorded / max(self.fed, 1.0)


@dataclass(frozen=True)
class TrainedTokens:
    """Which rows of one micro-batch are trained.

    `rows` int64 `[M]`: trained tokens. `episodes` int64 `[M]`: the number in the
    minibatch of the episode that each is of; without the column `episode` each sample is an episode by itself: -1 for the
    first of them, -2, ... `places` int `[M]`: their numbers in the minibatch; empty without the column `place`.
    """

    rows: np.ndarray
    episodes: np.ndarray
    places: np.ndarray
    counts: TokenCounts


def trained_tokens(micro_batch: MicroBatch) -> TrainedTokens:
    """Raises `LearnerError` if the first token of a sample, which nothing predicts, is to be trained, if the column
    `advantages` is missing, or if a trained token has no episode though others have."""
    table = micro_batch.table
    wanted = table["loss_mask"]
    starts = micro_batch.firsts
    if wanted[starts].any():
        first = int(starts[np.flatnonzero(wanted[starts])[0]])
        sample = micro_batch.sample_ids[int(np.searchsorted(micro_batch.cu_seqlens, first, side="right")) - 1]
        raise LearnerError(f"sample {sample}: its first token is to be trained, but nothing predicts a first token")
    if "advantages" not in table:
        raise LearnerError(f"sample {micro_batch.sample_ids[0]}: column 'advantages' is missing")
    finite = np.isfinite(table["rollout_logprobs"])
    rows = np.flatnonzero(wanted & finite)
    episodes = -np.searchsorted(micro_batch.cu_seqlens, rows, side="right")
    if "episode" in table:
        episodes = table["episode"][rows].astype(np.int64)
        if (episodes < 0).any():
            raise LearnerError(
                "column 'episode' is -1 at a trained token: number the episodes of a minibatch 0, 1, ..."
            )
    recorded = table["routing_recorded"] if "routing_recorded" in table else np.zeros(len(table), bool)
    times, real = micro_batch.times, micro_batch.real_tokens
    counts = TokenCounts(
        trained=len(rows),
        recorded=int(recorded[micro_batch.before(rows)].sum()),
        credited=int(np.count_nonzero(table["advantages"][rows])),
        dropped=int((wanted & ~finite).sum()),
        fed=real + micro_batch.shared_tokens,
        fed_recorded=int((recorded if times is None else recorded * times)[:real].sum()),
        shared=micro_batch.shared_tokens,
        micro_batches=bool(micro_batch.sample_ids),
    )
    places = table["place"][rows] if "place" in table else np.zeros(0, np.int64)
    return TrainedTokens(rows, episodes, places, counts)


@dataclass
class Minibatch:
    """Made by `agreed`. `counts`: of all ranks; the rest is this rank's. `version`: of the weights that are trained, which
    tokens' ages count from. `coef`: of the trust region. `chosen`: of each of `micro_batches`. `count`: of the minibatch's
    places. `spread` bool `[episodes]`: those that have trained tokens in more than one micro-batch of all ranks. `balance`
    float64 `[layers, experts]` for `RoutingReplay.balanced`; None without `algorithm.router_aux`."""

    config: Config
    version: int
    coef: float
    ranks: Ranks
    counts: TokenCounts
    micro_batches: list[MicroBatch]
    chosen: list[TrainedTokens]
    count: int
    spread: np.ndarray
    balance: np.ndarray | None
    trace: bool
    _everywhere: Columns = field(init=False, default_factory=dict)
    """Of the trained tokens of all ranks, if `complete` was called."""
    _sums: ObjectiveSums | None = field(init=False, default=None)
    _drift: list[Tensor] = field(init=False, default_factory=list)
    """float64 `[2, drift_rows, 2]` of each micro-batch that was trained: `drift_sums` of its tokens, and of the probed ones."""
    _traces: list[RouteTrace] = field(init=False, default_factory=list)
    _scored: dict[int, Tensor] = field(init=False, default_factory=dict)
    """With `trace`: the log-probs of each micro-batch's trained tokens."""

    @property
    def rows(self) -> list[np.ndarray]:
        """int64 `[M]` of each micro-batch: its trained rows."""
        return [c.rows for c in self.chosen]

    @property
    def needs_logprobs(self) -> bool:
        """Whether `complete` has to be called before the first `loss`: alike on all ranks."""
        return bool(self.spread.any()) and takes_episodes(self.config.algorithm)

    @property
    def episode_count(self) -> int:
        """How many numbered episodes there are on all ranks; 0 without the column `episode`."""
        return len(self.spread)

    @property
    def drift_rows(self) -> int:
        """Rows of `drift_of`."""
        return DRIFT_ROWS + self.episode_count

    @property
    def cause(self) -> Cause:
        """Why no update is to be made, whatever the gradient; the same on every rank. Empty: one may be made.

        Without an advantage the gradient of the policy loss is 0, and what the other terms leave is rounding noise, which
        Adam would scale to a full step."""
        if self.counts.credited:
            return ""
        return "not_finite" if self.counts.dropped and not self.counts.trained else "no_contrast"

    def complete(self, logprobs: Sequence[np.ndarray]) -> None:
        """Take the learner's log-probs as they are now, `[N]` of each of `micro_batches`, and learn of every rank those of
        the episodes' tokens that it has. Collective."""
        columns = [self._columns(i) | {"logprobs": logprobs[i][rows]} for i, rows in enumerate(self.rows)]
        places = [c.places for c in self.chosen]
        self._everywhere = gathered(places, columns, self.count, self.ranks)

    def _columns(self, index: int) -> Columns:
        """Of the trained rows of micro-batch `index`: what the loss takes. Without the column `loss_weights` every trained
        token of the minibatch weighs the same (`token_mean`)."""
        table, chosen = self.micro_batches[index].table, self.chosen[index]
        names = ("rollout_logprobs", "advantages", "old_logprobs", "reference_logprobs")
        columns = {name: table[name][chosen.rows] for name in names if name in table}
        even = np.full(len(chosen.rows), 1 / max(self.counts.trained, 1), np.float32)
        columns["weights"] = table["loss_weights"][chosen.rows] if "loss_weights" in table else even
        ages = self.version - table["policy_version"][chosen.rows]
        return columns | {"ages": ages, "episode": chosen.episodes}

    def loss(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """Scalar loss of micro-batch `index`, whose sums are added. `logprobs`, `entropies`: float32 `[M]`, of its `rows`."""
        if self.trace and self.micro_batches[index].sample_ids:
            self._scored[index] = logprobs.detach()
        columns, device, own = self._columns(index), logprobs.device, None
        self._keep_drift(self.micro_batches[index], self.chosen[index].rows, logprobs)
        if self._everywhere and self._is_spread(columns["episode"]).any():
            columns, at = of_episodes(self._everywhere, columns["episode"], self.chosen[index].places)
            here = torch.from_numpy(at).to(device)
            own = torch.zeros(len(columns["episode"]), dtype=torch.bool, device=device).index_fill_(0, here, True)
            logprobs, entropies = joined(columns.pop("logprobs"), here, logprobs, entropies)
        episodes, sequence = np.unique(columns.pop("episode"), return_inverse=True)
        open = np.where(self._is_spread(episodes), episodes, -1)
        tensors = {
            n: torch.from_numpy(v).to(device) for n, v in (columns | {"sequence": sequence, "open": open}).items()
        }
        loss, sums = objective(
            TokenBatch(**tensors, sequences=len(episodes), own=own),
            logprobs,
            entropies,
            self.config.algorithm,
            rollout_kl_coef=self.coef,
            max_token_age=self.config.schedule.max_token_age,
        )
        self._sums = sums if self._sums is None else self._sums + sums
        return loss

    def _is_spread(self, episodes: np.ndarray) -> np.ndarray:
        """bool, as `episodes`: those that other micro-batches have tokens of as well."""
        return np.isin(episodes, np.flatnonzero(self.spread))

    def total(self) -> np.ndarray:
        """`ObjectiveSums.values` of all micro-batches on all ranks. Collective; after the last `loss`."""
        sums = self._sums if self.ranks.holds_loss and self._sums is not None else ObjectiveSums.zero()
        mine = sums.values()
        total = self.ranks.reduce(mine, "sum")
        maxima = [ObjectiveSums.names().index(name) for name in ObjectiveSums.maxima()]
        total[maxima] = self.ranks.reduce(mine[maxima], "max")
        # The figures of episodes that are in several micro-batches follow from their parts on all ranks.
        finished = ObjectiveSums.zero()
        if self.spread.any():
            parts = sums.open.cpu().numpy()
            parts = parts[parts[:, 0] >= 0]
            whole = np.zeros((len(self.spread), 4))
            np.add.at(whole, parts[:, 0].astype(np.int64), parts[:, 1:])
            finished.finish(torch.from_numpy(self.ranks.reduce(whole.reshape(-1), "sum").reshape(whole.shape)))
        total += finished.values()
        return total

    def drift_of(self, micro_batch: MicroBatch, rows: np.ndarray, logprobs: Tensor) -> Tensor:
        """`drift_sums` of the tokens at `rows` int64 `[M]` of any micro-batch, with the learner's log-probs float32 `[M]`."""
        table = micro_batch.table
        numbers = [self.version - table["policy_version"][rows], table["turn"][rows], micro_batch.positions[rows]]
        numbers += [table["episode"][rows]] if self.episode_count else []
        rollout = torch.from_numpy(table["rollout_logprobs"][rows]).to(logprobs.device)
        ages, turns, positions, *found = (torch.from_numpy(x.astype(np.int64)).to(logprobs.device) for x in numbers)
        limit, episodes = self.config.algorithm.rollout_kl.token_limit, found[0] if found else None
        return drift_sums(logprobs, rollout, ages, turns, positions, limit, episodes, self.episode_count)

    def _keep_drift(self, micro_batch: MicroBatch, rows: np.ndarray, logprobs: Tensor) -> None:
        table, found = micro_batch.table, self.drift_of(micro_batch, rows, logprobs)
        probed = np.flatnonzero(table["probed"][rows]) if "probed" in table else np.zeros(0, np.int64)
        some = logprobs[torch.from_numpy(probed).to(logprobs.device)]
        self._drift.append(torch.stack([found, self.drift_of(micro_batch, rows[probed], some)]))

    def drifts(self, served: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum drift over all ranks: of trained tokens, of the probed ones, and of these when they are `served`.

        Returns `drift_sums` float64 `[3, DRIFT_ROWS, 2]` by age, turn and position, and `[3, episode_count, 2]` by episode.
        Collective; after the last `loss`. `served`: `drift_sums` of this rank's part.
        """
        mine = np.zeros((3, *served.shape))
        if self._drift and self.ranks.holds_loss:
            mine[:2] = torch.stack(self._drift).sum(dim=0).cpu().numpy()
        mine[2] = served
        total = self.ranks.reduce(mine.reshape(-1), "sum").reshape(mine.shape)
        return total[:, :DRIFT_ROWS], total[:, DRIFT_ROWS:]

    # -- traces ----------------------------------------------------------------------------------------------------

    def saw(self, index: int, routes: MicroBatchRoutes) -> None:
        """Keep the trace of a micro-batch that has been fed forward, if this rank has routers."""
        if routes.own:
            self._traces.append(routes.trace())

    def traces(self) -> list[RouteTrace]:
        """Each with its micro-batch's log-probs where this rank has them. A last pipeline stage may have no MoE layer and so
        no trace of its own: its log-probs come with a trace of no layer."""
        logprobs: dict[tuple[str, ...], np.ndarray] = {}
        for index, values in self._scored.items():
            row = np.full(self.micro_batches[index].real_tokens, np.nan, np.float32)
            row[self.rows[index]] = values.float().cpu().numpy()
            logprobs[self.micro_batches[index].sample_ids] = row
        traces = [msgspec.structs.replace(t, logprobs=logprobs.pop(t.sample_ids, None)) for t in self._traces]
        none = np.zeros((0, 0, 0), np.uint16)
        for micro_batch in (self.micro_batches[index] for index in self._scored):
            samples = micro_batch.sample_ids
            if samples in logprobs:
                starts = micro_batch.cu_seqlens[: len(samples) + 1]
                prefixes = micro_batch.prefixes
                shared = None if prefixes is None else prefixes[: len(samples)]
                traces.append(RouteTrace(samples, starts, 0, [], none, none, logprobs[samples], shared))
        return traces


# -- what ranks agree on before the first forward pass -------------------------------------------------------------------


def agreed(
    micro_batches: Sequence[MicroBatch],
    config: Config,
    *,
    version: int,
    rollout_kl_coef: float,
    ranks: Ranks = ALONE,
    replays: bool = False,
    routing: tuple[int, int] = (0, 0),
    skip_untrained: bool = False,
    trace: bool = False,
) -> Minibatch:
    """The minibatch of which these are this rank's micro-batches. Collective: counts are summed over the data-parallel ranks,
    so that the loss's denominator is global and known before the first micro-batch. Every check is made here.

    `replays`: whether recorded routes are used. `routing`: MoE layers and experts of the model. `skip_untrained`: leave out
    micro-batches in which nothing is trained; only where no other rank waits for this one.

    Raises `LearnerError`, on every rank alike, if too few of the routes that replay needs were recorded, or if the ranks
    were given different numbers of micro-batches; and what `trained_tokens` raises.
    """
    chosen = [trained_tokens(m) for m in micro_batches]
    mine = sum((np.asarray(c.counts, np.float64) for c in chosen), np.zeros(len(TokenCounts._fields)))
    counts = TokenCounts(*ranks.reduce(mine * ranks.is_first_copy, "sum").tolist())
    numbers = [c.episodes for c in chosen], [c.places for c in chosen]
    largest = [max((int(x.max(initial=-1)) for x in each), default=-1) for each in numbers]
    extremes = np.asarray([len(micro_batches), -len(micro_batches), *largest], np.float64)
    most, least, last, place = ranks.reduce(extremes, "max").tolist()
    if most != -least:
        raise LearnerError(f"ranks were given between {-least:.0f} and {most:.0f} micro-batches, not the same number")
    floor = config.routing.min_recorded_fraction
    if counts.trained and replays and counts.recorded_fraction < floor:
        raise LearnerError(
            f"only {counts.recorded_fraction:.3f} of the trained tokens have recorded routes, and "
            f"routing.min_recorded_fraction is {floor}: find out why the engine did not record them, lower that setting, "
            "or set routing.replay=off"
        )
    kept = [i for i, c in enumerate(chosen) if len(c.rows) or not skip_untrained]
    minibatch = Minibatch(
        config,
        version,
        rollout_kl_coef,
        ranks,
        counts,
        [micro_batches[i] for i in kept],
        [chosen[i] for i in kept],
        count=int(place) + 1,
        spread=spread([c.episodes for c in chosen], int(last) + 1, ranks),
        balance=_balance(micro_batches, config.algorithm.router_aux.coef, counts.fed, routing, ranks),
        trace=trace,
    )
    if minibatch.needs_logprobs and not minibatch.count:
        raise LearnerError(
            f"{config.algorithm.policy_loss!r} or a correction takes whole episodes, of which some are in several "
            "micro-batches, and the column 'place' is missing"
        )
    return minibatch


def _balance(
    micro_batches: Sequence[MicroBatch], coef: float, tokens: float, routing: tuple[int, int], ranks: Ranks
) -> np.ndarray | None:
    """What a unit of a router's probability of an expert adds to the loss, `coef * experts * f_i / tokens`: with the load
    known beforehand, the term is a plain sum over tokens."""
    layers, experts = routing
    if not coef or not layers:
        return None
    mine = recorded_load(micro_batches if ranks.is_first_copy else (), layers, experts)
    load = ranks.reduce(mine.reshape(-1), "sum").reshape(mine.shape)
    share = load / np.maximum(load.sum(axis=1, keepdims=True), 1.0)
    return coef * experts * share / max(tokens, 1.0)


def recorded_load(micro_batches: Sequence[MicroBatch], layers: int, experts: int) -> np.ndarray:
    """float64 `[layers, experts]`: tokens that the recorded routes send to each expert."""
    load = np.zeros((layers, experts))
    for m in micro_batches:
        if "routed_experts" in m.table:
            (recorded,) = np.nonzero(m.table["routing_recorded"])
            rows = m.table["routed_experts"][recorded]
            times = None if m.times is None else np.repeat(m.times[recorded], rows.shape[2])
            for layer in range(layers):
                load[layer] += np.bincount(rows[:, layer].reshape(-1), times, minlength=experts)
    return load
