"""`r3async tail`: files read as they grow, curves of characters, lines in a pipe, the screen at two sizes."""

import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from r3async.config import Config, config_to_toml
from r3async.data.metrics import METRICS
from r3async.record.events import open_event_log
from r3async.schedule.admission import compute_staleness_bound
from r3async.tools.cli import app
from r3async.tools.tail import view
from r3async.tools.tail.app import TailApp
from r3async.tools.tail.draw import SPARK_BARS, draw_bar, draw_plot, draw_sparkline, thin_values
from r3async.tools.tail.lines import FAILED_EXIT_CODE, SILENT_EXIT_CODE, print_run_lines
from r3async.views.charts import CHARTS
from r3async.views.follow import FollowedFile, FollowedRun, MetricColumns
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


def followed(run_dir: Path, now: float = 2000.0) -> FollowedRun:
    run = FollowedRun(run_dir, clock=lambda: now)
    run.read_new()
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


def test_columns_have_gaps_where_rows_lack_them() -> None:
    columns = MetricColumns()
    for each in ({"a": 1}, {"b": 2.5, "text": "x", "flag": True}, {"a": 3, "b": None}):
        columns.append(each)
    assert sorted(columns) == ["a", "b"]
    np.testing.assert_array_equal(columns.get_values("a"), [1, np.nan, 3])
    np.testing.assert_array_equal(columns.get_values("b", 2), [2.5, np.nan])
    assert np.isnan(columns.get_values("c")).all()
    assert (columns.last_value("a"), columns.last_value("b"), columns.last_value("c")) == (3, None, None)


# --- the run's state


def test_state_follows_the_events(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "demo"
    run_dir.mkdir(parents=True)
    run = followed(run_dir)
    assert (run.phase, run.step, run.slot_count, run.remaining_seconds) == ("starting", 0, None, None)
    (run_dir / "config.toml").write_text(config_to_toml(Config(steps=40)))
    events = open_event_log(run_dir, "conductor")
    open_event_log(run_dir, "generator-0").info("generator_started")
    run.read_new()
    assert (run.phase, run.generator_states) == ("loading", {"generator-0": "playing"})
    append(run_dir / "metrics.jsonl", *(row(step) for step in range(1, 11)))
    events.warning("generator_lost", generator="generator-0")
    rows, seen = run.read_new()
    assert (len(rows), len(seen), run.phase, run.step, run.slot_count) == (10, 1, "training", 10, 32)
    assert run.generator_states == {"generator-0": "lost"}
    assert run.remaining_seconds == pytest.approx(30.0)
    events.warning("generator_restarted", generator="generator-0")
    events.warning("generator_suspect", generator="generator-0")
    run.read_new()
    assert run.generator_states == {"generator-0": "silent"}
    assert "generator-0 silent" in "\n".join(line.plain for line in view.render_overview(run, 80))
    events.warning("generator_recovered", generator="generator-0")
    events.error("run_failed", error="no route came")
    run.read_new()
    assert (run.phase, run.reason, run.generator_states["generator-0"]) == ("failed", "no route came", "playing")
    assert (run.warnings, run.errors, run.silent_seconds) == (4, 1, 0)


# --- curves


def test_spark_spans_its_values_and_marks_gaps() -> None:
    assert draw_sparkline(np.arange(8.0), 8) == SPARK_BARS
    assert draw_sparkline(np.array([1.0, math.nan, 3.0]), 5) == "▁ █  "
    assert draw_sparkline(np.full(3, 7.0), 3) == "▃▃▃"
    assert draw_sparkline(np.zeros(0), 3) == "   "
    assert len(draw_sparkline(np.arange(1000.0), 30)) == 30
    assert draw_bar(0.5, 4) == "██░░"


def test_thinning_keeps_means_and_gaps() -> None:
    np.testing.assert_array_equal(thin_values(np.array([1, 3, np.nan, np.nan, 5, np.nan]), 3), [2, np.nan, 5])
    np.testing.assert_array_equal(thin_values(np.array([1.0, np.inf]), 3), [1, np.nan])


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [1.0], [1.0, 1e-13, 2.0], list(range(500))], ids=str)
def test_a_chart_has_the_size_it_was_asked_for(values: list[float], log: bool) -> None:
    lines = draw_plot([(np.array(values, float), "cyan")], 40, 7, log=log, floor=0.0, threshold=1.0)
    assert len(lines) == 7
    assert all(line.cell_len <= 40 for line in lines)


# --- views


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_line_fits(tmp_path: Path, width: int) -> None:
    run = followed(write_run(tmp_path, 30))
    open_event_log(run.run_dir, "learner").warning("odd", text="long " * 100)
    run.read_new()
    lines = [
        *view.render_header(run, width),
        *view.render_overview(run, width),
        *view.render_events(run, width, 5),
        *view.render_metrics(run, width),
        *view.render_charts(run, width, 30),
    ]
    assert max(line.cell_len for line in lines) <= width


def test_the_overview_says_what_matters(tmp_path: Path) -> None:
    text = view.to_plain_text(view.render_overview(followed(write_run(tmp_path, 30)), 80))
    for part in (
        "0.75  began at 0.05",
        "oldest 1 of 1 allowed",
        "20 of 32",
        "4 of 16",
        "1 of 1  generating, 0 restarts",
    ):
        assert part in text


