"""`r3async inspect` on trajectories: what is shown, what is written for other programs, how damage is reported."""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import config_from_dict, config_to_toml
from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.data.wire import encode_trajectory
from r3async.record.routes import RouteFile
from r3async.record.step_writer import MetricsFile
from r3async.tools.init_model import build_byte_tokenizer
from r3async.tools.inspect.export import export_trajectories
from r3async.tools.inspect.run import InspectError
from r3async.tools.inspect.show import format_short_routes
from r3async.tools.inspect.sources import read_spool, read_traces
from r3async.tools.inspect.trajectories import (
    InspectedTrajectory,
    TrajectoryFilter,
    convert_trained_routes,
    convert_trajectory,
)
from r3async.transport.spool import SPOOL_FORMAT
from tests.helpers.routes import ID, TOKENS, episode, experts

MASK = np.asarray([t >= 10 for t in TOKENS])


def made(number: int, *, reward: float = 1.0, version: int = 5, turns: int = 2) -> Trajectory:
    """Ten tokens; sampled are 3 to 5 and 8, 9, the first of them by `version` and the others by the next."""
    name = f"g{number:08d}e0000"
    versions = np.where(np.arange(10) > 3, version + 1, version)
    table = TokenTable.from_tokens(np.asarray(TOKENS)).with_columns(
        loss_mask=MASK,
        rollout_logprobs=np.where(MASK, np.float32(-0.1) * (1 + number), 0).astype(np.float32),
        policy_version=np.where(MASK, versions, -1).astype(np.int32),
        turn=np.where(MASK, np.arange(10) > 6, -1).astype(np.int32),
        rewards=np.where(np.arange(10) == 9, reward, 0).astype(np.float32),
        routed_experts=experts(number, 10),
        routing_recorded=np.arange(10) < 9,
    )
    played = [Turn(0, 0, 3, 6, 0.0, "eos"), Turn(1, 0, 8, 10, reward, "length")][-turns:]
    preview = [{"role": "user", "content": "[b]\x1b"}]
    return Trajectory(
        name, number, 0, 7, "generator-0", "length", played, [Sample(f"{name}s0", table, 0.8)], 1.0, 2.0, preview
    )


def write_spool(root: Path, *trajectories: Trajectory) -> Path:
    run = root / "runs" / "demo"
    (run / "spool").mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text(config_to_toml(config_from_dict({"buffer": {"durability": "disk"}})))
    for each in trajectories:
        SPOOL_FORMAT.append_record(
            run / "spool" / f"{each.group_index:09d}-0000.spool", encode_trajectory(each), fsync=False
        )
    return run


def traced(run: Path, step: int, reward: float) -> None:
    """One trajectory that step `step` trained, as this release writes it; the step made version `step`."""
    trained, calls = episode()
    columns = made(0, reward=reward).samples[0].table
    RouteFile(run / "routes", "learner").append(
        msgspec.structs.replace(
            trained,
            step=step,
            turn=columns["turn"],
            rewards=columns["rewards"],
            learner_logprobs=np.where(MASK, np.float32(-1.25), np.float32(np.nan)),
        )
    )
    for call in calls:
        RouteFile(run / "routes", "engine-generator-0").append(call)
    MetricsFile(run).write({"step": step, "version": step, "time": 1.0})


# --- spools


def test_a_spool_is_listed_with_ages_from_the_newest_version_known(tmp_path, inspect) -> None:
    run = write_spool(tmp_path, made(0), made(1, version=3, reward=0.25))
    lines = inspect("runs/demo/spool").splitlines()
    heads, *rows = [line.split() for line in lines]
    assert heads[0] == "trajectory"
    ages = {row[0]: (row[heads.index("age")], row[heads.index("reward")], row[heads.index("versions")]) for row in rows}
    assert ages == {"g00000000e0000": ("1", "1", "5-6"), "g00000001e0000": ("3", "0.25", "3-4")}
    MetricsFile(run).write({"step": 1, "version": 12, "time": 1.0})
    one = run / "spool" / "000000000-0000.spool"
    (row,) = inspect(str(one), "--json").splitlines()
    assert json.loads(row)["age"] == 7
    (row,) = inspect("trajectories", str(one), "--json", "--version", "20").splitlines()
    assert json.loads(row)["age"] == 15


