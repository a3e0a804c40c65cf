"""Conditions for a trajectory to be trained, the same for its sender, on arrival and in the step.
Pure.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from r3async.data.model_shape import RoutingShape
from r3async.data.routes import RoutingError, check_gates, validate_routes
from r3async.data.tokens import ROUTE_COLUMNS, UNSAMPLED_VERSION, Sample, TokenTable, Trajectory
from r3async.data.versions import Lineage
from r3async.envs import MAX_EPISODE_REWARD

MAX_LOGPROB = 1e-3
"""Maximum log-prob of a trained token. No distribution gives one above 0; rounding in float32 does,
by less than a hundredth of this."""

ROLLOUT_COLUMNS = (
    "token_ids",
    "loss_mask",
    "rollout_logprobs",
    "policy_version",
    "turn",
    "rewards",
)
SUPPORT_COLUMN = "support"
TURN_LIMIT = 2**31
"""Larger than any index of a turn that a token can have."""
MAX_JOINED_ROUTES = 2**18
"""Maximum number of ids in the routes of several samples that are copied, to be checked at once."""


class InvalidTrajectory(ValueError):
    """Error for a trajectory that is well-formed on the wire, but not trainable."""


def check_trajectory(trajectory: Trajectory) -> None:
    """Check one trajectory as `check_trajectories` does."""
    check_trajectories([trajectory])


def check_trajectories(trajectories: Sequence[Trajectory]) -> None:
    """Check everything that can be checked without knowing the model.

    - Indices are not negative.
    - Each turn has a different index and a stretch of tokens within a sample, and turns are those
      that the tokens name.
    - Every trained token belongs to a turn, and lies within its stretch.
    - Rewards, and their sums, stay finite in float32.
    - Samples have the columns of a rollout, alike within a trajectory, and a temperature
      that float32 holds.
    - Every token is in its own support, if it has one.
    - No trained token has a log-prob above 0, beyond rounding. Log-probs that are not finite pass:
      the loss drops these tokens and counts them.

    Raises `InvalidTrajectory` that names what is wrong first.
    """
    for trajectory in trajectories:
        _check_fields(trajectory)
    if trajectories:
        _check_tokens(trajectories, _JoinedTokens(trajectories))


def find_invalid(
    trajectories: Sequence[Trajectory], check: Callable[[Sequence[Trajectory]], None]
) -> dict[int, InvalidTrajectory]:
    """Return the errors of the trajectories that `check` refuses, by their index.

    All together are checked at the cost of a few, so each is checked alone only if `check`
    refuses some of them.
    """
    try:
        check(trajectories)
        return {}
    except InvalidTrajectory as error:
        if len(trajectories) == 1:
            return {0: error}
    return {
        i: error for i, t in enumerate(trajectories) for error in find_invalid([t], check).values()
    }


class _JoinedTokens:
    """The tokens of all samples of some trajectories, end to end: N tokens of S samples.

    Every trajectory has a sample, and no sample is without tokens.
    """

    def __init__(self, trajectories: Sequence[Trajectory]):
        self.samples = [sample for t in trajectories for sample in t.samples]
        self.lengths = [len(sample.table) for sample in self.samples]
        self.starts = [0, *itertools.accumulate(self.lengths)]
        """Index of each sample's first token; then N."""
        counts = [0, *itertools.accumulate(len(t.samples) for t in trajectories)]
        self.first_samples = counts[:-1]
        self.first_tokens = [self.starts[i] for i in self.first_samples]
        """Index of each trajectory's first token."""

    def join_column(self, name: str) -> np.ndarray:
        """Return a column of all tokens, `[N]`."""
        if len(self.samples) == 1:
            return self.samples[0].table[name]
        return np.concatenate([sample.table[name] for sample in self.samples])

    def first_sample_of(self, wrong: np.ndarray) -> Sample:
        """Return the sample of the first token where `wrong`, bool `[N]`, is True."""
        return self.samples[bisect.bisect_right(self.starts, int(wrong.argmax())) - 1]


def _check_fields(trajectory: Trajectory) -> None:
    """Check everything but the tokens. Raises `InvalidTrajectory`."""
    name = trajectory.trajectory_id
    samples = trajectory.samples
    for field in ("group_index", "episode_index"):
        if getattr(trajectory, field) < 0:
            raise InvalidTrajectory(f"{name} has {field} {getattr(trajectory, field)}")
    if not samples:
        raise InvalidTrajectory(f"{name} holds no sample")
    if len(samples) > 1 and len({s.sample_id for s in samples}) != len(samples):
        raise InvalidTrajectory(f"{name} has two samples of one name")
    columns = tuple(samples[0].table)
    for sample in samples:
        _check_sample(sample, columns)
    _check_reward(name, sum(abs(turn.reward) for turn in trajectory.turns))
    if len({turn.index for turn in trajectory.turns}) != len(trajectory.turns):
        indices = [turn.index for turn in trajectory.turns]
        twice = next(i for i in indices if indices.count(i) > 1)
        raise InvalidTrajectory(f"trajectory {name} has turn {twice} twice")
    for turn in trajectory.turns:
        length = len(samples[turn.sample].table) if 0 <= turn.sample < len(samples) else -1
        if turn.index < 0 or not 0 <= turn.start <= turn.stop <= length:
            raise InvalidTrajectory(
                f"trajectory {name} has turn {turn.index} at tokens {turn.start}:{turn.stop} of "
                f"sample {turn.sample}, which are not there"
            )


