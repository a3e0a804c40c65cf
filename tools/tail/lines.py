"""Show a run while it trains, one plain line per step: `r3async tail`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from r3async.record.events import format_event
from r3async.views.follow import FollowedRun
from r3async.views.summary import NOT_TRAINED, get_failure_key
from r3async.world.process_output import escape_control_characters

from .live import StepPace, describe_evaluation, describe_step

POLL_SECONDS = 0.5
FAILED_EXIT_CODE = 1
SILENT_EXIT_CODE = 3
"""Exit codes of a failed run, and of one that wrote nothing for as long as the
reader was patient."""


def tail_local(run_dir: Path, *, follow: bool = True, patience: float = 1800.0) -> int:
    """Show the run on standard output until it ends. Returns the exit code."""
    return print_run_lines(FollowedRun(run_dir), sys.stdout, follow=follow, patience=patience)


def print_run_lines(
    run: FollowedRun,
    out: TextIO,
    *,
    follow: bool,
    patience: float = 1800.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print a line for every step, evaluation and warning so far, and with `follow` for those
    to come and for the phases before the first step.

    Following ends when the run ends or is silent for `patience` seconds. Each kind of failure is
    one line, with its count, and is repeated at the end if it occurred again.

    Returns 0, `FAILED_EXIT_CODE` if the run failed or trained nothing, or `SILENT_EXIT_CODE` if
    nothing came. If the reader leaves (`| head`), it ends with 0.
    """
    last_news = clock()
    described = dict[str, str]()
    pace = StepPace()
    phase = ""

    def print_line(line: str) -> None:
        out.write(escape_control_characters(line) + "\n")

    try:
        while True:
            news = run.read_new()
            for event in news.events:
                kind = get_failure_key(event)
                if kind:
                    if kind in run.history.failures and kind not in described:
                        described[kind] = run.history.failures[kind].to_text()
                        print_line(format_event(event, described[kind]).splitlines()[0])
                elif event.get("level") in ("warning", "error", "critical"):
                    print_line(format_event(event).splitlines()[0])
            if follow and not run.step and not run.has_ended and run.phase != phase:
                phase = run.phase
                print_line(f"{run.name}: {phase}")
            for row in news.rows:
                of = f"/{run.planned_steps}" if run.planned_steps else ""
                pace.add_step(row)
                print_line(
                    f"{row.get('step', '?'):>4}{of}  "
                    f"{describe_step(row)}{pace.describe(run.planned_steps)}"
                )
            for row in news.evaluations:
                print_line(describe_evaluation(row))
            if any(news):
                last_news = clock()
            if run.has_ended or not follow:
                for kind, failure in run.history.failures.items():
                    in_all = failure.to_text()
                    if described.get(kind) != in_all:
                        print_line(in_all)
            if run.has_ended:
                print_line(f"{run.name}: {run.status} after {run.step} steps")
            out.flush()
            if run.has_ended or not follow:
                return FAILED_EXIT_CODE if run.status in ("failed", NOT_TRAINED) else 0
            if clock() - last_news > patience:
                sys.stderr.write(
                    f"{run.name} wrote nothing for {patience:.0f} s: its processes may be lost "
                    f"(see {run.run_dir}/logs); --patience SECONDS waits longer\n"
                )
                return SILENT_EXIT_CODE
            sleep(POLL_SECONDS)
    except BrokenPipeError:
        # Python would complain again when it closes the stream.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return 0
