"""What every actor process does first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from r3async.checkpoint.lock import RunLock
from r3async.files import make_directory
from r3async.world import ActorLost, World
from r3async.world.processes import find_user_modules


class NotLoaded(ActorLost):
    """This process was started in place of one that died, and was told nothing yet."""


def whereabouts(world: World) -> dict[str, Any]:
    """This process's `pid` and `host`, to tell who may have to end it."""
    return {"pid": world.processes.pid, "host": world.processes.host}


def begin(world: World, run_dir: Path, role: str) -> RunLock:
    """Find the person's modules, and send what this process and its children print to `logs/ROLE.log` of the run. If its
    configuration sets `observe.prometheus_port`, serve this process's memory and CPU time.

    Returns the lock on the run's directory, shared and to be kept: nobody prepares it anew before this process has ended.
    Raises `BlockingIOError` if somebody does already: this actor is of a start that is over.
    """
    find_user_modules()
    make_directory(run_dir / "logs", files=world.files)
    lock = RunLock(run_dir, files=world.files)
    lock.shared()
    world.processes.redirect_output(run_dir / "logs" / f"{role}.log")
    world.processes.serve_figures(role, run_dir)
    return lock
