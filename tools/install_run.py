"""Programs of the installer, run with visible progress: never a silence, the important lines only, all in the log."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tools.install_state import inspect_venv

HEARTBEAT = 5.0


class Progress:
    """Numbered steps with the time since the start. On a terminal the newest status line is rewritten in place."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step, self.started, self.last, self.open = steps, 0, time.monotonic(), 0.0, False
        self.live = sys.stdout.isatty()

    def _write(self, text: str, end: str) -> None:
        sys.stdout.write(("\r\x1b[K" if self.open else "") + text + end)
        sys.stdout.flush()
        self.last, self.open = time.monotonic(), end == ""

    def next(self, text: str) -> None:
        self.step += 1
        self._write(f"[{self.step}/{self.steps}] {time.monotonic() - self.started:6.1f}s  {text}", "\n")

    def say(self, text: str) -> None:
        self._write(f"      {time.monotonic() - self.started:6.1f}s    {text}", "\n")

    def status(self, text: str) -> None:
        """A sign of life: at once on a terminal, else when nothing was printed for a while."""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"      {time.monotonic() - self.started:6.1f}s    {text}"[:width], "")
        elif time.monotonic() - self.last >= HEARTBEAT:
            self.say(text)


def _die_with_parent() -> None:
    # A killed installer must not leave a pip behind that goes on writing into `.venv`. Linux only; elsewhere the lock
    # that pip inherits makes the next call wait for it.
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def stream(
    command: list[str], folder: Path, on_line: Callable[[str], None], on_silence: Callable[[], None], lock: int = -1
) -> int:
    """Run a program, its lines to `on_line` as they come; `on_silence` is called each second. Returns the exit code."""
    misleading = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in misleading}
    environment.update(PYTHONUNBUFFERED="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PIP_USER="0")
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,) if lock >= 0 else (),
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )
    assert process.stdout is not None
    try:
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(timeout=1.0):
                    on_silence()
                    continue
                data = os.read(process.stdout.fileno(), 65536)
                *lines, rest = (rest + data).split(b"\n")
                for line in [*lines, rest] if not data else lines:
                    on_line(line.decode(errors="replace").rstrip())
                if not data:
                    return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class PipWatcher:
    """Turns pip's output into a few lines for a person: what is big, what is wrong, how far it is."""

    def __init__(self, venv: Path, progress: Progress, log: Path, lock: int) -> None:
        self.venv, self.progress, self.log, self.lock = venv, progress, log, lock
        self.begin()

    def begin(self) -> None:
        self.lines: list[str] = []
        self.collected, self.current, self.to_install, self.before = 0, "", 0, 0

    def __call__(self, arguments: list[str]) -> tuple[int, list[str]]:
        self.begin()
        with self.log.open("a") as log:
            log.write(f"$ pip {' '.join(arguments)}\n")

            def on_line(line: str) -> None:
                log.write(line + "\n")
                log.flush()
                self.lines.append(line)
                self.on_line(line.strip())

            command = [str(self.venv / "bin/python"), "-m", "pip", *arguments]
            return stream(command, self.venv.parent, on_line, self.on_silence, self.lock), self.lines

    def on_line(self, line: str) -> None:
        big = re.match(r"(?:Downloading|Using cached) (?:\S*/)?([^\s/]+?)-([^\s-]+)-\S+ \(([\d.]+) (MB|GB)\)", line)
        if line.startswith("Collecting "):
            self.collected, self.current = self.collected + 1, line.split()[1]
            self.progress.status(f"resolving: {self.collected} packages so far, now {self.current}")
        elif big and (big.group(4) == "GB" or float(big.group(3)) >= 20):
            self.current = f"{big.group(1)} {big.group(2)} ({big.group(3)} {big.group(4)})"
            self.progress.say(f"getting {self.current}")
        elif line.startswith("Installing collected packages:"):
            self.to_install = line.count(",") + 1
            self.before = len(inspect_venv(self.venv).distributions)
            self.progress.say(f"unpacking {self.to_install} packages")
        elif line.startswith(("ERROR", "Building wheel")):
            self.progress.say(line[:200])

    def on_silence(self) -> None:
        if self.to_install:
            done = len(inspect_venv(self.venv).distributions) - self.before
            self.progress.status(f"unpacked {max(0, min(done, self.to_install))} of {self.to_install} packages")
        else:
            self.progress.status(f"waiting for {self.current or 'pip'} ({self.collected} packages so far)")
