"""A run's directory: made, or found with checkpoints in it to go on from. For one driver at a time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.saving import RECORDS, checkpoint_directory
from r3async.checkpoint import (
    Checkpoints,
    Opened,
    check_model,
    check_same_run,
    find_checkpoint,
    resume_from,
    rewind,
)
from r3async.checkpoint.lineages import mark, origin_of, read_starts
from r3async.checkpoint.lock import RunLock
from r3async.checkpoint.resume import check_settings
from r3async.config import Config, ConfigError, load_config, to_dict, to_toml
from r3async.files import make_directory, replace_file
from r3async.observe.events import open_events
from r3async.observe.quarantine import FILE as QUARANTINE

LOCK_SECONDS = 60.0
"""How long processes of the run's past may take to end."""


@dataclass(frozen=True)
class RunDir:
    """`path`: the directory, with the resolved configuration in it. `resume`: where the run goes on from, if it does."""

    path: Path
    resume: Opened | None
    lock: RunLock
    began: bool = False
    """It began before, and made no checkpoint: the start model that it made is there."""

    def model_path(self, config: Config) -> Path | None:
        """The start model, as far as there is one: configured, or the one that the run began with.

        Raises `CheckpointError` if that is not the model it was then.
        """
        if config.model.path:
            path = Path(config.model.path).absolute()
        elif self.resume is None:
            made = self.path / "init"
            return made.absolute() if self.began and (made / "config.json").is_file() else None
        else:
            path = Path(self.resume.state.model_path)
            inside = self.path / path.name  # the run may have been moved
            path = path if path.is_dir() or not inside.is_dir() else inside.absolute()
        if self.resume is not None:
            check_model(self.resume.state, path)
        return path


def open_run(
    config: Config, preset: str, say: Callable[[str], object], root: Path = Path("runs"), report: Any = None
) -> RunDir:
    """`runs/NAME`, new, or as its newest intact checkpoint left it; `runs/latest` points at it.

    `resume = auto` goes on in a directory with checkpoints, and begins again in that of a run which made none yet. `none` moves
    one that exists aside. The path of a checkpoint, or of another run, begins a new run there with the records of the old one.
    Raises `ConfigError` and `CheckpointError`, which say what to do; then nothing has changed, except that checkpoints which can
    not be read are named so.
    """
    name = config.name or f"{Path(preset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = root / name
    if directory.exists() and any(directory.iterdir()):
        if config.resume == "none":
            _locked(directory, say).close()  # a run that still writes there is not moved
            say(f"{directory} is kept as {_move_aside(directory)}")
        elif _checkpoints(config, directory, report).empty and read_starts(directory) is None:
            raise ConfigError(
                f"`name` = {name!r}: {directory} exists already and has no checkpoint to go on from; choose another name, or "
                'set resume="none", which keeps it under another one'
            )
    make_directory(directory / "logs")
    lock = _locked(directory, say)
    try:
        resume = _resume(config, directory, say, report)
        began = resume is None and _begin_again_from_nothing(config, directory, say)
        mark(directory)
        replace_file(directory / "config.toml", to_toml(config).encode())
        _point_latest(root, name)
    except BaseException:
        lock.close()
        raise
    lock.shared()
    return RunDir(directory, resume, lock, began)


def _begin_again_from_nothing(config: Config, directory: Path, say: Callable[[str], object]) -> bool:
    """Whether a run began here and made no checkpoint; its records are cut back to nothing then. Raises `CheckpointError` if it
    had other settings than it needs now."""
    before = directory / "config.toml"
    if read_starts(directory) is None or not before.is_file():
        return False
    for key, (was, now) in check_settings(to_dict(load_config(str(before))), config).items():
        say(f"changed since the run began: {key} was {was!r}, is {now!r}")
    say(f"{directory} has no checkpoint yet: the run begins again, with what its spool has kept")
    open_events(directory, "driver").warning("begun_without_checkpoint", directory=str(directory))
    _take_back(directory, None)
    return True


