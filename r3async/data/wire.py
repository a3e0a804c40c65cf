"""The wire format of trajectories: columns as bytes, rows in tables by schema, messages with a checksum. Pure."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import lz4.block
import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from r3async.data.packed import WORD_BYTES, PackedRoutes, RouteForm, pack_routes, packed_size
from r3async.data.supports import SupportSets
from r3async.data.tokens import SCHEMA, Column, ColumnData, TokenSchema, TokenTable, Trajectory, dtype_name
from r3async.untrusted import MalformedError, decode_msgpack
from r3async.world import MAX_FRAME

# Columns as bytes (raw, or packed together where they are nearly constant), frames in pieces, and the checksum. Pure.
#
# Bytes are little-endian. Packed columns come back bit for bit: they are compressed (LZ4), never rounded.


PIECE_BYTES = MAX_FRAME
"""Maximum bytes of a frame on the wire. Larger frames are cut into pieces, so that no more than this has to be accepted
from a peer that has not been admitted yet: ZeroMQ has one limit for all peers, from the first byte of a connection."""

T = TypeVar("T")

Frame = Any
"""Contiguous bytes: `bytes`, `memoryview`, or a `world.ReceivedFrame`."""


class WireError(ValueError):
    """Error for bytes, or a trajectory to encode, that do not fit the wire format; the message says where and why."""


IS_LITTLE_ENDIAN = sys.byteorder == "little"


@functools.cache
def little_endian_dtype(dtype: str | np.dtype) -> np.dtype:
    """Return the dtype in little-endian order, cached: making one in NumPy takes as long as reading a column."""
    return np.dtype(dtype).newbyteorder("<")


def decode_wire_struct(data: Any, kind: type[T], what: str, dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """Decode msgpack as a type. Raises `WireError`, and nothing else, for any other bytes; `what` names them in it."""
    try:
        return decode_msgpack(data, kind, dec_hook)
    except MalformedError as error:
        raise WireError(f"malformed {what}: {error}") from error


def array_bytes(array: np.ndarray) -> memoryview:
    """Return the array as little-endian bytes, without a copy if it has that layout already."""
    return _to_little_endian(array).reshape(-1).view(np.uint8).data


def compress_lz4(data: bytes) -> bytes:
    return lz4.block.compress(data, store_size=False) if data else b""


def decompress_lz4(block: bytes | memoryview, size: int) -> bytes:
    """Return exactly `size` decompressed bytes, or raise `WireError`; nothing larger is ever allocated."""
    try:
        data = lz4.block.decompress(block, uncompressed_size=size) if size else bytes(block)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise WireError(f"a packed block of {len(block)} bytes: {error}") from error
    if len(data) != size:
        raise WireError(f"a packed block has {len(data)} bytes, expected {size}")
    return data


class BlockLayout(NamedTuple):
    """Layout of a packed block, which holds columns of one value a token.

    Attributes:
        columns: Name of each column, its dtype (little-endian), and the bytes before it in a row of the block. Wide
            columns come first, so that each is aligned.
        row_bytes: Bytes of a row of the block.
        bool_count: Number of bool columns, which come last, so that they are checked together.
    """

    columns: tuple[tuple[str, np.dtype, int], ...]
    row_bytes: int
    bool_count: int


def lay_out_block(columns: Iterable[tuple[str, np.dtype]]) -> BlockLayout:
    """Return the layout of a block of columns, given by name and dtype."""
    ordered = sorted(columns, key=lambda column: (-column[1].itemsize, column[1].kind == "b"))
    offsets = list(itertools.accumulate((dtype.itemsize for _, dtype in ordered), initial=0))
    placed = [(name, little_endian_dtype(dtype), at) for (name, dtype), at in zip(ordered, offsets, strict=False)]
    return BlockLayout(tuple(placed), offsets[-1], sum(dtype.kind == "b" for _, dtype in ordered))


def pack_columns(columns: Mapping[str, np.ndarray], block: BlockLayout) -> bytes:
    """Return columns, `[rows]` each, as a packed block. Raises `WireError` for a bool that is neither 0 nor 1."""
    # `Any`: the type of an array does not say that it is a buffer. Making its `data` takes longer than reading it.
    laid: list[Any] = [_to_little_endian(columns[name]) for name, _, _ in block.columns]
    data = b"".join(laid)
    _check_bools(data, block)
    return compress_lz4(data)


def unpack_columns(packed: bytes | memoryview, block: BlockLayout, rows: int) -> dict[str, np.ndarray]:
    """Return the columns of a packed block by name, each `[rows]`, read-only and aligned.

    Nothing larger than they are is ever allocated. Raises `WireError` for bytes that do not hold exactly these columns.
    """
    data = decompress_lz4(packed, rows * block.row_bytes)
    _check_bools(data, block)
    return {name: np.ndarray(rows, dtype, data, rows * offset) for name, dtype, offset in block.columns}


def _check_bools(data: bytes, block: BlockLayout) -> None:
    if not block.bool_count or not data:
        return
    rows = len(data) // block.row_bytes
    values = np.frombuffer(data, np.uint8, offset=len(data) - rows * block.bool_count)
    if np.maximum.reduce(values) > 1:
        wrong = block.columns[int((values > 1).argmax()) // rows - block.bool_count][0]
        raise WireError(f"bool column {wrong!r} has a byte that is neither 0 nor 1")


def _to_little_endian(array: np.ndarray) -> np.ndarray:
    """Return the array C-contiguous and little-endian, itself if it already is."""
    if IS_LITTLE_ENDIAN and array.dtype.isnative and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, dtype=little_endian_dtype(array.dtype))


def compute_checksum(buffers: Iterable[Any]) -> int:
    """Return the XXH3 checksum, 64 bits, of all bytes in order."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


