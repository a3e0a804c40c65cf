"""Delivery over real sockets: at least once, and accepted once, whatever is lost, killed or restarted."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r3async.config import TransportConfig
from r3async.data import control_messages
from r3async.transport import TransportError
from r3async.world.real import RealWorld
from tests.helpers.transport import (
    HELLO,
    LIMIT,
    SLOW,
    Inbox,
    TappedWorld,
    deliver_all,
    delivered,
    free_port,
    losing_acks,
    make_trajectory,
    memory_size,
    raw_dealer,
    receiving,
    send_all,
    sending,
    until,
    wire_size,
)


async def test_round_trip():
    sent = [make_trajectory(i, length) for i, length in enumerate([0, 1, 50, 1000, 20_000])]
    inbox = Inbox()
    async with receiving(inbox, SLOW) as (receiver, endpoint), sending(endpoint, SLOW) as sender:
        await deliver_all(sender, sent)
        assert sorted(inbox.trajectories, key=lambda t: t.trajectory_id) == sent
        assert (sender.sent, sender.acked, sender.resent, sender.reconnects) == (5, 5, 0, 0)
        assert (receiver.received, receiver.duplicates, receiver.rejected, receiver.unreleased_bytes) == (5, 0, 0, 0)
        assert receiver.bytes_received == sum(map(wire_size, sent))
        assert sender.receiver_incarnation == receiver.incarnation


async def test_many_senders_share_the_memory_and_all_is_delivered():
    groups = {f"g{g}": [make_trajectory(f"{g}-{i}", 200, group=g) for i in range(40)] for g in range(4)}
    config = TransportConfig(ack_timeout=0.3, credit_bytes=3 * memory_size(groups["g0"][0]) + 100)
    inbox = Inbox()
    async with contextlib.AsyncExitStack() as stack:
        receiver, endpoint = await stack.enter_async_context(receiving(inbox, config, window=0))
        senders = [await stack.enter_async_context(sending(endpoint, config, name)) for name in groups]
        async with asyncio.timeout(LIMIT):
            pairs = zip(senders, groups.values(), strict=True)
            await asyncio.gather(*(s.send(t) for s, ts in pairs for t in ts))
            assert [await s.flush(LIMIT) for s in senders] == [0] * 4
        assert inbox.once({t.trajectory_id for ts in groups.values() for t in ts})
        assert inbox.highest <= config.credit_bytes
        assert receiver.sender_count == 4
        assert receiver.unreleased_bytes == 0


@pytest.mark.parametrize("at_once", [1, 40, 160])
async def test_a_trajectory_crosses_the_wire_once_and_nothing_is_said_before(at_once):
    """Those that are accepted at about the same time are acknowledged together. How many depends on the machine."""
    world = TappedWorld()
    trajectories = [make_trajectory(i) for i in range(160)]
    inbox = Inbox()
    async with receiving(inbox, SLOW, world=world) as (_, endpoint), sending(endpoint, SLOW, world=world) as sender:
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(send_all(sender, trajectories[i::at_once]) for i in range(at_once)))
        assert await sender.flush(LIMIT) == 0
    assert inbox.once({f"t{i}" for i in range(160)})
    kinds = Counter(type(message) for message in world.sent)
    assert kinds.pop(control_messages.Ack) <= 100
    assert kinds.pop(control_messages.Deliver) <= 160
    assert kinds == {control_messages.Hello: 1, control_messages.Welcome: 1}
    deliveries = [message for message in world.sent if isinstance(message, control_messages.Deliver)]
    delivered_ids = [item.trajectory_id for message in deliveries for item in message.items]
    acked_ids = [name for message in world.sent if isinstance(message, control_messages.Ack) for name in message.ids]
    assert sorted(delivered_ids) == sorted(acked_ids) == sorted(f"t{i}" for i in range(160))


class LateWorld(RealWorld):
    """Its clock is `late[0]` seconds ahead."""

    def __init__(self, late: list[float]):
        self.clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], time=time.time)


async def test_a_receiver_that_was_busy_does_not_blame_its_senders():
    late = [0.0]
    config = TransportConfig(ack_timeout=3)
    async with (
        receiving(Inbox(), config, world=LateWorld(late)) as (receiver, endpoint),
        sending(endpoint, config) as sender,
    ):
        await deliver_all(sender, [make_trajectory(1)])
        late[0] = 1000.0
        await asyncio.sleep(1)  # One heartbeat.
        await deliver_all(sender, [make_trajectory(2)])
        assert receiver.sender_count == 1
        assert sender.reconnects == 0


@pytest.mark.parametrize("restored", [True, False])
async def test_receiver_restarts_on_the_same_port(restored: bool):
    """With its ledger: each once. Without: what was accepted and not acknowledged comes twice, but nothing is lost."""
    port, deaf = free_port(), losing_acks(lambda _: first.received >= 10)
    trajectories = [make_trajectory(i) for i in range(60)]
    inbox = Inbox()
    async with contextlib.AsyncExitStack() as stack:
        async with receiving(inbox, world=deaf, port=port) as (first, endpoint):
            sender = await stack.enter_async_context(sending(endpoint))
            feed = asyncio.create_task(send_all(sender, trajectories))
            await until(lambda: first.received >= 20)
        accepted = first.received
        assert sender.unacknowledged >= accepted - 10
        async with receiving(inbox, port=port, ledger=first.ledger if restored else None) as (second, _):
            await asyncio.wait_for(feed, LIMIT)
            assert await sender.flush(LIMIT) == 0
            assert set(inbox.seen) == {t.trajectory_id for t in trajectories}
            assert sender.receiver_incarnation == second.incarnation != first.incarnation
            assert sender.resent >= accepted - 10
            if restored:
                assert inbox.once({t.trajectory_id for t in trajectories})
                assert second.duplicates >= accepted - 10
            else:
                assert sum(inbox.seen.values()) >= 60 + accepted - 10


async def test_cancelled_send_is_not_sent():
    config = TransportConfig(ack_timeout=SLOW.ack_timeout, credit_bytes=memory_size(make_trajectory(1)) + 10)
    inbox, world = Inbox(hold=True), TappedWorld()
    async with (
        receiving(inbox, config, window=0) as (receiver, endpoint),
        sending(endpoint, config, world=world) as sender,
    ):
        await send_all(sender, [make_trajectory(0), make_trajectory(1)])
        await until(lambda: sender.acked == world.turned_away == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sender.send(make_trajectory(2)), 0.3)
        assert sender.unacknowledged == 1  # that was sent once: it may be accepted
        receiver.release_trajectory("t0")
        assert await sender.flush(LIMIT) == 0
        receiver.release_trajectory("t1")
        await deliver_all(sender, [make_trajectory(2)])  # A second try is a new one.
        assert inbox.once({"t0", "t1", "t2"})


async def test_the_same_trajectory_twice_at_once_is_an_error():
    config = TransportConfig(credit_bytes=1)
    inbox, world = Inbox(hold=True), TappedWorld()
    async with receiving(inbox, config, window=0) as (_, endpoint), sending(endpoint, config, world=world) as sender:
        await asyncio.wait_for(sender.send(make_trajectory(0)), LIMIT)
        await until(lambda: "t0" in inbox.seen)
        await asyncio.wait_for(sender.send(make_trajectory(3)), LIMIT)  # which does not fit
        await until(lambda: sender.acked == world.turned_away == 1)
        task = asyncio.create_task(sender.send(make_trajectory(1)))
        await until(lambda: sender.unacknowledged == 2)
        with pytest.raises(TransportError, match="'t1' is being sent already"):
            await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
        await sender.close()
        with pytest.raises(TransportError, match="closed"):
            await asyncio.wait_for(task, LIMIT)
        with pytest.raises(TransportError, match="closed"):
            await asyncio.wait_for(sender.send(make_trajectory(2)), LIMIT)


async def test_redelivered_later_by_another_sender():
    inbox = Inbox()
    async with receiving(inbox) as (receiver, endpoint):
        for name in ("g0", "g1"):
            async with sending(endpoint, name=name) as sender:
                await deliver_all(sender, [make_trajectory(1, group=5)])
        assert receiver.received == 1
        receiver.forget_group(5)
        async with sending(endpoint, name="g2") as sender:
            await deliver_all(sender, [make_trajectory(1, group=5), make_trajectory(2, group=5)])
        assert receiver.received == 1
        assert receiver.duplicates >= 3  # more, where an acknowledgement was late
        assert inbox.once({"t1"})


async def test_a_sender_that_is_silent_is_forgotten_and_says_hello_again():
    config = TransportConfig(ack_timeout=0.1)
    async with receiving(Inbox(), config) as (receiver, endpoint), raw_dealer(endpoint) as silent:
        await silent.send(HELLO)
        await until(lambda: receiver.sender_count == 1)
        await until(lambda: receiver.sender_count == 0)
        await silent.send(*delivered("t1", 0, 10, b"x"))
        assert await silent.answer() == control_messages.Refusal("session", "unknown session: say HELLO", final=False)
    assert receiver.rejected == 0


class FullWorld(RealWorld):
    """A world that has no descriptor for a dealer after the first, for `times` times."""

    def __init__(self, times: int):
        self.times = times
        self.connected = self.refused = 0

    def open_sockets(self) -> Any:
        sockets = super().open_sockets()

        def connect_dealer(*args: Any, **options: Any) -> Any:
            if self.connected and self.refused < self.times:
                self.refused += 1
                raise OSError(errno.EMFILE, "Too many open files")
            self.connected += 1
            return sockets.connect_dealer(*args, **options)

        return SimpleNamespace(connect_dealer=connect_dealer, close=sockets.close)


async def test_a_sender_that_lacks_descriptors_when_it_connects_again_tries_until_it_has_one(caplog):
    inbox, port, config, world = Inbox(), free_port(), TransportConfig(ack_timeout=0.2), FullWorld(5)
    async with sending(f"tcp://127.0.0.1:{port}", config, world=world) as sender:
        sending_one = asyncio.create_task(sender.send(make_trajectory(1)))
        await until(lambda: world.refused == 5)  # nobody answers, so it connects again
        async with receiving(inbox, config, port=port):
            await asyncio.wait_for(sending_one, LIMIT)
            assert await sender.flush(LIMIT) == 0
    assert inbox.once({"t1"})
    assert "Too many open files" in caplog.text


SENDER = """
import asyncio, sys
from tests.helpers.transport import CLIENT_KEYS, FAST, TrajectorySender, make_trajectory

