"""The contents of a version: tensors copied to host memory, and the bytes of their file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import xxhash

from r3async.data.models import EXPERT_BIAS_SUFFIXES
from r3async.data.safetensors_header import (
    encode_safetensors_header,
    tensor_bytes,
    torch_dtype_name,
)
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.world import Buffer

if TYPE_CHECKING:
    import torch


_ALIGN_BYTES = 16
"""Alignment in bytes of a segment of tensors in memory."""


@dataclass(frozen=True)
class TensorSegment:
    """A run of tensors that have one dtype and are published in one dtype.

    `values` `[n]` has them one after the other.
    """

    names: list[str]
    values: torch.Tensor


class HostWeights(dict[str, "torch.Tensor"]):
    """The tensors of a version, copied to one buffer of host memory in the order of their file.

    The buffer is reused for the next version: allocating it for each version would cost more than
    the copy, and so would copying tensors one by one.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        import torch

        super().__init__()
        self._layout = _describe_layout(tensors)
        self._headers: dict[torch.dtype, bytes] = {}
        alike = itertools.groupby(
            tensors.items(), lambda item: (item[1].dtype, _keeps_own_dtype(item[0]))
        )
        runs = [list(group) for _, group in alike]
        flat = torch.empty(
            sum(t.nbytes for t in tensors.values()) + _ALIGN_BYTES * len(runs), dtype=torch.uint8
        )
        self.segments: list[TensorSegment] = []
        at = 0
        for run in runs:
            at = -(-at // _ALIGN_BYTES) * _ALIGN_BYTES
            sizes = [tensor.numel() for _, tensor in run]
            dtype = run[0][1].dtype
            values = flat[at : at + sum(sizes) * dtype.itemsize].view(dtype)
            for (name, tensor), part in zip(run, values.split(sizes), strict=True):
                self[name] = part.view(tensor.shape)
            self.segments.append(TensorSegment([name for name, _ in run], values))
            at += values.nbytes

    def matches_layout(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if names, shapes and dtypes are those of the buffer, in its order."""
        return self._layout == _describe_layout(tensors)

    def copy_from(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Copy `tensors`, on any device and in any memory layout, for which
        `matches_layout` is True."""
        import torch

        if self:
            torch._foreach_copy_(list(self.values()), [t.detach() for t in tensors.values()])
        return self

    def copy_in_buckets(
        self, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
    ) -> Self:
        """Copy tensors in any order, holding no more than a bucket of them, or a
        single one, at once.

        Raises `WeightError` if they are not those of the buffer.
        """
        import torch

        left = dict.fromkeys(self)
        held = dict[str, torch.Tensor]()
        size = 0

        def copy() -> None:
            torch._foreach_copy_([self[name] for name in held], [t.detach() for t in held.values()])

        for name, tensor in tensors:
            if name not in left or (self[name].shape, self[name].dtype) != (
                tensor.shape,
                tensor.dtype,
            ):
                raise WeightError(
                    f"tensor {name!r} is not what it was in the first version of the weights"
                )
            del left[name]
            if held and size + tensor.nbytes > bucket_bytes:
                copy()
                held = {}
                size = 0
            held[name] = tensor
            size = size + tensor.nbytes
        if held:
            copy()
        if left:
            raise WeightError(
                f"tensor {next(iter(left))!r} was in the first version of the weights, "
                "and is missing now"
            )
        return self

    def describe_tensors(self, dtype: torch.dtype) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype as stored, and shape of each tensor, in the order of the file."""
        return [
            (name, torch_dtype_name(choose_stored_dtype(name, kind, dtype)), tuple(shape))
            for name, shape, kind in self._layout
        ]

    def build_header(self, dtype: torch.dtype) -> bytes:
        """Return the header of the file in which floating-point tensors are stored in `dtype`.

        Raises `ValueError`; see `encode_safetensors_header`.
        """
        if dtype not in self._headers:
            stored = (
                (name, choose_stored_dtype(name, kind, dtype), shape)
                for name, shape, kind in self._layout
            )
            self._headers[dtype] = encode_safetensors_header(stored)
        return self._headers[dtype]


def copy_to_host(tensors: Mapping[str, torch.Tensor], buffer: HostWeights | None) -> HostWeights:
    """Copy tensors to host memory, in `buffer` if it has their layout."""
    if buffer is None or not buffer.matches_layout(tensors):
        buffer = HostWeights(tensors)
    return buffer.copy_from(tensors)


def copy_share_to_host(
    iter_share: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    buffer: HostWeights | None,
    bucket_bytes: int,
) -> HostWeights:
    """Copy the tensors that `iter_share()` yields one by one to host memory.

    The first time it is called twice, so that all tensors are never in memory twice.
    """
    if buffer is None:
        buffer = HostWeights({name: tensor.to("meta") for name, tensor in iter_share()})
    return buffer.copy_in_buckets(iter_share(), bucket_bytes)


def _describe_layout(
    tensors: Mapping[str, torch.Tensor],
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, t.shape, t.dtype) for name, t in tensors.items()]


def choose_stored_dtype(
    name: str, tensor_dtype: torch.dtype, engine_dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype in which a tensor of `tensor_dtype` is published for engines
    of `engine_dtype`.

    It is `engine_dtype`, unless the tensor has no floating-point dtype, or engines keep it in
    single precision whatever they compute in.
    """
    return (
        engine_dtype
        if tensor_dtype.is_floating_point and not _keeps_own_dtype(name)
        else tensor_dtype
    )


def _keeps_own_dtype(name: str) -> bool:
    return name.endswith(EXPERT_BIAS_SUFFIXES)


class SafetensorsEncoder:
    """A safetensors file as a series of parts, none larger than `bucket_bytes`, encoded one by one
    during iteration.

    Tensors that are not a `HostWeights` are copied to one. The manifest is known after the last
    part: the checksums are computed over the bytes that were yielded. Raises `WeightError` for a
    tensor that safetensors cannot hold, or if there is none.
    """

    def __init__(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        bucket_bytes: int,
    ):
        if not tensors:
            raise WeightError(f"version {version} has no tensors")
        self._version = version
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._copy = (
            tensors if isinstance(tensors, HostWeights) else HostWeights(tensors).copy_from(tensors)
        )
        try:
            self._header = self._copy.build_header(dtype)
        except ValueError as error:
            raise WeightError(str(error)) from error
        self.entries: dict[str, TensorEntry] = {}
        """Entries of the tensors yielded so far, by name."""
        runs = self._copy.segments
        self.nbytes = sum(run.values.numel() * self._segment_dtype(run).itemsize for run in runs)

    def _segment_dtype(self, run: TensorSegment) -> torch.dtype:
        return choose_stored_dtype(run.names[0], run.values.dtype, self._dtype)

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        yield from self.iter_data()

    def iter_data(self) -> Iterator[Buffer]:
        """Yield the file without its header."""
        for run in self._copy.segments:
            stored = self._segment_dtype(run)
            kind = torch_dtype_name(stored)
            most = max(1, self._bucket_bytes // stored.itemsize)
            held: list[tuple[str, tuple[int, ...], int]] = []
            start = stop = 0
            for name in run.names:
                tensor = self._copy[name]
                size = tensor.numel()
                if held and stop + size - start > most:
                    yield self._record_bucket(
                        kind, held, tensor_bytes(run.values[start:stop].to(stored))
                    )
                    held = []
                    start = stop
                if size > most:
                    pieces = run.values[stop : stop + size].split(most)
                    yield from self._iter_large_tensor(
                        kind, name, (piece.to(stored) for piece in pieces)
                    )
                    start = stop + size
                else:
                    held.append((name, tuple(tensor.shape), size * stored.itemsize))
                stop += size
            if held:
                yield self._record_bucket(
                    kind, held, tensor_bytes(run.values[start:stop].to(stored))
                )

    def _record_bucket(
        self, kind: str, held: list[tuple[str, tuple[int, ...], int]], data: memoryview
    ) -> memoryview:
        at = 0
        for name, shape, nbytes in held:
            self.entries[name] = TensorEntry(
                kind, shape, xxhash.xxh3_64_intdigest(data[at : at + nbytes])
            )
            at += nbytes
        return data

    def _iter_large_tensor(
        self, kind: str, name: str, pieces: Iterable[torch.Tensor]
    ) -> Iterator[Buffer]:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            data = tensor_bytes(piece)
            digest.update(data)
            yield data
        self.entries[name] = TensorEntry(kind, tuple(self._copy[name].shape), digest.intdigest())

    def build_manifest(self, path: str) -> WeightManifest:
        """Return the manifest of the encoded file, which is now at `path`."""
        assert len(self.entries) == len(self._copy)
        return WeightManifest(
            version=self._version, path=path, tensors=self.entries, nbytes=self.nbytes
        )
