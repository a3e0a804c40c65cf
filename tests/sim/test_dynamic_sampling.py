"""Groups with zero variance are replaced, within a budget and the age bound: the actors as they are, in virtual time."""

import pytest

from r3async.config import ConfigError, load_config
from r3async.envs import Action, Message, StepResult
from r3async.record.reading import read_json_objects
from tests.sim.whole import SMALL, Game, Machine


class Flat(Game):
    """Of two tasks out of three, every answer is worth the same."""

    async def reset(self, task_seed: int) -> list[Message]:
        self.flat = task_seed // 2 % 3 > 0
        return await super().reset(task_seed)

    async def step(self, action: Action) -> StepResult:
        reward = 1.0 if self.flat else float(hash_of(action.text) % 2)
        return StepResult(reward, done=True)


def hash_of(text: str) -> int:
    return sum(map(ord, text))


BUDGET = 3
DYNAMIC = [
    "env.name=tests.sim.test_dynamic_sampling:Flat",
    "steps=15",
    "schedule.prompts_per_step=2",
    "schedule.group_size=8",
    "schedule.max_staleness=3",
    "algorithm.filter_zero_variance=true",
]


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 3])
def test_a_step_takes_groups_until_it_has_enough_with_contrast_or_the_budget_is_spent(machine: Machine, window) -> None:
    more = [f"schedule.replaced_groups={BUDGET}", f"schedule.window={window}"]
    run_dir = machine.train(*DYNAMIC, *more, settings=SMALL)
    rows = read_json_objects(run_dir / "metrics.jsonl")
    assert len(rows) == 15
    with_contrast = []
    for row in rows:
        groups, flat = row["batch/groups"], row["advantage/zero_variance_groups"]
        with_contrast.append(groups - flat)
        assert 2 <= groups <= 2 + BUDGET
        assert groups - flat == 2 or (groups - flat < 2 and groups == 2 + BUDGET)
        assert row["staleness/max"] <= row["staleness/bound"]
        if flat:
            assert row["advantage/filtered_tokens"] > 0
    assert {row["batch/groups"] for row in rows} > {2}
    plain = read_json_objects(Machine.train(fresh(machine), *DYNAMIC, settings=SMALL) / "metrics.jsonl")
    without = [row["batch/groups"] - row["advantage/zero_variance_groups"] for row in plain]
    assert sum(with_contrast) > 1.5 * sum(without)


def fresh(machine: Machine) -> Machine:
    """Another run on the same machine."""
    machine.files.remove_tree(machine.run_dir)
    return machine


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["algorithm.filter_zero_variance=false"], "filter_zero_variance"),
        (["algorithm.filter_zero_variance=true", "schedule.max_staleness=0"], "max_staleness"),
        (["algorithm.filter_zero_variance=true", "schedule.tokens_per_step=10"], "set one"),
    ],
)
def test_what_it_cannot_be_used_with_is_named(settings, says) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config("quickstart", ["schedule.replaced_groups=2", *settings])
