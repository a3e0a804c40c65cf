"""Token tables on the wire: what a header says of one, and the parts of frames that hold its columns. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from r3async.data.packed import WORD, Form, PackedRoutes, pack_routes, packed_size
from r3async.data.records import Column, Kept, Schema, TokenTable, dtype_name
from r3async.data.supports import Supports
from r3async.transport.codec import Block, Parts, WireError, block_of, decode, little_endian, pack, raw_bytes, unpack

MAX_DIM = 2**24
"""Size of one dimension of a column."""
MAX_INNER = 8
MAX_LAYOUTS = 2**14
"""Bytes of the layouts of a table's columns: they are kept, to be read once."""

Dim = Annotated[int, Meta(ge=0, le=MAX_DIM)]


class Layout(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A column of a table, but for its number of rows. `inner`: its other dimensions; `form` and `bits`: see `PackedRoutes`.

    A bool column is declared `bool` and travels as one byte, 0 or 1, a value.
    """

    column: str
    dtype: str
    inner: Annotated[tuple[Dim, ...], Meta(max_length=MAX_INNER)] = ()
    form: Form = "plain"
    bits: Annotated[int, Meta(ge=0, le=16)] = 0


class TableHead(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What stands for a table in the body. `columns`: its layouts, in msgpack: tables that are alike have the same bytes there,
    which are read once. `packed`: bytes of the block of its compressible columns; `sets`: of each column of sets."""

    rows: Dim
    columns: Annotated[bytes, Meta(max_length=MAX_LAYOUTS)]
    packed: Annotated[int, Meta(ge=0)]
    sets: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_INNER)] = ()


class Raw(NamedTuple):
    """A column that has a part of its own. `dtype`: little-endian; `row_bytes`: as it is when it is plain."""

    name: str
    dtype: np.dtype
    inner: tuple[int, ...]
    row_bytes: int
    form: Form
    bits: int


class Plan(NamedTuple):
    """How tables of certain layouts are read and written. `names`: in the order of the schema; `block`: of compressible ones;
    `sets`: names of the columns of sets."""

    names: tuple[str, ...]
    raw: tuple[Raw, ...]
    block: Block
    sets: tuple[str, ...]


def encode_table(table: TokenTable, schema: Schema, routes: Form, parts: list[bytes | memoryview]) -> TableHead:
    """Appends the columns to `parts`: the raw ones, the sets, then the packed block. Raises `WireError` for a bool that is
    neither 0 nor 1."""
    columns, described = dict(table.kept()), []
    for name, column in columns.items():
        if schema.columns[name].choices and isinstance(column, np.ndarray):
            columns[name] = column = pack_routes(column, routes)
        form = (column.form, column.bits) if isinstance(column, PackedRoutes) else ("plain", 0)
        described.append((name, dtype_name(column.dtype), column.shape[1:], *form))
    plan, layouts = _described(tuple(described), schema)
    for raw in plan.raw:
        column = columns[raw.name]
        data = raw_bytes(column if isinstance(column, np.ndarray) else column.data)
        if raw.dtype.kind == "b":
            _check_bool(data, raw.name)
        parts.append(data)
    sets = [raw_bytes(table[name].encode()) for name in plan.sets]
    parts += sets
    packed = b""
    if plan.block.columns:
        packed = pack({name: table[name] for name, _, _ in plan.block.columns}, plan.block)
        parts.append(packed)
    return TableHead(len(table), layouts, len(packed), tuple(map(len, sets)))


def decode_table(value: Any, schema: Schema, parts: Parts) -> TokenTable:
    """The table that `value` stands for, of the next of the `parts`. Raises `WireError`."""
    try:
        head = msgspec.convert(value, TableHead)
    except msgspec.ValidationError as error:
        raise WireError(f"table layout: {error}") from error  # So that msgspec adds where the table is.
    rows, plan = head.rows, _plan(head.columns, schema)
    columns: dict[str, Kept] = {raw.name: _column(raw, rows, parts) for raw in plan.raw}
    if len(head.sets) != len(plan.sets):
        raise WireError(f"{len(plan.sets)} columns of sets come in {len(head.sets)} parts")
    # The first column is raw and is here, so what is unpacked is bounded by the bytes that really arrived.
    for name, size in zip(plan.sets, head.sets, strict=True):
        data = parts.take(size, name)
        try:
            columns[name] = Supports.decode(rows, data)
        except ValueError as error:
            raise WireError(f"column {name!r}: {error}") from error
    if plan.block.columns:
        columns |= unpack(parts.take(head.packed, "the packed columns"), plan.block, rows)
    return TokenTable.of_checked({name: columns[name] for name in plan.names}, rows, schema)


