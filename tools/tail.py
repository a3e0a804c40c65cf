"""`r3async tail`: a run as it goes on, on a terminal; in a pipe, one plain line a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from r3async.observe.events import format_event
from r3async.observe.follow import FollowedRun
from tools.live import describe_step

POLL_SECONDS = 0.5
FAILED, SILENT = 1, 3
"""Exit codes: the run failed; it wrote nothing for as long as the reader was patient."""


def tail(
    run_dir: Path, *, follow: bool = True, plain: bool = False, patience: float = 1800.0, poll_also: Callable[[], None] | None = None
) -> int:
    """Show the run until it ends (`plain`, or no terminal) or the reader leaves. Returns the exit code.

    `poll_also`: called before each look at the files, where something else brings them here.
    """
    run = FollowedRun(run_dir)

    def poll() -> None:
        if poll_also is not None:
            poll_also()
        run.poll()

    if not plain and follow and sys.stdout.isatty():
        from tools.tail_app import TailApp

        TailApp(run, poll).run()
        return 0
    return print_lines(run, sys.stdout, follow=follow, patience=patience, poll_also=poll_also)


def print_lines(
    run: FollowedRun,
    out: TextIO,
    *,
    follow: bool,
    patience: float = 1800.0,
    poll_also: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """A line for every step and every warning so far; with `follow`, until the run ends or is silent for `patience` seconds.

    Returns 0, `FAILED` if the run failed, `SILENT` if nothing came. A reader who left (`| head`) ends it, with 0.
    """
    heard = clock()
    try:
        while True:
            if poll_also is not None:
                poll_also()
            rows, events = run.poll()
            for event in events:
                if event.get("level") in ("warning", "error", "critical"):
                    out.write(format_event(event).splitlines()[0] + "\n")
            for row in rows:
                of = f"/{run.planned_steps}" if run.planned_steps else ""
                out.write(f"{row.get('step', '?'):>4}{of}  {describe_step(row)}\n")
            if rows or events:
                heard = clock()
            if run.ended:
                out.write(f"{run.name}: {run.status} after {run.step} steps\n")
            out.flush()
            if run.ended or not follow:
                return FAILED if run.status == "failed" else 0
            if clock() - heard > patience:
                sys.stderr.write(
                    f"{run.name} wrote nothing for {patience:.0f} s: its processes may have died (see {run.run_dir}/logs); "
                    "--patience SECONDS waits longer\n"
                )
                return SILENT
            sleep(POLL_SECONDS)
    except BrokenPipeError:
        # Python would complain once more when it closes the stream.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return 0
