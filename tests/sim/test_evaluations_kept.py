"""Whole runs, simulated, that are stopped or killed while they evaluate: the same command finishes what is missing."""

import pytest

from r3async.checkpoint.evaluations import read_evaluations
from r3async.config import ConfigError
from r3async.record.reading import EVALUATION_FILE, read_json_objects
from r3async.views.summary import summarize_run

SLOW = "generator.engine_args={ token_seconds = 0.1 }"
EVALUATED = [
    "evaluation.every_steps=3",
    "evaluation.tasks=400",
    "generator.concurrency=8",
    "checkpoint.every_steps=1",
    SLOW,
]


def evaluated(machine):
    """Steps that have a row, in the order of the file, and those that have a result."""
    files = read_evaluations(machine.run_dir / "checkpoints")
    rows = read_json_objects(machine.run_dir / EVALUATION_FILE)
    return [row["step"] for row in rows], [step for step, one in files.items() if one.is_finished]


async def evaluating(machine, step):
    """Until the evaluation after that step is played."""
    path = machine.run_dir / "checkpoints" / f"evaluation-{step:08d}.json"
    await machine.until(lambda: machine.files.stat(path))


def test_a_run_that_is_killed_in_its_last_evaluation_has_it_after_the_same_command(machine):
    async def late(machine):
        await machine.step(3)
        await evaluating(machine, 3)
        await machine.until(lambda: machine.files.stat(machine.run_dir / "model" / "model.safetensors"))
        await machine.kill_run()

    machine.train("steps=3", *EVALUATED, meddle=late, killed=True)
    assert evaluated(machine) == ([], [])
    machine.train("steps=3", *EVALUATED)
    assert evaluated(machine) == ([3], [3])
    assert [row["step"] for row in machine.rows()] == [1, 2, 3]
    assert summarize_run(machine.run_dir).status == "finished"
    with pytest.raises(ConfigError, match="has made 3 of 3 steps"):  # now nothing is missing
        machine.train("steps=3", *EVALUATED)


def test_a_run_that_is_stopped_in_its_last_evaluation_says_what_its_same_command_then_does(machine):
    async def stop(machine):
        await machine.step(3)
        await evaluating(machine, 3)
        machine.person.stop_requested = True
        await machine.event("evaluation_abandoned")

    machine.train("steps=3", *EVALUATED, "supervise.stop_grace_seconds=1", meddle=stop)
    assert "to resume: the same command with name=run" in machine.person.screen
    assert summarize_run(machine.run_dir).status == "stopped"
    assert evaluated(machine) == ([], [])
    machine.train("steps=3", *EVALUATED)
    assert evaluated(machine) == ([3], [3])
    assert summarize_run(machine.run_dir).status == "finished"


def test_an_evaluation_that_was_cut_off_is_played_with_the_weights_that_are_resumed(machine):
    async def late(machine):
        await machine.step(5)
        await machine.kill_run()

    machine.train("steps=8", *EVALUATED, meddle=late, killed=True)
    assert evaluated(machine) == ([], [])
    machine.train("steps=8", *EVALUATED)
    (resumed,) = machine.events("resumed")
    rows, results = evaluated(machine)
    assert rows == results
    assert rows[0] == resumed["step"] >= 4
    assert rows[-1] == 8


def test_the_row_of_an_evaluation_that_a_resume_takes_back_is_written_again_and_nothing_is_played_twice(machine):
    quick = ["evaluation.every_steps=3", "evaluation.tasks=2", "checkpoint.every_steps=3", SLOW]

    async def late(machine):
        await machine.event("evaluation_finished")
        await machine.step(4)
        await machine.kill_run()

    machine.train("steps=5", *quick, meddle=late, killed=True)
    (row,) = read_json_objects(machine.run_dir / EVALUATION_FILE)
    machine.train("steps=5", *quick)
    assert machine.events("resumed")[0]["step"] == 3
    assert read_json_objects(machine.run_dir / EVALUATION_FILE)[0] == row
    assert [event["step"] for event in machine.events("evaluation_finished")] == [3, 5]
    assert evaluated(machine) == ([3, 5], [3, 5])


def test_results_of_steps_that_a_resume_takes_back_are_removed(machine):
    settings = ["evaluation.every_steps=1", "evaluation.tasks=2", "checkpoint.every_steps=2", SLOW]

    async def late(machine):
        await machine.until(lambda: [e for e in machine.events("evaluation_finished") if e["step"] >= 3])
        await machine.kill_run()

    machine.train("steps=6", *settings, meddle=late, killed=True)
    lost = max(evaluated(machine)[1])
    before = read_evaluations(machine.run_dir / "checkpoints")[lost]
    machine.train("steps=6", *settings)
    (resumed,) = machine.events("resumed")
    again = read_evaluations(machine.run_dir / "checkpoints")[lost]
    assert (again == before) == (lost <= resumed["step"])


def versions_of_evaluations(machine):
    rows = read_json_objects(machine.run_dir / EVALUATION_FILE)
    return [(row["evaluation/version_min"], row["evaluation/version_max"]) for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("generators", [1, 2])
def test_an_evaluation_of_one_version_sees_no_other(machine, generators):
    settings = ["steps=9", *EVALUATED, f"generator.count={generators}", "evaluation.at_start=true"]
    machine.train(*settings, "evaluation.one_version=true")
    found = versions_of_evaluations(machine)
    assert found[-1] == (9, 9)
    assert all(oldest == newest for oldest, newest in found)
    assert [row["step"] for row in machine.rows()] == list(range(1, 10))


def test_newer_weights_sample_the_rest_of_an_evaluation_otherwise(machine):
    machine.train("steps=9", *EVALUATED, "evaluation.at_start=true")
    assert any(oldest < newest for oldest, newest in versions_of_evaluations(machine))
