"""Change the number of generators of a running run: `r3async scale`.

The request is a file in the run's directory (`actors/fleet_scaler.py`), and the answer comes in
the run's events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from r3async.actors.fleet_scaler import ScaleRequest, write_scale_request
from r3async.checkpoint.run_lock import is_run_in_use
from r3async.config import ConfigError
from r3async.views.follow import FollowedFile, FollowedRun
from r3async.world.real import REAL_WORLD

MAX_GENERATORS = 4096
"""Maximum number of generators of a run."""
ANSWER_TIMEOUT_SECONDS = 60.0
"""Seconds within which the run's command answers, even while it starts Ray."""
POLL_SECONDS = 0.2
REFUSED_EXIT_CODE = 1
PENDING_EXIT_CODE = 3
"""Exit codes of a refused request, and of one that is not fulfilled yet."""
SHOWN_EVENTS = (
    "scale_waits",
    "generator_joined",
    "generator_left",
    "generator_refused",
    "generator_lost",
)
"""Events that are printed."""


def parse_generators(arguments: Sequence[str]) -> int:
    """Parse `generators=N`. Raises `ConfigError`."""
    name, equals, number = arguments[0].partition("=") if len(arguments) == 1 else ("", "", "")
    if name != "generators" or not equals or not number.isascii() or not number.isdigit():
        raise ConfigError(
            f"`{' '.join(arguments)}`: write generators=N, for example generators=4; nothing "
            "else can be scaled"
        )
    if not 1 <= int(number) <= MAX_GENERATORS:
        raise ConfigError(
            f"`generators` = {number} must be 1 to {MAX_GENERATORS:,}: a run without "
            "generators cannot train"
        )
    return int(number)


def scale_run(run_dir: Path, count: int, wait: float, print_line: Callable[[str], object]) -> int:
    """Request `count` generators, and print the progress for `wait` seconds. Returns the exit code.

    Raises `ConfigError` if no process runs the run.
    """
    run = _read_run(run_dir)
    if run.has_ended:
        raise ConfigError(
            f"{run_dir} is not running ({run.status}): set `generator.count` where it "
            "is started again"
        )
    if not is_run_in_use(run_dir):
        raise ConfigError(
            f"{run_dir} is not running (interrupted): set `generator.count` where it is resumed"
        )
    events = FollowedFile(run_dir / "events.jsonl")
    list(events.read_objects())  # earlier events
    wish = ScaleRequest(count, REAL_WORLD.unique_id())
    write_scale_request(run_dir, wish)
    if not wait:
        print_line(f"{run_dir.name}: {count} generators are asked for")
        return 0
    answers: list[str] = []
    for event in _iter_events(events, answers, wait):
        what = str(event.get("event"))
        answers += [what] if event.get("asked") == wish.asked else []
        if what in SHOWN_EVENTS:
            print_line(_describe_event(event))
        if event.get("asked") == wish.asked and what in ("scaled", "scale_refused"):
            if what == "scale_refused":
                print_line(
                    f"{run_dir.name} has {event['generators']} generators: {event['reason']}"
                )
                return REFUSED_EXIT_CODE
            print_line(
                f"{run_dir.name} has {event['generators']} generators, and had {event['of']}"
            )
            return 0
        if what in ("run_finished", "run_failed"):
            print_line(f"{run_dir.name} ended before it had {count} generators")
            return REFUSED_EXIT_CODE
    if not answers:
        raise ConfigError(
            f"nobody answers for {run_dir}: the command that trains it does not run (any more)"
        )
    print_line(
        f"{run_dir.name} lacks {count} generators after {wait:g} s, and continues to try (`r3async "
        f"tail {run_dir}`)"
    )
    return PENDING_EXIT_CODE


def _read_run(run_dir: Path) -> FollowedRun:
    run = FollowedRun(run_dir)
    run.read_new()
    return run


def _iter_events(
    events: FollowedFile, answers: Sequence[str], wait: float
) -> Iterator[dict[str, Any]]:
    """Yield events as they come, for `wait` seconds, or `ANSWER_TIMEOUT_SECONDS` if `answers`
    is empty by then."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < wait and (
        answers or passed < ANSWER_TIMEOUT_SECONDS
    ):
        yield from events.read_objects()
        time.sleep(POLL_SECONDS)


def _describe_event(event: dict[str, Any]) -> str:
    """Describe an event in words."""
    who = event.get("generator", "")
    match event["event"]:
        case "scale_waits":
            return f"waiting for a place: {event.get('reason')}"
        case "generator_joined":
            return (
                f"{who} on {event.get('host')} generates, with version "
                f"{event.get('version')} of the weights"
            )
        case "generator_left":
            again = event.get("leased_again") or []
            return f"{who} has left" + (
                f"; others generate its groups {', '.join(map(str, again))}" if again else ""
            )
        case "generator_refused":
            return f"{who} cannot join: {event.get('error')}"
    return f"{who} was lost, and is started again"
