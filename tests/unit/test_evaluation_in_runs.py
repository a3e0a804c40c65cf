"""Evaluations of a run: when they are due, whom they may hold up, and nothing of them in what is trained."""

import asyncio
import errno
import json
from functools import partial

import msgspec
import pytest

from r3async.actors import evaluator as evaluator_module
from r3async.actors.evaluator import Evaluator
from r3async.actors.fleet import Fleet
from r3async.actors.generator import GeneratorActor
from r3async.actors.leasing import LeaseAnswer, LeaseCall
from r3async.actors.process import ActorNotLoaded
from r3async.actors.run_setup import RunSetup
from r3async.checkpoint.evaluations import read_evaluations, write_evaluation
from r3async.config import config_from_dict, config_to_dict, load_config
from r3async.schedule.run_ahead import GroupLease
from r3async.schedule.tasks import training_seed
from r3async.world import ActorLostError
from r3async.world.curve_keys import generate_keys
from r3async.world.disk_retries import DiskRetrier
from r3async.world.real import REAL_WORLD
from tests.helpers.fleet import Events
from tests.helpers.serving import ready, renderer
from tests.helpers.transport import KeepingSender, until
from tests.helpers.world import StandIn


async def half(*_):
    return {"reward_mean": 0.5}


async def fails():
    raise RuntimeError("the environment is away")


def evaluator(tmp_path, answer=half, *, silence=30.0, version=0, generators=None, seconds=1800.0, **settings):
    """Return an evaluator of `generators`, by default of one that answers so, all with weights of `version`."""
    supervise = {"stop_grace_seconds": 0.3, "silence_seconds": silence, "patience": seconds / 1800}
    config = config_from_dict({"evaluation": {"every_steps": 2, **settings}, "supervise": supervise})
    events = Events()
    fleet = Fleet(config, events, generators or {"g": StandIn(evaluate=answer)})
    for member in fleet:
        member.health.mark_loaded()
        member.health.mark_installed(version, version)
    return Evaluator(config, tmp_path, events, fleet), events, fleet


def lines(tmp_path):
    file = tmp_path / "evaluation.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def settle(it):
    await until(lambda: not it.is_running, 5)


async def test_a_run_that_has_loaded_begins_evaluations_without_reading_files(tmp_path, monkeypatch):
    def no_descriptors(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    it, _, _ = evaluator(tmp_path, at_start=True)
    monkeypatch.setattr("r3async.actors.evaluator.read_evaluations", no_descriptors)
    monkeypatch.setattr("r3async.actors.evaluator.read_json_objects", no_descriptors)
    it.resume_evaluations(0, 0)
    await settle(it)
    assert [line["step"] for line in lines(tmp_path)] == [0]


async def test_evaluations_are_due_every_so_many_steps_and_after_the_last(tmp_path):
    async def answer():
        return {"reward_mean": 0.5, "version_min": 3, "version_max": 4, "episodes": 32}

    it, _, _ = evaluator(tmp_path, answer, at_start=True)
    it.resume_evaluations(0, 0)
    await settle(it)
    for step in range(1, 6):
        it.evaluate_if_due(step, 0)
        await settle(it)
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 4]
    await it.finish_evaluations(5, 0, asyncio.Event())
    assert [line["step"] for line in lines(tmp_path)] == [0, 2, 4, 5]
    await it.finish_evaluations(5, 0, asyncio.Event())
    assert len(lines(tmp_path)) == 4
    assert lines(tmp_path)[0]["evaluation/reward_mean"] == 0.5
    assert {"step", "time", "evaluation/version_min", "evaluation/version_max", "evaluation/episodes"} <= set(
        lines(tmp_path)[0]
    )


async def test_the_result_is_kept_beside_the_checkpoints_and_a_failed_one_leaves_nothing(tmp_path):
    result = {"reward_mean": 0.5, "passes": {"1": [0.25, 0.1, 0.4]}, "rewards": {"7": [0.0, 1.0]}, "version_min": 3}
    playing = asyncio.Event()

    async def answer():
        playing.set()
        await asyncio.sleep(0.1)
        return result

    it, _, _ = evaluator(tmp_path, answer)
    it.evaluate_if_due(2, 0)
    await asyncio.wait_for(playing.wait(), 120)
    found = read_evaluations(tmp_path / "checkpoints")
    assert [(step, one.is_finished) for step, one in found.items()] == [(2, False)]
    await settle(it)
    (one,) = read_evaluations(tmp_path / "checkpoints").values()
    assert (one.step, one.result) == (2, result)
    assert one.figures == {"reward_mean": 0.5, "pass@1": 0.25, "version_min": 3}
    (row,) = lines(tmp_path)
    assert row == {"step": 2, "time": row["time"]} | {f"evaluation/{k}": v for k, v in one.figures.items()}
    assert list(it.recent_rows) == [row]

    it, events, _ = evaluator(tmp_path, fails)
    it.evaluate_if_due(4, 0)
    await settle(it)
    await it.finish_evaluations(4, 0, asyncio.Event())
    assert list(read_evaluations(tmp_path / "checkpoints")) == [2]
    assert lines(tmp_path) == [row]
    assert [(e, f["step"]) for e, f in events.seen] == [("evaluation_failed", 4)]
    assert "the environment is away" in events.seen[0][1]["error"]


