"""Factories of environments, built from `env.name` and `env.args`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from r3async.config import DATASET_ENV, MIX_ENV, ConfigError, EnvConfig, did_you_mean
from r3async.config.user_code import import_object
from r3async.envs import EnvironmentFactory
from r3async.envs.errors import summarize_error
from r3async.envs.passed_objects import (
    get_pickled_object,
    is_object_name,
    load_object,
    register_objects,
)
from r3async.envs.pool import make_pooled_factory
from r3async.envs.seeding import seed_global_generators

BUILTIN_ENVIRONMENTS = {
    "reverse-text": "r3async.envs.builtin:ReverseText",
    "alphabet-sort": "r3async.envs.builtin:AlphabetSort",
    "guess": "r3async.envs.builtin:GuessNumber",
    "countdown": "r3async.envs.builtin:Countdown",
    "tool-calculator": "r3async.envs.builtin:ToolCalculator",
}
ADAPTER_FACTORIES = {
    "dataset": "r3async.envs.dataset:make_dataset",
    MIX_ENV: "r3async.envs.mix:make_mix",
    "reasoning-gym": "r3async.envs.adapters.reasoning_gym_tasks:make_reasoning_gym",
    "gymnasium": "r3async.envs.adapters.gymnasium_games:make_gymnasium",
    "textarena": "r3async.envs.adapters.textarena_games:make_textarena",
    "verifiers": "r3async.envs.adapters.verifiers_tasksets:make_verifiers",
    "openenv": "r3async.envs.adapters.openenv_servers:make_openenv",
    "harbor": "r3async.envs.adapters.harbor_tasks:make_harbor",
    "mcp": "r3async.envs.mcp_tools:make_mcp",
}
"""Functions that build the factory of `PREFIX:TARGET` from TARGET and the configuration
section, by prefix."""


def build_environment_factory(config: EnvConfig) -> EnvironmentFactory:
    """Return a callable that makes environments; call this once per process.

    A class is constructed once, here, so that wrong arguments show before anything starts. Raises
    `ConfigError` for an unknown name, wrong `env.args` or a package that is not installed.
    """
    # Tasks that are listed or shuffled while they are loaded are the same in all processes.
    seed_global_generators(0)
    prefix, colon, target = config.name.partition(":")
    if (colon and prefix in ADAPTER_FACTORIES) or prefix in (DATASET_ENV, MIX_ENV):
        if not target and prefix not in (DATASET_ENV, MIX_ENV):
            raise ConfigError(f"`env.name` = {config.name!r}: say which, as in `{prefix}:NAME`")
        return pkgutil.resolve_name(ADAPTER_FACTORIES[prefix])(target, config)
    if is_object_name(config.name):
        return build_class_factory(load_object(config.name, "env.name"), config.name, config)
    path = BUILTIN_ENVIRONMENTS.get(config.name, config.name)
    if ":" not in path:
        hint = did_you_mean(
            config.name,
            [*BUILTIN_ENVIRONMENTS, *ADAPTER_FACTORIES],
            f"built in: {', '.join(BUILTIN_ENVIRONMENTS)}.",
        )
        raise ConfigError(
            f"`env.name` = {config.name!r}: no such environment; {hint} Your own is `module:Class` "
            "or `file.py:Class`, adapters are "
            f"{', '.join(f'`{name}:...`' for name in ADAPTER_FACTORIES)}."
        )
    kind = import_for_setting(path, "env.name")
    _check_return_annotation(kind, config)
    return build_class_factory(kind, path, config)


def build_class_factory(
    constructor: Any, path: str, config: EnvConfig, **extra: Any
) -> EnvironmentFactory:
    """Return a factory of `constructor(**extra, **env.args)`. The environments run here if their
    functions are `async def`, and in the pool's processes if they are plain. The constructor is a
    class, or a function that makes environments."""
    if inspect.isclass(constructor) or not callable(constructor):
        _check_environment_methods(constructor, config)
    arguments = {**extra, **config.reveal_args()}
    check_arguments(constructor, config, extra)
    try:
        inspect.signature(constructor).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"`env.args` do not fit {config.name!r}: {error}; it takes "
            f"{describe_signature(constructor, extra)}"
        ) from error
    try:
        first = constructor(**arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        wrong_value = isinstance(error, TypeError | ValueError)
        hint = (
            f"; it takes {describe_signature(constructor, extra)}"
            if wrong_value and config.args
            else ""
        )
        raise ConfigError(
            f"`env.name` = {config.name!r} cannot be made{_describe_args(config)}: "
            f"{summarize_error(error).line}{hint}"
        ) from error
    _check_environment_methods(first, config)
    _check_method_arguments(first, config)
    if inspect.iscoroutinefunction(first.reset):
        return lambda: constructor(**arguments)
    close = getattr(first, "close", None)
    if close is not None:
        close()
    if is_object_name(path):
        arguments = {"data": get_pickled_object(path, "env.name"), "arguments": arguments}
        path = "r3async.envs.passed_objects:construct_from_pickle"
    return make_pooled_factory(
        path,
        arguments,
        config,
        has_oracle=hasattr(first, "oracle"),
        size=getattr(first, "size", None),
    )


def _check_return_annotation(constructor: Any, config: EnvConfig) -> None:
    """Raise `ConfigError` for a function whose return annotation does not say that it
    makes environments.

    Without this check a configuration could name, and so call, any function of any module,
    such as `os:system`.
    """
    if inspect.isclass(constructor) or not callable(constructor):
        return  # `build_class_factory` looks at these before it calls anything
    made: Any = None
    with contextlib.suppress(Exception):  # an annotation may name something that does not exist
        made = typing.get_type_hints(constructor).get("return")
    if not all(callable(getattr(made, name, None)) for name in ("reset", "step")):
        raise ConfigError(
            f"`env.name` = {config.name!r} is no environment, but a function, which is called only "
            "if it says what it makes: name a class, or annotate it, as in `def "
            f"{getattr(constructor, '__name__', 'make')}(…) -> Environment`, with `from "
            "r3async.envs import Environment`"
        )


def _check_environment_methods(environment: Any, config: EnvConfig) -> None:
    """Raise `ConfigError` unless a class, or an instance of it, has the methods
    of an environment."""
    waits = [
        inspect.iscoroutinefunction(getattr(environment, name, None)) for name in ("reset", "step")
    ]
    if (
        not all(callable(getattr(environment, name, None)) for name in ("reset", "step"))
        or len(set(waits)) == 2
    ):
        raise ConfigError(
            f"`env.name` = {config.name!r} is no environment: it needs `reset(task_seed)` and "
            "`step(action)`, both `async def` or both plain `def`"
        )


def _check_method_arguments(environment: Any, config: EnvConfig) -> None:
    """Raise `ConfigError` unless `reset` and `step` can be called as r3async calls them.
    Gymnasium's `reset` takes its seed by name alone."""
    for name, argument in (("reset", "task_seed"), ("step", "action")):
        try:
            signature = inspect.signature(getattr(environment, name))
        except ValueError:  # functions written in C may have none
            continue
        try:
            signature.bind(0)
        except TypeError as error:
            raise ConfigError(
                f"`env.name` = {config.name!r}: `{name}{signature}` cannot be called as "
                f"`{name}({argument})`: {error}. Write `def {name}(self, {argument})`"
            ) from error


