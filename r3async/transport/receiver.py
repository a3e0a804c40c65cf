"""The learner's receiver: takes trajectories from many senders, validates, stores and acknowledges them."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from r3async.config import LOOPBACK_HOST, TransportConfig, bracket_ipv6
from r3async.data.consumed_groups import ConsumedGroups
from r3async.data.control_messages import (
    Ack,
    ControlMessage,
    Deliver,
    DeliveryItem,
    Hello,
    Refusal,
    Reject,
    Welcome,
    decode_control,
    encode_control,
    join_item_frames,
)
from r3async.data.tokens import SCHEMA, Trajectory
from r3async.data.wire import WIRE_VERSION, InvalidTrajectoryError, decode_trajectory, decoded_bytes
from r3async.data.wire_frames import Frame, WireError
from r3async.transport.sockets import OFFLOAD_BYTES, NullSocket, run_off_loop
from r3async.world import TURN_SECONDS, MessageSocket, World
from r3async.world.curve_keys import ServerKeys, TransportError
from r3async.world.real import REAL_WORLD
from r3async.world.stages import in_stage

__all__ = ["RejectionError", "TrajectoryConsumer", "TrajectoryReceiver"]

logger = logging.getLogger(__name__)

SILENT_TIMEOUTS = 4
"""Number of `ack_timeout`s of silence after which a sender is considered lost, and the others may have more in
flight."""
MAX_REASON_CHARS = 500
MAX_IN_HAND_IDS = 64
MAX_SENDERS = 1024
MAX_ACK_IDS = 64
"""Ids in one message, at most: it must stay below `MAX_CONTROL_BYTES` however long they are."""
ACK_DELAY_SECONDS = 0.01
"""Seconds within which accepted trajectories are acknowledged together: each message wakes up a thread here and an
event loop there. Only the sender's bytes in flight wait for it, so this share of them (`ACK_CREDIT_SHARE`, of the
credit of each) is acknowledged at once."""
ACK_CREDIT_SHARE = 16


@dataclass(slots=True)
class SenderSession:
    session: str
    last_message_at: float


class TrajectoryConsumer:
    """The consumer of what a receiver accepts, which the receiver asks what to accept. This base accepts everything
    and keeps nothing. All methods but `find_invalid` are called on the event loop."""

    def is_expected(self, group_index: int, trajectory_id: str) -> bool:
        """Return True if a group has such a trajectory."""
        return True

    def find_invalid(self, trajectories: Sequence[Trajectory]) -> Mapping[int, str]:
        """Return the reasons, by index, why trajectories are rejected. Called in a thread if the payload is large."""
        return {}

    def admit_trajectory(self, trajectory: Trajectory) -> bool:
        """Return False for a duplicate. Raises `RejectionError` for a trajectory that will never be accepted."""
        return True

    def take_trajectory(self, trajectory: Trajectory, nbytes: int) -> None:
        """Take a trajectory, which holds `nbytes` of memory. The consumer owns it (read-only arrays) from then on."""

    def report_rejection(self, trajectory_id: str, reason: str) -> None:
        """Report a rejected message. `trajectory_id` is empty for one that is not a trajectory."""


class TrajectoryReceiver:
    """The learner's end of the transport: accepts each trajectory once and hands it to its consumer.

    A trajectory takes these steps, in this order:

    * `consumer.find_invalid`, for several at once, off the event loop if the payload is large.
    * `consumer.admit_trajectory`, on the event loop; it returns False for a duplicate.
    * `store.put_trajectory`, if there is a store.
    * `consumer.take_trajectory`, on the event loop.
    * The acknowledgement, after which the sender forgets the trajectory. What has to survive a crash is in the store by
      then.

    If `find_invalid` names a reason or `admit_trajectory` raises `RejectionError`, the trajectory is rejected with that
    reason, and nothing of it is stored. Any other exception is logged and rejects it too, for a message that triggers a
    defect must neither stop the receiver nor be resent for ever.

    Memory: trajectories that arrived and are not released take at most `settings.credit_bytes`, and beyond that only
    what the next `window` groups take, which are accepted whatever else is held; `MemoryBudget` has the rule and
    explains why it cannot deadlock. Any other trajectory that arrives while there is no free memory is dropped at once:
    its sender keeps it, and is told when to send it again. Claims of senders are limited: `consumer.is_expected` says
    whether a group has such a trajectory, and no trajectory takes more than `max_trajectory_bytes` bytes. So memory is
    bounded whatever senders claim, by `max(credit_bytes, largest) + window * (trajectories that claims lets a group
    have) * largest`. At most half of `credit_bytes` is in flight to the receiver, or one trajectory of each sender.

    Call `release_trajectory` for each trajectory that is no longer held in memory, or `forget_group` for a whole group,
    in the order of groups as far as possible. With a store, a trajectory that would exceed `store.memory_bytes` is
    handed over mapped from disk; and if the store has no free bytes, only the window is accepted.

    Duplicates: `ledger` has the ids of accepted trajectories. A receiver that restarts with a restored ledger and the
    store neither loses a trajectory nor takes one twice: `start` hands over again what the store kept, and groups that
    are over are removed from the store. A receiver with an empty ledger takes again what was not acknowledged.

    Only peers whose key is in `keys` are let in; see `transport.keys`.

    No message can stop the receiver: an invalid message is counted, and refused with a reason if there is a sender to
    answer. All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        run_id: str,
        settings: TransportConfig,
        consumer: TrajectoryConsumer,
        *,
        keys: ServerKeys,
        max_trajectory_bytes: int | None = None,
        store: TrajectoryStore | None = None,
        window: int = 1,
        port: int = 0,
        ledger: TrajectoryLedger | None = None,
        world: World = REAL_WORLD,
    ):
        self.run_id = run_id
        self.settings = settings
        self.ledger = TrajectoryLedger() if ledger is None else ledger
        self.incarnation = world.unique_id()
        """Name of this incarnation."""
        self.received = 0
        """Trajectories accepted."""
        self.bytes_received = 0
        """Bytes of accepted trajectories, on the wire."""
        self.recovered = 0
        """Trajectories that the store had kept and `start` handed over again."""
        self.duplicates = 0
        """Trajectories delivered again after they were accepted, or after their group was over."""
        self.rejected = 0
        """Messages refused with a reason."""
        self.damaged = 0
        """Trajectories damaged in transit; their senders were asked to send them again."""
        self.refused_peers: Counter[str] = Counter()
        """Number of times that peers were not let in, by reason."""
        self._keys = keys
        self._consumer = consumer
        limits = (settings.max_message_bytes, max_trajectory_bytes)
        self._max_trajectory_bytes = min(limit for limit in limits if limit is not None)
        self._store = store
        self._port = port
        self._clock = world.clock.monotonic
        self._memory = MemoryBudget(settings.credit_bytes, window)
        self._group_limit = NO_GROUP_LIMIT
        """Group limit that senders were told: only trajectories of groups before it are accepted."""
        self._sessions: dict[bytes, SenderSession] = {}
        self._pending_acks: dict[bytes, list[str]] = {}
        self._unacknowledged_bytes = 0
        """Bytes of the trajectories in `_pending_acks`."""
        self._heartbeat_seconds = settings.ack_timeout / 4
        self._heartbeat_due_at = 0.0
        self._announce_scheduled = False
        self._intake = TrajectoryIntake(self.ledger, self._memory, consumer, store, world)
        self._sockets = world.open_sockets()
        self._socket: MessageSocket = NullSocket()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def unreleased_bytes(self) -> int:
        """The bytes of trajectories that were handed over and not released."""
        return self._memory.reserved_bytes

    @property
    def sender_count(self) -> int:
        """The number of senders that are connected."""
        return len(self._sessions)

    async def start(self) -> str:
        """Take back what the store kept, bind, and serve. Returns the endpoint; its host is `settings.host`, unchanged,
        even if that is a wildcard, or loopback if that is unset.

        Raises `TransportError` if the address cannot be bound.
        """
        assert not self._tasks, "a receiver is started once"
        self._memory.advance_window(self.ledger.oldest_group)
        if self._store is not None:
            self.recovered, refused = await self._intake.restore_from_store(self._store)
            self.rejected += refused
        address = f"tcp://{bracket_ipv6(self.settings.host or LOOPBACK_HOST)}:{self._port or '*'}"
        try:
            self._socket = self._sockets.bind_router(
                address, self._on_message, keys=self._keys, refused_peers=self.refused_peers
            )
        except OSError as error:
            await self.close()
            raise TransportError(f"cannot listen on {address}: {error.strerror}") from error
        self._tasks = [
            asyncio.create_task(in_stage("intake", self._answer_arrivals()), name="transport-receiver"),
            asyncio.create_task(in_stage("messages", self._run_heartbeat()), name="transport-heartbeat"),
        ]
        return self._socket.endpoint

    def release_trajectory(self, trajectory_id: str) -> None:
        """Free the bytes of a trajectory that is consumed. Harmless for one that holds none."""
        self._memory.release_trajectory(trajectory_id)
        self._announce_soon()

    def forget_group(self, group_index: int) -> None:
        """Release what a consumed group still holds, and forget its ids. Trajectories that still arrive for it are
        acknowledged and dropped as duplicates. Idempotent."""
        for trajectory_id in self.ledger.forget_group(group_index):
            self._memory.release_trajectory(trajectory_id)
        self._memory.advance_window(self.ledger.oldest_group)
        self._announce_soon()

    async def close(self) -> None:
        """Stop serving and free the address. What is not acknowledged stays with its sender. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        await self._sockets.close()

    async def _run_heartbeat(self) -> None:
        """Drop silent senders, and read messages that are waiting, at every heartbeat."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            try:
                self._socket.receive_pending()
                self._drop_silent_senders()
                self._announce_limit()
            except Exception:
                logger.exception("the trajectory receiver continues after an error")

    def _on_message(self, frames: list[Any]) -> None:
        try:
            self._handle_message(frames[0].bytes, frames[1:])
        except Exception:  # A defect here or in a callback. The sender gets no answer, and tries again.
            logger.exception("the trajectory receiver continues after an error")

    def _handle_message(self, identity: bytes, frames: Sequence[Frame]) -> None:
        try:
            message = decode_control(frames[0] if frames else b"")
            if isinstance(message, Hello):
                self._answer_hello(identity, message)
            elif not isinstance(message, Deliver):
                raise WireError(f"{type(message).__name__.upper()} is not for a receiver")
            elif self._is_current_session(identity, message.session):
                self._receive_delivery(identity, message, frames[1:])
        except WireError as error:
            self._reject_trajectory(identity, "", str(error))

    def _answer_hello(self, identity: bytes, hello: Hello) -> None:
        problem, kind = "", ""
        if hello.wire != WIRE_VERSION:
            kind = "another version of the protocol"
            problem = f"wire version {hello.wire}, the learner has {WIRE_VERSION}: install the same version on both"
        elif hello.run_id != self.run_id:
            kind = "another run"
            problem = f"run {hello.run_id!r} is not the run of this learner"
        elif hello.schema != SCHEMA.fingerprint:
            kind = "another schema"
            problem = f"token schema {hello.schema!r}, the learner has {SCHEMA.fingerprint!r}: the columns differ"
        elif identity not in self._sessions and len(self._sessions) >= MAX_SENDERS:
            kind = "too many senders"
            problem = f"{MAX_SENDERS} senders are connected, which is as many as may be"
        if problem:
            self.rejected += 1
            self.refused_peers[kind] += 1
            self._send_message(identity, Refusal(hello.session, f"sender {hello.sender_id!r}: {problem}", final=True))
            return
        self._sessions[identity] = SenderSession(hello.session, self._clock())
        self._announce_limit()
        self._send_welcome(identity)

    def _is_current_session(self, identity: bytes, session: str) -> bool:
        """Return True if a message belongs to the sender's current session.

        A sender opens a socket for each session, and ZeroMQ gives what is left of the earlier one another name, so that
        its session is unknown here. What it was is sent again anyway.
        """
        peer = self._sessions.get(identity)
        if peer is None:
            # The session is from before this receiver started, or before it dropped this sender.
            self._send_message(identity, Refusal(session, "unknown session: say HELLO", final=False))
            return False
        if peer.session != session:
            return False
        peer.last_message_at = self._clock()
        return True

    def _receive_delivery(self, identity: bytes, message: Deliver, frames: Sequence[Frame]) -> None:
        try:
            portions = message.split_by_item(frames)
        except WireError as error:
            for item in message.items:
                self._reject_damaged(identity, item.trajectory_id, str(error))
            return
        for item, pieces in zip(message.items, portions, strict=True):
            if not self._intake.add_duplicate_sender(identity, item.trajectory_id):
                self._receive_item(identity, item, pieces)

    def _receive_item(self, identity: bytes, item: DeliveryItem, pieces: Sequence[Frame]) -> None:
        trajectory_id, group_index = item.trajectory_id, item.group_index
        if problem := self._rejection_reason(item, pieces):
            self._reject_trajectory(identity, trajectory_id, problem)
        elif (group_index, trajectory_id) in self.ledger:
            self._acknowledge_duplicates(identity, trajectory_id)
        elif self._memory.try_reserve(trajectory_id, group_index, item.nbytes, self._free_disk_bytes):
            self._intake.add(IncomingTrajectory([identity], item, pieces))
        else:
            self._announce_limit()  # first, or it would be sent again at once
            self._send_message(identity, Reject(trajectory_id, "there is no free memory for it", again="later"))

    def _rejection_reason(self, item: DeliveryItem, pieces: Sequence[Frame]) -> str:
        """Return why an item like this is never accepted; empty if it may be."""
        trajectory_id, group_index, nbytes = item.trajectory_id, item.group_index, item.nbytes
        if nbytes > self._max_trajectory_bytes:
            return f"{nbytes} bytes, more than {self._max_trajectory_bytes}"
        if group_index < 0 or not self._consumer.is_expected(group_index, trajectory_id):
            return f"group {group_index} has no trajectory {trajectory_id!r}"
        if (there := sum(map(len, pieces))) > nbytes:
            return f"{there} bytes came, and {nbytes} were announced"
        return ""

    @property
    def _free_disk_bytes(self) -> float:
        """The free bytes of the store, less those in hand, which are not in it yet."""
        return math.inf if self._store is None else self._store.free_bytes - self._intake.unanswered_bytes

    async def _answer_arrivals(self) -> None:
        """Answer the sender of each trajectory that the intake has done with."""
        async for arrival, outcome in self._intake.process_arrivals():
            try:
                self._answer_sender(arrival, outcome)
            except Exception:
                logger.exception("the trajectory receiver continues after an error")

    def _answer_sender(self, arrival: IncomingTrajectory, outcome: IntakeOutcome) -> None:
        name, (identity, *others) = arrival.trajectory_id, arrival.sender_identities
        if outcome.kind == "over":
            self._acknowledge_duplicates(identity, name)
        elif outcome.kind == "refused":
            self._reject_trajectory(identity, name, outcome.reason)
        elif outcome.kind == "damaged":
            self._reject_damaged(identity, name, outcome.reason)
        else:
            self.received += 1
            self.bytes_received += arrival.wire_bytes
            if not self._pending_acks:
                asyncio.get_running_loop().call_later(ACK_DELAY_SECONDS, self._send_acks)
            self._pending_acks.setdefault(identity, []).append(name)
            self._unacknowledged_bytes += arrival.nbytes
            if self._unacknowledged_bytes >= self.settings.credit_bytes // (
                ACK_CREDIT_SHARE * max(1, len(self._sessions))
            ):
                self._send_acks()
        for other in others:  # its payload may differ, and is judged separately
            self._send_message(other, Reject(name, "another sender's was in hand", again="later"))
        self._announce_soon()

    def _send_acks(self) -> None:
        """Send one ACK to each sender for everything that was accepted and is not acknowledged yet."""
        acks, self._pending_acks, self._unacknowledged_bytes = self._pending_acks, {}, 0
        for identity, ids in acks.items():
            for i in range(0, len(ids), MAX_ACK_IDS):
                self._send_message(identity, Ack(ids[i : i + MAX_ACK_IDS]))

    def _acknowledge_duplicates(self, identity: bytes, *trajectory_ids: str) -> None:
        self.duplicates += len(trajectory_ids)
        self._send_message(identity, Ack(list(trajectory_ids)))

    def _reject_trajectory(self, identity: bytes, trajectory_id: str, reason: str) -> None:
        self.rejected += 1
        reason = reason[:MAX_REASON_CHARS]
        self._send_message(identity, Reject(trajectory_id, reason))
        self._consumer.report_rejection(trajectory_id, reason)

    def _reject_damaged(self, identity: bytes, trajectory_id: str, reason: str) -> None:
        self.damaged += 1
        logger.warning("trajectory %r came damaged: %s", trajectory_id, reason)
        self._send_message(identity, Reject(trajectory_id, reason[:MAX_REASON_CHARS], again="damaged"))

    def _announce_soon(self) -> None:
        """Schedule one announcement to senders of everything that becomes possible in this round of the event loop."""
        if self._group_limit != NO_GROUP_LIMIT and not self._announce_scheduled:
            self._announce_scheduled = True
            asyncio.get_running_loop().call_soon(self._announce_limit)

    def _announce_limit(self) -> None:
        self._announce_scheduled = False
        disk = self._free_disk_bytes
        until = self._memory.group_limit(disk)
        if self._store is not None:
            self._store.set_waiting(self._memory.lacks_only_disk(disk))
        if until != self._group_limit:
            self._group_limit = until
            for identity in list(self._sessions):
                self._send_welcome(identity)

    def _send_welcome(self, identity: bytes) -> None:
        at_once = self.settings.credit_bytes // (2 * len(self._sessions))
        in_hand = self._intake.unanswered_of(identity)[:MAX_IN_HAND_IDS]
        self._send_message(
            identity, Welcome(self._sessions[identity].session, self.incarnation, self._group_limit, at_once, in_hand)
        )

    def _drop_silent_senders(self) -> None:
        now = self._clock()
        if now - self._heartbeat_due_at > self._heartbeat_seconds:
            # This end was not listening because its event loop was busy, so nobody counts as silent.
            for peer in self._sessions.values():
                peer.last_message_at = now
        self._heartbeat_due_at = now + self._heartbeat_seconds
        for identity, peer in list(self._sessions.items()):
            if now - peer.last_message_at > SILENT_TIMEOUTS * self.settings.ack_timeout:
                del self._sessions[identity]

    def _send_message(self, identity: bytes, message: ControlMessage) -> None:
        """Send an answer, which may be lost: WELCOME is repeated, and what is not answered is sent again."""
        if self._socket.send([identity, encode_control(message)]) == errno.EHOSTUNREACH:
            self._sessions.pop(identity, None)


