"""The learner's end: a ROUTER socket that takes trajectories from many senders."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from r3async.config import TransportConfig
from r3async.records import SCHEMA, Schema, Trajectory
from r3async.transport.credit import CreditPool
from r3async.transport.ledger import Ledger
from r3async.transport.sockets import TransportError, close_context, milliseconds, off_loop, open_socket, send_now
from r3async.transport.wire import (
    WIRE_VERSION,
    Ack,
    Deliver,
    Frame,
    Grant,
    Hello,
    Message,
    Offer,
    Refusal,
    Reject,
    Welcome,
    WireError,
    decode_control,
    decode_trajectory,
    encode_control,
)

logger = logging.getLogger(__name__)

PATIENCE = 4
"""A sender that is silent for this many `ack_timeout`s is gone, and what was granted to it is granted to others."""
MAX_REASON = 500


class Refuse(ValueError):
    """Raised by `on_trajectory`: this trajectory will never be taken. The message is the reason its sender is given."""


@dataclass(slots=True)
class Peer:
    session: str
    seen_at: float


class Receiver:
    """Accepts each trajectory once and hands it to `on_trajectory(trajectory, nbytes)`.

    `on_trajectory` is called on the event loop and owns the trajectory (read-only arrays) from then on. When it returns,
    the trajectory is acknowledged and its sender forgets it: whatever has to survive a crash must be written by then.
    If it raises `Refuse`, the trajectory is rejected with that reason; any other exception is logged and rejects it
    too, for a message that trips over a defect must neither stop the receiver nor be resent for ever.

    Memory: at most `settings.credit_bytes` of trajectories are granted, under way, or handed over and not released.
    Call `release` for each one that is no longer held in memory, or `forget` for a whole group. Until then senders wait.

    Duplicates: `ledger` has the ids that were accepted. A receiver that restarts with a restored ledger (and whatever
    `on_trajectory` wrote) neither loses a trajectory nor takes one twice; one with an empty ledger takes again what was
    not acknowledged.

    No message can stop it: what does not validate is counted, and refused with a reason if there is someone to tell.
    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        run_id: str,
        settings: TransportConfig,
        on_trajectory: Callable[[Trajectory, int], None],
        *,
        port: int = 0,
        schema: Schema = SCHEMA,
        ledger: Ledger | None = None,
        on_reject: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run_id = run_id
        self.settings = settings
        self.ledger = Ledger() if ledger is None else ledger
        self.epoch = uuid.uuid4().hex
        """Name of this incarnation."""
        self.received = 0
        """Trajectories accepted."""
        self.bytes_received = 0
        """Bytes of accepted trajectories, on the wire."""
        self.duplicates = 0
        """Trajectories offered or delivered again after they were accepted, or after their group was over."""
        self.rejected = 0
        """Messages refused with a reason."""
        self._on_trajectory = on_trajectory
        self._on_reject = on_reject
        self._port = port
        self._schema = schema
        self._clock = clock
        self._pool = CreditPool(settings.credit_bytes)
        self._peers: dict[bytes, Peer] = {}
        self._beat = settings.ack_timeout / 4
        self._beat_at = 0.0
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def bytes_held(self) -> int:
        """Bytes of trajectories that were handed over and not released."""
        return self._pool.held

    @property
    def senders(self) -> int:
        """Senders that are connected."""
        return len(self._peers)

    async def start(self) -> str:
        """Bind and serve. Returns the endpoint; its host is `settings.host`, as it is, also if that is a wildcard.

        Raises `TransportError` if the address can not be bound.
        """
        assert self._socket is None, "a receiver is started once"
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, self.settings)
        # Without MANDATORY an answer to a peer that is gone, or does not read, would vanish without a trace.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A sender that reconnects takes its name over from the connection that it gave up.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        address = f"tcp://{self.settings.host}:{self._port or '*'}"
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            await self.close()
            raise TransportError(f"can not listen on {address}: {error}") from error
        self._task = asyncio.create_task(self._serve(), name="transport-receiver")
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def release(self, trajectory_id: str) -> None:
        """A trajectory is consumed: its bytes become credit. Harmless for one that holds none."""
        self._pool.release(trajectory_id)
        self._grant()

    def forget(self, group_index: int) -> None:
        """A group is consumed: release what it still holds, and its ids need not be remembered. Anything that still comes
        for it is acknowledged and dropped as a duplicate. Idempotent."""
        for trajectory_id in self.ledger.forget(group_index):
            self._pool.release(trajectory_id)
        self._grant()

    async def close(self) -> None:
        """Stop serving and free the address. What is not acknowledged stays with its sender. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=5)
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
        context, self._context = self._context, None
        if context is not None:
            await close_context(context)

    async def _serve(self) -> None:
        assert self._socket is not None
        while True:
            try:
                if await self._socket.poll(milliseconds(self._beat)):
                    identity, *frames = await self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
                    await self._handle(identity.bytes, frames)
                if self._clock() >= self._beat_at:
                    self._heartbeat()
            except Exception:  # A defect here or in a callback. Senders are not answered, and try again.
                logger.exception("the trajectory receiver goes on after an error")
                await asyncio.sleep(self._beat)

    async def _handle(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        try:
            message = decode_control(frames[0] if frames else b"")
            if isinstance(message, Hello):
                self._hello(identity, message)
            elif not isinstance(message, Offer | Deliver):
                raise WireError(f"{type(message).__name__.upper()} is not for a receiver")
            elif self._known(identity, message.session):
                if isinstance(message, Offer):
                    self._offer(identity, message)
                else:
                    await self._deliver(identity, message, frames[1:])
        except WireError as error:
            self._reject(identity, "", str(error))

    def _hello(self, identity: bytes, hello: Hello) -> None:
        problem = ""
        if hello.wire != WIRE_VERSION:
            problem = f"wire version {hello.wire}, the learner has {WIRE_VERSION}: install the same version on both"
        elif hello.run_id != self.run_id:
            problem = f"run {hello.run_id!r}, but this is the learner of run {self.run_id!r}"
        elif hello.schema != self._schema.fingerprint:
            problem = f"token schema {hello.schema!r}, the learner has {self._schema.fingerprint!r}: the columns differ"
        if problem:
            self.rejected += 1
            self._send(identity, Refusal(hello.session, f"sender {hello.sender_id!r}: {problem}", final=True))
            return
        # The welcome is answered by an offer, which ends what an earlier session was granted and does not send now.
        self._peers[identity] = Peer(hello.session, self._clock())
        self._welcome(identity)

    def _known(self, identity: bytes, session: str) -> bool:
        """The message is of the sender's current session. One of an earlier session is left over, and resent anyway."""
        peer = self._peers.get(identity)
        if peer is None:
            # Before this receiver started, or before it gave this sender up.
            self._send(identity, Refusal(session, "unknown session: say HELLO", final=False))
            return False
        if peer.session != session:
            return False
        peer.seen_at = self._clock()
        return True

    def _offer(self, identity: bytes, offer: Offer) -> None:
        limit = self.settings.max_message_bytes
        known = [p.trajectory_id for p in offer.parcels if (p.group_index, p.trajectory_id) in self.ledger]
        too_large = [p for p in offer.parcels if p.nbytes > limit]
        refused = {*known, *(p.trajectory_id for p in too_large)}
        self._pool.offer(identity, {p.trajectory_id: p.nbytes for p in offer.parcels if p.trajectory_id not in refused})
        if known:
            self._acknowledge_again(identity, *known)  # Without moving their payload again.
        for parcel in too_large:
            self._reject(identity, parcel.trajectory_id, f"{parcel.nbytes} bytes, more than {limit}")
        self._grant(identity)

    async def _deliver(self, identity: bytes, message: Deliver, frames: Sequence[Frame]) -> None:
        trajectory_id, group_index = message.trajectory_id, message.group_index
        if (group_index, trajectory_id) in self.ledger:
            self._pool.cancel(identity, trajectory_id)
            self._acknowledge_again(identity, trajectory_id)
            self._grant()
            return
        nbytes = sum(map(len, frames))
        if not self._pool.arrive(identity, trajectory_id, nbytes):
            self._reject(identity, trajectory_id, f"{nbytes} bytes were not granted")
            self._grant()
            return
        try:
            trajectory = await off_loop(nbytes, decode_trajectory, frames, self._schema)
            if (trajectory.trajectory_id, trajectory.group_index) != (trajectory_id, group_index):
                raise WireError(f"the payload is trajectory {trajectory.trajectory_id!r} of {trajectory.group_index}")
            if self.ledger.is_forgotten(group_index):  # While it was decoded.
                self._acknowledge_again(identity, trajectory_id)
                self.release(trajectory_id)
                return
            # Before the call, so that it may forget the group that this trajectory completes.
            self.ledger.add(group_index, trajectory_id)
            self._on_trajectory(trajectory, nbytes)
        except Exception as error:
            reason = str(error)
            if not isinstance(error, WireError | Refuse):
                logger.exception("trajectory %r was not taken", trajectory_id)
                reason = f"the learner failed to take it: {type(error).__name__}: {error}"
            self.ledger.discard(group_index, trajectory_id)
            self._reject(identity, trajectory_id, reason)
            self.release(trajectory_id)
        else:
            self.received += 1
            self.bytes_received += nbytes
            self._send(identity, Ack([trajectory_id]))

    def _acknowledge_again(self, identity: bytes, *trajectory_ids: str) -> None:
        self.duplicates += len(trajectory_ids)
        self._send(identity, Ack(list(trajectory_ids)))

    def _reject(self, identity: bytes, trajectory_id: str, reason: str) -> None:
        self.rejected += 1
        reason = reason[:MAX_REASON]
        self._send(identity, Reject(trajectory_id, reason))
        if self._on_reject is not None:
            self._on_reject(trajectory_id, reason)

    def _grant(self, also: bytes | None = None) -> None:
        """Tell senders what they may send: those with a new grant, and one that may have missed the last."""
        identities = self._pool.grant()
        if also is not None and also not in identities and self._pool.granted(also):
            identities.append(also)
        for identity in identities:
            self._send(identity, Grant(self._peers[identity].session, self._pool.granted(identity)))

    def _welcome(self, identity: bytes) -> None:
        self._send(identity, Welcome(self._peers[identity].session, self.epoch, self.settings.credit_bytes))

    def _heartbeat(self) -> None:
        now = self._clock()
        if now - self._beat_at > self._beat:
            # This end did not listen, the event loop was busy: no silence to hold against anyone.
            for peer in self._peers.values():
                peer.seen_at = now
        self._beat_at = now + self._beat
        for identity, peer in list(self._peers.items()):
            if now - peer.seen_at > PATIENCE * self.settings.ack_timeout:
                self._drop(identity)
            else:
                self._welcome(identity)
        self._grant()

    def _send(self, identity: bytes, message: Message) -> None:
        """Every answer may be lost: heartbeats, new offers and resending make it good."""
        if self._socket is None:  # Released after closing.
            return
        if send_now(self._socket, [identity, encode_control(message)]) == zmq.EHOSTUNREACH:
            self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        self._pool.drop(identity)
        self._peers.pop(identity, None)
