"""An environment that holds up the event loop is named, with how long; one that waits is not."""

import asyncio
import time

import pytest

from r3async.rollout.blocking_detector import BLOCKING_SECONDS, BlockingDetector
from tests.helpers.world import Clock


class Blocks:
    def __init__(self, clock: Clock):
        self.clock = clock

    async def step(self, seconds: float) -> str:
        await asyncio.sleep(0)
        self.clock.now += seconds
        await asyncio.sleep(0)
        return "done"

    async def waits(self, seconds: float) -> str:
        for _ in range(10):
            self.clock.now += seconds / 10
            await asyncio.sleep(0)
        return "done"


@pytest.fixture
def reported():
    return []


@pytest.fixture
def held_up(reported):
    return BlockingDetector(lambda event, **fields: reported.append((event, fields)), Clock())


def test_who_blocks_is_named_with_how_long_and_again_only_when_it_is_twice_as_long(held_up, reported):
    env = Blocks(held_up.clock)
    for seconds in (0.4, 1.0, 1.5, 1.9, 2.5, 0.6):
        assert asyncio.run(held_up.run(env, "step", env.step(seconds))) == "done"
    assert [fields["seconds"] for _, fields in reported] == [1.0, 2.5]
    event, fields = reported[0]
    assert (event, fields["environment"], fields["method"]) == ("environment_blocks", f"{__name__}:Blocks", "step")
    assert "plain `def`" in fields["remedy"]


def test_one_that_waits_as_long_is_not(held_up, reported):
    env = Blocks(held_up.clock)
    assert asyncio.run(held_up.run(env, "step", env.waits(4 * BLOCKING_SECONDS))) == "done"
    assert reported == []


def test_errors_and_cancellations_pass(held_up):
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("its own")

    cleaned = []

    async def hangs() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    async def cancelled() -> None:
        task = asyncio.ensure_future(held_up.run(None, "step", hangs()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pytest.raises(KeyError, match="its own"):
        asyncio.run(held_up.run(None, "step", fails()))
    asyncio.run(cancelled())
    assert cleaned == [True]


def test_on_the_real_clock(reported):
    held_up = BlockingDetector(lambda event, **fields: reported.append(fields["seconds"]))

    async def sleeps() -> None:
        time.sleep(BLOCKING_SECONDS + 0.05)  # noqa: ASYNC251

    asyncio.run(held_up.run(None, "step", sleeps()))
    assert len(reported) == 1
    assert reported[0] >= BLOCKING_SECONDS
