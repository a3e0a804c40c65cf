"""The intake of trajectories, from arrival to answer: decode, validate, store, hand over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from r3async.data.control_messages import DeliveryItem, join_item_frames
from r3async.data.tokens import Trajectory
from r3async.data.wire import InvalidTrajectoryError, decode_trajectory, decoded_bytes
from r3async.data.wire_frames import Frame, WireError
from r3async.transport.ledger import TrajectoryLedger
from r3async.transport.memory_budget import MIN_TOKEN_BYTES, MemoryBudget
from r3async.transport.sockets import OFFLOAD_BYTES, run_off_loop
from r3async.world import TURN_SECONDS, World

logger = logging.getLogger(__name__)


class TrajectoryConsumer:
    """The consumer of what a receiver accepts, which the receiver asks what to accept.
    This base accepts everything and keeps nothing. All methods but `find_invalid` are
    called on the event loop."""

    def is_expected(self, group_index: int, trajectory_id: str) -> bool:
        """Return True if a group has such a trajectory."""
        return True

    def find_invalid(self, trajectories: Sequence[Trajectory]) -> Mapping[int, str]:
        """Return the reasons, by index, why trajectories are rejected. Called in a thread if the
        payload is large."""
        return {}

    def admit_trajectory(self, trajectory: Trajectory) -> bool:
        """Return False for a duplicate. Raises `RejectionError` for a trajectory that will
        never be accepted."""
        return True

    def take_trajectory(self, trajectory: Trajectory, nbytes: int) -> None:
        """Take a trajectory, which holds `nbytes` of memory. The consumer owns it (read-only
        arrays) from then on."""

    def report_rejection(self, trajectory_id: str, reason: str) -> None:
        """Report a rejected message. `trajectory_id` is empty for one that is not a trajectory."""


INTAKE_BATCH = 16
"""Trajectories that are decoded and validated together, at most."""


class RejectionError(ValueError):
    """Rejection by `TrajectoryConsumer.admit_trajectory` of a trajectory that will never be
    accepted. The message is the reason that its sender gets."""


class DecodedTrajectory(NamedTuple):
    """A decoded trajectory and its bytes in memory."""

    trajectory: Trajectory
    nbytes: int


class IntakeOutcome(NamedTuple):
    """The result of taking in a trajectory.

    Attributes:
        kind: `taken`; `over` for a duplicate, whose episode is over; `refused` if its content is
            not accepted; `damaged` if no sender makes such a message, so it was damaged in transit.
        reason: Why it was refused or damaged.
    """

    kind: Literal["taken", "over", "refused", "damaged"]
    reason: str = ""


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


@dataclass(slots=True)
class IncomingTrajectory:
    """A trajectory that arrived and was not answered yet.

    Attributes:
        sender_identities: The senders of the trajectory; the first one's message is judged.
        frames: The frames in pieces, until `join_frames` joins them.
    """

    sender_identities: list[bytes]
    item: DeliveryItem
    frames: Sequence[Frame]

    @property
    def trajectory_id(self) -> str:
        return self.item.trajectory_id

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes, as its sender says."""
        return self.item.nbytes

    @property
    def wire_bytes(self) -> int:
        return sum(map(len, self.frames))

    def join_frames(self) -> None:
        """Join the frames, off the event loop, because this may copy. Raises `WireError`."""
        self.frames = join_item_frames(self.item, self.frames)


