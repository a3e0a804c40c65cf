"""The learner's step, from top to bottom: groups of trajectories become updates of the
weights, and metrics.

In the learner actor, while the previous step trains, if the groups have arrived by then
(`actors/trajectory_inbox.py`, `NextStep`):

1. A trajectory that cannot be trained is replaced by a placeholder `Trainer.prepare_step`,
   `replace_untrainable`
2. Advantages, minibatches, the weight of every token in the loss      `prepare_minibatches`
3. Each minibatch is planned and packed for the data-parallel ranks    `pack_for_ranks`

When the step begins, the event loop takes the groups and checks their ages (`actors/learner.py`,
`train_step`). On every rank, on its share of the micro-batches (`Trainer.train_step`):

4. Own routes; log-probs: old, of the reference model, of a teacher    `train_minibatches`
5. For each minibatch, and again in each epoch of the step             `train_minibatch`
   - ranks agree on counts, so that the loss's denominators are global `build_minibatch`
   - each micro-batch: forward with routes replayed, loss, backward    `accumulate_gradients`
   - served drift, on the probed episodes                              `sum_served_drift`
   - trust region, clipping, optimizer; too long a step is shortened   `apply_update`
   - metrics, over all ranks                                           `build_minibatch_result`

In the learner actor again:

6. The minibatches' metrics are combined; traces are written `combine_results`,
   `RouteFileTracer.write_trace`

Ranks run the same code. Their inputs differ, but their decisions do not: every decision follows
from figures that were reduced over all ranks. A model has to provide only four things
(`LearnerBackend`): how it is built, `forward`, `score_tokens` and `export_weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.tokens import Sample, Trajectory
from r3async.learner.distillation import add_teacher_advantages
from r3async.learner.drift_metrics import (
    DRIFT_BINS,
    REPLAYED_DRIFT_METRIC,
    SERVED_DRIFT_METRIC,
    SERVED_ESTIMATE_METRIC,
    SERVED_PREDICTION_METRIC,
    compute_gap_moments,
)
from r3async.learner.limited_update import apply_update
from r3async.learner.loss import needs_whole_episodes
from r3async.learner.loss_sums import LossSums
from r3async.learner.metrics import build_minibatch_result, combine_results
from r3async.learner.micro_batches import MicroBatch, pack_for_ranks
from r3async.learner.minibatch import Minibatch, build_minibatch
from r3async.learner.packing_plan import CostModel
from r3async.learner.policy_loss import explain_gspo_clipping, needs_old_logprobs
from r3async.learner.prepare import (
    PreparedStep,
    find_failing_groups,
    prepare_minibatches,
    replace_untrainable,
)
from r3async.learner.results import DriftSums, GapMoments, MinibatchResult, RejectedTrajectory
from r3async.learner.served_drift import (
    build_probes,
    drop_probe_column,
    is_measurement_due,
    sum_served_drift,
)
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


# -- in the learner actor --------------------------------------------------------------------------


class LearnerRanks(Protocol):
    """The learner's ranks, driven as one."""

    def train_minibatches(
        self,
        minibatches: Sequence[Sequence[Sequence[MicroBatch]]],
        *,
        version: int,
        trace: bool = False,
    ) -> list[MinibatchResult]:
        """Run `train_minibatches` on every rank, and return the results with the
        traces of all ranks.

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


class StepOutcome(NamedTuple):
    """The outcome of a step: its metrics, the groups as they were trained, and the trajectories
    that could not be.

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
        """Prepare all of a step that follows from its groups alone, not from the weights or
        the steps before.

        It may run in any thread, also while another step trains. Blocking. Raises `LearnerError` or
        `PackingError` for groups that cannot be trained with this configuration.
        """
        trainable, rejected = replace_untrainable(groups, self.make_placeholder)
        try:
            minibatches, metrics = prepare_minibatches(trainable, self.config)
        except Exception:
            # A group can fail although each of its trajectories is trainable. What fails without
            # such groups is a defect.
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
        """Train step `step` of the run, from weights of `version`: one update for each
        minibatch and epoch.

        Blocking, in the learner's torch thread. Raises the error of a rank that fails.
        """
        results = self.ranks.train_minibatches(
            prepared.micro_batches,
            version=version,
            trace=self.tracer.should_trace(prepared.samples),
        )
        self._log_warnings(step, results)
        with stage("figures"):
            result = combine_results(results, epochs=self.config.schedule.epochs_per_step)
            self.tracer.write_trace(step, prepared.samples, result)
        metrics = (
            result.metrics | prepared.metrics | {"batch/quarantined": float(len(prepared.rejected))}
        )
        # Every epoch repeats all minibatches.
        digests = [
            before | result.digests
            for before, result in zip(itertools.cycle(prepared.digests), results)
        ]
        return StepOutcome(metrics, prepared.groups, prepared.rejected, digests)

    def _digest_minibatches(
        self,
        minibatches: Sequence[Sequence[Sample]],
        packed: Sequence[Sequence[Sequence[MicroBatch]]],
    ) -> list[dict[str, int]]:
        if self.config.observe.record == "off":
            return [{} for _ in minibatches]
        from r3async.learner.digests import digest_packing, digest_samples

        with stage("recording"):
            pairs = zip(minibatches, packed, strict=True)
            return [
                {"advantages": digest_samples(samples), "packing": digest_packing(m)}
                for samples, m in pairs
            ]

    def _pack_minibatch(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        """Return, for each data-parallel rank, its micro-batches; all ranks have
        the same number."""
        learner = self.config.learner
        return pack_for_ranks(
            samples,
            learner.max_tokens_per_micro_batch,
            ranks=learner.parallel.dp,
            cost=self.cost_model,
            # If the loss takes whole episodes, episodes that are in one micro-batch need no
            # further forward pass.
            whole_episodes=needs_whole_episodes(self.config.algorithm),
            share_prefixes=learner.share_prefixes,
        )

    def _log_warnings(self, number: int, results: Sequence[MinibatchResult]) -> None:
        region = self.config.algorithm.rollout_kl
        narrow = explain_gspo_clipping(self.config.algorithm, results[0].metrics)
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
                    hint=(
                        "algorithm.rollout_kl.limit shortens a step to 1/32 at most, and this one "
                        "was made: lower learner.lr or schedule.max_staleness, or set "
                        "algorithm.rollout_kl.max, which makes no update"
                    ),
                )
            if result.metrics["optimizer/broken"]:
                names = (
                    (SERVED_DRIFT_METRIC, SERVED_ESTIMATE_METRIC)
                    if region.measure == "served"
                    else ()
                )
                judged = next(
                    (name for name in names if name in result.metrics), REPLAYED_DRIFT_METRIC
                )
                self.event_log.error(
                    "trust_region_broke",
                    step=number,
                    measured=result.metrics[judged],
                    allowed=region.max,
                    hint=(
                        "algorithm.rollout_kl.max: no update was made; look at staleness, lr and "
                        "routing/agreement"
                    ),
                )


