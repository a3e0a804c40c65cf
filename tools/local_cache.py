"""What this machine keeps between runs, in `$XDG_CACHE_HOME/r3async` (`~/.cache/r3async`)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

import r3async.config
from r3async.config import Config, config_to_dict

MODEL_PACKAGES = ("torch", "transformers", "tokenizers")
"""Packages on whose versions it depends what a model's files mean."""
MARK_SECONDS = 30 * 86400.0
"""Age of the mark of a passed check at which it is removed."""


def find_cache_directory() -> Path:
    """Return the directory, which may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "r3async")


def list_package_versions() -> list[str]:
    """Return name and version of each of `MODEL_PACKAGES`."""
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
        for other in mark.parent.iterdir():
            if other.stat().st_mtime < time.time() - MARK_SECONDS:
                other.unlink(missing_ok=True)


def _digest_checked(name: str, config: Config) -> str:
    """Return a digest of all on which the result of a check of a model's files depends."""
    settings = config_to_dict(config)
    sections = [settings[each] for each in ("model", "learner", "routing", "episode")]
    model = Path(config.model.path).iterdir() if config.model.path else []
    files = [_describe_file(path) for path in sorted([*model, *_iter_code()])]
    what = (name, sections, list_package_versions(), files)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(what, order="sorted"))


def _iter_code() -> Iterator[Path]:
    package = Path(r3async.config.__file__).parents[1]
    for directory, _, names in os.walk(package, followlinks=True):
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def _describe_file(path: Path) -> tuple[str, int, int]:
    """Return the path, the size in bytes, and the time of the last change."""
    facts = path.stat() if path.exists() else path.lstat()  # a link to nowhere
    return str(path.resolve()), facts.st_size, facts.st_mtime_ns
