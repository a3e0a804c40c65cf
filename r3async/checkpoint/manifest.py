"""The manifest of a checkpoint, and the errors that report a damaged one.

The manifest lists a checkpoint's files with names, sizes and checksums, in a file that carries its
own checksum.
"""

from __future__ import annotations

import errno
import hashlib
import re
from pathlib import Path

import msgspec

from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.real import REAL_WORLD

MANIFEST_FILE = "manifest.json"
MANIFEST_SCHEMA = 1
"""Layout version of a checkpoint's directory, to be raised when the layout changes. Any
other one is refused."""

_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_READ_BLOCK_BYTES = 2**20

MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Error numbers of a file that does not exist, and will not however often it is tried."""


class CheckpointError(RuntimeError):
    """Failure to write a checkpoint, to read it or to continue from it; the message says which
    file, why, and what to do."""


class CheckpointUnreadable(CheckpointError):
    """Failure of the disk to return a file of a checkpoint, which may be intact: nothing is
    known against it."""


class IncompatibleCheckpoint(CheckpointError):
    """Failure to read an undamaged checkpoint that another version of r3async
    wrote, and can read."""


def make_read_error(name: str, error: OSError) -> CheckpointError:
    """Return the error for a failed read of the file `name`: `CheckpointUnreadable`, or
    `CheckpointError` if the file does not exist, which is damage."""
    kind = CheckpointError if error.errno in MISSING_ERRNOS else CheckpointUnreadable
    return kind(f"{name}: {error.strerror or error}")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint: its name without any folder, its size in bytes, and its
    SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of the checkpoint made after `step` steps."""

    schema: int
    step: int
    files: list[FileEntry]

    def encode(self) -> bytes:
        """Return two lines: JSON, and the SHA-256 of that line."""
        line = msgspec.json.encode(self)
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Decode a manifest. Raises `CheckpointError` unless every byte of `data` is as
    `CheckpointManifest.encode` wrote it."""
    line, _, rest = data.partition(b"\n")
    if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise CheckpointError(
            f"{MANIFEST_FILE}: its checksum does not fit what it says: cut off, or changed "
            "after it was written"
        )
    try:
        manifest = decode_json(line, CheckpointManifest)
    except MalformedError as error:
        raise CheckpointError(f"{MANIFEST_FILE}: {error}") from error
    if manifest.schema != MANIFEST_SCHEMA:
        raise IncompatibleCheckpoint(
            f"{MANIFEST_FILE}: layout {manifest.schema}, and this version of r3async reads layout "
            f"{MANIFEST_SCHEMA}: use the one that wrote it"
        )
    for file in manifest.files:
        if not _FILE_NAME_PATTERN.fullmatch(file.name):
            raise CheckpointError(
                f"{MANIFEST_FILE}: {file.name!r} is not the name of a file of a checkpoint"
            )
    if len({f.name for f in manifest.files}) != len(manifest.files):
        raise CheckpointError(f"{MANIFEST_FILE}: a file is listed twice")
    return manifest


def verify_checkpoint_file(
    directory: Path, file: FileEntry, *, files: Files = REAL_WORLD.files
) -> None:
    """Raise `CheckpointError` if the file is missing or not as it was written,
    `CheckpointUnreadable` if the disk fails to return it."""
    path = directory / file.name
    try:
        with files.open(path) as stream:
            size = stream.size()
            if size != file.size:
                raise CheckpointError(
                    f"{file.name}: {size} bytes, not {file.size}: cut off, or changed "
                    "after it was written"
                )
            digest = hashlib.sha256()
            for at in range(0, size, _READ_BLOCK_BYTES):
                digest.update(stream.read(at, _READ_BLOCK_BYTES))
    except OSError as error:
        raise make_read_error(file.name, error) from error
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(f"{file.name}: its checksum is wrong: changed after it was written")


def write_checkpoint_file(path: Path, data: bytes, *, files: Files = REAL_WORLD.files) -> FileEntry:
    """Write a new file, durably, and return its entry."""
    with files.open(path, exclusive=True) as stream:
        stream.append([data])
        stream.fsync()
    return FileEntry(path.name, len(data), hashlib.sha256(data).hexdigest())
