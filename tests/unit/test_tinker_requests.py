"""The order of training requests, results that clients poll for, and what they have open."""

import asyncio
import itertools

import msgspec
import pytest

from r3async.tinker import futures as futures_module
from r3async.tinker.futures import READ_SECONDS, UNREAD_SECONDS, ResultFutures
from r3async.tinker.protocol import Answer, ApiError, LoraConfig
from r3async.tinker.sampling import FairTurns
from r3async.tinker.sequencing import GAP_SECONDS, MAX_WAITING, MAX_WAITING_BYTES, RequestSequence
from r3async.tinker.sessions import (
    BASE_SNAPSHOT,
    SAMPLERS_PER_SESSION,
    SNAPSHOTS_PER_MODEL,
    Sampler,
    Sessions,
    Snapshot,
)
from r3async.world.real import REAL_WORLD

ANSWER, OTHER = Answer(b"1"), Answer(b"2")


class ManualClock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("order", itertools.permutations([0, 1, 2, 3]))
def test_requests_are_started_in_the_order_of_their_numbers(order):
    sequence, started = RequestSequence(), []
    for number in order:
        sequence.admit(number, 10)
        started += sequence.pop_ready(0.0)
    assert started == [0, 1, 2, 3]


def test_a_repeated_request_is_known_while_it_waits_and_after_it_was_started():
    sequence = RequestSequence()
    sequence.admit(1, 10)
    assert [sequence.is_known(n) for n in (0, 1, 2)] == [False, True, False]
    sequence.admit(0, 10)
    assert sequence.pop_ready(0.0) == [0, 1]
    assert [sequence.is_known(n) for n in (0, 1, 2)] == [True, True, False]
    assert sequence.pop_ready(0.0) == []


def test_numbers_that_never_come_are_given_up_and_their_turn_is_over():
    sequence = RequestSequence()
    sequence.admit(2, 10)
    assert sequence.pop_ready(10.0) == []
    assert sequence.pop_ready(10.0 + GAP_SECONDS - 1) == []
    assert sequence.pop_ready(10.0 + GAP_SECONDS) == [2]
    assert sequence.is_known(0)
    sequence.admit(4, 10)
    assert sequence.pop_ready(20.0 + GAP_SECONDS) == []  # the next one is waited for anew


def test_what_waits_is_bounded_but_never_the_one_whose_turn_it_is():
    many, large = RequestSequence(), RequestSequence()
    for number in range(1, MAX_WAITING + 1):
        many.admit(number, 1)
    large.admit(1, MAX_WAITING_BYTES)
    for sequence in (many, large):
        with pytest.raises(ApiError, match="wait for an earlier one") as refused:
            sequence.check_room(MAX_WAITING + 1, 1)
        assert refused.value.status == 429
        sequence.check_room(0, 1)
    assert RequestSequence().check_room(5, MAX_WAITING_BYTES) is None


# -- results -------------------------------------------------------------------------------------------------------


async def test_a_poll_is_held_until_there_is_a_result():
    futures = ResultFutures(ManualClock(), poll_seconds=30.0)
    futures.create("r", "session")
    poll = asyncio.create_task(futures.poll("r"))
    await asyncio.sleep(0.01)
    assert not poll.done()
    futures.resolve("r", ANSWER)
    assert await asyncio.wait_for(poll, 1.0) == ANSWER


async def test_a_poll_without_a_result_ends_and_may_be_made_again():
    futures = ResultFutures(ManualClock(), poll_seconds=0.02)
    futures.create("r", "session")
    assert await futures.poll("r") is None
    futures.resolve("r", ANSWER)
    futures.resolve("r", OTHER)  # the first result counts
    assert await futures.poll("r") == ANSWER


async def test_results_are_forgotten_a_while_after_they_were_read():
    clock = ManualClock()
    futures = ResultFutures(clock)
    for name in ("read", "unread"):
        futures.create(name, "session")
        futures.resolve(name, ANSWER)
    await futures.poll("read")
    clock.now += READ_SECONDS - 1
    assert await futures.poll("read") == ANSWER  # an answer that was lost on its way
    clock.now += READ_SECONDS + 1
    futures.forget_expired()
    with pytest.raises(ApiError) as gone:
        await futures.poll("read")
    assert gone.value.status == 410
    assert "unread" in futures
    clock.now += UNREAD_SECONDS
    futures.forget_expired()
    assert len(futures) == 0


async def test_a_session_that_ends_takes_its_results_along_and_no_others():
    futures = ResultFutures(ManualClock())
    for owner in ("a", "b"):
        futures.create(f"r-{owner}", owner)
    task = asyncio.create_task(asyncio.sleep(60))
    futures.let_cancel("r-a", task)
    poll = asyncio.create_task(futures.poll("r-a"))
    await asyncio.sleep(0)
    futures.forget_owner("a")
    with pytest.raises(ApiError) as gone:
        await poll
    assert gone.value.status == 410
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "r-b" in futures
    assert "r-a" not in futures


async def test_only_samples_can_be_cancelled():
    futures = ResultFutures(ManualClock())
    for name in ("sample", "training"):
        futures.create(name, "session")
    task = asyncio.create_task(asyncio.sleep(60))
    futures.let_cancel("sample", task)
    for name in ("sample", "training", "unknown"):
        futures.cancel(name)
    assert "sample" not in futures
    await asyncio.wait([task])
    assert task.cancelled()
    futures.resolve("training", ANSWER)
    assert await futures.poll("training") == ANSWER


