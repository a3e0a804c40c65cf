"""Sinks copy metrics elsewhere and can neither slow nor stop a run; Prometheus can scrape a process."""

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from r3async.config import ConfigError, LogConfig, ObserveConfig, config_from_dict, config_to_toml, load_config
from r3async.record.sinks import (
    SINK_BACKENDS,
    SINK_PACKAGES,
    Sink,
    SinkSet,
    check_sinks,
    serve_actor_metrics,
    serve_metrics,
    to_prometheus_name,
)

ROWS = [{"step": i, "time": 1_700_000_000.0 + i, "reward/mean": i / 4, "lr": None, "note": "text"} for i in (1, 2, 3)]


class Memory:
    def __init__(self):
        self.rows, self.closed = [], False

    def write_metrics(self, row):
        self.rows.append(row)

    def write_examples(self, examples):
        self.rows.append(examples)

    def close(self):
        self.closed = True


def test_rows_arrive_in_order_and_the_backend_is_closed():
    memory, reported = Memory(), []
    with SinkSet([Sink("memory", lambda: memory, 8, reported.append)], 10.0) as sinks:
        for row in ROWS:
            sinks.write(row)
    assert memory.rows == ROWS
    assert memory.closed
    assert reported == []


def test_a_sink_that_hangs_costs_no_time_and_says_once_that_it_misses_rows():
    release, reported = threading.Event(), []

    class Hangs(Memory):
        def write_metrics(self, row):
            release.wait(30)

    sink = Sink("slow", Hangs, 2, reported.append)
    before = time.monotonic()
    for row in ROWS * 100:
        sink.write(row)
    assert time.monotonic() - before < 1.0
    assert sink.dropped_rows >= 297
    assert len(reported) == 1
    assert "slower than the run" in reported[0]
    SinkSet([sink], 0.3).close()
    assert time.monotonic() - before < 5.0
    assert "did not finish in time" in reported[1]
    assert f"missed {sink.dropped_rows} rows" in reported[2]
    release.set()


def test_a_sink_that_fails_is_left_out_and_the_others_go_on():
    reported, memory = [], Memory()

    class Broken(Memory):
        def write_metrics(self, row):
            raise OSError("disk full")

    def never():
        raise ConnectionError("no such server")

    sinks = SinkSet([Sink("broken", Broken, 64, reported.append), Sink("never", never, 64, reported.append)], 10.0)
    sinks.sinks.append(Sink("memory", lambda: memory, 64, reported.append))
    for row in ROWS * 4:
        sinks.write(row)
    sinks.close()
    assert len(memory.rows) == 12
    assert sum("disk full" in line for line in reported) == 1
    assert sum("no such server" in line for line in reported) == 1


def test_a_missing_package_is_refused_with_the_pip_command_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"log\.to.*'mlflow'.*pip install mlflow-skinny"):
        check_sinks(LogConfig(to=["mlflow"]))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ('log.to=["tensorbord"]', "log.to"),
        ('log.to=["wandb", "wandb"]', "twice"),
        ("observe.prometheus_port=70000", "prometheus_port"),
    ],
)
def test_nonsense_is_refused_by_name(override, part):
    with pytest.raises(ConfigError, match=part):
        load_config("quickstart", [override])


def test_every_sink_that_can_be_named_has_a_package_and_a_backend():
    assert set(SINK_PACKAGES) == set(SINK_BACKENDS)


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return answer.read().decode()


def test_prometheus_reads_the_last_row_of_every_process_and_finds_it_by_file(tmp_path):
    config = ObserveConfig(prometheus_port=39000)
    driver = serve_metrics("driver", tmp_path, config)
    learner = serve_metrics("learner", tmp_path, config)
    try:
        assert driver.port != learner.port  # the first free one each
        driver.set_metrics(ROWS[0])
        driver.set_metrics(ROWS[1])
        text = scrape(f"127.0.0.1:{driver.port}")
        assert to_prometheus_name("reward/mean") == "r3async_reward_mean"
        assert f'r3async_reward_mean{{role="driver",run="{tmp_path.name}"}} 0.5' in text
        assert "process_resident_memory_bytes" in text
        assert "r3async_reward_mean" not in scrape(f"127.0.0.1:{learner.port}")
        target = json.loads((tmp_path / "prometheus" / "learner.json").read_text())
        assert target == [
            {"targets": [f"127.0.0.1:{learner.port}"], "labels": {"role": "learner", "run": tmp_path.name}}
        ]
    finally:
        driver.close()
        learner.close()
    assert not list((tmp_path / "prometheus").iterdir())


