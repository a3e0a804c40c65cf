"""A spool file: a container of trajectories in the wire format."""

from __future__ import annotations

from dataclasses import dataclass

from r3async.data.container import Container, Record
from r3async.data.records import Schema, Trajectory
from r3async.transport.wire import decode_trajectory, decoded_bytes

SPOOL = Container(b"r3spool1")


@dataclass(frozen=True, slots=True)
class Stored:
    """A trajectory whose columns are mapped from disk. `nbytes`: what it takes in memory all the same."""

    trajectory: Trajectory
    nbytes: int


def load(record: Record, schema: Schema) -> Stored:
    """The trajectory of a record, on the mapped file. Raises `WireError`."""
    trajectory = decode_trajectory(record.frames, schema)
    mapped = sum(frame.nbytes for frame in record.frames[1:])
    return Stored(trajectory, decoded_bytes(record.frames, trajectory) - mapped)
