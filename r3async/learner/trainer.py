"""The learner's step, from top to bottom: groups of trajectories become updates of the weights, and metrics.

In the learner actor, beside the step before, if the groups are there by then (`actors/reception.py`, `NextStep`):

1. What cannot be trained has a stand-in in its place                         `Trainer.prepare_step`, `replace_untrainable`
2. Advantages, minibatches, the weight of every token in the loss             `preparation.prepare_minibatches`
3. Each minibatch is planned and packed for the data-parallel ranks           `pack_for_ranks`

When the step begins, the event loop takes the groups and checks their ages (`actors/learner.py`, `train_step`). On every rank, on
its share of the micro-batches (`Trainer.train_step`):

4. Own routes, old log-probs, those of the reference model, a teacher's       `train_minibatches`
5. For each minibatch, and again in each epoch of the step                    `train_minibatch`
   - ranks agree on counts, so that the loss's denominators are global        `build_minibatch`
   - each micro-batch: forward with its routes replayed, loss, backward       `accumulate_gradients`
   - served drift, on the probed episodes                                     `sum_served_drift`
   - trust region, clipping, optimizer, and a step too far is shortened       `apply_update`
   - metrics, over all ranks                                                  `build_minibatch_result`

In the learner actor again:

6. The minibatches' metrics as one, and traces                                `combine_results`, `RouteFileTracer.write_trace`

Ranks run the same lines. What they are given differs, and what they decide does not: every decision follows from figures
that were reduced over all of them. A model is asked four things only (`LearnerBackend`): how it was built, `forward`,
`score_tokens` and `export_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.records import Sample, Trajectory
from r3async.learner import MinibatchResult, RejectedTrajectory
from r3async.learner.batch.packing import MicroBatch, pack_for_ranks
from r3async.learner.batch.planner import CostModel
from r3async.learner.distillation import add_teacher_advantages
from r3async.learner.figures import (
    DRIFT_BINS,
    REPLAYED_DRIFT_METRIC,
    SERVED_DRIFT_METRIC,
    SERVED_ESTIMATE_METRIC,
    LossSums,
    build_minibatch_result,
    combine_results,
    compute_gap_moments,
)
from r3async.learner.losses.objective import needs_whole_episodes
from r3async.learner.losses.policy_loss import explain_gspo_clipping, needs_old_logprobs
from r3async.learner.minibatch import Minibatch, build_minibatch
from r3async.learner.preparation import prepare_minibatches, replace_untrainable
from r3async.learner.served import apply_update, build_probes, drop_probe_column, is_measurement_due, sum_served_drift
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


# -- in the learner actor ------------------------------------------------------------------------------------------------


class LearnerRanks(Protocol):
    """The learner's ranks, driven as one."""

    def train_minibatches(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """`train_minibatches` on every rank; each minibatch has micro-batches for every data-parallel rank, as many for one
        as for another. The traces are those of all ranks."""
        ...


class RouteTracer(Protocol):
    """Who writes down what routers did: `record.routes.RouteFileTracer`."""

    def should_trace(self, samples: Sequence[Sample], /) -> bool:
        """Whether the step that trains these has to be traced."""
        ...

    def write_trace(self, step: int, samples: Sequence[Sample], result: MinibatchResult, /) -> None:
        """Step `step`, from 1, trained `samples`."""
        ...


class PreparedStep(NamedTuple):
    """The groups of a step, ready to be trained: `groups` with stand-ins for what is `rejected`, their `samples` with the
    learner's columns, and of each minibatch the `micro_batches` for every data-parallel rank, and `digests`, with
    `observe.record`. `metrics`: about them."""

    groups: list[list[Trajectory]]
    rejected: list[RejectedTrajectory]
    samples: list[Sample]
    micro_batches: list[list[list[MicroBatch]]]
    metrics: dict[str, float]
    digests: list[dict[str, int]]


class StepOutcome(NamedTuple):
    """What a step did: its metrics, the groups as they were trained, and what of them could not be. `digests`: of each minibatch,
    with `observe.record`."""

    metrics: dict[str, float]
    groups: list[list[Trajectory]]
    rejected: list[RejectedTrajectory]
    digests: list[dict[str, int]]


@dataclass(frozen=True)
class Trainer:
    """Makes the steps of a run. `cost_model`: of the model's samples. `event_log`: a structlog logger. `make_placeholder`: of
    a trajectory that cannot be trained."""

    config: Config
    cost_model: CostModel
    ranks: LearnerRanks
    tracer: RouteTracer
    event_log: Any
    make_placeholder: Callable[[Trajectory], Trajectory]

    def prepare_step(self, groups: Sequence[Sequence[Trajectory]]) -> PreparedStep:
        """All of a step that follows from its groups alone, and not from the weights or the steps before: in any thread, also
        while another step trains. Blocking. Raises `LearnerError` or `PackingError` for groups that cannot be trained with this
        configuration."""
        kept = replace_untrainable(groups, lambda some: prepare_minibatches(some, self.config), self.make_placeholder)
        minibatches, metrics = kept.prepared
        with stage("pack"):
            packed = [self._pack_minibatch(samples) for samples in minibatches]
        samples = [s for part in minibatches for s in part]
        return PreparedStep(
            kept.groups, kept.rejected, samples, packed, metrics, self._digest_minibatches(minibatches, packed)
        )

    def train_step(self, step: int, version: int, prepared: PreparedStep) -> StepOutcome:
        """Step `step` of the run, from weights of `version`: one update for each minibatch and epoch. Blocking, in the
        learner's torch thread. Raises what a rank fails with."""
        groups, unsound, samples, micro_batches, figures, digests = prepared
        results = self.ranks.train_minibatches(micro_batches, version=version, trace=self.tracer.should_trace(samples))

        self._log_warnings(step, results)
        with stage("figures"):
            result = combine_results(results, epochs=self.config.schedule.epochs_per_step)
            self.tracer.write_trace(step, samples, result)
        metrics = result.metrics | figures | {"batch/quarantined": float(len(unsound))}
        # Each epoch has all minibatches again.
        made = [digests[at % len(digests)] | result.digests for at, result in enumerate(results)]
        return StepOutcome(metrics, groups, unsound, made)

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
        """For each data-parallel rank its micro-batches, as many for one as for another."""
        learner = self.config.learner
        return pack_for_ranks(
            samples,
            learner.max_tokens_per_micro_batch,
            ranks=learner.parallel.dp,
            cost=self.cost_model,
            # Where the loss takes whole episodes, those that are in one micro-batch need no further forward pass.
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


# -- on every rank -------------------------------------------------------------------------------------------------------


def train_minibatches(
    backend: LearnerBackend,
    minibatches: Sequence[Sequence[MicroBatch]],
    *,
    version: int,
    trace: bool = False,
    teacher: LearnerBackend | None = None,
) -> list[MinibatchResult]:
    """One optimizer step for each minibatch in each epoch of the step; this rank has these micro-batches of them. Collective.
    Results come in the order of the updates, and the first epoch alone is traced.

    What is asked of the model as it is before the first of them comes first: its own routes (`routing.replay = learner`), its
    log-probs, those of the reference model, and what a `teacher` says (`algorithm.distillation`).
    """
    config, batches = backend.config, list(minibatches)
    figures: list[dict[str, float]] = [{} for _ in batches]
    with stage("model"):
        if config.routing.replay == "learner":
            batches = [backend.record_learner_routes(b) for b in batches]
        if needs_old_logprobs(config.algorithm):
            batches = [_add_column(b, "old_logprobs", backend.logprobs(b)) for b in batches]
        if config.algorithm.reference_kl.coef:
            batches = [_add_column(b, "reference_logprobs", backend.logprobs(b, use_reference=True)) for b in batches]
        if teacher is not None:
            for i, b in enumerate(batches):
                batches[i], figures[i] = add_teacher_advantages(
                    teacher, b, config.algorithm.distillation, backend.ranks
                )
    results: list[MinibatchResult] = []
    for epoch in range(config.schedule.epochs_per_step):
        for b, more in zip(batches, figures, strict=True):
            result = train_minibatch(backend, b, version=version, trace=trace and epoch == 0)
            results.append(msgspec.structs.replace(result, metrics=result.metrics | more))
    return results


def _add_column(micro_batches: Sequence[MicroBatch], name: str, values: Sequence[np.ndarray]) -> list[MicroBatch]:
    return [replace(m, table=m.table.with_columns(**{name: v})) for m, v in zip(micro_batches, values, strict=True)]


def train_minibatch(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
) -> MinibatchResult:
    """One optimizer step over all micro-batches, which need the column `advantages`. Collective.

    `version`: of the weights, from which tokens' ages count; by default, the steps taken. A token is trained if its
    `loss_mask` is set and its rollout log-prob is finite (others are counted and left out). If no trained token has an
    advantage, with a gradient that is not finite, or with drift beyond `algorithm.rollout_kl.max`, weights, moments and
    the optimizer's count stay as they are and `optimizer/skipped` is 1. Without an advantage the trust region stays, too. With
    `trace` the result has what every router did. Raises what `build_minibatch` raises, before any forward pass; whatever a
    pass fails with leaves nothing behind.
    """
    version = backend.update_count if version is None else version
    with stage("figures"):
        micro_batches = drop_probe_column(micro_batches, backend.config, version)
        minibatch = begin_minibatch(backend, micro_batches, version=version, trace=trace)
    total, update = LossSums.zeros().to_numpy(), backend.optimizer.skip_step(minibatch.skip_cause)
    drift, moments = np.zeros((3, DRIFT_BINS, 2)), np.zeros(5)
    if minibatch.counts.trained:
        try:
            with stage("probe"):
                probes = build_probes(backend, minibatch, micro_batches)
                own = bool(probes.trained_rows) and backend.replay.is_enabled and backend.replay.num_moe_layers > 0
                due = own and is_measurement_due(backend.config, version)
                served = (
                    sum_served_drift(backend, minibatch, probes) if due else np.zeros((minibatch.drift_bin_count, 2))
                )
            with stage("model"):
                accumulate_gradients(backend, minibatch)
            with stage("figures"):
                total, (drift, by_episode) = minibatch.reduce_loss_sums(), minibatch.reduce_drift(served)
                if not own:  # without replay every pass routes by itself
                    drift[2], by_episode[2] = drift[1], by_episode[1]
                moments = compute_gap_moments(by_episode, backend.trust_region.mean_gap_variance)
            with stage("optimizer"):
                update = apply_update(backend, minibatch, probes, total, drift, moments)
        except BaseException:
            backend.abort_step()
            raise
    with stage("figures"):
        result = build_minibatch_result(minibatch, total, drift, moments, update, backend.replay)
    if not update.cause:
        backend.update_expert_biases(result.expert_load)
    if backend.stage_digests is None:
        return result
    with stage("recording"):
        return msgspec.structs.replace(result, digests=backend.stage_digests.pop_digests(backend))


def begin_minibatch(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
) -> Minibatch:
    """What ranks agree on before the first forward pass; see `build_minibatch`."""
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
    """Forward with replay, loss, backward, of every micro-batch; gradients of this rank's tokens add up in the optimizer."""
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
