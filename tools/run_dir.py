"""Choose the directory of a command's run, by name under the directory of runs, and
check its disk space."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from r3async.actors import run_directory
from r3async.config import Config, ConfigError
from r3async.world import EventReporter, ignore_event
from r3async.world.files import DISK_FULL_ERRNOS

from .targets import find_system_error

MIN_FREE_BYTES = 2**20
"""Free bytes needed for the configuration, logs and records of the first steps, besides models
and checkpoints."""


def open_named_run(
    config: Config,
    preset: str,
    print_line: Callable[[str], object],
    root: Path = Path("runs"),
    report_event: EventReporter = ignore_event,
) -> run_directory.RunDirectory:
    """Open `runs/NAME` with `r3async.actors.run_directory.open_run_directory`, and point
    `runs/latest` at it."""
    name = config.name or f"{Path(preset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = asyncio.run(
        run_directory.open_run_directory(config, root / name, print_line, report_event)
    )
    try:
        _link_latest(root, name)
    except BaseException:
        run.lock.close()
        raise
    return run


def check_named_run(config: Config, root: Path) -> None:
    """Check that `runs/NAME`, if it exists, can be resumed with these settings; see
    `check_run_directory`."""
    if config.name:
        run_directory.check_run_directory(config, root / config.name)


def _link_latest(root: Path, name: str) -> None:
    scratch = root / f".latest-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # of a killed process with the same id
        scratch.unlink()
    scratch.symlink_to(name)
    scratch.replace(root / "latest")


def check_disk_space(directory: Path, needed: int = MIN_FREE_BYTES) -> None:
    """Raise `ConfigError` if the directory is not writable, or if the disk or the user's quota
    lacks `needed` bytes.

    The error about a full disk names the path, the free bytes and the needed bytes.
    """
    there = _find_existing_parent(directory)
    probe = there / f".capacity-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, needed)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise _make_full_disk_error(directory, needed) from error
        # Of a file system that cannot reserve.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise _make_unwritable_error(directory, error.strerror) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


@contextlib.contextmanager
def explain_full_disk(directory: Path) -> Iterator[None]:
    """Convert the error of a disk that fills up during the start into a
    `ConfigError` that says so."""
    try:
        yield
    except Exception as error:
        failure = find_system_error(error)
        if failure is not None and failure.errno in DISK_FULL_ERRNOS:
            raise _make_full_disk_error(directory, MIN_FREE_BYTES) from error
        raise


def _find_existing_parent(directory: Path) -> Path:
    path = directory.absolute()
    while not path.is_dir():
        if path.exists():
            raise _make_unwritable_error(directory, f"{path} is a file")
        path = path.parent
    return path


def _make_unwritable_error(directory: Path, reason: str | None) -> ConfigError:
    return ConfigError(
        f"no run can be written to {directory.absolute()}: {reason}. Choose another "
        "directory (--runs)"
    )


def _make_full_disk_error(directory: Path, needed: int) -> ConfigError:
    free = shutil.disk_usage(_find_existing_parent(directory)).free
    return ConfigError(
        f"the disk of {directory.absolute()} is full: {free:,} bytes are free, and a run needs "
        f"{needed:,} and its model. Free some, or choose another directory with --runs"
    )
