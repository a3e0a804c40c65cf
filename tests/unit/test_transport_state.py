"""The protocol's state, without sockets."""

import asyncio
import contextlib
import itertools
import pickle
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import TransportConfig
from r3async.data import control_messages, wire
from r3async.transport import TrajectoryLedger, TrajectoryReceiver
from r3async.transport.memory_budget import NO_GROUP_LIMIT, MemoryBudget
from r3async.transport.outbox import MAX_DAMAGED_DELIVERIES, MAX_IN_FLIGHT, Outbox, OutgoingTrajectory
from r3async.transport.receiver import ACK_CREDIT_SHARE, MAX_ACK_IDS
from tests.helpers.transport import LIMIT, SERVER_KEYS, SendersByHand, delivered, make_trajectory, memory_size


@settings(max_examples=400)
@given(
    window=st.integers(1, 3),
    steps=st.integers(1, 5),
    members=st.integers(1, 4),
    total=st.integers(1, 200),
    largest=st.integers(0, 120),
    rng=st.integers(0, 2**32).map(random.Random),
)
def test_the_groups_of_the_next_step_always_arrive_and_memory_is_bounded(window, steps, members, total, largest, rng):
    """Any number of groups, sizes and arrival orders, of senders that heed what they are told or do not; nothing is released but
    by consuming the oldest groups, or to the disk."""
    groups = window * steps
    todo = {(g, e): rng.randint(0, largest) for g in range(groups) for e in range(members)}
    capacity = MemoryBudget(total, window)
    unsent = rng.sample(sorted(todo), len(todo))
    held: dict[tuple[int, int], int] = {}
    arrived: set[tuple[int, int]] = set()
    oldest = 0
    while oldest < groups:
        until = capacity.group_limit()
        assert until == NO_GROUP_LIMIT or until == oldest + window
        if until != NO_GROUP_LIMIT:  # somebody was turned away, and would be again
            assert capacity.reserved_bytes
        wanted = {(g, e) for g in range(oldest, oldest + window) for e in range(members)}
        heeding = [key for key in unsent if key[0] < until]
        actions = ["send"] * bool(heeding) + ["intrude"] * bool(unsent) + ["spill"] * bool(held)
        if wanted <= arrived:
            actions.append("consume")
        assert set(actions) - {"intrude", "spill"}, f"stuck before group {oldest}"
        action = rng.choice(actions)
        if action in ("send", "intrude"):
            key = rng.choice(heeding if action == "send" else unsent)
            before = capacity.reserved_bytes
            fits = not before or before + todo[key] <= total
            assert capacity.try_reserve(f"{key[0]}-{key[1]}", key[0], todo[key]) == (fits or key[0] < oldest + window)
            if fits or key[0] < oldest + window:
                unsent.remove(key)
                arrived.add(key)
                held[key] = todo[key]
            else:
                assert capacity.group_limit() == oldest + window
        elif action == "spill":
            key = rng.choice(sorted(held))
            held[key] = 0
            capacity.set_reserved(f"{key[0]}-{key[1]}", 0)
        else:
            for g, e in wanted:
                capacity.release_trajectory(f"{g}-{e}")
                held.pop((g, e), None)
            oldest += window
            capacity.advance_window(oldest)
        assert capacity.reserved_bytes == sum(held.values())
        waited_for = sum(n for (g, _), n in todo.items() if oldest <= g < oldest + window)
        assert capacity.reserved_bytes <= max(total, *todo.values(), 0) + waited_for
    assert capacity.reserved_bytes == 0


def test_without_the_window_later_groups_hold_all_memory_for_ever():
    """The deadlock that the rule is there for."""
    for window in (0, 1):
        capacity = MemoryBudget(100, window)
        assert capacity.try_reserve("later", 1, 100)
        assert capacity.try_reserve("oldest", 0, 60) is bool(window)


