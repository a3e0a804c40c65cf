"""Readers of a run's files.

Several processes may append to one file and be killed meanwhile, and disks and people damage files.
Unreadable lines are skipped and reported as events (`make_skipped_events`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from r3async.config import Config, ScheduleConfig
from r3async.config.section import Section
from r3async.untrusted import MalformedError, decode_json_object, decode_toml
from r3async.world import File, Files
from r3async.world.files import read_file
from r3async.world.real import REAL_WORLD

EVALUATION_FILE = "evaluation.jsonl"
"""File of a run's evaluations: one object per evaluation, with the step after which it began."""
EPISODES_FILE = "episodes.jsonl"
"""File of a run's example episodes, one object each."""
TIMELINE_FILE = "timeline.jsonl"
"""File of a run's timeline spans (`record/timeline.py`)."""
QUARANTINE_FILE = "quarantine.jsonl"
"""File of a run's quarantined tasks, which are not posed again because all their
episodes failed."""
CONFIG_FILE = "config.toml"
"""File of a run's resolved configuration."""
READ_BLOCK_BYTES = 2**20
T = TypeVar("T")
UnixTime = Annotated[float, msgspec.Meta(ge=0, le=2**36)]
"""Unix seconds within the range of a calendar."""
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _StepLine(msgspec.Struct):
    step: NonNegativeInt | None = None
    version: NonNegativeInt | None = None
    time: UnixTime | None = None


class _EventLine(msgspec.Struct):
    event: str = ""
    level: str = ""
    role: str = ""
    time: UnixTime = 0.0


class _EpisodeLine(msgspec.Struct):
    step: NonNegativeInt | None = None
    turns: list[dict[str, Any]] = []


class _SpanLine(msgspec.Struct):
    start: UnixTime
    end: UnixTime
    step: NonNegativeInt | None = None
    version: NonNegativeInt | None = None


class QuarantinedTask(msgspec.Struct, frozen=True):
    """A task that is not posed again, because all episodes of one of its groups failed.

    Attributes:
        group: The group that failed.
        from_group: The first group that does not pose the task any more.
        failed_by: `environment`, or `learner` if the learner refused the trajectories.
        time: Unix seconds.
    """

    task_seed: int
    group: int
    from_group: int
    failed_by: str
    error: str
    time: float


LINE_TYPES: dict[str, Any] = {
    "metrics.jsonl": _StepLine,
    "events.jsonl": _EventLine,
    EVALUATION_FILE: _StepLine,
    EPISODES_FILE: _EpisodeLine,
    TIMELINE_FILE: _SpanLine,
    QUARANTINE_FILE: QuarantinedTask,
    "routing.jsonl": _StepLine,
}
"""The fields that readers rely on in each line of a file, by file name. All other fields of a line
may be anything."""


class JsonLines(NamedTuple):
    """The content of a file of JSON lines.

    Attributes:
        objects: The objects of the file, in order.
        skipped_lines: Numbers, from 1, of the lines that could not be read as an object.
        error: Why the file could not be read; "" if it could be, or is missing.
    """

    objects: list[dict[str, Any]]
    skipped_lines: list[int]
    error: str = ""


def read_json_lines(path: Path, *, files: Files = REAL_WORLD.files) -> JsonLines:
    """Read a file of JSON lines; a missing file, and one that cannot be read, has none.

    A torn last line may still be in the middle of being written: it is left out, but does not
    count as skipped.
    """
    try:
        with files.open(path) as file:
            *whole, last = _iter_lines(file)
    except FileNotFoundError:
        return JsonLines([], [])
    except OSError as error:
        return JsonLines([], [], error.strerror or str(error))
    values = [decode_line(path.name, line) for line in whole]
    skipped = [
        at
        for at, (line, value) in enumerate(zip(whole, values, strict=True), 1)
        if value is None and line.strip()
    ]
    values.append(decode_line(path.name, last))
    return JsonLines([value for value in values if value is not None], skipped)


def read_json_objects(path: Path, *, files: Files = REAL_WORLD.files) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON lines, in order. Unreadable lines are skipped; a
    missing file has none."""
    return read_json_lines(path, files=files).objects


def read_run_files(
    run_dir: Path, *names: str, files: Files = REAL_WORLD.files
) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the objects of each named file of a run, and the events for skipped lines, also
    of `config.toml`."""
    read = [read_json_lines(run_dir / name, files=files) for name in names]
    told = [
        make_skipped_events(name, len(lines.skipped_lines), lines.skipped_lines, error=lines.error)
        for name, lines in zip(names, read, strict=True)
    ]
    told.append(make_config_events(run_dir, files=files))
    return [lines.objects for lines in read], [event for events in told for event in events]


