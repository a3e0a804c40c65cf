"""The runs kept with the page on routing replay: its tables are theirs, and they show what it says."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from r3async.tools.bench.replay_map import Row, Run, read, rows

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def test_the_pages_tables_are_made_of_the_runs_kept_beside_it() -> None:
    script = runpy.run_path(str(FIGURES / "make_replay_map.py"))
    text, runs = script["PAGE"].read_text(), script["read"](script["DATA"])
    assert script["page"](text, runs) == text
    changed = text.replace("<!-- end of trained -->", "| another | row |\n<!-- end of trained -->")
    assert script["page"](changed, runs) == text


def kept() -> tuple[list[Run], Mapping[tuple[str, str], Row]]:
    runs = read(FIGURES / "replay-map.jsonl")
    return runs, {(row.point, row.replay): row for row in rows(runs)}


def test_at_step_1_replay_lowers_drift_in_every_seed_and_the_less_the_larger_the_disturbance() -> None:
    runs, by = kept()
    first = [r for r in runs if r.point.startswith("step 1: ")]
    disturbed = [r for r in first if r.agreement[0] < 1]
    assert all(r.served[0] > 2.5 * r.replayed[0] for r in disturbed)
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
    assert {r.replay for r in harsh} == {"off", "rollout"}
    for r in harsh:
        assert not r.collapsed
        assert r.end > r.reward[0]
        assert fmean(r.agreement) < 0.4
    off, r3 = (by["uncorrected: noise=1.0", replay] for replay in ("off", "rollout"))
    assert r3.replayed < 0.4 * off.replayed
    assert 0.7 < r3.served / off.served < 1.1
    assert off.gain is not None
    assert off.gain.pairs >= 4
    assert abs(off.gain.mean) < off.gain.half_width < off.gain.detectable
