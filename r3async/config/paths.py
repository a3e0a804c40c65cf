"""Resolution of a configuration's paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from r3async.config.env import MIX_ENV
from r3async.config.shorthand import DATASET_ENV

USER_PATH_VARIABLE = "R3ASYNC_USER_PATH"
"""Environment variable of every process of a run: the directory in which it was started, and so
where the user's own modules and files are."""


def resolve_user_path(path: str) -> Path:
    """Return the path of a user's file. A relative path starts at the directory in which the
    run was started."""
    return Path(os.environ.get(USER_PATH_VARIABLE, os.getcwd())) / Path(path).expanduser()


# -- paths in a TOML file --------------------------------------------------------------------------


def resolve_relative_paths(layer: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the settings of a TOML file in `directory`, with paths of files that exist beside it
    made relative to the current directory. Other paths are left unchanged, as they are looked for
    where the command is typed."""

    def resolve_existing(value: Any) -> Any:
        return (
            str(directory / value)
            if isinstance(value, str) and value and (directory / value).exists()
            else value
        )

    def resolve_file(value: Any) -> Any:
        """Resolve a value that may also be the name of something else: a preset, a split."""
        return (
            resolve_existing(value)
            if isinstance(value, str) and (directory / value).is_file()
            else value
        )

    def resolve_code_path(value: Any) -> Any:
        """Resolve `module:name` or `file.py:name`, with an optional prefix (`agent:`)."""
        if not isinstance(value, str) or ":" not in value:
            return value
        head, _, last = value.rpartition(":")
        kind, colon, place = head.rpartition(":")
        source = directory / (place if place.endswith(".py") else f"{place}.py")
        # What stands before a game's id is imported by gymnasium, which takes a module and no file.
        return (
            f"{kind}{colon}{source}:{last}" if source.is_file() and kind != "gymnasium" else value
        )

    def resolve_reward(value: Any) -> Any:
        if isinstance(value, list):
            return [
                {**each, "fn": resolve_code_path(each.get("fn"))}
                if isinstance(each, Mapping)
                else resolve_code_path(each)
                for each in value
            ]
        return resolve_code_path(value)

    def resolve_environment(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        called = value.get("name")
        args = value.get("args")
        out = dict(value)
        if called == MIX_ENV and isinstance(args, Mapping):
            return {
                **out,
                "args": {label: resolve_environment(each) for label, each in args.items()},
            }
        if isinstance(called, str):
            kind, colon, rows = called.partition(":")
            out["name"] = (
                f"{kind}{colon}{resolve_existing(rows)}"
                if kind == DATASET_ENV
                else resolve_code_path(called)
            )
            if kind == DATASET_ENV and isinstance(args, Mapping):
                out["args"] = _map_keys(
                    args, {"path": resolve_existing, "eval": resolve_file, "reward": resolve_reward}
                )
        return out

    def resolve_sets(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            label: _map_keys(each, {"env": resolve_environment}) for label, each in value.items()
        }

    return _map_keys(
        layer,
        {
            "extends": resolve_file,
            "env": resolve_environment,
            "model": lambda section: _map_keys(section, {"path": resolve_existing}),
            "transport": lambda section: _map_keys(section, {"keys": resolve_existing}),
            "evaluation": lambda section: _map_keys(
                section, {"env": resolve_environment, "sets": resolve_sets}
            ),
            "algorithm": lambda section: _map_keys(
                section,
                {
                    "policy_loss": resolve_code_path,
                    "advantage": resolve_code_path,
                    "distillation": lambda inner: _map_keys(inner, {"teacher": resolve_existing}),
                },
            ),
        },
    )


def _map_keys(section: Any, functions: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return the section with each of `functions` applied to the value of its key, where the
    section has that key."""
    if not isinstance(section, Mapping):
        return section
    return {
        key: functions[key](value) if key in functions else value for key, value in section.items()
    }
