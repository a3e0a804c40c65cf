"""Events, metrics, summaries and the report."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import structlog
from rich.console import Console

from r3async.config import Config, to_toml
from r3async.record.catalogue import METRICS
from r3async.record.events import format_event, open_events
from r3async.record.reading import read_objects
from r3async.record.steps import MetricsWriter
from r3async.views.charts import CHARTS, describe_charts
from r3async.views.follow import FollowedRun
from r3async.views.maps import MAX_COLUMNS, describe_maps
from r3async.views.report import write_report
from r3async.views.summary import (
    counted,
    format_number,
    format_percent,
    format_seconds,
    format_summary,
    history_of,
    summarize,
)
from r3async.world.appending import Keeper

# --- events


def test_event_has_time_level_role_and_facts(tmp_path: Path) -> None:
    events = open_events(tmp_path, "learner")
    events.info("started", pid=7)
    events.bind(step=3).warning("odd", value=0.5)
    first, second = read_objects(tmp_path / "events.jsonl")
    assert list(first) == ["time", "level", "role", "event", "pid"]
    assert isinstance(first["time"], float)
    assert (first["level"], first["role"], first["event"], first["pid"]) == ("info", "learner", "started", 7)
    assert (second["level"], second["step"], second["value"]) == ("warning", 3, 0.5)


def test_exception_is_text(tmp_path: Path) -> None:
    events = open_events(tmp_path, "x")
    try:
        raise ValueError("what went wrong")
    except ValueError:
        events.exception("failed", step=1)
    (event,) = read_objects(tmp_path / "events.jsonl")
    assert event["level"] == "error"
    assert "ValueError: what went wrong" in event["exception"]
    assert "Traceback" in event["exception"]


@pytest.mark.parametrize(
    "value",
    [Path("/a"), {1, 2}, np.float32(0.5), np.arange(3), float("nan"), {1: {2: 3}}, "\ud800", ValueError("x"), object()],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_taken(tmp_path: Path, value: object) -> None:
    events = open_events(tmp_path, "x")
    events.info("odd", value=value)
    itself: list[object] = [value]
    itself.append(itself)
    events.info("very_odd", value=itself)
    assert [e["event"] for e in read_objects(tmp_path / "events.jsonl")] == ["odd", "very_odd"]


def test_structlog_is_configured_for_nobody_else(tmp_path: Path) -> None:
    before = structlog.get_config()
    open_events(tmp_path, "x").info("one")
    assert structlog.get_config() == before


def test_processes_append_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from r3async.record.events import open_events\n"
        "e = open_events(Path(sys.argv[1]), sys.argv[2])\n"
        "for i in range(500): e.info('tick', index=i, filler='x' * (i * 37 % 3000))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    writers = [subprocess.Popen([*command, f"p{i}"]) for i in range(3)]
    assert [w.wait() for w in writers] == [0, 0, 0]
    events = read_objects(tmp_path / "events.jsonl")
    for role in ("p0", "p1", "p2"):
        assert [e["index"] for e in events if e["role"] == role] == list(range(500))


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time":1.0,"event":"whole"}\n{"time":2.0,"eve')
    open_events(tmp_path, "x").info("after")
    assert [e["event"] for e in read_objects(path)] == ["whole", "after"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_events_that_a_full_disk_refuses_are_written_when_it_takes_them(tmp_path: Path) -> None:
    path, keeper = tmp_path / "events.jsonl", Keeper(retry_seconds=0)
    path.symlink_to("/dev/full")
    events = open_events(tmp_path, "x", keeper=keeper)
    events.info("one")
    events.info("two")
    assert not keeper.retry()
    path.unlink()
    assert keeper.retry()
    assert [e["event"] for e in read_objects(path)] == ["one", "records_kept", "two", "records_written"]


def test_console_shows_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_events(tmp_path, "learner", console=True).warning("odd", text="two words", n=[1, 2])
    assert re.search(r"\d\d:\d\d:\d\d warning learner: odd text=\"two words\" n=\[1,2\]\n", capsys.readouterr().err)
    assert "boom" in format_event({"event": "e", "exception": "boom"})


# --- metrics


def test_non_finite_values_are_null_and_reported(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    row = {"step": 1, "reward/mean": 0.5, "grad_norm": float("nan"), "ratio/max": np.float32(np.inf), "x": None}
    assert writer.write(row) == ["grad_norm", "ratio/max"]
    assert writer.write({"step": np.int64(2), "reward/mean": np.float64(0.25)}) == []
    first, second = read_objects(tmp_path / "metrics.jsonl")
    assert first == {"step": 1, "reward/mean": 0.5, "grad_norm": None, "ratio/max": None, "x": None}
    assert second == {"step": 2, "reward/mean": 0.25}
    assert row["ratio/max"] == np.inf, "the caller's row is left as it was"


def test_a_metric_is_a_number(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    with pytest.raises(TypeError, match="number"):
        writer.write({"step": 1, "loss/policy": [1.0]})
    assert read_objects(tmp_path / "metrics.jsonl") == []


def test_metrics_survive_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(tmp_path).write({"step": 1})
    with path.open("ab") as file:
        file.write(b'{"step":2,"rew')
    assert read_objects(path) == [{"step": 1}]
    MetricsWriter(tmp_path).write({"step": 2})
    assert read_objects(path) == [{"step": 1}, {"step": 2}]
    assert read_objects(tmp_path / "nothing.jsonl") == []


def test_every_drawn_metric_is_documented() -> None:
    assert {known.curve.chart for known in METRICS.values() if known.curve} == {chart.title for chart in CHARTS}
    assert all(chart.lines for chart in CHARTS)
    assert all(metric.label and metric.docs.endswith(".") for metric in METRICS.values())
    assert next(iter(METRICS)) == "step"


# --- summary


def fill(run: Path, steps: int, **changes: object) -> None:
    """A run directory as a run leaves it."""
    run.mkdir(parents=True, exist_ok=True)
    config = Config(steps=20)
    config.schedule.max_staleness = 2
    (run / "config.toml").write_text(to_toml(config))
    writer = MetricsWriter(run)
    for step in range(1, steps + 1):
        row = dict.fromkeys(METRICS, 0.5)
        row |= {
            "step": step,
            "version": step,
            "time": 1000.0 + step,
            "reward/mean": step / 20,
            "staleness/max": min(step, 2),
        }
        row |= {"rollout_kl/k1": (-1) ** step * 1e-4, "rollout_kl/k3": 1e-4 * step, "transport/rejected": step // 10}
        writer.write({**row, **changes})


def test_summary(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    fill(run, 20)
    events = open_events(run, "conductor")
    events.warning("generator_lost", generator="generator-0")
    events.warning("generator_restarted", generator="generator-0")
    events.info("run_finished", steps=20, stopped=False)
    summary = summarize(run)
    assert (summary.name, summary.status, summary.steps, summary.planned_steps) == ("demo", "finished", 20, 20)
    assert summary["reward/mean"].first == pytest.approx(0.1)  # mean of 1, 2, 3 twentieths
    assert summary["reward/mean"].last == pytest.approx(15.5 / 20)
    assert summary["reward/mean"].high == pytest.approx(1.0)
    assert summary["rollout_kl/k3"].last == pytest.approx(15.5e-4)
    assert summary["rollout_kl/k3"].high == pytest.approx(20e-4)
    assert (summary["staleness/max"].high, summary.staleness_bound, summary.stale) == (2, 2, False)
    assert (summary.history.generators_lost, summary.rejected, summary.warnings, summary.errors) == (1, 2, 2, 0)
    text = rendered(summary)
    assert "0.1 → 0.775" in text
    assert "finished" in text


def test_the_summary_counts_what_happened_before_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    writer = MetricsWriter(run)
    for step, rejected, duplicates in [(1, 2, 1), (2, 5, 1), (3, 0, 0), (4, 3, 2), (5, 3, 2), (6, 1, 0)]:
        writer.write({"step": step, "transport/rejected": rejected, "transport/duplicates": duplicates})
    events = open_events(run, "conductor")
    for life in range(3):
        events.info("conductor_started", pid=life)
        for number in range(2 - life):
            events.warning("generator_lost", generator=f"generator-{number}")  # the run may end before it is back
        events.warning("episode_abandoned", episode="g0e0")
        events.error("trajectory_refused", trajectory_id="g1e0")
        if life == 1:
            events.info("run_finished", steps=4, stopped=True)  # and somebody resumed it
    summary = summarize(run)
    assert (summary.history.generators_lost, summary.history.run_restarts) == (3, 1)
    assert (summary.history.failed_episodes, summary.history.refused) == (3, 3)
    assert summary.status == "unfinished", "it runs again after the end"
    assert (summary.rejected, summary.duplicates) == (5 + 3 + 1, 1 + 2)
    text = rendered(summary)
    assert "3 of generators, 1 of the run" in text
    assert "3 episodes failed, 3 trajectories refused" in text
    assert counted([]) == 0
    view = FollowedRun(run)
    view.poll()
    assert view.history == history_of(read_objects(run / "events.jsonl"))


def rendered(summary) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(format_summary(summary))
    return console.export_text()


def test_summary_of_nothing(tmp_path: Path) -> None:
    summary = summarize(tmp_path)
    assert (summary.status, summary.steps, summary["reward/mean"].first, summary.duration_seconds) == (
        "unfinished",
        0,
        None,
        None,
    )
    assert "unfinished" in rendered(summary)


def test_summary_of_a_failed_and_of_a_stopped_run(tmp_path: Path) -> None:
    fill(tmp_path / "a", 2, **{"reward/mean": None, "staleness/max": 3})
    open_events(tmp_path / "a", "conductor").error("run_failed", error="no [route] came")
    summary = summarize(tmp_path / "a")
    assert (summary.status, summary.reason, summary["reward/mean"].last, summary.stale) == (
        "failed",
        "no [route] came",
        None,
        True,
    )
    assert "no [route] came" in rendered(summary)
    open_events(tmp_path / "b", "conductor").info("run_finished", steps=1, stopped=True)
    assert summarize(tmp_path / "b").status == "stopped"


def test_numbers_for_people() -> None:
    assert [format_number(v) for v in (None, 0.0, 0.94123, 1234.5, 3.21e-5, 12.0)] == [
        "-",
        "0",
        "0.941",
        "1,234",
        "3.2e-05",
        "12",
    ]
    assert [format_seconds(v) for v in (None, 0.02, 3.0, 125.4, 7265)] == [
        "-",
        "20 ms",
        "3.0 s",
        "2 min 05 s",
        "2 h 01 min",
    ]
    assert [format_percent(v) for v in (None, 1.0, 0.99999, 0.5)] == ["-", "100 %", "99.9 %", "50.0 %"]


# --- report


class Page(HTMLParser):
    """The text that a reader sees, the scripts, and everything that would be fetched."""

    def __init__(self, path: Path):
        super().__init__()
        self.text, self.scripts, self.fetched, self.inside = "", [], [], ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.fetched += [
            v for k, v in attributes if k in ("src", "href", "srcset", "data") and v and not v.startswith("data:")
        ]

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside != "style":
            self.text += data


def test_report(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    fill(run, 20)
    events = open_events(run, "conductor")
    events.warning("generator_restarted", generator="generator-0", seconds=9.2)
    events.info("run_finished", stopped=False)
    turns = [{"user": "say <b>", "assistant": "</script><script>alert(1)</script>", "reward": 0.25}]
    (run / "episodes.jsonl").write_text(json.dumps({"step": 1, "reward": 0.25, "turns": turns}) + "\n{torn")
    page = Page(write_report(run))
    assert page.fetched == []
    assert len(page.scripts) == 3, "data, plotly, ours: nothing of a run became a script"
    for text in (
        "demo",
        "0.1 → 0.775",
        "generator_restarted",
        "say <b>",
        "</script><script>alert(1)</script>",
        "max_staleness",
    ):
        assert text in page.text
    data = json.loads(page.scripts[0])
    assert data["steps"] == list(range(1, 21))
    assert {chart["title"] for chart in data["charts"]} == {chart.title for chart in CHARTS}
    staleness = next(chart for chart in data["charts"] if chart["title"] == "Staleness")
    assert staleness["bound"] == 2
    assert data["series"]["rollout_kl/k1"][:2] == [None, 1e-4], "a log axis has no negative values"
    assert not (run / ".report.html.tmp").exists()


def test_report_without_steps(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert "No step was finished" in page.text
    assert "plotly.js" not in "".join(page.scripts)


def test_report_of_hostile_text(tmp_path: Path) -> None:
    evil = "<script>x</script>{{ title }}{% raw %}&amp;'\""
    fill(tmp_path / "run", 1, **{"step": "<script>x</script>", "reward/mean": evil})
    events = open_events(tmp_path / "run", evil)
    events.error("run_failed", error=evil, **{evil: evil})
    (tmp_path / "run" / "config.toml").write_text(f"{json.dumps(evil)} = {json.dumps(evil)}\n[schedule]\n")
    page = Page(write_report(tmp_path / "run"))
    assert len(page.scripts) == 3
    assert page.text.count(evil) >= 4


def test_charts_leave_out_what_was_not_measured() -> None:
    rows = [{"step": 1, "reward/mean": 0.5, "grad_norm": None, "loss/policy": math.nan, "rollout_kl/k1": -1.0}]
    drawing = describe_charts(rows, None)
    assert [chart["title"] for chart in drawing.charts] == ["Reward"]
    assert drawing.series == {"reward/mean": [0.5]}


# --- maps of routing


def routing_lines(steps: int) -> list[dict]:
    lines: list[dict] = [{"step": step, "agreement": [1 - step / 1e4, 0.75]} for step in range(1, steps + 1)]
    lines[0]["load"] = [[9, 9, 9], [9, 9, 9]]
    if steps > 2:
        lines[2]["load"] = [[0, 10, 20], [10, 10, 10]]
    return lines


def test_routing_is_drawn_by_layer() -> None:
    agreement, load = describe_maps(routing_lines(5))
    assert (agreement["x"], agreement["y"]) == ([1, 2, 3, 4, 5], [0, 1])
    assert agreement["z"] == [[0.9999, 0.9998, 0.9997, 0.9996, 0.9995], [0.75] * 5]
    assert agreement["range"] == [0.75, 1]
    assert load["caption"].startswith("step 3:")
    assert (load["x"], load["z"]) == ([0, 1, 2], [[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]])


def test_a_long_run_is_thinned_out_and_ends_with_its_last_step() -> None:
    agreement, _ = describe_maps(routing_lines(3 * MAX_COLUMNS + 3))
    assert len(agreement["x"]) <= MAX_COLUMNS
    assert agreement["x"][-1] == 3 * MAX_COLUMNS + 3
    assert all(len(row) == len(agreement["x"]) for row in agreement["z"])


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"step": 1, "agreement": []},
        {"step": "x", "agreement": [0.5]},
        {"step": 1, "agreement": [None]},
        {"step": 1, "load": []},
        {"step": 1, "load": [[1, 2], [1]]},
        {"step": 1, "load": [[1, "<b>"]]},
        {"agreement": {}, "load": 3},
    ],
    ids=repr,
)
def test_what_is_no_routing_is_not_drawn(line: dict) -> None:
    assert describe_maps([]) == []
    assert describe_maps([line]) == []
    assert len(describe_maps([line, *routing_lines(3), line])) == 2


def test_report_has_the_maps_where_there_is_routing(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    page = Page(write_report(tmp_path))
    assert "Agreement by layer" not in page.text
    assert json.loads(page.scripts[0])["maps"] == []
    (tmp_path / "routing.jsonl").write_text("\n".join(json.dumps(line) for line in routing_lines(5)) + "\n{torn")
    page = Page(write_report(tmp_path))
    assert "Agreement by layer" in page.text
    assert "step 3: tokens sent to each expert" in page.text
    assert [each["id"] for each in json.loads(page.scripts[0])["maps"]] == ["map-agreement", "map-load"]
    assert (page.fetched, len(page.scripts)) == ([], 3)
