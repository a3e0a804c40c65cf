"""One minibatch on one rank: what the ranks agree on first, and the loss of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from r3async.config import Config
from r3async.learner.device_upload import upload_array
from r3async.learner.drift import MAX_TOKEN_K3
from r3async.learner.drift_metrics import DRIFT_BINS, sum_drift
from r3async.learner.loss import TokenBatch, compute_loss, needs_whole_episodes
from r3async.learner.loss_sums import LossSums
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.optimizer import SkipCause
from r3async.learner.rank_group import SINGLE_RANK, RankGroup
from r3async.learner.replay import MicroBatchRoutes, count_recorded_load
from r3async.learner.results import DriftSums, GapMoments, LearnerError, RouteTrace
from r3async.learner.split_episodes import (
    LOSS_COLUMNS,
    TokenColumns,
    find_split_episodes,
    gather_token_columns,
    merge_logprobs,
    select_episode_columns,
)
from r3async.learner.token_choice import TOKEN_CHOICES


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
    """Build the minibatch from this rank's micro-batches, and run all checks. Collective.

    Counts are summed over the data-parallel ranks, so that the loss's denominator is global and
    known before the first micro-batch.

    Raises `LearnerError`, on every rank alike, if too few of the routes that replay needs were
    recorded, or if the ranks were given different numbers of micro-batches; and what
    `find_trained_tokens` raises.

    Args:
        needs_routes: Recorded routes are used.
        routing_shape: MoE layers and experts of the model.
        skip_untrained: Leave out micro-batches in which nothing is trained; only where no other
            rank waits for this one.
    """
    chosen = [find_trained_tokens(m) for m in micro_batches]
    mine = sum(
        (np.asarray(c.counts, np.float64) for c in chosen), np.zeros(len(TokenCounts._fields))
    )
    counts = TokenCounts(*ranks.all_reduce(mine * ranks.is_batch_reporter, "sum").tolist())
    numbers = [c.episode_index for c in chosen], [c.token_index for c in chosen]
    largest = [max((int(x.max(initial=-1)) for x in each), default=-1) for each in numbers]
    extremes = np.asarray([len(micro_batches), -len(micro_batches), *largest], np.float64)
    most, least, last, place = ranks.all_reduce(extremes, "max").tolist()
    if most != -least:
        raise LearnerError(
            f"ranks were given between {-least:.0f} and {most:.0f} micro-batches, "
            "not the same number"
        )
    floor = config.routing.min_recorded_fraction
    if counts.trained and needs_routes and counts.recorded_fraction < floor:
        raise LearnerError(
            f"only {counts.recorded_fraction:.3f} of the trained tokens have recorded routes, and "
            f"routing.min_recorded_fraction is {floor}: find out why the engine did not record "
            "them, lower that setting, or set routing.replay=off"
        )
    kept = [i for i, c in enumerate(chosen) if len(c.rows) or not skip_untrained]
    minibatch = Minibatch(
        ranks,
        [micro_batches[i] for i in kept],
        [chosen[i].rows for i in kept],
        counts.trained,
        aux_loss_weights=_compute_aux_loss_weights(
            micro_batches, config.algorithm.router_aux.coef, counts.total, routing_shape, ranks
        ),
        records_traces=trace,
        config=config,
        version=version,
        rollout_kl_coef=rollout_kl_coef,
        counts=counts,
        trained_tokens=[chosen[i] for i in kept],
        token_index_count=int(place) + 1,
        split_episodes=find_split_episodes([c.episode_index for c in chosen], int(last) + 1, ranks),
    )
    if minibatch.needs_global_logprobs and not minibatch.token_index_count:
        raise LearnerError(
            f"{config.algorithm.policy_loss!r} or a correction takes whole episodes, of which some "
            "are in several micro-batches, or chooses tokens of the whole minibatch, and the "
            "column 'place' is missing"
        )
    return minibatch


def _compute_aux_loss_weights(
    micro_batches: Sequence[MicroBatch],
    coef: float,
    tokens: float,
    routing: tuple[int, int],
    ranks: RankGroup,
) -> np.ndarray | None:
    """Return what a unit of a router's probability of an expert adds to the loss,
    `coef * experts * f_i / tokens`.

    With the load known beforehand, the term is a plain sum over tokens.
    """
    layers, experts = routing
    if not coef or not layers:
        return None
    mine = count_recorded_load(micro_batches if ranks.is_batch_reporter else (), layers, experts)
    load = ranks.all_reduce(mine.reshape(-1), "sum").reshape(mine.shape)
    share = load / np.maximum(load.sum(axis=1, keepdims=True), 1.0)
    return coef * experts * share / max(tokens, 1.0)


class TokenCounts(NamedTuple):
    """Numbers of tokens in one micro-batch, or in a minibatch over all ranks.

    Attributes:
        trained: Trained tokens.
        recorded: Trained tokens whose input, the token before, has recorded routes.
        with_advantage: Trained tokens with an advantage that is not 0.
        dropped: Tokens that would be trained, but for a rollout log-prob that is not finite.
        total: Tokens of all samples.
        total_recorded: Tokens of all samples that have recorded routes.
        shared: Tokens of all samples that have no row themselves, but use another sample's.
        micro_batches: Number of micro-batches that are not padding only.
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
    """The trained rows of one micro-batch.

    Attributes:
        rows: int64 `[M]`: trained tokens.
        episode_index: int64 `[M]`: the number in the minibatch of each token's episode. Without the
            column `episode` each sample is an episode: -1 for the first of them, -2, ...
        token_index: int `[M]`: the tokens' numbers in the minibatch; empty without
            the column `place`.
    """

    rows: np.ndarray
    episode_index: np.ndarray
    token_index: np.ndarray
    counts: TokenCounts


