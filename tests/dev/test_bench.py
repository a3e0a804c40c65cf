"""`python -m dev bench`: the report that all share, what single benchmarks compute, and a small run of each.

Times are never judged.
"""

import math
import os
import random
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from dev.bench import start, transport
from dev.bench.conductor import ConductorJob, measure_simulated
from dev.bench.e2e import ComparisonPlan, compare_sides, configure_run, peer_job, seconds_to
from dev.bench.fleet import ConductorLoad
from dev.bench.jobs import BenchError, report_progress, run_job
from dev.bench.packing import (
    LENGTH_CAPS,
    divide_then_pack,
    draw_lengths,
    fewest_bins,
    pack_then_deal,
    plan_efficiency,
    read_model_shape,
    sum_by_micro_batch,
)
from dev.bench.report import BenchReport, Measurements, build_report, render_report, summarize_values
from dev.bench.soak import MIB, ResourceSample, find_growth
from dev.bench.tree_cpu import TreeCpu
from r3async.config import ConfigError
from r3async.learner.micro_batch_plan import CostModel
from tests.helpers.cli import run_program
from tests.helpers.processes import has_ended

PLAN = ComparisonPlan(["a"], [0], steps=20)


def measure(*words, cwd, timeout=120):
    done = run_program([sys.executable, "-m", "dev", "bench", *words, "--json"], cwd=cwd, timeout=timeout)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout.splitlines()[-1], type=BenchReport)
    assert report.benchmark == words[0]
    assert report.facts["command"].startswith(f"python -m dev bench {words[0]}")
    return report


# -- the report --------------------------------------------------------------------------------------------------------


def test_a_figure_has_its_mean_the_interval_of_students_t_and_the_number_of_values():
    figure = summarize_values([1.0, 2.0, 6.0])
    assert (figure.mean, figure.median, figure.n) == (3.0, 2.0, 3)
    half = 4.303 * np.std([1, 2, 6], ddof=1) / 3**0.5
    assert (figure.low, figure.high) == pytest.approx((3 - half, 3 + half), rel=1e-3)
    assert (summarize_values([2.0]).low, summarize_values([2.0]).high) == (None, None)


def test_rows_that_share_figures_are_one_table_and_problems_are_named():
    measured = Measurements()
    for value in (1.0, 3.0):
        measured.add_figures("a", {"ms": value, "none": None})
    measured.add_figures("b", {"ms": 2000.0, "MiB": 0.5})
    measured.add_figures("c", {"share": 0.25})
    measured.problems.append("b grows")
    lines = render_report(build_report("x", measured, {"command": "y", "machine": "z"})).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "command: `y`; machine: z",
        "",
        "| case | ms | MiB | n |",
        lines[3],
        "| a | 2 [-10.7, 14.7] | | 2 |",
        "| b | 2,000 | 0.5 | 1 |",
        "",
        "| case | share | n |",
        lines[8],
        "| c | 0.25 | 1 |",
        "",
        "b grows",
    ]


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_a_job_reports_its_progress_its_answer_and_its_failure(tmp_path, monkeypatch):
    said = []
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "jobs.py").write_text(
        "import time\n"
        "def double(job: int, directory): return 2 * job\n"
        "def fails(job: int, directory): raise SystemExit('no such model')\n"
        "def long(job: int, directory): print('waiting', flush=True); time.sleep(60)\n"
    )
    options = {"answer": int, "directory": tmp_path / "job", "print_line": said.append}
    assert run_job("jobs:double", 21, timeout=240, **options) == 42
    with pytest.raises(BenchError, match=r"(?s)jobs failed with exit code 1.*no such model"):
        run_job("jobs:fails", 1, timeout=240, **options)
    started = time.monotonic()
    with pytest.raises(BenchError, match=r"(?s)jobs took longer than 1 s.*"):
        run_job("jobs:long", 1, timeout=1, **options)
    assert time.monotonic() - started < 30
    report_progress(tmp_path, "half-way")
    assert (tmp_path / "progress.txt").read_text() == "half-way"


def test_a_benchmark_that_is_ended_ends_what_it_started(tmp_path):
    code = """
import sys, time
from pathlib import Path
from dev.bench.jobs import end_on_sigterm, start_process
with end_on_sigterm(), start_process([sys.executable, "-c", "import time; time.sleep(60)"], Path(sys.argv[1]) / "log") as job:
    print(job.pid, flush=True)
    time.sleep(60)
"""
    bench = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    pid = int(bench.stdout.readline())
    bench.terminate()
    assert bench.wait(120) == 128 + signal.SIGTERM
    bench.stdout.close()
    assert has_ended(pid)


