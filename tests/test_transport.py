"""Delivery over real sockets: at least once, accepted once, within bounds, through whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import TransportConfig
from r3async.records import SCHEMA, Column, Sample, TokenTable, Trajectory
from r3async.transport import Ledger, Receiver, Refuse, Sender, TransportError, TransportRefused, WireError, wire
from r3async.transport import sender as sender_module
from r3async.transport.credit import CreditPool
from r3async.transport.outbox import Outbox, Pending

FAST = TransportConfig(ack_timeout=0.3)
LIMIT = 10.0
"""Seconds that any wait of a test may take."""


def make_trajectory(
    index: int | str, length: int = 50, *, group: int | None = None, samples: list[Sample] | None = None
) -> Trajectory:
    rng = np.random.default_rng(length)
    table = TokenTable({c.name: c.filled(length, (4, 2)[: len(c.inner)]) for c in SCHEMA.columns.values()})
    table = table.with_columns(token_ids=rng.integers(0, 1000, length, dtype=np.int32))
    group = group if group is not None else int(index) // 4
    return Trajectory(f"t{index}", group, 0, 1, "g0", "eos", [], samples or [Sample("s", table)])


def wire_size(trajectory: Trajectory) -> int:
    return sum(map(len, wire.encode_trajectory(trajectory)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def until(condition: Callable[[], Any], limit: float = LIMIT) -> None:
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Inbox:
    """A consumer that counts what it was given and, unless told to hold, releases it at once."""

    def __init__(self, *, hold: bool = False):
        self.hold = hold
        self.seen: Counter[str] = Counter()
        self.trajectories: list[Trajectory] = []
        self.receiver: Receiver | None = None
        self.highest = 0

    def __call__(self, trajectory: Trajectory, nbytes: int) -> None:
        self.seen[trajectory.trajectory_id] += 1
        self.trajectories.append(trajectory)
        assert self.receiver is not None
        self.highest = max(self.highest, self.receiver.bytes_held)
        if not self.hold:
            self.receiver.release(trajectory.trajectory_id)

    def once(self, names: set[str]) -> bool:
        return self.seen == dict.fromkeys(names, 1)


@contextlib.asynccontextmanager
async def receiving(
    inbox: Inbox, config: TransportConfig = FAST, kind: type[Receiver] = Receiver, run_id: str = "run", **options: Any
) -> AsyncIterator[tuple[Receiver, str]]:
    receiver = inbox.receiver = kind(run_id, config, inbox, **options)
    try:
        yield receiver, await asyncio.wait_for(receiver.start(), LIMIT)
    finally:
        await asyncio.wait_for(receiver.close(), LIMIT)


@contextlib.asynccontextmanager
async def sending(
    endpoint: str, config: TransportConfig = FAST, name: str = "g0", run_id: str = "run", **options: Any
) -> AsyncIterator[Sender]:
    sender = Sender(endpoint, name, run_id, config, **options)
    try:
        await asyncio.wait_for(sender.start(), LIMIT)
        yield sender
    finally:
        await asyncio.wait_for(sender.close(), LIMIT)


async def send_all(sender: Sender, trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        await asyncio.wait_for(sender.send(trajectory), LIMIT)


@contextlib.asynccontextmanager
async def raw_dealer(endpoint: str, name: bytes = b"raw") -> AsyncIterator[Any]:
    """A peer that sends what it likes: `await peer(*frames)`, answers are messages, or None if there is none in time."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.setsockopt(zmq.ROUTING_ID, name)
    dealer.connect(endpoint)

    class Peer:
        async def send(self, *frames: Any) -> None:
            parts = [wire.encode_control(f) if isinstance(f, wire.Control) else f for f in frames]
            await asyncio.wait_for(dealer.send_multipart(parts), LIMIT)

        async def answer(self, timeout: float = LIMIT) -> Any:
            """The next message that is not a heartbeat."""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    while True:
                        message = wire.decode_control((await dealer.recv_multipart())[0])
                        if not isinstance(message, wire.Welcome):
                            return message
            return None

    try:
        yield Peer()
    finally:
        dealer.close()
        context.term()


HELLO = wire.Hello("session", "raw", "run", SCHEMA.fingerprint)


