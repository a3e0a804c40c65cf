"""A disk without free bytes: a run does not start on it, and small files of a run that meets one never end it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dev.chaos.filling import top_up
from dev.chaos.scenarios import FullDisk
from r3async.config import ConfigError
from r3async.rollout.agent_player import _write_private_file
from r3async.world.real import REAL_WORLD
from r3async.world.stack_dumps import dump_stacks


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 20 MB."""
    try:
        with FullDisk.provide_directory(tmp_path) as place:
            yield place
    except ConfigError as error:
        pytest.skip(str(error))


def fill(directory: Path) -> Path:
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        top_up(file.fileno())
    return ballast


def train_quickstart(runs: Path, *words: str) -> str:
    """Return what a run that cannot begin says."""
    command = [sys.executable, "-m", "r3async", "train", "quickstart", "--runs", str(runs), "name=x", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=os.environ | {"COLUMNS": "400"})
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.long
def test_a_run_on_a_full_disk_is_refused_at_once_with_path_free_bytes_and_what_is_needed(small_disk):
    fill(small_disk)
    runs = small_disk / "runs"
    assert f"the disk of {runs} is full: 0 bytes are free, and a run needs 1,048,576" in train_quickstart(runs)
    assert not runs.exists()


@pytest.mark.long
def test_a_disk_that_fills_up_while_the_model_is_made_is_named_too(small_disk):
    (small_disk / "ballast").write_bytes(bytes(18 * 2**20))
    words = ["model.init.max_warm_steps=1", "model.init.warm_reward=0.01"]
    assert f"the disk of {small_disk / 'runs' / 'x'} is full: " in train_quickstart(small_disk / "runs", *words)


def test_stacks_that_the_disk_does_not_take_go_to_the_log(tmp_path, capsys):
    (tmp_path / "file").write_text("no directory")
    dump_stacks(tmp_path / "file" / "learner.txt", "why not")
    assert "why not" in capsys.readouterr().err


async def test_the_address_of_an_endpoint_is_written_as_soon_as_the_disk_takes_it(tmp_path):
    reported, failed = [], asyncio.Event()

    def report(event, **facts):
        reported.append(event)
        failed.set()

    path = tmp_path / "not there yet" / "serving-g0.json"
    writing = asyncio.create_task(_write_private_file(path, b"{}", report, REAL_WORLD))
    async with asyncio.timeout(60):
        await failed.wait()
        path.parent.mkdir()
        await writing
    assert path.read_bytes() == b"{}"
    assert path.stat().st_mode & 0o777 == 0o600
    assert reported == ["serving_address_not_written"]
