"""Tables and drawings of the pages are those of their data."""

import re
import runpy

import msgspec

from dev.bench import page
from dev.bench.commands import app as bench
from dev.bench.report import Measurements, build_report
from dev.sweep.plan import read_sweep_plan
from dev.sweep.results import compute_results, read_finished_runs


def test_the_trust_region_bounds_every_window_of_every_run_and_costs_no_reward():
    plan = read_sweep_plan(page.FIGURES_DIRECTORY / "plans" / "trust-region.toml")
    points = compute_results(plan, read_finished_runs(page.FIGURES_DIRECTORY / "science" / "trust-region.jsonl"))
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


def test_the_tables_of_the_pages_are_made_from_the_data():
    assert page.main(["--check"]) == 0
    shown = {match[2] for text in page.read_pages().values() for match in page.PLACE.finditer(text)}
    assert shown <= {path.stem for path in (page.FIGURES_DIRECTORY / "bench").glob("*.json")}


def test_a_table_stands_in_its_place_and_nothing_else_changes(tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    measured = Measurements(facts={"weights": "135 tensors"})
    for milliseconds in (20.0, 22.0):
        measured.add_figures("pause", {"ms": milliseconds})
    report = build_report("weights", measured, {"command": "python -m dev bench weights"})
    (tmp_path / "bench" / "weights.json").write_bytes(msgspec.json.encode(report))
    monkeypatch.setattr(page, "FIGURES_DIRECTORY", tmp_path)
    before = "# A\n\n<!-- bench: weights -->\nold\n<!-- end of weights -->\n\nb\n"
    other = "<!-- bench: wire -->\nas it was\n<!-- end of wire -->\n"
    made = page.fill_tables(before + other)
    assert made.startswith(
        "# A\n\n<!-- bench: weights -->\ncommand: `python -m dev bench weights`; weights: 135 tensors\n"
    )
    assert "| case | ms | n |\n|---|---|---|\n| pause | 21 [8.29, 33.7] | 2 |\n<!-- end of weights -->\n\nb\n" in made
    assert made.endswith(other)
    assert page.fill_tables(made) == made


def test_every_benchmark_that_a_page_names_is_there_or_is_named_with_the_commit_that_has_it():
    known = {command.callback.__name__ for command in bench.registered_commands}
    records = {path.name: path.read_text() for path in (page.DOCS / "decisions").glob("D-*.md")}
    for name, text in (page.read_pages() | records).items():
        for block in re.split(r"\n\s*\n", text):
            for benchmark in re.findall(r"dev bench ([a-z][\w-]*)", block):
                assert benchmark in known or "ab1215e1" in block, f"{name}: {block[:200]}"


def test_the_figure_of_routing_replay_is_drawn_from_the_reports_kept_beside_it():
    drawn = runpy.run_path(str(page.FIGURES_DIRECTORY / "make_routing_replay.py"))["draw"]()
    assert drawn == (page.FIGURES_DIRECTORY / "routing-replay.svg").read_text()
