"""The keeper of a program: a process between us and the program that ends everything which the
program started, in whatever session, group or environment, and also when we are killed.

It runs as a separate program (`python -I -S keeper.py SETTINGS COMMAND…`), so it imports only
the standard library. Descendants whose parent has ended become its children, as it is a
subreaper (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

STOP_SIGNALS = frozenset([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
"""Signals that request the end of a run. Service managers send them to every
process of a command."""
KILL_SECONDS = 10.0
"""Seconds within which killed processes have ended."""
NO_PROGRAM_EXIT_CODE = 127
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Options of prctl(2): the signal that is sent when the parent ends, and becoming the parent of
orphaned descendants."""
_POLL_SECONDS = 0.01
_OWNER_CHECK_SECONDS = 1.0
"""Seconds between two checks that the owner lives: a process that it forked may hold
the lifeline open."""


def main() -> None:
    """Run a program until its owner closes the lifeline or ends, and then end all
    that is left of it.

    Settings: `lifeline`, a descriptor that is read; `report`, a descriptor to which the program's
    process id and its exit code are written, a line each; `passed`, descriptors for the program
    alone; and `grace`, seconds between SIGTERM and SIGKILL. All processes of the program have ended
    when `report` is closed.
    """
    settings = json.loads(sys.argv[1])
    owner = os.getppid()
    lifeline = settings["lifeline"]
    report = settings["report"]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)
    for descriptor in (lifeline, report):
        os.set_inheritable(descriptor, False)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    program = os.fork()
    if program == 0:
        _become_program(sys.argv[2:])
    # Or their other ends would not notice the end of the program.
    for descriptor in settings["passed"]:
        os.close(descriptor)
    os.write(report, b"%d\n" % program)
    poll = select.poll()
    for descriptor in (lifeline, woken):
        poll.register(descriptor, select.POLLIN)
    while os.getppid() == owner:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * _OWNER_CHECK_SECONDS)}
        if woken in ready:
            os.read(woken, 4096)
            _reap_children(program, report)
        if lifeline in ready:
            break
    _end_children(program, report, settings["grace"])


def _call_prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _become_program(words: list[str]) -> None:
    os.setsid()
    _call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # of the keeper
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    try:
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(NO_PROGRAM_EXIT_CODE)


def _reap_children(program: int, report: int) -> bool:
    """Reap the children that have ended, and report the program's exit code. Returns False if
    no child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == program:
            with contextlib.suppress(OSError):  # the owner has ended
                os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))


def _end_children(program: int, report: int, grace: float) -> None:
    now = time.monotonic()
    told = set[int]()
    while _reap_children(program, report) and time.monotonic() < now + grace + KILL_SECONDS:
        killing = time.monotonic() >= now + grace
        for pid in list_descendants(os.getpid()):
            if killing or pid not in told:
                told.add(pid)
                _send_signal(pid, signal.SIGKILL if killing else signal.SIGTERM)
        time.sleep(_POLL_SECONDS)


def list_descendants(pid: int) -> list[int]:
    """Return the ids of the processes that process `pid` started, and that these started; parents
    come first. Those whose parent has ended are not among them. Linux only."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):  # it has ended
            for thread in Path(f"/proc/{each}/task").iterdir():
                with contextlib.suppress(OSError):
                    found += map(int, (thread / "children").read_text().split())
    return found[1:]


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
