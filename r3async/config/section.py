"""Base of every configuration section: numbers within ranges, secrets, and expansion of short forms."""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from r3async.untrusted import format_value


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key and the fix."""


def did_you_mean(
    name: str, names: Iterable[str], otherwise: str = "", format_name: Callable[[str], str] = repr, cutoff: float = 0.4
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
    """Range of a number in a section: `field: Annotated[float, NumberRange(-1, 1)]`. Both ends are included, except the
    lower one with `excludes_low`."""

    low: float
    high: float
    excludes_low: bool = False

    def explain_violation(self, number: float) -> str:
        """Return why `number` is out of range, as a continuation of its name; "" if it is in range."""
        if self.excludes_low and number <= self.low:
            return f"must be greater than {self.low:,}, got {format_value(number)}"
        if number < self.low:
            return f"must be {self.low:,} or more, got {format_value(number)}"
        return f"must be at most {self.high:,}, got {format_value(number)}" if number > self.high else ""


DEFAULT_RANGE = NumberRange(0, 10**9)
"""Range of every number whose field declares none. Its upper end is 31 years in seconds, and clocks of all libraries
can wait that long."""

PositiveFloat = Annotated[float, NumberRange(0, 10**9, excludes_low=True)]
PositiveInt = Annotated[int, NumberRange(0, 10**9, excludes_low=True)]
UnitFraction = Annotated[float, NumberRange(0, 1)]
Port = Annotated[int, NumberRange(0, 65535)]
"""Port number; 0 stands for a free one."""
ByteCount = Annotated[int, NumberRange(0, 2**50, excludes_low=True)]
Seed = Annotated[int, NumberRange(0, 2**63 - 1)]
SignedFloat = Annotated[float, NumberRange(-(10**9), 10**9)]
"""A number that may be negative: a reward, or the weight of a term that may be a penalty."""


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections. Every number of every field is finite and in the field's `NumberRange`, whatever else a
    section checks.

    Numbers in tables (`env.args`) are finite; their valid ranges are not known here. No value in a table is None:
    `config.toml` has no null, so a resumed run would have another value there than it began with.
    """

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_tables(self)
        self.check_values()

    def check_values(self) -> None:
        """Check the section's values beyond their ranges, and convert them where needed. Raises `ValueError`."""


def flatten_section(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested sections as one table with dotted names."""
    found: dict[str, Any] = {}
    for key, value in section.items() if isinstance(section, dict) else ():
        found |= flatten_section(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def strip_range(annotation: Any) -> Any:
    """Return a field's type without its `NumberRange`."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _check_numbers(section: Section) -> None:
    for field, bounds in _field_ranges(type(section)).items():
        value = getattr(section, field)
        for name, number in _iter_numbers(field, value):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"`{name}` must be a finite number, got {number}")
            if not isinstance(value, Mapping) and (problem := bounds.explain_violation(number)):
                raise ValueError(f"`{name}` {problem}")