async def test_round_trip():
    sent = [make_trajectory(i, length) for i, length in enumerate([0, 1, 50, 1000, 20_000])]
    inbox = Inbox()
    async with receiving(inbox) as (receiver, endpoint), sending(endpoint) as sender:
        await send_all(sender, sent)
        assert await sender.flush(LIMIT) == 0
        assert sorted(inbox.trajectories, key=lambda t: t.trajectory_id) == sent
        assert (sender.sent, sender.acked, sender.resent, sender.reconnects) == (5, 5, 0, 0)
        assert (receiver.received, receiver.duplicates, receiver.rejected, receiver.bytes_held) == (5, 0, 0, 0)
        assert receiver.bytes_received == sum(map(wire_size, sent))
        assert sender.epoch == receiver.epoch


async def test_many_senders_share_the_credit_and_all_is_delivered():
    groups = {f"g{g}": [make_trajectory(f"{g}-{i}", 200, group=g) for i in range(40)] for g in range(4)}
    size = wire_size(groups["g0"][0])
    config = TransportConfig(ack_timeout=0.3, credit_bytes=3 * size + 100)
    inbox = Inbox()
    async with contextlib.AsyncExitStack() as stack:
        receiver, endpoint = await stack.enter_async_context(receiving(inbox, config))
        senders = [await stack.enter_async_context(sending(endpoint, config, name)) for name in groups]
        async with asyncio.timeout(LIMIT):
            pairs = zip(senders, groups.values(), strict=True)
            await asyncio.gather(*(s.send(t) for s, ts in pairs for t in ts))
            assert [await s.flush(LIMIT) for s in senders] == [0] * 4
        assert inbox.once({t.trajectory_id for ts in groups.values() for t in ts})
        assert inbox.highest <= config.credit_bytes
        assert receiver.senders == 4
        assert receiver._pool.used == 0


async def test_sender_may_come_first():
    port = free_port()
    inbox = Inbox()
    async with sending(f"tcp://127.0.0.1:{port}") as sender:
        task = asyncio.create_task(sender.send(make_trajectory(1)))
        await until(lambda: sender.reconnects)
        async with receiving(inbox, port=port):
            await asyncio.wait_for(task, LIMIT)
            assert await sender.flush(LIMIT) == 0
    assert inbox.once({"t1"})


@pytest.mark.parametrize("restored", [True, False])
async def test_receiver_restarts_on_the_same_port(restored: bool):
    """With its ledger: each once. Without: what was accepted and not acknowledged comes twice, but nothing is lost."""

    class Deaf(Receiver):
        """Accepts, and dies before it can acknowledge."""

        def _send(self, identity: bytes, message: wire.Message) -> None:
            if not isinstance(message, wire.Ack) or self.received < 10:
                super()._send(identity, message)

    port = free_port()
    trajectories = [make_trajectory(i) for i in range(60)]
    inbox = Inbox()
    async with contextlib.AsyncExitStack() as stack:
        async with receiving(inbox, kind=Deaf, port=port) as (first, endpoint):
            sender = await stack.enter_async_context(sending(endpoint))
            feed = asyncio.create_task(send_all(sender, trajectories))
            await until(lambda: first.received >= 20)
        accepted = first.received
        assert sender.unacknowledged >= accepted - 10
        ledger = Ledger.restore(first.ledger.snapshot()) if restored else None
        async with receiving(inbox, port=port, ledger=ledger) as (second, _):
            await asyncio.wait_for(feed, LIMIT)
            assert await sender.flush(LIMIT) == 0
            assert set(inbox.seen) == {t.trajectory_id for t in trajectories}
            assert sender.epoch == second.epoch != first.epoch
            assert sender.resent >= accepted - 10
            if restored:
                assert inbox.once({t.trajectory_id for t in trajectories})
                assert second.duplicates >= accepted - 10
            else:
                assert sum(inbox.seen.values()) >= 60 + accepted - 10


async def test_lost_acknowledgement():
    class Forgetful(Receiver):
        lost = 0

        def _send(self, identity: bytes, message: wire.Message) -> None:
            if isinstance(message, wire.Ack) and self.lost < 2:
                self.lost += 1
            else:
                super()._send(identity, message)

    inbox = Inbox()
    async with receiving(inbox, kind=Forgetful) as (receiver, endpoint), sending(endpoint) as sender:
        await send_all(sender, [make_trajectory(i) for i in range(5)])
        assert await sender.flush(LIMIT) == 0
        assert receiver.duplicates == 2
        assert sender.resent == 2
        assert sender.reconnects == 1
        assert inbox.once({f"t{i}" for i in range(5)})


