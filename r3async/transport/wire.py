"""What goes over the wire: trajectories as a header and raw frames, and the small control messages around them.

A trajectory is `[header, frame, frame, ...]`: a msgpack header (schema fingerprint, checksum, every field of the
trajectory, and a `TableHeader` in place of each token table), and then the columns of all tables as parts of frames: large ones
are a frame each, small ones are joined (`codec.frame_parts`). Of each table come first its raw columns, little-endian, in the
order of the layouts, routes perhaps in fewer bits (`data/packed.py`); then one part with all columns that are declared
compressible (turn, version, mask, rewards), packed together by `codec.py`. Which columns there are, their dtypes and their
dimensions come from the `TokenSchema` alone, so a column added there travels without a change here.

Large raw columns are not copied in either direction: encoded frames are views of the trajectory's arrays, decoded arrays are
read-only views of the frames. Both directions checksum the payload, so call them off the event loop when it is large.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from r3async.data.packed import RouteForm
from r3async.data.records import SCHEMA, TokenSchema, TokenTable, Trajectory
from r3async.transport.codec import (
    MAX_JOINED_BYTES,
    PIECE_BYTES,
    Frame,
    PartReader,
    WireError,
    align_offset,
    byte_view,
    compress_lz4,
    compute_checksum,
    decode_wire_struct,
    decompress_lz4,
    frame_parts,
    join_pieces,
    split_frames,
)
from r3async.transport.tables import decode_table, encode_table
from r3async.untrusted import MalformedError, decode_msgpack

WIRE_VERSION = 8
"""Changes when an older peer would misread a message. Both ends must have the same."""
MAX_HEADER_BYTES = 4 * 2**20
"""Bytes of a trajectory's header. The preview text is the part of it that grows."""
MAX_CONTROL_BYTES = PIECE_BYTES
CRC_BYTES = 4
MAX_ID_CHARS = 100
MAX_TRAJECTORY_FRAMES = 4096
"""Of a trajectory."""
MAX_DELIVERY_ITEMS = 32
"""Trajectories in one message."""
MAX_SHARED_BYTES = PIECE_BYTES // 2
"""Of the frames of several trajectories in one message: they travel as one piece."""


class TrajectoryHeader(msgspec.Struct, tag="trajectory", tag_field="kind", frozen=True, forbid_unknown_fields=True):
    """First frame of a trajectory. `packed` is its body, of `nbytes` when unpacked; `checksum` covers that as it is here,
    and then every column frame, in order (`codec.compute_checksum`)."""

    wire: int
    schema: str
    checksum: int
    nbytes: Annotated[int, Meta(ge=1, le=MAX_HEADER_BYTES)]
    packed: bytes

    @property
    def body(self) -> bytes:
        """The trajectory in msgpack, with layouts for tables. Raises `WireError`."""
        return decompress_lz4(self.packed, self.nbytes)


def encode_trajectory_header(body: bytes, frames: Sequence[Frame], schema: TokenSchema = SCHEMA) -> bytes:
    """The header of a body and the column frames that follow it."""
    packed = compress_lz4(body)
    header = TrajectoryHeader(WIRE_VERSION, schema.fingerprint, compute_checksum([packed, *frames]), len(body), packed)
    return msgspec.msgpack.encode(header)


class InvalidTrajectoryError(WireError):
    """It came as it was sent, checksum and all, and says what no trajectory may say: sending it again does not help."""


class _AnyVersionHeader(msgspec.Struct):
    """What every version's header has."""

    wire: int


def read_trajectory_header(frame: Frame) -> TrajectoryHeader:
    """Raises `WireError` for what is no header, or one of another version, which may have other fields."""
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
    """Header and column frames of a trajectory whose tables have `schema`; `routes`: the form that columns of choices get.

    The frames alias its arrays: do not change them while the frames are in use. Raises `WireError` for what
    `decode_trajectory` would refuse at the other end.
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
    """The trajectory in `frames`. Its arrays are read-only views that keep the frames alive; routes that were packed stay so.

    Raises `WireError`, and nothing else, for whatever bytes are not exactly one trajectory of `schema`. Whether it can be
    trained is another question: see `schedule.validation`.
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
    """What a trajectory takes in memory while its raw columns are views of `frames`: those, and what was unpacked."""
    unpacked = read_trajectory_header(frames[0]).nbytes
    for sample in trajectory.samples:
        columns = sample.table.schema.columns
        unpacked += sum(column.nbytes for name, column in sample.table.stored_items() if columns[name].compressible)
    return sum(map(len, frames)) + unpacked