def test_what_does_not_fit_passes_when_it_would_or_alone_and_senders_are_asked_for_the_window_until_then():
    capacity = MemoryBudget(100, 1)
    assert capacity.try_reserve("a", 5, 60)
    assert capacity.group_limit() == NO_GROUP_LIMIT
    assert not capacity.try_reserve("b", 6, 120)
    assert not capacity.try_reserve("c", 7, 50)
    assert capacity.group_limit() == 1
    capacity.advance_window(2)
    assert capacity.group_limit() == 3
    capacity.set_reserved("a", 10)  # the disk has it now
    assert capacity.group_limit() == 3  # the first that was turned away is waited for
    capacity.release_trajectory("a")
    capacity.release_trajectory("a")
    assert capacity.group_limit() == NO_GROUP_LIMIT
    assert capacity.try_reserve("b", 6, 120)
    assert capacity.try_reserve("b", 6, 120) is False  # not beside itself


def test_without_free_bytes_on_the_disk_only_the_window_is_taken():
    capacity = MemoryBudget(1000, 2)
    assert not capacity.try_reserve("2", 2, 10, free_disk_bytes=5)
    assert capacity.try_reserve("1", 1, 10, free_disk_bytes=-5)
    assert (capacity.group_limit(5), capacity.lacks_only_disk(5)) == (2, True)
    assert (capacity.group_limit(10), capacity.lacks_only_disk(10)) == (NO_GROUP_LIMIT, False)
    assert not capacity.try_reserve("3", 3, 2000, free_disk_bytes=5)
    assert not capacity.lacks_only_disk(5)  # it lacks memory, too


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.sampled_from("xyz")), max_size=40))
def test_ledger_against_sets(steps):
    ledger = TrajectoryLedger()
    accepted: set[tuple[int, str]] = set()
    over: set[int] = set()
    for forget, group, name in steps:
        if forget:
            assert ledger.forget_group(group) == {n for g, n in accepted if g == group and group not in over}
            over.add(group)
        else:
            ledger.add(group, name)
            accepted.add((group, name))
        for g, n in itertools.product(range(14), "xyz"):
            assert ((g, n) in ledger) == (g in over or (g, n) in accepted)
        assert ledger.oldest_group == min(set(range(14)) - over)


def test_ledger_is_small_after_a_long_run():
    ledger = TrajectoryLedger()
    for group in range(10_000):
        for episode in range(4):
            ledger.add(group, f"{group}-{episode}")
        ledger.forget_group(group ^ 1)  # A little out of order, as groups end.
    assert len(pickle.dumps(ledger)) < 1000
    assert (17, "17-3") in ledger
    assert ledger.oldest_group == 10_000


def pending(index: int | str, group: int = 0, nbytes: int = 1) -> OutgoingTrajectory:
    return OutgoingTrajectory(make_trajectory(index, group=group), nbytes, [])


def drain(outbox: Outbox, until: int, at_once: int) -> list[str]:
    """Send what may be sent; the names of that."""
    sent = []
    while chosen := outbox.next_batch(until, at_once):
        for each in chosen:
            outbox.mark_sent(each, 0.0)
            sent.append(each.trajectory_id)
    return sent


def send(outbox: Outbox, name: str, now: float) -> None:
    outbox.mark_sent(outbox.waiting[name], now)


def test_outbox_sends_what_is_asked_for_past_what_is_not_and_no_more_at_once_than_it_may():
    outbox = Outbox()
    for i, nbytes in enumerate([40, 40, 40, 500]):
        outbox.add(pending(i, group=9 - i, nbytes=nbytes))
    assert drain(outbox, 6, 600) == []
    assert drain(outbox, 7, 10) == ["t3"]  # alone, or it would never go
    outbox.settle_trajectory("t3", 0.0)
    assert drain(outbox, NO_GROUP_LIMIT, 100) == ["t0", "t1"]
    assert drain(outbox, NO_GROUP_LIMIT, 119) == []
    outbox.settle_trajectory("t0", 1.0)
    assert drain(outbox, NO_GROUP_LIMIT, 100) == ["t2"]
    assert outbox.requeue_trajectory("t1", 1.0, damaged=False)
    assert drain(outbox, 8, 100) == []
    assert drain(outbox, NO_GROUP_LIMIT, 100) == ["t1"]
    outbox.settle_trajectory("t1", 1.0)
    outbox.settle_trajectory("t2", 1.0)
    assert outbox.bytes_in_flight == 0


