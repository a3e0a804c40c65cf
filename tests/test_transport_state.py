"""The protocol's state, without sockets."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.transport import Ledger, wire
from r3async.transport.credit import CreditPool, Offered
from r3async.transport.outbox import OFFERED_AT_ONCE, Outbox, Pending
from tests.helpers_transport import make_trajectory


def offered(messages: dict[str, int], group: int = 10**6) -> dict[str, Offered]:
    """Of a group that no step waits for yet."""
    return {m: Offered(group, n) for m, n in messages.items()}


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
            new = {f"m{next(numbers)}": data.draw(st.integers(0, 160))} if action == "offer" else {}
            if action == "withdraw" and mine:
                mine.pop(data.draw(st.sampled_from(sorted(mine))))
            mine |= new
            sizes = {k: n for k, n in sizes.items() if k[0] != sender} | {(sender, m): n for m, n in mine.items()}
            if new and data.draw(st.booleans()):
                pool.offer(sender, offered(new), more=True)
            else:
                pool.offer(sender, offered(mine))
        elif action == "arrive" and granted:
            assert pool.arrive(sender, granted[0]) == sizes[sender, granted[0]]
            held[granted[0]] = sizes.pop((sender, granted[0]))
        elif action == "release" and held:
            message = data.draw(st.sampled_from(sorted(held)))
            del held[message]
            pool.release(message)
        elif action == "drop":
            pool.drop(sender)
            sizes = {k: n for k, n in sizes.items() if k[0] != sender}
        before = {s: set(pool.granted(s)) for s in (b"a", b"b", b"c")}
        new_grants = pool.grant()
        assert all(len(set(ids)) == len(ids) for ids in new_grants.values())
        assert {s: set(pool.granted(s)) - before[s] for s in before} == {s: set(new_grants.get(s, ())) for s in before}
        given_out = [n for (s, m), n in sizes.items() if m in pool.granted(s)]
        assert pool.held == sum(held.values())
        assert pool.reserved == sum(given_out)
        # A message of no bytes may come beside one that passes alone.
        positive = [n for n in [*given_out, *held.values()] if n]
        assert pool.used <= pool.total or len(positive) == 1
        assert pool.used or not set(sizes) - {(s, m) for s, m in sizes if m in pool.granted(s)}
        assert pool.waiting == len(sizes) - len(given_out)


@settings(max_examples=400, deadline=None)
@given(
    window=st.integers(1, 3),
    steps=st.integers(1, 5),
    members=st.integers(1, 4),
    total=st.integers(1, 200),
    largest=st.integers(0, 120),
    chance=st.integers(0, 2**32).map(random.Random),
)
def test_the_groups_of_the_next_step_always_arrive_and_memory_is_bounded(
    window, steps, members, total, largest, chance
):
    """Any number of groups, sizes, senders and arrival orders; nothing is released but by consuming the oldest groups."""
    groups = window * steps
    todo = {(g, e): chance.randint(0, largest) for g in range(groups) for e in range(members)}
    sender_of = {key: chance.choice([b"a", b"b", b"c"]) for key in todo}
    pool = CreditPool(total, window)
    offers: dict[bytes, dict[str, Offered]] = {b"a": {}, b"b": {}, b"c": {}}
    unsent = chance.sample(sorted(todo), len(todo))
    arrived: set[tuple[int, int]] = set()
    oldest = 0
    while oldest < groups:
        granted = [(s, m) for s in offers for m in pool.granted(s)]
        actions = ["offer"] * bool(unsent) + ["arrive"] * bool(granted)
        wanted = {(g, e) for g in range(oldest, oldest + window) for e in range(members)}
        if wanted <= arrived:
            actions.append("consume")
        assert actions, f"stuck before group {oldest}"
        action = chance.choice(actions)
        if action == "offer":
            key = unsent.pop()
            sender = sender_of[key]
            offers[sender][f"{key[0]}-{key[1]}"] = Offered(key[0], todo[key])
            if chance.random() < 0.5:
                pool.offer(sender, {f"{key[0]}-{key[1]}": Offered(key[0], todo[key])}, more=True)
            else:
                pool.offer(sender, offers[sender])
        elif action == "arrive":
            sender, message = chance.choice(granted)
            assert pool.arrive(sender, message) is not None
            del offers[sender][message]
            arrived.add(tuple(map(int, message.split("-"))))
        else:
            for g, e in wanted:
                pool.release(f"{g}-{e}")
            oldest += window
            pool.advance(oldest)
        pool.grant()
        waited_for = sum(n for (g, _), n in todo.items() if oldest <= g < oldest + window)
        assert pool.used <= max(total, *todo.values(), 0) + waited_for
    assert pool.used == 0


def test_without_the_window_later_groups_hold_all_the_credit_for_ever():
    """The deadlock that the rule is there for."""
    for window in (0, 1):
        pool = CreditPool(100, window)
        pool.offer(b"a", {"later": Offered(1, 100)})
        assert pool.grant() == {b"a": ["later"]}
        assert pool.arrive(b"a", "later") == 100
        pool.offer(b"b", {"oldest": Offered(0, 60)})
        assert pool.grant() == ({b"b": ["oldest"]} if window else {})


def test_older_groups_are_granted_first_and_nothing_overtakes_a_large_message():
    pool = CreditPool(100, 0)
    pool.offer(b"x", {"held": Offered(0, 90)})
    pool.grant()
    pool.arrive(b"x", "held")
    pool.offer(b"a", {"small": Offered(9, 20), "large": Offered(5, 100)})
    pool.offer(b"b", {"older": Offered(4, 15)})
    assert pool.grant() == {}
    pool.release("held")
    assert pool.grant() == {b"b": ["older"]}
    pool.arrive(b"b", "older")
    pool.release("older")
    assert pool.grant() == {b"a": ["large"]}
    assert pool.granted(b"a") == ["large"]


def test_without_room_elsewhere_only_the_next_step_is_granted():
    pool = CreditPool(1000, 2)
    pool.offer(b"a", {f"{g}": Offered(g, 10) for g in range(6)})
    pool.grant(room=0)
    assert pool.granted(b"a") == ["0", "1"]
    pool.advance(1)
    pool.grant(room=-5)
    assert pool.granted(b"a") == ["1", "2"]
    pool.grant(room=40)
    assert pool.granted(b"a") == ["1", "2", "3", "4"]


def test_credit_pool_refuses_what_was_not_granted():
    pool = CreditPool(100)
    pool.offer(b"a", offered({"x": 60, "y": 60}))
    assert pool.grant() == {b"a": ["x"]}
    assert pool.granted(b"a") == ["x"]
    assert pool.arrive(b"a", "y") is None
    assert pool.arrive(b"b", "x") is None
    assert pool.used == 60
    pool.drop(b"a")
    assert pool.used == 0


def test_credit_pool_does_not_grow_with_offers_that_come_and_go():
    pool = CreditPool(100)
    pool.offer(b"a", offered({"x": 100}))
    pool.grant()
    for i in range(10_000):
        pool.offer(b"b", offered({f"m{i}": 100}))
        assert pool.grant() == {}
    assert len(pool._queue) < 100
    # A message that is offered anew in another group waits in that group's place, not in its old one.
    pool.offer(b"b", {})
    pool.offer(b"b", {"again": Offered(3, 100)})
    pool.offer(b"b", {})
    pool.offer(b"b", {"again": Offered(8, 100), "other": Offered(5, 100)})
    pool.drop(b"a")
    pool.grant()
    assert pool.granted(b"b") == ["other"]


def test_a_sender_that_only_offers_more_takes_a_bounded_place():
    pool = CreditPool(100)
    for i in range(3 * wire.MAX_PARCELS):
        pool.offer(b"a", offered({f"m{i}": 200}), more=True)
        pool.grant()
    assert pool.waiting + len(pool.granted(b"a")) == wire.MAX_PARCELS
    pool.offer(b"a", offered({f"m{wire.MAX_PARCELS + 1}": 10}))  # what was ignored is listed again by an offer of all
    pool.grant()
    assert pool.granted(b"a") == [f"m{wire.MAX_PARCELS + 1}"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.sampled_from("xyz")), max_size=40))
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
        for g, n in itertools.product(range(14), "xyz"):
            assert ((g, n) in ledger) == (g in over or (g, n) in accepted)


def test_ledger_is_small_after_a_long_run():
    ledger = Ledger()
    for group in range(10_000):
        for episode in range(4):
            ledger.add(group, f"{group}-{episode}")
        ledger.forget(group ^ 1)  # A little out of order, as groups end.
    assert (ledger._live, ledger._over.beyond) == ({}, set())
    assert (17, "17-3") in ledger
    assert ledger.oldest == 10_000


def test_oldest_group_that_is_not_over():
    ledger = Ledger()
    assert ledger.oldest == 0
    for group, oldest in ((1, 0), (0, 2), (5, 2), (2, 3)):
        ledger.forget(group)
        assert ledger.oldest == oldest


def test_outbox_offers_the_oldest_groups_first():
    """Or one that the learner waits for would not be offered while more than an offer can list wait before it."""
    outbox = Outbox()
    for i in range(100):
        outbox.add(Pending(make_trajectory(0), wire.Parcel(f"{i}", 100 - i, 1), []))
    assert [p.group_index for p in outbox.offers()] == list(range(1, 65))


def test_a_later_offer_repeats_what_an_earlier_one_listed():
    """An offer replaces the one before it, so leaving a message out would withdraw a grant that is on its way for it: its
    payload would come without one."""
    outbox = Outbox()
    for i in range(OFFERED_AT_ONCE):
        outbox.add(Pending(make_trajectory(0), wire.Parcel(f"new{i}", 1000 + i, 1), []))
    first = {p.trajectory_id for p in outbox.offers()}
    for i in range(OFFERED_AT_ONCE):
        outbox.add(Pending(make_trajectory(0), wire.Parcel(f"old{i}", i, 1), []))
    second = [p.trajectory_id for p in outbox.offers()]
    assert first < set(second)
    assert second[:OFFERED_AT_ONCE] == [f"old{i}" for i in range(OFFERED_AT_ONCE)]
    outbox.mark_sent("new0", 0.0)
    assert {p.trajectory_id for p in outbox.offers()} == set(second) - {"new0"}
    outbox.reset()  # Grants belong to a session.
    assert {p.trajectory_id for p in outbox.offers()} == set(second[:OFFERED_AT_ONCE])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_was_offered_more_by_more_is_what_an_offer_of_all_would_list(data):
    """The receiver's view, built from offers of more, has the 64 oldest groups whatever was added, sent and withdrawn."""
    outbox = Outbox()
    view: dict[str, int] = {}
    numbers = itertools.count()
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["add", "add", "send", "damaged", "withdraw", "reset"]))
        if action == "add":
            for group in data.draw(st.lists(st.integers(0, 300), max_size=120)):
                outbox.add(Pending(make_trajectory(0), wire.Parcel(f"t{next(numbers)}", group, 1), []))
        elif action == "send":
            for name in sorted(view, key=lambda n: (view[n], n))[: data.draw(st.integers(0, 80))]:
                outbox.mark_sent(name, 0.0)
                del view[name]
        elif action == "damaged" and outbox.flying:
            outbox.again(next(iter(outbox.flying)), 8, 0.0)
        elif outbox.waiting:
            if action == "withdraw":
                outbox.withdraw(next(iter(outbox.waiting)))
            elif action == "reset":
                outbox.reset()
            view = {p.trajectory_id: p.group_index for p in outbox.offers()}
        more = outbox.more()
        assert not {p.trajectory_id for p in more} & set(view)
        view |= {p.trajectory_id: p.group_index for p in more}
        waiting = sorted(p.parcel.group_index for p in outbox.waiting.values())
        assert set(view) <= set(outbox.waiting)
        assert len(view) <= wire.MAX_PARCELS
        if len(view) < wire.MAX_PARCELS:
            assert sorted(view.values())[:OFFERED_AT_ONCE] == waiting[:OFFERED_AT_ONCE]
        assert not outbox.more()
        if not data.draw(st.integers(0, 4)):
            view = {p.trajectory_id: p.group_index for p in outbox.offers()}


