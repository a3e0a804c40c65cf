"""The learner's step, from top to bottom: groups of trajectories become updates of the weights, and metrics.

In the learner actor, while the previous step trains, if the groups have arrived by then
(`actors/learner.py`, `NextStep`):

1. A trajectory that cannot be trained is replaced by a placeholder    `Trainer.prepare_step`, `replace_untrainable`
2. Advantages, minibatches, the weight of every token in the loss      `prepare_minibatches`
3. Each minibatch is planned and packed for the data-parallel ranks    `pack_for_ranks`

When the step begins, the event loop takes the groups and checks their ages (`actors/learner.py`, `train_step`). On every
rank, on its share of the micro-batches (`Trainer.train_step`):

4. Own routes; log-probs: old, of the reference model, of a teacher    `train_minibatches`
5. For each minibatch, and again in each epoch of the step             `train_minibatch`
   - ranks agree on counts, so that the loss's denominators are global `build_minibatch`
   - each micro-batch: forward with routes replayed, loss, backward    `accumulate_gradients`
   - served drift, on the probed episodes                              `sum_served_drift`
   - trust region, clipping, optimizer; too long a step is shortened   `apply_update`
   - metrics, over all ranks                                           `build_minibatch_result`

In the learner actor again:

6. The minibatches' metrics are combined; traces are written           `combine_results`, `RouteFileTracer.write_trace`

Ranks run the same code. Their inputs differ, but their decisions do not: every decision follows from figures that were
reduced over all ranks. A model has to provide only four things (`LearnerBackend`): how it is built, `forward`,
`score_tokens` and `export_weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from r3async.config import Config
from r3async.data.tokens import Sample, Trajectory
from r3async.learner.advantages import assign_advantages
from r3async.learner.backend import SINGLE_RANK, RankGroup
from r3async.learner.batch import CostModel, MicroBatch, pack_for_ranks
from r3async.learner.distillation import add_teacher_advantages
from r3async.learner.kernels import upload_array
from r3async.learner.loss import TokenBatch, compute_loss, compute_loss_weights, needs_whole_episodes, split_by_length
from r3async.learner.metrics import (
    DRIFT_BINS,
    REPLAYED_DRIFT_METRIC,
    SERVED_DRIFT_METRIC,
    SERVED_ESTIMATE_METRIC,
    SERVED_PREDICTION_METRIC,
    LossSums,
    build_minibatch_result,
    combine_results,
    compute_gap_moments,
    sum_drift,
)
from r3async.learner.optimizer import SkipCause
from r3async.learner.policy_loss import explain_gspo_clipping, needs_old_logprobs
from r3async.learner.replay import MicroBatchRoutes, count_recorded_load
from r3async.learner.results import (
    DriftSums,
    GapMoments,
    LearnerError,
    MinibatchResult,
    RejectedTrajectory,
    RouteTrace,
)
from r3async.learner.trust_region import (
    apply_update,
    build_probes,
    drop_probe_column,
    is_measurement_due,
    mark_probed_samples,
    sum_served_drift,
)
from r3async.schedule.validation import check_trajectories, find_invalid
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


# -- in the learner actor ------------------------------------------------------------------------------------------------


class LearnerRanks(Protocol):
    """The learner's ranks, driven as one."""

    def train_minibatches(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """Run `train_minibatches` on every rank, and return the results with the traces of all ranks.

        Each minibatch has the same number of micro-batches for every data-parallel rank.
        """
        ...


class RouteTracer(Protocol):
    """A writer of the routers' choices: `record.routes.RouteFileTracer`."""

    def should_trace(self, samples: Sequence[Sample], /) -> bool:
        """Return True if the step that trains these samples has to be traced."""
        ...

    def write_trace(self, step: int, samples: Sequence[Sample], result: MinibatchResult, /) -> None:
        """Write the trace of step `step`, counted from 1, which trained `samples`."""
        ...


class PreparedStep(NamedTuple):
    """The groups of a step, ready to be trained.

    Attributes:
        groups: The groups, with placeholders for what is `rejected`.
        samples: Their samples, with the learner's columns.
        micro_batches: For each minibatch, the micro-batches of every data-parallel rank.
        metrics: Metrics of the groups and samples.
        digests: For each minibatch, with `observe.record`.
    """

    groups: list[list[Trajectory]]
    rejected: list[RejectedTrajectory]
    samples: list[Sample]
    micro_batches: list[list[list[MicroBatch]]]
    metrics: dict[str, float]
    digests: list[dict[str, int]]


class StepOutcome(NamedTuple):
    """The outcome of a step: its metrics, the groups as they were trained, and the trajectories that could not be.

    `digests` has an entry for each minibatch, with `observe.record`.
    """

    metrics: dict[str, float]
    groups: list[list[Trajectory]]
    rejected: list[RejectedTrajectory]
    digests: list[dict[str, int]]


@dataclass(frozen=True)
class Trainer:
    """Runs the steps of a run.

    Attributes:
        cost_model: The cost of the model's samples.
        event_log: A structlog logger.
        make_placeholder: Returns a placeholder for a trajectory that cannot be trained.
    """

    config: Config
    cost_model: CostModel
    ranks: LearnerRanks
    tracer: RouteTracer
    event_log: Any
    make_placeholder: Callable[[Trajectory], Trajectory]

    def prepare_step(self, groups: Sequence[Sequence[Trajectory]]) -> PreparedStep:
        """Prepare all of a step that follows from its groups alone, not from the weights or the steps before.

        It may run in any thread, also while another step trains. Blocking. Raises `LearnerError` or `PackingError` for
        groups that cannot be trained with this configuration.
        """
        trainable, rejected = replace_untrainable(groups, self.make_placeholder)
        try:
            minibatches, metrics = prepare_minibatches(trainable, self.config)
        except Exception:
            # A group can fail although each of its trajectories is trainable. What fails without such groups is a defect.
            failing_groups = find_failing_groups(trainable, self.config)
            trainable, rejected = replace_untrainable(groups, self.make_placeholder, failing_groups)
            minibatches, metrics = prepare_minibatches(trainable, self.config)
        with stage("pack"):
            packed = [self._pack_minibatch(samples) for samples in minibatches]
        return PreparedStep(
            groups=trainable,
            rejected=rejected,
            samples=[sample for minibatch in minibatches for sample in minibatch],
            micro_batches=packed,
            metrics=metrics,
            digests=self._digest_minibatches(minibatches, packed),
        )

    def train_step(self, step: int, version: int, prepared: PreparedStep) -> StepOutcome:
        """Train step `step` of the run, from weights of `version`: one update for each minibatch and epoch.

        Blocking, in the learner's torch thread. Raises the error of a rank that fails.
        """
        results = self.ranks.train_minibatches(
            prepared.micro_batches, version=version, trace=self.tracer.should_trace(prepared.samples)
        )
        self._log_warnings(step, results)
        with stage("figures"):
            result = combine_results(results, epochs=self.config.schedule.epochs_per_step)
            self.tracer.write_trace(step, prepared.samples, result)
        metrics = result.metrics | prepared.metrics | {"batch/quarantined": float(len(prepared.rejected))}
        # Every epoch repeats all minibatches.
        digests = [before | result.digests for before, result in zip(itertools.cycle(prepared.digests), results)]
        return StepOutcome(metrics, prepared.groups, prepared.rejected, digests)

    def _digest_minibatches(
        self, minibatches: Sequence[Sequence[Sample]], packed: Sequence[Sequence[Sequence[MicroBatch]]]
    ) -> list[dict[str, int]]:
        if self.config.observe.record == "off":
            return [{} for _ in minibatches]
        from r3async.learner.digests import digest_packing, digest_samples

        with stage("recording"):
            pairs = zip(minibatches, packed, strict=True)
            return [{"advantages": digest_samples(samples), "packing": digest_packing(m)} for samples, m in pairs]

    def _pack_minibatch(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        """Return, for each data-parallel rank, its micro-batches; all ranks have the same number."""
        learner = self.config.learner
        return pack_for_ranks(
            samples,
            learner.max_tokens_per_micro_batch,
            ranks=learner.parallel.dp,
            cost=self.cost_model,
            # If the loss takes whole episodes, episodes that are in one micro-batch need no further forward pass.
            whole_episodes=needs_whole_episodes(self.config.algorithm),
            share_prefixes=learner.share_prefixes,
        )

    def _log_warnings(self, number: int, results: Sequence[MinibatchResult]) -> None:
        region, narrow = (
            self.config.algorithm.rollout_kl,
            explain_gspo_clipping(self.config.algorithm, results[0].metrics),
        )
        if number == 1 and narrow:
            self.event_log.warning("gspo_range_within_noise", hint=narrow)
        for result in results:
            if result.metrics["optimizer/beyond_limit"]:
                self.event_log.warning(
                    "drift_beyond_limit",
                    step=number,
                    predicted=result.metrics[SERVED_PREDICTION_METRIC],
                    limit=region.update_limit,
                    step_share=result.metrics["optimizer/step_share"],
                    hint="algorithm.rollout_kl.limit shortens a step to 1/32 at most, and this one was made: lower learner.lr "
                    "or schedule.max_staleness, or set algorithm.rollout_kl.max, which makes no update",
                )
            if result.metrics["optimizer/broken"]:
                names = (SERVED_DRIFT_METRIC, SERVED_ESTIMATE_METRIC) if region.measure == "served" else ()
                judged = next((name for name in names if name in result.metrics), REPLAYED_DRIFT_METRIC)
                self.event_log.error(
                    "trust_region_broke",
                    step=number,
                    measured=result.metrics[judged],
                    allowed=region.max,
                    hint="algorithm.rollout_kl.max: no update was made; look at staleness, lr and routing/agreement",
                )


# The part of a step that follows from its groups alone: trainable trajectories, advantages, minibatches, loss weights.


def replace_untrainable(
    groups: Sequence[Sequence[Trajectory]],
    make_placeholder: Callable[[Trajectory], Trajectory],
    failing_groups: Mapping[int, str] = {},
) -> tuple[list[list[Trajectory]], list[RejectedTrajectory]]:
    """Replace the trajectories that cannot be trained by placeholders, so that these do not end the run.

    The failure does not come back in a later step either. A trajectory is replaced if it is not trainable
    (`check_trajectories`). So are all trajectories of a group in `failing_groups` (`find_failing_groups`): no single one
    is to blame. Returns the groups, and the trajectories that were replaced.
    """
    places = [(g, e) for g, group in enumerate(groups) for e in range(len(group))]
    invalid = find_invalid([trajectory for group in groups for trajectory in group], check_trajectories)
    reasons = {places[index]: str(error) for index, error in invalid.items()}
    for g, reason in failing_groups.items():
        for e in range(len(groups[g])):
            reasons.setdefault((g, e), reason)
    trainable = [
        [make_placeholder(trajectory) if (g, e) in reasons else trajectory for e, trajectory in enumerate(group)]
        for g, group in enumerate(groups)
    ]
    return trainable, [RejectedTrajectory(groups[g][e], reason) for (g, e), reason in reasons.items()]


def find_failing_groups(groups: Sequence[Sequence[Trajectory]], config: Config) -> dict[int, str]:
    """Return the reason of each group, by its index, on which alone `prepare_minibatches` fails."""
    reasons = {}
    for index, group in enumerate(groups):
        try:
            prepare_minibatches([group], config)
        except Exception as error:
            reasons[index] = f"its group cannot be trained: {type(error).__name__}: {error}"
    return reasons


class PlacedSample(NamedTuple):
    """A sample of a step, where it is and what is trained.

    Attributes:
        group: The index of its group.
        episode: The number of its episode in the step.
        trained_mask: bool `[T]`: the tokens that are trained.
    """

    sample: Sample
    group: int
    episode: int
    trained_mask: np.ndarray


def prepare_minibatches(
    groups: Sequence[Sequence[Trajectory]], config: Config
) -> tuple[list[list[Sample]], dict[str, float]]:
    """Return the samples of each minibatch, with the learner's columns, and figures about them.

    The columns are `advantages`, `loss_weights`, `episode`, `place` and `probed`. A group is in one minibatch, with all
    its episodes and all samples of each: scores that are compared stay together, and every unit that the loss is a mean
    over is whole.
    """
    samples, metrics = assign_advantages(groups, config.algorithm, max_new_tokens=config.episode.max_new_tokens)
    placed_groups = _place_samples(groups, samples)
    # No update of the step should be noisier than the others: minibatches have about as many trained tokens each.
    trained_tokens = [sum(int(np.count_nonzero(placed.trained_mask)) for placed in group) for group in placed_groups]
    minibatches = [
        _add_learner_columns([placed for index in part for placed in placed_groups[index]], config)
        for part in partition_groups(trained_tokens, config.schedule.minibatches_per_step)
    ]
    return minibatches, metrics


def _place_samples(groups: Sequence[Sequence[Trajectory]], samples: Sequence[Sample]) -> list[list[PlacedSample]]:
    """Return the samples of each group, from those of all groups in order."""
    placed: list[list[PlacedSample]] = [[] for _ in groups]
    remaining, episode = iter(samples), 0
    for group_index, group in enumerate(groups):
        for trajectory in group:
            for sample in itertools.islice(remaining, len(trajectory.samples)):
                # Without a finite rollout log-prob a token has no ratio.
                trained_mask = sample.table["loss_mask"] & np.isfinite(sample.table["rollout_logprobs"])
                placed[group_index].append(PlacedSample(sample, group_index, episode, trained_mask))
            episode += 1
    return placed


def _add_learner_columns(minibatch: Sequence[PlacedSample], config: Config) -> list[Sample]:
    """Return the samples of a minibatch with the columns that depend on all of it."""
    if not minibatch:
        return []
    samples, masks = [placed.sample for placed in minibatch], [placed.trained_mask for placed in minibatch]
    # Ranks sum figures into arrays with a row for each episode: its number in the minibatch, without gaps.
    episodes = np.unique([placed.episode for placed in minibatch], return_inverse=True)[1].tolist()
    probed = mark_probed_samples(samples, masks, episodes, config)
    # One array for all samples takes half the time of one for each.
    lengths, is_trained = [len(mask) for mask in masks], np.concatenate(masks)
    columns = {
        "loss_weights": compute_loss_weights(
            masks,
            episodes,
            [placed.group for placed in minibatch],
            config.algorithm.reduction,
            norm_length=config.episode.max_new_tokens,
        ),
        "episode": split_by_length(np.repeat(np.asarray(episodes, np.int32), lengths), lengths),
        "place": split_by_length(np.where(is_trained, np.cumsum(is_trained) - 1, -1).astype(np.int32), lengths),
    }
    if any(probed):
        columns["probed"] = split_by_length(np.repeat(probed, lengths), lengths)
    return [
        Sample(
            sample.sample_id, sample.table.with_columns(**dict(zip(columns, values, strict=True))), sample.temperature
        )
        for sample, *values in zip(samples, *columns.values(), strict=True)
    ]


def partition_groups(tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Divide groups into `parts` parts with about the same number of trained tokens; deterministic.

    Returns the indices of the groups of each part, in order. The longest come first, each to the part that has the
    least so far. Parts that would be empty are left out.
    """
    held, members = [0] * parts, [[] for _ in range(parts)]  # type: ignore[var-annotated]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        least = min(range(parts), key=lambda p: (held[p], len(members[p]), p))
        members[least].append(index)
        held[least] += tokens[index]
    return [sorted(m) for m in members if m]


# -- on every rank -------------------------------------------------------------------------------------------------------


def train_minibatches(
    backend: LearnerBackend,
    minibatches: Sequence[Sequence[MicroBatch]],
    *,
    version: int,
    trace: bool = False,
    teacher: LearnerBackend | None = None,
) -> list[MinibatchResult]:
    """Make one optimizer step for each minibatch in each epoch of the step, on this rank's micro-batches of them.

    Collective. Results come in the order of the updates, and only the first epoch is traced. Values that depend on the
    model before its first update are computed first: its own routes (`routing.replay = learner`), its log-probs, those
    of the reference model, and those of a `teacher` (`algorithm.distillation`).
    """
    config, batches = backend.config, list(minibatches)
    teacher_metrics: list[dict[str, float]] = [{} for _ in batches]
    # Compute what depends on the weights before the first update.
    with stage("model"):
        if config.routing.replay == "learner":
            batches = [backend.record_learner_routes(batch) for batch in batches]
        if needs_old_logprobs(config.algorithm):
            batches = [_add_column(batch, "old_logprobs", backend.logprobs(batch)) for batch in batches]
        if config.algorithm.reference_kl.coef:
            batches = [
                _add_column(batch, "reference_logprobs", backend.logprobs(batch, use_reference=True))
                for batch in batches
            ]
        if teacher is not None:
            for i, batch in enumerate(batches):
                batches[i], teacher_metrics[i] = add_teacher_advantages(
                    teacher, batch, config.algorithm.distillation, backend.ranks
                )
    # Make an update for each minibatch, epoch by epoch.
    results: list[MinibatchResult] = []
    for epoch in range(config.schedule.epochs_per_step):
        for batch, metrics in zip(batches, teacher_metrics, strict=True):
            result = train_minibatch(backend, batch, version=version, trace=trace and epoch == 0)
            results.append(msgspec.structs.replace(result, metrics=result.metrics | metrics))
    return results


def _add_column(micro_batches: Sequence[MicroBatch], name: str, values: Sequence[np.ndarray]) -> list[MicroBatch]:
    return [replace(m, table=m.table.with_columns(**{name: v})) for m, v in zip(micro_batches, values, strict=True)]


def train_minibatch(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
) -> MinibatchResult:
    """Make one optimizer step over all micro-batches, which need the column `advantages`. Collective.

    `version` is that of the weights, from which tokens' ages count; by default, the steps taken. A token is trained if
    its `loss_mask` is set and its rollout log-prob is finite (others are counted and left out). If no trained token has
    an advantage, with a gradient that is not finite, or with drift beyond `algorithm.rollout_kl.max`, weights, moments
    and the optimizer's count stay as they are and `optimizer/skipped` is 1. Without an advantage the trust region
    stays, too. With `trace` the result has the choices of every router. Raises what `build_minibatch` raises, before
    any forward pass. If a pass fails, it leaves nothing behind.
    """
    version = backend.update_count if version is None else version
    # Let all ranks agree on what is trained and on the denominators, before the first forward pass.
    with stage("figures"):
        micro_batches = drop_probe_column(micro_batches, backend.config, version)
        minibatch = begin_minibatch(backend, micro_batches, version=version, trace=trace)
    # What a minibatch without a trained token has: no loss, no drift and no update.
    total, update = LossSums.zeros().to_numpy(), backend.optimizer.skip_step(minibatch.skip_cause)
    drift, moments = DriftSums.zeros(DRIFT_BINS), GapMoments()
    if minibatch.counts.trained:
        try:
            # Measure served drift on a sample, with the routers' own choice: the weights must be those before the step.
            with stage("probe"):
                probes = build_probes(backend, minibatch, micro_batches)
                replays = backend.replay.is_enabled and backend.replay.num_moe_layers > 0
                served_differs = replays and bool(probes.trained_rows)
                if served_differs and is_measurement_due(backend.config, version):
                    served = sum_served_drift(backend, minibatch, probes)
                else:
                    served = np.zeros((minibatch.drift_bin_count, 2))
            # Run every micro-batch forward with its recorded routes, and backward.
            with stage("model"):
                accumulate_gradients(backend, minibatch)
            # Sum loss and drift over ranks.
            with stage("figures"):
                total, (drift, by_episode) = minibatch.reduce_loss_sums(), minibatch.reduce_drift(served)
                if not served_differs:  # without replay every pass uses the routers' own choice
                    drift = drift._replace(probed_served=drift.probed_replayed)
                    by_episode = by_episode._replace(probed_served=by_episode.probed_replayed)
                moments = compute_gap_moments(by_episode, backend.trust_region.mean_gap_variance)
            # Clip, step, and let the trust region shorten or skip the step.
            with stage("optimizer"):
                update = apply_update(backend, minibatch, probes, total, drift, moments)
        except BaseException:
            # Leave no gradient that the next step would add to.
            backend.abort_step()
            raise
    with stage("figures"):
        result = build_minibatch_result(minibatch, total, drift, moments, update, backend.replay)
    if not update.cause:
        # Routers that are balanced without a loss follow the load of what was trained.
        backend.update_expert_biases(result.expert_load)
    if backend.stage_digests is None:
        return result
    with stage("recording"):
        return msgspec.structs.replace(result, digests=backend.stage_digests.pop_digests(backend))


def begin_minibatch(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
) -> Minibatch:
    """Build the minibatch that ranks agree on before the first forward pass; see `build_minibatch`."""
    replay = backend.replay
    return build_minibatch(
        backend.pad_for_parallel(micro_batches),
        backend.config,
        version=backend.update_count if version is None else version,
        rollout_kl_coef=backend.trust_region.coef,
        ranks=backend.ranks,
        needs_routes=replay.is_enabled and replay.num_moe_layers > 0,
        routing_shape=(replay.num_moe_layers, replay.num_experts),
        skip_untrained=backend.can_skip_untrained,
        trace=trace,
    )


# -- agreement of ranks before the first forward pass --------------------------------------------------------------------


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

    Counts are summed over the data-parallel ranks, so that the loss's denominator is global and known before the first
    micro-batch.

    Raises `LearnerError`, on every rank alike, if too few of the routes that replay needs were recorded, or if the
    ranks were given different numbers of micro-batches; and what `find_trained_tokens` raises.

    Args:
        needs_routes: Recorded routes are used.
        routing_shape: MoE layers and experts of the model.
        skip_untrained: Leave out micro-batches in which nothing is trained; only where no other rank waits for this
            one.
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
    """Return what a unit of a router's probability of an expert adds to the loss, `coef * experts * f_i / tokens`.

    With the load known beforehand, the term is a plain sum over tokens.
    """
    layers, experts = routing
    if not coef or not layers:
        return None
    mine = count_recorded_load(micro_batches if ranks.is_batch_reporter else (), layers, experts)
    load = ranks.all_reduce(mine.reshape(-1), "sum").reshape(mine.shape)
    share = load / np.maximum(load.sum(axis=1, keepdims=True), 1.0)
    return coef * experts * share / max(tokens, 1.0)


def accumulate_gradients(backend: LearnerBackend, minibatch: Minibatch) -> None:
    """Run forward with replay, loss and backward for every micro-batch.

    Gradients of this rank's tokens add up in the optimizer.
    """
    if minibatch.needs_global_logprobs:
        minibatch.set_global_logprobs(backend.logprobs(minibatch.micro_batches, trained_only=True))
    with backend.replay.use_aux_loss(minibatch.aux_loss_weights):
        backend.run_micro_batches(
            minibatch.micro_batches,
            minibatch.trained_rows,
            minibatch.compute_micro_batch_loss
            if backend.stage_digests is None
            else backend.stage_digests.wrap_loss(minibatch.compute_micro_batch_loss),
            on_routes=minibatch.record_routes if minibatch.records_traces else None,
            backward=True,
        )


# One minibatch on one rank: its trained tokens, their denominators, and the loss of each micro-batch.


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
        episode_index: int64 `[M]`: the number in the minibatch of each token's episode. Without the column `episode`
            each sample is an episode: -1 for the first of them, -2, ...
        token_index: int `[M]`: the tokens' numbers in the minibatch; empty without the column `place`.
    """

    rows: np.ndarray
    episode_index: np.ndarray
    token_index: np.ndarray
    counts: TokenCounts


def find_trained_tokens(micro_batch: MicroBatch) -> TrainedTokens:
    """Find the trained tokens of a micro-batch.

    Raises `LearnerError` if the first token of a sample, which nothing predicts, is to be trained, if the column
    `advantages` is missing, or if a trained token has no episode though others have.
    """
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
    """One minibatch on this rank, built by `build_minibatch`.

    `counts` are those of all ranks; everything else is this rank's.

    Attributes:
        version: The version of the weights that are trained, from which tokens' ages count.
        rollout_kl_coef: The coefficient of the trust region.
        trained_tokens: The trained tokens of each of `micro_batches`.
        token_index_count: The number of places in the minibatch.
        split_episodes: bool `[episodes]`: the episodes that have trained tokens in more than one micro-batch of all
            ranks.
        aux_loss_weights: float64 `[layers, experts]` for `RoutingReplay.use_aux_loss`; None without
            `algorithm.router_aux`.
    """

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
    """Columns of the trained tokens of all ranks, if `set_global_logprobs` was called."""
    _loss_sums: LossSums | None = field(init=False, default=None)
    _drift_sums: list[Tensor] = field(init=False, default_factory=list)
    """float64 `[2, drift_bin_count, 2]` for each trained micro-batch: `sum_drift` of its tokens, and of the probed ones."""
    _traces: list[RouteTrace] = field(init=False, default_factory=list)
    _traced_logprobs: dict[int, Tensor] = field(init=False, default_factory=dict)
    """Log-probs of each micro-batch's trained tokens, with `records_traces`."""

    @property
    def trained_rows(self) -> list[np.ndarray]:
        """The trained rows of each micro-batch, int64 `[M]`."""
        return [c.rows for c in self.trained_tokens]

    @property
    def needs_global_logprobs(self) -> bool:
        """True if `set_global_logprobs` has to be called before the first `compute_micro_batch_loss`; the same on all
        ranks."""
        return bool(self.split_episodes.any()) and needs_whole_episodes(self.config.algorithm)

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
        """The reason to make no update, whatever the gradient; the same on every rank. Empty: one may be made.

        Without an advantage the gradient of the policy loss is 0, and what the other terms leave is rounding noise,
        which Adam would scale to a full step.
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
        self._global_columns = gather_token_columns(places, columns, self.token_index_count, self.ranks)

    def compute_micro_batch_loss(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """Return the scalar loss of micro-batch `index`, and add its sums.

        `logprobs` and `entropies` are float32 `[M]`, for its `trained_rows`.
        """
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

    def _build_token_batch(self, index: int, logprobs: Tensor, entropies: Tensor) -> tuple[TokenBatch, Tensor, Tensor]:
        """Return the tokens that the loss of micro-batch `index` takes, with log-probs and entropies of all of them.

        They are its trained tokens; and if `set_global_logprobs` was called, all trained tokens of their episodes.
        """
        tokens, device = self.trained_tokens[index], logprobs.device
        columns, is_in_micro_batch = self._select_loss_columns(index), None
        if self._global_columns and self._is_split(tokens.episode_index).any():
            columns, positions = select_episode_columns(self._global_columns, tokens.episode_index, tokens.token_index)
            rows = upload_array(positions, device)
            is_in_micro_batch = torch.zeros(len(columns["episode"]), dtype=torch.bool, device=device)
            is_in_micro_batch.index_fill_(0, rows, True)
            logprobs, entropies = merge_logprobs(columns["logprobs"], rows, logprobs, entropies)
        episodes, episode_index = np.unique(columns["episode"], return_inverse=True)
        names = [name for name in (*LOSS_COLUMNS, "weights", "staleness") if name in columns]
        batch = TokenBatch(
            **{name: upload_array(columns[name], device) for name in names},
            episode_index=upload_array(episode_index, device),
            num_episodes=len(episodes),
            in_micro_batch=is_in_micro_batch,
            split_episode_ids=upload_array(np.where(self._is_split(episodes), episodes, -1), device),
        )
        return batch, logprobs, entropies

    def _select_loss_columns(self, index: int) -> TokenColumns:
        """Return the columns that the loss takes, for the trained rows of micro-batch `index`.

        Without the column `loss_weights` every trained token of the minibatch has the same weight (`token_mean`).
        """
        table, tokens = self.micro_batches[index].table, self.trained_tokens[index]
        equal_weights = np.full(len(tokens.rows), 1 / max(self.counts.trained, 1), np.float32)
        return {name: table[name][tokens.rows] for name in LOSS_COLUMNS if name in table} | {
            "weights": table["loss_weights"][tokens.rows] if "loss_weights" in table else equal_weights,
            "staleness": self.version - table["policy_version"][tokens.rows],
            "episode": tokens.episode_index,
        }

    def _is_split(self, episodes: np.ndarray) -> np.ndarray:
        """Return bool, in the shape of `episodes`: True for episodes that have tokens in other micro-batches as well."""
        return np.isin(episodes, np.flatnonzero(self.split_episodes))

    def reduce_loss_sums(self) -> np.ndarray:
        """Return `LossSums.to_numpy` of all micro-batches on all ranks.

        Collective; after the last `compute_micro_batch_loss`.
        """
        sums = self._loss_sums if self.ranks.is_loss_reporter and self._loss_sums is not None else LossSums.zeros()
        mine = sums.to_numpy()
        total = self.ranks.all_reduce(mine, "sum")
        maxima = [LossSums.sum_names().index(name) for name in LossSums.max_names()]
        total[maxima] = self.ranks.all_reduce(mine[maxima], "max")
        # Figures of episodes that are in several micro-batches are computed from their parts on all ranks.
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
            token_limit=self.config.algorithm.rollout_kl.token_limit,
            episodes=as_int64(table["episode"][rows]) if self.episode_count else None,
            episode_count=self.episode_count,
        )

    def _add_drift(self, index: int, logprobs: Tensor) -> None:
        micro_batch, rows = self.micro_batches[index], self.trained_tokens[index].rows
        table = micro_batch.table
        probed = np.flatnonzero(table["probed"][rows]) if "probed" in table else np.zeros(0, np.int64)
        probed_logprobs = logprobs[upload_array(probed, logprobs.device)]
        of_trained = self.measure_drift(micro_batch, rows, logprobs)
        of_probed = self.measure_drift(micro_batch, rows[probed], probed_logprobs)
        self._drift_sums.append(torch.stack([of_trained, of_probed]))

    def reduce_drift(self, served: np.ndarray) -> tuple[DriftSums, DriftSums]:
        """Sum drift over all ranks. Collective; after the last `compute_micro_batch_loss`.

        Returns the sums by age, turn and position, `[DRIFT_BINS, 2]`, and by episode, `[episode_count, 2]`. `served` is
        `sum_served_drift` of this rank.
        """
        mine = np.zeros((3, *served.shape))
        if self._drift_sums and self.ranks.is_loss_reporter:
            mine[:2] = torch.stack(self._drift_sums).sum(dim=0).cpu().numpy()
        mine[2] = served
        total = self.ranks.all_reduce(mine.reshape(-1), "sum").reshape(mine.shape)
        return DriftSums(*total[:, :DRIFT_BINS]), DriftSums(*total[:, DRIFT_BINS:])

    # -- traces ----------------------------------------------------------------------------------------------------

    def record_routes(self, index: int, routes: MicroBatchRoutes) -> None:
        """Keep the trace of a micro-batch after its forward pass, if this rank has routers."""
        if routes.preferred_experts:
            self._traces.append(routes.build_trace())

    def collect_traces(self) -> list[RouteTrace]:
        """Return the traces, each with its micro-batch's log-probs where this rank has them.

        A last pipeline stage may have no MoE layer and so no trace: its log-probs come with a trace of no layer.
        """
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


# Episodes whose samples are in several micro-batches, of this rank or of others.
#
# A loss that takes whole episodes (`loss.needs_whole_episodes`) is given every trained token of an episode in each
# micro-batch that has one of them. The learner's log-probs of tokens elsewhere come from a forward pass before the
# first backward pass, with the same weights; the other columns are known. Each token has a unique number in the
# minibatch, the column `place`, so that a sum over ranks gathers all of them.


TokenColumns = dict[str, np.ndarray]
"""Columns of trained tokens by name, each `[M]`."""
LOSS_COLUMNS = ("rollout_logprobs", "advantages", "old_logprobs", "reference_logprobs")
"""Columns of a micro-batch's table that the loss takes as they are, where the table has them."""


def find_split_episodes(episodes: Sequence[np.ndarray], count: int, ranks: RankGroup) -> np.ndarray:
    """Return bool `[count]`: the episodes that have trained tokens in more than one micro-batch of all ranks.

    Collective.

    `episodes` has an array for each micro-batch, see `TrainedTokens`.
    """
    held = np.zeros(count)
    for found in episodes:
        held[np.unique(found[found >= 0])] += ranks.is_batch_reporter
    return ranks.all_reduce(held, "sum") > 1 if count else held > 1


def gather_token_columns(
    places: Sequence[np.ndarray], columns: Sequence[TokenColumns], count: int, ranks: RankGroup
) -> TokenColumns:
    """Return the columns of all trained tokens of the minibatch, of all ranks, in the order of their places.

    Collective.

    Args:
        places: int `[M]` for each micro-batch of this rank, each below `count`.
        columns: Columns for each micro-batch of this rank; the same columns on every rank.
    """
    names = list(columns[0])
    table = np.zeros((len(names) + 1, count))
    for place, mine in zip(places, columns, strict=True):
        if ranks.is_batch_reporter:
            table[0, place] = 1
            for row, name in enumerate(names, 1):
                table[row, place] = mine[name]
    table = ranks.all_reduce(table.reshape(-1), "sum").reshape(table.shape)
    there = table[0] > 0
    return {
        name: values[there].astype(columns[0][name].dtype) for name, values in zip(names, table[1:], strict=True)
    } | {"place": np.flatnonzero(there)}


def select_episode_columns(
    everywhere: TokenColumns, episodes: np.ndarray, places: np.ndarray
) -> tuple[TokenColumns, np.ndarray]:
    """Return the columns of all tokens of those episodes, and the positions of `places` in them.

    The columns are in the order of the tokens' places. `places` are int `[M]`, positions int64 `[M]`. `everywhere`
    comes from `gather_token_columns`.
    """
    rows = np.flatnonzero(np.isin(everywhere["episode"], episodes))
    columns = {name: values[rows] for name, values in everywhere.items()}
    return columns, np.searchsorted(columns["place"], places)


def merge_logprobs(everywhere: np.ndarray, rows: Tensor, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of all tokens of some episodes, `[A]`.

    Log-probs are `everywhere`, as they were computed before; at `rows` int64 `[M]` they have the gradient of `logprobs`
    `[M]`. So every micro-batch sees the same values, to the last bit, and decides alike. Entropies are 0 except at
    `rows`.
    """
    before = upload_array(everywhere, logprobs.device).to(logprobs.dtype)
    mine = before[rows] + (logprobs - logprobs.detach())
    return before.index_copy(0, rows, mine), torch.zeros_like(before).index_copy(0, rows, entropies)
