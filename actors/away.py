"""Generators on a host that does not see the files of the run: what they are given of its model, and who gets their events.

Nothing of a run needs a file system that its hosts share but what the learner writes, if its ranks are on several hosts. A host
without the model's directory gets everything in it but the weights, which come as any version does: the engine begins with
made-up ones, and plays when those of the run are installed and verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.actors.process import RunFailed
from r3async.checkpoint.resume import read_starts
from r3async.rollout.engines import NAMES
from r3async.world import Files, World
from r3async.world.files import make_directory, read_file, replace_file

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Suffixes of what is not sent."""
MOST_BYTES = 512 * 2**20
"""Of all that is sent."""


class ModelAt(NamedTuple):
    """A model directory at `path` of the host where the run was started. `rest`: what `Actors.put` returned for the files in it
    that are no weights."""

    path: str
    rest: Any


def offer_model(world: World, path: Path) -> ModelAt:
    """For hosts that do not have it. Raises `RunFailed` if it is too large for a model without its weights."""
    files, given, total = world.files, dict[str, bytes](), 0
    for name in files.list(path):
        found = files.stat(path / name)
        if found is None or found.directory or Path(name).suffix in WEIGHTS:
            continue
        given[name] = read_file(path / name, files=files)
        if (total := total + len(given[name])) > MOST_BYTES:
            raise RunFailed(f"{path} has more than {MOST_BYTES:,} bytes beside its weights: is it a model directory?")
    if NAMES not in given and (names := _tensor_names(path, world)):
        given[NAMES] = msgspec.json.encode(names)
    return ModelAt(str(path), world.actors.put(given))


def _tensor_names(path: Path, world: World) -> list[str]:
    if not any(name.endswith(".safetensors") for name in world.files.list(path)):
        return []
    from r3async.rollout.engines.vllm import checkpoint_names

    return sorted(checkpoint_names(path))


def bring_model(world: World, model: str | ModelAt, run_dir: Path) -> str:
    """The directory of the model on this host. Blocking."""
    if isinstance(model, str):
        return model
    files, path = world.files, Path(model.path)
    if files.stat(path / "config.json") is not None:
        return model.path
    here = run_dir / "model-of-the-run"
    make_directory(here, files=files)
    for name, data in world.actors.get(model.rest).items():
        replace_file(here / name, data, files=files)
    return str(here)


def sees_run(run_dir: Path, lineage: int, files: Files) -> bool:
    """Whether this host sees the directory in which that start of the run was noted before any of its processes began."""
    starts = read_starts(run_dir, files=files) or []
    return starts[-1:] != [] and starts[-1].lineage == lineage


def check_sees_run(info: Mapping[str, Any], run_dir: Path) -> None:
    """Raises `RunFailed` if the learner, by what it reported of itself, would write where nobody finds it."""
    if not info.get("sees_run", True):
        raise RunFailed(
            f"the learner is on host {info['host']}, which does not see {run_dir.absolute()}, where the run was started and "
            "its records and checkpoints are: start the run on that host, or put its directory where both see it (--runs)"
        )
