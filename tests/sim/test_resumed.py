"""Whole runs, simulated, that are killed, stopped and continued: what is trained, and how often.

On Ray: `ray/test_resume_run.py`."""

import json
import re

import pytest
from safetensors.torch import load_file

from r3async.checkpoint import CheckpointDirectory, directory, open_checkpoint
from r3async.checkpoint.state import encode_state
from r3async.record.reading import read_json_objects
from r3async.rollout.scripted import DIGEST_TENSOR
from r3async.world.files import read_file
from tests.ray.test_resume_run import check_books, events, trained
from tests.sim.whole import Machine

SEEDS = pytest.mark.parametrize("seed", range(2))
PATIENT = ["supervise.max_run_restarts=3", "checkpoint.every_steps=2"]


@pytest.mark.long
@SEEDS
@pytest.mark.parametrize("order", [("learner", "conductor"), ("conductor", "learner")], ids="-".join)
def test_a_run_whose_learner_and_conductor_are_killed_trains_everything_once(machine, order, seed):
    async def kill(machine):
        for role, step in zip(order, (5, 9), strict=True):
            await machine.step(step)
            await machine.kill(role)

    settings = ["steps=14", "schedule.max_staleness=3", "schedule.window=3", "buffer.durability=disk"]
    run_dir = machine.train(*PATIENT, *settings, "generator.engine_args={ token_seconds = 0.1 }", meddle=kill)
    assert "the run restarts (1 of 3" in machine.person.screen
    assert "the run restarts (2 of 3" in machine.person.screen
    check_books(run_dir, 14)
    first, second = (resumed["step"] for resumed in events(run_dir, "resumed"))
    assert 4 <= first <= second
    assert first % 2 == second % 2 == 0
    assert second >= 8
    assert all(row["staleness/max"] <= row["staleness/bound"] for row in read_json_objects(run_dir / "metrics.jsonl"))
    assert not list((run_dir / "spool").iterdir())  # What the last checkpoint trained needs not be kept.


@SEEDS
def test_a_run_that_is_lost_twice_before_its_first_checkpoint_trains_everything_once(machine, seed):
    async def kill(machine):
        for role, lineage in (("learner", 1), ("conductor", 2)):
            await machine.until(lambda: [t for t in machine.trained() if t["lineage"] == lineage])  # noqa: B023
            await machine.kill(role)

    settings = ["steps=9", "checkpoint.every_steps=8", "supervise.max_run_restarts=3", "buffer.durability=disk"]
    settings += ["schedule.max_staleness=3", "generator.engine_args={ token_seconds = 0.1 }"]
    run_dir = machine.train(*settings, meddle=kill)
    check_books(run_dir, 9)
    assert [e["step"] for e in events(run_dir, "lineage_began")] == [0, 0, 0]
    adopted = [e for e in events(run_dir, "resumed") if not e["checkpoint"]]
    assert adopted  # what the spool kept


EXACT = ["schedule.max_staleness=0", "steps=20", "checkpoint.every_steps=4"]


def weights(run_dir):
    return {name: tensor.tolist() for name, tensor in load_file(run_dir / "model" / "model.safetensors").items()}


@pytest.fixture(scope="module")
def straight(untrained, tmp_path_factory):
    """What an exact run trains that nothing happens to, and its weights."""
    machine = Machine(tmp_path_factory.mktemp("straight"), untrained)
    run_dir = machine.train(*EXACT)
    machine.close()
    return [(line["groups"], line["crc32"]) for line in trained(run_dir)], weights(run_dir)


