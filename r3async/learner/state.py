"""The learner's saved state, its reference weights, and model directories of its current weights.

Every tensor of the optimizer is named as in a model's checkpoint, whatever the ranks: `master/NAME`, `exp_avg/NAME`,
`exp_avg_sq/NAME` for each weight `NAME` of the model, `step/NAME` for how often it was updated, `expert_bias/NAME` for
an expert bias, `rng/DEVICE/RANK`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter

from r3async.checkpoint.state import CheckpointError
from r3async.checkpoint.tensors import LearnerMetadata, LearnerStateReader, RankState, SliceValues, TensorSlice
from r3async.learner.optimizer import ExpertBias, RowShare, to_local
from r3async.learner.results import LearnerError
from r3async.untrusted import decode_python_json
from r3async.world.files import make_directory, replace_directory

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend, RankGroup

MODEL_FILE_BYTES = 2 * 10**9
"""Most bytes of weights in one file of a model directory, unless one weight is larger. A rank copies as many to its host
at once."""

WEIGHT_FILE_ENDINGS = (
    *(".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf"),
    *(".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".ckpt", ".npz"),
    "adapter_config.json",
)
"""Ends of the names of files that hold weights or name files of weights. They are not copied beside new weights."""


@dataclass(frozen=True)
class ShardSlice:
    """The position of one parameter of this rank in the whole model.

    The parameter has the values of `places`, in the order in which `split` returns them. `join` undoes `split`.
    `is_writer` is True on the one rank, among those that hold the same values, that writes them.
    """

    places: tuple[TensorSlice, ...]
    split: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]
    join: Callable[[list[Tensor]], Tensor] = lambda tensors: tensors[0]
    is_writer: bool = True

    def narrow_to_share(self, shape: Sequence[int], share: RowShare) -> ShardSlice:
        """Return the position of that share of the parameter, which has `shape`, in the whole model.

        Places in which the share has nothing are left out. The rows of each place are in order in the parameter, so the
        rows that belong to a share are a box.
        """
        if share.num_ranks == 1:
            return self
        count = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        mine = share.row_range(shape)
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
                rows.append(_as_slice(here[inside] - mine.start))

        def join(tensors: list[Tensor]) -> Tensor:
            out = tensors[0].new_empty(mine.stop - mine.start, *tensors[0].shape[1:])
            for at, tensor in zip(rows, tensors, strict=True):
                out[at] = tensor
            return out

        return ShardSlice(tuple(places), lambda tensor: [tensor[at] for at in rows], join, self.is_writer)


def _as_slice(numbers: Tensor) -> slice | Tensor:
    """Return a slice if the numbers are consecutive: indexing with it copies nothing."""
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers


@torch.no_grad()
def capture_learner_state(backend: LearnerBackend) -> RankState:
    """Return a copy, in host memory, of everything of this rank that later steps depend on.

    This is: float32 weights, Adam's moments and step counts, the trust region's controller, random number generators.
    Values that several ranks hold are captured by one of them.
    """
    pieces = []
    for held, tensors in zip(backend.owned_slices(), backend.optimizer.iter_states(), strict=True):
        if not held.is_writer:
            continue
        for kind, tensor in tensors.items():
            if kind == "step":
                # Among the ranks that divide a tensor, the one that has its beginning writes the step.
                pieces += [
                    SliceValues(_step_place(place), _copy_to_host(tensor))
                    for place in held.places
                    if not any(place.offset)
                ]
                continue
            for place, part in zip(held.places, held.split(tensor), strict=True):
                inside = part[tuple(slice(n) for n in place.size)]
                pieces.append(SliceValues(replace(place, name=f"{kind}/{place.name}"), _copy_to_host(inside)))
    for bias in backend.expert_biases:
        if bias.is_writer:
            pieces.append(SliceValues(_bias_place(bias), _copy_to_host(bias.tensor)))
    for name, numbers in _rng_states(backend.ranks.rank):
        pieces.append(SliceValues(TensorSlice.full_tensor(name, numbers.shape), numbers))
    facts = LearnerMetadata(
        backend=backend.name,
        model=_config_digest(backend),
        steps=backend.optimizer.update_count,
        world=backend.ranks.world_size,
        trust_region=backend.trust_region.state_dict(),
    )
    return RankState(backend.ranks.rank, facts, pieces)


def restore_learner_state(backend: LearnerBackend, parts: LearnerStateReader, *, with_optimizer: bool = True) -> None:
    """Restore a learner, see `LearnerBackend.restore_state`.

    Raises `CheckpointError` if the state is of another model or backend, or if a tensor is missing.
    """
    facts = parts.metadata
    if facts.backend != backend.name:
        raise CheckpointError(
            f'it was written by learner.backend = "{facts.backend}", which names tensors in its own way: set that back, or '
            "`r3async export` the model and start from it"
        )
    if facts.model != _config_digest(backend):
        raise CheckpointError(
            f"it is of another model: the config.json in {backend.model_path} is not the one it was written with"
        )
    backend.optimizer.load_states(
        _read_optimizer_states(backend, parts, with_optimizer), facts.steps if with_optimizer else 0
    )
    for bias in backend.expert_biases:
        if (
            _bias_place(bias).name in parts
        ):  # checkpoints from before biases were updated have none: the start model's are right
            bias.tensor.copy_(parts.read_slice(_bias_place(bias)))
    if not with_optimizer:
        return
    backend.trust_region.load_state_dict(facts.trust_region)
    if facts.world == backend.ranks.world_size:
        _restore_rng_states(backend.ranks.rank, parts)


def _read_optimizer_states(
    backend: LearnerBackend, parts: LearnerStateReader, optimizer: bool
) -> Iterator[dict[str, Tensor]]:
    """Yield, for each parameter, the state that `MasterAdamW.load_states` takes."""

    def values(kind: str, held: ShardSlice, like: Tensor) -> Tensor:
        pairs = zip(held.places, held.split(like), strict=True)
        return held.join([_pad_rows(parts.read_slice(replace(p, name=f"{kind}/{p.name}")), part) for p, part in pairs])

    own = zip(backend.owned_slices(), backend.optimizer.iter_states(), strict=True)
    for held, parameter, (mine, now) in zip(backend.trained_slices(), backend.optimizer.parameters, own, strict=True):
        out = {"master": values("master", held, to_local(parameter.detach()))}
        if optimizer and mine.places and f"step/{mine.places[0].name}" in parts:
            out |= {kind: values(kind, mine, now["master"]) for kind in ("exp_avg", "exp_avg_sq")}
            out["step"] = parts.read_slice(_step_place(mine.places[0]))
        yield out


def _pad_rows(values: Tensor, part: Tensor) -> Tensor:
    """Add zeros where a rank has rows that only pad its share: such rows never change."""
    return F.pad(values, (0, 0, 0, part.shape[0] - values.shape[0])) if values.shape != part.shape else values


def _config_digest(backend: LearnerBackend) -> str:
    """Return the SHA-256 of `config.json`, which determines the tensors' names and shapes."""
    return hashlib.sha256((backend.model_path / "config.json").read_bytes()).hexdigest()


