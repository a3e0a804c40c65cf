"""From `env.name` and `env.args` to a callable that makes environments."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterable
from typing import Any

from r3async.config import DATASET_ENV, MIX_ENV, ConfigError, EnvConfig, did_you_mean
from r3async.config.places import import_object
from r3async.envs import EnvironmentFactory
from r3async.envs.objects import get_pickled_object, is_object_name, load_object
from r3async.envs.pool import make_pooled_factory

BUILTIN_ENVIRONMENTS = {
    "reverse-text": "r3async.envs.tasks:ReverseText",
    "alphabet-sort": "r3async.envs.tasks:AlphabetSort",
    "guess": "r3async.envs.tasks:GuessNumber",
    "countdown": "r3async.envs.tasks:Countdown",
    "tool-calculator": "r3async.envs.tasks:ToolCalculator",
}
ADAPTER_FACTORIES = {
    "dataset": "r3async.envs.dataset:make_dataset",
    MIX_ENV: "r3async.envs.mix:make_mix",
    "reasoning-gym": "r3async.envs.adapters:make_reasoning_gym",
    "gymnasium": "r3async.envs.adapters:make_gymnasium",
    "textarena": "r3async.envs.adapters:make_textarena",
    "verifiers": "r3async.envs.adapt_verifiers:make_verifiers",
    "mcp": "r3async.envs.mcp_tools:make_mcp",
}
"""`PREFIX:TARGET` is made by that function of TARGET and the section."""


def build_environment_factory(config: EnvConfig) -> EnvironmentFactory:
    """A callable that makes environments; call this once a process. A class is constructed once, here, so that wrong arguments
    show before anything starts.

    Raises `ConfigError` for an unknown name, wrong `env.args` or a package that is not installed.
    """
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
            config.name, [*BUILTIN_ENVIRONMENTS, *ADAPTER_FACTORIES], f"built in: {', '.join(BUILTIN_ENVIRONMENTS)}."
        )
        raise ConfigError(
            f"`env.name` = {config.name!r}: no such environment; {hint} Your own is `module:Class` or `file.py:Class`, "
            f"adapters are {', '.join(f'`{name}:...`' for name in ADAPTER_FACTORIES)}."
        )
    kind = import_for_setting(path, "env.name")
    _check_return_annotation(kind, config)
    return build_class_factory(kind, path, config)


def build_class_factory(constructor: Any, path: str, config: EnvConfig, **extra: Any) -> EnvironmentFactory:
    """Makes `constructor(**extra, **env.args)`: here if its functions are `async def`, in the pool's processes if they are plain.
    `constructor`: a class, or a function that makes environments."""
    if inspect.isclass(constructor) or not callable(constructor):
        _check_environment_methods(constructor, config)
    arguments = {**extra, **config.reveal_args()}
    check_arguments(constructor, config, extra)
    try:
        first = constructor(**arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"`env.args` do not fit {config.name!r}: {error}; it takes {describe_signature(constructor, extra)}"
        ) from error
    _check_environment_methods(first, config)
    if inspect.iscoroutinefunction(first.reset):
        return lambda: constructor(**arguments)
    close = getattr(first, "close", None)
    if close is not None:
        close()
    if is_object_name(path):
        path, arguments = (
            "r3async.envs.objects:construct_from_pickle",
            {"data": get_pickled_object(path, "env.name"), "arguments": arguments},
        )
    return make_pooled_factory(
        path, arguments, config, has_oracle=hasattr(first, "oracle"), size=getattr(first, "size", None)
    )


def _check_return_annotation(constructor: Any, config: EnvConfig) -> None:
    """Raise `ConfigError` for a function that does not say that it makes environments, by what it is annotated to return. Whoever
    wrote the configuration named it, and would have it called: it could be any function of any module, such as `os:system`."""
    if inspect.isclass(constructor) or not callable(constructor):
        return  # `build_class_factory` looks at these before it calls anything
    made: Any = None
    with contextlib.suppress(Exception):  # an annotation may name what is not there
        made = typing.get_type_hints(constructor).get("return")
    if not all(callable(getattr(made, name, None)) for name in ("reset", "step")):
        raise ConfigError(
            f"`env.name` = {config.name!r} is no environment, but a function, which is called only if it says what it makes: "
            f"name a class, or annotate it, as in `def {getattr(constructor, '__name__', 'make')}(…) -> Environment`, with "
            "`from r3async.envs import Environment`"
        )


def _check_environment_methods(environment: Any, config: EnvConfig) -> None:
    """Of a class, or of what it makes. Raises `ConfigError`."""
    waits = [inspect.iscoroutinefunction(getattr(environment, name, None)) for name in ("reset", "step")]
    if not all(callable(getattr(environment, name, None)) for name in ("reset", "step")) or len(set(waits)) == 2:
        raise ConfigError(
            f"`env.name` = {config.name!r} is no environment: it needs `reset(task_seed)` and `step(action)`, "
            "both `async def` or both plain `def`"
        )


def check_arguments(function: Any, config: EnvConfig, extra: Iterable[str] = ()) -> None:
    """Raises `ConfigError` unless `function` takes `env.args` by name; `extra` are arguments that we give ourselves."""
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in config.args:
        if (name not in parameters and not open_ended) or name in extra:
            hint = did_you_mean(name, [p for p in parameters if p not in set(extra)])
            raise ConfigError(
                f"`env.args.{name}`: {config.name!r} takes no such argument; {hint}{' ' * bool(hint)}it takes "
                f"{describe_signature(function, extra)}"
            )


def describe_signature(function: Any, extra: Iterable[str] = ()) -> str:
    """The signature as a person may set it: what we give ourselves is left out."""
    signature = inspect.signature(function)
    shown = [p for name, p in signature.parameters.items() if name not in set(extra)]
    return str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))


def import_for_setting(path: str, setting: str) -> Any:
    """What `module:name` or `file.py:name` names. Raises `ConfigError`, which names `setting`."""
    try:
        return import_object(path)
    except (Exception, SystemExit) as error:  # importing somebody's module may raise anything
        what = "" if isinstance(error, (ImportError, AttributeError, ValueError)) else f"{type(error).__name__}: "
        raise ConfigError(f"`{setting}` = {path!r} cannot be loaded: {what}{error}") from error


def import_optional_package(name: str, config: EnvConfig, extra: str = "envs") -> Any:
    """A package of that extra. Raises `ConfigError` that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"`env.name` = {config.name!r} needs a package that is not installed ({error}): pip install 'r3async[{extra}]'"
        ) from error
