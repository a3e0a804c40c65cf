"""Leases are waited for: a call that finds nothing is answered when there is something, and by nobody else's fault twice."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import actors.conductor
import actors.waiting
from actors.conductor import Conductor
from actors.leasing import Leasing
from r3async.config import load_config, to_dict
from r3async.scheduling.admission import GroupLease
from r3async.world.real import REAL
from tests.helpers_world import StandIn

LIMIT = 20.0
COUNTERS = ("generated_tokens", "places_all", "places_empty", "engine_all", "engine_idle", "playing")


class Lacks(StandIn):
    """A learner that has nothing."""

    async def missing(self, groups: list[int]) -> dict[int, list[int]]:
        return {group: [0, 1] for group in groups}

    async def interrupt(self) -> None:
        pass


@pytest.fixture
def conductor(tmp_path, monkeypatch) -> Conductor:
    """Of two generators with weights, and one slot. It looks only when something rings."""
    monkeypatch.setattr(actors.conductor, "begin", lambda *args: None)
    monkeypatch.setattr(actors.waiting, "LOOK_SECONDS", 10 * LIMIT)
    settings = ["schedule.groups_per_step=1", "schedule.samples_per_group=2", "schedule.max_staleness=0", "steps=9"]
    made = Conductor(
        REAL,
        "run",
        to_dict(load_config("quickstart", settings)),
        str(tmp_path),
        Lacks(),
        {"a": StandIn(), "b": StandIn()},
    )
    for generator in made.fleet:
        generator.health.loaded()
        generator.health.installed(0, 0)
    made.admission.installed(0)
    return made


async def lease(conductor: Conductor, who: str, room: int = 2, wait: float = 0.0) -> tuple[list[int], bool]:
    """Groups, and whether there may be more."""
    stats = dict.fromkeys(COUNTERS, 0.0) | {"limit": 2.0}
    answer = await asyncio.wait_for(conductor.lease(who, room, stats, wait=wait), LIMIT)
    return [x.group_index for x in msgspec.msgpack.decode(answer["leases"], type=list[GroupLease])], answer["more"]


async def waiting(conductor: Conductor, who: str) -> asyncio.Task[tuple[list[int], bool]]:
    task = asyncio.create_task(lease(conductor, who, wait=10 * LIMIT))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def train(conductor: Conductor, version: int) -> None:
    conductor.admission.trained(version, [version - 1])
    for generator in conductor.fleet:
        generator.health.installed(version, version)
    conductor.admission.installed(version)


async def test_who_waits_is_given_what_becomes_free(conductor):
    assert await lease(conductor, "a") == ([0], True)
    assert await lease(conductor, "b") == ([], True)
    b = await waiting(conductor, "b")
    train(conductor, 1)
    assert await asyncio.wait_for(b, LIMIT) == ([1], True)


async def test_a_later_call_ends_an_earlier_one_which_leases_nothing(conductor):
    await lease(conductor, "a")
    first = await waiting(conductor, "b")
    second = await waiting(conductor, "b")
    assert await asyncio.wait_for(first, LIMIT) == ([], True)
    train(conductor, 1)
    assert await asyncio.wait_for(second, LIMIT) == ([1], True)
    assert conductor.admission.leases("b") == [1]


async def test_what_returns_from_the_dead_goes_to_who_waits_and_not_to_the_dead_ones_own_call(conductor):
    assert (await lease(conductor, "a"))[0] == [0]
    of_the_dead, b = await waiting(conductor, "a"), await waiting(conductor, "b")
    await conductor._bury(conductor.fleet["a"], RuntimeError("killed"))
    assert await asyncio.wait_for(b, LIMIT) == ([0], True)
    assert (await asyncio.wait_for(of_the_dead, LIMIT))[0] == []
    assert (conductor.admission.leases("a"), conductor.admission.leases("b")) == ([], [0])


async def test_who_waits_hears_of_the_end(conductor):
    await lease(conductor, "a")
    b = await waiting(conductor, "b")
    await conductor.stop()
    assert await asyncio.wait_for(b, LIMIT) == ([], False)


class Asked:
    """A conductor that answers when the test says so."""

    def __init__(self) -> None:
        self.rooms: list[int] = []
        self.answers: list[asyncio.Future[dict[str, Any]]] = []

    async def __call__(self, room: int, stats: dict[str, float], wait: float) -> dict[str, Any]:
        self.rooms.append(room)
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    def answer(self, call: int, leases: list[GroupLease], more: bool = True) -> None:
        told = {"leases": msgspec.msgpack.encode(leases), "more": more, "blocked": False}
        self.answers[call].set_result(told)


async def until(what) -> None:
    async with asyncio.timeout(LIMIT):
        while not what():  # noqa: ASYNC110 - it offers nothing to wait on
            await asyncio.sleep(0.005)


async def test_a_generator_asks_again_when_leases_come_and_when_an_episode_is_over_and_not_in_between():
    config = load_config("quickstart", ["generator.concurrency=4"])
    asked, player, ends = Asked(), SimpleNamespace(playing=0), asyncio.Event()

    def play(lease: GroupLease):
        player.playing += len(lease.episode_indices)
        return ended(lease)

    async def ended(lease: GroupLease) -> None:
        await ends.wait()
        player.playing -= len(lease.episode_indices)
        leasing.wake()

    leasing = Leasing(
        config,
        lambda: 0.0,  # no heartbeat is ever due
        SimpleNamespace(stats=lambda: {"running": player.playing}),  # type: ignore[arg-type]
        player,  # type: ignore[arg-type]
        lease=asked,
        play=play,
        load=dict,
        check=lambda: None,
    )
    running = asyncio.create_task(leasing.run(lambda: False))
    await until(lambda: asked.rooms == [4])
    asked.answer(0, [GroupLease(0, 0, (0, 1))])
    await until(lambda: len(asked.rooms) == 2)
    for _ in range(100):
        leasing._woken.set()  # looks
        await asyncio.sleep(0)
    assert asked.rooms == [4, 2]  # what has come counts at once
    ends.set()
    await until(lambda: len(asked.rooms) == 3)
    asked.answer(1, [])  # overtaken
    asked.answer(2, [], more=False)
    await asyncio.wait_for(running, LIMIT)
    assert asked.rooms == [4, 2, 4]
