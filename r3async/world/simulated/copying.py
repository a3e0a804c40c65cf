"""Values on their way from one simulated process to another: nothing that can change is shared."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

SHARED = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose values cannot change, and hold nothing that can."""


def copied(value: Any) -> Any:
    """What would arrive. Raises what pickling raises."""
    kind = type(value)
    if kind in SHARED:
        return value
    if kind is dict:  # whose keys are hashable: they do not change
        return {key: item if type(item) in SHARED else copied(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in SHARED else copied(item) for item in value]
    if kind is tuple:
        return tuple([item if type(item) in SHARED else copied(item) for item in value]) if value else value
    if kind is np.ndarray and value.dtype != object:
        return value.copy()
    if getattr(kind, "passes_between_processes", False):
        return value
    return pickle.loads(pickle.dumps(value, protocol=5))


def copied_error(error: Exception) -> Exception:
    """The exception as its caller gets it; one that cannot be pickled, as a `RuntimeError` that has its words."""
    try:
        arrived = copied(error)
    except Exception:
        arrived = None
    if not isinstance(arrived, Exception):
        arrived = RuntimeError(f"{type(error).__name__}: {error}")
    return arrived.with_traceback(error.__traceback__)


__all__ = ["copied", "copied_error"]