MAX_JOINED_BYTES = 2**15
"""Bytes up to which a part is copied into one frame with its neighbours, which costs less than a separate frame."""
FRAME_ALIGNMENT = 8


def align_offset(at: int) -> int:
    """Return the first offset from `at` on where an array may begin."""
    return -(-at // FRAME_ALIGNMENT) * FRAME_ALIGNMENT


def frame_parts(parts: Iterable[Frame], small_bytes: int = MAX_JOINED_BYTES) -> list[Frame]:
    """Return frames that hold these parts, one after the other.

    Parts of up to `small_bytes` are joined; each larger one is a frame as it is.
    """
    frames: list[Frame] = []
    small: list[Frame] = []
    for part in filter(len, parts):
        if len(part) <= small_bytes:
            # The part before it is padded, so that arrays are aligned in place.
            small += [bytes(-len(small[-1]) % FRAME_ALIGNMENT), part] if small else [part]
            continue
        if small:
            frames.append(b"".join(small))
            small = []
        frames.append(part)
    return [*frames, b"".join(small)] if small else frames


class PartReader:
    """A reader of the parts in frames of `frame_parts`, given the size of each part."""

    def __init__(self, frames: Sequence[memoryview]):
        self._frames, self._next = frames, 0
        self._frame, self._at = memoryview(b""), 0

    def read_part(self, size: int, what: str) -> memoryview:
        """Return the next part. Raises `WireError` if the frames do not have it; `what` is its name for the message."""
        if not size:
            return self._frame[:0]
        start = align_offset(self._at)
        if start >= len(self._frame):
            if self._next == len(self._frames):
                raise WireError(f"only {len(self._frames)} column frames, no frame for {what!r}")
            self._frame, start = self._frames[self._next], 0
            self._next += 1
        self._at = start + size
        part = self._frame[start : self._at]
        if len(part) < size:
            raise WireError(f"{what!r} takes {size} bytes, its frame has {len(part)}")
        return part

    @property
    def frame_index(self) -> int:
        """The index of the frame that holds the last part: 0 for the first frame."""
        return self._next - 1

    def check_end(self) -> None:
        """Raise `WireError` if anything is left."""
        if self._next < len(self._frames) or self._at < len(self._frame):
            raise WireError(
                f"{len(self._frames)} column frames, but the header describes {self._next}, and {self._at} bytes of the last"
            )


def split_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Return frames as they travel, in pieces.

    Each frame becomes consecutive views of `PIECE_BYTES` bytes, and then a shorter one, possibly empty, as its end.
    """
    pieces: list[Frame] = []
    for frame in frames:
        view = byte_view(frame)
        pieces += [view[at : at + PIECE_BYTES] for at in range(0, len(view) + 1, PIECE_BYTES)]
    return pieces


def join_pieces(pieces: Sequence[Frame]) -> list[Frame]:
    """Return the frames that `split_frames` cut into these pieces, read-only.

    Only a frame that was cut is copied. Raises `WireError` if the last frame has no end.
    """
    frames: list[Frame] = []
    parts: list[memoryview] = []
    for piece in pieces:
        parts.append(byte_view(piece))
        if len(parts[-1]) < PIECE_BYTES:
            frames.append(piece if len(parts) == 1 else b"".join(parts))
            parts.clear()
    if parts:
        raise WireError("the last frame has no end")
    return frames


def byte_view(frame: Frame) -> memoryview:
    """Return a frame as a view of bytes. Raises `WireError` if it is not contiguous bytes."""
    try:
        view = memoryview(frame)
        # An empty view cannot be cast.
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise WireError(f"a frame is contiguous bytes, not {type(frame).__name__}: {error}") from error


# Token tables on the wire: the header of a table, and the parts of frames that hold its columns. Pure.


MAX_DIM_SIZE = 2**24
"""Maximum size of one dimension of a column."""
MAX_INNER_DIMS = 8
MAX_LAYOUT_BYTES = 2**14
"""Maximum bytes of the layouts of a table's columns. They are kept, so that equal ones are read only once."""

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
        layouts: Layouts of its columns, in msgpack. Tables that are alike have the same bytes, which are read once.
        packed_bytes: Bytes of the block of its compressible columns.
        set_bytes: Bytes of each column of sets.
    """

    rows: DimSize
    layouts: Annotated[bytes, Meta(max_length=MAX_LAYOUT_BYTES)]
    packed_bytes: Annotated[int, Meta(ge=0)]
    set_bytes: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_INNER_DIMS)] = ()


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
    """Append the columns of a table to `parts` (raw ones, sets, then the packed block), and return the table's header.

    Raises `WireError` for a bool that is neither 0 nor 1.
    """
    columns, described = dict(table.stored_items()), []
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
    """Decode the table whose header is `value` from the next of the `parts`. Raises `WireError` if they do not fit."""
    try:
        head = msgspec.convert(value, TableHeader)
    except msgspec.ValidationError as error:
        raise WireError(f"table layout: {error}") from error  # So that msgspec adds where the table is.
    rows, plan = head.rows, _plan_layouts(head.layouts, schema)
    columns: dict[str, ColumnData] = {raw.name: _read_raw_column(raw, rows, parts) for raw in plan.raw_columns}
    if len(head.set_bytes) != len(plan.set_columns):
        raise WireError(f"{len(plan.set_columns)} columns of sets come in {len(head.set_bytes)} parts")
    # The first column is raw and is here, so what is unpacked is bounded by the bytes that really arrived.
    for name, size in zip(plan.set_columns, head.set_bytes, strict=True):
        data = parts.read_part(size, name)
        try:
            columns[name] = SupportSets.decode(rows, data)
        except ValueError as error:
            raise WireError(f"column {name!r}: {error}") from error
    if plan.block.columns:
        columns |= unpack_columns(parts.read_part(head.packed_bytes, "the packed columns"), plan.block, rows)
    return TokenTable.from_checked({name: columns[name] for name in plan.column_names}, rows, schema)


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
            ", ".join(f"{name} {named[name]}" for name in plan.column_names if name in named) + " (packed)",
            head.packed_bytes,
        )


def _raw_column_bytes(raw: RawColumn, rows: int) -> int:
    return rows * raw.row_bytes if raw.form == "plain" else packed_size(raw.form, raw.bits, (rows, *raw.inner_shape))


def _read_raw_column(raw: RawColumn, rows: int, parts: PartReader) -> np.ndarray | PackedRoutes:
    data = parts.read_part(_raw_column_bytes(raw, rows), raw.name)
    if raw.form != "plain":
        words = np.ndarray(len(data) // WORD_BYTES, np.uint64, data)
        return PackedRoutes(raw.form, raw.bits, (rows, *raw.inner_shape), raw.dtype, _align_array(words).view(np.uint8))
    if raw.dtype.kind == "b":
        _check_bool(data, raw.name)
    return _align_array(np.ndarray((rows, *raw.inner_shape), raw.dtype, data))


def _align_array(array: np.ndarray) -> np.ndarray:
    """Return the array aligned: ZeroMQ hands out small messages as slices of one receive buffer, at any address."""
    return array if array.flags.aligned else array.copy()


def _check_bool(data: memoryview, name: str) -> None:
    if np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise WireError(f"bool column {name!r} has a byte that is neither 0 nor 1")


@functools.lru_cache(maxsize=64)
def _plan_columns(columns: tuple[tuple[Any, ...], ...], schema: TokenSchema) -> tuple[TablePlan, bytes]:
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
        declared, dtype = _find_declaration(layout, schema), little_endian_dtype(layout.dtype)
        if declared.compressible:
            block.append((layout.column, dtype))
        elif declared.holds_sets:
            sets.append(layout.column)
        else:
            size = math.prod(layout.inner_shape) * dtype.itemsize
            raw.append(RawColumn(layout.column, dtype, layout.inner_shape, size, layout.form, layout.bits))
    for at, (name, column) in enumerate(schema.columns.items()):
        if name not in names and (not column.optional or not at):
            raise WireError(f"column {name!r} is missing")
    return TablePlan(
        tuple(name for name in schema.columns if name in names), tuple(raw), lay_out_block(block), tuple(sets)
    )


def _find_declaration(layout: ColumnLayout, schema: TokenSchema) -> Column:
    """Return the schema's declaration of a column. Raises `WireError` if the layout does not fit it.

    A dtype is only ever made from a name that the schema declares.
    """
    name, declared = layout.column, schema.columns.get(layout.column)
    if declared is None:
        raise WireError(f"unknown column {name!r}; the schema has {', '.join(schema.columns)}")
    if layout.dtype not in declared.dtypes:
        raise WireError(f"column {name!r} has dtype {layout.dtype!r}, expected {' or '.join(declared.dtypes)}")
    if len(layout.inner_shape) != len(declared.inner_dims):
        raise WireError(
            f"column {name!r} has {1 + len(layout.inner_shape)} dimensions, not {1 + len(declared.inner_dims)}"
        )
    if layout.form == "plain":
        return declared
    if not declared.holds_choices or layout.bits > 8 * np.dtype(layout.dtype).itemsize:
        raise WireError(f"column {name!r} of {layout.dtype} cannot come as {layout.form} of {layout.bits} bits")
    try:
        packed_size(layout.form, layout.bits, (1, *layout.inner_shape))
    except ValueError as error:
        raise WireError(f"column {name!r}: {error}") from error
    return declared


# Messages on the wire: trajectories as a header and raw frames, and the small control messages around them.
#
# A trajectory is `[header, frame, frame, ...]`: a msgpack header (schema fingerprint, checksum, every field of the
# trajectory, and a `TableHeader` in place of each token table), and then the columns of all tables as parts of frames:
# large ones are a frame each, small ones are joined (`frame_parts`). Each table has first its raw columns,
# little-endian, in the order of the layouts, routes perhaps in fewer bits (`data/packed.py`); then its columns of sets;
# then one part with all columns that are declared compressible (turn, version, mask, rewards), packed together
# (`pack_columns`). The names, dtypes and dimensions of columns come from the `TokenSchema` alone, so a column added
# there travels without a change here.
#
# Large raw columns are not copied in either direction: encoded frames are views of the trajectory's arrays, decoded
# arrays are read-only views of the frames. Both directions checksum the payload, so call them off the event loop when
# it is large.


WIRE_VERSION = 8
"""Version of the wire format. It changes when an older peer would misread a message; both ends must have the same."""
MAX_HEADER_BYTES = 4 * 2**20
"""Maximum bytes of a trajectory's header. The preview text is the part of it that grows."""
MAX_CONTROL_BYTES = PIECE_BYTES
CRC_BYTES = 4
MAX_ID_CHARS = 100
MAX_TRAJECTORY_FRAMES = 4096
"""Maximum number of frames of a trajectory."""
MAX_DELIVERY_ITEMS = 32
"""Maximum number of trajectories in one message."""
MAX_SHARED_BYTES = PIECE_BYTES // 2
"""Maximum bytes of the frames of several trajectories in one message: they travel as one piece."""


class TrajectoryHeader(msgspec.Struct, tag="trajectory", tag_field="kind", frozen=True, forbid_unknown_fields=True):
    """First frame of a trajectory.

    Attributes:
        checksum: Checksum of `packed` as it is here, and then of every column frame, in order (`compute_checksum`).
        nbytes: Bytes of the body when it is unpacked.
        packed: Body of the trajectory, packed.
    """

    wire: int
    schema: str
    checksum: int
    nbytes: Annotated[int, Meta(ge=1, le=MAX_HEADER_BYTES)]
    packed: bytes

    @property
    def body(self) -> bytes:
        """The trajectory in msgpack, with headers in place of tables. Raises `WireError` if it cannot be unpacked."""
        return decompress_lz4(self.packed, self.nbytes)


def encode_trajectory_header(body: bytes, frames: Sequence[Frame], schema: TokenSchema = SCHEMA) -> bytes:
    """Return the header for a body and the column frames that follow it."""
    packed = compress_lz4(body)
    header = TrajectoryHeader(WIRE_VERSION, schema.fingerprint, compute_checksum([packed, *frames]), len(body), packed)
    return msgspec.msgpack.encode(header)


class InvalidTrajectoryError(WireError):
    """Error for a trajectory that arrived intact, checksum included, with values that no trajectory may have.

    It does not help to send it again.
    """


class _AnyVersionHeader(msgspec.Struct):
    """The part of a header that all wire versions share."""

    wire: int


def read_trajectory_header(frame: Frame) -> TrajectoryHeader:
    """Return the header in a frame.

    Raises `WireError` if the frame holds no header, or one of another version, which may have other fields.
    """
    view = byte_view(frame)
    try:
        header = decode_wire_struct(view, TrajectoryHeader, "header")
    except WireError:
        _check_wire_version(decode_wire_struct(view, _AnyVersionHeader, "header").wire)
        raise
    _check_wire_version(header.wire)
    return header


def _check_wire_version(version: int) -> None:
    if version != WIRE_VERSION:
        raise WireError(f"wire version {version}, expected {WIRE_VERSION}")


def encode_trajectory(
    trajectory: Trajectory, schema: TokenSchema = SCHEMA, *, routes: RouteForm = "plain"
) -> list[bytes | memoryview]:
    """Return the header and column frames of a trajectory whose tables have `schema`.

    Columns of choices are encoded in the form `routes`. The frames alias the trajectory's arrays: do not change them
    while the frames are in use. Raises `WireError` for anything that `decode_trajectory` would refuse at the other end.
    """
    _check_trajectory_values(trajectory)
    parts: list[bytes | memoryview] = []

    def lay_out(value: Any) -> Any:
        if isinstance(value, np.generic):  # Environments return NumPy scalars as rewards.
            return value.item()
        if not isinstance(value, TokenTable):
            raise WireError(f"a {type(value).__name__} cannot be sent")
        if value.schema is not schema and value.schema.fingerprint != schema.fingerprint:
            raise WireError(f"a table has schema {value.schema.fingerprint}, the connection has {schema.fingerprint}")
        return encode_table(value, schema, routes, parts)

    try:
        body = msgspec.msgpack.encode(trajectory, enc_hook=lay_out)
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"trajectory {trajectory.trajectory_id!r} cannot be encoded: {error}") from error
    if len(body) > MAX_HEADER_BYTES:
        raise WireError(f"the header takes {len(body)} bytes, more than {MAX_HEADER_BYTES}: shorten the preview")
    frames = frame_parts(parts)
    return [encode_trajectory_header(body, frames, schema), *frames]


