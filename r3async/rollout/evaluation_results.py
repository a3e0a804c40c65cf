"""Results of an evaluation: means with intervals, pass@k, and the figures of its sets. Pure.

Episodes of one task are not independent of each other, so every interval is over tasks: the
standard error of the tasks' means, clustered by task (Miller, "Adding Error Bars to Evals",
arXiv:2411.00640), and 1.96 of it to both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.config.evaluation import list_pass_ks
from r3async.data.statistics import mean_interval
from r3async.data.tokens import Trajectory

REWARD_TOLERANCE = 1e-6
"""Rounding error allowed in a reward that is a sum of decimals."""


class EpisodeOutcome(msgspec.Struct, frozen=True):
    """The result of one episode.

    Attributes:
        sampled_tokens: Number of tokens sampled.
        version_min: Oldest version that sampled them, -1 if unknown.
        version_max: Newest version that sampled them, -1 if unknown.
        metrics: The metrics that the environment reported.
        task_seed: Seed of the task, None if unknown.
    """

    reward: float
    turn_count: int
    stop_reason: str
    sampled_tokens: int = 0
    version_min: int = -1
    version_max: int = -1
    metrics: dict[str, float] = {}
    task_seed: int | None = None


class Evaluation(msgspec.Struct, frozen=True):
    """The results of all episodes.

    `reward_error` is the standard error of the mean, None for a single task; `stop_reasons` has
    `[episodes, mean reward]` for each reason; tokens and turns are means per episode.
    """

    episodes: int
    reward_mean: float
    """Mean reward, avg@n: the mean over tasks of the mean over the n episodes of each."""
    reward_error: float | None
    reward_min: float
    reward_max: float
    turns_mean: float
    tokens_mean: float
    version_min: int
    version_max: int
    stop_reasons: dict[str, tuple[int, float]]
    seconds: float
    metrics: dict[str, float] = {}
    """Mean of each metric of the environment, over the episodes that report it. Rewards by
    name are among them."""
    tasks: int = 0
    reward_low: float | None = None
    """Lower end of the 95 % confidence interval of `reward_mean`, `reward_high` being the upper;
    None for a single task."""
    reward_high: float | None = None
    passes: dict[str, tuple[float, float | None, float | None]] = {}
    """pass@k as `[estimate, low, high]`, the last two as above, for k = "1", "2", "4", … and the
    number of episodes per task."""
    rewards: dict[str, list[float]] = {}
    """Rewards of the episodes of each task, by task seed."""
    sets: dict[str, Evaluation] = {}
    """Evaluation of each set by name, if there are several. All other figures are then those
    of the first set."""


def pass_at_k(episodes: int, passed: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of `k` answers passes.

    From `episodes` answers of which `passed` passed: `1 - C(n - c, k) / C(n, k)` (Chen et al.,
    "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, section 2.1). Raises
    `ValueError` unless `1 <= k <= episodes`.
    """
    if not 1 <= k <= episodes:
        raise ValueError(f"pass@{k} cannot be estimated from {episodes} answers")
    return 1.0 - math.comb(episodes - passed, k) / math.comb(episodes, k)


def summarize_outcomes(
    outcomes: Sequence[EpisodeOutcome], seconds: float, pass_reward: float = 1.0
) -> Evaluation:
    """Summarize the outcomes of an evaluation that took `seconds`.

    An episode passes with a reward of at least `pass_reward`. Each outcome without a task seed
    counts as a separate task.
    """
    by_task: dict[int | str, list[float]] = {}
    for at, outcome in enumerate(outcomes):
        by_task.setdefault(
            f"episode {at}" if outcome.task_seed is None else outcome.task_seed, []
        ).append(outcome.reward)
    rewards = np.array([o.reward for o in outcomes], np.float64)
    mean, error, low, high = mean_interval([float(np.mean(each)) for each in by_task.values()])
    told = sorted({name for o in outcomes for name in o.metrics})
    by_reason = {
        reason: [o.reward for o in outcomes if o.stop_reason == reason]
        for reason in sorted({o.stop_reason for o in outcomes})
    }
    return Evaluation(
        episodes=len(outcomes),
        reward_mean=mean,
        reward_error=error,
        reward_min=float(rewards.min()),
        reward_max=float(rewards.max()),
        turns_mean=float(np.mean([o.turn_count for o in outcomes])),
        tokens_mean=float(np.mean([o.sampled_tokens for o in outcomes])),
        version_min=min(o.version_min for o in outcomes),
        version_max=max(o.version_max for o in outcomes),
        stop_reasons={reason: (len(r), float(np.mean(r))) for reason, r in by_reason.items()},
        seconds=seconds,
        metrics={
            name: float(np.mean([o.metrics[name] for o in outcomes if name in o.metrics]))
            for name in told
        },
        tasks=len(by_task),
        reward_low=low,
        reward_high=high,
        passes=_estimate_pass_at_k(by_task.values(), pass_reward),
        rewards={str(task): each for task, each in by_task.items()},
    )


def _estimate_pass_at_k(
    by_task: Iterable[Sequence[float]], pass_reward: float
) -> dict[str, tuple[float, float | None, float | None]]:
    """Return pass@k as `[estimate, low, high]` by k.

    The task with the fewest episodes limits k: a task that was posed several times has more
    episodes than others.
    """
    counts = [
        (len(rewards), sum(r >= pass_reward - REWARD_TOLERANCE for r in rewards))
        for rewards in by_task
    ]
    found: dict[str, tuple[float, float | None, float | None]] = {}
    for k in list_pass_ks(min(episodes for episodes, _ in counts)):
        mean, _, low, high = mean_interval(
            [pass_at_k(episodes, passed, k) for episodes, passed in counts]
        )
        found[str(k)] = mean, low, high
    return found


def join_sets(sets: Mapping[str, Evaluation]) -> Evaluation:
    """Return one evaluation of several sets, or the evaluation of the only set,
    which has no name."""
    first = next(iter(sets.values()))
    if list(sets) == [""]:
        return first
    return msgspec.structs.replace(
        first,
        seconds=sum(each.seconds for each in sets.values()),
        version_min=min(each.version_min for each in sets.values()),
        version_max=max(each.version_max for each in sets.values()),
        sets=dict(sets),
    )


def flatten_evaluation(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of an `Evaluation`, given as plain data, by name.

    The names are those of one row: `pass@K`, and `SET/NAME` for the figures of its sets.

    The rewards of single tasks are left out because there are many.
    """
    figures: dict[str, Any] = {}
    for name, value in evaluation.items():
        if name == "passes":
            figures |= {f"pass@{k}": estimate[0] for k, estimate in value.items()}
        elif name == "sets":
            for of, each in value.items():
                figures |= {
                    f"{of}/{inner}": figure for inner, figure in flatten_evaluation(each).items()
                }
        elif name != "rewards":
            figures[name] = value
    return figures


def summarize_trajectory(trajectory: Trajectory) -> EpisodeOutcome:
    """Return the outcome of a trajectory. Raises `ValueError` for one without samples."""
    versions = [s.table["policy_version"][s.table["loss_mask"]] for s in trajectory.samples]
    return EpisodeOutcome(
        reward=trajectory.reward,
        turn_count=len(trajectory.turns),
        stop_reason=trajectory.stop_reason,
        sampled_tokens=sum(turn.stop - turn.start for turn in trajectory.turns),
        version_min=int(min(v.min() for v in versions)),
        version_max=int(max(v.max() for v in versions)),
        metrics=trajectory.metrics,
        task_seed=trajectory.task_seed,
    )
