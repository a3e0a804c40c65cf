"""Several environments as one: the seed of a task decides which of them poses it
(`data/mixed.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from r3async.config import (
    MIX_ENV,
    Config,
    ConfigError,
    EnvConfig,
    EvaluationEnvConfig,
    EvaluationSetConfig,
    parse_mix_entries,
    resolve_envs,
)
from r3async.data.mixed import split_seed
from r3async.envs import Action, Environment, EnvironmentFactory, Message, StepResult
from r3async.envs.factory import build_environment_factory
from r3async.envs.task_splits import select_held_out_rows


class MixedEnvironment:
    """An environment that plays each episode in one of several environments, chosen by the
    seed at `reset`.

    All other attributes, such as `tools` or `oracle`, are those of the chosen environment; before
    the first `reset`, those of the first one.
    """

    size = None
    """Size of the mix, which has none: each environment has its own tasks."""

    def __init__(self, factories: Sequence[EnvironmentFactory]):
        self._factories = factories
        self._env_index = 0
        self._env = factories[0]()

    async def reset(self, task_seed: int) -> list[Message]:
        entry, seed = split_seed(task_seed, len(self._factories))
        if entry != self._env_index:
            before = self._env
            self._env = self._factories[entry]()
            self._env_index = entry
            close = getattr(before, "close", None)
            if close is not None:
                waiting = close()
                if inspect.isawaitable(waiting):
                    await waiting
        return await self._env.reset(seed)

    async def step(self, action: Action) -> StepResult:
        return await self._env.step(action)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # looked up while a copy is being made
            raise AttributeError(name)
        return getattr(self._env, name)


class MixedEnvironmentFactory:
    """A factory of mixed environments.

    Attributes:
        factories: The factory of each environment, by label, in the order of the labels.
    """

    def __init__(self, config: EnvConfig):
        """Build the factory of each entry. Raises `ConfigError` that names the entry."""
        self.entry_configs = parse_mix_entries(config)
        self.factories: dict[str, EnvironmentFactory] = {}
        for label, entry in self.entry_configs.items():
            if entry.name == MIX_ENV or entry.name.startswith(("agent:", "agent-")):
                what = "an agent" if entry.name != MIX_ENV else "a mix"
                raise ConfigError(
                    f"`env.args.{label}.name` = {entry.name!r}: {what} cannot be one of "
                    "several environments"
                )
            try:
                self.factories[label] = build_environment_factory(entry)
            except ConfigError as error:
                raise ConfigError(f"[env.args.{label}] {error}") from error

    def __call__(self) -> Environment:
        return MixedEnvironment(list(self.factories.values()))


def make_mix(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a `MixedEnvironmentFactory`."""
    return MixedEnvironmentFactory(config)


def add_default_evaluation_sets(config: Config) -> Config:
    """Return `config` with default evaluation sets: if several environments are trained and no
    evaluation is configured, each of them becomes a set with its label. A dataset is evaluated on
    the rows that its `eval` holds out from training."""
    settings = config.evaluation
    if config.env.name != MIX_ENV or settings.sets or settings.env.name:
        return config
    sets = {}
    for each in resolve_envs(config):
        env = select_held_out_rows(each.env)
        fields = {name: getattr(env, name) for name in EnvConfig.__struct_fields__}
        sets[each.label] = EvaluationSetConfig(env=EvaluationEnvConfig(**fields))
    return msgspec.structs.replace(config, evaluation=msgspec.structs.replace(settings, sets=sets))