# -- e2e ---------------------------------------------------------------------------------------------------------------


def test_a_level_is_reached_when_the_mean_of_eight_steps_is():
    marks = [(100.0 + step, 1.0 if step % 2 else 0.4) for step in range(20)]
    assert seconds_to(0.7, 90.0, marks) == 107.0 - 90.0
    assert seconds_to(0.71, 90.0, marks) is None


def test_ratios_are_of_the_figures_that_both_sides_have():
    ours = {"seconds a step": 1.0, "seconds to 0.7": 30.0, "tokens a step": 9.0}
    assert compare_sides(ours, {"seconds a step": 2.0, "tokens a step": 9.0}) == {"seconds a step": 0.5}


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_the_peer_has_the_settings_of_our_run(case, tmp_path):
    config = configure_run(case, PLAN, 3, tmp_path)
    job = peer_job(config, 2, 20)
    assert (job["groups"], job["samples"]) == (16, 8) == (config.schedule.prompts_per_step, config.schedule.group_size)
    assert (job["lr"], job["seed"], job["max_turns"]) == (
        {"b": 2e-4}.get(case, 3e-4),
        3,
        {"a": 1, "b": 5, "c": 3}[case],
    )
    assert job["env"].startswith("r3async.envs.builtin:" if case != "c" else "dev.bench.slow_tools:")


def test_processor_time_of_a_tree_is_counted_by_role_also_when_a_process_has_ended():
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with TreeCpu("mine") as cpu:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        cpu.take_reading()
        child.communicate(b"\n", timeout=240)
    # Whatever tests before this one left running is below this process too.
    first, last = cpu.readings[0], cpu.readings[-1]
    spent = last.by_role["mine"] - first.by_role.get("mine", 0.0)
    assert spent >= 0.25
    assert last.machine > 0
    assert cpu.seconds_between(first.time, time.time())["mine"] == pytest.approx(spent)


