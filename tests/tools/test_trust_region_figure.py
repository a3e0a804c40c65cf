"""The runs kept with the page on the trust region: the figure and the table are theirs, and they show what it says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def test_the_figure_is_drawn_from_the_runs_kept_beside_it_and_the_page_has_their_table():
    script = runpy.run_path(str(FIGURES / "make_trust_region.py"))
    assert script["draw"]() == (FIGURES / "trust-region.svg").read_text()
    assert script["table"]() in (FIGURES.parent / "trust-region.md").read_text()


def test_the_kept_runs_show_what_the_page_claims():
    script = runpy.run_path(str(FIGURES / "make_trust_region.py"))
    runs = {(run["kind"], run["seed"]): run for run in script["runs"]() if script["drawn"](run)}
    for seed in (0, 1):
        held, free = (script["summary"](runs[kind, seed]) for kind in ("target", "none"))
        assert held["drift"] <= 1.5 < 3 < free["drift"]
        assert held["reward_half"] >= free["reward_half"]
        assert held["reward_last"] >= free["reward_last"]
        assert {runs[kind, seed]["max_staleness"] for kind in ("target", "none")} == {4}
        assert runs["target", seed]["lr"] == runs["none", seed]["lr"]


def test_what_is_kept_of_a_run(tmp_path):
    (tmp_path / "config.toml").write_text(
        "seed = 3\n[algorithm.rollout_kl]\ncoef = 0.0\n[learner]\nlr = 0.1\n[schedule]\nmax_staleness = 2\n"
    )
    names = {"rollout_kl/k3": 0.123456, "rollout_kl/coef": 0, "reward/mean": 1, "staleness/mean": 2.5, "grad_norm": 1}
    (tmp_path / "metrics.jsonl").write_text((json.dumps(names) + "\n") * 2)
    run = runpy.run_path(str(FIGURES / "make_trust_region.py"))["kept"](tmp_path)
    assert (run["kind"], run["seed"], run["max_staleness"], run["steps"]) == ("none", 3, 2, 2)
    assert run["drift"] == [0.1235, 0.1235]
