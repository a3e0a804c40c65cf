"""What happens to a trajectory between its arrival and its answer: decoded, validated, stored, handed over. And what was accepted
already, so that a redelivery is harmless, and how much of it is held.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from r3async.data.records import Trajectory
from r3async.data.window import ConsumedGroups
from r3async.transport.codec import Frame, WireError
from r3async.transport.sockets import OFFLOAD_BYTES, TrajectoryValidator, run_off_loop
from r3async.transport.wire import (
    DeliveryItem,
    InvalidTrajectoryError,
    decode_trajectory,
    decoded_bytes,
    join_item_frames,
)
from r3async.world import TURN_SECONDS, World
from r3async.world.real import REAL_WORLD

logger = logging.getLogger(__name__)

MIN_TOKEN_BYTES = 16
"""Of columns, at the least: what a token weighs when it is decided where to work on it."""
INTAKE_BATCH = 16
"""Trajectories that are opened and validated in one go, at most."""


class RejectionError(ValueError):
    """Raised by `admit`: this trajectory will never be taken. The message is the reason that its sender is given."""


class DecodedTrajectory(NamedTuple):
    """What arrived, and its bytes in memory."""

    trajectory: Trajectory
    nbytes: int


class IntakeOutcome(NamedTuple):
    """`over`: its episode is, so it is a duplicate. `refused`: what it says is not accepted. `damaged`: it is not what a sender
    makes, so it changed on its way."""

    kind: Literal["taken", "over", "refused", "damaged"]
    reason: str = ""


class DurableTrajectory(Protocol):
    """A trajectory that is on disk, and takes `nbytes` of memory."""

    @property
    def trajectory(self) -> Trajectory: ...
    @property
    def nbytes(self) -> int: ...


class TrajectoryStore(Protocol):
    """What makes trajectories durable (`r3async.schedule.spool.Spool`)."""

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


@dataclass(slots=True)
class IncomingTrajectory:
    """A trajectory that arrived and was not answered yet. `sender_identities`: the first one's is judged. `frames`: in
    pieces, until they are `join_frames`ed."""

    sender_identities: list[bytes]
    item: DeliveryItem
    frames: Sequence[Frame]

    @property
    def trajectory_id(self) -> str:
        return self.item.trajectory_id

    @property
    def nbytes(self) -> int:
        """What it takes in memory, as its sender says."""
        return self.item.nbytes

    @property
    def wire_bytes(self) -> int:
        return sum(map(len, self.frames))

    def join_frames(self) -> None:
        """Off the event loop: this may copy. Raises `WireError`."""
        self.frames = join_item_frames(self.item, self.frames)


class TrajectoryIntake:
    """Takes in one trajectory after the other, small ones a few at a time, so that answers come in the order of deliveries.

    `on_outcome(arrival, outcome)` is called on the event loop when all is done.
    """

    def __init__(
        self,
        ledger: TrajectoryLedger,
        capacity: MemoryBudget,
        on_trajectory: Callable[[Trajectory, int], None],
        validate: TrajectoryValidator | None,
        admit: Callable[[Trajectory], bool] | None,
        store: TrajectoryStore | None,
        on_outcome: Callable[[IncomingTrajectory, IntakeOutcome], None],
        world: World = REAL_WORLD,
    ):
        self._ledger, self._capacity = ledger, capacity
        self._on_trajectory, self._validate, self._admit, self._store = on_trajectory, validate, admit, store
        self._on_outcome = on_outcome
        self._clock, self._threads = world.clock.monotonic, world.threads
        self.unanswered_bytes = 0
        """Of those that arrived and are not answered yet."""
        self._unanswered: dict[str, IncomingTrajectory] = {}
        self._inbox: asyncio.Queue[IncomingTrajectory] = asyncio.Queue()

    def add_duplicate_sender(self, identity: bytes, trajectory_id: str) -> bool:
        """Whether this one is in hand: then its sender will be answered with the first."""
        arrival = self._unanswered.get(trajectory_id)
        if arrival is not None and identity not in arrival.sender_identities:
            arrival.sender_identities.append(identity)
        return arrival is not None

    def __len__(self) -> int:
        """How many arrived, and are not answered yet."""
        return len(self._unanswered)

    def unanswered_of(self, identity: bytes) -> list[str]:
        """What is in hand of one sender."""
        return [p.trajectory_id for p in self._unanswered.values() if identity in p.sender_identities]

    def add(self, arrival: IncomingTrajectory) -> None:
        self._unanswered[arrival.trajectory_id] = arrival
        self.unanswered_bytes += arrival.nbytes
        self._inbox.put_nowait(arrival)

    async def run(self) -> None:
        """Until it is cancelled. What is in hand then was not answered."""
        turn = self._clock()
        while True:
            if self._inbox.empty() or self._clock() - turn > TURN_SECONDS:
                await asyncio.sleep(0)
                turn = self._clock()
            arrivals = self._next_batch(await self._inbox.get())
            nbytes = sum(arrival.nbytes for arrival in arrivals)
            opened = await run_off_loop(self._threads, nbytes, self._decode_and_validate, arrivals)
            for arrival, found in zip(arrivals, opened, strict=True):
                try:
                    outcome = await self._store_and_hand_over(arrival, found)
                finally:
                    del self._unanswered[arrival.trajectory_id]
                    self.unanswered_bytes -= arrival.nbytes
                try:
                    self._on_outcome(arrival, outcome)
                except Exception:
                    logger.exception("the trajectory receiver continues after an error")

    def _next_batch(self, arrival: IncomingTrajectory) -> list[IncomingTrajectory]:
        """It, and those behind it that are opened with it: small ones, which cost less together."""
        arrivals, nbytes = [arrival], arrival.nbytes
        while nbytes < OFFLOAD_BYTES and len(arrivals) < INTAKE_BATCH and not self._inbox.empty():
            arrivals.append(self._inbox.get_nowait())
            nbytes += arrivals[-1].nbytes
        return arrivals

    async def restore_from_store(self, store: TrajectoryStore) -> tuple[int, int]:
        """What was accepted and not trained is handed over again; what the ledger knows besides was never kept, and what
        is over, or not accepted any more, is removed from the store. Returns how many there were, and how many of them are
        not taken any more."""
        self._ledger.forget_unconsumed()
        over, count = set(), 0
        refused: dict[tuple[int, str], str] = {}
        for kept in await store.recover_trajectories():
            trajectory = kept.trajectory
            group_index, trajectory_id = trajectory.group_index, trajectory.trajectory_id
            if self._ledger.is_group_consumed(group_index):
                over.add(group_index)
                continue
            count += 1
            try:
                wrong = await run_off_loop(
                    self._threads, trajectory.num_tokens * MIN_TOKEN_BYTES, self._find_rejections, [trajectory]
                )
                for error in wrong.values():
                    raise error
                if not self._is_admitted(trajectory):
                    raise RejectionError("its episode is here already")
                self._hand_over(trajectory, kept.nbytes)
            except Exception as error:
                refused[group_index, trajectory_id] = str(error) or type(error).__name__
                logger.warning("trajectory %r was kept, but is not taken again: %s", trajectory_id, error)
        await store.delete_trained(over)
        await store.remove_trajectories(refused)
        return count, len(refused)

    async def _store_and_hand_over(
        self, arrival: IncomingTrajectory, decoded: DecodedTrajectory | Exception
    ) -> IntakeOutcome:
        """Everything that may refuse it comes before it is stored. `decoded`: what it is, or why it is not."""
        stored = False
        try:
            if isinstance(decoded, Exception):
                raise decoded
            trajectory, nbytes = decoded
            if self._ledger.is_group_consumed(arrival.item.group_index) or not self._is_admitted(trajectory):
                self._capacity.release_trajectory(arrival.trajectory_id)
                return IntakeOutcome("over")
            if self._store is not None:
                spill = self._capacity.reserved_bytes > self._store.memory_bytes
                kept = await self._store.put_trajectory(trajectory, arrival.frames, spill=spill)
                stored = True
                if kept is not None:
                    trajectory, nbytes = kept.trajectory, kept.nbytes
            if self._ledger.is_group_consumed(arrival.item.group_index):  # Meanwhile.
                self._capacity.release_trajectory(arrival.trajectory_id)
                return IntakeOutcome("over")
            self._hand_over(trajectory, nbytes)
        except Exception as error:
            self._capacity.release_trajectory(arrival.trajectory_id)
            if isinstance(error, WireError | RejectionError) and not stored:
                again = isinstance(error, WireError) and not isinstance(error, InvalidTrajectoryError)
                return IntakeOutcome("damaged" if again else "refused", str(error) or type(error).__name__)
            logger.exception("trajectory %r was not taken", arrival.trajectory_id)
            reason = f"the learner failed to take it: {type(error).__name__}: {error}"
            if stored and self._store is not None:  # a defect; it must not be met again at every start
                await self._store.remove_trajectories({(arrival.item.group_index, arrival.trajectory_id): reason})
            return IntakeOutcome("refused", reason)
        return IntakeOutcome("taken")

    def _decode_and_validate(self, arrivals: Sequence[IncomingTrajectory]) -> list[DecodedTrajectory | Exception]:
        """Decode and validate: the work that is proportional to the payload. What is wrong with one is no other's matter."""
        opened: list[DecodedTrajectory | Exception] = []
        for arrival in arrivals:
            try:
                opened.append(self._decode_one(arrival))
            except Exception as error:
                opened.append(error)
        good = [(at, found) for at, found in enumerate(opened) if isinstance(found, DecodedTrajectory)]
        for which, refusal in self._find_rejections([found.trajectory for _, found in good]).items():
            opened[good[which][0]] = refusal
        return opened

    def _decode_one(self, arrival: IncomingTrajectory) -> DecodedTrajectory:
        """Raises `WireError`."""
        arrival.join_frames()
        trajectory = decode_trajectory(arrival.frames)
        if (trajectory.trajectory_id, trajectory.group_index) != (arrival.trajectory_id, arrival.item.group_index):
            raise WireError(f"the payload is trajectory {trajectory.trajectory_id!r} of {trajectory.group_index}")
        nbytes = decoded_bytes(arrival.frames, trajectory)
        if nbytes > arrival.nbytes:
            raise WireError(f"it takes {nbytes} bytes, and {arrival.nbytes} were announced")
        return DecodedTrajectory(trajectory, nbytes)

    def _find_rejections(self, trajectories: Sequence[Trajectory]) -> dict[int, Exception]:
        """By their place: what is wrong with those that are not taken, or what `validate` failed with when it was given them
        alone."""
        if self._validate is None or not trajectories:
            return {}
        try:
            return {at: RejectionError(reason) for at, reason in self._validate(trajectories).items()}
        except Exception as error:
            if len(trajectories) == 1:
                return {0: error}
        return {at: error for at, t in enumerate(trajectories) for error in self._find_rejections([t]).values()}

    def _is_admitted(self, trajectory: Trajectory) -> bool:
        return self._admit is None or self._admit(trajectory)

    def _hand_over(self, trajectory: Trajectory, nbytes: int) -> None:
        """Raises what `on_trajectory` raises, and then nothing is held."""
        group_index, trajectory_id = trajectory.group_index, trajectory.trajectory_id
        self._capacity.set_reserved(trajectory_id, nbytes)
        # Before the call, so that it may forget the group that this trajectory completes.
        self._ledger.add(group_index, trajectory_id)
        try:
            self._on_trajectory(trajectory, nbytes)
        except Exception:
            self._ledger.discard(group_index, trajectory_id)
            self._capacity.release_trajectory(trajectory_id)
            raise


