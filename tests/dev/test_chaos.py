"""The parts of `python -m dev chaos`, and delivery over a bad way: what is held up or damaged arrives once, as it was sent."""

import asyncio
import contextlib
import random
import socket
import threading

import pytest

from dev.chaos.accounting import (
    AcknowledgedRecord,
    LineageStart,
    RunRestart,
    SentRecord,
    check_content,
    check_durable,
    check_lineages,
    check_trained,
)
from dev.chaos.crowd import StrangerCrowd
from dev.chaos.relay import MessageRelay, NoiseRates, TcpProxy, flip_bit
from r3async.data import wire
from r3async.record.trained_trajectories import TrainedStep
from tests.helpers.transport import CLIENT_KEYS, FAST, LIMIT, Inbox, make_trajectory, receiving, send_all, sending


@contextlib.contextmanager
def relayed(endpoint, noise, note=lambda direction, frames: None):
    relay = MessageRelay(endpoint, noise, random.Random(noise.seed), note, keys=CLIENT_KEYS)
    relay.start()
    try:
        yield relay
    finally:
        relay.close()
        assert not relay.is_alive()


@pytest.mark.parametrize("seed", range(3))
async def test_all_arrive_once_and_as_they_were_sent_over_a_way_that_delays_and_damages(seed):
    sent = [make_trajectory(i, length=200 + i) for i in range(60)]
    inbox = Inbox()
    async with receiving(inbox) as (receiver, endpoint):
        with relayed(endpoint, NoiseRates(seed=seed, delay=0.1, max_delay=0.05, damage=0.1)) as relay:
            refused: list[tuple[str, str]] = []
            async with sending(
                relay.endpoint,
                keys=relay.sender_keys,
                on_reject=lambda t, why: refused.append((t.trajectory_id, why)),
            ) as sender:
                await asyncio.wait_for(send_all(sender, sent), 120)
                assert await sender.flush(60) == 0
            assert refused == []
            assert relay.damaged
            assert relay.delayed
        assert receiver.rejected - receiver.damaged <= relay.damaged  # control messages, each with a reason
    assert inbox.seen == {t.trajectory_id: 1 for t in sent}
    assert sorted(inbox.trajectories, key=lambda t: t.group_index * 100 + int(t.trajectory_id[1:])) == sent


async def test_a_trajectory_that_is_damaged_each_time_is_given_up_with_the_reason():
    refused: list[tuple[str, str]] = []
    inbox = Inbox()
    async with receiving(inbox, FAST) as (receiver, endpoint):
        async with sending(endpoint, on_reject=lambda t, why: refused.append((t.trajectory_id, why))) as sender:
            encode = wire.encode_trajectory

            def wrong(trajectory, **options):
                return flip_bit(random.Random(0), [bytes(f) for f in encode(trajectory, **options)])

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("r3async.transport.encoding_queue.encode_trajectory", wrong)
                await asyncio.wait_for(sender.send(make_trajectory(0)), LIMIT)
            assert await sender.flush(LIMIT) == 0
            assert (sender.damaged, sender.rejected, receiver.damaged) == (7, 1, 8)
    assert not inbox.trajectories
    ((name, why),) = refused
    assert name == "t0"
    assert why


def test_a_line_passes_bytes_both_ways_and_none_while_it_is_blocked():
    blocked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = TcpProxy(f"tcp://127.0.0.1:{server.getsockname()[1]}", blocked.is_set)
        line.start()
        host, _, port = line.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), LIMIT) as near, server.accept()[0] as far:
            near.sendall(b"there")
            assert far.recv(100) == b"there"
            blocked.set()
            far.sendall(b"back")
            near.settimeout(0.2)
            with pytest.raises(TimeoutError):
                near.recv(100)
            blocked.clear()
            near.settimeout(LIMIT)
            assert near.recv(100) == b"back"
            far.close()
            assert near.recv(100) == b"", "one end's end is the other's"
        line.close()
        line.join(LIMIT)


def test_a_line_tries_again_and_then_gives_up_where_its_target_takes_no_connection(monkeypatch):
    """The kernel alone would try for two minutes, each time after twice as long, and a dealer behind it could not."""
    monkeypatch.setattr("dev.chaos.relay.CONNECT_MS", 50)
    monkeypatch.setattr("dev.chaos.relay.HANDSHAKE_TIMEOUT_MS", 200)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # its queue is full
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        line = TcpProxy(f"tcp://127.0.0.1:{server.getsockname()[1]}", lambda: False)
        line.start()
        stack.callback(line.close)
        host, port = line.endpoint.removeprefix("tcp://").split(":")
        near = stack.enter_context(socket.create_connection((host, int(port)), timeout=240))
        assert near.recv(1) == b""


def test_a_crowd_comes_back_when_it_is_turned_out_and_counts():
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        crowd = StrangerCrowd(4, [server.getsockname()])
        guests = [server.accept()[0] for _ in range(4)]
        for guest in guests:
            guest.sendall(b"who are you?")
        while crowd.counts.most < 4:
            crowd.handle_events(LIMIT)
        guests.pop().close()
        while crowd.counts.turned_out < 1:
            crowd.handle_events(LIMIT)
        server.settimeout(LIMIT)
        guests.append(server.accept()[0])
        assert (crowd.counts.tried, crowd.counts.let_in, crowd.counts.turned_out, crowd.counts.most) == (5, 4, 1, 4)
        for guest in guests:
            guest.close()


