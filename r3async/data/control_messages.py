"""Control messages on the wire: greetings, deliveries, acknowledgements and rejections. Pure.

Those of a sender carry its session, a random name for one HELLO, which distinguishes them from
messages queued before a reconnection. They are maps, not arrays, so that a field can be added
without being misread.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from r3async.data.wire import MAX_ID_CHARS, MAX_TRAJECTORY_FRAMES, WIRE_VERSION
from r3async.data.wire_frames import (
    CRC_BYTES,
    MAX_JOINED_BYTES,
    PIECE_BYTES,
    Frame,
    PartReader,
    WireError,
    align_offset,
    byte_view,
    frame_parts,
    join_pieces,
    split_frames,
)
from r3async.untrusted import MalformedError, decode_msgpack

MAX_CONTROL_BYTES = PIECE_BYTES


MAX_DELIVERY_ITEMS = 32
"""Maximum number of trajectories in one message."""
MAX_SHARED_BYTES = PIECE_BYTES // 2
"""Maximum bytes of the frames of several trajectories in one message: they travel as one piece."""


BoundedId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
SessionId = Annotated[str, Meta(max_length=64)]


class ControlBase(msgspec.Struct, tag_field="kind", tag=str.lower):
    """Base of control messages: one frame of msgpack, distinguished by `kind`, and then its
    CRC-32, little-endian."""


class Hello(ControlBase):
    """Sender's message that opens a session, repeated as a heartbeat. The answer is `Welcome`, or a
    final `Refusal`."""

    session: SessionId
    sender_id: BoundedId
    run_id: str
    schema: str
    wire: int = WIRE_VERSION


class Welcome(ControlBase):
    """Receiver's message that the session is open. It answers each HELLO, and goes to all senders
    when `until` changes.

    Attributes:
        epoch: Incarnation of the receiver; a new one means that the receiver was restarted.
        until: Group before which trajectories are accepted now.
        at_once: Bytes that may be in flight from this sender; or one trajectory, if that is larger.
        in_hand: Trajectories of this sender that arrived and are not answered yet (they are
            being written, say).
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

    All their frames follow, small ones joined (`frame_parts`), cut into pieces (`split_frames`);
    those of several trajectories are one piece. Each trajectory is accepted or refused separately.
    """

    session: SessionId
    items: Annotated[list[DeliveryItem], Meta(min_length=1, max_length=MAX_DELIVERY_ITEMS)]

    def split_by_item(self, pieces: Sequence[Frame]) -> list[Sequence[Frame]]:
        """Return the pieces of each item. Raises `WireError` if they do not fit the items.

        They are copied out of the piece that several items share, so that none keeps the memory
        of another alive.
        """
        if len(self.items) == 1:
            return [pieces]
        if len(pieces) != 1:
            raise WireError(f"{len(self.items)} trajectories in {len(pieces)} pieces")
        view = byte_view(pieces[0])
        ends = [0]
        for item in self.items:
            end = ends[-1]
            for size in filter(None, item.frames):
                end = align_offset(end) + size
            ends.append(end)
        if ends[-1] != len(view):
            raise WireError(f"{len(view)} bytes of several trajectories that have {ends[-1]}")
        return [
            [bytes(view[align_offset(start) : end])] if start < end else []
            for start, end in itertools.pairwise(ends)
        ]


def encode_delivery(
    session: str, items: Sequence[DeliveryItem], frames: Iterable[Sequence[Frame]]
) -> list[Frame]:
    """Return the message that delivers trajectories, whose frames are `frames`."""
    # The frames of several trajectories have to be one piece.
    payload = frame_parts(
        itertools.chain.from_iterable(frames), PIECE_BYTES if len(items) > 1 else MAX_JOINED_BYTES
    )
    return [encode_control(Deliver(session, list(items))), *split_frames(payload)]


def join_item_frames(item: DeliveryItem, pieces: Sequence[Frame]) -> list[Frame]:
    """Return the frames of a trajectory from its own pieces.

    They are views of the pieces unless one was cut. Raises `WireError` if they do not fit the item.
    """
    parts = PartReader([byte_view(frame) for frame in join_pieces(pieces)])
    frames: list[Frame] = [
        parts.read_part(size, f"frame {i}") for i, size in enumerate(item.frames)
    ]
    parts.check_end()
    return frames


class Ack(ControlBase):
    """Receiver's message that it has these trajectories now. The sender forgets them."""

    ids: list[str]


class Reject(ControlBase):
    """Receiver's message that it has not accepted a trajectory.

    Attributes:
        trajectory_id: Id of the trajectory; empty if the message was too broken to have one.
        again: `never`: it will never be accepted. `damaged`: it is not what a sender of this schema
            makes, so it changed on its way, and may be sent again. `later`: it may be sent again as
            soon as its group is before `Welcome.until`.
    """

    trajectory_id: str
    reason: str
    again: Literal["never", "damaged", "later"] = "never"


ControlMessage = Hello | Welcome | Refusal | Deliver | Ack | Reject


def encode_control(message: ControlMessage) -> bytes:
    return append_control_crc(msgspec.msgpack.encode(message))


def append_control_crc(body: bytes) -> bytes:
    """Append the CRC-32 to a message.

    A changed bit could turn one valid message into another, and TCP's own checksum, of 16 bits,
    misses some changes.
    """
    return body + zlib.crc32(body).to_bytes(CRC_BYTES, "little")


def decode_control(frame: Frame) -> ControlMessage:
    """Decode a control message. Raises `WireError`, and nothing else, for any other bytes."""
    view = byte_view(frame)
    if len(view) > MAX_CONTROL_BYTES:
        raise WireError(f"a control message of {len(view)} bytes, more than {MAX_CONTROL_BYTES}")
    body = view[:-CRC_BYTES]
    crc = view[-CRC_BYTES:]
    if zlib.crc32(body) != int.from_bytes(crc, "little") or not body:
        raise WireError(
            "malformed control message: its checksum is wrong, or it is of another "
            "version of the protocol"
        )
    try:
        return decode_msgpack(body, ControlMessage)
    except MalformedError as error:
        raise WireError(f"malformed control message: {error}") from error