def test_version_0_is_a_version_to_count_ages_from(tmp_path, inspect) -> None:
    run = write_spool(tmp_path, made(0, version=-1))
    MetricsFile(run).write({"step": 1, "version": 0, "time": 1.0})
    (row,) = inspect("runs/demo/spool", "--json").splitlines()
    assert json.loads(row)["age"] is not None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--reward-below", "0.5"], [1]),
        (["--reward-below", "1"], [1]),
        (["--age-above", "1"], [1]),
        (["--age-above", "0"], [0, 1, 2]),
        (["--turns", "2"], [0, 1]),
        (["--trajectory", "g00000002e0000"], [2]),
        (["--trajectory", "g00000002e0000s0"], [2]),
        (["--limit", "2"], [0, 1]),
        (["--turns", "2", "--age-above", "1"], [1]),
    ],
)
def test_filters_choose_trajectories(tmp_path, inspect, words, expected) -> None:
    write_spool(tmp_path, made(0), made(1, version=3, reward=0.25), made(2, turns=1))
    text = inspect("trajectories", "runs/demo/spool", "--json", *words)
    assert [json.loads(line)["group_index"] for line in text.splitlines()] == expected


def test_what_a_limit_hides_is_counted_and_nothing_found_says_what_there_is(tmp_path, inspect) -> None:
    write_spool(tmp_path, made(0), made(1), made(2))
    assert "and 2 more; --limit 0" in inspect("runs/demo/spool", "--limit", "1")
    text = inspect("trajectories", "demo", "--reward-below", "-1", code=2)
    assert "no such trajectory" in text
    assert "spool: 3 files" in text
    assert '"all" keeps every one' in text


def test_tokens_are_shown_one_a_line(tmp_path, inspect) -> None:
    run = write_spool(tmp_path, made(0))
    build_byte_tokenizer().save_pretrained(run / "init")
    text = inspect("trajectories", "runs/demo/spool", "--tokens")
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.lstrip().startswith("pos"))
    heads, rows = lines[at].split(), [line.split() for line in lines[at + 1 :]]
    assert heads == ["pos", "id", "text", "mask", "logprob", "ver", "turn", "reward", "experts"]
    assert len(rows) == 10
    assert rows[3][:8] == ["3", "10", build_byte_tokenizer().decode([10]), "1", "-0.1000", "5", "0", "-"]
    assert rows[3][8:] == [",".join(map(str, layer)) for layer in experts(0, 10)[3].tolist()]
    assert rows[9][3:] == ["1", "-0.1000", "6", "1", "1", "-"], "the last token was never fed"
    assert rows[0][3:8] == ["0", "-", "-", "-", "-"]
    objects = inspect("trajectories", "runs/demo/spool", "--tokens", "--json").splitlines()
    assert [json.loads(o)["token"] for o in objects] == TOKENS
    assert json.loads(objects[3])["routes"] == experts(0, 10)[3].tolist()


def test_without_a_tokenizer_tokens_are_ids(tmp_path, inspect) -> None:
    SPOOL_FORMAT.append_record(tmp_path / "a.spool", encode_trajectory(made(0)), fsync=False)
    assert "#11" in inspect("trajectories", "a.spool", "--tokens")


