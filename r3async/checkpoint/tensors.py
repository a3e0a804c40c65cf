"""Tensors of a checkpoint: one safetensors file a rank, each with that rank's pieces of whole tensors.

A piece is named by its whole tensor and says where in it it lies, so that any number of ranks can read what any other number
wrote. The format is what `torch.distributed.checkpoint` calls a distributed safetensors checkpoint, and its
`HuggingFaceStorageReader` reads it. Writing needs no other rank and nothing is pickled.
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

from r3async.checkpoint.state import CheckpointError, FileRecord, TrustRegionState
from r3async.data.container import CODES, Described, encode_header, tensor_bytes
from r3async.untrusted import Malformed, decode_json
from r3async.world import Files
from r3async.world.real import REAL

_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in CODES.items()}
_OURS = "r3async"
_BLOCK = 2**26
"""Bytes written at once."""


@dataclass(frozen=True)
class Place:
    """A box of the tensor `name`, which has `shape` as a whole: `size` from `offset` on, along each dimension."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> Place:
        return Place(name, tuple(shape), (0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Piece:
    """The values of a place; `tensor` is a copy in host memory."""

    place: Place
    tensor: Tensor


class LearnerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is not a tensor, the same on every rank.

    `backend`: `learner.backend`. `model`: SHA-256 of the model's `config.json`. `steps`: optimizer steps taken, from which the
    learning rate follows. `world`: ranks. `trust_region`: see `TrustRegion.state`.
    """

    backend: str
    model: str
    steps: int
    world: int
    trust_region: TrustRegionState


@dataclass(frozen=True)
class LearnerState:
    """One rank's copy of everything that its later steps depend on; see `LearnerBackend.state`."""

    rank: int
    facts: LearnerFacts
    pieces: list[Piece]


def part_name(rank: int, world: int) -> str:
    return f"learner-{rank:05d}-of-{world:05d}.safetensors"


def write_part(directory: Path, state: LearnerState, *, files: Files = REAL.files) -> FileRecord:
    """Write one rank's file into `directory`, to the disk. From any thread; most of its time it holds no lock."""
    pieces = sorted(
        (p for p in state.pieces if p.tensor.numel()), key=lambda p: (-p.tensor.element_size(), p.place.name)
    )
    for piece in pieces:
        assert tuple(piece.tensor.shape) == piece.place.size
    assert len({p.place.name for p in pieces}) == len(pieces)
    described = ((p.place.name, p.tensor.dtype, p.place.size) for p in pieces)
    header = encode_header(described, _metadata(state.facts, pieces))
    digest, path = hashlib.sha256(), directory / part_name(state.rank, state.facts.world)
    size = 0
    with files.open(path, new=True) as file:
        for view in itertools.chain([memoryview(header)], (tensor_bytes(p.tensor) for p in pieces)):
            digest.update(view)
            size += len(view)
            for start in range(0, len(view), _BLOCK):
                file.append([view[start : start + _BLOCK]])
        file.sync()
    return FileRecord(path.name, size, digest.hexdigest())


def _metadata(facts: LearnerFacts, pieces: Iterable[Piece]) -> dict[str, str]:
    places = [p.place for p in pieces]
    return {
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps({p.name: {"saved_offsets": list(p.offset)} for p in places}),
        _OURS: json.dumps(
            {
                "facts": msgspec.to_builtins(facts),
                "shapes": {p.name: list(p.shape) for p in places if p.shape != p.size},
            }
        ),
    }


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    facts: LearnerFacts
    shapes: dict[str, tuple[int, ...]]


class _Offsets(msgspec.Struct, forbid_unknown_fields=True):
    saved_offsets: tuple[int, ...]


class Part:
    """One rank's file: the facts and places that its header names. The values stay in the file until they are read.

    Raises `CheckpointError` for a header that cannot be read.
    """

    def __init__(self, path: Path, *, files: Files = REAL.files):
        self.name = path.name
        try:
            with files.open(path) as file:
                data = file.map()
            end = 8 + int.from_bytes(data[:8], "little")
            header = decode_json(data[8:end], dict[str, msgspec.Raw])
            metadata = decode_json(header.pop("__metadata__", b"{}"), dict[str, str])
            saved = decode_json(metadata[_OURS], _Saved)
            offsets = decode_json(metadata["DCP_SHARDING_INFO"], dict[str, _Offsets])
            self.tensors = {name: decode_json(text, Described) for name, text in header.items()}
            self.places = {
                name: Place(name, saved.shapes.get(name, tensor.shape), offsets[name].saved_offsets, tensor.shape)
                for name, tensor in self.tensors.items()
            }
        except KeyError as error:
            raise CheckpointError(f"{self.name}: it says nothing of {error}") from error
        except (OSError, Malformed) as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        self.facts, self._data = saved.facts, data[end:]

    def check(self) -> None:
        """Raises `CheckpointError` unless every piece is within its tensor, and its values within the file."""
        for name, tensor in self.tensors.items():
            place = self.places[name]
            if not len(place.shape) == len(place.offset) == len(place.size):
                raise CheckpointError(
                    f"{self.name}: {name}: a piece of {len(place.size)} dimensions in {place.shape} at {place.offset}"
                )
            boxes = zip(place.shape, place.offset, place.size, strict=True)
            if any(min(offset, size) < 0 or offset + size > whole for whole, offset, size in boxes):
                raise CheckpointError(
                    f"{self.name}: {name}: a piece of {place.size} at {place.offset} is not inside {place.shape}"
                )
            begin, end = tensor.data_offsets
            nbytes = math.prod(tensor.shape) * _DTYPES[tensor.dtype].itemsize if tensor.dtype in _DTYPES else -1
            if not 0 <= begin <= end <= len(self._data) or end - begin != nbytes:
                raise CheckpointError(
                    f"{self.name}: {name}: {tensor.dtype} {tensor.shape} at bytes {begin} to {end} cannot be"
                )

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self.tensors[name].dtype]

    def values(self, name: str) -> np.ndarray:
        """uint8 `[*size, bytes of a value]`, not copied: NumPy does not know every dtype."""
        data = np.frombuffer(self._data[slice(*self.tensors[name].data_offsets)], np.uint8)
        return data.reshape(*self.places[name].size, self.dtype(name).itemsize)


@dataclass(frozen=True)
class HeldPart:
    """The same of a rank's copy that never was in a file. It passes between processes: the NumPy arrays of `bytes_of`, uint8
    `[*size, bytes of a value]` by name, are mapped by whoever gets them, not copied."""

    name: str
    facts: LearnerFacts
    places: dict[str, Place]
    dtypes: dict[str, torch.dtype]
    bytes_of: dict[str, np.ndarray]

    @staticmethod
    def of(state: LearnerState) -> HeldPart:
        """Of what that rank copied, whose memory it shares."""
        kept = {p.place.name: p for p in state.pieces if p.tensor.numel()}
        return HeldPart(
            part_name(state.rank, state.facts.world),
            state.facts,
            {name: piece.place for name, piece in kept.items()},
            {name: piece.tensor.dtype for name, piece in kept.items()},
            {name: piece.tensor.unsqueeze(-1).view(torch.uint8).numpy() for name, piece in kept.items()},
        )

    def check(self) -> None:
        """A rank of this very start made it."""

    def dtype(self, name: str) -> torch.dtype:
        return self.dtypes[name]

    def values(self, name: str) -> np.ndarray:
        """See `Part.values`."""
        return self.bytes_of[name]


class LearnerParts:
    """The learner's files of a checkpoint, or copies that never were in one, whatever ranks made them. Reads what is asked for,
    and nothing twice.

    `parts`: files that the manifest lists, whose checksums have been compared; or what ranks copied after the same step. Every
    method raises `CheckpointError`.
    """

    def __init__(self, parts: Sequence[Path] | Sequence[HeldPart], *, files: Files = REAL.files):
        opened = [each if isinstance(each, HeldPart) else Part(each, files=files) for each in parts]
        opened.sort(key=lambda part: part.name)
        if not opened:
            raise CheckpointError("it has no file of the learner (learner-*.safetensors)")
        self.facts = opened[0].facts
        world, names = self.facts.world, [part.name for part in opened]
        if len(names) != world or names != [part_name(rank, world) for rank in range(world)]:
            raise CheckpointError(f"{world} ranks wrote it, but there are {', '.join(names)}")
        self._pieces: dict[str, list[tuple[Part | HeldPart, Place]]] = {}
        for part in opened:
            if part.facts != self.facts:
                raise CheckpointError(f"{part.name}: it is of another step, model or run than {opened[0].name}")
            part.check()
            for name, place in part.places.items():
                self._pieces.setdefault(name, []).append((part, place))
        for name, found in self._pieces.items():
            for (_, a), (_, b) in itertools.combinations(found, 2):
                if a.shape != b.shape or _overlap(a, b):
                    raise CheckpointError(f"{name}: two of its pieces contradict each other")

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def names(self) -> set[str]:
        """Of all whole tensors."""
        return set(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._found(name)[0][1].shape

    def _found(self, name: str) -> list[tuple[Part | HeldPart, Place]]:
        if name not in self._pieces:
            raise CheckpointError(f"it has no {name}: it is of another model, or of another backend")
        return self._pieces[name]

    def read(self, wanted: Place, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of that place, which must be of `dtype`, from however many pieces."""
        name = wanted.name
        found = self._found(name)
        out = torch.empty(wanted.size, dtype=dtype)
        values = out.unsqueeze(-1).view(torch.uint8).numpy()
        filled = 0
        for part, place in found:
            if place.shape != wanted.shape:
                raise CheckpointError(f"{name}: shape {place.shape}, but the model's is {wanted.shape}")
            box = _overlap(place, wanted)
            if box is None:
                continue
            begin, end = box
            theirs = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, place.offset, strict=True))
            ours = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, wanted.offset, strict=True))
            if part.dtype(name) != dtype:
                raise CheckpointError(f"{name}: {part.dtype(name)}, not {dtype}")
            values[ours] = part.values(name)[theirs]
            filled += math.prod(e - b for b, e in zip(begin, end, strict=True))
        if filled != out.numel():
            raise CheckpointError(f"{name}: {filled} of {out.numel()} values are there")
        return out


def _overlap(a: Place, b: Place) -> tuple[list[int], list[int]] | None:
    """First and last corner, in the whole tensor, of what both cover. None if that is nothing."""
    begin = [max(x, y) for x, y in zip(a.offset, b.offset, strict=True)]
    ends = zip(a.offset, a.size, b.offset, b.size, strict=True)
    end = [min(x + n, y + m) for x, n, y, m in ends]
    return (begin, end) if math.prod(max(0, e - b) for b, e in zip(begin, end, strict=True)) else None