class TrajectoryIntake:
    """A queue that takes in one trajectory after the other, small ones a few at a time, so that
    answers come in the order of deliveries."""

    def __init__(
        self,
        ledger: TrajectoryLedger,
        capacity: MemoryBudget,
        consumer: TrajectoryConsumer,
        store: TrajectoryStore | None,
        world: World,
    ):
        self._ledger = ledger
        self._capacity = capacity
        self._consumer = consumer
        self._store = store
        self._clock = world.clock.monotonic
        self._threads = world.threads
        self.unanswered_bytes = 0
        """Bytes of the trajectories that arrived and are not answered yet."""
        self._unanswered: dict[str, IncomingTrajectory] = {}
        self._inbox: asyncio.Queue[IncomingTrajectory] = asyncio.Queue()

    def add_duplicate_sender(self, identity: bytes, trajectory_id: str) -> bool:
        """Return True if this trajectory is in hand already; its sender is then answered
        together with the first."""
        arrival = self._unanswered.get(trajectory_id)
        if arrival is not None and identity not in arrival.sender_identities:
            arrival.sender_identities.append(identity)
        return arrival is not None

    def __len__(self) -> int:
        """Return the number of trajectories that arrived and are not answered yet."""
        return len(self._unanswered)

    def unanswered_of(self, identity: bytes) -> list[str]:
        """Return the ids of one sender's trajectories that are in hand."""
        return [
            p.trajectory_id for p in self._unanswered.values() if identity in p.sender_identities
        ]

    def add(self, arrival: IncomingTrajectory) -> None:
        self._unanswered[arrival.trajectory_id] = arrival
        self.unanswered_bytes += arrival.nbytes
        self._inbox.put_nowait(arrival)

    async def process_arrivals(self) -> AsyncIterator[tuple[IncomingTrajectory, IntakeOutcome]]:
        """Take in trajectories until cancelled, and yield each with its outcome, for the answer."""
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
                yield arrival, outcome

    def _next_batch(self, arrival: IncomingTrajectory) -> list[IncomingTrajectory]:
        """Return a trajectory and those behind it that are decoded with it: small ones, which
        cost less together."""
        arrivals = [arrival]
        nbytes = arrival.nbytes
        while nbytes < OFFLOAD_BYTES and len(arrivals) < INTAKE_BATCH and not self._inbox.empty():
            arrivals.append(self._inbox.get_nowait())
            nbytes += arrivals[-1].nbytes
        return arrivals

    async def restore_from_store(self, store: TrajectoryStore) -> tuple[int, int]:
        """Hand over again what the store kept of accepted trajectories that are not trained.
        Anything else in the ledger was never kept and is forgotten.

        Trajectories that are over, or no longer accepted, are removed from the store. Returns how
        many there were that are not over, and how many of them are no longer accepted.
        """
        self._ledger.forget_unconsumed()
        over = set()
        count = 0
        refused: dict[tuple[int, str], str] = {}
        for kept in await store.recover_trajectories():
            trajectory = kept.trajectory
            group_index = trajectory.group_index
            trajectory_id = trajectory.trajectory_id
            if self._ledger.is_group_consumed(group_index):
                over.add(group_index)
                continue
            count += 1
            try:
                wrong = await run_off_loop(
                    self._threads,
                    trajectory.num_tokens * MIN_TOKEN_BYTES,
                    self._find_rejections,
                    [trajectory],
                )
                for error in wrong.values():
                    raise error
                if not self._consumer.admit_trajectory(trajectory):
                    raise RejectionError("its episode is here already")
                self._hand_over(trajectory, kept.nbytes)
            except Exception as error:
                refused[group_index, trajectory_id] = str(error) or type(error).__name__
                logger.warning(
                    "trajectory %r was kept, but is not taken again: %s", trajectory_id, error
                )
        await store.delete_trained(over)
        await store.remove_trajectories(refused)
        return count, len(refused)

    async def _store_and_hand_over(
        self, arrival: IncomingTrajectory, decoded: DecodedTrajectory | Exception
    ) -> IntakeOutcome:
        """Store a trajectory and hand it over. Every check that may refuse it precedes the storing.
        `decoded` is the decoded trajectory, or the error that prevented it."""
        stored = False
        try:
            if isinstance(decoded, Exception):
                raise decoded
            trajectory, nbytes = decoded
            is_over = self._ledger.is_group_consumed(arrival.item.group_index)
            if is_over or not self._consumer.admit_trajectory(trajectory):
                self._capacity.release_trajectory(arrival.trajectory_id)
                return IntakeOutcome("over")
            if self._store is not None:
                spill = self._capacity.reserved_bytes > self._store.memory_bytes
                kept = await self._store.put_trajectory(trajectory, arrival.frames, spill=spill)
                stored = True
                if kept is not None:
                    trajectory = kept.trajectory
                    nbytes = kept.nbytes
            # The group ended during the write.
            if self._ledger.is_group_consumed(arrival.item.group_index):
                self._capacity.release_trajectory(arrival.trajectory_id)
                return IntakeOutcome("over")
            self._hand_over(trajectory, nbytes)
        except Exception as error:
            self._capacity.release_trajectory(arrival.trajectory_id)
            if isinstance(error, WireError | RejectionError) and not stored:
                again = isinstance(error, WireError) and not isinstance(
                    error, InvalidTrajectoryError
                )
                return IntakeOutcome(
                    "damaged" if again else "refused", str(error) or type(error).__name__
                )
            logger.exception("trajectory %r was not taken", arrival.trajectory_id)
            reason = f"the learner failed to take it: {type(error).__name__}: {error}"
            if stored and self._store is not None:  # a defect, which must not recur at every start
                await self._store.remove_trajectories(
                    {(arrival.item.group_index, arrival.trajectory_id): reason}
                )
            return IntakeOutcome("refused", reason)
        return IntakeOutcome("taken")

    def _decode_and_validate(
        self, arrivals: Sequence[IncomingTrajectory]
    ) -> list[DecodedTrajectory | Exception]:
        """Decode and validate trajectories: the work that is proportional to the payload. An error
        of one does not affect the others."""
        opened: list[DecodedTrajectory | Exception] = []
        for arrival in arrivals:
            try:
                opened.append(self._decode_one(arrival))
            except Exception as error:
                opened.append(error)
        good = [
            (at, found) for at, found in enumerate(opened) if isinstance(found, DecodedTrajectory)
        ]
        for which, refusal in self._find_rejections(
            [found.trajectory for _, found in good]
        ).items():
            opened[good[which][0]] = refusal
        return opened

    def _decode_one(self, arrival: IncomingTrajectory) -> DecodedTrajectory:
        """Decode one trajectory. Raises `WireError`."""
        arrival.join_frames()
        trajectory = decode_trajectory(arrival.frames)
        if (trajectory.trajectory_id, trajectory.group_index) != (
            arrival.trajectory_id,
            arrival.item.group_index,
        ):
            raise WireError(
                f"the payload is trajectory {trajectory.trajectory_id!r} of "
                f"{trajectory.group_index}"
            )
        nbytes = decoded_bytes(arrival.frames, trajectory)
        if nbytes > arrival.nbytes:
            raise WireError(f"it takes {nbytes} bytes, and {arrival.nbytes} were announced")
        return DecodedTrajectory(trajectory, nbytes)

    def _find_rejections(self, trajectories: Sequence[Trajectory]) -> dict[int, Exception]:
        """Return, by position, why trajectories are not accepted: the reason, or the error that
        `find_invalid` raised for that one alone."""
        if not trajectories:
            return {}
        try:
            return {
                at: RejectionError(reason)
                for at, reason in self._consumer.find_invalid(trajectories).items()
            }
        except Exception as error:
            if len(trajectories) == 1:
                return {0: error}
        return {
            at: error
            for at, t in enumerate(trajectories)
            for error in self._find_rejections([t]).values()
        }

    def _hand_over(self, trajectory: Trajectory, nbytes: int) -> None:
        """Hand a trajectory to the consumer. Raises whatever that raises, and then
        nothing is held."""
        group_index = trajectory.group_index
        trajectory_id = trajectory.trajectory_id
        self._capacity.set_reserved(trajectory_id, nbytes)
        # Before the call, so that it may forget the group that this trajectory completes.
        self._ledger.add(group_index, trajectory_id)
        try:
            self._consumer.take_trajectory(trajectory, nbytes)
        except Exception:
            self._ledger.discard(group_index, trajectory_id)
            self._capacity.release_trajectory(trajectory_id)
            raise
