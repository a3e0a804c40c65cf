"""The learner's checkpoints: copied between two steps, written beside those that follow, and what a resumed run begins with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.appending import Keeper
from r3async.checkpoint import CheckpointError, Checkpoints, CheckpointWriter, RunState
from r3async.checkpoint.resume import fingerprint_model
from r3async.checkpoint.writer import WriteParts
from r3async.config import Config, to_dict
from r3async.lineage import FIRST, Lineage
from r3async.world import World
from r3async.world.real import REAL

CONDUCTOR_RECORDS = ("metrics.jsonl", "episodes.jsonl", "evaluation.jsonl")
LEARNER_RECORDS = ("routing.jsonl", "trained.jsonl")
RECORDS = CONDUCTOR_RECORDS + LEARNER_RECORDS
"""Files of a run with something for each step: a resume takes back what came after its checkpoint."""


class Books(msgspec.Struct, frozen=True):
    """The conductor's part of a checkpoint; see `RunState`."""

    admission: dict[str, Any]
    record_bytes: dict[str, int]
    pending_rows: list[dict[str, Any]]
    elapsed: float
    generated_tokens: int
    record_kept: dict[str, list[str]] = {}

    async def with_records(self, run_dir: Path, names: Sequence[str], *, keeper: Keeper) -> Books:
        """And where these records of the run are now, to which this process alone appends; so far they are on the disk, too."""
        positions = {name: keeper.position(run_dir / name) for name in names}
        await keeper.sync(run_dir, names)
        kept = {name: [line.decode(errors="replace") for line in at.kept] for name, at in positions.items() if at.kept}
        return msgspec.structs.replace(
            self,
            record_bytes=self.record_bytes | {name: at.nbytes for name, at in positions.items()},
            record_kept=self.record_kept | kept,
        )


class Progress(msgspec.Struct, frozen=True):
    """The learner's part."""

    steps: int
    version: int
    consumed: int
    consumed_beyond: list[int]
    since_publication: tuple[int, int]
    lineage: Lineage = FIRST


def checkpoint_directory(config: Config, run_dir: Path) -> Path:
    """Where the run's checkpoints are."""
    return Path(config.checkpoint.directory) if config.checkpoint.directory else run_dir / "checkpoints"


class Saver:
    """Belongs to the learner's event loop. `events`: a structlog logger."""

    def __init__(
        self, config: Config, run_id: str, model_path: Path, run_dir: Path, events: Any, *, world: World = REAL
    ):
        settings = config.checkpoint
        self._checkpoints = Checkpoints(
            checkpoint_directory(config, run_dir),
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            report=self._say,
            files=world.files,
        )
        self._events, self._world = events, world
        self._writer = CheckpointWriter(
            self._checkpoints, settings, report=self._say, threads=world.threads, clock=world.clock
        )
        self._run_id, self._config, self._model_path = run_id, to_dict(config), model_path
        self._fingerprint = ""
        self._failure: CheckpointError | None = None
        """What the last writing that failed did so with."""
        self._begun = self._written = -1
        """Steps made before the last checkpoint that was begun, and before the last that is there."""

    def _say(self, event: str, /, **facts: object) -> None:
        say = self._events.error if event.endswith(("_failed", "_bad")) else self._events.info
        say(event, **facts)

    async def save(
        self,
        hold: Callable[[], Awaitable[object]],
        write: WriteParts,
        books: Books,
        progress: Progress,
        then: Callable[[], object],
    ) -> None:
        """Copy the state between two steps (`hold`), and begin to write it (`write`); one copy waits at most. `then`: see
        `CheckpointWriter.save`.

        A writing that fails is reported, and training goes on: the next checkpoint is the next try. Raises `CheckpointError` if
        one does not end within `checkpoint.write_timeout`.
        """
        await self._let(self._writer.wait())
        if not self._fingerprint:
            files, threads = self._world.files, self._world.threads
            self._fingerprint = await threads.run(fingerprint_model, self._model_path, files=files)
        state = RunState(
            run_id=self._run_id,
            config=self._config,
            model_path=str(self._model_path),
            model_fingerprint=self._fingerprint,
            **msgspec.structs.asdict(progress),
            **msgspec.structs.asdict(books),
        )
        await hold()
        self._begun = progress.steps

        def written() -> None:
            self._written = progress.steps
            then()

        await self._let(self._writer.save(state, write, written))

    async def _let(self, call: Awaitable[None]) -> None:
        try:
            await call
        except CheckpointError as error:
            if self._writer.busy:
                raise
            self._failure = error

    async def finish(self) -> None:
        """Wait for what is being written. Raises `CheckpointError` if the last one failed."""
        await self._let(self._writer.wait())
        if self._failure is not None and self._written != self._begun:
            raise self._failure
