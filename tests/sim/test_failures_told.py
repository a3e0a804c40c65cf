"""Whole runs, simulated, in which episodes fail: every view names each error once, with its count; and how such runs end."""

import io
import json

import pytest
from rich.console import Console

from r3async.actors.process import NotTrained, RunFailed
from r3async.config import Config
from r3async.envs import Action, Message, StepResult
from r3async.record.events import open_event_log
from r3async.record.reading import read_json_objects
from r3async.tools.outlets import MetricsForwarder
from r3async.tools.tail.lines import print_run_lines
from r3async.tools.tail.live import LiveView, describe_step
from r3async.tools.training_session import report_ended_run
from r3async.views.follow import FollowedRun
from r3async.views.report import write_report
from r3async.views.summary import MAX_FAILURE_KINDS, RunHistory, summarize_run
from tests.tools.test_report import Page
from tests.tools.test_tail import append

HERE = "tests.sim.test_failures_told"
SIZE, BAD = 100, 7


class Parsed:
    """A hundred rows, of which one cannot be judged."""

    size = SIZE

    async def reset(self, task_seed: int) -> list[Message]:
        self.row = task_seed
        return [Message("user", str(task_seed))]

    async def step(self, action: Action) -> StepResult:
        return StepResult(judged(self.row, action.text), done=True)


def judged(row: int, answer: str) -> float:
    if row == BAD:
        raise ValueError(f"my parser broke on row {row}")
    return float(len(answer) % 2)


@pytest.fixture
def parsed(machine):
    """A run of a hundred rows, each once."""
    machine.train("steps=50", f"env.name={HERE}:Parsed")
    return machine.run_dir


NAMED = "task seed 7, group {}, environment: ValueError: my parser broke on row 7 (test_failures_told.py:{} in judged)"
COUNTED = f"{NAMED}; 8 times, 4 episodes lost"


@pytest.fixture
def named(parsed):
    """What says where the error of the bad row was met first."""
    first = next(event for event in read_json_objects(parsed / "events.jsonl") if event["event"] == "episode_failed")
    return (first["group"], judged.__code__.co_firstlineno + 2)


def test_summary_tail_and_report_name_the_error_of_a_row_once_with_its_count(parsed, named):
    counted = COUNTED.format(*named)
    summary = summarize_run(parsed)
    assert [failure.to_text() for failure in summary.history.failures.values()] == [counted]
    assert (summary.status, summary.warnings) == ("finished", 2)  # the failure, and the task that it took out

    out = io.StringIO()
    assert print_run_lines(FollowedRun(parsed), out, follow=False) == 0
    assert out.getvalue().count("my parser broke") == 1
    assert f"episode_failed {counted}\n" in out.getvalue()

    page = Page(write_report(parsed))
    assert page.text.count(counted) == 1
    assert page.text.count("episode_") == 1
    assert page.text.count("in judged") == 2  # and once in the traceback


def test_the_console_names_it_when_it_is_met_and_counts_it_at_the_end(parsed, named, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    view = LiveView(console, 50)
    with MetricsForwarder(Config(), tmp_path, view.print_line) as outlets:
        for line in (parsed / "events.jsonl").read_text().splitlines():
            append(tmp_path / "events.jsonl", json.loads(line))
            outlets.show_status({"rows": []})
    report_ended_run(parsed, view)
    said = console.file.getvalue()
    assert said.count(NAMED.format(*named)) == 2
    assert f"an episode failed, others like it are only counted: {NAMED.format(*named)}\n" in said
    assert COUNTED.format(*named) in said


def test_a_resumed_command_does_not_tell_what_failed_before_it(parsed):
    said = []
    with MetricsForwarder(Config(), parsed, said.append) as outlets:
        outlets.show_status({"rows": []})
        events = open_event_log(parsed, "generator-0")
        for episode in range(3):
            events.warning("episode_failed", task_seed=7, group=99, by="environment", error="E: x", episode=episode)
        outlets.show_status({"rows": []})
    assert said == ["an episode failed, others like it are only counted: task seed 7, group 99, environment: E: x"]


class Hopeless(Parsed):
    """No row can be judged."""

    async def step(self, action: Action) -> StepResult:
        return StepResult(judged(BAD, action.text), done=True)


ALLOWED = "supervise.max_failed_fraction=1.0"


def test_a_run_of_which_every_episode_failed_has_failed_and_says_by_what(machine):
    reason = (
        r"no step made an update, and 24 of 24 episodes failed\. The last one: task seed \d+, group \d, environment: "
    )
    with pytest.raises(RunFailed, match=reason + "ValueError: my parser broke on row 7") as raised:
        machine.train("steps=3", f"env.name={HERE}:Hopeless", ALLOWED)
    assert not isinstance(raised.value, NotTrained)  # that is for who can learn nothing, and exits with 4
    summary = summarize_run(machine.run_dir)
    assert (summary.status, summary.steps_failed, summary.steps_with_zero_variance) == ("failed", 3, 0)
    assert summary["reward/mean"].last_mean is None  # nobody was rewarded
    (told,) = machine.events("every_episode_failed")
    assert (told["step"], told["episodes"]) == (1, 8)
    assert not machine.events("zero_variance")
    assert not machine.events("metric_not_finite")
    row = read_json_objects(machine.run_dir / "metrics.jsonl")[0]
    assert describe_step(row).endswith("no update: every episode failed")


class Half(Parsed):
    """Of every second row nothing can be judged; the others are worth the same."""

    async def step(self, action: Action) -> StepResult:
        return StepResult(judged(BAD, "") if self.row % 2 else 0.5, done=True)


def test_a_run_with_zero_variance_of_which_some_episodes_failed_is_not_trained(machine):
    with pytest.raises(NotTrained, match=r"none of 8 steps made an update \(.*zero variance"):
        machine.train("steps=8", f"env.name={HERE}:Half", ALLOWED)


def test_errors_that_differ_in_numbers_alone_are_one_and_of_many_kinds_the_rest_is_counted_together():
    history = RunHistory()
    late = {"event": "episode_abandoned", "by": "environment"}
    news = [history.add_event({**late, "error": f"episode g{n} took longer than 30 s"}) for n in range(3)]
    assert news == [True, False, False]
    assert [f.count for f in history.failures.values()] == [3]
    for n in range(MAX_FAILURE_KINDS + 5):
        history.add_event({**late, "error": "x" * n})
    *_, others = history.failures.values()
    assert len(history.failures) == MAX_FAILURE_KINDS + 1
    assert others.to_text() == "other errors; 6 times, 6 episodes lost"
