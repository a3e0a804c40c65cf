"""Tasks that are always, or never, solved are posed rarely, in a run that is killed and resumes: the actors as they are."""

from collections import Counter

import pytest

from r3async.actors.process import RunFailed
from r3async.envs import Action, Message, StepResult
from r3async.record.reading import read_json_objects
from tests.sim.whole import SMALL, Game, Machine


class Graded(Game):
    """Twelve tasks: the first five are always solved, the next three never."""

    size = 12

    async def reset(self, task_seed: int) -> list[Message]:
        self.task = task_seed
        return [Message("user", f"task {task_seed}")]

    async def step(self, action: Action) -> StepResult:
        reward = 1.0 if self.task < 5 else 0.0 if self.task < 8 else float(sum(map(ord, action.text)) % 2)
        return StepResult(reward, done=True, metrics={"task": float(self.task)})


RUN = [
    "env.name=tests.sim.test_difficulty_run:Graded",
    "steps=60",
    "schedule.prompts_per_step=1",
    "checkpoint.every_steps=5",
    "buffer.durability=disk",
    "schedule.difficulty.groups=2",
    "schedule.difficulty.settled_share=0.1",
]


def tasks_of(rows: list[dict]) -> list[int]:
    assert all(row["env/task/std"] == 0 for row in rows)  # one group, one task
    return [int(row["env/task/mean"]) for row in rows]


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_settled_tasks_are_posed_rarely_also_by_a_run_that_resumes(machine: Machine, killed) -> None:
    async def kill(machine: Machine) -> None:
        await machine.until(lambda: len(machine.trained()) >= 43)
        await machine.kill_run()

    if killed:
        machine.train(*RUN, settings=SMALL, meddle=kill, killed=True)
    rows = read_json_objects(machine.train(*RUN, settings=SMALL) / "metrics.jsonl")
    tasks = tasks_of(rows)
    assert len(tasks) == 60
    early, late = Counter(tasks[:24]), Counter(tasks[26:])
    assert set(early.values()) == {2}
    settled = sum(late[task] for task in range(8))
    assert settled <= 7  # of 34 turns; without the filter it is two out of three
    last = rows[-1]
    assert (last["data/easy_tasks"], last["data/hard_tasks"]) == (5, 3)
    assert last["data/replaced_tasks"] >= 15
    assert last["staleness/max"] <= last["staleness/bound"]


def test_a_curriculum_poses_those_near_its_target(machine: Machine) -> None:
    more = ["schedule.difficulty.settled_share=1", "schedule.difficulty.target=0.5"]
    tasks = tasks_of(read_json_objects(machine.train(*RUN, *more, settings=SMALL) / "metrics.jsonl"))
    late = Counter(tasks[26:])
    assert sum(late[task] for task in range(8, 12)) > 25


def test_tasks_that_never_come_again_have_no_past(machine: Machine) -> None:
    with pytest.raises(RunFailed, match=r"`schedule.difficulty` needs tasks that come again.*`size`"):
        machine.train(*RUN, "env.name=tests.sim.whole:Game", settings=SMALL)
