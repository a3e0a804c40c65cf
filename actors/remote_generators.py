"""Generators that cannot read the start model: their part of the model, and their events.

A run needs no file system that its hosts share, except for what the learner writes if its ranks are
on several hosts. A host without the model's directory gets all files in it but the weights, which
come like any version: the engine begins with made-up weights, and plays when those of the run are
installed and verified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.checkpoint.run_starts import read_run_starts
from r3async.data.checkpoint_forms import read_quantized_form, without_quantization
from r3async.rollout.engine import TENSOR_NAMES_FILE
from r3async.untrusted import decode_python_json
from r3async.world import Files, World
from r3async.world.files import make_directory, read_file, replace_file

from .process import RunFailed

WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
)
"""Suffixes of the files that are not sent."""
MAX_MODEL_FILES_BYTES = 512 * 2**20
"""Maximum bytes of all files that are sent."""
ENGINE_MODEL_DIRECTORY = "engine-model"
"""Name of the directory in a run's directory with which the engines of a quantized model start."""


class RemoteModelFiles(NamedTuple):
    """A model directory at `path` on the host where the run was started. `files_ref` is the
    reference that `Actors.put` returned for the files in it that are not weights."""

    path: str
    files_ref: Any


def publish_model_files(world: World, path: Path) -> RemoteModelFiles:
    """Publish the files of a model directory, except its weights, for hosts that do not have it.
    Raises `RunFailed` if they are too large for a model without its weights."""
    return RemoteModelFiles(str(path), world.actors.put(_read_model_files(world, path)))


def write_engine_model(world: World, path: Path, run_dir: Path) -> Path:
    """Return the directory with which engines start: `path`, unless its weights are quantized.

    Then it is a new one in the run's directory, with all but the weights: engines get them as the
    learner trains them. Raises `RunFailed` like `publish_model_files`.
    """
    described = decode_python_json(read_file(path / "config.json", files=world.files))
    if read_quantized_form(described) is None:
        return path
    given = _read_model_files(world, path)
    given["config.json"] = json.dumps(without_quantization(described)).encode()
    here = run_dir.absolute() / ENGINE_MODEL_DIRECTORY
    _write_model_files(world, given, here)
    return here


def _read_model_files(world: World, path: Path) -> dict[str, bytes]:
    files = world.files
    given = dict[str, bytes]()
    total = 0
    for name in files.list_names(path):
        found = files.stat(path / name)
        if found is None or found.is_directory or Path(name).suffix in WEIGHT_SUFFIXES:
            continue
        given[name] = read_file(path / name, files=files)
        total = total + len(given[name])
        if total > MAX_MODEL_FILES_BYTES:
            raise RunFailed(
                f"{path} has more than {MAX_MODEL_FILES_BYTES:,} bytes beside its weights: is it a "
                "model directory?"
            )
    if TENSOR_NAMES_FILE not in given:
        names = _tensor_names(path, world)
        if names:
            given[TENSOR_NAMES_FILE] = msgspec.json.encode(names)
    return given


def _write_model_files(world: World, given: Mapping[str, bytes], directory: Path) -> None:
    make_directory(directory, files=world.files)
    for name, data in given.items():
        replace_file(directory / name, data, files=world.files)


def _tensor_names(path: Path, world: World) -> list[str]:
    if not any(name.endswith(".safetensors") for name in world.files.list_names(path)):
        return []
    from r3async.rollout.vllm.engine import read_tensor_names

    return sorted(read_tensor_names(path))


def fetch_model_files(world: World, model: str | RemoteModelFiles, run_dir: Path) -> str:
    """Return the directory of the model on this host. Its files are written there if the host does
    not have it. Blocking."""
    if isinstance(model, str):
        return model
    files = world.files
    path = Path(model.path)
    if files.stat(path / "config.json") is not None:
        return model.path
    here = run_dir / "model-of-the-run"
    _write_model_files(world, world.actors.get(model.files_ref), here)
    return str(here)


def shares_run_directory(run_dir: Path, lineage: int, files: Files) -> bool:
    """Return True if this host sees the run's directory: the start with this lineage was noted
    there before any of its processes began."""
    starts = read_run_starts(run_dir, files=files) or []
    return starts[-1:] != [] and starts[-1].lineage == lineage


def check_shares_run_directory(info: Mapping[str, Any], run_dir: Path) -> None:
    """Raise `RunFailed` if the learner, by what it reported about itself, would write where
    nobody finds it."""
    if not info.get("sees_run", True):
        raise RunFailed(
            f"the learner is on host {info['host']}, which does not see {run_dir.absolute()}, "
            "where the run was started and its records and checkpoints are: start the run on that "
            "host, or put its directory where both see it (--runs)"
        )
