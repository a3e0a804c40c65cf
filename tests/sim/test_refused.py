"""Whole runs, simulated, in which tasks, trajectories or prompts are no good: what is trained without them, and when it ends."""

import json

import pytest

from r3async.actors.learner import LearnerActor
from r3async.actors.process import RunFailed
from r3async.actors.trajectory_inbox import TrajectoryInbox
from r3async.envs import Message
from r3async.record.reading import read_quarantine
from r3async.tools.inspect.look import describe_run_contents
from tests.ray.test_resume_run import check_books, events
from tests.sim.whole import Game, Simulated

SIZE, BAD, SAMPLES = 12, 5, 8
SEEDS = pytest.mark.parametrize("seed", range(2))
ASKED: list[int] = []
"""Task seeds that `Rows` was asked for. All simulated processes are this one."""


# -- the learner refuses -----------------------------------------------------------------------------------------------


def refusing(groups):
    """A run whose learner refuses what was played of one episode in each so many groups; what stands for a failed one has
    no turn."""

    class Dislikes(TrajectoryInbox):
        def find_invalid(self, trajectories, **options):
            disliked = {
                at: "not to my liking"
                for at, t in enumerate(trajectories)
                if t.turns and t.episode_index == 1 and t.group_index % groups == 0
            }
            return super().find_invalid(trajectories, **options) | disliked

    class Disliking(LearnerActor):
        inbox_class = Dislikes

    class Refusing(Simulated):
        learner_class = Disliking

    return Refusing


@SEEDS
def test_one_bad_sample_costs_its_group_one_sample(machine, seed):
    machine.train("steps=6", pipeline=refusing(4))
    steps = machine.rows()
    assert [s["step"] for s in steps] == list(range(1, 7))
    assert sum(s["episode/ended_error"] for s in steps) == 3  # groups 0, 4 and 8 of twelve
    assert steps[-1]["transport/rejected"] == 3
    refused = machine.events("trajectory_rejected")
    assert [e["trajectory_id"] for e in refused] == [f"g{group:08d}e0001" for group in (0, 4, 8)]


@SEEDS
def test_a_learner_that_refuses_too_much_ends_the_run_with_its_reason(machine, seed):
    reason = r"too many tasks fail: 9 .*of the last \d+ tasks, failed by the learner; .*rejected trajectory g\d+e0001: not to"
    with pytest.raises(RunFailed, match=reason):
        machine.train("steps=30", pipeline=refusing(1))


# -- a task is no good -------------------------------------------------------------------------------------------------


class Rows(Game):
    """A data set of `SIZE` rows, of which one cannot be posed."""

    size = SIZE

    async def reset(self, task_seed: int) -> list[Message]:
        ASKED.append(task_seed)
        if task_seed == BAD:
            raise ValueError("row 5 has no question")
        return [Message("user", str(task_seed))]


@pytest.mark.long
@SEEDS
def test_a_bad_row_costs_its_group_and_is_not_posed_again_also_after_a_resume(machine, seed):
    settings = [
        f"schedule.group_size={SAMPLES}",
        "generator.count=2",
        "generator.concurrency=4",  # groups are played in parts, by both
        "episode.retries=0",
        "env.name=tests.sim.test_refused:Rows",
        "checkpoint.every_steps=2",
    ]
    ASKED.clear()
    run_dir = machine.train("steps=14", *settings)  # 28 groups: two epochs, and some
    assert ASKED.count(BAD) == SAMPLES
    check_books(run_dir, 14, samples=SAMPLES)
    (quarantined,) = events(run_dir, "task_quarantined")
    assert (quarantined["task_seed"], quarantined["failed_by"]) == (BAD, "environment")
    (kept,) = read_quarantine(run_dir)
    assert kept.error.startswith("ValueError: row 5 has no question (test_refused.py:")
    assert (kept.task_seed, kept.group) == (BAD, quarantined["group"])
    told = f"task seed {BAD}: group {kept.group} failed by the environment"
    assert any(told in line for line in describe_run_contents(run_dir))

    ASKED.clear()
    machine.train("steps=20", *settings)
    assert len(ASKED) == 12 * SAMPLES
    assert BAD not in ASKED
    check_books(run_dir, 20, samples=SAMPLES)
    assert len(events(run_dir, "task_quarantined")) == 1
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["data/quarantined_tasks"] == 1


def test_a_prompt_that_is_too_long_stops_the_run_and_names_the_setting(machine):
    settings = ["env.name=reverse-text", "env.args={ letters = 9, turns = 3 }", "episode.max_prompt_tokens=8"]
    with pytest.raises(RunFailed, match=r"episode\.max_prompt_tokens = 8"):
        machine.train("steps=4", *settings)
