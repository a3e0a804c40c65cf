"""A terminal is closed while a run trains on it: the run ends in order, as by Ctrl-C, and can be continued."""

import os
import pty
import subprocess
import sys
import time
import uuid

import pytest

from r3async.checkpoint import CheckpointDirectory
from r3async.record.reading import read_json_objects
from tests.ray.test_stop_while_loading import wait_for_end

pytestmark = pytest.mark.timeout(500)

SETTINGS = ["name=closed", "steps=4000", "generator.engine=scripted", "learner.backend=scripted", "weights.probe=false"]


def until_closed(screen: int, words: bytes, seconds: float) -> None:
    """Read what is shown until `words` are, and close the terminal."""
    shown, deadline = b"", time.monotonic() + seconds
    while words not in shown:
        assert time.monotonic() < deadline, shown.decode()
        shown += os.read(screen, 4096)
    os.close(screen)


def test_a_run_on_a_terminal_that_is_closed_writes_a_checkpoint_and_ends_well(untrained, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("R3ASYNC_TEST_MARK", mark := uuid.uuid4().hex)
    monkeypatch.setenv("TERM", "xterm")
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(tmp_path), *SETTINGS]
    screen, terminal = pty.openpty()
    # A session of its own, whose terminal this is: the kernel tells all processes in it when it is closed.
    leader = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    driver = subprocess.Popen(
        [sys.executable, "-c", leader, *command, f"model.path={untrained}"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        until_closed(screen, b"3/4000", 300)
        assert driver.wait(120) == 0
    finally:
        driver.kill()
        driver.wait()
    run_dir = tmp_path / "closed"
    (ended,) = [e for e in read_json_objects(run_dir / "events.jsonl") if e["event"] in ("run_finished", "run_failed")]
    assert ended["stopped"]
    assert CheckpointDirectory(run_dir / "checkpoints").list_steps()[-1] == ended["steps"] >= 3
    assert (run_dir / "report.html").exists()
    wait_for_end(mark)