def _check_trajectory_values(trajectory: Trajectory) -> None:
    """What types do not express, and no one else judges. Raises `WireError`."""
    if not 0 < len(trajectory.trajectory_id) <= MAX_ID_CHARS:
        raise WireError(f"a trajectory id has 1 to {MAX_ID_CHARS} characters, not {len(trajectory.trajectory_id)}")
    if not (math.isfinite(trajectory.started_at) and math.isfinite(trajectory.finished_at)):
        raise WireError("started_at or finished_at is not finite")


# Control messages. Those of a sender carry its session, a random name for one HELLO: what was queued before a
# reconnection is distinguished by it. Maps, not arrays, so that a field can be added without misreading.

BoundedId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
SessionId = Annotated[str, Meta(max_length=64)]


class ControlBase(msgspec.Struct, tag_field="kind", tag=str.lower):
    """Base of control messages: one frame of msgpack, distinguished by `kind`, and then the CRC-32 of that, little-endian."""


class Hello(ControlBase):
    """Sender: a new session, and repeated as a heartbeat. Answered by `Welcome`, or by a final `Refusal`."""

    session: SessionId
    sender_id: BoundedId
    run_id: str
    schema: str
    wire: int = WIRE_VERSION


class Welcome(ControlBase):
    """Receiver: the session stands. Each HELLO is answered so, and all senders get it when `until` changes. A new `epoch` is a
    restarted receiver.

    `until`: only trajectories of groups before it are taken now. `at_once`: bytes that may be in flight from this sender, or one
    trajectory. `in_hand`: trajectories of this sender that arrived and are not answered yet (they are being written, say).
    """

    session: SessionId
    epoch: str
    until: int
    at_once: int
    in_hand: list[str] = []


class Refusal(ControlBase):
    """Receiver: not this session. If `final`, no session of this sender; otherwise it may say HELLO again."""

    session: SessionId
    reason: str
    final: bool


class DeliveryItem(msgspec.Struct, array_like=True, frozen=True):
    """A trajectory in a message. `nbytes`: what it takes in memory once decoded (`decoded_bytes`). `frames`: bytes of each."""

    trajectory_id: BoundedId
    group_index: int
    nbytes: Annotated[int, Meta(ge=0)]
    frames: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_TRAJECTORY_FRAMES)]


class Deliver(ControlBase):
    """Sender: the trajectories themselves. All their frames follow, small ones joined (`codec.frame_parts`), cut into pieces
    (`codec.split_frames`); those of several trajectories are one piece. Each is accepted or refused by itself."""

    session: SessionId
    items: Annotated[list[DeliveryItem], Meta(min_length=1, max_length=MAX_DELIVERY_ITEMS)]

    def split_by_item(self, pieces: Sequence[Frame]) -> list[Sequence[Frame]]:
        """Those of each item: copied out of the piece that several share, so that none keeps the memory of another. Raises
        `WireError`."""
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
    """The message that delivers these, whose frames are `frames`."""
    # Those of several have to be one piece.
    payload = frame_parts(itertools.chain.from_iterable(frames), PIECE_BYTES if len(items) > 1 else MAX_JOINED_BYTES)
    return [encode_control(Deliver(session, list(items))), *split_frames(payload)]


def join_item_frames(item: DeliveryItem, pieces: Sequence[Frame]) -> list[Frame]:
    """The frames of a trajectory, from its own pieces: views of these unless it was cut. Raises `WireError`."""
    parts = PartReader([byte_view(frame) for frame in join_pieces(pieces)])
    frames: list[Frame] = [parts.read_part(size, f"frame {i}") for i, size in enumerate(item.frames)]
    parts.check_end()
    return frames


class Ack(ControlBase):
    """Receiver: it has these now; the sender forgets them."""

    ids: list[str]


class Reject(ControlBase):
    """Receiver: it has not taken this one. The id is empty if the message was too broken to have one.

    `again`: `never` will it be taken. `damaged`: what came is not what a sender of this schema makes, so it changed on its way,
    and may be sent again. `later`: it may be sent again as soon as its group is before `Welcome.until`.
    """

    trajectory_id: str
    reason: str
    again: Literal["never", "damaged", "later"] = "never"


ControlMessage = Hello | Welcome | Refusal | Deliver | Ack | Reject


def encode_control(message: ControlMessage) -> bytes:
    return append_control_crc(msgspec.msgpack.encode(message))


def append_control_crc(body: bytes) -> bytes:
    """A changed bit could make of one valid message another one: TCP's own checksum, of 16 bits, lets some through."""
    return body + zlib.crc32(body).to_bytes(CRC_BYTES, "little")


def decode_control(frame: Frame) -> ControlMessage:
    """A control message. Raises `WireError`, and nothing else, for any other bytes."""
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
