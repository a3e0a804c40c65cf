"""The learner's step, from top to bottom: groups of trajectories become updates of the weights, and metrics.

In the learner actor, beside the step before, if the groups are there by then (`actors/reception.py`, `Ahead`):

1. What cannot be trained has a stand-in in its place                         `Trainer.prepared`, `preparation.sound`
2. Advantages, minibatches, the weight of every token in the loss             `preparation.prepare`
3. Each minibatch is planned and packed for the data-parallel ranks           `pack_for_ranks`

When the step begins, the event loop takes the groups and checks their ages (`actors/learner.py`, `train_step`). On every rank, on
its share of the micro-batches (`Trainer.step`):

4. Own routes, old log-probs, those of the reference model, a teacher's       `train_share`
5. For each minibatch, and again in each epoch of the step                    `train_minibatch`
   - ranks agree on counts, so that the loss's denominators are global        `agreed`
   - each micro-batch: forward with its routes replayed, loss, backward       `backward`
   - served drift, on the probed episodes                                     `served_sums`
   - trust region, clipping, optimizer, and a step too far is shortened       `take_update`
   - metrics, over all ranks                                                  `result_of`

In the learner actor again:

6. The minibatches' metrics as one, and traces                                `combined`, `StepTracer.write`

Ranks run the same lines. What they are given differs, and what they decide does not: every decision follows from figures
that were reduced over all of them. A model is asked four things only (`LearnerBackend`): how it was built, `forward`, `scores`
and `export`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.records import Sample, Trajectory
from r3async.learner import MinibatchResult, Unsound
from r3async.learner.batch.packing import MicroBatch, pack_for_ranks
from r3async.learner.batch.planner import Cost
from r3async.learner.distillation import taught
from r3async.learner.figures import (
    DRIFT_ROWS,
    MEASURED_DRIFT,
    SERVED_DRIFT,
    SERVED_ESTIMATE,
    ObjectiveSums,
    combined,
    gap_moments,
    result_of,
)
from r3async.learner.losses.objective import takes_episodes
from r3async.learner.losses.policy_loss import needs_old_logprobs, rounding_clips
from r3async.learner.minibatch import Minibatch, agreed
from r3async.learner.preparation import prepare, sound
from r3async.learner.served import is_due, looked_at, probes_of, served_sums, take_update
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


# -- in the learner actor ------------------------------------------------------------------------------------------------


class LearnerRanks(Protocol):
    """The learner's ranks, driven as one."""

    def train(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """`train_share` on every rank; each minibatch has micro-batches for every data-parallel rank, as many for one as for
        another. The traces are those of all ranks."""
        ...


class Tracer(Protocol):
    """Who writes down what routers did: `observe.tracing.StepTracer`."""

    def wants(self, samples: Sequence[Sample], /) -> bool:
        """Whether the step that trains these has to be traced."""
        ...

    def write(self, step: int, samples: Sequence[Sample], result: MinibatchResult, /) -> None:
        """Step `step`, from 1, trained `samples`."""
        ...


class Prepared(NamedTuple):
    """The groups of a step, ready to be trained: `groups` with stand-ins for what is `unsound`, their `samples` with the
    learner's columns, and of each minibatch the `micro_batches` for every data-parallel rank, and `digests`, with
    `observe.record`. `metrics`: about them."""

    groups: list[list[Trajectory]]
    unsound: list[Unsound]
    samples: list[Sample]
    micro_batches: list[list[list[MicroBatch]]]
    metrics: dict[str, float]
    digests: list[dict[str, int]]


class TrainedGroups(NamedTuple):
    """What a step did: its metrics, the groups as they were trained, and what of them could not be. `digests`: of each minibatch,
    with `observe.record`."""

    metrics: dict[str, float]
    groups: list[list[Trajectory]]
    unsound: list[Unsound]
    digests: list[dict[str, int]]


@dataclass(frozen=True)
class Trainer:
    """Makes the steps of a run. `cost`: of the model's samples. `events`: a structlog logger. `stand_in`: of a trajectory that
    cannot be trained."""

    config: Config
    cost: Cost
    ranks: LearnerRanks
    tracer: Tracer
    events: Any
    stand_in: Callable[[Trajectory], Trajectory]

    def prepared(self, groups: Sequence[Sequence[Trajectory]]) -> Prepared:
        """All of a step that follows from its groups alone, and not from the weights or the steps before: in any thread, also
        while another step trains. Blocking. Raises `LearnerError` or `PackingError` for groups that cannot be trained with this
        configuration."""
        kept = sound(groups, lambda some: prepare(some, self.config), self.stand_in)
        minibatches, metrics = kept.made
        with stage("pack"):
            packed = [self._packed(samples) for samples in minibatches]
        samples = [s for part in minibatches for s in part]
        return Prepared(kept.groups, kept.unsound, samples, packed, metrics, self._digests(minibatches, packed))

    def step(self, number: int, version: int, prepared: Prepared) -> TrainedGroups:
        """Step `number` of the run, from weights of `version`: one update for each minibatch and epoch. Blocking, in the
        learner's torch thread. Raises what a rank fails with."""
        groups, unsound, samples, micro_batches, figures, digests = prepared
        results = self.ranks.train(micro_batches, version=version, trace=self.tracer.wants(samples))

        self._report(number, results)
        with stage("figures"):
            result = combined(results, epochs=self.config.schedule.epochs_per_step)
            self.tracer.write(number, samples, result)
        metrics = result.metrics | figures | {"batch/quarantined": float(len(unsound))}
        # Each epoch has all minibatches again.
        made = [digests[at % len(digests)] | result.digests for at, result in enumerate(results)]
        return TrainedGroups(metrics, groups, unsound, made)

    def _digests(
        self, minibatches: Sequence[Sequence[Sample]], packed: Sequence[Sequence[Sequence[MicroBatch]]]
    ) -> list[dict[str, int]]:
        if self.config.observe.record == "off":
            return [{} for _ in minibatches]
        from r3async.learner.digests import of_packing, of_samples

        with stage("recording"):
            pairs = zip(minibatches, packed, strict=True)
            return [{"advantages": of_samples(samples), "packing": of_packing(m)} for samples, m in pairs]

    def _packed(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        """For each data-parallel rank its micro-batches, as many for one as for another."""
        learner = self.config.learner
        return pack_for_ranks(
            samples,
            learner.max_tokens_per_micro_batch,
            ranks=learner.parallel.dp,
            cost=self.cost,
            # Where the loss takes whole episodes, those that are in one micro-batch need no further forward pass.
            whole_episodes=takes_episodes(self.config.algorithm),
            share_prefixes=learner.share_prefixes,
        )

    def _report(self, number: int, results: Sequence[MinibatchResult]) -> None:
        region, narrow = self.config.algorithm.rollout_kl, rounding_clips(self.config.algorithm, results[0].metrics)
        if number == 1 and narrow:
            self.events.warning("gspo_range_within_noise", hint=narrow)
        for result in results:
            if result.metrics["optimizer/broken"]:
                names = (SERVED_DRIFT, SERVED_ESTIMATE) if region.measure == "served" else ()
                judged = next((name for name in names if name in result.metrics), MEASURED_DRIFT)
                self.events.error(
                    "trust_region_broke",
                    step=number,
                    measured=result.metrics[judged],
                    allowed=region.max,
                    hint="algorithm.rollout_kl.max: no update was made; look at staleness, lr and routing/agreement",
                )


# -- on every rank -------------------------------------------------------------------------------------------------------


def train_share(
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
            batches = [backend.record_routes(b) for b in batches]
        if needs_old_logprobs(config.algorithm):
            batches = [_with_column(b, "old_logprobs", backend.logprobs(b)) for b in batches]
        if config.algorithm.reference_kl.coef:
            batches = [_with_column(b, "reference_logprobs", backend.logprobs(b, reference=True)) for b in batches]
        if teacher is not None:
            for i, b in enumerate(batches):
                batches[i], figures[i] = taught(teacher, b, config.algorithm.distillation, backend.ranks)
    results: list[MinibatchResult] = []
    for epoch in range(config.schedule.epochs_per_step):
        for b, more in zip(batches, figures, strict=True):
            result = train_minibatch(backend, b, version=version, trace=trace and epoch == 0)
            results.append(msgspec.structs.replace(result, metrics=result.metrics | more))
    return results


def _with_column(micro_batches: Sequence[MicroBatch], name: str, values: Sequence[np.ndarray]) -> list[MicroBatch]:
    return [replace(m, table=m.table.with_columns(**{name: v})) for m, v in zip(micro_batches, values, strict=True)]


def train_minibatch(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
) -> MinibatchResult:
    """One optimizer step over all micro-batches, which need the column `advantages`. Collective.

    `version`: of the weights, from which tokens' ages count; by default, the steps taken. A token is trained if its
    `loss_mask` is set and its rollout log-prob is finite (others are counted and left out). If no trained token has an
    advantage, with a gradient that is not finite, or with drift beyond `algorithm.rollout_kl.max`, weights, moments and
    the optimizer's count stay as they are and `optimizer/skipped` is 1. Without an advantage the trust region stays, too. With
    `trace` the result has what every router did. Raises what `agreed` raises, before any forward pass; whatever a pass fails
    with leaves nothing behind.
    """
    version = backend.version if version is None else version
    with stage("figures"):
        micro_batches = looked_at(micro_batches, backend.config, version)
        minibatch = begin(backend, micro_batches, version=version, trace=trace)
    total, update = ObjectiveSums.zero().values(), backend.optimizer.skip(minibatch.cause)
    drift, moments = np.zeros((3, DRIFT_ROWS, 2)), np.zeros(5)
    if minibatch.counts.trained:
        try:
            with stage("probe"):
                probes = probes_of(backend, minibatch, micro_batches)
                own = bool(probes.rows) and backend.replay.enabled and backend.replay.layers > 0
                due = own and is_due(backend.config, version)
                served = served_sums(backend, minibatch, probes) if due else np.zeros((minibatch.drift_rows, 2))
            with stage("model"):
                backward(backend, minibatch)
            with stage("figures"):
                total, (drift, by_episode) = minibatch.total(), minibatch.drifts(served)
                if not own:  # without replay every pass routes by itself
                    drift[2], by_episode[2] = drift[1], by_episode[1]
                moments = gap_moments(by_episode, backend.trust_region.usual_variance)
            with stage("optimizer"):
                update = take_update(backend, minibatch, probes, total, drift, moments)
        except BaseException:
            backend.forget()
            raise
    with stage("figures"):
        result = result_of(minibatch, total, drift, moments, update, backend.replay)
    if not update.cause:
        backend.balance_experts(result.expert_load)
    if backend.digests is None:
        return result
    with stage("recording"):
        return msgspec.structs.replace(result, digests=backend.digests.take(backend))


def begin(
    backend: LearnerBackend, micro_batches: Sequence[MicroBatch], *, version: int | None = None, trace: bool = False
) -> Minibatch:
    """What ranks agree on before the first forward pass; see `agreed`."""
    replay = backend.replay
    return agreed(
        backend.aligned(micro_batches),
        backend.config,
        version=backend.version if version is None else version,
        rollout_kl_coef=backend.trust_region.coef,
        ranks=backend.ranks,
        replays=replay.enabled and replay.layers > 0,
        routing=(replay.layers, replay.num_experts),
        skip_untrained=backend.skips_untrained,
        trace=trace,
    )


def backward(backend: LearnerBackend, minibatch: Minibatch) -> None:
    """Forward with replay, loss, backward, of every micro-batch; gradients of this rank's tokens add up in the optimizer."""
    if minibatch.needs_logprobs:
        minibatch.complete(backend.logprobs(minibatch.micro_batches, trained=True))
    with backend.replay.balanced(minibatch.balance):
        backend.feed(
            minibatch.micro_batches,
            minibatch.rows,
            minibatch.loss if backend.digests is None else backend.digests.before(minibatch.loss),
            visit=minibatch.saw if minibatch.trace else None,
            backward=True,
        )
