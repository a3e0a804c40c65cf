"""The order of training requests, results that clients poll for, and what they have open."""

import asyncio
import itertools

import pytest

from r3async.tinker.futures import READ_SECONDS, UNREAD_SECONDS, ResultFutures
from r3async.tinker.protocol import ApiError
from r3async.tinker.sequencing import GAP_SECONDS, MAX_WAITING, REMEMBERED_ANSWERS, RequestSequence
from r3async.tinker.sessions import SNAPSHOTS_PER_MODEL, Sampler, Sessions, Snapshot, TrainedModel


class ManualClock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("order", itertools.permutations([1, 2, 3, 4]))
def test_requests_are_started_in_the_order_of_their_numbers(order):
    sequence, started = RequestSequence(), []
    for number in order:
        sequence.admit(number, f"r{number}")
        started += sequence.pop_ready(0.0)
    assert started == ["r1", "r2", "r3", "r4"]


def test_a_repeated_request_gets_the_first_answer_and_is_not_started_again():
    sequence = RequestSequence()
    sequence.admit(2, "second")
    assert sequence.find_answer(2) == "second"  # still waits for number 1
    sequence.admit(1, "first")
    assert sequence.pop_ready(0.0) == ["first", "second"]
    assert [sequence.find_answer(n) for n in (1, 2, 3)] == ["first", "second", None]
    assert sequence.pop_ready(0.0) == []


def test_a_refused_request_has_used_up_its_number():
    sequence = RequestSequence()
    sequence.admit(2, "later")
    refused = ApiError("no such loss")
    sequence.refuse(1, refused)
    assert sequence.find_answer(1) is refused
    assert sequence.pop_ready(0.0) == ["later"]
    sequence.refuse(3, refused)
    sequence.admit(4, "last")
    assert sequence.pop_ready(0.0) == ["last"]


def test_a_number_that_never_comes_is_given_up_and_refused_when_it_comes_after_all():
    sequence = RequestSequence()
    sequence.admit(3, "third")
    assert sequence.pop_ready(10.0) == []
    assert sequence.pop_ready(10.0 + GAP_SECONDS - 1) == []
    assert sequence.pop_ready(10.0 + GAP_SECONDS) == []  # number 2 is missing from here on
    assert sequence.pop_ready(10.0 + 2 * GAP_SECONDS) == ["third"]
    assert isinstance(sequence.find_answer(1), ApiError)


def test_what_is_remembered_of_a_client_is_bounded():
    sequence = RequestSequence()
    for number in range(1, REMEMBERED_ANSWERS + 10):
        sequence.admit(number, str(number))
        sequence.pop_ready(0.0)
    with pytest.raises(ApiError, match="request 3 is done, and its result is forgotten"):
        sequence.find_answer(3)
    first = REMEMBERED_ANSWERS + 20
    for number in range(first, first + MAX_WAITING):
        sequence.admit(number, str(number))
    with pytest.raises(ApiError, match="wait already") as refused:
        sequence.admit(first + MAX_WAITING, "one more")
    assert refused.value.status == 429


def test_requests_without_a_number_come_after_all_so_far():
    sequence = RequestSequence()
    sequence.admit(None, "a")
    sequence.admit(None, "b")
    assert sequence.pop_ready(0.0) == ["a", "b"]
    assert sequence.next_number == 3


# -- results -------------------------------------------------------------------------------------------------------


async def test_a_poll_is_held_until_there_is_a_result():
    futures = ResultFutures(ManualClock(), poll_seconds=30.0)
    futures.create("r", "session")
    poll = asyncio.create_task(futures.poll("r"))
    await asyncio.sleep(0.01)
    assert not poll.done()
    futures.resolve("r", {"a": 1})
    assert await asyncio.wait_for(poll, 1.0) == {"a": 1}


async def test_a_poll_without_a_result_ends_and_may_be_made_again():
    futures = ResultFutures(ManualClock(), poll_seconds=0.02)
    futures.create("r", "session")
    assert await futures.poll("r") is None
    futures.resolve("r", {"a": 1})
    futures.resolve("r", {"a": 2})  # the first result counts
    assert await futures.poll("r") == {"a": 1}


