"""Commands as a person types them, in this process: to start another for each takes half a second and more."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from r3async.tools.cli import main


class Said(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def typed(*words: str, cwd: Path, main: Callable[[], None] = main) -> Said:
    """What `r3async WORDS` says in that folder, or the program of which `main` is the entry. It leaves the import path, the
    environment and the folder of this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "argv", ["r3async", *words]),
        patch.object(sys, "path", [*sys.path]),
        patch.dict(os.environ),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    return Said(int(code), out.getvalue(), err.getvalue())
