"""A sweep in real processes that is killed, stopped and continued. In the place of training, a run writes rows now and then."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from r3async.record.reading import read_json_objects
from tests.helpers.cli import run_program

ROOT = Path(__file__).parents[2]
PLAN = """
title = "Two losses"
seeds = [0]

[settings]
steps = 8

[variants.pg]

[variants.ppo]
algorithm.policy_loss = "ppo"
steps = 60
"""
STAND_IN = '''
"""Python runs this file when it starts: in a run's process `r3async train` writes rows, obeys SIGTERM, and resumes."""
import sys

if "r3async.tools.program" in sys.orig_argv:
    import json, os, signal, time

    import r3async.tools.train

    def train(config, preset, root):
        run, stop = root / config.name, []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        run.mkdir(exist_ok=True)
        (run / "config.toml").write_text(f"steps = {config.steps}\\n")
        (run / "pids").open("a").write(f"{os.getpid()}\\n")
        rows, events = run / "metrics.jsonl", (run / "events.jsonl").open("a", buffering=1)
        made = len(rows.read_text().splitlines()) if rows.exists() else 0
        events.write(json.dumps({"event": "conductor_started", "time": time.time()}) + "\\n")
        while made < config.steps and not stop:
            time.sleep(0.3)
            made += 1
            with rows.open("a") as file:
                row = {"step": made, "time": time.time(), "reward/mean": 0.5, "batch/trained_tokens": 10.0}
                file.write(json.dumps(row) + "\\n")
        events.write(json.dumps({"event": "run_finished", "time": time.time(), "stopped": made < config.steps}) + "\\n")

    r3async.tools.train.train = train
'''


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "r3async", "sweep", "plan.toml", "--parallel", "1", "--json"]
    environment = os.environ | {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(what, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@pytest.mark.long
def test_a_sweep_continues_where_it_was_killed_and_where_it_was_stopped(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    sweep = tmp_path / "runs" / "plan"

    def steps(run: str) -> list[int]:
        return [row["step"] for row in read_json_objects(sweep / run / "metrics.jsonl")]

    killed = start(tmp_path)
    wait_for(lambda: steps("pg-s0"))
    killed.kill()
    killed.communicate(timeout=60)
    (pid,) = (sweep / "pg-s0" / "pids").read_text().split()
    wait_for(lambda: not psutil.pid_exists(int(pid)), 30.0)
    assert len(steps("pg-s0")) < 8, "the run ended with its sweep"

    stopped = start(tmp_path)
    wait_for(lambda: steps("ppo-s0"))
    command = [sys.executable, "-P", "-m", "r3async", "sweep", "plan.toml"]
    second = run_program(command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    os.kill(stopped.pid, signal.SIGINT)
    _, said = stopped.communicate(timeout=60)
    assert (second.returncode, "is in use by another sweep" in second.stderr) == (2, True), second.stderr
    assert stopped.returncode == 130, said
    assert "stopping: 1 runs finish their steps" in said
    assert "stopped: the same command continues with what is left" in said
    assert 1 <= len(steps("ppo-s0")) < 60
    assert "pg-s0: finished, 8 of 8 steps" in said
    first = (sweep / "pg-s0" / "metrics.jsonl").read_bytes()
    assert steps("pg-s0") == list(range(1, 9))

    last = start(tmp_path)
    out, said = last.communicate(timeout=120)
    assert last.returncode == 0, said
    assert (sweep / "pg-s0" / "metrics.jsonl").read_bytes() == first, "a finished run is not made again"
    assert len((sweep / "pg-s0" / "pids").read_text().split()) == 2
    assert steps("ppo-s0") == list(range(1, 61))
    results = json.loads(out.splitlines()[-1])
    assert [run["complete"] for run in results["runs"]] == [True, True]
    assert results["runs"][0]["seconds"] is None, "it was resumed"
    assert (sweep / "report.html").stat().st_size > 1000
