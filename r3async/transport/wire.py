"""What goes over the wire: trajectories as a header and raw frames, and the small control messages around them.

A trajectory is `[header, frame, frame, ...]`: a msgpack header (schema fingerprint, checksum, every field of the
trajectory, and in place of each token table its layouts) and for each sample one raw little-endian frame a column, in
the order of the layouts, and then one frame with all columns that are declared compressible (turn, version, mask, rewards),
packed together by `codec.py`. Which columns there are, their dtypes and their dimensions come from the `Schema` alone,
so a column added there travels without a change here.

Raw columns are not copied in either direction: encoded frames are views of the trajectory's arrays, decoded arrays are
read-only views of the frames. Both directions checksum the payload, so call them off the event loop when it is large.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from r3async.data.records import SCHEMA, Column, Schema, TokenTable, Trajectory, dtype_name
from r3async.transport.codec import (
    PIECE,
    Frame,
    WireError,
    checksum,
    compress,
    decompress,
    little_endian,
    pack,
    raw_bytes,
    unpack,
    view_of,
)

WIRE_VERSION = 6
"""Changes when an older peer would misread a message. Both ends must have the same."""
MAX_HEADER = 4 * 2**20
"""Bytes of a trajectory's header. The preview text is the part of it that grows."""
MAX_CONTROL = PIECE
CRC_BYTES = 4
MAX_ID = 100
MAX_DIM = 2**24
"""Size of one dimension of a column."""

T = TypeVar("T")


class Layout(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How to read one column: from its frame, or, if it is declared compressible, from the packed frame of its table.

    A bool column is declared `bool` and travels as one byte, 0 or 1, a value.
    """

    column: str
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_DIM)], ...], Meta(min_length=1)]


class Header(msgspec.Struct, tag="trajectory", tag_field="kind", frozen=True, forbid_unknown_fields=True):
    """First frame of a trajectory. `packed` is its body, of `nbytes` when unpacked; `checksum` covers that as it is here,
    and then every column frame, in order (`codec.checksum`)."""

    wire: int
    schema: str
    checksum: int
    nbytes: Annotated[int, Meta(ge=1, le=MAX_HEADER)]
    packed: bytes

    @property
    def body(self) -> bytes:
        """The trajectory in msgpack, with layouts for tables. Raises `WireError`."""
        return decompress(self.packed, self.nbytes)


def with_checksum(body: bytes, frames: Sequence[Frame], schema: Schema = SCHEMA) -> bytes:
    """The header of a body and the column frames that follow it."""
    packed = compress(body)
    header = Header(WIRE_VERSION, schema.fingerprint, checksum([packed, *frames]), len(body), packed)
    return msgspec.msgpack.encode(header)


class NotAcceptable(WireError):
    """It came as it was sent, checksum and all, and says what no trajectory may say: sending it again does not help."""


class _Versioned(msgspec.Struct):
    """What every version's header has."""

    wire: int


def read_header(frame: Frame) -> Header:
    """Raises `WireError` for what is no header, or one of another version, which may have other fields."""
    view = view_of(frame)
    version = _decode(view, _Versioned, "header").wire
    if version != WIRE_VERSION:
        raise WireError(f"wire version {version}, expected {WIRE_VERSION}")
    return _decode(view, Header, "header")


def encode_trajectory(trajectory: Trajectory, schema: Schema = SCHEMA) -> list[bytes | memoryview]:
    """Header and column frames of a trajectory whose tables have `schema`.

    The frames alias its arrays: do not change them while the frames are in use. Raises `WireError` for what
    `decode_trajectory` would refuse at the other end.
    """
    _check_values(trajectory)
    buffers: list[bytes | memoryview] = []

    def lay_out(value: Any) -> Any:
        if isinstance(value, np.generic):  # Environments return NumPy scalars as rewards.
            return value.item()
        if not isinstance(value, TokenTable):
            raise WireError(f"a {type(value).__name__} cannot be sent")
        if value.schema.fingerprint != schema.fingerprint:
            raise WireError(f"a table has schema {value.schema.fingerprint}, the connection has {schema.fingerprint}")
        layouts: list[Layout] = []
        steady: list[tuple[str, np.ndarray]] = []
        for name, array in value.items():
            if schema.columns[name].compressible:
                steady.append((name, array))
            else:
                raw = raw_bytes(array)
                if array.dtype == bool:
                    _check_bool(raw, name)
                buffers.append(raw)
            layouts.append(Layout(name, dtype_name(array.dtype), array.shape))
        if steady:
            buffers.append(pack(steady))
        return layouts

    try:
        body = msgspec.msgpack.encode(trajectory, enc_hook=lay_out)
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"trajectory {trajectory.trajectory_id!r} cannot be encoded: {error}") from error
    if len(body) > MAX_HEADER:
        raise WireError(f"the header takes {len(body)} bytes, more than {MAX_HEADER}: shorten the preview")
    return [with_checksum(body, buffers, schema), *buffers]


