"""Each sink against its real package: rows, evaluations that come late, examples of episodes, and a run that resumes."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from r3async.config import LogConfig, load_config
from r3async.record.sinks import EpisodeExample, make_episode_example, open_sinks
from r3async.tools.outlets import MetricsForwarder

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
    told = make_episode_example(EPISODE)
    assert told == EpisodeExample(
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
    deadline = time.monotonic() + 30  # W&B's own process writes on after the run is finished
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
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def init(**given):
        asked.append((given["id"], given["resume"], given["mode"]))
        raise ConnectionError("no W&B here")

    monkeypatch.setattr(wandb, "init", init)
    for _ in range(2):
        reported: list[str] = []
        config = LogConfig(to=["wandb"])
        open_sinks(config, tmp_path, {}, reported.append, timeout=60.0).close()
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
    path = client.download_artifacts(run.info.run_id, artifact.path)
    assert json.loads(Path(path).read_text()) == {
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


def test_the_driver_hands_on_what_is_new_in_the_files_of_the_run(tmp_path) -> None:
    evaluations, episodes = tmp_path / "evaluation.jsonl", tmp_path / "episodes.jsonl"

    def append(path: Path, *objects: dict) -> None:
        with path.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in objects)

    append(evaluations, {**LATE, "step": 1})  # an earlier start handed them on
    append(episodes, EPISODE)
    written: list = []
    config = load_config("quickstart")
    with MetricsForwarder(config, tmp_path, print) as outlets:
        outlets._sinks.write = written.append  # type: ignore[method-assign]
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