def test_routes_of_many_layers_are_cut_short() -> None:
    assert format_short_routes([[1, 2]] * 48) == "1,2 1,2 1,2 +45"
    assert format_short_routes(None) == "-"


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign"])
def test_what_is_left_of_a_damaged_spool_is_shown_and_the_rest_named(tmp_path, inspect, damage) -> None:
    run = write_spool(tmp_path, made(0), made(1))
    path = run / "spool" / "000000000-0000.spool"
    first = path.stat().st_size
    SPOOL_FORMAT.append_record(path, encode_trajectory(made(2)), fsync=False)
    data = bytearray(path.read_bytes())
    if damage == "torn":
        path.write_bytes(data[: first + 100])
    elif damage == "foreign":
        path.write_bytes(data[:first] + b"not a record" * 3)
    else:
        data[-200] ^= 1
        path.write_bytes(data)
    text = inspect("runs/demo/spool", code=2)
    assert "g00000000e0000" in text
    assert "g00000001e0000" in text
    assert "g00000002e0000" not in text
    assert f"000000000-0000.spool: {'the record at' if damage == 'flipped' else 'from'} byte {first}" in text
    assert "Traceback" not in text


# --- runs


def test_a_run_shows_what_waits_what_was_trained_and_what_was_said(tmp_path, inspect) -> None:
    run = write_spool(tmp_path, made(4, version=9))
    traced(run, 7, reward=0.5)
    turns = [{"user": "u", "assistant": "a", "reward": 0.125}]
    (run / "episodes.jsonl").write_text(json.dumps({"step": 7, "reward": 0.125, "turns": turns}) + "\n{torn")
    text = inspect("trajectories", "demo", "--json")
    found = [json.loads(line) for line in text.splitlines()]
    assert [(f["source"], f["step"], f["reward"], f["turns"], f["tokens"]) for f in found] == [
        ("spool", None, 1.0, 2, 10),
        ("trace", 7, 0.5, 2, 10),
        ("episode", 7, 0.125, 1, 0),
    ]
    assert found[1]["age"] == 6, "the step that made version 7 trained version 6"
    old = inspect("trajectories", "demo", "--tokens", "--step", "7")
    assert "-1.2500" in old, "the learner's log-prob"
    overview = inspect("demo")
    assert "spool: 1 files" in overview
    assert "traces: 1 trained" in overview
    assert "conversations: 1" in overview


def test_a_run_without_a_spool_says_which_setting_makes_one(tmp_path, inspect) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(config_to_toml(config_from_dict({})))
    text = inspect("demo")
    assert '`buffer.durability` is "memory"; "disk"' in text
    assert '`routing.trace` is "sample"; "all"' in text


def test_turns_of_a_trace_are_its_stretches_of_sampled_tokens(tmp_path) -> None:
    trained, calls = episode()
    seen = convert_trained_routes([(trained, None)], "here", None)
    assert [(t.start, t.stop) for t in seen.turns] == [(3, 6), (8, 10)]
    assert [t.reward for t in seen.turns] == [0.0, 0.5]
    assert seen.reward == 0.5
    unknown = msgspec.structs.replace(seen, reward=None)
    assert not TrajectoryFilter(reward_below=100.0).matches_trajectory(unknown, None), (
        "an unknown reward is not below anything"
    )
    for call in calls:
        RouteFile(tmp_path / "routes", "engine").append(call)
    RouteFile(tmp_path / "routes", "learner").append(trained)
    (found,) = read_traces(tmp_path, pytest.fail)
    assert found.trajectory_id == ID
    assert found.samples[0].columns["routing_recorded"].tolist() == [True] * 9 + [False]


# --- files for other programs


def assert_round_trip(rows: list[dict], trajectories: list[Trajectory]) -> None:
    assert [row["trajectory_id"] for row in rows] == [t.trajectory_id for t in trajectories]
    for row, trajectory in zip(rows, trajectories, strict=True):
        assert row["reward"] == trajectory.reward
        assert [msgspec.convert(turn, Turn) for turn in row["turns"]] == trajectory.turns
        assert row["preview"] == trajectory.preview
        for kept, sample in zip(row["samples"], trajectory.samples, strict=True):
            assert (kept["sample_id"], kept["temperature"]) == (sample.sample_id, sample.temperature)
            columns = {name: np.asarray(kept[name], array.dtype) for name, array in sample.table.items()}
            assert TokenTable(columns) == sample.table


