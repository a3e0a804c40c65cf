"""From the groups of a step to what is trained: advantages, minibatches, and the weight of every token in the loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3async.algorithms.advantages import assign_advantages
from r3async.algorithms.reduction import loss_weights
from r3async.config import Config
from r3async.records import Sample, Trajectory


def prepare(groups: Sequence[Sequence[Trajectory]], config: Config) -> tuple[list[list[Sample]], dict[str, float]]:
    """The samples of each minibatch, with the columns `advantages`, `loss_weights`, `episode` and `place`, and figures about
    them.

    A group is in one minibatch, with all its episodes and all samples of each: what is compared stays together, and what
    the loss is a mean over is whole.
    """
    samples, metrics = assign_advantages(groups, config.algorithm, max_new_tokens=config.episode.max_new_tokens)
    # Of each sample: its group, and its episode, by the order in which they come.
    owners = [(g, (g, e)) for g, group in enumerate(groups) for e, t in enumerate(group) for _ in t.samples]
    trained = [s.table["loss_mask"] & np.isfinite(s.table["rollout_logprobs"]) for s in samples]
    members: list[list[int]] = [[] for _ in groups]
    for i, (group, _) in enumerate(owners):
        members[group].append(i)
    minibatches: list[list[Sample]] = []
    tokens = [sum(int(trained[i].sum()) for i in of) for of in members]
    for part in divide(tokens, config.schedule.minibatches_per_step):
        rows = [i for index in part for i in members[index]]
        numbers: dict[tuple[int, int], int] = {}
        episodes = [numbers.setdefault(owners[i][1], len(numbers)) for i in rows]
        weights = loss_weights(
            [trained[i] for i in rows],
            episodes,
            [owners[i][0] for i in rows],
            config.algorithm.reduction,
            norm_length=config.episode.max_new_tokens,
        )
        minibatches.append([])
        place = 0
        for i, episode, weight in zip(rows, episodes, weights, strict=True):
            mask, table = trained[i], samples[i].table
            columns = {
                "loss_weights": weight,
                "episode": np.full(len(table), episode, np.int32),
                "place": np.where(mask, place + np.cumsum(mask) - 1, -1).astype(np.int32),
            }
            place += int(mask.sum())
            minibatches[-1].append(Sample(samples[i].sample_id, table.with_columns(**columns), samples[i].temperature))
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