def decode_trajectory(frames: Sequence[Frame], schema: TokenSchema = SCHEMA) -> Trajectory:
    """Decode the trajectory in `frames`.

    Its arrays are read-only views that keep the frames alive; routes that were packed stay packed. Raises `WireError`,
    and nothing else, for any bytes that are not exactly one trajectory of `schema`. It does not check whether the
    trajectory can be trained: see `schedule.validation`.
    """
    views = [byte_view(frame) for frame in frames]
    if not views:
        raise WireError("a trajectory has at least a header frame")
    header = read_trajectory_header(views[0])
    if header.schema != schema.fingerprint:
        raise WireError(
            f"schema {header.schema!r}, expected {schema.fingerprint!r}: both ends must run the same columns"
        )
    parts = PartReader(views[1:])
    trajectory = decode_wire_struct(
        header.body, Trajectory, "trajectory", lambda _, head: decode_table(head, schema, parts)
    )
    parts.check_end()
    found = compute_checksum([header.packed, *views[1:]])
    if found != header.checksum:
        raise WireError(f"checksum {found:016x}, but the header says {header.checksum:016x}")
    try:
        _check_trajectory_values(trajectory)
    except WireError as error:
        raise InvalidTrajectoryError(str(error)) from error
    return trajectory


def decoded_bytes(frames: Sequence[Frame], trajectory: Trajectory) -> int:
    """Return the bytes that a trajectory takes in memory while its raw columns are views of `frames`.

    They are those of the frames, and of everything that was unpacked.
    """
    unpacked = read_trajectory_header(frames[0]).nbytes
    for sample in trajectory.samples:
        columns = sample.table.schema.columns
        unpacked += sum(column.nbytes for name, column in sample.table.stored_items() if columns[name].compressible)
    return sum(map(len, frames)) + unpacked


