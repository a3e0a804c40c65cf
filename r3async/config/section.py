"""Base of every configuration section, with the ranges of its numbers."""

from __future__ import annotations

import difflib
import functools
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from r3async.untrusted import format_value


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and the fix."""


def did_you_mean(
    name: str,
    names: Iterable[str],
    otherwise: str = "",
    format_name: Callable[[str], str] = repr,
    cutoff: float = 0.4,
) -> str:
    """Return `did you mean 'x'?` for the nearest of `names`.

    Args:
        name: The unknown name.
        names: The valid names.
        otherwise: Returned if no name is similar enough.
        format_name: Formats the name in the answer.
        cutoff: Minimum similarity of a name, from 0 to 1.
    """
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"did you mean {format_name(found[0])}?" if found else otherwise


@dataclass(frozen=True)
class NumberRange:
    """Range of a number in a section: `field: Annotated[float, NumberRange(-1, 1)]`. Both ends are
    included, except the lower one with `excludes_low`."""

    low: float
    high: float
    excludes_low: bool = False

    def explain_violation(self, number: float) -> str:
        """Return why `number` is out of range, as a continuation of its name; ""
        if it is in range."""
        if self.excludes_low and number <= self.low:
            return f"must be greater than {self.low:,}, got {format_value(number)}"
        if number < self.low:
            return f"must be {self.low:,} or more, got {format_value(number)}"
        return (
            f"must be at most {self.high:,}, got {format_value(number)}"
            if number > self.high
            else ""
        )


DEFAULT_RANGE = NumberRange(0, 10**9)
"""Range of every number whose field declares none. Its upper end is 31 years in seconds, and clocks
of all libraries can wait that long."""

PositiveFloat = Annotated[float, NumberRange(0, 10**9, excludes_low=True)]
PositiveFraction = Annotated[float, NumberRange(0, 1, excludes_low=True)]
PositiveInt = Annotated[int, NumberRange(0, 10**9, excludes_low=True)]
UnitFraction = Annotated[float, NumberRange(0, 1)]
Port = Annotated[int, NumberRange(0, 65535)]
"""Port number; 0 stands for a free one."""
ByteCount = Annotated[int, NumberRange(0, 2**50, excludes_low=True)]
Seed = Annotated[int, NumberRange(0, 2**63 - 1)]
SignedFloat = Annotated[float, NumberRange(-(10**9), 10**9)]
"""A number that may be negative: a reward, or the weight of a term that may be a penalty."""


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections. Every number of every field is finite and in the field's `NumberRange`,
    whatever else a section checks.

    Numbers in tables (`env.args`) are finite; their valid ranges are not known here. No value in
    a table is None: `config.toml` has no null, so a resumed run would have another value there
    than it began with.
    """

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_tables(self)
        self.check_values()

    def check_values(self) -> None:
        """Check the section's values beyond their ranges, and convert them where needed.
        Raises `ValueError`."""


def flatten_section(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested sections as one table with dotted names."""
    found: dict[str, Any] = {}
    for key, value in section.items() if isinstance(section, dict) else ():
        found |= (
            flatten_section(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return found


def strip_range(annotation: Any) -> Any:
    """Return a field's type without its `NumberRange`."""
    return (
        typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    )


def _check_numbers(section: Section) -> None:
    for field, bounds in _field_ranges(type(section)).items():
        value = getattr(section, field)
        for name, number in _iter_numbers(field, value):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"`{name}` must be a finite number, got {number}")
            if not isinstance(value, Mapping):
                problem = bounds.explain_violation(number)
                if problem:
                    raise ValueError(f"`{name}` {problem}")


def _check_tables(section: Section) -> None:
    for field in type(section).__struct_fields__:
        value = getattr(section, field)
        if isinstance(value, Mapping):
            name = next(_find_unset(field, value), "")
            if name:
                raise ValueError(
                    f"`{name}` is None, which the run's `config.toml` has no word for: leave it "
                    "out, or give another value"
                )


def _find_unset(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted name of every None in a table."""
    if value is None:
        yield name
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _find_unset(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _find_unset(f"{name}[{index}]", inner)


@functools.cache
def _field_ranges(kind: type[Section]) -> dict[str, NumberRange]:
    """Return the range of each field. Cached, as msgspec evaluates the annotations of all fields at
    every call of `fields`."""
    return {field.name: find_range(field.type) for field in msgspec.structs.fields(kind)}


def find_range(annotation: Any) -> NumberRange:
    """Return the range of the type of a field, or of a member of its union."""
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is Annotated:
            return next(
                (note for note in part.__metadata__ if isinstance(note, NumberRange)), DEFAULT_RANGE
            )
    return DEFAULT_RANGE


def _iter_numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield every number in a field's value, with its dotted name."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iter_numbers(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _iter_numbers(f"{name}[{index}]", inner)
