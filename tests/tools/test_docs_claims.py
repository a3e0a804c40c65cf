"""Figures about learning: each on the pages is of data, or says of how many runs it is; and data becomes pages."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from dev.bench import claims, page, science
from dev.bench.claims import Claim, Other, Register, blocks, filled, is_figure, problems, written
from dev.bench.jobs import BenchError
from r3async.config import ConfigError
from r3async.tools.sweep import record as records
from r3async.tools.sweep import runner as runners
from r3async.tools.sweep.command import SweepRequest
from r3async.tools.sweep.plan import list_runs, read_sweep_plan
from r3async.views.sweeps import FINISHED_FILE, SweepResults, read_sweep_results
from tests.helpers.sweeps import PLAN, FakeRun, write_plan, write_swept_run
from tests.tools.test_sweep_results import learnt, swept

DATA = {"runs": {"none": [{"drift": 4.9}, {"drift": 0.000123}]}}


# -- the pages' own ----------------------------------------------------------------------------------------------------


def test_every_figure_about_learning_is_of_data_or_says_of_how_many_runs_it_is():
    wrong = problems(claims.read_register(), claims.pages())
    assert not wrong, (
        "docs/figures/claims.toml needs a [[claim]] for each, with `data`, or with `runs` as the page's section has it "
        "('one run', 'three seeds'); or an [[other]], if it is no figure about learning:\n" + "\n".join(wrong)
    )


def test_the_plans_of_the_pages_have_five_seeds_and_models_and_all_baselines():
    plans = {path.stem: read_sweep_plan(path) for path in science.PLANS.glob("*.toml")}
    assert set(plans) == {"quickstart", "trust-region"}
    for plan in plans.values():
        assert (len(plan.seeds), len(plan.initial_models), plan.model_per_seed) == (5, 5, True)
        names = [run.name for run in list_runs(plan)]
        assert len(set(names)) == len(names)
        for run in list_runs(plan):
            assert run.make_config().seed == run.seed
    made = [run.make_config().algorithm for run in list_runs(plans["trust-region"])]
    assert {each.policy_loss for each in made} == {"truncated_pg", "ppo", "decoupled_ppo", "tis"}
    assert {each.rollout_kl.coef for each in made} == {0.0, 0.01}
    assert {each.rollout_kl.target for each in made} == {None, 0.1}
    assert {each.rollout_kl.limit for each in made} == {None, 0.1}


DATA_OF_RUNS = sorted((claims.FIGURES / "science").glob("*.jsonl"))


@pytest.mark.parametrize("data", DATA_OF_RUNS, ids=lambda path: path.stem)
def test_figures_of_the_pages_follow_from_the_runs_in_the_repository(data, tmp_path):
    plan = read_sweep_plan(science.PLANS / f"{data.stem}.toml")
    shutil.copy(data, tmp_path / FINISHED_FILE)
    record = records.begin_sweep(tmp_path, plan, [], [], {"commit": "", "command": ""})
    made = read_sweep_results(tmp_path, records.make_sweep_description(record))
    there = msgspec.json.decode(data.with_suffix(".json").read_bytes(), type=SweepResults)
    assert (made.runs, made.points, made.outcomes) == (there.runs, there.points, there.outcomes)
    assert all(run.complete for run in made.runs)


def test_the_trust_region_bounds_every_window_of_every_run_and_costs_no_reward():
    found = msgspec.json.decode((claims.FIGURES / "science" / "trust-region.json").read_bytes(), type=SweepResults)
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
    assert [is_figure(block) for _, block in blocks(f"# A\n\n{text}\n")] == [True]


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
    assert not any(is_figure(block) for _, block in blocks(f"# A\n\n{text}\n"))


PAGE = "# A\n\n## B\n\nOne run each. Drift is 4.90 times\nthe target, and 1.2e-4 nats.\n\n## C\n\n* Reward is 0.91 and 0.92.\n"
DRIFT = "Drift is {runs[none][0][drift]:.2f} times the target, and {runs[none][1][drift]:.1e} nats."
REWARD = Claim("a.md", "Reward is 0.91 and 0.92.", runs="two seeds")


@pytest.fixture
def data(monkeypatch, tmp_path):
    monkeypatch.setattr(claims, "FIGURES", tmp_path)
    (tmp_path / "d.json").write_text("said before\n" + json.dumps(DATA) + "\n")


def test_a_claim_is_compared_with_its_data(data):
    good = Register([Claim("a.md", DRIFT, data="d.json")], [Other("a.md", "Reward is 0.91", "an example")])
    assert problems(good, {"a.md": PAGE}) == []
    assert problems(good, {"a.md": PAGE.replace("4.90", "4.80")}) == [
        "a.md does not say 'Drift is 4.90 times the target, and 1.2e-4 nats.', as d.json does"
    ]
    lacking = Register([Claim("a.md", DRIFT.replace("none", "some"), data="d.json")], good.other)
    assert "d.json lacks 'some'" in problems(lacking, {"a.md": PAGE})[0]


def test_a_claim_without_data_says_in_its_section_of_how_many_runs_it_is(data):
    drift = Claim("a.md", DRIFT, data="d.json")
    assert problems(Register([drift, REWARD]), {"a.md": PAGE}) == [
        "a.md: its section does not say of how many runs 'Reward is 0.91 and 0.92.' is: two seeds"
    ]
    assert problems(Register([drift, REWARD]), {"a.md": PAGE.replace("0.92.", "0.92. These are two seeds.")}) == []
    assert "?" in problems(Register([drift, Claim("a.md", REWARD.words)]), {"a.md": PAGE})[0]


def test_a_figure_in_no_claim_and_a_word_that_is_not_there_any_more_are_named(data):
    (line,) = problems(Register([Claim("a.md", DRIFT, data="d.json")]), {"a.md": PAGE})
    assert line == "a.md, C: in no claim of claims.toml: * Reward is 0.91 and 0.92."
    other = Other("a.md", "Reward is 0.1", "an example")
    assert "a.md does not say 'Reward is 0.1' (any more)" in problems(Register([], [other]), {"a.md": PAGE})


def test_figures_in_sentences_are_written_from_the_data(data):
    register = Register([Claim("a.md", DRIFT, data="d.json"), REWARD])
    old = PAGE.replace("4.90", "3.10").replace("1.2e-4", "9.9e-5")
    assert written("a.md", old, register) == PAGE, "line ends stay where they are"
    assert written("a.md", PAGE, register) == PAGE
    assert written("b.md", old, register) == old
    assert filled(register.claim[0], DATA).endswith("1.2e-4 nats.")


def test_the_script_lists_claims_and_fails_where_one_is_wrong(monkeypatch, capsys, data):
    monkeypatch.setattr(claims, "read_register", lambda: Register([Claim("a.md", DRIFT, data="d.json"), REWARD]))
    monkeypatch.setattr(claims, "pages", lambda: {"a.md": PAGE.replace("0.92.", "0.92. These are two seeds.")})
    assert claims.main() == 0
    said = capsys.readouterr().out
    assert "1 without data, which say so:" in said
    assert "a.md: Reward is 0.91 and 0.92. (two seeds; )" in said
    monkeypatch.setattr(claims, "pages", lambda: {"a.md": PAGE})
    assert claims.main() == 1
    assert "does not say of how many runs" in capsys.readouterr().err


# -- from runs to pages ------------------------------------------------------------------------------------------------


def made_by(tmp_path):
    """Stands for `sweep.command.run_sweep`: the runs are there, without training."""

    def make(directory, asked, say):
        plan = read_sweep_plan(asked.path)
        seeds = [seed for seed in plan.seeds if not asked.seeds or str(seed) in asked.seeds.split(",")]
        for seed in seeds:
            write_swept_run(directory / f"pg-s{seed}-m0", learnt(0.2, seed))
            if not (seed == 1 and "fail" in plan.title):
                write_swept_run(directory / f"ppo-s{seed}-m0", learnt(0.3, seed))
        found = swept("pg", "ppo", seeds=seeds)
        facts = {"commit": "abc", "machine": "2 cores", "command": f"r3async sweep {asked.overrides}"}
        results = read_sweep_results(directory, msgspec.structs.replace(found, facts=facts))
        return all(run.complete for run in results.runs), results

    return make


def test_a_plan_becomes_data_and_data_becomes_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "run_sweep", made_by(tmp_path))
    path, out = write_plan(tmp_path, name="two.toml"), tmp_path / "data"
    report = science.run([path], SweepRequest(path), quick=False, keep=tmp_path / "runs", out=out, say=print)
    assert report.sweeps["two"].facts["command"] == f"python -m dev bench science {path}"
    monkeypatch.setattr(page, "SCIENCE", out)
    text = "# A\n\n<!-- science: two -->\nold\n<!-- end of two -->\n"
    made = page.written(text, {"reports": {}})
    assert "3 seeds x 1 initial model, at abc on 2 cores. These are fewer than 5 seeds and 3 initial models" in made
    assert "| ppo less pg | +0.049 [0.049, 0.049] |" in made
    assert "old" not in made
    assert page.written(made, {"reports": {}}) == made


def in_parts(tmp_path, monkeypatch):
    """In the place of runs' processes: those that are asked for are there at once. Returns the names of those that were made."""
    begun = []

    def start(run, slot):
        begun.append(run.name)
        learned = learnt(0.3 if run.name.startswith("ppo") else 0.2, run.seed, steps=20)
        return FakeRun(tmp_path / "runs" / "plan" / run.name, polls=1, rewards=learned)

    monkeypatch.setattr(runners, "make_starter", lambda directory, environment: start)
    monkeypatch.setattr(runners, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(records, "find_commit", lambda: "abc")
    return begun


def test_data_is_made_in_parts_and_its_figures_again_without_training(tmp_path, monkeypatch):
    begun, path, out = in_parts(tmp_path, monkeypatch), write_plan(tmp_path), tmp_path / "data"

    def measure(seeds=""):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)  # the next part is made on another machine
        keep = tmp_path / "runs"
        return science.run([path], SweepRequest(path, seeds=seeds), quick=False, keep=keep, out=out, say=print).sweeps[
            "plan"
        ]

    measure("0")
    monkeypatch.setattr(records, "find_commit", lambda: "def")
    measure("1,2")
    assert sorted(begun) == [f"{name}-s{seed}" for name in ("pg", "ppo") for seed in (0, 1, 2)]
    before, figures = (out / "plan.jsonl").read_bytes(), (out / "plan.json").read_bytes()
    assert [json.loads(line)["facts"]["commit"] for line in before.splitlines()] == ["abc"] * 2 + ["def"] * 4
    monkeypatch.setattr(records, "find_commit", lambda: "ghi")
    results = measure()
    assert len(begun) == 6, "no run is made again"
    assert results.facts["commit"] == "abc; def"
    assert results.points[1].differences["reward/mean"].runs == 3
    assert ((out / "plan.jsonl").read_bytes(), (out / "plan.json").read_bytes()) == (before, figures)


