"""One part of a benchmark in a process of its own, with a time limit, and its progress on stderr."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

Say = Callable[[str], None]

POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
TAIL_LINES = 40
PROGRESS = "progress.txt"


class BenchError(RuntimeError):
    """A benchmark that could not be measured; the message says which part failed, and why."""


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_job(module: str, directory: Path, *, timeout: float, say: Say) -> None:
    """Run `python -P -m MODULE DIRECTORY` with one thread, and wait until it has ended.

    What the job prints goes to `DIRECTORY/log.txt`; the line that it last gave to `progress` is said when it changes.
    Raises `BenchError` with the end of the log if it fails, or takes longer than `timeout` seconds: it is then asked
    to end, and killed if it does not.
    """
    name = module.rpartition(".")[2]
    log = directory / "log.txt"
    (directory / PROGRESS).unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            # -P: a folder `tools` where the command was typed must not stand in for ours.
            [sys.executable, "-P", "-m", module, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches this process only, which then ends the job in order
        )
    deadline, shown = time.monotonic() + timeout, ""
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise BenchError(f"{name} took longer than {timeout:.0f} s; it ended with:\n{_tail(log)}")
            time.sleep(POLL_SECONDS)
            shown = _say_new(directory, shown, say)
        _say_new(directory, shown, say)
    finally:
        _end(process)
    if process.returncode:
        raise BenchError(f"{name} failed with exit code {process.returncode}:\n{_tail(log)}")


def job_main(main: Callable[[Path], None]) -> None:
    """A job's `__main__`: run `main` on the directory it was given, and end, whatever it is doing, when the benchmark has."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    main(Path(sys.argv[1]))


def progress(directory: Path, line: str) -> None:
    """Called by a job: what it is doing now."""
    scratch = directory / "progress.new"
    scratch.write_text(line)
    scratch.replace(directory / PROGRESS)


def _say_new(directory: Path, shown: str, say: Say) -> str:
    path = directory / PROGRESS
    line = path.read_text() if path.exists() else ""
    if line != shown:
        say(line)
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
