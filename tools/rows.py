"""What a run's `data` comes to, before anything starts: how many rows are trained and evaluated, and how many are too long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from r3async.config import Config, ConfigError
from r3async.envs.dataset import DatasetFactory, held_out, is_dataset, settings_of, tasks_of
from r3async.rollout.chat import ChatRenderer, TemplateError
from r3async.rollout.evaluation import drop_long_prompts


def note_rows(config: Config, say: Callable[[str], object]) -> Config:
    """`config` with the digest of its rows, which a resumed run has to find again; as it is without rows. `say` gets the counts.

    Raises `ConfigError` for rows that cannot be read or do not fit, if all prompts are too long, and for a tokenizer that cannot
    be used.
    """
    if not is_dataset(config.env):
        return config
    data = settings_of(config.env)
    tasks = tasks_of(data)
    config = msgspec.structs.replace(config)
    config.env = msgspec.structs.replace(config.env, args={**config.env.args, "digest": tasks.digest})
    for line in describe_rows(config):
        say(line)
    return config


def describe_rows(config: Config) -> list[str]:
    """A line for each part of the rows; see `note_rows`. Prompts are measured where the model's tokenizer is."""
    if not is_dataset(config.env):
        return []
    data = settings_of(config.env)
    tasks, renderer = tasks_of(data), _renderer(config)
    lines = []
    for part, env in (("trained", config.env), ("evaluated", held_out(config.env))):
        if part == "evaluated" and not data.eval:
            continue
        factory = DatasetFactory(env)
        dropped = drop_long_prompts(factory, renderer, config.episode) if renderer else 0
        longer = f" ({dropped} longer than episode.max_prompt_tokens = {config.episode.max_prompt_tokens})" * bool(
            dropped
        )
        lines.append(f"data: {factory.size} rows are {part}, {dropped} dropped{longer}")
    if tasks.repeated:
        lines.append(f"data: {tasks.repeated} rows are left out of training, for evaluation poses the same prompts")
    return lines


def _renderer(config: Config) -> ChatRenderer | None:
    """None if the model is not on this machine."""
    path = config.model.path
    if not path:
        from r3async.tools.init_model import byte_tokenizer

        return ChatRenderer(byte_tokenizer(), template_args=config.episode.template_args)
    if not (Path(path) / "config.json").is_file():
        return None
    try:
        return ChatRenderer.from_model(path, config.episode.template_args)
    except (TemplateError, OSError, ValueError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"`model.path` = {path!r}: its tokenizer cannot be used: {line}") from error
