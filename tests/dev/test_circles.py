"""What may import what, as `make lint` checks it: in the order of pyproject.toml, and in no circle."""

import shutil
import sys
from pathlib import Path

import pytest

from dev.lint import circles
from dev.lint.circles import check_package
from tests.helpers.cli import run_program

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
    done = run_program(command, cwd=directory, PYTHONPATH=str(directory))
    return done.returncode, done.stdout + done.stderr


def test_no_import_goes_up(copy):
    code, said = lint(copy)
    assert (code, "2 kept, 0 broken" in said) == (0, True), said


@pytest.mark.parametrize(
    ("room", "planted"),
    [
        ("r3async/learner/policy_loss.py", "from r3async.actors.conductor import Conductor"),
        ("r3async/transport/sender.py", "from r3async.schedule.groups import GroupBuffer"),
        ("r3async/world/disk.py", "import r3async.record.step_writer"),
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


def find_circles(directory):
    return run_program([sys.executable, "-m", "dev.lint.circles"], cwd=directory, PYTHONPATH=f"{directory}:{ROOT}")


def test_no_files_import_each_other_in_a_circle():
    assert check_package("r3async") == []


@pytest.mark.parametrize(
    ("file", "planted", "back"),
    [
        ("r3async/world/disk.py", "from r3async.world.real import REAL_WORLD", "r3async.world.real"),
        ("r3async/learner/results.py", "from r3async.learner import build_learner", "r3async.learner"),
        ("tools/tail/lines.py", "from .remote import tail_remote", "r3async.tools.tail.remote"),
    ],
    ids=["a module", "the package's own", "relative"],
)
def test_an_import_that_closes_a_circle_is_named_also_within_a_function(copy, file, planted, back):
    line = len((copy / file).read_text().splitlines()) + 2
    with (copy / file).open("a") as out:
        out.write(f"def late():\n    {planted}\n")
    done = find_circles(copy)
    importer = f"r3async.{file.removesuffix('.py').replace('/', '.').removeprefix('r3async.')}"
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    assert f"{importer}, line {line}: {planted}" in said
    assert f"{back}, line " in said


def test_an_import_for_types_alone_closes_a_circle_too(copy):
    with (copy / "r3async/world/disk.py").open("a") as file:
        file.write(
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from r3async.world.real import RealWorld\n"
        )
    done = find_circles(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "from r3async.world.real import RealWorld" in done.stdout


def test_an_exception_that_is_not_needed_is_named(monkeypatch):
    monkeypatch.setitem(circles.TYPES_ALONE, ("r3async.learner.loss", "r3async.learner.backend"), "it is no import")
    (said,) = check_package("r3async")
    assert said.startswith("r3async.learner.loss does not import r3async.learner.backend for types alone")
