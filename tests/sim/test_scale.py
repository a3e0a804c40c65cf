"""Whole simulated runs whose fleet grows and shrinks: by `r3async scale`, beside faults, and over restarts."""

import asyncio
from collections import Counter

import pytest

from dev.simulation.faults import PlannedFault
from dev.simulation.run import SimulatedRun as SimulatedRun
from dev.simulation.run import tiny_model_directory
from dev.simulation.shrink import SimulationCase
from dev.simulation.workload import SimulatedWorkload
from r3async.actors.fleet_scaler import ScaleRequest, write_scale_request
from r3async.config.supervise import TimeLimits
from r3async.schedule.run_ahead import AdmissionController
from tests.sim.test_accounting import rehearse


def ask(machine, generators, asked):
    write_scale_request(machine.run_dir, ScaleRequest(generators, asked), files=machine.files)


async def scaled(machine, generators, asked):
    ask(machine, generators, asked)
    await machine.until(lambda: any(e["asked"] == asked for e in machine.events("scaled")))


SETTINGS = ["steps=16", "generator.count=1", "generator.concurrency=4"]


@pytest.mark.long
@pytest.mark.parametrize(("backend", "seed"), [("shared_memory", 0), ("tcp", 1)])
def test_a_fleet_grows_and_shrinks_and_everything_is_trained_once(machine, tmp_path, monkeypatch, backend, seed):
    leased: Counter[str] = Counter()
    lease_group = AdmissionController.lease_group

    def watched(self, owner, **limits):
        lease = lease_group(self, owner, **limits)
        leased[owner] += lease is not None
        return lease

    monkeypatch.setattr(AdmissionController, "lease_group", watched)

    async def resize(machine):
        await machine.step(3)
        await scaled(machine, 4, "more")
        await machine.step(7)
        await scaled(machine, 2, "fewer")
        assert machine.simulation.find_process("generator-3") is None
        assert machine.simulation.find_process("generator-1") is not None
        await machine.step(11)
        await scaled(machine, 3, "again")
        await machine.kill("generator-4")

    report = rehearse(machine, tmp_path, [], *SETTINGS, f"weights.backend={backend}", meddle=resize)
    assert report.problems == []
    assert report.trajectories == report.steps * 8
    joined = sorted(event["generator"] for event in machine.events("generator_joined"))
    assert joined == ["generator-1", "generator-2", "generator-3", "generator-4"], "no name is used twice"
    left = {event["generator"]: event for event in machine.events("generator_left")}
    assert left.keys() == {"generator-2", "generator-3"}
    assert all(event["finished"] and not event["leased_again"] for event in left.values()), "it played what it had"
    assert set(leased) >= {"generator-0", *joined}, "who joins plays"


def test_one_that_does_not_finish_in_time_returns_what_it_was_leased(machine, tmp_path, monkeypatch):
    async def shrink(machine):
        await machine.step(3)
        await scaled(machine, 1, "fewer")

    settings = [*SETTINGS, "generator.count=3"]
    monkeypatch.setattr("r3async.config.supervise.TIME_LIMITS", TimeLimits(leave=0.01))
    report = rehearse(machine, tmp_path, [], *settings, meddle=shrink)
    assert report.problems == []
    left = machine.events("generator_left")
    assert len(left) == 2
    assert any(event["leased_again"] for event in left)
    assert not machine.events("generator_lost")


@pytest.mark.long
@pytest.mark.parametrize("who", ["conductor", "learner"])
def test_a_run_that_restarts_has_as_many_as_were_asked_for(machine, tmp_path, who):
    async def resize(machine):
        await machine.step(3)
        await scaled(machine, 3, "more")
        await machine.step(6)
        await machine.kill(who)
        await machine.until(lambda: len(machine.events("lineage_began")) == 2)
        await machine.until(lambda: machine.simulation.find_process("generator-2"))
        await machine.step(12)
        await scaled(machine, 2, "fewer")

    report = rehearse(machine, tmp_path, [], *SETTINGS, meddle=resize)
    assert report.problems == []
    assert [event["generators"] for event in machine.events("scaled")] == [3, 2]


def test_one_that_cannot_join_is_refused_and_the_run_goes_on(machine, tmp_path):
    def wrong_start(actor):
        return 1.0, actor.name == "generator-1"

    async def grow(machine):
        await machine.step(2)
        machine.simulation.plan_start = wrong_start
        ask(machine, 2, "more")
        refused = await machine.event("scale_refused")
        assert "generator-1" in refused["reason"]
        assert refused["generators"] == 1
        await asyncio.sleep(5)
        assert len(machine.events("generator_refused")) == 1, "it is not tried again"

    settings = [*SETTINGS, "generator.max_restarts=0"]
    report = rehearse(machine, tmp_path, [], *settings, meddle=grow)
    assert report.problems == []


def test_what_has_no_place_waits_for_one(machine, tmp_path):
    async def grow(machine):
        await machine.step(2)
        machine.simulation.gpus = 1  # the hosts have GPUs now, and the learner's is taken
        held = machine.simulation.reservations[0].bundles
        taken, held[0] = held[0], type(held[0])(held[0].cpus, 1, held[0].node_id)
        ask(machine, 2, "more")
        waits = await machine.event("scale_waits")
        assert "another engine needs 1 GPU" in waits["reason"]
        assert "add a host" in waits["reason"]
        held[0] = taken
        await machine.until(lambda: machine.events("scaled"))
        assert len(machine.events("scale_waits")) == len(machine.events("scaling")) == 1

    report = rehearse(machine, tmp_path, [], *SETTINGS, meddle=grow)
    assert report.problems == []


def test_the_simulator_scales_a_run_beside_faults():
    workload = SimulatedWorkload(
        seed=3, hosts=3, generators=2, concurrency=2, steps=6, train_seconds=30.0, stall_seconds=60.0
    )
    faults = (
        PlannedFault(40.0, "scale", amount=4),
        PlannedFault(70.0, "kill", "learner"),
        PlannedFault(90.0, "scale", amount=1),
        PlannedFault(100.0, "kill", "generator-0"),
        PlannedFault(120.0, "scale", amount=3),
    )
    with tiny_model_directory():
        run = SimulatedRun(SimulationCase(workload, faults))
        result = run.run()
    assert (result.violated, result.reason, result.steps) == ("", "", 6)
    assert result.faults["scale"] == 3


def test_one_that_was_excluded_is_counted_no_more_and_another_takes_its_place(machine, tmp_path):
    async def replace(machine):
        await machine.step(2)
        await machine.kill("generator-1")
        await machine.event("generator_excluded")
        await scaled(machine, 2, "two again")

    settings = [*SETTINGS, "generator.count=2", "generator.max_restarts=0"]
    report = rehearse(machine, tmp_path, [], *settings, meddle=replace)
    assert report.problems == []
    assert [event["of"] for event in machine.events("scaling")] == [1]
    assert [event["generator"] for event in machine.events("generator_joined")] == ["generator-2"]
