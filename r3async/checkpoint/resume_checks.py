"""Whether a run may resume with this configuration and model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from r3async.checkpoint.directory import WEIGHT_SUFFIXES
from r3async.checkpoint.manifest import CheckpointError
from r3async.checkpoint.state import RunState
from r3async.config import REDACTED, Config, config_to_dict, flatten_section
from r3async.config.load import upgrade_saved_settings
from r3async.untrusted import decode_json
from r3async.world import Files
from r3async.world.real import REAL_WORLD

FIXED_SETTINGS = (
    "seed",
    "model.path",
    "model.init",
    "env",
    "schedule.max_staleness",
    "schedule.prompts_per_step",
    "schedule.group_size",
    "schedule.steps_per_publication",
    "schedule.tokens_per_step",
    "schedule.replaced_groups",
    "schedule.window",
    "learner.backend",
    "learner.lora",
    "learner.freeze_router",
    "sft",
)
"""Settings, and whole sections, that may not change during a run: they determine which tasks come
next, slots and leases, what is trained, and the layout of the tensors."""

CHANGEABLE_SETTINGS = (
    "steps, learner.lr and the rest of learner (parallel, dtype, …), algorithm, generator, "
    "checkpoint, supervise"
)


def find_changed_settings(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that have changed: the saved and the current value, by dotted key.

    A setting that the saved configuration does not know has its default. `name` and `resume` are
    not training settings, and are ignored.
    """
    # In the form that a checkpoint has: without tuples.
    old, new, defaults = (
        flatten_section(decode_json(msgspec.json.encode(each)))
        for each in (
            upgrade_saved_settings(saved),
            config_to_dict(config),
            config_to_dict(Config()),
        )
    )
    out = {}
    for key in sorted({*old, *new} - {"name", "resume"}):
        was = old.get(key, defaults.get(key))
        value = new.get(key, defaults.get(key))
        if not _may_be_equal(was, value):
            out[key] = (was, value)
    return out


def _may_be_equal(was: Any, value: Any) -> bool:
    """Return True if two values are equal, or if one is a redacted secret, whose value is
    no longer known."""
    if isinstance(was, list) and isinstance(value, list) and len(was) == len(value):
        return all(map(_may_be_equal, was, value))
    return was == value or REDACTED in (was, value)


def check_resume_settings(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those `saved` (`config_to_dict`) and may differ. Raises
    `CheckpointError` naming those that may not."""
    changed = find_changed_settings(saved, config)
    refused = {
        k: v
        for k, v in changed.items()
        if any(k == f or k.startswith(f"{f}.") for f in FIXED_SETTINGS)
    }
    if "env.args.digest" in refused:
        path = config_to_dict(config)["env"]["args"].get("path") or config.env.name
        raise CheckpointError(
            f"the rows of `data` = {path!r}, or which of them are evaluated, have changed since "
            'the run began: put the file back, or set resume="none" to start over'
        )
    if refused:
        said = "; ".join(
            f"`{key}` was {was!r} and is {now!r}" for key, (was, now) in refused.items()
        )
        raise CheckpointError(
            f"the run cannot be resumed with other settings: {said}. Set them back, or set "
            f'resume="none" to start over. What may differ: {CHANGEABLE_SETTINGS}'
        )
    return changed


def check_start_model(
    state: RunState, model_path: Path, *, files: Files = REAL_WORLD.files
) -> None:
    """Raise `CheckpointError` if the start model is not the one that the run began with, which is
    its reference model."""
    fingerprint = fingerprint_model(model_path, files=files)
    if fingerprint != state.model_fingerprint:
        raise CheckpointError(
            f"the model in {model_path} is not the one that the run began with (in "
            f"{state.model_path}): its fingerprint is {fingerprint[:12]}, not "
            f"{state.model_fingerprint[:12]}. Put that model back, or set `model.path` to it"
        )


_SAMPLE_BLOCKS = 64
_BLOCK_BYTES = 65536


def fingerprint_model(directory: Path, *, files: Files = REAL_WORLD.files) -> str:
    """Return the SHA-256 over names and sizes of the model's files, all of `config.json`, and a
    sample of each weight file.

    A sample is 64 blocks of 64 KiB spread evenly, the header among them. This covers all of a small
    file, and enough of a large one to tell trained weights from others, without reading hundreds of
    gigabytes at every start.
    """
    digest = hashlib.sha256()
    names = files.list_names(directory)
    if "config.json" not in names:
        raise CheckpointError(f"{directory} is not a model directory: it has no config.json")
    for name in names:
        if name != "config.json" and Path(name).suffix not in WEIGHT_SUFFIXES:
            continue
        with files.open(directory / name) as file:
            size = file.size()
            digest.update(f"{name}\0{size}\0".encode())
            step = max(_BLOCK_BYTES, -(-max(0, size - _BLOCK_BYTES) // (_SAMPLE_BLOCKS - 1)))
            for at in range(0, size, step):
                digest.update(file.read(at, _BLOCK_BYTES))
    return digest.hexdigest()
