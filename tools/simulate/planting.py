"""Defects, planted to prove that the search finds what it is there for: each replaces one method of a production class while a
simulation runs. A search that finds none of its mutants proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """`plant`: what is wrong as long as it is entered."""

    name: str
    what: str
    plant: Callable[[], AbstractContextManager[None]]


MUTANTS: dict[str, Mutant] = {}
"""By name; `mutants.py`, `mutants_schedule.py` and `mutants_weights.py` fill it."""


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `make(what it was)` meanwhile."""
    before = vars(owner)[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def mutant(owner: Any, method: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """The decorated function makes the replacement of a method from what it was; its docstring says what is wrong."""

    def add(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        what = " ".join((make.__doc__ or "").split())
        MUTANTS[make.__name__] = Mutant(make.__name__, what, lambda: replaced(owner, method, make))
        return make

    return add


def plant(name: str, what: str, *replacements: tuple[Any, str, Callable[[Any], Any]]) -> None:
    """A mutant of several methods."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, method, make in replacements:
                stack.enter_context(replaced(owner, method, make))
            yield

    MUTANTS[name] = Mutant(name, what, planted)