def describe(value: Any, schema: Schema) -> Iterator[tuple[str, int]]:
    """What each part of the table that `value` stands for holds, and its bytes. Raises `ValueError` if it stands for none."""
    head = msgspec.convert(value, TableHead)
    plan = _plan(head.columns, schema)
    for raw in plan.raw:
        shape = (head.rows, *raw.inner)
        form = "" if raw.form == "plain" else f" ({raw.form}, {raw.bits} bits)"
        yield f"{raw.name} {raw.dtype.name} {list(shape)}{form}", _raw_size(raw, head.rows)
    for name, size in zip(plan.sets, head.sets, strict=False):
        yield f"{name} [{head.rows}] (sets)", size
    if plan.block.columns:
        named = {name: dtype.name for name, dtype, _ in plan.block.columns}
        yield ", ".join(f"{name} {named[name]}" for name in plan.names if name in named) + " (packed)", head.packed


def _raw_size(raw: Raw, rows: int) -> int:
    return rows * raw.row_bytes if raw.form == "plain" else packed_size(raw.form, raw.bits, (rows, *raw.inner))


def _column(raw: Raw, rows: int, parts: Parts) -> np.ndarray | PackedRoutes:
    data = parts.take(_raw_size(raw, rows), raw.name)
    if raw.form != "plain":
        words = np.ndarray(len(data) // WORD, np.uint64, data)
        return PackedRoutes(raw.form, raw.bits, (rows, *raw.inner), raw.dtype, _aligned(words).view(np.uint8))
    if raw.dtype.kind == "b":
        _check_bool(data, raw.name)
    return _aligned(np.ndarray((rows, *raw.inner), raw.dtype, data))


def _aligned(array: np.ndarray) -> np.ndarray:
    """ZeroMQ hands out small messages as slices of one receive buffer, at any address."""
    return array if array.flags.aligned else array.copy()


def _check_bool(data: memoryview, name: str) -> None:
    if np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise WireError(f"bool column {name!r} has a byte that is neither 0 nor 1")


@functools.lru_cache(maxsize=64)
def _described(described: tuple[tuple[Any, ...], ...], schema: Schema) -> tuple[Plan, bytes]:
    """The plan for columns of these layouts, and what the layouts are sent as."""
    layouts = msgspec.msgpack.encode([Layout(*of_one) for of_one in described])
    return _plan(layouts, schema), layouts


@functools.lru_cache(maxsize=64)
def _plan(layouts: bytes, schema: Schema) -> Plan:
    """Raises `WireError` for layouts that are not of the schema. Tables that are alike are judged once."""
    columns = decode(layouts, list[Layout], "table layout")
    names = [layout.column for layout in columns]
    if len(set(names)) != len(names):
        raise WireError(f"a column comes twice: {', '.join(names)}")
    raw: list[Raw] = []
    block: list[tuple[str, np.dtype]] = []
    sets: list[str] = []
    for layout in columns:
        declared, dtype = _declared(layout, schema), little_endian(layout.dtype)
        if declared.compressible:
            block.append((layout.column, dtype))
        elif declared.sets:
            sets.append(layout.column)
        else:
            size = math.prod(layout.inner) * dtype.itemsize
            raw.append(Raw(layout.column, dtype, layout.inner, size, layout.form, layout.bits))
    for at, (name, column) in enumerate(schema.columns.items()):
        if name not in names and (not column.optional or not at):
            raise WireError(f"column {name!r} is missing")
    return Plan(tuple(name for name in schema.columns if name in names), tuple(raw), block_of(block), tuple(sets))


def _declared(layout: Layout, schema: Schema) -> Column:
    """What the schema says of a column. A dtype is only ever made from a name that it declares. Raises `WireError`."""
    name, declared = layout.column, schema.columns.get(layout.column)
    if declared is None:
        raise WireError(f"unknown column {name!r}; the schema has {', '.join(schema.columns)}")
    if layout.dtype not in declared.dtypes:
        raise WireError(f"column {name!r} has dtype {layout.dtype!r}, expected {' or '.join(declared.dtypes)}")
    if len(layout.inner) != len(declared.inner):
        raise WireError(f"column {name!r} has {1 + len(layout.inner)} dimensions, not {1 + len(declared.inner)}")
    if layout.form == "plain":
        return declared
    if not declared.choices or layout.bits > 8 * np.dtype(layout.dtype).itemsize:
        raise WireError(f"column {name!r} of {layout.dtype} cannot come as {layout.form} of {layout.bits} bits")
    try:
        packed_size(layout.form, layout.bits, (1, *layout.inner))
    except ValueError as error:
        raise WireError(f"column {name!r}: {error}") from error
    return declared
