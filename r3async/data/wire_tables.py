"""Token tables on the wire: a table's header, and the frames that hold its columns. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from r3async.data.packed_routes import WORD_BYTES, PackedRoutes, RouteForm, pack_routes, packed_size
from r3async.data.supports import SupportSets
from r3async.data.tokens import Column, ColumnData, TokenSchema, TokenTable, dtype_name
from r3async.data.wire_frames import (
    BlockLayout,
    PartReader,
    WireError,
    array_bytes,
    decode_wire_struct,
    lay_out_block,
    little_endian_dtype,
    pack_columns,
    unpack_columns,
)

MAX_DIM_SIZE = 2**24
"""Maximum size of one dimension of a column."""
MAX_INNER_DIMS = 8
MAX_LAYOUT_BYTES = 2**14
"""Maximum bytes of the layouts of a table's columns. They are kept, so that equal ones
are read only once."""

DimSize = Annotated[int, Meta(ge=0, le=MAX_DIM_SIZE)]


class ColumnLayout(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Layout of a column of a table, except its number of rows.

    A bool column is declared `bool` and travels as one byte, 0 or 1, a value.

    Attributes:
        inner_shape: Sizes of the dimensions after the rows.
        form: Form in which routes are packed; see `PackedRoutes`.
        bits: Bits of an id in that form; see `PackedRoutes`.
    """

    column: str
    dtype: str
    inner_shape: Annotated[tuple[DimSize, ...], Meta(max_length=MAX_INNER_DIMS)] = ()
    form: RouteForm = "plain"
    bits: Annotated[int, Meta(ge=0, le=16)] = 0