def _check_sample(sample: Sample, columns: tuple[str, ...]) -> None:
    table = sample.table
    name = sample.sample_id
    temperature = sample.temperature
    if not len(table):
        raise InvalidTrajectory(f"sample {name} is empty")
    own = tuple(table)
    odd = _find_unknown_column(own)
    if odd:
        raise InvalidTrajectory(f"sample {name} has column {odd!r}, which only the learner makes")
    if own != columns or ((ROUTE_COLUMNS[0] in own) != (ROUTE_COLUMNS[1] in own)):
        raise InvalidTrajectory(
            f"sample {name} has routes or supports, and another sample has none, or it "
            "has half of them"
        )
    if not (math.isfinite(temperature) and temperature < 1e38 and np.float32(temperature) > 0):
        raise InvalidTrajectory(f"sample {name} has temperature {temperature}")
    if table["loss_mask"][0]:
        raise InvalidTrajectory(f"sample {name} trains its first token, which nothing predicts")


@functools.cache
def _find_unknown_column(columns: tuple[str, ...]) -> str:
    """Return the first column that no rollout has; "" if there is none."""
    return min(set(columns) - {*ROLLOUT_COLUMNS, *ROUTE_COLUMNS, SUPPORT_COLUMN}, default="")


def _check_reward(name: str, total: float) -> None:
    if not math.isfinite(total):
        raise InvalidTrajectory(f"trajectory {name} has a reward that is not finite")
    if total > MAX_EPISODE_REWARD:
        raise InvalidTrajectory(
            f"trajectory {name} has rewards of {total:g} together: beyond {MAX_EPISODE_REWARD:g} "
            "their squares are not finite in float32"
        )


def _check_tokens(trajectories: Sequence[Trajectory], tokens: _JoinedTokens) -> None:
    """Check the tokens, and the turns that they name. Raises `InvalidTrajectory`."""
    mask = tokens.join_column("loss_mask")
    turn = tokens.join_column("turn")
    with np.errstate(invalid="ignore"):
        rewards = np.abs(tokens.join_column("rewards"), dtype=np.float64)
        if not np.add.reduce(rewards) <= MAX_EPISODE_REWARD:
            for trajectory, total in zip(
                trajectories, np.add.reduceat(rewards, tokens.first_tokens), strict=True
            ):
                _check_reward(trajectory.trajectory_id, float(total))
    sampled = turn >= 0
    of_none = mask > sampled
    if np.count_nonzero(of_none):
        raise InvalidTrajectory(
            f"sample {tokens.first_sample_of(of_none).sample_id} trains a token of no turn"
        )
    _check_logprobs(tokens, mask)
    for sample in tokens.samples:
        if SUPPORT_COLUMN in sample.table:
            _check_own_support(sample, sampled=sample.table["turn"] >= 0)
    # Usually the stretches of turns do not overlap, so that each token has to belong to the turn
    # that lies there.
    lies = np.full(len(turn), -1, np.int32)
    for first, trajectory in zip(tokens.first_samples, trajectories, strict=True):
        for t in trajectory.turns:
            if t.index < TURN_LIMIT:
                start = tokens.starts[first + t.sample]
                lies[start + t.start : start + t.stop] = t.index
    elsewhere = sampled & (turn != lies)
    if np.count_nonzero(elsewhere):
        _check_turns(trajectories, tokens, np.flatnonzero(elsewhere), turn)


def _check_logprobs(tokens: _JoinedTokens, mask: np.ndarray) -> None:
    """Raise `InvalidTrajectory` if a trained token has a log-prob that no distribution gives."""
    logprobs = tokens.join_column("rollout_logprobs")
    above = mask & (logprobs > MAX_LOGPROB) & np.isfinite(logprobs)
    if np.count_nonzero(above):
        raise InvalidTrajectory(
            f"sample {tokens.first_sample_of(above).sample_id} trains a token of log-prob "
            f"{logprobs[above.argmax()]:g}: no distribution gives one above 0, so the engine's "
            "log-probs are wrong"
        )


