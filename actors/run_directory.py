"""A run's directory, new or with checkpoints to resume from, which one driver uses at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r3async.checkpoint import (
    Checkpoint,
    CheckpointDirectory,
    CheckpointError,
    check_resume_settings,
    check_start_model,
    find_checkpoint,
    open_checkpoint,
    rewind_records,
)
from r3async.checkpoint.run_lock import RunLock
from r3async.checkpoint.run_starts import describe_origin, mark_run_directory, read_run_starts
from r3async.checkpoint.state import RECORD_FILES
from r3async.config import Config, ConfigError, config_from_saved, config_to_dict, config_to_toml
from r3async.record.events import EVENTS_FILE, open_event_log
from r3async.record.reading import QUARANTINE_FILE, read_json_objects
from r3async.untrusted import decode_toml
from r3async.views.summary import NOT_TRAINED, UNFINISHED, get_status_change
from r3async.weights.probe import FAILED_MODEL_DIRECTORY
from r3async.world import EventReporter, Files, World, ignore_event
from r3async.world.files import fsync_with_parents, make_directory, read_file, replace_file
from r3async.world.real import REAL_WORLD

LOCK_WAIT_SECONDS = 60.0
"""Seconds that processes of an earlier start of the run may take to end."""
_COPY_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class RunDirectory:
    """The opened directory of a run.

    Attributes:
        path: The directory, with the resolved configuration in it.
        resume_from: Checkpoint that the run resumes from, if it does.
        lock: Lock on the directory, which this process holds.
    """

    path: Path
    resume_from: Checkpoint | None
    lock: RunLock
    began_without_checkpoint: bool = False
    """True if the run began before and made no checkpoint: then the start model that it made is
    in the directory."""

    def find_start_model(self, config: Config, *, files: Files = REAL_WORLD.files) -> Path | None:
        """Return the path of the start model: the configured one, or the one that the run began
        with; None if there is none.

        Raises `CheckpointError` if it is not the model that it was then.
        """
        if config.model.path:
            path = Path(config.model.path).absolute()
        elif self.resume_from is None:
            made = self.path / "init"
            return (
                made.absolute()
                if self.began_without_checkpoint and files.stat(made / "config.json")
                else None
            )
        else:
            path = Path(self.resume_from.state.model_path)
            inside = self.path / path.name  # the run may have been moved
            path = path if files.stat(path) or not files.stat(inside) else inside.absolute()
        if self.resume_from is not None:
            check_start_model(self.resume_from.state, path, files=files)
        return path


async def open_run_directory(
    config: Config,
    directory: Path,
    print_line: Callable[[str], object],
    report_event: EventReporter = ignore_event,
    *,
    world: World = REAL_WORLD,
) -> RunDirectory:
    """Open `directory`, which is new, or as its newest intact checkpoint left it. `report_event`
    gets what is found among the checkpoints.

    `resume = auto` resumes in a directory with checkpoints, and starts again in the directory of a
    run that made none yet. `none` moves an existing directory aside. The path of a checkpoint, or
    of another run, begins a new run there with the records of the old one. Raises `ConfigError` and
    `CheckpointError`, whose messages name what to do; then nothing has changed, except that
    checkpoints which cannot be read are renamed to say so.
    """
    files = world.files
    if _has_content(directory, files):
        if config.resume == "none":
            aside = await _move_aside(directory, print_line, world)
            print_line(f"{directory} is kept as {aside}")
        elif (
            CheckpointDirectory.from_config(
                config, directory, report_event=report_event, files=files
            ).is_empty
            and read_run_starts(directory, files=files) is None
        ):
            raise _make_foreign_directory_error(directory)
    make_directory(directory, files=files)
    fsync_with_parents(directory, files=files)  # `checkpoints` in it, too
    lock = await _acquire_lock(directory, print_line, world)
    try:
        # First of all: whatever ends this process from now on, the directory is known
        # as that of a run.
        mark_run_directory(directory, files=files)
        make_directory(directory / "logs", files=files)
        resume = _open_resume_checkpoint(config, directory, print_line, report_event, files)
        began = resume is None and _restart_without_checkpoint(config, directory, print_line, world)
        replace_file(directory / "config.toml", config_to_toml(config).encode(), files=files)
        _share_lock(lock, directory)
    except BaseException:
        lock.close()
        raise
    return RunDirectory(directory, resume, lock, began)


def check_run_directory(
    config: Config, directory: Path, *, files: Files = REAL_WORLD.files
) -> None:
    """Raise `ConfigError` or `CheckpointError` where `open_run_directory` would refuse the
    settings. Changes nothing.

    Only the newest checkpoint is looked at, and its tensors are not verified.
    """
    if config.resume != "auto" or not _has_content(directory, files):
        return
    checkpoints = CheckpointDirectory.from_config(config, directory, files=files)
    steps = checkpoints.list_steps()
    if not steps and read_run_starts(directory, files=files) is None:
        raise _make_foreign_directory_error(directory)
    if not steps:
        saved = decode_toml(read_file(directory / "config.toml", files=files))
        check_resume_settings(config_to_dict(config_from_saved(saved)), config)
        return
    try:
        newest = open_checkpoint(checkpoints.step_path(steps[-1]), check_tensors=False, files=files)
    except CheckpointError:
        return  # the start reports it, and takes the one before
    _check_resumable(newest, config, directory)


def _make_foreign_directory_error(directory: Path) -> ConfigError:
    return ConfigError(
        f"`name` = {directory.name!r}: {directory} exists already and has no checkpoint to resume "
        'from; choose another name, or set resume="none", which keeps it under another one'
    )


def _has_content(directory: Path, files: Files) -> bool:
    """Return True if the directory has content. A lock, and a file that was being written when its
    process was killed, do not count."""
    return any(not name.startswith(".") for name in files.list_names(directory))


def _restart_without_checkpoint(
    config: Config, directory: Path, say: Callable[[str], object], world: World
) -> bool:
    """Return True if a run began here and made no checkpoint; then its records are cut back to
    nothing. Raises `CheckpointError` if it had other settings than it needs now."""
    before = directory / "config.toml"
    if world.files.stat(before) is None:
        return False
    saved = decode_toml(read_file(before, files=world.files))
    for key, (was, now) in check_resume_settings(
        config_to_dict(config_from_saved(saved)), config
    ).items():
        say(f"changed since the run began: {key} was {was!r}, is {now!r}")
    say(f"{directory} has no checkpoint yet: the run starts again, with what its spool has kept")
    events = open_event_log(directory, "driver", world=world)
    events.warning("begun_without_checkpoint", directory=str(directory))
    _rewind_records(directory, None, world.files)
    return True


def _check_origin(
    opened: Checkpoint | None, checkpoints: CheckpointDirectory, directory: Path, files: Files
) -> None:
    """Raise `ConfigError` if a run without checkpoints of its own would resume from elsewhere than
    where it began: the numbers of lineages belong to one line of descent."""
    starts = read_run_starts(directory, files=files) or []
    origin = describe_origin(opened, checkpoints.directory) if opened else ""
    if checkpoints.is_empty and starts and starts[-1].origin != origin:
        where = starts[-1].origin or "its start model"
        raise ConfigError(
            f"{directory} holds a run that began from {where} and has no checkpoint of its own "
            'yet: set `resume` to that again, choose another `name`, or set resume="none"'
        )


async def _acquire_lock(directory: Path, say: Callable[[str], object], world: World) -> RunLock:
    lock = RunLock(directory, files=world.files)
    waiting = lambda: say(f"waiting for processes of {directory} to end")  # noqa: E731
    if not await lock.acquire_exclusive(LOCK_WAIT_SECONDS, waiting, clock=world.clock.monotonic):
        lock.close()
        raise _in_use_error(directory)
    return lock


def _share_lock(lock: RunLock, directory: Path) -> None:
    try:
        lock.acquire_shared()
    except BlockingIOError as error:  # another driver was waiting for it, too
        raise _in_use_error(directory) from error


def _in_use_error(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} is in use by another process, which writes to it: wait for it, or "
        "choose another name"
    )


async def restart_run(
    config: Config,
    run: RunDirectory,
    print_line: Callable[[str], object],
    report_event: EventReporter = ignore_event,
    *,
    world: World = REAL_WORLD,
) -> RunDirectory:
    """Prepare the restart of a run after one of its processes was lost: from the newest checkpoint,
    or from the beginning if there is none."""
    waiting = lambda: print_line("waiting for the other processes to end")  # noqa: E731
    if not await run.lock.acquire_exclusive(
        LOCK_WAIT_SECONDS, waiting, clock=world.clock.monotonic
    ):
        raise ConfigError(
            f"processes that write to {run.path} did not end within {LOCK_WAIT_SECONDS:.0f} s"
        )
    checkpoints = CheckpointDirectory.from_config(
        config, run.path, report_event=report_event, files=world.files
    )
    checkpoints.recover_directory()
    resume = checkpoints.recover_newest() or run.resume_from
    checkpoints.remove_later_evaluations(resume)
    _rewind_records(run.path, resume, world.files)
    _share_lock(run.lock, run.path)
    return RunDirectory(run.path, resume, run.lock, began_without_checkpoint=resume is None)


def _open_resume_checkpoint(
    config: Config,
    directory: Path,
    say: Callable[[str], object],
    report_event: EventReporter,
    files: Files,
) -> Checkpoint | None:
    """Return the checkpoint that `resume` means; None to begin. The records are rewound to it, and
    what came later is set aside."""
    checkpoints = CheckpointDirectory.from_config(
        config, directory, report_event=report_event, files=files
    )
    if config.resume == "none":
        checkpoints.recover_directory()
        checkpoints.supersede_later(-1)
        return None
    if config.resume == "auto":
        _check_origin(None, checkpoints, directory, files)
        checkpoints.recover_directory()
        opened = checkpoints.recover_newest()
    else:
        opened = _open_named_checkpoint(config, checkpoints, directory, files)
        checkpoints.recover_directory()
        checkpoints.supersede_later(opened.state.steps)
    checkpoints.remove_later_evaluations(opened)
    if opened is None:
        return None
    say(f"resumes from step {opened.state.steps} ({opened.path})")
    for key, (was, now) in _check_resumable(opened, config, directory).items():
        say(f"changed since the checkpoint: {key} was {was!r}, is {now!r}")
    if opened.path.parent.absolute() != checkpoints.directory.absolute():  # of another run
        source = opened.path.parent.parent
        for name in (*RECORD_FILES, QUARANTINE_FILE):
            if files.stat(source / name) is not None:
                _copy_file(source / name, directory / name, files)
    _rewind_records(directory, opened, files)
    return opened


def _open_named_checkpoint(
    config: Config, checkpoints: CheckpointDirectory, directory: Path, files: Files
) -> Checkpoint:
    """Return the checkpoint at the path `resume`, or the newest one of the run there. Raises if
    this run cannot resume from it."""
    found = find_checkpoint(Path(config.resume), files=files)
    _check_resumable(found, config, directory)
    if (
        not checkpoints.is_empty
        and found.path.parent.absolute() != checkpoints.directory.absolute()
    ):
        raise ConfigError(
            f"`resume` = {config.resume!r} is of another run than {directory}, which has "
            "checkpoints of its own: choose another `name`"
        )
    _check_origin(found, checkpoints, directory, files)
    return found


def _copy_file(path: Path, to: Path, files: Files) -> None:
    files.remove(to)
    with files.open(path) as source, files.open(to, exclusive=True) as copy:
        for at in range(0, source.size(), _COPY_BLOCK_BYTES):
            copy.append([source.read(at, _COPY_BLOCK_BYTES)])


def _rewind_records(directory: Path, resume: Checkpoint | None, files: Files) -> None:
    """Rewind the run's records to its checkpoint, or empty them if there is none, and remove the
    version with which a probe failed."""
    files.remove_tree(directory / FAILED_MODEL_DIRECTORY)
    if resume:
        lengths = resume.state.record_bytes
        kept = resume.state.record_kept
    else:
        lengths = {}
        kept = {}
    rewind_records(directory, dict.fromkeys(RECORD_FILES, 0) | lengths, kept, files=files)


def _ended_early(opened: Checkpoint, config: Config, directory: Path) -> bool:
    """Return True if the checkpoint belongs to the run in `directory`, and that run was stopped or
    lost, or failed, after its last step."""
    ours = CheckpointDirectory.from_config(config, directory).directory
    if opened.path.parent.absolute() != ours.absolute():
        return False
    events = read_json_objects(directory / EVENTS_FILE, files=opened.files)
    status, _ = next(
        (end for event in reversed(events) if (end := get_status_change(event))), (UNFINISHED, "")
    )
    return status not in ("finished", NOT_TRAINED)


def _check_resumable(
    opened: Checkpoint, config: Config, directory: Path
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with old and new values. Raises if the run cannot resume
    with them, or is over. A run that made all its steps, and was stopped or lost while it evaluated
    or saved, is not over."""
    changed = check_resume_settings(opened.state.config, config)
    if opened.state.steps > config.steps or (
        opened.state.steps == config.steps and not _ended_early(opened, config, directory)
    ):
        raise ConfigError(
            f"the run has made {opened.state.steps} of {config.steps} steps: set `steps` to more, "
            "or choose another name"
        )
    return changed


async def _move_aside(directory: Path, say: Callable[[str], object], world: World) -> Path:
    number = 1
    while (
        world.files.stat(aside := directory.with_name(f"{directory.name}.superseded-{number}"))
        is not None
    ):
        number += 1
    lock = await _acquire_lock(directory, say, world)  # do not move a run that still writes there
    try:
        world.files.rename(directory, aside)
        world.files.fsync_directory(directory.parent)
    finally:
        lock.close()
    return aside
