"""Values of rows as plain data, which is what JSON can hold: a row is then the same from
every kind of file."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from r3async.untrusted import format_value


def to_plain_value(value: Any) -> Any:
    """Return a value of Python, NumPy or Arrow as text, numbers, truth values, None,
    lists and dicts.

    A `Decimal` becomes the number that JSON would have in its place, a date or time its ISO
    text, and bytes become base64. Raises `ValueError` for any other object, and for a key
    that is no text.
    """
    match value:
        case None | bool():
            return value
        case str():
            return str(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {_require_text_key(key): to_plain_value(inner) for key, inner in value.items()}
        case list() | tuple():
            return [to_plain_value(inner) for inner in value]
        case Decimal():
            number = float(value)
            return (
                int(value)
                if math.isfinite(number) and value == value.to_integral_value()
                else number
            )
        case datetime() | date() | time():
            return value.isoformat()
        case UUID():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
    to_list = getattr(value, "tolist", None)  # NumPy's numbers and arrays
    if to_list is None:
        raise ValueError(f"a {type(value).__name__} is no value of a row: {format_value(value)}")
    return to_plain_value(to_list())


def _require_text_key(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError(f"the key {format_value(key)} of an object is no text")
    return str(key)