class TrajectoryLedger:
    """Ids of accepted trajectories, by group that is not over.

    `consumed`: the groups that are over. Whoever consumes groups shares his with the ledger; else it has one of its own, in which
    groups may end in any order.
    """

    def __init__(self, consumed: ConsumedGroups | None = None) -> None:
        self._consumed = ConsumedGroups(window=sys.maxsize) if consumed is None else consumed
        self._accepted_ids: dict[int, set[str]] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        """`(group_index, trajectory_id)` was accepted, or its group is over."""
        group_index, trajectory_id = key
        return self.is_group_consumed(group_index) or trajectory_id in self._accepted_ids.get(group_index, ())

    def is_group_consumed(self, group_index: int) -> bool:
        return group_index in self._consumed

    @property
    def oldest_group(self) -> int:
        """The first group that is not over."""
        return self._consumed.head

    def add(self, group_index: int, trajectory_id: str) -> None:
        if not self.is_group_consumed(group_index):
            self._accepted_ids.setdefault(group_index, set()).add(trajectory_id)

    def discard(self, group_index: int, trajectory_id: str) -> None:
        """Take back an `add`. Harmless if there was none."""
        ids = self._accepted_ids.get(group_index, set())
        ids.discard(trajectory_id)
        if not ids:
            self._accepted_ids.pop(group_index, None)

    def forget_group(self, group_index: int) -> set[str]:
        """The group is over: whatever still comes for it is a duplicate. Returns the ids it had. Idempotent."""
        if not self.is_group_consumed(group_index):
            self._consumed.add(group_index)
        return self._accepted_ids.pop(group_index, set())

    def forget_unconsumed(self) -> None:
        """Only what is over stays known: of the rest, nothing has been kept, or what was kept is added again."""
        self._accepted_ids.clear()


