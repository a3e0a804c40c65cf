"""Versions on the learner's hosts: a file on each, written by its ranks, and the delta beside it.

No rank has more than its own part: each writes its tensors to its region of its host's file, and
returns their checksums. No host has more than its ranks: the version's file is that of all hosts,
one after the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from r3async.data.safetensors_header import encode_safetensors_header
from r3async.weights.delta import (
    DELTA_BLOCK_BYTES,
    VersionDigest,
    digest_version,
    encode_records,
    iter_blocks,
    make_delta_header,
)
from r3async.weights.host_weights import SafetensorsEncoder
from r3async.weights.interfaces import PublishedPart, TransferOffer, delta_path
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.weights.version_folder import VersionFolder
from r3async.weights.version_store import describe_part, open_delta_pair
from r3async.world import ActorLostError, Buffer, World
from r3async.world.disk import write_at
from r3async.world.files import write_atomically
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    pass


CallRanks = Callable[[str, Sequence[tuple[Any, ...] | None]], list[Any]]
"""Function that calls a method of every rank with arguments, which are its own, and returns the
results in rank order, None for the others."""
CallHosts = CallRanks
"""The same with a method of the `PartFolder` of each of the learner's hosts."""


class ShareDescription(msgspec.Struct, frozen=True):
    """A rank's part of `version`, with name, dtype and shape of each tensor as stored, in the
    order of its region."""

    version: int
    tensors: list[tuple[str, str, tuple[int, ...]]]


class PartFolder(VersionFolder):
    """The folder of one of the learner's hosts: the parts of versions that the ranks of this
    host write together."""

    def __init__(self, directory: Path, world: World = REAL_WORLD):
        super().__init__(directory, keep=2, world=world)

    def begin_part(
        self, version: int, head: bytes, nbytes: int, versions_in_use: Collection[int] = ()
    ) -> str:
        """Make a file aside of `nbytes`, which begins with `head`, and return its path.

        A version that is here already was not finished on another host, and is written again.
        Raises the errors of `VersionFolder.write_version`.
        """
        while self._versions and self._versions[-1][0] == version:
            self._files.remove(self._versions.pop()[1])
        path = self.reserve_version(version, nbytes, versions_in_use)
        aside = path.with_name(f".{path.name}")
        self._files.remove(aside)
        try:
            with self._files.open(aside, exclusive=True, mode=0o600) as file:
                file.append([head])
                file.truncate(nbytes)
        except BaseException:
            self.abandon_part(str(aside))
            raise
        return str(aside)

    def finish_part(self, version: int, aside: str, versions_in_use: Collection[int] = ()) -> str:
        """Give the part's file its name, which is returned, and remove old versions."""
        path = Path(aside).with_name(Path(aside).name.removeprefix("."))
        self._files.rename(Path(aside), path)
        self.add_version(version, path, versions_in_use)
        return str(path)

    def abandon_part(self, aside: str) -> None:
        """Remove a file that will not be finished: its space is needed for the next attempt."""
        with contextlib.suppress(OSError):
            self._files.remove(Path(aside))

    def count_delta_blocks(self, before: str, path: str) -> int | None:
        """Return the number of blocks of a delta between two of the files here; None if it
        is not worthwhile."""
        with contextlib.ExitStack() as opened:
            pair = open_delta_pair(opened, Path(before), Path(path), self._files.open)
            return (
                None if pair is None else len(list(iter_blocks(pair[1].size(), DELTA_BLOCK_BYTES)))
            )

    def join_delta(
        self, path: str, base: VersionDigest, made: VersionDigest, pieces: Sequence[str]
    ) -> PublishedPart:
        """Join what the ranks wrote of the delta beside `path`, and describe the part."""
        found = self._files.stat(Path(path))
        assert found is not None
        head = make_delta_header(base, made, found.size)
        joined = self._join_pieces(head, [Path(piece) for piece in pieces])
        write_atomically(delta_path(Path(path)), joined, fsync=False, files=self._files)
        return describe_part(Path(path), base, self._files)

    def copy_part(self, path: str, target: str, start: int) -> None:
        """Write a part into a file from byte `start` on."""
        with self._files.open(Path(path)) as file:
            write_at(Path(target), start, [file.map_bytes()])

    def _join_pieces(self, head: bytes, pieces: Iterable[Path]) -> Iterable[Buffer]:
        yield head
        for piece in pieces:
            with self._files.open(piece) as file:
                yield file.map_bytes()
            self._files.remove(piece)


