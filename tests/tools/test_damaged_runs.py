"""Damaged files of a run: every view shows the rest, and says what it passed over.

R3ASYNC_FUZZ=N damages N runs here.
"""

import html
import io
import json
import os
import random
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from dev.fuzz.common import mutate_bytes
from r3async.record.events import open_event_log
from r3async.record.routes import RouteFileError
from r3async.tools.inspect.look import Inspection
from r3async.tools.inspect.run import InspectError
from r3async.tools.inspect.trajectories import TrajectoryFilter
from r3async.tools.tail.lines import print_run_lines
from r3async.views.episode_search import EpisodeQuery
from r3async.views.follow import FollowedRun
from r3async.views.live import LiveRun
from r3async.views.report import LivePage, render_comparison_page, render_run_page, write_report
from r3async.views.summary import format_summary, summarize_run
from tests.helpers.written_runs import write_run

COUNT = int(os.environ.get("R3ASYNC_FUZZ", "20"))
LINES = ("metrics.jsonl", "events.jsonl", "evaluation.jsonl", "episodes.jsonl", "timeline.jsonl", "routing.jsonl")
FILES = (*LINES, "quarantine.jsonl", "config.toml")

ODD_LINES: list[bytes] = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"3",
    b'"x"',
    b"[" * 5000,
    b'{"a":' * 5000,
    b"\xff\xfe\x00",
    b"\x00" * 40,
    b"{" * 200,
]
ODD_VALUES = [
    "[1,null]",
    "null",
    '"x"',
    "-1",
    "0",
    "1e308",
    "1" * 400,
    "1" * 5000,
    "[]",
    "{}",
    "[[[]]]",
    "true",
    '"\\ud800"',
    "NaN",
    "[1,null]",
]


def write_whole_run(root: Path) -> Path:
    run = write_run(root, routing={"trace": "all"})
    with (run / "evaluation.jsonl").open("w") as file:
        for step in (0, 5, 10):
            reward = {"evaluation/reward_mean": step / 10, "evaluation/reward_stderr": 0.1, "evaluation/pass@1": 0.5}
            file.write(json.dumps({"step": step, "time": 1000.0 + step, **reward}) + "\n")
    task = {"task_seed": 7, "group": 3, "from_group": 9, "failed_by": "environment", "error": "E", "time": 1.0}
    (run / "quarantine.jsonl").write_text((json.dumps(task) + "\n") * 2)
    events = open_event_log(run, "conductor")
    for name in ("conductor_started", "learner_started", "generator_lost", "scaling", "generator_joined"):
        events.warning(name, generator="generator-0", generators=2)
    events.info("run_finished", steps=12, updates=12, stopped=False)
    return run


# --- what people and disks do to lines and bytes


def damage(rng: random.Random, run: Path) -> str:
    """Change one file of the run. Returns what was done."""
    routes = [str(path.relative_to(run)) for path in sorted((run / "routes").iterdir())]
    name = rng.choice([*FILES, *LINES, *routes])
    path = run / name
    data = path.read_bytes()
    if name in routes or rng.random() < 0.3:
        path.write_bytes(mutate_bytes(rng, data))
        return f"bytes of {name}"
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    how = rng.choice([odd_line, odd_value, odd_value, odd_value, cut_line, foreign_line, same_line])
    lines[at : at + 1] = how(rng, lines[at], run)
    path.write_bytes(b"\n".join(lines))
    return f"{how.__name__} in line {at + 1} of {name}: {lines[at][:120]!r}"


def odd_line(rng: random.Random, line: bytes, run: Path) -> list[bytes]:
    return [rng.choice(ODD_LINES)]


def odd_value(rng: random.Random, line: bytes, run: Path) -> list[bytes]:
    value = rng.choice(ODD_VALUES)
    if b" = " in line:
        return [line.partition(b" = ")[0] + b" = " + value.encode()]
    try:
        known = json.loads(line)
    except ValueError:
        return [line]
    if not isinstance(known, dict) or not known:
        return [line]
    known[rng.choice(sorted(known))] = "@@"
    return [json.dumps(known).replace('"@@"', value, 1).encode()]


def cut_line(rng: random.Random, line: bytes, run: Path) -> list[bytes]:
    return [line[: rng.randrange(len(line) + 1)]]


def foreign_line(rng: random.Random, line: bytes, run: Path) -> list[bytes]:
    return [rng.choice((run / rng.choice(FILES)).read_bytes().split(b"\n"))]


def same_line(rng: random.Random, line: bytes, run: Path) -> list[bytes]:
    return [line, line]


# --- whoever reads a run


def show_summary(run: Path) -> str:
    out = io.StringIO()
    Console(file=out, width=300).print(format_summary(summarize_run(run)))
    return out.getvalue()


def show_report(run: Path) -> str:
    return write_report(run).read_text() + write_report(run, run, path=run / "both.html").read_text()


