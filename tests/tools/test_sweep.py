"""`r3async sweep`: plans, how many runs at once, what is made again and what is not; without training."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from r3async.config import ConfigError
from r3async.tools.memory import GIB
from r3async.tools.sweep import record as records
from r3async.tools.sweep import runner as runners
from r3async.tools.sweep.capacity import Machine, RunNeeds, combine_needs, compute_capacity, make_slot_environment
from r3async.tools.sweep.plan import choose_runs, list_points, list_runs, read_sweep_plan
from r3async.tools.sweep.runner import LOGS_DIRECTORY, SweepRunner, make_starter
from tests.helpers.cli import typed
from tests.helpers.sweeps import PLAN, FakeRun, write_plan, write_swept_run

FACTS = {"command": "r3async sweep plan.toml", "commit": "abc", "machine": "2 cores", "software": "torch 2"}


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_comes_to_runs_that_train_takes_as_they_are(tmp_path):
    plan = read_sweep_plan(write_plan(tmp_path))
    runs = list_runs(plan)
    assert [run.name for run in runs] == ["pg-s0", "ppo-s0", "pg-s1", "ppo-s1", "pg-s2", "ppo-s2"]
    assert runs[1].overrides == ['name="ppo-s0"', "steps=20", 'algorithm.policy_loss="ppo"', "seed=0"]
    config = runs[1].make_config()
    assert (config.name, config.seed, config.steps, config.algorithm.policy_loss) == ("ppo-s0", 0, 20, "ppo")
    assert runs[0].make_config().algorithm.policy_loss == "truncated_pg"


def test_a_grid_is_made_with_each_variant_and_compared_at_the_same_place(tmp_path):
    text = PLAN + "[grid]\n'schedule.max_staleness' = [1, 4]\n'learner.lr' = [1e-3]\n"
    plan = read_sweep_plan(write_plan(tmp_path, text))
    assert [(point.name, point.base_point) for point in list_points(plan)] == [
        ("pg, max_staleness=1, lr=0.001", "pg, max_staleness=1, lr=0.001"),
        ("pg, max_staleness=4, lr=0.001", "pg, max_staleness=4, lr=0.001"),
        ("ppo, max_staleness=1, lr=0.001", "pg, max_staleness=1, lr=0.001"),
        ("ppo, max_staleness=4, lr=0.001", "pg, max_staleness=4, lr=0.001"),
    ]
    assert list_runs(plan)[3].make_config().schedule.max_staleness == 4
    alone = read_sweep_plan(write_plan(tmp_path, "[grid]\n'schedule.max_staleness' = [1, 4]\n"))
    assert [(point.name, point.base_point) for point in list_points(alone)][1] == ("max_staleness=4", "max_staleness=1")


def test_initial_models_are_made_by_number_or_named(tmp_path):
    plan = read_sweep_plan(write_plan(tmp_path, "initial_models = [0, 7]\n" + PLAN))
    runs = list_runs(plan)
    assert [run.name for run in runs][:2] == ["pg-s0-m0", "ppo-s0-m0"]
    assert len({run.name for run in runs}) == 12
    assert runs[-1].make_config().model.init.seed == 7
    named = read_sweep_plan(write_plan(tmp_path, 'initial_models = ["a", "b"]\n' + PLAN))
    assert [run.make_config().model.path for run in list_runs(named)][-1] == "b"
    with pytest.raises(ConfigError, match="`initial_models` are numbers, for models that are made"):
        read_sweep_plan(write_plan(tmp_path, "initial_models = [1]\n" + PLAN.replace("steps = 20", 'model.path = "m"')))


def test_each_seed_may_have_an_initial_model_of_its_own(tmp_path):
    plan = read_sweep_plan(write_plan(tmp_path, "initial_models = [0, 7, 9]\nmodel_per_seed = true\n" + PLAN))
    runs = list_runs(plan)
    assert [run.name for run in runs] == [f"{loss}-s{at}-m{at}" for at in range(3) for loss in ("pg", "ppo")]
    assert [run.make_config().model.init.seed for run in runs[::2]] == [0, 7, 9]
    assert [run.name for run in choose_runs(plan, runs, seeds="1")] == ["pg-s1-m1", "ppo-s1-m1"]


def test_variants_whose_names_are_alike_have_directories_of_their_own(tmp_path):
    text = 'seeds = [0]\n[variants."a b"]\n[variants."a/b"]\nlearner.lr = 1e-4\n[variants."ä"]\nlearner.lr = 1e-5\n'
    assert [run.name for run in list_runs(read_sweep_plan(write_plan(tmp_path, text)))] == [
        "a-b-s0",
        "a-b-2-s0",
        "point-s0",
    ]


def test_a_part_of_a_plan_has_the_names_of_the_whole(tmp_path):
    plan = read_sweep_plan(write_plan(tmp_path, "initial_models = [0, 7]\n" + PLAN))
    part = choose_runs(plan, list_runs(plan), seeds="1", models="1", only="ppo")
    assert [run.name for run in part] == ["ppo-s1-m1"]
    assert part[0].make_config().model.init.seed == 7
    both = choose_runs(plan, list_runs(plan), seeds="1", models="1", only="pg, ppo")
    assert [run.name for run in both] == ["pg-s1-m1", "ppo-s1-m1"]


def test_a_variant_whose_name_no_option_could_give_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'ppo, bounded' has a comma, and `--only` takes several names"):
        read_sweep_plan(write_plan(tmp_path, '[variants."ppo, bounded"]\nlearner.lr = 1e-4\n'))


BAD = [
    ("seeds = [0, 1]\ninitial_models = [0, 1, 2]\nmodel_per_seed = true", "as many `initial_models` as `seeds`"),
    ("seds = [0]", "unknown key `seds`: did you mean `seeds`?"),
    ("seeds = []", "`seeds` is empty"),
    ("seeds = [1, 1]", "`seeds` = [1, 1] has one twice"),
    ("seeds = [-1]", "`seeds[0]` must be 0 or more"),
    ('seeds = "few"', "Expected `array`, got `str`"),
    ("metrics = []", "`metrics` is empty"),
    ('metrics = ["reward/maen"]', "no run has 'reward/maen'; did you mean 'reward/mean'?"),
    ('initial_models = [0, "a"]', "`initial_models` are numbers"),
    ('baseline = "pgo"\n[variants.pg]\n[variants.ppo]', "`baseline` = 'pgo' is no variant; did you mean"),
    ('preset = "quikstart"', "did you mean 'quickstart'"),
    ("[settings]\nseed = 3", "`settings.seed`: list them in `seeds`"),
    ("[settings]\nname = 'x'", "each run has a name of its own"),
    ("[settings]\nlearner.lrr = 1", "unknown key `learner.lrr`"),
    ("[variants.a]\nmodel.init.seed = 1", "`variants.a.model.init.seed`: list them in `initial_models`"),
    ("[grid]\n'learner.lr' = 1e-3", "Expected `array`"),
    ("[grid]\n'learner.lr' = []", "`grid.learner.lr` must be a list of values"),
    ("[variants.a]\nlearner.lr = 1\n[grid]\n'learner.lr' = [1]", "`learner.lr` is in the grid, and in variants.a"),
    ("[settings]\nenv = [{ name = 'x' }, 1997-01-01]", "plan.toml"),
    ("seeds = [", "is not valid TOML"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_bad_plan_is_one_line_and_exit_code_2(text, message, tmp_path):
    write_plan(tmp_path, text)
    done = typed("sweep", "plan.toml", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "plan.toml" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0,9"], "--seeds '0,9': the plan has no seed '9'"),
        (["--models", "1"], "the plan has no initial model '1'"),
        (["--only", "pppo"], "no variant 'pppo'; did you mean 'ppo'?"),
        (["algorithm.policy_loss=gspo"], "`algorithm.policy_loss` is what the plan's runs differ in"),
        (["seed=3"], "`seed` cannot be set for a sweep: list them in `seeds`"),
        (["--parallel", "0"], "--parallel"),
        (["--name", "a/../b"], "--name"),
        (["learner.parallel.cp=2", "learner.parallel.ep=3"], "run pg-s0"),
    ],
)
def test_a_bad_command_names_what_is_wrong(words, message, tmp_path):
    write_plan(tmp_path)
    done = typed("sweep", "plan.toml", *words, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "runs").exists()


def test_every_run_is_validated_before_the_first_starts(tmp_path):
    text = PLAN + "[variants.last]\ntransport.max_message_bytes = 1000\n"
    write_plan(tmp_path, text)
    done = typed("sweep", "plan.toml", cwd=tmp_path)
    assert (done.returncode, "run last-s0" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_lists_commands_that_can_be_typed(tmp_path):
    write_plan(tmp_path)
    done = typed("sweep", "plan.toml", "--dry-run", "--seeds", "1", "--parallel", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == ("r3async train quickstart 'name=\"ppo-s1\"' steps=20 'algorithm.policy_loss=\"ppo\"' seed=1")
    assert lines[2] == "2 runs, 2 at once (as asked (--parallel))"


# -- how many at once --------------------------------------------------------------------------------------------------


def test_cores_memory_and_gpus_limit_how_many_runs_there_are_at_once():
    machine = Machine(16, 64 * GIB, [])
    assert compute_capacity(RunNeeds(2, 4 * GIB, 0), machine, 20, None, "").runs == 8
    found = compute_capacity(RunNeeds(2, 10 * GIB, 0), machine, 20, None, "")
    assert found.runs == 6
    assert found.reason == "16 cores, 2 a run; 64.0 GiB of free memory, 10.0 a run"
    assert compute_capacity(RunNeeds(2, 4 * GIB, 0), machine, 3, None, "").runs == 3
    assert compute_capacity(RunNeeds(2, 4 * GIB, 0), Machine(1, GIB, []), 3, None, "").runs == 1
    assert compute_capacity(RunNeeds(2, 4 * GIB, 3), Machine(64, 512 * GIB, list("01234567")), 9, None, "").runs == 2
    assert compute_capacity(RunNeeds(2, 4 * GIB, 0), machine, 20, 12, "").runs == 12
    assert compute_capacity(RunNeeds(2, 4 * GIB, 0), machine, 20, None, "ray://head:1").runs == 1
    assert combine_needs([RunNeeds(1, 5.0, 0), RunNeeds(2, 3.0, 1)]) == RunNeeds(2, 5.0, 1)


def test_runs_at_once_have_gpus_of_their_own():
    machine = Machine(64, 512 * GIB, ["4", "5", "6", "7"])
    assert [make_slot_environment(slot, RunNeeds(2, GIB, 2), machine) for slot in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    assert make_slot_environment(0, RunNeeds(2, GIB, 0), machine) == {}


# -- making them -------------------------------------------------------------------------------------------------------


class Made:
    """Runs of `PLAN` with fake processes. `fakes`: by name, options of `FakeRun`."""

    def __init__(self, tmp_path, monkeypatch, slots=2, **fakes):
        self.directory, self.said, self.processes, self.most = tmp_path / "runs" / "plan", [], {}, 0
        self.runs = list_runs(read_sweep_plan(write_plan(tmp_path)))
        self.stop = SimpleNamespace(requested=False)
        self.fakes = fakes
        self.polls = 0
        monkeypatch.setattr(runners, "KILL_SECONDS", 0.05)
        self.runner = SweepRunner(
            self.directory, self.runs, slots, self.start, self.stop, self.said.append, sleep=self.sleep
        )

    def start(self, run, slot):
        self.processes[run.name] = FakeRun(self.directory / run.name, **self.fakes.get(run.name.replace("-", "_"), {}))
        self.most = max(self.most, slot + 1)
        return self.processes[run.name]

    def sleep(self, seconds):
        self.polls += 1
        if self.polls == getattr(self, "stop_at", None):
            self.stop.requested = True


def test_runs_are_made_as_many_at_once_as_there_are_slots(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch, slots=2)
    assert made.runner.run_all()
    assert list(made.processes) == [run.name for run in made.runs]
    assert made.most == 2
    assert made.said[0] == "0 of 6 runs are finished"
    assert "ppo-s2: finished, 2 of 2 steps in 4.0 s" in made.said


def test_finished_runs_are_not_made_again_and_others_are(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch)
    write_swept_run(made.directory / "pg-s0", [0.5] * 20)
    write_swept_run(made.directory / "ppo-s0", [0.5] * 7, steps=20, end="stopped")
    write_swept_run(made.directory / "pg-s1", [0.5] * 7, steps=20, end="")
    write_swept_run(made.directory / "ppo-s1", [0.5] * 20, end="")
    write_swept_run(made.directory / "pg-s2", [0.5] * 7, steps=20, end="failed")
    assert made.runner.run_all()
    assert list(made.processes) == ["ppo-s0", "pg-s1", "pg-s2", "ppo-s2"], "one had all steps when it was killed"


def test_a_stop_ends_runs_in_order_and_the_next_start_makes_the_rest(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch, pg_s1={"polls": 99}, ppo_s1={"polls": 99})
    made.stop_at = 5
    assert not made.runner.run_all()
    assert [name for name, process in made.processes.items() if process.signals] == ["pg-s1", "ppo-s1"]
    assert made.runner.failed_names == []
    assert "stopping: 2 runs finish their steps; once more ends them at once" in made.said
    again = Made(tmp_path, monkeypatch)
    assert again.runner.run_all()
    assert list(again.processes) == ["pg-s1", "ppo-s1", "pg-s2", "ppo-s2"]


def test_a_second_stop_leaves_no_process_behind(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch, slots=1, pg_s0={"deaf": True})

    def interrupt(seconds):
        made.polls += 1
        if made.polls == 2:
            raise KeyboardInterrupt

    made.runner._sleep = interrupt
    with pytest.raises(KeyboardInterrupt):
        made.runner.run_all()
    assert made.processes["pg-s0"].killed


def test_a_run_that_fails_is_named_and_the_others_are_made(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch, ppo_s0={"code": 1})
    (made.directory / LOGS_DIRECTORY).mkdir(parents=True)
    (made.directory / LOGS_DIRECTORY / "ppo-s0.txt").write_text("loading\nthe run failed: out of memory\n\n")
    assert not made.runner.run_all()
    assert made.runner.failed_names == ["ppo-s0"]
    assert "ppo-s0: failed: the run failed: out of memory" in made.said
    assert len(made.processes) == 6


def test_a_run_that_is_refused_ends_the_sweep(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch, pg_s0={"code": 2}, ppo_s0={"polls": 99})
    with pytest.raises(ConfigError, match="run pg-s0 was refused: exit code 2"):
        made.runner.run_all()
    assert list(made.processes) == ["pg-s0", "ppo-s0"]
    assert made.processes["ppo-s0"].signals, "what ran beside it is ended in order"


def test_a_run_in_a_process_of_its_own_keeps_its_words_and_its_environment(tmp_path):
    """A real process: `train` refuses the preset, with exit code 2, in its log."""
    run = list_runs(read_sweep_plan(write_plan(tmp_path)))[0]._replace(preset="quikstart")
    process = make_starter(tmp_path / "sweep", lambda slot: {"CUDA_VISIBLE_DEVICES": str(slot)})(run, 0)
    assert process.wait(timeout=60) == 2
    assert runners.read_last_line(tmp_path / "sweep" / LOGS_DIRECTORY / "pg-s0.txt").endswith(
        "(a file must end in .toml)"
    ), (tmp_path / "sweep" / LOGS_DIRECTORY / "pg-s0.txt").read_text()


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_a_sweep_is_not_continued_with_other_settings(tmp_path):
    plan = read_sweep_plan(write_plan(tmp_path))
    directory = tmp_path / "runs" / "plan"
    records.begin_sweep(directory, plan, [], list_runs(plan), FACTS)
    write_swept_run(directory / "pg-s0", [0.5] * 20)
    with pytest.raises(ConfigError, match="pg-s0 was made with other settings") as error:
        records.begin_sweep(directory, plan, ["steps=30"], list_runs(plan, ["steps=30"]), FACTS)
    assert "(steps=20 in place of steps=30)" in str(error.value)
    records.begin_sweep(directory, plan, [], list_runs(plan), FACTS)
    with pytest.raises(ConfigError, match=r"finished\.jsonl has a run pg-s0 that was made with other settings"):
        records.begin_sweep(directory, plan, ["steps=30"], list_runs(plan, ["steps=30"])[:1], FACTS)
    kept = records.begin_sweep(directory, plan, [], list_runs(plan)[:1], FACTS | {"commit": "def"})
    assert kept.facts["commit"] == "abc, def"
    assert len(kept.runs) == 6, "what was planned before is still in the report"


def test_figures_and_curves_of_whole_runs_are_kept_when_their_directories_are_gone(tmp_path):
    plan = read_sweep_plan(write_plan(tmp_path))
    directory = tmp_path / "runs" / "plan"
    for at, run in enumerate(list_runs(plan)[:5]):
        write_swept_run(directory / run.name, [0.1 * at + 0.01 * step for step in range(20)], lives=1 + (at == 2))
    write_swept_run(directory / "pg-s2", [0.5] * 3, steps=20, end="stopped")
    record = records.begin_sweep(directory, plan, [], list_runs(plan), FACTS)
    before = records.write_sweep_report(directory, record)
    records.save_finished_runs(directory, record, list_runs(plan), FACTS)
    for run in list_runs(plan):
        if run.name != "pg-s2":
            shutil.rmtree(directory / run.name, ignore_errors=True)
    after = records.write_sweep_report(
        directory, records.begin_sweep(directory, plan, [], list_runs(plan)[:1], FACTS | {"commit": "def"})
    )
    assert [run.complete for run in after.runs] == [True, True, True, True, False, False]
    assert msgspec.structs.replace(after, facts=before.facts) == before
    assert after.facts["commit"] == "abc", "the commit that made them"


def test_a_run_that_is_kept_is_not_made_again_unless_its_line_lacks_a_metric(tmp_path, monkeypatch):
    made = Made(tmp_path, monkeypatch)
    write_swept_run(made.directory / "pg-s0", [0.5] * 20)
    record = records.begin_sweep(made.directory, read_sweep_plan(tmp_path / "plan.toml"), [], made.runs, FACTS)
    records.save_finished_runs(made.directory, record, made.runs, FACTS)
    shutil.rmtree(made.directory / "pg-s0")
    runner = partial(
        SweepRunner, made.directory, made.runs, 1, made.start, made.stop, made.said.append, sleep=made.sleep
    )
    assert runner(metrics=["reward/mean"]).run_all()
    assert list(made.processes) == [run.name for run in made.runs[1:]]
    assert runner(metrics=["reward/mean", "rollout_kl/served_k3"]).run_all()
    assert "pg-s0" in made.processes


def test_a_directory_that_is_a_runs_or_cannot_be_read_is_refused(tmp_path):
    write_swept_run(tmp_path / "run", [0.5])
    with pytest.raises(ConfigError, match="is the directory of a run"):
        records.read_sweep_record(tmp_path / "run")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / records.RECORD_FILE).write_text('{"plan": ')
    with pytest.raises(ConfigError, match="cannot be read"):
        records.read_sweep_record(tmp_path / "torn")


def test_a_report_is_written_again_by_the_sweeps_name(tmp_path):
    plan = read_sweep_plan(write_plan(tmp_path))
    directory = tmp_path / "runs" / "plan"
    records.begin_sweep(directory, plan, [], list_runs(plan)[:2], FACTS)
    write_swept_run(directory / "pg-s0", [0.5] * 20)
    done = typed("report", "plan", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("runs/plan/report.html")
    results = json.loads((directory / "results.json").read_text())
    assert [point["complete"] for point in results["points"]] == [1, 0]
    assert [run["complete"] for run in results["runs"]] == [True, False]
