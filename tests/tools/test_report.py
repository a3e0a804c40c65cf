"""The report's timeline, drift, ages, tokens and comparison; and the page in a real browser."""

import asyncio
import json
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from r3async.data.metrics import METRICS, ROW_ID_COLUMNS
from r3async.record.routes import RouteFile
from r3async.record.timeline import FILE, Span, Timeline, compute_busy_shares, read_timeline
from r3async.tools.cli import app
from r3async.views.charts import CHARTS, build_other_charts
from r3async.views.episodes import select_evenly
from r3async.views.report import write_report
from r3async.views.report_drawings import build_staleness_histogram
from r3async.views.report_timeline import build_timeline, summarize_waits
from r3async.views.summary import make_drift_table
from r3async.world.real import REAL_WORLD
from tests.helpers.browser import browse, find_chromium
from tests.helpers.routes import damage_last_record, episode
from tests.helpers.written_runs import write_run


class Page(HTMLParser):
    """Text that a reader sees, ids, and addresses that would be fetched."""

    def __init__(self, path: Path):
        super().__init__()
        self.text, self.ids, self.fetched, self.data, self._inside = "", [], [], "", ("", "")
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self._inside = (tag, found.get("id") or "")
        self.ids += [found["id"]] if found.get("id") else []
        self.fetched += [v for k, v in attributes if k in ("src", "href") and v and not v.startswith("data:")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ("", "")

    def handle_data(self, data: str) -> None:
        if self._inside == ("script", "data"):
            self.data += data
        elif self._inside[0] not in ("script", "style"):
            self.text += data


# --- the file of spans


def test_spans_are_written_when_they_end(tmp_path: Path) -> None:
    times = iter([10.0, 12.5, 20.0, 21.0])
    timeline = Timeline(tmp_path, "learner", clock=lambda: next(times))
    with timeline.measure_span("train", step=3, version=4):
        assert read_timeline(tmp_path) == []
    with pytest.raises(ValueError, match="x"), timeline.measure_span("wait"):
        raise ValueError("x")
    timeline.add_span("pause", 5.0, 6.0, actor="generator-0")
    assert read_timeline(tmp_path) == [
        Span("generator-0", "pause", 5.0, 6.0),
        Span("learner", "train", 10.0, 12.5, 3, 4),
        Span("learner", "wait", 20.0, 21.0),
    ]


def test_a_timeline_that_is_off_does_nothing(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, "learner", enabled=False, clock=lambda: pytest.fail("was measured"))
    with timeline.measure_span("train"):
        timeline.add_span("wait", 0.0, 1.0)
    assert list(tmp_path.iterdir()) == []


async def test_spans_that_a_full_disk_refuses_are_written_when_it_takes_them(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to("/dev/full")
    timeline = Timeline(tmp_path, "learner")
    for step in range(2):
        with timeline.measure_span("train", step=step):
            pass
    (tmp_path / FILE).unlink()
    assert await REAL_WORLD.record_flusher.finish_writes(10.0) == 0
    assert [span.step for span in read_timeline(tmp_path)] == [0, 1]


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        '{"who":"a","what":"b","start":1,"end":2}\n{"who":1}\n[]\n{"who":"a","what":"b","start":3,"end":2}\n{to'
    )
    assert read_timeline(tmp_path) == [Span("a", "b", 1.0, 2.0)]


# --- the timeline of a page


def test_who_waited_is_said_in_shares_of_the_whole() -> None:
    spans = [Span("learner", "wait", 0, 4), Span("learner", "train", 4, 10), Span("engines", "pause", 9, 10)]
    assert compute_busy_shares([*spans, Span("learner", "wait", 1, 3)])[("learner", "wait")] == pytest.approx(0.4)
    text = summarize_waits(spans)
    for part in ("trained 60.0 %", "waited 40.0 % for data", "generators were the bottleneck", "were paused 10.0 %"):
        assert part in text


def test_lanes_go_from_generators_to_weights_and_begin_zoomed() -> None:
    spans = [Span("weights", "deliver", 0, 1, 1), Span("learner", "odd<", 0, 1, 1), Span("generator-1", "play", 0, 1)]
    spans += [Span("learner", "train", step, step + 0.5, step) for step in range(1, 40)]
    found = build_timeline(spans)
    assert found is not None
    assert found["lanes"] == ["weights", "learner", "generator-1"]
    assert found["range"] == [28, 39.5]
    assert {bar["label"]: bar["color"] for bar in found["bars"]}["odd<"] == "faint"


# --- drift and ages


def test_the_drift_table_has_ten_parts_and_all() -> None:
    rows = [{"step": s, "rollout_kl/k3": s / 1000, "ratio/max": float(s)} for s in range(1, 31)]
    table = make_drift_table(rows)
    assert table is not None
    assert table["titles"] == ["drift k3", "drift k3, worst step", "largest ratio, worst step"]
    assert len(table["lines"]) == 11
    assert table["lines"][-2:] == [("28 – 30", ["0.029", "0.03", "30"]), ("all", ["0.0155", "0.03", "30"])]
    assert make_drift_table([{"step": 1}]) is make_drift_table([]) is None


def test_ages_are_of_all_trained_tokens() -> None:
    found = build_staleness_histogram(
        [{"staleness/tokens_0": 3.0, "staleness/max": 4}, {"staleness/tokens_0": 2.0, "staleness/tokens_4": 5.0}], 2
    )
    assert found is not None
    assert (found["x"], found["y"]) == ([0, 1, 2, 4], [0.5, 0, 0, 0.5])
    assert "10 trained tokens" in found["caption"]


def test_where_rows_do_not_say_ages_are_of_steps() -> None:
    found = build_staleness_histogram([{"staleness/max": 1}, {"staleness/max": 0}, {"staleness/max": 1}], 1)
    assert found is not None
    assert (found["x"], found["y"]) == ([0, 1], [1 / 3, 2 / 3])
    assert build_staleness_histogram([{}], 1) is None


# --- tokens


def test_tokens_are_shown_turn_by_turn_with_what_is_known_of_them(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path)).read_text()
    assert html.count("class='card sample'") == 2
    blocks = [part.split("'")[0] for part in html.split("<div class='block ")[1:]]
    assert blocks == ["prompt", "sampled", "observation", "sampled"] * 2
    assert html.count("class='t v0'") + html.count("class='t v0 u'") == 10
    assert html.count(", no route recorded'") == 2, "the last token of each was never fed"
    assert "value='ratio'" not in html, "no log-prob of the learner was kept"
    assert "log-prob -1.000, version 0" in html


