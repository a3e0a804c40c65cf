"""The state of a run at one step: everything but tensors. Each part of it is declared once, by whoever knows it.

And the manifest: what a checkpoint consists of, with names, sizes and checksums of its files, in a file that carries its own
checksum; and how a checkpoint is said to be damaged.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict

import msgspec

from r3async.data.versions import Lineage
from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.appending import RecordFlusher
from r3async.world.real import REAL_WORLD

STATE_SCHEMA = 2
"""Raised by whoever changes what a field means. New fields have defaults and need no new schema."""

CONDUCTOR_RECORD_FILES = ("metrics.jsonl", "episodes.jsonl", "evaluation.jsonl")
LEARNER_RECORD_FILES = ("routing.jsonl", "trained.jsonl")
RECORD_FILES = CONDUCTOR_RECORD_FILES + LEARNER_RECORD_FILES
"""Files of a run with something for each step: a resume takes back what came after its checkpoint."""


class ConductorState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the conductor knows of a run between two steps."""

    admission: dict[str, Any] = {}
    """`AdmissionController.state_dict()`: slots and leases. Nobody who held a lease outlives the run; see
    `AdmissionController.requeue_after_resume`."""
    tasks: dict[str, Any] = {}
    """`TaskHistory.state_dict()`: what tasks scored, if that changes which are posed."""
    record_bytes: dict[str, int] = {}
    """By file name, for example `metrics.jsonl`: how long that record was. `rewind_records` cuts off what came later."""
    record_kept: dict[str, list[str]] = {}
    """Lines behind them that the disk had not taken yet, each with its end. `rewind_records` writes them."""
    pending_rows: list[dict[str, Any]] = []
    """Rows of steps whose weights had not been delivered: not in the record yet."""
    elapsed: float = 0.0
    """Seconds of running, over all processes that the run had so far."""
    generated_tokens: int = 0

    async def with_record_positions(self, run_dir: Path, names: Sequence[str], *, keeper: RecordFlusher) -> Self:
        """And where these records of the run are now, to which this process alone appends; so far they are on the disk, too."""
        positions = {name: keeper.file_position(run_dir / name) for name in names}
        await keeper.fsync_files(run_dir, names)
        kept = {
            name: [line.decode(errors="replace") for line in at.waiting_records]
            for name, at in positions.items()
            if at.waiting_records
        }
        return msgspec.structs.replace(
            self,
            record_bytes=self.record_bytes | {name: at.whole_bytes for name, at in positions.items()},
            record_kept=self.record_kept | kept,
        )


