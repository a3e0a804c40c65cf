"""The program `r3async`: run the command line and end the process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from r3async.world.processes import exit_with_owner

from .cli import main


def run_program() -> NoReturn:
    """Run the command that `sys.argv` names, and end this process with its exit code."""
    try:
        main()
    except SystemExit as ended:
        end_process(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    end_process(0)


def run_owned_program(owner_pid: int, words: Sequence[str]) -> NoReturn:
    """Run the command `words` in this process, which ends with process `owner_pid`: a run of a sweep."""
    exit_with_owner(owner_pid)
    sys.argv = ["r3async", *words]
    run_program()


def end_process(code: int) -> NoReturn:
    """End this process quickly.

    The interpreter would free every object of torch and transformers, which takes a second of a dry run for memory
    that the system reclaims anyway. If Ray or a non-daemon thread is in this process, it ends as usual.
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


if __name__ == "__main__":
    run_owned_program(int(sys.argv[1]), sys.argv[2:])