def test_data_that_another_plan_made_is_refused_by_name_and_kept(tmp_path, monkeypatch):
    begun, path, out = in_parts(tmp_path, monkeypatch), write_plan(tmp_path), tmp_path / "data"
    science.run([path], SweepRequest(path, seeds="0"), quick=False, keep=tmp_path / "runs", out=out, say=print)
    before = (out / "plan.jsonl").read_bytes()
    write_plan(tmp_path, PLAN.replace("steps = 20", "steps = 30"))
    with pytest.raises(ConfigError, match=r"has a run pg-s0 .*\(steps=20 in place of steps=30\).*--out"):
        science.run([path], SweepRequest(path, seeds="1"), quick=False, keep=tmp_path / "runs", out=out, say=print)
    assert (len(begun), (out / "plan.jsonl").read_bytes()) == (2, before)


def test_a_measurement_that_is_stopped_keeps_the_runs_that_it_made(tmp_path, monkeypatch):
    path, out = write_plan(tmp_path), tmp_path / "data"
    in_parts(tmp_path, monkeypatch)
    whole = science.run_sweep

    def stopped(directory, asked, say):
        whole(directory, asked._replace(seeds="0"), say)
        raise KeyboardInterrupt

    monkeypatch.setattr(science, "run_sweep", stopped)
    with pytest.raises(KeyboardInterrupt):
        science.run([path], SweepRequest(path), quick=False, keep=tmp_path / "runs", out=out, say=print)
    assert [json.loads(line)["name"] for line in (out / "plan.jsonl").read_text().splitlines()] == ["pg-s0", "ppo-s0"]
    assert json.loads((out / "plan.json").read_bytes())["facts"]["command"] == f"python -m dev bench science {path}"


