"""A generator's sender, which keeps each trajectory until the learner has acknowledged it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from r3async.config import TransportConfig
from r3async.data.control_messages import (
    Ack,
    ControlMessage,
    Hello,
    Refusal,
    Reject,
    Welcome,
    decode_control,
    encode_control,
    encode_delivery,
)
from r3async.data.tokens import SCHEMA, Trajectory
from r3async.data.wire_frames import Frame, WireError
from r3async.transport.encoding_queue import EncodeResult, EncodingQueue, SendWaiter
from r3async.transport.null_socket import NullSocket, SenderRefusedError, TrajectoryValidator
from r3async.transport.outbox import Outbox, OutgoingTrajectory
from r3async.world import MessageSocket, World
from r3async.world.curve_keys import ClientKeys, TransportError
from r3async.world.real import REAL_WORLD
from r3async.world.stages import in_stage, stage

logger = logging.getLogger(__name__)

MAX_BACKOFF = 8
HEARTBEATS_PER_TIMEOUT = 4
"""Heartbeats per `ack_timeout`."""
DRAIN_SECONDS = 0.05
"""Seconds for which available messages are read before an answer is judged to be missing."""


class TrajectorySender:
    """A generator's end of the transport: delivers trajectories to one receiver, at least once
    each, while both are alive.

    Every trajectory is kept in memory until it is acknowledged (accepted by the learner) or
    rejected. If nothing is received for `settings.ack_timeout`, or an acknowledgement is missing
    for as long, or the receiver was restarted, the sender opens a fresh connection and sends again
    all that is not acknowledged; the receiver drops what it has. If the sender's process ends, what
    is not acknowledged is lost with it: the holder of the lease leases that work again.

    All methods belong to the event loop's thread.

    Args:
        sender_id: Name of this end for the receiver; two live senders must not share one.
        validate: Function that names the trajectories that the learner would not accept; it runs
            off the event loop if they are large.
        on_reject: `on_reject(trajectory, reason)` is called, on the event loop, for a trajectory
            that the learner will never accept.
    """

    def __init__(
        self,
        endpoint: str,
        sender_id: str,
        run_id: str,
        settings: TransportConfig,
        *,
        keys: ClientKeys,
        validate: TrajectoryValidator = lambda trajectories: {},
        on_reject: Callable[[Trajectory, str], None] | None = None,
        world: World = REAL_WORLD,
    ):
        self.endpoint = endpoint
        self.sender_id = sender_id
        self.run_id = run_id
        self.settings = settings
        self.receiver_incarnation = ""
        """Incarnation of the receiver; empty until it has answered."""
        self.sent = 0
        """Trajectories handed to the connection, each time counted."""
        self.acked = 0
        self.rejected = 0
        self.resent = 0
        """Trajectories that had been sent and were requeued for a fresh connection."""
        self.reconnects = 0
        """Fresh connections after the first."""
        self.damaged = 0
        """Deliveries damaged in transit."""
        self._validate = validate
        self._on_reject = on_reject
        self._unique_id = world.unique_id
        self._clock = world.clock.monotonic
        self._encoder = EncodingQueue(settings, validate, self._on_encoded, world)
        self._outbox = Outbox()
        self._all_settled = asyncio.Event()
        """Event that is set while nothing is unacknowledged, or once nothing will ever
        be settled again."""
        self._all_settled.set()
        self._error: TransportError | None = None
        self._session = ""
        self._is_welcomed = False
        self._group_limit = self._max_in_flight_bytes = 0
        self._last_message_at = 0.0
        self._backoff = 1
        self._sockets = world.open_sockets()
        self._socket: MessageSocket = NullSocket()
        self._keys = keys
        self._task: asyncio.Task[None] | None = None

    @property
    def unacknowledged(self) -> int:
        """The number of trajectories that wait to be sent or for an acknowledgement."""
        return len(self._encoder.unencoded) + len(self._outbox)

    def __contains__(self, trajectory_id: str) -> bool:
        """Return True if a trajectory was handed to `send` and is not acknowledged
        or rejected yet."""
        return trajectory_id in self._encoder.unencoded or trajectory_id in self._outbox

    async def start(self) -> None:
        """Begin to connect, and return: the receiver may come up later. Raises `TransportError` for
        an invalid endpoint; `send` and `flush` raise a refusal."""
        assert self._task is None, "a sender is started once"
        try:
            self._open_connection()
        except OSError as error:
            await self.close()
            raise TransportError(
                f"cannot connect to {self.endpoint!r}: {error.strerror}"
            ) from error
        self._task = asyncio.create_task(
            in_stage("messages", self._run_heartbeat()), name=f"transport-sender-{self.sender_id}"
        )

    async def send(self, trajectory: Trajectory, *, more_follow: bool = False) -> None:
        """Send a trajectory, and return when it is on its way, which may take until the learner
        has memory for it.

        From then on the sender delivers it, and its arrays must not be changed. If cancelled before
        that, it is not sent. Raises `SenderRefusedError` if the receiver refuses this sender,
        `TransportError` if it is closed, or if the trajectory is too large or is being sent
        already, and `WireError` if it is not valid.

        Args:
            more_follow: Others of its group will follow, for which it waits up to `LINGER_SECONDS`.
        """
        self._raise_error()
        name = trajectory.trajectory_id
        waiter = asyncio.get_running_loop().create_future()
        if name in self:
            raise TransportError(f"trajectory {name!r} is being sent already")
        try:
            await self._encoder.add(trajectory, waiter, more_follow=more_follow)
            self._update_settled()
            await waiter
        except asyncio.CancelledError:
            waiter.cancel()
            self._encoder.unencoded.pop(name, None)
            self._outbox.withdraw_unsent(name)
            self._update_settled()
            raise

    async def flush(self, timeout: float) -> int:
        """Wait up to `timeout` seconds until everything is acknowledged. Returns how many
        trajectories are not; raises as `send` does."""
        self._encoder.encode_soon()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_settled.wait(), timeout)
        self._raise_error()
        return self.unacknowledged

    async def close(self) -> None:
        """Disconnect at once. What is not acknowledged is given up (call `flush` first), and
        callers that wait in `send` get a `TransportError`. Idempotent."""
        task = self._task
        self._task = None
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=5)
        self._fail_all(TransportError("the sender is closed"))
        await self._sockets.close()

    async def _run_heartbeat(self) -> None:
        try:
            while self._error is None:
                await asyncio.sleep(self.settings.ack_timeout / HEARTBEATS_PER_TIMEOUT)
                # Read all available messages before judging what is missing: this end may have
                # been busy itself.
                self._socket.receive_pending(DRAIN_SECONDS)
                self._check_connection()
        except Exception as error:
            self._stop_on_defect(error)

    def _on_message(self, frames: list[Any]) -> None:
        try:
            self._handle_message(frames)
        except Exception as error:
            self._stop_on_defect(error)

    def _stop_on_defect(self, error: Exception) -> None:
        """Stop after a defect, here or in a callback: callers that wait in `send` would
        otherwise wait for ever."""
        logger.error("the trajectory sender stopped", exc_info=error)
        self._fail_all(TransportError(f"the sender stopped: {type(error).__name__}: {error}"))

    def _open_connection(self) -> None:
        """Open a fresh socket and session. Nothing is resent until it is welcomed, so trying
        again costs little."""
        if self._session:
            self._socket.close()
            self.reconnects += 1
        self._is_welcomed = False
        self._last_message_at = -math.inf
        self.resent += self._outbox.requeue_all()
        identity = self.sender_id.encode()
        self._socket = self._sockets.connect_dealer(
            self.endpoint, identity, self._on_message, keys=self._keys
        )
        self._session = self._unique_id()
        self._last_message_at = self._clock()
        self._send_hello()

    def _try_reconnect(self) -> None:
        """Reconnect now, or at a later heartbeat if it fails: this process may lack descriptors."""
        try:
            self._open_connection()
        except OSError as error:
            logger.warning("no connection to %s, which is tried again: %s", self.endpoint, error)

    def _send_hello(self) -> None:
        self._send_message(Hello(self._session, self.sender_id, self.run_id, SCHEMA.fingerprint))

    def _check_connection(self) -> None:
        """Reconnect if the receiver is silent or an answer is overdue; otherwise show that
        this end is alive."""
        if self._error is not None:
            return
        if self._socket.denial_reason:
            self._fail_all(
                SenderRefusedError(f"{self.endpoint} refuses {self._socket.denial_reason}")
            )
            return
        now = self._clock()
        overdue = self._outbox.is_overdue(now, self.settings.ack_timeout * self._backoff)
        if overdue:
            # A link on which the largest message takes longer than the timeout would otherwise
            # never deliver it.
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        if overdue or now - self._last_message_at > self.settings.ack_timeout:
            self._try_reconnect()
        else:
            self._send_hello()

    def _handle_message(self, frames: Sequence[Frame]) -> None:
        try:
            message = decode_control(frames[0])
        except WireError:
            return  # Not from a receiver of ours. Silence and missing answers are handled as usual.
        if isinstance(message, Ack):
            self._last_message_at = self._clock()
            for trajectory_id in message.ids:
                self.acked += self._settle_trajectory(trajectory_id) is not None
            self._send_ready()
        elif isinstance(message, Reject):
            self._on_reject_message(message)
        elif isinstance(message, Welcome | Refusal) and message.session == self._session:
            self._last_message_at = self._clock()
            if isinstance(message, Welcome):
                self._on_welcome(message)
            elif message.final:
                self._fail_all(SenderRefusedError(f"{self.endpoint} refuses {message.reason}"))
            else:
                self._try_reconnect()

    def _on_welcome(self, message: Welcome) -> None:
        # What the old one had in hand is lost.
        if self._is_welcomed and message.epoch != self.receiver_incarnation:
            self._try_reconnect()
            return
        self.receiver_incarnation = message.epoch
        self._is_welcomed = True
        self._group_limit = message.until
        self._max_in_flight_bytes = message.at_once
        self._outbox.mark_in_hand(message.in_hand, self._clock())
        self._send_ready()

    def _on_reject_message(self, message: Reject) -> None:
        name = message.trajectory_id
        damaged = message.again == "damaged"
        if message.again != "never" and self._outbox.requeue_trajectory(
            name, self._clock(), damaged=damaged
        ):
            self._last_message_at = self._clock()
            self.damaged += damaged
            self._send_ready()
        elif message.again != "later":
            pending = self._settle_trajectory(name)
            if pending:
                self._report_rejected(pending.trajectory, message.reason)
                self._send_ready()

    # -- sending -----------------------------------------------------------------------------------

    def _on_encoded(self, results: Sequence[tuple[Trajectory, SendWaiter, EncodeResult]]) -> None:
        try:
            with stage("messages"):
                for trajectory, waiter, encoded in results:
                    if not waiter.done():  # otherwise it was cancelled, or the sender has failed
                        self._enqueue_encoded(trajectory, waiter, encoded)
                self._send_ready()
        except Exception as error:
            self._stop_on_defect(error)
        self._update_settled()

    def _enqueue_encoded(
        self, trajectory: Trajectory, waiter: SendWaiter, encoded: EncodeResult
    ) -> None:
        if self._error is not None:
            waiter.set_exception(copy_error(self._error))
        elif isinstance(encoded, Exception):
            waiter.set_exception(encoded)
        elif isinstance(encoded, str):
            waiter.set_result(None)
            self._report_rejected(trajectory, encoded)
        elif trajectory.trajectory_id in self:
            waiter.set_exception(
                TransportError(f"trajectory {trajectory.trajectory_id!r} is being sent already")
            )
        else:
            encoded.sent_waiter = waiter
            self._outbox.add(encoded)

    def _send_ready(self) -> None:
        """Send everything that may be sent now."""
        while self._is_welcomed and (
            ready := self._outbox.next_batch(self._group_limit, self._max_in_flight_bytes)
        ):
            if self._socket.send(
                encode_delivery(self._session, [p.item for p in ready], [p.frames for p in ready])
            ):
                break  # The connection's queue is full: the next answer, or WELCOME, tries again.
            now = self._clock()
            for pending in ready:
                self._outbox.mark_sent(pending, now)
                self._resolve_waiter(pending)
            self.sent += len(ready)

    def _send_message(self, message: ControlMessage) -> None:
        self._socket.send([encode_control(message)])

    def _settle_trajectory(self, trajectory_id: str) -> OutgoingTrajectory | None:
        """Settle a trajectory after its final answer, and return it; None if it is
        settled already."""
        pending = self._outbox.settle_trajectory(trajectory_id, self._clock())
        if pending is None:
            return None
        self._backoff = 1
        self._resolve_waiter(pending)
        self._update_settled()
        return pending

    @staticmethod
    def _resolve_waiter(pending: OutgoingTrajectory) -> None:
        if pending.sent_waiter is not None and not pending.sent_waiter.done():
            pending.sent_waiter.set_result(None)

    def _update_settled(self) -> None:
        if self.unacknowledged and self._error is None:
            self._all_settled.clear()
        else:
            self._all_settled.set()

    def _report_rejected(self, trajectory: Trajectory, reason: str) -> None:
        """Report a trajectory that will never be accepted."""
        self.rejected += 1
        if self._on_reject is not None:
            self._on_reject(trajectory, reason)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise copy_error(self._error)

    def _fail_all(self, error: TransportError) -> None:
        """Fail for good: all waiting callers get the error, now and later. The
        first error stands."""
        if self._error is None:
            self._error = error
        self._all_settled.set()
        waiting = [waiter for _, waiter in self._encoder.unencoded.values()]
        self._encoder.unencoded.clear()
        waiting += [
            p.sent_waiter for p in self._outbox.waiting.values() if p.sent_waiter is not None
        ]
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(copy_error(self._error))


def copy_error(error: TransportError) -> TransportError:
    """Return a copy of an error: one that is raised twice collects the tracebacks of both."""
    return type(error)(*error.args)
