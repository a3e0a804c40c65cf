"""The learner's step, from top to bottom: groups of trajectories become updates of the weights, and metrics.

In the learner actor, beside the step before, if the groups are there by then (`actors/reception.py`, `Ahead`):

1. What cannot be trained has a stand-in in its place                         `Trainer.prepared`, `sound`
2. Advantages, minibatches, the weight of every token in the loss             `prepare`
3. Each minibatch is planned and packed for the data-parallel ranks           `pack_for_ranks`

When the step begins, the event loop takes the groups and checks their ages (`actors/learner.py`, `train_step`). On every rank, on
its share of the micro-batches (`Trainer.step`):

4. Own routes, old log-probs, those of the reference model                    `train_share`
5. For each minibatch                                                         `train_minibatch`
   - ranks agree on counts, so that the loss's denominators are global        `agreed`
   - each micro-batch: forward with its routes replayed, loss, backward       `backward`
   - trust region, clipping, optimizer                                        `take_update`
   - metrics, over all ranks                                                  `result_of`

In the learner actor again:

6. The minibatches' metrics as one, and traces                                `combined`, `StepTracer.write`

Ranks run the same lines. What they are given differs, and what they decide does not: every decision follows from figures
that were reduced over all of them. A model is asked four things only (`LearnerBackend`): how it was built, `forward`, `scores`
and `export`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from r3async.config import Config
from r3async.data.records import Sample, Trajectory
from r3async.learner import MinibatchResult, Unsound
from r3async.learner.batch.packing import MicroBatch, pack_for_ranks
from r3async.learner.batch.planner import Cost
from r3async.learner.figures import MEASURED_DRIFT, ObjectiveSums, combined, result_of
from r3async.learner.losses.advantages import assign_advantages
from r3async.learner.losses.objective import divided, loss_weights, takes_episodes
from r3async.learner.losses.policy_loss import needs_old_logprobs
from r3async.learner.minibatch import Minibatch, agreed
from r3async.learner.optimizer import Update
from r3async.schedule.validation import check_trajectories, refused
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend

T = TypeVar("T")

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
    learner's columns, and of each minibatch the `micro_batches` for every data-parallel rank. `metrics`: about them."""

    groups: list[list[Trajectory]]
    unsound: list[Unsound]
    samples: list[Sample]
    micro_batches: list[list[list[MicroBatch]]]
    metrics: dict[str, float]


class TrainedGroups(NamedTuple):
    """What a step did: its metrics, the groups as they were trained, and what of them could not be."""

    metrics: dict[str, float]
    groups: list[list[Trajectory]]
    unsound: list[Unsound]


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
        return Prepared(kept.groups, kept.unsound, [s for part in minibatches for s in part], packed, metrics)

    def step(self, number: int, version: int, prepared: Prepared) -> TrainedGroups:
        """Step `number` of the run, from weights of `version`: one update for each minibatch. Blocking, in the learner's torch
        thread. Raises what a rank fails with."""
        groups, unsound, samples, micro_batches, figures = prepared
        results = self.ranks.train(micro_batches, version=version, trace=self.tracer.wants(samples))

        self._report(number, results)
        with stage("figures"):
            result = combined(results)
            self.tracer.write(number, samples, result)
        metrics = result.metrics | figures | {"batch/quarantined": float(len(unsound))}
        return TrainedGroups(metrics, groups, unsound)

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
        for result in results:
            if result.metrics["optimizer/broken"]:
                self.events.error(
                    "trust_region_broke",
                    step=number,
                    measured=result.metrics[MEASURED_DRIFT],
                    allowed=self.config.algorithm.rollout_kl.max,
                    hint="algorithm.rollout_kl.max: no update was made; look at staleness, lr and routing/agreement",
                )


class Sound(NamedTuple, Generic[T]):
    """`groups`: those of the step, with stand-ins for what is `unsound`; `made`: of them."""

    groups: list[list[Trajectory]]
    made: T
    unsound: list[Unsound]


def sound(
    groups: Sequence[Sequence[Trajectory]],
    make: Callable[[Sequence[Sequence[Trajectory]]], T],
    stand_in: Callable[[Trajectory], Trajectory],
) -> Sound[T]:
    """`make(groups)`, without what it cannot take: whatever fails in it does not end the run, nor is it met again.

    A trajectory that is not trainable (`check_trajectories`) has `stand_in` in its place. So have all of a group of which `make`
    fails though each of its members is: nobody in particular is to blame. Raises what `make` raises on what is left: a defect.
    """
    trajectories = [t for group in groups for t in group]
    wrong = refused(trajectories, check_trajectories)
    unsound = [Unsound(trajectories[at], str(error)) for at, error in wrong.items()]
    each = iter([stand_in(t) if at in wrong else t for at, t in enumerate(trajectories)])

    def alone(group: list[Trajectory]) -> list[Trajectory]:
        try:
            make([group])
        except Exception as error:
            reason = f"its group cannot be trained: {type(error).__name__}: {error}"
            known = {u.trajectory.trajectory_id for u in unsound}
            unsound.extend(Unsound(t, reason) for t in group if t.trajectory_id not in known)
            return [stand_in(t) for t in group]
        return group

    kept = [[next(each) for _ in group] for group in groups]
    try:
        made = make(kept)
    except Exception:
        kept = [alone(group) for group in kept]
        made = make(kept)
    return Sound(kept, made, unsound)


