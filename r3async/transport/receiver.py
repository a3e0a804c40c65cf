"""The learner's receiver: yields the trajectories of many senders, stores and acknowledges
them."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from r3async.config import LOOPBACK_HOST, TransportConfig, bracket_ipv6
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
)
from r3async.data.tokens import SCHEMA, is_trajectory_of_group
from r3async.data.wire import WIRE_VERSION, InvalidTrajectoryError
from r3async.data.wire_frames import Frame, WireError
from r3async.transport.intake import IncomingTrajectory, ReceivedTrajectory, TrajectoryIntake
from r3async.transport.ledger import TrajectoryLedger
from r3async.transport.memory_budget import NO_GROUP_LIMIT, MemoryBudget
from r3async.transport.null_socket import NullSocket
from r3async.transport.trajectory_store import TrajectoryStore
from r3async.world import EventReporter, MessageSocket, World, ignore_event
from r3async.world.curve_keys import ServerKeys, TransportError
from r3async.world.real import REAL_WORLD
from r3async.world.stages import in_stage

__all__ = ["ReceivedTrajectory", "TrajectoryReceiver"]

logger = logging.getLogger(__name__)

SILENT_TIMEOUTS = 4
"""Number of `ack_timeout`s of silence after which a sender is considered lost, and the others may
have more in flight."""
MAX_REASON_CHARS = 500
MAX_IN_HAND_IDS = 64
MAX_SENDERS = 1024
MAX_ACK_IDS = 64
"""Ids in one message, at most: it must stay below `MAX_CONTROL_BYTES` however long they are."""
ACK_DELAY_SECONDS = 0.01
"""Seconds within which accepted trajectories are acknowledged together: each message wakes up a
thread here and an event loop there. Only the sender's bytes in flight wait for it, so this share of
them (`ACK_CREDIT_SHARE`, of the credit of each) is acknowledged at once."""
ACK_CREDIT_SHARE = 16


@dataclass(slots=True)
class SenderSession:
    session: str
    last_message_at: float


class TrajectoryReceiver:
    """The learner's end of the transport, which yields each trajectory once:

        async for batch in receiver:
            for received in batch:
                await receiver.store(received)
                receiver.accept(received)

    A batch has the trajectories that arrived next and are decoded: one, or several small ones, so
    that they can be validated together. Each of them is answered, in this order and once, with one
    of these:

    * `await store(...)` and then `accept(...)`: it is durable, if there is a store, and then
      acknowledged; its sender forgets it. It belongs to the caller, in memory that counts as held
      until `release_trajectory` or `forget_group`.
    * `acknowledge_duplicate(...)`: its episode is here already, or over. Nothing of it is kept.
    * `await reject(...)`: it will never be accepted. Its sender gets the reason, and nothing of it
      is kept, not even if it is in the store already. Every check that may refuse it belongs before
      `store`; an unexpected failure rejects it, too, for a message that triggers a defect must
      neither stop the learner nor be resent for ever.

    Memory: trajectories that arrived and are not released take at most `settings.credit_bytes`, and
    beyond that only what the next `window` groups take, which are accepted whatever else is held;
    `MemoryBudget` has the rule and explains why it cannot deadlock. Any other trajectory that
    arrives while there is no free memory is dropped at once: its sender keeps it, and is told when
    to send it again. Claims of senders are limited: a group has `group_size` trajectories with the
    names of its episodes, and none takes more than `max_trajectory_bytes` bytes. So memory is
    bounded whatever senders claim, by `max(credit_bytes, largest) + window * group_size * largest`.
    At most half of `credit_bytes` is in flight to the receiver, or one trajectory of each sender.

    Call `release_trajectory` for each trajectory that is no longer held in memory, or
    `forget_group` for a whole group, in the order of groups as far as possible. With a store, a
    trajectory that would exceed `store.memory_bytes` is mapped from disk; and if the store has no
    free bytes, only the window is accepted.

    Duplicates: `ledger` has the ids of accepted trajectories. A receiver that restarts with a
    restored ledger and the store neither loses a trajectory nor accepts one twice: `recover` yields
    again what the store kept, and groups that are over are removed from the store. A receiver with
    an empty ledger accepts again what was not acknowledged.

    Only peers whose key is in `keys` are let in; see `transport.keys`.

    No message can stop the receiver: an invalid message is counted, reported
    (`report_event("trajectory_refused", ...)`), and refused with a reason if there is a sender to
    answer. All methods belong to the event loop's thread.

    Args:
        group_size: Trajectories of a group; None: any name is accepted.
        report_event: Writes an event of the run's log.
    """

    def __init__(
        self,
        run_id: str,
        settings: TransportConfig,
        *,
        keys: ServerKeys,
        group_size: int | None = None,
        max_trajectory_bytes: int | None = None,
        store: TrajectoryStore | None = None,
        window: int = 1,
        port: int = 0,
        ledger: TrajectoryLedger | None = None,
        report_event: EventReporter = ignore_event,
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
        """Trajectories of groups that are not over which the store had kept."""
        self.duplicates = 0
        """Trajectories delivered again after they were accepted, or after their group was over."""
        self.rejected = 0
        """Messages refused with a reason."""
        self.damaged = 0
        """Trajectories damaged in transit; their senders were asked to send them again."""
        self.refused_peers: Counter[str] = Counter()
        """Number of times that peers were not let in, by reason."""
        self._keys = keys
        self._group_size = group_size
        self._report_event = report_event
        limits = (settings.max_message_bytes, max_trajectory_bytes)
        self._max_trajectory_bytes = min(limit for limit in limits if limit is not None)
        self._store = store
        self._port = port
        self._clock = world.clock.monotonic
        self._memory = MemoryBudget(settings.credit_bytes, window)
        self._group_limit = NO_GROUP_LIMIT
        """Group limit that senders were told: only trajectories of groups before
        it are accepted."""
        self._sessions: dict[bytes, SenderSession] = {}
        self._pending_acks: dict[bytes, list[str]] = {}
        self._unacknowledged_bytes = 0
        """Bytes of the trajectories in `_pending_acks`."""
        self._heartbeat_seconds = settings.ack_timeout / 4
        self._heartbeat_due_at = 0.0
        self._announce_scheduled = False
        self._intake = TrajectoryIntake(world)
        self._rejected_stored: dict[tuple[int, str], str] = {}
        """Reasons for recovered trajectories that were rejected, by group and id."""
        self._sockets = world.open_sockets()
        self._socket: MessageSocket = NullSocket()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def unreleased_bytes(self) -> int:
        """The bytes of trajectories that arrived and are not released."""
        return self._memory.reserved_bytes

    @property
    def sender_count(self) -> int:
        """The number of senders that are connected."""
        return len(self._sessions)

    async def start(self) -> str:
        """Bind and serve. Returns the endpoint; its host is `settings.host`, unchanged, even if that
        is a wildcard, or loopback if that is unset. With a store, use up `recover` first.

        Raises `TransportError` if the address cannot be bound.
        """
        assert not self._tasks, "a receiver is started once"
        self._memory.advance_window(self.ledger.oldest_group)
        address = f"tcp://{bracket_ipv6(self.settings.host or LOOPBACK_HOST)}:{self._port or '*'}"
        try:
            self._socket = self._sockets.bind_router(
                address, self._on_message, keys=self._keys, refused_peers=self.refused_peers
            )
        except OSError as error:
            await self.close()
            raise TransportError(f"cannot listen on {address}: {error.strerror}") from error
        heartbeat = in_stage("messages", self._run_heartbeat())
        self._tasks = [asyncio.create_task(heartbeat, name="transport-heartbeat")]
        return self._socket.endpoint

    async def recover(self) -> AsyncIterator[ReceivedTrajectory]:
        """Yield what the store kept of accepted trajectories of groups that are not over, each to be
        answered like one that arrives. Anything else in the ledger was never kept and is
        forgotten.

        What is over, or rejected now, is removed from the store when all have been yielded.
        """
        if self._store is None:
            return
        self.ledger.forget_unconsumed()
        over = set()
        for kept in await self._store.recover_trajectories():
            if self.ledger.is_group_consumed(kept.trajectory.group_index):
                over.add(kept.trajectory.group_index)
                continue
            self.recovered += 1
            yield ReceivedTrajectory(kept.trajectory, kept.nbytes, None, is_stored=True)
        await self._store.delete_trained(over)
        await self._store.remove_trajectories(self._rejected_stored)

    async def __aiter__(self) -> AsyncIterator[list[ReceivedTrajectory]]:
        """Yield batches of trajectories as they arrive, until cancelled. All of a batch are answered
        before the next is asked for. One that is not is forgotten: its sender delivers it again."""
        while True:
            batch: list[ReceivedTrajectory] = []
            for arrival, decoded in await self._intake.decode_next():
                if not isinstance(decoded, Exception):
                    batch.append(decoded)
                    continue
                # Those before it are answered first: answers come in the order of deliveries.
                if batch:
                    yield batch
                    self._forget_unanswered(batch)
                    batch = []
                self._answer_undecodable(arrival, decoded)
            if batch:
                yield batch
                self._forget_unanswered(batch)

    def _forget_unanswered(self, batch: Sequence[ReceivedTrajectory]) -> None:
        for received in batch:
            if received.arrival is not None and self._intake.is_unanswered(received.arrival):
                self._memory.release_trajectory(received.arrival.trajectory_id)
                self._intake.remove(received.arrival)
                self._announce_soon()

    async def store(self, received: ReceivedTrajectory) -> None:
        """Make a trajectory durable, if there is a store. Waits as long as the disk takes
        nothing."""
        arrival = received.arrival
        if self._store is None or arrival is None:
            return
        spill = self._memory.reserved_bytes > self._store.memory_bytes
        kept = await self._store.put_trajectory(received.trajectory, arrival.frames, spill=spill)
        received.is_stored = True
        if kept is not None:
            received.trajectory = kept.trajectory
            received.nbytes = kept.nbytes

    def accept(self, received: ReceivedTrajectory) -> bool:
        """Acknowledge a trajectory that is stored. Returns False if its group is over meanwhile:
        then it is a duplicate."""
        trajectory = received.trajectory
        if self.ledger.is_group_consumed(trajectory.group_index):
            self.acknowledge_duplicate(received)
            return False
        assert received.is_stored or self._store is None, "stored before it is acknowledged"
        self._memory.set_reserved(trajectory.trajectory_id, received.nbytes)
        self.ledger.add(trajectory.group_index, trajectory.trajectory_id)
        arrival = received.arrival
        if arrival is None:
            return True
        self._intake.remove(arrival)
        self.received += 1
        self.bytes_received += arrival.wire_bytes
        if not self._pending_acks:
            asyncio.get_running_loop().call_later(ACK_DELAY_SECONDS, self._send_acks)
        self._pending_acks.setdefault(arrival.sender_identities[0], []).append(
            arrival.trajectory_id
        )
        self._unacknowledged_bytes += arrival.nbytes
        if self._unacknowledged_bytes >= self.settings.credit_bytes // (
            ACK_CREDIT_SHARE * max(1, len(self._sessions))
        ):
            self._send_acks()
        self._answer_other_senders(arrival)
        return True

    def acknowledge_duplicate(self, received: ReceivedTrajectory) -> None:
        """Acknowledge a trajectory whose episode is here already, or over. Nothing of it is kept but
        what is in the store, until its group is over."""
        arrival = received.arrival
        if arrival is None:
            return
        self._memory.release_trajectory(arrival.trajectory_id)
        self._intake.remove(arrival)
        self._acknowledge_duplicates(arrival.sender_identities[0], arrival.trajectory_id)
        self._answer_other_senders(arrival)

    async def reject(self, received: ReceivedTrajectory, reason: str) -> None:
        """Reject a trajectory for good: its sender gets the reason. One that is in the store is
        removed from there."""
        name = received.trajectory.trajectory_id
        rejected = {(received.trajectory.group_index, name): reason}
        arrival = received.arrival
        if arrival is None:
            self.rejected += 1
            self._rejected_stored |= rejected
            logger.warning("trajectory %r was kept, but is not taken again: %s", name, reason)
            return
        if received.is_stored and self._store is not None:
            await self._store.remove_trajectories(rejected)
        self._memory.release_trajectory(name)
        self._intake.remove(arrival)
        self._reject_trajectory(arrival.sender_identities[0], name, reason)
        self._answer_other_senders(arrival)

    def release_trajectory(self, trajectory_id: str) -> None:
        """Free the bytes of a trajectory that is consumed. Harmless for one that holds none."""
        self._memory.release_trajectory(trajectory_id)
        self._announce_soon()

    def forget_group(self, group_index: int) -> None:
        """Release what a consumed group still holds, and forget its ids. Trajectories that still
        arrive for it are acknowledged and dropped as duplicates. Idempotent."""
        for trajectory_id in self.ledger.forget_group(group_index):
            self._memory.release_trajectory(trajectory_id)
        self._memory.advance_window(self.ledger.oldest_group)
        self._announce_soon()

    async def close(self) -> None:
        """Stop serving and free the address. What is not acknowledged stays with its
        sender. Idempotent."""
        tasks = self._tasks
        self._tasks = []
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
        except Exception:
            # A defect. The sender gets no answer, and tries again.
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
        problem = ""
        kind = ""
        if hello.wire != WIRE_VERSION:
            kind = "another version of the protocol"
            problem = (
                f"wire version {hello.wire}, the learner has {WIRE_VERSION}: install the "
                "same version on both"
            )
        elif hello.run_id != self.run_id:
            kind = "another run"
            problem = f"run {hello.run_id!r} is not the run of this learner"
        elif hello.schema != SCHEMA.fingerprint:
            kind = "another schema"
            problem = (
                f"token schema {hello.schema!r}, the learner has {SCHEMA.fingerprint!r}: "
                "the columns differ"
            )
        elif identity not in self._sessions and len(self._sessions) >= MAX_SENDERS:
            kind = "too many senders"
            problem = f"{MAX_SENDERS} senders are connected, which is as many as may be"
        if problem:
            self.rejected += 1
            self.refused_peers[kind] += 1
            self._send_message(
                identity,
                Refusal(hello.session, f"sender {hello.sender_id!r}: {problem}", final=True),
            )
            return
        self._sessions[identity] = SenderSession(hello.session, self._clock())
        self._announce_limit()
        self._send_welcome(identity)

    def _is_current_session(self, identity: bytes, session: str) -> bool:
        """Return True if a message belongs to the sender's current session.

        A sender opens a socket for each session, and ZeroMQ gives what is left of the earlier one
        another name, so that its session is unknown here. What it was is sent again anyway.
        """
        peer = self._sessions.get(identity)
        if peer is None:
            # The session is from before this receiver started, or before it dropped this sender.
            self._send_message(
                identity, Refusal(session, "unknown session: say HELLO", final=False)
            )
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
        trajectory_id = item.trajectory_id
        group_index = item.group_index
        problem = self._rejection_reason(item, pieces)
        if problem:
            self._reject_trajectory(identity, trajectory_id, problem)
        elif (group_index, trajectory_id) in self.ledger:
            self._acknowledge_duplicates(identity, trajectory_id)
        elif self._memory.try_reserve(
            trajectory_id, group_index, item.nbytes, self._free_disk_bytes
        ):
            self._intake.add(IncomingTrajectory([identity], item, pieces))
        else:
            self._announce_limit()  # first, or it would be sent again at once
            self._send_message(
                identity, Reject(trajectory_id, "there is no free memory for it", again="later")
            )

    def _rejection_reason(self, item: DeliveryItem, pieces: Sequence[Frame]) -> str:
        """Return why an item like this is never accepted; empty if it may be."""
        trajectory_id = item.trajectory_id
        group_index = item.group_index
        nbytes = item.nbytes
        if nbytes > self._max_trajectory_bytes:
            return f"{nbytes} bytes, more than {self._max_trajectory_bytes}"
        has_episode = self._group_size is None or is_trajectory_of_group(
            group_index, trajectory_id, self._group_size
        )
        if group_index < 0 or not has_episode:
            return f"group {group_index} has no trajectory {trajectory_id!r}"
        there = sum(map(len, pieces))
        if there > nbytes:
            return f"{there} bytes came, and {nbytes} were announced"
        return ""

    @property
    def _free_disk_bytes(self) -> float:
        """The free bytes of the store, less those in hand, which are not in it yet."""
        return (
            math.inf
            if self._store is None
            else self._store.free_bytes - self._intake.unanswered_bytes
        )

    def _answer_undecodable(self, arrival: IncomingTrajectory, error: Exception) -> None:
        """Answer an arrival that could not be decoded. If no sender makes such a message, it was
        damaged in transit, and is asked for again."""
        name = arrival.trajectory_id
        identity = arrival.sender_identities[0]
        self._memory.release_trajectory(name)
        self._intake.remove(arrival)
        reason = str(error) or type(error).__name__
        if isinstance(error, InvalidTrajectoryError):
            self._reject_trajectory(identity, name, reason)
        elif isinstance(error, WireError):
            self._reject_damaged(identity, name, reason)
        else:
            logger.error("trajectory %r was not decoded", name, exc_info=error)
            reason = f"the learner failed to decode it: {type(error).__name__}: {error}"
            self._reject_trajectory(identity, name, reason)
        self._answer_other_senders(arrival)

    def _answer_other_senders(self, arrival: IncomingTrajectory) -> None:
        """Answer those who sent the trajectory while it was in hand. What they sent may differ, and
        is judged separately."""
        for other in arrival.sender_identities[1:]:
            self._send_message(
                other,
                Reject(arrival.trajectory_id, "another sender's was in hand", again="later"),
            )
        self._announce_soon()

    def _send_acks(self) -> None:
        """Send one ACK to each sender for everything that was accepted and is not
        acknowledged yet."""
        acks = self._pending_acks
        self._pending_acks = {}
        self._unacknowledged_bytes = 0
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
        self._report_event("trajectory_refused", trajectory_id=trajectory_id, reason=reason)

    def _reject_damaged(self, identity: bytes, trajectory_id: str, reason: str) -> None:
        self.damaged += 1
        logger.warning("trajectory %r came damaged: %s", trajectory_id, reason)
        self._send_message(
            identity, Reject(trajectory_id, reason[:MAX_REASON_CHARS], again="damaged")
        )

    def _announce_soon(self) -> None:
        """Schedule one announcement to senders of everything that becomes possible in this round
        of the event loop."""
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
            identity,
            Welcome(
                self._sessions[identity].session,
                self.incarnation,
                self._group_limit,
                at_once,
                in_hand,
            ),
        )

    def _drop_silent_senders(self) -> None:
        now = self._clock()
        if now - self._heartbeat_due_at > self._heartbeat_seconds:
            # This end was not listening because its event loop was busy, so nobody
            # counts as silent.
            for peer in self._sessions.values():
                peer.last_message_at = now
        self._heartbeat_due_at = now + self._heartbeat_seconds
        for identity, peer in list(self._sessions.items()):
            if now - peer.last_message_at > SILENT_TIMEOUTS * self.settings.ack_timeout:
                del self._sessions[identity]

    def _send_message(self, identity: bytes, message: ControlMessage) -> None:
        """Send an answer, which may be lost: WELCOME is repeated, and what is not
        answered is sent again."""
        if self._socket.send([identity, encode_control(message)]) == errno.EHOSTUNREACH:
            self._sessions.pop(identity, None)