def _bias_place(bias: ExpertBias) -> TensorSlice:
    return TensorSlice.full_tensor(f"expert_bias/{bias.name}", bias.tensor.shape)


def _step_place(place: TensorSlice) -> TensorSlice:
    return TensorSlice.full_tensor(f"step/{place.name}", ())


def _copy_to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


def _rng_states(rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield torch's random number states.

    Nothing uses them today: no model trained here has dropout, and weights are loaded.
    """
    yield f"rng/cpu/{rank}", torch.get_rng_state()
    if torch.cuda.is_available():
        yield f"rng/cuda/{rank}", torch.cuda.get_rng_state()


def _restore_rng_states(rank: int, parts: LearnerStateReader) -> None:
    for name, now in _rng_states(rank):
        if name in parts:
            numbers = parts.read_slice(TensorSlice.full_tensor(name, now.shape), torch.uint8)
            try:
                torch.set_rng_state(numbers) if "/cpu/" in name else torch.cuda.set_rng_state(numbers)
            except RuntimeError as error:
                raise CheckpointError(f"{name}: {error}") from error


class ReferenceWeights:
    """A copy, in host memory, of this rank's weights as they are now: the frozen reference model of the policy."""

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Parameter]):
        self._parameters = list(parameters)
        self._copies = self._copy_weights()

    def _copy_weights(self) -> list[Tensor]:
        return [to_local(p.detach()).to("cpu", copy=True) for p in self._parameters]

    @contextmanager
    def use_reference_weights(self) -> Iterator[None]:
        """Give the model the reference weights inside this block, and its own again afterwards, bit by bit."""
        own = self._copy_weights()
        self._load_weights(self._copies)
        try:
            yield
        finally:
            self._load_weights(own)

    @torch.no_grad()
    def _load_weights(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            to_local(parameter.detach()).copy_(value)


def save_model(
    directory: Path, source: Path, weights: Iterable[tuple[str, Tensor]], dtype: str, ranks: RankGroup
) -> None:
    """Write the weights, of `dtype`, as a Hugging Face model directory with the configuration and tokenizer of `source`.

    Collective. Every rank writes the weights that it yields to files of its own, so the directory has to be on a file
    system that all ranks share, and no rank holds more than `MODEL_FILE_BYTES` of them. It is written aside and renamed;
    an existing `directory` is replaced. Raises `OSError` if this rank cannot write, `LearnerError` if another cannot.
    """
    with ExitStack() as stack:
        aside, failed = None, None
        if ranks.rank == 0:
            try:
                aside = stack.enter_context(_stage_model_directory(directory, source, dtype))
            except OSError as error:
                failed = error
        _raise_together(failed, ranks, directory)
        shared = ranks.all_gather(aside)[0]
        assert shared is not None
        files, failed = _write_weight_files(shared, ranks.rank, weights)
        _raise_together(failed, ranks, directory)
        everywhere = ranks.all_gather(files)
        if aside is not None:
            _name_weight_files(aside, {file: sizes for each in everywhere for file, sizes in each.items()})


def _raise_together(failed: OSError | None, ranks: RankGroup, directory: Path) -> None:
    """Raise this rank's error, if there is one, or a `LearnerError` with another rank's. Collective: a rank that raised
    alone would be waited for."""
    for rank, error in enumerate(ranks.all_gather(failed)):
        if error is not None:
            raise failed or LearnerError(f"rank {rank} of the learner could not write its part of {directory}: {error}")


def _write_weight_files(
    directory: Path, rank: int, weights: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, dict[str, int]], OSError | None]:
    """Write the weights and return the bytes of each tensor, by file and name, and the error that stopped it.

    After an error the rest of the weights is read all the same: others wait for this rank's part in gathering them.
    """
    written: dict[str, dict[str, int]] = {}
    failed: OSError | None = None
    for number, tensors in enumerate(_divide_weights(weights)):
        file = f"{rank}-{number}.safetensors"
        try:
            if failed is None:
                save_file(tensors, directory / file, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            failed = error if isinstance(error, OSError) else OSError(str(error))
        written[file] = {name: tensor.nbytes for name, tensor in tensors.items()}
        del tensors  # before the next are copied
    return written, failed


def _divide_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield copies of the weights on the host, as many at once as `MODEL_FILE_BYTES` has room for."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights:
        if tensors and sum(t.nbytes for t in tensors.values()) + tensor.nbytes > MODEL_FILE_BYTES:
            yield tensors
            tensors = {}
        tensors[name] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor)
    if tensors:
        yield tensors


