"""The program `r3async`: run the command line and end the process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from .cli import main


def run_program() -> NoReturn:
    """Run the command that `sys.argv` names, and end this process with its exit code."""
    try:
        main()
    except SystemExit as ended:
        end_process(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    end_process(0)


def end_process(code: int) -> NoReturn:
    """End this process quickly.

    The interpreter would free every object of torch and transformers, which takes a second of a dry
    run for memory that the system reclaims anyway. If Ray or a non-daemon thread is in this
    process, it ends as usual.
    """
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if "torch" in sys.modules and "ray" not in sys.modules and not others:
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # the reader is gone; the interpreter handles that
            sys.exit(code)
        os._exit(code)
    sys.exit(code)