# The intake of trajectories, from arrival to answer: decode, validate, store, hand over. Also the ledger of accepted
# trajectories, which makes redelivery harmless, and the memory budget.


MIN_TOKEN_BYTES = 16
"""Least bytes of columns per token, for the decision whether to process a trajectory off the event loop."""
INTAKE_BATCH = 16
"""Trajectories that are decoded and validated together, at most."""


class RejectionError(ValueError):
    """Rejection by `TrajectoryConsumer.admit_trajectory` of a trajectory that will never be accepted. The message is
    the reason that its sender gets."""


class DecodedTrajectory(NamedTuple):
    """A decoded trajectory and its bytes in memory."""

    trajectory: Trajectory
    nbytes: int


class IntakeOutcome(NamedTuple):
    """The result of taking in a trajectory.

    Attributes:
        kind: `taken`; `over` for a duplicate, whose episode is over; `refused` if its content is not accepted;
            `damaged` if no sender makes such a message, so it was damaged in transit.
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
    """A queue that takes in one trajectory after the other, small ones a few at a time, so that answers come in the
    order of deliveries."""

    def __init__(
        self,
        ledger: TrajectoryLedger,
        capacity: MemoryBudget,
        consumer: TrajectoryConsumer,
        store: TrajectoryStore | None,
        world: World,
    ):
        self._ledger, self._capacity, self._consumer, self._store = ledger, capacity, consumer, store
        self._clock, self._threads = world.clock.monotonic, world.threads
        self.unanswered_bytes = 0
        """Bytes of the trajectories that arrived and are not answered yet."""
        self._unanswered: dict[str, IncomingTrajectory] = {}
        self._inbox: asyncio.Queue[IncomingTrajectory] = asyncio.Queue()

    def add_duplicate_sender(self, identity: bytes, trajectory_id: str) -> bool:
        """Return True if this trajectory is in hand already; its sender is then answered together with the first."""
        arrival = self._unanswered.get(trajectory_id)
        if arrival is not None and identity not in arrival.sender_identities:
            arrival.sender_identities.append(identity)
        return arrival is not None

    def __len__(self) -> int:
        """Return the number of trajectories that arrived and are not answered yet."""
        return len(self._unanswered)

    def unanswered_of(self, identity: bytes) -> list[str]:
        """Return the ids of one sender's trajectories that are in hand."""
        return [p.trajectory_id for p in self._unanswered.values() if identity in p.sender_identities]

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
        """Return a trajectory and those behind it that are decoded with it: small ones, which cost less together."""
        arrivals, nbytes = [arrival], arrival.nbytes
        while nbytes < OFFLOAD_BYTES and len(arrivals) < INTAKE_BATCH and not self._inbox.empty():
            arrivals.append(self._inbox.get_nowait())
            nbytes += arrivals[-1].nbytes
        return arrivals

    async def restore_from_store(self, store: TrajectoryStore) -> tuple[int, int]:
        """Hand over again what the store kept of accepted trajectories that are not trained. Anything else in the
        ledger was never kept and is forgotten.

        Trajectories that are over, or no longer accepted, are removed from the store. Returns how many there were that
        are not over, and how many of them are no longer accepted.
        """
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
                if not self._consumer.admit_trajectory(trajectory):
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
        """Store a trajectory and hand it over. Every check that may refuse it precedes the storing. `decoded` is the
        decoded trajectory, or the error that prevented it."""
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
                    trajectory, nbytes = kept.trajectory, kept.nbytes
            if self._ledger.is_group_consumed(arrival.item.group_index):  # The group ended during the write.
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
            if stored and self._store is not None:  # a defect, which must not recur at every start
                await self._store.remove_trajectories({(arrival.item.group_index, arrival.trajectory_id): reason})
            return IntakeOutcome("refused", reason)
        return IntakeOutcome("taken")

    def _decode_and_validate(self, arrivals: Sequence[IncomingTrajectory]) -> list[DecodedTrajectory | Exception]:
        """Decode and validate trajectories: the work that is proportional to the payload. An error of one does not
        affect the others."""
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
        """Decode one trajectory. Raises `WireError`."""
        arrival.join_frames()
        trajectory = decode_trajectory(arrival.frames)
        if (trajectory.trajectory_id, trajectory.group_index) != (arrival.trajectory_id, arrival.item.group_index):
            raise WireError(f"the payload is trajectory {trajectory.trajectory_id!r} of {trajectory.group_index}")
        nbytes = decoded_bytes(arrival.frames, trajectory)
        if nbytes > arrival.nbytes:
            raise WireError(f"it takes {nbytes} bytes, and {arrival.nbytes} were announced")
        return DecodedTrajectory(trajectory, nbytes)

    def _find_rejections(self, trajectories: Sequence[Trajectory]) -> dict[int, Exception]:
        """Return, by position, why trajectories are not accepted: the reason, or the error that `find_invalid` raised
        for that one alone."""
        if not trajectories:
            return {}
        try:
            return {at: RejectionError(reason) for at, reason in self._consumer.find_invalid(trajectories).items()}
        except Exception as error:
            if len(trajectories) == 1:
                return {0: error}
        return {at: error for at, t in enumerate(trajectories) for error in self._find_rejections([t]).values()}

    def _hand_over(self, trajectory: Trajectory, nbytes: int) -> None:
        """Hand a trajectory to the consumer. Raises whatever that raises, and then nothing is held."""
        group_index, trajectory_id = trajectory.group_index, trajectory.trajectory_id
        self._capacity.set_reserved(trajectory_id, nbytes)
        # Before the call, so that it may forget the group that this trajectory completes.
        self._ledger.add(group_index, trajectory_id)
        try:
            self._consumer.take_trajectory(trajectory, nbytes)
        except Exception:
            self._ledger.discard(group_index, trajectory_id)
            self._capacity.release_trajectory(trajectory_id)
            raise


