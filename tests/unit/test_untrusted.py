"""One decoder for all that comes from outside: whatever the bytes are, it is a value or one kind of error."""

import contextlib
import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.untrusted import (
    MAX_DEPTH,
    MalformedError,
    decode_json,
    decode_json_object,
    decode_msgpack,
    decode_python_json,
    decode_toml,
    decode_utf8,
    format_value,
    to_bounded_int,
    to_finite_float,
)


class Asked(msgspec.Struct):
    number: int = 0
    more: dict[str, float] = {}


WRONG_JSON = {
    "nothing": b"",
    "open brackets": b"[" * 100_000,
    "open objects": b'{"a":' * 100_000,
    "as deep as Python reads": b"[" * 900 + b"]" * 900,
    "deep in an object": b'{"more": ' + b"[" * 900 + b"]" * 900 + b"}",
    "an integer of 5,000 digits": b"1" * 5000,
    "a number that no float holds": b"1e400",
    "bytes that are no text": b'"\xff"',
    "half of a surrogate pair": b'"\\ud800"',
    "text that cannot be written": '"\ud800"',
    "a word of Python's": b"NaN",
    "two values": b"{} {}",
}


@pytest.mark.parametrize("data", WRONG_JSON.values(), ids=list(WRONG_JSON))
def test_what_is_no_json_is_one_kind_of_error(data):
    for decode in (decode_json, decode_json_object, lambda given: decode_json(given, Asked)):
        with pytest.raises(MalformedError) as found:
            decode(data)
        assert 0 < len(str(found.value)) < 300


def test_an_object_is_asked_for_by_name():
    assert decode_json_object(b'{"a": 1}') == {"a": 1}
    with pytest.raises(MalformedError, match="a JSON list where an object is expected"):
        decode_json_object(b"[1]")


def test_as_deep_as_it_reads_python_can_do_with_it_what_it_will():
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert msgspec.json.encode(decode_json(deep)).decode() == deep
    with pytest.raises(MalformedError, match=f"more than {MAX_DEPTH}"):
        decode_json(f"[{deep}]")
    with pytest.raises(MalformedError, match=f"more than {MAX_DEPTH}"):
        decode_python_json(f"[{deep}]")


class Carrying(msgspec.Struct):
    anything: Any = None


def test_what_a_struct_carries_is_no_deeper_than_what_stands_alone():
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert msgspec.json.encode(decode_json(f'{{"anything":{deep}}}', Carrying).anything).decode() == deep
    for kind, data in ((Carrying, f'{{"anything":[{deep}]}}'), (list[Carrying], f'[{{"anything":{deep}}}]')):
        with pytest.raises(MalformedError, match=f"more than {MAX_DEPTH}"):
            decode_json(data, kind)


def test_what_python_writes_may_have_numbers_that_json_has_not():
    assert math.isnan(decode_python_json('{"a": NaN}')["a"])
    assert decode_python_json(b'\xef\xbb\xbf{"a": [Infinity, "\\ud83d\\ude00"]}') == {"a": [math.inf, "\U0001f600"]}
    for data in (b"[" * 100_000, b"1" * 5000, b"\xff", '"\\ud800"', b"{"):
        with pytest.raises(MalformedError):
            decode_python_json(data)


WRONG_TOML = ["a = ", "a = " + "[" * 5000, "a = " + "{a=" * 5000, "a." * 5000 + "b = 1", "a = " + "1" * 5000]
WRONG_TOML += ["a = 0x" + "f" * 6000, "a = [1, { b = 0b" + "1" * 16000 + " }]", b"\xff", "a = 1\na = 2"]


@pytest.mark.parametrize("data", WRONG_TOML, ids=range(len(WRONG_TOML)))
def test_what_is_no_toml_is_one_kind_of_error(data):
    with pytest.raises(MalformedError):
        decode_toml(data)


def test_integers_of_toml_may_have_more_than_64_bits_for_a_setting_to_refuse_by_name():
    assert decode_toml(f"a = {2**70}\nb = [{-(2**63)}, 0.5]") == {"a": 2**70, "b": [-(2**63), 0.5]}


@pytest.mark.parametrize("data", [b"", b"\x91" * 5000, b"\xa1\xff", b"\x81\xa1\xff", b"\xc7", b"\xdd\xff\xff\xff\xff"])
def test_what_is_no_message_is_one_kind_of_error(data):
    for kind in (dict, list, Asked, Asked | None):
        with pytest.raises(MalformedError):
            decode_msgpack(data, kind)


def test_a_name_that_is_no_text_is_one_kind_of_error():
    assert decode_utf8("ä".encode()) == "ä"
    with pytest.raises(MalformedError, match="not UTF-8"):
        decode_utf8(b"\xff")


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60), st.from_regex(r'([\[{"\\u0-9eE.,:+\-d8]|NaN){0,60}')))
def test_nothing_but_one_kind_of_error_is_ever_raised(data):
    for decode in (decode_json, decode_python_json, decode_toml, lambda given: decode_json(given, Asked)):
        with contextlib.suppress(MalformedError):
            decode(data)


NUMBERS = [1, True, 0.5, -1e308, np.float32(0.5), np.int64(3), np.array(2.0), torch.tensor(0.25), Fraction(1, 4)]
NOT_FINITE = [math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**5000, np.float32("inf"), torch.tensor(math.nan)]
NO_NUMBERS = [None, "1.0", b"1", [1.0], {}, 1j, object(), torch.tensor([1.0, 2.0]), np.array([1.0, 2.0])]


@pytest.mark.parametrize("value", NUMBERS, ids=range(len(NUMBERS)))
def test_a_number_of_any_library_is_a_float(value):
    assert to_finite_float(value) == float(value)


@pytest.mark.parametrize("value", NOT_FINITE, ids=range(len(NOT_FINITE)))
def test_a_number_that_is_not_finite_is_refused_also_one_that_cannot_be_printed(value):
    with pytest.raises(ValueError, match="must be a finite number, not"):
        to_finite_float(value)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_what_is_no_number_is_refused_by_its_type(value):
    with pytest.raises(TypeError, match=f"a {type(value).__name__} where one number is expected"):
        to_finite_float(value)


def test_a_number_may_have_a_bound():
    assert to_finite_float(-1e15, max_size=1e15) == -1e15
    with pytest.raises(ValueError, match=r"must be at most 1e\+15 by size, not 1e\+308"):
        to_finite_float(1e308, max_size=1e15)


def test_a_whole_number_is_within_its_bounds_and_no_boolean():
    assert (to_bounded_int(0, 0, 5), to_bounded_int(np.int64(5), 0, 5)) == (0, 5)
    for value in (-1, 6, 2**70, 10**5000, True, 1.0, "1", None, math.nan):
        with pytest.raises(ValueError, match="must be a whole number from 0 to 5, not"):
            to_bounded_int(value, 0, 5)


def test_any_value_can_be_shown_in_a_message():
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert format_value("a") == "'a'"
    assert len(format_value("a" * 1000)) == 100
    assert format_value(10**5000) == "a int that cannot be printed"
    assert format_value(Odd()) == "a Odd that cannot be printed"