async def test_an_evaluation_waits_for_the_weights_of_its_step_and_prefers_who_has_them(tmp_path):
    asked = []

    def generator(name):
        async def evaluate():
            asked.append(name)
            return {"reward_mean": 0.5}

        return StandIn(evaluate=evaluate)

    it, events, fleet = evaluator(tmp_path, seconds=1.0, generators={name: generator(name) for name in "ab"})
    it.evaluate_if_due(2, version=1)
    await asyncio.sleep(0.1)
    assert asked == []
    fleet["b"].health.mark_installed(1, 1)
    await settle(it)
    assert asked == ["b"]
    it.evaluate_if_due(4, version=2)
    await asyncio.sleep(0.1)
    for member in fleet:  # it did not install them in time
        member.health.mark_lost()
    await settle(it)
    assert asked == ["b"]
    assert [event for event, _ in events.seen] == ["evaluation_finished", "evaluation_failed"]


async def test_a_generator_that_stops_answering_in_an_evaluation_is_left_for_another(tmp_path):
    asked = []

    def generator(name, frozen):
        async def evaluate():
            asked.append(name)
            await asyncio.sleep(60 if frozen else 0.2)
            return {"reward_mean": 0.5}

        async def whereabouts():
            await asyncio.sleep(60 if frozen else 0)

        return StandIn(evaluate=evaluate, describe_process=whereabouts)

    generators = {name: generator(name, name != "c") for name in "abc"}
    it, events, fleet = evaluator(tmp_path, seconds=1.0, silence=0.1, generators=generators)
    it.evaluate_if_due(2, 0)
    await settle(it)
    assert asked == ["a", "b", "c"]
    assert [(e, f["generator"]) for e, f in events.seen] == [
        ("evaluation_moved", "a"),
        ("evaluation_moved", "b"),
        ("evaluation_finished", "c"),
    ]
    assert [line["step"] for line in lines(tmp_path)] == [2]
    fleet["c"].health.mark_lost()
    it.evaluate_if_due(4, 0)
    await settle(it)
    error = "no generator was healthy and had version 0 of the weights within 1 s (supervise.patience)"
    assert events.seen[-1] == ("evaluation_failed", {"step": 4, "error": error})


@pytest.mark.parametrize("lost", [True, False], ids=["it was lost", "it does not answer"])
async def test_a_generator_that_comes_back_plays_its_evaluation_again(tmp_path, lost):
    """With the weights of the step, and not with those that it has meanwhile."""
    tries, back = [], asyncio.Event()

    async def answer():
        tries.append(fleet["g"].version)
        if len(tries) == 1 and lost:
            raise ActorLostError("g: killed")
        await asyncio.sleep(60 if len(tries) == 1 else 0)
        return {"reward_mean": 0.5}

    async def whereabouts():
        if len(tries) == 1 and not lost:
            await back.wait()

    generators = {"g": StandIn(evaluate=answer, describe_process=whereabouts)}
    it, events, fleet = evaluator(tmp_path, silence=0.1, version=3, generators=generators)
    health = fleet["g"].health
    it.evaluate_if_due(2, version=3)
    await until(lambda: events.seen)
    await asyncio.sleep(0.3)
    assert tries == [3]
    if lost:
        health.mark_lost()
        health.begin_restart()
        health.mark_loaded()
        health.mark_installed(2, 2)
        await asyncio.sleep(0.3)
        assert tries == [3]
        health.mark_installed(3, 3)
    back.set()
    await settle(it)
    assert tries == [3, 3]
    assert fleet["g"].is_restart_requested == fleet.restarts_due.is_set() == lost
    told = [(event, fields.get("hint")) for event, fields in events.seen]
    assert told == [
        ("evaluation_moved", "it was lost" if lost else "it does not answer"),
        ("evaluation_finished", None),
    ]
    assert [line["step"] for line in lines(tmp_path)] == [2]


async def test_a_result_waits_for_a_disk_that_does_not_take_it(tmp_path, monkeypatch):
    def write(directory, evaluation, **facts):
        if evaluation.is_finished and len(refused) < 2:
            refused.append(evaluation.step)
            raise OSError(errno.EMFILE, "Too many open files")
        return write_evaluation(directory, evaluation, **facts)

    refused = []
    monkeypatch.setattr(evaluator_module, "write_evaluation", write)
    monkeypatch.setattr(evaluator_module, "DiskRetrier", partial(DiskRetrier, retry_seconds=0.05))
    it, events, _ = evaluator(tmp_path)
    it.evaluate_if_due(2, 0)
    await settle(it)
    (one,) = read_evaluations(tmp_path / "checkpoints").values()
    assert one.result == {"reward_mean": 0.5}
    assert refused == [2, 2]
    assert [event for event, _ in events.seen] == ["evaluation_finished", "evaluation_not_kept", "evaluation_kept"]