async def test_results_are_forgotten_a_while_after_they_were_read():
    clock = ManualClock()
    futures = ResultFutures(clock)
    for name in ("read", "unread"):
        futures.create(name, "session")
        futures.resolve(name, {})
    await futures.poll("read")
    clock.now += READ_SECONDS - 1
    assert await futures.poll("read") == {}  # an answer that was lost on its way
    clock.now += READ_SECONDS + 1
    futures.forget_expired()
    with pytest.raises(ApiError) as gone:
        await futures.poll("read")
    assert gone.value.status == 410
    assert "unread" in futures
    clock.now += UNREAD_SECONDS
    futures.forget_expired()
    assert len(futures) == 0


async def test_errors_of_work_become_results_with_their_category():
    futures = ResultFutures(ManualClock())

    async def fail(error: Exception):
        raise error

    for name, error in (("user", ApiError("bad data")), ("server", RuntimeError("out of memory"))):
        futures.create(name, "session")
        await futures.start(name, fail(error))
        result = await futures.poll(name)
        assert isinstance(result, ApiError)
        assert result.category == name


async def test_a_session_that_ends_takes_its_results_along_and_no_others():
    futures = ResultFutures(ManualClock())
    for owner in ("a", "b"):
        futures.create(f"r-{owner}", owner)
    stopped = asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    futures.start("r-a", work())
    await asyncio.sleep(0)
    poll = asyncio.create_task(futures.poll("r-a"))
    await asyncio.sleep(0)
    futures.forget_owner("a")
    assert (await poll).status == 410
    await asyncio.wait_for(stopped.wait(), 1.0)
    assert "r-b" in futures
    assert "r-a" not in futures


async def test_only_samples_can_be_cancelled():
    futures = ResultFutures(ManualClock())
    for name in ("sample", "training"):
        futures.create(name, "session", cancellable=name == "sample")
        futures.start(name, asyncio.sleep(0.02, result={}))
        await asyncio.sleep(0)
        futures.cancel(name)
    assert isinstance(await futures.poll("sample"), ApiError)
    assert await futures.poll("training") == {}
    futures.create("early", "session", cancellable=True)
    futures.start("early", asyncio.sleep(0.02, result={}))
    futures.cancel("early")  # before its task has begun
    assert isinstance(await futures.poll("early"), ApiError)


# -- sessions ------------------------------------------------------------------------------------------------------


def test_heartbeats_are_no_use_and_an_idle_session_ends():
    sessions = Sessions(idle_seconds=100.0)
    for name in ("used", "beating"):
        sessions.open_session(name, 0.0, None)
    sessions.models["m"] = TrainedModel("m", "used", None, None, 0.0, 0.0)
    sessions.find_model("m", 90.0)
    sessions.find_session("beating")
    assert sessions.find_idle(150.0) == ["beating"]
    sessions.close_session("beating")
    with pytest.raises(ApiError) as ended:
        sessions.find_session("beating")
    assert ended.value.status == 410


def test_snapshots_of_a_model_are_bounded_and_the_oldest_goes():
    sessions = Sessions()
    sessions.open_session("s", 0.0, None)
    model = sessions.models["m"] = TrainedModel("m", "s", None, None, 0.0, 0.0)
    over = []
    for version in range(SNAPSHOTS_PER_MODEL + 3):
        name = f"m:sample:{version}"
        over += sessions.add_snapshot(model, Sampler(name, "s", Snapshot(name, "m", version)))
    assert [snapshot.version for snapshot in over] == [0, 1, 2]
    with pytest.raises(ApiError, match="last 4 snapshots"):
        sessions.find_sampler("m:sample:2", 1.0)
    assert sessions.find_sampler("m:sample:3", 1.0).snapshot.version == 3
    _, left = sessions.close_session("s")
    assert [snapshot.version for snapshot in left] == [3, 4, 5, 6]
