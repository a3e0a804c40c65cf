"""What a sweep's runs come to: figures of runs, means and differences of points, bands, the page."""

import json

import msgspec
import numpy as np
import pytest

from r3async.data.statistics import estimate_mean
from r3async.views.sweeps import (
    REPORT_FILE,
    RESULTS_FILE,
    SweepDescription,
    SweepPoint,
    SweepResults,
    SweepRun,
    describe_results,
    describe_run_counts,
    format_estimate,
    format_outcome,
    read_sweep_results,
    write_sweep_results,
)
from tests.helpers.sweeps import write_swept_run
from tests.tools.test_report import Page

REWARD, DRIFT = "reward/mean", "rollout_kl/served_k3"


def swept(*names, seeds=(0, 1, 2), models=(0,)):
    points = [SweepPoint(name, names[0], {"learner.lr": at}) for at, name in enumerate(names)]
    runs = [SweepRun(f"{n}-s{s}-m{m}", n, s, m) for m in models for s in seeds for n in names]
    return SweepDescription("Two <losses>", [REWARD], points, runs, {"commit": "abc", "command": "r3async sweep"})


def learnt(gain, seed, steps=50):
    return [0.3 + 0.1 * seed + gain * step / steps for step in range(steps)]


@pytest.fixture
def made(tmp_path):
    """`fast` gains 0.1 more over the run than `slow`, with every seed; its steps take half as long."""
    for seed in range(3):
        write_swept_run(tmp_path / f"slow-s{seed}-m0", learnt(0.2, seed), seconds=2.0)
        write_swept_run(tmp_path / f"fast-s{seed}-m0", learnt(0.3, seed), seconds=1.0)
    return tmp_path


def test_figures_of_a_run_are_means_over_steps_and_over_equal_time_and_tokens(made):
    results = read_sweep_results(made, swept("slow", "fast"))
    slow, fast = results.runs[0], results.runs[1]
    assert (slow.steps, slow.seconds, slow.tokens, fast.seconds) == (50, 98.0, 5000.0, 49.0)
    assert slow.figures[REWARD] == pytest.approx(np.mean(learnt(0.2, 0)))
    assert slow.figures[f"{REWARD}, last"] == pytest.approx(np.mean(learnt(0.2, 0)[-10:]))
    assert slow.figures[f"{REWARD}, tokens"] == pytest.approx(np.mean(learnt(0.2, 0)))
    # The fast runs end after 49 s; then the slow ones have made half of their steps.
    assert fast.figures[f"{REWARD}, time"] == pytest.approx(np.mean(learnt(0.3, 0)[1:]), rel=1e-5)
    assert slow.figures[f"{REWARD}, time"] == pytest.approx(
        (sum(learnt(0.2, 0)[1:25]) * 2 + learnt(0.2, 0)[25]) / 49, rel=1e-5
    )
    assert "49.0 s" in results.outcomes[f"{REWARD}, time"]


def test_a_bound_of_drift_is_about_the_worst_window_of_the_worst_run(tmp_path):
    burst = [0.01] * 30 + [0.2] * 5 + [0.01] * 30
    for seed, drift in enumerate(([0.02] * 65, burst)):
        write_swept_run(tmp_path / f"pg-s{seed}-m0", drift, metric=DRIFT)
    found = read_sweep_results(tmp_path, msgspec.structs.replace(swept("pg", seeds=(0, 1)), metrics=[DRIFT]))
    worst = (20 * 0.01 + 5 * 0.2) / 25
    assert [run.figures[f"{DRIFT}, window"] for run in found.runs] == pytest.approx([0.02, worst])
    (point,) = found.points
    assert point.largest[f"{DRIFT}, window"] == pytest.approx(worst)
    assert format_outcome(point, f"{DRIFT}, window").endswith("], at most 0.048")
    assert "at most" not in format_outcome(point, DRIFT)


def test_a_run_shorter_than_a_window_has_its_mean(tmp_path):
    write_swept_run(tmp_path / "pg-s0-m0", [0.1, 0.3], metric=DRIFT)
    found = read_sweep_results(tmp_path, msgspec.structs.replace(swept("pg", seeds=(0,)), metrics=[DRIFT]))
    assert found.runs[0].figures[f"{DRIFT}, window"] == pytest.approx(0.2)


def test_seeds_with_an_initial_model_each_are_so_many_runs(tmp_path):
    for seed in range(3):
        write_swept_run(tmp_path / f"pg-s{seed}-m{seed}", learnt(0.2, seed))
    runs = [SweepRun(f"pg-s{at}-m{at}", "pg", at, at) for at in range(3)]
    results = read_sweep_results(tmp_path, msgspec.structs.replace(swept("pg"), runs=runs))
    assert describe_run_counts(results) == "3 seeds, each with an initial model of its own"
    found = results.points[0].estimates[REWARD]
    assert (found.runs, found.seeds, found.models) == (3, 3, 3)
    alone = estimate_mean({(s, 0): float(f"{np.mean(learnt(0.2, s)):.6g}") for s in range(3)})
    assert (found.low, found.high) == (alone.low, alone.high)


