"""Events and metrics, as they are written and read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import structlog

from r3async.record.events import format_event, open_event_log
from r3async.record.reading import read_json_objects
from r3async.record.step_writer import MetricsFile
from r3async.world.appending import RecordFlusher
from r3async.world.real import REAL_WORLD


def test_event_has_time_level_role_and_facts(tmp_path: Path) -> None:
    events = open_event_log(tmp_path, "learner")
    events.info("started", pid=7)
    events.bind(step=3).warning("odd", value=0.5)
    first, second = read_json_objects(tmp_path / "events.jsonl")
    assert list(first) == ["time", "level", "role", "event", "pid"]
    assert isinstance(first["time"], float)
    assert (first["level"], first["role"], first["event"], first["pid"]) == ("info", "learner", "started", 7)
    assert (second["level"], second["step"], second["value"]) == ("warning", 3, 0.5)


def test_exception_is_text(tmp_path: Path) -> None:
    events = open_event_log(tmp_path, "x")
    try:
        raise ValueError("what went wrong")
    except ValueError:
        events.exception("failed", step=1)
    (event,) = read_json_objects(tmp_path / "events.jsonl")
    assert event["level"] == "error"
    assert "ValueError: what went wrong" in event["exception"]
    assert "Traceback" in event["exception"]


@pytest.mark.parametrize(
    "value",
    [Path("/a"), {1, 2}, np.float32(0.5), np.arange(3), float("nan"), {1: {2: 3}}, "\ud800", ValueError("x"), object()],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_taken(tmp_path: Path, value: object) -> None:
    events = open_event_log(tmp_path, "x")
    events.info("odd", value=value)
    itself: list[object] = [value]
    itself.append(itself)
    events.info("very_odd", value=itself)
    assert [e["event"] for e in read_json_objects(tmp_path / "events.jsonl")] == ["odd", "very_odd"]


def test_structlog_is_configured_for_nobody_else(tmp_path: Path) -> None:
    before = structlog.get_config()
    open_event_log(tmp_path, "x").info("one")
    assert structlog.get_config() == before


def test_processes_append_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from r3async.record.events import open_event_log\n"
        "e = open_event_log(Path(sys.argv[1]), sys.argv[2])\n"
        "for i in range(500): e.info('tick', index=i, filler='x' * (i * 37 % 3000))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    writers = [subprocess.Popen([*command, f"p{i}"]) for i in range(3)]
    assert [w.wait() for w in writers] == [0, 0, 0]
    events = read_json_objects(tmp_path / "events.jsonl")
    for role in ("p0", "p1", "p2"):
        assert [e["index"] for e in events if e["role"] == role] == list(range(500))


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time":1.0,"event":"whole"}\n{"time":2.0,"eve')
    open_event_log(tmp_path, "x").info("after")
    assert [e["event"] for e in read_json_objects(path)] == ["whole", "after"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_events_that_a_full_disk_refuses_are_written_when_it_takes_them(tmp_path: Path) -> None:
    path, keeper = tmp_path / "events.jsonl", RecordFlusher(world=REAL_WORLD, retry_seconds=0)
    path.symlink_to("/dev/full")
    events = open_event_log(tmp_path, "x", keeper=keeper)
    events.info("one")
    events.info("two")
    assert not keeper.retry_writes()
    path.unlink()
    assert keeper.retry_writes()
    assert [e["event"] for e in read_json_objects(path)] == ["one", "records_kept", "two", "records_written"]


def test_console_shows_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_event_log(tmp_path, "learner", console=True).warning("odd", text="two words", n=[1, 2])
    assert re.search(r"\d\d:\d\d:\d\d warning learner: odd text=\"two words\" n=\[1,2\]\n", capsys.readouterr().err)
    assert "boom" in format_event({"event": "e", "exception": "boom"})


def test_non_finite_values_are_null_and_reported(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    row = {"step": 1, "reward/mean": 0.5, "grad_norm": float("nan"), "ratio/max": np.float32(np.inf), "x": None}
    assert writer.write(row) == ["grad_norm", "ratio/max"]
    assert writer.write({"step": np.int64(2), "reward/mean": np.float64(0.25)}) == []
    first, second = read_json_objects(tmp_path / "metrics.jsonl")
    assert first == {"step": 1, "reward/mean": 0.5, "grad_norm": None, "ratio/max": None, "x": None}
    assert second == {"step": 2, "reward/mean": 0.25}
    assert row["ratio/max"] == np.inf, "the caller's row is left as it was"


def test_a_metric_is_a_number(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    with pytest.raises(TypeError, match="number"):
        writer.write({"step": 1, "loss/policy": [1.0]})
    assert read_json_objects(tmp_path / "metrics.jsonl") == []
