"""What every actor process does first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

USER_PATH = "R3ASYNC_USER_PATH"
"""Environment variable that tells an actor where the person's own modules are: where the run was started."""


def environment(threads: int) -> dict[str, str]:
    """Environment variables of an actor that computes with that many threads."""
    return {"OMP_NUM_THREADS": str(threads), USER_PATH: os.environ.get(USER_PATH, os.getcwd())}


def find_user_modules() -> None:
    """Let `module:name` of a configuration name a module beside which the run was started. Ours come first."""
    path = os.environ.get(USER_PATH, os.getcwd())
    if path not in sys.path:
        sys.path.append(path)


def begin(path: Path) -> None:
    """Find the person's modules, and send this process's stdout and stderr, and those of its children, to `path`: logs belong
    to the run directory."""
    find_user_modules()
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
