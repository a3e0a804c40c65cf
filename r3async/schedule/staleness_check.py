"""The age of tokens, and the check of its bound. Pure.

The age of a token is the version that the learner is about to change, minus the version that
sampled the token. So all waiting counts: in an engine's queue, in transit, in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3async.data.tokens import Trajectory


class StalenessError(RuntimeError):
    """Error for a token that is older than the schedule allows: a defect, never a matter of luck.

    Nothing was trained on it.
    """


def compute_staleness(trajectory: Trajectory, version: int) -> np.ndarray:
    """Return the ages of the trajectory's trained tokens, int32 `[n]`, when the learner
    is at `version`."""
    return np.concatenate(
        [version - s.table["policy_version"][s.table["loss_mask"]] for s in trajectory.samples]
    )


def check_staleness(groups: Sequence[Sequence[Trajectory]], version: int, bound: int) -> None:
    """Raise `StalenessError` if a token is older than `bound`; see
    `schedule.run_ahead.compute_staleness_bound`."""
    for trajectory in (t for group in groups for t in group):
        oldest = int(compute_staleness(trajectory, version).max(initial=0))
        if oldest > bound:
            raise StalenessError(
                f"group {trajectory.group_index} holds a token of age {oldest} (trajectory "
                f"{trajectory.trajectory_id} of "
                f"{trajectory.generator_id or 'an unnamed generator'}, learner at version "
                f"{version}), and schedule.max_staleness and schedule.window promise at most "
                f"{bound}: a generator sampled with older weights than the conductor believed, or "
                "slots were freed too early. This is a defect: please report it with events.jsonl"
            )


def compute_staleness_metrics(
    groups: Sequence[Sequence[Trajectory]],
    version: int,
    bound: int,
    now: float,
    max_token_age: int | None = None,
) -> dict[str, float]:
    """Return the metrics `staleness/*` of one step; `now` is in unix seconds, like
    `Trajectory.finished_at`.

    `tokens_0` to `tokens_<bound>` are the numbers of trained tokens of that staleness.
    `queue_seconds` is the time from the end of an episode to the step that trains it.
    """
    trajectories = [t for group in groups for t in group]
    ages = np.concatenate([compute_staleness(t, version) for t in trajectories])
    queued = [max(0.0, now - t.finished_at) for t in trajectories if t.finished_at]
    masked = (
        float((ages > max_token_age).mean()) if max_token_age is not None and len(ages) else 0.0
    )
    counts = np.bincount(np.clip(ages, 0, bound), minlength=bound + 1)
    return {
        "staleness/mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness/max": float(ages.max(initial=0)),
        "staleness/bound": float(bound),
        "staleness/masked_fraction": masked,
        "staleness/queue_seconds_mean": float(np.mean(queued)) if queued else 0.0,
        "staleness/queue_seconds_max": max(queued, default=0.0),
        **{f"staleness/tokens_{age}": float(count) for age, count in enumerate(counts)},
    }
