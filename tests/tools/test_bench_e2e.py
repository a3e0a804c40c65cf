"""`bench e2e`: what it makes of runs, what it asks of a peer, and the processor time of a tree of processes."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from dev.bench import bare
from dev.bench.e2e import configure, peer_job, run
from dev.bench.e2e_report import Pair, Plan, Side, compare_sides, own_ratios, seconds_to
from dev.bench.tree_cpu import TreeCpu
from r3async.config import ConfigError

PLAN = Plan(["a"], [0], steps=20)


def a_side(seconds: float, reached: float | None = None, **roles: float) -> Side:
    levels = {"0.6": 1.0, "0.7": reached, "0.8": None}
    return Side(seconds, sum(roles.values()), 128 / seconds, 100.0, 0.4, 0.8, 0.6, levels, roles, 0.0, 0.0)


def test_a_level_is_reached_when_the_mean_of_eight_steps_is():
    marks = [(100.0 + step, 1.0 if step % 2 else 0.4) for step in range(20)]
    assert seconds_to(0.7, 90.0, marks) == 107.0 - 90.0
    assert seconds_to(0.71, 90.0, marks) is None


def test_ratios_are_medians_over_seeds_that_both_have():
    pairs = [Pair(0, a_side(1.0, 30.0), a_side(2.0, 60.0)), Pair(1, a_side(3.0, 9.0), a_side(2.0, None))]
    case = compare_sides([*pairs, Pair(2, a_side(1.0, 20.0), a_side(1.0, 80.0))], {})
    assert (case.step_ratio, case.episodes_ratio) == (1.0, 1.0)
    assert case.seconds_to_07_ratio == pytest.approx((0.5 + 0.25) / 2)
    assert case.seconds_to_08_ratio is None
    assert compare_sides([Pair(0, a_side(1.0))], {}).step_ratio is None


def test_the_learner_is_compared_with_a_bare_loop_and_all_else_with_a_bare_engine():
    facts = {"learner_idle": 0.1, "engine_idle": 0.2, "lag_p99_ms": 3.0}
    side = Side(1.0, 0.8, 8.0, 100.0, 0, 0, 0, {}, {"learner": 0.3, "engine": 0.4, "ray": 0.1}, 0.0, 0.0, facts)
    made = own_ratios(side, bare.Engine(1000, 4.0, 9.0), bare.Learner(1000, 2.0, 2.2))
    assert made["cpu_per_token_ratio"] == pytest.approx(5e-3 / 4e-3)
    assert made["learner_cpu_ratio"] == pytest.approx(3e-3 / 2e-3)
    assert made["pipeline_cpu_ratio"] == pytest.approx(8e-3 / 6e-3)
    assert made["trainer_cpu_ratio"] == pytest.approx(1.1)
    assert made["engine_idle"] == 0.2


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_the_peer_has_the_settings_of_our_run(case, tmp_path):
    config = configure(case, PLAN, 3, tmp_path)
    job = peer_job(config, 2, 20)
    assert (job["groups"], job["samples"]) == (16, 8) == (config.schedule.prompts_per_step, config.schedule.group_size)
    assert (job["lr"], job["seed"], job["max_turns"]) == (
        {"b": 2e-4}.get(case, 3e-4),
        3,
        {"a": 1, "b": 5, "c": 3}[case],
    )
    assert job["env"].startswith("r3async.envs.builtin:" if case != "c" else "dev.bench.overlap_env:")


def test_a_peer_that_is_not_there_says_how_to_make_it():
    with pytest.raises(ConfigError, match=r"PEER/bin/pip install trl"):
        run(Plan(["a"], [0], peer="trl"), print)
    with pytest.raises(ConfigError, match="there are none, trl"):
        run(Plan(["a"], [0], peer="another"), print)
    with pytest.raises(ConfigError, match="there are a, b, c, own"):
        run(Plan(["d"], [0]), print)


def test_processor_time_of_a_tree_is_counted_by_role_also_when_a_process_has_ended():
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with TreeCpu("mine") as cpu:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        cpu.read()
        child.communicate(b"\n", timeout=60)
    # Whatever tests before this one left running is below this process too.
    first, last = cpu.readings[0], cpu.readings[-1]
    spent = last.by_role["mine"] - first.by_role.get("mine", 0.0)
    assert spent >= 0.25
    assert last.machine > 0
    assert cpu.between(first.time, time.time())["mine"] == pytest.approx(spent)


def test_a_benchmark_that_is_ended_ends_what_it_started(tmp_path):
    code = """
import sys, time
from pathlib import Path
from dev.bench.jobs import ended_in_order, started
with ended_in_order(), started([sys.executable, "-c", "import time; time.sleep(60)"], Path(sys.argv[1]) / "log") as job:
    print(job.pid, flush=True)
    time.sleep(60)
"""
    bench = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    pid = int(bench.stdout.readline())
    bench.terminate()
    assert bench.wait(30) == 128 + signal.SIGTERM
    bench.stdout.close()
    assert not psutil.pid_exists(pid)