def test_enough_seeds_and_models_are_no_first_look(tmp_path):
    for model in range(3):
        for seed in range(5):
            for name, gain in (("pg", 0.2), ("ppo", 0.3)):
                write_swept_run(tmp_path / f"{name}-s{seed}-m{model}", learnt(gain, seed + model))
    found = swept("pg", "ppo", seeds=range(5), models=range(3))
    facts = {"commit": "abc", "machine": "2 cores"}
    results = read_sweep_results(tmp_path, msgspec.structs.replace(found, facts=facts))
    text = "\n".join(page._science(results))
    assert text.startswith("5 seeds x 3 initial models, at abc on 2 cores.\n")
    assert "|  | reward, mean of all steps | reward, last 10 steps |" in text
    assert "|  | reward, last 10 steps |\n" in "\n".join(page._science(results, " reward/mean, last "))
    with pytest.raises(ValueError, match="no outcome 'reward/means'"):
        list(page._science(results, "reward/means"))


def test_runs_that_failed_are_in_the_data_and_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "run_sweep", made_by(tmp_path))
    path = write_plan(tmp_path, PLAN.replace("Two losses", "one fails"))
    report = science.run(
        [path], SweepRequest(path), quick=False, keep=tmp_path / "runs", out=tmp_path / "data", say=print
    )
    text = "\n".join(page._science(report.sweeps["plan"]))
    assert "3 seeds x 1 initial model; 1 of 6 runs are missing or failed" in text
    assert "`ppo-s1-m0`: unfinished." in text


def test_a_small_measurement_has_two_seeds_and_few_steps_and_no_place_among_the_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "run_sweep", made_by(tmp_path))
    before = sorted((claims.FIGURES / "science").glob("*"))
    path = write_plan(tmp_path)
    report = science.run([path], SweepRequest(path), quick=True, keep=None, out=None, say=print)
    assert (report.quick, len(report.sweeps["plan"].runs)) == (True, 4)
    assert sorted((claims.FIGURES / "science").glob("*")) == before


def test_what_cannot_be_measured_is_named(tmp_path, monkeypatch):
    path = write_plan(tmp_path)
    with pytest.raises(ConfigError, match="two plans are called plan"):
        science.run([path, path], SweepRequest(path), quick=True, keep=None, out=None, say=print)

    def nothing(directory, asked, say):
        return False, read_sweep_results(directory, swept("pg", "ppo"))

    monkeypatch.setattr(science, "run_sweep", nothing)
    with pytest.raises(BenchError, match=r"no run of .* was finished"):
        science.run([path], SweepRequest(path), quick=True, keep=None, out=None, say=print)
