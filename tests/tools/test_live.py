"""The live view says what happens, in a pipe and on a terminal."""

import io

from rich.console import Console

from r3async.tools.tail.live import LiveView, StepPace, describe_evaluation, describe_step

ROW = {
    "step": 3,
    "reward/mean": 0.5,
    "rollout_kl/k3": 1e-3,
    "staleness/mean": 0.75,
    "staleness/max": 1,
    "routing/agreement": 0.98,
    "throughput/generated_tokens_per_second": 3210.0,
    "throughput/trained_tokens_per_second": None,
}


def status(phase="training", row=None, restarts=0):
    return {"phase": phase, "rows": [row] if row else [], "generators": [{"restarts": restarts}]}


def test_a_step_is_one_readable_line_also_when_a_number_is_missing():
    line = describe_step(ROW)
    for part in ("reward 0.500", "drift 1e-03", "staleness 0.8, max 1", "agreement 98 %", "3.2k>nank"):
        assert part in line
    del (bare := dict(ROW))["routing/agreement"]
    assert "agree" not in describe_step(bare), "a run without routes"


def test_a_line_says_how_long_the_step_took_and_how_long_the_others_will():
    pace = StepPace()
    said = []
    for row in (
        {"step": 1, "time": 10.0},
        {"step": 2, "time": 11.0},
        {"step": 3, "time": 14.0},  # 2 s a step on average, and 98 to go
        {"step": 3, "time": 99.0},  # made again after a restart
        {"step": 4, "time": 100.5},
        {"time": None},
    ):
        pace.add_step(row)
        said.append(pace.describe(101))
    assert said == ["", "  1.0 s, 1 min 39 s left", "  3.0 s, 3 min 16 s left", "", "  1.5 s, 2 min 26 s left", ""]
    pace.add_step({"step": 1, "time": 1.0})
    pace.add_step({"step": 2, "time": 2.0})
    assert (pace.describe(2), pace.describe(None)) == ("  1.0 s", "  1.0 s"), "at the end, or where none is known"


def test_a_pipe_gets_plain_lines_once_per_step_and_phase():
    screen = io.StringIO()
    with LiveView(Console(file=screen), 10) as view:
        for _ in range(3):
            view.show_status(status("loading engine"))
        for _ in range(3):
            view.show_status(status(row=ROW))
        view.show_status(status(row={**ROW, "step": 4}, restarts=1))
    lines = screen.getvalue().splitlines()
    assert sum("loading engine" in line for line in lines) == 1
    assert [line.split("/")[0].strip() for line in lines if "reward" in line] == ["3", "4"]
    assert sum("was lost and begins again" in line for line in lines) == 1
    assert all(len(line) <= 100 for line in lines if "reward" in line)


def test_steps_beyond_the_limit_of_drift_are_told_once():
    screen = io.StringIO()
    with LiveView(Console(file=screen), 10) as view:
        for step, count in ((3, 0), (4, 1), (5, 2)):
            view.show_status(status(row={**ROW, "step": step, "optimizer/beyond_limit": float(count)}))
    lines = screen.getvalue().splitlines()
    told = [index for index, line in enumerate(lines) if "algorithm.rollout_kl.limit" in line]
    assert len(told) == 1
    assert lines[told[0] - 1].strip().startswith("4/10"), "beside the first such step"


def test_an_evaluation_is_a_line_of_its_own_once_with_each_of_its_sets():
    row = {"step": 20, "time": 7.0, "evaluation/reward_mean": 0.5, "evaluation/reward_error": 0.0625}
    assert describe_evaluation(row) == "evaluation after step 20: reward 0.500 ± 0.062"
    sets = {
        "evaluation/greedy/reward_mean": 0.5,
        "evaluation/many/reward_mean": 0.25,
        "evaluation/many/reward_error": None,
    }
    told = describe_evaluation(row | sets | {"evaluation/many/pass@1": 0.25, "evaluation/many/pass@4": 0.75})
    assert told == "evaluation after step 20: greedy reward 0.500; many reward 0.250, pass@4 0.750"
    screen = io.StringIO()
    with LiveView(Console(file=screen), 10) as view:
        for _ in range(2):
            view.show_status(status() | {"evaluations": [row]})
    assert screen.getvalue().count("evaluation after step 20") == 1


def test_a_terminal_gets_a_line_that_changes():
    screen = io.StringIO()
    with LiveView(Console(file=screen, force_terminal=True, width=160), 10) as view:
        view.show_status(status(row=ROW))
    assert "reward 0.500" in screen.getvalue()