def decode_line(file_name: str, line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of the file `file_name`; None if none of its writers can have
    written the line."""
    try:
        value = decode_json_object(line)
        shape = LINE_TYPES.get(file_name)
        if shape is not None:
            msgspec.convert(value, shape)
    except (MalformedError, msgspec.ValidationError):
        return None
    return value


def make_skipped_events(
    file_name: str, count: int, numbers: Sequence[int] = (), *, error: str = ""
) -> list[dict[str, Any]]:
    """Return the warning event that reports `count` skipped lines of a file, or the `error` for
    which all of it is skipped, to be shown beside the run's own events.

    Returns an empty list if nothing is skipped. `numbers` are the line numbers,
    where they are known.
    """
    if error:
        return [{"level": "warning", "event": "file_skipped", "file": file_name, "error": error}]
    if not count:
        return []
    told = {"level": "warning", "event": "lines_skipped", "file": file_name, "lines": count}
    return [told | ({"first": numbers[0]} if numbers else {})]


def convert_valid(objects: Iterable[dict[str, Any]], kind: type[T]) -> Iterator[T]:
    """Yield the objects that convert to `kind`; the others are skipped."""
    for value in objects:
        with contextlib.suppress(msgspec.ValidationError):
            yield msgspec.convert(value, kind)


def _iter_lines(file: File) -> Iterator[bytes]:
    at = 0
    rest = b""
    while block := file.read(at, READ_BLOCK_BYTES):
        at += len(block)
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    yield rest


def read_run_config(run_dir: Path, *, files: Files = REAL_WORLD.files) -> dict[str, Any]:
    """Read a run's resolved configuration as plain data, as it was written; {} if it is
    missing or damaged.

    A value of another type than the setting has is left out; settings that this release does
    not know are kept.
    """
    return _read_config(run_dir, files)[0]


def make_config_events(run_dir: Path, *, files: Files = REAL_WORLD.files) -> list[dict[str, Any]]:
    """Return the events that report what of a run's configuration cannot be read; an
    empty list otherwise."""
    return _read_config(run_dir, files)[1]


def _read_config(run_dir: Path, files: Files) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        text = read_file(run_dir / CONFIG_FILE, files=files)
    except FileNotFoundError:
        return {}, []
    except OSError as error:
        return {}, make_skipped_events(CONFIG_FILE, 0, error=error.strerror or str(error))
    try:
        found = decode_toml(text)
    except MalformedError:
        return {}, make_skipped_events(CONFIG_FILE, len(text.splitlines()) or 1)
    skipped: list[str] = []
    kept = _keep_valid_settings(found, Config, "", skipped)
    wrong = {
        "level": "warning",
        "event": "settings_skipped",
        "file": CONFIG_FILE,
        "settings": ", ".join(skipped),
    }
    return kept, [wrong] if skipped else []


def _keep_valid_settings(
    values: dict[str, Any], section: type, prefix: str, skipped: list[str]
) -> dict[str, Any]:
    """Return the settings of a section that have the right type, and add the names of the
    others to `skipped`."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(section)}
    kept = {}
    for name, value in values.items():
        kind = fields.get(name, Any)
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        if is_section and isinstance(value, dict):
            kept[name] = _keep_valid_settings(value, kind, f"{prefix}{name}.", skipped)
        elif not is_section and _is_valid_setting(value, kind):
            kept[name] = value
        else:
            skipped.append(f"{prefix}{name}")
    return kept


def _is_valid_setting(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, dec_hook=lambda kind, secret: kind(secret))
    except (msgspec.ValidationError, TypeError, ValueError):
        return False
    return True


def parse_schedule(config: dict[str, Any]) -> ScheduleConfig | None:
    """Return the schedule section of a run's configuration; None if it has no valid one."""
    try:
        return msgspec.convert(config["schedule"], ScheduleConfig)
    except (KeyError, msgspec.ValidationError):
        return None


def read_quarantine(run_dir: Path, *, files: Files = REAL_WORLD.files) -> list[QuarantinedTask]:
    """Read the quarantined tasks, in the order in which they failed.

    If a task is listed more than once (after a resume), the last line counts.
    """
    tasks = convert_valid(
        read_json_objects(run_dir / QUARANTINE_FILE, files=files), QuarantinedTask
    )
    return list({task.task_seed: task for task in tasks}.values())
