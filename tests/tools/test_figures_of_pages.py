"""Tables and drawings of the pages are those of their data."""

import re
import runpy
import shutil

import msgspec
import pytest

from dev.bench import page
from dev.bench.commands import app as bench
from dev.bench.report import Measurements, build_report
from r3async.tools.sweep import record as records
from r3async.tools.sweep.plan import read_sweep_plan
from r3async.views.sweeps import FINISHED_FILE, SweepResults, read_sweep_results
from tests.helpers.sweeps import write_swept_run
from tests.tools.test_sweep_results import learnt, swept

PLANS = page.FIGURES_DIRECTORY / "plans"

DATA_OF_RUNS = sorted((page.FIGURES_DIRECTORY / "science").glob("*.jsonl"))


@pytest.mark.parametrize("data", DATA_OF_RUNS, ids=lambda path: path.stem)
def test_figures_of_the_pages_follow_from_the_runs_in_the_repository(data, tmp_path):
    plan = read_sweep_plan(PLANS / f"{data.stem}.toml")
    shutil.copy(data, tmp_path / FINISHED_FILE)
    record = records.begin_sweep(tmp_path, plan, [], [], {"commit": "", "command": ""})
    made = read_sweep_results(tmp_path, records.make_sweep_description(record))
    there = msgspec.json.decode(data.with_suffix(".json").read_bytes(), type=SweepResults)
    assert (made.runs, made.points, made.outcomes) == (there.runs, there.points, there.outcomes)
    assert all(run.complete for run in made.runs)


def test_the_trust_region_bounds_every_window_of_every_run_and_costs_no_reward():
    found = msgspec.json.decode(
        (page.FIGURES_DIRECTORY / "science" / "trust-region.json").read_bytes(), type=SweepResults
    )
    bounded = [run for run in found.runs if "limit" in run.point or "target" in run.point]
    assert len(found.points) == 7 * 6
    assert all(point.complete == point.planned == 5 for point in found.points)
    assert len({run.seed for run in bounded}) == 5
    assert max(run.figures["rollout_kl/served_k3, window"] for run in bounded) < 1.5 * 0.1
    # Another loss less the one with the limit: the interval of no difference in reward is above 0.
    others = [point for point in found.points if point.differences]
    better = [point.name for point in others if point.differences["reward/mean"].low > 0]
    assert not better
    assert all(point.base.startswith("PPO clip with limit 0.1, ") for point in others)
    assert all(
        "lr=0.0005" in p.name or p.differences["reward/mean, last"].high < 0 for p in others if "PPO clip" in p.name
    )


def test_enough_seeds_and_models_are_no_first_look(tmp_path):
    for model in range(3):
        for seed in range(5):
            for name, gain in (("pg", 0.2), ("ppo", 0.3)):
                write_swept_run(tmp_path / f"{name}-s{seed}-m{model}", learnt(gain, seed + model))
    found = swept("pg", "ppo", seeds=range(5), models=range(3))
    facts = {"commit": "abc", "machine": "2 cores"}
    results = read_sweep_results(tmp_path, msgspec.structs.replace(found, facts=facts))
    text = "\n".join(page._render_sweep(results))
    assert text.startswith("5 seeds x 3 initial models, at abc on 2 cores.\n")
    assert "|  | reward, mean of all steps | reward, last 10 steps |" in text
    assert "|  | reward, last 10 steps |\n" in "\n".join(page._render_sweep(results, " reward/mean, last "))
    with pytest.raises(ValueError, match="no outcome 'reward/means'"):
        list(page._render_sweep(results, "reward/means"))


def test_runs_that_failed_are_in_the_data_and_on_the_page(tmp_path):
    for seed in range(3):
        write_swept_run(tmp_path / f"pg-s{seed}-m0", learnt(0.2, seed))
        if seed != 1:
            write_swept_run(tmp_path / f"ppo-s{seed}-m0", learnt(0.3, seed))
    found = swept("pg", "ppo", seeds=range(3))
    facts = {"commit": "abc", "machine": "2 cores"}
    results = read_sweep_results(tmp_path, msgspec.structs.replace(found, facts=facts))
    text = "\n".join(page._render_sweep(results))
    assert "3 seeds x 1 initial model; 1 of 6 runs are missing or failed" in text
    assert "These are fewer than 5 seeds and 3 initial models" in text
    assert "| ppo less pg | +0.049 [0.049, 0.049] |" in text
    assert "`ppo-s1-m0`: unfinished." in text


def test_the_tables_of_the_pages_are_made_from_the_data_and_all_data_is_shown():
    assert page.main(["--check"]) == 0
    places = [match.groups()[1:3] for text in page.read_pages().values() for match in page.PLACE.finditer(text)]
    for kind in ("bench", "science"):
        kept = {path.stem for path in (page.FIGURES_DIRECTORY / kind).glob("*.json")}
        shown = {name for of, name in places if of == kind}
        assert shown <= kept


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
    records = {path.name: path.read_text() for path in (page.DOCS / "decisions").rglob("D-*.md")}
    for name, text in (page.read_pages() | records).items():
        for block in re.split(r"\n\s*\n", text):
            for benchmark in re.findall(r"dev bench ([a-z][\w-]*)", block):
                assert benchmark in known or "ab1215e1" in block, f"{name}: {block[:200]}"


def test_the_figure_of_routing_replay_is_drawn_from_the_reports_kept_beside_it():
    drawn = runpy.run_path(str(page.FIGURES_DIRECTORY / "make_routing_replay.py"))["draw"]()
    assert drawn == (page.FIGURES_DIRECTORY / "routing-replay.svg").read_text()
