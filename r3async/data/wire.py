"""The wire format of trajectories: a header, and raw frames. Pure.

A trajectory is `[header, frame, frame, ...]`: a msgpack header (schema fingerprint, checksum, every
field of the trajectory, and a `TableHeader` in place of each token table), and then the columns of
all tables as parts of frames: large ones are a frame each, small ones are joined (`frame_parts`).
Each table has first its raw columns, little-endian, in the order of the layouts, routes perhaps in
fewer bits (`data/packed_routes.py`); then its columns of sets; then one part with all columns that are
declared compressible (turn, version, mask, rewards), packed together (`pack_columns`). The names,
dtypes and dimensions of columns come from the `TokenSchema` alone, so a column added there travels
without a change here.

Large raw columns are not copied in either direction: encoded frames are views of the trajectory's
arrays, decoded arrays are read-only views of the frames. Both directions checksum the payload, so
call them off the event loop when it is large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from r3async.data.packed_routes import RouteForm
from r3async.data.tokens import SCHEMA, TokenSchema, TokenTable, Trajectory
from r3async.data.wire_frames import (
    Frame,
    PartReader,
    WireError,
    byte_view,
    compress_lz4,
    compute_checksum,
    decode_wire_struct,
    decompress_lz4,
    frame_parts,
)
from r3async.data.wire_tables import decode_table, encode_table

WIRE_VERSION = 8
"""Version of the wire format. It changes when an older peer would misread a message; both ends
must have the same."""
MAX_HEADER_BYTES = 4 * 2**20
"""Maximum bytes of a trajectory's header. The preview text is the part of it that grows."""


MAX_ID_CHARS = 100
MAX_TRAJECTORY_FRAMES = 4096
"""Maximum number of frames of a trajectory."""


class TrajectoryHeader(
    msgspec.Struct, tag="trajectory", tag_field="kind", frozen=True, forbid_unknown_fields=True
):
    """First frame of a trajectory.

    Attributes:
        checksum: Checksum of `packed` as it is here, and then of every column frame, in order
            (`compute_checksum`).
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
        """The trajectory in msgpack, with headers in place of tables. Raises `WireError` if it
        cannot be unpacked."""
        return decompress_lz4(self.packed, self.nbytes)


def encode_trajectory_header(
    body: bytes, frames: Sequence[Frame], schema: TokenSchema = SCHEMA
) -> bytes:
    """Return the header for a body and the column frames that follow it."""
    packed = compress_lz4(body)
    header = TrajectoryHeader(
        WIRE_VERSION, schema.fingerprint, compute_checksum([packed, *frames]), len(body), packed
    )
    return msgspec.msgpack.encode(header)


class InvalidTrajectoryError(WireError):
    """Error for a trajectory that arrived intact, checksum included, with values that no
    trajectory may have.

    It does not help to send it again.
    """


class _AnyVersionHeader(msgspec.Struct):
    """The part of a header that all wire versions share."""

    wire: int


def read_trajectory_header(frame: Frame) -> TrajectoryHeader:
    """Return the header in a frame.

    Raises `WireError` if the frame holds no header, or one of another version, which may
    have other fields.
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

    Columns of choices are encoded in the form `routes`. The frames alias the trajectory's arrays:
    do not change them while the frames are in use. Raises `WireError` for anything that
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
            raise WireError(
                f"a table has schema {value.schema.fingerprint}, the connection has "
                f"{schema.fingerprint}"
            )
        return encode_table(value, schema, routes, parts)

    try:
        body = msgspec.msgpack.encode(trajectory, enc_hook=lay_out)
    except WireError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(
            f"trajectory {trajectory.trajectory_id!r} cannot be encoded: {error}"
        ) from error
    if len(body) > MAX_HEADER_BYTES:
        raise WireError(
            f"the header takes {len(body)} bytes, more than {MAX_HEADER_BYTES}: shorten the preview"
        )
    frames = frame_parts(parts)
    return [encode_trajectory_header(body, frames, schema), *frames]


def decode_trajectory(frames: Sequence[Frame], schema: TokenSchema = SCHEMA) -> Trajectory:
    """Decode the trajectory in `frames`.

    Its arrays are read-only views that keep the frames alive; routes that were packed stay packed.
    Raises `WireError`, and nothing else, for any bytes that are not exactly one trajectory of
    `schema`. It does not check whether the trajectory can be trained: see `schedule.validation`.
    """
    views = [byte_view(frame) for frame in frames]
    if not views:
        raise WireError("a trajectory has at least a header frame")
    header = read_trajectory_header(views[0])
    if header.schema != schema.fingerprint:
        raise WireError(
            f"schema {header.schema!r}, expected {schema.fingerprint!r}: both ends must run "
            "the same columns"
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
    """Return the bytes that a trajectory takes in memory while its raw columns are
    views of `frames`.

    They are those of the frames, and of everything that was unpacked.
    """
    unpacked = read_trajectory_header(frames[0]).nbytes
    for sample in trajectory.samples:
        columns = sample.table.schema.columns
        unpacked += sum(
            column.nbytes
            for name, column in sample.table.stored_items()
            if columns[name].compressible
        )
    return sum(map(len, frames)) + unpacked


def _check_trajectory_values(trajectory: Trajectory) -> None:
    """Check the values that types do not constrain and no other code checks. Raises `WireError`."""
    if not 0 < len(trajectory.trajectory_id) <= MAX_ID_CHARS:
        raise WireError(
            f"a trajectory id has 1 to {MAX_ID_CHARS} characters, not "
            f"{len(trajectory.trajectory_id)}"
        )
    if not (math.isfinite(trajectory.started_at) and math.isfinite(trajectory.finished_at)):
        raise WireError("started_at or finished_at is not finite")
