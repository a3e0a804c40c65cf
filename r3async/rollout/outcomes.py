"""What came of an evaluation: means with confidence intervals, pass@k, and the figures of its sets. Pure.

Episodes of one task are not independent of each other, so every interval is over tasks: the standard error of the tasks' means,
clustered by task (Miller, "Adding Error Bars to Evals", arXiv:2411.00640), and 1.96 of it to both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.config.evaluation import list_pass_ks
from r3async.data.records import Trajectory
from r3async.data.statistics import mean_interval

REWARD_TOLERANCE = 1e-6
"""Of a reward that is a sum of decimals."""


class EpisodeOutcome(msgspec.Struct, frozen=True):
    """What came of one episode. `sampled_tokens` were sampled; versions are those that sampled them, -1 if nobody knows;
    `metrics`: what the environment told; `task_seed`: its task seed."""

    reward: float
    turn_count: int
    stop_reason: str
    sampled_tokens: int = 0
    version_min: int = -1
    version_max: int = -1
    metrics: dict[str, float] = {}
    task_seed: int | None = None


class Evaluation(msgspec.Struct, frozen=True):
    """What came of all. `reward_error` is the standard error of the mean, None of a single task; `stop_reasons` has
    `[episodes, mean reward]` of each; tokens and turns are means of an episode."""

    episodes: int
    reward_mean: float
    """avg@n: the mean over tasks, of the mean over the n episodes of each."""
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
    """Means of what the environment told, over the episodes that told it: rewards by name are among them."""
    tasks: int = 0
    reward_low: float | None = None
    """With `reward_high` the 95 % confidence interval of `reward_mean`; None of a single task."""
    reward_high: float | None = None
    passes: dict[str, tuple[float, float | None, float | None]] = {}
    """pass@k by k = "1", "2", "4", … and the number of episodes of each task: `[estimate, low, high]`, the last two as above."""
    rewards: dict[str, list[float]] = {}
    """Of each task, by its task seed, the rewards of its episodes."""
    sets: dict[str, Evaluation] = {}
    """Of an evaluation of several sets: each one's, by name. All other figures are then those of the first."""


def pass_at_k(episodes: int, passed: int, k: int) -> float:
    """Probability that one of `k` answers passes, unbiased, from `episodes` answers of which `passed` did:
    `1 - C(n - c, k) / C(n, k)` (Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, section 2.1).

    Raises `ValueError` unless `1 <= k <= episodes`.
    """
    if not 1 <= k <= episodes:
        raise ValueError(f"pass@{k} cannot be estimated from {episodes} answers")
    return 1.0 - math.comb(episodes - passed, k) / math.comb(episodes, k)


def summarize_outcomes(outcomes: Sequence[EpisodeOutcome], seconds: float, pass_reward: float = 1.0) -> Evaluation:
    """`pass_reward`: an episode passes with that, or more. Outcomes without a task are one of their own each."""
    by_task: dict[int | str, list[float]] = {}
    for at, outcome in enumerate(outcomes):
        by_task.setdefault(f"episode {at}" if outcome.task_seed is None else outcome.task_seed, []).append(
            outcome.reward
        )
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
        metrics={name: float(np.mean([o.metrics[name] for o in outcomes if name in o.metrics])) for name in told},
        tasks=len(by_task),
        reward_low=low,
        reward_high=high,
        passes=_estimate_pass_at_k(by_task.values(), pass_reward),
        rewards={str(task): each for task, each in by_task.items()},
    )


def _estimate_pass_at_k(
    by_task: Iterable[Sequence[float]], pass_reward: float
) -> dict[str, tuple[float, float | None, float | None]]:
    """A task that was posed several times has more episodes than others: the fewest say which k there are."""
    counts = [(len(rewards), sum(r >= pass_reward - REWARD_TOLERANCE for r in rewards)) for rewards in by_task]
    found: dict[str, tuple[float, float | None, float | None]] = {}
    for k in list_pass_ks(min(episodes for episodes, _ in counts)):
        mean, _, low, high = mean_interval([pass_at_k(episodes, passed, k) for episodes, passed in counts])
        found[str(k)] = mean, low, high
    return found


def join_sets(sets: Mapping[str, Evaluation]) -> Evaluation:
    """One evaluation of several sets, or that of the only one, which has no name."""
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
    """By name, the figures of an `Evaluation` in plain data that a row has: `pass@K`, and those of its sets as `SET/NAME`.

    The rewards of single tasks are left out, for they are many.
    """
    figures: dict[str, Any] = {}
    for name, value in evaluation.items():
        if name == "passes":
            figures |= {f"pass@{k}": estimate[0] for k, estimate in value.items()}
        elif name == "sets":
            for of, each in value.items():
                figures |= {f"{of}/{inner}": figure for inner, figure in flatten_evaluation(each).items()}
        elif name != "rewards":
            figures[name] = value
    return figures


def summarize_trajectory(trajectory: Trajectory) -> EpisodeOutcome:
    """Raises `ValueError` for a trajectory without samples."""
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