# -- on every rank ---------------------------------------------------------------------------------


def train_minibatches(
    backend: LearnerBackend,
    minibatches: Sequence[Sequence[MicroBatch]],
    *,
    version: int,
    trace: bool = False,
    teacher: LearnerBackend | None = None,
) -> list[MinibatchResult]:
    """Make one optimizer step for each minibatch in each epoch of the step, on this rank's
    micro-batches of them.

    Collective. Results come in the order of the updates, and only the first epoch is traced. Values
    that depend on the model before its first update are computed first: its own routes
    (`routing.replay = learner`), its log-probs, those of the reference model, and those of a
    `teacher` (`algorithm.distillation`).
    """
    config = backend.config
    batches = list(minibatches)
    teacher_metrics: list[dict[str, float]] = [{} for _ in batches]
    # Compute what depends on the weights before the first update.
    with stage("model"):
        if config.routing.replay == "learner":
            batches = [backend.record_learner_routes(batch) for batch in batches]
        if needs_old_logprobs(config.algorithm):
            batches = [
                _add_column(batch, "old_logprobs", backend.logprobs(batch)) for batch in batches
            ]
        if config.algorithm.reference_kl.coef:
            batches = [
                _add_column(
                    batch, "reference_logprobs", backend.logprobs(batch, use_reference=True)
                )
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


def _add_column(
    micro_batches: Sequence[MicroBatch], name: str, values: Sequence[np.ndarray]
) -> list[MicroBatch]:
    return [
        replace(m, table=m.table.with_columns(**{name: v}))
        for m, v in zip(micro_batches, values, strict=True)
    ]


def train_minibatch(
    backend: LearnerBackend,
    micro_batches: Sequence[MicroBatch],
    *,
    version: int | None = None,
    trace: bool = False,
) -> MinibatchResult:
    """Make one optimizer step over all micro-batches, which need the column
    `advantages`. Collective.

    `version` is that of the weights, from which tokens' ages count; by default, the steps taken. A
    token is trained if its `loss_mask` is set and its rollout log-prob is finite (others are
    counted and left out). If no trained token has an advantage, with a gradient that is not finite,
    or with drift beyond `algorithm.rollout_kl.max`, weights, moments and the optimizer's count stay
    as they are and `optimizer/skipped` is 1. Without an advantage the trust region stays, too. With
    `trace` the result has the choices of every router. Raises what `build_minibatch` raises, before
    any forward pass. If a pass fails, it leaves nothing behind.
    """
    version = backend.update_count if version is None else version
    # Let all ranks agree on what is trained and on the denominators, before the first forward pass.
    with stage("figures"):
        micro_batches = drop_probe_column(micro_batches, backend.config, version)
        minibatch = begin_minibatch(backend, micro_batches, version=version, trace=trace)
    # What a minibatch without a trained token has: no loss, no drift and no update.
    total = LossSums.zeros().to_numpy()
    update = backend.optimizer.skip_step(minibatch.skip_cause)
    drift = DriftSums.zeros(DRIFT_BINS)
    moments = GapMoments()
    if minibatch.counts.trained:
        try:
            # Measure served drift on a sample, with the routers' own choice: the weights must be
            # those before the step.
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
                total, (drift, by_episode) = (
                    minibatch.reduce_loss_sums(),
                    minibatch.reduce_drift(served),
                )
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
        return msgspec.structs.replace(
            result,
            digests=backend.stage_digests.pop_digests(backend.optimizer, backend.expert_biases),
        )


def begin_minibatch(
    backend: LearnerBackend,
    micro_batches: Sequence[MicroBatch],
    *,
    version: int | None = None,
    trace: bool = False,
) -> Minibatch:
    """Build the minibatch that ranks agree on before the first forward pass; see
    `build_minibatch`."""
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
