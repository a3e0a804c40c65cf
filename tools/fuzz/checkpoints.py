"""Mutated checkpoints into a resume: what was not signed is refused or read as it was written."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from r3async.checkpoint import CheckpointError, Opened
from r3async.checkpoint.directory import STATE
from r3async.checkpoint.manifest import MANIFEST
from r3async.tools.fuzz.common import WARM, Report, mutate_bytes, resident
from r3async.tools.fuzz.tiny_run import TinyRun

Files = dict[str, bytes | None]
"""By name. None: a directory has its place."""

OLDER = 1
"""Step of the checkpoint before the one that is mutated."""

REFUSED = "refused with a reason, the one before it read"
LATE = "signed anew, refused with a reason when it was read"
OTHER = "signed anew, other values"
EQUAL = "read, equal"

NESTED = {"<deep>": b'{"a":' * 400 + b"0" + b"}" * 400, "<deeper>": b"[" * 3000 + b"]" * 3000}
"""What `dump` writes for these strings."""

NUMBERS = (True, -1, 0, 1, 2**31, 2**63, 10**25, 1.5, -1e308, float("nan"))
TEXTS = ("", "..", "../run.json", "/etc/passwd", "run.json", "a/b", "a\0b", "é", "x" * 5000, "F64", "I64", "U32", "F4")
ODD: tuple[Any, ...] = (None, [], {}, [[]], {"": 0}, [0, -1], *NUMBERS, *TEXTS, *NESTED)
"""Values that JSON may have where another is expected."""


def damage(chance: random.Random, files: Files) -> None:
    """What disks, copies and people do to one or two files."""
    for _ in range(min(len(files), chance.choice((1, 1, 1, 2)))):
        name = chance.choice(list(files))
        data = files[name] or b""
        kind = chance.randrange(8)
        if kind == 0:
            del files[name]
        elif kind == 1:
            files[name] = chance.choice((b"", None))
        elif kind == 2:
            other = chance.choice(list(files))
            files[name], files[other] = files[other], files[name]
        elif kind == 3:
            at = chance.randrange(len(data) + 1)
            fresh = chance.choice((bytes, chance.randbytes))(chance.randrange(65))
            files[name] = data[:at] + fresh + data[at + len(fresh) :]
        else:
            files[name] = mutate_bytes(chance, data)


def with_checksum(line: bytes) -> bytes:
    """A manifest of that line, as if it had been written so."""
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def mutate_json(chance: random.Random, document: Any) -> Any:
    """`document` with one to three of its values gone, doubled, exchanged, or other ones."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        if not document or chance.random() < 0.01:
            return chance.choice(ODD)
        inside, key = _choose(chance, document)
        kind, value = chance.randrange(7), inside[key]
        if kind == 0:
            del inside[key]
        elif kind == 1:
            other, theirs = _choose(chance, document)
            inside[key] = copy.deepcopy(other[theirs])
        elif kind == 2 and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(value))
        elif kind == 2:
            inside[str(chance.choice(ODD))] = inside.pop(key)
        elif kind == 3 and isinstance(value, int):
            inside[key] = value + chance.choice((-1, 1, 2, 10**6, 10**12))
        elif kind == 3 and isinstance(value, str):
            inside[key] = mutate_bytes(chance, value.encode()).decode(errors="replace")
        else:
            inside[key] = copy.deepcopy(chance.choice(ODD))
    return document


def _choose(chance: random.Random, inside: Any) -> tuple[Any, Any]:
    """A value somewhere inside: what it is in, and under which key."""
    while True:
        key = chance.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        value = inside[key]
        if not value or not isinstance(value, dict | list) or chance.random() < 0.2:
            return inside, key
        inside = value


def dump(document: Any) -> bytes:
    """JSON, which may be nested deeper than Python can."""
    text = json.dumps(document).encode()
    for name, nested in NESTED.items():
        text = text.replace(f'"{name}"'.encode(), nested)
    return text


