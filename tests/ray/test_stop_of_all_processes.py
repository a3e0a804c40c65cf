"""A service manager stops a run by a signal to all of its processes: the command alone obeys, and ends the others."""

import os
import shutil
import signal
import stat
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from r3async.checkpoint import CheckpointDirectory
from r3async.record.reading import read_json_objects
from tests.ray.test_stop_while_loading import marked, under_timeout, wait_for, wait_for_end

pytestmark = pytest.mark.timeout(500)

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "steps": 4000,
    "generator.engine": "scripted",
    "learner.backend": "scripted",
    "weights.probe": False,
    "name": "stopped",
}


@pytest.fixture
def start(untrained, tmp_path, monkeypatch):
    """The mark of a run's processes, and its command from the command line and from Python."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("R3ASYNC_TEST_MARK", mark := uuid.uuid4().hex)
    # Outside pytest's own folder, because a path of a Unix socket has at most 107 bytes.
    monkeypatch.setenv("TMPDIR", home := tempfile.mkdtemp(prefix="r3"))
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    settings = {**SETTINGS, "model.path": str(untrained)}
    words = [f"{name}={str(value).lower() if value is False else value}" for name, value in settings.items()]
    script = tmp_path / "script.py"
    script.write_text(
        f"import r3async\nprint('returned', r3async.train('quickstart', runs={str(tmp_path)!r}, **{settings!r}))\n"
    )
    commands = {
        "command line": [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(tmp_path), *words],
        "Python": [sys.executable, str(script)],
    }
    yield mark, commands
    names = {path.name for path in Path(home).iterdir() if not path.name.startswith((".", "torch"))}
    assert names == {"ray"}
    assert stat.S_IMODE(Path(home, ".ray", "auth_token").stat().st_mode) == 0o600
    shutil.rmtree(home, ignore_errors=True)


def signal_all(mark: str, number: signal.Signals) -> None:
    for process in marked(mark):
        if process.pid != os.getpid():
            process.send_signal(number)


@pytest.mark.parametrize("face", ["command line", "Python"])
def test_a_run_is_stopped_by_a_signal_to(face, start, tmp_path):
    """The group, as `timeout` signals it, and every single process, as systemd and Slurm do."""
    mark, commands = start
    screen, run_dir = tmp_path / "screen", tmp_path / "stopped"
    with under_timeout(commands[face], screen) as driver:
        wait_for(lambda: "3/4000" in screen.read_text(), driver, screen)
        listening = [
            address.laddr.ip
            for process in marked(mark)
            for address in process.net_connections()
            if address.status == psutil.CONN_LISTEN
        ]
        if face == "Python":
            driver.send_signal(signal.SIGTERM)
        else:
            signal_all(mark, signal.SIGTERM)
        assert driver.wait(120) == 0, screen.read_text()
    assert "Traceback" not in screen.read_text()
    assert ("returned" in screen.read_text()) == (face == "Python")
    (ended,) = [e for e in read_json_objects(run_dir / "events.jsonl") if e["event"] in ("run_finished", "run_failed")]
    assert ended["stopped"]
    assert CheckpointDirectory(run_dir / "checkpoints").list_steps()[-1] == ended["steps"] >= 3
    assert (run_dir / "model").exists()
    assert (run_dir / "report.html").exists()
    wait_for_end(mark)
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, "a Ray of this machine is for this machine"


def test_a_python_program_is_stopped_while_it_loads(start, tmp_path):
    mark, commands = start
    screen = tmp_path / "screen"
    with under_timeout(commands["Python"], screen) as driver:
        wait_for(lambda: "loading learner" in screen.read_text(), driver, screen)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120) == 1, screen.read_text()
    assert "before a step was made; to resume: the same command with name=stopped" in screen.read_text()
    wait_for_end(mark)


def test_a_run_is_stopped_while_vllm_loads(start, tmp_path):
    mark, _ = start
    screen, home = tmp_path / "screen", Path(os.environ["TMPDIR"])
    words = ["train", "quickstart", "--runs", str(tmp_path), "model.init.max_warm_steps=1", "model.init.warm_reward=0"]
    with under_timeout([sys.executable, "-m", "r3async", *words], screen) as driver:
        wait_for(lambda: any(home.glob("r3async-engine-*")), driver, screen)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120) == 130, screen.read_text()
    wait_for_end(mark)


def test_no_process_of_a_run_outlives_a_command_that_is_killed(start, tmp_path):
    mark, commands = start
    screen = tmp_path / "screen"
    with under_timeout(commands["command line"], screen) as driver:
        wait_for(lambda: "loading learner" in screen.read_text(), driver, screen)
        psutil.Process(driver.pid).children()[0].kill()
        driver.wait(120)
    wait_for_end(mark)