def show_live(run: Path) -> str:
    live = LiveRun(run)
    try:
        live.read_new()
        page = LivePage("token", "1", "run=0", [])
        text = render_run_page(live.make_record(), page) + render_comparison_page(
            [live.make_record(), live.make_record()], page
        )
        text += live.render_episode_list(EpisodeQuery()) + live.render_episode_list(
            EpisodeQuery(order="best", reward_min=0.1, step_max=9)
        )
        for key in re.findall(r"data-key='(.*?)'", live.render_episode_list(EpisodeQuery())):
            text += live.render_episode(html.unescape(key), group=True) or ""
        return text
    finally:
        live.close()


def show_tail(run: Path) -> str:
    out = io.StringIO()
    print_run_lines(FollowedRun(run), out, follow=False)
    return out.getvalue()


def show_inspected(run: Path) -> str:
    """The command's own errors are refusals in one line."""
    out, problems = io.StringIO(), list[str]()
    look = Inspection(Console(file=out, width=300), problems, run.parent)
    asks: list[Callable[[], object]] = [
        lambda: look.show_target(str(run), None, json=False),
        lambda: look.show_trajectories(str(run), TrajectoryFilter(), None, 0),
        lambda: look.show_trajectories(str(run), TrajectoryFilter(reward_below=0.7, age_above=0), None, 0, json=True),
        lambda: look.show_trajectories(str(run), TrajectoryFilter(), None, 0, tokens=True),
        lambda: look.show_routes(str(run), None, None, [], diff=False, json=False),
        lambda: look.verify_routes(str(run), json=False),
    ]
    for ask in asks:
        try:
            ask()
        except (InspectError, RouteFileError) as error:
            problems.append(str(error))
    return out.getvalue() + "\n".join(problems)


VIEWS: dict[str, Callable[[Path], str]] = {
    "summary": show_summary,
    "report": show_report,
    "live": show_live,
    "tail": show_tail,
    "inspect": show_inspected,
}


def failures(count: int, root: Path) -> Iterator[str]:
    """What any view raised for any of `count` damaged runs, and for what."""
    whole = write_whole_run(root / "whole")
    for seed in range(count):
        rng = random.Random(seed)
        run = root / f"damaged-{seed}"
        shutil.copytree(whole, run)
        done = [damage(rng, run) for _ in range(rng.choice([1, 1, 2, 5]))]
        for name, show in VIEWS.items():
            began = time.monotonic()
            try:
                show(run)
            except Exception as error:
                at = traceback.extract_tb(error.__traceback__)[-1]
                said = f"{type(error).__name__}: {str(error)[:100]} at {at.filename}:{at.lineno}"
                yield f"seed {seed}, {name}: {said}\n  {done}"
            if time.monotonic() - began > 30:
                yield f"seed {seed}, {name}: it took {time.monotonic() - began:.0f} s\n  {done}"
        shutil.rmtree(run)


@pytest.mark.long
def test_whatever_is_damaged_every_view_shows_the_rest(tmp_path: Path) -> None:
    found = list(failures(COUNT, tmp_path))
    assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.parametrize("name", [*LINES, "quarantine.jsonl"])
def test_a_line_that_is_passed_over_is_told(tmp_path: Path, name: str) -> None:
    run = write_whole_run(tmp_path)
    before = summarize_run(run).warnings
    lines = (run / name).read_bytes().split(b"\n")
    (run / name).write_bytes(b"\n".join([lines[0], b"[" * 5000, *lines[1:]]))
    assert f"{name}: 1 of its lines cannot be read, and are passed over; the first is line 2" in show_inspected(run)
    if name == "quarantine.jsonl":
        return
    for show in (show_report, show_live):
        text = show(run)
        assert "lines_skipped" in text
        assert f"file={name}" in text
    if name in ("metrics.jsonl", "events.jsonl", "evaluation.jsonl"):
        assert f"file={name}" in show_tail(run)
        assert summarize_run(run).warnings == before + 1


def test_settings_that_cannot_be_read_are_told_once_and_are_not_taken_for_none(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    before = summarize_run(run).warnings
    (run / "config.toml").write_bytes(b"steps = 5\nseed = = 1\n")
    assert "config.toml cannot be read: the settings are not known" in show_inspected(run)
    for show in (show_report, show_live, show_tail):
        assert "file=config.toml" in show(run)
    followed = FollowedRun(run)
    assert [[event["event"] for event in followed.read_new().events].count("lines_skipped") for _ in range(2)] == [1, 0]
    assert summarize_run(run).warnings == before + 1


def test_a_last_line_that_is_torn_may_still_be_written_and_is_no_warning(tmp_path: Path) -> None:
    run = write_whole_run(tmp_path)
    before = summarize_run(run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 13, "rew')
    assert (summarize_run(run).warnings, summarize_run(run).steps) == (before.warnings, before.steps)
    assert "lines_skipped" not in show_report(run) + show_live(run) + show_tail(run) + show_inspected(run)
