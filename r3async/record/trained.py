"""What a step says of the trajectories that it trained: metrics, episodes to look at, and a line that proves which they were."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.data.records import Trajectory
from r3async.rollout.episode import ENDINGS

FILE = "trained.jsonl"
PREVIEWS = 2


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over those that were played: one without turns stands for an episode that failed, and only its ending counts."""
    played = [t for t in trajectories if t.turns]
    rewards = [t.reward for t in played] or [0.0]
    endings = Counter(t.stop_reason for t in trajectories)
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/max": float(np.max(rewards)),
        "episode/turns_mean": float(np.mean([len(t.turns) for t in played] or [0])),
        "episode/rows_mean": float(np.mean([len(t.samples) for t in played] or [0])),
        **{f"episode/ended_{reason}": float(endings[reason]) for reason in ENDINGS},
    }


def previews(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """The first few that carry their conversation, for `episodes.jsonl`."""
    return [
        {"group": t.group_index, "reward": t.reward, "messages": t.preview, "rewards": [x.reward for x in t.turns]}
        for t in trajectories
        if t.preview
    ][:PREVIEWS]


class TrainedStep(msgspec.Struct, frozen=True):
    """A line of `trained.jsonl`. `crc32`: of the token ids of each trajectory, sample by sample, as they were trained.

    `lineage`: of the learner, in which `version` is counted. `lineages` and `newest`: of each trajectory, and its newest version
    (-1: none)."""

    step: int
    version: int
    groups: list[int]
    trajectories: list[str]
    crc32: list[int]
    lineage: int = 0
    lineages: list[int] = []
    newest: list[int] = []


def trained_step(step: int, version: int, groups: Sequence[Sequence[Trajectory]], lineage: int = 0) -> TrainedStep:
    """`version` and `lineage`: of the weights that the step changed."""
    members = [t for group in groups for t in group]
    return TrainedStep(
        step,
        version,
        [group[0].group_index for group in groups],
        [t.trajectory_id for t in members],
        [checksum(t) for t in members],
        lineage,
        [t.lineage for t in members],
        [t.newest_version for t in members],
    )


def checksum(trajectory: Trajectory) -> int:
    crc = 0
    for sample in trajectory.samples:
        crc = zlib.crc32(sample.table["token_ids"].tobytes(), crc)
    return crc
