"""The file of a published version: mapped, compared with its manifest, and verified."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from r3async.data.safetensors_header import SAFETENSORS_DTYPES, decode_safetensors_header
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.world import Files
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    import torch

_VERIFY_THREADS = 4
_BYTES_OF_A_THREAD = 64 * 2**20
"""Bytes below which another thread takes longer to start than to verify them."""


class VersionFile:
    """The memory-mapped file of a published version, whose names, shapes and dtypes are those
    of the manifest.

    Checksums are not compared before `verify_checksums`. `content` are the file's bytes, uint8
    `[n]`, if it is mapped already. Raises `WeightError` that names the file or the tensor.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        content: torch.Tensor | None = None,
        *,
        files: Files = REAL_WORLD.files,
    ):
        import torch

        self._label = f"weights version {manifest.version} ({manifest.path})"
        try:
            content = map_file_privately(manifest.path, files=files) if content is None else content
            found, begin = decode_safetensors_header(content.numpy())
        except (OSError, RuntimeError, ValueError) as error:
            raise WeightError(f"{self._label} cannot be read: {error}") from error
        self.header = content[:begin].numpy().tobytes()
        self.data = content[begin:]
        """Bytes of the tensors, uint8 `[nbytes]`."""
        missing = sorted(set(manifest.tensors) - set(found))
        if missing:
            raise WeightError(
                f"{self._label}: tensor {missing[0]!r} is missing ({len(missing)} in all)"
            )
        unknown = sorted(set(found) - set(manifest.tensors))
        if unknown:
            raise WeightError(
                f"{self._label}: tensor {unknown[0]!r} is not in the manifest "
                f"({len(unknown)} in all)"
            )
        widths = {dtype: getattr(torch, dtype).itemsize for dtype in SAFETENSORS_DTYPES}
        names = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}
        self._tensor_spans: list[tuple[str, TensorEntry, int, int]] = []
        for name, entry in manifest.tensors.items():
            this = found[name]
            start, stop = this.data_offsets
            if this.dtype != SAFETENSORS_DTYPES.get(entry.dtype) or this.shape != entry.shape:
                raise WeightError(
                    f"{self._label}: tensor {name!r} is {names.get(this.dtype, this.dtype)} "
                    f"{list(this.shape)}, the manifest says {entry.dtype} {list(entry.shape)}"
                )
            nbytes = math.prod(entry.shape) * widths[entry.dtype]
            if not 0 <= start <= stop <= len(self.data) or stop - start != nbytes:
                raise WeightError(
                    f"{self._label} cannot be read: tensor {name!r} is at bytes {start} to {stop} "
                    f"of {len(self.data)}"
                )
            self._tensor_spans.append((name, entry, start, stop))

    def iter_tensors(self, *, verify_checksums: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in the manifest's order, not copied. `verify_checksums` compares
        each just before."""
        view = memoryview(self.data.numpy())
        for name, entry, start, stop in self._tensor_spans:
            if verify_checksums:
                self._verify_checksum(view, name, entry, start, stop)
            yield name, view_as_tensor(self.data, start, stop, entry)

    def verify_checksums(self) -> None:
        """Compare all checksums, in up to four threads. Blocking: each reads 3 to 5 GB a second."""
        threads = min(_VERIFY_THREADS, 1 + len(self.data) // _BYTES_OF_A_THREAD)
        if threads == 1:
            self._verify_spans(self._tensor_spans)
            return
        shares = [self._tensor_spans[thread::threads] for thread in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(self._verify_spans, shares):
                pass  # raises the error of the first share that has one

    def _verify_spans(self, spans: Sequence[tuple[str, TensorEntry, int, int]]) -> None:
        view = memoryview(self.data.numpy())
        for name, entry, start, stop in spans:
            self._verify_checksum(view, name, entry, start, stop)

    def _verify_checksum(
        self, view: memoryview, name: str, entry: TensorEntry, start: int, stop: int
    ) -> None:
        if xxhash.xxh3_64_intdigest(view[start:stop]) != entry.checksum:
            raise WeightError(
                f"{self._label}: tensor {name!r} is corrupt: its checksum differs from "
                "the published one"
            )


def map_file_privately(path: str, *, files: Files = REAL_WORLD.files) -> torch.Tensor:
    """Return the memory-mapped bytes of a file, uint8 `[n]`. Writes to the tensor do
    not reach the file.

    Raises `OSError` and `RuntimeError`.
    """
    import torch

    found = files.stat(Path(path))
    if found is None:
        raise FileNotFoundError(path)
    return torch.from_file(path, shared=False, size=found.size, dtype=torch.uint8)


def view_as_tensor(data: torch.Tensor, start: int, stop: int, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor in `data[start:stop]`, copied only if its offset is not
    aligned for its dtype."""
    import torch

    dtype = getattr(torch, entry.dtype)
    piece = data[start:stop]
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(entry.shape)


def iter_verified_tensors(
    manifest: WeightManifest, *, verify_checksums: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a published version in the manifest's order, mapped from the file
    rather than copied.

    Names, shapes and dtypes are checked before the first tensor is yielded, and the checksum of
    each tensor just before it. `verify_checksums=False` omits the checksums, for a reader whose
    caller has just verified the same file. Raises `WeightError` that names the file or the tensor.
    """
    yield from VersionFile(manifest).iter_tensors(verify_checksums=verify_checksums)


def verify_version_file(manifest: WeightManifest) -> None:
    """Check a whole published file; see `VersionFile.verify_checksums`. Raises `WeightError`."""
    VersionFile(manifest).verify_checksums()