def _check_trajectory_values(trajectory: Trajectory) -> None:
    """Check the values that types do not constrain and no other code checks. Raises `WireError`."""
    if not 0 < len(trajectory.trajectory_id) <= MAX_ID_CHARS:
        raise WireError(f"a trajectory id has 1 to {MAX_ID_CHARS} characters, not {len(trajectory.trajectory_id)}")
    if not (math.isfinite(trajectory.started_at) and math.isfinite(trajectory.finished_at)):
        raise WireError("started_at or finished_at is not finite")


# Control messages. Those of a sender carry its session, a random name for one HELLO, which distinguishes them from
# messages queued before a reconnection. They are maps, not arrays, so that a field can be added without being misread.

BoundedId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
SessionId = Annotated[str, Meta(max_length=64)]


class ControlBase(msgspec.Struct, tag_field="kind", tag=str.lower):
    """Base of control messages: one frame of msgpack, distinguished by `kind`, and then its CRC-32, little-endian."""


class Hello(ControlBase):
    """Sender's message that opens a session, repeated as a heartbeat. The answer is `Welcome`, or a final `Refusal`."""

    session: SessionId
    sender_id: BoundedId
    run_id: str
    schema: str
    wire: int = WIRE_VERSION


class Welcome(ControlBase):
    """Receiver's message that the session is open. It answers each HELLO, and goes to all senders when `until` changes.

    Attributes:
        epoch: Incarnation of the receiver; a new one means that the receiver was restarted.
        until: Group before which trajectories are accepted now.
        at_once: Bytes that may be in flight from this sender; or one trajectory, if that is larger.
        in_hand: Trajectories of this sender that arrived and are not answered yet (they are being written, say).
    """

    session: SessionId
    epoch: str
    until: int
    at_once: int
    in_hand: list[str] = []