def test_log_ratios_are_coloured_where_the_learner_kept_its_own(tmp_path: Path) -> None:
    trained, calls = episode()
    own = np.where(trained.loss_mask, np.float32(-1.1), np.float32(np.nan))
    own[3] = np.nan  # sampled, and dropped from the loss
    RouteFile(tmp_path / "routes", "learner").append(msgspec.structs.replace(trained, learner_logprobs=own))
    for call in calls:
        RouteFile(tmp_path / "routes", "engine-0").append(call)
    html = write_report(tmp_path).read_text()
    assert "value='ratio'" in html
    assert html.count("log-ratio -0.1000") == 4
    assert "log-ratio nan" not in html
    assert "--r:0.5" in html
    assert "#10" in html, "ids, where there is no tokenizer"


def test_a_damaged_record_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    damage_last_record(run / "routes" / "learner.0.routes")
    assert write_report(run).read_text().count("class='card sample'") == 1


def test_spread_is_from_first_to_last() -> None:
    assert select_evenly(0, 3) == []
    assert select_evenly(1, 3) == [0]
    assert select_evenly(10, 3) == [0, 4, 9]


# --- the page


def test_every_metric_is_on_the_page(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path)))
    data = json.loads(page.data)
    drawn = {line["metric"] for chart in [*data["charts"], *data["more"]] for line in chart["lines"]}
    assert drawn >= set(METRICS) - {*ROW_ID_COLUMNS, "staleness/max"} | {"gpu/odd"}
    shown = {*page.ids}
    for chart in [*data["charts"], *data["more"], *data["maps"], data["ages"], data["timeline"]]:
        assert chart["id"] in shown
    assert page.fetched == []
    for heading in ("Timeline", "Drift", "Tokens", "Environment", "All other metrics", "Staleness"):
        assert heading in page.text


