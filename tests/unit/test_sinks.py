"""Sinks copy metrics to services and can neither slow nor stop a run; Prometheus can scrape a process."""

import contextlib
import importlib.util
import json
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from r3async.config import ConfigError, LogConfig, ObserveConfig, config_from_dict, config_to_toml, load_config
from r3async.data.metrics import METRICS
from r3async.record.prometheus import serve_actor_metrics, serve_metrics, to_prometheus_name
from r3async.record.sink_backends import SINK_BACKENDS, SINK_PACKAGES, EpisodeExample, make_episode_example
from r3async.record.sinks import Sink, SinkSet, check_sinks, open_sinks
from r3async.tools.outlets import MetricsForwarder


class Memory:
    def __init__(self):
        self.rows, self.closed = [], False

    def write_metrics(self, row):
        self.rows.append(row)

    def write_examples(self, examples):
        self.rows.append(examples)

    def close(self):
        self.closed = True


def test_a_sink_that_hangs_costs_no_time_and_says_once_that_it_misses_rows():
    release, reported = threading.Event(), []

    class Hangs(Memory):
        def write_metrics(self, row):
            release.wait(120)

    sink = Sink("slow", Hangs, 2, reported.append)
    before = time.monotonic()
    for row in ROWS * 100:
        sink.write(row)
    assert time.monotonic() - before < 1.0
    assert sink.dropped_rows >= 497
    assert len(reported) == 1
    assert "slower than the run" in reported[0]
    SinkSet([sink], 0.3).close()
    assert time.monotonic() - before < 5.0
    assert "did not finish in time" in reported[1]
    assert f"missed {sink.dropped_rows} rows" in reported[2]
    release.set()