# -- the accounting ----------------------------------------------------------------------------------------------------


def step(number, *groups, samples=2, crc=7):
    names = [f"g{g}e{e}" for g in groups for e in range(samples)]
    return TrainedStep(number, number - 1, list(groups), names, [crc] * len(names))


def test_the_accounting_of_a_run_that_trained_everything_once_finds_no_problem():
    assert check_trained([step(1, 0, 1), step(2, 3, 2)], 2, 2, 2) == []


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([step(1, 0, 1)], "steps are not 1 to 2"),
        ([step(1, 0, 1), step(1, 2, 3)], "steps are not 1 to 2"),
        ([step(1, 0, 1), step(2, 1, 2)], "group 1 was trained 2 times"),
        ([step(1, 0, 1), step(2, 1, 2)], "groups [3] were never trained"),
        ([step(1, 0, 1), step(2, 1, 2)], "trajectory g1e0 was trained 2 times"),
        ([step(1, 0, 1), step(2, 2, 3, samples=1)], "step 2 trained 2 trajectories of 2 groups of 2"),
    ],
)
def test_what_is_missing_or_there_twice_is_found(steps, problem):
    assert any(problem in found for found in check_trained(steps, 2, 2, 2))


def sent(at, play, name="g0e0", group=0, newest=3, crc=7, began=None):
    return SentRecord(at, name, group, play, newest, crc, began)


def test_what_was_trained_must_be_what_was_sent():
    passed = [sent(1.0, "a", "g0e0"), sent(1.0, "a", "g0e1", crc=8)]
    assert check_content([step(1, 0)], passed) == ["trajectory g0e1 was trained with other tokens than were sent"]
    assert check_content([step(1, 0)], passed[:1]) == ["trajectory g0e1 was never sent"]
    assert check_content([step(1, 0)], [passed[0], sent(1.0, "a", "g0e1")]) == []


ACKNOWLEDGED = [sent(1, "a"), AcknowledgedRecord(2, ["g0e0"])]
AGAIN = [*ACKNOWLEDGED, sent(3, "b")]
BESIDE = [*ACKNOWLEDGED, sent(3, "b", began=1.5)]
"""Two play it, one was silent."""


@pytest.mark.parametrize(
    ("passed", "resumed", "lost"),
    [
        ([sent(1, "a"), sent(2, "b")], [], False),  # never acknowledged
        ([*ACKNOWLEDGED, sent(3, "a")], [], False),  # its answer was lost
        (AGAIN, [], True),
        (AGAIN, [RunRestart(2.5, 3, 4)], True),
        (AGAIN, [RunRestart(1.5, 2, 4)], True),  # before it
        (AGAIN, [RunRestart(2.5, 2, 4)], False),  # its weights are gone
        ([sent(1, "a", group=4), *AGAIN[1:]], [RunRestart(2.5, 3, 4)], False),  # its slot is
        ([sent(1, "a"), sent(2, "b"), AcknowledgedRecord(3, ["g0e0"]), sent(4, "c")], [], True),
        (BESIDE, [], False),
        ([*BESIDE, sent(4, "c", began=3.5)], [], True),
    ],
)
def test_what_was_acknowledged_and_played_again_is_found(passed, resumed, lost):
    assert bool(check_durable(passed, resumed)) is lost


# -- lineages ----------------------------------------------------------------------------------------------------------

BEGAN = [LineageStart(1, 0, 0), LineageStart(2, 1, 2), LineageStart(3, 1, 2)]
"""Two losses after a checkpoint of version 2."""


def of(number, lineage, tokens):
    """A step of `lineage`, on tokens of so many (lineage, version)."""
    lineages, newest = zip(*tokens, strict=True)
    names = [f"g{number}e{i}" for i in range(len(tokens))]
    return TrainedStep(number, number - 1, [number], names, [7] * len(names), lineage, list(lineages), list(newest))


FIRST_STEPS = [of(1, 1, [(1, 0), (1, -1)]), of(2, 1, [(1, 0), (1, 1)])]


def test_tokens_of_weights_that_led_to_the_learners_are_right_by_any_of_their_names():
    steps = [*FIRST_STEPS, of(3, 3, [(1, 1), (1, 2), (2, 2), (3, 2)]), of(4, 3, [(3, 3), (9, -1)])]
    assert check_lineages(steps, BEGAN) == []


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([*FIRST_STEPS, of(3, 3, [(3, 2)]), of(4, 3, [(1, 3)])], "sampled by version 3 of lineage 1"),
        ([*FIRST_STEPS, of(3, 3, [(3, 2)]), of(4, 3, [(2, 3)])], "sampled by version 3 of lineage 2"),
        ([*FIRST_STEPS, of(3, 3, [(0, 2)])], "sampled by version 2 of lineage 0"),
        ([*FIRST_STEPS, of(3, 1, [(1, 2)]), of(4, 3, [(1, 2)])], "changed version 3 of lineage 3"),
    ],
)
def test_tokens_of_weights_that_were_taken_back_are_found(steps, problem):
    assert any(problem in found for found in check_lineages(steps, BEGAN))
