"""The program `r3async`: the command line as a process of its own, with its end."""

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
    """End this process. The interpreter would take apart what torch and transformers made, object by object: a second of a dry
    run, for memory that the system takes back anyway. Where Ray or a thread that must end is in this process, it ends as usual.
    """
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if "torch" in sys.modules and "ray" not in sys.modules and not others:
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads any more: the interpreter has its own way for that
            sys.exit(code)
        os._exit(code)
    sys.exit(code)