class ShardedVersionStore:
    """Versions that the ranks of the learner's hosts write together, each host a part of its own.

    The parts are one file of the version, which begins with the first host's: its part has the
    header. `deltas` adds deltas as in `DeltaVersionStore`, one beside each part.

    Args:
        call_hosts: `call_hosts(name, args_by_host)` calls a method of the `PartFolder` of every
            host for which there are arguments, and returns the results, None for the others.
        ranks_by_host: The ranks of each host, the learner's own host first.
    """

    def __init__(
        self,
        call_hosts: CallHosts,
        call_ranks: CallRanks,
        ranks_by_host: Sequence[Sequence[int]],
        *,
        deltas: bool,
    ):
        self._call_hosts = call_hosts
        self._call_ranks = call_ranks
        self._deltas = deltas
        self._ranks_by_host = ranks_by_host
        self._rank_count = sum(map(len, ranks_by_host))
        self._last_version: tuple[VersionDigest, list[PublishedPart]] | None = None

    def publish_shares(self, versions_in_use: Collection[int] = ()) -> TransferOffer:
        """Have the ranks write their snapshots; see `VersionFolder.write_version`."""
        shares: list[ShareDescription] = self._call_ranks(
            "describe_snapshot", [()] * self._rank_count
        )
        version = shares[0].version
        names = [name for share in shares for name, _, _ in share.tensors]
        if any(share.version != version for share in shares):
            raise WeightError(
                f"the ranks hold versions {sorted({s.version for s in shares})} of the weights"
            )
        if len(set(names)) != len(names) or not names:
            raise WeightError(f"version {version}: {len(names)} tensors of {len(set(names))} names")
        manifest, parts = self._write_shares(version, shares, versions_in_use)
        before = self._last_version
        self._last_version = (digest_version(manifest), parts)
        if not self._deltas:
            return TransferOffer(manifest)
        if before is not None:
            # Of a rank, or of the disk; hosts fetch the whole then.
            with contextlib.suppress(ActorLostError, OSError):
                parts = self._write_deltas(before, self._last_version)
        return TransferOffer(manifest, parts)

    def _write_shares(
        self, version: int, shares: Sequence[ShareDescription], versions_in_use: Collection[int]
    ) -> tuple[WeightManifest, list[PublishedPart]]:
        import torch

        in_order = [
            tensor
            for ranks in self._ranks_by_host
            for rank in ranks
            for tensor in shares[rank].tensors
        ]
        header = encode_safetensors_header(
            (name, getattr(torch, dtype), shape) for name, dtype, shape in in_order
        )
        regions: dict[int, tuple[int, int]] = {}
        """Host and offset in its file, by rank."""
        part_bytes = []
        for host, ranks in enumerate(self._ranks_by_host):
            at = 0 if host else len(header)
            for rank in ranks:
                regions[rank] = host, at
                at += count_share_bytes(shares[rank])
            part_bytes.append(at)
        heads = [b"" if host else header for host in range(len(part_bytes))]
        asides: list[str] = self._call_hosts(
            "begin_part",
            [
                (version, head, nbytes, versions_in_use)
                for head, nbytes in zip(heads, part_bytes, strict=True)
            ],
        )
        try:
            written = self._call_ranks(
                "write_snapshot",
                [
                    (asides[host], start)
                    for host, start in map(regions.__getitem__, range(len(shares)))
                ],
            )
        except BaseException:
            with contextlib.suppress(ActorLostError, OSError):
                self._call_hosts("abandon_part", [(aside,) for aside in asides])
            raise
        paths = self._call_hosts(
            "finish_part", [(version, aside, versions_in_use) for aside in asides]
        )
        entries: dict[str, TensorEntry] = {}
        for ranks in self._ranks_by_host:
            for rank in ranks:
                entries |= written[rank]
        nbytes = sum(part_bytes) - len(header)
        parts = [PublishedPart(*each) for each in zip(paths, part_bytes, strict=True)]
        return WeightManifest(version=version, path=paths[0], tensors=entries, nbytes=nbytes), parts

    def _write_deltas(
        self,
        before: tuple[VersionDigest, list[PublishedPart]],
        now: tuple[VersionDigest, list[PublishedPart]],
    ) -> list[PublishedPart]:
        """Write the delta of each part for which it is worthwhile, and return the parts
        with their deltas."""
        pairs = [(old.path, new.path) for old, new in zip(before[1], now[1], strict=True)]
        counts: list[int | None] = self._call_hosts("count_delta_blocks", pairs)
        pieces: list[list[str]] = []
        args: list[tuple[Any, ...] | None] = [None] * self._rank_count
        for (old, new), count, ranks in zip(pairs, counts, self._ranks_by_host, strict=True):
            path = delta_path(Path(new))
            pieces.append([])
            if count is None:
                continue
            for number, rank in enumerate(ranks):
                first, last = (count * n // len(ranks) for n in (number, number + 1))
                pieces[-1].append(str(path.with_name(f".{path.name}.{number}")))
                args[rank] = old, new, first, last, pieces[-1][-1]
        self._call_ranks("write_delta_part", args)
        joins = [
            (new, before[0], now[0], each) if each else None
            for (_, new), each in zip(pairs, pieces, strict=True)
        ]
        return [
            made or part
            for made, part in zip(self._call_hosts("join_delta", joins), now[1], strict=True)
        ]


def count_share_bytes(share: ShareDescription) -> int:
    """Return the size of a rank's region of the file."""
    import torch

    return sum(
        math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in share.tensors
    )


def write_share_region(
    path: str, start: int, encoded: SafetensorsEncoder
) -> dict[str, TensorEntry]:
    """Write a rank's tensors to its region of the file, a bucket at a time, and
    return their entries."""
    write_at(Path(path), start, encoded.iter_data())
    return encoded.entries


def write_delta_part(
    before: str, path_now: str, first: int, last: int, path: str, world: World = REAL_WORLD
) -> None:
    """Write the blocks `first` to `last` of the delta between two files to a separate file."""
    with world.files.open(Path(before)) as old, world.files.open(Path(path_now)) as new:
        write_atomically(
            Path(path), encode_records(old, new, first, last), fsync=False, files=world.files
        )
