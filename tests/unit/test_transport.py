"""Delivery over real sockets: at least once, accepted once, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from r3async.config import TransportConfig
from r3async.data.records import SCHEMA, Column, Trajectory
from r3async.transport import Receiver, Refuse, Sender, TransportError, TransportRefused, WireError, wire
from r3async.transport import intake as intake_module
from r3async.transport import sender as sender_module
from r3async.world.real import RealWorld
from tests.helpers.transport import (
    CLIENT_KEYS,
    FAST,
    HELLO,
    LIMIT,
    SERVER_KEYS,
    SLOW,
    Inbox,
    free_port,
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
        await send_all(sender, sent)
        assert await sender.flush(LIMIT) == 0
        assert sorted(inbox.trajectories, key=lambda t: t.trajectory_id) == sent
        assert (sender.sent, sender.acked, sender.resent, sender.reconnects) == (5, 5, 0, 0)
        assert (receiver.received, receiver.duplicates, receiver.rejected, receiver.bytes_held) == (5, 0, 0, 0)
        assert receiver.bytes_received == sum(map(wire_size, sent))
        assert sender.epoch == receiver.epoch


async def test_many_senders_share_the_memory_and_all_is_delivered():
    groups = {f"g{g}": [make_trajectory(f"{g}-{i}", 200, group=g) for i in range(40)] for g in range(4)}
    size = memory_size(groups["g0"][0])
    config = TransportConfig(ack_timeout=0.3, credit_bytes=3 * size + 100)
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
        assert receiver.senders == 4
        assert receiver.bytes_held == 0


@pytest.mark.parametrize("at_once", [40, 160])
async def test_a_trajectory_crosses_the_wire_once_and_nothing_is_said_before(monkeypatch, at_once):
    said: Counter[str] = Counter()
    say, answer = Sender._say, Receiver._send

    def count(self: Sender, message: wire.Message, *args: Any) -> bool:
        said[type(message).__name__] += 1
        return say(self, message, *args)

    def count_answer(self: Receiver, identity: bytes, message: wire.Message) -> None:
        said[type(message).__name__] += 1
        answer(self, identity, message)

    monkeypatch.setattr(Sender, "_say", count)
    monkeypatch.setattr(Receiver, "_send", count_answer)
    trajectories = [make_trajectory(i) for i in range(160)]
    inbox = Inbox()
    async with receiving(inbox, SLOW) as (_, endpoint), sending(endpoint, SLOW) as sender:
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(send_all(sender, trajectories[i::at_once]) for i in range(at_once)))
        assert await sender.flush(LIMIT) == 0
    assert inbox.once({f"t{i}" for i in range(160)})
    assert said.pop("Ack") <= 160
    assert said == {"Hello": 1, "Welcome": 1, "Deliver": 160}


class LateWorld(RealWorld):
    """Its clock is `late[0]` seconds ahead."""

    def __init__(self, late: list[float]):
        self.clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], time=time.time)


async def test_a_receiver_that_was_busy_does_not_blame_its_senders():
    late = [0.0]
    config = TransportConfig(ack_timeout=3)
    inbox = Inbox()
    async with (
        receiving(inbox, config, world=LateWorld(late)) as (receiver, endpoint),
        sending(endpoint, config) as sender,
    ):
        await send_all(sender, [make_trajectory(1)])
        assert await sender.flush(LIMIT) == 0
        late[0] = 1000.0
        await asyncio.sleep(1)  # One heartbeat.
        await send_all(sender, [make_trajectory(2)])
        assert await sender.flush(LIMIT) == 0
        assert receiver.senders == 1
        assert sender.reconnects == 0


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
        ledger = first.ledger if restored else None
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
        assert receiver.duplicates >= 2
        assert sender.resent >= 2
        assert sender.reconnects >= 1
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

    trajectories = [make_trajectory(i) for i in range(90)]
    config = TransportConfig(ack_timeout=0.15, credit_bytes=4 * memory_size(trajectories[0]))
    inbox = Inbox(hold=True)

    async def consume(receiver: Receiver) -> None:
        while True:
            await asyncio.sleep(0.02)
            for trajectory in inbox.trajectories[-3:]:
                receiver.release(trajectory.trajectory_id)

    async with receiving(inbox, config, Lossy, window=0) as (receiver, endpoint), sending(endpoint, config) as sender:
        consuming = asyncio.create_task(consume(receiver))
        await asyncio.wait_for(send_all(sender, trajectories), 4 * LIMIT)
        assert await sender.flush(4 * LIMIT) == 0
        consuming.cancel()
        for trajectory in trajectories:
            receiver.release(trajectory.trajectory_id)
        assert inbox.once({t.trajectory_id for t in trajectories})
        assert lost["Ack"]
        assert lost["Reject"]
        assert lost["Welcome"]
        assert receiver.bytes_held == 0


async def test_back_pressure():
    """What does not fit is sent back, and nothing more is sent until it would."""
    size = memory_size(make_trajectory(10))
    config = TransportConfig(ack_timeout=SLOW.ack_timeout, credit_bytes=3 * size + size // 2)
    inbox = Inbox(hold=True)
    async with receiving(inbox, config, window=0) as (receiver, endpoint), sending(endpoint, config) as sender:
        for i in range(4):
            await asyncio.wait_for(sender.send(make_trajectory(10 + i)), LIMIT)
        await until(lambda: len(inbox.seen) == 3 and sender.unacknowledged == 1)
        fifth = asyncio.create_task(sender.send(make_trajectory(14)))
        await asyncio.sleep(0.5)
        assert not fifth.done()
        assert receiver.bytes_held == 3 * size
        assert (sender.sent, sender.unacknowledged, sender.reconnects) == (4, 2, 0)

        receiver.release("t10")
        receiver.release("t10")  # Twice is once.
        await until(fifth.done)
        await until(lambda: len(inbox.seen) == 4)
        await asyncio.sleep(0.2)
        assert sender.unacknowledged == 1
        receiver.forget(11 // 4)  # t11 is the last one of group 2 that is held.
        await until(lambda: len(inbox.seen) == 5)
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({f"t{10 + i}" for i in range(5)})
        assert receiver.bytes_held == 3 * size
        assert sender.sent == 4 + 3


async def test_the_groups_of_the_next_step_are_sent_while_nothing_else_is():
    size = memory_size(make_trajectory(0))
    config = TransportConfig(ack_timeout=SLOW.ack_timeout, credit_bytes=size)
    inbox = Inbox(hold=True)
    async with (
        receiving(inbox, config, window=2) as (receiver, endpoint),
        sending(endpoint, config) as sender,
        sending(endpoint, config, "g1") as other,
    ):
        await send_all(sender, [make_trajectory(i, group=i) for i in (5, 6)])
        await until(lambda: sender.unacknowledged == 1 and not sender._outbox.in_flight)
        waiting = [asyncio.create_task(s.send(make_trajectory(i, group=i))) for s, i in ((sender, 3), (other, 2))]
        await send_all(sender, [make_trajectory(0, group=0)])
        await send_all(other, [make_trajectory(1, group=1)])
        await until(lambda: len(inbox.seen) == 3)
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        receiver.forget(0)  # the next step may wait for groups 1 and 2
        await asyncio.wait_for(waiting[1], LIMIT)
        await until(lambda: "t2" in inbox.seen)
        assert not waiting[0].done()
        receiver.forget(1)
        await asyncio.wait_for(waiting[0], LIMIT)
        await until(lambda: "t3" in inbox.seen)
        assert "t6" not in inbox.seen


async def test_a_message_larger_than_the_memory_passes_alone():
    small, large = make_trajectory(0), make_trajectory(1, 5000)
    config = TransportConfig(ack_timeout=0.3, credit_bytes=2 * memory_size(small))
    assert memory_size(large) > config.credit_bytes
    inbox = Inbox(hold=True)
    async with receiving(inbox, config, window=0) as (receiver, endpoint), sending(endpoint, config) as sender:
        await send_all(sender, [small, large])
        await until(lambda: sender.sent == 2 and not sender._outbox.in_flight)
        after = asyncio.create_task(sender.send(make_trajectory(2)))
        await asyncio.sleep(0.5)
        # The last one would fit, but must not starve the large one.
        assert not after.done()
        receiver.release("t0")
        await until(lambda: "t1" in inbox.seen)
        await asyncio.sleep(0.3)
        assert "t2" not in inbox.seen
        receiver.release("t1")
        await until(lambda: "t2" in inbox.seen)
        await asyncio.wait_for(after, LIMIT)


async def test_no_more_is_in_flight_than_may_be_at_once():
    class Slow(Receiver):
        """Does not answer, until it is told to."""

        silent = True

        def _send(self, identity: bytes, message: wire.Message) -> None:
            if not (self.silent and isinstance(message, wire.Ack)):
                super()._send(identity, message)

    size = memory_size(make_trajectory(0))
    config = TransportConfig(ack_timeout=0.5, credit_bytes=6 * size)
    inbox = Inbox()
    async with receiving(inbox, config, Slow) as (receiver, endpoint), sending(endpoint, config) as sender:
        feed = asyncio.create_task(send_all(sender, [make_trajectory(i) for i in range(10)]))
        await until(lambda: sender.sent)
        await asyncio.sleep(0.2)
        assert sender.sent == 3  # half of the memory
        receiver.silent = False
        await asyncio.wait_for(feed, LIMIT)
        assert await sender.flush(LIMIT) == 0
    assert inbox.once({f"t{i}" for i in range(10)})


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
        # A peer with other settings is refused.
        async with raw_dealer(endpoint) as peer:
            await peer.send(HELLO)
            await peer.send(wire.Deliver("session", "big", 0, 2001), b"x")
            assert await peer.answer() == wire.Reject("big", "2001 bytes, more than 2000")
        assert receiver.rejected == 1


async def test_cancelled_send_is_not_sent():
    size = memory_size(make_trajectory(1))
    config = TransportConfig(ack_timeout=SLOW.ack_timeout, credit_bytes=size + 10)
    inbox = Inbox(hold=True)
    async with receiving(inbox, config, window=0) as (receiver, endpoint), sending(endpoint, config) as sender:
        await send_all(sender, [make_trajectory(0), make_trajectory(1)])
        await until(lambda: sender.sent == 2 and not sender._outbox.in_flight)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sender.send(make_trajectory(2)), 0.3)
        assert sender.unacknowledged == 1  # that was sent once: it may be accepted
        receiver.release("t0")
        assert await sender.flush(LIMIT) == 0
        receiver.release("t1")
        await send_all(sender, [make_trajectory(2)])  # A second try is a new one.
        assert await sender.flush(LIMIT) == 0
        assert inbox.once({"t0", "t1", "t2"})


async def test_the_same_trajectory_twice_at_once_is_an_error():
    config = TransportConfig(credit_bytes=1)
    inbox = Inbox(hold=True)
    async with receiving(inbox, config, window=0) as (_, endpoint), sending(endpoint, config) as sender:
        await asyncio.wait_for(sender.send(make_trajectory(0)), LIMIT)
        await until(lambda: "t0" in inbox.seen)
        await asyncio.wait_for(sender.send(make_trajectory(3)), LIMIT)  # which does not fit
        await until(lambda: not sender._outbox.in_flight)
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
                await send_all(sender, [make_trajectory(1, group=5)])
                assert await sender.flush(LIMIT) == 0
        assert receiver.received == 1
        receiver.forget(5)
        async with sending(endpoint, name="g2") as sender:
            await send_all(sender, [make_trajectory(1, group=5), make_trajectory(2, group=5)])
            assert await sender.flush(LIMIT) == 0
        assert receiver.received == 1
        assert receiver.duplicates >= 3  # more, where an acknowledgement was late
        assert inbox.once({"t1"})


async def test_a_sender_that_is_silent_is_forgotten_and_says_hello_again():
    config = TransportConfig(ack_timeout=0.1)
    async with receiving(Inbox(), config) as (receiver, endpoint), raw_dealer(endpoint) as silent:
        await silent.send(HELLO)
        await until(lambda: receiver.senders == 1)
        await until(lambda: receiver.senders == 0)
        await silent.send(wire.Deliver("session", "t1", 0, 10), b"x")
        assert await silent.answer() == wire.Refusal("session", "unknown session: say HELLO", final=False)
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
    receiver = Receiver("run", FAST, take, keys=SERVER_KEYS, on_reject=lambda *args: told.append(args))
    async with sending(await receiver.start(), on_reject=lambda t, why: heard.append((t, why))) as sender:
        await send_all(sender, [make_trajectory(i) for i in range(4)])
        assert await sender.flush(LIMIT) == 0
        await receiver.close()
    assert taken == ["t0", "t3"]
    assert told == [("t1", "expert id 9 of 8"), ("t2", "the learner failed to take it: KeyError: 'oops'")]
    assert heard == [(make_trajectory(int(name[1:])), why) for name, why in told]  # whole, as it was sent
    assert (receiver.received, receiver.rejected, sender.rejected, sender.acked) == (2, 2, 2, 2)
    assert receiver.bytes_held == 2 * memory_size(make_trajectory(0))
    assert (0, "t1") not in receiver.ledger
    assert "KeyError" in caplog.text


async def test_malformed_messages():
    frames = [bytes(f) for f in wire.encode_trajectory(make_trajectory(1))]
    size = sum(map(len, frames))
    nan = make_trajectory(2)
    payloads = {
        "checksum": [frames[0], bytes(len(frames[1])), *frames[2:]],
        "malformed header": [frames[0][:-1], *frames[1:]],
        f"only {len(frames) - 2} column frames": frames[:-1],
        "the payload is trajectory 't1' of 0": frames,
        "at least a header": [],
        f"and {size} were announced": [*frames, b"more"],
    }
    inbox = Inbox()
    async with receiving(inbox) as (receiver, endpoint):
        async with raw_dealer(endpoint) as peer:
            garbage = [(b"",), (b"", b"x"), (b"\xc1\x00",), (b"\x91" * 60_000,), (b"x" * 100_000,), tuple([b"y"] * 50)]
            for n, bad in enumerate([*garbage, (wire.Ack(["t"]),), (wire.Reject("t", "why"),)], 1):
                await peer.send(*bad)
                answer = await peer.answer()
                assert isinstance(answer, wire.Reject)
                assert answer.trajectory_id == ""
                assert answer.reason
                assert receiver.rejected == n
            await peer.send(wire.Deliver("session", "x", 0, size), *frames)
            assert await peer.answer() == wire.Refusal("session", "unknown session: say HELLO", False)
            await peer.send(HELLO)
            for n, (reason, payload) in enumerate(payloads.items()):
                await peer.send(wire.Deliver("session", f"x{n}", 0, size), *payload)
                answer = await peer.answer()
                assert isinstance(answer, wire.Reject)
                assert answer.trajectory_id == f"x{n}"
                assert answer.again == ("never" if reason.endswith("announced") else "damaged")
                assert reason in answer.reason
            # An old session's leftovers are neither taken nor answered.
            await peer.send(wire.Deliver("before", "x", 0, size), *frames)
            assert await peer.answer(0.3) is None
        assert receiver.rejected == len(garbage) + 2 + 1
        assert receiver.damaged == len(payloads) - 1
        assert receiver.bytes_held == 0
        async with sending(endpoint) as sender:
            await send_all(sender, [nan])
            assert await sender.flush(LIMIT) == 0
    assert inbox.once({"t2"})


async def test_a_stranger_is_refused_for_good():
    inbox = Inbox()
    other = SCHEMA.with_column(Column("entropy", ("float32",), 0.0, optional=True)).fingerprint
    async with receiving(inbox) as (receiver, endpoint):
        async with sending(endpoint, run_id="yesterday") as sender:
            with pytest.raises(TransportRefused, match="'g0': run 'yesterday' is not the run of this learner"):
                await asyncio.wait_for(sender.send(make_trajectory(1)), LIMIT)
            with pytest.raises(TransportRefused, match="yesterday"):
                await sender.flush(LIMIT)
            await asyncio.sleep(1)
            assert sender.reconnects == 0
        async with raw_dealer(endpoint) as peer:
            await peer.send(wire.Hello("s", "raw", "run", other))
            answer = await peer.answer()
            assert answer.final
            assert f"token schema '{other}'" in answer.reason
            assert "the columns differ" in answer.reason
            await peer.send(wire.Hello("s", "raw", "run", SCHEMA.fingerprint, wire=wire.WIRE_VERSION - 1))
            answer = await peer.answer()
            assert answer.final
            assert f"wire version {wire.WIRE_VERSION - 1}, the learner has {wire.WIRE_VERSION}" in answer.reason
        assert receiver.rejected == 3
        assert receiver.senders == 0
    assert not inbox.seen


async def test_bad_addresses_and_bad_trajectories_are_clear_errors():
    with pytest.raises(TransportError, match="cannot connect to 'nowhere'"):
        await Sender("nowhere", "g0", "run", FAST, keys=CLIENT_KEYS).start()
    inbox = Inbox()
    async with receiving(inbox) as (_, endpoint), sending(endpoint) as sender:
        port = int(endpoint.rsplit(":", 1)[1])
        with pytest.raises(TransportError, match=r"cannot listen on .*Address already in use"):
            await Receiver("run", FAST, inbox, keys=SERVER_KEYS, port=port).start()
        with pytest.raises(WireError, match="100 characters"):
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

    spy(sender_module, "encode_trajectory", "encode")
    spy(intake_module, "decode_trajectory", "decode")
    inbox = Inbox()
    async with receiving(inbox) as (_, endpoint), sending(endpoint) as sender:
        await send_all(sender, [make_trajectory(0, 10), make_trajectory(1, 20_000)])
        assert await sender.flush(LIMIT) == 0
    assert here == {"encode": [True, False], "decode": [True, False]}


async def test_many_episodes_that_end_at_once_do_not_hold_up_the_event_loop_together(monkeypatch):
    """Each encodes for half a millisecond, on the loop; others have their turn in between."""
    encode = sender_module.encode_trajectory
    turns: list[int] = []
    encoded = 0

    def slow(*args: Any) -> Any:
        nonlocal encoded
        encoded += 1
        end = time.perf_counter() + 0.0005
        while time.perf_counter() < end:
            pass
        return encode(*args)

    async def watch() -> None:
        while True:
            turns.append(encoded)
            await asyncio.sleep(0)

    monkeypatch.setattr(sender_module, "encode_trajectory", slow)
    inbox = Inbox()
    async with receiving(inbox, SLOW) as (_, endpoint), sending(endpoint, SLOW) as sender:
        watching = asyncio.create_task(watch())
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(sender.send(make_trajectory(i)) for i in range(100)))
        watching.cancel()
        assert max(b - a for a, b in itertools.pairwise(turns)) <= 10
        assert await sender.flush(LIMIT) == 0
