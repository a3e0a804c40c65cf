"""Environments, rewards and rows that the caller passes as objects; a configuration names
them `object:NAME`.

A program gives `r3async.train` a class, a function that makes environments, a reward, or rows. They
are pickled, by value or by reference (cloudpickle), and travel to the generators through Ray, to
the process that makes a start model, and on to the pool's processes; no file of a run holds them,
since unpickling runs code. Each process holds what it was given.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from r3async.config import ConfigError
from r3async.envs.given_rows import encode_given_rows

OBJECT_PREFIX = "object"
_pickled_objects: dict[str, bytes] = {}
"""Pickled objects of this process, by name."""


def register_objects(objects: Mapping[str, bytes]) -> None:
    """Register pickled objects in this process under the names that `object:NAME` uses."""
    _pickled_objects.update(objects)


def get_registered_objects() -> dict[str, bytes]:
    """Return the pickled objects of this process, for `register_objects` in another one."""
    return dict(_pickled_objects)


def is_object_name(path: str) -> bool:
    return path.partition(":")[0] == OBJECT_PREFIX


def get_pickled_object(path: str, setting: str) -> bytes:
    """Return the pickled object that `path` names. Raises `ConfigError` for one that this
    process was not given."""
    name = path.partition(":")[2]
    if name not in _pickled_objects:
        raise ConfigError(
            f"`{setting}` = {path!r} is an object that a program gave r3async.train, and no "
            "file keeps it: give it again, with r3async.train(…) or r3async.evaluate(…) and "
            f"{name} where it was"
        )
    return _pickled_objects[name]


def load_object(path: str, setting: str) -> Any:
    """Return the object that `path` names. Raises `ConfigError` also for one that cannot be loaded
    here, for example because its module is missing."""
    data = get_pickled_object(path, setting)
    try:
        return _unpickle_cached(data)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise ConfigError(
            f"`{setting}`: {path.partition(':')[2]} cannot be loaded in this process: "
            f"{type(error).__name__}: {error}"
        ) from error


@functools.lru_cache(maxsize=32)
def _unpickle_cached(data: bytes) -> Any:
    return pickle.loads(data)


def construct_from_pickle(data: bytes, arguments: dict[str, Any]) -> Any:
    """Construct an environment from a pickled constructor; called in a process of the pool."""
    return _unpickle_cached(data)(**arguments)


def extract_objects(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return `settings` with each class, each function and all rows replaced by `object:NAME`, and
    the objects by name: pickled, or lines of JSON for rows.

    Raises `ConfigError` for an object that cannot be pickled, or a row that JSON cannot hold; the
    message names the setting, the object, and the part of it that is the reason.
    """
    objects: dict[str, bytes] = {}

    def add_object(data: bytes, name: str) -> str:
        name = next(
            each
            for each in (name, *(f"{name}{n}" for n in range(2, 99)))
            if objects.get(each, data) == data
        )
        objects[name] = data
        return f"{OBJECT_PREFIX}:{name}"

    def replace_objects(value: Any, where: str) -> Any:
        rows = encode_given_rows(value, where)
        if rows is not None:
            return add_object(rows, "rows")
        if isinstance(value, Mapping):
            return {
                key: replace_objects(inner, f"{where}.{key}" if where else str(key))
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [replace_objects(inner, f"{where}[{at}]") for at, inner in enumerate(value)]
        if not callable(value) and not _is_environment(value):
            return value
        return add_object(_pickle_object(value, where), _name_object(value))

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
            f"`{where}` is one {type(value).__name__}, and every episode needs an environment of "
            "its own: give the class, or a function that makes one, such as lambda: "
            f"{type(value).__name__}(…)"
        )
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # pickling the user's object may raise anything
        blame = ", ".join(_find_unpicklable(value, cloudpickle.dumps))
        raise ConfigError(
            f"`{where}` = {_name_object(value)} cannot be sent to the "
            f"generators{f', because of {blame}' if blame else ''}: {type(error).__name__}: "
            f"{error}. Make it where it is used (in `reset`, or in the function), or put "
            f"{_name_object(value)} "
            'into a module and name it "module:name"'
        ) from error


def _find_unpicklable(value: Any, dumps: Callable[[Any], bytes]) -> list[str]:
    """Return the names that a function, or the functions of a class, refer to and that
    cannot be pickled."""
    functions = (
        [f for f in vars(value).values() if inspect.isfunction(f)]
        if inspect.isclass(value)
        else [value]
    )
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