def test_a_run_without_steps_can_be_shown(tmp_path: Path) -> None:
    run = followed(write_run(tmp_path, 0))
    assert "no step was finished yet" in view.to_plain_text(view.render_metrics(run, 80))
    assert "no data yet" in view.to_plain_text(view.render_charts(run, 80, 40))
    assert "0 of 40" in view.to_plain_text(view.render_header(run, 80))
    assert len(view.render_overview(run, 80)) == 13


def test_unknown_metrics_are_shown_below_their_prefix(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 1)
    append(run_dir / "metrics.jsonl", {"step": 2, "gpu/memory": 7.0, "reward/mean": None})
    lines = view.to_plain_text(view.render_metrics(followed(run_dir), 80)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("─ gpu"))
    assert lines[at + 1].split()[:2] == ["memory", "7"]


def test_a_silent_run_and_a_bound_that_broke_stand_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 2)
    append(run_dir / "metrics.jsonl", row(3, **{"staleness/max": 5}))
    run = FollowedRun(run_dir, clock=lambda: 9e9)
    run.read_new()
    assert "nothing written for" in view.to_plain_text(view.render_header(run, 120))
    assert view.format_gauge(run, METRICS["staleness/mean"])[2] == "bold red"


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


# --- the screen


def screen(app: TailApp) -> list[str]:
    """What is on the terminal, line by line."""
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_the_overview_fills_the_screen_without_scrolling(tmp_path: Path, size: tuple[int, int]) -> None:
    run_dir = write_run(tmp_path, 30)
    tail = TailApp(FollowedRun(run_dir, clock=lambda: 1031.0))
    async with tail.run_test(size=size) as pilot:
        await pilot.pause()
        lines = screen(tail)
        assert (len(lines), len(lines[0])) == (size[1], size[0])
        assert "demo  training" in lines[0]
        assert "step 30 of 40" in lines[1]
        assert "reward" in lines[2]
        assert any("generator_started" in line for line in lines)
        assert "Quit" in lines[-1]
        assert tail.query_one("#body").max_scroll_y == 0
        assert any("tokens/s: generated trained" in line for line in lines) == (size[0] == 200)
        append(run_dir / "metrics.jsonl", row(31))
        tail.update_run()
        await pilot.pause()
        assert "step 31 of 40" in screen(tail)[1]


async def test_keys(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 30)
    open_event_log(run_dir, "learner").warning("step_skipped", step=3)
    tail = TailApp(FollowedRun(run_dir, clock=lambda: 1031.0))
    async with tail.run_test(size=(80, 24)) as pilot:

        async def press(key: str) -> str:
            await pilot.press(key)
            await pilot.pause()
            return "\n".join(screen(tail))

        assert "─ episode" in await press("m")
        await press("pagedown")
        await pilot.pause(0.3)
        assert tail.query_one("#body").scroll_y > 0
        assert "generator_started" in await press("e")
        text = await press("w")
        assert "step_skipped" in text
        assert "generator_started" not in text
        assert "does nothing to the run" in await press("question_mark")
        assert "began at" in await press("o")
        assert "last 200 steps" in await press("z")
        assert "last 50 steps" in await press("z")
        assert " held " in await press("space")
        append(run_dir / "metrics.jsonl", row(31))
        tail.update_run()
        await pilot.pause()
        assert "step 30 of 40" in screen(tail)[1]
        assert "step 31 of 40" in await press("space")
        await pilot.press("q")
    assert tail.return_code == 0


async def test_the_screen_may_change_its_size(tmp_path: Path) -> None:
    tail = TailApp(FollowedRun(write_run(tmp_path, 5), clock=lambda: 1006.0))
    async with tail.run_test(size=(80, 24)) as pilot:
        for size in ((200, 50), (40, 10), (20, 4), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert len(screen(tail)) == size[1]


def test_the_age_allowed_counts_groups_that_may_overtake(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 1)
    settings = {"max_staleness": 2, "window": 5, "prompts_per_step": 2, "steps_per_publication": 1}
    config = Config(steps=40)
    for name, value in settings.items():
        setattr(config.schedule, name, value)
    (run_dir / "config.toml").write_text(config_to_toml(config))
    append(run_dir / "metrics.jsonl", row(2, **{"staleness/max": 4}))
    run = followed(run_dir)
    assert run.staleness_bound == compute_staleness_bound(config.schedule) == 4
    assert view.format_gauge(run, METRICS["staleness/mean"])[1:] == ("oldest 4 of 4 allowed", "bold")
    assert summarize_run(run_dir).staleness_bound == 4
    (drawn,) = [chart for chart in CHARTS if chart.shows_bound]
    assert view.find_threshold(drawn, run) == 4


def test_the_tail_has_a_gauge_of_evaluations_once_there_is_one(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 5)
    run = followed(run_dir)
    assert "evaluated" not in view.to_plain_text(view.render_overview(run, 120))
    for step, once, of_four in ((0, 0.25, 0.5), (5, 0.5, 0.75)):
        passes = {"evaluation/pass@1": once, "evaluation/pass@4": of_four}
        append(run_dir / "evaluation.jsonl", {"step": step, "evaluation/reward_mean": once, **passes})
    run.read_new()
    lines = view.to_plain_text(view.render_overview(run, 120)).splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.split()[0] == "evaluated"]
    assert lines[at - 1].split()[0] == "reward"
    assert lines[at].split()[1:6] == ["0.5", "step", "5,", "pass@4", "0.75"]