def decode_trajectory(frames: Sequence[Frame], schema: Schema = SCHEMA) -> Trajectory:
    """The trajectory in `frames`. Its arrays are read-only views that keep the frames alive.

    Raises `WireError`, and nothing else, for whatever bytes are not exactly one valid trajectory of `schema`. A
    log-prob that is not finite is valid here: dropping that token is the learner's decision.
    """
    views = [view_of(frame) for frame in frames]
    if not views:
        raise WireError("a trajectory has at least a header frame")
    header = read_header(views[0])
    if header.schema != schema.fingerprint:
        raise WireError(
            f"schema {header.schema!r}, expected {schema.fingerprint!r}: both ends must run the same columns"
        )

    buffers = iter(views[1:])
    used = 0
    # It comes raw, so what is unpacked is bounded by the bytes that really arrived.
    first = next(iter(schema.columns))

    def take(what: str) -> memoryview:
        nonlocal used
        used += 1
        buffer = next(buffers, None)
        if buffer is None:
            raise WireError(f"only {len(views) - 1} column frames, no frame for {what}")
        return buffer

    def read_table(kind: type, value: Any) -> TokenTable:
        columns: dict[str, np.ndarray] = {}
        steady: list[tuple[str, np.dtype]] = []
        try:
            layouts = msgspec.convert(value, list[Layout])
        except msgspec.ValidationError as error:
            raise WireError(f"table layout: {error}") from error  # So that msgspec adds where the table is.
        if len({layout.column for layout in layouts}) != len(layouts):
            raise WireError(f"a column comes twice: {', '.join(layout.column for layout in layouts)}")
        for layout in layouts:
            name = layout.column
            if _declared(layout, schema).compressible:
                rows = len(columns[first]) if first in columns else 0
                if rows != layout.shape[0]:
                    raise WireError(f"column {name!r} has {layout.shape[0]} rows, expected {rows}")
                steady.append((name, little_endian(layout.dtype)))
            else:
                columns[name] = _array(layout, take(f"column {name!r}"))
        if steady:
            columns |= unpack(take("the packed columns"), steady, len(columns[first]))
        return TokenTable(columns, schema)

    trajectory = _decode(header.body, Trajectory, "trajectory", read_table)
    if used != len(views) - 1:
        raise WireError(f"{len(views) - 1} column frames, but the header describes {used}")
    found = checksum([header.packed, *views[1:]])
    if found != header.checksum:
        raise WireError(f"checksum {found:016x}, but the header says {header.checksum:016x}")
    try:
        _check_values(trajectory)
    except WireError as error:
        raise NotAcceptable(str(error)) from error
    return trajectory


def _declared(layout: Layout, schema: Schema) -> Column:
    declared = schema.columns.get(layout.column)
    if declared is None:
        raise WireError(f"unknown column {layout.column!r}; the schema has {', '.join(schema.columns)}")
    if layout.dtype not in declared.dtypes:
        raise WireError(f"column {layout.column!r} has dtype {layout.dtype!r}, expected {' or '.join(declared.dtypes)}")
    if len(layout.shape) != 1 + len(declared.inner):
        raise WireError(f"column {layout.column!r} has {len(layout.shape)} dimensions, not {1 + len(declared.inner)}")
    return declared


def _array(layout: Layout, buffer: memoryview) -> np.ndarray:
    """One column's frame as an array. A dtype is only ever made from a name that the schema declares."""
    dtype = little_endian(layout.dtype)
    size = math.prod(layout.shape) * dtype.itemsize
    if size != len(buffer):
        raise WireError(
            f"column {layout.column!r} of shape {list(layout.shape)} takes {size} bytes, its frame has {len(buffer)}"
        )
    if dtype.kind == "b":
        _check_bool(buffer, layout.column)
    array = np.frombuffer(buffer, dtype).reshape(layout.shape)
    # ZeroMQ hands out small messages as slices of one receive buffer, at any address.
    return array if array.flags.aligned else array.copy()


def _check_bool(buffer: memoryview, name: str) -> None:
    if np.frombuffer(buffer, np.uint8).max(initial=0) > 1:
        raise WireError(f"bool column {name!r} has a byte that is neither 0 nor 1")


def decoded_bytes(frames: Sequence[Frame], trajectory: Trajectory) -> int:
    """What a trajectory takes in memory while its raw columns are views of `frames`: those, and what was unpacked."""
    unpacked = read_header(frames[0]).nbytes
    for sample in trajectory.samples:
        columns = sample.table.schema.columns
        unpacked += sum(array.nbytes for name, array in sample.table.items() if columns[name].compressible)
    return sum(map(len, frames)) + unpacked


