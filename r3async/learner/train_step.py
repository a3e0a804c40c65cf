"""The learner's step on a rank: the verbs, and `train_step`, which composes them.

All ranks run the same code. Their inputs differ, but their decisions do not: every decision follows
from figures that were reduced over all ranks. So every verb is collective, except for `save_state`
and `load_state`.

A model has to provide only four things (`LearnerBackend`): how it is built, `forward`,
`score_tokens` and `export_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from torch import Tensor

from r3async.checkpoint.rank_files import LearnerStateReader, write_rank_file
from r3async.learner.distillation import Teacher, add_teacher_advantages
from r3async.learner.drift_metrics import compute_gap_moments
from r3async.learner.limited_update import update_in_trust_region
from r3async.learner.metrics import build_minibatch_result
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.minibatch import (
    MeasuredMinibatch,
    Minibatch,
    ProbeBatches,
    TrainableMinibatch,
    build_minibatch,
)
from r3async.learner.optimizer import OptimizerUpdate
from r3async.learner.policy_loss import needs_old_logprobs
from r3async.learner.results import MinibatchResult
from r3async.learner.served_drift import build_probes, drop_probe_column, measure_served_drift
from r3async.world import Files
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


def train_step(
    backend: LearnerBackend,
    minibatches: Sequence[Sequence[MicroBatch]],
    *,
    version: int | None = None,
    trace: bool = False,
    teacher: Teacher | None = None,
) -> list[MinibatchResult]:
    """Make one update for each minibatch in each epoch of the step, on this rank's micro-batches
    of them, which need the column `advantages`. Collective.

    A token is trained if its `loss_mask` is set and its rollout log-prob is finite (others are
    counted and left out). If no trained token has an advantage, with a gradient that is not finite,
    or with drift beyond `algorithm.rollout_kl.max`, weights, moments and the optimizer's count stay
    as they are and `optimizer/skipped` is 1. Without an advantage the trust region stays, too.
    Raises what `build_minibatch` raises, before any forward pass of the minibatch. A step that
    fails leaves no gradient behind.

    Args:
        version: The version of the weights, from which tokens' ages count; by default, the number
            of updates made.
        trace: The results of the first epoch have the choices of every router.
        teacher: The teacher model of `algorithm.distillation`.

    Returns the results in the order of the updates.
    """
    version = backend.update_count if version is None else version
    results: list[MinibatchResult] = []
    with backend.discard_on_error():
        # Add what depends on the weights before the first update: old, reference, teacher log-probs.
        with stage("model"):
            minibatches, teacher_metrics = add_reference_columns(backend, minibatches, teacher)
        minibatches = [drop_probe_column(each, backend.config, version) for each in minibatches]
        for epoch in range(backend.config.schedule.epochs_per_step):
            for micro_batches, metrics in zip(minibatches, teacher_metrics, strict=True):
                # Agree with all ranks on what is trained, and on the denominators of the loss.
                with stage("figures"):
                    minibatch = agree_on_counts(
                        backend, micro_batches, version=version, trace=trace and epoch == 0
                    )
                # Measure served drift on a sample, while the weights are those before the update.
                with stage("probe"):
                    probes = build_probes(backend, minibatch, micro_batches)
                    served = measure_served_drift(backend, minibatch, probes)
                # Run every micro-batch forward with its recorded routes, and backward.
                with stage("model"):
                    forward_backward(backend, minibatch)
                # Sum loss and drift over ranks.
                with stage("figures"):
                    measured = measure_minibatch(backend, minibatch, probes, served)
                # Clip and update; the trust region may shorten the update or leave it out.
                with stage("optimizer"):
                    update = optim_step(backend, measured)
                # Collect what the minibatch measured, and let expert biases follow its load.
                results.append(collect_result(backend, measured, update, metrics))
    return results


# -- verbs -----------------------------------------------------------------------------------------


def forward(
    backend: LearnerBackend,
    micro_batches: Sequence[MicroBatch],
    *,
    use_reference: bool = False,
    trained_only: bool = False,
) -> list[np.ndarray]:
    """Return the log-probs of each micro-batch's tokens, float32 `[N]`, from a forward-only pass;
    see `LearnerBackend.logprobs`. Collective."""
    return backend.logprobs(micro_batches, use_reference=use_reference, trained_only=trained_only)


def forward_backward(backend: LearnerBackend, minibatch: TrainableMinibatch) -> None:
    """Run every micro-batch forward, with its recorded routes, and backward through its loss.
    Collective.

    Gradients add up until `optim_step`. Two calls on parts of a minibatch leave the gradients of
    one call on all of it, if the column `loss_weights` has the denominators of the whole. A call
    that fails discards the gradients of all. Without a trained token on any rank there is no pass.
    """
    if not minibatch.num_trained:
        return

    def compute_micro_batch_loss(index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        if backend.stage_digests is not None:
            backend.stage_digests.add("logprobs", str(index), logprobs)
        return minibatch.compute_micro_batch_loss(index, logprobs, entropies)

    batches = minibatch.micro_batches
    with backend.discard_on_error(), backend.replay.use_aux_loss(minibatch.aux_loss_weights):
        # Some losses take whole episodes, of which other micro-batches have a part.
        if minibatch.needs_global_logprobs:
            minibatch.set_global_logprobs(forward(backend, batches, trained_only=True))
        # The iterator has no name, so that a failed pass ends it and releases its routes.
        for index, routes, logprobs, entropies in backend.iter_scores(
            batches,
            minibatch.trained_rows,
            replay=minibatch.replays_routes,
            keep_choices=minibatch.records_traces,
            pipeline_loss=compute_micro_batch_loss,
        ):
            if routes is not None:
                minibatch.record_routes(routes)
            # There are no scores where a pipeline has made the backward pass.
            if logprobs is not None and entropies is not None:
                loss = compute_micro_batch_loss(index, logprobs, entropies)
                loss.backward()


def optim_step(
    backend: LearnerBackend, measured: MeasuredMinibatch | None = None
) -> OptimizerUpdate:
    """Clip the gradients and make the update, unless there is a cause not to. Collective.

    The update of a `measured` minibatch is left out or shortened if its drift is beyond the bounds
    of the trust region (`update_in_trust_region`). Otherwise it is left out only if the norm of the
    gradients is not finite. No gradient is left.
    """
    with backend.discard_on_error():
        if measured is None:
            backend.replay.pop_counts()
            return backend.optimizer.step()
        if not measured.minibatch.num_trained:
            return backend.optimizer.skip_step(measured.minibatch.skip_cause)
        return update_in_trust_region(backend, measured)


def save_state(
    backend: LearnerBackend, directory: Path, *, files: Files = REAL_WORLD.files
) -> None:
    """Write this rank's weights, moments and trust region into a file of `directory`. Every rank
    has to make the call."""
    make_directory(directory, files=files)
    write_rank_file(directory, backend.capture_state(), files=files)


def load_state(
    backend: LearnerBackend, directory: Path, *, files: Files = REAL_WORLD.files
) -> None:
    """Continue from what any number of ranks wrote into `directory`; see
    `LearnerBackend.restore_state`. Every rank has to make the call. Raises `CheckpointError`."""
    names = [name for name in files.list_names(directory) if name.startswith("learner-")]
    backend.restore_state(LearnerStateReader([directory / name for name in names], files=files))


# -- parts of a step -------------------------------------------------------------------------------


def add_reference_columns(
    backend: LearnerBackend,
    minibatches: Sequence[Sequence[MicroBatch]],
    teacher: Teacher | None = None,
) -> tuple[list[list[MicroBatch]], list[dict[str, float]]]:
    """Return the minibatches with what depends on the weights before an update, as far as the
    configuration wants it, and the teacher's metrics of each. Collective.

    It is: the learner's own routes (`routing.replay = learner`), its log-probs, those of the
    reference model, and those of a `teacher`, as advantages.
    """
    config = backend.config
    batches = [list(micro_batches) for micro_batches in minibatches]
    teacher_metrics: list[dict[str, float]] = [{} for _ in batches]
    if config.routing.replay == "learner":
        batches = [backend.record_learner_routes(batch) for batch in batches]
    if needs_old_logprobs(config.algorithm):
        batches = [_add_column(batch, "old_logprobs", forward(backend, batch)) for batch in batches]
    if config.algorithm.reference_kl.coef:
        batches = [
            _add_column(batch, "reference_logprobs", forward(backend, batch, use_reference=True))
            for batch in batches
        ]
    if teacher is not None:
        for i, batch in enumerate(batches):
            batches[i], teacher_metrics[i] = add_teacher_advantages(
                teacher, batch, config.algorithm.distillation, backend.ranks
            )
    return batches, teacher_metrics


def _add_column(
    micro_batches: Sequence[MicroBatch], name: str, values: Sequence[np.ndarray]
) -> list[MicroBatch]:
    return [
        replace(m, table=m.table.with_columns(**{name: v}))
        for m, v in zip(micro_batches, values, strict=True)
    ]


def agree_on_counts(
    backend: LearnerBackend,
    micro_batches: Sequence[MicroBatch],
    *,
    version: int | None = None,
    trace: bool = False,
) -> Minibatch:
    """Build the minibatch that ranks agree on before the first forward pass; see
    `build_minibatch`. Collective."""
    replay = backend.replay
    return build_minibatch(
        backend.pad_for_parallel(micro_batches),
        backend.config,
        version=backend.update_count if version is None else version,
        rollout_kl_coef=backend.trust_region.coef,
        ranks=backend.ranks,
        needs_routes=replay.uses_records,
        routing_shape=(replay.num_moe_layers, replay.num_experts),
        skip_untrained=backend.can_skip_untrained,
        trace=trace,
    )


def measure_minibatch(
    backend: LearnerBackend, minibatch: Minibatch, probes: ProbeBatches, served: np.ndarray
) -> MeasuredMinibatch:
    """Sum loss and drift over all ranks, after `forward_backward`. Collective.

    `served` is `measure_served_drift` of this rank.
    """
    loss_sums = minibatch.reduce_loss_sums()
    drift, by_episode = minibatch.reduce_drift(served)
    if not backend.replay.uses_records:  # every pass uses the routers' own choice
        drift = drift._replace(probed_served=drift.probed_replayed)
        by_episode = by_episode._replace(probed_served=by_episode.probed_replayed)
    moments = compute_gap_moments(by_episode, backend.trust_region.mean_gap_variance)
    return MeasuredMinibatch(minibatch, probes, loss_sums, drift, moments)


def collect_result(
    backend: LearnerBackend,
    measured: MeasuredMinibatch,
    update: OptimizerUpdate,
    teacher_metrics: dict[str, float],
) -> MinibatchResult:
    """Return the result of an update. Routers that are balanced without a loss follow the load of
    what was trained. Collective."""
    with stage("figures"):
        result = build_minibatch_result(measured, update, backend.replay)
    if not update.cause:
        backend.update_expert_biases(result.expert_load)
    result = msgspec.structs.replace(result, metrics=result.metrics | teacher_metrics)
    if backend.stage_digests is None:
        return result
    with stage("recording"):
        digests = backend.stage_digests.pop_digests(backend.optimizer, backend.expert_biases)
        return msgspec.structs.replace(result, digests=digests)