def mutate_header(chance: random.Random, data: bytes) -> bytes:
    """A part of the learner with another header: tensors, or what it says of them and of the run."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = header["__metadata__"]
    if chance.random() < 0.6:
        key = chance.choice(("r3async", "DCP_SHARDING_INFO"))
        about[key] = dump(mutate_json(chance, json.loads(about[key]))).decode()
    else:
        header = mutate_json(chance, header)
    text = dump(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def replace(chance: random.Random, files: Files) -> None:
    """Changes the books or a part of the learner, and lets the manifest say that it was written so."""
    name = chance.choice([name for name in files if name == STATE or name.startswith("learner-")])
    data = files[name] or b""
    if chance.random() < 0.2:
        data = mutate_bytes(chance, data)
    elif name == STATE:
        data = dump(mutate_json(chance, json.loads(data)))
    else:
        data = mutate_header(chance, data)
    files[name] = data
    manifest = _manifest(files)
    for record in manifest["files"]:
        if record["name"] == name:
            record |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files[MANIFEST] = with_checksum(dump(manifest))


def mutate_manifest(chance: random.Random, files: Files) -> None:
    """Another manifest, with a checksum that fits."""
    if chance.random() < 0.2:
        line = (files[MANIFEST] or b"").partition(b"\n")[0]
        files[MANIFEST] = with_checksum(mutate_bytes(chance, line))
        return
    manifest = _manifest(files)
    if chance.random() < 0.2:  # what is there under another name, or a file more or less
        first, second = chance.choices(manifest["files"], k=2)
        chance.choice((first.update, manifest["files"].append, manifest["files"].remove))(second)
    else:
        manifest = mutate_json(chance, manifest)
    files[MANIFEST] = with_checksum(dump(manifest))


def _manifest(files: Files) -> Any:
    return json.loads((files[MANIFEST] or b"").partition(b"\n")[0])


class Case:
    """A run with two checkpoints, of which the newer one is to be mutated."""

    def __init__(self, directory: Path, world: int):
        self.run = TinyRun(directory, world)
        self.run.write(OLDER)
        self._older = self._newest()
        self.path = self.run.write(OLDER + 1)
        self.files: Files = {p.name: p.read_bytes() for p in sorted(self.path.iterdir())}
        before, self._whole = self.run.go_on(self._older), self.run.go_on(self._newest())
        assert before != self._whole, "which of the two was read would make no difference"

    def _newest(self) -> Opened:
        self.run.checkpoints.clean()
        opened = self.run.checkpoints.newest()
        assert opened is not None
        return opened

    def put(self, files: Files) -> None:
        shutil.rmtree(self.path)
        self.path.mkdir()
        for name, data in files.items():
            if data is None:
                (self.path / name).mkdir()
            else:
                (self.path / name).write_bytes(data)

    def outcome(self) -> str:
        """What becomes of what was put there."""
        self.run.said.clear()
        try:
            opened = self._newest()
            if opened.state.steps != OLDER:
                return EQUAL if self.run.go_on(opened) == self._whole else OTHER
        except CheckpointError as error:
            return LATE if str(error) else "refused without a reason"
        assert opened == self._older, "the checkpoint before it was read as another one"
        (said,) = self.run.said
        Path(said["kept_as"]).rename(self.path)
        return REFUSED if said["reason"] else "refused without a reason"


def fuzz_checkpoints(count: int, seed: int, directory: Path) -> Report:
    """Raises `AssertionError` for a change that went unnoticed, and whatever else than `CheckpointError` a resume raises."""
    chance = random.Random(seed)
    cases = [Case(directory / f"ranks-{world}", world) for world in (1, 2)]
    outcomes: Counter[str] = Counter()
    began, slowest, warm = time.perf_counter(), 0.0, 0
    for n in range(count):
        case = chance.choice(cases)
        files = dict(case.files)
        (change,) = chance.choices((damage, mutate_manifest, replace), (5, 2, 3))
        change(chance, files)
        case.put(files)
        start = time.perf_counter()
        outcome = case.outcome()
        slowest = max(slowest, time.perf_counter() - start)
        assert change is not damage or outcome == (EQUAL if files == case.files else REFUSED), outcome
        assert change is replace or outcome != OTHER, "a manifest made other values of the same files"
        assert outcome in (REFUSED, LATE, OTHER, EQUAL), outcome
        outcomes[outcome] += 1
        if n == int(count * WARM):
            warm = resident()
    seconds = time.perf_counter() - began
    return Report(count, seconds, slowest, (resident() - warm) / 2**20, dict(outcomes))