def test_json_lines_hold_everything_and_give_it_back(tmp_path, inspect) -> None:
    trajectories = [made(0), made(1, reward=0.25, turns=1)]
    write_spool(tmp_path, *trajectories)
    output = inspect("trajectories", "demo", "--export", "out.jsonl")
    assert "out.jsonl: 2 trajectories" in output
    assert_round_trip([json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()], trajectories)
    inspect("trajectories", "demo", "--reward-below", "0.5", "--export", "few.jsonl")
    assert [json.loads(x)["group_index"] for x in (tmp_path / "few.jsonl").read_text().splitlines()] == [1]


@settings(max_examples=30)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-1, 2**31 - 1))
def test_any_log_prob_and_version_come_back_exactly(tmp_path_factory, logprob: float, version: int) -> None:
    trajectory = made(0)
    trajectory.samples[0].table = trajectory.samples[0].table.with_columns(
        rollout_logprobs=np.full(10, logprob, np.float32), policy_version=np.full(10, version, np.int32)
    )
    path = tmp_path_factory.mktemp("out") / "a.jsonl"
    assert export_trajectories([convert_trajectory(trajectory, "")], path, None) == 1
    assert_round_trip([json.loads(path.read_text())], [trajectory])


def test_parquet_holds_the_rows_of_the_json_lines(tmp_path, inspect) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = write_spool(tmp_path, made(0), made(1))
    traced(run, 7, reward=0.5)
    for name in ("out.parquet", "out.jsonl"):
        inspect("trajectories", "demo", "--export", name)
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert_round_trip(rows[:2], [made(0), made(1)])
    for row, line in zip(rows, (tmp_path / "out.jsonl").read_text().splitlines(), strict=True):
        exact = json.loads(line)
        for sample, expected in zip(row.pop("samples"), exact.pop("samples"), strict=True):
            present = {name: value for name, value in sample.items() if name in expected}
            assert {n for n, v in sample.items() if v is None} >= set(sample) - set(expected)
            scores = [(s.pop("learner_logprobs", None), s) for s in (present, expected)]
            assert scores[0][1] == scores[1][1]
            if scores[1][0] is not None:
                assert [s for s in scores[0][0] if s == s] == [s for s in scores[1][0] if s is not None]
        assert row == exact


def test_an_export_that_can_not_be_written_leaves_nothing_and_says_why(tmp_path, inspect, monkeypatch) -> None:
    write_spool(tmp_path, made(0))
    assert "end in .jsonl or .parquet" in inspect("trajectories", "demo", "--export", "a.csv", code=2)
    assert "No such file" in inspect("trajectories", "demo", "--export", "no/a.jsonl", code=2)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    text = inspect("trajectories", "demo", "--export", "a.parquet", code=2)
    assert 'pip install "r3async[parquet]"' in text

    def breaks():
        yield from read_spool(tmp_path / "runs" / "demo" / "spool", pytest.fail)
        raise InspectError("lost")

    with pytest.raises(InspectError, match="lost"):
        export_trajectories(breaks(), tmp_path / "half.jsonl", None)
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}


def test_routes_are_of_runs_only(tmp_path, inspect) -> None:
    write_spool(tmp_path, made(0))
    for command in ("routes", "verify"):
        text = inspect(command, "runs/demo/spool", code=2)
        assert "only a run has routes" in text


def test_a_seen_trajectory_without_tokens_has_no_age() -> None:
    seen = InspectedTrajectory(source="episode", where="", trajectory_id="", step=1, reward=0.0)
    assert (seen.compute_staleness(5), seen.token_count, seen.version_range) == (None, 0, None)
    assert not TrajectoryFilter(age_above=-10).matches_trajectory(seen, 5)
    assert TrajectoryFilter(step=1, reward_below=0.1).matches_trajectory(seen, 5)