def _check_origin(found: Opened | None, checkpoints: Checkpoints, directory: Path) -> None:
    """A run without checkpoints of its own goes on only from where it began: numbers of lineages are of one line."""
    starts = read_starts(directory) or []
    origin = origin_of(found, checkpoints.directory) if found else ""
    if checkpoints.empty and starts and starts[-1].origin != origin:
        where = starts[-1].origin or "its start model"
        raise ConfigError(
            f"{directory} holds a run that began from {where} and has no checkpoint of its own yet: set `resume` to that again, "
            'choose another `name`, or set resume="none"'
        )


def _locked(directory: Path, say: Callable[[str], object]) -> RunLock:
    lock = RunLock(directory)
    if not lock.alone(LOCK_SECONDS, lambda: say(f"waiting for processes of {directory} to end")):
        lock.close()
        raise ConfigError(
            f"{directory} is in use by another process, which writes to it: wait for it, or choose another name"
        )
    return lock


def begin_again(config: Config, run: RunDir, say: Callable[[str], object], report: Any = None) -> RunDir:
    """The same run, after one of its processes died: from the newest checkpoint, or from the beginning if there is none yet."""
    if not run.lock.alone(LOCK_SECONDS, lambda: say("waiting for the other processes to end")):
        raise ConfigError(f"processes that write to {run.path} did not end within {LOCK_SECONDS:.0f} s")
    checkpoints = _checkpoints(config, run.path, report)
    checkpoints.clean()
    resume = checkpoints.newest() or run.resume
    _take_back(run.path, resume)
    run.lock.shared()
    return RunDir(run.path, resume, run.lock, began=resume is None)


def _checkpoints(config: Config, directory: Path, report: Any) -> Checkpoints:
    where = checkpoint_directory(config, directory)
    settings = config.checkpoint
    options = {} if report is None else {"report": report}
    return Checkpoints(where, keep_last=settings.keep_last, keep_every=settings.keep_every, **options)


def _resume(config: Config, directory: Path, say: Callable[[str], object], report: Any) -> Opened | None:
    checkpoints = _checkpoints(config, directory, report)
    if config.resume not in ("auto", "none"):
        # Looked at before anything is set aside for it.
        found = find_checkpoint(Path(config.resume))
        _check(found, config)
        if not checkpoints.empty and found.path.parent.absolute() != checkpoints.directory.absolute():
            raise ConfigError(
                f"`resume` = {config.resume!r} is of another run than {directory}, which has checkpoints of its own: choose "
                "another `name`"
            )
        _check_origin(found, checkpoints, directory)
    elif config.resume == "auto":
        _check_origin(None, checkpoints, directory)
    opened = resume_from(config.resume, checkpoints)
    if opened is None:
        return None
    say(f"going on from step {opened.state.steps} ({opened.path})")
    for key, (was, now) in _check(opened, config).items():
        say(f"changed since the checkpoint: {key} was {was!r}, is {now!r}")
    if opened.path.parent.absolute() != checkpoints.directory.absolute():  # of another run
        source = opened.path.parent.parent
        for name in (*RECORDS, QUARANTINE):
            if (source / name).is_file():
                shutil.copy(source / name, directory / name)
    _take_back(directory, opened)
    return opened


def _take_back(directory: Path, resume: Opened | None) -> None:
    """The run's records as they were at its checkpoint, empty if there is none."""
    lengths, kept = (resume.state.record_bytes, resume.state.record_kept) if resume else ({}, {})
    rewind(directory, dict.fromkeys(RECORDS, 0) | lengths, kept)


def _check(opened: Opened, config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ. Raises if the run can not go on with them, or is over."""
    changed = check_same_run(opened.state, config)
    if opened.state.steps >= config.steps:
        raise ConfigError(
            f"the run has made {opened.state.steps} of {config.steps} steps: set `steps` to more, or choose another name"
        )
    return changed


def _move_aside(directory: Path) -> Path:
    number = 1
    while (aside := directory.with_name(f"{directory.name}.superseded-{number}")).exists():
        number += 1
    directory.rename(aside)
    return aside


def _point_latest(root: Path, name: str) -> None:
    scratch = root / f".latest-{os.getpid()}"
    scratch.symlink_to(name)
    scratch.replace(root / "latest")
