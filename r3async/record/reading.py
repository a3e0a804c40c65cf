"""The files of a run, read. Several processes may append to one, and be killed meanwhile: what is torn is passed over."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from r3async.config import ScheduleConfig
from r3async.world import File, Files
from r3async.world.files import read_file
from r3async.world.real import REAL

EVALUATION = "evaluation.jsonl"
"""Of a run: an object an evaluation, with the step after which it began."""
EPISODES = "episodes.jsonl"
"""Of a run: examples of episodes, an object each."""
QUARANTINE = "quarantine.jsonl"
"""Of a run: tasks that are not posed any more, because every episode of them failed."""
BLOCK = 2**20
T = TypeVar("T")


def read_objects(path: Path, *, files: Files = REAL.files) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, in order. A torn or foreign line is passed over; a missing file has none."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return []
    with file:
        values = [_decoded(line) for line in _lines(file)]
    return [value for value in values if isinstance(value, dict)]


def converted(objects: Iterable[dict[str, Any]], kind: type[T]) -> Iterator[T]:
    """Those that are a `kind`; the others are passed over."""
    for value in objects:
        with contextlib.suppress(msgspec.ValidationError):
            yield msgspec.convert(value, kind)


def _decoded(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return None


def _lines(file: File) -> Iterator[bytes]:
    at, rest = 0, b""
    while block := file.read(at, BLOCK):
        at += len(block)
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    yield rest


def read_run_config(run_dir: Path, *, files: Files = REAL.files) -> dict[str, Any]:
    """The resolved configuration as it was written, as plain data; {} if there is none."""
    try:
        return tomllib.loads(read_file(run_dir / "config.toml", files=files).decode())
    except (OSError, ValueError):
        return {}


def read_schedule(config: dict[str, Any]) -> ScheduleConfig | None:
    """Of a run's configuration; None if it has none."""
    try:
        return msgspec.convert(config["schedule"], ScheduleConfig)
    except (KeyError, msgspec.ValidationError):
        return None


class QuarantinedTask(msgspec.Struct, frozen=True):
    """`group`: the one that failed. `from_group`: the first that does not pose the task any more. `failed_by`: `environment`, or
    `learner`, which refused its trajectories. `time`: in seconds since 1970."""

    task_seed: int
    group: int
    from_group: int
    failed_by: str
    error: str
    time: float


def read_quarantine(run_dir: Path, *, files: Files = REAL.files) -> list[QuarantinedTask]:
    """In the order in which they failed. Of a task that is named again (after a resume) the last line counts."""
    tasks = converted(read_objects(run_dir / QUARANTINE, files=files), QuarantinedTask)
    return list({task.task_seed: task for task in tasks}.values())
