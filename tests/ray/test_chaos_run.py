"""Chaos on whole runs: real Ray, ZeroMQ, Megatron, spool and checkpoints, an engine without a model, and kill -9. Each time:
`ray/test_pipeline.py` and `ray/test_resume_run.py`. What the accounting finds in learners that are wrong:
`sim/test_accounting.py`."""

import pytest
from rich.console import Console

from dev.chaos.relay import NoiseRates
from dev.chaos.run import run_chaos
from dev.chaos.scenarios import SCENARIOS, FullDisk
from r3async.config import ConfigError

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]


def rehearse(untrained, root, roles, *overrides, **options):
    settings = [f"model.path={untrained}", *overrides]
    return run_chaos(
        "quickstart", settings, kills=len(roles), seed=3, root=root, console=Console(width=160), roles=roles, **options
    )


def test_a_run_of_which_every_role_is_killed_trains_everything_once(untrained, tmp_path):
    roles = ["environment", "generator", "learner", "conductor"]
    report = rehearse(untrained, tmp_path, roles, noise=NoiseRates(damage=0.15))
    assert report.problems == []
    assert report.faults == dict.fromkeys(roles, 1)
    # A generator that dies while the run starts takes it down, too; of one that dies just before the learner does nobody hears,
    # nor of a conductor that dies while the run ends for the learner's death: the number of restarts is a matter of moments.
    assert report.resumed >= 1
    assert report.trajectories == report.steps * 8
    assert report.changed  # what of it the learner counted dies with it if it is killed before its next step


def allowed(scenario, root):
    """Skips where no file system may be mounted."""
    try:
        with scenario.provide_directory(root):
            pass
    except ConfigError as error:
        pytest.skip(str(error))


def test_a_run_whose_disk_fills_up_continues_and_every_row_is_there_when_it_has_free_bytes_again(untrained, tmp_path):
    allowed(FullDisk, tmp_path)
    report = rehearse(untrained, tmp_path, [], scenario="full-disk")
    assert report.problems == []
    assert report.faults == {"disk": 2}


@pytest.mark.parametrize(
    ("scenario", "faults"),
    [
        ("blocked-line", {"line": 1}),
        ("full-memory", {"disk": 2}),
        ("strangers", {"strangers": 3000, "generator": 1}),
    ],
)
def test_a_run_in_which_weights_meet_trouble_in_one_place_trains_everything_once(untrained, tmp_path, scenario, faults):
    allowed(SCENARIOS[scenario], tmp_path)
    report = rehearse(untrained, tmp_path, [], scenario=scenario)
    assert report.problems == []
    assert report.faults == faults
    assert report.resumed == 0
