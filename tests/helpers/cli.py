"""Commands as a user types them, run in this process: starting another for each takes half a second and more."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from rich.console import Console

from r3async.tools.cli import main


class Said(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def typed(*words: str, cwd: Path, main: Callable[[], None] = main) -> Said:
    """Return the output of `r3async WORDS` in that folder, or of the program of which `main` is the entry.

    Import path, environment and folder of this process stay as they are.
    """
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


def run_program(
    words: Iterable[object],
    *,
    cwd: Path,
    timeout: float = 120.0,
    environment: Mapping[str, str] = os.environ,
    **variables: str,
) -> Said:
    """Return the output of a program in that folder, with these variables in its environment."""
    command = [str(word) for word in words]
    variables = {**environment, **variables}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


def printed(renderable: object, width: int = 120) -> str:
    """Return what a console of that width shows."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()
