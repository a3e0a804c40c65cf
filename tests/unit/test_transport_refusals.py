"""What is not delivered: what the consumer refuses, what is no message, and who is not let in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from r3async.data import wire
from r3async.data.tokens import SCHEMA, Column, Trajectory
from r3async.data.wire import align_offset
from r3async.transport import (
    RejectionError,
    TrajectoryConsumer,
    TrajectoryReceiver,
    TrajectorySender,
    TransportError,
    WireError,
)
from tests.helpers.transport import (
    CLIENT_KEYS,
    FAST,
    HELLO,
    LIMIT,
    SERVER_KEYS,
    SLOW,
    Inbox,
    deliver_all,
    delivered,
    make_trajectory,
    memory_size,
    raw_dealer,
    receiving,
    sending,
)


async def test_what_validation_refuses_or_fails_on_is_nobody_elses_matter(caplog):
    together = []

    def validate(trajectories: Sequence[Trajectory]) -> dict[int, str]:
        names = [t.trajectory_id for t in trajectories]
        together.append(len(names))
        if "t0" in names:  # large, so this is a thread: the others arrive meanwhile
            time.sleep(0.5)
        if "t2" in names:
            raise KeyError("oops")
        return {at: "not today" for at, name in enumerate(names) if name == "t1"}

    inbox = Inbox(validate=validate)
    heard: list[tuple[str, str]] = []
    async with receiving(inbox, SLOW) as (receiver, endpoint):
        async with sending(endpoint, SLOW, on_reject=lambda t, why: heard.append((t.trajectory_id, why))) as sender:
            await deliver_all(sender, [make_trajectory(i, 50 if i else 20_000) for i in range(20)])
        assert inbox.once({f"t{i}" for i in range(20)} - {"t1", "t2"})
        assert sorted(heard) == [("t1", "not today"), ("t2", "the learner failed to take it: KeyError: 'oops'")]
        assert receiver.received == 18
    assert max(together) > 1


async def test_consumer_refuses_and_consumer_fails(caplog):
    taken = []
    told: list[tuple[str, str]] = []

    class Failing(TrajectoryConsumer):
        def take_trajectory(self, trajectory: Trajectory, nbytes: int) -> None:
            if trajectory.trajectory_id == "t1":
                raise RejectionError("expert id 9 of 8")
            if trajectory.trajectory_id == "t2":
                raise KeyError("oops")
            taken.append(trajectory.trajectory_id)

        def report_rejection(self, trajectory_id: str, reason: str) -> None:
            told.append((trajectory_id, reason))

    heard: list[tuple[str, str]] = []
    receiver = TrajectoryReceiver("run", FAST, Failing(), keys=SERVER_KEYS)
    async with sending(await receiver.start(), on_reject=lambda t, why: heard.append((t, why))) as sender:
        await deliver_all(sender, [make_trajectory(i) for i in range(4)])
        await receiver.close()
    assert taken == ["t0", "t3"]
    assert told == [("t1", "expert id 9 of 8"), ("t2", "the learner failed to take it: KeyError: 'oops'")]
    assert heard == [(make_trajectory(int(name[1:])), why) for name, why in told]  # whole, as it was sent
    assert (receiver.received, receiver.rejected, sender.rejected, sender.acked) == (2, 2, 2, 2)
    assert receiver.unreleased_bytes == 2 * memory_size(make_trajectory(0))
    assert (0, "t1") not in receiver.ledger
    assert "KeyError" in caplog.text


async def test_malformed_messages():
    frames = [bytes(f) for f in wire.encode_trajectory(make_trajectory(1))]
    size = sum(align_offset(len(frame)) for frame in frames)
    nan = make_trajectory(2)
    payloads = {
        "checksum": [frames[0], bytes([frames[1][0] ^ 1]) + frames[1][1:], *frames[2:]],
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
            await peer.send(*delivered("x", 0, size, *frames))
            assert await peer.answer() == wire.Refusal("session", "unknown session: say HELLO", False)
            await peer.send(HELLO)
            for n, (reason, payload) in enumerate(payloads.items()):
                await peer.send(*delivered(f"x{n}", 0, size, *payload))
                answer = await peer.answer()
                assert isinstance(answer, wire.Reject)
                assert answer.trajectory_id == f"x{n}"
                assert answer.again == ("never" if reason.endswith("announced") else "damaged")
                assert reason in answer.reason
            # An old session's leftovers are neither taken nor answered.
            await peer.send(*delivered("x", 0, size, *frames, session="before"))
            assert await peer.answer(0.3) is None
        assert receiver.rejected == len(garbage) + 2 + 1
        assert receiver.damaged == len(payloads) - 1
        assert receiver.unreleased_bytes == 0
        async with sending(endpoint) as sender:
            await deliver_all(sender, [nan])
    assert inbox.once({"t2"})


async def test_another_schema_and_another_version_of_the_wire_are_refused_for_good():
    inbox = Inbox()
    other = SCHEMA.with_column(Column("entropy", ("float32",), 0.0, optional=True)).fingerprint
    async with receiving(inbox) as (receiver, endpoint):
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
        assert receiver.rejected == 2
        assert receiver.sender_count == 0
    assert not inbox.seen


async def test_bad_addresses_and_bad_trajectories_are_clear_errors():
    with pytest.raises(TransportError, match="cannot connect to 'nowhere'"):
        await TrajectorySender("nowhere", "g0", "run", FAST, keys=CLIENT_KEYS).start()
    inbox = Inbox()
    async with receiving(inbox) as (_, endpoint), sending(endpoint) as sender:
        port = int(endpoint.rsplit(":", 1)[1])
        with pytest.raises(TransportError, match=r"cannot listen on .*Address already in use"):
            await TrajectoryReceiver("run", FAST, inbox, keys=SERVER_KEYS, port=port).start()
        with pytest.raises(WireError, match="100 characters"):
            await asyncio.wait_for(sender.send(make_trajectory("x" * 300, group=0)), LIMIT)
        assert sender.unacknowledged == 0
