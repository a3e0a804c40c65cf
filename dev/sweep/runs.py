"""Make the runs of a plan that are not finished yet, several at once, each by `r3async train`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from dev.bench.jobs import PrintLine, end_on_sigterm, start_process
from dev.sweep.plan import PlannedRun, SweepPlan, list_runs
from dev.sweep.results import (
    FINISHED_FILE,
    append_finished_run,
    collect_finished_run,
    read_finished_runs,
)

POLL_SECONDS = 0.5


def make_runs(
    directory: Path,
    plan: SweepPlan,
    *,
    only: str,
    parallel: int,
    facts: Mapping[str, str],
    print_line: PrintLine,
    make_command: Callable[[SweepPlan, PlannedRun, Path], list[str]],
) -> list[str]:
    """Make the missing runs of a plan and add them to `finished.jsonl` as they end.

    A run that was interrupted continues from its checkpoint. Whatever was started ends with this
    call, however it ends.

    Args:
        only: Make only the runs whose names contain this text.
        parallel: Number of runs at once.
        facts: Facts about these runs to keep with them.

    Returns:
        The names of runs that ended without having made all their steps.
    """
    directory.mkdir(parents=True, exist_ok=True)
    finished = read_finished_runs(directory / FINISHED_FILE)
    waiting = deque(run for run in list_runs(plan) if only in run.name and run.name not in finished)
    running: dict[str, tuple[PlannedRun, subprocess.Popen[bytes]]] = {}
    failed = []
    with end_on_sigterm(), ExitStack() as processes:
        while waiting or running:
            while waiting and len(running) < parallel:
                run = waiting.popleft()
                log = directory / f"{run.name}.log"
                command = make_command(plan, run, directory)
                running[run.name] = run, processes.enter_context(start_process(command, log))
                print_line(f"{run.name}: started; {len(waiting)} wait")
            time.sleep(POLL_SECONDS)
            for run, process in list(running.values()):
                if process.poll() is None:
                    continue
                del running[run.name]
                made = collect_finished_run(directory, plan, run, facts)
                if made is None:
                    failed.append(run.name)
                    print_line(f"{run.name}: failed; see {directory / run.name}.log")
                else:
                    append_finished_run(directory / FINISHED_FILE, made)
                    print_line(f"{run.name}: {made.status}")
    return failed


def make_train_command(plan: SweepPlan, run: PlannedRun, directory: Path) -> list[str]:
    # -P: a folder `tools` in the current directory must not shadow ours.
    words = ["train", plan.preset, *run.overrides, "--runs", str(directory)]
    return [sys.executable, "-P", "-m", "r3async", *words]
