"""One optimizer step of the learner: from groups of trajectories to metrics. Blocking; called in the torch thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from r3async.batching.cost import Cost
from r3async.batching.packing import pack_for_ranks
from r3async.config import Config
from r3async.learners.prepare import prepare
from r3async.learners.sound import Unsound, sound
from r3async.observe.tracing import StepTracer
from r3async.records import Trajectory

if TYPE_CHECKING:
    from actors.ranks import LocalLearner, RankedLearner


class TrainedGroups(NamedTuple):
    """What a step did: its metrics, the groups as they were trained, and what of them could not be."""

    metrics: dict[str, float]
    groups: list[list[Trajectory]]
    unsound: list[Unsound]


@dataclass(frozen=True)
class StepOf:
    """Step `number` of a run, from weights of `version`. `events`: a structlog logger."""

    number: int
    version: int
    config: Config
    cost: Cost
    tracer: StepTracer
    events: Any

    def train(
        self,
        backend: LocalLearner | RankedLearner,
        groups: Sequence[Sequence[Trajectory]],
        stand_in: Callable[[Trajectory], Trajectory],
    ) -> TrainedGroups:
        """Pack the groups' tokens for the ranks, update once for each minibatch, and trace what is to be traced. `stand_in`: of a
        trajectory that cannot be trained."""
        from r3async.algorithms.objective import takes_episodes
        from r3async.learners.step import MEASURED_DRIFT, combined

        kept = sound(groups, lambda some: prepare(some, self.config), stand_in)
        minibatches, metrics = kept.made
        samples = [s for part in minibatches for s in part]
        learner = self.config.learner
        packed = [
            pack_for_ranks(
                part,
                learner.max_tokens_per_micro_batch,
                ranks=learner.parallel.dp,
                cost=self.cost,
                # Where the loss takes whole episodes, those that are in one micro-batch need no further forward pass.
                whole_episodes=takes_episodes(self.config.algorithm),
            )
            for part in minibatches
        ]
        results = backend.train(packed, version=self.version, trace=self.tracer.wants(samples))
        for result in results:
            if result.metrics["optimizer/broken"]:
                self.events.error(
                    "trust_region_broke",
                    step=self.number,
                    measured=result.metrics[MEASURED_DRIFT],
                    allowed=self.config.algorithm.rollout_kl.max,
                    hint="algorithm.rollout_kl.max: no update was made; look at staleness, lr and routing/agreement",
                )
        result = combined(results)
        self.tracer.write(self.number, samples, result)
        counted = {"batch/quarantined": float(len(kept.unsound))}
        return TrainedGroups(result.metrics | metrics | counted, kept.groups, kept.unsound)
