"""What is short in a configuration: `data` and `reward` at the top, and `[[env]]`, stand for `env.name` and `env.args`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r3async.config.generation import MIX_ENV
from r3async.config.section import ConfigError

LABEL_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
DATASET_ENV = "dataset"
"""`env.name` of rows of the user's own."""
SHORTHAND_KEYS = ("data", "reward")
"""Keys at the top that stand for `env.name` and `env.args` of a dataset."""


def merge_tables(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in overlay.items():
        old = out.get(key)
        out[key] = merge_tables(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return out


def expand_shorthand(layer: Mapping[str, Any]) -> dict[str, Any]:
    """`data` and `reward` of a file, or of the overrides, as the `env.name` and `env.args` that they are short for; and so
    `[[env]]`."""
    if isinstance(entries := layer.get("env"), list):
        if both := next((key for key in SHORTHAND_KEYS if key in layer), ""):
            raise ConfigError(f"`{both}` beside [[env]]: set it in the entry that it is for")
        return {**layer, "env": _build_mix([_expand_entry(entry) for entry in entries])}
    given = {key: layer[key] for key in SHORTHAND_KEYS if key in layer}
    if not given:
        return dict(layer)
    data = given.pop("data", {})
    if isinstance(data, str):
        data = {"path": data}
    if not isinstance(data, Mapping):
        raise ConfigError(f"`data` = {data!r} must be a path, or a section with `path` in it")
    if "reward" in data:
        raise ConfigError("`data.reward`: `reward` is set beside `data`, not in it")
    rest = {key: value for key, value in layer.items() if key not in SHORTHAND_KEYS}
    return merge_tables(rest, {"env": {"name": DATASET_ENV, "args": {**data, **given}}})


def _expand_entry(entry: Any) -> Any:
    """Of `[[env]]`, with its `data` and `reward` spelled out."""
    if not isinstance(entry, Mapping):
        return entry
    short = {key: entry[key] for key in SHORTHAND_KEYS if key in entry}
    rest = {key: value for key, value in entry.items() if key not in SHORTHAND_KEYS}
    return merge_tables(expand_shorthand(short)["env"], rest) if short else rest


def _build_mix(entries: Sequence[Any]) -> dict[str, Any]:
    """The section `env` that `[[env]]` stands for. Each entry is plain data, with `data` and `reward` spelled out. Raises
    `ConfigError` that names the entry."""
    args: dict[str, Any] = {}
    for at, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"`env[{at}]` = {entry!r} must be a table: [[env]], with `name` in it")
        inner = {key: value for key, value in entry.items() if key != "label"}
        label = entry.get("label") or _derive_label(inner)
        if not isinstance(label, str) or not LABEL_PATTERN.fullmatch(label):
            raise ConfigError(f"`env[{at}].label` = {label!r} must be of letters, digits, `_` and `-`")
        if label in args:
            raise ConfigError(f"`env[{at}]`: two are called {label!r}; give each a `label` of its own")
        if not inner.get("name"):
            raise ConfigError(f"`env[{at}]`: which environment? Set its `name`, or `data`")
        args[label] = inner
    if not args:
        raise ConfigError("`env` = [] names no environment")
    return {"name": MIX_ENV, "args": args}


def _derive_label(entry: Mapping[str, Any]) -> str:
    name, args = str(entry.get("name", "")), entry.get("args", {})
    path = args.get("path", "") if isinstance(args, Mapping) else ""
    last = Path(path).stem if path else name.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_-]", "-", last) or "-"
