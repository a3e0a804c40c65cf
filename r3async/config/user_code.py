"""Import of the user's code that a configuration names."""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
import sys
from types import ModuleType
from typing import Any

from r3async.config.paths import resolve_user_path
from r3async.config.section import did_you_mean


def import_object(path: str) -> Any:
    """Return the object at `module:name` or `file.py:name`. Raises `ImportError`, `AttributeError`
    or `ValueError` if it does not exist, and any error that the module raises."""
    place, _, name = path.rpartition(":")
    if not place.endswith(".py"):
        return pkgutil.resolve_name(path)
    module = _import_user_module(place)
    if not hasattr(module, name):
        own = [
            each
            for each in vars(module)
            if callable(getattr(module, each)) and not each.startswith("_")
        ]
        hint = did_you_mean(name, own, f"it has {', '.join(own) or 'none'}")
        raise AttributeError(f"{place} has no {name!r}; {hint}")
    return getattr(module, name)


@functools.cache
def _import_user_module(place: str) -> ModuleType:
    """Return the module of a file, which may import modules beside it."""
    file = resolve_user_path(place)
    if not file.is_file():
        raise ImportError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"user_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    finally:
        sys.path.remove(str(file.parent))
    return module
