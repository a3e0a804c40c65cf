"""Each recipe of examples/ runs to its end as its page says, in a folder of its own, with fewer steps."""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from r3async.config import load_config
from r3async.record.reading import read_json_objects
from tests.helpers.cli import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
STEPS = 2
NOT_TRAINED = 4
"""Exit code of a run of which no step made an update."""


def read_commands(recipe, run=""):
    """The commands of the section that a machine without a GPU runs; of those that train, `run`, or all."""
    page = (EXAMPLES / recipe / "README.md").read_text()
    (block,) = re.findall(r"^## On two CPU cores\n\n```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [line for line in block.splitlines() if not line.startswith("r3async train") or run in line]


@contextlib.contextmanager
def serving_beside(recipe, folder):
    """Run the server that a recipe has in a second terminal."""
    if recipe != "openenv":
        yield
        return
    pytest.importorskip("openenv", reason="openenv-core is not installed: pip install -e '.[openenv]'")
    (port,) = re.findall(r"127\.0\.0\.1:(\d+)", (folder / "tiny.toml").read_text())
    server = subprocess.Popen([sys.executable, "server.py"], cwd=folder)
    try:
        deadline = time.monotonic() + 120
        while server.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
                break
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait(120)


NIGHTLY = {"agent", "code", "environments", "harbor", "math", "tools"}
"""Recipes whose environments and rewards have tests of their own, and whose runs go the way of the other recipes."""
RUNS = [
    pytest.param(recipe, run, marks=[pytest.mark.nightly] if recipe in NIGHTLY else [])
    for recipe in RECIPES
    for line in read_commands(recipe)
    if line.startswith("r3async train") and (run := line.removeprefix("r3async train ").split()[0])
]


def test_the_index_has_every_recipe():
    index = (EXAMPLES / "README.md").read_text()
    assert re.findall(r"^\| \[\w+\]\((\w+)\)", index, re.MULTILINE) == RECIPES


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.toml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_configuration_of_a_recipe_is_right(path):
    assert load_config(str(path)).steps > STEPS


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recipe", "run"), RUNS)
def test_a_recipe_runs_to_its_end_as_its_page_says(recipe, run, tmp_path):
    """A run whose tiny model earns nothing has a comment that says so: it ends without an update."""
    folder = shutil.copytree(EXAMPLES / recipe, tmp_path / recipe)
    path, printed, trained = f"{Path(sys.executable).parent}:/usr/bin:/bin", "", True
    with serving_beside(recipe, folder):
        for line in read_commands(recipe, run):
            command, expected = line.partition("#")[0], 0
            if command.startswith("r3async train"):
                command += f" steps={STEPS}"
                trained = "exit code 4" not in line
                expected = 0 if trained else NOT_TRAINED
            done = run_program(["bash", "-c", command], cwd=folder, timeout=800, PATH=path)
            printed += done.stdout
            assert done.returncode == expected, f"{command}\n{done.stdout}{done.stderr}"
    (made,) = (path for path in (folder / "runs").iterdir() if not path.is_symlink())
    assert [row["step"] for row in read_json_objects(made / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert (made / "model" / "config.json").is_file() == trained, "what learnt nothing is no trained model"
    assert ("difference: " in printed) == (recipe == "math")