NO_GROUP_LIMIT = 2**62
"""`MemoryBudget.group_limit` while everything is taken: no group is behind it."""


class MemoryBudget:
    """Bytes of trajectories that arrived and are not released.

    `oldest_group` is the first group that is not consumed, and the `window` groups from there on are what the next step may wait
    for. Rule: a trajectory of the window is always taken. Any other is taken if it fits into `total_bytes`, or if nothing is
    held. From the first one that does not fit until it would, senders are asked for the window only (`group_limit`).

    * It cannot deadlock: whatever else is held, all trajectories of the window are taken, so the step gets its groups,
      consumes them, and the window moves. A trajectory waits at most until its group is in the window.
    * It is bounded: beyond `total_bytes` there are only trajectories that were taken in the window, and they leave it only by
    being
      consumed: `reserved_bytes <= max(total, largest trajectory) + bytes of the groups oldest .. oldest + window - 1`.
      Whatever senders claim, these are at most `window` times the trajectories that a group may have times the largest (see
      `TrajectoryReceiver`).
    """

    def __init__(self, total_bytes: int, window: int = 1):
        self.total_bytes = total_bytes
        self.window = window
        self.oldest_group = 0
        self.reserved_bytes = 0
        self._reserved: dict[str, int] = {}
        self._first_refused_bytes: int | None = None
        """Bytes of the first trajectory that did not fit; None while everything is taken."""

    def advance_window(self, oldest_group: int) -> None:
        """Groups before `oldest_group` are consumed."""
        self.oldest_group = max(self.oldest_group, oldest_group)

    def try_reserve(self, trajectory_id: str, group_index: int, nbytes: int, free_disk_bytes: float = math.inf) -> bool:
        """Hold one that arrives, if the rule allows it. `free_disk_bytes`: bytes that are free there, where it has to go,
        too, unless it is of the window."""
        urgent = self.oldest_group <= group_index < self.oldest_group + self.window
        if not urgent and not (self._fits_in_memory(nbytes) and nbytes <= free_disk_bytes):
            if self._first_refused_bytes is None:
                self._first_refused_bytes = nbytes
            return False
        self.set_reserved(trajectory_id, nbytes)
        return True

    def group_limit(self, free_disk_bytes: float = math.inf) -> int:
        """Groups before this one are taken now, however large they are; `NO_GROUP_LIMIT` if it may be all of them."""
        if (
            self._first_refused_bytes is not None
            and self._fits_in_memory(self._first_refused_bytes)
            and self._first_refused_bytes <= free_disk_bytes
        ):
            self._first_refused_bytes = None
        return NO_GROUP_LIMIT if self._first_refused_bytes is None else self.oldest_group + self.window

    def lacks_only_disk(self, free_disk_bytes: float) -> bool:
        """What did not fit would, if `free_disk_bytes` had more free bytes."""
        return (
            self._first_refused_bytes is not None
            and self._fits_in_memory(self._first_refused_bytes)
            and self._first_refused_bytes > free_disk_bytes
        )

    def set_reserved(self, trajectory_id: str, nbytes: int) -> None:
        """A trajectory holds `nbytes`, and no longer what it held before."""
        self.release_trajectory(trajectory_id)
        self._reserved[trajectory_id] = nbytes
        self.reserved_bytes += nbytes

    def release_trajectory(self, trajectory_id: str) -> None:
        """Free what a trajectory holds. Harmless if it holds nothing."""
        self.reserved_bytes -= self._reserved.pop(trajectory_id, 0)

    def _fits_in_memory(self, nbytes: int) -> bool:
        return not self.reserved_bytes or self.reserved_bytes + nbytes <= self.total_bytes
