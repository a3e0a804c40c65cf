"""Find code that a configuration names, and decide whether a command may import it.

A configuration can come from somebody else, and importing a module runs it. So a command that only
shows something imports no module that only a file names. `r3async train … --dry-run` imports it if
the user typed the name or confirms it. Commands that run import it.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence

import msgspec
import typer

from r3async.config import (
    DATASET_ENV,
    MIX_ENV,
    Config,
    EnvConfig,
    parse_data_config,
    parse_rewards,
    resolve_envs,
)
from r3async.envs.factory import BUILTIN_ENVIRONMENTS
from r3async.envs.passed_objects import is_object_name
from r3async.rollout.agents import FUNCTION_AGENT_PREFIX, is_agent


def find_named_code(config: Config) -> dict[str, str]:
    """Return every name by which a run with `config` would import somebody's code, by the
    setting that has it."""
    found: dict[str, str] = {}
    for each in resolve_envs(config):
        found |= _find_environment_code(
            each.env, f"env.args.{each.label}." if each.label else "env."
        )
    for name, settings in config.evaluation.resolve_sets().items():
        if settings.env.name not in ("", MIX_ENV):
            prefix = (
                "evaluation.env."
                if settings is config.evaluation
                else f"evaluation.sets.{name}.env."
            )
            found |= _find_environment_code(settings.env, prefix)
    for key in ("policy_loss", "advantage"):
        if ":" in (name := getattr(config.algorithm, key)):
            found[f"algorithm.{key}"] = name
    return found


def _find_environment_code(env: EnvConfig, prefix: str) -> dict[str, str]:
    kind, colon, target = env.name.partition(":")
    if kind == DATASET_ENV:
        named = []
        with contextlib.suppress(ValueError):  # unreadable values are refused where they are used
            rewards = parse_rewards(parse_data_config(env.args).reward)
            named = [each.fn for each in rewards if ":" in each.fn and not is_object_name(each.fn)]
        return {"reward": ", ".join(named)} if named else {}
    if kind == "mcp":
        task = env.args.get("task")
        args = task if isinstance(task, dict) else {}
        return _find_environment_code(msgspec.structs.replace(env, name=target, args=args), prefix)
    if kind == "textarena":
        opponent = str(env.args.get("opponent", ""))
        return {f"{prefix}args.opponent": opponent} if ":" in opponent else {}
    ours = env.name in BUILTIN_ENVIRONMENTS or is_object_name(env.name) or kind == "reasoning-gym"
    if not colon or ours or (is_agent(env) and not env.name.startswith(FUNCTION_AGENT_PREFIX)):
        return {}
    if kind == "gymnasium" and ":" not in target:  # from the installed package
        return {}
    return {f"{prefix}name": env.name}


def may_import_code(config: Config, overrides: Sequence[str]) -> bool:
    """Return whether code that `config` names may be imported to check it.

    It may if all of it was typed, in `overrides`, or if the user at the terminal confirms.
    """
    files_name = {
        setting: names
        for setting, names in find_named_code(config).items()
        if not all(_is_typed(name, overrides) for name in names.split(", "))
    }
    if not files_name or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return not files_name
    typer.echo(f"{describe_code(files_name)}. Importing it runs it.", err=True)
    return typer.confirm("Import it, to check that it works?", err=True)


def _is_typed(name: str, overrides: Sequence[str]) -> bool:
    """Return whether `name` occurs in an override as a whole, and not as part of another name."""
    return any(re.search(rf"(?<![\w./:-]){re.escape(name)}(?![\w.:-])", text) for text in overrides)


def describe_code(code: Mapping[str, str]) -> str:
    return "The configuration names code: " + ", ".join(
        f"`{setting}` = {name}" for setting, name in code.items()
    )