async def test_any_answer_may_be_lost():
    chance = random.Random(0)
    lost: Counter[str] = Counter()

    class Lossy(Receiver):
        def _send(self, identity: bytes, message: wire.Message) -> None:
            if chance.random() < 0.25:
                lost[type(message).__name__] += 1
            else:
                super()._send(identity, message)

    trajectories = [make_trajectory(i) for i in range(30)]
    config = TransportConfig(ack_timeout=0.15, credit_bytes=4 * wire_size(trajectories[0]))
    inbox = Inbox()
    async with receiving(inbox, config, Lossy) as (receiver, endpoint), sending(endpoint, config) as sender:
        await send_all(sender, trajectories)
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({t.trajectory_id for t in trajectories})
        assert lost["Ack"]
        assert lost["Grant"]
        assert lost["Welcome"]
        assert receiver._pool.used == 0


async def test_back_pressure():
    size = wire_size(make_trajectory(10))
    config = TransportConfig(ack_timeout=0.3, credit_bytes=3 * size + size // 2)
    inbox = Inbox(hold=True)
    async with receiving(inbox, config) as (receiver, endpoint), sending(endpoint, config) as sender:
        sends = [asyncio.create_task(sender.send(make_trajectory(10 + i))) for i in range(5)]
        await until(lambda: sum(t.done() for t in sends) == 3)
        await asyncio.sleep(1)  # Several heartbeats and timeouts: nothing more may move.
        assert [t.done() for t in sends] == [True] * 3 + [False] * 2
        assert receiver.bytes_held == 3 * size
        assert sender.unacknowledged == 2
        assert sender.reconnects == 0

        receiver.release("t10")
        receiver.release("t10")  # Twice is once.
        await until(sends[3].done)
        await asyncio.sleep(0.2)
        assert not sends[4].done()
        receiver.forget(11 // 4)  # t11 is the last one of group 2 that is held.
        await until(sends[4].done)
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({f"t{10 + i}" for i in range(5)})
        assert receiver.bytes_held == 3 * size


async def test_a_message_larger_than_the_credit_passes_alone():
    small, large, after = make_trajectory(0), make_trajectory(1, 5000), make_trajectory(2)
    config = TransportConfig(ack_timeout=0.3, credit_bytes=2 * wire_size(small))
    assert wire_size(large) > config.credit_bytes
    inbox = Inbox(hold=True)
    async with receiving(inbox, config) as (receiver, endpoint), sending(endpoint, config) as sender:
        await asyncio.wait_for(sender.send(small), LIMIT)
        sends = [asyncio.create_task(sender.send(large)), asyncio.create_task(sender.send(after))]
        await asyncio.sleep(0.5)
        # The last one would fit, but must not starve the large one.
        assert [t.done() for t in sends] == [False, False]
        receiver.release("t0")
        await until(sends[0].done)
        await asyncio.sleep(0.3)
        assert not sends[1].done()
        receiver.release("t1")
        await until(sends[1].done)


async def test_message_over_the_limit_is_an_error_of_the_sender():
    config = TransportConfig(max_message_bytes=2000)
    inbox = Inbox()
    async with receiving(inbox, config) as (receiver, endpoint), sending(endpoint, config) as sender:
        with pytest.raises(
            TransportError, match=r"'t1' takes \d+ bytes, more than `transport.max_message_bytes` = 2000"
        ):
            await asyncio.wait_for(sender.send(make_trajectory(1, 5000)), LIMIT)
        await send_all(sender, [make_trajectory(2, 10)])
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({"t2"})
        # A peer with other settings is refused when it asks, before it moves the payload.
        async with raw_dealer(endpoint) as peer:
            await peer.send(HELLO)
            await peer.send(wire.Offer("session", [wire.Parcel("big", 0, 2001)]))
            assert await peer.answer() == wire.Reject("big", "2001 bytes, more than 2000")
        assert receiver.rejected == 1


async def test_cancelled_send_is_not_sent_and_gives_its_credit_back():
    size = wire_size(make_trajectory(1))
    config = TransportConfig(ack_timeout=0.3, credit_bytes=size + 10)
    inbox = Inbox(hold=True)
    async with (
        receiving(inbox, config) as (receiver, endpoint),
        sending(endpoint, config) as sender,
        sending(endpoint, config, "g1") as other,
    ):
        await asyncio.wait_for(sender.send(make_trajectory(0)), LIMIT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sender.send(make_trajectory(1)), 0.3)
        assert sender.unacknowledged == 0
        assert await sender.flush(LIMIT) == 0
        receiver.release("t0")
        await asyncio.wait_for(other.send(make_trajectory(2)), LIMIT)
        assert await other.flush(LIMIT) == 0
        receiver.release("t2")
        await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)  # A second try is a new one.
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({"t0", "t1", "t2"})


async def test_the_same_trajectory_twice_at_once_is_an_error():
    config = TransportConfig(credit_bytes=1)
    inbox = Inbox(hold=True)
    async with receiving(inbox, config) as (_, endpoint), sending(endpoint, config) as sender:
        await asyncio.wait_for(sender.send(make_trajectory(0)), LIMIT)
        task = asyncio.create_task(sender.send(make_trajectory(1)))
        await until(lambda: sender.unacknowledged)
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
                await send_all(sender, [make_trajectory(1, group=5)])
                assert await sender.flush(LIMIT) == 0
        assert (receiver.received, receiver.duplicates) == (1, 1)
        receiver.forget(5)
        async with sending(endpoint, name="g2") as sender:
            await send_all(sender, [make_trajectory(1, group=5), make_trajectory(2, group=5)])
            assert await sender.flush(LIMIT) == 0
        assert (receiver.received, receiver.duplicates) == (1, 3)
        assert inbox.once({"t1"})


async def test_a_sender_that_vanished_does_not_keep_its_credit():
    trajectory = make_trajectory(1)
    config = TransportConfig(ack_timeout=0.1, credit_bytes=wire_size(trajectory))
    inbox = Inbox()
    async with receiving(inbox, config) as (receiver, endpoint), raw_dealer(endpoint) as silent:
        await silent.send(HELLO)
        await silent.send(wire.Offer("session", [wire.Parcel("never", 0, 100)]))
        assert await silent.answer() == wire.Grant("session", ["never"])
        async with sending(endpoint, config) as sender:
            await asyncio.wait_for(sender.send(trajectory), LIMIT)
            assert await sender.flush(LIMIT) == 0
        await silent.send(wire.Offer("session", []))
        answer = await silent.answer()
        assert isinstance(answer, wire.Refusal)
        assert not answer.final
    assert inbox.once({"t1"})
    assert receiver.rejected == 0


async def test_consumer_refuses_and_consumer_fails(caplog):
    taken = []

    def take(trajectory: Trajectory, nbytes: int) -> None:
        if trajectory.trajectory_id == "t1":
            raise Refuse("expert id 9 of 8")
        if trajectory.trajectory_id == "t2":
            raise KeyError("oops")
        taken.append(trajectory.trajectory_id)

    told: list[tuple[str, str]] = []
    heard: list[tuple[str, str]] = []
    receiver = Receiver("run", FAST, take, on_reject=lambda *args: told.append(args))
    async with sending(await receiver.start(), on_reject=lambda *args: heard.append(args)) as sender:
        await send_all(sender, [make_trajectory(i) for i in range(4)])
        assert await sender.flush(LIMIT) == 0
        await receiver.close()
    assert taken == ["t0", "t3"]
    assert heard == told == [("t1", "expert id 9 of 8"), ("t2", "the learner failed to take it: KeyError: 'oops'")]
    assert (receiver.received, receiver.rejected, sender.rejected, sender.acked) == (2, 2, 2, 2)
    assert receiver.bytes_held == 2 * wire_size(make_trajectory(0))
    assert (0, "t1") not in receiver.ledger
    assert "KeyError" in caplog.text


async def test_malformed_messages():
    frames = [bytes(f) for f in wire.encode_trajectory(make_trajectory(1))]
    size = sum(map(len, frames))
    nan = make_trajectory(2)
    payloads = {
        "checksum": [frames[0], bytes(len(frames[1])), *frames[2:]],
        "malformed header": [frames[0][:-1], *frames[1:]],
        "only 8 column frames": frames[:-1],
        "the payload is trajectory 't1' of 0": frames,
        "at least a header": [],
        "bytes were not granted": [*frames, b"more"],
    }
    inbox = Inbox()
    async with receiving(inbox) as (receiver, endpoint):
        async with raw_dealer(endpoint) as peer:
            garbage = [(b"",), (b"", b"x"), (b"\xc1\x00",), (b"\x91" * 60_000,), (b"x" * 100_000,), tuple([b"y"] * 50)]
            for n, bad in enumerate([*garbage, (wire.Ack(["t"]),), (wire.Grant("s", []),)], 1):
                await peer.send(*bad)
                answer = await peer.answer()
                assert isinstance(answer, wire.Reject)
                assert answer.trajectory_id == ""
                assert answer.reason
                assert receiver.rejected == n
            await peer.send(wire.Deliver("session", "x", 0), *frames)
            assert await peer.answer() == wire.Refusal("session", "unknown session: say HELLO", False)
            await peer.send(HELLO)
            await peer.send(wire.Deliver("session", "x", 0), *frames)
            assert await peer.answer() == wire.Reject("x", f"{size} bytes were not granted")
            for n, (reason, payload) in enumerate(payloads.items()):
                await peer.send(wire.Offer("session", [wire.Parcel(f"x{n}", 0, size)]))
                assert await peer.answer() == wire.Grant("session", [f"x{n}"])
                await peer.send(wire.Deliver("session", f"x{n}", 0), *payload)
                answer = await peer.answer()
                assert isinstance(answer, wire.Reject)
                assert answer.trajectory_id == f"x{n}"
                assert reason in answer.reason
            # An old session's leftovers are neither taken nor answered.
            await peer.send(wire.Deliver("before", "x", 0), *frames)
            assert await peer.answer(0.3) is None
        assert receiver.rejected == len(garbage) + 2 + 1 + len(payloads)
        assert receiver._pool.used == 0
        async with sending(endpoint) as sender:
            await send_all(sender, [nan])
            assert await sender.flush(LIMIT) == 0
    assert inbox.once({"t2"})


async def test_a_stranger_is_refused_for_good():
    inbox = Inbox()
    other = SCHEMA.with_column(Column("entropy", ("float32",), 0.0, optional=True))
    async with receiving(inbox) as (receiver, endpoint):
        async with sending(endpoint, run_id="yesterday") as sender:
            with pytest.raises(TransportRefused, match="'g0': run 'yesterday', but this is the learner of run 'run'"):
                await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
            with pytest.raises(TransportRefused, match="yesterday"):
                await sender.flush(LIMIT)
            await asyncio.sleep(1)
            assert sender.reconnects == 0
        async with sending(endpoint, schema=other) as sender:
            sample = Sample("s", TokenTable(dict(make_trajectory(1).samples[0].table.items()), other))
            with pytest.raises(TransportRefused, match="the columns differ"):
                await asyncio.wait_for(sender.send(make_trajectory(1, samples=[sample])), LIMIT)
        async with raw_dealer(endpoint) as peer:
            await peer.send(wire.Hello("s", "raw", "run", SCHEMA.fingerprint, wire=99))
            answer = await peer.answer()
            assert answer.final
            assert "wire version 99" in answer.reason
        assert receiver.rejected == 3
        assert receiver.senders == 0
    assert not inbox.seen


async def test_bad_addresses_and_bad_trajectories_are_clear_errors():
    with pytest.raises(TransportError, match="can not connect to 'nowhere'"):
        await Sender("nowhere", "g0", "run", FAST).start()
    inbox = Inbox()
    async with receiving(inbox) as (_, endpoint), sending(endpoint) as sender:
        port = int(endpoint.rsplit(":", 1)[1])
        with pytest.raises(TransportError, match=r"can not listen on .*Address already in use"):
            await Receiver("run", FAST, inbox, port=port).start()
        with pytest.raises(WireError, match="256 characters"):
            await asyncio.wait_for(sender.send(make_trajectory("x" * 300, group=0)), LIMIT)
        assert sender.unacknowledged == 0


async def test_large_payloads_are_handled_off_the_event_loop(monkeypatch):
    here: dict[str, list[bool]] = {"encode": [], "decode": []}

    def spy(module: Any, name: str, key: str) -> None:
        original = getattr(module, name)

        def call(*args: Any) -> Any:
            here[key].append(threading.current_thread() is threading.main_thread())
            return original(*args)

        monkeypatch.setattr(module, name, call)

    from r3async.transport import receiver as receiver_module

    spy(sender_module, "encode_trajectory", "encode")
    spy(receiver_module, "decode_trajectory", "decode")
    inbox = Inbox()
    async with receiving(inbox) as (_, endpoint), sending(endpoint) as sender:
        await send_all(sender, [make_trajectory(0, 10), make_trajectory(1, 20_000)])
        assert await sender.flush(LIMIT) == 0
    assert here == {"encode": [True, False], "decode": [True, False]}


RECEIVER = """
import asyncio, os, sys, time
from r3async.config import TransportConfig
from r3async.transport import Ledger, Receiver

async def main(path, port):
    ledger = Ledger()
    spool = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for line in os.read(spool, 2**20).decode().split("\\n")[:-1]:
        group, name = line.split()
        ledger.add(int(group), name)

    def take(trajectory, nbytes):
        os.write(spool, f"{trajectory.group_index} {trajectory.trajectory_id}\\n".encode())
        time.sleep(0.002)  # Written, and not acknowledged yet: the moment that a kill should hit.
        receiver.release(trajectory.trajectory_id)

    receiver = Receiver("run", TransportConfig(ack_timeout=0.3), take, port=int(port), ledger=ledger)
    await receiver.start()
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""

SENDER = """
import asyncio, sys
sys.path.insert(0, "tests")
from test_transport import FAST, Sender, make_trajectory

async def main(endpoint, count):
    sender = Sender(endpoint, "g0", "run", FAST)
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
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    child = subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=root, env=environment)
    try:
        yield child
    finally:
        child.kill()
        child.wait(LIMIT)


