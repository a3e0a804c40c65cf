"""The learner's host: a version as one file, which one process writes, or several ranks together, and the delta beside it.

No rank has more than its own part: each writes its tensors into its own region of the file, and tells their checksums.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.data.container import encode_header
from r3async.weights.content import EncodedWeights
from r3async.weights.delta import BLOCK_BYTES, blocks, encode, head_of, identity, records, worth
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.weights.publish import BUCKET_BYTES, Publication, Publisher, VersionFolder, delta_path
from r3async.world import ActorLost, Buffer, File, World
from r3async.world.disk import write_at
from r3async.world.files import write_aside
from r3async.world.real import REAL

OnRanks = Callable[[str, Sequence[tuple[Any, ...]]], list[Any]]
"""A method of every rank, each with arguments of its own; what they return, in the order of the ranks."""


class Described(msgspec.Struct, frozen=True):
    """A rank's part of `version`: name, dtype and shape of each tensor as stored, in the order of its region."""

    version: int
    tensors: list[tuple[str, str, tuple[int, ...]]]


class DeltaPublisher(Publisher):
    """A `Publisher` for hosts that fetch: beside a version is its delta from the one before, if it is worth it. The publication's
    one part is the identity of that, or None."""

    def __init__(self, directory: Path, bucket_bytes: int = BUCKET_BYTES, world: World = REAL):
        super().__init__(directory, bucket_bytes=bucket_bytes, world=world)
        self._last: WeightManifest | None = None

    def announce(self, manifest: WeightManifest) -> Publication:
        """With a part: the identity of the version that the delta beside the file changes, or None. Where the disk takes no delta
        hosts fetch all of the version."""
        before, self._last = self._last, manifest
        made = False
        with contextlib.suppress(OSError):
            made = before is not None and self._write_delta(before, manifest)
        return Publication(manifest, [identity(before) if before is not None and made else None])

    def _write_delta(self, before: WeightManifest, manifest: WeightManifest) -> bool:
        """Whether it is worth it, and there."""
        with contextlib.ExitStack() as opened:
            pair = files_of(opened, before, manifest, self._files.open)
            if pair is None:
                return False
            pieces = encode(identity(before), identity(manifest), *pair)
            write_aside(delta_path(Path(manifest.path)), pieces, sync=False, files=self._files)
        return True


def files_of(
    opened: contextlib.ExitStack, before: WeightManifest, manifest: WeightManifest, open_file: Callable[[Path], File]
) -> tuple[File, File] | None:
    """The files of two versions, if both are there and a delta between them is worth it."""
    try:
        old, new = (opened.enter_context(open_file(Path(m.path))) for m in (before, manifest))
    except FileNotFoundError:
        return None
    return (old, new) if worth(old, new) else None


class ShardedPublisher(VersionFolder):
    """Versions that ranks of this host write together. `deltas`: see `DeltaPublisher`."""

    def __init__(self, directory: Path, on_ranks: OnRanks, ranks: int, *, deltas: bool, world: World = REAL):
        super().__init__(directory, keep=2, world=world)
        self._on_ranks, self._ranks, self._deltas = on_ranks, ranks, deltas
        self._last: WeightManifest | None = None

    def send(self, reading: Collection[int] = ()) -> Publication:
        """Have the ranks write their snapshots; see `VersionFolder.write`."""
        parts: list[Described] = self._on_ranks("describe_share", [()] * self._ranks)
        version = parts[0].version
        names = [name for part in parts for name, _, _ in part.tensors]
        if any(part.version != version for part in parts):
            raise WeightError(f"the ranks hold versions {sorted({p.version for p in parts})} of the weights")
        if len(set(names)) != len(names) or not names:
            raise WeightError(f"version {version}: {len(names)} tensors of {len(set(names))} names")
        manifest = self._write(version, parts, reading)
        before, self._last = self._last, manifest
        if not self._deltas:
            return Publication(manifest)
        try:
            return Publication(manifest, [before and self._delta(before, manifest)])
        except (ActorLost, OSError):  # of a rank, or of the disk; the version is there, and hosts fetch all of it
            return Publication(manifest, [None])

    def _write(self, version: int, parts: Sequence[Described], reading: Collection[int]) -> WeightManifest:
        import torch

        described = [(name, getattr(torch, dtype), shape) for part in parts for name, dtype, shape in part.tensors]
        header = encode_header(described)
        starts = [len(header)]
        for part in parts:
            starts.append(starts[-1] + sum(math.prod(s) * getattr(torch, d).itemsize for _, d, s in part.tensors))
        path = self.admit(version, starts[-1], reading)
        aside = path.with_name(f".{path.name}")
        try:
            self._files.remove(aside)
            with self._files.open(aside, new=True, mode=0o600) as file:
                file.append([header])
                file.truncate(starts[-1])
            written = self._on_ranks("write_share", [(str(aside), start) for start in starts[:-1]])
            self._files.rename(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):  # what it takes is needed when this is tried again
                self._files.remove(aside)
            raise
        self.add(version, path, reading)
        entries: dict[str, TensorEntry] = {}
        for each in written:
            entries |= each
        return WeightManifest(version=version, path=str(path), tensors=entries, nbytes=starts[-1] - len(header))

    def _delta(self, before: WeightManifest, manifest: WeightManifest) -> Any:
        with contextlib.ExitStack() as opened:
            pair = files_of(opened, before, manifest, self._files.open)
            if pair is None:
                return None
            nbytes = pair[1].size()
        count = len(list(blocks(nbytes, BLOCK_BYTES)))
        path = delta_path(Path(manifest.path))
        bounds = [count * rank // self._ranks for rank in range(self._ranks + 1)]
        parts = [path.with_name(f".{path.name}.{rank}") for rank in range(self._ranks)]
        self._on_ranks(
            "write_delta", [(before, manifest, bounds[r], bounds[r + 1], str(parts[r])) for r in range(self._ranks)]
        )
        head = head_of(identity(before), identity(manifest), nbytes)
        write_aside(path, self._joined(head, parts), sync=False, files=self._files)
        return identity(before)

    def _joined(self, head: bytes, parts: Iterable[Path]) -> Iterable[Buffer]:
        yield head
        for part in parts:
            with self._files.open(part) as file:
                yield file.map()
            self._files.remove(part)


def write_region(path: str, start: int, encoded: EncodedWeights) -> dict[str, TensorEntry]:
    """A rank's tensors into its region of the file, a bucket at a time. Returns what is there now."""
    write_at(Path(path), start, encoded.data())
    return encoded.entries


def write_delta_part(
    before: WeightManifest, manifest: WeightManifest, first: int, last: int, path: str, world: World = REAL
) -> None:
    """The blocks `first` to `last` of a delta, into a file of their own."""
    with world.files.open(Path(before.path)) as old, world.files.open(Path(manifest.path)) as new:
        write_aside(Path(path), records(old, new, first, last), sync=False, files=world.files)
