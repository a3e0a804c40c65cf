"""A run's directory: made, or found with checkpoints in it to resume from. For one driver at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3async.checkpoint import (
    Checkpoints,
    Opened,
    check_model,
    check_settings,
    find_checkpoint,
    rewind,
)
from r3async.checkpoint.directory import RunLock, silent
from r3async.checkpoint.resume import mark, origin_of, read_starts
from r3async.checkpoint.state import RECORDS
from r3async.config import Config, ConfigError, config_from_dict, to_dict, to_toml
from r3async.record.events import EVENTS, open_events
from r3async.record.reading import QUARANTINE, read_objects
from r3async.untrusted import decode_toml
from r3async.views.summary import NOT_TRAINED, UNFINISHED, status_after
from r3async.weights.probe import KEPT
from r3async.world import Files, World
from r3async.world.appending import Report
from r3async.world.files import make_directory, read_file, replace_file, settle_directory
from r3async.world.real import REAL

LOCK_SECONDS = 60.0
"""How long processes of the run's past may take to end."""
_BLOCK = 2**20


@dataclass(frozen=True)
class RunDir:
    """`path`: the directory, with the resolved configuration in it. `resume`: what the run resumes from, if it does."""

    path: Path
    resume: Opened | None
    lock: RunLock
    began: bool = False
    """It began before, and made no checkpoint: the start model that it made is there."""

    def model_path(self, config: Config, *, files: Files = REAL.files) -> Path | None:
        """The start model, as far as there is one: configured, or the one that the run began with.

        Raises `CheckpointError` if that is not the model it was then.
        """
        if config.model.path:
            path = Path(config.model.path).absolute()
        elif self.resume is None:
            made = self.path / "init"
            return made.absolute() if self.began and files.stat(made / "config.json") else None
        else:
            path = Path(self.resume.state.model_path)
            inside = self.path / path.name  # the run may have been moved
            path = path if files.stat(path) or not files.stat(inside) else inside.absolute()
        if self.resume is not None:
            check_model(self.resume.state, path, files=files)
        return path


async def open_run(
    config: Config,
    directory: Path,
    say: Callable[[str], object],
    report: Report = silent,
    *,
    world: World = REAL,
) -> RunDir:
    """`directory`, new, or as its newest intact checkpoint left it. `report`: what is found among the checkpoints.

    `resume = auto` resumes in a directory with checkpoints, and starts again in that of a run which made none yet. `none` moves
    one that exists aside. The path of a checkpoint, or of another run, begins a new run there with the records of the old one.
    Raises `ConfigError` and `CheckpointError`, whose messages name what to do; then nothing has changed, except that
    checkpoints which cannot be read are named so.
    """
    files = world.files
    if _is_used(directory, files):
        if config.resume == "none":
            aside = await _move_aside(directory, say, world)
            say(f"{directory} is kept as {aside}")
        elif (
            Checkpoints.of(config, directory, report=report, files=files).empty
            and read_starts(directory, files=files) is None
        ):
            raise ConfigError(
                f"`name` = {directory.name!r}: {directory} exists already and has no checkpoint to resume from; choose another "
                'name, or set resume="none", which keeps it under another one'
            )
    make_directory(directory, files=files)
    settle_directory(directory, files=files)  # `checkpoints` in it, too
    lock = await _locked(directory, say, world)
    try:
        mark(directory, files=files)  # first of all: whatever ends this process now, the directory is that of a run
        make_directory(directory / "logs", files=files)
        resume = _resume(config, directory, say, report, files)
        began = resume is None and _restart_from_nothing(config, directory, say, world)
        replace_file(directory / "config.toml", to_toml(config).encode(), files=files)
        _share(lock, directory)
    except BaseException:
        lock.close()
        raise
    return RunDir(directory, resume, lock, began)


def _is_used(directory: Path, files: Files) -> bool:
    """Something is in it. A lock, and a file that was being written when its process was killed, are nothing."""
    return any(not name.startswith(".") for name in files.list(directory))


def _restart_from_nothing(config: Config, directory: Path, say: Callable[[str], object], world: World) -> bool:
    """Whether a run began here and made no checkpoint; its records are cut back to nothing then. Raises `CheckpointError` if it
    had other settings than it needs now."""
    before = directory / "config.toml"
    if world.files.stat(before) is None:
        return False
    saved = decode_toml(read_file(before, files=world.files))
    for key, (was, now) in check_settings(to_dict(config_from_dict(saved)), config).items():
        say(f"changed since the run began: {key} was {was!r}, is {now!r}")
    say(f"{directory} has no checkpoint yet: the run starts again, with what its spool has kept")
    events = open_events(directory, "driver", world=world)
    events.warning("begun_without_checkpoint", directory=str(directory))
    _take_back(directory, None, world.files)
    return True


def _check_origin(found: Opened | None, checkpoints: Checkpoints, directory: Path, files: Files) -> None:
    """A run without checkpoints of its own resumes only from where it began: numbers of lineages are of one line."""
    starts = read_starts(directory, files=files) or []
    origin = origin_of(found, checkpoints.directory) if found else ""
    if checkpoints.empty and starts and starts[-1].origin != origin:
        where = starts[-1].origin or "its start model"
        raise ConfigError(
            f"{directory} holds a run that began from {where} and has no checkpoint of its own yet: set `resume` to that again, "
            'choose another `name`, or set resume="none"'
        )