def test_outbox_has_a_limit_of_small_ones_in_flight():
    outbox = Outbox()
    for i in range(MAX_IN_FLIGHT + 3):
        outbox.add(pending(i))
    assert len(drain(outbox, NO_GROUP_LIMIT, 10**9)) == MAX_IN_FLIGHT
    outbox.settle_trajectory("t0", 0.0)
    assert drain(outbox, NO_GROUP_LIMIT, 10**9) == [f"t{MAX_IN_FLIGHT}"]


def test_outbox_sends_small_ones_together_and_a_large_one_alone():
    outbox = Outbox()
    sizes = [
        10,
        20,
        control_messages.MAX_SHARED_BYTES,
        5,
        control_messages.MAX_SHARED_BYTES - 5,
        1,
        3 * control_messages.MAX_SHARED_BYTES,
        7,
    ]
    for i, size in enumerate(sizes):
        outbox.add(OutgoingTrajectory(make_trajectory(i, group=0), 1, [bytes(size)]))
    messages = []
    while chosen := outbox.next_batch(NO_GROUP_LIMIT, 10**9):
        messages.append([len(each.frames[0]) for each in chosen])
        for each in chosen:
            outbox.mark_sent(each, 0.0)
    assert messages == [sizes[:2], sizes[2:3], sizes[3:5], sizes[5:6], sizes[6:7], sizes[7:]]
    for i in range(100, 101 + control_messages.MAX_DELIVERY_ITEMS):
        outbox.add(pending(i))
    assert len(outbox.next_batch(NO_GROUP_LIMIT, 10**9)) == control_messages.MAX_DELIVERY_ITEMS


@settings(max_examples=60)
@given(data=st.data())
def test_outbox_keeps_each_until_it_is_settled_and_counts_what_is_in_flight(data):
    outbox = Outbox()
    numbers = itertools.count()
    alive: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "add", "send", "settle", "again", "withdraw", "reset"]))
        if action == "add":
            new = pending(next(numbers), group=data.draw(st.integers(0, 9)), nbytes=data.draw(st.integers(1, 50)))
            alive[new.trajectory_id] = new.nbytes
            outbox.add(new)
        elif action == "send":
            at_once = data.draw(st.integers(1, 100))
            sent = drain(outbox, data.draw(st.integers(0, 10)), at_once)
            assert not sent or outbox.bytes_in_flight <= at_once or len(outbox.in_flight) == 1
        elif action == "reset":
            assert outbox.requeue_all() + len(outbox.waiting) >= len(alive)
        elif alive:
            name = data.draw(st.sampled_from(sorted(alive)))
            if action == "settle":
                assert outbox.settle_trajectory(name, 0.0) is not None
                assert outbox.settle_trajectory(name, 0.0) is None
                del alive[name]
            elif action == "again":
                assert outbox.requeue_trajectory(name, 0.0, damaged=False)
                assert name in outbox.waiting
            elif name in outbox.waiting and outbox.waiting[name].send_order < 0:
                outbox.withdraw_unsent(name)
                del alive[name]
        assert {*outbox.waiting, *outbox.in_flight} == set(alive)
        assert len(outbox) == len(alive)
        assert outbox.bytes_in_flight == sum(alive[name] for name in outbox.in_flight)


