"""What a checkpoint consists of: names, sizes and checksums of its files, in a file that carries its own checksum. And how one
is said to be damaged."""

from __future__ import annotations

import errno
import hashlib
import re
from pathlib import Path

import msgspec

from r3async.world import Files
from r3async.world.real import REAL

MANIFEST = "manifest.json"
SCHEMA = 1
"""Of the directory. A later one is refused; whoever changes the layout raises it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_BLOCK = 2**20

MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""There is no such file, and there will be none however often it is asked for."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or continued from; the message says which file, why, and what to do."""


class Unreadable(CheckpointError):
    """The disk did not give a file of it. Nothing is known against the checkpoint: it may be intact."""


def not_read(name: str, error: OSError) -> CheckpointError:
    """What reading the file `name` failed with: `Unreadable`, except for a file that is not there, which is damage."""
    kind = CheckpointError if error.errno in MISSING else Unreadable
    return kind(f"{name}: {error.strerror or error}")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its name without any folder, its bytes, and their SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the checkpoint made after `step` steps."""

    schema: int
    step: int
    files: list[FileRecord]

    def encode(self) -> bytes:
        """Two lines: JSON, and the SHA-256 of that line."""
        line = msgspec.json.encode(self)
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Raises `CheckpointError` unless every byte of `data` is as `Manifest.encode` wrote it."""
    line, _, rest = data.partition(b"\n")
    if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise CheckpointError(
            f"{MANIFEST}: its checksum does not fit what it says: cut off, or changed after it was written"
        )
    try:
        manifest = msgspec.json.decode(line, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from error
    if manifest.schema != SCHEMA:
        raise CheckpointError(
            f"{MANIFEST}: layout {manifest.schema}, and this version of r3async reads layout {SCHEMA}: use the one that wrote it"
        )
    for file in manifest.files:
        if not _NAME.fullmatch(file.name):
            raise CheckpointError(f"{MANIFEST}: {file.name!r} is not the name of a file of a checkpoint")
    if len({f.name for f in manifest.files}) != len(manifest.files):
        raise CheckpointError(f"{MANIFEST}: a file is listed twice")
    return manifest


def check_file(directory: Path, file: FileRecord, *, files: Files = REAL.files) -> None:
    """Raises `CheckpointError` if the file is not there, or not as it was written, `Unreadable` if the disk does not give it."""
    path = directory / file.name
    try:
        with files.open(path) as stream:
            size = stream.size()
            if size != file.size:
                raise CheckpointError(
                    f"{file.name}: {size} bytes, not {file.size}: cut off, or changed after it was written"
                )
            digest = hashlib.sha256()
            for at in range(0, size, _BLOCK):
                digest.update(stream.read(at, _BLOCK))
    except OSError as error:
        raise not_read(file.name, error) from error
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(f"{file.name}: its checksum is wrong: changed after it was written")


def write_file(path: Path, data: bytes, *, files: Files = REAL.files) -> FileRecord:
    """Write a new file, to the disk."""
    with files.open(path, new=True) as stream:
        stream.append([data])
        stream.sync()
    return FileRecord(path.name, len(data), hashlib.sha256(data).hexdigest())
