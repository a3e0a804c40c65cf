"""Trajectories to send, a learner that counts, and both ends of a connection, closed whatever happens."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from zmq.utils import z85

from r3async.config import TransportConfig
from r3async.data import control_messages, wire
from r3async.data.tokens import SCHEMA, Sample, TokenTable, Trajectory
from r3async.transport import ReceivedTrajectory, TrajectoryReceiver, TrajectorySender
from r3async.transport.null_socket import TrajectoryValidator
from r3async.world.curve_keys import ClientKeys, ServerKeys
from r3async.world.real import RealWorld
from r3async.world.zmq_sockets import apply_client_keys

FAST = TransportConfig(ack_timeout=0.3)
SLOW = TransportConfig(ack_timeout=60.0)
"""Settings in which no heartbeat or timeout falls within a test's limit, so that none of them hides a fault."""
LEARNER_SECRET = b"&$3K<7+vB$[{q0MiC<$iFC%@dWm2$3VW-x5leSxh"
GENERATOR_SECRET = b"%97mCw)}{rX91Rsn}}J)-!5$=P<c/JmW<b69i=UK"
SERVER_KEYS = ServerKeys(LEARNER_SECRET, frozenset([z85.decode(zmq.curve_public(GENERATOR_SECRET))]))
"""Server keys, the same in every process of a test."""
CLIENT_KEYS = ClientKeys(GENERATOR_SECRET, zmq.curve_public(LEARNER_SECRET))
LIMIT = 10.0
"""Maximum seconds of any wait of a test."""


def make_trajectory(
    index: int | str, length: int = 50, *, group: int | None = None, samples: list[Sample] | None = None
) -> Trajectory:
    rng = np.random.default_rng(length)
    table = TokenTable({c.name: c.filled_rows(length, (4, 2)[: len(c.inner_dims)]) for c in SCHEMA.columns.values()})
    table = table.with_columns(token_ids=rng.integers(0, 1000, length, dtype=np.int32))
    group = group if group is not None else int(index) // 4
    return Trajectory(f"t{index}", group, 0, 1, "g0", "eos", [], samples or [Sample("s", table)])


def encoded(trajectory: Trajectory) -> list[bytes | memoryview]:
    """Encode a trajectory as a sender with the default settings does."""
    return wire.encode_trajectory(trajectory, routes="bits")


def wire_size(trajectory: Trajectory) -> int:
    return sum(map(len, encoded(trajectory)))


def memory_size(trajectory: Trajectory) -> int:
    """Return the size in which a trajectory's credit is counted."""
    return wire.decoded_bytes(encoded(trajectory), trajectory)


def delivered(name: str, group: int, nbytes: int, *frames: bytes | memoryview, session: str = "session") -> list[Any]:
    """Return the message that delivers these frames as one trajectory."""
    return control_messages.encode_delivery(
        session, [control_messages.DeliveryItem(name, group, nbytes, [len(f) for f in frames])], [frames]
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def until(condition: Callable[[], Any], limit: float = LIMIT) -> None:
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Inbox:
    """A learner that stores and accepts what its `receiver` yields, counts it and, unless `hold` is set, releases it at
    once. It rejects what `validate` finds invalid."""

    def __init__(self, *, hold: bool = False, validate: TrajectoryValidator = lambda trajectories: {}):
        self.hold, self.validate = hold, validate
        self.seen: Counter[str] = Counter()
        self.trajectories: list[Trajectory] = []
        self.highest = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, receiver: TrajectoryReceiver) -> str:
        """Recover what the receiver's store kept, start it, and receive from then on. Returns the endpoint."""
        async for recovered in receiver.recover():
            await self._take_in(receiver, [recovered])
        endpoint = await receiver.start()
        self.tasks.append(asyncio.create_task(self._receive(receiver)))
        return endpoint

    async def _receive(self, receiver: TrajectoryReceiver) -> None:
        async for batch in receiver:
            await self._take_in(receiver, batch)

    async def _take_in(self, receiver: TrajectoryReceiver, batch: Sequence[ReceivedTrajectory]) -> None:
        problems = self.validate([received.trajectory for received in batch])
        for at, received in enumerate(batch):
            if at in problems:
                await receiver.reject(received, problems[at])
                continue
            await receiver.store(received)
            if not receiver.accept(received):
                continue
            self.seen[received.trajectory.trajectory_id] += 1
            self.trajectories.append(received.trajectory)
            self.highest = max(self.highest, receiver.unreleased_bytes)
            if not self.hold:
                receiver.release_trajectory(received.trajectory.trajectory_id)

    def once(self, names: set[str]) -> bool:
        return self.seen == dict.fromkeys(names, 1)