def test_metrics_that_never_change_are_listed() -> None:
    rows = [{"step": s, "lr": 0.1, "b/x": s, "b/none": None, "a": s} for s in range(3)]
    drawing, constants = build_other_charts(rows)
    assert [(chart["group"], chart["title"]) for chart in drawing.charts] == [("step", "a"), ("b", "b/x")]
    assert set(drawing.series) == {"a", "b/x"}
    assert constants == [("learning rate", 0.1)]


def test_a_run_that_wrote_no_spans_has_no_timeline(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / FILE).unlink()
    page = Page(write_report(run))
    assert "who waited for whom" not in page.text
    assert json.loads(page.data)["timeline"] is None
    assert build_timeline([]) is None


def test_two_runs_are_compared(tmp_path: Path) -> None:
    one = write_run(tmp_path, "one", 12)
    other = write_run(tmp_path, "other", 5, schedule={"max_staleness": 4}, seed=3)
    page = Page(write_report(one, other, path=tmp_path / "both.html"))
    data = json.loads(page.data)
    assert {"0:reward/mean", "1:reward/mean", "0:x/step", "1:x/time"} <= set(data["series"])
    assert len(data["charts"]) == sum(len(chart.lines) for chart in CHARTS)
    assert all([line["label"] for line in chart["lines"]] == ["one", "other"] for chart in data["charts"])
    assert len(data["series"]["1:x/step"]) == 5
    for part in ("schedule.max_staleness", "seed", "learner: train", "reward, last steps"):
        assert part in page.text
    assert "group_size" not in page.text, "only settings that differ"


def test_runs_of_one_name_are_shown_with_their_directories(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    text = Page(write_report(one, other, path=tmp_path / "both.html")).text
    assert f"{one} against {other}" in text
    assert "the same in all" in text


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "one")
    write_run(tmp_path, "two")
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["report", "one"]).output.strip() == "runs/one/report.html"
    assert CliRunner().invoke(app, ["report", "one", "two"]).output.strip() == "runs/one/compare.html"
    assert CliRunner().invoke(app, ["report", "one", "-o", "page.html"]).exit_code == 0
    assert (tmp_path / "page.html").is_file()


# --- in a browser

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium (apt-get install chromium)")


async def wait_until_drawn(page) -> list[str]:
    """The ids of the plots that are still empty after half a minute."""
    frames, empty = "[...document.querySelectorAll('.plot')]", [""]
    for _ in range(300):
        empty = await page.value(f"{frames}.filter((p) => !p.querySelector('canvas')).map((p) => p.id)")
        if not empty:
            break
        await asyncio.sleep(0.1)
    return empty


@needs_chromium
@pytest.mark.long
async def test_the_page_draws_every_curve_asks_for_nothing_and_has_no_complaint(tmp_path: Path) -> None:
    path = write_report(evaluated(write_run(tmp_path), BEFORE, AFTER))
    async with browse(str(find_chromium()), path.as_uri()) as page:
        await page.value("document.querySelectorAll('details.group').forEach((group) => { group.open = true; })")
        assert await wait_until_drawn(page) == []
        data = json.loads(Page(path).data)
        for chart in [*data["charts"], *data["more"]]:
            labels = await page.value(f"plots.get('{chart['id']}').series.slice(1).map((line) => line.label)")
            assert labels == [line["label"] for line in chart["lines"]]
        for plot, color in (
            ("timeline", "blue"),
            ("map-agreement", "blue-soft"),
            ("ages", "blue"),
            ("chart-0", "green"),
        ):
            assert await page.value(PAINTED % (plot, color)) > 0, plot
        await page.value("document.querySelector('input[value=agreement]').click()")
        assert await page.value("getComputedStyle(document.querySelector('p.mode.agreement')).display") == "block"
        assert page.requests == []
        assert page.problems == []


PAINTED = """(() => {
    const u = plots.get("%s"), wanted = document.createElement("canvas").getContext("2d");
    wanted.fillStyle = color("%s");
    wanted.fillRect(0, 0, 1, 1);
    const [r, g, b] = wanted.getImageData(0, 0, 1, 1).data;
    const { data } = u.ctx.getImageData(0, 0, u.ctx.canvas.width, u.ctx.canvas.height);
    let count = 0;
    for (let at = 0; at < data.length; at += 4) {
        if (data[at + 3] > 250 && [r, g, b].every((value, i) => Math.abs(data[at + i] - value) < 3)) { count++; }
    }
    return count;
})()"""
"""The number of a plot's points that have a colour of the page."""


