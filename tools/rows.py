"""Count a run's rows of `data` before anything starts: the trained, the evaluated, and those
that are too long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from r3async.config import Config, ConfigError, EnvConfig, RunEnv, resolve_envs
from r3async.envs.dataset import DatasetFactory
from r3async.envs.task_splits import (
    is_dataset,
    load_task_splits,
    resolve_data_config,
    select_held_out_rows,
)
from r3async.rollout.evaluation import drop_long_prompts
from r3async.rollout.renderer import ChatRenderer, TemplateError


def add_row_digests(config: Config, print_line: Callable[[str], object]) -> Config:
    """Return `config` with the digest of its rows, which must be the same at a resume; unchanged if
    there are no rows.

    Raises `ConfigError` for rows that cannot be read or do not fit, if all prompts are too long,
    and for a tokenizer that cannot be used.

    Args:
        print_line: Called with the counts.
    """
    for line in describe_rows(config):
        print_line(line)
    noted = {
        each.label: _add_digest(each.env) for each in resolve_envs(config) if is_dataset(each.env)
    }
    if not noted:
        return config
    config = msgspec.structs.replace(config)
    if "" in noted:
        config.env = msgspec.structs.replace(config.env, args=noted[""])
        return config
    entries = {label: {**config.env.args[label], "args": args} for label, args in noted.items()}
    config.env = msgspec.structs.replace(config.env, args={**config.env.args, **entries})
    return config


def _add_digest(env: EnvConfig) -> dict[str, Any]:
    return {**env.args, "digest": load_task_splits(resolve_data_config(env)).digest}


def describe_rows(config: Config) -> list[str]:
    """Describe each part of the rows of each environment in a line; see `add_row_digests`.

    Prompts are measured if the model's tokenizer is available.
    """
    return [
        line
        for each in resolve_envs(config)
        if is_dataset(each.env)
        for line in _describe_environment_rows(config, each)
    ]


def _describe_environment_rows(config: Config, env_entry: RunEnv) -> list[str]:
    data = resolve_data_config(env_entry.env)
    what = env_entry.label or "data"
    tasks = load_task_splits(data)
    renderer = make_renderer(config)
    lines = []
    for part, env in (
        ("trained", env_entry.env),
        ("evaluated", select_held_out_rows(env_entry.env)),
    ):
        if part == "evaluated" and not data.eval:
            continue
        factory = DatasetFactory(env)
        most = env_entry.episode.max_prompt_tokens
        dropped = drop_long_prompts(factory, renderer, env_entry.episode) if renderer else 0
        longer = f" ({dropped} longer than episode.max_prompt_tokens = {most})" if dropped else ""
        lines.append(f"{what}: {factory.size} rows are {part}, {dropped} dropped{longer}")
    if tasks.dropped_overlap:
        lines.append(
            f"{what}: {tasks.dropped_overlap} rows are left out of training, because evaluation "
            "has the same prompts"
        )
    return lines


def make_renderer(config: Config) -> ChatRenderer | None:
    """Return the model's renderer; None if the model is not on this machine.

    Raises `ConfigError` for a tokenizer or a chat template that cannot be used.
    """
    path = config.model.path
    if not path:
        from .init_model import build_byte_tokenizer

        return ChatRenderer(build_byte_tokenizer(), template_args=config.episode.template_args)
    if not (Path(path) / "config.json").is_file():
        return None
    try:
        return ChatRenderer.from_model(path, config.episode.template_args)
    except (TemplateError, OSError, ValueError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
    except Exception as error:
        # Many kinds: a damaged tokenizer.json fails where transformers happens to look first.
        line = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    raise ConfigError(f"`model.path` = {path!r}: its tokenizer cannot be used: {line}")