class KeepingSender:
    """The sender of a generator that sends to nobody, and keeps its trajectories by their IDs in `got`."""

    unacknowledged = 0

    def __init__(self) -> None:
        self.got: dict[str, Trajectory] = {}

    @property
    def acked(self) -> int:
        return len(self.got)

    async def start(self) -> None:
        pass

    async def send(self, trajectory: Trajectory, *, more_follow: bool) -> None:
        self.got[trajectory.trajectory_id] = trajectory

    async def flush(self, timeout: float) -> None:
        pass

    async def close(self) -> None:
        pass

    def __contains__(self, trajectory_id: str) -> bool:
        return False


class SendersByHand(RealWorld):
    """A world without a network, in which the test says what the senders of a receiver say: it arrives at once. `answers`
    are the receiver's messages, each with the sender that it is for."""

    def __init__(self) -> None:
        self.answers: list[tuple[bytes, control_messages.ControlMessage]] = []
        self._on_message: Callable[[list[Any]], None] | None = None

    def open_sockets(self) -> Any:
        async def close() -> None:
            pass

        return SimpleNamespace(bind_router=self._bind_router, close=close)

    def _bind_router(self, address: str, on_message: Callable[[list[Any]], None], **options: Any) -> Any:
        self._on_message = on_message
        return SimpleNamespace(endpoint=address, send=self._keep_answer, receive_pending=lambda: None)

    def _keep_answer(self, frames: Sequence[Any]) -> int:
        self.answers.append((frames[0], control_messages.decode_control(frames[1])))
        return 0

    def say(self, sender: bytes, *frames: bytes | memoryview) -> None:
        assert self._on_message is not None, "the receiver is started"
        self._on_message([zmq.Frame(frame) for frame in (sender, *frames)])

    def greet(self, *senders: bytes, session: str = "session") -> None:
        """Let these senders say HELLO, in this order."""
        for sender in senders:
            hello = control_messages.Hello(session, sender.decode(), "run", SCHEMA.fingerprint)
            self.say(sender, control_messages.encode_control(hello))

    def in_hand(self, sender: bytes) -> list[str]:
        """Return what the receiver tells a sender, which says HELLO again, that it has in hand."""
        before = len(self.answers)
        self.greet(sender)
        welcome = self.answers[-1][1]
        assert isinstance(welcome, control_messages.Welcome)
        del self.answers[before:]
        return welcome.in_hand


