"""Short forms of a configuration: `data`, `reward` and `[[env]]` for `env.name` and `env.args`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from r3async.config.others import find_equivalent_setting
from r3async.config.section import ConfigError
from r3async.untrusted import format_value

LABEL_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
DATASET_ENV = "dataset"
"""Value of `env.name` for the user's own rows."""
MIX_ENV = "mix"
"""Value of `env.name` for several environments: `env.args` has a table for each, by its label."""
UNSET_WORD = "null"
"""Value that unsets a setting of a file or preset below: TOML has no null."""
SHORTHAND_KEYS = ("data", "reward")
"""Keys at the top that stand for `env.name` and `env.args` of a dataset."""


def merge_tables(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in overlay.items():
        old = out.get(key)
        out[key] = (
            merge_tables(old, value)
            if isinstance(value, Mapping) and isinstance(old, Mapping)
            else value
        )
    return out


def expand_shorthand(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer (a file or the overrides) in which `data` and `reward` are expanded to the
    `env.name` and `env.args` that they stand for, and `[[env]]` likewise. A value "null" there
    becomes None, which unsets it."""
    entries = layer.get("env")
    if isinstance(entries, list):
        both = next((key for key in SHORTHAND_KEYS if key in layer), "")
        if both:
            raise ConfigError(f"`{both}` beside [[env]]: set it in the entry that it is for")
        return {**layer, "env": _build_mix([_expand_entry(entry) for entry in entries])}
    given = {key: layer[key] for key in SHORTHAND_KEYS if key in layer}
    if not given:
        return dict(layer)
    rest = {key: value for key, value in layer.items() if key not in SHORTHAND_KEYS}
    _refuse_two_environments(given, rest.get("env"))
    data = given.pop("data", {})
    if data is None or data == UNSET_WORD:
        raise ConfigError(
            "`data` cannot be unset: set `env.name`, which names an environment without rows"
        )
    if isinstance(data, str):
        data = {"path": data}
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"`data` = {format_value(data)} must be a path, a section with `path` in it, or in "
            "Python rows: a list of dicts, or a datasets.Dataset"
        )
    if isinstance(given.get("reward"), Mapping) and given["reward"]:
        key, value = next(iter(given["reward"].items()))
        hint = find_equivalent_setting(f"reward.{key}", value)
        raise ConfigError(
            f"unknown key `reward.{key}`: "
            + (hint or "`reward` is no section, but a reward function or a list of them")
        )
    if "reward" in data:
        raise ConfigError("`data.reward`: `reward` is set beside `data`, not in it")
    args = {key: None if value == UNSET_WORD else value for key, value in {**data, **given}.items()}
    return merge_tables(rest, {"env": {"name": DATASET_ENV, "args": args}})


def _refuse_two_environments(shorthand: Mapping[str, Any], env: Any) -> None:
    """Raise `ConfigError` if a layer has rows, and names an environment that is none of rows."""
    name = env.get("name") if isinstance(env, Mapping) else None
    if isinstance(name, str) and name.partition(":")[0] != DATASET_ENV:
        raise ConfigError(
            f"`{next(iter(shorthand))}` is for rows, and `env.name` = {name!r} is another "
            "environment: set one of the two"
        )


def _expand_entry(entry: Any) -> Any:
    """Return an entry of `[[env]]` with its `data` and `reward` expanded."""
    if not isinstance(entry, Mapping):
        return entry
    short = {key: entry[key] for key in SHORTHAND_KEYS if key in entry}
    rest = {key: value for key, value in entry.items() if key not in SHORTHAND_KEYS}
    return merge_tables(expand_shorthand(short)["env"], rest) if short else rest


def _build_mix(entries: Sequence[Any]) -> dict[str, Any]:
    """Return the section `env` that `[[env]]` stands for. Each entry is plain data, with `data` and
    `reward` expanded. Raises `ConfigError` that names the entry."""
    args: dict[str, Any] = {}
    for at, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"`env[{at}]` = {entry!r} must be a table: [[env]], with `name` in it"
            )
        inner = {key: value for key, value in entry.items() if key != "label"}
        label = entry.get("label") or _derive_label(inner)
        if not isinstance(label, str) or not LABEL_PATTERN.fullmatch(label):
            raise ConfigError(
                f"`env[{at}].label` = {label!r} must be of letters, digits, `_` and `-`"
            )
        if label in args:
            raise ConfigError(
                f"`env[{at}]`: two are called {label!r}; give each a `label` of its own"
            )
        if not inner.get("name"):
            raise ConfigError(f"`env[{at}]`: which environment? Set its `name`, or `data`")
        args[label] = inner
    if not args:
        raise ConfigError("`env` = [] names no environment")
    return {"name": MIX_ENV, "args": args}


def _derive_label(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("name", ""))
    args = entry.get("args", {})
    path = args.get("path", "") if isinstance(args, Mapping) else ""
    last = Path(path).stem if path else name.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_-]", "-", last) or "-"