class Refusal(ControlBase):
    """Receiver's message that it refuses this session.

    If `final`, it refuses every session of this sender; otherwise the sender may send HELLO again.
    """

    session: SessionId
    reason: str
    final: bool


class DeliveryItem(msgspec.Struct, array_like=True, frozen=True):
    """Description of a trajectory in a message.

    Attributes:
        nbytes: Bytes that it takes in memory once it is decoded (`decoded_bytes`).
        frames: Bytes of each of its frames.
    """

    trajectory_id: BoundedId
    group_index: int
    nbytes: Annotated[int, Meta(ge=0)]
    frames: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_TRAJECTORY_FRAMES)]


class Deliver(ControlBase):
    """Sender's message that delivers trajectories.

    All their frames follow, small ones joined (`frame_parts`), cut into pieces (`split_frames`); those of several
    trajectories are one piece. Each trajectory is accepted or refused separately.
    """

    session: SessionId
    items: Annotated[list[DeliveryItem], Meta(min_length=1, max_length=MAX_DELIVERY_ITEMS)]

    def split_by_item(self, pieces: Sequence[Frame]) -> list[Sequence[Frame]]:
        """Return the pieces of each item. Raises `WireError` if they do not fit the items.

        They are copied out of the piece that several items share, so that none keeps the memory of another alive.
        """
        if len(self.items) == 1:
            return [pieces]
        if len(pieces) != 1:
            raise WireError(f"{len(self.items)} trajectories in {len(pieces)} pieces")
        view, ends = byte_view(pieces[0]), [0]
        for item in self.items:
            end = ends[-1]
            for size in filter(None, item.frames):
                end = align_offset(end) + size
            ends.append(end)
        if ends[-1] != len(view):
            raise WireError(f"{len(view)} bytes of several trajectories that have {ends[-1]}")
        return [
            [bytes(view[align_offset(start) : end])] if start < end else [] for start, end in itertools.pairwise(ends)
        ]