def test_without_a_port_nothing_is_served_and_a_bad_interface_does_not_stop_the_run(tmp_path, capfd):
    assert serve_metrics("driver", tmp_path, ObserveConfig()) is None
    assert serve_metrics("driver", tmp_path, ObserveConfig(prometheus_port=0, prometheus_host="203.0.113.1")) is None
    assert "observe.prometheus_port" in capfd.readouterr().err
    assert serve_actor_metrics("learner", tmp_path) is None  # there is no configuration yet
    (tmp_path / "config.toml").write_text(config_to_toml(config_from_dict({})))
    assert serve_actor_metrics("learner", tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


ACTOR = """
import sys, time
from pathlib import Path
from r3async.actors.process import prepare_process
from r3async.world.real import REAL_WORLD
lock = prepare_process(REAL_WORLD, Path(sys.argv[1]), "generator-0")
figures = [{"engine/running": 3, "odd": "text"}]
REAL_WORLD.processes.add_metrics_source(lambda: figures[0] if figures else 1 / 0)
print("begun", flush=True)
sys.stdin.readline()
figures.clear()
sys.stdin.readline()
"""


@contextlib.contextmanager
def an_actor(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that begins as every actor does; it continues when it reads a line."""
    actor = subprocess.Popen([sys.executable, "-c", ACTOR, str(run)], stdin=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while "begun" not in (log.read_text() if (log := run / "logs" / "generator-0.log").exists() else ""):
            assert time.monotonic() < deadline
            assert actor.poll() is None
            time.sleep(0.05)
        yield actor
    finally:
        actor.kill()
        actor.wait()


def test_every_actor_process_serves_itself_and_what_its_engine_counts(tmp_path):
    run = tmp_path / "demo"
    run.mkdir()
    (run / "config.toml").write_text(config_to_toml(config_from_dict({"observe": {"prometheus_port": 0}})))
    with an_actor(run) as actor:
        (target,) = json.loads((run / "prometheus" / "generator-0.json").read_text())
        assert target["labels"] == {"role": "generator-0", "run": "demo"}
        (address,) = target["targets"]
        first = scrape(address)
        assert 'r3async_engine_running{role="generator-0",run="demo"} 3.0' in first
        assert "odd" not in first
        assert "process_resident_memory_bytes" in first
        assert "process_cpu_seconds_total" in first
        actor.stdin.write("\n")
        actor.stdin.flush()
        deadline = time.monotonic() + 30
        while "r3async_engine_running" in (now := scrape(address)):  # an engine that is stopping
            assert time.monotonic() < deadline
        assert "process_resident_memory_bytes" in now


def test_the_driver_hands_rows_on_while_the_run_lasts(tmp_path):
    from r3async.tools.outlets import MetricsForwarder

    reported = []
    with MetricsForwarder(
        load_config("quickstart", ["observe.prometheus_port=0"]), tmp_path, reported.append
    ) as outlets:
        outlets.show_status({"rows": ROWS})
        (target,) = (tmp_path / "prometheus").iterdir()
        address = json.loads(target.read_text())[0]["targets"][0]
        evaluation = {"step": 0, "time": 9.0, "evaluation/reward_mean": 0.5}
        (tmp_path / "evaluation.jsonl").write_text(json.dumps(evaluation) + "\n")
        outlets.show_status({"rows": []})
        lines = [line for line in scrape(address).splitlines() if line[0] != "#"]
        shown = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
        assert "r3async_reward_mean" in shown
        assert shown["r3async_evaluation_reward_mean"] == 0.5
        assert shown["r3async_step"] == ROWS[-1]["step"], "that of the run, not of an evaluation before it"
    assert not (tmp_path / "prometheus").exists()
    assert reported == []
