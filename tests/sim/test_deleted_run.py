"""The directory of a run is deleted, or moved, while the run uses it."""

from r3async.checkpoint import find_checkpoint
from tests.sim.whole import Machine

SLOW = ["generator.engine_args={ token_seconds = 0.5 }"]
"""Steps of some seconds, so that the run notices within one."""


async def delete_directory(machine: Machine) -> None:
    await machine.step(3)
    machine.files.remove_tree(machine.run_dir)


async def move_directory(machine: Machine) -> None:
    await machine.step(3)
    machine.files.rename(machine.run_dir, machine.run_dir.with_name("elsewhere"))


def test_a_run_whose_directory_was_deleted_says_so_once_and_stops_with_a_new_checkpoint(machine: Machine) -> None:
    run = machine.train("steps=40", "checkpoint.every_steps=100", *SLOW, meddle=delete_directory)
    assert machine.person.screen.count(f"{run} was deleted or moved while the run uses it") == 1
    stopped = find_checkpoint(run).state.steps
    assert 3 <= stopped < 40
    assert [event["stopped"] for event in machine.events("run_finished")] == [True]
    assert len(machine.events("run_directory_deleted")) == 1

    machine.train(f"steps={stopped + 2}", *SLOW)
    assert [row["step"] for row in machine.rows()][-2:] == [stopped + 1, stopped + 2], "it resumes from there"


def test_a_run_whose_directory_was_moved_leaves_the_moved_one_alone(machine: Machine) -> None:
    run = machine.train("steps=40", "checkpoint.every_steps=2", *SLOW, meddle=move_directory)
    moved = run.with_name("elsewhere")
    before = [name for name in machine.files.list_names(moved / "checkpoints") if name.startswith("step-")]
    assert before == ["step-00000002"]
    assert find_checkpoint(run).state.steps > 2
    assert machine.events("run_directory_deleted")
