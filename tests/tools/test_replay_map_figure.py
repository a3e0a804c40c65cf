"""The runs kept with the page on routing replay: its table is theirs, and they show what it says."""

import importlib.util
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
spec = importlib.util.spec_from_file_location("make_replay_map", FIGURES / "make_replay_map.py")
assert spec is not None
script = sys.modules["make_replay_map"] = importlib.util.module_from_spec(spec)
assert spec.loader is not None
spec.loader.exec_module(script)


def test_the_pages_table_is_made_of_the_runs_kept_beside_it() -> None:
    text, runs = script.PAGE.read_text(), script.read(script.DATA)
    assert script.page(text, runs) == text
    changed = text.replace("<!-- end of trained -->", "| another | row |\n<!-- end of trained -->")
    assert script.page(changed, runs) == text


def kept() -> tuple[list[Any], Mapping[tuple[str, str], Any]]:
    """Return the runs, and a row of the table for each point and mode."""
    runs = script.read(script.DATA)
    return runs, {(row.point, row.replay): row for row in script.rows(runs)}


def test_at_step_1_replay_lowers_drift_in_every_seed_and_the_less_the_larger_the_disturbance() -> None:
    runs, by = kept()
    first = [r for r in runs if r.point.startswith("step 1: ")]
    disturbed = [r for r in first if r.agreement[0] < 1]
    usual = [r for r in disturbed if "gate_std" not in r.point and "experts" not in r.point]
    assert all(r.served[0] > 2.5 * r.replayed[0] for r in usual)
    others = [r for r in disturbed if r not in usual]
    assert any(r.served[0] < 1.2 * r.replayed[0] for r in others)
    assert all(max(r.served[0], r.replayed[0]) < 1e-12 for r in first if r not in disturbed)
    noisy = [by[f"step 1: noise={noise}", "rollout"] for noise in (0.01, 0.03, 0.1, 0.3, 1.0)]
    assert all(row.seeds == 5 for row in noisy)
    for less, more in itertools.pairwise(noisy):
        assert more.agreement < less.agreement
        assert more.served > less.served
        assert more.served / more.replayed < less.served / less.replayed


def test_no_run_of_the_harshest_setting_collapsed_and_each_learned() -> None:
    runs, by = kept()
    harsh = [r for r in runs if r.point == "uncorrected: noise=1.0"]
    assert {r.replay for r in harsh} == {"off", "learner", "rollout"}
    for r in harsh:
        assert not r.collapsed
        assert r.end > r.reward[0]
        assert fmean(r.agreement) < 0.4 or r.replay == "learner"  # of its own routes of before the step
    off, r3 = (by["uncorrected: noise=1.0", replay] for replay in ("off", "rollout"))
    assert r3.replayed < 0.4 * off.replayed
    assert 0.7 < r3.served / off.served < 1.1
    assert off.gain is not None
    assert off.gain.pairs == 5
    assert abs(off.gain.mean) < off.gain.half_width < off.gain.detectable


def test_between_replay_and_none_no_reward_differs_and_one_run_collapsed() -> None:
    runs, by = kept()
    trained = [r for r in runs if not r.point.startswith("step 1: ")]
    assert len(trained) == 205
    assert [(r.point, r.replay) for r in trained if r.collapsed] == [("uncorrected: noise=1.0 lr=0.001", "learner")]
    others = {key: row.gain for key, row in by.items() if row.gain is not None}
    assert all(gain.pairs == 5 for gain in others.values())
    apart = {key: gain.mean for key, gain in others.items() if abs(gain.mean) > gain.half_width}
    different = {(point, gain.mean) for (point, _), gain in others.items()}
    assert (len(others), len(different)) == (26, 18)
    assert list(apart) == [("uncorrected: noise=0.3", "learner")]
    assert apart["uncorrected: noise=0.3", "learner"] < 0
    long = others["trained: noise=0.3 steps=400", "off"]
    assert (round(long.mean, 3), round(long.half_width, 3), round(long.detectable, 3)) == (0.010, 0.018, 0.025)


def test_at_eight_versions_served_drift_is_lower_without_replay_and_no_rule_halves_it() -> None:
    runs, by = kept()
    served = {name: by[f"trained: {name}", "rollout"].served for name in ("age=8", "margin=0.1", "margin=0.5")}
    off = by["trained: age=8", "off"].served
    assert round(off / served["age=8"], 2) == 0.69
    assert all(
        served["age=8"] / 2 < each < served["age=8"] for each in (off, served["margin=0.1"], served["margin=0.5"])
    )
    by_seed = {(r.replay, r.seed): fmean(r.served) for r in runs if r.point == "trained: age=8"}
    assert sum(by_seed["off", seed] < by_seed["rollout", seed] for seed in range(5)) == 4
    for age, error in ((1, 0.1), (4, 0.05)):
        point = "trained: noise=0.1" if age == 1 else f"trained: age={age}"
        assert abs(by[point, "off"].served / by[point, "rollout"].served - 1) < error
