"""Simulated threads and lanes: when a function runs, and when its result is there."""

import asyncio

import pytest

from dev.simulation.world import Simulation


@pytest.fixture
def simulation():
    simulation = Simulation(1, max_seconds=10_000.0)
    yield simulation
    simulation.close()


@pytest.fixture
def run(simulation):
    driver = simulation.begin_process("driver", simulation.hosts["host-0"])
    return lambda main: simulation.run(driver, main(driver.world))


def fail():
    raise ValueError("in a thread")


def test_a_function_runs_a_little_later(run, simulation):
    async def main(world):
        before, seen = world.clock.monotonic(), []
        assert await world.threads.run(lambda a, *, b: seen.append(world.clock.monotonic()) or a + b, 1, b=2) == 3
        with pytest.raises(ValueError, match="in a thread"):
            await world.threads.run(fail)
        return seen[0] - before

    low, high = simulation.delays.thread
    assert low <= run(main) <= high
    assert simulation.loop.failures == []


def test_work_on_files_takes_time_until_the_result_is_there(run):
    async def main(world):
        def work(seconds: float) -> float:
            world.process.disk_seconds += seconds
            return world.clock.monotonic()

        world.process.disk_seconds = 50.0  # what the loop did itself
        began = await world.threads.run(work, 3.0)
        alone = world.clock.monotonic() - began
        lane = world.threads.new_worker("files")
        calls = [asyncio.create_task(lane.run(work, 2.0)) for _ in range(3)]
        starts = [await call for call in calls]
        return alone, starts[1] - starts[0], starts[2] - starts[1]

    alone, *between = run(main)
    assert alone == pytest.approx(3.0)
    assert all(2.0 < seconds < 2.1 for seconds in between)


def test_a_lane_keeps_the_order_and_skips_what_was_cancelled(run):
    async def main(world):
        lane, seen = world.threads.new_worker("one"), []
        calls = [asyncio.create_task(lane.run(seen.append, n)) for n in range(10)]
        await asyncio.sleep(0)
        calls[4].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(ValueError, match="in a thread"):
            await lane.run(fail)
        await lane.run(seen.append, "after")
        return seen

    assert run(main) == [0, 1, 2, 3, 5, 6, 7, 8, 9, "after"]


def test_a_closed_lane_ends_the_call_that_runs_and_makes_no_other(run):
    async def main(world):
        lane, seen = world.threads.new_worker("one"), []

        def work(n: int):
            world.process.disk_seconds += 5.0
            seen.append(n)

        calls = [asyncio.create_task(lane.run(work, n)) for n in range(3)]
        await asyncio.sleep(1.0)
        before = world.clock.monotonic()
        await lane.close()
        waited = world.clock.monotonic() - before
        await lane.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(RuntimeError, match="shutdown"):
            await lane.run(work, 9)
        return seen, waited, [type(end).__name__ for end in ended]

    seen, waited, ended = run(main)
    assert seen == [0]
    assert 3.9 < waited < 4.1
    assert ended == ["NoneType", "CancelledError", "CancelledError"]


def test_repeat_calls_until_told_that_it_is_done_and_ends_with_its_process(run, simulation):
    other = simulation.begin_process("other", simulation.hosts["host-0"])

    async def main(world):
        seen, theirs = [], []
        world.threads.repeat_until_done("r", 2.0, lambda: seen.append(world.clock.monotonic()) or len(seen) == 3)
        other.world.threads.repeat_until_done("r", 1.0, lambda: bool(theirs.append(1)))
        before = world.clock.monotonic()
        await asyncio.sleep(4.5)
        simulation.end_process(other, "a test")
        await asyncio.sleep(20.0)
        return [at - before for at in seen], theirs

    assert run(main) == (pytest.approx([2.0, 4.0, 6.0]), [1, 1, 1, 1])
