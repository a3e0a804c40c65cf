"""The protocols of a weight transfer: sender, receiver, and the offer between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from r3async.weights.delta import VersionDigest
from r3async.weights.manifest import WeightManifest

if TYPE_CHECKING:
    import torch


class PublishedPart(msgspec.Struct, frozen=True):
    """The part of a version's file that one of the learner's hosts has, as a file of its own.

    A version's file is its parts, one after the other. With one host it is one part.

    Attributes:
        path: The part's file on its host.
        nbytes: Size of that file.
        base: The version that the delta beside it changes into this one; None if there is no delta.
        delta_bytes: Size of the delta.
        endpoint: Address at which a sender of that host serves the part; empty on the
            learner's own host.
    """

    path: str
    nbytes: int
    base: VersionDigest | None = None
    delta_bytes: int = 0
    endpoint: str = ""

    @property
    def name(self) -> str:
        """The name of the part among all parts: its folder has a name of its own."""
        path = Path(self.path)
        return f"{path.parent.name}/{path.stem}"

    @property
    def file_paths(self) -> dict[str, str]:
        """The files with the part's bytes, and its delta's if there is one, by name."""
        delta = (
            {delta_name(self.name): str(delta_path(Path(self.path)))}
            if self.base is not None
            else {}
        )
        return {self.name: self.path, **delta}


class TransferOffer(msgspec.Struct, frozen=True):
    """An offer of a version by the learner's host.

    `transport_data` is what the transport needs besides the manifest.
    """

    manifest: WeightManifest
    transport_data: list[Any] = []


class WeightSender(Protocol):
    """The learner's end of a weight transport. Blocking; one call at a time."""

    def publish_tensors(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        versions_in_use: Collection[int] = (),
    ) -> TransferOffer:
        """Publish `tensors` as `version`, in their `choose_stored_dtype`. The `versions_in_use` by
        engines are kept.

        Raises `WeightError`, and `OSError` if the disk does not accept the version, after which it
        can be published again.
        """
        ...

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Publish a version whose file is on this host already."""
        ...

    def close(self) -> None:
        """Stop serving: no published version can be fetched any more. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """A generator's end of a weight transport, on its event loop. One call at a time."""

    async def fetch_version(
        self, manifest: WeightManifest, transport_data: Sequence[Any], timeout: float
    ) -> WeightManifest:
        """Fetch a version to this host and return its manifest with a local path, or
        with a `source`.

        The file at that path stays until the next version is fetched. Raises `WeightError`,
        `OSError` if the disk does not accept the file, or `TimeoutError` after `timeout` seconds.
        """
        ...

    async def discard_version(self, manifest: WeightManifest) -> None:
        """Discard a fetched file that differs from what was published, so that the next call
        fetches it again."""
        ...

    async def close(self) -> None:
        """Remove the fetched files. Idempotent."""
        ...


def delta_name(name: str) -> str:
    """Return the name of the delta of a part of that name."""
    return f"{name}-delta"


def delta_path(path: Path) -> Path:
    """Return the path of a version's delta from the version before, which is beside
    the version's file."""
    return path.with_suffix(".delta")
