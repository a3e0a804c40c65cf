"""Calls that come again: the answer to the first was lost with its connection, and the process that was asked lives."""

import asyncio
from functools import partial

import msgspec
import pytest

from r3async.actors.generator import GeneratorActor
from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.actors.process import ActorNotLoaded, latest_call_only, run_once
from r3async.actors.run_setup import RunSetup
from r3async.config import config_to_dict, load_config
from r3async.schedule.run_ahead import GroupLease
from r3async.schedule.tasks import training_seed
from r3async.world.curve_keys import generate_keys
from r3async.world.processes import GRPC_KEEPALIVE_VARIABLE, actor_environment
from r3async.world.real import REAL_WORLD
from tests.helpers.serving import ready, renderer
from tests.helpers.transport import KeepingSender, until
from tests.helpers.world import StandIn


class Calls:
    def __init__(self):
        self.begun, self.ended, self.may_end, self.fails = 0, 0, asyncio.Event(), False

    async def _work(self, number):
        self.begun += 1
        try:
            await self.may_end.wait()
        finally:
            self.ended += 1
        if self.fails:
            raise OSError("no")
        return number

    once, newest = run_once(_work), latest_call_only(_work)


async def begin(*calls):
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)  # each has come to its work, or to the one before it
    return tasks


async def test_what_is_done_once_answers_who_calls_meanwhile_and_later_also_if_the_first_caller_went_away():
    calls, other = Calls(), Calls()
    first, second, _ = await begin(calls.once(1), calls.once(2), other.once(3))
    first.cancel()
    calls.may_end.set()
    assert (await second, await calls.once(4)) == (1, 1)
    assert (calls.begun, other.begun) == (1, 1)


async def test_what_failed_is_done_again():
    calls = Calls()
    calls.fails = True
    calls.may_end.set()
    with pytest.raises(OSError, match="no"):
        await calls.once(1)
    calls.fails = False
    assert await calls.once(2) == 2


async def test_of_the_newest_call_alone_there_is_work_and_the_one_before_has_ended_when_it_begins():
    calls = Calls()
    (first,) = await begin(calls.newest(1))
    await until(lambda: calls.begun == 1)
    (second,) = await begin(calls.newest(2))
    with pytest.raises(ActorNotLoaded, match="called again"):
        await first
    await until(lambda: calls.begun == 2)
    assert calls.ended == 1
    third, fourth = await begin(calls.newest(3), calls.newest(4))  # in either order
    with pytest.raises(ActorNotLoaded, match="called again"):
        await second
    await until(lambda: third.done() or fourth.done())
    ended, last = (third, fourth) if third.done() else (fourth, third)
    with pytest.raises(ActorNotLoaded, match="called again"):
        await ended
    await until(lambda: calls.begun - calls.ended == 1)
    calls.may_end.set()
    assert await last in (3, 4)
    assert await calls.newest(5) == 5


async def test_a_generator_that_was_out_of_reach_keeps_its_engine_and_plays_for_the_new_call_only(
    monkeypatch, tmp_path
):
    monkeypatch.setattr("r3async.actors.generator.prepare_process", lambda *args: None)
    chat, engines, senders = renderer(), [], []
    engine = await ready(lambda request, index: [65, chat.eos_token_id])

    class Player(GeneratorActor):
        def make_engine(self, model_path, seed):
            engines.append(engine)
            return engine

        def make_renderer(self, model_path):
            return chat

        def make_sender(self, endpoint, keys):
            senders.append(KeepingSender())
            return senders[-1]

    config = load_config("quickstart", ["schedule.group_size=2", "supervise.silence_seconds=1"])
    actor = Player(REAL_WORLD, RunSetup("run", config_to_dict(config), str(tmp_path)), "g", "nowhere")
    asked = {"before": 0, "after": 0}

    async def lease(who, group, last, message):
        call = msgspec.msgpack.decode(message, type=LeaseCall)
        asked[who] += 1
        if asked[who] == 1 and call.free:
            leases = [GroupLease(group, training_seed(0, group), (0, 1))]
            return msgspec.msgpack.encode(LeaseAnswer(leases, more=True))
        if not last:
            await asyncio.Event().wait()  # the answer is lost
        return msgspec.msgpack.encode(LeaseAnswer([], more=len(senders[0].got) < 4))

    conductors = [StandIn(lease_groups=partial(lease, *what)) for what in (("before", 0, False), ("after", 1, True))]
    runs = []
    for conductor in conductors:
        assert (await actor.start())["pid"] == REAL_WORLD.processes.pid
        await actor.connect_to_learner("", "shared_memory", generate_keys()[1])
        runs.append(asyncio.create_task(actor.run(conductor)))
        await until(lambda: asked["before"] >= 2 and len(senders[0].got) >= 2)  # its second answer is lost
    with pytest.raises(ActorNotLoaded):
        await runs[0]
    before = asked["before"]
    await asyncio.wait_for(runs[1], 120)
    assert (len(engines), len(senders)) == (1, 1)
    assert {t.group_index for t in senders[0].got.values()} == {0, 1}
    assert asked["before"] == before
    await actor.stop()


def test_processes_of_a_run_keep_their_connections_over_a_cut_of_a_minute_unless_the_person_says_otherwise(monkeypatch):
    monkeypatch.delenv(GRPC_KEEPALIVE_VARIABLE, raising=False)
    assert int(actor_environment(1)[GRPC_KEEPALIVE_VARIABLE]) > 60_000
    monkeypatch.setenv(GRPC_KEEPALIVE_VARIABLE, "5000")
    assert actor_environment(1)[GRPC_KEEPALIVE_VARIABLE] == "5000"
