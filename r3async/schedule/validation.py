"""What a trajectory must satisfy to be trained on: one definition, for its sender, on arrival and in the step; and its age.

The age of a token is the version that the learner is about to change, less the version that sampled the token. So all
waiting counts: in an engine's queue, on the way, in the buffer. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from r3async.data.model_shape import RoutingShape
from r3async.data.records import Sample, Trajectory
from r3async.data.routes import RoutingError, validate_rows
from r3async.data.versions import Lineage

MAX_REWARD = 1e15
"""Of an episode, all rewards added up by size. Squares of advantages, and their sum over a batch, are then finite in float32."""

ROLLOUT_COLUMNS = ("token_ids", "loss_mask", "rollout_logprobs", "policy_version", "turn", "rewards")
ROUTES = ("routed_experts", "routing_recorded")


class InvalidTrajectory(ValueError):
    """Well-formed on the wire, but not trainable."""


def check_trajectory(trajectory: Trajectory) -> None:
    """What can be checked without knowing the model. Raises `InvalidTrajectory` naming what is wrong.

    Indices are not negative; turns have each their own index, a stretch of tokens within a sample, and are those that the tokens
    name; every trained token is of a turn, within its stretch; rewards, and their sums, stay finite in float32; samples have the
    columns of a rollout, alike, and a temperature that float32 holds. Log-probs that are not finite pass: the loss drops
    these tokens and counts them.
    """
    name = trajectory.trajectory_id
    for field in ("group_index", "episode_index"):
        if getattr(trajectory, field) < 0:
            raise InvalidTrajectory(f"{name} has {field} {getattr(trajectory, field)}")
    if not trajectory.samples:
        raise InvalidTrajectory(f"{name} holds no sample")
    if len({s.sample_id for s in trajectory.samples}) != len(trajectory.samples):
        raise InvalidTrajectory(f"{name} has two samples of one name")
    for sample in trajectory.samples:
        _check_sample(sample, list(trajectory.samples[0].table))
    _check_rewards(trajectory)
    _check_turns(trajectory)


def _check_sample(sample: Sample, columns: list[str]) -> None:
    table, name = sample.table, sample.sample_id
    if not len(table):
        raise InvalidTrajectory(f"sample {name} is empty")
    if odd := sorted(set(table) - {*ROLLOUT_COLUMNS, *ROUTES}):
        raise InvalidTrajectory(f"sample {name} has column {odd[0]!r}, which only the learner makes")
    if list(table) != columns or len(set(ROUTES) & set(table)) == 1:
        raise InvalidTrajectory(f"sample {name} has routes, and another sample has none, or it has half of them")
    temperature = np.float32(min(sample.temperature, 1e38))
    if not (math.isfinite(sample.temperature) and sample.temperature < 1e38 and temperature > 0):
        raise InvalidTrajectory(f"sample {name} has temperature {sample.temperature}")
    if table["loss_mask"][0]:
        raise InvalidTrajectory(f"sample {name} trains its first token, which nothing predicts")


def _check_rewards(trajectory: Trajectory) -> None:
    """Rewards of turns, and of tokens, are finite and within `MAX_REWARD`. Raises `InvalidTrajectory`."""
    of_turns = sum(abs(turn.reward) for turn in trajectory.turns)
    with np.errstate(invalid="ignore"):
        of_tokens = sum(float(np.abs(s.table["rewards"]).sum(dtype=np.float64)) for s in trajectory.samples)
    for total in (of_turns, of_tokens):
        if not math.isfinite(total):
            raise InvalidTrajectory(f"trajectory {trajectory.trajectory_id} has a reward that is not finite")
        if total > MAX_REWARD:
            raise InvalidTrajectory(
                f"trajectory {trajectory.trajectory_id} has rewards of {total:g} together: beyond {MAX_REWARD:g} their "
                "squares are not finite in float32"
            )


def _check_turns(trajectory: Trajectory) -> None:
    """The turns, and what the tokens say of them. Raises `InvalidTrajectory`."""
    name = trajectory.trajectory_id
    turns = {turn.index: turn for turn in trajectory.turns}
    if len(turns) != len(trajectory.turns):
        twice = next(i for i in turns if sum(t.index == i for t in trajectory.turns) > 1)
        raise InvalidTrajectory(f"trajectory {name} has turn {twice} twice")
    for turn in trajectory.turns:
        length = len(trajectory.samples[turn.sample].table) if 0 <= turn.sample < len(trajectory.samples) else -1
        if turn.index < 0 or not 0 <= turn.start <= turn.stop <= length:
            raise InvalidTrajectory(
                f"trajectory {name} has turn {turn.index} at tokens {turn.start}:{turn.stop} of sample {turn.sample}, "
                "which are not there"
            )
    for at, sample in enumerate(trajectory.samples):
        named, mask = sample.table["turn"], sample.table["loss_mask"]
        if mask.any() and int(named[mask].min()) < 0:
            raise InvalidTrajectory(f"sample {sample.sample_id} trains a token of no turn")
        for index in np.unique(named[named >= 0]).tolist():
            if index not in turns:
                raise InvalidTrajectory(
                    f"sample {sample.sample_id}: a token of turn {index}, but its trajectory has no such turn"
                )
            turn, places = turns[index], np.flatnonzero(named == index)
            if turn.sample != at or places[0] < turn.start or places[-1] >= turn.stop:
                raise InvalidTrajectory(
                    f"sample {sample.sample_id}: a token of turn {index} outside of tokens {turn.start}:{turn.stop} of "
                    f"sample {turn.sample}, where that turn is"
                )


def validate_trajectory(
    trajectory: Trajectory,
    *,
    vocab_size: int | None,
    learner_version: int,
    max_tokens: int,
    routing: RoutingShape | None,
    samples_per_group: int | None = None,
    age_bound: int | None = None,
    lineage: Lineage | None = None,
    kept: bool = False,
) -> None:
    """All of it: `check_trajectory`, and what this model and this run allow. Raises `InvalidTrajectory` naming what is wrong.

    What is None is not known here, and not checked. `age_bound`: versions that a trained token can be old at most. `kept`: it was
    stored before `lineage` began.
    """
    check_trajectory(trajectory)
    if samples_per_group is not None and trajectory.episode_index >= samples_per_group:
        raise InvalidTrajectory(
            f"{trajectory.trajectory_id} is episode {trajectory.episode_index} of a group of {samples_per_group}"
        )
    newest = trajectory.newest_version
    if lineage is not None and (why := lineage.refusal(trajectory.lineage, newest, learner_version, kept=kept)):
        raise InvalidTrajectory(f"{trajectory.trajectory_id}: {why}")
    for sample in trajectory.samples:
        table, name = sample.table, sample.sample_id
        if len(table) > max_tokens:
            raise InvalidTrajectory(
                f"sample {name} has {len(table)} tokens, more than learner.max_tokens_per_micro_batch = {max_tokens}"
            )
        ids = table["token_ids"]
        if vocab_size is not None and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise InvalidTrajectory(f"sample {name} has a token id outside 0..{vocab_size - 1}")
        versions = table["policy_version"][table["loss_mask"]]
        if len(versions):
            oldest = int(versions.min())
            if oldest < 0 or int(versions.max()) > learner_version:
                raise InvalidTrajectory(
                    f"sample {name} has versions {oldest}..{int(versions.max())}, the learner is at {learner_version}"
                )
            if age_bound is not None and oldest < learner_version - age_bound:
                raise InvalidTrajectory(
                    f"sample {name} has a token of version {oldest}, the learner is at {learner_version}, and the schedule "
                    f"allows an age of {age_bound}"
                )
        _check_routes(sample, routing)


def _check_routes(sample: Sample, routing: RoutingShape | None) -> None:
    table = sample.table
    if routing is None:
        return
    if not set(ROUTES) <= set(table):
        raise InvalidTrajectory(f"sample {sample.sample_id} has no routes, but the model is a mixture of experts")
    shape = table.shape_of("routed_experts")
    if shape[1:] != (routing.layers, routing.top_k):  # before they are unpacked
        raise InvalidTrajectory(
            f"sample {sample.sample_id} has routes of shape {list(shape)}, expected [T, {routing.layers}, {routing.top_k}]"
        )
    rows, recorded = table["routed_experts"], table["routing_recorded"]
    first = len(recorded) if recorded.all() else int(recorded.argmin())
    # Most often only the last token has no record, and nothing has to be copied.
    rows = rows[recorded] if recorded[first:].any() else rows[:first]
    try:
        validate_rows(rows, layers=routing.layers, top_k=routing.top_k, num_experts=routing.num_experts)
    except RoutingError as error:
        raise InvalidTrajectory(f"sample {sample.sample_id}: {error}") from error


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