async def test_one_that_takes_long_lets_the_next_one_out_and_a_stopped_run_waits_no_longer_than_its_grace(tmp_path):
    async def answer():
        await asyncio.sleep(60)

    it, events, _ = evaluator(tmp_path, answer)
    it.evaluate_if_due(2, 0)
    it.evaluate_if_due(4, 0)
    assert events.seen == [("evaluation_skipped", {"step": 4, "running_since_step": 2})]
    stop_requested = asyncio.Event()
    stop_requested.set()
    await asyncio.wait_for(it.finish_evaluations(4, 0, stop_requested), 3)
    assert events.seen[-1][0] == "evaluation_abandoned"
    await it.finish_evaluations(4, 0, stop_requested)
    assert len(events.seen) == 2


async def test_a_run_without_evaluations_asks_for_none(tmp_path):
    it, events, _ = evaluator(tmp_path, every_steps=0)
    it.resume_evaluations(0, 0)
    for step in range(1, 5):
        it.evaluate_if_due(step, 0)
    await it.finish_evaluations(4, 0, asyncio.Event())
    await it.cancel()
    assert (events.seen, it.is_running) == ([], False)


@pytest.fixture
def made(monkeypatch):
    """`made(directory, config, engine, chat, sender)`: a generator, in this process."""
    monkeypatch.setattr("r3async.actors.generator.prepare_process", lambda *args: None)

    def make(directory, config, engine, chat, sender=None):
        actor = GeneratorActor(REAL_WORLD, RunSetup("run", config_to_dict(config), str(directory)), "g", "nowhere")
        actor.make_engine = lambda *args: engine
        actor.make_renderer = lambda *args: chat
        actor.make_sender = lambda *args: sender
        return actor

    return make


async def play_run(made, directory, evaluations, groups=3):
    """What a generator delivers of `groups` leases at S = 0, with evaluations beside each or without."""
    settings = {"every_steps": 1 if evaluations else 0, "tasks": 6, "seed": 0}
    config = load_config("quickstart", ["schedule.group_size=2", "schedule.max_staleness=0"])
    config = msgspec.structs.replace(config, evaluation=config_from_dict({"evaluation": settings}).evaluation)
    chat, sender = renderer(), KeepingSender()

    def answer(request, index):  # of the request alone, as greedy sampling would be
        return [int(t) for t in request.prompt_ids[-4:] % 256] + [chat.eos_token_id]

    engine = await ready(answer)
    actor = made(directory, config, engine, chat, sender)
    await actor.start()
    await actor.connect_to_learner("", "shared_memory", generate_keys()[1])
    results = []

    async def lease(message):
        call = msgspec.msgpack.decode(message, type=LeaseCall)
        for _ in range(int(call.wait / 0.01)):
            if len(sender.got) >= 2 * len(lease.given):
                break
            await asyncio.sleep(0.01)
        played = len(sender.got) // 2
        if evaluations and len(results) <= played < groups:
            results.append(asyncio.create_task(actor.evaluate()))
        free = len(sender.got) == 2 * played and played not in lease.given and played < groups
        leases = [GroupLease(played, training_seed(0, played), (0, 1))] if free and call.free else []
        lease.given |= {g.group_index for g in leases}
        return msgspec.msgpack.encode(LeaseAnswer(leases, more=played < groups))

    lease.given = set()
    await asyncio.wait_for(actor.run(StandIn(lease_groups=lease)), 120)
    evaluated = await asyncio.gather(*results)
    await actor.stop()
    return sender.got, evaluated, engine


async def test_training_data_is_the_same_with_and_without_evaluation_and_no_evaluation_is_sent_to_the_learner(
    made, tmp_path
):
    plain, none, _ = await play_run(made, tmp_path / "a", evaluations=False)
    beside, evaluated, engine = await play_run(made, tmp_path / "b", evaluations=True)
    assert none == []
    assert len(evaluated) == 3
    assert all(e["episodes"] == 6 for e in evaluated)
    assert len({e["reward_mean"] for e in evaluated}) == 1  # the same tasks each time
    assert sorted(plain) == sorted(beside) == [f"g{g:08d}e{i:04d}" for g in range(3) for i in range(2)]
    for name, trajectory in plain.items():
        other = beside[name]
        assert trajectory.task_seed == other.task_seed
        assert trajectory.turns == other.turns
        assert [s.table for s in trajectory.samples] == [s.table for s in other.samples]
    asked = [call.request_id for call in engine.requests]
    assert sum(name.startswith("evaluation") for name in asked) == 3 * 6 * 3
    assert len(asked) == 3 * 6 * 3 + 3 * 2 * 3


async def test_a_generator_that_stops_gives_its_evaluations_up(made, tmp_path):
    engine, chat = await ready([[1]], before_token=asyncio.Event().wait), renderer()
    actor = made(tmp_path, load_config("quickstart", []), engine, chat)
    with pytest.raises(ActorNotLoaded, match="is not set up yet"):
        await actor.evaluate()
    await actor.start()
    evaluating = asyncio.create_task(actor.evaluate())
    await asyncio.sleep(0.05)
    await asyncio.wait_for(actor.stop(), 120)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(evaluating, 120)
