"""What a learner saves and resumes from, the weights that it began with, and a model directory of those that it has.

Every tensor of the optimizer is named as in a model's checkpoint, whatever the ranks: `master/NAME`, `exp_avg/NAME`,
`exp_avg_sq/NAME` for each weight `NAME` of the model, `step/NAME` for how often it was updated, `expert_bias/NAME` for what
decides who is chosen, `rng/DEVICE/RANK`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.nn import Parameter

from r3async.checkpoint.state import CheckpointError
from r3async.checkpoint.tensors import LearnerFacts, LearnerParts, LearnerState, Piece, Place
from r3async.learner.expert_biases import ExpertBias
from r3async.learner.optimizer import local
from r3async.learner.shares import Share
from r3async.untrusted import decode_python_json
from r3async.world.files import make_directory, replace_directory

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


@dataclass(frozen=True)
class Held:
    """What one parameter of this rank is of the whole model: the values of `places`, in the order in which `split` gives them.

    `join` undoes `split`. `writes`: of the ranks that hold the same, this one hands it in.
    """

    places: tuple[Place, ...]
    split: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]
    join: Callable[[list[Tensor]], Tensor] = lambda tensors: tensors[0]
    writes: bool = True

    def of_share(self, shape: Sequence[int], share: Share) -> Held:
        """What that share of the parameter, which has `shape`, is of the whole model; places in which it has nothing are left
        out. Rows of each place are in order in the parameter, so what is in a share of them is a box."""
        if share.ranks == 1:
            return self
        count = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        mine = share.rows(shape)
        numbers = torch.arange(count).view(*shape[:-1], 1) if len(shape) > 1 else torch.arange(count)
        places, rows = [], []
        for place, part in zip(self.places, self.split(numbers), strict=True):
            assert len(place.shape) <= 2, place
            here = part.reshape(-1)
            (inside,) = torch.nonzero((here >= mine.start) & (here < mine.stop), as_tuple=True)
            if len(inside):
                first = min(int(inside[0]), place.size[0])  # rows after these only pad the part
                offset, size = place.offset[0] + first, min(len(inside), place.size[0] - first)
                places.append(
                    replace(place, offset=(offset, *place.offset[1:]), size=(size, *place.size[1:])),
                )
                rows.append(_slice_of(here[inside] - mine.start))

        def join(tensors: list[Tensor]) -> Tensor:
            out = tensors[0].new_empty(mine.stop - mine.start, *tensors[0].shape[1:])
            for at, tensor in zip(rows, tensors, strict=True):
                out[at] = tensor
            return out

        return Held(tuple(places), lambda tensor: [tensor[at] for at in rows], join, self.writes)


def _slice_of(numbers: Tensor) -> slice | Tensor:
    """A slice if they follow one another: what it takes is not copied."""
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers


@torch.no_grad()
def take(backend: LearnerBackend) -> LearnerState:
    """A copy, in host memory, of everything of this rank that later steps depend on: float32 weights, Adam's moments and step
    counts, the trust region's controller, random number generators. What several ranks hold, one hands in."""
    pieces = []
    for held, tensors in zip(backend.own_places(), backend.optimizer.states(), strict=True):
        if not held.writes:
            continue
        for kind, tensor in tensors.items():
            if kind == "step":
                # Of the ranks that divide a tensor among them, the one that begins it.
                pieces += [Piece(_step(place), _copy(tensor)) for place in held.places if not any(place.offset)]
                continue
            for place, part in zip(held.places, held.split(tensor), strict=True):
                inside = part[tuple(slice(n) for n in place.size)]
                pieces.append(Piece(replace(place, name=f"{kind}/{place.name}"), _copy(inside)))
    for bias in backend.biases:
        if bias.writes:
            pieces.append(Piece(_bias(bias), _copy(bias.tensor)))
    for name, numbers in _generators(backend.ranks.rank):
        pieces.append(Piece(Place.whole(name, numbers.shape), numbers))
    facts = LearnerFacts(
        backend=backend.name,
        model=_model(backend),
        steps=backend.optimizer.steps,
        world=backend.ranks.world,
        trust_region=backend.trust_region.state(),
    )
    return LearnerState(backend.ranks.rank, facts, pieces)