@needs_chromium
@pytest.mark.long
async def test_a_curve_tells_its_values_to_mouse_and_keys_and_zooms(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path, steps=60))
    span = "plots.get('chart-0').scales.x.max - plots.get('chart-0').scales.x.min"
    told = "document.querySelector('#chart-0 .tip:not([hidden])')?.textContent"
    async with browse(str(find_chromium()), path.as_uri()) as page:
        place = "plots.get('chart-0').over.getBoundingClientRect()"
        x, y, width, height = await page.value(f"(({{x, y, width, height}}) => [x, y, width, height])({place})")
        await page.mouse("Moved", x + width / 2, y + height / 2)
        assert await page.value(told) == "step 30mean0.17best0.18"
        await page.value("document.getElementById('chart-0').blur()")
        await page.mouse("Moved", 1, 1)
        assert await page.value(told) is None
        await page.value("document.getElementById('chart-0').focus()")
        for _ in range(2):
            await page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        assert (await page.value(told)).startswith("step 31")
        whole = await page.value(span)
        await page.drag(x + width * 0.25, x + width * 0.5, y + height / 2)
        assert await page.value(span) == pytest.approx(whole / 4, rel=0.02)
        await page.value("document.querySelector('input[value=smoother]').click()")
        assert await page.value(span) == pytest.approx(whole / 4, rel=0.02), "drawn again, and still zoomed"
        await page.value("plots.get('chart-0').over.dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
        assert await page.value(span) == pytest.approx(whole)
        # The timeline goes on with the run, unless its reader has zoomed.
        await page.value("data.timeline.range = data.timeline.range.map((end) => end + 3); drawTimeline()")
        begins = "plots.get('timeline').scales.x.min - data.timeline.range[0]"
        assert await page.value(begins) == 0
        await page.value("plots.get('timeline').setScale('x', {min: 10, max: 20})")
        await page.value("drawTimeline()")
        assert await page.value("plots.get('timeline').scales.x.max") == 20
        assert page.problems == []


@needs_chromium
@pytest.mark.long
async def test_the_comparison_draws_both_runs(tmp_path: Path) -> None:
    one, other = write_run(tmp_path, "one"), write_run(tmp_path, "other", 5)
    async with browse(str(find_chromium()), write_report(one, other).as_uri()) as page:
        assert await wait_until_drawn(page) == []
        lines = "[...plots.values()].reduce((sum, u) => sum + u.series.length - 1, 0)"
        assert await page.value(lines) == 2 * sum(len(chart.lines) for chart in CHARTS)
        assert (page.requests, page.problems) == ([], [])


# --- evaluations


def evaluated(run: Path, *lines: dict[str, object]) -> Path:
    (run / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{torn")
    return run


def drawn(path: Path) -> dict:
    return json.loads(Page(path).data)


BEFORE = {"step": 0, "evaluation/reward_mean": 0.25, "evaluation/reward_error": 0.05}
AFTER = {"step": 10, "evaluation/reward_mean": 0.75, "evaluation/reward_error": None}


def test_evaluations_are_drawn_over_their_own_steps_beside_training(tmp_path: Path) -> None:
    run = evaluated(write_run(tmp_path), {"step": 10, "evaluation/reward_mean": 0.5}, AFTER, BEFORE, {"step": 3})
    data = drawn(write_report(run))
    assert [chart["title"] for chart in data["charts"]][:2] == ["Reward", "Evaluation"]
    chart = data["charts"][1]
    evaluation, training = chart["lines"]
    assert data["series"][evaluation["x"] + "x/step"] == [0, 10], "the steps of evaluations, in order, each once"
    assert data["series"][evaluation["metric"]] == [0.25, 0.75]
    assert data["series"][evaluation["error"]] == [0.05, None]
    assert evaluation["marks"], "a single one would not show as a line"
    assert training["metric"] == "reward/mean"
    assert len(data["series"]["reward/mean"]) == len(data["series"]["x/step"])
    assert data["series"]["evaluation/x/time"][0] == 0, "step 0 is before the first step of the metrics"
    assert data["series"]["x/time"][8] < data["series"]["evaluation/x/time"][1] == data["series"]["x/time"][9]


def test_each_set_of_evaluations_is_a_line(tmp_path: Path) -> None:
    row = {"evaluation/reward_mean": 0.5, "evaluation/greedy/reward_mean": 0.5, "evaluation/many/reward_mean": 0.25}
    run = evaluated(write_run(tmp_path), {"step": 0, **row}, {"step": 10, **row, "evaluation/many/reward_mean": 0.75})
    data = drawn(write_report(run))
    (chart,) = [chart for chart in data["charts"] if chart["title"] == "Evaluation"]
    greedy, many, training = chart["lines"]
    assert (greedy["label"], many["label"], training["label"]) == ("greedy", "many", "training")
    assert data["series"][many["metric"]] == [0.25, 0.75]
    assert data["series"][greedy["metric"]] == [0.5, 0.5]


def test_a_run_without_evaluations_has_no_such_chart(tmp_path: Path) -> None:
    titles = [chart["title"] for chart in drawn(write_report(write_run(tmp_path)))["charts"]]
    assert "Reward" in titles
    assert "Evaluation" not in titles


def test_evaluations_alone_are_drawn(tmp_path: Path) -> None:
    run = evaluated(tmp_path, BEFORE)  # and no metrics yet
    (chart,) = drawn(write_report(run))["charts"]
    assert [line["metric"] for line in chart["lines"]] == ["evaluation/reward_mean"]


def test_a_comparison_shows_the_evaluations_of_the_runs_that_have_some(tmp_path: Path) -> None:
    one = evaluated(write_run(tmp_path, "one"), BEFORE, AFTER)
    two, three = write_run(tmp_path, "two"), evaluated(write_run(tmp_path, "three"), {**BEFORE, "step": 40})
    path = write_report(one, two, three)
    page, data = Page(path), drawn(path)
    (chart,) = [chart for chart in data["charts"] if chart["title"] == "Evaluation"]
    assert [line["label"] for line in chart["lines"]] == ["one", "three"]
    assert [data["series"][line["x"] + "x/step"] for line in chart["lines"]] == [[0, 10], [40]]
    assert [data["series"][line["metric"]] for line in chart["lines"]] == [[0.25, 0.75], [0.25]]
    assert chart["lines"][0]["color"] != chart["lines"][1]["color"]
    row = page.text[page.text.index("reward of the last evaluation") :]
    assert row.startswith("reward of the last evaluation0.75-0.25")


def solved(prefix: str, mean: float, **passes: float) -> dict[str, float]:
    named = {f"{prefix}/pass@{k[1:]}": value for k, value in passes.items()}
    return {f"{prefix}/reward_mean": mean, f"{prefix}/reward_error": 0.05, **named}


def test_pass_at_k_is_a_curve_of_each_k_in_the_report(tmp_path: Path) -> None:
    first, last = (
        solved("evaluation", 0.25, k1=0.25, k2=0.4, k10=0.5),
        solved("evaluation", 0.5, k1=0.5, k2=0.6, k10=1.0),
    )
    run = evaluated(write_run(tmp_path), {"step": 10, **last}, {"step": 0, **first, "evaluation/pass@x": 3})
    data = drawn(write_report(run))
    assert [chart["title"] for chart in data["charts"]][:3] == ["Reward", "Evaluation", "Solved"]
    chart = data["charts"][2]
    assert [line["label"] for line in chart["lines"]] == ["pass@10", "pass@2", "pass@1"]
    assert data["series"][chart["lines"][0]["metric"]] == [0.5, 1.0]
    assert {data["series"][line["x"] + "x/step"][1] for line in chart["lines"]} == {10}


def test_each_set_has_its_own_curves_and_greedy_answers_have_none(tmp_path: Path) -> None:
    greedy, many = solved("evaluation/greedy", 0.5, k1=0.5), solved("evaluation/many", 0.25, k1=0.25, k4=0.75)
    data = drawn(
        write_report(evaluated(write_run(tmp_path), {"step": 0, **solved("evaluation", 0.5), **greedy, **many}))
    )
    charts = [chart for chart in data["charts"] if chart["title"].startswith("Solved")]
    assert [chart["title"] for chart in charts] == ["Solved: many"]
    assert [data["series"][line["metric"]] for line in charts[0]["lines"]] == [[0.75], [0.25]]
