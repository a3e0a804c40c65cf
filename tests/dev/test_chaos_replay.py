"""`python -m dev chaos --replay`: what it makes of a recording that is whole, short, or of another learner."""

import pytest

from dev.chaos.run import ChaosReport, describe_report, replay_recording
from r3async.learner import optimizer
from r3async.record.recording import find_recorded_steps
from tests.helpers import models as hm
from tests.unit.test_recording import STEPS, record, recorded_config


@pytest.fixture
def run(tmp_path, tmp_path_factory):
    model = hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    assert record(tmp_path, recorded_config(model), model) == []
    return tmp_path


def report(steps=STEPS) -> ChaosReport:
    counts = dict.fromkeys(
        ("trajectories", "resumed", "generators_lost", "sent", "acknowledged", "changed", "damaged", "duplicates"), 0
    )
    return ChaosReport("quickstart", "kills", 0, "", {}, steps, **counts, seconds=1.0, problems=[])


def test_every_step_of_a_recording_is_made_again(run):
    made = replay_recording(report(), run, print)
    assert (made.replayed, made.problems) == (STEPS, [])
    assert f"replayed: {STEPS} steps" in describe_report(made)
    assert "replayed" not in describe_report(report())


def test_a_step_that_differs_is_a_problem_with_its_stage(run, monkeypatch):
    rate = optimizer.compute_learning_rate
    monkeypatch.setattr(
        optimizer, "compute_learning_rate", lambda config, made, total: rate(config, made, total) * (1 + made)
    )
    made = replay_recording(report(), run, print)
    assert made.replayed == 1
    (problem,) = made.problems
    assert "step 2 is not the run's" in problem
    assert "stage weights" in problem


def test_what_the_recording_lacks_is_a_problem(run):
    (problem,) = replay_recording(report(STEPS + 1), run, print).problems
    assert problem == f"replay: the recording has {STEPS} of {STEPS + 1} steps"
    find_recorded_steps(run)[1].unlink()
    made = replay_recording(report(), run, print)
    assert made.replayed == 0
    assert "no step 2" in made.problems[0]
    assert "something is WRONG" in describe_report(made)
