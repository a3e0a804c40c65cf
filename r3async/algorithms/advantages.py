"""Group-relative advantages: how much better than its group an answer was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from r3async.records import Sample, Trajectory


def relative(rewards: Sequence[float] | np.ndarray, *, normalize_std: bool, eps: float = 1e-3) -> np.ndarray:
    """float64 `[n]`: `r - mean(r)`, divided by `std(r) + eps` if `normalize_std` (std with n - 1 in the denominator).

    GRPO (arXiv 2402.03300) divides; Dr. GRPO (arXiv 2503.20783) does not. A group without contrast (fewer than two
    rewards, or all equal) is exactly 0.
    """
    values = np.asarray(rewards, np.float64)
    if len(values) < 2 or values.max() == values.min():
        return np.zeros(len(values))
    centred = values - values.mean()
    return centred / (values.std(ddof=1) + eps) if normalize_std else centred


def group_advantages(
    trajectories: Sequence[Trajectory],
    credit: Literal["turn", "trajectory"],
    normalize_std: bool,
    eps: float = 1e-3,
) -> list[Sample]:
    """The samples of one group, trajectory by trajectory, with the column `advantages` (float32 `[T]`) set.

    `credit="turn"`: the tokens of turn j get turn j's reward relative to turn j of those episodes of the group that have
    one. `credit="trajectory"`: all sampled tokens get the trajectory's mean reward over turns, relative to the group.
    Tokens that no turn sampled get 0. Trajectories without turns have nothing to train and do not count.

    Raises `ValueError` if the trajectories are of different groups, a turn index occurs twice in an episode, or a token
    names a turn that its trajectory does not have.
    """
    groups = {t.group_index for t in trajectories}
    if len(groups) > 1:
        raise ValueError(f"advantages are relative to one group, got trajectories of groups {sorted(groups)}")
    by_turn: list[dict[int, float]] = [{} for _ in trajectories]
    if credit == "turn":
        for index in sorted({turn.index for t in trajectories for turn in t.turns}):
            members = [(i, turn) for i, t in enumerate(trajectories) for turn in t.turns if turn.index == index]
            if len({i for i, _ in members}) != len(members):
                raise ValueError(f"a trajectory of group {groups.pop()} has turn {index} twice")
            values = relative([turn.reward for _, turn in members], normalize_std=normalize_std, eps=eps)
            for (i, _), value in zip(members, values, strict=True):
                by_turn[i][index] = float(value)
    elif credit == "trajectory":
        played = [i for i, t in enumerate(trajectories) if t.turns]
        values = relative([trajectories[i].reward for i in played], normalize_std=normalize_std, eps=eps)
        for i, value in zip(played, values, strict=True):
            by_turn[i] = {turn.index: float(value) for turn in trajectories[i].turns}
    else:
        raise ValueError(f"credit {credit!r} is not one of 'turn', 'trajectory'")
    return [
        Sample(s.sample_id, s.table.with_columns(advantages=_spread(s, by_turn[i])), s.temperature)
        for i, t in enumerate(trajectories)
        for s in t.samples
    ]


def _spread(sample: Sample, by_turn: dict[int, float]) -> np.ndarray:
    """float32 `[T]`: each token's value by its `turn`, 0 where it has none."""
    turn = sample.table["turn"]
    advantages = np.zeros(len(turn), np.float32)
    for index in np.unique(turn[turn >= 0]).tolist():
        if index not in by_turn:
            raise ValueError(f"sample {sample.sample_id}: a token of turn {index}, but its trajectory has no such turn")
        advantages[turn == index] = by_turn[index]
    return advantages
