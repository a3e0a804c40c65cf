"""`r3async tail`: files read as they grow, and the lines that it prints."""

import io
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from r3async.config import Config, config_to_toml
from r3async.data.metrics import METRICS
from r3async.record.events import open_event_log
from r3async.schedule.run_ahead import compute_staleness_bound
from r3async.tools.cli import app
from r3async.tools.tail.lines import FAILED_EXIT_CODE, SILENT_EXIT_CODE, print_run_lines
from r3async.views.follow import FollowedFile, FollowedRun
from r3async.views.summary import summarize_run


def append(path: Path, *objects: dict) -> None:
    with path.open("ab") as file:
        for each in objects:
            file.write(json.dumps(each).encode() + b"\n")


def row(step: int, **changes: object) -> dict:
    found = dict.fromkeys(METRICS.keys() - {"loss/answers", "loss/answers_held_out"}, 0.5) | {
        "step": step,
        "version": step,
        "time": 1000.0 + step,
        "reward/mean": step / 40,
    }
    found |= {"slots/taken": 20, "buffer/ready_groups": 4, "staleness/max": 1, "generator/restarts": 0}
    return found | changes


def write_run(root: Path, steps: int, name: str = "demo", *, end: str = "") -> Path:
    run = root / "runs" / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(config_to_toml(Config(steps=40)))
    events = open_event_log(run, "conductor")
    open_event_log(run, "generator-0").info("generator_started", pid=1)
    append(run / "metrics.jsonl", *(row(step) for step in range(1, steps + 1)))
    if end == "failed":
        events.error("run_failed", error="no route came")
    elif end:
        events.info("run_finished", steps=steps, stopped=False)
    return run


# --- files


def test_each_line_is_read_once_and_a_torn_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(path)
    assert list(file.read_objects()) == []
    append(path, {"a": 1}, {"a": 2})
    with path.open("ab") as other:
        other.write(b'{"a":')
    assert list(file.read_objects()) == [{"a": 1}, {"a": 2}]
    assert list(file.read_objects()) == []
    with path.open("ab") as other:
        other.write(b' 3}\nno json\n[4]\n{"a":5}\n')
    assert list(file.read_objects()) == [{"a": 3}, {"a": 5}]


def test_bytes_are_never_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    file, taken = FollowedFile(path), []
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, n: taken.append(real(fd, n)) or taken[-1])
    for index in range(50):
        append(path, {"index": index, "filler": "x" * 1000})
        assert [o["index"] for o in file.read_objects(limit=300)] == [index]
    assert sum(map(len, taken)) == path.stat().st_size


def test_a_rotated_file_is_read_to_its_end_and_then_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = FollowedFile(path)
    append(path, {"a": 1})
    assert [o["a"] for o in file.read_objects()] == [1]
    append(path, {"a": 2})
    path.rename(tmp_path / "events.jsonl.1")
    assert [o["a"] for o in file.read_objects()] == [2]
    append(path, {"a": 3})
    assert [o["a"] for o in file.read_objects()] == [3]


def test_a_file_that_was_cut_short_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = FollowedFile(path)
    append(path, {"a": 1}, {"a": 2})
    assert len(list(file.read_objects())) == 2
    path.write_bytes(b'{"a":9}\n')
    assert [o["a"] for o in file.read_objects()] == [9]


def test_a_torn_line_that_its_writer_cut_off_is_neither_read_nor_are_those_before_it_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = FollowedFile(path)
    append(path, {"a": 1})
    for torn, then in ((b'{"a":2, "lo', {"a": 3}), (b'{"a":', {"a": 4, "much": "longer"})):
        with path.open("ab") as other:
            other.write(torn)
        assert list(file.read_objects()) == ([{"a": 1}] if then["a"] == 3 else [])
        os.truncate(path, path.stat().st_size - len(torn))
        if then["a"] == 3:
            assert list(file.read_objects()) == []
        append(path, then)
        assert list(file.read_objects()) == [then]


# --- the run's state


