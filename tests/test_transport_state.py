"""The protocol's state, without sockets."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.transport import Ledger, wire
from r3async.transport.credit import CreditPool
from r3async.transport.outbox import Outbox, Pending


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