class TappedWorld(RealWorld):
    """A world whose sockets keep the control messages that they `sent`, and those that they `received`, once these are
    handled. What is `lost` is not sent."""

    def __init__(self, lost: Callable[[control_messages.ControlMessage], Any] = lambda message: False):
        self.lost = lost
        self.sent: list[control_messages.ControlMessage] = []
        self.received: list[control_messages.ControlMessage] = []

    @property
    def turned_away(self) -> int:
        """The number of trajectories that a sender was told to send again later."""
        return sum(isinstance(m, control_messages.Reject) and m.again == "later" for m in self.received)

    def open_sockets(self) -> Any:
        sockets = super().open_sockets()

        def bind_router(address: str, on_message: Callable[[list[Any]], None], **options: Any) -> Any:
            return self._tap(sockets.bind_router(address, self._hear(on_message, 1), **options), 1)

        def connect_dealer(endpoint: str, name: bytes, on_message: Callable[[list[Any]], None], **options: Any) -> Any:
            return self._tap(sockets.connect_dealer(endpoint, name, self._hear(on_message, 0), **options), 0)

        return SimpleNamespace(bind_router=bind_router, connect_dealer=connect_dealer, close=sockets.close)

    def _hear(self, on_message: Callable[[list[Any]], None], control_at: int) -> Callable[[list[Any]], None]:
        def hear(frames: list[Any]) -> None:
            on_message(frames)
            self.received.append(control_messages.decode_control(frames[control_at].bytes))

        return hear

    def _tap(self, socket: Any, control_at: int) -> Any:
        send = socket.send

        def tapped_send(frames: Sequence[Any]) -> int:
            message = control_messages.decode_control(frames[control_at])
            if self.lost(message):
                return 0
            self.sent.append(message)
            return send(frames)

        socket.send = tapped_send
        return socket


def losing_acks(lost: Callable[[control_messages.Ack], Any]) -> TappedWorld:
    """Return a world for a receiver whose acknowledgements do not arrive if they are `lost`."""
    return TappedWorld(lambda message: isinstance(message, control_messages.Ack) and lost(message))


@contextlib.asynccontextmanager
async def receiving(
    inbox: Inbox, config: TransportConfig = FAST, run_id: str = "run", **options: Any
) -> AsyncIterator[tuple[TrajectoryReceiver, str]]:
    receiver = TrajectoryReceiver(run_id, config, **{"keys": SERVER_KEYS, **options})
    try:
        yield receiver, await asyncio.wait_for(inbox.start(receiver), LIMIT)
    finally:
        for task in inbox.tasks:
            task.cancel()
        await asyncio.wait_for(receiver.close(), LIMIT)


@contextlib.asynccontextmanager
async def sending(
    endpoint: str, config: TransportConfig = FAST, name: str = "g0", run_id: str = "run", **options: Any
) -> AsyncIterator[TrajectorySender]:
    sender = TrajectorySender(endpoint, name, run_id, config, **{"keys": CLIENT_KEYS, **options})
    try:
        await asyncio.wait_for(sender.start(), LIMIT)
        yield sender
    finally:
        await asyncio.wait_for(sender.close(), LIMIT)


async def send_all(sender: TrajectorySender, trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        await asyncio.wait_for(sender.send(trajectory), LIMIT)


async def deliver_all(sender: TrajectorySender, trajectories: list[Trajectory]) -> None:
    """Send them, and wait until each is acknowledged."""
    await send_all(sender, trajectories)
    assert await sender.flush(LIMIT) == 0


@contextlib.asynccontextmanager
async def raw_dealer(endpoint: str, name: bytes = b"raw") -> AsyncIterator[Any]:
    """Connect a peer that sends anything: `await peer.send(*frames)`. Its answers are messages, or None if there is none in
    time."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.setsockopt(zmq.ROUTING_ID, name)
    apply_client_keys(dealer, CLIENT_KEYS)
    dealer.connect(endpoint)

    class Peer:
        async def send(self, *frames: Any) -> None:
            parts = [
                control_messages.encode_control(f) if isinstance(f, control_messages.ControlBase) else f for f in frames
            ]
            await asyncio.wait_for(dealer.send_multipart(parts), LIMIT)

        async def answer(self, timeout: float = LIMIT) -> Any:
            """Return the next message that is not a heartbeat."""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    while True:
                        message = control_messages.decode_control((await dealer.recv_multipart())[0])
                        if not isinstance(message, control_messages.Welcome):
                            return message
            return None

    try:
        yield Peer()
    finally:
        dealer.close()
        context.term()


HELLO = control_messages.Hello("session", "raw", "run", SCHEMA.fingerprint)
