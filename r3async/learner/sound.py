"""What a step trains of the groups that it took: whatever fails in it does not end the run, nor is it met again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from r3async.data.records import Trajectory
from r3async.schedule.validation import InvalidTrajectory, check_trajectory

T = TypeVar("T")


class Unsound(NamedTuple):
    """A trajectory that arrived, and that the step cannot train."""

    trajectory: Trajectory
    reason: str


class Sound(NamedTuple, Generic[T]):
    """`groups`: those of the step, with stand-ins for what is `unsound`; `made`: of them."""

    groups: list[list[Trajectory]]
    made: T
    unsound: list[Unsound]


def sound(
    groups: Sequence[Sequence[Trajectory]],
    make: Callable[[Sequence[Sequence[Trajectory]]], T],
    stand_in: Callable[[Trajectory], Trajectory],
) -> Sound[T]:
    """`make(groups)`, without what it cannot take.

    A trajectory that is not trainable (`check_trajectory`) has `stand_in` in its place. So have all of a group of which `make`
    fails though each of its members is: nobody in particular is to blame. Raises what `make` raises on what is left: a defect.
    """
    unsound: list[Unsound] = []
    kept = [[_checked(t, stand_in, unsound) for t in group] for group in groups]
    try:
        return Sound(kept, make(kept), unsound)
    except Exception:
        kept = [_made_alone(group, make, stand_in, unsound) for group in kept]
    return Sound(kept, make(kept), unsound)


def _checked(
    trajectory: Trajectory, stand_in: Callable[[Trajectory], Trajectory], unsound: list[Unsound]
) -> Trajectory:
    try:
        check_trajectory(trajectory)
    except InvalidTrajectory as error:
        unsound.append(Unsound(trajectory, str(error)))
        return stand_in(trajectory)
    return trajectory


def _made_alone(
    group: list[Trajectory],
    make: Callable[[Sequence[Sequence[Trajectory]]], object],
    stand_in: Callable[[Trajectory], Trajectory],
    unsound: list[Unsound],
) -> list[Trajectory]:
    try:
        make([group])
    except Exception as error:
        reason = f"its group cannot be trained: {type(error).__name__}: {error}"
        known = {u.trajectory.trajectory_id for u in unsound}
        unsound += [Unsound(t, reason) for t in group if t.trajectory_id not in known]
        return [stand_in(t) for t in group]
    return group