def test_services_get_the_main_metrics_unless_all_are_asked_for(monkeypatch, tmp_path):
    """The catalogue's, and whatever environments, rewards and evaluations report."""
    row = dict.fromkeys(METRICS, 1.0) | {"step": 1, "time": 2.0, "version": 1, "lineage": 1}
    reported = {"rewards/correct/mean": 1.0, "env/guesses/mean": 3.0, "evaluation/reward_mean": 0.5}
    memories = {}
    monkeypatch.setitem(SINK_BACKENDS, "tensorboard", lambda config, *_: memories.setdefault(config.metrics, Memory()))
    for metrics in ("main", "all"):
        with open_sinks(LogConfig(to=["tensorboard"], metrics=metrics), tmp_path, {}, print, timeout=60.0) as sinks:
            sinks.write(row | reported)
    assert memories["all"].rows == [row | reported]
    (main,) = memories["main"].rows
    assert main == {name: (row | reported)[name] for name in main}
    assert {*reported, "step", "time", "reward/mean", "lr", "grad_norm", "rollout_kl/k3", "staleness/max"} <= set(main)
    assert 30 <= len(set(main) & set(METRICS)) <= 45
    assert not any(name.startswith(("cpu/", "wall/", "lag/")) for name in main)


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
    assert memory.rows == ROWS * 4
    assert memory.closed
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
        assert json.loads((tmp_path / "prometheus" / "learner.json").read_text()) == [
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
        deadline = time.monotonic() + 240
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


ROWS = [{"step": i, "time": 1_700_000_000.0 + i, "reward/mean": i / 4, "lr": None, "note": "text"} for i in range(1, 6)]
LATE = {
    "step": 2,
    "time": 1_700_000_009.0,
    "evaluation/reward_mean": 0.75,
    "evaluation/pass@4": 0.5,
    "evaluation/stop_reasons": {"env_done": [1, 1]},
    "evaluation/metrics": {"rewards/correct": 0.25},
}
EPISODE = {
    "step": 3,
    "trajectory": "g00000001e0000",
    "reward": 1.0,
    "turns": [
        {"user": "first | prompt\nwith a line", "assistant": "one", "reward": 0.0},
        {"user": "wrong", "assistant": "two", "reward": 1.0},
    ],
}


def start(name: str, run_dir: Path, rows: Sequence[dict], seed: int = 1) -> None:
    """A start of the run, which hands on these rows, then a late evaluation and an example."""
    run_dir.mkdir(exist_ok=True)
    reported: list[str] = []
    config = LogConfig(to=[name])
    with open_sinks(config, run_dir, {"seed": seed, "learner": {"lr": 1e-4}}, reported.append, timeout=120.0) as sinks:
        for row in rows:
            sinks.write(row)
        sinks.write(LATE)
        sinks.write([make_episode_example(EPISODE)])
    assert reported == []


def resumed(name: str, tmp_path: Path) -> Path:
    """Steps 1 to 4, and a second start from the checkpoint of step 2 that makes steps 3 to 5 with another seed."""
    run_dir = tmp_path / "run"
    start(name, run_dir, ROWS[:4])
    if name == "wandb":
        time.sleep(1.1)  # it names its directories by the second
    start(name, run_dir, ROWS[2:], seed=2)
    return run_dir


def test_an_example_is_the_first_prompt_and_all_that_followed() -> None:
    assert make_episode_example(EPISODE) == EpisodeExample(
        3, "g00000001e0000", 1.0, 2, "first | prompt\nwith a line", "one\n\n[environment] wrong\n\ntwo"
    )
    assert make_episode_example({"step": 1, "reward": 0.5, "turns": []}) == EpisodeExample(1, "", 0.5, 0, "", "")


def test_tensorboard_shows_each_step_once(tmp_path) -> None:
    run_dir = resumed("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(i, i / 4) for i in range(1, 6)]
    assert {e.value for e in events.Scalars("evaluation/reward_mean")} == {0.75}
    shown = ["evaluation/metrics/rewards/correct", "evaluation/pass@4", "evaluation/reward_mean", "reward/mean"]
    assert sorted(events.Tags()["scalars"]) == shown
    (tag,) = events.Tags()["tensors"]
    table = events.Tensors(tag)[-1].tensor_proto
    assert [d.size for d in table.tensor_shape.dim] == [2, len(EpisodeExample._fields)]
    assert list(table.string_val)[: len(EpisodeExample._fields)] == [name.encode() for name in EpisodeExample._fields]
    assert b"first | prompt\nwith a line" in list(table.string_val)


BLOCK = 32768


def records(file: Path) -> list:
    """What W&B wrote: a log of LevelDB's form, after 7 bytes that say whose it is."""
    from wandb.proto import wandb_internal_pb2

    data, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):
            break  # it is being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def wandb_rows(run_dir: Path) -> tuple[set[str], list[dict], list[dict]]:
    """Ids of runs, rows of metrics, rows with a table, of all files of W&B in a run's directory."""
    ids, rows, tables = set(), [], []
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            for item in [record.history.item] if record.WhichOneof("record_type") == "history" else []:
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in item}
                (tables if "episodes" in row else rows).append(row)
    return ids, rows, tables


@pytest.mark.long
def test_wandb_has_one_run_for_all_starts(tmp_path) -> None:
    run_dir = resumed("wandb", tmp_path)
    files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    deadline = time.monotonic() + 240  # W&B's own process writes on after the run is finished
    while len((found := wandb_rows(run_dir))[1]) < 9 and time.monotonic() < deadline:
        time.sleep(0.1)
    ids, rows, tables = found
    assert len(files) == 2
    assert ids == {(run_dir / "sinks" / "wandb").read_text()}
    steps = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert steps == [(i, i / 4) for i in (1, 2, 3, 4, 3, 4, 5)]
    assert [row["step"] for row in rows if "evaluation/reward_mean" in row] == [2, 2]  # after step 4, and kept
    assert {row["evaluation/metrics/rewards/correct"] for row in rows if "evaluation/reward_mean" in row} == {0.25}
    assert all(row["step"] == 3 for row in tables)
    stored = [json.loads(path.read_text()) for path in run_dir.rglob("*.table.json")]
    assert [table["columns"] for table in stored] == [list(EpisodeExample._fields)] * 2
    assert stored[0]["data"] == [list(make_episode_example(EPISODE))]


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "a" * 40}, "online"),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, "online"),
        ({"WANDB_API_KEY": "a" * 40, "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "online"}, "online"),
    ],
)
def test_wandb_is_asked_for_the_run_that_an_earlier_start_had(tmp_path, monkeypatch, variables, mode) -> None:
    """Online, W&B itself finds it: `wandb sync` puts offline files of one id together."""
    import wandb

    asked = []
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text(f"machine wandb.example.org login user password {'a' * 40}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def init(**given):
        asked.append((given["id"], given["resume"], given["mode"]))
        raise ConnectionError("no W&B here")

    monkeypatch.setattr(wandb, "init", init)
    for _ in range(2):
        reported: list[str] = []
        open_sinks(LogConfig(to=["wandb"]), tmp_path, {}, reported.append, timeout=60.0).close()
        assert "no W&B here" in reported[0]
    assert asked[0] == asked[1] == (asked[0][0], "allow", mode)
    assert asked[0][0] == (tmp_path / "sinks" / "wandb").read_text()


def test_mlflow_has_one_run_for_all_starts(tmp_path) -> None:
    run_dir = resumed("mlflow", tmp_path)
    from mlflow import MlflowClient

    client = MlflowClient((run_dir / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("r3async").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "1", "learner.lr": "0.0001"}  # MLflow lets none change
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(i, i / 4) for i in (1, 2, 3, 4, 3, 4, 5)]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "evaluation/reward_mean")] == [2, 2]
    assert [m.value for m in client.get_metric_history(run.info.run_id, "evaluation/pass_at_4")] == [0.5, 0.5]
    (artifact,) = client.list_artifacts(run.info.run_id)
    assert json.loads(Path(client.download_artifacts(run.info.run_id, artifact.path)).read_text()) == {
        "columns": list(EpisodeExample._fields),
        "data": [list(make_episode_example(EPISODE))],
    }
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": artifact.path, "type": "table"}]