def prepare(groups: Sequence[Sequence[Trajectory]], config: Config) -> tuple[list[list[Sample]], dict[str, float]]:
    """The samples of each minibatch, with the columns `advantages`, `loss_weights`, `episode` and `place`, and figures about
    them.

    A group is in one minibatch, with all its episodes and all samples of each: what is compared stays together, and what
    the loss is a mean over is whole.
    """
    samples, metrics = assign_advantages(groups, config.algorithm, max_new_tokens=config.episode.max_new_tokens)
    # Of each sample: its group, and its episode, by the order in which they come.
    owners = [(g, e) for g, group in enumerate(groups) for e, t in enumerate(group) for _ in t.samples]
    lengths = [len(s.table) for s in samples]
    masks = np.concatenate([s.table["loss_mask"] for s in samples] or [np.zeros(0, bool)])
    finite = np.isfinite(np.concatenate([s.table["rollout_logprobs"] for s in samples] or [np.zeros(0, np.float32)]))
    trained = divided(masks & finite, lengths)
    members: list[list[int]] = [[] for _ in groups]
    for i, (group, _) in enumerate(owners):
        members[group].append(i)
    minibatches: list[list[Sample]] = []
    tokens = [sum(int(trained[i].sum()) for i in of) for of in members]
    for part in divide(tokens, config.schedule.minibatches_per_step):
        chosen = [i for group in part for i in members[group]]
        numbers: dict[tuple[int, int], int] = {}
        episodes = [numbers.setdefault(owners[i], len(numbers)) for i in chosen]
        weights = loss_weights(
            [trained[i] for i in chosen],
            episodes,
            [owners[i][0] for i in chosen],
            config.algorithm.reduction,
            norm_length=config.episode.max_new_tokens,
        )
        sizes = [lengths[i] for i in chosen]
        mask = np.concatenate([trained[i] for i in chosen] or [np.zeros(0, bool)])
        columns = {
            "loss_weights": weights,
            "episode": divided(np.repeat(np.asarray(episodes, np.int32), sizes), sizes),
            "place": divided(np.where(mask, np.cumsum(mask) - 1, -1).astype(np.int32), sizes),
        }
        tables = [
            samples[i].table.with_columns(**{name: values[at] for name, values in columns.items()})
            for at, i in enumerate(chosen)
        ]
        minibatches.append(
            [Sample(samples[i].sample_id, t, samples[i].temperature) for i, t in zip(chosen, tables, strict=True)]
        )
    return minibatches, metrics


def divide(tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of groups in `parts` parts with about the same number of trained tokens, each in order; deterministic.

    The longest come first, each to the part that has the least so far. Parts that would be empty are left out.
    """
    held, members = [0] * parts, [[] for _ in range(parts)]  # type: ignore[var-annotated]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        least = min(range(parts), key=lambda p: (held[p], len(members[p]), p))
        members[least].append(index)
        held[least] += tokens[index]
    return [sorted(m) for m in members if m]


# -- on every rank -------------------------------------------------------------------------------------------------------


def train_share(
    backend: LearnerBackend, minibatches: Sequence[Sequence[MicroBatch]], *, version: int, trace: bool = False
) -> list[MinibatchResult]:
    """One optimizer step for each minibatch, of which this rank has these micro-batches. Collective.

    What is asked of the model as it is before the first of them comes first: its own routes (`routing.replay = learner`), its
    log-probs, those of the reference model.
    """
    config, batches = backend.config, list(minibatches)
    with stage("model"):
        if config.routing.replay == "learner":
            batches = [backend.record_routes(b) for b in batches]
        if needs_old_logprobs(config.algorithm):
            batches = [_with_column(b, "old_logprobs", backend.logprobs(b)) for b in batches]
        if config.algorithm.reference_kl.coef:
            batches = [_with_column(b, "reference_logprobs", backend.logprobs(b, reference=True)) for b in batches]
    return [train_minibatch(backend, b, version=version, trace=trace) for b in batches]


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
    with stage("figures"):
        minibatch = begin(backend, micro_batches, version=version, trace=trace)
    total, update = ObjectiveSums.zero().values(), backend.optimizer.skip(minibatch.cause)
    if minibatch.counts.trained:
        try:
            with stage("model"):
                backward(backend, minibatch)
            with stage("figures"):
                total = minibatch.total()
            with stage("optimizer"):
                update = take_update(backend, minibatch, drift=ObjectiveSums.metrics_of(total)[MEASURED_DRIFT])
        except BaseException:
            backend.forget()
            raise
    with stage("figures"):
        return result_of(minibatch, total, update, backend.replay)


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
            minibatch.loss,
            visit=minibatch.saw if minibatch.trace else None,
            backward=True,
        )


def take_update(backend: LearnerBackend, minibatch: Minibatch, drift: float) -> Update:
    """Clip and make the optimizer's step, unless there is a cause not to, or the measured `drift` is beyond `rollout_kl.max`.

    The coefficient of the next step follows from the drift measured in this one, if this one has contrast.
    """
    optimizer, trust_region = backend.optimizer, backend.trust_region
    if minibatch.cause:
        return optimizer.skip(minibatch.cause if math.isfinite(drift) else "not_finite")
    update = optimizer.skip("trust_region") if trust_region.breaks(drift) else optimizer.step()
    trust_region.update(drift)
    return update
