"""What every section of the configuration is made of."""

from __future__ import annotations

import difflib
import functools
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and the fix."""


def did_you_mean(
    name: str, names: Iterable[str], otherwise: str = "", shown: Callable[[str], str] = repr, near: float = 0.4
) -> str:
    """`did you mean 'x'?` of the nearest of `names`, or `otherwise` if none is as `near` (0..1)."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=near)
    return f"did you mean {shown(found[0])}?" if found else otherwise


@dataclass(frozen=True)
class Range:
    """What a number of a section may be: `field: Annotated[float, Range(-1, 1)]`. Both ends are included; with `above` the lower
    one is not."""

    low: float
    high: float
    above: bool = False

    def problem(self, number: float) -> str:
        """Why `number` may not be, after its name; "" if it may."""
        if self.above and number <= self.low:
            return f"must be greater than {self.low:,}, got {number}"
        if number < self.low:
            return f"must be {self.low:,} or more, got {number}"
        return f"must be at most {self.high:,}, got {number}" if number > self.high else ""


NUMBER = Range(0, 10**9)
"""Of every number whose field says nothing else. As seconds it is 31 years, and clocks of all libraries can wait for it."""

Positive = Annotated[float, Range(0, 10**9, above=True)]
PositiveInt = Annotated[int, Range(0, 10**9, above=True)]
Share = Annotated[float, Range(0, 1)]
Port = Annotated[int, Range(0, 65535)]
"""0: a free one."""
Bytes = Annotated[int, Range(0, 2**50, above=True)]
Seed = Annotated[int, Range(0, 2**63 - 1)]
Signed = Annotated[float, Range(-(10**9), 10**9)]
"""A number that may be negative: a reward, or the weight of a term that may be a penalty."""


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: every number of every field is finite and in the field's `Range`, whatever a section checks itself.

    A section's own `__post_init__` comes after that. Numbers in tables (`env.args`) are finite; what they may be is not known
    here.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (own := cls.__dict__.get("__post_init__")) is None:
            return

        @functools.wraps(own)
        def checked(section: Section) -> None:
            _check_numbers(section)
            own(section)

        cls.__post_init__ = checked  # type: ignore[method-assign, assignment]

    def __post_init__(self) -> None:
        _check_numbers(self)


def plain_type(kind: Any) -> Any:
    """A field's type without its `Range`."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _check_numbers(section: Section) -> None:
    for field, bounds in _ranges(type(section)).items():
        value = getattr(section, field)
        for name, number in _numbers(field, value):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"`{name}` must be a finite number, got {number}")
            if not isinstance(value, Mapping) and (problem := bounds.problem(number)):
                raise ValueError(f"`{name}` {problem}")


@functools.cache
def _ranges(kind: type[Section]) -> dict[str, Range]:
    """Of each field. msgspec evaluates the annotations of all fields whenever it is asked for them."""
    return {field.name: range_of(field.type) for field in msgspec.structs.fields(kind)}


def range_of(kind: Any) -> Range:
    """Of the type of a field, or of a member of its union."""
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is Annotated:
            return next((note for note in part.__metadata__ if isinstance(note, Range)), NUMBER)
    return NUMBER


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number in a field's value, with where it is."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _numbers(f"{name}[{index}]", inner)
