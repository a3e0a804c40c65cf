"""The event loop in virtual time: time, order, processes that freeze and end, and what asyncio itself makes of it."""

import asyncio
import gc
import os
import subprocess
import sys
import warnings

import pytest

from dev.simulation.loop import DeadlockError, LimitReachedError, ProcessKilled, VirtualLoop, VirtualProcess


@pytest.fixture
def loop():
    loop = VirtualLoop(max_seconds=100_000.0)
    yield loop
    loop.close()


def test_time_jumps_to_the_next_timer(loop):
    async def main():
        began = loop.time()
        await asyncio.sleep(3600.0)
        return loop.time() - began

    assert loop.run_until_complete(main()) == 3600.0
    assert loop.callback_count < 10


def test_timers_fire_by_time_and_then_by_order(loop):
    seen = []
    for name, delay in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        loop.call_later(delay, seen.append, name)
    loop.call_later(1.0, seen.append, "never").cancel()
    loop.call_soon(seen.append, "first")
    loop.run_until_complete(asyncio.sleep(3.0))
    assert seen == ["first", "a", "b", "c"]


def test_what_asyncio_offers_works(loop):
    async def fail(after: float):
        await asyncio.sleep(after)
        raise ValueError("it failed")

    async def both(*works):
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(6.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1.0)
        with pytest.raises(ExceptionGroup) as failed:
            await both(fail(1.0), asyncio.sleep(50.0))
        assert isinstance(failed.value.exceptions[0], ValueError)
        shielded = asyncio.create_task(asyncio.sleep(1.0, "kept"))
        waiting = asyncio.ensure_future(asyncio.shield(shielded))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await shielded == "kept"
        assert await asyncio.gather(asyncio.sleep(2.0, 1), asyncio.sleep(1.0, 2)) == [1, 2]
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(t)) for t in (1.0, 9.0)], return_when=asyncio.FIRST_COMPLETED
        )
        assert (len(done), len(pending)) == (1, 1)
        return loop.time()

    assert loop.run_until_complete(main()) == 5.0 + 1.0 + 1.0 + 1.0 + 2.0 + 1.0
    assert loop.failures == []


def test_nothing_to_do_is_a_deadlock_that_says_where_each_waits(loop):
    async def for_nobody():
        await asyncio.Event().wait()

    async def main():
        await asyncio.create_task(for_nobody(), name="lonely")

    with pytest.raises(DeadlockError) as found:
        loop.run_until_complete(main())
    assert "lonely: Event.wait" in str(found.value)
    assert "for_nobody test_loop.py:" in str(found.value)


def test_it_ends_at_its_limits():
    async def spin():
        for _ in range(10_000):
            await asyncio.sleep(0)

    loop = VirtualLoop(max_callbacks=1000)
    with pytest.raises(LimitReachedError, match="1000 callbacks"):
        loop.run_until_complete(spin())
    loop.close()
    loop = VirtualLoop(max_seconds=10.0)
    with pytest.raises(LimitReachedError, match="10 s"):
        loop.run_until_complete(asyncio.sleep(11.0))
    loop.close()


def test_a_failing_callback_is_recorded_and_the_loop_goes_on(loop):
    def fail():
        raise ValueError("of a callback")

    async def forgotten():
        raise ValueError("of a task")

    async def main():
        loop.call_soon(fail)
        loop.create_task(forgotten())
        await asyncio.sleep(1.0)

    loop.run_until_complete(main())
    gc.collect()
    assert len(loop.failures) == 2
    assert "ValueError: of a callback at test_a_failing" in loop.failures[0]
    assert "ValueError: of a task" in loop.failures[1]


def test_an_executor_is_refused(loop):
    with pytest.raises(RuntimeError, match=r"world\.threads"):
        loop.run_until_complete(asyncio.to_thread(len, ()))


async def tick(loop: VirtualLoop, seen: list[float]):
    while True:
        await asyncio.sleep(1.0)
        seen.append(loop.time())


def test_a_frozen_process_catches_up_when_it_thaws(loop):
    process, other, seen, others = VirtualProcess(loop, "p"), VirtualProcess(loop, "q"), [], []
    loop.create_task(tick(loop, seen), context=process.context)
    loop.create_task(tick(loop, others), context=other.context)
    loop.call_at(2.5, process.freeze)
    loop.call_at(2.7, loop.call_soon, seen.append, "told", context=process.context)
    loop.call_at(10.5, process.thaw)
    loop.run_until_complete(asyncio.sleep(12.7))
    assert seen == [1.0, 2.0, "told", 10.5, 11.5, 12.5]
    assert others == [float(second) for second in range(1, 13)]