def _name_weight_files(directory: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Give the files the names that Hugging Face gives them, and write the index if there are several."""
    if len(files) == 1:
        (file,) = files
        (directory / file).rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (file, sizes) in enumerate(files.items(), 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        (directory / file).rename(directory / name)
        weight_map.update(dict.fromkeys(sizes, name))
    total = sum(nbytes for sizes in files.values() for nbytes in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_version_as_model(directory: Path, source: Path, copy_version: Callable[[Path], object], dtype: str) -> None:
    """Write a published version, whose file `copy_version` copies to a path, as a model directory, like `save_model`."""
    with _stage_model_directory(directory, source, dtype) as aside:
        copy_version(aside / "model.safetensors")


def copy_version_file(weights: Path, target: Path) -> None:
    """Copy the file of a version that is whole on this host, for `save_version_as_model`."""
    shutil.copyfile(weights, target)


def omit_prediction_layers(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` without layers for multi-token prediction, which are neither trained nor written.

    Numbers and switches become 0 and False, because a model's class may have another default. All else that describes
    these layers is left out, in nested configurations too.
    """
    kept: dict[str, Any] = {}
    for key, value in described.items():
        if "nextn" in key or "mtp" in key.split("_"):
            if isinstance(value, int):
                kept[key] = type(value)(0)
        else:
            kept[key] = omit_prediction_layers(value) if isinstance(value, dict) else value
    return kept


@contextmanager
def _stage_model_directory(directory: Path, source: Path, dtype: str) -> Iterator[Path]:
    """Yield a temporary directory for weights, which becomes `directory` at the end."""
    make_directory(directory.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield aside
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith(WEIGHT_FILE_ENDINGS):
                shutil.copy2(path, aside / path.name)
        described = omit_prediction_layers(decode_python_json((source / "config.json").read_bytes()))
        described.pop("torch_dtype", None)
        described["dtype"] = dtype
        (aside / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        aside.chmod(0o755)
        replace_directory(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
