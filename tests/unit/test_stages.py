"""Accounting of a process's time by stage: everything is booked once, to the stage that it belongs to."""

import asyncio
import contextlib
import threading
import time

import pytest
import uvloop

from r3async.record.process_time import LagMeter, StageTimer
from r3async.world import stages
from r3async.world.real import REAL_WORLD
from r3async.world.stack_dumps import dump_stacks
from r3async.world.stages import in_stage, stage

BURST = 0.02


def burn(seconds: float = BURST) -> None:
    """Of this thread's processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Spent:
    """What was spent since it was made."""

    def __init__(self) -> None:
        self.cpu_before, self.wall_before = REAL_WORLD.processes.stage_seconds()
        self.process, self.wall_clock, self.thread = time.process_time(), time.perf_counter(), time.thread_time()

    def look(self) -> tuple[dict[str, float], dict[str, float], float, float]:
        """Processor and wall time by stage, and both as their clocks have them."""
        cpu, wall = REAL_WORLD.processes.stage_seconds()
        process, passed = time.process_time() - self.process, time.perf_counter() - self.wall_clock
        return (
            {name: seconds - self.cpu_before.get(name, 0.0) for name, seconds in cpu.items()},
            {name: seconds - self.wall_before.get(name, 0.0) for name, seconds in wall.items()},
            process,
            passed,
        )


@contextlib.asynccontextmanager
async def measured(lane: str = "lane"):
    """Account for this process's time; yields a worker thread of that name."""
    meter, worker = LagMeter(), REAL_WORLD.threads.new_worker(lane)
    meter.start()
    try:
        yield worker
    finally:
        meter.stop()
        await worker.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def runner(request):
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


def test_all_that_a_process_computes_is_booked_to_the_stage_that_it_belongs_to(runner):
    async def plays() -> None:
        for _ in range(2):
            burn()
            await asyncio.sleep(0.001)
            with stage("tokens"):
                burn()
                await asyncio.sleep(0.001)  # others run meanwhile, and are not booked to this stage
                burn()
            await REAL_WORLD.threads.run(burn)

    async def sends() -> None:
        async with asyncio.TaskGroup() as group:  # whose tasks are of the stage in which they are made
            group.create_task(asyncio.sleep(0.001))
            group.create_task(bursts())

    async def bursts() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            burn()

    async def run() -> None:
        async with measured("writer") as lane:
            spent = Spent()
            asyncio.get_running_loop().call_soon(burn)
            other = threading.Thread(target=burn)
            other.start()
            tasks = [asyncio.create_task(in_stage("play", plays())), asyncio.create_task(in_stage("send", sends()))]
            await asyncio.gather(*tasks, lane.run(burn))
            await in_stage("steps", bursts())  # in a task that was there before
            other.join()
            await asyncio.sleep(0.05)
            cpu, wall, process, passed = spent.look()
        expected = {"play": 4, "tokens": 4, "send": 3, "writer": 1, "steps": 3, "loop": 1}
        assert {name: round(cpu.get(name, 0.0) / BURST) for name in expected} == expected
        # "other", and whatever threads earlier tests left in this process.
        assert round(cpu["runtime"] / BURST) >= 1
        assert sum(cpu.values()) == pytest.approx(process, rel=0.02)
        assert sum(wall.values()) == pytest.approx(passed, rel=0.02)
        assert wall["idle"] >= 0.04
        assert "metrics" in wall
        assert "writer" not in wall
        assert min(wall.values()) >= 0
        assert min(cpu.values()) >= -1e-4

    runner.run(run())


def test_work_that_a_thread_has_not_ended_is_booked_already(runner):
    begun, ending = threading.Event(), threading.Event()

    def works() -> None:
        with stage("forward"):
            burn()
            begun.set()
            ending.wait(120)
        burn()

    async def run() -> None:
        async with measured("torch") as lane:
            spent, working = Spent(), asyncio.create_task(lane.run(works))
            await asyncio.sleep(0)
            await asyncio.to_thread(begun.wait, 10)
            running = spent.look()[0]
            ending.set()
            await working
            cpu = spent.look()[0]
        assert running["forward"] > BURST / 2 > running.get("torch", 0.0)
        assert round(cpu["forward"] / BURST) == round(cpu["torch"] / BURST) == 1

    runner.run(run())


def test_nothing_is_measured_where_nothing_is_accounted_for(runner):
    async def bursts() -> str:
        with stage("tokens"):
            await asyncio.sleep(0)
        return "done"

    async def run() -> None:
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        coroutine = bursts()
        assert in_stage("play", coroutine) is coroutine
        assert await coroutine == "done"
        meter = LagMeter()
        meter.start()
        meter.stop()
        assert loop.get_task_factory() is factory
        before = stages.wall_seconds_by_stage()
        assert await in_stage("play", bursts()) == "done"
        assert stages.wall_seconds_by_stage() == before

    runner.run(run())


def test_a_task_is_what_it_was(runner, tmp_path):
    """Errors, cancellation, results, and what a dump of stacks says of it."""

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("as always")

    async def waits_long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    ended: list[bool] = []

    async def run() -> None:
        async with measured():
            with pytest.raises(ValueError, match="as always"):
                await asyncio.create_task(fails())
            waiting = asyncio.create_task(waits_long(), name="the one that waits")
            await asyncio.sleep(0)
            text = dump_stacks(tmp_path / "stacks.txt").read_text()
            assert "task the one that waits" in text
            assert "await asyncio.sleep(60)" in text
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await waits_long()

    runner.run(run())
    assert ended == [True, True]


def test_a_role_s_stages_as_metrics(runner):
    async def run() -> None:
        seconds = StageTimer("learner")
        async with measured():
            seconds.read_increment()
            with stage("tokens"):
                burn()
            metrics, again = seconds.read_increment(), seconds.read_increment()
        assert metrics["cpu/learner_tokens_seconds"] == pytest.approx(BURST, rel=0.1)
        assert metrics["wall/learner_tokens_seconds"] >= BURST
        assert again["wall/learner_tokens_seconds"] == 0
        assert seconds.total_seconds()["cpu/learner_tokens_seconds"] >= metrics["cpu/learner_tokens_seconds"]

    runner.run(run())
