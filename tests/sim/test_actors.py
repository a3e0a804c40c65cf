"""Simulated actors: calls, what is shared, and what happens when processes end."""

import asyncio
import gc
import inspect
from dataclasses import dataclass, field

import numpy as np
import pytest

from dev.simulation.actors import copy_as_sent
from dev.simulation.loop import ProcessKilled
from dev.simulation.world import Simulation
from r3async.world import ActorLostError, ActorOptions, ActorRef


@dataclass
class Box:
    items: list[int] = field(default_factory=list)


class OwnError(ValueError):
    def __init__(self, one: int, two: int):
        super().__init__(one, two)
        self.both = one, two


class Unpicklable(Exception):
    def __init__(self, one: int, two: int):
        super().__init__("cannot be made from this")


class Counter:
    """Counts in memory, and says where it runs."""

    made = 0

    def __init__(self, world, start: int = 0, box: Box | None = None):
        self.world, self.count, self.box = world, start, box
        Counter.made += 1

    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count

    async def slow(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.count

    async def forever(self, seen: str = ""):
        await asyncio.Event().wait()

    def whereabouts(self):
        return self.world.processes.pid, self.world.processes.host

    def keep(self, box: Box) -> Box:
        box.items.append(2)
        self.box = box
        return box

    def kept(self) -> Box | None:
        return self.box

    async def fail(self, kind: str):
        await asyncio.sleep(0.1)
        raise {"own": OwnError(1, 2), "unpicklable": Unpicklable(1, 2), "cancelled": asyncio.CancelledError()}[kind]

    def me(self) -> ActorRef:
        return self.world.actors.current_actor()

    async def ask(self, other: ActorRef, method: str):
        return await other.call(method)

    async def end_self(self):
        self.world.processes.kill_process(*self.whereabouts())
        raise AssertionError("it runs on")

    def spawn(self, name: str) -> ActorRef:
        return self.world.actors.spawn_actor(Counter, 7, name=name)

    def put(self, value):
        return self.world.actors.put(value)

    def get(self, references):
        return self.world.actors.get(references[0])

    def same(self, value):
        return value


class Unmakeable:
    def __init__(self, world):
        raise OSError("no memory")


@pytest.fixture
def simulation():
    simulation = Simulation(1, hosts=("a", "b"), max_seconds=10_000.0)
    yield simulation
    simulation.close()
    assert simulation.loop.failures == []


@pytest.fixture
def run(simulation):
    """Runs `main(world)` in the driver's process."""
    driver = simulation.begin_process("driver", simulation.hosts["a"])
    return lambda main: simulation.run(driver, main(driver.world))


def in_driver(main):
    """Make a test that runs `main(world)` in the driver's process, or `main(world, simulation)`."""
    if len(inspect.signature(main).parameters) == 1:
        return lambda run: run(main)
    return lambda run, simulation: run(lambda world: main(world, simulation))


def test_calls_take_time_and_arrive_in_order(run, simulation):
    async def main(world):
        actor = world.actors.spawn_actor(Counter, 5, name="counter")
        calls = [asyncio.create_task(actor.call("add")) for _ in range(20)]
        counts = [await call for call in calls]
        before = world.clock.monotonic()
        assert await actor.call("slow", 3.0) == 25
        return counts, world.clock.monotonic() - before

    counts, seconds = run(main)
    assert counts == list(range(6, 26))
    low, high = simulation.delays.call
    assert 3.0 + 2 * low <= seconds <= 3.0 + 2 * high


def test_calls_run_beside_each_other_up_to_the_concurrency(run, simulation):
    async def main(world):
        times = []
        for placement in (ActorOptions(), ActorOptions(max_concurrency=2)):
            actor = world.actors.spawn_actor(Counter, name=f"c{len(times)}", actor_options=placement)
            await actor.call("add")
            before = world.clock.monotonic()
            await asyncio.gather(*(actor.call("slow", 1.0) for _ in range(4)))
            times.append(round(world.clock.monotonic() - before, 1))
        return times

    assert run(main) == [1.0, 2.0]


def test_nothing_mutable_is_shared(run):
    async def main(world):
        box = Box([1])
        actor = world.actors.spawn_actor(Counter, 0, box, name="c")
        box.items.append(9)
        assert (await actor.call("kept")).items == [1]
        mine = Box([1])
        back = await actor.call("keep", mine)
        assert (mine.items, back.items) == ([1], [1, 2])
        back.items.append(3)
        assert (await actor.call("kept")).items == [1, 2]

    run(main)
    array = np.arange(3)
    again = copy_as_sent({"a": [array, (1, "x")]})
    assert again["a"][0] is not array
    assert again["a"][1] == (1, "x")


@in_driver
async def test_refs_pass_through_and_name_the_same_actor(world):
    one, other = (world.actors.spawn_actor(Counter, name=name) for name in ("one", "other"))
    await one.call("add", 41)
    assert await other.call("ask", one, "add") == 42
    assert copy_as_sent([Box([one])])[0].items[0].actor is one.actor  # also through pickle
    me = await one.call("me")
    assert (me.name, await me.call("add")) == ("one", 43)
    spawned = await one.call("spawn", "third")
    assert await spawned.call("add") == 8


@in_driver
async def test_exceptions_arrive_as_themselves(world):
    actor = world.actors.spawn_actor(Counter, name="c")
    with pytest.raises(OwnError) as found:
        await actor.call("fail", "own")
    assert found.value.both == (1, 2)
    with pytest.raises(RuntimeError, match="Unpicklable: cannot be made"):
        await actor.call("fail", "unpicklable")
    with pytest.raises(RuntimeError, match="was cancelled"):
        await actor.call("fail", "cancelled")
    with pytest.raises(AttributeError, match="nothing"):
        await actor.call("nothing")
    with pytest.raises(NotImplementedError):
        world.actors.begin_call(actor, "add")


@in_driver
async def test_a_timeout_does_not_stop_the_method(world):
    actor = world.actors.spawn_actor(Counter, name="c")
    await actor.call("add")
    with pytest.raises(TimeoutError):
        await actor.call("slow", 100.0, timeout=1.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await actor.call("slow", 100.0)
    assert await actor.call("slow", 0.0, timeout=1.0) == 1


def test_a_killed_actor_loses_its_calls_a_bit_later(run, simulation):
    async def main(world):
        actor = world.actors.spawn_actor(Counter, name="c")
        await actor.call("add")
        calls = [asyncio.create_task(actor.call("forever")) for _ in range(2)]
        await asyncio.sleep(1.0)
        gc.collect()  # a task and what it waits for may know of each other alone
        world.actors.kill_actor(actor)
        before = world.clock.monotonic()
        for call in calls:
            with pytest.raises(ActorLostError, match="c: killed by driver"):
                await call
        seconds = world.clock.monotonic() - before
        with pytest.raises(ActorLostError, match="killed by driver"):
            await actor.call("add")
        return seconds

    low, high = simulation.delays.notice
    assert low <= run(main) <= high


@in_driver
async def test_a_restarted_actor_is_a_new_process_of_the_same_name(world):
    actor = world.actors.spawn_actor(Counter, 10, name="c", actor_options=ActorOptions(max_restarts=2))
    pid, host = await actor.call("whereabouts")
    for count in range(2):
        await actor.call("add")
        assert world.processes.kill_process(pid, "nowhere") is False
        assert world.processes.is_alive(pid, host) == (host == world.processes.host)
        running = asyncio.create_task(actor.call("forever"))
        await asyncio.sleep(0.5)
        if host == world.processes.host:
            assert world.processes.kill_process(pid, host)
        else:
            world.actors.kill_actor(actor, restart=True)
        with pytest.raises(ActorLostError):
            await running
        with pytest.raises(ActorLostError, match="restarts"):
            await actor.call("whereabouts")
        await asyncio.sleep(10.0)
        now, host = await actor.call("whereabouts")
        assert now != pid
        pid = now
        assert await actor.call("add", 0) == 10, count
    world.actors.kill_actor(actor, restart=True)
    with pytest.raises(ActorLostError):
        await actor.call("add")
    await asyncio.sleep(100.0)
    with pytest.raises(ActorLostError):
        await actor.call("add")


@in_driver
async def test_a_process_that_kills_itself_does_no_more(world):
    actor = world.actors.spawn_actor(Counter, name="c")
    with pytest.raises(ActorLostError, match="killed by c"):
        await actor.call("end_self")


@in_driver
async def test_an_actor_that_cannot_be_made_is_lost(world):
    actor = world.actors.spawn_actor(Unmakeable, name="c", actor_options=ActorOptions(max_restarts=3))
    with pytest.raises(ActorLostError, match="OSError: no memory"):
        await actor.call("add")


@in_driver
async def test_an_actor_that_cannot_be_made_again_is_restarted_until_it_can(world, simulation):
    actor = world.actors.spawn_actor(Counter, name="c", actor_options=ActorOptions(max_restarts=-1))
    assert await actor.call("add") == 1
    counter, simulation.actors[-1].actor_class = simulation.actors[-1].actor_class, Unmakeable
    world.actors.kill_actor(actor, restart=True)
    await asyncio.sleep(60)
    simulation.actors[-1].actor_class = counter
    await asyncio.sleep(60)
    assert await actor.call("add") == 1


def test_a_start_that_fails_is_made_again(run, simulation):
    simulation.plan_start = lambda actor: (2.0, actor.start_count == 1)

    async def main(world):
        fragile = world.actors.spawn_actor(Counter, name="fragile")
        robust = world.actors.spawn_actor(Counter, name="robust", actor_options=ActorOptions(max_restarts=1))
        with pytest.raises(ActorLostError, match="start failed"):
            await fragile.call("add")
        await asyncio.sleep(5.0)
        assert await robust.call("add") == 1

    run(main)


@in_driver
async def test_actors_end_with_the_process_that_spawned_them(world):
    parent = world.actors.spawn_actor(Counter, name="parent")
    child = await parent.call("spawn", "child")
    assert await child.call("add") == 8
    world.actors.kill_actor(parent)
    with pytest.raises(ActorLostError, match="parent ended"):
        await child.call("add")


@in_driver
async def test_what_was_put_is_lost_with_its_owner(world):
    owner, other = (world.actors.spawn_actor(Counter, name=name) for name in ("owner", "other"))
    reference = await owner.call("put", [1, 2])
    assert await other.call("get", [reference]) == [1, 2]
    assert await other.call("same", reference) == [1, 2]
    assert world.actors.get(copy_as_sent(Box([reference])).items[0]) == [1, 2]
    world.actors.kill_actor(owner)
    for method, argument in (("get", [reference]), ("same", reference)):
        with pytest.raises(ActorLostError):
            await other.call(method, argument)


@in_driver
async def test_a_frozen_process_answers_when_it_thaws(world, simulation):
    actor = world.actors.spawn_actor(Counter, name="c")
    await actor.call("add")
    process = simulation.find_process("c")
    simulation.freeze_process(process)
    with pytest.raises(TimeoutError):
        await actor.call("add", timeout=5.0)
    simulation.loop.call_later(20.0, simulation.thaw_process, process)
    assert await actor.call("add") == 3


def test_calls_wait_while_their_hosts_are_cut_off(run, simulation):
    async def main(world):
        there = world.actors.spawn_actor(Counter, name="c")  # on the host with the fewest processes
        assert (await there.call("whereabouts"))[1] == "b"
        now = simulation.loop.now
        simulation.cut_hosts(simulation.hosts["b"], simulation.hosts["a"], 30.0)
        await there.call("add")
        return simulation.loop.now - now

    assert 30.0 < run(main) < 31.0


@in_driver
async def test_a_host_that_is_lost_takes_its_processes_along(world, simulation):
    actor = world.actors.spawn_actor(Counter, name="c", actor_options=ActorOptions(max_restarts=1))
    assert (await actor.call("whereabouts"))[1] == "b"
    running = asyncio.create_task(actor.call("forever"))
    await asyncio.sleep(0.1)
    simulation.lose_host(simulation.hosts["b"])
    with pytest.raises(ActorLostError, match="b was lost"):
        await running
    await asyncio.sleep(10.0)
    assert (await actor.call("whereabouts"))[1] == "a"


@in_driver
async def test_the_world_of_an_ended_process_does_nothing(world, simulation):
    actor = world.actors.spawn_actor(Counter, name="c")
    await actor.call("add")
    process = simulation.find_process("c")
    theirs = process.world
    simulation.end_process(process, "a test")
    for touch in (
        lambda: theirs.actors.spawn_actor(Counter, name="d"),
        lambda: theirs.actors.kill_actor(actor),
        lambda: theirs.actors.put(1),
        lambda: theirs.processes.kill_process(1, "a"),
        lambda: theirs.threads.repeat_until_done("x", 1.0, lambda: True),
        lambda: theirs.open_sockets(),
        lambda: theirs.unique_id(),
    ):
        with pytest.raises(ProcessKilled):
            touch()
    with pytest.raises(ProcessKilled):
        await theirs.threads.run(len, ())
