"""Records of trained trajectories: their metrics, previews, and line of `trained.jsonl`."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.data.mixed import split_seed
from r3async.data.tokens import Trajectory
from r3async.rollout.episode import STOP_REASONS

TRAINED_FILE = "trained.jsonl"
MAX_PREVIEWS = 2


PER_ENVIRONMENT_METRICS = (
    "reward/mean",
    "reward/std",
    "reward/std_in_group",
    "response_length/mean",
    "response_length/p95",
    "response_length/clip_ratio",
    "episode/turns_mean",
    "episode/ended_error",
)
"""Metrics that `compute_environment_metrics` returns for each environment, besides those that it
reported itself."""


def compute_episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute episode metrics over the played trajectories; the means are NaN if none was played.

    A trajectory without turns stands for a failed episode: only its ending counts.
    """
    played = [t for t in trajectories if t.turns]
    nobody = [math.nan]
    rewards = [t.reward for t in played] or nobody
    groups: dict[int, list[float]] = {}
    for t in played:
        groups.setdefault(t.group_index, []).append(t.reward)
    lengths = [sum(turn.stop - turn.start for turn in t.turns) for t in played] or nobody
    endings = Counter(t.stop_reason for t in trajectories)
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "reward/std_in_group": float(
            np.mean([float(np.std(group)) for group in groups.values()] or nobody)
        ),
        "reward/max": float(np.max(rewards)),
        "response_length/mean": float(np.mean(lengths)),
        "response_length/p95": float(np.percentile(lengths, 95)),
        "response_length/max": float(np.max(lengths)),
        "response_length/clip_ratio": float(np.mean([is_truncated(t) for t in played] or nobody)),
        "episode/turns_mean": float(np.mean([len(t.turns) for t in played] or nobody)),
        "episode/rows_mean": float(np.mean([len(t.samples) for t in played] or nobody)),
        **{f"episode/ended_{reason}": float(endings[reason]) for reason in STOP_REASONS},
        **_average_env_metrics(played),
    }


def compute_environment_metrics(
    trajectories: Sequence[Trajectory], labels: Sequence[str]
) -> dict[str, float]:
    """Compute the metrics of each environment of a mix, as `env/LABEL/NAME`.

    An environment without trajectories has none, and neither has the only environment of a run.
    """
    metrics: dict[str, float] = {}
    for entry, label in enumerate(labels if len(labels) > 1 else ()):
        own = [t for t in trajectories if split_seed(t.task_seed, len(labels))[0] == entry]
        if not own:
            continue
        told = compute_episode_metrics(own)
        played = [t for t in own if t.turns]
        kept = {
            name.replace("/", "_"): told[name]
            for name in PER_ENVIRONMENT_METRICS
            if not math.isnan(told[name])
        }
        kept |= {
            name.removeprefix("env/"): value for name, value in _average_env_metrics(played).items()
        }
        kept["episodes"] = float(len(own))
        metrics |= {f"env/{label}/{name}": value for name, value in kept.items()}
    return metrics


def is_truncated(trajectory: Trajectory) -> bool:
    """Return True if one of the answers was truncated, or the context was full."""
    return trajectory.stop_reason == "length" or any(
        turn.stop_reason == "length" for turn in trajectory.turns
    )


def _average_env_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    """Compute mean and standard deviation of the environments' metrics (`StepResult.metrics`).

    Each is taken over the episodes that reported it.
    """
    told: dict[str, list[float]] = {}
    for trajectory in played:
        for name, value in trajectory.metrics.items():
            told.setdefault(name if "/" in name else f"env/{name}", []).append(value)
    means = {f"{name}/mean": float(np.mean(values)) for name, values in told.items()}
    return means | {f"{name}/std": float(np.std(values)) for name, values in told.items()}


def select_previews(
    trajectories: Sequence[Trajectory], labels: Sequence[str] = ("",)
) -> list[dict[str, Any]]:
    """Return the first few trajectories that carry their conversation, for `episodes.jsonl`.

    `labels` are the labels of the environments of a mix.
    """
    return [
        {
            "trajectory": t.trajectory_id,
            "environment": labels[split_seed(t.task_seed, len(labels))[0]],
            "reward": t.reward,
            "messages": t.preview,
            "rewards": [x.reward for x in t.turns],
        }
        for t in trajectories
        if t.preview
    ][:MAX_PREVIEWS]


class TrainedStep(msgspec.Struct, frozen=True):
    """A line of `trained.jsonl`: the trajectories that one step trained.

    Attributes:
        version: Version of the weights that the step changed.
        groups: Index of each group.
        trajectories: Id of each trajectory.
        crc32: CRC-32 of the token ids of each trajectory, sample by sample, as they were trained.
        lineage: Lineage of the learner, in which `version` counts.
        lineages: Lineage of each trajectory.
        newest: Newest version of each trajectory; -1 for none.
    """

    step: int
    version: int
    groups: list[int]
    trajectories: list[str]
    crc32: list[int]
    lineage: int = 0
    lineages: list[int] = []
    newest: list[int] = []


def make_trained_step(
    step: int, version: int, groups: Sequence[Sequence[Trajectory]], lineage: int = 0
) -> TrainedStep:
    """Build the line of a step. `version` and `lineage` are those of the weights that
    the step changed."""
    members = [t for group in groups for t in group]
    return TrainedStep(
        step,
        version,
        [group[0].group_index for group in groups],
        [t.trajectory_id for t in members],
        [checksum_tokens(t) for t in members],
        lineage,
        [t.lineage for t in members],
        [t.newest_version for t in members],
    )


def checksum_tokens(trajectory: Trajectory) -> int:
    crc = 0
    for sample in trajectory.samples:
        crc = zlib.crc32(sample.table["token_ids"].tobytes(), crc)
    return crc
