"""The books of a run at one step: everything but tensors. Pure data."""

from __future__ import annotations

from typing import Any

import msgspec

from r3async.checkpoint.error import CheckpointError

STATE_SCHEMA = 1
"""Raised by whoever changes what a field means. New fields have defaults and need no new schema."""


class SpooledTrajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trajectory that was accepted and not trained yet: the spool has to have it, or its episode is played again."""

    group_index: int
    episode_index: int
    trajectory_id: str


class RunState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run between two steps.

    What the learner's ranks hold (optimizer steps and with them the learning rate, the trust region's controller, random
    number generators) is in their files, see `LearnerFacts`.
    """

    schema: int = STATE_SCHEMA
    run_id: str
    config: dict[str, Any]
    """The resolved configuration (`to_dict`)."""
    model_path: str
    """The start path: where configuration, tokenizer and the reference model come from."""
    model_fingerprint: str
    """Of that directory; see `fingerprint_model`."""

    steps: int
    """Steps made."""
    version: int
    """Published last. Engines are given the checkpoint's weights under this number again."""
    consumed: int
    """Groups trained so far. They are consumed in order, so this is the data cursor: the next step begins with that group."""
    since_publication: tuple[int, int] = (0, 0)
    """Steps made and groups consumed since `version` was published."""
    consumed_by_version: dict[int, int] = {}
    """By published version: the groups that it and all earlier ones were trained from."""
    admission: dict[str, Any] = {}
    """Slots and leases. Who held a lease is of no use later: nobody who plays outlives the run."""
    ledger: dict[str, Any] = {}
    """`Ledger.snapshot()`: ids that were accepted, and groups that are over."""
    spooled: list[SpooledTrajectory] = []

    record_bytes: dict[str, int] = {}
    """By file name, for example `metrics.jsonl`: how long that record was. `rewind` cuts off what came later."""
    pending_rows: list[dict[str, Any]] = []
    """Rows of steps whose weights had not been delivered: not in the record yet."""
    elapsed: float = 0.0
    """Seconds of running, over all processes that the run had so far."""
    generated_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.version, self.consumed, *self.since_publication) < 0:
            raise ValueError("steps, version and groups are counts, and never negative")
        if self.version not in self.consumed_by_version and self.consumed_by_version:
            raise ValueError(f"`consumed_by_version` has no version {self.version}")
        if any(t.group_index < self.consumed for t in self.spooled):
            raise ValueError(f"a spooled trajectory is of a group before {self.consumed}, which was trained")


class _Schema(msgspec.Struct):
    schema: int


def encode_state(state: RunState) -> bytes:
    return msgspec.json.format(msgspec.json.encode(state)) + b"\n"


def decode_state(data: bytes) -> RunState:
    """Raises `CheckpointError` with what is wrong."""
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
        if schema != STATE_SCHEMA:
            raise CheckpointError(
                f"run.json: it is of schema {schema}, and this version of r3async reads {STATE_SCHEMA}: resume with the version "
                "that wrote it, or `r3async export` its model there and start from that"
            )
        return msgspec.json.decode(data, type=RunState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"run.json: {error}") from error
