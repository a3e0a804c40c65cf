"""A generator's end: a DEALER socket that keeps each trajectory until the learner has it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from r3async.config import TransportConfig
from r3async.data.records import SCHEMA, Trajectory
from r3async.transport.encoding import Encoded, Encoding, Waiter
from r3async.transport.outbox import Outbox, Pending
from r3async.transport.sockets import NoSocket, TransportRefused, Validate
from r3async.transport.wire import (
    Ack,
    Frame,
    Hello,
    Message,
    Refusal,
    Reject,
    Welcome,
    WireError,
    decode_control,
    delivery,
    encode_control,
)
from r3async.world import MessageSocket, World
from r3async.world.keys import ClientKeys, TransportError
from r3async.world.real import REAL
from r3async.world.stages import booked, stage

logger = logging.getLogger(__name__)

MAX_BACKOFF = 8
HEARTBEATS = 4
"""In one `ack_timeout`."""
DRAIN_SECONDS = 0.05
"""What is there is read for so long before it is judged that an answer is missing."""


class Sender:
    """Delivers trajectories to one receiver, at least once each, while both are alive.

    Every trajectory is kept in memory until it is acknowledged (accepted by the learner) or rejected. If nothing is received for
    `settings.ack_timeout`, or an acknowledgement is missing for as long, or the receiver was restarted, the sender opens
    a fresh connection and sends again all that is not acknowledged; the receiver drops what it has. If the sender's
    process ends, what it had not had acknowledged is lost with it: whoever leased that work leases it again.

    `sender_id` names this end to the receiver: two live senders must not share one. `validate(trajectories)`, off the event loop
    if they are large, names those that the learner would not take. `on_reject(trajectory, reason)` is called, on the event loop,
    with a trajectory that the learner will never take.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        endpoint: str,
        sender_id: str,
        run_id: str,
        settings: TransportConfig,
        *,
        keys: ClientKeys,
        validate: Validate = lambda trajectories: {},
        on_reject: Callable[[Trajectory, str], None] | None = None,
        world: World = REAL,
    ):
        self.endpoint = endpoint
        self.sender_id = sender_id
        self.run_id = run_id
        self.settings = settings
        self.epoch = ""
        """Incarnation of the receiver; empty until it has answered."""
        self.sent = 0
        """Trajectories handed to the connection, each time counted."""
        self.acked = 0
        self.rejected = 0
        self.resent = 0
        """Trajectories that had been sent and wait again for a fresh connection."""
        self.reconnects = 0
        """Fresh connections after the first."""
        self.damaged = 0
        """Deliveries that changed on their way."""
        self._validate, self._on_reject = validate, on_reject
        self._unique, self._clock = world.unique, world.clock.monotonic
        self._encoding = Encoding(settings, validate, self._encoded, world)
        self._outbox = Outbox()
        self._settled = asyncio.Event()
        """Nothing is unacknowledged, or nothing ever will be settled again."""
        self._settled.set()
        self._error: TransportError | None = None
        self._session = ""
        self._welcomed = False
        self._until = self._at_once = 0
        self._heard_at = 0.0
        self._backoff = 1
        self._sockets = world.sockets()
        self._socket: MessageSocket = NoSocket()
        self._keys = keys
        self._task: asyncio.Task[None] | None = None

    @property
    def unacknowledged(self) -> int:
        """Trajectories that wait to be sent or for an acknowledgement."""
        return len(self._encoding.fresh) + len(self._outbox)

    def __contains__(self, trajectory_id: str) -> bool:
        """It was handed to `send`, and is not acknowledged or rejected yet."""
        return trajectory_id in self._encoding.fresh or trajectory_id in self._outbox

    async def start(self) -> None:
        """Begin to connect, and return: the receiver may come up later. Raises `TransportError` for an endpoint that is
        none; a refusal is raised by `send` and `flush`."""
        assert self._task is None, "a sender is started once"
        try:
            self._connect()
        except OSError as error:
            await self.close()
            raise TransportError(f"cannot connect to {self.endpoint!r}: {error.strerror}") from error
        self._task = asyncio.create_task(booked("messages", self._run()), name=f"transport-sender-{self.sender_id}")

    async def send(self, trajectory: Trajectory, *, more: bool = False) -> None:
        """Return when the trajectory is on its way, which may take as long as the learner takes to have memory for it. With
        `more`, others of its group will follow: it waits for them, `encoding.LINGER_SECONDS` at most.

        From then on it is this object's to deliver, and its arrays must not be changed. Cancelled before that, it is not
        sent. Raises `TransportRefused` if the receiver refuses this sender, `TransportError` if it is closed, or if the
        trajectory is too large or is being sent already, and `WireError` if it is not valid.
        """
        self._raise_error()
        name, waiter = trajectory.trajectory_id, asyncio.get_running_loop().create_future()
        if name in self:
            raise TransportError(f"trajectory {name!r} is being sent already")
        try:
            await self._encoding.add(trajectory, waiter, more=more)
            self._note_settled()
            await waiter
        except asyncio.CancelledError:
            waiter.cancel()
            self._encoding.fresh.pop(name, None)
            self._outbox.withdraw(name)
            self._note_settled()
            raise

    async def flush(self, timeout: float) -> int:
        """Wait up to `timeout` seconds until all is acknowledged. Returns how many are not; raises as `send` does."""
        self._encoding.begin()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout)
        self._raise_error()
        return self.unacknowledged

    async def close(self) -> None:
        """Disconnect at once. What is not acknowledged is given up (`flush` first), and callers that wait in `send` get
        a `TransportError`. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=5)
        self._fail(TransportError("the sender is closed"))
        await self._sockets.close()

    async def _run(self) -> None:
        try:
            while self._error is None:
                await asyncio.sleep(self.settings.ack_timeout / HEARTBEATS)
                # All that is there, before judging what is missing: this end may have been busy itself.
                self._socket.drain(DRAIN_SECONDS)
                self._check()
        except Exception as error:
            self._stop(error)

    def _on_message(self, frames: list[Any]) -> None:
        try:
            self._handle(frames)
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """A defect, here or in a callback: those who wait in `send` would wait for ever."""
        logger.error("the trajectory sender stopped", exc_info=error)
        self._fail(TransportError(f"the sender stopped: {type(error).__name__}: {error}"))

    def _connect(self) -> None:
        """A fresh socket and session. Nothing is resent until it is welcomed, so trying again costs little."""
        if self._session:
            self._socket.close()
            self.reconnects += 1
        self._welcomed, self._heard_at = False, -math.inf
        self.resent += self._outbox.reset()
        identity = self.sender_id.encode()
        self._socket = self._sockets.dealer(self.endpoint, identity, self._on_message, keys=self._keys)
        self._session = self._unique()
        self._heard_at = self._clock()
        self._say_hello()

    def _reconnect(self) -> None:
        """Now, or at a later heartbeat: this process may lack descriptors."""
        try:
            self._connect()
        except OSError as error:
            logger.warning("no connection to %s, which is tried again: %s", self.endpoint, error)

    def _say_hello(self) -> None:
        self._say(Hello(self._session, self.sender_id, self.run_id, SCHEMA.fingerprint))

    def _check(self) -> None:
        """Reconnect if the receiver is silent, or an answer is overdue; or else show that this end lives."""
        if self._error is not None:
            return
        if self._socket.denied:
            self._fail(TransportRefused(f"{self.endpoint} refuses {self._socket.denied}"))
            return
        now = self._clock()
        overdue = self._outbox.overdue(now, self.settings.ack_timeout * self._backoff)
        if overdue:
            # A link on which the largest message takes longer than the timeout would otherwise never deliver it.
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        if overdue or now - self._heard_at > self.settings.ack_timeout:
            self._reconnect()
        else:
            self._say_hello()

    def _handle(self, frames: Sequence[Frame]) -> None:
        try:
            message = decode_control(frames[0])
        except WireError:
            return  # Not from a receiver of ours. Silence, and the answers that are missing, take their course.
        if isinstance(message, Ack):
            self._heard_at = self._clock()
            for trajectory_id in message.ids:
                self.acked += self._settle(trajectory_id) is not None
            self._deliver()
        elif isinstance(message, Reject):
            self._rejected(message)
        elif isinstance(message, Welcome | Refusal) and message.session == self._session:
            self._heard_at = self._clock()
            if isinstance(message, Welcome):
                self._welcome(message)
            elif message.final:
                self._fail(TransportRefused(f"{self.endpoint} refuses {message.reason}"))
            else:
                self._reconnect()

    def _welcome(self, message: Welcome) -> None:
        if self._welcomed and message.epoch != self.epoch:  # what the one before had in hand is lost
            self._reconnect()
            return
        self.epoch, self._welcomed = message.epoch, True
        self._until, self._at_once = message.until, message.at_once
        self._outbox.touch(message.in_hand, self._clock())
        self._deliver()

    def _rejected(self, message: Reject) -> None:
        name, damaged = message.trajectory_id, message.again == "damaged"
        if message.again != "never" and self._outbox.again(name, self._clock(), damaged=damaged):
            self._heard_at = self._clock()
            self.damaged += damaged
            self._deliver()
        elif message.again != "later" and (pending := self._settle(name)):
            self._refuse(pending.trajectory, message.reason)
            self._deliver()

    # -- what is to be sent ----------------------------------------------------------------------------------------

    def _encoded(self, made: Sequence[tuple[Trajectory, Waiter, Encoded]]) -> None:
        try:
            with stage("messages"):
                for trajectory, waiter, encoded in made:
                    if not waiter.done():  # or it was cancelled, or the sender has failed
                        self._add(trajectory, waiter, encoded)
                self._deliver()
        except Exception as error:
            self._stop(error)
        self._note_settled()

    def _add(self, trajectory: Trajectory, waiter: Waiter, encoded: Encoded) -> None:
        if self._error is not None:
            waiter.set_exception(again(self._error))
        elif isinstance(encoded, Exception):
            waiter.set_exception(encoded)
        elif isinstance(encoded, str):
            waiter.set_result(None)
            self._refuse(trajectory, encoded)
        elif trajectory.trajectory_id in self:
            waiter.set_exception(TransportError(f"trajectory {trajectory.trajectory_id!r} is being sent already"))
        else:
            encoded.handed_over = waiter
            self._outbox.add(encoded)

    def _deliver(self) -> None:
        """All that may be sent now."""
        while self._welcomed and (ready := self._outbox.ready(self._until, self._at_once)):
            if self._socket.send(delivery(self._session, [p.item for p in ready], [p.frames for p in ready])):
                break  # The connection's queue is full: the next answer, or WELCOME, tries again.
            now = self._clock()
            for pending in ready:
                self._outbox.mark_sent(pending, now)
                self._resolve(pending)
            self.sent += len(ready)

    def _say(self, message: Message) -> None:
        self._socket.send([encode_control(message)])

    def _settle(self, trajectory_id: str) -> Pending | None:
        """What was answered for good; None if that was known already."""
        pending = self._outbox.settle(trajectory_id, self._clock())
        if pending is None:
            return None
        self._backoff = 1
        self._resolve(pending)
        self._note_settled()
        return pending

    @staticmethod
    def _resolve(pending: Pending) -> None:
        if pending.handed_over is not None and not pending.handed_over.done():
            pending.handed_over.set_result(None)

    def _note_settled(self) -> None:
        if self.unacknowledged and self._error is None:
            self._settled.clear()
        else:
            self._settled.set()

    def _refuse(self, trajectory: Trajectory, reason: str) -> None:
        """It will never be taken."""
        self.rejected += 1
        if self._on_reject is not None:
            self._on_reject(trajectory, reason)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise again(self._error)

    def _fail(self, error: TransportError) -> None:
        """For good: all who wait get the reason, now and later. The first reason stands."""
        if self._error is None:
            self._error = error
        self._settled.set()
        waiting = [waiter for _, waiter in self._encoding.fresh.values()]
        self._encoding.fresh.clear()
        waiting += [p.handed_over for p in self._outbox.waiting.values() if p.handed_over is not None]
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(again(self._error))


def again(error: TransportError) -> TransportError:
    """The same: one that is raised twice gathers the tracebacks of both."""
    return type(error)(*error.args)
