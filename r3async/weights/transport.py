"""How a version gets from the learner to the engines' hosts: one interface, whatever carries it.

It arrives as a file that an engine of that host maps, and is verified there against the manifest's checksums before anything is
paused. Or, with `weights.nccl`, the manifest says where workers receive it when the engine is paused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from r3async.weights.manifest import WeightManifest
from r3async.weights.publish import Publisher

if TYPE_CHECKING:
    import torch


class Publication(msgspec.Struct, frozen=True):
    """A version as the learner's host gives it away. `parts` are what the transport needs beside the manifest."""

    manifest: WeightManifest
    parts: list[Any] = []


class WeightSender(Protocol):
    """At the learner. Blocking; one call at a time."""

    def send(
        self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, reading: Collection[int] = ()
    ) -> Publication:
        """Give away `tensors` as `version`, floating-point ones in `dtype`. Versions that engines are `reading` stay.

        Raises `WeightError`.
        """
        ...

    def close(self) -> None:
        """Nothing that was sent can be fetched any more. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """At a generator. Blocking; one call at a time."""

    def fetch(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        """Bring a version to this host. The manifest that is returned has the path of a file that is here, and stays until
        the next version is fetched, or a `source`. Raises `WeightError`, or `TimeoutError` after `timeout` seconds."""
        ...

    def close(self) -> None:
        """Remove what was fetched. Idempotent."""
        ...


class SharedMemorySender(Publisher):
    """Writes a version into this host's shared memory, once for all engines of the host."""

    def send(
        self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, reading: Collection[int] = ()
    ) -> Publication:
        return Publication(self.publish(version, tensors, dtype, reading))


class SharedMemoryReceiver:
    """Nothing to bring: the file is on this host."""

    def fetch(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        return manifest

    def close(self) -> None:
        pass
