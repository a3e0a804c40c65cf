"""A trajectory that the learner refuses: its group is trained without it, and the run goes on; unless too many are refused."""

import io

import pytest
from rich.console import Console

from actors.deaths import RunFailed
from actors.learner import LearnerActor
from actors.pipeline import Pipeline
from actors.reception import Reception
from r3async.config import load_config
from r3async.observe.events import read_events
from r3async.observe.jsonl import read_objects
from r3async.transport import Refuse
from tests.test_resume_run import settings
from tools.train import train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("local_ray")]


class Dislikes(Reception):
    """Refuses what was played of one episode in each fourth group; what stands for a failed one has no turn."""

    groups = 4

    def _validate(self, trajectory):
        if trajectory.turns and trajectory.episode_index == 1 and trajectory.group_index % self.groups == 0:
            raise Refuse("not to my liking")
        super()._validate(trajectory)


class DislikesAll(Dislikes):
    groups = 1


class Disliking(LearnerActor):
    receives = Dislikes


class DislikingAll(LearnerActor):
    receives = DislikesAll


class Refusing(Pipeline):
    learner = Disliking


class RefusingAll(Pipeline):
    learner = DislikingAll


def run(untrained, root, pipeline):
    config = load_config("quickstart", settings(untrained, "run", "steps=6"))
    train(config, "quickstart", Console(file=io.StringIO()), root, pipeline=pipeline)


def test_one_bad_sample_costs_its_group_one_sample(untrained, tmp_path):
    run(untrained, tmp_path, Refusing)
    steps = list(read_objects(tmp_path / "run" / "metrics.jsonl"))
    assert [s["step"] for s in steps] == list(range(1, 7))
    assert sum(s["episode/ended_error"] for s in steps) == 3  # groups 0, 4 and 8 of twelve
    assert steps[-1]["transport/rejected"] == 3
    refused = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "trajectory_rejected"]
    assert [e["trajectory_id"] for e in refused] == [f"g{group:08d}e0001" for group in (0, 4, 8)]


def test_a_learner_that_refuses_too_much_ends_the_run_with_its_reason(untrained, tmp_path):
    reason = r"too many tasks fail: 9 .*of the last \d+ tasks, failed by the learner; .*rejected trajectory g\d+e0001: not to"
    with pytest.raises(RunFailed, match=reason):
        run(untrained, tmp_path, RefusingAll)
