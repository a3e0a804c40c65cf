"""Every preset is valid, says what it is for, and keeps what its head says."""

import contextlib
import re

import pytest
from rich.console import Console

from r3async.actors.process import NotTrained
from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.init_model import init_model
from r3async.tools.plan import make_run_plan
from r3async.tools.presets import describe_presets, list_preset_paths, read_preset_header
from r3async.tools.submit.commands import app as submit
from r3async.tools.training_session import train
from tests.sim.test_presets_run import PRESETS, rows_for

PROMISED = {"quickstart", "on_policy", "one_step_off", "fully_async", "fully_async_long_tail", "stepwise_search"} | {
    *("moe_30b_r3", "moe_235b_r3", "qwen3_5_35b_r3", "dense_7b")
}
CHANCE = contextlib.suppress(NotTrained)
"""Whether a tiny model, or none, finds a reward in a few steps is left to chance, and is not what is tested."""
NAMES = [path.stem for path in list_preset_paths()]


def test_the_promised_presets_are_there_and_none_is_hidden_by_a_command():
    assert set(NAMES) >= PROMISED
    assert not set(NAMES) & {command.name or command.callback.__name__ for command in submit.registered_commands}


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_passes_its_dry_run_and_its_head_is_true(name, tmp_path):
    plan = make_run_plan(load_config(name, rows_for(name, tmp_path)))
    header = read_preset_header(next(p for p in list_preset_paths() if p.stem == name))
    assert header.purpose
    assert header.when_to_use
    assert int(re.match(r"\d+", header.staleness_bound).group()) == plan.staleness_bound
    said_on_gpus = "the plan only" in header.tested_on
    assert said_on_gpus == bool(plan.gpus)  # nobody had the GPUs: a head that says otherwise needs a run behind it


def test_the_list_begins_with_the_quickstart_and_explains_all():
    listed = describe_presets()
    assert listed.startswith("quickstart")
    for name in NAMES:
        assert f"\n{name}\n" in f"\n{listed}"
    assert listed.count("Staleness bound:") == len(NAMES)


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.timeout(400)
def test_a_preset_runs_with_a_model_that_plays_and_keeps_its_bound(tmp_path):
    """That with the most turns, and a row for each. The others: `sim/test_presets_run.py`."""
    name = "stepwise_search"
    small = ["steps=4", "schedule.prompts_per_step=4", "schedule.group_size=4", "generator.kv_cache_gib=0.25"]
    small += ["model.init.warm_reward=0.02"]  # a tiny model's first answers will do
    config = load_config(name, small)
    init_model(tmp_path / "init", config)
    config = load_config(name, [*small, f"model.path={tmp_path / 'init'}", "name=run"], None)
    with CHANCE:
        train(config, name, Console(width=120), tmp_path)
    rows = read_json_objects(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 4
    assert max(row["staleness/max"] for row in rows) <= make_run_plan(config).staleness_bound


def test_every_preset_for_a_cpu_runs_simulated_or_in_the_tests_of_the_pipeline(tmp_path):
    plans = {name: make_run_plan(load_config(name, rows_for(name, tmp_path))) for name in NAMES}
    assert {name for name, plan in plans.items() if not plan.gpus} == {"quickstart", *PRESETS}
