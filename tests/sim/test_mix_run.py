"""A run that trains two environments, killed and resumed: the actors as they are, in virtual time."""

from r3async.envs import Action, Message, StepResult
from r3async.record.reading import read_json_objects
from r3async.schedule.environment_mix import EnvironmentOrder
from tests.sim.whole import SMALL, Game, Machine

MIX = [
    "env=[{ name = 'tests.sim.whole:Game', label = 'game', weight = 3 }, "
    "{ name = 'tests.sim.test_mix_run:Few', label = 'few', max_turns = 1, max_new_tokens = 2 }]",
    "steps=12",
    "schedule.max_staleness=0",
    "schedule.prompts_per_step=4",
    "checkpoint.every_steps=3",
    "evaluation.every_steps=6",
    "evaluation.tasks=3",
    "evaluation.sets.few.env.name=tests.sim.whole:Game",
]


class Few(Game):
    """Five tasks, of which it says which it is."""

    size = 5

    async def reset(self, task_seed: int) -> list[Message]:
        self.task = task_seed
        return [Message("user", f"few {task_seed}")]

    async def step(self, action: Action) -> StepResult:
        return StepResult(float(len(action.text) % 2), done=True, metrics={"task": float(self.task)})


def settings() -> list[str]:
    return [each for each in SMALL if not each.startswith("env.")]


def test_each_environment_has_its_share_its_epochs_and_its_limits(machine: Machine) -> None:
    run_dir = machine.train(*MIX, settings=settings())
    rows = read_json_objects(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    # Labels are in their order: few, game. Of four groups one is of `few`.
    order = EnvironmentOrder([1, 3])
    assert [order.environment_of(group) for group in range(8)].count(0) == 2
    posed = []
    for row in rows:
        assert (row["env/few/episodes"], row["env/game/episodes"]) == (4, 12)
        assert row["env/few/response_length_p95"] <= 2
        assert row["env/few/task/std"] == 0  # one group, one task
        assert "env/game/task/mean" not in row
        together = row["env/few/reward_mean"] * 4 + row["env/game/reward_mean"] * 12
        assert abs(together - 16 * row["reward/mean"]) < 1e-6
        posed.append(int(row["env/few/task/mean"]))
    assert sorted(posed[:5]) == sorted(posed[5:10]) == list(range(5))
    assert rows[-1]["env/few/epochs"] > 2
    assert max(row["env/game/response_length_p95"] for row in rows) > 2
    examples = read_json_objects(run_dir / "episodes.jsonl")
    assert {(e["environment"], e["turns"][0]["user"].split()[0]) for e in examples} == {("few", "few"), ("game", "go")}
    evaluated = read_json_objects(run_dir / "evaluation.jsonl")
    assert [each["step"] for each in evaluated] == [6, 12]
    assert all("evaluation/few/reward_mean" in each for each in evaluated)


def test_a_resumed_run_poses_the_same_tasks(untrained, tmp_path) -> None:
    told = []
    for name, killed in (("straight", False), ("killed", True)):
        machine = Machine(tmp_path / name, untrained)

        async def kill(machine: Machine) -> None:
            await machine.until(lambda: len(machine.trained()) >= 7)
            await machine.kill_run()

        if killed:
            machine.train(*MIX, settings=settings(), meddle=kill, killed=True)
        run_dir = machine.train(*MIX, settings=settings())
        machine.close()
        told.append([row["env/few/task/mean"] for row in read_json_objects(run_dir / "metrics.jsonl")])
    assert len(told[0]) == 12
    assert told[0] == told[1]