async def test_receiver_process_is_killed_and_restarted(tmp_path):
    spool = tmp_path / "spool"
    port = free_port()
    count = 400

    def accepted() -> list[str]:
        return [line.split()[1] for line in spool.read_text().splitlines()] if spool.exists() else []

    async with sending(f"tcp://127.0.0.1:{port}") as sender:
        feed = asyncio.gather(*(sender.send(make_trajectory(i)) for i in range(count)))
        for goal in (count // 4, count // 2):
            with process(RECEIVER, spool, port) as child:
                await until(lambda: len(accepted()) >= goal)  # noqa: B023
                os.kill(child.pid, signal.SIGKILL)
        with process(RECEIVER, spool, port):
            await asyncio.wait_for(feed, LIMIT)
            assert await sender.flush(LIMIT) == 0
        assert sender.resent
        assert sender.reconnects
    assert Counter(accepted()) == {f"t{i}": 1 for i in range(count)}


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
        assert receiver._pool.used == 0


FLOODED = """
import asyncio, subprocess, sys, time
from r3async.config import TransportConfig
from r3async.transport import Receiver

FLOOD = '''
import sys, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.linger, dealer.sndhwm = 0, 0
dealer.connect(sys.argv[1])
dealer.send(b"first")
dealer.recv()
for _ in range(60000):
    dealer.send(b"x" * 400)
dealer.poll(400)
'''

async def main():
    receiver = Receiver("run", TransportConfig(ack_timeout=0.2), print)
    child = subprocess.Popen([sys.executable, "-c", FLOOD, await receiver.start()])
    while not receiver.rejected:
        await asyncio.sleep(0.01)
    read = receiver.rejected
    time.sleep(1.5)  # The event loop does not read: the queue fills, the peer leaves, timers run.
    child.wait(5)
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


# The protocol's state, without sockets.


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_credit_pool_keeps_its_bound_and_never_sticks(data):
    pool = CreditPool(100)
    numbers = itertools.count()
    sizes: dict[tuple[bytes, str], int] = {}
    held: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        sender = data.draw(st.sampled_from([b"a", b"b", b"c"]))
        granted = pool.granted(sender)
        action = data.draw(st.sampled_from(["offer", "offer", "arrive", "release", "drop", "withdraw"]))
        if action in ("offer", "withdraw"):
            mine = {m: n for (s, m), n in sizes.items() if s == sender}
            if action == "offer":
                mine[f"m{next(numbers)}"] = data.draw(st.integers(0, 160))
            elif mine:
                mine.pop(data.draw(st.sampled_from(sorted(mine))))
            sizes = {k: n for k, n in sizes.items() if k[0] != sender} | {(sender, m): n for m, n in mine.items()}
            pool.offer(sender, mine)
        elif action == "arrive" and granted:
            assert pool.arrive(sender, granted[0], sizes[sender, granted[0]])
            held[granted[0]] = sizes.pop((sender, granted[0]))
        elif action == "release" and held:
            message = data.draw(st.sampled_from(sorted(held)))
            del held[message]
            pool.release(message)
        elif action == "drop":
            pool.drop(sender)
            sizes = {k: n for k, n in sizes.items() if k[0] != sender}
        pool.grant()
        given_out = [n for (s, m), n in sizes.items() if m in pool.granted(s)]
        assert pool.held == sum(held.values())
        assert pool.reserved == sum(given_out)
        # A message of no bytes may come beside one that passes alone.
        positive = [n for n in [*given_out, *held.values()] if n]
        assert pool.used <= pool.total or len(positive) == 1
        assert pool.used or not set(sizes) - {(s, m) for s, m in sizes if m in pool.granted(s)}


def test_credit_pool_refuses_what_was_not_granted():
    pool = CreditPool(100)
    pool.offer(b"a", {"x": 60, "y": 60})
    assert pool.grant() == [b"a"]
    assert pool.granted(b"a") == ["x"]
    assert not pool.arrive(b"a", "y", 60)
    assert not pool.arrive(b"b", "x", 60)
    assert not pool.arrive(b"a", "x", 61)
    assert pool.used == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(-2, 12), st.sampled_from("xyz")), max_size=40))
def test_ledger_against_sets(steps):
    ledger = Ledger()
    accepted: set[tuple[int, str]] = set()
    over: set[int] = set()
    for forget, group, name in steps:
        if forget:
            assert ledger.forget(group) == {n for g, n in accepted if g == group and group not in over}
            over.add(group)
        else:
            ledger.add(group, name)
            accepted.add((group, name))
        for other in (ledger, Ledger.restore(ledger.snapshot())):
            for g, n in itertools.product(range(-3, 14), "xyz"):
                assert ((g, n) in other) == (g in over or (g, n) in accepted)
    assert len(ledger.snapshot()["forgotten"]) == sum(g - 1 not in over for g in over)


def test_ledger_is_small_after_a_long_run():
    ledger = Ledger()
    for group in range(10_000):
        for episode in range(4):
            ledger.add(group, f"{group}-{episode}")
        ledger.forget(group ^ 1)  # A little out of order, as groups end.
    assert ledger.snapshot() == {"live": [], "forgotten": [[0, 10_000]]}
    assert (17, "17-3") in ledger


def test_outbox_knows_when_an_answer_is_missing():
    outbox = Outbox()
    for name in "abc":
        outbox.add(Pending(wire.Parcel(name, 0, 1), []))
    assert [p.trajectory_id for p in outbox.offers()] == ["a", "b", "c"]
    assert not outbox.overdue(1e9, 1)
    for now, name in enumerate("abc"):
        outbox.mark_sent(name, now)
    assert not outbox.overdue(1.0, 1)
    assert outbox.overdue(1.1, 1)
    outbox.settle("a", 5.0)
    assert not outbox.overdue(5.9, 1)  # Answers come, if slowly.
    outbox.settle("c", 5.5)
    assert outbox.overdue(5.6, 1)  # One that overtook b: b's is lost.
    assert outbox.settle("a", 6.0) is None
    outbox.add(Pending(wire.Parcel("d", 0, 1), []))
    assert outbox.reset() == 1
    assert [p.trajectory_id for p in outbox.offers()] == ["b", "d"]
    outbox.withdraw("b")  # It was sent once, and may be accepted.
    outbox.withdraw("d")
    assert list(outbox.waiting) == ["b"]