def test_an_offer_as_long_as_it_can_be_is_a_message_that_can_be_read():
    outbox = Outbox()
    for i in reversed(range(wire.MAX_PARCELS + 1)):
        outbox.add(
            Pending(make_trajectory(0), wire.Parcel(f"{i:03}".ljust(wire.MAX_ID, "\U0001f40c"), 2**62 + i, 2**62), [])
        )
        offered = outbox.offers()
    assert len(offered) == wire.MAX_PARCELS
    assert min(p.group_index for p in offered) == 2**62
    message = wire.decode_control(wire.encode_control(wire.Offer("s" * 64, offered)))
    assert isinstance(message, wire.Offer)
    assert message.parcels == offered


def test_what_the_receiver_has_in_hand_is_not_overdue():
    outbox = Outbox()
    outbox.add(Pending(make_trajectory(0), wire.Parcel("a", 0, 1), []))
    outbox.mark_sent("a", 0.0)
    outbox.touch(["a", "unknown"], 5.0)
    assert not outbox.overdue(5.9, 1)
    assert outbox.overdue(6.1, 1)


def test_outbox_knows_when_an_answer_is_missing():
    outbox = Outbox()
    for name in "abc":
        outbox.add(Pending(make_trajectory(0), wire.Parcel(name, 0, 1), []))
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
    outbox.add(Pending(make_trajectory(0), wire.Parcel("d", 0, 1), []))
    assert outbox.reset() == 1
    assert [p.trajectory_id for p in outbox.offers()] == ["b", "d"]
    outbox.withdraw("b")  # It was sent once, and may be accepted.
    outbox.withdraw("d")
    assert list(outbox.waiting) == ["b"]