def _check_own_support(sample: Sample, sampled: np.ndarray) -> None:
    """Raise `InvalidTrajectory` if a token that was not sampled has a support, or a token is not in
    its own support."""
    supports = sample.table[SUPPORT_COLUMN]
    ids = sample.table["token_ids"]
    if (supports.recorded_mask & ~sampled).any():
        raise InvalidTrajectory(
            f"sample {sample.sample_id} has the support of a token that was not sampled"
        )
    inside = supports.contains_ids(np.maximum(ids, 0))
    if not inside.all():
        at = int(inside.argmin())
        raise InvalidTrajectory(
            f"sample {sample.sample_id}: token {ids[at]} at {at} is not in its own support"
        )


def _check_turns(
    trajectories: Sequence[Trajectory],
    tokens: _JoinedTokens,
    suspects: np.ndarray,
    token_turns: np.ndarray,
) -> None:
    """Check that tokens belong to turns that exist, and lie within their stretches. Raises
    `InvalidTrajectory`.

    Args:
        suspects: Indices of the tokens for which this may be false.
        token_turns: Turn that each token names, int32 `[N]`.
    """
    for place in suspects.tolist():
        at = bisect.bisect_right(tokens.starts, place) - 1
        index = int(token_turns[place])
        owner = bisect.bisect_right(tokens.first_samples, at) - 1
        name = tokens.samples[at].sample_id
        first = tokens.first_samples[owner]
        turn = next((t for t in trajectories[owner].turns if t.index == index), None)
        if turn is None:
            raise InvalidTrajectory(
                f"sample {name}: a token of turn {index}, but its trajectory has no such turn"
            )
        start = tokens.starts[first + turn.sample]
        if not start + turn.start <= place < start + turn.stop:
            raise InvalidTrajectory(
                f"sample {name}: a token of turn {index} outside of tokens "
                f"{turn.start}:{turn.stop} of sample {turn.sample}, where that turn is"
            )


def validate_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    vocab_size: int | None,
    learner_version: int,
    max_tokens: int,
    routing: RoutingShape | None,
    group_size: int | None = None,
    staleness_bound: int | None = None,
    lineage: Lineage | None = None,
    is_recovered: bool = False,
    needs_supports: bool | None = None,
) -> None:
    """Check everything: what `check_trajectories` checks, and what this model and this run allow.

    An argument that is None is not known here, and not checked. Raises `InvalidTrajectory` that
    names what is wrong.

    Args:
        vocab_size: Number of token ids of the model.
        learner_version: Version that the learner is at.
        max_tokens: Maximum number of tokens of a sample (`learner.max_tokens_per_micro_batch`).
        routing: Shape of the model's routes.
        group_size: Number of episodes of a group.
        staleness_bound: Maximum age of a trained token, in versions.
        lineage: Lineage of the run's start.
        is_recovered: True if the trajectories were stored before `lineage` began.
        needs_supports: True if trained tokens must have a support (sampling excluded some),
            False if none may.
    """
    if not trajectories:
        return
    for trajectory in trajectories:
        _check_fields(trajectory)
    tokens = _JoinedTokens(trajectories)
    _check_tokens(trajectories, tokens)
    mask = tokens.join_column("loss_mask")
    versions = tokens.join_column("policy_version")
    ids = tokens.join_column("token_ids")
    trained = np.where(mask, versions, UNSAMPLED_VERSION)
    for trajectory, newest in zip(
        trajectories, np.maximum.reduceat(trained, tokens.first_tokens).tolist(), strict=True
    ):
        if group_size is not None and trajectory.episode_index >= group_size:
            raise InvalidTrajectory(
                f"{trajectory.trajectory_id} is episode {trajectory.episode_index} of a group "
                f"of {group_size}"
            )
        why = (
            lineage.rejection_reason(
                trajectory.lineage, newest, learner_version, from_earlier_start=is_recovered
            )
            if lineage is not None
            else ""
        )
        if why:
            raise InvalidTrajectory(f"{trajectory.trajectory_id}: {why}")
    longest = max(tokens.lengths)
    if longest > max_tokens:
        name = tokens.samples[tokens.lengths.index(longest)].sample_id
        raise InvalidTrajectory(
            f"sample {name} has {longest} tokens, more than "
            f"learner.max_tokens_per_micro_batch = {max_tokens}"
        )
    if vocab_size is not None and (
        np.minimum.reduce(ids) < 0 or np.maximum.reduce(ids) >= vocab_size
    ):
        name = tokens.first_sample_of((ids < 0) | (ids >= vocab_size)).sample_id
        raise InvalidTrajectory(f"sample {name} has a token id outside 0..{vocab_size - 1}")
    _check_supports_allowed(tokens.samples, vocab_size, needs_supports)
    _check_versions(tokens, mask, versions, learner_version, staleness_bound)
    _check_routes(tokens, routing)


