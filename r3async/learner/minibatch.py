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
from r3async.learner.backend import SINGLE_RANK, RankGroup
from r3async.learner.batch.packing import MicroBatch
from r3async.learner.figures import DRIFT_BINS, LossSums, sum_drift
from r3async.learner.losses.objective import TokenBatch, compute_loss, needs_whole_episodes
from r3async.learner.optimizer import SkipCause
from r3async.learner.replay import MicroBatchRoutes
from r3async.learner.scattered import (
    TokenColumns,
    find_split_episodes,
    gather_token_columns,
    merge_logprobs,
    select_episode_columns,
)


class TokenCounts(NamedTuple):
    """Of one micro-batch, or of a minibatch over all ranks: numbers of tokens, but for the last.

    `trained`. `recorded`: trained ones whose input, the token before, has recorded routes. `with_advantage`: those with an
    advantage that is not 0. `dropped`: to be trained, but for a rollout log-prob that is not finite. `total`: of all samples,
    of which `total_recorded` have recorded routes, and `shared` have no row of their own but
    another sample's. `micro_batches`: those that are not padding only.
    """

    trained: float
    recorded: float
    with_advantage: float
    dropped: float
    total: float
    total_recorded: float
    shared: float
    micro_batches: float

    @property
    def recorded_fraction(self) -> float:
        return self.recorded / max(self.trained, 1.0)

    @property
    def total_recorded_fraction(self) -> float:
        return self.total_recorded / max(self.total, 1.0)


@dataclass(frozen=True)
class TrainedTokens:
    """Which rows of one micro-batch are trained.

    `rows` int64 `[M]`: trained tokens. `episode_index` int64 `[M]`: the number in the
    minibatch of the episode that each is of; without the column `episode` each sample is an episode by itself: -1 for the
    first of them, -2, ... `token_index` int `[M]`: their numbers in the minibatch; empty without the column `place`.
    """

    rows: np.ndarray
    episode_index: np.ndarray
    token_index: np.ndarray
    counts: TokenCounts


def find_trained_tokens(micro_batch: MicroBatch) -> TrainedTokens:
    """Raises `LearnerError` if the first token of a sample, which nothing predicts, is to be trained, if the column
    `advantages` is missing, or if a trained token has no episode though others have."""
    table = micro_batch.table
    wanted = table["loss_mask"]
    starts = micro_batch.first_rows
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
    times, real = micro_batch.row_multiplicity, micro_batch.num_real_tokens
    counts = TokenCounts(
        trained=len(rows),
        recorded=int(recorded[micro_batch.previous_rows(rows)].sum()),
        with_advantage=int(np.count_nonzero(table["advantages"][rows])),
        dropped=int((wanted & ~finite).sum()),
        total=real + micro_batch.num_shared_tokens,
        total_recorded=int((recorded if times is None else recorded * times)[:real].sum()),
        shared=micro_batch.num_shared_tokens,
        micro_batches=bool(micro_batch.sample_ids),
    )
    places = table["place"][rows] if "place" in table else np.zeros(0, np.int64)
    return TrainedTokens(rows, episodes, places, counts)