# -- start, conductor --------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.engine
def test_a_start_without_a_model_is_measured_by_stage_and_by_process(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = start.measure_start(["none", "help"], 1, print, quick=True).values
    stages = [found["none"][f"until {stage}"][0] for stage in ("model", "ray", "learner", "generator", "step")]
    assert 0 < stages[0] < stages[1] < stages[3] < stages[4]
    assert found["none"]["seconds"] == [stages[4]]
    roles = {name.removeprefix("CPU s, "): of[0] for name, of in found["none"].items() if name.startswith("CPU s, ")}
    assert {"driver", "learner", "generator", "conductor", "ray"} <= set(roles)
    assert found["none"]["CPU s"][0] == pytest.approx(sum(roles.values()))
    assert found["help"]["CPU s"][0] > 0.05


def test_a_small_conductor(tmp_path):
    report = measure("conductor", "--quick", cwd=tmp_path)
    for size in (4, 16):
        figures = report.find_figures(f"{size} generators, simulated")
        assert figures["groups/s"].mean == pytest.approx(size * 64 / 8 / 4.0, rel=0.3)
        assert figures["places busy"].mean > 0.8
        assert figures["share of a core"].mean > 0


def test_a_group_takes_few_messages_however_many_generators_there_are():
    """A call for each group, heartbeats, and what the conductor asks."""
    load = ConductorLoad(24, places=32, episode_seconds=4.0, warm_up=4.0, seconds=12.0, tensors=1)
    few, many = (measure_simulated(msgspec.structs.replace(load, generators=n), print) for n in (6, 48))
    for measured in (few, many):
        assert measured.leases < 2.5 * measured.groups
        assert measured.busy > 0.75
    assert many.leases / many.groups < 1.1 * few.leases / few.groups
    assert ConductorJob(load, "ray").way == "ray"


# -- transport, weights, transfer --------------------------------------------------------------------------------------


def test_bytes_per_token_stay_within_their_budget():
    found = transport.measure_format(2048)
    budgets = {"no routes": 10, "routes 48x8, plain": 394, "routes 48x8, bits": 345}
    assert list(found) == list(budgets)
    for name, budget in budgets.items():
        assert found[name]["bytes a token"] <= budget + 1500 / 2048, name


@pytest.mark.nightly
def test_a_small_transport_measures_every_path(tmp_path):
    report = measure("transport", "--quick", cwd=tmp_path)
    paths = [row for row in report.rows if "bytes a token" not in row.figures]
    assert [row.case.rpartition(", ")[0] for row in paths][:4] == ["raw", "raw, CURVE", "memory", "disk"]
    assert len(paths) == 8
    for row in paths:
        figures = {name: figure.mean for name, figure in row.figures.items()}
        assert figures["GB/s"] > 0
        assert figures["CURVE's CPU / this"] > figures["raw's CPU / this"]
        if row.case.startswith("raw"):
            assert figures["of CURVE" if "CURVE" in row.case else "of raw"] == 1.0
        else:
            assert figures["generator's lag p99, ms"] > 0


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_small_weights_have_every_part_of_an_update(tmp_path):
    report = measure("weights", "--updates", "3", "--layers", "2", cwd=tmp_path, timeout=580)
    milliseconds = {row.case: row.figures["ms"] for row in report.rows}
    assert all(figure.n == 3 for figure in milliseconds.values())
    assert milliseconds["load"].median < milliseconds["pause"].median < milliseconds["update"].median
    tensors = 2 * (3 * 8 + 9) + 3
    assert report.facts["weights"].startswith(f"{tensors} tensors of the model; ")
    each = report.find_figures("load")["µs a tensor"]
    assert each.median == pytest.approx(1e3 * milliseconds["load"].median / tensors)


@pytest.mark.nightly
def test_a_small_transfer_has_the_learners_bits_everywhere_once_a_host_in_bounded_memory(tmp_path):
    report = measure("transfer", "--quick", cwd=tmp_path)
    assert report.problems == []
    for engines, hosts in ((1, 1), (2, 1), (1, 2), (2, 2), (2, 3)):
        whole, delta = (
            report.find_figures(f"{engines} engines on {hosts} hosts, {form}") for form in ("whole", "delta")
        )
        assert whole["files"].mean == max(1, hosts - 1)
        assert whole["MB received"].mean >= (hosts - 1) * 4.0
        assert delta["MB received"].mean <= whole["MB received"].mean / 5
    for who in ("a rank", "an engine", "the learner"):
        memory = report.find_figures(f"memory of {who}, beside what it had")
        assert memory["MB"].mean < memory["limit, MB"].mean


# -- packing -----------------------------------------------------------------------------------------------------------


def test_efficiency_by_hand():
    """Two ranks, two rounds: the first takes 4, the second 2; 4 + 1 + 2 + 0 of 2 · 6 is useful."""
    planned = [[[0], [1]], [[2], []]]
    assert plan_efficiency(planned, np.asarray([4.0, 2.0, 1.0])) == pytest.approx(7 / 12)
    assert sum_by_micro_batch(planned, np.asarray([4, 2, 1])).tolist() == [[4, 2], [1, 0]]


@pytest.mark.parametrize(
    ("lengths", "cap", "fewest"),
    [
        ([], 10, 0),
        ([10], 10, 1),
        ([1], 10, 1),
        ([5, 5], 10, 1),
        ([6, 6, 6], 10, 3),  # no two together
        ([6, 6, 6, 5], 10, 4),  # 5 goes beside none of them
        ([7, 7, 4, 4, 4], 10, 4),  # total 26; 7 leaves 3, and three times 4 needs two more
        ([7, 7, 3, 3], 10, 2),
        ([6, 4, 4, 4], 10, 2),  # one 4 beside the 6, 8 left
    ],
)
def test_the_bound_on_micro_batches_by_hand(lengths, cap, fewest):
    assert fewest_bins(np.asarray(lengths, np.int64), cap) == fewest


@pytest.mark.parametrize("kind", LENGTH_CAPS)
def test_lengths_are_in_their_range_and_the_same_every_time(kind):
    low = {"lognormal": 64, "bimodal": 200, "pareto": 100, "groups": 64, "cut": 64}[kind]
    lengths = draw_lengths(kind, 8192, 0)
    assert low <= lengths.min() < lengths.max() <= LENGTH_CAPS[kind]
    assert np.array_equal(lengths, draw_lengths(kind, 8192, 0))
    assert not np.array_equal(lengths, draw_lengths(kind, 8192, 1))
    centre = {"cut": math.exp(8.6), "bimodal": 200 + 1300 * 0.5 / 0.7, "pareto": 500 * (2 ** (1 / 1.2) - 1)}
    assert np.median(lengths) == pytest.approx(centre.get(kind, math.exp(7)), rel=0.1)


def test_samples_of_a_group_are_alike():
    groups = np.log(draw_lengths("groups", 8192, 0)).reshape(-1, 8)
    assert groups.std(1).mean() < 0.4 < groups.mean(1).std()


@pytest.mark.parametrize("divide", [pack_then_deal, divide_then_pack])
def test_the_simpler_ways_lose_nothing_either(divide):
    lengths = draw_lengths("lognormal", 100, 0)
    planned = divide(lengths, 32768, 8, CostModel(1, 1e-4))
    assert sorted(i for mine in planned for m in mine for i in m) == list(range(100))
    assert sum_by_micro_batch(planned, lengths).max() <= 32768
    assert len({len(mine) for mine in planned}) == 1


def test_what_can_not_be_measured_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no model directory"):
        read_model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    assert read_model_shape(str(tmp_path)) == {"hidden_size": 4}


@pytest.mark.long
def test_a_small_packing(tmp_path):
    report = measure("packing", "--quick", "--seeds", "3,4", cwd=tmp_path)
    assert [row.case for row in report.rows] == [*LENGTH_CAPS, "all", "planning 256 samples", "planning 1,024 samples"]
    for kind in (*LENGTH_CAPS, "all"):
        figures = report.find_figures(kind)
        assert figures["lockstep"].n == 2
        assert figures["dealt"].mean < figures["lockstep"].mean <= figures["ceiling"].mean <= 1
    every = report.find_figures("all")
    assert every["apart"].mean < every["lockstep"].mean
    assert every["share with fewest micro-batches"].mean >= 23 / 30


# -- soak --------------------------------------------------------------------------------------------------------------


def samples(*, slope=0.0, noise=0.5, warm_up=0.0, files=lambda i: 40, count=360):
    """Of half an hour, one every five seconds: memory of 300 MiB and `slope` MiB an hour, `warm_up` MiB in the first minutes."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        at = 5.0 * i
        mib = 300 + slope * at / 3600 + min(warm_up, warm_up * at / 300) + rng.gauss(0, noise)
        made.append(ResourceSample(at, int(mib * MIB), files(i)))
    return made


def test_noise_and_what_warms_up_is_no_growth():
    figures, grows = find_growth(samples(warm_up=50))
    assert not grows
    assert abs(figures["growth MiB"]) < 0.5
    assert 0.2 < figures["scatter MiB"] < 0.6


@pytest.mark.parametrize("slope", [20.0, 60.0])
def test_a_leak_is_found_beside_the_noise(slope):
    figures, grows = find_growth(samples(slope=slope))
    assert grows
    assert figures["MiB/h"] == pytest.approx(slope, rel=0.1)


def test_memory_that_jumps_about_is_not_a_leak():
    assert not find_growth(samples(noise=8.0))[1]


def test_files_that_stay_open_are_found_and_those_that_come_and_go_are_not():
    assert not find_growth(samples(files=lambda i: 40 + i % 3))[1]
    figures, grows = find_growth(samples(files=lambda i: 40 + i // 60))
    assert grows
    assert figures["open files, last"] > figures["open files, first"]


def test_too_short_a_run_shows_nothing():
    with pytest.raises(BenchError, match="measure for longer"):
        find_growth(samples(count=11))


# -- the stranger's path


def test_a_stranger_types_what_pages_have_and_reads_them():
    from dev.bench.stranger import OWN_ROWS, PATH, PathStage, check_commands, count_words, find_file_block

    check_commands(PATH)
    assert sum(OWN_ROWS[0] in command for stage in PATH for command in stage.commands) == 1
    assert "def correct(completion, answer)" in find_file_block("rewards.py", ("docs/your-data.md",))
    assert 100 < count_words(("docs/your-data.md",)) < 1000
    with pytest.raises(BenchError, match="no page that was read by 'a' has the command `r3async fly`"):
        check_commands((PathStage("a", ("README.md",), ("r3async fly",)),))


def test_a_stranger_starts_without_the_environment_of_this_process(tmp_path, monkeypatch):
    from dev.bench.stranger import type_command

    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    monkeypatch.setenv("PATH", f"/venv/bin:{os.environ['PATH']}")
    screen, typed = tmp_path / "screen.txt", []
    type_command("echo $PYTHONPATH$VIRTUAL_ENV:$PATH; pwd", tmp_path, tmp_path, screen, typed.append)
    variables, folder = screen.read_text().splitlines()
    assert variables.startswith(":")
    assert "/venv/bin" not in variables
    assert folder == str(tmp_path)
    assert typed == ["echo $PYTHONPATH$VIRTUAL_ENV:$PATH; pwd"]
    with pytest.raises(BenchError, match="failed with exit code 3"):
        type_command("exit 3", tmp_path, tmp_path, screen, typed.append)