def encode_delivery(session: str, items: Sequence[DeliveryItem], frames: Iterable[Sequence[Frame]]) -> list[Frame]:
    """Return the message that delivers trajectories, whose frames are `frames`."""
    # The frames of several trajectories have to be one piece.
    payload = frame_parts(itertools.chain.from_iterable(frames), PIECE_BYTES if len(items) > 1 else MAX_JOINED_BYTES)
    return [encode_control(Deliver(session, list(items))), *split_frames(payload)]


def join_item_frames(item: DeliveryItem, pieces: Sequence[Frame]) -> list[Frame]:
    """Return the frames of a trajectory from its own pieces.

    They are views of the pieces unless one was cut. Raises `WireError` if they do not fit the item.
    """
    parts = PartReader([byte_view(frame) for frame in join_pieces(pieces)])
    frames: list[Frame] = [parts.read_part(size, f"frame {i}") for i, size in enumerate(item.frames)]
    parts.check_end()
    return frames


class Ack(ControlBase):
    """Receiver's message that it has these trajectories now. The sender forgets them."""

    ids: list[str]


class Reject(ControlBase):
    """Receiver's message that it has not accepted a trajectory.

    Attributes:
        trajectory_id: Id of the trajectory; empty if the message was too broken to have one.
        again: `never`: it will never be accepted. `damaged`: it is not what a sender of this schema makes, so it
            changed on its way, and may be sent again. `later`: it may be sent again as soon as its group is before
            `Welcome.until`.
    """

    trajectory_id: str
    reason: str
    again: Literal["never", "damaged", "later"] = "never"


ControlMessage = Hello | Welcome | Refusal | Deliver | Ack | Reject


def encode_control(message: ControlMessage) -> bytes:
    return append_control_crc(msgspec.msgpack.encode(message))


def append_control_crc(body: bytes) -> bytes:
    """Append the CRC-32 to a message.

    A changed bit could turn one valid message into another, and TCP's own checksum, of 16 bits, misses some changes.
    """
    return body + zlib.crc32(body).to_bytes(CRC_BYTES, "little")


def decode_control(frame: Frame) -> ControlMessage:
    """Decode a control message. Raises `WireError`, and nothing else, for any other bytes."""
    view = byte_view(frame)
    if len(view) > MAX_CONTROL_BYTES:
        raise WireError(f"a control message of {len(view)} bytes, more than {MAX_CONTROL_BYTES}")
    body, crc = view[:-CRC_BYTES], view[-CRC_BYTES:]
    if zlib.crc32(body) != int.from_bytes(crc, "little") or not body:
        raise WireError("malformed control message: its checksum is wrong, or it is of another version of the protocol")
    try:
        return decode_msgpack(body, ControlMessage)
    except MalformedError as error:
        raise WireError(f"malformed control message: {error}") from error
