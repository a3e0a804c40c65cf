"""Several environments in one run: what `[[env]]` says of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from r3async.config.generation import EnvConfig, EpisodeConfig
from r3async.config.section import ConfigError, PositiveFloat, PositiveInt


class EnvEntryConfig(EnvConfig):
    """One of several environments: `[[env]]`, once for each. It takes the keys of `[env]`, or `data` and `reward`, and those
    below. In a run's `config.toml` they are `env.args.LABEL` of the environment `mix`, and so they are on the command line:
    `env.args.guess.weight=2`. A key that is unset is that of `[episode]`, which is also the most that it may be."""

    weight: PositiveFloat = 1.0
    """Share of the groups, over the sum of all weights."""
    max_turns: PositiveInt | None = None
    max_new_tokens: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    max_total_tokens: PositiveInt | None = None
    timeout: PositiveFloat | None = None


EPISODE_LIMITS = ("max_turns", "max_new_tokens", "max_prompt_tokens", "max_total_tokens", "timeout")


class RunEnv(NamedTuple):
    """An environment of a run. `label`: in metrics; "" where it is the only one. `episode`: with its own limits."""

    label: str
    env: EnvConfig
    weight: float
    episode: EpisodeConfig


def resolve_env(label: str, entry: EnvEntryConfig, episode: EpisodeConfig) -> RunEnv:
    """Raises `ConfigError` that names the entry."""
    limits: dict[str, Any] = {name: value for name in EPISODE_LIMITS if (value := getattr(entry, name)) is not None}
    for name, value in limits.items():
        if value > (most := getattr(episode, name)):
            raise ConfigError(
                f"`env.args.{label}.{name}` = {value} is more than `episode.{name}` = {most}, which is the most that any "
                "environment of the run may have: raise that"
            )
    env = EnvConfig(**{name: getattr(entry, name) for name in EnvConfig.__struct_fields__})
    try:
        return RunEnv(label, env, entry.weight, msgspec.structs.replace(episode, **limits))
    except ValueError as error:
        raise ConfigError(f"[env.args.{label}] {error}") from error