def _describe_args(config: EnvConfig) -> str:
    return f" with `env.args` = {config.args}" if config.args else ""


def check_arguments(function: Any, config: EnvConfig, extra: Iterable[str] = ()) -> None:
    """Raise `ConfigError` unless `function` takes `env.args` by name. The arguments `extra` are
    supplied by r3async."""
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in config.args:
        if (name not in parameters and not open_ended) or name in extra:
            hint = did_you_mean(name, [p for p in parameters if p not in set(extra)])
            raise ConfigError(
                f"`env.args.{name}`: {config.name!r} takes no such argument; "
                f"{hint}{' ' if hint else ''}it takes {describe_signature(function, extra)}"
            )


def describe_signature(function: Any, extra: Iterable[str] = ()) -> str:
    """Return the signature of `function` as a user may set it, without the arguments `extra`, which
    r3async supplies."""
    signature = inspect.signature(function)
    shown = [p for name, p in signature.parameters.items() if name not in set(extra)]
    return str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))


def import_for_setting(path: str, setting: str) -> Any:
    """Return the object that `module:name` or `file.py:name` names. Raises `ConfigError`, which
    names `setting`."""
    try:
        return import_object(path)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        what = (
            ""
            if isinstance(error, (ImportError, AttributeError, ValueError))
            else f"{type(error).__name__}: "
        )
        raise ConfigError(f"`{setting}` = {path!r} cannot be loaded: {what}{error}") from error


def import_optional_package(name: str, config: EnvConfig, extra: str = "envs") -> Any:
    """Import and return a package of the given extra. Raises `ConfigError` that says
    how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"`env.name` = {config.name!r} needs a package that is not installed ({error}): pip "
            f"install 'r3async[{extra}]'"
        ) from error


def build_factory_with_objects(
    objects: Mapping[str, bytes], config: EnvConfig
) -> Callable[[], Any]:
    """Register `objects`, then return `build_environment_factory(config)`; used by a generator that
    plays such environments."""

    register_objects(objects)
    return build_environment_factory(config)
