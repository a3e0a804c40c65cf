"""From `env.name` and `env.args` to a callable that makes environments."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterable
from typing import Any

from r3async.config import DATASET, MIX, ConfigError, EnvConfig, did_you_mean
from r3async.config.places import resolve_name
from r3async.envs import EnvironmentFactory
from r3async.envs.objects import is_object, loaded, pickled
from r3async.envs.pool import pooled

BUILT_IN = {
    "reverse-text": "r3async.envs.tasks:ReverseText",
    "alphabet-sort": "r3async.envs.tasks:AlphabetSort",
    "guess": "r3async.envs.tasks:Guess",
    "countdown": "r3async.envs.tasks:Countdown",
    "tool-calculator": "r3async.envs.tasks:ToolCalculator",
}
ADAPTERS = {
    "dataset": "r3async.envs.dataset:make",
    MIX: "r3async.envs.mix:make",
    "reasoning-gym": "r3async.envs.adapters:make_reasoning_gym",
    "gymnasium": "r3async.envs.adapters:make_gymnasium",
    "textarena": "r3async.envs.adapters:make_textarena",
    "verifiers": "r3async.envs.adapt_verifiers:make",
    "mcp": "r3async.envs.mcp_tools:make",
}
"""`PREFIX:TARGET` is made by that function of TARGET and the section."""


def environment_factory(config: EnvConfig) -> EnvironmentFactory:
    """A callable that makes environments; call this once a process. A class is constructed once, here, so that wrong arguments
    show before anything starts.

    Raises `ConfigError` for an unknown name, wrong `env.args` or a package that is not installed.
    """
    prefix, colon, target = config.name.partition(":")
    if (colon and prefix in ADAPTERS) or prefix in (DATASET, MIX):
        if not target and prefix not in (DATASET, MIX):
            raise ConfigError(f"`env.name` = {config.name!r}: say which, as in `{prefix}:NAME`")
        return pkgutil.resolve_name(ADAPTERS[prefix])(target, config)
    if is_object(config.name):
        return class_factory(loaded(config.name, "env.name"), config.name, config)
    path = BUILT_IN.get(config.name, config.name)
    if ":" not in path:
        hint = did_you_mean(config.name, [*BUILT_IN, *ADAPTERS], f"built in: {', '.join(BUILT_IN)}.")
        raise ConfigError(
            f"`env.name` = {config.name!r}: no such environment; {hint} Your own is `module:Class` or `file.py:Class`, "
            f"adapters are {', '.join(f'`{name}:...`' for name in ADAPTERS)}."
        )
    kind = load(path, "env.name")
    _check_declared(kind, config)
    return class_factory(kind, path, config)


def class_factory(kind: Any, path: str, config: EnvConfig, **extra: Any) -> EnvironmentFactory:
    """Makes `kind(**extra, **env.args)`: here if its functions are `async def`, in the pool's processes if they are plain.
    `kind`: a class, or a function that makes environments."""
    if inspect.isclass(kind) or not callable(kind):
        _check_plays(kind, config)
    arguments = {**extra, **config.arguments()}
    accept_arguments(kind, config, extra)
    try:
        first = kind(**arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"`env.args` do not fit {config.name!r}: {error}; it takes {takes(kind, extra)}") from error
    _check_plays(first, config)
    if inspect.iscoroutinefunction(first.reset):
        return lambda: kind(**arguments)
    close = getattr(first, "close", None)
    if close is not None:
        close()
    if is_object(path):
        path, arguments = "r3async.envs.objects:remade", {"data": pickled(path, "env.name"), "arguments": arguments}
    return pooled(path, arguments, config, has_oracle=hasattr(first, "oracle"), size=getattr(first, "size", None))


def _check_declared(kind: Any, config: EnvConfig) -> None:
    """Raise `ConfigError` for a function that does not say that it makes environments, by what it is annotated to return. Whoever
    wrote the configuration named it, and would have it called: it could be any function of any module, such as `os:system`."""
    if inspect.isclass(kind) or not callable(kind):
        return  # `class_factory` looks at these before it calls anything
    made: Any = None
    with contextlib.suppress(Exception):  # an annotation may name what is not there
        made = typing.get_type_hints(kind).get("return")
    if not all(callable(getattr(made, name, None)) for name in ("reset", "step")):
        raise ConfigError(
            f"`env.name` = {config.name!r} is no environment, but a function, which is called only if it says what it makes: "
            f"name a class, or annotate it, as in `def {getattr(kind, '__name__', 'make')}(…) -> Environment`, with "
            "`from r3async.envs import Environment`"
        )


def _check_plays(environment: Any, config: EnvConfig) -> None:
    """Of a class, or of what it makes. Raises `ConfigError`."""
    waits = [inspect.iscoroutinefunction(getattr(environment, name, None)) for name in ("reset", "step")]
    if not all(callable(getattr(environment, name, None)) for name in ("reset", "step")) or len(set(waits)) == 2:
        raise ConfigError(
            f"`env.name` = {config.name!r} is no environment: it needs `reset(task_seed)` and `step(action)`, "
            "both `async def` or both plain `def`"
        )


def accept_arguments(function: Any, config: EnvConfig, extra: Iterable[str] = ()) -> None:
    """Raises `ConfigError` unless `function` takes `env.args` by name; `extra` are arguments that we give ourselves."""
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in config.args:
        if (name not in parameters and not open_ended) or name in extra:
            hint = did_you_mean(name, [p for p in parameters if p not in set(extra)])
            raise ConfigError(
                f"`env.args.{name}`: {config.name!r} takes no such argument; {hint}{' ' * bool(hint)}it takes "
                f"{takes(function, extra)}"
            )


def takes(function: Any, extra: Iterable[str] = ()) -> str:
    """The signature as a person may set it: what we give ourselves is left out."""
    signature = inspect.signature(function)
    shown = [p for name, p in signature.parameters.items() if name not in set(extra)]
    return str(signature.replace(parameters=shown, return_annotation=inspect.Signature.empty))


def load(path: str, setting: str) -> Any:
    """What `module:name` or `file.py:name` names. Raises `ConfigError`, which names `setting`."""
    try:
        return resolve_name(path)
    except (Exception, SystemExit) as error:  # importing somebody's module may raise anything
        what = "" if isinstance(error, (ImportError, AttributeError, ValueError)) else f"{type(error).__name__}: "
        raise ConfigError(f"`{setting}` = {path!r} cannot be loaded: {what}{error}") from error


def optional_package(name: str, config: EnvConfig, extra: str = "envs") -> Any:
    """A package of that extra. Raises `ConfigError` that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"`env.name` = {config.name!r} needs a package that is not installed ({error}): pip install 'r3async[{extra}]'"
        ) from error
