"""Several environments as one: a task's seed says which of them poses it (`data/mixed.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from r3async.config import (
    MIX,
    Config,
    ConfigError,
    EnvConfig,
    EvaluatedEnv,
    EvaluationSet,
    environments,
    parts_of,
)
from r3async.data.mixed import parted
from r3async.envs import Action, Environment, EnvironmentFactory, Message, StepResult
from r3async.envs.dataset import held_out
from r3async.envs.factory import environment_factory


class Mixed:
    """An episode of one of several environments, which the seed at `reset` chooses. Whatever else is asked of it, such as `tools`
    or `oracle`, is asked of that one; before, of the first."""

    size = None
    """Each has tasks of its own."""

    def __init__(self, factories: Sequence[EnvironmentFactory]):
        self._factories = factories
        self._entry, self._env = 0, factories[0]()

    async def reset(self, task_seed: int) -> list[Message]:
        entry, seed = parted(task_seed, len(self._factories))
        if entry != self._entry:
            before, self._entry, self._env = self._env, entry, self._factories[entry]()
            close = getattr(before, "close", None)
            if close is not None and inspect.isawaitable(waiting := close()):
                await waiting
        return await self._env.reset(seed)

    async def step(self, action: Action) -> StepResult:
        return await self._env.step(action)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._env, name)


class MixedFactory:
    """Makes them. `parts`: the factory of each environment, by label, in the order of the labels."""

    def __init__(self, config: EnvConfig):
        """Raises `ConfigError` that names the entry."""
        self.entries = parts_of(config)
        self.parts: dict[str, EnvironmentFactory] = {}
        for label, entry in self.entries.items():
            if entry.name == MIX or entry.name.startswith(("agent:", "agent-")):
                what = "an agent" if entry.name != MIX else "a mix"
                raise ConfigError(
                    f"`env.args.{label}.name` = {entry.name!r}: {what} cannot be one of several environments"
                )
            try:
                self.parts[label] = environment_factory(entry)
            except ConfigError as error:
                raise ConfigError(f"[env.args.{label}] {error}") from error

    def __call__(self) -> Environment:
        return Mixed(list(self.parts.values()))


def make(target: str, config: EnvConfig) -> EnvironmentFactory:
    """See `MixedFactory`."""
    return MixedFactory(config)


def evaluate_each(config: Config) -> Config:
    """`config`; where several environments are trained and nothing says what is evaluated, each of them is, as a set that has its
    label: a dataset with the rows that its `eval` keeps from training."""
    settings = config.evaluation
    if config.env.name != MIX or settings.sets or settings.env.name:
        return config
    sets = {}
    for each in environments(config):
        env = held_out(each.env)
        given = {name: getattr(env, name) for name in EnvConfig.__struct_fields__}
        sets[each.label] = EvaluationSet(env=EvaluatedEnv(**given))
    return msgspec.structs.replace(config, evaluation=msgspec.structs.replace(settings, sets=sets))