async def main(endpoint, count):
    sender = TrajectorySender(endpoint, "g0", "run", FAST, keys=CLIENT_KEYS)
    await sender.start()
    for index in range(int(count)):
        await sender.send(make_trajectory(index))
        await asyncio.sleep(0.003)
    assert await sender.flush(20) == 0
    await sender.close()

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.contextmanager
def process(code: str, *args: Any):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    child = subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=root, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.wait(LIMIT)


async def test_sender_process_is_killed_and_restarted():
    """The work it had not finished is done again, under the same ids."""
    inbox = Inbox()
    async with receiving(inbox) as (receiver, endpoint):
        for goal in (20, 60):
            with process(SENDER, endpoint, 100) as child:
                await until(lambda: len(inbox.seen) >= goal)  # noqa: B023
                os.kill(child.pid, signal.SIGKILL)
        with process(SENDER, endpoint, 100) as child:
            await until(lambda: child.poll() is not None, 20)
            assert child.returncode == 0
        assert inbox.once({f"t{i}" for i in range(100)})
        assert receiver.duplicates >= 80
        assert receiver.unreleased_bytes == 0


FLOODED = """
import asyncio, subprocess, sys, time
from r3async.config import TransportConfig
from r3async.transport import TrajectoryReceiver
from tests.helpers.transport import SERVER_KEYS

FLOOD = '''
import sys, zmq
from r3async.world.zmq_sockets import apply_client_keys
from tests.helpers.transport import CLIENT_KEYS
dealer = zmq.Context().socket(zmq.DEALER)
dealer.linger, dealer.sndhwm = 0, 0
apply_client_keys(dealer, CLIENT_KEYS)
dealer.connect(sys.argv[1])
dealer.send(b"first")
dealer.recv()
for _ in range(60000):
    dealer.send(b"x" * 400)
dealer.poll(400)
'''

async def main():
    receiver = TrajectoryReceiver("run", TransportConfig(ack_timeout=0.2), keys=SERVER_KEYS)
    child = subprocess.Popen([sys.executable, "-c", FLOOD, await receiver.start()])
    while not receiver.rejected:
        await asyncio.sleep(0.01)
    read = receiver.rejected
    time.sleep(1.5)  # The event loop does not read: the queue fills, the peer leaves, timers run.
    child.wait(120)
    assert receiver.rejected == read
    await asyncio.sleep(0.3)
    assert receiver.rejected > read + 10
    await receiver.close()

asyncio.run(main())
"""


async def test_a_flood_while_the_event_loop_is_busy_does_not_abort_the_process():
    with process(FLOODED) as child:
        await until(lambda: child.poll() is not None, 20)
        assert child.returncode == 0