def test_a_trajectory_that_came_damaged_before_a_new_session_began_waits_as_before():
    outbox = Outbox()
    outbox.add(pending("x"))
    send(outbox, "tx", 0.0)
    outbox.requeue_all()
    for times in range(1, MAX_DAMAGED_DELIVERIES):
        assert outbox.requeue_trajectory("tx", 1.0, damaged=True), times
        assert (list(outbox.waiting), list(outbox.in_flight)) == (["tx"], [])
        send(outbox, "tx", 2.0)
        assert outbox.requeue_trajectory("tx", 2.0, damaged=False)  # which is not counted
        send(outbox, "tx", 2.0)
    assert not outbox.requeue_trajectory("tx", 5.0, damaged=True)
    assert list(outbox.in_flight) == ["tx"]


def test_what_the_receiver_has_in_hand_is_not_overdue():
    outbox = Outbox()
    outbox.add(pending("a"))
    send(outbox, "ta", 0.0)
    outbox.mark_in_hand(["ta", "unknown"], 5.0)
    assert not outbox.is_overdue(5.9, 1)
    assert outbox.is_overdue(6.1, 1)


def test_outbox_knows_when_an_answer_is_missing():
    outbox = Outbox()
    for name in "abc":
        outbox.add(pending(name))
    assert not outbox.is_overdue(1e9, 1)
    for now, name in enumerate("abc"):
        send(outbox, f"t{name}", now)
    assert not outbox.is_overdue(1.0, 1)
    assert outbox.is_overdue(1.1, 1)
    outbox.settle_trajectory("ta", 5.0)
    assert not outbox.is_overdue(5.9, 1)  # Answers come, if slowly.
    outbox.settle_trajectory("tc", 5.5)
    assert outbox.is_overdue(5.6, 1)  # One that overtook b: b's is lost.
    assert outbox.settle_trajectory("ta", 6.0) is None
    outbox.add(pending("d"))
    assert outbox.requeue_all() == 1
    assert list(outbox.waiting) == ["tb", "td"]
    outbox.withdraw_unsent("tb")  # It was sent once, and may be accepted.
    outbox.withdraw_unsent("td")
    assert list(outbox.waiting) == ["tb"]


def test_what_was_turned_away_says_nothing_of_those_before_it():
    """It is answered at once, and not in order."""
    outbox = Outbox()
    for name in "ab":
        outbox.add(pending(name))
        send(outbox, f"t{name}", 0.0)
    assert outbox.requeue_trajectory("tb", 3.0, damaged=False)
    assert not outbox.is_overdue(3.9, 1)
    assert outbox.is_overdue(4.1, 1)


@pytest.fixture
def senders():
    return SendersByHand()


@contextlib.asynccontextmanager
async def started_receiver(senders: SendersByHand, credit_bytes: int) -> AsyncIterator[TrajectoryReceiver]:
    config = TransportConfig(credit_bytes=credit_bytes)
    receiver = TrajectoryReceiver("run", config, keys=SERVER_KEYS, world=senders)
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest.fixture
async def receiver(senders):
    async with started_receiver(senders, 1000) as made:
        yield made


def encoded_delivery(index: int, nbytes: int = 10**6) -> list[Any]:
    return delivered(f"t{index}", 0, nbytes, *wire.encode_trajectory(make_trajectory(index, group=0)))


async def test_the_credit_is_divided_among_two_senders(senders, receiver):
    senders.greet(b"one", b"two")
    welcomes = [(to, message.at_once) for to, message in senders.answers]
    assert welcomes == [(b"one", 500), (b"two", 250)]


async def test_each_of_two_senders_is_told_of_a_new_limit(senders, receiver):
    senders.greet(b"one", b"two")
    senders.say(b"one", *delivered("later", 5, 900))
    senders.answers.clear()
    senders.say(b"two", *delivered("last", 6, 200))
    (first, second, rejected) = senders.answers
    assert [(to, message.until) for to, message in (first, second)] == [(b"one", 1), (b"two", 1)]
    assert (rejected[0], rejected[1].again) == (b"two", "later")
    senders.answers.clear()
    receiver.release_trajectory("later")
    await asyncio.sleep(0)
    told = [(to, message.until) for to, message in senders.answers]
    assert told == [(b"one", NO_GROUP_LIMIT), (b"two", NO_GROUP_LIMIT)]


