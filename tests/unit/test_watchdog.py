"""The watchdog names the stage that stands still though it has work, and no other."""

import asyncio
import threading

import pytest

from r3async.schedule.health import Watchdog
from r3async.world.threads import dump_stacks
from tests.helpers.world import Clock


@pytest.fixture
def clock():
    return Clock()


def names(stalls):
    return [stall.stage for stall in stalls]


def test_a_stage_with_work_that_does_nothing_stalls_and_one_without_work_does_not(clock):
    dog = Watchdog(clock, 10)
    for now in range(0, 13, 3):
        clock.now = now
        dog.observe_stage("learner", done=4, waiting=0)
        dog.observe_stage("generator", done=7, waiting=2)
        dog.observe_stage("transport", done=now, waiting=1)
    (stall,) = dog.find_stalls()
    assert (stall.stage, stall.seconds, stall.limit, stall.done, stall.waiting) == ("generator", 12, 10, 7, 2)


def test_time_without_work_does_not_count(clock):
    dog = Watchdog(clock, 10)
    dog.observe_stage("learner", 1, 0)
    clock.now = 100
    dog.observe_stage("learner", 1, 3)
    clock.now = 109
    dog.observe_stage("learner", 1, 3)
    assert not dog.find_stalls()
    clock.now = 110
    assert names(dog.find_stalls()) == ["learner"]


def test_a_stall_is_told_once_and_again_only_after_the_stage_has_moved(clock):
    dog = Watchdog(clock, 10, {"slow": 50})
    dog.observe_stage("slow", 0, 1)
    dog.observe_stage("fast", 0, 1)
    clock.now = 20
    assert names(dog.take_new_stalls()) == ["fast"]
    assert dog.take_new_stalls() == []
    clock.now = 60
    assert names(dog.take_new_stalls()) == ["slow"]
    dog.observe_stage("fast", 1, 1)
    clock.now = 75
    assert names(dog.take_new_stalls()) == ["fast"]
    assert dog.describe_stages()["fast"] == {"done": 1, "waiting": 1, "still_for": 15}


def test_a_restarted_process_counts_from_zero_and_has_moved(clock):
    dog = Watchdog(clock, 10)
    dog.observe_stage("engine", 500, 1)
    clock.now = 9
    dog.observe_stage("engine", 0, 1)
    clock.now = 18
    assert not dog.find_stalls()


def test_a_stage_that_ended_is_not_missed(clock):
    dog = Watchdog(clock, 10)
    dog.observe_stage("engine", 5, 1)
    dog.forget_stage("engine")
    clock.now = 99
    assert not dog.find_stalls()


async def test_the_dump_names_every_thread_and_every_task_with_its_line(tmp_path):
    held = threading.Event()

    def wait_for_nothing():
        held.wait(20)

    async def wait_for_ever():
        await asyncio.sleep(20)

    thread = threading.Thread(target=wait_for_nothing, name="stuck-thread", daemon=True)
    thread.start()
    task = asyncio.create_task(wait_for_ever(), name="stuck-task")
    await asyncio.sleep(0)
    path = dump_stacks(tmp_path / "logs" / "stacks.txt", "transport stood still")
    dump_stacks(path, "again")
    held.set()
    task.cancel()
    text = path.read_text()
    assert text.count("====") == 2
    for part in ("transport stood still", "stuck-thread", "held.wait(20)", "stuck-task", "await asyncio.sleep(20)"):
        assert part in text
