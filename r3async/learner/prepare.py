"""The part of a step that follows from its groups: advantages, minibatches, weights in the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from r3async.config import Config
from r3async.data.tokens import Sample, Trajectory
from r3async.learner.advantages import assign_advantages
from r3async.learner.loss import compute_loss_weights, split_by_length
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.results import RejectedTrajectory
from r3async.learner.served_drift import mark_probed_samples
from r3async.schedule.validation import check_trajectories, find_invalid


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


def replace_untrainable(
    groups: Sequence[Sequence[Trajectory]],
    make_placeholder: Callable[[Trajectory], Trajectory],
    failing_groups: Mapping[int, str] = {},
) -> tuple[list[list[Trajectory]], list[RejectedTrajectory]]:
    """Replace the trajectories that cannot be trained by placeholders, so that these do
    not end the run.

    The failure does not come back in a later step either. A trajectory is replaced if it is not
    trainable (`check_trajectories`). So are all trajectories of a group in `failing_groups`
    (`find_failing_groups`): no single one is to blame. Returns the groups, and the trajectories
    that were replaced.
    """
    places = [(g, e) for g, group in enumerate(groups) for e in range(len(group))]
    invalid = find_invalid(
        [trajectory for group in groups for trajectory in group], check_trajectories
    )
    reasons = {places[index]: str(error) for index, error in invalid.items()}
    for g, reason in failing_groups.items():
        for e in range(len(groups[g])):
            reasons.setdefault((g, e), reason)
    trainable = [
        [
            make_placeholder(trajectory) if (g, e) in reasons else trajectory
            for e, trajectory in enumerate(group)
        ]
        for g, group in enumerate(groups)
    ]
    return trainable, [
        RejectedTrajectory(groups[g][e], reason) for (g, e), reason in reasons.items()
    ]


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

    The columns are `advantages`, `loss_weights`, `episode`, `place` and `probed`. A group is in one
    minibatch, with all its episodes and all samples of each: scores that are compared stay
    together, and every unit that the loss is a mean over is whole.
    """
    samples, metrics = assign_advantages(
        groups, config.algorithm, max_new_tokens=config.episode.max_new_tokens
    )
    placed_groups = _place_samples(groups, samples)
    # No update of the step should be noisier than the others: minibatches have about as many
    # trained tokens each.
    trained_tokens = [
        sum(int(np.count_nonzero(placed.trained_mask)) for placed in group)
        for group in placed_groups
    ]
    minibatches = [
        _add_learner_columns([placed for index in part for placed in placed_groups[index]], config)
        for part in partition_groups(trained_tokens, config.schedule.minibatches_per_step)
    ]
    return minibatches, metrics


def _place_samples(
    groups: Sequence[Sequence[Trajectory]], samples: Sequence[Sample]
) -> list[list[PlacedSample]]:
    """Return the samples of each group, from those of all groups in order."""
    placed: list[list[PlacedSample]] = [[] for _ in groups]
    remaining = iter(samples)
    episode = 0
    for group_index, group in enumerate(groups):
        for trajectory in group:
            for sample in itertools.islice(remaining, len(trajectory.samples)):
                # Without a finite rollout log-prob a token has no ratio.
                trained_mask = sample.table["loss_mask"] & np.isfinite(
                    sample.table["rollout_logprobs"]
                )
                placed[group_index].append(PlacedSample(sample, group_index, episode, trained_mask))
            episode += 1
    return placed


def _add_learner_columns(minibatch: Sequence[PlacedSample], config: Config) -> list[Sample]:
    """Return the samples of a minibatch with the columns that depend on all of it."""
    if not minibatch:
        return []
    samples = [placed.sample for placed in minibatch]
    masks = [placed.trained_mask for placed in minibatch]
    # Ranks sum figures into arrays with a row for each episode: its number in the
    # minibatch, without gaps.
    episodes = np.unique([placed.episode for placed in minibatch], return_inverse=True)[1].tolist()
    probed = mark_probed_samples(samples, masks, episodes, config)
    # One array for all samples takes half the time of one for each.
    lengths = [len(mask) for mask in masks]
    is_trained = np.concatenate(masks)
    columns = {
        "loss_weights": compute_loss_weights(
            masks,
            episodes,
            [placed.group for placed in minibatch],
            config.algorithm.reduction,
            norm_length=config.episode.max_new_tokens,
        ),
        "episode": split_by_length(np.repeat(np.asarray(episodes, np.int32), lengths), lengths),
        "place": split_by_length(
            np.where(is_trained, np.cumsum(is_trained) - 1, -1).astype(np.int32), lengths
        ),
    }
    if any(probed):
        columns["probed"] = split_by_length(np.repeat(probed, lengths), lengths)
    return [
        Sample(
            sample.sample_id,
            sample.table.with_columns(**dict(zip(columns, values, strict=True))),
            sample.temperature,
        )
        for sample, *values in zip(samples, *columns.values(), strict=True)
    ]


def partition_groups(tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Divide groups into `parts` parts with about the same number of trained tokens; deterministic.

    Returns the indices of the groups of each part, in order. The longest come first, each to the
    part that has the least so far. Parts that would be empty are left out.
    """
    held, members = [0] * parts, [[] for _ in range(parts)]  # type: ignore[var-annotated]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        least = min(range(parts), key=lambda p: (held[p], len(members[p]), p))
        members[least].append(index)
        held[least] += tokens[index]
    return [sorted(m) for m in members if m]
