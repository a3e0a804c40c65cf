"""How old the trained tokens are, and the promise that none is older than the bound.

The age of a token is the version that the learner is about to change, less the version that sampled the token. So all
waiting counts: in an engine's queue, on the way, in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from r3async.data.records import Trajectory


class AgeError(RuntimeError):
    """A token is older than the schedule allows: a defect, never a matter of luck. Nothing was trained on it."""


def token_ages(trajectory: Trajectory, version: int) -> np.ndarray:
    """int32 `[n]`: ages of the trajectory's trained tokens when the learner is at `version`."""
    return np.concatenate([version - s.table["policy_version"][s.table["loss_mask"]] for s in trajectory.samples])


def check_ages(groups: Sequence[Sequence[Trajectory]], version: int, bound: int) -> None:
    """Raise `AgeError` if a token is older than `bound`; see `scheduling.admission.age_bound`."""
    for trajectory in (t for group in groups for t in group):
        oldest = int(token_ages(trajectory, version).max(initial=0))
        if oldest > bound:
            raise AgeError(
                f"group {trajectory.group_index} holds a token of age {oldest} (trajectory {trajectory.trajectory_id} of "
                f"{trajectory.generator_id or 'an unnamed generator'}, learner at version {version}), and "
                f"schedule.max_staleness and schedule.window promise at most {bound}: a generator played with older "
                "weights than the conductor believed, or slots were freed too early. This is a defect: please report it "
                "with events.jsonl"
            )


def age_metrics(
    groups: Sequence[Sequence[Trajectory]], version: int, bound: int, now: float, max_token_age: int | None = None
) -> dict[str, float]:
    """The figures `staleness/*` of one step; `now` in unix seconds, as `Trajectory.finished_at`.

    `age_0` to `age_<bound>` are the numbers of trained tokens of that age. `queue_seconds` is the time from the end of an
    episode to the step that trains it.
    """
    trajectories = [t for group in groups for t in group]
    ages = np.concatenate([token_ages(t, version) for t in trajectories])
    queued = [max(0.0, now - t.finished_at) for t in trajectories if t.finished_at]
    masked = float((ages > max_token_age).mean()) if max_token_age is not None and len(ages) else 0.0
    counts = np.bincount(np.clip(ages, 0, bound), minlength=bound + 1)
    return {
        "staleness/mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness/max": float(ages.max(initial=0)),
        "staleness/bound": float(bound),
        "staleness/masked_fraction": masked,
        "staleness/queue_seconds_mean": float(np.mean(queued)) if queued else 0.0,
        "staleness/queue_seconds_max": max(queued, default=0.0),
        **{f"staleness/age_{age}": float(count) for age, count in enumerate(counts)},
    }
