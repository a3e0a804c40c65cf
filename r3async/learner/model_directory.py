"""Model directories: the current weights, or a published version, in Hugging Face's form."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from r3async.data.checkpoint_forms import (
    INDEX_FILE,
    is_prediction_key,
    is_prediction_tensor,
    read_quantized_form,
    without_quantization,
)
from r3async.data.engine_models import list_needed_config
from r3async.data.model_shape import take_text_config
from r3async.data.safetensors_header import decode_safetensors_header
from r3async.learner.dequantized_files import DequantizedFile
from r3async.learner.model import open_model_files
from r3async.learner.results import LearnerError
from r3async.untrusted import decode_python_json
from r3async.world.files import make_directory, replace_directory

if TYPE_CHECKING:
    from r3async.learner.rank_group import RankGroup


logger = logging.getLogger(__name__)

MODEL_FILE_BYTES = 2 * 10**9
"""Most bytes of weights in one file of a model directory, unless one weight is larger. A rank
copies as many to its host at once."""

WEIGHT_FILE_ENDINGS = (
    *(".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf"),
    *(".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".ckpt", ".npz"),
    "adapter_config.json",
)
"""Ends of the names of files that hold weights or name files of weights. They are not copied
beside new weights."""


def save_model(
    directory: Path,
    source: Path,
    weights: Iterable[tuple[str, Tensor]],
    dtype: str,
    ranks: RankGroup,
    carried: Sequence[str] = (),
) -> None:
    """Write the weights, of `dtype`, as a Hugging Face model directory with the configuration and
    tokenizer of `source`, and its `carried` tensors.

    Collective. Every rank writes the weights that it yields to files of its own, so the directory
    has to be on a file system that all ranks share, and no rank holds more than `MODEL_FILE_BYTES`
    of them. It is written aside and renamed; an existing `directory` is replaced. Raises `OSError`
    if this rank cannot write, `LearnerError` if another cannot.
    """
    with ExitStack() as stack:
        aside = None
        failed = None
        if ranks.rank == 0:
            try:
                aside = stack.enter_context(
                    _stage_model_directory(directory, source, dtype, carried)
                )
            except OSError as error:
                failed = error
        _raise_together(failed, ranks, directory)
        shared = ranks.all_gather(aside)[0]
        assert shared is not None
        if ranks.rank == 0:
            weights = itertools.chain(weights, _read_carried(source, carried, dtype))
        files, failed = _write_weight_files(shared, ranks.rank, weights)
        _raise_together(failed, ranks, directory)
        everywhere = ranks.all_gather(files)
        if aside is not None:
            _name_weight_files(
                aside, {file: sizes for each in everywhere for file, sizes in each.items()}
            )


def _raise_together(failed: OSError | None, ranks: RankGroup, directory: Path) -> None:
    """Raise this rank's error, if there is one, or a `LearnerError` with another rank's.
    Collective: a rank that raised alone would be waited for."""
    for rank, error in enumerate(ranks.all_gather(failed)):
        if error is not None:
            raise failed or LearnerError(
                f"rank {rank} of the learner could not write its part of {directory}: {error}"
            )


def _write_weight_files(
    directory: Path, rank: int, weights: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, dict[str, int]], OSError | None]:
    """Write the weights and return the bytes of each tensor, by file and name, and the error
    that stopped it.

    After an error the rest of the weights is read all the same: others wait for this rank's part
    in gathering them.
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


