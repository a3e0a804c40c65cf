"""What the directory of a run needs of its machine: one holder, a name of its own, free bytes, and parents that are synced."""

import asyncio
import errno
import inspect
import os
import subprocess
import sys
import time

import pytest

from r3async.actors.conductor import Conductor
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.actors.rank_actor import RankActor
from r3async.checkpoint import CheckpointDirectory
from r3async.checkpoint.run_lock import RunLock
from r3async.config import BufferConfig, ConfigError, load_config
from r3async.data.wire import encode_trajectory
from r3async.tools.run_dir import explain_full_disk, open_named_run
from r3async.tools.training_session import train
from r3async.transport.spool import Spool
from r3async.world.appending import AppendFile
from r3async.world.real import REAL_WORLD
from tests.unit.test_buffer import make_trajectory

HOLD = """
import sys, time
from pathlib import Path
from r3async.checkpoint.run_lock import RunLock
RunLock(Path(sys.argv[1])).acquire_shared()
print("held", flush=True)
time.sleep(60)
"""


def test_a_directory_that_a_process_still_writes_to_waits_for_it_however_it_ends(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        lock, waits = RunLock(tmp_path), []
        assert not asyncio.run(lock.acquire_exclusive(0.3, lambda: waits.append(1)))
        assert waits == [1]
        other = RunLock(tmp_path)
        other.acquire_shared()  # Beside the process.
        other.close()
        process.kill()
        assert asyncio.run(lock.acquire_exclusive(20, lambda: None))
        began = time.monotonic()
        assert not asyncio.run(RunLock(tmp_path).acquire_exclusive(0.2))
        assert time.monotonic() - began < 10
        lock.acquire_shared()
        assert not asyncio.run(RunLock(tmp_path).acquire_exclusive(0.2))
    finally:
        process.kill()
        process.wait(120)


def test_nobody_joins_a_directory_that_is_prepared_for_another_start(tmp_path):
    """An actor of the past that comes late is refused; it does not wait, and write into the records of the next start."""
    driver, late = RunLock(tmp_path), RunLock(tmp_path)
    assert asyncio.run(driver.acquire_exclusive(0.0))
    with pytest.raises(BlockingIOError, match="another process prepares"):
        late.acquire_shared()
    driver.acquire_shared()
    late.acquire_shared()
    assert not asyncio.run(driver.acquire_exclusive(0.0))


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", ".", "..", "a/b", "a/", "./a", "a\\b", " ", "a\nb", "latest", "x" * 201]
)
def test_a_name_that_leaves_the_directory_of_runs_or_hides_in_it_is_refused(name):
    with pytest.raises(ConfigError, match=r"`name` = .*Choose a plain name, such as name=first-try"):
        load_config("quickstart", [f"name={name!r}" if name == " " else f"name={name}"])


def test_a_full_disk_is_named_with_its_free_bytes_before_anything_is_made(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ConfigError, match=r"the disk of .*/runs is full: [\d,]+ bytes are free, and a run needs 1,048,576"
    ):
        train(load_config("quickstart", ["name=x"]), "quickstart", root=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="is full"), explain_full_disk(tmp_path):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(OSError, match="rights"), explain_full_disk(tmp_path):
        raise PermissionError("no rights")


def test_every_actor_holds_the_lock_of_the_run_it_writes_to(tmp_path):
    """Whatever its role: `prepare_process` is the first thing that each does."""
    script = """
import sys
from pathlib import Path
from r3async.actors.process import prepare_process
from r3async.world.real import REAL_WORLD
lock = prepare_process(REAL_WORLD, Path(sys.argv[1]), "learner-rank-0")
sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        lock = RunLock(tmp_path)
        deadline = time.monotonic() + 240
        while not (tmp_path / "logs" / "learner-rank-0.log").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not asyncio.run(lock.acquire_exclusive(0.2))
        process.communicate(timeout=240)
        assert asyncio.run(lock.acquire_exclusive(10))
    for actor in (Conductor, GeneratorActor, LearnerActor, RankActor):
        assert "self._lock = prepare_process(world, " in inspect.getsource(actor.__init__)


async def spool_put(directory):
    spool = Spool(directory / "spool", BufferConfig(fsync=True))
    await spool.put_trajectory(make_trajectory(0), encode_trajectory(make_trajectory(0)), spill=False)
    await spool.close()


@pytest.mark.parametrize(
    ("make", "made"),
    [
        (
            lambda path: CheckpointDirectory(path / "own" / "checkpoints").begin_checkpoint(1),
            ["own", "own/checkpoints"],
        ),
        (lambda path: asyncio.run(spool_put(path / "run")), ["run", "run/spool"]),
        (
            lambda path: open_named_run(load_config("quickstart", ["name=n"]), "p", print, path / "runs"),
            ["runs", "runs/n"],
        ),
        (
            lambda path: AppendFile(path / "run" / "routes" / "a.jsonl", world=REAL_WORLD).append(b"1"),
            ["run", "run/routes"],
        ),
    ],
    ids=["checkpoints", "spool", "run", "records"],
)
def test_directories_that_are_made_are_on_the_disk_with_their_parents(tmp_path, monkeypatch, make, made):
    synced, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    make(tmp_path)
    assert {str(tmp_path), *(str(tmp_path / name) for name in made)} <= synced
