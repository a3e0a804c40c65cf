"""Whether a checkpoint may be continued with this configuration and model, how records and leases go back to that step, and the
starts of a run.

Each start is a line of a file in the run's directory, which is on the disk before any process of that start exists: so two
crashes without a checkpoint between them still leave two lineages. The file also tells the directory of a run from any other:
it is made with the directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.checkpoint.directory import STATE_FILE, Checkpoint
from r3async.checkpoint.state import CheckpointError, RunState
from r3async.config import REDACTED, Config, config_to_dict, flatten_section
from r3async.data.versions import Lineage, RunStart
from r3async.schedule.admission import AdmissionController
from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.appending import whole_record_bytes
from r3async.world.files import read_file, replace_file
from r3async.world.real import REAL_WORLD

LINEAGES_FILE = "lineages.json"

FIXED_SETTINGS = (
    "seed",
    "model.path",
    "model.init",
    "env",
    "schedule.max_staleness",
    "schedule.groups_per_step",
    "schedule.samples_per_group",
    "schedule.steps_per_publication",
    "schedule.tokens_per_step",
    "schedule.replaced_groups",
    "schedule.window",
    "learner.backend",
    "learner.lora",
    "learner.freeze_router",
    "sft",
)
"""Settings, and whole sections, that a run keeps: which tasks come next, slots and leases, what is trained, and the layout
of the tensors."""

CHANGEABLE_SETTINGS = (
    "steps, learner.lr and the rest of learner (parallel, dtype, …), algorithm, generator, checkpoint, supervise"
)


def find_changed_settings(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """By dotted key: the value saved and the value now, where they are not the same.

    A setting that the saved configuration does not know has its default. `name` and `resume` are no settings of training.
    """
    # As a checkpoint has them: without tuples.
    old, new, defaults = (
        flatten_section(decode_json(msgspec.json.encode(each)))
        for each in (saved, config_to_dict(config), config_to_dict(Config()))
    )
    out = {}
    for key in sorted({*old, *new} - {"name", "resume"}):
        was, value = old.get(key, defaults.get(key)), new.get(key, defaults.get(key))
        if not _may_be_equal(was, value):
            out[key] = (was, value)
    return out


def _may_be_equal(was: Any, value: Any) -> bool:
    """What a secret was is not known any more."""
    if isinstance(was, list) and isinstance(value, list) and len(was) == len(value):
        return all(map(_may_be_equal, was, value))
    return was == value or REDACTED in (was, value)


def check_resume_settings(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those `saved` (`config_to_dict`) and may. Raises `CheckpointError` naming those that
    may not."""
    changed = find_changed_settings(saved, config)
    refused = {k: v for k, v in changed.items() if any(k == f or k.startswith(f"{f}.") for f in FIXED_SETTINGS)}
    if "env.args.digest" in refused:
        path = config_to_dict(config)["env"]["args"].get("path") or config.env.name
        raise CheckpointError(
            f"the rows of `data` = {path!r}, or which of them are evaluated, have changed since the run began: put the file "
            'back, or set resume="none" to start over'
        )
    if refused:
        said = "; ".join(f"`{key}` was {was!r} and is {now!r}" for key, (was, now) in refused.items())
        raise CheckpointError(
            f"the run cannot be resumed with other settings: {said}. Set them back, or set "
            f'resume="none" to start over. What may differ: {CHANGEABLE_SETTINGS}'
        )
    return changed


def check_start_model(state: RunState, model_path: Path, *, files: Files = REAL_WORLD.files) -> None:
    """Raises `CheckpointError` if the start model is not the one that the run began with, which is its reference model."""
    fingerprint = fingerprint_model(model_path, files=files)
    if fingerprint != state.model_fingerprint:
        raise CheckpointError(
            f"the model in {model_path} is not the one that the run began with (in {state.model_path}): its fingerprint is "
            f"{fingerprint[:12]}, not {state.model_fingerprint[:12]}. Put that model back, or set `model.path` to it"
        )


_SAMPLE_BLOCKS, _BLOCK_BYTES = 64, 65536


