"""Decoders for data from outside: text of models, agents and strangers, rows, files
of runs, settings.

The underlying decoders raise many kinds of errors, depending on the bytes: their own, `ValueError`
for an integer of 5,000 digits, `UnicodeDecodeError`, `OverflowError`, and `RecursionError` for a
thousand open brackets. The functions here raise a single one, `MalformedError`. `dev/lint/seam.py`
refuses direct calls of the others.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import msgspec

MAX_DEPTH = 128
"""Maximum nesting depth of lists and objects. Python reads nearly a thousand levels, but then fails
at a later operation (a copy, a comparison, a template, JSON again), depending on how deep its own
stack is by then."""
MIN_UNPRINTABLE_INT = 10**sys.int_info.default_max_str_digits
"""Smallest integer that Python refuses to print, though it reads such integers in hexadecimal."""

T = TypeVar("T")
EncodedData = bytes | bytearray | memoryview | str

_DECODE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, MemoryError)
"""Errors that decoders raise for malformed data; msgspec's own errors, and Unicode errors,
are `ValueError`s."""


class MalformedError(ValueError):
    """Bytes or text in the wrong format; the message gives the reason."""


@overload
def decode_json(data: EncodedData) -> Any: ...
@overload
def decode_json(data: EncodedData, kind: type[T]) -> T: ...
def decode_json(data: EncodedData, kind: Any = Any) -> Any:
    """Return the JSON value in `data`, as a `kind`. Raises `MalformedError`, and nothing else,
    for any other data."""
    try:
        value = msgspec.json.decode(data, type=kind)
    except _DECODE_ERRORS as error:
        raise MalformedError(_error_reason(error)) from error
    _check_depth(value)
    return value


def decode_json_object(data: EncodedData) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises `MalformedError`, and nothing else,
    for any other data."""
    value = decode_json(data)
    if not isinstance(value, dict):
        raise MalformedError(
            f"a JSON {_JSON_TYPE_NAMES.get(type(value), 'value')} where an object is expected"
        )
    return value


def decode_python_json(data: bytes | str) -> Any:
    """Return the JSON value in data that Python may have written, such as a `config.json`,
    or a file of rows: `NaN` and `Infinity` are accepted as numbers. Raises `MalformedError`,
    and nothing else."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:
            # Half of a surrogate pair is no text that a tokenizer takes.
            json.dumps(value, ensure_ascii=False).encode()
    except _DECODE_ERRORS as error:
        raise MalformedError(_error_reason(error)) from error
    _check_depth(value)
    return value


def decode_model_config(data: bytes) -> Any:
    """Return the value of a model's `config.json`; see `decode_python_json`.

    Where a number is not finite, transformers writes an object, as `{"__float__": "Infinity"}`, and
    reads the number again (`PreTrainedConfig`, 5.24).
    """
    return _restore_floats(decode_python_json(data))


def _restore_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_restore_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("NaN", "Infinity", "-Infinity"):
        return float(value["__float__"])
    return {name: _restore_floats(each) for name, each in value.items()}


@overload
def decode_msgpack(
    data: EncodedData, kind: type[T], hook: Callable[[type, Any], Any] | None = None
) -> T: ...
@overload
def decode_msgpack(
    data: EncodedData, kind: Any, hook: Callable[[type, Any], Any] | None = None
) -> Any: ...
def decode_msgpack(data: Any, kind: Any, hook: Callable[[type, Any], Any] | None = None) -> Any:
    """Return the msgpack value in `data`, as a `kind`. Raises `MalformedError`, and nothing else,
    for any other data."""
    try:
        if hook is not None:
            return msgspec.msgpack.decode(data, type=kind, dec_hook=hook)
        return _msgpack_decoder(kind).decode(data)
    except _DECODE_ERRORS as error:
        raise MalformedError(_error_reason(error)) from error


@functools.cache
def _msgpack_decoder(kind: Any) -> Any:
    """Return the cached decoder of a kind of message. Otherwise msgspec would inspect each member
    of a union again for every message."""
    return msgspec.msgpack.Decoder(kind)


def decode_toml(data: bytes | str) -> dict[str, Any]:
    """Return the tables of a TOML document. Raises `MalformedError`, and nothing else,
    for any other data."""
    try:
        value = tomllib.loads(data if isinstance(data, str) else data.decode())
    except _DECODE_ERRORS as error:
        raise MalformedError(_error_reason(error)) from error
    _check_depth(value)
    if any(
        isinstance(each, int) and abs(each) >= MIN_UNPRINTABLE_INT for each in _iter_leaves(value)
    ):
        raise MalformedError(
            f"an integer of more than {sys.int_info.default_max_str_digits} digits"
        )
    return value


def decode_utf8(data: bytes | bytearray) -> str:
    """Return UTF-8 data as text. Raises `MalformedError` for any other data."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"not UTF-8 text: {error}") from error


def _error_reason(error: BaseException) -> str:
    return (
        _TOO_DEEP_REASON
        if isinstance(error, RecursionError)
        else str(error) or type(error).__name__
    )


_TOO_DEEP_REASON = f"more than {MAX_DEPTH} lists and objects within each other"
_JSON_TYPE_NAMES = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    list: "list",
    type(None): "null",
}


def _check_depth(value: Any) -> None:
    """Raise `MalformedError` for a value that is nested too deep, also within the fields of
    structs. The value comes from decoders, whose lists and dictionaries are never subclasses."""
    level = [value] if _is_nested(value) else []
    for _ in range(MAX_DEPTH if level else 0):
        level = [inner for each in level for inner in _iter_inner(each) if _is_nested(inner)]
        if not level:
            return
    if level:
        raise MalformedError(_TOO_DEEP_REASON)


def _is_nested(value: Any) -> bool:
    return type(value) is dict or type(value) is list or isinstance(value, msgspec.Struct)


def _iter_inner(value: Any) -> Iterable[Any]:
    if isinstance(value, msgspec.Struct):
        return (getattr(value, name) for name in value.__struct_fields__)
    return value.values() if type(value) is dict else value


def _iter_leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _iter_leaves(inner)
    else:
        yield value


# -- numbers ---------------------------------------------------------------------------------------


def to_finite_float(value: object, max_size: float = sys.float_info.max) -> float:
    """Return a number of Python, NumPy or torch as a float. Raises `TypeError` for what is
    no number, such as a text or a list, and `ValueError` for a number that is not finite,
    or whose size is beyond `max_size`. The message continues a sentence that begins with
    the number's name."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text is no number")
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except Exception as error:  # whatever an object's own `__float__` raises
        raise TypeError(
            f"must be a finite number, not {format_value(value)}: a {type(value).__name__} where "
            "one number is expected"
        ) from error
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {format_value(value)}")
    if abs(number) > max_size:
        raise ValueError(f"must be at most {max_size:g} by size, not {format_value(value)}")
    return number


def to_bounded_int(value: object, low: int, high: int) -> int:
    """Return an integer of Python or NumPy from `low` to `high`; a boolean does not count as one.
    Raises `ValueError`, whose message continues a sentence that begins with the number's name."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise ValueError(f"must be a whole number from {low} to {high}, not {format_value(value)}")
    return number


def format_value(value: object, max_chars: int = 100) -> str:
    """Return the printed form of a value, in at most `max_chars` characters, even of a value that
    Python refuses to print."""
    try:
        text = repr(value)
    except Exception:  # an integer of 5,000 digits, and whatever an object's own `__repr__` raises
        return f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
