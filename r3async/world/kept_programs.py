"""Programs that end with what they started, and processes that end with their owner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

from r3async.world import keeper


class KeptProgram:
    """A running program that is ended with everything that it started, in whatever session, group
    or environment (`keeper.py`): by `end`, and when this process ends, even by SIGKILL.

    Signals that are blocked in this process are not blocked in the program, whose
    standard input is empty.

    Args:
        words: Program and arguments. If it cannot be run, its exit code is 127.
        grace: Seconds between SIGTERM and SIGKILL in `end`; 0 to kill at once.
        pass_fds: Descriptors that the program inherits.
        options: Further arguments of `subprocess.Popen`.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        grace: float = 0.0,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ):
        lifeline, self._lifeline = os.pipe()
        self._report, report = os.pipe()
        os.set_blocking(self._report, False)
        settings = json.dumps(
            {"lifeline": lifeline, "report": report, "passed": list(pass_fds), "grace": grace}
        )
        self._grace = grace
        self._said = b""
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(keeper.__file__), settings, *words],
                stdin=subprocess.DEVNULL,
                pass_fds=[lifeline, report, *pass_fds],
                start_new_session=True,
                **options,
            )
        except BaseException:
            os.close(self._lifeline)
            os.close(self._report)
            raise
        finally:
            os.close(lifeline)
            os.close(report)

    @property
    def keeper_pid(self) -> int:
        """The id of the keeper, of which all processes of the program are descendants."""
        return self._keeper.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the program's exit code, negative for the signal that ended it; None if it has not
        ended within `timeout` seconds. What it started may still run."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._parse_exit_code()) is None and self._read_report(deadline):
            pass
        return code

    async def wait_async(self) -> int | None:
        """Return the program's exit code as `wait` does. None if the keeper was killed, and the
        program with it."""
        while (code := self._parse_exit_code()) is None and await self._read_report_async():
            pass
        return code

    def end(self) -> None:
        """End everything that is left of the program, and wait until it has ended. Idempotent."""
        if self._close_lifeline():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(self._grace + 2 * keeper.KILL_SECONDS)
            self.wait(0.0)
            self._close_report()

    async def end_async(self) -> None:
        """End everything that is left of the program, as `end` does."""
        if self._close_lifeline():
            try:
                async with asyncio.timeout(self._grace + 2 * keeper.KILL_SECONDS):
                    while await self._read_report_async():
                        pass
            except TimeoutError:
                return
            finally:
                self._close_report()
            self._keeper.wait()  # which has closed its report, and so ends

    def _close_lifeline(self) -> bool:
        """Ask the keeper to end everything. Returns False if it was asked before."""
        lifeline = self._lifeline
        self._lifeline = -1
        if lifeline >= 0:
            os.close(lifeline)
        return lifeline >= 0

    def _close_report(self) -> None:
        os.close(self._report)
        self._report = -1

    def _parse_exit_code(self) -> int | None:
        _, *code = self._said.split(b"\n")[:-1] or [b""]
        return int(code[0]) if code else None

    def _read_report(self, deadline: float | None = None) -> bool:
        """Read what the keeper reports next. Returns False if it has ended, or reports nothing
        before `deadline`."""
        if self._report < 0:
            return False
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        if not poll.poll(
            None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())
        ):
            return False
        return self._read_available_report()

    async def _read_report_async(self) -> bool:
        """Read what the keeper reports next, as `_read_report` does."""
        if self._report < 0:
            return False
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        # A descriptor has one reader in an event loop: calls that overlap would
        # remove each other's.
        descriptor = os.dup(self._report)
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._read_available_report()

    def _read_available_report(self) -> bool:
        if self._report < 0:  # another call saw the end
            return False
        try:
            said = os.read(self._report, 256)
        except BlockingIOError:  # another call read it
            return True
        self._said += said
        return bool(said)


def list_process_trees(pids: Sequence[int]) -> list[psutil.Process]:
    """Return these processes and all that they started, in whatever session, except that whose
    parent has ended."""
    found = dict[psutil.Process, None]()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found |= dict.fromkeys([root, *root.children(recursive=True)])
    return list(found)


def kill_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=keeper.KILL_SECONDS)


def exit_with_owner(owner_pid: int) -> None:
    """Start a daemon thread that ends this process as soon as process `owner_pid` has ended, for
    whatever reason.

    An owner that is killed cannot clean up, and nothing else would ever end this process.
    """

    def watch_owner() -> None:
        _wait_for_exit(owner_pid)
        os._exit(1)

    threading.Thread(target=watch_owner, name="r3async-owner-watch", daemon=True).start()


def _wait_for_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel or sandbox
        while _process_exists(pid):
            time.sleep(1.0)
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not poller.poll(60_000):
        pass


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