@dataclass
class Minibatch:
    """Made by `build_minibatch`. `counts`: of all ranks; the rest is this rank's. `version`: of the weights that are trained,
    which tokens' ages count from. `rollout_kl_coef`: of the trust region. `trained_tokens`: of each of `micro_batches`.
    `token_index_count`: of the minibatch's places. `split_episodes` bool `[episodes]`: those that have trained tokens in more
    than one micro-batch of all ranks. `aux_loss_weights` float64 `[layers, experts]` for `RoutingReplay.use_aux_loss`; None
    without `algorithm.router_aux`."""

    config: Config
    version: int
    rollout_kl_coef: float
    ranks: RankGroup
    counts: TokenCounts
    micro_batches: list[MicroBatch]
    trained_tokens: list[TrainedTokens]
    token_index_count: int
    split_episodes: np.ndarray
    aux_loss_weights: np.ndarray | None
    records_traces: bool
    _global_columns: TokenColumns = field(init=False, default_factory=dict)
    """Of the trained tokens of all ranks, if `set_global_logprobs` was called."""
    _loss_sums: LossSums | None = field(init=False, default=None)
    _drift_sums: list[Tensor] = field(init=False, default_factory=list)
    """float64 `[2, drift_rows, 2]` of each micro-batch that was trained: `sum_drift` of its tokens, and of the probed ones."""
    _traces: list[RouteTrace] = field(init=False, default_factory=list)
    _traced_logprobs: dict[int, Tensor] = field(init=False, default_factory=dict)
    """With `records_traces`: the log-probs of each micro-batch's trained tokens."""

    @property
    def trained_rows(self) -> list[np.ndarray]:
        """int64 `[M]` of each micro-batch: its trained rows."""
        return [c.rows for c in self.trained_tokens]

    @property
    def needs_global_logprobs(self) -> bool:
        """Whether `set_global_logprobs` has to be called before the first `compute_micro_batch_loss`: alike on all ranks."""
        return bool(self.split_episodes.any()) and needs_whole_episodes(self.config.algorithm)

    @property
    def episode_count(self) -> int:
        """How many numbered episodes there are on all ranks; 0 without the column `episode`."""
        return len(self.split_episodes)

    @property
    def drift_bin_count(self) -> int:
        """Rows of `measure_drift`."""
        return DRIFT_BINS + self.episode_count

    @property
    def skip_cause(self) -> SkipCause:
        """Why no update is to be made, whatever the gradient; the same on every rank. Empty: one may be made.

        Without an advantage the gradient of the policy loss is 0, and what the other terms leave is rounding noise, which
        Adam would scale to a full step."""
        if self.counts.with_advantage:
            return ""
        return "not_finite" if self.counts.dropped and not self.counts.trained else "no_contrast"

    def set_global_logprobs(self, logprobs: Sequence[np.ndarray]) -> None:
        """Take the learner's log-probs as they are now, `[N]` of each of `micro_batches`, and learn of every rank those of
        the episodes' tokens that it has. Collective."""
        columns = [self._loss_columns(i) | {"logprobs": logprobs[i][rows]} for i, rows in enumerate(self.trained_rows)]
        places = [c.token_index for c in self.trained_tokens]
        self._global_columns = gather_token_columns(places, columns, self.token_index_count, self.ranks)

    def _loss_columns(self, index: int) -> TokenColumns:
        """Of the trained rows of micro-batch `index`: what the loss takes. Without the column `loss_weights` every trained
        token of the minibatch weighs the same (`token_mean`)."""
        table, chosen = self.micro_batches[index].table, self.trained_tokens[index]
        names = ("rollout_logprobs", "advantages", "old_logprobs", "reference_logprobs")
        columns = {name: table[name][chosen.rows] for name in names if name in table}
        even = np.full(len(chosen.rows), 1 / max(self.counts.trained, 1), np.float32)
        columns["weights"] = table["loss_weights"][chosen.rows] if "loss_weights" in table else even
        ages = self.version - table["policy_version"][chosen.rows]
        return columns | {"staleness": ages, "episode": chosen.episode_index}

    def compute_micro_batch_loss(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """Scalar loss of micro-batch `index`, whose sums are added. `logprobs`, `entropies`: float32 `[M]`, of its
        `trained_rows`."""
        if self.records_traces and self.micro_batches[index].sample_ids:
            self._traced_logprobs[index] = logprobs.detach()
        columns, device, own = self._loss_columns(index), logprobs.device, None
        self._add_drift(self.micro_batches[index], self.trained_tokens[index].rows, logprobs)
        if self._global_columns and self._is_split(columns["episode"]).any():
            columns, at = select_episode_columns(
                self._global_columns, columns["episode"], self.trained_tokens[index].token_index
            )
            here = torch.from_numpy(at).to(device)
            own = torch.zeros(len(columns["episode"]), dtype=torch.bool, device=device).index_fill_(0, here, True)
            logprobs, entropies = merge_logprobs(columns.pop("logprobs"), here, logprobs, entropies)
        episodes, sequence = np.unique(columns.pop("episode"), return_inverse=True)
        columns |= {"episode_index": sequence, "split_episode_ids": np.where(self._is_split(episodes), episodes, -1)}
        tensors = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        loss, sums = compute_loss(
            TokenBatch(**tensors, num_episodes=len(episodes), in_micro_batch=own),
            logprobs,
            entropies,
            self.config.algorithm,
            rollout_kl_coef=self.rollout_kl_coef,
            max_token_staleness=self.config.schedule.max_token_age,
        )
        self._loss_sums = sums if self._loss_sums is None else self._loss_sums + sums
        return loss

    def _is_split(self, episodes: np.ndarray) -> np.ndarray:
        """bool, as `episodes`: those that other micro-batches have tokens of as well."""
        return np.isin(episodes, np.flatnonzero(self.split_episodes))

    def reduce_loss_sums(self) -> np.ndarray:
        """`LossSums.to_numpy` of all micro-batches on all ranks. Collective; after the last `compute_micro_batch_loss`."""
        sums = self._loss_sums if self.ranks.is_loss_reporter and self._loss_sums is not None else LossSums.zeros()
        mine = sums.to_numpy()
        total = self.ranks.all_reduce(mine, "sum")
        maxima = [LossSums.sum_names().index(name) for name in LossSums.max_names()]
        total[maxima] = self.ranks.all_reduce(mine[maxima], "max")
        # The figures of episodes that are in several micro-batches follow from their parts on all ranks.
        finished = LossSums.zeros()
        if self.split_episodes.any():
            parts = sums.split_episode_parts.cpu().numpy()
            parts = parts[parts[:, 0] >= 0]
            whole = np.zeros((len(self.split_episodes), 4))
            np.add.at(whole, parts[:, 0].astype(np.int64), parts[:, 1:])
            finished.add_episodes(
                torch.from_numpy(self.ranks.all_reduce(whole.reshape(-1), "sum").reshape(whole.shape))
            )
        total += finished.to_numpy()
        return total

    def measure_drift(self, micro_batch: MicroBatch, rows: np.ndarray, logprobs: Tensor) -> Tensor:
        """`sum_drift` of the tokens at `rows` int64 `[M]` of any micro-batch, with the learner's log-probs float32 `[M]`."""
        table = micro_batch.table
        numbers = [self.version - table["policy_version"][rows], table["turn"][rows], micro_batch.positions[rows]]
        numbers += [table["episode"][rows]] if self.episode_count else []
        rollout = torch.from_numpy(table["rollout_logprobs"][rows]).to(logprobs.device)
        ages, turns, positions, *found = (torch.from_numpy(x.astype(np.int64)).to(logprobs.device) for x in numbers)
        limit, episodes = self.config.algorithm.rollout_kl.token_limit, found[0] if found else None
        return sum_drift(logprobs, rollout, ages, turns, positions, limit, episodes, self.episode_count)

    def _add_drift(self, micro_batch: MicroBatch, rows: np.ndarray, logprobs: Tensor) -> None:
        table, found = micro_batch.table, self.measure_drift(micro_batch, rows, logprobs)
        probed = np.flatnonzero(table["probed"][rows]) if "probed" in table else np.zeros(0, np.int64)
        some = logprobs[torch.from_numpy(probed).to(logprobs.device)]
        self._drift_sums.append(torch.stack([found, self.measure_drift(micro_batch, rows[probed], some)]))

    def reduce_drift(self, served: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum drift over all ranks: of trained tokens, of the probed ones, and of these when they are `served`.

        Returns `sum_drift` float64 `[3, DRIFT_ROWS, 2]` by age, turn and position, and `[3, episode_count, 2]` by episode.
        Collective; after the last `compute_micro_batch_loss`. `served`: `sum_drift` of this rank's part.
        """
        mine = np.zeros((3, *served.shape))
        if self._drift_sums and self.ranks.is_loss_reporter:
            mine[:2] = torch.stack(self._drift_sums).sum(dim=0).cpu().numpy()
        mine[2] = served
        total = self.ranks.all_reduce(mine.reshape(-1), "sum").reshape(mine.shape)
        return total[:, :DRIFT_BINS], total[:, DRIFT_BINS:]

    # -- traces ----------------------------------------------------------------------------------------------------

    def record_routes(self, index: int, routes: MicroBatchRoutes) -> None:
        """Keep the trace of a micro-batch that has been fed forward, if this rank has routers."""
        if routes.preferred_experts:
            self._traces.append(routes.build_trace())

    def collect_traces(self) -> list[RouteTrace]:
        """Each with its micro-batch's log-probs where this rank has them. A last pipeline stage may have no MoE layer and so
        no trace of its own: its log-probs come with a trace of no layer."""
        logprobs: dict[tuple[str, ...], np.ndarray] = {}
        for index, values in self._traced_logprobs.items():
            row = np.full(self.micro_batches[index].num_real_tokens, np.nan, np.float32)
            row[self.trained_rows[index]] = values.float().cpu().numpy()
            logprobs[self.micro_batches[index].sample_ids] = row
        traces = [msgspec.structs.replace(t, logprobs=logprobs.pop(t.sample_ids, None)) for t in self._traces]
        none = np.zeros((0, 0, 0), np.uint16)
        for micro_batch in (self.micro_batches[index] for index in self._traced_logprobs):
            samples = micro_batch.sample_ids
            if samples in logprobs:
                starts = micro_batch.cu_seqlens[: len(samples) + 1]
                prefixes = micro_batch.prefixes
                shared = None if prefixes is None else prefixes[: len(samples)]
                traces.append(RouteTrace(samples, starts, 0, [], none, none, logprobs[samples], shared))
        return traces


# -- what ranks agree on before the first forward pass -------------------------------------------------------------------


def build_minibatch(
    micro_batches: Sequence[MicroBatch],
    config: Config,
    *,
    version: int,
    rollout_kl_coef: float,
    ranks: RankGroup = SINGLE_RANK,
    needs_routes: bool = False,
    routing_shape: tuple[int, int] = (0, 0),
    skip_untrained: bool = False,
    trace: bool = False,
) -> Minibatch:
    """The minibatch of which these are this rank's micro-batches. Collective: counts are summed over the data-parallel ranks,
    so that the loss's denominator is global and known before the first micro-batch. Every check is made here.

    `needs_routes`: whether recorded routes are used. `routing_shape`: MoE layers and experts of the model. `skip_untrained`:
    leave out micro-batches in which nothing is trained; only where no other rank waits for this one.

    Raises `LearnerError`, on every rank alike, if too few of the routes that replay needs were recorded, or if the ranks
    were given different numbers of micro-batches; and what `find_trained_tokens` raises.
    """
    chosen = [find_trained_tokens(m) for m in micro_batches]
    mine = sum((np.asarray(c.counts, np.float64) for c in chosen), np.zeros(len(TokenCounts._fields)))
    counts = TokenCounts(*ranks.all_reduce(mine * ranks.is_batch_reporter, "sum").tolist())
    numbers = [c.episode_index for c in chosen], [c.token_index for c in chosen]
    largest = [max((int(x.max(initial=-1)) for x in each), default=-1) for each in numbers]
    extremes = np.asarray([len(micro_batches), -len(micro_batches), *largest], np.float64)
    most, least, last, place = ranks.all_reduce(extremes, "max").tolist()
    if most != -least:
        raise LearnerError(f"ranks were given between {-least:.0f} and {most:.0f} micro-batches, not the same number")
    floor = config.routing.min_recorded_fraction
    if counts.trained and needs_routes and counts.recorded_fraction < floor:
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
        token_index_count=int(place) + 1,
        split_episodes=find_split_episodes([c.episode_index for c in chosen], int(last) + 1, ranks),
        aux_loss_weights=_compute_aux_loss_weights(
            micro_batches, config.algorithm.router_aux.coef, counts.total, routing_shape, ranks
        ),
        records_traces=trace,
    )
    if minibatch.needs_global_logprobs and not minibatch.token_index_count:
        raise LearnerError(
            f"{config.algorithm.policy_loss!r} or a correction takes whole episodes, of which some are in several "
            "micro-batches, and the column 'place' is missing"
        )
    return minibatch


def _compute_aux_loss_weights(
    micro_batches: Sequence[MicroBatch], coef: float, tokens: float, routing: tuple[int, int], ranks: RankGroup
) -> np.ndarray | None:
    """What a unit of a router's probability of an expert adds to the loss, `coef * experts * f_i / tokens`: with the load
    known beforehand, the term is a plain sum over tokens."""
    layers, experts = routing
    if not coef or not layers:
        return None
    mine = count_recorded_load(micro_batches if ranks.is_batch_reporter else (), layers, experts)
    load = ranks.all_reduce(mine.reshape(-1), "sum").reshape(mine.shape)
    share = load / np.maximum(load.sum(axis=1, keepdims=True), 1.0)
    return coef * experts * share / max(tokens, 1.0)


def count_recorded_load(micro_batches: Sequence[MicroBatch], layers: int, experts: int) -> np.ndarray:
    """float64 `[layers, experts]`: tokens that the recorded routes send to each expert."""
    load = np.zeros((layers, experts))
    for m in micro_batches:
        if "routed_experts" in m.table:
            (recorded,) = np.nonzero(m.table["routing_recorded"])
            rows = m.table["routed_experts"][recorded]
            times = None if m.row_multiplicity is None else np.repeat(m.row_multiplicity[recorded], rows.shape[2])
            for layer in range(layers):
                load[layer] += np.bincount(rows[:, layer].reshape(-1), times, minlength=experts)
    return load
