"""Writes versions of the weights for the engines of a host, and offers them to other hosts.

A version is one safetensors file in shared memory, so an engine maps it instead of copying it
through a socket. Every tensor has a checksum over its bytes: the installed weights equal the
published ones, or the run stops and names the tensor. A version arrives as a file that an engine of
that host maps, and is verified there before anything is paused. With `weights.nccl`, the manifest
instead names the source from which workers receive it while the engine is paused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r3async.weights.delta import VersionDigest, digest_version, encode_delta, is_delta_worthwhile
from r3async.weights.host_weights import SafetensorsEncoder
from r3async.weights.interfaces import PublishedPart, TransferOffer, delta_path
from r3async.weights.manifest import WeightManifest
from r3async.weights.version_folder import VersionFolder
from r3async.world import File, Files, World
from r3async.world.files import write_atomically
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    import torch


DEFAULT_BUCKET_BYTES = 64 * 2**20


class VersionStore(VersionFolder):
    """A store of a policy's versions for the engines of this host, which keeps the last `keep`.

    An engine may begin to read version v - 1 while v is written, hence `keep=2`. No more than
    `bucket_bytes` are held in memory besides the tensors themselves.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 2,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        world: World = REAL_WORLD,
    ):
        super().__init__(directory, keep, world)
        self._bucket_bytes = bucket_bytes

    def write_tensors(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        versions_in_use: Collection[int] = (),
    ) -> WeightManifest:
        """Write `tensors` (Hugging Face names, any device) as `version`; see `choose_stored_dtype`.

        See `VersionFolder.write_version`. Raises `WeightError` also if there are no tensors.
        """
        encoded = SafetensorsEncoder(version, tensors, dtype, self._bucket_bytes)
        path = self.write_version(version, encoded.nbytes, encoded, versions_in_use)
        return encoded.build_manifest(str(path))

    def publish_tensors(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        versions_in_use: Collection[int] = (),
    ) -> TransferOffer:
        """Implement `WeightSender.publish_tensors`, with one file for all engines of this host."""
        return self.announce_version(self.write_tensors(version, tensors, dtype, versions_in_use))

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Implement `WeightSender.announce_version`."""
        return TransferOffer(manifest)


class SharedMemoryReceiver:
    """A generator's end of the shared-memory transport. It fetches nothing: the file is on
    this host already."""

    async def fetch_version(
        self, manifest: WeightManifest, transport_data: Sequence[Any], timeout: float
    ) -> WeightManifest:
        return manifest

    async def discard_version(self, manifest: WeightManifest) -> None:
        pass

    async def close(self) -> None:
        pass


class DeltaVersionStore(VersionStore):
    """A `VersionStore` for hosts that fetch. It writes a version's delta from the one before beside
    it, if worthwhile.

    An offer's only transport data is the `PublishedPart` that is the whole version.
    """

    def __init__(
        self, directory: Path, bucket_bytes: int = DEFAULT_BUCKET_BYTES, world: World = REAL_WORLD
    ):
        super().__init__(directory, bucket_bytes=bucket_bytes, world=world)
        self._last_manifest: WeightManifest | None = None

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Publish a version. If the disk does not accept its delta, hosts fetch
        the whole version."""
        before = self._last_manifest
        self._last_manifest = manifest
        made = False
        with contextlib.suppress(OSError):
            made = before is not None and self._write_delta(before, manifest)
        base = digest_version(before) if before is not None and made else None
        return TransferOffer(manifest, [describe_part(Path(manifest.path), base, self._files)])

    def _write_delta(self, before: WeightManifest, manifest: WeightManifest) -> bool:
        """Write the delta, if worthwhile, and return True if it was written."""
        with contextlib.ExitStack() as opened:
            pair = open_delta_pair(opened, Path(before.path), Path(manifest.path), self._files.open)
            if pair is None:
                return False
            pieces = encode_delta(digest_version(before), digest_version(manifest), *pair)
            write_atomically(
                delta_path(Path(manifest.path)), pieces, fsync=False, files=self._files
            )
        return True


def describe_part(path: Path, base: VersionDigest | None, files: Files) -> PublishedPart:
    """Describe the file of a part, and its delta if it has a `base`."""
    sizes = [
        found.size for each in (path, delta_path(path)) if (found := files.stat(each)) is not None
    ]
    return PublishedPart(str(path), sizes[0], base, sizes[1] if base is not None else 0)


def open_delta_pair(
    stack: contextlib.ExitStack, before: Path, path: Path, open_file: Callable[[Path], File]
) -> tuple[File, File] | None:
    """Open the files of two versions, if both exist and a delta between them is worthwhile;
    else return None."""
    try:
        old, new = (stack.enter_context(open_file(each)) for each in (before, path))
    except FileNotFoundError:
        return None
    return (old, new) if is_delta_worthwhile(old, new) else None