def find_trained_tokens(micro_batch: MicroBatch) -> TrainedTokens:
    """Find the trained tokens of a micro-batch.

    Raises `LearnerError` if the first token of a sample, which nothing predicts, is to be trained,
    if the column `advantages` is missing, or if a trained token has no episode though others have.
    """
    table = micro_batch.table
    wanted = table["loss_mask"]
    starts = micro_batch.first_rows
    if wanted[starts].any():
        first = int(starts[np.flatnonzero(wanted[starts])[0]])
        sample = micro_batch.sample_ids[
            int(np.searchsorted(micro_batch.cu_seqlens, first, side="right")) - 1
        ]
        raise LearnerError(
            f"sample {sample}: its first token is to be trained, but nothing predicts a first token"
        )
    if "advantages" not in table:
        raise LearnerError(f"sample {micro_batch.sample_ids[0]}: column 'advantages' is missing")
    finite = np.isfinite(table["rollout_logprobs"])
    rows = np.flatnonzero(wanted & finite)
    episodes = -np.searchsorted(micro_batch.cu_seqlens, rows, side="right")
    if "episode" in table:
        episodes = table["episode"][rows].astype(np.int64)
        if (episodes < 0).any():
            raise LearnerError(
                "column 'episode' is -1 at a trained token: number the episodes of a "
                "minibatch 0, 1, ..."
            )
    recorded = (
        table["routing_recorded"] if "routing_recorded" in table else np.zeros(len(table), bool)
    )
    times = micro_batch.row_multiplicity
    real = micro_batch.num_real_tokens
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
class TrainableMinibatch:
    """Micro-batches of this rank with a loss, for `train_step.forward_backward`.

    Attributes:
        trained_rows: The tokens of each micro-batch whose log-probs the loss takes, int64 `[M]`.
        num_trained: The number of these tokens on all ranks.
        aux_loss_weights: float64 `[layers, experts]` for `RoutingReplay.use_aux_loss`, or None.
        records_traces: `record_routes` is called after each forward pass.
    """

    ranks: RankGroup
    micro_batches: list[MicroBatch]
    trained_rows: list[np.ndarray]
    num_trained: float
    aux_loss_weights: np.ndarray | None
    records_traces: bool
    replays_routes: ClassVar[bool]
    """Routers use the recorded routes."""

    @property
    def needs_global_logprobs(self) -> bool:
        """True if `set_global_logprobs` has to be called before the first
        `compute_micro_batch_loss`; the same on all ranks."""
        return False

    def compute_micro_batch_loss(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """Return the scalar loss of micro-batch `index`, and add its sums.

        `logprobs` and `entropies` are float32 `[M]`, for its `trained_rows`.
        """
        raise NotImplementedError

    def set_global_logprobs(self, logprobs: Sequence[np.ndarray]) -> None:
        raise NotImplementedError

    def record_routes(self, routes: MicroBatchRoutes) -> None:
        raise NotImplementedError


@dataclass
class Minibatch(TrainableMinibatch):
    """One minibatch on this rank, built by `build_minibatch`.

    `counts` are those of all ranks; everything else is this rank's.

    Attributes:
        version: The version of the weights that are trained, from which tokens' ages count.
        rollout_kl_coef: The coefficient of the trust region.
        trained_tokens: The trained tokens of each of `micro_batches`.
        token_index_count: The number of places in the minibatch.
        split_episodes: bool `[episodes]`: the episodes that have trained tokens in more than one
            micro-batch of all ranks.
    """

    config: Config
    version: int
    rollout_kl_coef: float
    counts: TokenCounts
    trained_tokens: list[TrainedTokens]
    token_index_count: int
    split_episodes: np.ndarray
    replays_routes = True
    _global_columns: TokenColumns = field(init=False, default_factory=dict)
    """Columns of the trained tokens of all ranks, if `set_global_logprobs` was called."""
    _is_chosen: np.ndarray | None = field(init=False, default=None)
    """bool, by place: the tokens that the policy loss has chosen among them."""
    _loss_sums: LossSums | None = field(init=False, default=None)
    _drift_sums: list[Tensor] = field(init=False, default_factory=list)
    """float64 `[2, drift_bin_count, 2]` for each trained micro-batch: `sum_drift` of its tokens,
    and of the probed ones."""
    _traces: list[RouteTrace] = field(init=False, default_factory=list)
    _traced_logprobs: dict[int, Tensor] = field(init=False, default_factory=dict)
    """Log-probs of each micro-batch's trained tokens, with `records_traces`."""

    @property
    def needs_global_logprobs(self) -> bool:
        algorithm = self.config.algorithm
        is_split = bool(self.split_episodes.any()) and needs_whole_episodes(algorithm)
        return is_split or algorithm.policy_loss in TOKEN_CHOICES

    @property
    def episode_count(self) -> int:
        """The number of numbered episodes on all ranks; 0 without the column `episode`."""
        return len(self.split_episodes)

    @property
    def drift_bin_count(self) -> int:
        """The number of rows of `measure_drift`."""
        return DRIFT_BINS + self.episode_count

    @property
    def skip_cause(self) -> SkipCause:
        """The reason to make no update, whatever the gradient; the same on every rank. Empty:
        one may be made.

        Without an advantage the gradient of the policy loss is 0, and what the other terms leave is
        rounding noise, which Adam would scale to a full step.
        """
        if self.counts.with_advantage:
            return ""
        return "not_finite" if self.counts.dropped and not self.counts.trained else "zero_variance"

    def set_global_logprobs(self, logprobs: Sequence[np.ndarray]) -> None:
        """Take the learner's current log-probs, `[N]` for each of `micro_batches`. Collective.

        The columns of all trained tokens of the minibatch are then gathered over all ranks.
        """
        columns = [
            self._select_loss_columns(i) | {"logprobs": logprobs[i][tokens.rows]}
            for i, tokens in enumerate(self.trained_tokens)
        ]
        places = [tokens.token_index for tokens in self.trained_tokens]
        self._global_columns = gather_token_columns(
            places, columns, self.token_index_count, self.ranks
        )
        choose = TOKEN_CHOICES.get(self.config.algorithm.policy_loss)
        if choose is not None:
            everywhere = self._global_columns
            generator = np.random.default_rng([self.config.seed, self.version])
            chosen = choose(everywhere, self.config.algorithm, generator)
            self._is_chosen = np.zeros(self.token_index_count, np.bool_)
            self._is_chosen[everywhere["place"][chosen]] = True

    def compute_micro_batch_loss(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        self._add_drift(index, logprobs)
        if self.records_traces and self.micro_batches[index].sample_ids:
            self._traced_logprobs[index] = logprobs.detach()
        batch, logprobs, entropies = self._build_token_batch(index, logprobs, entropies)
        loss, sums = compute_loss(
            batch,
            logprobs,
            entropies,
            self.config.algorithm,
            rollout_kl_coef=self.rollout_kl_coef,
            max_token_staleness=self.config.schedule.max_token_age,
        )
        self._loss_sums = sums if self._loss_sums is None else self._loss_sums + sums
        return loss

    def _build_token_batch(
        self, index: int, logprobs: Tensor, entropies: Tensor
    ) -> tuple[TokenBatch, Tensor, Tensor]:
        """Return the tokens that the loss of micro-batch `index` takes, with log-probs and
        entropies of all of them.

        They are its trained tokens; and if `set_global_logprobs` was called, all trained tokens
        of their episodes.
        """
        tokens = self.trained_tokens[index]
        device = logprobs.device
        columns = self._select_loss_columns(index)
        is_in_micro_batch = None
        if self._global_columns and self._is_split(tokens.episode_index).any():
            columns, positions = select_episode_columns(
                self._global_columns, tokens.episode_index, tokens.token_index
            )
            rows = upload_array(positions, device)
            is_in_micro_batch = torch.zeros(
                len(columns["episode"]), dtype=torch.bool, device=device
            )
            is_in_micro_batch.index_fill_(0, rows, True)
            logprobs, entropies = merge_logprobs(columns["logprobs"], rows, logprobs, entropies)
        if self._is_chosen is not None:
            columns["chosen"] = self._is_chosen[columns.get("place", tokens.token_index)]
        episodes, episode_index = np.unique(columns["episode"], return_inverse=True)
        names = [*LOSS_COLUMNS, "weights", "staleness", "chosen"]
        if needs_whole_episodes(self.config.algorithm):
            names.append("turns")
        batch = TokenBatch(
            **{name: upload_array(columns[name], device) for name in names if name in columns},
            episode_index=upload_array(episode_index, device),
            num_episodes=len(episodes),
            in_micro_batch=is_in_micro_batch,
            split_episode_ids=upload_array(
                np.where(self._is_split(episodes), episodes, -1), device
            ),
        )
        return batch, logprobs, entropies

    def _select_loss_columns(self, index: int) -> TokenColumns:
        """Return the columns that the loss takes, for the trained rows of micro-batch `index`.

        Without the column `loss_weights` every trained token of the minibatch has the same
        weight (`token_mean`).
        """
        table = self.micro_batches[index].table
        tokens = self.trained_tokens[index]
        equal_weights = np.full(len(tokens.rows), 1 / max(self.counts.trained, 1), np.float32)
        return {name: table[name][tokens.rows] for name in LOSS_COLUMNS if name in table} | {
            "weights": table["loss_weights"][tokens.rows]
            if "loss_weights" in table
            else equal_weights,
            "staleness": self.version - table["policy_version"][tokens.rows],
            "turns": table["turn"][tokens.rows],
            "episode": tokens.episode_index,
        }

    def _is_split(self, episodes: np.ndarray) -> np.ndarray:
        """Return bool, in the shape of `episodes`: True for episodes that have tokens in other
        micro-batches as well."""
        return np.isin(episodes, np.flatnonzero(self.split_episodes))

    def reduce_loss_sums(self) -> np.ndarray:
        """Return `LossSums.to_numpy` of all micro-batches on all ranks.

        Collective; after the last `compute_micro_batch_loss`.
        """
        sums = (
            self._loss_sums
            if self.ranks.is_loss_reporter and self._loss_sums is not None
            else LossSums.zeros()
        )
        mine = sums.to_numpy()
        total = self.ranks.all_reduce(mine, "sum")
        maxima = [LossSums.sum_names().index(name) for name in LossSums.max_names()]
        total[maxima] = self.ranks.all_reduce(mine[maxima], "max")
        # Figures of episodes that are in several micro-batches are computed from their
        # parts on all ranks.
        finished = LossSums.zeros()
        if self.split_episodes.any():
            parts = sums.split_episode_parts.cpu().numpy()
            parts = parts[parts[:, 0] >= 0]
            whole = np.zeros((len(self.split_episodes), 4))
            np.add.at(whole, parts[:, 0].astype(np.int64), parts[:, 1:])
            finished.add_episodes(
                torch.from_numpy(
                    self.ranks.all_reduce(whole.reshape(-1), "sum").reshape(whole.shape)
                )
            )
        total += finished.to_numpy()
        return total

    def measure_drift(self, micro_batch: MicroBatch, rows: np.ndarray, logprobs: Tensor) -> Tensor:
        """Return `sum_drift` of the tokens at `rows` int64 `[M]` of any micro-batch.

        `logprobs` float32 `[M]` are the learner's.
        """
        table = micro_batch.table

        def as_int64(column: np.ndarray) -> Tensor:
            return upload_array(column.astype(np.int64), logprobs.device)

        return sum_drift(
            logprobs,
            upload_array(table["rollout_logprobs"][rows], logprobs.device),
            staleness=as_int64(self.version - table["policy_version"][rows]),
            turns=as_int64(table["turn"][rows]),
            positions=as_int64(micro_batch.positions[rows]),
            token_limit=MAX_TOKEN_K3,
            episodes=as_int64(table["episode"][rows]) if self.episode_count else None,
            episode_count=self.episode_count,
        )

    def _add_drift(self, index: int, logprobs: Tensor) -> None:
        micro_batch = self.micro_batches[index]
        rows = self.trained_rows[index]
        table = micro_batch.table
        probed = (
            np.flatnonzero(table["probed"][rows]) if "probed" in table else np.zeros(0, np.int64)
        )
        probed_logprobs = logprobs[upload_array(probed, logprobs.device)]
        of_trained = self.measure_drift(micro_batch, rows, logprobs)
        of_probed = self.measure_drift(micro_batch, rows[probed], probed_logprobs)
        self._drift_sums.append(torch.stack([of_trained, of_probed]))

    def reduce_drift(self, served: np.ndarray) -> tuple[DriftSums, DriftSums]:
        """Sum drift over all ranks. Collective; after the last `compute_micro_batch_loss`.

        Returns the sums by age, turn and position, `[DRIFT_BINS, 2]`, and by episode,
        `[episode_count, 2]`. `served` is `sum_served_drift` of this rank.
        """
        mine = np.zeros((3, *served.shape))
        if self._drift_sums and self.ranks.is_loss_reporter:
            mine[:2] = torch.stack(self._drift_sums).sum(dim=0).cpu().numpy()
        mine[2] = served
        total = self.ranks.all_reduce(mine.reshape(-1), "sum").reshape(mine.shape)
        return DriftSums(*total[:, :DRIFT_BINS]), DriftSums(*total[:, DRIFT_BINS:])

    # -- traces ------------------------------------------------------------------------------------

    def record_routes(self, routes: MicroBatchRoutes) -> None:
        """Keep the trace of a micro-batch after its forward pass, if this rank has routers."""
        if routes.preferred_experts:
            self._traces.append(routes.build_trace())

    def collect_traces(self) -> list[RouteTrace]:
        """Return the traces, each with its micro-batch's log-probs where this rank has them.

        A last pipeline stage may have no MoE layer and so no trace: its log-probs come with a
        trace of no layer.
        """
        logprobs: dict[tuple[str, ...], np.ndarray] = {}
        for index, values in self._traced_logprobs.items():
            row = np.full(self.micro_batches[index].num_real_tokens, np.nan, np.float32)
            row[self.trained_rows[index]] = values.float().cpu().numpy()
            logprobs[self.micro_batches[index].sample_ids] = row
        traces = [
            msgspec.structs.replace(t, logprobs=logprobs.pop(t.sample_ids, None))
            for t in self._traces
        ]
        none = np.zeros((0, 0, 0), np.uint16)
        for micro_batch in (self.micro_batches[index] for index in self._traced_logprobs):
            samples = micro_batch.sample_ids
            if samples in logprobs:
                starts = micro_batch.cu_seqlens[: len(samples) + 1]
                prefixes = micro_batch.prefixes
                shared = None if prefixes is None else prefixes[: len(samples)]
                traces.append(
                    RouteTrace(samples, starts, 0, [], none, none, logprobs[samples], shared)
                )
        return traces


class ProbeBatches(NamedTuple):
    """The probed episodes of a minibatch on this rank, in separate micro-batches, as
    many on every rank.

    `trained_rows` are the rows of trained tokens in each, int64 `[M]`. Either all ranks have
    micro-batches, or none has.
    """

    micro_batches: list[MicroBatch]
    trained_rows: list[np.ndarray]


class MeasuredMinibatch(NamedTuple):
    """A minibatch after its passes, and what they measured, over all ranks.

    Attributes:
        loss_sums: See `Minibatch.reduce_loss_sums`.
        drift: See `Minibatch.reduce_drift`.
        gap_moments: See `compute_gap_moments`.
    """

    minibatch: Minibatch
    probes: ProbeBatches
    loss_sums: np.ndarray
    drift: DriftSums
    gap_moments: GapMoments
