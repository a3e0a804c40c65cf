"""A run's steps, in the learner actor: groups of trajectories become updates and metrics.

While the previous step trains, if the groups have arrived by then (`actors/trajectory_inbox.py`,
`NextStep`):

1. A trajectory that cannot be trained is replaced by a placeholder `Trainer.prepare_step`,
   `replace_untrainable`
2. Advantages, minibatches, the weight of every token in the loss      `prepare_minibatches`
3. Each minibatch is planned and packed for the data-parallel ranks    `pack_for_ranks`

When the step begins (`Trainer.update_weights`):

4. Every rank makes the updates on its share of the micro-batches      `train_step.train_step`
5. The minibatches' metrics are combined; traces are written           `combine_results`,
   `RouteFileTracer.write_trace`
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from r3async.config import Config
from r3async.data.tokens import Sample, Trajectory
from r3async.learner.drift_metrics import (
    REPLAYED_DRIFT_METRIC,
    SERVED_DRIFT_METRIC,
    SERVED_ESTIMATE_METRIC,
    SERVED_PREDICTION_METRIC,
)
from r3async.learner.loss import needs_whole_episodes
from r3async.learner.metrics import combine_results
from r3async.learner.micro_batch_plan import CostModel
from r3async.learner.micro_batches import MicroBatch, pack_for_ranks
from r3async.learner.policy_loss import explain_gspo_clipping
from r3async.learner.prepare import (
    PreparedStep,
    find_failing_groups,
    prepare_minibatches,
    replace_untrainable,
)
from r3async.learner.results import MinibatchResult, RejectedTrajectory
from r3async.world.stages import stage


class LearnerRanks(Protocol):
    """The learner's ranks, driven as one."""

    def run_minibatches(
        self,
        minibatches: Sequence[Sequence[Sequence[MicroBatch]]],
        *,
        version: int,
        trace: bool = False,
    ) -> list[MinibatchResult]:
        """Run `train_step.train_step` on every rank, and return the results with the traces of
        all ranks.

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

    def update_weights(self, step: int, version: int, prepared: PreparedStep) -> StepOutcome:
        """Train step `step` of the run, from weights of `version`: one update for each
        minibatch and epoch.

        Blocking, in the learner's torch thread. Raises the error of a rank that fails.
        """
        results = self.ranks.run_minibatches(
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
