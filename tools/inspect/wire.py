"""Describe messages of the wire frame by frame, from a spool file or a file with one
control message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from r3async.data.container import TornRecord, map_file
from r3async.data.control_messages import ControlMessage, Deliver, decode_control, join_item_frames
from r3async.data.tokens import SCHEMA
from r3async.data.wire import decode_trajectory, read_trajectory_header
from r3async.data.wire_frames import Frame, PartReader, WireError, byte_view, compute_checksum
from r3async.data.wire_tables import describe_table
from r3async.transport.spool import SPOOL_FORMAT
from r3async.untrusted import decode_msgpack
from r3async.world.files import read_file

from .run import InspectError

MAX_FIELD_CHARACTERS = 200
"""Maximum characters shown of a control message's field."""


def is_spool_file(path: Path) -> bool:
    return map_file(path)[: len(SPOOL_FORMAT.magic)] == SPOOL_FORMAT.magic


def read_messages(
    path: Path, report_problem: Callable[[str], object]
) -> Iterator[tuple[int, list[Frame]]]:
    """Yield the offset of each message in a file, and its frames.

    A file without records is one frame of a control message. Raises `InspectError`
    if it is neither.
    """
    if not is_spool_file(path):
        data = read_file(path)
        try:
            decode_control(data)
        except WireError as error:
            raise InspectError(
                f"{path} holds no message: it begins with {data[:8]!r}, which is no record of a "
                f"spool, and as a control message it is a {error}"
            ) from error
        yield 0, [data]
        return
    for record in SPOOL_FORMAT.iter_records(map_file(path)):
        if isinstance(record, TornRecord):
            report_problem(
                f"{path}: from byte {record.offset} on there is no record: {record.reason}"
            )
        else:
            yield record.offset, list(record.frames)


def describe_message(frames: Sequence[Frame]) -> tuple[list[str], str]:
    """Describe each frame of a message in a line, and what is wrong with the message
    ("" if nothing)."""
    control = _decode_control_frame(frames[0]) if frames else None
    if control is None:
        return _describe_trajectory_frames(frames, 0)
    fields = {
        name: str(value)[:MAX_FIELD_CHARACTERS]
        for name, value in msgspec.structs.asdict(control).items()
    }
    said = " ".join(
        [type(control).__name__.upper(), *(f"{name}={value}" for name, value in fields.items())]
    )
    lines = [_format_frame(0, frames[0], said)]
    problems = list[str]()
    if isinstance(control, Deliver):
        try:
            for item, pieces in zip(control.items, control.split_by_item(frames[1:]), strict=True):
                described, problem = _describe_trajectory_frames(
                    join_item_frames(item, pieces), len(lines)
                )
                lines = [*lines, *described]
                problems = [*problems, problem]
        except WireError as error:
            problems.append(str(error))
    elif len(frames) > 1:
        problems.append(f"{len(frames) - 1} frames follow a message that has one")
    return lines, "; ".join(filter(None, problems))


def _describe_trajectory_frames(frames: Sequence[Frame], first: int) -> tuple[list[str], str]:
    """Describe the frames of one trajectory, numbered from `first`, and what is wrong with it
    ("" if nothing)."""
    if not frames:
        return [], "it has no frame"
    try:
        described, framed, missing = _describe_header(frames)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        described = "not a header that this release can read"
        framed = [""] * (len(frames) - 1)
        missing = []
        problem = f"frame {first}: {error!r}"
    else:
        problem = ""
    lines = [_format_frame(first, frames[0], described)]
    for number, frame in enumerate(frames[1:]):
        lines.append(
            _format_frame(first + 1 + number, frame, framed[number] or "described nowhere")
        )
    lines += [f"  missing        {text}" for text in missing]
    try:
        decode_trajectory(frames, SCHEMA)
    except WireError as error:
        problem = str(error)
    return lines, problem


def _decode_control_frame(frame: Frame) -> ControlMessage | None:
    try:
        return decode_control(frame)
    except WireError:
        return None


def _format_frame(number: int, frame: Frame, text: str) -> str:
    return f"  frame {number:<3} {memoryview(frame).nbytes:>12,} bytes  {text}"


def _describe_header(frames: Sequence[Frame]) -> tuple[str, list[str], list[str]]:
    """Describe the header, the contents of each frame after it ("" if unknown), and
    the missing parts."""
    header = read_trajectory_header(frames[0])
    body = decode_msgpack(header.body, dict)
    found = compute_checksum([header.packed, *frames[1:]])
    right = "right" if found == header.checksum else f"wrong: the frames have {found:016x}"
    schema = "ours" if header.schema == SCHEMA.fingerprint else f"ours is {SCHEMA.fingerprint}"
    described = (
        f"trajectory {body['trajectory_id']}: wire {header.wire}, schema {header.schema} "
        f"({schema}), checksum {header.checksum:016x} ({right})"
    )
    parts = PartReader([byte_view(frame) for frame in frames[1:]])
    framed = [""] * (len(frames) - 1)
    missing = []
    for sample in body["samples"]:
        for text, size in describe_table(sample["table"], SCHEMA):
            text = f"{text} of sample {sample['sample_id']}"
            try:
                parts.read_part(size, text)
            except WireError:
                missing.append(text)
            else:
                framed[parts.frame_index] += f"; {text}" if framed[parts.frame_index] else text
    return described, framed, missing
