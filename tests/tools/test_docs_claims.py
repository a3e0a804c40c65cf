"""Figures about learning: each on the pages is of data, or says of how many runs it is; and data becomes pages."""

import json
import re
import runpy
import shutil
from pathlib import Path

import msgspec
import pytest

from dev.bench import claims, page
from dev.bench.claims import (
    ClaimRegister,
    FigureClaim,
    OtherFigures,
    fill_claims,
    fill_words,
    find_problems,
    is_figure,
    iter_blocks,
)
from dev.bench.commands import app as bench
from dev.bench.report import Measurements, build_report
from r3async.tools.sweep import record as records
from r3async.tools.sweep.plan import read_sweep_plan
from r3async.views.sweeps import FINISHED_FILE, SweepResults, read_sweep_results
from tests.helpers.sweeps import write_swept_run
from tests.tools.test_sweep_results import learnt, swept

PLANS = claims.FIGURES_DIRECTORY / "plans"
DATA = {"runs": {"none": [{"drift": 4.9}, {"drift": 0.000123}]}}


# -- the pages' own ----------------------------------------------------------------------------------------------------


def test_every_figure_about_learning_is_of_data_or_says_of_how_many_runs_it_is():
    wrong = find_problems(claims.read_register(), claims.read_pages())
    assert not wrong, (
        "docs/figures/claims.toml needs a [[claim]] for each, with `data`, or with `runs` as the page's section has it "
        "('one run', 'three seeds'); or an [[other]], if it is no figure about learning:\n" + "\n".join(wrong)
    )


DATA_OF_RUNS = sorted((claims.FIGURES_DIRECTORY / "science").glob("*.jsonl"))


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
        (claims.FIGURES_DIRECTORY / "science" / "trust-region.json").read_bytes(), type=SweepResults
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


# -- how that is found -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "| seed | reward |\n|---|---|\n| 0 | 0.40 → 0.97 |",
        "Without it drift is 2.3 times as large.",
        "* With replay the KL is 1.2e-4 nats.",
        "It learned more: 45 % of the tasks are solved, and reward is higher.",
    ],
)
def test_figures_about_learning_look_like_these(text):
    assert [is_figure(block) for _, block in iter_blocks(f"# A\n\n{text}\n")] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "A step takes 0.25 s.",
        "The reward is a number.",
        "`coef=0.01` weighs the drift.",
        "<!-- science: losses: reward/mean | reward/mean, last -->\n| reward | 0.40 → 0.97 |\n<!-- end of losses -->",
        "```sh\nreward 0.40 → 0.97\n```",
    ],
)
def test_other_words_and_what_is_made_do_not(text):
    assert not any(is_figure(block) for _, block in iter_blocks(f"# A\n\n{text}\n"))


PAGE = "# A\n\n## B\n\nOne run each. Drift is 4.90 times\nthe target, and 1.2e-4 nats.\n\n## C\n\n* Reward is 0.91 and 0.92.\n"
DRIFT = "Drift is {runs[none][0][drift]:.2f} times the target, and {runs[none][1][drift]:.1e} nats."
REWARD = FigureClaim("a.md", "Reward is 0.91 and 0.92.", runs="two seeds")


@pytest.fixture
def data(monkeypatch, tmp_path):
    monkeypatch.setattr(claims, "FIGURES_DIRECTORY", tmp_path)
    (tmp_path / "d.json").write_text("said before\n" + json.dumps(DATA) + "\n")


def test_a_claim_is_compared_with_its_data(data):
    good = ClaimRegister(
        [FigureClaim("a.md", DRIFT, data="d.json")], [OtherFigures("a.md", "Reward is 0.91", "an example")]
    )
    assert find_problems(good, {"a.md": PAGE}) == []
    assert find_problems(good, {"a.md": PAGE.replace("4.90", "4.80")}) == [
        "a.md does not say 'Drift is 4.90 times the target, and 1.2e-4 nats.', as d.json does"
    ]
    lacking = ClaimRegister([FigureClaim("a.md", DRIFT.replace("none", "some"), data="d.json")], good.other)
    assert "d.json lacks 'some'" in find_problems(lacking, {"a.md": PAGE})[0]


def test_a_claim_without_data_says_in_its_section_of_how_many_runs_it_is(data):
    drift = FigureClaim("a.md", DRIFT, data="d.json")
    assert find_problems(ClaimRegister([drift, REWARD]), {"a.md": PAGE}) == [
        "a.md: its section does not say of how many runs 'Reward is 0.91 and 0.92.' is: two seeds"
    ]
    assert (
        find_problems(ClaimRegister([drift, REWARD]), {"a.md": PAGE.replace("0.92.", "0.92. These are two seeds.")})
        == []
    )
    assert "?" in find_problems(ClaimRegister([drift, FigureClaim("a.md", REWARD.words)]), {"a.md": PAGE})[0]