def _check_values(trajectory: Trajectory) -> None:
    """What types do not express. Raises `WireError`."""
    if not 0 < len(trajectory.trajectory_id) <= MAX_ID:
        raise WireError(f"a trajectory id has 1 to {MAX_ID} characters, not {len(trajectory.trajectory_id)}")
    for name in ("started_at", "finished_at"):
        _check_finite(getattr(trajectory, name), name)
    for i, sample in enumerate(trajectory.samples):
        _check_finite(sample.temperature, f"the temperature of sample {i}")
        if "rewards" in sample.table:
            # Double precision cannot overflow here, and one pass is all that it takes.
            _check_finite(sample.table["rewards"].sum(dtype=np.float64), f"a reward in sample {i}")
    lengths = [len(sample.table) for sample in trajectory.samples]
    for turn in trajectory.turns:
        if not math.isfinite(turn.reward):
            raise WireError(f"the reward of turn {turn.index} is not finite")
        if not 0 <= turn.sample < len(lengths):
            raise WireError(f"turn {turn.index} is of sample {turn.sample}, there are {len(lengths)}")
        if not 0 <= turn.start <= turn.stop <= lengths[turn.sample]:
            raise WireError(
                f"turn {turn.index} is tokens {turn.start}:{turn.stop} of a sample of {lengths[turn.sample]}"
            )


def _check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise WireError(f"{what} is not finite")


def _decode(data: Any, kind: type[T], what: str, hook: Callable[[type, Any], Any] | None = None) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=hook)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        # msgspec raises its own errors for most malformed data, and Python's for bad UTF-8 and deep nesting.
        raise WireError(f"malformed {what}: {error}") from error


# Control messages. Those of a sender carry its session, a random name for one HELLO: what was queued before a
# reconnection is distinguished by it. Maps, not arrays, so that a field can be added without misreading.

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
Session = Annotated[str, Meta(max_length=64)]


class Control(msgspec.Struct, tag_field="kind", tag=str.lower):
    """Base of control messages: one frame of msgpack, distinguished by `kind`, and then the CRC-32 of that, little-endian."""


class Hello(Control):
    """Sender: a new session, and repeated as a heartbeat. Answered by `Welcome`, or by a final `Refusal`."""

    session: Session
    sender_id: Id
    run_id: str
    schema: str
    wire: int = WIRE_VERSION


class Welcome(Control):
    """Receiver: the session stands. Each HELLO is answered so, and all senders get it when `until` changes. A new `epoch` is a
    restarted receiver.

    `until`: only trajectories of groups before it are taken now. `at_once`: bytes that may be in flight from this sender, or one
    trajectory. `in_hand`: trajectories of this sender that arrived and are not answered yet (they are being written, say).
    """

    session: Session
    epoch: str
    until: int
    at_once: int
    in_hand: list[str] = []


class Refusal(Control):
    """Receiver: not this session. If `final`, no session of this sender; otherwise it may say HELLO again."""

    session: Session
    reason: str
    final: bool


class Deliver(Control):
    """Sender: the trajectory itself, in the frames that follow, cut into pieces (`cut`). `nbytes` is what it takes in memory once
    decoded (`decoded_bytes`)."""

    session: Session
    trajectory_id: Id
    group_index: int
    nbytes: Annotated[int, Meta(ge=0)]


class Ack(Control):
    """Receiver: it has these now; the sender forgets them."""

    ids: list[str]


class Reject(Control):
    """Receiver: it has not taken this one. The id is empty if the message was too broken to have one.

    `again`: `never` will it be taken. `damaged`: what came is not what a sender of this schema makes, so it changed on its way,
    and may be sent again. `later`: it may be sent again as soon as its group is before `Welcome.until`.
    """

    trajectory_id: str
    reason: str
    again: Literal["never", "damaged", "later"] = "never"


Message = Hello | Welcome | Refusal | Deliver | Ack | Reject
_decoder = msgspec.msgpack.Decoder(Message)


def encode_control(message: Message) -> bytes:
    return sign_control(msgspec.msgpack.encode(message))


def sign_control(body: bytes) -> bytes:
    """A changed bit could make of one valid message another one: TCP's own checksum, of 16 bits, lets some through."""
    return body + zlib.crc32(body).to_bytes(CRC_BYTES, "little")


def decode_control(frame: Frame) -> Message:
    """A control message. Raises `WireError`, and nothing else, for any other bytes."""
    view = view_of(frame)
    if len(view) > MAX_CONTROL:
        raise WireError(f"a control message of {len(view)} bytes, more than {MAX_CONTROL}")
    body, crc = view[:-CRC_BYTES], view[-CRC_BYTES:]
    if zlib.crc32(body) != int.from_bytes(crc, "little") or not body:
        raise WireError("malformed control message: its checksum is wrong, or it is of another version of the protocol")
    try:
        return _decoder.decode(body)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise WireError(f"malformed control message: {error}") from error