def test_tasks_and_callbacks_inherit_the_process(loop):
    process, seen = VirtualProcess(loop, "p"), []

    async def main():
        loop.create_task(tick(loop, seen))
        loop.call_later(5.0, seen.append, "late")

    loop.create_task(main(), context=process.context)
    loop.call_at(3.5, process.end)
    loop.run_until_complete(asyncio.sleep(10.0))
    assert seen == [1.0, 2.0, 3.0]


async def later(first, second):
    await first
    await second


class Holder:
    """What a dead process left in a cycle, with every kind of clean-up."""

    def __init__(self, process: VirtualProcess):
        self.process, self.effects, self.task = process, [], None

    async def work(self):
        unawaited = later(asyncio.sleep(1.0), asyncio.sleep(1.0))
        try:
            async with asyncio.timeout(50.0):
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(1.0)
        except BaseException:
            await unawaited
            raise
        finally:
            again = asyncio.gather(*(later(asyncio.sleep(1.0), asyncio.sleep(1.0)) for _ in range(2)))
            try:
                await again
            finally:
                self.process.raise_if_ended()
                self.effects.append("a finally had an effect")


def test_a_kill_leaves_no_trace(loop, capfd, monkeypatch):
    """Neither the garbage collector nor the end of the loop lets a `finally` do anything, or warns."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: unraisable.append(str(what.exc_value)))
    process = VirtualProcess(loop, "p")
    holders = [Holder(process) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for holder in holders:
            holder.task = loop.create_task(holder.work(), context=process.context)
        loop.call_at(1.0, process.end)  # and then a task that never starts
        loop.call_at(1.0, lambda made: loop.create_task(made.work(), context=process.context), Holder(process))
        loop.create_task(later(asyncio.Event().wait(), Holder(process).work()), context=process.context)
        effects = [holder.effects for holder in holders]
        del holders, holder
        loop.run_until_complete(asyncio.sleep(100.0))
        gc.collect()
        assert loop.time() == 100.0
        loop.close()
        gc.collect()
    assert effects == [[], [], []]
    assert loop.failures == []
    assert unraisable == []
    assert capfd.readouterr().err == ""


def test_a_process_that_ends_itself_stops_where_it_touches_the_world(loop):
    process, seen = VirtualProcess(loop, "p"), []

    async def suicide():
        process.end()
        try:
            process.raise_if_ended()
        finally:
            seen.append("before the kill was complete")
        seen.append("never")

    loop.create_task(suicide(), context=process.context)
    loop.call_later(1.0, process.raise_if_ended, context=process.context)
    loop.run_until_complete(asyncio.sleep(2.0))
    gc.collect()
    assert seen == ["before the kill was complete"]
    assert loop.failures == []
    with pytest.raises(ProcessKilled):
        process.raise_if_ended()


def test_at_the_end_of_a_process_its_callbacks_are_called_once(loop):
    process, seen = VirtualProcess(loop, "p"), []
    process.add_end_callback(lambda: seen.append("files"))
    process.add_end_callback(lambda: seen.append("sockets"))
    process.end()
    process.end()
    assert seen == ["files", "sockets"]
    assert process.ended


ORDERS = """
import asyncio, random
from dev.simulation.loop import VirtualLoop
loop = VirtualLoop()
async def main():
    rng, seen = random.Random(1), []
    waste = [object() for _ in range(rng.randrange(99))]
    async def work(number):
        await asyncio.sleep(rng.randrange(4))
        seen.append(number)
    tasks = {asyncio.create_task(work(n)) for n in range(40)} | {loop.create_future() for _ in range(20)}
    order = [getattr(t, "get_name", lambda: "future")() for t in tasks]
    done, pending = await asyncio.wait(tasks, timeout=2.5)
    order += [t.get_name() for t in done] + [hash(t) for t in pending]
    for t in pending: t.cancel()
    try:
        async with asyncio.TaskGroup() as group:
            async def cancelled(n):
                try: await asyncio.sleep(9)
                finally: seen.append(("cancelled", n))
            for n in range(30): group.create_task(cancelled(n))
            await asyncio.sleep(1); raise ValueError
    except* ValueError: pass
    return order, seen
print(loop.run_until_complete(main()))
"""


def test_sets_of_tasks_iterate_alike_in_every_process():
    def run(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", ORDERS], env=environment, capture_output=True, text=True, timeout=240, check=True
        )
        return done.stdout

    first = run("1")
    assert first == run("2")
    assert first.count("cancelled") == 30