def _check_tables(section: Section) -> None:
    for field in type(section).__struct_fields__:
        value = getattr(section, field)
        if isinstance(value, Mapping) and (name := next(_find_unset(field, value), "")):
            raise ValueError(
                f"`{name}` is None, which the run's `config.toml` has no word for: leave it out, or give another value"
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
    """Return the range of each field. Cached, as msgspec evaluates the annotations of all fields at every call of
    `fields`."""
    return {field.name: find_range(field.type) for field in msgspec.structs.fields(kind)}


def find_range(annotation: Any) -> NumberRange:
    """Return the range of the type of a field, or of a member of its union."""
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is Annotated:
            return next((note for note in part.__metadata__ if isinstance(note, NumberRange)), DEFAULT_RANGE)
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


# -- secrets ---------------------------------------------------------------------------------------------------------

REDACTED = "***"
_REFERENCE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")


class Secret:
    """A text that is not written anywhere: it prints as `***`, and only `reveal` returns it.

    `$NAME` stands for the environment variable NAME of the process that reveals it. The reference itself is no
    secret, so it is shown, and a resumed run finds it again. Immutable.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str = ""):
        self._text = text

    def __repr__(self) -> str:
        return repr(self.redacted)

    def __str__(self) -> str:
        return self.redacted

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @property
    def variable_name(self) -> str:
        """The name of the environment variable that holds the secret; empty if it is given literally."""
        return self._text[1:] if _REFERENCE.fullmatch(self._text) else ""

    @property
    def is_lost(self) -> bool:
        """True if the secret was read from a file to which it had not been written."""
        return self._text == REDACTED

    @property
    def redacted(self) -> str:
        """The form that may be written and printed."""
        return self._text if self.variable_name or not self._text else REDACTED

    @property
    def raw_text(self) -> str:
        """The text, or the reference to it, for a process that will reveal it."""
        return self._text

    def reveal(self, setting: str) -> str:
        """Return the text. Raises `ConfigError` that names `setting` if the variable is not set, or the text was not
        kept."""
        refuse_lost_secret(self, setting)
        if not self.variable_name:
            return self._text
        try:
            return os.environ[self.variable_name]
        except KeyError:
            raise ConfigError(f"`{setting}` = {self._text!r}: there is no such environment variable") from None


def refuse_lost_secret(secret: Secret, setting: str) -> None:
    """Raise `ConfigError` for a secret that was left out of the file which this configuration comes from."""
    if secret.is_lost:
        raise ConfigError(
            f"`{setting}` is {REDACTED!r}: secrets are not written to files. Set it again, best as `{setting}=$NAME`, which "
            "names an environment variable"
        )


def reveal_secrets(value: Any, setting: str) -> Any:
    """Return plain data with the secrets in it revealed as by `Secret.reveal`."""
    if isinstance(value, Secret):
        return value.reveal(setting)
    if isinstance(value, Mapping):
        return {key: reveal_secrets(inner, f"{setting}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [reveal_secrets(inner, f"{setting}[{at}]") for at, inner in enumerate(value)]
    return value


def collect_secrets(data: Any, path: str = "") -> dict[str, Secret]:
    """Return every secret of a section, or of plain data, by its dotted key."""
    if isinstance(data, Secret):
        return {path: data}
    if isinstance(data, list):
        return {
            at: secret for n, inner in enumerate(data) for at, secret in collect_secrets(inner, f"{path}[{n}]").items()
        }
    fields = data if isinstance(data, Mapping) else getattr(data, "__struct_fields__", ())
    found: dict[str, Secret] = {}
    for name in fields:
        inner = data[name] if isinstance(data, Mapping) else getattr(data, name)
        found |= collect_secrets(inner, f"{path}.{name}" if path else str(name))
    return found


# Short forms of a configuration: `data` and `reward` at the top, and `[[env]]`, stand for `env.name` and `env.args`.


LABEL_PATTERN = re.compile(r"[A-Za-z0-9_-]+")
DATASET_ENV = "dataset"
"""Value of `env.name` for the user's own rows."""
MIX_ENV = "mix"
"""Value of `env.name` for several environments: `env.args` has a table for each, by its label."""
UNSET_WORD = "null"
"""Value that unsets a setting of a file or preset below: TOML has no null."""
SHORTHAND_KEYS = ("data", "reward")
"""Keys at the top that stand for `env.name` and `env.args` of a dataset."""


def merge_tables(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in overlay.items():
        old = out.get(key)
        out[key] = merge_tables(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return out


def expand_shorthand(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer (a file or the overrides) in which `data` and `reward` are expanded to the `env.name` and
    `env.args` that they stand for, and `[[env]]` likewise. A value "null" there becomes None, which unsets it."""
    if isinstance(entries := layer.get("env"), list):
        if both := next((key for key in SHORTHAND_KEYS if key in layer), ""):
            raise ConfigError(f"`{both}` beside [[env]]: set it in the entry that it is for")
        return {**layer, "env": _build_mix([_expand_entry(entry) for entry in entries])}
    given = {key: layer[key] for key in SHORTHAND_KEYS if key in layer}
    if not given:
        return dict(layer)
    rest = {key: value for key, value in layer.items() if key not in SHORTHAND_KEYS}
    _refuse_two_environments(given, rest.get("env"))
    data = given.pop("data", {})
    if data is None or data == UNSET_WORD:
        raise ConfigError("`data` cannot be unset: set `env.name`, which names an environment without rows")
    if isinstance(data, str):
        data = {"path": data}
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"`data` = {format_value(data)} must be a path, a section with `path` in it, or in Python rows: a list of "
            "dicts, or a datasets.Dataset"
        )
    if "reward" in data:
        raise ConfigError("`data.reward`: `reward` is set beside `data`, not in it")
    args = {key: None if value == UNSET_WORD else value for key, value in {**data, **given}.items()}
    return merge_tables(rest, {"env": {"name": DATASET_ENV, "args": args}})


def _refuse_two_environments(shorthand: Mapping[str, Any], env: Any) -> None:
    """Raise `ConfigError` if a layer has rows, and names an environment that is none of rows."""
    name = env.get("name") if isinstance(env, Mapping) else None
    if isinstance(name, str) and name.partition(":")[0] != DATASET_ENV:
        raise ConfigError(
            f"`{next(iter(shorthand))}` is for rows, and `env.name` = {name!r} is another environment: set one of the two"
        )


def _expand_entry(entry: Any) -> Any:
    """Return an entry of `[[env]]` with its `data` and `reward` expanded."""
    if not isinstance(entry, Mapping):
        return entry
    short = {key: entry[key] for key in SHORTHAND_KEYS if key in entry}
    rest = {key: value for key, value in entry.items() if key not in SHORTHAND_KEYS}
    return merge_tables(expand_shorthand(short)["env"], rest) if short else rest


def _build_mix(entries: Sequence[Any]) -> dict[str, Any]:
    """Return the section `env` that `[[env]]` stands for. Each entry is plain data, with `data` and `reward`
    expanded. Raises `ConfigError` that names the entry."""
    args: dict[str, Any] = {}
    for at, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"`env[{at}]` = {entry!r} must be a table: [[env]], with `name` in it")
        inner = {key: value for key, value in entry.items() if key != "label"}
        label = entry.get("label") or _derive_label(inner)
        if not isinstance(label, str) or not LABEL_PATTERN.fullmatch(label):
            raise ConfigError(f"`env[{at}].label` = {label!r} must be of letters, digits, `_` and `-`")
        if label in args:
            raise ConfigError(f"`env[{at}]`: two are called {label!r}; give each a `label` of its own")
        if not inner.get("name"):
            raise ConfigError(f"`env[{at}]`: which environment? Set its `name`, or `data`")
        args[label] = inner
    if not args:
        raise ConfigError("`env` = [] names no environment")
    return {"name": MIX_ENV, "args": args}


def _derive_label(entry: Mapping[str, Any]) -> str:
    name, args = str(entry.get("name", "")), entry.get("args", {})
    path = args.get("path", "") if isinstance(args, Mapping) else ""
    last = Path(path).stem if path else name.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9_-]", "-", last) or "-"
