"""`python -m dev sweep`: the runs of a plan, what is made again and what is not, and what the runs come to."""

import json
import sys
from pathlib import Path

import pytest

from dev.estimates import estimate_mean
from dev.sweep.plan import list_points, list_runs, make_config, read_sweep_plan
from dev.sweep.results import (
    FINISHED_FILE,
    FinishedRun,
    compute_figures,
    compute_results,
    describe_results,
    format_estimate,
    read_finished_runs,
)
from dev.sweep.runs import make_runs, make_train_command
from r3async.config import ConfigError

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
PLANS = sorted((FIGURES / "plans").glob("*.toml"))
REWARD, DRIFT = "reward/mean", "rollout_kl/served_k3"
PLAN = """
title = "Two losses"
seeds = [0, 1, 2]
metrics = ["reward/mean"]
baseline = "pg"
[settings]
steps = 20
[variants.pg]
[variants.ppo]
algorithm.policy_loss = "ppo"
"""
HEAD = 'seeds = [0]\nmetrics = ["reward/mean"]\n'


def read_plan(folder, text=PLAN):
    path = folder / "plan.toml"
    path.write_text(text)
    return read_sweep_plan(path)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_comes_to_runs_that_train_takes_as_they_are(tmp_path):
    plan = read_plan(tmp_path)
    runs = list_runs(plan)
    assert [run.name for run in runs] == ["pg-s0", "ppo-s0", "pg-s1", "ppo-s1", "pg-s2", "ppo-s2"]
    assert runs[1].overrides == ['name="ppo-s0"', "steps=20", 'algorithm.policy_loss="ppo"', "seed=0"]
    config = make_config(plan, runs[1])
    assert (config.name, config.seed, config.steps, config.algorithm.policy_loss) == ("ppo-s0", 0, 20, "ppo")
    command = make_train_command(plan, runs[1], tmp_path)
    assert command[-8:] == ["train", "quickstart", *runs[1].overrides, "--runs", str(tmp_path)]


