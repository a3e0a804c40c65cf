"""What of a step follows from its groups alone: those that can be trained, advantages, minibatches, weights in the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from r3async.config import Config
from r3async.data.records import Sample, Trajectory
from r3async.learner import RejectedTrajectory
from r3async.learner.losses.advantages import assign_advantages
from r3async.learner.losses.objective import compute_loss_weights, split_by_length
from r3async.learner.served import mark_probed_samples
from r3async.schedule.validation import check_trajectories, find_invalid

T = TypeVar("T")


class PreparedGroups(NamedTuple, Generic[T]):
    """`groups`: those of the step, with stand-ins for what is `rejected`; `prepared`: of them."""

    groups: list[list[Trajectory]]
    prepared: T
    rejected: list[RejectedTrajectory]


def replace_untrainable(
    groups: Sequence[Sequence[Trajectory]],
    prepare: Callable[[Sequence[Sequence[Trajectory]]], T],
    make_placeholder: Callable[[Trajectory], Trajectory],
) -> PreparedGroups[T]:
    """`prepare(groups)`, without what it cannot take: whatever fails in it does not end the run, nor is it met again.

    A trajectory that is not trainable (`check_trajectories`) has `make_placeholder` in its place. So have all of a group of
    which `prepare` fails though each of its members is: nobody in particular is to blame. Raises what `prepare` raises on
    what is left: a defect.
    """
    trajectories = [t for group in groups for t in group]
    wrong = find_invalid(trajectories, check_trajectories)
    unsound = [RejectedTrajectory(trajectories[at], str(error)) for at, error in wrong.items()]
    each = iter([make_placeholder(t) if at in wrong else t for at, t in enumerate(trajectories)])

    def alone(group: list[Trajectory]) -> list[Trajectory]:
        try:
            prepare([group])
        except Exception as error:
            reason = f"its group cannot be trained: {type(error).__name__}: {error}"
            known = {u.trajectory.trajectory_id for u in unsound}
            unsound.extend(RejectedTrajectory(t, reason) for t in group if t.trajectory_id not in known)
            return [make_placeholder(t) for t in group]
        return group

    kept = [[next(each) for _ in group] for group in groups]
    try:
        made = prepare(kept)
    except Exception:
        kept = [alone(group) for group in kept]
        made = prepare(kept)
    return PreparedGroups(kept, made, unsound)


def prepare_minibatches(
    groups: Sequence[Sequence[Trajectory]], config: Config
) -> tuple[list[list[Sample]], dict[str, float]]:
    """The samples of each minibatch, with the columns `advantages`, `loss_weights`, `episode`, `place` and `probed`,
    and figures about them.

    A group is in one minibatch, with all its episodes and all samples of each: what is compared stays together, and what
    the loss is a mean over is whole.
    """
    samples, metrics = assign_advantages(groups, config.algorithm, max_new_tokens=config.episode.max_new_tokens)
    # Of each sample: its group, and its episode, by the order in which they come.
    owners = [(g, e) for g, group in enumerate(groups) for e, t in enumerate(group) for _ in t.samples]
    lengths = [len(s.table) for s in samples]
    masks = np.concatenate([s.table["loss_mask"] for s in samples] or [np.zeros(0, bool)])
    finite = np.isfinite(np.concatenate([s.table["rollout_logprobs"] for s in samples] or [np.zeros(0, np.float32)]))
    trained = split_by_length(masks & finite, lengths)
    members: list[list[int]] = [[] for _ in groups]
    for i, (group, _) in enumerate(owners):
        members[group].append(i)
    minibatches: list[list[Sample]] = []
    tokens = [sum(int(trained[i].sum()) for i in of) for of in members]
    for part in partition_groups(tokens, config.schedule.minibatches_per_step):
        chosen = [i for group in part for i in members[group]]
        numbers: dict[tuple[int, int], int] = {}
        episodes = [numbers.setdefault(owners[i], len(numbers)) for i in chosen]
        probed = mark_probed_samples([samples[i] for i in chosen], [trained[i] for i in chosen], episodes, config)
        weights = compute_loss_weights(
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
            "episode": split_by_length(np.repeat(np.asarray(episodes, np.int32), sizes), sizes),
            "place": split_by_length(np.where(mask, np.cumsum(mask) - 1, -1).astype(np.int32), sizes),
        }
        if any(probed):
            columns["probed"] = split_by_length(np.repeat(probed, sizes), sizes)
        tables = [
            samples[i].table.with_columns(**{name: values[at] for name, values in columns.items()})
            for at, i in enumerate(chosen)
        ]
        minibatches.append(
            [Sample(samples[i].sample_id, t, samples[i].temperature) for i, t in zip(chosen, tables, strict=True)]
        )
    return minibatches, metrics


def partition_groups(tokens: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of groups in `parts` parts with about the same number of trained tokens, each in order; deterministic.

    The longest come first, each to the part that has the least so far. Parts that would be empty are left out.
    """
    held, members = [0] * parts, [[] for _ in range(parts)]  # type: ignore[var-annotated]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        least = min(range(parts), key=lambda p: (held[p], len(members[p]), p))
        members[least].append(index)
        held[least] += tokens[index]
    return [sorted(m) for m in members if m]
