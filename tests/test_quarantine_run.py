"""A run whose data has a bad row: its task is quarantined and the run goes on, also after it is resumed."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from r3async.config import load_config
from r3async.envs.base import Message, StepResult
from r3async.observe.quarantine import read_quarantine
from tests.test_resume_run import check_books, events, settings
from tools.inspect_look import describe_rest
from tools.train import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("local_ray")]

SIZE, BAD, SAMPLES = 12, 5, 8


class Rows:
    """A data set of `SIZE` rows, of which one can not be posed. Which are asked for is written down."""

    size = SIZE

    def __init__(self, seen: str):
        self.seen = Path(seen)

    async def reset(self, task_seed):
        with self.seen.open("a") as file:
            file.write(f"{task_seed}\n")
        if task_seed == BAD:
            raise ValueError("row 5 has no question")
        return [Message("user", str(task_seed))]

    async def step(self, action):
        return StepResult(float(len(action.text) % 2), done=True)


def test_a_bad_row_costs_its_group_and_is_not_posed_again_also_after_a_resume(untrained, tmp_path):
    seen = tmp_path / "seen"

    def run(steps):
        overrides = [
            f"steps={steps}",
            f"schedule.samples_per_group={SAMPLES}",
            "generator.count=2",
            "generator.concurrency=4",  # groups are played in parts, by both
            "episode.max_turns=1",
            "episode.retries=0",
            "env.name=tests.test_quarantine_run:Rows",
            f"env.args={{ seen = '{seen}' }}",
        ]
        config = load_config("quickstart", settings(untrained, "run", *overrides))
        return train(config, "quickstart", Console(file=io.StringIO()), tmp_path)

    run_dir = run(14)  # 28 groups: two epochs, and some
    asked = seen.read_text().split()
    assert asked.count(str(BAD)) == SAMPLES
    check_books(run_dir, 14, samples=SAMPLES)
    (quarantined,) = events(run_dir, "task_quarantined")
    assert (quarantined["task_seed"], quarantined["failed_by"]) == (BAD, "environment")
    assert "row 5 has no question" in quarantined["error"]
    (kept,) = read_quarantine(run_dir)
    assert (kept.task_seed, kept.group) == (BAD, quarantined["group"])
    assert any(
        f"task seed {BAD}: group {kept.group} failed by the environment" in line for line in describe_rest(run_dir)
    )

    seen.unlink()
    run(20)
    asked = seen.read_text().split()
    assert len(asked) == 12 * SAMPLES
    assert str(BAD) not in asked
    check_books(run_dir, 20, samples=SAMPLES)
    assert len(events(run_dir, "task_quarantined")) == 1
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["data/quarantined_tasks"] == 1
