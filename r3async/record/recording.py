"""Recording of training data (`observe.record = "full"`), to replay steps without engines,
environments or Ray.

The run's `recording/` directory has one file per step, named by step and lineage. It begins with a
description of the step and its results, followed by the trajectories in the wire format. The file
of a step is complete before a checkpoint of that step is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from r3async.config import Config, ConfigError, config_from_saved, config_to_dict
from r3async.data.container import RecordFormat, TornRecord, map_file
from r3async.data.tokens import Trajectory
from r3async.data.versions import Lineage
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.data.wire_frames import WireError, compute_checksum
from r3async.untrusted import MalformedError, decode_json, decode_json_object
from r3async.world import Buffer, EventReporter, Files, World
from r3async.world.files import make_directory, read_file, replace_file, write_atomically
from r3async.world.real import REAL_WORLD
from r3async.world.stages import create_stage_task

if TYPE_CHECKING:
    from r3async.learner.trainer import StepOutcome

RECORDING_DIRECTORY = "recording"
STEP_CONTAINER = RecordFormat(b"r3steps2")
WRITE_CHUNK_BYTES = 2**18
"""Approximate number of bytes per write."""
_STEP_FILE_NAME = re.compile(r"(\d{9,})-(\d{4,})\.step")


class RecordingError(ValueError):
    """A recording that is unreadable or incomplete; the message names the file or the step."""


class RecordedStep(msgspec.Struct, frozen=True):
    """One recorded step of a run, without its trajectories.

    Attributes:
        step: Number of the step, from 1.
        version: Version of the weights that the step started from.
        lineage: Lineage in which `version` counts.
        minibatches: Digests of the stages of each minibatch (`learner.digests.DIGEST_STAGES`).
        metrics: Metrics of the step.
        groups: Number of trajectories of each group, in the order in which the step took them.
        trajectories: Digest of the trajectories in this file.
    """

    step: int
    version: int
    lineage: int
    minibatches: list[dict[str, int]]
    metrics: Mapping[str, float | None]
    groups: list[int] = []
    trajectories: int = 0


class StepRecorder:
    """The recorder of one start of a run. It writes the steps in a separate worker thread.

    It never ends the run: a step that cannot be written is reported, and a replay names
    the missing step.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        lineage: Lineage,
        report_event: EventReporter,
        *,
        world: World = REAL_WORLD,
    ):
        self._enabled = config.observe.record == "full"
        self._lineage = lineage.number
        self._directory = run_dir / RECORDING_DIRECTORY
        self._report = report_event
        self._files = world.files
        self._lane = world.threads.new_worker("recording")
        self._writing: set[asyncio.Task[None]] = set()
        self._config = config
        self._settings_written = False

    def add(self, step: int, version: int, outcome: StepOutcome) -> None:
        """Start writing step `step`, which was trained from weights of `version`. Its trajectories
        must not change."""
        if not self._enabled:
            return
        if not self._settings_written:
            self._settings_written = True
            self._start_write(
                "settings", write_recorded_settings, self._directory, self._config, self._lineage
            )
        sizes = [len(group) for group in outcome.groups]
        made = RecordedStep(step, version, self._lineage, outcome.digests, outcome.metrics, sizes)
        self._start_write(
            step,
            write_recorded_step,
            self._directory,
            made,
            [t for group in outcome.groups for t in group],
        )

    def _start_write(self, name: object, write: Callable[..., object], *args: Any) -> None:
        task = create_stage_task("recording", self._write_reported(name, write, *args))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def wait_written(self) -> None:
        """Wait until all steps added so far are written."""
        await asyncio.gather(*self._writing)

    async def close(self) -> None:
        await self.wait_written()
        await self._lane.close()

    async def _write_reported(self, name: object, write: Callable[..., object], *args: Any) -> None:
        try:
            await self._lane.run(write, *args, self._files)
        except (OSError, WireError) as error:
            hint = "the run continues; `python -m r3async.tools replay` will name what is missing"
            self._report("not_recorded", step=name, error=str(error), hint=hint)


def write_recorded_settings(
    directory: Path, config: Config, lineage: int, files: Files = REAL_WORLD.files
) -> None:
    """Write the configuration that the steps of `lineage` are trained with, without secrets.
    Raises `OSError`."""
    make_directory(directory, files=files)
    replace_file(
        directory / f"settings-{lineage:04d}.json",
        msgspec.json.encode(config_to_dict(config)),
        files=files,
    )


