"""Environments and rewards that are objects of the caller's: in a configuration they have names, `object:NAME`.

A program gives `r3async.train` a class, a function that makes environments, or a reward. They are pickled, by value or by
reference (cloudpickle), and travel to the generators through Ray, to the process that makes a start model, and on to the pool's;
no file of a run holds them, since unpickling runs code. Each process holds what it was given.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from r3async.config import ConfigError, EnvConfig

OBJECT_PREFIX = "object"
_pickled_objects: dict[str, bytes] = {}
"""By name, of this process."""


def register_objects(objects: Mapping[str, bytes]) -> None:
    """Have `object:NAME` stand for the objects, pickled, in this process."""
    _pickled_objects.update(objects)


def get_registered_objects() -> dict[str, bytes]:
    """For `register_objects` in another process."""
    return dict(_pickled_objects)


def is_object_name(path: str) -> bool:
    return path.partition(":")[0] == OBJECT_PREFIX


def get_pickled_object(path: str, setting: str) -> bytes:
    """Raises `ConfigError` for an object that this process was not given."""
    name = path.partition(":")[2]
    if name not in _pickled_objects:
        raise ConfigError(
            f"`{setting}` = {path!r} is an object that a program gave r3async.train, and no file keeps it: give it again, with "
            f"r3async.train(…) or r3async.evaluate(…) and {name} where it was"
        )
    return _pickled_objects[name]


def load_object(path: str, setting: str) -> Any:
    """The object. Raises `ConfigError` also for one that cannot be loaded here, such as one of a module that is not."""
    data = get_pickled_object(path, setting)
    try:
        return _unpickle_cached(data)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(
            f"`{setting}`: {path.partition(':')[2]} cannot be loaded in this process: {type(error).__name__}: {error}"
        ) from error


@functools.lru_cache(maxsize=32)
def _unpickle_cached(data: bytes) -> Any:
    return pickle.loads(data)


def construct_from_pickle(data: bytes, arguments: dict[str, Any]) -> Any:
    """An environment, in a process of the pool."""
    return _unpickle_cached(data)(**arguments)


def extract_objects(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """`settings` with `object:NAME` in the place of each class and function among them, and these, pickled, by name.

    Raises `ConfigError` for what cannot be pickled, naming the setting, the object, and what in it is the reason.
    """
    objects: dict[str, bytes] = {}

    def replace_objects(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return {
                key: replace_objects(inner, f"{where}.{key}" if where else str(key)) for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [replace_objects(inner, f"{where}[{at}]") for at, inner in enumerate(value)]
        if not callable(value) and not _is_environment(value):
            return value
        data, name = _pickle_object(value, where), _name_object(value)
        name = next(each for each in (name, *(f"{name}{n}" for n in range(2, 99))) if objects.get(each, data) == data)
        objects[name] = data
        return f"{OBJECT_PREFIX}:{name}"

    return replace_objects(settings, ""), objects


def _is_environment(value: object) -> bool:
    return callable(getattr(value, "reset", None)) and callable(getattr(value, "step", None))


def _name_object(value: Any) -> str:
    name = getattr(value, "__name__", type(value).__name__)
    return name if name.isidentifier() else "function"


def _pickle_object(value: Any, where: str) -> bytes:
    import cloudpickle

    if _is_environment(value) and not inspect.isclass(value):
        raise ConfigError(
            f"`{where}` is one {type(value).__name__}, and every episode needs an environment of its own: give the class, or a "
            f"function that makes one, such as lambda: {type(value).__name__}(…)"
        )
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # what is in it may raise anything
        blame = ", ".join(_find_unpicklable(value, cloudpickle.dumps))
        raise ConfigError(
            f"`{where}` = {_name_object(value)} cannot be sent to the generators{f', because of {blame}' if blame else ''}: "
            f"{type(error).__name__}: {error}. Make it where it is used (in `reset`, or in the function), or put "
            f"{_name_object(value)} "
            'into a module and name it "module:name"'
        ) from error


def _find_unpicklable(value: Any, dumps: Callable[[Any], bytes]) -> list[str]:
    """Names of what a function, or the functions of a class, refer to and cannot be pickled."""
    functions = [f for f in vars(value).values() if inspect.isfunction(f)] if inspect.isclass(value) else [value]
    used: dict[str, Any] = dict(vars(value)) if inspect.isclass(value) else {}
    for function in functions:
        if inspect.isfunction(function):
            found = inspect.getclosurevars(function)
            used |= {**found.globals, **found.nonlocals}
    bad = []
    for name, inner in used.items():
        try:
            if not name.startswith("__") and not any(inner is function for function in functions):
                dumps(inner)
        except Exception:
            bad.append(name)
    return bad


def build_factory_with_objects(objects: Mapping[str, bytes], config: EnvConfig) -> Callable[[], Any]:
    """`build_environment_factory` where `objects` are held: of a generator that plays them."""
    from r3async.envs.factory import build_environment_factory

    register_objects(objects)
    return build_environment_factory(config)
