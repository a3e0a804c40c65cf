"""Leases are waited for: a call that finds nothing is answered when there is something, and by nobody else's fault twice."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import r3async.actors.conductor
from r3async.actors.conductor import Conductor
from r3async.actors.lease_client import LeaseClient, VersionGate
from r3async.actors.leasing import HEARTBEAT_SECONDS, LeaseAnswer, LeaseCall
from r3async.actors.run_setup import RunSetup
from r3async.config import config_to_dict, load_config
from r3async.rollout.engine import EngineLostError
from r3async.schedule.run_ahead import GroupLease
from r3async.schedule.task_failures import EpisodeEnd
from r3async.world.real import REAL_WORLD
from tests.helpers.world import Clock, StandIn

LIMIT = 20.0
COUNTERS = ("generated_tokens", "places_all", "places_empty", "engine_all", "engine_idle", "playing")


class Lacks(StandIn):
    """A learner that has nothing."""

    async def missing_episodes(self, groups: list[int]) -> dict[int, list[int]]:
        return {group: [0, 1] for group in groups}

    async def interrupt_wait(self) -> None:
        pass


@pytest.fixture
async def conductor(tmp_path, monkeypatch) -> AsyncIterator[Conductor]:
    """Of two generators with weights, and one slot."""
    monkeypatch.setattr(r3async.actors.conductor, "prepare_process", lambda *args: None)
    settings = ["schedule.prompts_per_step=1", "schedule.group_size=2", "schedule.max_staleness=0", "steps=9"]
    config = config_to_dict(load_config("quickstart", settings))
    made = Conductor(REAL_WORLD, RunSetup("run", config, str(tmp_path)), Lacks(), {"a": StandIn(), "b": StandIn()})
    for generator in made.fleet:
        generator.health.mark_loaded()
        generator.health.mark_installed(0, 0)
    made.admission.version_published(0)
    serving = asyncio.create_task(made.dispatcher.run())
    yield made
    serving.cancel()


async def lease(
    conductor: Conductor, who: str, room: int = 2, wait: float = 0.0, playing: int = 1, process: Any = None
) -> tuple[list[int], bool]:
    """Groups, and whether there may be more."""
    stats = dict.fromkeys(COUNTERS, 0.0) | {"limit": 2.0, "playing": playing}
    call = msgspec.msgpack.encode(LeaseCall(who, process or (conductor.fleet[who].pid, ""), room, stats, wait=wait))
    answer = msgspec.msgpack.decode(await asyncio.wait_for(conductor.lease_groups(call), LIMIT), type=LeaseAnswer)
    return [x.group_index for x in answer.leases], answer.more


async def waiting(conductor: Conductor, who: str, **what: int) -> asyncio.Task[tuple[list[int], bool]]:
    task = asyncio.create_task(lease(conductor, who, wait=10 * LIMIT, **what))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    return task


def train(conductor: Conductor, version: int) -> None:
    conductor.admission.step_trained(version, [version - 1])
    for generator in conductor.fleet:
        generator.health.mark_installed(version, version)
    conductor.admission.version_published(version)
    conductor.fleet.leases_due.set()


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
    assert conductor.admission.list_leased_groups("b") == [1]


async def test_what_returns_from_a_lost_one_goes_to_who_waits_and_not_to_its_own_call(conductor):
    assert (await lease(conductor, "a"))[0] == [0]
    of_the_dead, b = await waiting(conductor, "a"), await waiting(conductor, "b")
    await conductor.dispatcher.requeue_lost(conductor.fleet["a"])
    assert await asyncio.wait_for(b, LIMIT) == ([0], True)
    assert (await asyncio.wait_for(of_the_dead, LIMIT))[0] == []
    assert (conductor.admission.list_leased_groups("a"), conductor.admission.list_leased_groups("b")) == ([], [0])


async def test_who_waits_is_answered_at_the_end(conductor):
    await lease(conductor, "a")
    b = await waiting(conductor, "b")
    await conductor.request_stop()
    assert await asyncio.wait_for(b, LIMIT) == ([], False)


async def test_whoever_waits_longest_is_served_first(conductor):
    await lease(conductor, "a")
    b, a = await waiting(conductor, "b"), await waiting(conductor, "a")
    train(conductor, 1)
    assert await asyncio.wait_for(b, LIMIT) == ([1], True)
    await asyncio.sleep(0)
    assert not a.done()
    train(conductor, 2)
    assert await asyncio.wait_for(a, LIMIT) == ([2], True)


async def test_who_waits_is_served_before_it_has_the_weights(conductor):
    await lease(conductor, "a")
    b = await waiting(conductor, "b")
    conductor.admission.step_trained(1, [0])
    conductor.fleet.leases_due.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not b.done()
    conductor.admission.version_published(1)
    conductor.fleet.leases_due.set()
    assert await asyncio.wait_for(b, LIMIT) == ([1], True)
    assert {generator.version for generator in conductor.fleet} == {0}


class Held(SimpleNamespace):
    """An engine that answers with its version."""

    async def generate(self, request):
        return self.version


async def test_what_is_leased_for_weights_that_the_engine_does_not_have_waits_for_them():
    engine = Held(version=3)
    gate = VersionGate(engine, asyncio.Event())
    for group, version in ((7, 3), (8, 4), (9, 5)):
        gate.require_version(GroupLease(group, 0, (0, 1), version))
    ids = ["g7e0t0", "g8e0t0", "g8e1t0", "g9e0t0", "probe"]
    calls = {name: asyncio.create_task(gate.generate(SimpleNamespace(request_id=name))) for name in ids}

    async def answered() -> dict[str, int]:
        for _ in range(5):
            await asyncio.sleep(0)
        return {name: call.result() for name, call in calls.items() if call.done()}

    assert (await answered(), gate.waiting) == ({"g7e0t0": 3, "probe": 3}, 3)
    gate.release_ready()
    assert len(await answered()) == 2
    engine.version = 4
    gate.release_ready()
    assert (await answered(), gate.waiting) == ({"g7e0t0": 3, "probe": 3, "g8e0t0": 4, "g8e1t0": 4}, 1)
    calls["g9e0t0"].cancel()
    await asyncio.sleep(0)
    assert gate.waiting == 0


async def test_a_request_that_finds_the_engine_lost_wakes_the_loop_which_raises_it():
    async def die(request):
        raise EngineLostError("its process ended")

    woken = asyncio.Event()
    gate = VersionGate(SimpleNamespace(version=0, generate=die), woken)
    gate.raise_if_lost()
    with pytest.raises(EngineLostError):
        await gate.generate(SimpleNamespace(request_id="g7e0t0"))
    assert woken.is_set()
    with pytest.raises(EngineLostError, match="its process ended"):
        gate.raise_if_lost()


async def test_a_call_that_has_waited_for_as_long_as_it_may_is_answered_and_leased_nothing_later(conductor):
    await lease(conductor, "a")
    assert await lease(conductor, "b", wait=0.01) == ([], True)
    train(conductor, 1)
    assert conductor.admission.list_leased_groups("b") == []


async def test_a_group_is_shared_among_the_idle(conductor):
    await lease(conductor, "a", playing=0)
    b, a = await waiting(conductor, "b", playing=0), await waiting(conductor, "a", playing=0)
    train(conductor, 1)
    assert await asyncio.wait_for(b, LIMIT) == await asyncio.wait_for(a, LIMIT) == ([1], True)
    assert conductor.admission.state_dict()["owners"] == [[1, [("a", (1,)), ("b", (0,))]]]


class Asked(StandIn):
    """A conductor that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LeaseCall] = []
        self.answers: list[asyncio.Future[bytes]] = []

    async def lease_groups(self, message: bytes) -> bytes:
        self.calls.append(msgspec.msgpack.decode(message, type=LeaseCall))
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    def reply(self, call: int, leases: list[GroupLease], more: bool = True) -> None:
        self.answers[call].set_result(msgspec.msgpack.encode(LeaseAnswer(leases, more)))

    @property
    def rooms(self) -> list[int]:
        return [call.free for call in self.calls]