def read_recorded_settings(run_dir: Path, lineage: int, files: Files = REAL_WORLD.files) -> Config:
    """Read the configuration that the steps of `lineage` were trained with. Raises
    `RecordingError`."""
    path = run_dir / RECORDING_DIRECTORY / f"settings-{lineage:04d}.json"
    try:
        return config_from_saved(decode_json_object(read_file(path, files=files)))
    except (OSError, MalformedError, ConfigError) as error:
        raise RecordingError(f"{path}: {error}") from error


def write_recorded_step(
    directory: Path,
    step: RecordedStep,
    trajectories: Sequence[Trajectory],
    files: Files = REAL_WORLD.files,
) -> Path:
    """Write the file of a step and return its path. Raises `OSError` or `WireError`."""
    make_directory(directory, files=files)
    frames: list[Sequence[Buffer]] = [encode_trajectory(t) for t in trajectories]
    step = msgspec.structs.replace(step, trajectories=_digest_frames(frames))
    records = [[msgspec.json.encode(step)], *frames]
    path = directory / f"{step.step:09d}-{step.lineage:04d}.step"
    pieces = (piece for record in records for piece in STEP_CONTAINER.encode_record(record))
    write_atomically(path, _join_pieces(pieces), fsync=True, files=files)
    files.fsync_directory(directory)
    return path


def _join_pieces(pieces: Iterable[Buffer]) -> Iterator[bytes]:
    """Join the pieces into chunks of about `WRITE_CHUNK_BYTES` bytes.

    A short trajectory has five pieces, and a system call costs more than copying them.
    """
    waiting: list[Buffer] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= WRITE_CHUNK_BYTES:
            yield b"".join(waiting)
            waiting = []
            size = 0
    if waiting:
        yield b"".join(waiting)


def read_recorded_step(
    path: Path, files: Files = REAL_WORLD.files
) -> tuple[RecordedStep, list[list[Trajectory]]]:
    """Read the file of a step: the step and its groups of trajectories. Raises `RecordingError`."""
    frames: list[list[memoryview]] = []
    try:
        for record in STEP_CONTAINER.iter_records(map_file(path, files=files)):
            if isinstance(record, TornRecord):
                raise RecordingError(f"{path}: at byte {record.offset}: {record.reason}")
            frames.append(record.frames)
        if not frames:
            raise RecordingError(f"{path} is empty")
        step = decode_json(frames[0][0], RecordedStep)
        if _digest_frames(frames[1:]) != step.trajectories:
            raise RecordingError(f"{path}: its trajectories are not those that were written")
        each = iter([decode_trajectory(some) for some in frames[1:]])
        return step, [[next(each) for _ in range(count)] for count in step.groups]
    except (OSError, MalformedError, WireError, RuntimeError) as error:
        raise RecordingError(f"{path}: {error}") from error


def find_recorded_steps(
    run_dir: Path, after: int = 0, files: Files = REAL_WORLD.files
) -> list[Path]:
    """Return the files of the steps after `after` that led to the run's weights, in order.

    If a resume repeated a step, the file of the newest lineage counts. Raises `RecordingError`
    naming a missing step.
    """
    directory = run_dir / RECORDING_DIRECTORY
    found: dict[int, dict[int, Path]] = {}
    for name in files.list_names(directory) if files.stat(directory) else ():
        named = _STEP_FILE_NAME.fullmatch(name)
        if named:
            found.setdefault(int(named[2]), {})[int(named[1])] = directory / name
    if not found:
        raise RecordingError(
            f'{run_dir} has no recording: `observe.record = "full"` makes one while a run trains'
        )
    chosen: dict[int, Path] = {}
    end = max(found[max(found)])
    for lineage in sorted(found, reverse=True):
        # An older lineage's steps count until a newer one begins.
        first = min(chosen, default=end + 1)
        chosen |= {step: path for step, path in found[lineage].items() if step < first}
    missing = [step for step in range(after + 1, end + 1) if step not in chosen]
    if missing:
        raise RecordingError(
            f"{directory} has no step {missing[0]}, of {end}: it was not recorded, or the "
            "file was removed"
        )
    return [chosen[step] for step in range(after + 1, end + 1)]


def _digest_frames(frames: Sequence[Sequence[Buffer]]) -> int:
    return compute_checksum(frame for some in frames for frame in some)
