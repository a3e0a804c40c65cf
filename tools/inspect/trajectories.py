"""Trajectories in the form that `r3async inspect` shows, from a spool, traces of training, or
kept conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np

from r3async.data.metrics import finite_or_none
from r3async.data.tokens import Trajectory, Turn
from r3async.record.routes import TrainedRoutes, parse_episode_id

TrajectorySource = Literal["spool", "trace", "episode"]
"""Source of a trajectory.

`spool`: accepted and not yet in a checkpoint. `trace`: trained, and kept by `routing.trace`.
`episode`: trained, with only the conversation kept.
"""


class InspectedSample(msgspec.Struct):
    """A sample of an inspected trajectory.

    Attributes:
        columns: Columns by name, all of one length `T`: the known ones of `tokens.SCHEMA`, and
            for traces also `learner_logprobs` and `advantages` float32 `[T]`, and
            `learner_experts` `[T, L, K]`.
    """

    sample_id: str
    columns: dict[str, np.ndarray]
    temperature: float | None = None


class InspectedTrajectory(msgspec.Struct, kw_only=True):
    """The known facts about one trajectory; None where its source has none.

    Attributes:
        where: The file that holds it.
        learner_version: Version of the weights that were trained with it, from
            which its age counts.
    """

    source: TrajectorySource
    where: str
    trajectory_id: str
    step: int | None = None
    learner_version: int | None = None
    group_index: int | None = None
    episode_index: int | None = None
    task_seed: int | None = None
    generator_id: str | None = None
    stop_reason: str | None = None
    reward: float | None = None
    turns: list[Turn] = []
    samples: list[InspectedSample] = []
    preview: list[dict[str, str]] = []
    started_at: float | None = None
    finished_at: float | None = None
    lineage: int | None = None
    """Lineage in which the versions of its tokens are counted."""

    @property
    def token_count(self) -> int:
        return sum(len(sample.columns["token_ids"]) for sample in self.samples)

    @property
    def sampled_tokens(self) -> int:
        """The number of its tokens that are trained."""
        return sum(int(sample.columns["loss_mask"].sum()) for sample in self.samples)

    @property
    def version_range(self) -> tuple[int, int] | None:
        """The oldest and the newest version of the weights that sampled its tokens."""
        found = [s.columns["policy_version"][s.columns["loss_mask"]] for s in self.samples]
        every = np.concatenate(found) if found else np.zeros(0, np.int32)
        return (int(every.min()), int(every.max())) if len(every) else None

    def compute_staleness(self, version: int | None) -> int | None:
        """Return the age of its oldest sampled token in versions, at the step that trained it or
        else at `version`."""
        at = self.learner_version if self.learner_version is not None else version
        return None if at is None or self.version_range is None else at - self.version_range[0]

    def to_facts(self, version: int | None) -> dict[str, Any]:
        """Return everything but the tokens and the text."""
        low, high = self.version_range or (None, None)
        kept = {
            n: getattr(self, n)
            for n in self.__struct_fields__
            if n not in ("turns", "samples", "preview")
        }
        figures = {
            "turns": len(self.turns),
            "tokens": self.token_count,
            "sampled": self.sampled_tokens,
        }
        return (
            kept
            | figures
            | {"version_min": low, "version_max": high, "age": self.compute_staleness(version)}
        )


class TrajectoryFilter(msgspec.Struct, frozen=True):
    """A selection of trajectories; None selects all. An unknown value is never below,
    above, or of a step."""

    reward_below: float | None = None
    age_above: int | None = None
    turns: int | None = None
    trajectory: str | None = None
    step: int | None = None

    def matches_trajectory(self, trajectory: InspectedTrajectory, version: int | None) -> bool:
        """Return whether the trajectory is selected.

        Args:
            version: The version from which the ages of trajectories that are not trained yet count.
        """
        age = trajectory.compute_staleness(version) if self.age_above is not None else None
        names = {trajectory.trajectory_id, *(sample.sample_id for sample in trajectory.samples)}
        return (
            (
                self.reward_below is None
                or (trajectory.reward is not None and trajectory.reward < self.reward_below)
            )
            and (self.age_above is None or (age is not None and age > self.age_above))
            and (self.turns is None or len(trajectory.turns) >= self.turns)
            and (self.trajectory is None or self.trajectory in names)
            and (self.step is None or self.step == trajectory.step)
        )


def convert_trajectory(trajectory: Trajectory, file: str) -> InspectedTrajectory:
    """Convert a trajectory that came over the wire."""
    names = (
        "trajectory_id",
        "group_index",
        "episode_index",
        "task_seed",
        "generator_id",
        "stop_reason",
        "lineage",
    )
    return InspectedTrajectory(
        source="spool",
        where=file,
        **{name: getattr(trajectory, name) for name in names},
        reward=trajectory.reward,
        turns=trajectory.turns,
        samples=[
            InspectedSample(s.sample_id, dict(s.table.items()), s.temperature)
            for s in trajectory.samples
        ],
        preview=trajectory.preview,
        started_at=trajectory.started_at,
        finished_at=trajectory.finished_at,
    )


def convert_trained_routes(
    samples: Iterable[tuple[TrainedRoutes, tuple[np.ndarray, np.ndarray] | None]],
    file: str,
    learner_version: int | None,
) -> InspectedTrajectory:
    """Convert the samples of one trajectory that a step trained.

    Args:
        samples: At least one sample, each with the engine's rows of it and a mask of the
            recorded ones, if known.
    """
    seen: list[InspectedSample] = []
    turns: list[Turn] = []
    reward = 0.0
    for number, (trained, rows) in enumerate(samples):
        names = ("token_ids", "loss_mask", "rollout_logprobs", "policy_version", "turn", "rewards")
        columns = {name: getattr(trained, name) for name in names}
        if rows is not None:
            columns |= {"routed_experts": rows[0], "routing_recorded": rows[1]}
        if trained.learner_logprobs is not None:
            columns["learner_logprobs"] = trained.learner_logprobs
        if trained.advantages is not None:
            columns["advantages"] = trained.advantages
        columns["learner_experts"] = trained.own
        seen.append(InspectedSample(trained.sample_id, columns))
        turns += _split_turns(trained, number)
        reward += float(trained.rewards.sum(dtype=np.float64))
        last = trained
    which = parse_episode_id(last.trajectory_id)
    return InspectedTrajectory(
        source="trace",
        where=file,
        trajectory_id=last.trajectory_id,
        step=last.step,
        learner_version=learner_version,
        group_index=which.group_index if which else None,
        episode_index=which.episode_index if which else None,
        reward=reward,
        turns=turns,
        samples=seen,
    )


def _split_turns(trained: TrainedRoutes, sample: int) -> Iterator[Turn]:
    """Yield the turns in the columns; a turn is a stretch of tokens that one answer sampled."""
    mask = trained.loss_mask
    key = np.where(mask, trained.turn, -1)
    edges = np.flatnonzero(np.diff(key, prepend=-1, append=-1))
    stretches = [(int(a), int(b)) for a, b in pairwise(edges) if mask[a]]
    for start, stop in stretches:
        reward = float(trained.rewards[start:stop].sum(dtype=np.float64))
        yield Turn(int(trained.turn[start]), sample, start, stop, reward, "")


def convert_episode_line(line: dict[str, Any], file: str) -> InspectedTrajectory | None:
    """Convert a line of `episodes.jsonl`; None if it is not one."""
    exchanges = line.get("turns")
    trajectory = str(line.get("trajectory", ""))  # older runs did not name the trajectory
    which = parse_episode_id(trajectory)
    if exchanges is None:
        return None
    turns = []
    preview = []
    for index, turn in enumerate(exchanges):
        turns.append(Turn(index, 0, 0, 0, finite_or_none(turn.get("reward")) or 0.0, ""))
        preview.append({"role": "user", "content": str(turn.get("user") or "")})
        preview.append({"role": "assistant", "content": str(turn.get("assistant") or "")})
    return InspectedTrajectory(
        source="episode",
        where=file,
        trajectory_id=trajectory,
        step=line.get("step"),
        group_index=which.group_index if which else None,
        episode_index=which.episode_index if which else None,
        reward=finite_or_none(line.get("reward")),
        turns=turns,
        preview=preview,
    )


class InspectedToken(msgspec.Struct, frozen=True):
    """One token of a sample.

    Attributes:
        logprob: The rollout's log-prob; None where nothing was sampled.
        learner_logprob: The learner's log-prob; None where unknown.
        version: The rollout's version; None where nothing was sampled.
        routes: Its experts by MoE layer; None where none are recorded.
    """

    trajectory: str
    sample: str
    position: int
    token: int
    text: str
    loss_mask: bool
    logprob: float | None
    learner_logprob: float | None
    version: int | None
    turn: int | None
    reward: float | None
    routes: list[list[int]] | None


def iter_tokens(
    trajectory: InspectedTrajectory, sample: InspectedSample, decode_token: Callable[[int], str]
) -> Iterator[InspectedToken]:
    """Yield the tokens of a sample.

    Args:
        decode_token: Returns the text of a token.
    """
    columns = sample.columns
    recorded, learner, rewards = (
        columns.get(n) for n in ("routing_recorded", "learner_logprobs", "rewards")
    )
    turn = columns.get("turn")
    experts = columns.get("routed_experts")
    for at, token in enumerate(columns["token_ids"].tolist()):
        sampled = bool(columns["loss_mask"][at])
        yield InspectedToken(
            trajectory=trajectory.trajectory_id,
            sample=sample.sample_id,
            position=at,
            token=token,
            text=decode_token(token),
            loss_mask=sampled,
            logprob=float(columns["rollout_logprobs"][at]) if sampled else None,
            learner_logprob=float(learner[at]) if sampled and learner is not None else None,
            version=int(columns["policy_version"][at])
            if columns["policy_version"][at] >= 0
            else None,
            turn=int(turn[at]) if turn is not None and turn[at] >= 0 else None,
            reward=None if rewards is None else float(rewards[at]),
            routes=experts[at].tolist()
            if experts is not None and recorded is not None and recorded[at]
            else None,
        )