async def _locked(directory: Path, say: Callable[[str], object], world: World) -> RunLock:
    lock = RunLock(directory, files=world.files)
    waiting = lambda: say(f"waiting for processes of {directory} to end")  # noqa: E731
    if not await lock.alone(LOCK_SECONDS, waiting, clock=world.clock.monotonic):
        lock.close()
        raise _in_use(directory)
    return lock


def _share(lock: RunLock, directory: Path) -> None:
    try:
        lock.shared()
    except BlockingIOError as error:  # another driver was waiting for it, too
        raise _in_use(directory) from error


def _in_use(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} is in use by another process, which writes to it: wait for it, or choose another name"
    )


async def restart_run(
    config: Config,
    run: RunDir,
    say: Callable[[str], object],
    report: Report = silent,
    *,
    world: World = REAL,
) -> RunDir:
    """The same run, after one of its processes was lost: from the newest checkpoint, or from the beginning if there is none."""
    waiting = lambda: say("waiting for the other processes to end")  # noqa: E731
    if not await run.lock.alone(LOCK_SECONDS, waiting, clock=world.clock.monotonic):
        raise ConfigError(f"processes that write to {run.path} did not end within {LOCK_SECONDS:.0f} s")
    checkpoints = Checkpoints.of(config, run.path, report=report, files=world.files)
    checkpoints.clean()
    resume = checkpoints.newest() or run.resume
    checkpoints.take_back(resume)
    _take_back(run.path, resume, world.files)
    _share(run.lock, run.path)
    return RunDir(run.path, resume, run.lock, began=resume is None)


def _resume(
    config: Config, directory: Path, say: Callable[[str], object], report: Report, files: Files
) -> Opened | None:
    """The checkpoint that `resume` means, None to begin. The records are as they were then, and what came later is set aside."""
    checkpoints = Checkpoints.of(config, directory, report=report, files=files)
    if config.resume == "none":
        checkpoints.clean()
        checkpoints.supersede(-1)
        return None
    if config.resume == "auto":
        _check_origin(None, checkpoints, directory, files)
        checkpoints.clean()
        opened = checkpoints.newest()
    else:
        opened = _checked(config, checkpoints, directory, files)
        checkpoints.clean()
        checkpoints.supersede(opened.state.steps)
    checkpoints.take_back(opened)
    if opened is None:
        return None
    say(f"resumes from step {opened.state.steps} ({opened.path})")
    for key, (was, now) in _check(opened, config, directory).items():
        say(f"changed since the checkpoint: {key} was {was!r}, is {now!r}")
    if opened.path.parent.absolute() != checkpoints.directory.absolute():  # of another run
        source = opened.path.parent.parent
        for name in (*RECORDS, QUARANTINE):
            if files.stat(source / name) is not None:
                _copy(source / name, directory / name, files)
    _take_back(directory, opened, files)
    return opened


def _checked(config: Config, checkpoints: Checkpoints, directory: Path, files: Files) -> Opened:
    """That of the path `resume`, or the newest one of the run there. Raises if this run cannot resume from it."""
    found = find_checkpoint(Path(config.resume), files=files)
    _check(found, config, directory)
    if not checkpoints.empty and found.path.parent.absolute() != checkpoints.directory.absolute():
        raise ConfigError(
            f"`resume` = {config.resume!r} is of another run than {directory}, which has checkpoints of its own: choose "
            "another `name`"
        )
    _check_origin(found, checkpoints, directory, files)
    return found


def _copy(path: Path, to: Path, files: Files) -> None:
    files.remove(to)
    with files.open(path) as source, files.open(to, new=True) as copy:
        for at in range(0, source.size(), _BLOCK):
            copy.append([source.read(at, _BLOCK)])


def _take_back(directory: Path, resume: Opened | None, files: Files) -> None:
    """The run's records as they were at its checkpoint, empty if there is none; and no version that a probe failed with."""
    files.remove_tree(directory / KEPT)
    lengths, kept = (resume.state.record_bytes, resume.state.record_kept) if resume else ({}, {})
    rewind(directory, dict.fromkeys(RECORDS, 0) | lengths, kept, files=files)


def _lacks_end(opened: Opened, config: Config, directory: Path) -> bool:
    """Whether the run in `directory`, to which the checkpoint belongs, was stopped or lost, or failed, behind its last step."""
    ours = Checkpoints.of(config, directory).directory
    if opened.path.parent.absolute() != ours.absolute():
        return False
    events = read_objects(directory / EVENTS, files=opened.files)
    status, _ = next((end for event in reversed(events) if (end := status_after(event))), (UNFINISHED, ""))
    return status not in ("finished", NOT_TRAINED)


def _check(opened: Opened, config: Config, directory: Path) -> dict[str, tuple[Any, Any]]:
    """The settings that differ. Raises if the run cannot resume with them, or is over. One that made its steps, and was stopped
    or lost while it evaluated or saved, is not."""
    changed = check_settings(opened.state.config, config)
    if opened.state.steps > config.steps or (
        opened.state.steps == config.steps and not _lacks_end(opened, config, directory)
    ):
        raise ConfigError(
            f"the run has made {opened.state.steps} of {config.steps} steps: set `steps` to more, or choose another name"
        )
    return changed


async def _move_aside(directory: Path, say: Callable[[str], object], world: World) -> Path:
    number = 1
    while world.files.stat(aside := directory.with_name(f"{directory.name}.superseded-{number}")) is not None:
        number += 1
    lock = await _locked(directory, say, world)  # a run that still writes there is not moved
    try:
        world.files.rename(directory, aside)
        world.files.sync_directory(directory.parent)
    finally:
        lock.close()
    return aside
