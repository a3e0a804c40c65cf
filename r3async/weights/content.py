"""The content of a version: tensors copied into host memory, and the bytes of their file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import xxhash

from r3async.data.architectures import CHOICE_BIAS
from r3async.data.container import dtype_name, encode_header, tensor_bytes
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.world import Buffer

if TYPE_CHECKING:
    import torch

_ALIGN = 16
"""Bytes: where a run of tensors may begin in memory."""


@dataclass(frozen=True)
class Run:
    """Tensors of one dtype that are published in one, one behind the other: `values` `[n]` are all of them."""

    names: list[str]
    values: torch.Tensor


class HostCopy(dict[str, "torch.Tensor"]):
    """Tensors copied into one buffer of host memory, in the order of their file, and used again for the next version: memory
    that is allocated for each costs more than the copy, and so does each tensor that is handled by itself."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        import torch

        super().__init__()
        self._described = _described(tensors)
        self._headers: dict[torch.dtype, bytes] = {}
        alike = itertools.groupby(tensors.items(), lambda item: (item[1].dtype, _is_kept(item[0])))
        runs = [list(group) for _, group in alike]
        flat = torch.empty(sum(t.nbytes for t in tensors.values()) + _ALIGN * len(runs), dtype=torch.uint8)
        self.runs: list[Run] = []
        at = 0
        for run in runs:
            at = -(-at // _ALIGN) * _ALIGN
            sizes, dtype = [tensor.numel() for _, tensor in run], run[0][1].dtype
            values = flat[at : at + sum(sizes) * dtype.itemsize].view(dtype)
            for (name, tensor), part in zip(run, values.split(sizes), strict=True):
                self[name] = part.view(tensor.shape)
            self.runs.append(Run([name for name, _ in run], values))
            at += values.nbytes

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Names, shapes and dtypes are those of the buffer, in its order."""
        return self._described == _described(tensors)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Copy `tensors`, on any device and in any layout, which `fits`."""
        import torch

        torch._foreach_copy_(list(self.values()), [t.detach() for t in tensors.values()])
        return self

    def fill_from(self, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Self:
        """The same with tensors of which no more than a bucket, or one, is there at once, in any order. Raises `WeightError` if
        they are not those of the buffer."""
        import torch

        left, held, size = dict.fromkeys(self), dict[str, torch.Tensor](), 0

        def copy() -> None:
            torch._foreach_copy_([self[name] for name in held], [t.detach() for t in held.values()])

        for name, tensor in tensors:
            if name not in left or (self[name].shape, self[name].dtype) != (tensor.shape, tensor.dtype):
                raise WeightError(f"tensor {name!r} is not what it was in the first version of the weights")
            del left[name]
            if held and size + tensor.nbytes > bucket_bytes:
                copy()
                held, size = {}, 0
            held[name], size = tensor, size + tensor.nbytes
        if held:
            copy()
        if left:
            raise WeightError(
                f"tensor {next(iter(left))!r} was in the first version of the weights, and is missing now"
            )
        return self

    def described(self, dtype: torch.dtype) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype as stored, and shape of each tensor, in the order of the file."""
        return [
            (name, dtype_name(stored_dtype(name, kind, dtype)), tuple(shape)) for name, shape, kind in self._described
        ]

    def header(self, dtype: torch.dtype) -> bytes:
        """Of the file, floating-point tensors being stored in `dtype`. Raises `ValueError`; see `encode_header`."""
        if dtype not in self._headers:
            stored = ((name, stored_dtype(name, kind, dtype), shape) for name, shape, kind in self._described)
            self._headers[dtype] = encode_header(stored)
        return self._headers[dtype]


def copied(tensors: Mapping[str, torch.Tensor], memory: HostCopy | None) -> HostCopy:
    """A copy, in `memory` if they fit in it."""
    if memory is None or not memory.fits(tensors):
        memory = HostCopy(tensors)
    return memory.fill(tensors)


def copied_share(
    share: Callable[[], Iterable[tuple[str, torch.Tensor]]], memory: HostCopy | None, bucket_bytes: int
) -> HostCopy:
    """A copy of what `share()` gives one by one. The first time it is asked twice, lest all of it be there two times."""
    if memory is None:
        memory = HostCopy({name: tensor.to("meta") for name, tensor in share()})
    return memory.fill_from(share(), bucket_bytes)


def _described(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, t.shape, t.dtype) for name, t in tensors.items()]


def stored_dtype(name: str, kind: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """In which a tensor of `kind` is published for engines of `dtype`: in that, unless it is no floating-point one, or one that
    engines keep in single precision whatever they compute in."""
    return dtype if kind.is_floating_point and not _is_kept(name) else kind


def _is_kept(name: str) -> bool:
    return name.endswith(CHOICE_BIAS)


class EncodedWeights:
    """A safetensors file as a series of parts, none larger than `bucket_bytes`, made one by one as it is iterated over.

    Tensors that are not a `HostCopy` are copied into one. The manifest is known when the last part has been taken: the checksums
    come from the bytes that were given out. Raises `WeightError` for a tensor that safetensors cannot hold, or if there is none.
    """

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, bucket_bytes: int):
        if not tensors:
            raise WeightError(f"version {version} has no tensors")
        self._version, self._dtype, self._bucket_bytes = version, dtype, bucket_bytes
        self._copy = tensors if isinstance(tensors, HostCopy) else HostCopy(tensors).fill(tensors)
        try:
            self._header = self._copy.header(dtype)
        except ValueError as error:
            raise WeightError(str(error)) from error
        self.entries: dict[str, TensorEntry] = {}
        """Of what was given out."""
        runs = self._copy.runs
        self.nbytes = sum(run.values.numel() * self._stored(run).itemsize for run in runs)

    def _stored(self, run: Run) -> torch.dtype:
        return stored_dtype(run.names[0], run.values.dtype, self._dtype)

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        yield from self.data()

    def data(self) -> Iterator[Buffer]:
        """The file without its header."""
        for run in self._copy.runs:
            stored = self._stored(run)
            kind, most = dtype_name(stored), max(1, self._bucket_bytes // stored.itemsize)
            held: list[tuple[str, tuple[int, ...], int]] = []
            start = stop = 0
            for name in run.names:
                tensor = self._copy[name]
                size = tensor.numel()
                if held and stop + size - start > most:
                    yield self._together(kind, held, tensor_bytes(run.values[start:stop].to(stored)))
                    held, start = [], stop
                if size > most:
                    pieces = run.values[stop : stop + size].split(most)
                    yield from self._alone(kind, name, (piece.to(stored) for piece in pieces))
                    start = stop + size
                else:
                    held.append((name, tuple(tensor.shape), size * stored.itemsize))
                stop += size
            if held:
                yield self._together(kind, held, tensor_bytes(run.values[start:stop].to(stored)))

    def _together(self, kind: str, held: list[tuple[str, tuple[int, ...], int]], data: memoryview) -> memoryview:
        at = 0
        for name, shape, nbytes in held:
            self.entries[name] = TensorEntry(kind, shape, xxhash.xxh3_64_intdigest(data[at : at + nbytes]))
            at += nbytes
        return data

    def _alone(self, kind: str, name: str, pieces: Iterable[torch.Tensor]) -> Iterator[Buffer]:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            data = tensor_bytes(piece)
            digest.update(data)
            yield data
        self.entries[name] = TensorEntry(kind, tuple(self._copy[name].shape), digest.intdigest())

    def manifest(self, path: str) -> WeightManifest:
        """What was given out, and is now at `path`."""
        assert len(self.entries) == len(self._copy)
        return WeightManifest(version=self._version, path=path, tensors=self.entries, nbytes=self.nbytes)
