"""Actors of a real Ray do what `world.Actors` and `world.ActorRef` say."""

import asyncio
import contextlib
import os
import time

import pytest

from r3async.actors.process import ActorNotLoaded
from r3async.world import ActorLostError, ActorOptions, ActorRef, World
from r3async.world.real import REAL_WORLD

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("local_ray")]


class Wrong(RuntimeError):
    def __init__(self, *words: str):
        super().__init__(*words)
        self.words = words


class Echo:
    def __init__(self, world: World, name: str):
        self.world, self.name, self.slow = world, name, 0

    async def pid(self) -> int:
        return self.world.processes.pid

    async def is_its_own_world(self) -> bool:
        return self.world is REAL_WORLD

    async def niceness(self) -> int:
        return os.nice(0)

    async def hash_of(self, text: str) -> int:
        return hash(text)

    async def fail(self, error: Exception) -> None:
        raise error

    async def sleep(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        self.slow += 1
        return self.slow

    async def current(self) -> ActorRef:
        return self.world.actors.current_actor()

    async def ask(self, other: ActorRef, method: str, *args: object) -> object:
        return await other.call(method, *args)

    async def end(self) -> None:
        os._exit(1)

    async def sum(self, values: list[int]) -> int:
        return sum(values)

    async def shared(self, reference: list[object]) -> int:
        return sum(self.world.actors.get(reference[0], 20.0))


def spawn(name: str, **placement: int) -> ActorRef:
    return REAL_WORLD.actors.spawn_actor(
        Echo, name, name=name, actor_options=ActorOptions(threads=0, max_concurrency=100, **placement)
    )


async def next_process(actor: ActorRef, pid: int) -> int:
    """The id of the one that was started in its place."""
    deadline = time.monotonic() + 240
    while True:
        with contextlib.suppress(ActorLostError):
            if (now := await actor.call("pid", timeout=240)) != pid:
                return now
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def lost(actor: ActorRef) -> None:
    """Until its calls fail: one that was killed may still answer those that were on their way."""
    deadline = time.monotonic() + 240
    with contextlib.suppress(ActorLostError):
        while True:
            await actor.call("pid", timeout=240)
            assert time.monotonic() < deadline


async def test_calls_between_actors_their_exceptions_and_time_limits():
    one, two = spawn("one"), spawn("two")
    try:
        assert await one.call("is_its_own_world", timeout=240)
        assert await one.call("niceness", timeout=240) == os.nice(0), "Ray's own workers have 15"
        pids = [await actor.call("pid", timeout=240) for actor in (one, two)]
        assert await one.call("hash_of", "task", timeout=240) == await two.call("hash_of", "task", timeout=240)
        assert await one.call("ask", two, "pid", timeout=240) == pids[1]
        myself = await two.call("current", timeout=240)
        assert await one.call("ask", myself, "pid", timeout=240) == pids[1]
        with pytest.raises(Wrong) as caught:
            await one.call("fail", Wrong("a", "b"), timeout=240)
        assert caught.type is Wrong
        assert caught.value.words == ("a", "b")
        with pytest.raises(ActorNotLoaded, match=r"^nothing yet$"):
            await one.call("ask", two, "fail", ActorNotLoaded("nothing yet"), timeout=240)
        with pytest.raises(TimeoutError, match="its own"):
            await one.call("fail", TimeoutError("its own"), timeout=240)
        with pytest.raises(TimeoutError) as ours:
            await one.call("sleep", 1.0, timeout=0.1)
        assert str(ours.value) == ""
        left = asyncio.ensure_future(one.call("sleep", 1.0))
        await asyncio.sleep(0.1)
        left.cancel()
        assert await one.call("sleep", 1.5, timeout=240) == 3, "nobody waits, and the methods go on"
        reference = REAL_WORLD.actors.put([1, 2, 3])
        assert await one.call("shared", [reference], timeout=240) == 6
        assert await one.call("sum", reference, timeout=240) == 6
    finally:
        for actor in (one, two):
            REAL_WORLD.actors.kill_actor(actor)


class NeedsFile:
    """An actor whose constructor raises while a file is missing."""

    def __init__(self, world: World, path: str):
        open(path).close()

    async def pid(self) -> int:
        return os.getpid()


async def test_a_restart_that_raises_is_tried_again_and_a_first_start_that_raises_is_lost(tmp_path):
    """A disk that failed for a moment while an actor was restarted cost the actor for ever."""
    path, options = tmp_path / "needed", ActorOptions(threads=0, max_restarts=-1)
    unmade = REAL_WORLD.actors.spawn_actor(NeedsFile, str(path), name="unmade", actor_options=options)
    await lost(unmade)
    path.touch()
    actor = REAL_WORLD.actors.spawn_actor(NeedsFile, str(path), name="restarted", actor_options=options)
    try:
        first = await actor.call("pid", timeout=240)
        path.unlink()
        REAL_WORLD.actors.kill_actor(actor, restart=True)
        await asyncio.sleep(5.0)
        with pytest.raises((ActorLostError, TimeoutError)):
            await actor.call("pid", timeout=2)
        path.touch()
        assert await next_process(actor, first) != first
    finally:
        REAL_WORLD.actors.kill_actor(actor)


async def test_a_process_that_ends_is_lost_and_is_restarted_as_often_as_it_may_be():
    mortal, other = spawn("mortal", max_restarts=2), spawn("other")
    try:
        first = await mortal.call("pid", timeout=240)
        waiting = asyncio.ensure_future(mortal.call("sleep", 600.0))
        await asyncio.sleep(0.2)
        with pytest.raises(ActorLostError, match="mortal: "):
            await mortal.call("end", timeout=240)
        with pytest.raises(ActorLostError, match="mortal: "):
            await asyncio.wait_for(waiting, 120)
        second = await next_process(mortal, first)
        REAL_WORLD.actors.kill_actor(mortal, restart=True)
        assert await next_process(mortal, second) != first
        REAL_WORLD.actors.kill_actor(mortal)
        await lost(mortal)
        with pytest.raises(ActorLostError):
            await other.call("ask", mortal, "pid", timeout=240)
    finally:
        REAL_WORLD.actors.kill_actor(other)


def test_a_thread_without_a_loop_begins_calls_waits_for_them_and_is_told_of_errors():
    actors, one = REAL_WORLD.actors, spawn("one")
    slow, quick = actors.begin_call(one, "sleep", 30.0), actors.begin_call(one, "pid")
    assert actors.wait_for_call([slow, quick], timeout=240) == ([quick], [slow])
    assert actors.get(quick, 60) > 0
    with pytest.raises(TimeoutError):
        actors.get(slow, 0.1)
    with pytest.raises(Wrong):
        actors.get(actors.begin_call(one, "fail", Wrong("a")), 60)
    actors.kill_actor(one)
    with pytest.raises(ActorLostError):
        actors.get(slow, 60)
