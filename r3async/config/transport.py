"""The configuration sections `transport` and `buffer`."""

from __future__ import annotations

from typing import Literal

from r3async.config.section import ByteCount, PositiveFloat, Section


class TransportConfig(Section):
    host: str = ""
    """Interface of the learner's sockets. Empty: loopback if the whole run is on one host, else
    the address by which Ray knows the learner's host, or that of `cluster.interface`."""
    credit_bytes: ByteCount = 256 * 2**20
    """Bytes of trajectories that may wait at the learner, beyond those of the next step."""
    ack_timeout: PositiveFloat = 5.0
    """Seconds without an acknowledgement after which a sender connects again."""
    max_message_bytes: ByteCount = 64 * 2**20
    """Size of the largest trajectory, in memory."""
    keys: str = ""
    """Directory made by `python -m r3async.tools keys`: only peers with a key in it are let in.
    Empty: each start makes new keys."""
    trusted_network: bool = False
    """Trust everything that reaches `host`, as `weights.backend = "nccl"` needs beyond
    loopback."""


class BufferConfig(Section):
    durability: Literal["memory", "disk"] = "memory"
    """`disk`: accepted trajectories stay in the run's spool until a checkpoint has them, and
    survive the loss of any process. `memory`: they are lost with the learner, and generated
    again."""
    memory_bytes: ByteCount = 128 * 2**20
    """With `disk`, bytes of trajectories that are also kept in memory; effective below
    `transport.credit_bytes`."""
    disk_bytes: ByteCount = 8 * 2**30
    """Size of the spool, with `disk`, at which generators wait."""
    fsync: bool = False
    """With `disk`, survive power loss too: each acknowledgement waits for the device."""
