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

from r3async.actors import driver as run_dir
from r3async.checkpoint.directory import ignore_event
from r3async.config import Config, ConfigError
from r3async.world.appending import EventReporter
from r3async.world.files import DISK_FULL_ERRNOS

MIN_FREE_BYTES = 2**20
"""For the configuration, logs and records of the first steps; models and checkpoints come on top."""


def open_named_run(
    config: Config,
    preset: str,
    print_line: Callable[[str], object],
    root: Path = Path("runs"),
    report_event: EventReporter = ignore_event,
) -> run_dir.RunDirectory:
    """`runs/NAME`, see `r3async.actors.driver.open_run_directory`; `runs/latest` points at it."""
    name = config.name or f"{Path(preset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = asyncio.run(run_dir.open_run_directory(config, root / name, print_line, report_event))
    try:
        _link_latest(root, name)
    except BaseException:
        run.lock.close()
        raise
    return run


def _link_latest(root: Path, name: str) -> None:
    scratch = root / f".latest-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):  # of a process with this id that was killed here
        scratch.unlink()
    scratch.symlink_to(name)
    scratch.replace(root / "latest")


def check_disk_space(directory: Path, needed: int = MIN_FREE_BYTES) -> None:
    """Raise `ConfigError` if nothing can be written there; with path, free bytes and what is needed, if the disk, or this user's
    quota, does not have `needed`."""
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
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # of a file system that cannot reserve
            raise _make_unwritable_error(directory, error.strerror) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


@contextlib.contextmanager
def explain_full_disk(directory: Path) -> Iterator[None]:
    """Turns the error of a disk that fills up while the run starts into a `ConfigError` that says so."""
    try:
        yield
    except Exception as error:
        # safetensors has an error of its own, recognized by its text alone.
        if getattr(error, "errno", None) in DISK_FULL_ERRNOS or "No space left on device" in str(error):
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
    return ConfigError(f"no run can be written to {directory.absolute()}: {reason}. Choose another directory (--runs)")


def _make_full_disk_error(directory: Path, needed: int) -> ConfigError:
    free = shutil.disk_usage(_find_existing_parent(directory)).free
    return ConfigError(
        f"the disk of {directory.absolute()} is full: {free:,} bytes are free, and a run needs {needed:,} and its model. "
        "Free some, or choose another directory with --runs"
    )
