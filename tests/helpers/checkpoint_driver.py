"""A driver that kills checkpoint writers many times, in a process that has nothing else to do.

    python -m tests.helpers.checkpoint_driver DIRECTORY

It prints one JSON object. DIRECTORY should be in memory (`/dev/shm`), because every case writes files to the disk.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from r3async.checkpoint import CheckpointDirectory, open_checkpoint
from r3async.checkpoint.tensors import write_rank_file
from tests.helpers.checkpoint import fresh, run_state, tiny_state, write_checkpoint

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.scandir"}


def _kill_at(count: int) -> None:
    """Make this process kill itself at its `count`-th disk operation from now on, before or just after it."""
    left = [count]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(lambda event, _: tick() if event in EVENTS else None)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        tick()
        real(descriptor)
        tick()

    os.fsync = fsync


def _child(
    checkpoints: CheckpointDirectory, first: int, steps: int, kill_at: int, acknowledge: int, elements: int
) -> None:
    if kill_at:
        _kill_at(kill_at)
    for step in range(first, first + steps):
        partial = checkpoints.begin_checkpoint(step)
        checkpoints.commit_checkpoint(run_state(step), [write_rank_file(partial, tiny_state(step, elements=elements))])
        os.write(acknowledge, f"{step}\n".encode())
        checkpoints.prune_old()


def kill(directory: Path) -> dict[str, Any]:
    """Kill writers at each of their disk operations, and at random moments; then start the next one.

    After each, all checkpoints must be intact, and the newest not older than the last one that `commit_checkpoint` returned from.
    """
    reported: list[str] = []
    checkpoints = CheckpointDirectory(
        fresh(directory), keep_last=2, report=lambda event, /, **facts: reported.append(f"{event} {facts}")
    )
    write_checkpoint(checkpoints, 1)
    figures: Counter[str] = Counter()
    rng = random.Random(0)
    ended = False
    point = 0
    while not ended or figures["by chance"] < 25:
        point += 1
        by_chance = ended
        first = checkpoints.list_steps()[-1] + 1
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(checkpoints, first, 4, 0 if by_chance else point, write, 2**20 if by_chance else 8)
            os._exit(0)
        os.close(write)
        if by_chance:
            time.sleep(rng.uniform(0.0, 0.08))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(read) as stream:
            acknowledged = [int(line) for line in stream]
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or os.waitstatus_to_exitcode(status) == 0, f"point {point}: status {status}"
        ended = ended or not killed
        figures["by chance" if by_chance else "at a point"] += killed or by_chance
        names = {p.name for p in checkpoints.directory.iterdir()}
        figures["left .partial"] += any(n.endswith(".partial") for n in names)
        figures["left .removing"] += any(n.endswith(".removing") for n in names)
        checkpoints.recover_directory()
        assert all(n.startswith("step-") and len(n) == 13 for n in os.listdir(checkpoints.directory)), (
            "clean left something"
        )
        newest = checkpoints.recover_newest()
        assert newest is not None
        assert newest.state.steps >= max(acknowledged, default=first - 1), (
            f"point {point}: {newest.state.steps}, {acknowledged}"
        )
        for step in checkpoints.list_steps():  # also those that are about to be removed
            open_checkpoint(checkpoints.step_path(step)).open_learner_state()
        assert killed or len(checkpoints.list_steps()) == 2
    assert not [r for r in reported if not r.startswith("checkpoint_remains_removed")], reported
    return dict(figures)


if __name__ == "__main__":
    (where,) = sys.argv[1:]
    began = time.monotonic()
    answer = kill(Path(where))
    shutil.rmtree(where)
    print(json.dumps(answer | {"seconds": round(time.monotonic() - began, 1)}))