def restore(backend: LearnerBackend, parts: LearnerParts, *, optimizer: bool = True) -> None:
    """See `LearnerBackend.restore`. Raises `CheckpointError` if it is of another model or backend, or if a tensor is missing."""
    facts = parts.facts
    if facts.backend != backend.name:
        raise CheckpointError(
            f'it was written by learner.backend = "{facts.backend}", which names tensors in its own way: set that back, or '
            "`r3async export` the model and start from it"
        )
    if facts.model != _model(backend):
        raise CheckpointError(
            f"it is of another model: the config.json in {backend.source} is not the one it was written with"
        )
    backend.optimizer.restore(_read(backend, parts, optimizer), facts.steps if optimizer else 0)
    for bias in backend.biases:
        if (
            _bias(bias).name in parts
        ):  # checkpoints from before there was an update have none: the start model's are right
            bias.tensor.copy_(parts.read(_bias(bias)))
    if not optimizer:
        return
    backend.trust_region.restore(facts.trust_region)
    if facts.world == backend.ranks.world:
        _set_generators(backend.ranks.rank, parts)


def _read(backend: LearnerBackend, parts: LearnerParts, optimizer: bool) -> Iterator[dict[str, Tensor]]:
    """For each parameter what `MasterAdamW.restore` wants."""

    def values(kind: str, held: Held, like: Tensor) -> Tensor:
        pairs = zip(held.places, held.split(like), strict=True)
        return held.join([_filled(parts.read(replace(p, name=f"{kind}/{p.name}")), part) for p, part in pairs])

    own = zip(backend.own_places(), backend.optimizer.states(), strict=True)
    for held, parameter, (mine, now) in zip(backend.places(), backend.optimizer.parameters, own, strict=True):
        out = {"master": values("master", held, local(parameter.detach()))}
        if optimizer and mine.places and f"step/{mine.places[0].name}" in parts:
            out |= {kind: values(kind, mine, now["master"]) for kind in ("exp_avg", "exp_avg_sq")}
            out["step"] = parts.read(_step(mine.places[0]))
        yield out


def _filled(values: Tensor, part: Tensor) -> Tensor:
    """With zeros where a rank has rows that only pad its share: nothing is ever added to those."""
    return F.pad(values, (0, 0, 0, part.shape[0] - values.shape[0])) if values.shape != part.shape else values


def _model(backend: LearnerBackend) -> str:
    """SHA-256 of `config.json`: what the tensors' names and shapes follow from."""
    return hashlib.sha256((backend.source / "config.json").read_bytes()).hexdigest()


def _bias(bias: ExpertBias) -> Place:
    return Place.whole(f"expert_bias/{bias.name}", bias.tensor.shape)


def _step(place: Place) -> Place:
    return Place.whole(f"step/{place.name}", ())


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _generators(rank: int) -> Iterator[tuple[str, Tensor]]:
    """Torch's random numbers. Nothing draws any today: no model that is trained here has dropout, and weights are loaded."""
    yield f"rng/cpu/{rank}", torch.get_rng_state()
    if torch.cuda.is_available():
        yield f"rng/cuda/{rank}", torch.cuda.get_rng_state()


def _set_generators(rank: int, parts: LearnerParts) -> None:
    for name, now in _generators(rank):
        if name in parts:
            numbers = parts.read(Place.whole(name, now.shape), torch.uint8)
            try:
                torch.set_rng_state(numbers) if "/cpu/" in name else torch.cuda.set_rng_state(numbers)
            except RuntimeError as error:
                raise CheckpointError(f"{name}: {error}") from error


class Reference:
    """A copy, in host memory, of this rank's weights as they are now: the frozen model that the policy is kept near."""

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Parameter]):
        self._parameters = list(parameters)
        self._copies = self._now()

    def _now(self) -> list[Tensor]:
        return [local(p.detach()).to("cpu", copy=True) for p in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In this block the model has the reference weights; afterwards its own again, bit by bit."""
        own = self._now()
        self._put(self._copies)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            local(parameter.detach()).copy_(value)


def save_model(directory: Path, source: Path, tensors: Mapping[str, Tensor], dtype: str) -> None:
    """Write `tensors`, of `dtype`, as a Hugging Face model directory with the configuration and tokenizer of `source`.

    It is written aside and renamed; what was at `directory` is replaced.
    """
    with _model_directory(directory, source, dtype) as aside:
        save_torch_state_dict({k: v.cpu() for k, v in tensors.items()}, aside, metadata={"format": "pt"})


def save_version(directory: Path, source: Path, weights: Path, dtype: str) -> None:
    """The same of `weights`, the file of a published version."""
    with _model_directory(directory, source, dtype) as aside:
        shutil.copyfile(weights, aside / "model.safetensors")


@contextmanager
def _model_directory(directory: Path, source: Path, dtype: str) -> Iterator[Path]:
    """Aside, for weights; it becomes `directory` at the end."""
    make_directory(directory.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield aside
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".bin", ".index.json", ".pt", ".gguf")):
                shutil.copy2(path, aside / path.name)
        described = decode_python_json((source / "config.json").read_bytes())
        described.pop("torch_dtype", None)
        described["dtype"] = dtype
        (aside / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        aside.chmod(0o755)
        replace_directory(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