async def test_what_two_senders_sent_is_in_hand_for_both(senders, receiver):
    senders.greet(b"one", b"two")
    senders.say(b"one", *delivered("t0", 0, 10**6))
    senders.say(b"one", *delivered("t1", 0, 10**6))
    senders.say(b"two", *delivered("t1", 0, 10**6))
    assert [senders.in_hand(sender) for sender in (b"one", b"two")] == [["t0", "t1"], ["t1"]]


async def test_more_acknowledgements_than_a_message_holds_come_in_several(senders, monkeypatch):
    """Here they are sent when the last is accepted, because as many bytes then wait for them as two senders may have."""
    monkeypatch.setattr("r3async.transport.receiver.ACK_DELAY_SECONDS", LIMIT)
    count = MAX_ACK_IDS + 4
    async with started_receiver(senders, count * 10**6 * ACK_CREDIT_SHARE * 2) as receiver:
        senders.greet(b"one", b"two")
        senders.answers.clear()
        for index in range(count):
            senders.say(b"two" if index == 5 else b"one", *encoded_delivery(index))
        batches = aiter(receiver)
        while receiver.received < count:
            assert senders.answers == []
            for received in await asyncio.wait_for(anext(batches), LIMIT):
                assert receiver.accept(received)
    acked = [(to, len(message.ids)) for to, message in senders.answers]
    assert acked == [(b"one", MAX_ACK_IDS), (b"one", 3), (b"two", 1)]


async def test_answers_come_in_the_order_of_deliveries_also_around_one_that_came_damaged(senders, receiver):
    senders.greet(b"one")
    senders.answers.clear()
    nbytes = memory_size(make_trajectory(0))  # so little that they are decoded together
    senders.say(b"one", *encoded_delivery(0, nbytes))
    senders.say(b"one", *delivered("t1", 0, nbytes, b"damaged"))
    senders.say(b"one", *encoded_delivery(2, nbytes))
    batches = aiter(receiver)
    for index in (0, 2):
        (received,) = await anext(batches)
        assert received.trajectory == make_trajectory(index, group=0)
        await receiver.reject(received, "too old")
    assert [message.again for _, message in senders.answers] == ["never", "damaged", "never"]
    assert (senders.in_hand(b"one"), receiver.unreleased_bytes) == ([], 0)


async def test_what_the_learner_does_not_answer_is_forgotten_and_may_come_again(senders, receiver):
    senders.greet(b"one")
    batches = aiter(receiver)
    senders.say(b"one", *encoded_delivery(0))
    await anext(batches)
    assert (senders.in_hand(b"one"), receiver.unreleased_bytes) == (["t0"], 10**6)
    waiting = asyncio.create_task(anext(batches))
    await asyncio.sleep(0.01)
    assert (senders.in_hand(b"one"), receiver.unreleased_bytes) == ([], 0)
    senders.say(b"one", *encoded_delivery(0))
    (received,) = await asyncio.wait_for(waiting, LIMIT)
    assert receiver.accept(received)
    assert (senders.in_hand(b"one"), receiver.received, receiver.unreleased_bytes) == ([], 1, received.nbytes)


def test_an_outbox_requeues_in_the_order_of_sending_and_before_the_rest():
    outbox = Outbox()
    for index in range(4):
        trajectory = make_trajectory(index, group=0)
        outbox.add(OutgoingTrajectory(trajectory, 10, [b"x"]))
    for pending in outbox.next_batch(1, 20):
        outbox.mark_sent(pending, 0.0)
    assert list(outbox.in_flight) == ["t0", "t1"]
    assert outbox.requeue_trajectory("t1", 1.0, damaged=True)
    assert list(outbox.waiting) == ["t1", "t2", "t3"]
    assert outbox.requeue_all() == 1
    assert list(outbox.waiting) == ["t0", "t1", "t2", "t3"]
