"""What this machine keeps between runs, in `$XDG_CACHE_HOME/r3async` (`~/.cache/r3async`)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

import r3async
from r3async.config import Config, config_to_dict

MODEL_PACKAGES = ("torch", "transformers", "tokenizers")
"""Packages on whose versions it depends what a model's files mean."""


def find_cache_directory() -> Path:
    """Return the directory, which may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "r3async")


def list_package_versions() -> list[str]:
    return [f"{name} {importlib.metadata.version(name)}" for name in MODEL_PACKAGES]


def check_once(check: Callable[[Config], None], config: Config) -> None:
    """Call `check`, of the model's files, unless it has passed here before.

    To load torch for a check takes seconds of every start, and files that passed pass again, with
    the same settings, packages and code. What does not pass is not remembered.
    """
    mark = find_cache_directory() / "checked" / _digest_checked(check.__name__, config)
    if mark.exists():
        return
    check(config)
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _digest_checked(name: str, config: Config) -> str:
    """Return a digest of all on which the result of a check of a model's files depends."""
    settings = config_to_dict(config)
    sections = [settings[each] for each in ("model", "learner", "routing", "episode")]
    code = Path(r3async.__file__).parent
    files = [*_iter_files(Path(config.model.path))] if config.model.path else []
    files += [*_iter_files(code / "learner"), *_iter_files(code / "learner" / "torch")]
    files += [*_iter_files(code / "rollout"), *_iter_files(code / "tools")]
    what = (name, sections, list_package_versions(), sorted(files))
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(what, order="sorted"))


def _iter_files(directory: Path) -> Iterator[tuple[str, int, int]]:
    """Yield path, size in bytes, and time of the last change of each file."""
    for entry in os.scandir(directory):
        if entry.is_file():
            facts = entry.stat()
            yield os.path.realpath(entry.path), facts.st_size, facts.st_mtime_ns
