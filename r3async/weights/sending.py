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

from r3async.data.container import encode_safetensors_header
from r3async.weights.content import SafetensorsEncoder
from r3async.weights.delta import (
    DELTA_BLOCK_BYTES,
    digest_version,
    encode_delta,
    encode_records,
    is_delta_worthwhile,
    iter_blocks,
    make_delta_header,
)
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.weights.publish import DEFAULT_BUCKET_BYTES, TransferOffer, VersionFolder, VersionStore, delta_path
from r3async.world import ActorLostError, Buffer, File, World
from r3async.world.disk import write_at
from r3async.world.files import write_atomically
from r3async.world.real import REAL_WORLD

CallRanks = Callable[[str, Sequence[tuple[Any, ...]]], list[Any]]
"""A method of every rank, each with arguments of its own; what they return, in the order of the ranks."""


class ShareDescription(msgspec.Struct, frozen=True):
    """A rank's part of `version`: name, dtype and shape of each tensor as stored, in the order of its region."""

    version: int
    tensors: list[tuple[str, str, tuple[int, ...]]]


class DeltaVersionStore(VersionStore):
    """A `VersionStore` for hosts that fetch: beside a version is its delta from the one before, if it is worth it. The
    publication's one part is the identity of that, or None."""

    def __init__(self, directory: Path, bucket_bytes: int = DEFAULT_BUCKET_BYTES, world: World = REAL_WORLD):
        super().__init__(directory, bucket_bytes=bucket_bytes, world=world)
        self._last_manifest: WeightManifest | None = None

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """With a part: the identity of the version that the delta beside the file changes, or None. Where the disk takes no delta
        hosts fetch all of the version."""
        before, self._last_manifest = self._last_manifest, manifest
        made = False
        with contextlib.suppress(OSError):
            made = before is not None and self._write_delta(before, manifest)
        return TransferOffer(manifest, [digest_version(before) if before is not None and made else None])

    def _write_delta(self, before: WeightManifest, manifest: WeightManifest) -> bool:
        """Whether it is worth it, and there."""
        with contextlib.ExitStack() as opened:
            pair = open_delta_pair(opened, before, manifest, self._files.open)
            if pair is None:
                return False
            pieces = encode_delta(digest_version(before), digest_version(manifest), *pair)
            write_atomically(delta_path(Path(manifest.path)), pieces, fsync=False, files=self._files)
        return True


def open_delta_pair(
    stack: contextlib.ExitStack, before: WeightManifest, manifest: WeightManifest, open_file: Callable[[Path], File]
) -> tuple[File, File] | None:
    """The files of two versions, if both are there and a delta between them is worth it."""
    try:
        old, new = (stack.enter_context(open_file(Path(m.path))) for m in (before, manifest))
    except FileNotFoundError:
        return None
    return (old, new) if is_delta_worthwhile(old, new) else None


class ShardedVersionStore(VersionFolder):
    """Versions that ranks of this host write together. `deltas`: see `DeltaVersionStore`."""

    def __init__(self, directory: Path, call_ranks: CallRanks, ranks: int, *, deltas: bool, world: World = REAL_WORLD):
        super().__init__(directory, keep=2, world=world)
        self._call_ranks, self._ranks, self._deltas = call_ranks, ranks, deltas
        self._last_manifest: WeightManifest | None = None

    def publish_shares(self, versions_in_use: Collection[int] = ()) -> TransferOffer:
        """Have the ranks write their snapshots; see `VersionFolder.write_version`."""
        parts: list[ShareDescription] = self._call_ranks("describe_snapshot", [()] * self._ranks)
        version = parts[0].version
        names = [name for part in parts for name, _, _ in part.tensors]
        if any(part.version != version for part in parts):
            raise WeightError(f"the ranks hold versions {sorted({p.version for p in parts})} of the weights")
        if len(set(names)) != len(names) or not names:
            raise WeightError(f"version {version}: {len(names)} tensors of {len(set(names))} names")
        manifest = self._write_shares(version, parts, versions_in_use)
        before, self._last_manifest = self._last_manifest, manifest
        if not self._deltas:
            return TransferOffer(manifest)
        try:
            return TransferOffer(manifest, [before and self._write_delta(before, manifest)])
        except (ActorLostError, OSError):  # of a rank, or of the disk; the version is there, and hosts fetch all of it
            return TransferOffer(manifest, [None])

    def _write_shares(
        self, version: int, parts: Sequence[ShareDescription], versions_in_use: Collection[int]
    ) -> WeightManifest:
        import torch

        described = [(name, getattr(torch, dtype), shape) for part in parts for name, dtype, shape in part.tensors]
        header = encode_safetensors_header(described)
        starts = [len(header)]
        for part in parts:
            starts.append(starts[-1] + sum(math.prod(s) * getattr(torch, d).itemsize for _, d, s in part.tensors))
        path = self.reserve_version(version, starts[-1], versions_in_use)
        aside = path.with_name(f".{path.name}")
        try:
            self._files.remove(aside)
            with self._files.open(aside, exclusive=True, mode=0o600) as file:
                file.append([header])
                file.truncate(starts[-1])
            written = self._call_ranks("write_snapshot", [(str(aside), start) for start in starts[:-1]])
            self._files.rename(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):  # what it takes is needed when this is tried again
                self._files.remove(aside)
            raise
        self.add_version(version, path, versions_in_use)
        entries: dict[str, TensorEntry] = {}
        for each in written:
            entries |= each
        return WeightManifest(version=version, path=str(path), tensors=entries, nbytes=starts[-1] - len(header))

    def _write_delta(self, before: WeightManifest, manifest: WeightManifest) -> Any:
        with contextlib.ExitStack() as opened:
            pair = open_delta_pair(opened, before, manifest, self._files.open)
            if pair is None:
                return None
            nbytes = pair[1].size()
        count = len(list(iter_blocks(nbytes, DELTA_BLOCK_BYTES)))
        path = delta_path(Path(manifest.path))
        bounds = [count * rank // self._ranks for rank in range(self._ranks + 1)]
        parts = [path.with_name(f".{path.name}.{rank}") for rank in range(self._ranks)]
        self._call_ranks(
            "write_delta_part",
            [(before, manifest, bounds[r], bounds[r + 1], str(parts[r])) for r in range(self._ranks)],
        )
        head = make_delta_header(digest_version(before), digest_version(manifest), nbytes)
        write_atomically(path, self._join_delta_parts(head, parts), fsync=False, files=self._files)
        return digest_version(before)

    def _join_delta_parts(self, head: bytes, parts: Iterable[Path]) -> Iterable[Buffer]:
        yield head
        for part in parts:
            with self._files.open(part) as file:
                yield file.map_bytes()
            self._files.remove(part)


def write_share_region(path: str, start: int, encoded: SafetensorsEncoder) -> dict[str, TensorEntry]:
    """A rank's tensors into its region of the file, a bucket at a time. Returns what is there now."""
    write_at(Path(path), start, encoded.iter_data())
    return encoded.entries


def write_delta_part(
    before: WeightManifest, manifest: WeightManifest, first: int, last: int, path: str, world: World = REAL_WORLD
) -> None:
    """The blocks `first` to `last` of a delta, into a file of their own."""
    with world.files.open(Path(before.path)) as old, world.files.open(Path(manifest.path)) as new:
        write_atomically(Path(path), encode_records(old, new, first, last), fsync=False, files=world.files)
