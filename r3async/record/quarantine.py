"""`quarantine.jsonl` of a run: tasks that are not posed any more, because every episode of them failed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from r3async.record.jsonl import read_objects
from r3async.world import Files
from r3async.world.real import REAL

FILE = "quarantine.jsonl"


class QuarantinedTask(msgspec.Struct, frozen=True):
    """`group`: the one that failed. `from_group`: the first that does not pose the task any more. `failed_by`: `environment`, or
    `learner`, which refused its trajectories. `time`: in seconds since 1970."""

    task_seed: int
    group: int
    from_group: int
    failed_by: str
    error: str
    time: float


def read_quarantine(run_dir: Path, *, files: Files = REAL.files) -> list[QuarantinedTask]:
    """In the order in which they failed. Of a task that is named again (after a resume) the last line counts."""
    found: dict[int, QuarantinedTask] = {}
    for line in read_objects(run_dir / FILE, files=files):
        try:
            task = msgspec.convert(line, QuarantinedTask)
        except msgspec.ValidationError:
            continue
        found[task.task_seed] = task
    return list(found.values())


def describe_quarantine(run_dir: Path, shown: int = 10, *, files: Files = REAL.files) -> list[str]:
    """Lines for a person; none if no task is quarantined."""
    tasks = read_quarantine(run_dir, files=files)
    if not tasks:
        return []
    lines = [f"quarantined tasks: {len(tasks)} ({FILE}); every episode of them failed, and they are not posed again"]
    for task in tasks[:shown]:
        said = next((line for line in task.error.splitlines()[::-1] if line.strip()), "")
        visible = "".join(c if c.isprintable() else repr(c)[1:-1] for c in said)
        lines.append(
            f"  task seed {task.task_seed}: group {task.group} failed by the {task.failed_by}: {visible[:120]}"
        )
    return lines + ([f"  and {len(tasks) - shown} more"] if len(tasks) > shown else [])
