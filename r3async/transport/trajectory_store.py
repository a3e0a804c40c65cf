"""What a receiver needs of a store that makes trajectories durable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from r3async.data.tokens import Trajectory
from r3async.data.wire_frames import Frame


class DurableTrajectory(Protocol):
    """A trajectory that is on disk, and takes `nbytes` of memory."""

    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def nbytes(self) -> int: ...


class TrajectoryStore(Protocol):
    """A store that makes trajectories durable (`r3async.transport.spool.Spool`)."""

    memory_bytes: int

    @property
    def free_bytes(self) -> int: ...
    def set_waiting(self, waiting: bool) -> None: ...
    async def recover_trajectories(self) -> Sequence[DurableTrajectory]: ...
    async def put_trajectory(
        self, trajectory: Trajectory, frames: Sequence[Frame], *, spill: bool
    ) -> DurableTrajectory | None: ...
    async def delete_trained(self, groups: Iterable[int]) -> int: ...
    async def remove_trajectories(self, rejected: Mapping[tuple[int, str], str]) -> int: ...
