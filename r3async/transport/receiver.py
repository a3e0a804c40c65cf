"""The learner's end: a ROUTER socket that takes trajectories from many senders."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from r3async.config import TransportConfig, in_url
from r3async.records import SCHEMA, Schema, Trajectory
from r3async.transport.credit import CreditPool, Offered
from r3async.transport.intake import Intake, Outcome, Parcelled, Refuse, Store
from r3async.transport.keys import ServerKeys
from r3async.transport.ledger import Ledger
from r3async.transport.sockets import NoSocket, TransportError
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
    encode_control,
)
from r3async.world import MessageSocket, World
from r3async.world.real import REAL

__all__ = ["Receiver", "Refuse"]

logger = logging.getLogger(__name__)

PATIENCE = 4
"""A sender that is silent for this many `ack_timeout`s is gone, and what was granted to it is granted to others."""
MAX_REASON = 500
MAX_IN_HAND = 64
MAX_SENDERS = 1024
MAX_ACKS = 64
"""Ids in one message: it must stay below `MAX_CONTROL` however long they are."""


@dataclass(slots=True)
class Peer:
    session: str
    seen_at: float


class Receiver:
    """Accepts each trajectory once and hands it to `on_trajectory(trajectory, nbytes)`.

    In this order: `validate(trajectory)`, off the event loop if the payload is large; `admit(trajectory)`, on the event loop,
    which is False for a duplicate; `store.put`, if there is a store; `on_trajectory`, on the event loop, which owns the
    trajectory (read-only arrays) from then on; and then it is acknowledged, and its sender forgets it. What has to
    survive a crash is in the store by then. If `validate` or `admit` raises `Refuse`, the trajectory is rejected with that
    reason, and nothing of it is stored; any other exception is logged and rejects it too, for a message that trips over a
    defect must neither stop the receiver nor be resent for ever.

    Memory: trajectories that are under way, or handed over and not released, take at most `settings.credit_bytes`, and
    beyond that only what the next `window` groups take, which are let through whatever else is held; `CreditPool` has the
    rule and why it can not deadlock. What a sender claims is limited: `claims(group, trajectory_id)` says whether a group
    has such a trajectory, and no trajectory takes more than `largest` bytes. So memory is bounded whatever senders say, by
    `max(credit_bytes, largest) + window * (trajectories that claims lets a group have) * largest`.

    Call `release` for each trajectory that is no longer held in memory, or `forget` for a whole group, in the order of
    groups as far as possible. With a store, a trajectory that would go beyond `store.memory_bytes` is handed over mapped
    from disk; and if the store has no room, only the window is granted.

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
        claims: Callable[[int, str], bool] | None = None,
        largest: int | None = None,
        validate: Callable[[Trajectory], None] | None = None,
        admit: Callable[[Trajectory], bool] | None = None,
        store: Store | None = None,
        window: int = 1,
        port: int = 0,
        schema: Schema = SCHEMA,
        ledger: Ledger | None = None,
        on_reject: Callable[[str, str], None] | None = None,
        world: World = REAL,
    ):
        self.run_id = run_id
        self.settings = settings
        self.ledger = Ledger() if ledger is None else ledger
        self.epoch = world.unique()
        """Name of this incarnation."""
        self.received = 0
        """Trajectories accepted."""
        self.bytes_received = 0
        """Bytes of accepted trajectories, on the wire."""
        self.recovered = 0
        """Trajectories that the store had kept and `start` handed over again."""
        self.duplicates = 0
        """Trajectories offered or delivered again after they were accepted, or after their group was over."""
        self.rejected = 0
        """Messages refused with a reason."""
        self.damaged = 0
        """Trajectories that changed on their way; their senders were asked to send them again."""
        self.refused: Counter[str] = Counter()
        """Peers that were not let in, each time they tried, by reason."""
        self._keys = keys
        self._claims = claims
        limits = (settings.max_message_bytes, largest)
        self._largest = min(limit for limit in limits if limit is not None)
        self._store = store
        self._on_reject = on_reject
        self._port = port
        self._schema = schema
        self._clock = world.clock.monotonic
        self._pool = CreditPool(settings.credit_bytes, window)
        self._peers: dict[bytes, Peer] = {}
        self._acks: dict[bytes, list[str]] = {}
        self._beat = settings.ack_timeout / 4
        self._beat_at = 0.0
        self._granting = False
        self._intake = Intake(
            schema, self.ledger, self._pool, on_trajectory, validate, admit, store, self._answer, world
        )
        self._sockets = world.sockets()
        self._socket: MessageSocket = NoSocket()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def bytes_held(self) -> int:
        """Bytes of trajectories that were handed over and not released."""
        return self._pool.held

    @property
    def senders(self) -> int:
        """Senders that are connected."""
        return len(self._peers)

    async def start(self) -> str:
        """Take back what the store kept, bind, and serve. Returns the endpoint; its host is `settings.host`, as it is,
        also if that is a wildcard.

        Raises `TransportError` if the address can not be bound.
        """
        assert not self._tasks, "a receiver is started once"
        self._pool.advance(self.ledger.oldest)
        if self._store is not None:
            self.recovered, refused = await self._intake.recover(self._store)
            self.rejected += refused
        address = f"tcp://{in_url(self.settings.host)}:{self._port or '*'}"
        try:
            self._socket = self._sockets.router(address, self._on_message, keys=self._keys, refused=self.refused)
        except OSError as error:
            await self.close()
            raise TransportError(f"can not listen on {address}: {error.strerror}") from error
        self._tasks = [
            asyncio.create_task(self._intake.run(), name="transport-receiver"),
            asyncio.create_task(self._tick(), name="transport-heartbeat"),
        ]
        return self._socket.endpoint

    def release(self, trajectory_id: str) -> None:
        """A trajectory is consumed: its bytes become credit. Harmless for one that holds none."""
        self._pool.release(trajectory_id)
        self._grant()

    def forget(self, group_index: int) -> None:
        """A group is consumed: release what it still holds, and its ids need not be remembered. Anything that still comes
        for it is acknowledged and dropped as a duplicate. Idempotent."""
        for trajectory_id in self.ledger.forget(group_index):
            self._pool.release(trajectory_id)
        self._pool.advance(self.ledger.oldest)
        self._grant()

    async def close(self) -> None:
        """Stop serving and free the address. What is not acknowledged stays with its sender. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)
        await self._sockets.close()

    async def _tick(self) -> None:
        """Heartbeats, and the guarantee that no message lies unread."""
        while True:
            await asyncio.sleep(self._beat)
            try:
                self._socket.drain()
                self._heartbeat()
            except Exception:
                logger.exception("the trajectory receiver goes on after an error")

    def _on_message(self, frames: list[Any]) -> None:
        try:
            self._handle(frames[0].bytes, frames[1:])
        except Exception:  # A defect here or in a callback. The sender is not answered, and tries again.
            logger.exception("the trajectory receiver goes on after an error")

    def _handle(self, identity: bytes, frames: Sequence[Frame]) -> None:
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
                    self._deliver(identity, message, frames[1:])
        except WireError as error:
            self._reject(identity, "", str(error))

    def _hello(self, identity: bytes, hello: Hello) -> None:
        problem, kind = "", ""
        if hello.wire != WIRE_VERSION:
            kind = "another version of the protocol"
            problem = f"wire version {hello.wire}, the learner has {WIRE_VERSION}: install the same version on both"
        elif hello.run_id != self.run_id:
            kind = "another run"
            problem = f"run {hello.run_id!r} is not the run of this learner"
        elif hello.schema != self._schema.fingerprint:
            kind = "another schema"
            problem = f"token schema {hello.schema!r}, the learner has {self._schema.fingerprint!r}: the columns differ"
        elif identity not in self._peers and len(self._peers) >= MAX_SENDERS:
            kind = "too many senders"
            problem = f"{MAX_SENDERS} senders are connected, which is as many as may be"
        if problem:
            self.rejected += 1
            self.refused[kind] += 1
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
        known = [p.trajectory_id for p in offer.parcels if (p.group_index, p.trajectory_id) in self.ledger]
        wrong = {
            p.trajectory_id: problem
            for p in offer.parcels
            if (problem := self._problem(p.group_index, p.trajectory_id, p.nbytes))
        }
        refused = {*known, *wrong}
        self._pool.offer(
            identity,
            {
                p.trajectory_id: Offered(p.group_index, p.nbytes)
                for p in offer.parcels
                # What is in hand already (its sender reconnected while it was being written) is answered when it is done.
                if p.trajectory_id not in refused and p.trajectory_id not in self._intake
            },
            more=offer.more,
        )
        if known:
            self._acknowledge_again(identity, *known)  # Without moving their payload again.
        for trajectory_id, problem in wrong.items():
            self._reject(identity, trajectory_id, problem)
        if offer.more:
            self._grant()
        else:
            self._grant_now(identity)

    def _deliver(self, identity: bytes, message: Deliver, frames: Sequence[Frame]) -> None:
        trajectory_id, group_index = message.trajectory_id, message.group_index
        if trajectory_id in self._intake:
            return
        if problem := self._problem(group_index, trajectory_id):
            self._pool.cancel(identity, trajectory_id)
            self._reject(identity, trajectory_id, problem)
            self._grant()
            return
        if (group_index, trajectory_id) in self.ledger:
            self._pool.cancel(identity, trajectory_id)
            self._acknowledge_again(identity, trajectory_id)
            self._grant()
            return
        nbytes = self._pool.arrive(identity, trajectory_id)
        wire_bytes = sum(map(len, frames))
        if nbytes is None:
            # Its grant was withdrawn on its way (a newer offer left it out). Its sender keeps it, and offers it again:
            # to reject it would end the run over a matter of timing.
            logger.info("trajectory %r came without a grant; it will be offered again", trajectory_id)
            return
        if wire_bytes > nbytes:
            self._pool.release(trajectory_id)
            self._reject(identity, trajectory_id, f"{wire_bytes} bytes were not granted")
            self._grant()
            return
        self._intake.add(Parcelled(identity, trajectory_id, group_index, frames, nbytes))

    def _problem(self, group_index: int, trajectory_id: str, nbytes: int = 0) -> str:
        """Why nothing of the kind is ever granted or taken; empty if it may be."""
        if nbytes > self._largest:
            return f"{nbytes} bytes, more than {self._largest}"
        if group_index < 0 or (self._claims is not None and not self._claims(group_index, trajectory_id)):
            return f"group {group_index} has no trajectory {trajectory_id!r}"
        return ""

    def _answer(self, parcel: Parcelled, outcome: Outcome) -> None:
        if outcome.kind == "over":
            self._acknowledge_again(parcel.identity, parcel.trajectory_id)
        elif outcome.kind == "refused":
            self._reject(parcel.identity, parcel.trajectory_id, outcome.reason)
        elif outcome.kind == "damaged":
            self.damaged += 1
            logger.warning("trajectory %r came damaged: %s", parcel.trajectory_id, outcome.reason)
            self._send(parcel.identity, Reject(parcel.trajectory_id, outcome.reason[:MAX_REASON], damaged=True))
        else:
            self.received += 1
            self.bytes_received += parcel.wire_bytes
            if not self._acks:
                asyncio.get_running_loop().call_soon(self._acknowledge)
            self._acks.setdefault(parcel.identity, []).append(parcel.trajectory_id)
        if self._pool.waiting:
            self._grant()

    def _acknowledge(self) -> None:
        """One ACK to each sender for all that was accepted in this round of the event loop."""
        acks, self._acks = self._acks, {}
        for identity, ids in acks.items():
            for i in range(0, len(ids), MAX_ACKS):
                self._send(identity, Ack(ids[i : i + MAX_ACKS]))

    def _acknowledge_again(self, identity: bytes, *trajectory_ids: str) -> None:
        self.duplicates += len(trajectory_ids)
        self._send(identity, Ack(list(trajectory_ids)))

    def _reject(self, identity: bytes, trajectory_id: str, reason: str) -> None:
        self.rejected += 1
        reason = reason[:MAX_REASON]
        self._send(identity, Reject(trajectory_id, reason))
        if self._on_reject is not None:
            self._on_reject(trajectory_id, reason)

    def _grant(self) -> None:
        """One GRANT to each sender for all that becomes possible in this round of the event loop."""
        if not self._granting:
            self._granting = True
            asyncio.get_running_loop().call_soon(self._grant_now)

    def _grant_now(self, also: bytes | None = None) -> None:
        """Tell senders what they may send from now on; and one of them, that may have missed it, whatever it may."""
        self._granting = False
        if self._store is None:
            granted = self._pool.grant()
        else:
            # What is in hand is not in the store yet.
            granted = self._pool.grant(self._store.room - self._intake.nbytes)
            self._store.note_waiting(self._pool.short_of_room)
        if also is not None and (all_of_it := self._pool.granted(also)):
            granted[also] = all_of_it
        for identity, ids in granted.items():
            self._send(identity, Grant(self._peers[identity].session, ids))

    def _welcome(self, identity: bytes) -> None:
        in_hand = self._intake.of(identity)[:MAX_IN_HAND]
        self._send(identity, Welcome(self._peers[identity].session, self.epoch, self.settings.credit_bytes, in_hand))

    def _heartbeat(self) -> None:
        now = self._clock()
        if now - self._beat_at > self._beat:
            # This end did not listen, its event loop was busy: no silence to hold against anyone.
            for peer in self._peers.values():
                peer.seen_at = now
        self._beat_at = now + self._beat
        for identity, peer in list(self._peers.items()):
            if now - peer.seen_at > PATIENCE * self.settings.ack_timeout:
                self._drop(identity)
            else:
                self._welcome(identity)
        self._grant_now()

    def _send(self, identity: bytes, message: Message) -> None:
        """Every answer may be lost: heartbeats, new offers and resending make it good."""
        if self._socket.send([identity, encode_control(message)]) == errno.EHOSTUNREACH:
            self._drop(identity)

    def _drop(self, identity: bytes) -> None:
        self._pool.drop(identity)
        self._peers.pop(identity, None)
