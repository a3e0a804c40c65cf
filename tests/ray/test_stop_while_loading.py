"""SIGTERM to all processes of the command before the first step, at each of the calls that take long: the command ends at
once, and leaves no process behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from r3async.config import load_config
from r3async.record.reading import read_json_objects
from r3async.tools.cli import INTERRUPTED_EXIT_CODE
from r3async.tools.run_dir import open_named_run

pytestmark = pytest.mark.timeout(500)

PHASES = {
    "the model is made": "loading torch",
    "Ray starts": "starting Ray",
    "the actors load": "loading learner",
    "vLLM loads": "loading engine",
}


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("R3ASYNC_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_end(mark: str) -> None:
    """Wait until no process with this mark is left, but this one."""
    deadline = time.monotonic() + 240
    while left := [p for p in marked(mark) if p.pid != os.getpid()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


@contextlib.contextmanager
def under_timeout(command: list[str], screen: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command under `timeout`, which passes a signal to the command and then to all processes of its group. What is
    left of the group in the end is killed."""
    with screen.open("w") as file:
        driver = subprocess.Popen(["timeout", "600", *command], stdout=file, stderr=file, start_new_session=True)
    try:
        yield driver
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def wait_for(
    condition: Callable[[], bool], driver: subprocess.Popen[bytes], screen: Path, seconds: float = 300
) -> None:
    """Wait for a condition while the driver runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert driver.poll() is None, screen.read_text()
        assert time.monotonic() < deadline, screen.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_is_obeyed_while(phase, warm_model, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    mark = uuid.uuid4().hex
    monkeypatch.setenv("R3ASYNC_TEST_MARK", mark)
    if phase == "the model is made":  # and not kept by an earlier run
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["name=stopped"]
    words += ["generator.engine=scripted", "weights.probe=false"] * (phase != "vLLM loads")
    words += [f"model.path={warm_model}"] * (phase != "the model is made")
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(tmp_path), *words]
    screen = tmp_path / "screen"
    with under_timeout(command, screen) as driver:
        wait_for(lambda: PHASES[phase] in screen.read_text(), driver, screen)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120) == INTERRUPTED_EXIT_CODE, screen.read_text()
    said = screen.read_text()
    assert "stopped" in said
    assert "to resume: the same command with name=stopped" in said
    assert "Traceback" not in said
    wait_for_end(mark)
    # The same command is let in again, with nothing that this start left half made.
    run = open_named_run(load_config("quickstart", words), "quickstart", print, tmp_path)
    run.lock.close()
    assert run.resume_from is None
    assert not [e for e in read_json_objects(tmp_path / "stopped" / "events.jsonl") if e["event"] == "run_failed"]