class Playing:
    """A generator that leases from `asked`; an episode is over when the test says so."""

    def __init__(self, *settings: str):
        self.asked, self.clock, self.woken = Asked(), Clock(), asyncio.Event()
        config = load_config("quickstart", ["generator.concurrency=4", "schedule.group_size=2", *settings])
        self.ended: list[EpisodeEnd] = []
        engine = SimpleNamespace(collect_stats=lambda: {"running": self.leasing.playing_count}, version=0)
        who = {"generator_id": "g", "process": (1, "host"), "conductor": self.asked, "woken": self.woken}
        self.leasing = LeaseClient(config, self.clock, VersionGate(engine, self.woken), **who)

    async def run(self) -> None:
        """The loop of a generator, as far as leases are concerned."""
        while self.leasing.has_more or self.leasing.playing_count or self.leasing.open_calls:
            if self.leasing.is_call_due:
                ended, self.ended = self.ended, []
                self.leasing.begin_call({}, ended, [])
            await self.leasing.wait_for_change()
            self.leasing.playing_count += sum(len(lease.episode_indices) for lease in self.leasing.take_leases())

    def end(self, group: int, index: int) -> None:
        self.leasing.playing_count -= 1
        self.ended.append(EpisodeEnd(group, index, 7))
        self.woken.set()

    async def looks(self, passed: float = 0.01) -> None:
        """Everything that follows from what has happened by `passed` seconds from now."""
        self.clock.now += passed
        for _ in range(100):
            self.woken.set()
            await asyncio.sleep(0)