def test_state_follows_the_events(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "demo"
    run_dir.mkdir(parents=True)
    run = FollowedRun(run_dir)
    run.read_new()
    assert (run.phase, run.step, run.planned_steps) == ("starting", 0, None)
    (run_dir / "config.toml").write_text(config_to_toml(Config(steps=40)))
    events = open_event_log(run_dir, "conductor")
    open_event_log(run_dir, "generator-0").info("generator_started")
    run.read_new()
    assert run.phase == "loading"
    events.info("probe")
    run.read_new()
    assert run.phase == "first step"
    append(run_dir / "metrics.jsonl", *(row(step) for step in range(1, 11)))
    append(run_dir / "evaluation.jsonl", {"step": 0})
    events.warning("generator_lost", generator="generator-0")
    news = run.read_new()
    assert tuple(map(len, news)) == (10, 1, 1)
    assert (run.phase, run.step, run.planned_steps) == ("training", 10, 40)
    events.error("run_failed", error="no route came")
    run.read_new()
    assert (run.phase, run.reason, run.has_ended) == ("failed", "no route came", True)


# --- lines


def lines_of(run_dir: Path, **options) -> tuple[int, list[str]]:
    out = io.StringIO()
    code = print_run_lines(FollowedRun(run_dir), out, **{"follow": True, "sleep": lambda seconds: None, **options})
    return code, out.getvalue().splitlines()


def test_a_pipe_gets_a_line_a_step_and_the_end(tmp_path: Path) -> None:
    code, lines = lines_of(write_run(tmp_path, 3, end="finished"))
    assert code == 0
    assert [line.split()[0] for line in lines] == ["1/40", "2/40", "3/40", "demo:"]
    assert "reward 0.025" in lines[0]
    assert lines[-1] == "demo: finished after 3 steps"


def test_an_evaluation_is_a_line(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 1)
    passes = {"evaluation/pass@1": 0.25, "evaluation/pass@4": 0.5}
    append(run_dir / "evaluation.jsonl", {"step": 5, "evaluation/reward_mean": 0.25, **passes})
    append(run_dir / "evaluation.jsonl", {"evaluation/reward_mean": "damaged"})
    _, lines = lines_of(run_dir, follow=False)
    assert lines[1:] == ["evaluation after step 5: reward 0.250, pass@4 0.500", "evaluation after step ?: reward -"]


def test_phases_before_the_first_step_are_lines(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 0)
    later = iter(
        [
            lambda: open_event_log(run_dir, "conductor").info("probe"),
            lambda: append(run_dir / "metrics.jsonl", row(1)),
            lambda: open_event_log(run_dir, "conductor").info("run_finished", stopped=True),
        ]
    )
    _, lines = lines_of(run_dir, sleep=lambda seconds: next(later)())
    assert lines[:2] == ["demo: loading", "demo: first step"]
    assert lines[2].startswith("   1/40  reward")


def test_a_failed_run_exits_with_its_reason(tmp_path: Path) -> None:
    code, lines = lines_of(write_run(tmp_path, 1, end="failed"))
    assert code == FAILED_EXIT_CODE
    assert any("no route came" in line for line in lines)


def test_lines_follow_until_the_run_ends(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 1)
    later = iter([lambda: append(run_dir / "metrics.jsonl", row(2)),
                  lambda: open_event_log(run_dir, "conductor").info("run_finished", stopped=True)])  # fmt: skip
    code, lines = lines_of(run_dir, sleep=lambda seconds: next(later)())
    assert (code, lines[-1]) == (0, "demo: stopped after 2 steps")


def test_without_follow_only_what_there_is(tmp_path: Path) -> None:
    code, lines = lines_of(write_run(tmp_path, 2), follow=False)
    assert (code, len(lines)) == (0, 2)


def test_a_run_that_fell_silent_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = iter(range(0, 10_000, 100))
    code, _ = lines_of(write_run(tmp_path, 2), patience=300.0, clock=lambda: float(next(times)))
    assert code == SILENT_EXIT_CODE
    assert "--patience" in capsys.readouterr().err


def test_a_reader_that_left_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Left(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert print_run_lines(FollowedRun(write_run(tmp_path, 2)), Left(), follow=True) == 0


def test_the_command_in_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, 2, end="finished")
    (run.parent / "latest").symlink_to("demo")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["tail"])
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "demo: finished after 2 steps")


def test_the_age_allowed_counts_groups_that_may_overtake(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 1)
    settings = {"max_staleness": 2, "window": 5, "prompts_per_step": 2, "steps_per_publication": 1}
    config = Config(steps=40)
    for name, value in settings.items():
        setattr(config.schedule, name, value)
    (run_dir / "config.toml").write_text(config_to_toml(config))
    assert summarize_run(run_dir).staleness_bound == compute_staleness_bound(config.schedule) == 4
