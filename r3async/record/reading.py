"""The files of a run, read. Several processes may append to one, and be killed meanwhile; disks and people damage them. What
cannot be read is passed over, and told as an event (`skipped_event`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from r3async.config import Config, ScheduleConfig, to_dict
from r3async.untrusted import Malformed, decode_object, decode_toml
from r3async.world import File, Files
from r3async.world.files import read_file
from r3async.world.real import REAL

EVALUATION = "evaluation.jsonl"
"""Of a run: an object an evaluation, with the step after which it began."""
EPISODES = "episodes.jsonl"
"""Of a run: examples of episodes, an object each."""
TIMELINE = "timeline.jsonl"
"""Of a run: who did what when; see `record/timeline.py`."""
QUARANTINE = "quarantine.jsonl"
"""Of a run: tasks that are not posed any more, because every episode of them failed."""
CONFIG_FILE = "config.toml"
"""Of a run: its resolved configuration."""
BLOCK = 2**20
T = TypeVar("T")
Time = Annotated[float, msgspec.Meta(ge=0, le=2**36)]
"""Unix seconds that a calendar has."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _StepLine(msgspec.Struct):
    step: Count | None = None
    version: Count | None = None
    time: Time | None = None


class _EventLine(msgspec.Struct):
    event: str = ""
    level: str = ""
    role: str = ""
    time: Time = 0.0


class _EpisodeLine(msgspec.Struct):
    step: Count | None = None
    turns: list[dict[str, Any]] = []


class _SpanLine(msgspec.Struct):
    start: Time
    end: Time
    step: Count | None = None
    version: Count | None = None


class QuarantinedTask(msgspec.Struct, frozen=True):
    """`group`: the one that failed. `from_group`: the first that does not pose the task any more. `failed_by`: `environment`, or
    `learner`, which refused its trajectories. `time`: in seconds since 1970."""

    task_seed: int
    group: int
    from_group: int
    failed_by: str
    error: str
    time: float


SHAPES: dict[str, Any] = {
    "metrics.jsonl": _StepLine,
    "events.jsonl": _EventLine,
    EVALUATION: _StepLine,
    EPISODES: _EpisodeLine,
    TIMELINE: _SpanLine,
    QUARANTINE: QuarantinedTask,
    "routing.jsonl": _StepLine,
}
"""By the name of a file: what its readers rely on in each line. Whatever else a line has may be anything."""


class Lines(NamedTuple):
    """`objects`: those of a file of JSON lines, in order. `skipped`: the numbers, from 1, of lines that are none."""

    objects: list[dict[str, Any]]
    skipped: list[int]


def read_lines(path: Path, *, files: Files = REAL.files) -> Lines:
    """Read a file of JSON lines; a missing one has none. A last line that is torn may still be written: it is not skipped, but
    not there yet."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return Lines([], [])
    with file:
        *whole, last = _lines(file)
    values = [decode_line(path.name, line) for line in whole]
    skipped = [
        at for at, (line, value) in enumerate(zip(whole, values, strict=True), 1) if value is None and line.strip()
    ]
    values.append(decode_line(path.name, last))
    return Lines([value for value in values if value is not None], skipped)


def read_objects(path: Path, *, files: Files = REAL.files) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON lines, in order. What is none is passed over; a missing file has none."""
    return read_lines(path, files=files).objects


def read_files(
    run_dir: Path, *names: str, files: Files = REAL.files
) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the objects of each of a run's files, and the events that say what was passed over, of its `config.toml` too."""
    read = [read_lines(run_dir / name, files=files) for name in names]
    told = [skipped_event(name, len(lines.skipped), lines.skipped) for name, lines in zip(names, read, strict=True)]
    told.append(damaged_config_event(run_dir, files=files))
    return [lines.objects for lines in read], [event for events in told for event in events]


def decode_line(file: str, line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of the file of that name; None for what none of its writers has written."""
    try:
        value = decode_object(line)
        if (shape := SHAPES.get(file)) is not None:
            msgspec.convert(value, shape)
    except (Malformed, msgspec.ValidationError):
        return None
    return value


def skipped_event(file: str, count: int, numbers: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return what is told of `count` lines of a file that were passed over, as a warning beside the run's own; nothing if there
    are none. `numbers`: of the lines, where they are known."""
    if not count:
        return []
    told = {"level": "warning", "event": "lines_skipped", "file": file, "lines": count}
    return [told | ({"first": numbers[0]} if numbers else {})]


def converted(objects: Iterable[dict[str, Any]], kind: type[T]) -> Iterator[T]:
    """Those that are a `kind`; the others are passed over."""
    for value in objects:
        with contextlib.suppress(msgspec.ValidationError):
            yield msgspec.convert(value, kind)


def _lines(file: File) -> Iterator[bytes]:
    at, rest = 0, b""
    while block := file.read(at, BLOCK):
        at += len(block)
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    yield rest


def read_run_config(run_dir: Path, *, files: Files = REAL.files) -> dict[str, Any]:
    """The resolved configuration as it was written, as plain data; {} if there is none, or a damaged one."""
    try:
        found = decode_toml(read_file(run_dir / CONFIG_FILE, files=files))
    except (OSError, Malformed):
        return {}
    tables = to_dict(Config())
    return {key: value for key, value in found.items() if isinstance(value, dict) == isinstance(tables.get(key), dict)}


def damaged_config_event(run_dir: Path, *, files: Files = REAL.files) -> list[dict[str, Any]]:
    """Return the event of a configuration that is there and cannot be read; nothing of another."""
    try:
        text = read_file(run_dir / CONFIG_FILE, files=files)
        decode_toml(text)
    except OSError:
        return []
    except Malformed:
        return skipped_event(CONFIG_FILE, len(text.splitlines()) or 1)
    return []


def read_schedule(config: dict[str, Any]) -> ScheduleConfig | None:
    """Of a run's configuration; None if it has none."""
    try:
        return msgspec.convert(config["schedule"], ScheduleConfig)
    except (KeyError, msgspec.ValidationError):
        return None


def read_quarantine(run_dir: Path, *, files: Files = REAL.files) -> list[QuarantinedTask]:
    """In the order in which they failed. Of a task that is named again (after a resume) the last line counts."""
    tasks = converted(read_objects(run_dir / QUARANTINE, files=files), QuarantinedTask)
    return list({task.task_seed: task for task in tasks}.values())