async def test_a_generator_asks_when_there_is_room_for_a_group_and_no_call_waits_for_one():
    g = Playing()
    running = asyncio.create_task(g.run())
    await g.looks()
    assert g.asked.rooms == [4]
    g.asked.reply(0, [GroupLease(0, 0, (0, 1))])
    await g.looks()
    assert g.asked.rooms == [4, 2]  # what has come counts at once
    g.end(0, 0)
    g.end(0, 1)
    await g.looks()
    assert g.asked.rooms == [4, 2]  # a call waits
    g.asked.reply(1, [GroupLease(1, 0, (0, 1))])
    await g.looks()
    assert g.asked.rooms == [4, 2, 2]
    assert [(e.group_index, e.episode_index) for e in g.asked.calls[2].ended] == [(0, 0), (0, 1)]
    g.asked.reply(2, [GroupLease(2, 0, (0, 1))])
    await g.looks()
    g.end(1, 0)
    await g.looks()
    assert g.asked.rooms == [4, 2, 2]  # room for half a group
    g.end(2, 0)
    await g.looks()
    assert g.asked.rooms == [4, 2, 2, 2]
    g.end(1, 1)
    g.end(2, 1)
    g.asked.reply(3, [], more=False)
    await asyncio.wait_for(running, LIMIT)
    await asyncio.wait_for(report(g, answering=4), LIMIT)
    assert [(e.group_index, e.episode_index) for e in g.asked.calls[4].ended] == [(1, 1), (2, 1)]


async def report(g: Playing, answering: int) -> None:
    reporting = asyncio.create_task(g.leasing.send_last_report({}, g.ended, []))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    g.asked.reply(answering, [], more=False)
    await reporting


async def test_a_heartbeat_has_the_free_places_and_overtakes_the_call_that_waits():
    g = Playing("schedule.group_size=4")
    running = asyncio.create_task(g.run())
    await g.looks()
    g.asked.reply(0, [GroupLease(0, 0, (0, 1))])  # the rest of a group
    await g.looks()
    assert g.asked.rooms == [4]  # room for half a group
    await g.looks(HEARTBEAT_SECONDS)
    assert g.asked.rooms == [4, 2]
    assert g.asked.calls[1].wait == HEARTBEAT_SECONDS
    g.end(0, 0)
    g.end(0, 1)
    await g.looks()
    assert g.asked.rooms == [4, 2, 4]  # the call that waits asks for less than a group
    await g.looks(HEARTBEAT_SECONDS)
    assert g.asked.rooms == [4, 2, 4, 4]
    for call in (1, 2, 3):
        g.asked.reply(call, [], more=False)
    await asyncio.wait_for(running, LIMIT)


async def test_of_many_generators_each_calls_less_often():
    g = Playing("generator.count=512", "schedule.prompts_per_step=512")
    running = asyncio.create_task(g.run())
    await g.looks()
    g.asked.reply(0, [GroupLease(0, 0, (0, 1))])
    await g.looks(1.0)
    assert g.asked.rooms == [4]
    await g.looks(0.5)
    assert g.asked.rooms == [4, 2]  # 512 generators make 400 calls a second
    await g.looks(7.0)
    assert g.asked.rooms == [4, 2]
    await g.looks(1.0)
    assert g.asked.rooms == [4, 2, 2]  # a heartbeat
    assert g.asked.calls[1].wait == 8.0
    g.end(0, 0)
    g.end(0, 1)
    for call in (1, 2):
        g.asked.reply(call, [], more=False)
    await asyncio.wait_for(running, LIMIT)


async def test_a_late_call_of_a_process_that_was_lost_is_leased_nothing_and_does_not_wait(conductor):
    """It would be leased a group in the name of the process in its place, which knows nothing of it and plays on: nobody would
    lease that group again."""
    generator = conductor.fleet["a"]
    before = generator.process
    generator.health.mark_lost()
    assert await lease(conductor, "a", wait=10 * LIMIT, process=before) == ([], False)
    generator.health.begin_restart()
    assert await lease(conductor, "a", wait=10 * LIMIT, process=before) == ([], False)
    generator.process = before[0] + 1, ""
    generator.health.mark_loaded()
    generator.health.mark_installed(0, 0)
    assert await lease(conductor, "a", wait=10 * LIMIT, process=before) == ([], False)
    groups, more = await lease(conductor, "a")
    assert (groups != [], more) == (True, True)
