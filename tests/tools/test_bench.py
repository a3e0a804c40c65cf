"""`python -m dev bench`: the formulas, the list, and one small measurement with the real engine and the real learner."""

import json
import math
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dev.bench.jobs import BenchError, progress, run_job
from dev.bench.replay import VARIED, plan, render, summarize
from dev.bench.replay_report import (
    Case,
    LearnerJob,
    Report,
    RolloutJob,
    Rollouts,
    compare,
    histogram,
    mismatch,
    relative_error,
    step_time,
)
from r3async.config import ConfigError
from r3async.data.statistics import median_ratio_interval
from tests.helpers.models import make_samples


def cli(*words, cwd, timeout=120):
    command = [sys.executable, "-m", "dev", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False)


def a_mismatch(*delta, agreement=0.9, grad_error=0.1):
    return mismatch(np.asarray(delta), agreement=agreement, grad_error=grad_error, grad_error_own=0.2)


def test_mismatch_of_three_tokens_by_hand():
    found = a_mismatch(math.log(4), 0.0, -math.log(1.5))
    assert found.k3 == pytest.approx(((4 - 1 - math.log(4)) + 0 + (1 / 1.5 - 1 + math.log(1.5))) / 3)
    assert found.k1 == pytest.approx(-(math.log(4) - math.log(1.5)) / 3)
    assert found.mean_abs == pytest.approx((math.log(4) + math.log(1.5)) / 3)
    assert found.max_abs == pytest.approx(math.log(4))
    assert found.beyond_2x == pytest.approx(1 / 3)
    assert sum(found.histogram) == 3


@pytest.mark.parametrize("sign", [1, -1])
def test_a_ratio_of_exactly_two_is_not_beyond_two(sign):
    assert a_mismatch(sign * math.log(2)).beyond_2x == 0
    assert a_mismatch(sign * math.log(2.001)).beyond_2x == 1


def test_k3_and_k1_estimate_the_same_divergence_from_rollout_samples():
    rng = np.random.default_rng(0)
    rollout, learner = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    truth = float(np.sum(rollout * np.log(rollout / learner)))
    tokens = rng.choice(6, 400_000, p=rollout)
    found = mismatch(np.log(learner / rollout)[tokens], agreement=0, grad_error=0, grad_error_own=0)
    assert found.k3 == pytest.approx(truth, rel=0.02)
    assert found.k1 == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("delta", [[], [0.1, math.nan], [math.inf]])
def test_differences_that_mean_nothing_are_refused(delta):
    with pytest.raises(ValueError, match="log-prob differences"):
        a_mismatch(*delta)


def test_histogram_has_every_token_also_those_outside_its_range():
    counts = histogram(np.asarray([0.0, 1e-9, 1.01e-6, 0.11, 99.0]))
    assert len(counts) == 56
    assert counts[0] == 3
    assert counts[5 * 8] == 1
    assert counts[-1] == 1


def test_relative_error_is_over_all_tensors_together():
    reference = [np.asarray([3.0], np.float32), np.asarray([[0.0, 4.0]], np.float32)]
    moved = [np.asarray([3.0], np.float32), np.asarray([[1.0, 4.0]], np.float32)]
    assert relative_error(moved, reference) == pytest.approx(1 / 5)
    assert relative_error(reference, reference) == 0


def test_step_ratio_is_of_medians_so_that_one_disturbed_step_does_not_matter():
    found = step_time(
        "float32",
        100,
        1,
        cpu_with=[1.02, 1.02, 9.0],
        cpu_without=[1.0, 1.0, 1.0],
        wall_with=[2.0, 2.0, 2.0],
        wall_without=[1.0, 1.0, 1.0],
        route_seconds=0.01,
    )
    assert found.ratio == pytest.approx(1.02)
    assert found.wall_ratio == pytest.approx(2.0)
    assert found.ratio_interval[0] == pytest.approx(1.02)
    assert found.ratio_interval[1] == pytest.approx(9.0), "three pairs say little"


def test_the_interval_of_a_ratio_narrows_with_pairs_and_holds_the_truth():
    rng = np.random.default_rng(0)
    over, under = 1.02 + 0.05 * rng.normal(size=400), 1.0 + 0.05 * rng.normal(size=400)
    few, many = median_ratio_interval(over[:20], under[:20]), median_ratio_interval(over, under)
    assert many[1] - many[0] < (few[1] - few[0]) / 2
    assert many[0] < 1.02 < many[1]


def a_case(own, replay, seed=0):
    shape = Rollouts(
        tokens=10,
        sampled_tokens=8,
        seconds=1.0,
        gate_std=0.1,
        layers=16,
        experts=64,
        top_k=8,
        route_bytes_per_token=128.0,
        wire_bytes_per_token=150.0,
        wire_bytes_per_token_without_routes=21.0,
    )
    return Case(
        label="headline",
        varied="",
        rollout_job=RolloutJob(model="", seed=seed),
        learner_job=LearnerJob(model=""),
        rollouts=shape,
        learners={"bfloat16": compare(own, replay), "float32": compare(own, replay)},
    )


def test_the_summary_takes_ratios_of_means_and_the_largest_difference_of_all_seeds():
    cases = [
        a_case(a_mismatch(0.4, grad_error=0.3), a_mismatch(0.1)),
        a_case(a_mismatch(0.2, grad_error=0.1), a_mismatch(0.2)),
    ]
    found = summarize(cases, "bfloat16")
    own, replay = [c.learners["bfloat16"].kl_without for c in cases], [c.learners["bfloat16"].kl_with for c in cases]
    assert found.kl_ratio == pytest.approx(sum(own) / sum(replay))
    assert found.kl_ratio_by_seed[1] == 1
    assert (found.max_abs_without, found.max_abs_with, found.max_abs_ratio) == (0.4, 0.2, 2.0)
    assert found.grad_error_without == pytest.approx(0.2)


