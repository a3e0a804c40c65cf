"""Whole runs, simulated, in which a process is stopped, or the disk takes nothing: who is blamed, and that the run goes on."""

import asyncio
import errno

import pytest

from r3async.envs import Action, StepResult
from r3async.record.reading import read_json_objects
from tests.sim.whole import Game

STEPS = 6
SILENCE = ["supervise.silence_seconds=2", f"steps={STEPS}"]
SEEDS = pytest.mark.parametrize("seed", range(2))


class Slow(Game):
    """Whoever plays it is in the middle of an episode."""

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(2)
        return await super().step(action)


def run(machine, meddle, *overrides):
    """The run's directory, after it has made all its steps."""
    run_dir = machine.train(*SILENCE, *overrides, meddle=meddle)
    assert [row["step"] for row in read_json_objects(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert (run_dir / "model" / "model.safetensors").stat().st_size > 0


@SEEDS
def test_a_generator_that_is_stopped_for_a_while_is_suspect_and_recovers(machine, seed):
    async def stop_and_go_on(machine):
        await machine.step(1)
        process = await machine.freeze("generator-0")
        await machine.event("generator_suspect")
        machine.thaw(process)

    run(machine, stop_and_go_on)
    assert machine.events("generator_suspect")[0]["seconds"] > 2
    recovered = machine.events("generator_recovered")
    assert len(recovered) == len(machine.events("generator_suspect"))
    assert {e["pid"] for e in recovered} == {machine.events("generator_started")[0]["pid"]}
    assert not machine.events("generator_lost")
    assert not machine.events("stalled")


@SEEDS
def test_a_generator_that_is_stopped_for_good_is_named_and_restarted(machine, seed):
    """One alone: nobody else plays its episodes."""

    async def stop(machine):
        await machine.step(1)
        await machine.freeze("generator-0")

    run(machine, stop, "supervise.stall_seconds=5")
    (stalled,) = machine.events("stalled")
    # Something of its may be on its way just then.
    assert stalled["stage"] in ("playing/generator-0", "sending/generator-0")
    assert stalled["seconds"] >= stalled["limit"] == 5
    assert stalled["action"] == "restart"
    assert stalled["did_not_answer"] == ["generator-0"]
    assert stalled["queues"][stalled["stage"]]["waiting"] > 0
    assert len(machine.events("generator_lost")) == len(machine.events("generator_restarted")) == 1


@SEEDS
def test_a_generator_that_is_stopped_for_good_holds_nobody_up(machine, seed):
    """Its groups are played by the other, which gets every version without waiting for it; evaluations find the other."""
    stopped = []

    async def stop(machine):
        await machine.step(1)
        await asyncio.sleep(1)
        stopped.append(await machine.freeze("generator-0"))

    settings = ["generator.count=2", "supervise.stop_grace_seconds=2", "evaluation.every_steps=2", "evaluation.tasks=4"]
    run(machine, stop, *settings, "env.name=tests.sim.test_held_up:Slow")
    assert not machine.events("stalled")
    assert not machine.events("generator_lost")
    assert {e["generator"] for e in machine.events("generator_suspect")} == {"generator-0"}
    (returned,) = machine.events("leases_returned")
    assert returned["generator"] == "generator-0"
    assert returned["leased_again"]
    assert not machine.events("generator_recovered")
    assert machine.events("evaluation_finished")[-1]["generator"] == "generator-1"
    assert stopped[0].ended


@SEEDS
@pytest.mark.parametrize("role", ["conductor", "learner"])
def test_a_run_whose_conductor_or_learner_is_stopped_restarts_from_its_checkpoint(machine, role, seed):
    stopped = []

    async def stop(machine):
        await machine.step(1)
        await machine.event("checkpoint_written")
        stopped.append(await machine.freeze(role))

    settings = ["supervise.stall_seconds=8", "supervise.max_run_restarts=1", "checkpoint.every_steps=1"]
    run(machine, stop, *settings, "supervise.stop_grace_seconds=2")
    (stalled,) = [e for e in machine.events("stalled") if e["stage"] == f"answering/{role}"]
    assert stalled["action"] == "restart"
    assert stalled["seconds"] >= 8
    first, second = machine.events("conductor_started")
    assert second["step"] > first["step"] == 0
    assert stopped[0].ended


def test_a_conductor_that_answers_is_not_blamed_for_the_time_before_its_first_answer(machine):
    """The run takes longer than a conductor may take to start."""
    limits = ["supervise.stall_seconds=8", f"supervise.patience={8 / 600}"]
    run(machine, None, *limits, "env.name=tests.sim.test_held_up:Slow", "schedule.max_staleness=0")
    assert machine.seconds > 12
    assert not machine.events("stalled")
    assert len(machine.events("conductor_started")) == 1


@SEEDS
def test_a_spool_whose_disk_is_full_is_named_and_waited_for_and_no_generator_is_blamed(machine, seed):
    async def fill_up(machine):
        await machine.step(1)
        machine.host.disk.refuse_operations(machine.run_dir / "spool", errno.ENOSPC)
        await machine.event("stalled")
        await asyncio.sleep(10)  # longer than generators may send in vain
        machine.host.disk.allow_operations(machine.run_dir / "spool")

    run(machine, fill_up, "supervise.stall_seconds=8", "buffer.durability=disk")
    assert {(e["stage"], e["action"]) for e in machine.events("stalled")} == {("storing", "warn")}
    assert "No space left" in machine.events("stalled")[0]["learner"]["storing"]["why"]
    assert not machine.events("generator_lost")
    assert len(machine.events("spool_stalled")) == len(machine.events("spool_goes_on")) == 1