def test_a_grid_is_made_with_each_variant_and_compared_at_the_same_place(tmp_path):
    grid = "[grid]\n'schedule.max_staleness' = [1, 4]\n'learner.lr' = [1e-3]\n"
    assert [(point.name, point.base) for point in list_points(read_plan(tmp_path, PLAN + grid))] == [
        ("pg, max_staleness=1, lr=0.001", "pg, max_staleness=1, lr=0.001"),
        ("pg, max_staleness=4, lr=0.001", "pg, max_staleness=4, lr=0.001"),
        ("ppo, max_staleness=1, lr=0.001", "pg, max_staleness=1, lr=0.001"),
        ("ppo, max_staleness=4, lr=0.001", "pg, max_staleness=4, lr=0.001"),
    ]
    alone = list_points(read_plan(tmp_path, HEAD + grid))
    assert (alone[1].name, alone[1].base) == ("max_staleness=4, lr=0.001", "max_staleness=1, lr=0.001")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "seds = [0]", "seds"),
        (HEAD + "initial_models = [0, 1]", "equally many"),
        (HEAD + 'baseline = "pgo"\n[variants.pg]', "none of the variants"),
        (HEAD + "[settings]\nlearner.lrr = 1", "run run-s0: unknown key `learner.lrr`"),
        ("seeds = [", "plan.toml"),
    ],
)
def test_a_bad_plan_is_refused_before_any_run(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_plan(tmp_path, text)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_runs_behind_the_pages_are_those_of_their_plans(path):
    plan = read_sweep_plan(path)
    kept = read_finished_runs(FIGURES / "science" / f"{path.stem}.jsonl")
    planned = {run.name: run for run in list_runs(plan)}
    assert kept.keys() == planned.keys()
    for name, run in kept.items():
        assert sorted(run.overrides) == sorted(planned[name].overrides)
        assert set(plan.metrics) <= run.columns.keys()


# -- making runs -------------------------------------------------------------------------------------------------------

RUN = """
import json, sys
from pathlib import Path
path, status = Path(sys.argv[1]), sys.argv[2]
path.mkdir(parents=True, exist_ok=True)
(path / "calls").open("a").write("x")
(path / "config.toml").write_text("steps = 2")
rows = [{"step": step, "time": 1000.0 + step, "reward/mean": 0.5} for step in (1, 2)]
(path / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
end = {"event": "run_finished", "time": 1002.0, "updates": 2} if status == "finished" else {"event": "run_failed", "time": 1.0}
events = [{"event": "conductor_started", "time": 1000.0}, end]
(path / "events.jsonl").write_text("".join(json.dumps({"level": "info", **event}) + chr(10) for event in events))
"""


def make(directory, plan, failing="", only=""):
    def make_command(plan, run, directory):
        status = "failed" if run.name == failing else "finished"
        return [sys.executable, "-c", RUN, str(directory / run.name), status]

    said = []
    failed = make_runs(
        directory,
        plan,
        only=only,
        parallel=3,
        facts={"commit": "abc"},
        print_line=said.append,
        make_command=make_command,
    )
    return failed, said


def test_missing_runs_are_made_and_finished_ones_are_not_made_again(tmp_path):
    plan = read_plan(tmp_path)
    assert make(tmp_path, plan, only="pg-s")[0] == []
    failed, said = make(tmp_path, plan, failing="ppo-s1")
    assert failed == ["ppo-s1"]
    assert any("ppo-s1: failed" in line for line in said)
    assert make(tmp_path, plan)[0] == []
    finished = read_finished_runs(tmp_path / FINISHED_FILE)
    assert finished.keys() == {run.name for run in list_runs(plan)}
    assert finished["ppo-s1"].columns == {REWARD: [0.5, 0.5]}
    assert {name: len((tmp_path / name / "calls").read_text()) for name in finished if "s1" in name} == {
        "pg-s1": 1,
        "ppo-s1": 2,
    }


# -- results -----------------------------------------------------------------------------------------------------------


def finished(name, metric, values):
    return FinishedRun(name, "quickstart", [], "finished", "", {}, {metric: values})


def test_figures_are_means_over_all_and_the_last_steps_and_the_worst_window():
    burst = [0.01] * 30 + [0.2] * 5 + [0.01] * 30
    found = compute_figures(finished("a", DRIFT, burst), [DRIFT])
    assert found[DRIFT] == pytest.approx(sum(burst) / 65)
    assert found[f"{DRIFT}, last"] == pytest.approx(0.01)
    assert found[f"{DRIFT}, window"] == pytest.approx((20 * 0.01 + 5 * 0.2) / 25)
    short = compute_figures(finished("a", DRIFT, [0.1, None, 0.3]), [DRIFT])
    assert short[f"{DRIFT}, window"] == pytest.approx(0.2)
    assert compute_figures(finished("a", REWARD, [None]), [REWARD]) == {}


def test_points_have_intervals_and_differences_are_paired_by_seed(tmp_path):
    plan = read_plan(tmp_path)
    runs = [finished(f"pg-s{seed}", REWARD, [0.3 + 0.1 * seed]) for seed in range(3)]
    runs += [finished(f"ppo-s{seed}", REWARD, [0.4 + 0.1 * seed]) for seed in range(2)]
    results = compute_results(plan, {run.name: run for run in runs})
    pg, ppo = results
    assert pg.estimates[REWARD] == estimate_mean([0.3, 0.4, 0.5])
    assert pg.differences == {}
    difference = ppo.differences[REWARD]
    assert (difference.mean, difference.count) == (pytest.approx(0.1), 2)
    assert difference.high - difference.low < 1e-9, "what the seeds have in common is in no difference"
    text = describe_results(plan, results)
    assert "5 of 6 runs" in text
    assert "+0.1 [0.1, 0.1] against pg" in text
    assert format_estimate(estimate_mean([0.5])) == "0.5 (one run)"


def test_a_file_of_finished_runs_is_read_by_its_lines(tmp_path):
    assert read_finished_runs(tmp_path / "none.jsonl") == {}
    line = {"name": "a", "preset": "quickstart", "overrides": [], "status": "finished", "reason": "", "facts": {}}
    (tmp_path / "f.jsonl").write_text(json.dumps({**line, "columns": {REWARD: [0.5, None]}}) + "\n")
    assert read_finished_runs(tmp_path / "f.jsonl")["a"].columns[REWARD] == [0.5, None]
