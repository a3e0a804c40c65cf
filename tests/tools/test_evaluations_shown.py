"""What evaluations say is in the report (pass@k over their steps) and in `r3async tail` (a gauge)."""

from __future__ import annotations

from pathlib import Path

from r3async.tools.tail import view
from r3async.views.report import write_report
from tests.tools.test_report import drawn, evaluated
from tests.tools.test_report import write_run as write_reported
from tests.tools.test_tail import append, followed, write_run


def solved(prefix: str, mean: float, **passes: float) -> dict[str, float]:
    named = {f"{prefix}/pass@{k[1:]}": value for k, value in passes.items()}
    return {f"{prefix}/reward_mean": mean, f"{prefix}/reward_error": 0.05, **named}


def test_pass_at_k_is_a_curve_of_each_k_in_the_report(tmp_path: Path) -> None:
    first, last = (
        solved("evaluation", 0.25, k1=0.25, k2=0.4, k10=0.5),
        solved("evaluation", 0.5, k1=0.5, k2=0.6, k10=1.0),
    )
    run = evaluated(write_reported(tmp_path), {"step": 10, **last}, {"step": 0, **first, "evaluation/pass@x": 3})
    data = drawn(write_report(run))
    assert [chart["title"] for chart in data["charts"]][:3] == ["Reward", "Evaluation", "Solved"]
    chart = data["charts"][2]
    assert [line["label"] for line in chart["lines"]] == ["pass@10", "pass@2", "pass@1"]
    assert data["series"][chart["lines"][0]["metric"]] == [0.5, 1.0]
    assert {data["series"][line["x"] + "x/step"][1] for line in chart["lines"]} == {10}


def test_each_set_has_its_own_curves_and_greedy_answers_have_none(tmp_path: Path) -> None:
    greedy, many = solved("evaluation/greedy", 0.5, k1=0.5), solved("evaluation/many", 0.25, k1=0.25, k4=0.75)
    data = drawn(
        write_report(evaluated(write_reported(tmp_path), {"step": 0, **solved("evaluation", 0.5), **greedy, **many}))
    )
    charts = [chart for chart in data["charts"] if chart["title"].startswith("Solved")]
    assert [chart["title"] for chart in charts] == ["Solved: many"]
    assert [data["series"][line["metric"]] for line in charts[0]["lines"]] == [[0.75], [0.25]]


def test_the_tail_has_a_gauge_of_evaluations_once_there_is_one(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 5)
    run = followed(run_dir)
    assert "evaluated" not in view.to_plain_text(view.render_overview(run, 120))
    append(run_dir / "evaluation.jsonl", {"step": 0, **solved("evaluation", 0.25, k1=0.25, k4=0.5)})
    append(run_dir / "evaluation.jsonl", {"step": 5, **solved("evaluation", 0.5, k1=0.5, k4=0.75)})
    run.read_new()
    lines = view.to_plain_text(view.render_overview(run, 120)).splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.split()[0] == "evaluated"]
    assert lines[at - 1].split()[0] == "reward"
    assert lines[at].split()[1:6] == ["0.5", "step", "5,", "pass@4", "0.75"]