def cut_off(machine, path):
    """A file is half as long as it was."""
    with machine.files.open(path, create=True) as file:
        file.truncate(file.size() // 2)


@pytest.mark.long
@pytest.mark.parametrize("killed", ["driver", "power"])
@SEEDS
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_weights_bit_by_bit(machine, straight, killed, seed):
    """Weights are a digest of every token that was trained, in order. Also where the newest checkpoint was cut off, and another
    was being written."""

    async def kill(machine):
        await machine.until(lambda: len(machine.trained()) >= 10)
        if killed == "power":
            machine.simulation.lose_host(machine.host)
            machine.simulation.restore_host(machine.host)
        else:
            await machine.kill_run()

    slow = "generator.engine_args={ token_seconds = 0.1 }"
    machine.train(*EXACT, slow, meddle=kill, killed=True)
    checkpoints = CheckpointDirectory(machine.run_dir / "checkpoints", files=machine.files)
    *_, back, last = checkpoints.list_steps()
    (part,) = [name for name in machine.files.list_names(checkpoints.step_path(last)) if name.startswith("learner-")]
    cut_off(machine, checkpoints.step_path(last) / part)
    partial = checkpoints.directory / "step-00000019.partial"
    machine.files.create_directory(partial)
    with machine.files.open(partial / "run.json", exclusive=True) as file:
        file.append([b"{"])
    run_dir = machine.train(*EXACT)
    assert "checkpoint bad" in machine.person.screen
    assert f"resumes from step {back} " in machine.person.screen
    assert 4 <= back < last < 20
    assert [events(run_dir, "resumed")[-1]["step"], CheckpointDirectory(run_dir / "checkpoints").list_steps()[-1]] == [
        back,
        20,
    ]
    expected, digest = straight
    assert weights(run_dir) == digest
    # Without power, records lose what was not written back; no training depends on them.
    if killed == "driver":
        check_books(run_dir, 20)
        assert [(line["groups"], line["crc32"]) for line in trained(run_dir)] == expected


def test_rows_that_an_older_release_left_in_a_checkpoint_are_written_by_the_resume(machine, monkeypatch):
    """It wrote a row when the weights were delivered, and saved those that waited, without what was known later."""

    def encode_as_before(state):
        older = json.loads(encode_state(state))
        assert "pending_rows" not in older
        written = read_file(machine.run_dir / "metrics.jsonl", files=machine.files)
        last = written[: older["record_bytes"]["metrics.jsonl"]].splitlines(keepends=True)[-1]
        older["record_bytes"]["metrics.jsonl"] -= len(last)
        later = ("time", "throughput/", "cpu/", "weights/", "slots/", "generator/restarts", "lag/")
        row = {name: value for name, value in json.loads(last).items() if not name.startswith(later)}
        return json.dumps(older | {"pending_rows": [row]}).encode()

    monkeypatch.setattr(directory, "encode_state", encode_as_before)
    machine.train("steps=3", "checkpoint.every_steps=1")
    monkeypatch.undo()
    run_dir = machine.train("steps=5", "checkpoint.every_steps=1")
    check_books(run_dir, 5)
    rows = read_json_objects(run_dir / "metrics.jsonl")
    assert ["throughput/generated_tokens_per_second" in row for row in rows] == [True, True, False, True, True]


@SEEDS
def test_a_stop_leaves_a_checkpoint_and_ends_well_and_the_same_command_goes_on(machine, seed):
    async def stop(machine):
        await machine.step(3)
        machine.person.stop_requested = True
        await machine.until(lambda: "stopping" in machine.person.screen)

    run_dir = machine.train("steps=400", "schedule.max_staleness=1", "checkpoint.every_steps=0", meddle=stop)
    (step,) = CheckpointDirectory(run_dir / "checkpoints").list_steps()
    state = open_checkpoint(CheckpointDirectory(run_dir / "checkpoints").step_path(step)).state
    assert len(trained(run_dir)) == step == state.steps < 400
    assert f"stopped after {step} of 400 steps; to resume: the same command with name=run" in machine.person.screen
    machine.train(f"steps={step + 3}", "schedule.max_staleness=1", "checkpoint.every_steps=2")
    assert f"resumes from step {step} " in machine.person.screen
    changed = re.findall(r"changed since the checkpoint: (\S+) ", machine.person.screen)
    assert set(changed) == {"steps", "checkpoint.every_steps"}, "what the user set, and no address of the machine"
    check_books(run_dir, step + 3)
    rows = read_json_objects(run_dir / "metrics.jsonl")
    assert [row["version"] for row in rows] == list(range(1, step + 4))


def test_a_run_with_neither_engine_nor_model_makes_its_steps_and_a_resume_goes_on(machine):
    for steps in (2, 3):
        run_dir = machine.train(f"steps={steps}", "checkpoint.every_steps=1", "schedule.max_staleness=0")
    rows = read_json_objects(run_dir / "metrics.jsonl")
    assert [(r["step"], r["version"]) for r in rows] == [(1, 1), (2, 2), (3, 3)]
    assert all(r["routing/recorded_fraction"] > 0.9 for r in rows)
    probed = events(run_dir, "probe")
    assert probed
    assert all(e["mean_difference"] == 0 for e in probed)
    assert {line["step"] for line in trained(run_dir)} == {1, 2, 3}
    saved = load_file(run_dir / "model" / "model.safetensors")
    assert list(saved) == [DIGEST_TENSOR]
    assert saved[DIGEST_TENSOR].any()


def test_a_resumed_run_that_is_stopped_while_it_loads_says_after_which_step(machine):
    machine.train("steps=2", "checkpoint.every_steps=1")

    async def stop(machine):
        machine.person.stop_requested = True

    machine.train("steps=4", "checkpoint.every_steps=1", meddle=stop)
    assert "stopped after 2 of 4 steps; to resume" in machine.person.screen