def fingerprint_model(directory: Path, *, files: Files = REAL_WORLD.files) -> str:
    """SHA-256 over the names and sizes of the model's files, all of `config.json`, and a sample of each weight file.

    A sample: 64 blocks of 64 KiB spread evenly, the header among them. All of a small file, and of a large one enough to tell
    trained weights from others, without reading hundreds of gigabytes at every start.
    """
    digest = hashlib.sha256()
    names = files.list_names(directory)
    if "config.json" not in names:
        raise CheckpointError(f"{directory} is not a model directory: it has no config.json")
    for name in names:
        if name != "config.json" and Path(name).suffix not in (".safetensors", ".bin"):
            continue
        with files.open(directory / name) as file:
            size = file.size()
            digest.update(f"{name}\0{size}\0".encode())
            step = max(_BLOCK_BYTES, -(-max(0, size - _BLOCK_BYTES) // (_SAMPLE_BLOCKS - 1)))
            for at in range(0, size, step):
                digest.update(file.read(at, _BLOCK_BYTES))
    return digest.hexdigest()


def rewind_records(
    run_dir: Path,
    record_bytes: Mapping[str, int],
    pending_lines: Mapping[str, Sequence[str]] | None = None,
    *,
    files: Files = REAL_WORLD.files,
) -> dict[str, int]:
    """Cut the run's records back to the lengths they had, and write the lines behind them that were `pending_lines` in memory
    then. Returns the bytes cut off, by file. Raises `OSError`.

    A record that is shorter than it was, or lost, stays as it is: figures are lost, but training is not.
    """
    cut = {}
    for name in files.list_names(run_dir):
        length, found = record_bytes.get(name), files.stat(run_dir / name)
        if length is not None and found is not None and not found.is_directory and found.size > length:
            with files.open(run_dir / name, create=True) as file:
                file.truncate(length)
            cut[name] = found.size - length
    for name, lines in (pending_lines or {}).items():
        with files.open(run_dir / name, create=True) as file:
            file.truncate(whole_record_bytes(run_dir / name, files=files))
            file.append(["".join(lines).encode()])
    return cut


def restore_admission(admission: AdmissionController, state: RunState) -> None:
    """Slots and leases as they were, and the checkpoint's weights in every engine. Raises `CheckpointError` if these
    do not add up."""
    try:
        admission.load_state_dict(state.admission, state.consumed, state.consumed_beyond)
        admission.version_published(state.version)
    except ValueError as error:
        raise CheckpointError(f"{STATE_FILE}: admission: {error}") from error


class _StartsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    starts: list[RunStart] = []


def read_run_starts(run_dir: Path, *, files: Files = REAL_WORLD.files) -> list[RunStart] | None:
    """All starts of the run, oldest first; None if this is not the directory of a run. Raises `CheckpointError` for a file that
    cannot be read."""
    try:
        return decode_json(read_file(run_dir / LINEAGES_FILE, files=files), _StartsFile).starts
    except FileNotFoundError:
        return None
    except (OSError, MalformedError) as error:
        raise CheckpointError(
            f"{run_dir / LINEAGES_FILE} cannot be read ({error}): it numbers the starts of the run, and without it tokens of "
            "weights "
            'that a resume took back could be trained. Move it and spool/ aside, or set resume="none"'
        ) from error


def mark_run_directory(run_dir: Path, *, files: Files = REAL_WORLD.files) -> None:
    """`run_dir` is the directory of a run, if it was not one before."""
    if read_run_starts(run_dir, files=files) is None:
        _write_starts(run_dir, [], files)


def begin_lineage(
    run_dir: Path, resume: Checkpoint | None, model: str, origin: str = "", *, files: Files = REAL_WORLD.files
) -> Lineage:
    """The lineage of a start that begins now, from a checkpoint (of the run `origin`, if it is another one) or, without one, from
    the start model of fingerprint `model`. Its number was never taken in this directory before, and is on the disk when this
    returns. Raises `CheckpointError`."""
    starts = read_run_starts(run_dir, files=files) or []
    parent, version = (resume.state.lineage, resume.state.version) if resume else (Lineage(), 0)
    lineage, start = parent.start_child(starts, version, model, origin)
    _write_starts(run_dir, [*starts, start], files)
    return lineage


def describe_origin(resume: Checkpoint, checkpoints: Path) -> str:
    """Names the run and step of a checkpoint that is not in `checkpoints`, the run's own; "" for one that is."""
    ours = resume.path.parent.absolute() == checkpoints.absolute()
    return "" if ours else f"{resume.state.run_id} step {resume.state.steps}"


def _write_starts(run_dir: Path, starts: list[RunStart], files: Files) -> None:
    replace_file(
        run_dir / LINEAGES_FILE, msgspec.json.format(msgspec.json.encode(_StartsFile(starts))) + b"\n", files=files
    )
