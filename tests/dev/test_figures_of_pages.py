"""Figures and drawings of the pages are those of their data."""

import re
import runpy
from pathlib import Path

from dev.bench.commands import app as bench
from dev.sweep.plan import read_sweep_plan
from dev.sweep.results import compute_results, read_finished_runs

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"


def test_the_trust_region_bounds_every_window_of_every_run_and_costs_no_reward():
    plan = read_sweep_plan(FIGURES / "plans" / "trust-region.toml")
    points = compute_results(plan, read_finished_runs(FIGURES / "science" / "trust-region.jsonl"))
    assert len(points) == 7 * 6
    assert all(len(point.figures) == 5 for point in points)
    bounded = [point for point in points if "limit" in point.name or "target" in point.name]
    assert max(point.find_largest("rollout_kl/served_k3, window") for point in bounded) < 1.5 * 0.1
    # Another loss less the one with the limit: the interval of no difference in reward is above 0.
    others = [point for point in points if point.differences]
    assert all(point.base.startswith("PPO clip with limit 0.1, ") for point in others)
    better = [point.name for point in others if point.differences["reward/mean"].low > 0]
    assert not better
    assert all(
        "lr=0.0005" in p.name or p.differences["reward/mean, last"].high < 0 for p in others if "PPO clip" in p.name
    )


def test_every_benchmark_that_a_page_names_is_there_or_is_named_with_the_commit_that_has_it():
    known = {command.callback.__name__ for command in bench.registered_commands}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("D-*.md")]:
        for block in re.split(r"\n\s*\n", path.read_text()):
            for benchmark in re.findall(r"dev bench ([a-z][\w-]*)", block):
                assert benchmark in known or "ab1215e1" in block, f"{path.name}: {block[:200]}"


def test_the_figure_of_routing_replay_is_drawn_from_the_reports_kept_beside_it():
    drawn = runpy.run_path(str(FIGURES / "make_routing_replay.py"))["draw"]()
    assert drawn == (FIGURES / "routing-replay.svg").read_text()
