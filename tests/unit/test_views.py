"""What a summary and a report show of a run's rows."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest

from r3async.config import Config, config_to_toml
from r3async.data.metrics import METRICS, compute_end_windows
from r3async.record.events import open_event_log
from r3async.record.step_writer import MetricsFile
from r3async.views.charts import CHARTS, build_charts
from r3async.views.follow import FollowedRun
from r3async.views.number_formats import format_number, format_percent, format_seconds
from r3async.views.report import write_report
from r3async.views.report_drawings import MAX_MAP_COLUMNS, build_route_maps
from r3async.views.summary import format_summary, make_headlines, sum_restarting_counter, summarize_run
from r3async.views.templates import TEMPLATE_DIRECTORY
from tests.helpers.cli import printed


def test_every_drawn_metric_is_documented() -> None:
    assert {known.curve.chart for known in METRICS.values() if known.curve} == {chart.title for chart in CHARTS}
    assert all(chart.lines for chart in CHARTS)
    assert all(metric.label and metric.description.endswith(".") for metric in METRICS.values())
    assert next(iter(METRICS)) == "step"


def fill(run: Path, steps: int, **changes: object) -> None:
    """A run directory as a run leaves it."""
    run.mkdir(parents=True, exist_ok=True)
    config = Config(steps=20)
    config.schedule.max_staleness = 2
    (run / "config.toml").write_text(config_to_toml(config))
    writer = MetricsFile(run)
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


@pytest.mark.parametrize(
    ("steps", "windows"), [(1, (1, 1)), (2, (1, 1)), (3, (1, 2)), (5, (2, 3)), (12, (3, 6)), (20, (3, 10))]
)
def test_the_beginning_and_the_end_of_a_run_have_no_step_in_common(tmp_path: Path, steps: int, windows: object) -> None:
    assert compute_end_windows(steps) == windows
    assert steps == 1 or sum(compute_end_windows(steps)) <= steps
    run = tmp_path / "short"
    fill(run, steps)
    note = next(line.note for line in make_headlines(summarize_run(run)) if line.label == "reward")
    assert note.startswith(f"first {windows[0]} → last {windows[1]} step")  # type: ignore[index]


def test_the_held_out_loss_of_a_summary_is_that_of_the_last_evaluation(tmp_path: Path) -> None:
    run = tmp_path / "sft"
    rows = [{"step": step, "loss/answers": 2.0 - step / 10} for step in range(1, 13)]
    for step, loss in ((4, 1.4), (8, 1.0), (12, 0.75)):
        rows[step - 1]["loss/answers_held_out"] = loss
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert make_headlines(summarize_run(run))[0].note == "first 3 → last 6 steps; held out 0.75"


def test_a_run_without_routes_shows_no_agreement(tmp_path: Path) -> None:
    fill(tmp_path / "dense", 4, **{"routing/agreement": None})
    assert "routing agreement" not in [line.label for line in make_headlines(summarize_run(tmp_path / "dense"))]


def test_summary(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    fill(run, 20)
    events = open_event_log(run, "conductor")
    events.warning("generator_lost", generator="generator-0")
    events.warning("generator_restarted", generator="generator-0")
    events.info("run_finished", steps=20, stopped=False)
    summary = summarize_run(run)
    assert (summary.name, summary.status, summary.steps, summary.planned_steps) == ("demo", "finished", 20, 20)
    assert summary["reward/mean"].first_mean == pytest.approx(0.1)  # mean of 1, 2, 3 twentieths
    assert summary["reward/mean"].last_mean == pytest.approx(15.5 / 20)
    assert summary["reward/mean"].max == pytest.approx(1.0)
    assert summary["rollout_kl/k3"].last_mean == pytest.approx(15.5e-4)
    assert summary["rollout_kl/k3"].max == pytest.approx(20e-4)
    assert (summary["staleness/max"].max, summary.staleness_bound, summary.is_stale) == (2, 2, False)
    assert (summary.history.generators_lost, summary.rejected_messages) == (1, 2)
    assert (summary.warnings, summary.errors) == (2, 0)
    text = printed(format_summary(summary))
    assert "0.1 → 0.775" in text
    assert "finished" in text


def test_the_summary_counts_what_happened_before_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    writer = MetricsFile(run)
    for step, rejected, duplicates in [(1, 2, 1), (2, 5, 1), (3, 0, 0), (4, 3, 2), (5, 3, 2), (6, 1, 0)]:
        writer.write({"step": step, "transport/rejected": rejected, "transport/duplicates": duplicates})
    events = open_event_log(run, "conductor")
    for life in range(3):
        events.info("conductor_started", pid=life)
        for number in range(2 - life):
            events.warning("generator_lost", generator=f"generator-{number}")  # the run may end before it is back
        events.warning("episode_abandoned", episode="g0e0")
        events.error("trajectory_refused", trajectory_id="g1e0")
        if life == 1:
            events.info("run_finished", steps=4, stopped=True)  # and somebody resumed it
    summary = summarize_run(run)
    assert (summary.history.generators_lost, summary.history.run_restarts) == (3, 1)
    assert (summary.history.failed_episodes, summary.history.refused_trajectories) == (3, 3)
    assert summary.status == "unfinished", "it runs again after the end"
    assert (summary.rejected_messages, summary.duplicate_trajectories) == (5 + 3 + 1, 1 + 2)
    text = printed(format_summary(summary))
    assert "3 of generators, 1 of the run" in text
    assert "3 episodes failed, 3 trajectories refused" in text
    assert sum_restarting_counter([]) == 0
    view = FollowedRun(run)
    view.read_new()
    assert view.history == summary.history


def test_the_duration_of_a_run_is_that_of_its_starts(tmp_path: Path) -> None:
    run = tmp_path / "resumed"
    run.mkdir()
    rows = [{"step": step, "time": time} for step, time in ((1, 120.0), (2, 140.0), (3, 5030.0), (4, 5060.0))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = [{"event": "lineage_began", "role": "driver", "level": "info", "time": t} for t in (100.0, 5000.0)]
    rewound = {"event": "lineage_began", "role": "conductor", "level": "info", "time": 5040.0}
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*starts, rewound]))
    assert summarize_run(run).duration_seconds == (140 - 100) + (5060 - 5000)


def test_summary_of_nothing(tmp_path: Path) -> None:
    summary = summarize_run(tmp_path)
    assert (summary.status, summary.steps, summary.duration_seconds) == ("unfinished", 0, None)
    assert summary["reward/mean"].first_mean is None
    assert "unfinished" in printed(format_summary(summary))


def test_summary_of_a_failed_and_of_a_stopped_run(tmp_path: Path) -> None:
    fill(tmp_path / "a", 2, **{"reward/mean": None, "staleness/max": 3})
    open_event_log(tmp_path / "a", "conductor").error("run_failed", error="no [route] came")
    summary = summarize_run(tmp_path / "a")
    assert (summary.status, summary.reason, summary.is_stale) == ("failed", "no [route] came", True)
    assert summary["reward/mean"].last_mean is None
    assert "no [route] came" in printed(format_summary(summary))
    open_event_log(tmp_path / "b", "conductor").info("run_finished", steps=1, stopped=True)
    assert summarize_run(tmp_path / "b").status == "stopped"


def test_numbers_for_people() -> None:
    for shown, wanted in (
        (format_number, {None: "-", 0.0: "0", 0.94123: "0.941", 1234.5: "1,234", 3.21e-5: "3.2e-05", 12.0: "12"}),
        (format_seconds, {None: "-", 0.02: "20 ms", 3.0: "3.0 s", 125.4: "2 min 05 s", 7265: "2 h 01 min"}),
        (format_percent, {None: "-", 1.0: "100 %", 0.99999: "99.9 %", 0.5: "50.0 %"}),
    ):
        assert {value: shown(value) for value in wanted} == wanted


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
    events = open_event_log(run, "conductor")
    events.warning("generator_restarted", generator="generator-0", seconds=9.2)
    events.info("run_finished", stopped=False)
    turns = [{"user": "say <b>", "assistant": "</script><script>alert(1)</script>", "reward": 0.25}]
    (run / "episodes.jsonl").write_text(json.dumps({"step": 1, "reward": 0.25, "turns": turns}) + "\n{torn")
    page = Page(write_report(run))
    assert page.fetched == []
    assert len(page.scripts) == 3, "data, uPlot, ours: nothing of a run became a script"
    assert page.scripts[1] == (TEMPLATE_DIRECTORY / "uplot/uPlot.iife.min.js").read_text()
    assert (run / "report.html").stat().st_size < 0.5e6
    for text in ("demo", "0.1 → 0.775", "generator_restarted", "say <b>", turns[0]["assistant"], "max_staleness"):
        assert text in page.text
    data = json.loads(page.scripts[0])
    assert data["series"]["x/step"] == list(range(1, 21))
    assert {chart["title"] for chart in data["charts"]} == {chart.title for chart in CHARTS}
    assert next(chart for chart in data["charts"] if chart["title"] == "Staleness")["bound"] == 2
    assert data["series"]["rollout_kl/k1"][:2] == [None, 1e-4], "a log axis has no negative values"
    assert not (run / ".report.html.tmp").exists()


def test_report_without_steps(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert "No step was finished" in page.text
    assert len(page.scripts) == 2, "nothing to draw, and nothing that draws"


def test_report_of_hostile_text(tmp_path: Path) -> None:
    evil = "<script>x</script>{{ title }}{% raw %}&amp;'\""
    fill(tmp_path / "run", 1)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as rows:
        # It is no row, so it is passed over.
        rows.write(json.dumps({"step": "<script>x</script>", "reward/mean": evil}) + "\n")
    open_event_log(tmp_path / "run", evil).error("run_failed", error=evil, **{evil: evil})
    (tmp_path / "run" / "config.toml").write_text(f"{json.dumps(evil)} = {json.dumps(evil)}\n[schedule]\n")
    page = Page(write_report(tmp_path / "run"))
    assert len(page.scripts) == 3
    assert page.text.count(evil) >= 4


def test_charts_leave_out_what_was_not_measured() -> None:
    rows = [{"step": 1, "reward/mean": 0.5, "grad_norm": None, "loss/policy": math.nan, "rollout_kl/k1": -1.0}]
    drawing = build_charts(rows, None)
    assert [chart["title"] for chart in drawing.charts] == ["Reward"]
    assert drawing.series == {"reward/mean": [0.5]}


def routing_lines(steps: int) -> list[dict]:
    lines: list[dict] = [{"step": step, "agreement": [1 - step / 1e4, 0.75]} for step in range(1, steps + 1)]
    lines[0]["load"] = [[9, 9, 9], [9, 9, 9]]
    if steps > 2:
        lines[2]["load"] = [[0, 10, 20], [10, 10, 10]]
    return lines


def test_routing_is_drawn_by_layer() -> None:
    agreement, load = build_route_maps(routing_lines(5))
    assert (agreement["x"], agreement["y"]) == ([1, 2, 3, 4, 5], [0, 1])
    assert agreement["z"] == [[0.9999, 0.9998, 0.9997, 0.9996, 0.9995], [0.75] * 5]
    assert agreement["range"] == [0.75, 1]
    assert load["caption"].startswith("step 3:")
    assert (load["x"], load["z"]) == ([0, 1, 2], [[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]])


def test_a_long_run_is_thinned_out_and_ends_with_its_last_step() -> None:
    agreement, _ = build_route_maps(routing_lines(3 * MAX_MAP_COLUMNS + 3))
    assert len(agreement["x"]) <= MAX_MAP_COLUMNS
    assert agreement["x"][-1] == 3 * MAX_MAP_COLUMNS + 3
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
    assert build_route_maps([]) == []
    assert build_route_maps([line]) == []
    assert len(build_route_maps([line, *routing_lines(3), line])) == 2


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