def _check_supports_allowed(
    samples: Sequence[Sample], vocab_size: int | None, needs_supports: bool | None
) -> None:
    """Raise `InvalidTrajectory` if supports are missing, are not allowed, or have ids
    outside the vocabulary."""
    for sample in samples:
        if SUPPORT_COLUMN not in sample.table:
            if needs_supports and sample.table["loss_mask"].any():
                raise InvalidTrajectory(
                    f"sample {sample.sample_id} has no supports, and sampling may exclude tokens"
                )
            continue
        supports = sample.table[SUPPORT_COLUMN]
        if vocab_size is not None and not supports.fits_vocab(vocab_size).all():
            raise InvalidTrajectory(
                f"sample {sample.sample_id} has a support with an id outside 0..{vocab_size - 1}"
            )
        if needs_supports and not supports.recorded_mask[sample.table["loss_mask"]].all():
            raise InvalidTrajectory(
                f"sample {sample.sample_id} has a trained token without a support"
            )
        if needs_supports is False:
            raise InvalidTrajectory(
                f"sample {sample.sample_id} has supports, and nothing here renormalises over them"
            )


def _check_versions(
    tokens: _JoinedTokens,
    mask: np.ndarray,
    versions: np.ndarray,
    learner_version: int,
    staleness_bound: int | None,
) -> None:
    """Raise `InvalidTrajectory` unless trained tokens are of versions from 0 to the learner's,
    and not too old."""
    trained = versions[mask]
    if not len(trained):
        return
    oldest = int(trained.min())
    newest = int(trained.max())
    if oldest < 0 or newest > learner_version:
        name = tokens.first_sample_of(
            mask & ((versions < 0) | (versions > learner_version))
        ).sample_id
        raise InvalidTrajectory(
            f"sample {name} has versions {oldest}..{newest}, the learner is at {learner_version}"
        )
    if staleness_bound is not None and oldest < learner_version - staleness_bound:
        name = tokens.first_sample_of(
            mask & (versions < learner_version - staleness_bound)
        ).sample_id
        raise InvalidTrajectory(
            f"sample {name} has a token of version {oldest}, the learner is at {learner_version}, "
            f"and the schedule allows an age of {staleness_bound}"
        )


def _check_routes(tokens: _JoinedTokens, routing: RoutingShape | None) -> None:
    """Raise `InvalidTrajectory` if routes are missing, or cannot be routes of the model."""
    if routing is None:
        return
    shape = (routing.layers, routing.top_k)
    sizes = {"layers": routing.layers, "top_k": routing.top_k, "num_experts": routing.num_experts}
    samples = tokens.samples
    for sample in samples:
        if ROUTE_COLUMNS[0] not in sample.table:
            raise InvalidTrajectory(
                f"sample {sample.sample_id} has no routes, but the model is a mixture of experts"
            )
        found = sample.table.column_shape(ROUTE_COLUMNS[0])
        if found[1:] != shape:  # before they are unpacked
            raise InvalidTrajectory(
                f"sample {sample.sample_id} has routes of shape {list(found)}, expected [T, "
                f"{routing.layers}, {routing.top_k}]"
            )
        _check_gates(sample, routing.has_gates)
    # Small ones are checked at once, unless one that has only zeros would go
    # unnoticed among others.
    if (
        len(samples) > 1
        and routing.top_k > 1
        and tokens.starts[-1] * routing.layers * routing.top_k <= MAX_JOINED_ROUTES
    ):
        try:
            validate_routes(
                tokens.join_column(ROUTE_COLUMNS[0])[tokens.join_column(ROUTE_COLUMNS[1])],
                **sizes,
            )
            return
        except RoutingError:
            pass  # the loop below finds their sample
    for sample in samples:
        try:
            validate_routes(_recorded_routes(sample.table), **sizes)
        except RoutingError as error:
            raise InvalidTrajectory(f"sample {sample.sample_id}: {error}") from error


def _check_gates(sample: Sample, has_gates: bool) -> None:
    table = sample.table
    name = ROUTE_COLUMNS[2]
    if (name in table) != has_gates:
        raise InvalidTrajectory(
            f"sample {sample.sample_id} has {'no ' if has_gates else ''}gates, which its engine "
            f"{'records' if has_gates else 'does not record'}"
        )
    try:
        if has_gates:
            check_gates(table[name], table.column_shape(ROUTE_COLUMNS[0]))
    except RoutingError as error:
        raise InvalidTrajectory(f"sample {sample.sample_id}: {error}") from error


def _recorded_routes(table: TokenTable) -> np.ndarray:
    """Return the routes of the tokens that have any, `[n, layers, top_k]`."""
    rows = table["routed_experts"]
    recorded = table["routing_recorded"]
    first = len(recorded) if recorded.all() else int(recorded.argmin())
    # Usually only the last token has no record, and nothing has to be copied.
    return rows[recorded] if recorded[first:].any() else rows[:first]