class TrajectoryLedger:
    """The ids of accepted trajectories, by group that is not over.

    Args:
        consumed: The groups that are over, shared by the owner that consumes them; by default the ledger keeps its own,
            in which groups may end in any order.
    """

    def __init__(self, consumed: ConsumedGroups | None = None) -> None:
        self._consumed = ConsumedGroups(window=sys.maxsize) if consumed is None else consumed
        self._accepted_ids: dict[int, set[str]] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        """Return True if `(group_index, trajectory_id)` was accepted, or its group is over."""
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
        """Undo an `add`. Harmless if there was none."""
        ids = self._accepted_ids.get(group_index, set())
        ids.discard(trajectory_id)
        if not ids:
            self._accepted_ids.pop(group_index, None)

    def forget_group(self, group_index: int) -> set[str]:
        """Mark a group as over, so that whatever still arrives for it is a duplicate. Returns the ids it had.
        Idempotent."""
        if not self.is_group_consumed(group_index):
            self._consumed.add(group_index)
        return self._accepted_ids.pop(group_index, set())

    def forget_unconsumed(self) -> None:
        """Forget all ids of groups that are not over: nothing of them has been kept, or what was kept is added
        again."""
        self._accepted_ids.clear()


NO_GROUP_LIMIT = 2**62
"""Value of `MemoryBudget.group_limit` while everything is accepted: no group is beyond it."""