class TableHeader(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Header that stands for a table in the body of a trajectory.

    Attributes:
        layouts: Layouts of its columns, in msgpack. Tables that are alike have the same bytes,
            which are read once.
        packed_bytes: Bytes of the block of its compressible columns.
        set_bytes: Bytes of each column of sets.
    """

    rows: DimSize
    layouts: Annotated[bytes, Meta(max_length=MAX_LAYOUT_BYTES)]
    packed_bytes: Annotated[int, Meta(ge=0)]
    set_bytes: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_INNER_DIMS)
    ] = ()


class RawColumn(NamedTuple):
    """A column that is a separate part.

    Attributes:
        dtype: Dtype, little-endian.
        row_bytes: Bytes of a row in the plain form.
    """

    name: str
    dtype: np.dtype
    inner_shape: tuple[int, ...]
    row_bytes: int
    form: RouteForm
    bits: int


class TablePlan(NamedTuple):
    """Plan by which tables of certain layouts are read and written.

    Attributes:
        column_names: Names of all columns, in the order of the schema.
        raw_columns: Columns that are separate parts.
        block: Layout of the compressible columns.
        set_columns: Names of the columns of sets.
    """

    column_names: tuple[str, ...]
    raw_columns: tuple[RawColumn, ...]
    block: BlockLayout
    set_columns: tuple[str, ...]


def encode_table(
    table: TokenTable, schema: TokenSchema, routes: RouteForm, parts: list[bytes | memoryview]
) -> TableHeader:
    """Append the columns of a table to `parts` (raw ones, sets, then the packed block), and return
    the table's header.

    Raises `WireError` for a bool that is neither 0 nor 1.
    """
    columns = dict(table.stored_items())
    described = []
    for name, column in columns.items():
        if schema.columns[name].holds_choices and isinstance(column, np.ndarray):
            columns[name] = column = pack_routes(column, routes)
        form = (column.form, column.bits) if isinstance(column, PackedRoutes) else ("plain", 0)
        described.append((name, dtype_name(column.dtype), column.shape[1:], *form))
    plan, layouts = _plan_columns(tuple(described), schema)
    for raw in plan.raw_columns:
        column = columns[raw.name]
        data = array_bytes(column if isinstance(column, np.ndarray) else column.data)
        if raw.dtype.kind == "b":
            _check_bool(data, raw.name)
        parts.append(data)
    sets = [array_bytes(table[name].encode()) for name in plan.set_columns]
    parts += sets
    packed = b""
    if plan.block.columns:
        packed = pack_columns({name: table[name] for name, _, _ in plan.block.columns}, plan.block)
        parts.append(packed)
    return TableHeader(len(table), layouts, len(packed), tuple(map(len, sets)))


def decode_table(value: Any, schema: TokenSchema, parts: PartReader) -> TokenTable:
    """Decode the table whose header is `value` from the next of the `parts`. Raises `WireError` if
    they do not fit."""
    try:
        head = msgspec.convert(value, TableHeader)
    except msgspec.ValidationError as error:
        # So that msgspec adds where the table is.
        raise WireError(f"table layout: {error}") from error
    rows = head.rows
    plan = _plan_layouts(head.layouts, schema)
    columns: dict[str, ColumnData] = {
        raw.name: _read_raw_column(raw, rows, parts) for raw in plan.raw_columns
    }
    if len(head.set_bytes) != len(plan.set_columns):
        raise WireError(
            f"{len(plan.set_columns)} columns of sets come in {len(head.set_bytes)} parts"
        )
    # The first column is raw and is here, so what is unpacked is bounded by the bytes
    # that really arrived.
    for name, size in zip(plan.set_columns, head.set_bytes, strict=True):
        data = parts.read_part(size, name)
        try:
            columns[name] = SupportSets.decode(rows, data)
        except ValueError as error:
            raise WireError(f"column {name!r}: {error}") from error
    if plan.block.columns:
        columns |= unpack_columns(
            parts.read_part(head.packed_bytes, "the packed columns"), plan.block, rows
        )
    return TokenTable.from_checked(
        {name: columns[name] for name in plan.column_names}, rows, schema
    )


def describe_table(value: Any, schema: TokenSchema) -> Iterator[tuple[str, int]]:
    """Yield the contents of each part of a table, as text, and its size in bytes.

    Raises `ValueError` if `value` is no table header.
    """
    head = msgspec.convert(value, TableHeader)
    plan = _plan_layouts(head.layouts, schema)
    for raw in plan.raw_columns:
        shape = (head.rows, *raw.inner_shape)
        form = "" if raw.form == "plain" else f" ({raw.form}, {raw.bits} bits)"
        yield f"{raw.name} {raw.dtype.name} {list(shape)}{form}", _raw_column_bytes(raw, head.rows)
    for name, size in zip(plan.set_columns, head.set_bytes, strict=False):
        yield f"{name} [{head.rows}] (sets)", size
    if plan.block.columns:
        named = {name: dtype.name for name, dtype, _ in plan.block.columns}
        yield (
            ", ".join(f"{name} {named[name]}" for name in plan.column_names if name in named)
            + " (packed)",
            head.packed_bytes,
        )


def _raw_column_bytes(raw: RawColumn, rows: int) -> int:
    return (
        rows * raw.row_bytes
        if raw.form == "plain"
        else packed_size(raw.form, raw.bits, (rows, *raw.inner_shape))
    )


def _read_raw_column(raw: RawColumn, rows: int, parts: PartReader) -> np.ndarray | PackedRoutes:
    data = parts.read_part(_raw_column_bytes(raw, rows), raw.name)
    if raw.form != "plain":
        words = np.ndarray(len(data) // WORD_BYTES, np.uint64, data)
        return PackedRoutes(
            raw.form,
            raw.bits,
            (rows, *raw.inner_shape),
            raw.dtype,
            _align_array(words).view(np.uint8),
        )
    if raw.dtype.kind == "b":
        _check_bool(data, raw.name)
    return _align_array(np.ndarray((rows, *raw.inner_shape), raw.dtype, data))


def _align_array(array: np.ndarray) -> np.ndarray:
    """Return the array aligned: ZeroMQ hands out small messages as slices of one receive
    buffer, at any address."""
    return array if array.flags.aligned else array.copy()


def _check_bool(data: memoryview, name: str) -> None:
    if np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise WireError(f"bool column {name!r} has a byte that is neither 0 nor 1")


@functools.lru_cache(maxsize=64)
def _plan_columns(
    columns: tuple[tuple[Any, ...], ...], schema: TokenSchema
) -> tuple[TablePlan, bytes]:
    """Return the plan for columns of these layouts, and the layouts as they are sent."""
    layouts = msgspec.msgpack.encode([ColumnLayout(*of_one) for of_one in columns])
    return _plan_layouts(layouts, schema), layouts


@functools.lru_cache(maxsize=64)
def _plan_layouts(layouts: bytes, schema: TokenSchema) -> TablePlan:
    """Return the plan for these layouts, cached, so that tables that are alike are checked once.

    Raises `WireError` for layouts that do not fit the schema.
    """
    columns = decode_wire_struct(layouts, list[ColumnLayout], "table layout")
    names = [layout.column for layout in columns]
    if len(set(names)) != len(names):
        raise WireError(f"a column comes twice: {', '.join(names)}")
    raw: list[RawColumn] = []
    block: list[tuple[str, np.dtype]] = []
    sets: list[str] = []
    for layout in columns:
        declared = _find_declaration(layout, schema)
        dtype = little_endian_dtype(layout.dtype)
        if declared.compressible:
            block.append((layout.column, dtype))
        elif declared.holds_sets:
            sets.append(layout.column)
        else:
            size = math.prod(layout.inner_shape) * dtype.itemsize
            raw.append(
                RawColumn(layout.column, dtype, layout.inner_shape, size, layout.form, layout.bits)
            )
    for at, (name, column) in enumerate(schema.columns.items()):
        if name not in names and (not column.optional or not at):
            raise WireError(f"column {name!r} is missing")
    return TablePlan(
        tuple(name for name in schema.columns if name in names),
        tuple(raw),
        lay_out_block(block),
        tuple(sets),
    )


def _find_declaration(layout: ColumnLayout, schema: TokenSchema) -> Column:
    """Return the schema's declaration of a column. Raises `WireError` if the layout
    does not fit it.

    A dtype is only ever made from a name that the schema declares.
    """
    name = layout.column
    declared = schema.columns.get(layout.column)
    if declared is None:
        raise WireError(f"unknown column {name!r}; the schema has {', '.join(schema.columns)}")
    if layout.dtype not in declared.dtypes:
        raise WireError(
            f"column {name!r} has dtype {layout.dtype!r}, expected {' or '.join(declared.dtypes)}"
        )
    if len(layout.inner_shape) != len(declared.inner_dims):
        raise WireError(
            f"column {name!r} has {1 + len(layout.inner_shape)} dimensions, not "
            f"{1 + len(declared.inner_dims)}"
        )
    if layout.form == "plain":
        return declared
    if not declared.holds_choices or layout.bits > 8 * np.dtype(layout.dtype).itemsize:
        raise WireError(
            f"column {name!r} of {layout.dtype} cannot come as {layout.form} of {layout.bits} bits"
        )
    try:
        packed_size(layout.form, layout.bits, (1, *layout.inner_shape))
    except ValueError as error:
        raise WireError(f"column {name!r}: {error}") from error
    return declared
