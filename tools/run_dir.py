"""Which directory a command's run gets: by name, under the directory of runs; and whether its disk has free bytes for it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from r3async.actors import run_dir
from r3async.checkpoint.directory import silent
from r3async.config import Config, ConfigError
from r3async.world.appending import Report
from r3async.world.files import FULL

NEEDED_BYTES = 2**20
"""For the configuration, logs and records of the first steps; models and checkpoints come on top."""


def open_run(
    config: Config, preset: str, say: Callable[[str], object], root: Path = Path("runs"), report: Report = silent
) -> run_dir.RunDir:
    """`runs/NAME`, see `r3async.actors.run_dir.open_run`; `runs/latest` points at it."""
    name = config.name or f"{Path(preset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = asyncio.run(run_dir.open_run(config, root / name, say, report))
    try:
        _point_latest(root, name)
    except BaseException:
        run.lock.close()
        raise
    return run


def _point_latest(root: Path, name: str) -> None:
    scratch = root / f".latest-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # of a process with this id that was killed here
        scratch.unlink()
    scratch.symlink_to(name)
    scratch.replace(root / "latest")


def check_capacity(directory: Path, needed: int = NEEDED_BYTES) -> None:
    """Raise `ConfigError` if nothing can be written there; with path, free bytes and what is needed, if the disk, or this user's
    quota, does not have `needed`."""
    there = _existing(directory)
    probe = there / f".capacity-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, needed)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in FULL:
            raise _full(directory, needed) from error
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # of a file system that cannot reserve
            raise _unwritable(directory, error.strerror) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


@contextlib.contextmanager
def full_disk_is_named(directory: Path) -> Iterator[None]:
    """Turns the error of a disk that fills up while the run starts into a `ConfigError` that says so."""
    try:
        yield
    except Exception as error:
        # safetensors has an error of its own, recognized by its text alone.
        if getattr(error, "errno", None) in FULL or "No space left on device" in str(error):
            raise _full(directory, NEEDED_BYTES) from error
        raise


def _existing(directory: Path) -> Path:
    path = directory.absolute()
    while not path.is_dir():
        if path.exists():
            raise _unwritable(directory, f"{path} is a file")
        path = path.parent
    return path


def _unwritable(directory: Path, why: str | None) -> ConfigError:
    return ConfigError(f"no run can be written to {directory.absolute()}: {why}. Choose another directory (--runs)")


def _full(directory: Path, needed: int) -> ConfigError:
    free = shutil.disk_usage(_existing(directory)).free
    return ConfigError(
        f"the disk of {directory.absolute()} is full: {free:,} bytes are free, and a run needs {needed:,} and its model. "
        "Free some, or choose another directory with --runs"
    )
