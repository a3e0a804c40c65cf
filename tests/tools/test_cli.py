"""Commands as a person types them: what can be mended is one line on stderr and exit code 2."""

import os
import signal
import sys
import tomllib
from pathlib import Path

import pytest

from r3async.actors.process import NotTrained, ProcessLost, RunFailed, StoppedBeforeStep
from r3async.checkpoint import CheckpointError
from r3async.checkpoint.manifest import CheckpointUnreadable
from r3async.config import ConfigError
from r3async.tools.cli import main
from r3async.tools.training_session import StoppedWhileLoading, StopRequest, handle_stop_signals
from tests.helpers.cli import run_program


def test_presets_are_listed_with_the_place_of_their_files(tmp_path):
    listed = run_program([sys.executable, "-m", "r3async", "train", "--list"], cwd=tmp_path)
    assert listed.stdout.startswith("quickstart")
    files = Path(listed.stdout.splitlines()[-1].removeprefix("Their files are in "))
    assert tomllib.loads((files / "quickstart.toml").read_text())["env"]["name"] == "reverse-text"


def test_the_first_signal_asks_and_the_second_interrupts_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest()
    request.is_loading = False
    with handle_stop_signals(request):
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    with handle_stop_signals(StopRequest()), pytest.raises(StoppedWhileLoading):
        os.kill(os.getpid(), signal.SIGTERM)


def test_the_same_signal_twice_at_once_is_one_request_and_later_a_second_one(monkeypatch):
    """`timeout` sends its signal to the command, and then to the group of the command."""
    now = 100.0
    monkeypatch.setattr("r3async.tools.training_session.time.monotonic", lambda: now)
    request = StopRequest()
    with handle_stop_signals(request):
        with pytest.raises(StoppedWhileLoading):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        now += 2.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def terminal():
    """SIGHUP as a terminal has it, also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
def test_a_closed_terminal_asks_once_however_often_it_is_told_and_nohup_is_let_be():
    request = StopRequest()
    request.is_loading = False
    with handle_stop_signals(request):
        for _ in range(2):  # of the kernel and of the shell
            os.kill(os.getpid(), signal.SIGHUP)
        assert request.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_stop_signals(request := StopRequest()):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not request.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.long
def test_a_module_beside_which_a_run_is_started_is_found_and_hides_none_of_ours(tmp_path):
    (tmp_path / "my_losses.py").write_text("def reinforce(inputs): ...\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    script = Path(sys.executable).with_name("r3async")
    for loss, said in [
        ("my_losses:reinforce", "returns a NoneType"),
        ("my_losses:other", "cannot be loaded"),
    ]:
        words = (script, "train", "quickstart", "--dry-run", f"algorithm.policy_loss={loss}")
        done = run_program(words, cwd=tmp_path, timeout=240)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (CheckpointUnreadable("the disk does not give it"), 2),
        (RunFailed("the learner is lost"), 1),
        (ProcessLost("the learner is lost"), 1),
        (ConfigError("`steps` must be greater than 0"), 2),
        (CheckpointError("no checkpoint is intact"), 2),
        (FileExistsError("runs/a exists"), 2),
        (NotTrained("no step made an update"), 4),
        (StoppedBeforeStep("stopped before a step was made"), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_code_of_train_says_how_it_ended(error, code, tmp_path, monkeypatch, capsys):
    def end(*given, **options):
        if error is not None:
            raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("r3async.tools.training_session.train", end)
    monkeypatch.setattr(sys, "argv", ["r3async", "train", "quickstart"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code
    assert str(error or "") in capsys.readouterr().err
