"""The receiver of the learner: takes trajectories from many senders, validates, stores and acknowledges them."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from r3async.config import TransportConfig, bracket_ipv6
from r3async.data.tokens import SCHEMA, Trajectory
from r3async.data.versions import ConsumedGroups
from r3async.data.wire import (
    WIRE_VERSION,
    Ack,
    ControlMessage,
    Deliver,
    DeliveryItem,
    Frame,
    Hello,
    InvalidTrajectoryError,
    Refusal,
    Reject,
    Welcome,
    WireError,
    decode_control,
    decode_trajectory,
    decoded_bytes,
    encode_control,
    join_item_frames,
)
from r3async.transport.sockets import OFFLOAD_BYTES, NullSocket, TrajectoryValidator, run_off_loop
from r3async.world import TURN_SECONDS, MessageSocket, World
from r3async.world.real import REAL_WORLD
from r3async.world.sockets import ServerKeys, TransportError
from r3async.world.stages import in_stage

__all__ = ["RejectionError", "TrajectoryReceiver"]

logger = logging.getLogger(__name__)

SILENT_TIMEOUTS = 4
"""A sender that is silent for this many `ack_timeout`s is lost, and more may be in flight from others."""
MAX_REASON_CHARS = 500
MAX_IN_HAND_IDS = 64
MAX_SENDERS = 1024
MAX_ACK_IDS = 64
"""Ids in one message: it must stay below `MAX_CONTROL_BYTES` however long they are."""
ACK_DELAY_SECONDS = 0.01
"""What is accepted within so long is acknowledged together: each message wakes up a thread here and a loop over there. Only the
sender's bytes in flight wait for it, so this share of them (`ACK_CREDIT_SHARE`, of the credit of each) is acknowledged at
once."""
ACK_CREDIT_SHARE = 16


@dataclass(slots=True)
class SenderSession:
    session: str
    last_message_at: float


class TrajectoryReceiver:
    """Accepts each trajectory once and hands it to `on_trajectory(trajectory, nbytes)`.

    In this order: `validate(trajectories)`, of some at once, off the event loop if the payload is large; `admit(trajectory)`, on
    the event loop, which is False for a duplicate; `store.put_trajectory`, if there is a store; `on_trajectory`, on the event
    loop, which owns the trajectory (read-only arrays) from then on; and then it is acknowledged, and its sender forgets it.
    What has to survive a crash is in the store by then. If `validate` names a reason or `admit` raises `RejectionError`, the
    trajectory is rejected with that reason, and nothing of it is stored; any exception is logged and rejects it too, for a
    message that trips over a defect must neither stop the receiver nor be resent for ever.

    Memory: trajectories that arrived and are not released take at most `settings.credit_bytes`, and beyond that only what
    the next `window` groups take, which are let in whatever else is held; `MemoryBudget` has the rule and why it cannot deadlock.
    Any other that arrives while there is no free memory is dropped at once: its sender keeps it, and is answered when to send it
    again. What a sender claims is limited: `is_expected(group, trajectory_id)` says whether a group has such a trajectory, and no
    trajectory takes more than `max_trajectory_bytes` bytes. So memory is bounded whatever senders say, by
    `max(credit_bytes, largest) + window * (trajectories that claims lets a group have) * largest`. In flight to here are at
    most half of `credit_bytes`, or one trajectory of each sender.

    Call `release_trajectory` for each trajectory that is no longer held in memory, or `forget_group` for a whole group, in
    the order of groups as far as possible. With a store, a trajectory that would go beyond `store.memory_bytes` is handed
    over mapped from disk; and if the store has no free bytes, only the window is let in.

    Duplicates: `ledger` has the ids that were accepted. A receiver that restarts with a restored ledger and the store
    neither loses a trajectory nor takes one twice: what the store kept is handed over again by `start`, groups that are
    over are removed from it. One with an empty ledger takes again what was not acknowledged.

    Only peers whose key is in `keys` are let in; see `transport.keys`.

    No message can stop it: what does not validate is counted, and refused with a reason if there is someone to tell.
    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        run_id: str,
        settings: TransportConfig,
        on_trajectory: Callable[[Trajectory, int], None],
        *,
        keys: ServerKeys,
        is_expected: Callable[[int, str], bool] | None = None,
        max_trajectory_bytes: int | None = None,
        validate: TrajectoryValidator | None = None,
        admit: Callable[[Trajectory], bool] | None = None,
        store: TrajectoryStore | None = None,
        window: int = 1,
        port: int = 0,
        ledger: TrajectoryLedger | None = None,
        on_reject: Callable[[str, str], None] | None = None,
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
        """Trajectories that changed on their way; their senders were asked to send them again."""
        self.refused_peers: Counter[str] = Counter()
        """Peers that were not let in, each time they tried, by reason."""
        self._keys = keys
        self._is_expected = is_expected
        limits = (settings.max_message_bytes, max_trajectory_bytes)
        self._max_trajectory_bytes = min(limit for limit in limits if limit is not None)
        self._store = store
        self._on_reject = on_reject
        self._port = port
        self._clock = world.clock.monotonic
        self._memory = MemoryBudget(settings.credit_bytes, window)
        self._group_limit = NO_GROUP_LIMIT
        """What senders were answered: only trajectories of groups before it are taken."""
        self._sessions: dict[bytes, SenderSession] = {}
        self._pending_acks: dict[bytes, list[str]] = {}
        self._unacknowledged_bytes = 0
        """Bytes of what `_pending_acks` names."""
        self._heartbeat_seconds = settings.ack_timeout / 4
        self._heartbeat_due_at = 0.0
        self._announce_scheduled = False
        self._intake = TrajectoryIntake(
            self.ledger, self._memory, on_trajectory, validate, admit, store, self._answer_sender, world
        )
        self._sockets = world.open_sockets()
        self._socket: MessageSocket = NullSocket()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def unreleased_bytes(self) -> int:
        """Bytes of trajectories that were handed over and not released."""
        return self._memory.reserved_bytes

    @property
    def sender_count(self) -> int:
        """Senders that are connected."""
        return len(self._sessions)

    async def start(self) -> str:
        """Take back what the store kept, bind, and serve. Returns the endpoint; its host is `settings.host`, as it is,
        also if that is a wildcard.

        Raises `TransportError` if the address cannot be bound.
        """
        assert not self._tasks, "a receiver is started once"
        self._memory.advance_window(self.ledger.oldest_group)
        if self._store is not None:
            self.recovered, refused = await self._intake.restore_from_store(self._store)
            self.rejected += refused
        address = f"tcp://{bracket_ipv6(self.settings.host)}:{self._port or '*'}"
        try:
            self._socket = self._sockets.bind_router(
                address, self._on_message, keys=self._keys, refused_peers=self.refused_peers
            )
        except OSError as error:
            await self.close()
            raise TransportError(f"cannot listen on {address}: {error.strerror}") from error
        self._tasks = [
            asyncio.create_task(in_stage("intake", self._intake.run()), name="transport-receiver"),
            asyncio.create_task(in_stage("messages", self._run_heartbeat()), name="transport-heartbeat"),
        ]
        return self._socket.endpoint

    def release_trajectory(self, trajectory_id: str) -> None:
        """A trajectory is consumed: its bytes are free. Harmless for one that holds none."""
        self._memory.release_trajectory(trajectory_id)
        self._announce_soon()

    def forget_group(self, group_index: int) -> None:
        """A group is consumed: release what it still holds, and its ids need not be remembered. Anything that still comes
        for it is acknowledged and dropped as a duplicate. Idempotent."""
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
        """Who is silent is dropped; and no message lies unread."""
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
        except Exception:  # A defect here or in a callback. The sender is not answered, and tries again.
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
        """The message is of the sender's current session. One of an earlier session is left over, and resent anyway."""
        peer = self._sessions.get(identity)
        if peer is None:
            # Before this receiver started, or before it gave this sender up.
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
        """Why nothing of the kind is ever taken; empty if it may be."""
        trajectory_id, group_index, nbytes = item.trajectory_id, item.group_index, item.nbytes
        if nbytes > self._max_trajectory_bytes:
            return f"{nbytes} bytes, more than {self._max_trajectory_bytes}"
        if group_index < 0 or (self._is_expected is not None and not self._is_expected(group_index, trajectory_id)):
            return f"group {group_index} has no trajectory {trajectory_id!r}"
        if (there := sum(map(len, pieces))) > nbytes:
            return f"{there} bytes came, and {nbytes} were announced"
        return ""

    @property
    def _free_disk_bytes(self) -> float:
        """Free bytes of the store. What is in hand is not in it yet."""
        return math.inf if self._store is None else self._store.free_bytes - self._intake.unanswered_bytes

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
        for other in others:  # what it sent may be something else, and is judged by itself
            self._send_message(other, Reject(name, "another sender's was in hand", again="later"))
        self._announce_soon()

    def _send_acks(self) -> None:
        """One ACK to each sender for all that was accepted and is not acknowledged yet."""
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
        if self._on_reject is not None:
            self._on_reject(trajectory_id, reason)

    def _reject_damaged(self, identity: bytes, trajectory_id: str, reason: str) -> None:
        self.damaged += 1
        logger.warning("trajectory %r came damaged: %s", trajectory_id, reason)
        self._send_message(identity, Reject(trajectory_id, reason[:MAX_REASON_CHARS], again="damaged"))

    def _announce_soon(self) -> None:
        """Senders, of all that becomes possible in this round of the event loop."""
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
            # This end did not listen, its event loop was busy: no silence to hold against anyone.
            for peer in self._sessions.values():
                peer.last_message_at = now
        self._heartbeat_due_at = now + self._heartbeat_seconds
        for identity, peer in list(self._sessions.items()):
            if now - peer.last_message_at > SILENT_TIMEOUTS * self.settings.ack_timeout:
                del self._sessions[identity]

    def _send_message(self, identity: bytes, message: ControlMessage) -> None:
        """Every answer may be lost: WELCOME is repeated, and what is not answered is sent again."""
        if self._socket.send([identity, encode_control(message)]) == errno.EHOSTUNREACH:
            self._sessions.pop(identity, None)


# What happens to a trajectory between its arrival and its answer: decoded, validated, stored, handed over. And what was accepted
# already, so that a redelivery is harmless, and how much of it is held.


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
    """What makes trajectories durable (`r3async.transport.spool.Spool`)."""

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