def _read_carried(source: Path, carried: Sequence[str], dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the `carried` tensors of a model directory as they are, or in `dtype` if they are
    dequantized."""
    if not carried:
        return
    files = open_model_files(source)
    for name in carried:
        tensor = files[name].get_tensor(name)
        dequantized = isinstance(files[name], DequantizedFile)
        yield name, tensor.to(getattr(torch, dtype)) if dequantized else tensor


def _divide_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield copies of the weights on the host, as many at once as
    `MODEL_FILE_BYTES` has room for."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights:
        if tensors and sum(t.nbytes for t in tensors.values()) + tensor.nbytes > MODEL_FILE_BYTES:
            yield tensors
            tensors = {}
        tensors[name] = torch.empty_like(
            tensor, device="cpu", memory_format=torch.contiguous_format
        ).copy_(tensor)
    if tensors:
        yield tensors


def _read_tensor_sizes(file: Path) -> dict[str, int]:
    """Return the bytes of each tensor of a safetensors file."""
    with file.open("rb") as opened:
        start = opened.read(8)
        entries, _ = decode_safetensors_header(start + opened.read(int.from_bytes(start, "little")))
    return {name: entry.data_offsets[1] - entry.data_offsets[0] for name, entry in entries.items()}


def _name_weight_files(directory: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Give the files the names that Hugging Face gives them, and write the index if
    there are several."""
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
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def save_version_as_model(
    directory: Path,
    source: Path,
    copy_version: Callable[[Path], object],
    dtype: str,
    carried: Sequence[str] = (),
) -> None:
    """Write a published version, whose file `copy_version` copies to a path, as a model directory,
    like `save_model`."""
    with _stage_model_directory(directory, source, dtype, carried) as aside:
        version = aside / "version.safetensors"
        copy_version(version)
        files, failed = _write_weight_files(aside, 0, _read_carried(source, carried, dtype))
        if failed is not None:
            raise failed
        trained = {version.name: _read_tensor_sizes(version) if files else {}}
        _name_weight_files(aside, trained | files)


def copy_version_file(weights: Path, target: Path) -> None:
    """Copy the file of a version that is whole on this host, for `save_version_as_model`."""
    shutil.copyfile(weights, target)


def omit_prediction_layers(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` without layers for multi-token prediction, which are neither
    trained nor written.

    Numbers and switches become 0 and False, because a model's class may have another default. All
    else that describes these layers is left out, in nested configurations too.
    """
    kept: dict[str, Any] = {}
    for key, value in described.items():
        if is_prediction_key(key):
            if isinstance(value, int):
                kept[key] = type(value)(0)
        else:
            kept[key] = omit_prediction_layers(value) if isinstance(value, dict) else value
    return kept


def describe_written_model(
    described: Mapping[str, Any], dtype: str, carried: Sequence[str]
) -> dict[str, Any]:
    """Return the `config.json` for weights of `dtype`, none of them quantized, with the tensors
    that are `carried`, and with what vLLM needs and transformers left out."""
    written = without_quantization(described)
    layers = take_text_config(written).get("num_hidden_layers") or 0
    if not any(is_prediction_tensor(name, layers) for name in carried):
        written = omit_prediction_layers(written)
    written.pop("torch_dtype", None)
    written["dtype"] = dtype
    text = written.get("text_config", written)
    text.update({key: dtype for key in ("dtype", "torch_dtype") if key in text})
    needed = list_needed_config(text)
    text.update({key: value for key, value in needed.items() if text.get(key) is None})
    return written


def log_checkpoint_form(source: Path, carried: Sequence[str]) -> None:
    """Log what of a model directory is dequantized, and what is carried untrained."""
    described = decode_python_json((source / "config.json").read_bytes())
    form = read_quantized_form(described)
    if form is not None:
        logger.warning(
            "%s: its weights in %s are dequantized; what is written has none of them", source, form
        )
    if not carried:
        return
    layers = take_text_config(described).get("num_hidden_layers") or 0
    stale = [name for name in carried if is_prediction_tensor(name, layers)]
    logger.warning(
        "%s: %d tensors (%s, …) are carried as they are into what is exported%s",
        source,
        len(carried),
        carried[0],
        f". {len(stale)} of them are layers for multi-token prediction, which become stale: "
        "they predict what the model before training said"
        if stale
        else "",
    )


@contextmanager
def _stage_model_directory(
    directory: Path, source: Path, dtype: str, carried: Sequence[str]
) -> Iterator[Path]:
    """Yield a temporary directory for weights, which becomes `directory` at the end."""
    make_directory(directory.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield aside
        for path in source.iterdir():
            if path.is_file() and not path.name.endswith(WEIGHT_FILE_ENDINGS):
                shutil.copy2(path, aside / path.name)
        described = describe_written_model(
            decode_python_json((source / "config.json").read_bytes()), dtype, carried
        )
        (aside / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        aside.chmod(0o755)
        replace_directory(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
