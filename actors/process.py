"""What every actor process does first."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr, and those of its children, to `path`: logs belong to the run directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
