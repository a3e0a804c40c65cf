"""Where trajectories wait until they are trained."""

from __future__ import annotations

from typing import Literal

from r3async.config.section import Bytes, PositiveInt, Section


class BufferConfig(Section):
    durability: Literal["memory", "disk"] = "memory"
    """`disk`: a trajectory is in the run's spool before it is acknowledged, and stays until a checkpoint that trained it
    is committed. It survives the death of any process. `memory`: one that was not trained yet dies with the learner."""
    memory_bytes: Bytes = 128 * 2**20
    """With `disk`: trajectories beyond this many bytes are on disk only, and mapped back while they are trained. Has an
    effect below `transport.credit_bytes`, which bounds memory in any case."""
    disk_bytes: Bytes = 8 * 2**30
    """With `disk`: when the spool holds this much, generators wait. The groups that the next step needs still pass."""
    fsync: bool = False
    """With `disk`: also survive power loss. Each acknowledgement then waits for the device."""
    quarantine_bytes: PositiveInt = 64 * 2**20
    """Trajectories that were accepted and turned out not to be trainable are kept in the run's `quarantine/`, up to so many bytes
    together; the oldest make way."""