def test_points_have_intervals_and_differences_are_paired(made):
    slow, fast = read_sweep_results(made, swept("slow", "fast")).points
    mean = np.mean(learnt(0.2, 1))
    assert slow.estimates[REWARD].mean == pytest.approx(mean)
    assert slow.estimates[REWARD] == estimate_mean({(s, 0): float(f"{np.mean(learnt(0.2, s)):.6g}") for s in range(3)})
    assert slow.differences == {}
    difference = fast.differences[REWARD]
    assert difference.mean == pytest.approx(0.049, abs=1e-4)
    assert difference.high - difference.low < 1e-5, "seeds are alike in what they gain"
    assert fast.estimates[REWARD].high - fast.estimates[REWARD].low > 0.4, "and not in where they are"


def test_bands_are_of_each_axis(made):
    results = read_sweep_results(made, swept("slow", "fast"))
    assert len(results.axes["step"]) == 40
    assert results.axes["time"][-1] < 49 < results.axes["tokens"][-1] < 5000
    by_step, by_time = (results.bands[REWARD][axis] for axis in ("step", "time"))
    middle = results.axes["step"].index(pytest.approx(25.625))
    assert by_step["slow"].mean[middle] == pytest.approx(0.4 + 0.2 * 25.1 / 50, abs=0.003)
    assert by_time["slow"].mean[-1] < by_step["slow"].mean[-1], "after 49 s they have made half of their steps"
    band = by_step["slow"]
    assert all(low < mean < high for low, mean, high in zip(band.low, band.mean, band.high, strict=True))


def test_runs_that_are_missing_failed_or_unfinished_are_counted_and_named(made):
    write_swept_run(made / "fast-s1-m0", [0.5] * 3, steps=50, end="failed")
    write_swept_run(made / "fast-s2-m0", [0.5] * 3, steps=50, end="")
    results = read_sweep_results(made, swept("slow", "fast", seeds=(0, 1, 2, 3)))
    slow, fast = results.points
    assert (slow.complete, slow.planned, fast.complete, fast.planned) == (3, 4, 1, 4)
    assert fast.estimates[REWARD].low is None
    assert fast.differences[REWARD].runs == 1
    assert describe_run_counts(results) == "3 seeds x 1 initial model; 4 of 8 runs are missing or failed"
    assert "fast-s1-m0: failed no memory is left" in describe_results(results)
    assert "fast-s2-m0: unfinished" in describe_results(results)


def test_a_run_that_was_resumed_has_no_wall_time(made):
    write_swept_run(made / "fast-s1-m0", learnt(0.3, 1), lives=2)
    results = read_sweep_results(made, swept("slow", "fast"))
    assert "time" not in results.axes
    assert f"{REWARD}, time" not in results.outcomes
    assert f"{REWARD}, tokens" in results.outcomes
    assert next(run for run in results.runs if run.name == "fast-s1-m0").seconds is None


def test_a_sweep_without_a_finished_run_is_a_page_too(tmp_path):
    results = write_sweep_results(tmp_path, swept("slow", "fast"))
    assert results.axes == {}
    assert "slow-s0-m0" in Page(tmp_path / REPORT_FILE).text


def test_the_page_has_tables_bands_and_links_and_fetches_nothing(made):
    results = write_sweep_results(made, swept("slow", "fast"))
    assert msgspec.json.decode((made / RESULTS_FILE).read_bytes(), type=SweepResults) == results
    page = Page(made / REPORT_FILE)
    assert "Two <losses>" in page.text
    assert "fast less slow" in page.text
    assert "0.4" in page.text
    assert set(page.fetched) == {f"{name}-s{seed}-m0/report.html" for name in ("slow", "fast") for seed in range(3)}
    data = json.loads(page.data)
    (chart,) = data["charts"]
    assert [line["label"] for line in chart["lines"]] == ["fast", "slow"] or [
        line["label"] for line in chart["lines"]
    ] == ["slow", "fast"]
    for line in chart["lines"]:
        for axis in ("step", "time", "tokens"):
            lengths = {len(data["series"][f"{line[part]}@{axis}"]) for part in ("metric", "low", "high")}
            assert lengths == {len(data["series"][f"x/{axis}"])}


def test_estimates_in_words():
    assert format_estimate(None) == "-"
    assert format_estimate(estimate_mean({(0, 0): 0.5})) == "0.5 (one run)"
    assert format_estimate(estimate_mean({(0, 0): 0.5, (1, 0): 0.5}), signed=True) == "+0.5 [0.5, 0.5]"