def test_a_figure_in_no_claim_and_a_word_that_is_not_there_any_more_are_named(data):
    (line,) = find_problems(ClaimRegister([FigureClaim("a.md", DRIFT, data="d.json")]), {"a.md": PAGE})
    assert line == "a.md, C: in no claim of claims.toml: * Reward is 0.91 and 0.92."
    other = OtherFigures("a.md", "Reward is 0.1", "an example")
    assert "a.md does not say 'Reward is 0.1' (any more)" in find_problems(ClaimRegister([], [other]), {"a.md": PAGE})


def test_figures_in_sentences_are_written_from_the_data(data):
    register = ClaimRegister([FigureClaim("a.md", DRIFT, data="d.json"), REWARD])
    old = PAGE.replace("4.90", "3.10").replace("1.2e-4", "9.9e-5")
    assert fill_claims("a.md", old, register) == PAGE, "line ends stay where they are"
    assert fill_claims("a.md", PAGE, register) == PAGE
    assert fill_claims("b.md", old, register) == old
    assert fill_words(register.claim[0], DATA).endswith("1.2e-4 nats.")


def test_what_did_not_happen_is_never_and_rows_of_a_report_are_found_by_case(data, tmp_path):
    (tmp_path / "bench").mkdir()
    measured = Measurements()
    measured.add_figures("a, b", {"seconds to 0.7": 2.5})
    report = msgspec.json.encode(build_report("e2e", measured, {}))
    (tmp_path / "bench" / "e2e.json").write_bytes(report)
    words = "It took {rows[a, b][seconds to 0.7][values][0]:.1f} s."
    assert fill_words(FigureClaim("a.md", words), claims.read_data("bench/e2e.json")) == "It took 2.5 s."
    assert fill_words(FigureClaim("a.md", "Tamed: {tamed}."), {"tamed": None}) == "Tamed: never."
    again = ClaimRegister([FigureClaim("a.md", words, data="bench/e2e.json")])
    assert fill_claims("a.md", "It took never s.\n", again) == "It took 2.5 s.\n"


def test_the_script_lists_claims_without_data_and_fails_where_one_is_wrong(monkeypatch, capsys, data):
    monkeypatch.setattr(
        claims, "read_register", lambda: ClaimRegister([FigureClaim("a.md", DRIFT, data="d.json"), REWARD])
    )
    monkeypatch.setattr(claims, "read_pages", lambda: {"a.md": PAGE.replace("0.92.", "0.92. These are two seeds.")})
    assert claims.main() == 0
    said = capsys.readouterr().out
    assert "1 claims of data, and 1 without, which say so:" in said
    assert "a.md: Reward is 0.91 and 0.92. (two seeds; )" in said
    monkeypatch.setattr(claims, "read_pages", lambda: {"a.md": PAGE})
    assert claims.main() == 1
    assert "does not say of how many runs" in capsys.readouterr().err


# -- from data to pages ------------------------------------------------------------------------------------------------


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
    places = [match.groups()[1:3] for text in claims.read_pages().values() for match in page.PLACE.finditer(text)]
    for kind in ("bench", "science"):
        kept = {path.stem for path in (claims.FIGURES_DIRECTORY / kind).glob("*.json")}
        claimed = {Path(claim.data).stem for claim in claims.read_register().claim if claim.data.startswith(f"{kind}/")}
        shown = {name for of, name in places if of == kind}
        assert shown <= kept <= shown | claimed


def test_a_table_stands_in_its_place_and_nothing_else_changes(tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    measured = Measurements(facts={"weights": "135 tensors"})
    for milliseconds in (20.0, 22.0):
        measured.add_figures("pause", {"ms": milliseconds})
    report = build_report("weights", measured, {"command": "python -m dev bench weights"})
    (tmp_path / "bench" / "weights.json").write_bytes(msgspec.json.encode(report))
    monkeypatch.setattr(claims, "FIGURES_DIRECTORY", tmp_path)
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
    records = {path.name: path.read_text() for path in (claims.DOCS / "decisions").rglob("D-*.md")}
    for name, text in (claims.read_pages() | records).items():
        for block in re.split(r"\n\s*\n", text):
            for benchmark in re.findall(r"dev bench ([a-z][\w-]*)", block):
                assert benchmark in known or "ab1215e1" in block, f"{name}: {block[:200]}"


def test_the_figure_of_routing_replay_is_drawn_from_the_reports_kept_beside_it():
    drawn = runpy.run_path(str(claims.FIGURES_DIRECTORY / "make_routing_replay.py"))["draw"]()
    assert drawn == (claims.FIGURES_DIRECTORY / "routing-replay.svg").read_text()