class MemoryBudget:
    """The budget for bytes of trajectories that arrived and are not released.

    `oldest_group` is the first group that is not consumed, and the `window` groups from there on are what the next step
    may wait for. The rule: a trajectory of the window is always accepted. Any other is accepted if it fits into
    `total_bytes`, or if nothing is held. From the first one that does not fit until it would, senders are asked for the
    window only (`group_limit`).

    * It cannot deadlock: whatever else is held, all trajectories of the window are accepted, so the step gets its
      groups, consumes them, and the window moves. A trajectory waits at most until its group is in the window.
    * It is bounded: beyond `total_bytes` there are only trajectories that were accepted in the window, and they leave
      it only by being consumed:
      `reserved_bytes <= max(total, largest trajectory) + bytes of the groups oldest .. oldest + window - 1`. Whatever
      senders claim, these are at most `window` times the trajectories that a group may have times the largest (see
      `TrajectoryReceiver`).
    """

    def __init__(self, total_bytes: int, window: int = 1):
        self.total_bytes = total_bytes
        self.window = window
        self.oldest_group = 0
        self.reserved_bytes = 0
        self._reserved: dict[str, int] = {}
        self._first_refused_bytes: int | None = None
        """Bytes of the first trajectory that did not fit; None while everything is accepted."""

    def advance_window(self, oldest_group: int) -> None:
        """Move the window to `oldest_group`: all groups before it are consumed."""
        self.oldest_group = max(self.oldest_group, oldest_group)

    def try_reserve(self, trajectory_id: str, group_index: int, nbytes: int, free_disk_bytes: float = math.inf) -> bool:
        """Reserve memory for an arriving trajectory, if the rule allows it. Outside of the window it must also fit into
        `free_disk_bytes`, the free bytes of the store."""
        urgent = self.oldest_group <= group_index < self.oldest_group + self.window
        if not urgent and not (self._fits_in_memory(nbytes) and nbytes <= free_disk_bytes):
            if self._first_refused_bytes is None:
                self._first_refused_bytes = nbytes
            return False
        self.set_reserved(trajectory_id, nbytes)
        return True

    def group_limit(self, free_disk_bytes: float = math.inf) -> int:
        """Return the group before which all groups are accepted now, however large they are; `NO_GROUP_LIMIT` if every
        group may be."""
        if (
            self._first_refused_bytes is not None
            and self._fits_in_memory(self._first_refused_bytes)
            and self._first_refused_bytes <= free_disk_bytes
        ):
            self._first_refused_bytes = None
        return NO_GROUP_LIMIT if self._first_refused_bytes is None else self.oldest_group + self.window

    def lacks_only_disk(self, free_disk_bytes: float) -> bool:
        """Return True if what did not fit would fit with more `free_disk_bytes`."""
        return (
            self._first_refused_bytes is not None
            and self._fits_in_memory(self._first_refused_bytes)
            and self._first_refused_bytes > free_disk_bytes
        )

    def set_reserved(self, trajectory_id: str, nbytes: int) -> None:
        """Record that a trajectory holds `nbytes`, instead of what it held before."""
        self.release_trajectory(trajectory_id)
        self._reserved[trajectory_id] = nbytes
        self.reserved_bytes += nbytes

    def release_trajectory(self, trajectory_id: str) -> None:
        """Free what a trajectory holds. Harmless if it holds nothing."""
        self.reserved_bytes -= self._reserved.pop(trajectory_id, 0)

    def _fits_in_memory(self, nbytes: int) -> bool:
        return not self.reserved_bytes or self.reserved_bytes + nbytes <= self.total_bytes
