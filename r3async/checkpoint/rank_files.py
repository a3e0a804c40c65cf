"""Tensors of a checkpoint: one safetensors file per rank, with that rank's slices of whole tensors.

A slice has the name of its whole tensor and its place in it, so that any number of ranks can read
what any other number wrote. The format is what `torch.distributed.checkpoint` calls a distributed
safetensors checkpoint, and its `HuggingFaceStorageReader` reads it. Writing needs no other rank,
and nothing is pickled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from r3async.checkpoint.manifest import CheckpointError, FileEntry, make_read_error
from r3async.checkpoint.state import TrustRegionState
from r3async.data.safetensors_header import (
    SAFETENSORS_DTYPES,
    SafetensorsEntry,
    encode_safetensors_header,
    tensor_bytes,
)
from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.real import REAL_WORLD

_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for name, code in SAFETENSORS_DTYPES.items()
}
_METADATA_KEY = "r3async"
_WRITE_BLOCK_BYTES = 2**26
"""Bytes written at once."""


@dataclass(frozen=True)
class TensorSlice:
    """A box of the tensor `name`, whose whole shape is `shape`: along each dimension, `size`
    elements from `offset` on."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def full_tensor(name: str, shape: Sequence[int]) -> TensorSlice:
        return TensorSlice(name, tuple(shape), (0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class SliceValues:
    """The values of a tensor slice; `values` is a copy in host memory."""

    tensor_slice: TensorSlice
    values: Tensor


class LearnerMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The learner's state that is not a tensor, the same on every rank.

    Attributes:
        backend: `learner.backend`.
        model: SHA-256 of the model's `config.json`.
        steps: Optimizer steps taken, from which the learning rate follows.
        world: Number of ranks.
        trust_region: See `TrustRegion.state_dict`.
    """

    backend: str
    model: str
    steps: int
    world: int
    trust_region: TrustRegionState


@dataclass(frozen=True)
class RankState:
    """One rank's copy of everything that its later steps depend on; see
    `LearnerBackend.capture_state`."""

    rank: int
    metadata: LearnerMetadata
    slices: list[SliceValues]


def rank_file_name(rank: int, world: int) -> str:
    return f"learner-{rank:05d}-of-{world:05d}.safetensors"


def write_rank_file(
    directory: Path, state: RankState, *, files: Files = REAL_WORLD.files
) -> FileEntry:
    """Write one rank's file into `directory`, durably. May be called from any thread; most of the
    time it holds no lock."""
    pieces = sorted(
        (p for p in state.slices if p.values.numel()),
        key=lambda p: (-p.values.element_size(), p.tensor_slice.name),
    )
    for piece in pieces:
        assert tuple(piece.values.shape) == piece.tensor_slice.size
    assert len({p.tensor_slice.name for p in pieces}) == len(pieces)
    described = ((p.tensor_slice.name, p.values.dtype, p.tensor_slice.size) for p in pieces)
    header = encode_safetensors_header(described, _build_metadata(state.metadata, pieces))
    digest = hashlib.sha256()
    path = directory / rank_file_name(state.rank, state.metadata.world)
    size = 0
    with files.open(path, exclusive=True) as file:
        for view in itertools.chain([memoryview(header)], (tensor_bytes(p.values) for p in pieces)):
            digest.update(view)
            size += len(view)
            for start in range(0, len(view), _WRITE_BLOCK_BYTES):
                file.append([view[start : start + _WRITE_BLOCK_BYTES]])
        file.fsync()
    return FileEntry(path.name, size, digest.hexdigest())


def _build_metadata(facts: LearnerMetadata, pieces: Iterable[SliceValues]) -> dict[str, str]:
    places = [p.tensor_slice for p in pieces]
    return {
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(
            {p.name: {"saved_offsets": list(p.offset)} for p in places}
        ),
        _METADATA_KEY: json.dumps(
            {
                "facts": msgspec.to_builtins(facts),
                "shapes": {p.name: list(p.shape) for p in places if p.shape != p.size},
            }
        ),
    }


class _HeaderMetadata(msgspec.Struct, forbid_unknown_fields=True):
    facts: LearnerMetadata
    shapes: dict[str, tuple[int, ...]]


class _SliceOffsets(msgspec.Struct, forbid_unknown_fields=True):
    saved_offsets: tuple[int, ...]


class RankFile:
    """One rank's file: the metadata and slices that its header names. The values stay in the file
    until they are read.

    Raises `CheckpointError` for a header that cannot be read.
    """

    def __init__(self, path: Path, *, files: Files = REAL_WORLD.files):
        self.name = path.name
        try:
            with files.open(path) as file:
                data = file.map_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            header = decode_json(data[8:end], dict[str, msgspec.Raw])
            metadata = decode_json(header.pop("__metadata__", b"{}"), dict[str, str])
            saved = decode_json(metadata[_METADATA_KEY], _HeaderMetadata)
            offsets = decode_json(metadata["DCP_SHARDING_INFO"], dict[str, _SliceOffsets])
            self.tensors = {
                name: decode_json(text, SafetensorsEntry) for name, text in header.items()
            }
            self.slices = {
                name: TensorSlice(
                    name,
                    saved.shapes.get(name, tensor.shape),
                    offsets[name].saved_offsets,
                    tensor.shape,
                )
                for name, tensor in self.tensors.items()
            }
        except KeyError as error:
            raise CheckpointError(f"{self.name}: it says nothing of {error}") from error
        except OSError as error:
            raise make_read_error(self.name, error) from error
        except MalformedError as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        self.metadata = saved.facts
        self._data = data[end:]

    def check_slices(self) -> None:
        """Raise `CheckpointError` unless every slice is within its tensor, and its values are
        within the file."""
        for name, tensor in self.tensors.items():
            place = self.slices[name]
            if not len(place.shape) == len(place.offset) == len(place.size):
                raise CheckpointError(
                    f"{self.name}: {name}: a piece of {len(place.size)} dimensions in "
                    f"{place.shape} at {place.offset}"
                )
            boxes = zip(place.shape, place.offset, place.size, strict=True)
            if any(min(offset, size) < 0 or offset + size > whole for whole, offset, size in boxes):
                raise CheckpointError(
                    f"{self.name}: {name}: a piece of {place.size} at {place.offset} is not "
                    f"inside {place.shape}"
                )
            begin, end = tensor.data_offsets
            nbytes = (
                math.prod(tensor.shape) * _DTYPES[tensor.dtype].itemsize
                if tensor.dtype in _DTYPES
                else -1
            )
            if not 0 <= begin <= end <= len(self._data) or end - begin != nbytes:
                raise CheckpointError(
                    f"{self.name}: {name}: {tensor.dtype} {tensor.shape} at bytes {begin} to "
                    f"{end} cannot be"
                )

    def get_dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.tensors[name].dtype]

    def read_tensor(self, name: str) -> np.ndarray:
        """Return the values as uint8 `[*size, bytes of a value]`, not copied; NumPy does not
        know every dtype."""
        data = np.frombuffer(self._data[slice(*self.tensors[name].data_offsets)], np.uint8)
        return data.reshape(*self.slices[name].size, self.get_dtype(name).itemsize)


@dataclass(frozen=True)
class RankCopy:
    """A counterpart of `RankFile` for a rank's copy that never was in a file.

    It passes between processes: the receiver maps the NumPy arrays of `arrays`, uint8
    `[*size, bytes of a value]` by name, without copying them.
    """

    name: str
    metadata: LearnerMetadata
    slices: dict[str, TensorSlice]
    dtypes: dict[str, torch.dtype]
    arrays: dict[str, np.ndarray]

    @staticmethod
    def from_state(state: RankState) -> RankCopy:
        """Return the copy that a rank took, sharing its memory."""
        kept = {p.tensor_slice.name: p for p in state.slices if p.values.numel()}
        return RankCopy(
            rank_file_name(state.rank, state.metadata.world),
            state.metadata,
            {name: piece.tensor_slice for name, piece in kept.items()},
            {name: piece.values.dtype for name, piece in kept.items()},
            {
                name: piece.values.unsqueeze(-1).view(torch.uint8).numpy()
                for name, piece in kept.items()
            },
        )

    def check_slices(self) -> None:
        """Accept the slices unchecked: a rank of this very start made them."""

    def get_dtype(self, name: str) -> torch.dtype:
        return self.dtypes[name]

    def read_tensor(self, name: str) -> np.ndarray:
        """Implement `RankFile.read_tensor`."""
        return self.arrays[name]


class LearnerStateReader:
    """A reader of the learner's state from a checkpoint's files, or from copies that were never in
    one, whatever ranks made them. It reads only what is requested, and nothing twice.

    Every method raises `CheckpointError`.

    Args:
        parts: Files that the manifest lists, whose checksums have been compared; or what ranks
            copied after the same step.
    """

    def __init__(
        self, parts: Sequence[Path] | Sequence[RankCopy], *, files: Files = REAL_WORLD.files
    ):
        opened = [
            each if isinstance(each, RankCopy) else RankFile(each, files=files) for each in parts
        ]
        opened.sort(key=lambda part: part.name)
        if not opened:
            raise CheckpointError("it has no file of the learner (learner-*.safetensors)")
        self.metadata = opened[0].metadata
        world = self.metadata.world
        names = [part.name for part in opened]
        if len(names) != world or names != [rank_file_name(rank, world) for rank in range(world)]:
            raise CheckpointError(f"{world} ranks wrote it, but there are {', '.join(names)}")
        self._sources: dict[str, list[tuple[RankFile | RankCopy, TensorSlice]]] = {}
        for part in opened:
            if part.metadata != self.metadata:
                raise CheckpointError(
                    f"{part.name}: it is of another step, model or run than {opened[0].name}"
                )
            part.check_slices()
            for name, place in part.slices.items():
                self._sources.setdefault(name, []).append((part, place))
        for name, found in self._sources.items():
            for (_, a), (_, b) in itertools.combinations(found, 2):
                if a.shape != b.shape or _intersect_slices(a, b):
                    raise CheckpointError(f"{name}: two of its pieces contradict each other")

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def tensor_names(self) -> set[str]:
        """Return the names of all whole tensors."""
        return set(self._sources)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor `name`."""
        return self._find_sources(name)[0][1].shape

    def _find_sources(self, name: str) -> list[tuple[RankFile | RankCopy, TensorSlice]]:
        if name not in self._sources:
            raise CheckpointError(
                f"it has no {name}: it is of another model, or of another backend"
            )
        return self._sources[name]

    def read_slice(self, wanted: TensorSlice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values of a slice, assembled from any number of saved slices, all of which
        must be of `dtype`."""
        name = wanted.name
        found = self._find_sources(name)
        out = torch.empty(wanted.size, dtype=dtype)
        values = out.unsqueeze(-1).view(torch.uint8).numpy()
        filled = 0
        for part, place in found:
            if place.shape != wanted.shape:
                raise CheckpointError(
                    f"{name}: shape {place.shape}, but the model's is {wanted.shape}"
                )
            box = _intersect_slices(place, wanted)
            if box is None:
                continue
            begin, end = box
            theirs = tuple(
                slice(b - o, e - o) for b, e, o in zip(begin, end, place.offset, strict=True)
            )
            ours = tuple(
                slice(b - o, e - o) for b, e, o in zip(begin, end, wanted.offset, strict=True)
            )
            if part.get_dtype(name) != dtype:
                raise CheckpointError(f"{name}: {part.get_dtype(name)}, not {dtype}")
            values[ours] = part.read_tensor(name)[theirs]
            filled += math.prod(e - b for b, e in zip(begin, end, strict=True))
        if filled != out.numel():
            raise CheckpointError(f"{name}: {filled} of {out.numel()} values are there")
        return out


def _intersect_slices(a: TensorSlice, b: TensorSlice) -> tuple[list[int], list[int]] | None:
    """Return the first and last corner, in the whole tensor, of what both slices cover; None if
    that is nothing."""
    begin = [max(x, y) for x, y in zip(a.offset, b.offset, strict=True)]
    ends = zip(a.offset, a.size, b.offset, b.size, strict=True)
    end = [min(x + n, y + m) for x, n, y, m in ends]
    return (
        (begin, end) if math.prod(max(0, e - b) for b, e in zip(begin, end, strict=True)) else None
    )
