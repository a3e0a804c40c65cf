"""What may import what, as `make lint` checks it: the order of the rooms is in pyproject.toml."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = Path(sys.executable).with_name("lint-imports")


@pytest.fixture
def copy(tmp_path):
    """The packages, to plant an import in."""
    for name in ("r3async", "actors", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(directory):
    command = [LINT, "--no-logo", "--no-cache", "--config", directory / "pyproject.toml"]
    done = subprocess.run(
        command, cwd=directory, env={"PYTHONPATH": str(directory)}, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_no_import_goes_up(copy):
    code, said = lint(copy)
    assert (code, "2 kept, 0 broken" in said) == (0, True), said


@pytest.mark.parametrize(
    ("room", "planted"),
    [
        ("r3async/learner/policy_loss.py", "from r3async.actors.conductor import Conductor"),
        ("r3async/transport/sender.py", "from r3async.schedule.groups import GroupBuffer"),
        ("r3async/world/disk.py", "import r3async.record.writer"),
        ("actors/conductor.py", "import r3async.tools.cli"),
    ],
)
def test_an_import_that_goes_up_is_named(copy, room, planted):
    with (copy / room).open("a") as file:
        file.write(f"\n{planted}\n")
    code, said = lint(copy)
    importer = room.removesuffix(".py").replace("/", ".")
    upward = f"r3async.{importer.removeprefix('r3async.')} -> {planted.split()[1]}"
    assert (code, upward in said) == (1, True), said


def test_the_library_that_imports_its_workshop_is_named(copy):
    with (copy / "r3async" / "record" / "sinks.py").open("a") as file:
        file.write("\nfrom dev.frozen import main\n")
    code, said = lint(copy)
    assert (code, "r3async.record.sinks -> dev" in said) == (1, True), said