def test_what_is_planned():
    default = plan([0, 1, 2])
    shape = default.headline[0].rollout_job.random
    assert (shape.layers, shape.experts, shape.top_k, shape.gate_std) == (16, 64, 8, 0.1)
    assert [c.rollout_job.random.seed for c in default.headline] == [0, 1, 2]
    assert [bool(c.learner_job.step_dtypes) for c in default.headline] == [True, False, False]
    assert default.headline[0].learner_job.pairs >= 12
    assert not default.table
    varied = plan([5], table=True, pairs=0).table
    assert len(varied) == sum(map(len, VARIED.values()))
    for case in varied:
        changed = msgspec.structs.replace(
            case.rollout_job.random, **{case.varied: getattr(shape, case.varied), "seed": 0}
        )
        assert changed == shape, "one thing at a time"
    with pytest.raises(ConfigError, match="names no seed"):
        plan([])


def test_a_model_in_a_run_directory_plays_that_runs_episodes(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(ConfigError, match="not a model directory"):
        plan([0], models=[model])
    (model / "config.json").write_text("{}")
    assert plan([0], models=[model]).models[0].rollout_job.episodes == ""
    (tmp_path / "config.toml").write_text("")
    assert plan([0], models=[model]).models[0].rollout_job.episodes == str(tmp_path / "config.toml")


def test_a_job_reports_its_progress_its_answer_and_its_failure(tmp_path, monkeypatch):
    said = []
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "jobs.py").write_text(
        "import time\n"
        "def double(job: int, directory): return 2 * job\n"
        "def fails(job: int, directory): raise SystemExit('no such model')\n"
        "def long(job: int, directory): print('waiting', flush=True); time.sleep(60)\n"
    )
    options = {"answer": int, "directory": tmp_path / "job", "say": said.append}
    assert run_job("jobs:double", 21, timeout=60, **options) == 42
    with pytest.raises(BenchError, match=r"(?s)jobs failed with exit code 1.*no such model"):
        run_job("jobs:fails", 1, timeout=60, **options)
    started = time.monotonic()
    with pytest.raises(BenchError, match=r"(?s)jobs took longer than 1 s.*"):
        run_job("jobs:long", 1, timeout=1, **options)
    assert time.monotonic() - started < 30
    progress(tmp_path, "half-way")
    assert (tmp_path / "progress.txt").read_text() == "half-way"


def test_benchmarks_are_listed_and_near_names_offered(tmp_path):
    assert cli("bench", cwd=tmp_path).stdout.startswith("replay ")
    misspelt = cli("bench", "repaly", cwd=tmp_path)
    assert misspelt.returncode == 2
    assert "Did you mean 'replay'" in misspelt.stderr
    for words, message in ((["--seeds", "a"], "'a' is not a list"), (["--model", "/nowhere"], "not a model directory")):
        done = cli("bench", "replay", *words, cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert message in done.stderr


def test_routes_and_mask_are_all_that_a_bare_sample_lacks():
    from dev.bench.replay_learner import bare, with_random_advantages

    samples = with_random_advantages(make_samples(0, [5, 7], advantages=False), seed=3)
    for sample, stripped in zip(samples, bare(samples), strict=True):
        assert set(sample.table) - set(stripped.table) == {"routed_experts", "routing_recorded"}
        values = np.unique(sample.table["advantages"][sample.table["loss_mask"]])
        assert len(values) == 1, "one advantage a sample"
        assert not sample.table["advantages"][~sample.table["loss_mask"]].any()


def test_the_reports_kept_with_the_documentation_are_of_this_kind_and_the_figure_is_drawn_from_them():
    figures = Path(__file__).parents[2] / "docs" / "figures"
    for name in ("routing-replay.json", "routing-replay-table.json"):
        report = msgspec.json.decode((figures / name).read_bytes(), type=Report)
        assert report.kl_ratio >= 3
        assert len(render(report).splitlines()) > len(report.headline)
    drawn = runpy.run_path(str(figures / "make_routing_replay.py"))["draw"]()
    assert drawn == (figures / "routing-replay.svg").read_text()


@pytest.mark.nightly
@pytest.mark.engine
def test_replay_brings_the_learner_nearer_to_a_real_engine(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("raise SystemExit('a stranger')")
    words = [sys.executable, "-m", "dev", "bench", "replay", "--quick", "--seeds", "0", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    report = msgspec.json.decode(line, type=Report)
    assert json.loads(line)["benchmark"] == "replay"
    shape = report.headline[0].rollouts
    assert shape.sampled_tokens == 16 * 48
    assert report.route_bytes_per_token == shape.layers * shape.top_k
    for name in ("bfloat16", "float32"):
        found = report.summary[name]
        assert 0 < found.kl_with < found.kl_without < 1
        assert found.agreement_without < 1
        assert 0 <= found.grad_error_with < found.grad_error_without < 1
        assert report.steps[name].ratio > 0
        assert math.isfinite(report.steps[name].route_seconds)
    exact = report.headline[0].learners["float32"]
    assert exact.replay.grad_error == exact.own.grad_error_own == 0, "the references themselves"
    assert "kl_ratio" in render(report)
    branches = report.branches
    assert branches.branch_tokens == 16 * 48
    assert branches.k3_own < 1e-8 < 1e-4 * branches.drift < branches.k3_inherited
