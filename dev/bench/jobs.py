"""Helpers that benchmarks share: jobs in separate processes, with a time limit and progress on
stderr; whole runs in one; memory."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from r3async.config import Config, config_from_dict, config_to_dict
from r3async.record.reading import read_json_objects

PrintLine = Callable[[str], None]
T = TypeVar("T")

POLL_SECONDS = 0.2
STOP_SECONDS = 20.0
TAIL_LINES = 40
JOB_FILE = "job.json"
ANSWER_FILE = "done.json"
PROGRESS_FILE = "progress.txt"
LOG_FILE = "log.txt"


class BenchError(RuntimeError):
    """A failed measurement; the message says which part failed, and why."""


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_job(
    target: str,
    job: Any,
    answer: type[T],
    directory: Path,
    *,
    timeout: float,
    print_line: PrintLine,
) -> T:
    """Call `target` ("module:function") with `job` and `directory` in a process with one thread,
    and return its answer.

    `directory` is created if it does not exist. The job's output goes to `log.txt` there; the line
    that it last passed to `report_progress` is passed to `print_line` when it changes. Raises
    `BenchError` with the end of the log if the job fails or takes longer than `timeout` seconds. In
    the latter case it is asked to end, and killed if it does not.
    """
    name = target.partition(":")[0].rpartition(".")[2]
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (ANSWER_FILE, PROGRESS_FILE):
        (directory / stale).unlink(missing_ok=True)
    (directory / JOB_FILE).write_bytes(msgspec.json.encode(job))
    log = directory / LOG_FILE
    # -P: a folder `tools` in the current directory must not shadow ours.
    command = [sys.executable, "-P", "-m", "dev.bench.jobs", target, str(directory)]
    deadline = time.monotonic() + timeout
    shown = ""
    with start_process(
        command, log, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
    ) as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"{name} took longer than {timeout:.0f} s; it ended with:\n{_read_tail(log)}"
                )
            time.sleep(POLL_SECONDS)
            shown = _print_new_progress(directory, shown, print_line)
        _print_new_progress(directory, shown, print_line)
    if process.returncode:
        raise BenchError(f"{name} failed with exit code {process.returncode}:\n{_read_tail(log)}")
    return msgspec.json.decode((directory / ANSWER_FILE).read_bytes(), type=answer)


@contextlib.contextmanager
def start_process(
    command: Sequence[str],
    log: Path,
    *,
    patience: float = STOP_SECONDS,
    folder: Path | None = None,
    **environment: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that ends with the block: it is asked to end, and killed after
    `patience` seconds."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, **environment},
            # A Ctrl-C reaches this process only, which then ends the job in order.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                try:
                    process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[None]:
    """Make SIGTERM in this block end the processes of `start_process` too, which would
    otherwise be left behind."""

    def exit_on_signal(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report_progress(directory: Path, line: str) -> None:
    """Report the current work of a job; called by the job."""
    scratch = directory / "progress.new"
    scratch.write_text(line)
    scratch.replace(directory / PROGRESS_FILE)


def reset_memory_peak() -> float:
    """Restart the peak of this process's memory, `VmHWM`, if the kernel allows it (proc(5),
    `clear_refs`), and return its resident memory in MiB: what a peak is to be compared with."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return memory_mib("VmRSS")


def memory_mib(field: str) -> float:
    """Return the resident memory of this process in MiB: `VmRSS` for the current value,
    `VmHWM` for the peak."""
    return int(Path("/proc/self/status").read_text().partition(f"{field}:")[2].split()[0]) / 1024


# -- whole runs ------------------------------------------------------------------------------------


def train_in_process(
    config: Config, directory: Path, *, timeout: float, print_line: PrintLine
) -> list[dict[str, Any]]:
    """Make the run `directory/NAME` that `config` names in a separate process, and return its
    metrics, one row per step. Raises `BenchError`."""
    run_job(
        "dev.bench.jobs:train_in_job",
        config_to_dict(config),
        type(None),
        directory,
        timeout=timeout,
        print_line=print_line,
    )
    rows = read_json_objects(directory / config.name / "metrics.jsonl")
    if len(rows) != config.steps:
        raise BenchError(f"the run made {len(rows)} of {config.steps} steps; see {directory}")
    return rows


def train_in_job(job: dict[str, Any], directory: Path) -> None:
    """Train in the job's process. The run's output is kept in `console.txt`."""
    from r3async.tools.training_session import train

    with (directory / "console.txt").open("w") as file:
        train(config_from_dict(job), "bench", Console(file=file), root=directory)


# -- a job's process -------------------------------------------------------------------------------


def _print_new_progress(directory: Path, shown: str, print_line: PrintLine) -> str:
    path = directory / PROGRESS_FILE
    line = path.read_text() if path.exists() else ""
    if line != shown:
        print_line(line)
    return line


def _read_tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def main(target: str, directory: Path) -> None:
    """Run in the job's process: measure, and write the answer. The process exits as soon as the
    benchmark has ended."""
    parent = os.getppid()

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    module, _, name = target.partition(":")
    measure = getattr(importlib.import_module(module), name)
    kind = inspect.signature(measure, eval_str=True).parameters["job"].annotation
    job = msgspec.json.decode((directory / JOB_FILE).read_bytes(), type=kind)
    (directory / ANSWER_FILE).write_bytes(msgspec.json.encode(measure(job, directory)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
