"""Fuzzing of resumes. A mutated checkpoint without a matching checksum is refused, or read
as it was written."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

from dev.fuzz.common import FuzzReport, InputMonitor, mutate_bytes
from dev.fuzz.tiny_run import TinyRun
from r3async.checkpoint import Checkpoint, CheckpointError
from r3async.checkpoint.directory import STATE_FILE
from r3async.checkpoint.manifest import MANIFEST_FILE

CheckpointFiles = dict[str, bytes | None]
"""The content of each file of a checkpoint, by name; None for a directory in place of the file."""

OLDER = 1
"""The step of the checkpoint before the one that is mutated."""

REFUSED = "refused with a reason, the one before it read"
LATE = "checksum fits, refused with a reason when it was read"
OTHER = "checksum fits, other values"
EQUAL = "read, equal"

NESTED = {"<deep>": b'{"a":' * 400 + b"0" + b"}" * 400, "<deeper>": b"[" * 3000 + b"]" * 3000}
"""Deeply nested JSON that `dump_json` writes in place of these strings."""

NUMBERS = (True, -1, 0, 1, 2**31, 2**63, 10**25, 1.5, -1e308, float("nan"))
TEXTS = (
    "",
    "..",
    "../run.json",
    "/etc/passwd",
    "run.json",
    "a/b",
    "a\0b",
    "é",
    "x" * 5000,
    "F64",
    "I64",
    "U32",
    "F4",
)
ODD_VALUES: tuple[Any, ...] = (None, [], {}, [[]], {"": 0}, [0, -1], *NUMBERS, *TEXTS, *NESTED)
"""JSON values that are put where another value is expected."""


def damage_files(rng: random.Random, files: CheckpointFiles) -> None:
    """Damage one or two files in place, as disks, copies and people do."""
    for _ in range(min(len(files), rng.choice((1, 1, 1, 2)))):
        name = rng.choice(list(files))
        data = files[name] or b""
        kind = rng.randrange(8)
        if kind == 0:
            del files[name]
        elif kind == 1:
            files[name] = rng.choice((b"", None))
        elif kind == 2:
            other = rng.choice(list(files))
            files[name], files[other] = files[other], files[name]
        elif kind == 3:
            at = rng.randrange(len(data) + 1)
            fresh = rng.choice((bytes, rng.randbytes))(rng.randrange(65))
            files[name] = data[:at] + fresh + data[at + len(fresh) :]
        else:
            files[name] = mutate_bytes(rng, data)


def with_checksum(line: bytes) -> bytes:
    """Return a manifest file with this line and its valid checksum."""
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def mutate_json(rng: random.Random, document: Any) -> Any:
    """Return `document` with one to three of its values removed, duplicated,
    exchanged or replaced."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not document or rng.random() < 0.01:
            return rng.choice(ODD_VALUES)
        inside, key = _choose_value(rng, document)
        kind = rng.randrange(7)
        value = inside[key]
        if kind == 0:
            del inside[key]
        elif kind == 1:
            other, theirs = _choose_value(rng, document)
            inside[key] = copy.deepcopy(other[theirs])
        elif kind == 2 and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(value))
        elif kind == 2:
            inside[str(rng.choice(ODD_VALUES))] = inside.pop(key)
        elif kind == 3 and isinstance(value, int):
            inside[key] = value + rng.choice((-1, 1, 2, 10**6, 10**12))
        elif kind == 3 and isinstance(value, str):
            inside[key] = mutate_bytes(rng, value.encode()).decode(errors="replace")
        else:
            inside[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return document


def _choose_value(rng: random.Random, inside: Any) -> tuple[Any, Any]:
    """Choose a value somewhere inside. Returns its container and its key there."""
    while True:
        key = rng.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        value = inside[key]
        if not value or not isinstance(value, dict | list) or rng.random() < 0.2:
            return inside, key
        inside = value


def dump_json(document: Any) -> bytes:
    """Encode `document` as JSON, which may be nested deeper than Python allows (`NESTED`)."""
    text = json.dumps(document).encode()
    for name, nested in NESTED.items():
        text = text.replace(f'"{name}"'.encode(), nested)
    return text


def mutate_header(rng: random.Random, data: bytes) -> bytes:
    """Return a learner file with a mutated header: either the entries of tensors,
    or the metadata."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = header["__metadata__"]
    if rng.random() < 0.6:
        key = rng.choice(("r3async", "DCP_SHARDING_INFO"))
        about[key] = dump_json(mutate_json(rng, json.loads(about[key]))).decode()
    else:
        header = mutate_json(rng, header)
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def replace_content(rng: random.Random, files: CheckpointFiles) -> None:
    """Mutate the run's state or a learner file in place, and write a manifest that matches."""
    name = rng.choice([name for name in files if name == STATE_FILE or name.startswith("learner-")])
    data = files[name] or b""
    if rng.random() < 0.2:
        data = mutate_bytes(rng, data)
    elif name == STATE_FILE:
        data = dump_json(mutate_json(rng, json.loads(data)))
    else:
        data = mutate_header(rng, data)
    files[name] = data
    manifest = _read_manifest(files)
    for record in manifest["files"]:
        if record["name"] == name:
            record |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files[MANIFEST_FILE] = with_checksum(dump_json(manifest))


def mutate_manifest(rng: random.Random, files: CheckpointFiles) -> None:
    """Replace the manifest by a mutated one with a valid checksum."""
    if rng.random() < 0.2:
        line = (files[MANIFEST_FILE] or b"").partition(b"\n")[0]
        files[MANIFEST_FILE] = with_checksum(mutate_bytes(rng, line))
        return
    manifest = _read_manifest(files)
    if rng.random() < 0.2:  # a file under another name, or one file more or less
        first, second = rng.choices(manifest["files"], k=2)
        rng.choice((first.update, manifest["files"].append, manifest["files"].remove))(second)
    else:
        manifest = mutate_json(rng, manifest)
    files[MANIFEST_FILE] = with_checksum(dump_json(manifest))


def _read_manifest(files: CheckpointFiles) -> Any:
    return json.loads((files[MANIFEST_FILE] or b"").partition(b"\n")[0])


class CheckpointCase:
    """A run with two checkpoints, of which the newer one is mutated."""

    def __init__(self, directory: Path, world: int):
        self.run = TinyRun(directory, world)
        self.run.write_checkpoint(OLDER)
        self._older = self._open_newest()
        self.path = self.run.write_checkpoint(OLDER + 1)
        self.files: CheckpointFiles = {p.name: p.read_bytes() for p in sorted(self.path.iterdir())}
        before = self.run.resume_run(self._older)
        self._whole = self.run.resume_run(self._open_newest())
        assert before != self._whole, "which of the two was read would make no difference"

    def _open_newest(self) -> Checkpoint:
        self.run.checkpoints.recover_directory()
        opened = self.run.checkpoints.recover_newest()
        assert opened is not None
        return opened

    def put_files(self, files: CheckpointFiles) -> None:
        shutil.rmtree(self.path)
        self.path.mkdir()
        for name, data in files.items():
            if data is None:
                (self.path / name).mkdir()
            else:
                (self.path / name).write_bytes(data)

    def find_outcome(self) -> str:
        """Resume from the files that were put, and return the outcome."""
        self.run.reported_events.clear()
        try:
            opened = self._open_newest()
            if opened.state.steps != OLDER:
                return EQUAL if self.run.resume_run(opened) == self._whole else OTHER
        except CheckpointError as error:
            return LATE if str(error) else "refused without a reason"
        assert opened == self._older, "the checkpoint before it was read as another one"
        (reported,) = self.run.reported_events
        Path(reported["kept_as"]).rename(self.path)
        return REFUSED if reported["reason"] else "refused without a reason"


def fuzz_checkpoints(count: int, seed: int, directory: Path) -> FuzzReport:
    """Resume from `count` mutated checkpoints, and report the outcomes.

    Raises `AssertionError` for a change that goes unnoticed, and any exception of a resume other
    than `CheckpointError`.
    """
    rng = random.Random(seed)
    cases = [CheckpointCase(directory / f"ranks-{world}", world) for world in (1, 2)]
    watch = InputMonitor(count)
    for _ in range(count):
        case = rng.choice(cases)
        files = dict(case.files)
        (change,) = rng.choices((damage_files, mutate_manifest, replace_content), (5, 2, 3))
        change(rng, files)
        case.put_files(files)
        with watch.measure_input():
            outcome = case.find_outcome()
        assert change is not damage_files or outcome == (
            EQUAL if files == case.files else REFUSED
        ), outcome
        assert change is replace_content or outcome != OTHER, (
            "a manifest made other values of the same files"
        )
        assert outcome in (REFUSED, LATE, OTHER, EQUAL), outcome
        watch.outcomes[outcome] += 1
    return watch.make_report()