def test_mlflow_begins_another_run_where_the_store_is_another(tmp_path, monkeypatch) -> None:
    run_dir = tmp_path / "run"
    start("mlflow", run_dir, ROWS[:2])
    other = (tmp_path / "other").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
    start("mlflow", run_dir, ROWS[2:])
    from mlflow import MlflowClient

    client = MlflowClient(other)
    (run,) = client.search_runs([client.get_experiment_by_name("r3async").experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [3, 4, 5]


def test_trackio_has_one_run_for_all_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    resumed("trackio", tmp_path)
    (file,) = (tmp_path / "trackio").rglob("r3async*.db")
    with sqlite3.connect(file) as database:
        told = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, *_ in told} == {"run"}
    rows = [(step, json.loads(metrics)) for _, step, metrics in told]
    assert [step for step, row in rows if "reward/mean" in row] == [1, 2, 3, 4, 3, 4, 5]
    assert [step for step, row in rows if "evaluation/reward_mean" in row] == [2, 2]
    tables = [row["episodes"] for _, row in rows if "episodes" in row]
    assert [table["_value"][0]["prompt"] for table in tables] == ["first | prompt\nwith a line"] * 2


def test_the_driver_hands_on_what_is_new_in_the_files_of_the_run(tmp_path, monkeypatch) -> None:
    evaluations, episodes = tmp_path / "evaluation.jsonl", tmp_path / "episodes.jsonl"

    def append(path: Path, *objects: dict) -> None:
        with path.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in objects)

    append(evaluations, {**LATE, "step": 1})  # an earlier start handed them on
    append(episodes, EPISODE)
    written: list = []
    sinks = SimpleNamespace(write=written.append, close=lambda: None)
    monkeypatch.setattr("r3async.record.sinks.open_sinks", lambda *args: sinks)
    with MetricsForwarder(load_config("quickstart"), tmp_path, print) as outlets:
        outlets.show_status({"rows": ROWS[:1]})
        append(evaluations, LATE)
        append(episodes, *[{**EPISODE, "step": step} for step in range(4, 25)], {"foreign": 1})
        outlets.show_status({"rows": ROWS[1:2]})
        assert written[:3] == [ROWS[0], ROWS[1], LATE]
        assert [each.step for each in written[3]] == list(range(4, 25))
        # A restart from a checkpoint: files are cut, and what they have was handed on.
        evaluations.write_text(json.dumps({**LATE, "step": 1}) + "\n")
        outlets.skip_written()
        append(evaluations, {**LATE, "step": 3})
        append(episodes, EPISODE)
        outlets.show_status({"rows": []})
        assert written[4:] == [{**LATE, "step": 3}]  # too few examples for a table
    assert written[5:] == [[make_episode_example(EPISODE)]]