async def test_the_number_of_results_is_bounded(monkeypatch):
    monkeypatch.setattr(futures_module, "MAX_FUTURES", 1)
    futures = ResultFutures(ManualClock())
    futures.create("one", "session")
    with pytest.raises(ApiError) as full:
        futures.create("two", "session")
    assert full.value.status == 429


# -- turns of samples ----------------------------------------------------------------------------------------------


async def test_sessions_take_turns_whatever_one_has_asked_for():
    turns, began = FairTurns(limit=2), []

    async def sample(owner, size=1):
        await turns.take(owner, size)
        began.append(owner)

    tasks = [asyncio.create_task(sample("greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(sample(owner)) for owner in ("b", "c", "b")]
    await asyncio.sleep(0)
    assert began == ["greedy"] * 2
    for _ in range(6):
        turns.release(1)
        await asyncio.sleep(0)
    assert began[2:] == ["greedy", "b", "c", "greedy", "b", "greedy"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_request_larger_than_the_limit_runs_alone_and_a_cancelled_one_leaves_its_turn():
    turns = FairTurns(limit=4)
    await turns.take("a", 3)
    large = asyncio.create_task(turns.take("b", 100))
    small = asyncio.create_task(turns.take("c", 1))
    await asyncio.sleep(0)
    assert not large.done()
    turns.release(3)
    await large
    assert not small.done()
    small.cancel()
    await asyncio.wait([small])
    turns.release(100)
    await turns.take("d", 4)
    late = asyncio.create_task(turns.take("e", 1))
    await asyncio.sleep(0)
    turns.release(4)
    late.cancel()  # its turn has come, and it does not know yet
    await asyncio.wait([late])
    await asyncio.wait_for(turns.take("f", 4), 1.0)


# -- sessions ------------------------------------------------------------------------------------------------------


def open_sessions(directory, now=0.0, **options):
    return Sessions(directory, now, files=REAL_WORLD.files, **options)


def test_heartbeats_are_no_use_and_an_idle_session_ends(tmp_path):
    sessions = open_sessions(tmp_path, idle_seconds=100.0)
    for name in ("used", "beating"):
        sessions.open(name, 0.0)
    sessions.find_session("used", 90.0)
    sessions.find_session("beating")
    assert sessions.find_idle(150.0) == ["beating"]
    sessions.close("beating")
    with pytest.raises(ApiError) as ended:
        sessions.find_session("beating")
    assert ended.value.status == 410


def snapshot_sampler(number, session="s"):
    snapshot = Snapshot(f"tinker://m/snapshots/{number}", "m", number)
    return Sampler(f"{session}:train:0:sample:{number}", session, snapshot)


def test_snapshots_of_a_model_are_bounded_and_the_oldest_goes(tmp_path):
    sessions = open_sessions(tmp_path)
    sessions.open("s", 0.0)
    over = []
    for number in range(SNAPSHOTS_PER_MODEL + 3):
        over += sessions.add_sampler(snapshot_sampler(number))
    assert [snapshot.version for snapshot in over] == [0, 1, 2]
    with pytest.raises(ApiError, match="last 4 snapshots"):
        sessions.find_sampler("s:train:0:sample:2", 1.0)
    assert sessions.find_sampler("s:train:0:sample:3", 1.0).snapshot.version == 3
    assert sorted(snapshot.version for snapshot in sessions.close("s")) == [3, 4, 5, 6]


def test_samplers_of_a_session_are_bounded_and_the_one_that_is_used_stays(tmp_path):
    sessions = open_sessions(tmp_path)
    for name in ("s", "other"):
        sessions.open(name, 0.0)
    shared = Snapshot("tinker://m/sampler_weights/1", "m", 1)
    sessions.add_sampler(Sampler("other:sample:0", "other", shared))
    sessions.add_sampler(Sampler("s:sample:base", "s", BASE_SNAPSHOT))
    over = []
    for number in range(SAMPLERS_PER_SESSION + 2):
        snapshot = Snapshot(f"tinker://m/sampler_weights/{number}", "m", number)
        over += sessions.add_sampler(Sampler(f"s:sample:{number}", "s", snapshot))
        sessions.find_sampler("s:sample:base", 1.0)
    assert len(sessions.sessions["s"].samplers) == SAMPLERS_PER_SESSION
    assert [snapshot.version for snapshot in over] == [0, 2]  # the other session samples from 1


def test_sessions_are_there_after_a_restart_until_they_are_closed(tmp_path):
    sessions = open_sessions(tmp_path)
    for name in ("s", "closed"):
        session = sessions.open(name, 50.0)
        session.models[f"{name}:train:0"] = LoraConfig(8, train_mlp=False)
        sessions.add_sampler(snapshot_sampler(3, session=name))
        sessions.write(session)
    sessions.close("closed")
    sessions.write(session)
    (tmp_path / "damaged.json").write_bytes(b"{")
    again = open_sessions(tmp_path, now=7.0)
    assert list(again.sessions) == ["s"]
    assert again.sessions["s"] == msgspec.structs.replace(sessions.sessions["s"], used_at=7.0)