class TrainingState(ConductorState, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """And what the learner adds.

    What its ranks hold (optimizer steps and with them the learning rate, the trust region's controller, random number
    generators) is in their files, see `LearnerMetadata`.
    """

    steps: int
    """Steps made."""
    version: int
    """Published last. Engines are given the checkpoint's weights under this number again."""
    lineage: Lineage = Lineage()
    """In which `version` is counted, with its ancestors."""
    consumed: int
    """The data cursor: every group before this one has been trained."""
    consumed_beyond: list[int] = []
    """Groups that overtook it, and have been trained too (`schedule.window`)."""
    since_publication: tuple[int, int] = (0, 0)
    """Steps made and groups consumed since `version` was published."""

    def __post_init__(self) -> None:
        counts = (self.steps, self.version, self.consumed, *self.since_publication)
        if min(counts) < 0 or max(counts) >= 2**63:
            raise ValueError("steps, version and groups are counts: never negative, and below 2**63")
        if min(self.record_bytes.values(), default=0) < 0:
            raise ValueError("`record_bytes` are lengths, and never negative")
        if any(group <= self.consumed for group in self.consumed_beyond):
            raise ValueError(f"`consumed_beyond` names a group before {self.consumed}, or that group itself")


class TrustRegionState(TypedDict):
    """`coef`: of the KL term. `error`: of the last step; None before the first. `gaps`: see
    `TrustRegion.extrapolate_served_drift`; empty before they are known. `variances`: of the last measurements, see
    `TrustRegion.record_served_gaps`. `reach`: see there. All three are missing where an older release wrote the state."""

    coef: float
    error: float | None
    gaps: NotRequired[list[float | None]]
    variances: NotRequired[list[float]]
    reach: NotRequired[float]


class RunState(TrainingState, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """And whose it is: all of `run.json`."""

    schema: int = STATE_SCHEMA
    run_id: str
    config: dict[str, Any]
    """The resolved configuration (`config_to_dict`)."""
    model_path: str
    """The start path: where configuration, tokenizer and the reference model come from."""
    model_fingerprint: str
    """Of that directory; see `fingerprint_model`."""


class _SchemaOnly(msgspec.Struct):
    schema: int


def encode_state(state: RunState) -> bytes:
    return msgspec.json.format(msgspec.json.encode(state)) + b"\n"


def decode_state(data: bytes) -> RunState:
    """Raises `CheckpointError` with what is wrong."""
    try:
        schema = decode_json(data, _SchemaOnly).schema
        if schema != STATE_SCHEMA:
            raise IncompatibleCheckpoint(
                f"run.json: it is of schema {schema}, and this version of r3async reads {STATE_SCHEMA}: resume with the version "
                "that wrote it, or `r3async export` its model there and start from that"
            )
        return decode_json(data, RunState)
    except MalformedError as error:
        raise CheckpointError(f"run.json: {error}") from error


MANIFEST_FILE = "manifest.json"
MANIFEST_SCHEMA = 1
"""Of the directory. A later one is refused; whoever changes the layout raises it."""

_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_READ_BLOCK_BYTES = 2**20

MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""There is no such file, and there will be none however often it is asked for."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or continued from; the message says which file, why, and what to do."""


class CheckpointUnreadable(CheckpointError):
    """The disk did not give a file of it. Nothing is known against the checkpoint: it may be intact."""


class IncompatibleCheckpoint(CheckpointError):
    """Another version of r3async wrote it, and can read it: it is not damaged."""


def make_read_error(name: str, error: OSError) -> CheckpointError:
    """What reading the file `name` failed with: `CheckpointUnreadable`, except for a file that is not there, which is damage."""
    kind = CheckpointError if error.errno in MISSING_ERRNOS else CheckpointUnreadable
    return kind(f"{name}: {error.strerror or error}")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its name without any folder, its bytes, and their SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the checkpoint made after `step` steps."""

    schema: int
    step: int
    files: list[FileEntry]

    def encode(self) -> bytes:
        """Two lines: JSON, and the SHA-256 of that line."""
        line = msgspec.json.encode(self)
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Raises `CheckpointError` unless every byte of `data` is as `CheckpointManifest.encode` wrote it."""
    line, _, rest = data.partition(b"\n")
    if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise CheckpointError(
            f"{MANIFEST_FILE}: its checksum does not fit what it says: cut off, or changed after it was written"
        )
    try:
        manifest = decode_json(line, CheckpointManifest)
    except MalformedError as error:
        raise CheckpointError(f"{MANIFEST_FILE}: {error}") from error
    if manifest.schema != MANIFEST_SCHEMA:
        raise IncompatibleCheckpoint(
            f"{MANIFEST_FILE}: layout {manifest.schema}, and this version of r3async reads layout {MANIFEST_SCHEMA}: use the "
            "one that wrote it"
        )
    for file in manifest.files:
        if not _FILE_NAME_PATTERN.fullmatch(file.name):
            raise CheckpointError(f"{MANIFEST_FILE}: {file.name!r} is not the name of a file of a checkpoint")
    if len({f.name for f in manifest.files}) != len(manifest.files):
        raise CheckpointError(f"{MANIFEST_FILE}: a file is listed twice")
    return manifest


def verify_checkpoint_file(directory: Path, file: FileEntry, *, files: Files = REAL_WORLD.files) -> None:
    """Raises `CheckpointError` if the file is not there, or not as it was written, `CheckpointUnreadable` if the disk does
    not give it."""
    path = directory / file.name
    try:
        with files.open(path) as stream:
            size = stream.size()
            if size != file.size:
                raise CheckpointError(
                    f"{file.name}: {size} bytes, not {file.size}: cut off, or changed after it was written"
                )
            digest = hashlib.sha256()
            for at in range(0, size, _READ_BLOCK_BYTES):
                digest.update(stream.read(at, _READ_BLOCK_BYTES))
    except OSError as error:
        raise make_read_error(file.name, error) from error
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(f"{file.name}: its checksum is wrong: changed after it was written")


def write_checkpoint_file(path: Path, data: bytes, *, files: Files = REAL_WORLD.files) -> FileEntry:
    """Write a new file, to the disk."""
    with files.open(path, exclusive=True) as stream:
        stream.append([data])
        stream.fsync()
    return FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest())
