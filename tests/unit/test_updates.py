"""Steps that make no update: what is told of them, when they end the run, and what such a run calls itself."""

from typing import Any

import pytest

from r3async.data.metrics import METRICS
from r3async.record.events import open_event_log
from r3async.record.step_writer import MetricsFile
from r3async.schedule.update_monitor import (
    DRIFT_TOO_LARGE,
    GRADIENT_NOT_FINITE,
    ZERO_VARIANCE,
    UpdateMonitor,
    explain_no_update,
)
from r3async.tools.tail.live import describe_step
from r3async.views.follow import FollowedRun
from r3async.views.summary import format_summary, summarize_run
from tests.helpers.cli import printed


def step(updates: int = 1, **changes: float) -> dict[str, Any]:
    return {
        "optimizer/updates": updates,
        "optimizer/skipped": float(not updates),
        "optimizer/zero_variance": 0.0,
        "optimizer/broken": 0.0,
        "advantage/zero_variance_groups": 1.0,
        "batch/groups": 4,
        "batch/trained_tokens": 100,
    } | {name.replace("__", "/"): value for name, value in changes.items()}


GOOD = step()
FLAT = step(0, optimizer__zero_variance=1.0, advantage__zero_variance_groups=4.0)
BAD = step(0)
FAR = step(0, optimizer__broken=1.0)


class Told:
    def __init__(self, limit: int = 2):
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.updates = UpdateMonitor(
            limit,
            lambda event, **fields: self.events.append(("warning", event, fields)),
            lambda event, **fields: self.events.append(("info", event, fields)),
        )

    def run(self, *steps: dict[str, Any]) -> list[str]:
        return [self.updates.record_step(number, metrics) for number, metrics in enumerate(steps, start=1)]

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.events]


def test_what_kept_a_step_from_its_update_is_read_from_its_metrics():
    causes = ["", ZERO_VARIANCE, GRADIENT_NOT_FINITE, DRIFT_TOO_LARGE]
    assert [explain_no_update(m) for m in (GOOD, FLAT, BAD, FAR)] == causes
    assert explain_no_update({}) == ""  # a row of another release
    assert explain_no_update(step(1, optimizer__skipped=1.0)) == ""  # one minibatch of two made an update
    assert {"optimizer/updates", "optimizer/zero_variance", "optimizer/broken"} <= set(METRICS)


def test_a_hundred_steps_with_zero_variance_are_one_event_and_their_end_is_another():
    told = Told()
    assert told.run(GOOD, *[FLAT] * 100) == [""] * 101
    assert told.names == ["zero_variance"]
    level, _, fields = told.events[0]
    assert (level, fields["step"], fields["groups"], fields["groups_without"]) == ("warning", 2, 4, 4)
    assert told.updates.describe_no_updates() == "100 x zero variance"
    told.updates.record_step(102, GOOD)
    told.updates.record_step(103, FLAT)
    assert told.names == ["zero_variance", "variance_returned", "zero_variance"]
    assert told.events[1][2] == {"step": 102, "steps_without": 100}


def test_skipped_steps_in_a_row_end_the_run_at_the_one_past_the_limit():
    *passed, reason = Told(limit=2).run(GOOD, BAD, FAR, BAD)
    assert passed == [""] * 3
    assert reason.startswith("3 steps in a row made no update, more than supervise.max_skipped_steps = 2: ")
    assert f"2 x {GRADIENT_NOT_FINITE}, 1 x {DRIFT_TOO_LARGE} (steps 2 to 4)" in reason


def test_an_update_ends_a_row_of_skipped_steps_and_a_step_with_zero_variance_does_not():
    assert Told(limit=2).run(BAD, BAD, GOOD, BAD, BAD) == [""] * 5
    *passed, reason = Told(limit=2).run(BAD, FLAT, BAD, FLAT, FLAT, BAD)
    assert passed == [""] * 5
    assert "3 x gradient not finite (steps 1 to 6)" in reason


def test_with_a_limit_of_zero_the_first_skipped_step_ends_the_run():
    assert Told(limit=0).run(FLAT, GOOD, BAD)[-1].startswith("1 steps in a row")


def test_the_live_line_says_why_there_was_no_update():
    assert "no update" not in describe_step(GOOD)
    assert describe_step(FLAT).endswith("  no update: zero variance")
    assert describe_step(BAD).endswith("  no update: gradient not finite")


def write_run(run_dir, rows: list[dict[str, Any]], **ended: Any):
    run_dir.mkdir()
    writer = MetricsFile(run_dir)
    for number, row in enumerate(rows, start=1):
        writer.write({"step": number, "time": 1e9 + number, **row})
    writer.close()
    open_event_log(run_dir, "conductor").info("run_finished", steps=len(rows), **ended)
    return run_dir


@pytest.mark.parametrize(
    ("stopped", "updates", "status"),
    [(False, 0, "not trained"), (True, 0, "stopped"), (False, 3, "finished"), (True, 3, "stopped")],
)
def test_a_run_without_any_update_is_not_called_trained_by_its_summary(tmp_path, stopped, updates, status):
    rows = [GOOD] * updates + [FLAT] * 5
    run = write_run(tmp_path / "run", rows, stopped=stopped, updates=updates, without_update="5 x zero variance")
    summary = summarize_run(run)
    assert summary.status == status
    assert (summary.updates, summary.steps_with_zero_variance, summary.steps_skipped) == (updates, 5, 0)
    text = printed(format_summary(summary), 140)
    assert f"{updates}; steps without one: 5 had zero variance, 0 were skipped" in text
    assert ("no step made an update (5 x zero variance)" in text) == (not updates)
    followed = FollowedRun(run)
    followed.read_new()
    assert followed.status == status
    assert followed.has_ended
