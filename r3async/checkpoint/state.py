"""The state of a run at one step: everything but tensors. Pure data."""

from __future__ import annotations

from typing import Any

import msgspec

from r3async.checkpoint.error import CheckpointError
from r3async.lineage import Lineage

STATE_SCHEMA = 2
"""Raised by whoever changes what a field means. New fields have defaults and need no new schema."""


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
    lineage: Lineage = Lineage()
    """In which `version` is counted, with its ancestors."""
    consumed: int
    """The data cursor: every group before this one has been trained."""
    consumed_beyond: list[int] = []
    """Groups that overtook it, and have been trained too (`schedule.window`)."""
    since_publication: tuple[int, int] = (0, 0)
    """Steps made and groups consumed since `version` was published."""
    admission: dict[str, Any] = {}
    """`Admission.snapshot()`: slots and leases. Nobody who held a lease outlives the run; see `Admission.adopt`."""

    record_bytes: dict[str, int] = {}
    """By file name, for example `metrics.jsonl`: how long that record was. `rewind` cuts off what came later."""
    record_kept: dict[str, list[str]] = {}
    """Lines behind them that the disk had not taken yet, each with its end. `rewind` writes them."""
    pending_rows: list[dict[str, Any]] = []
    """Rows of steps whose weights had not been delivered: not in the record yet."""
    elapsed: float = 0.0
    """Seconds of running, over all processes that the run had so far."""
    generated_tokens: int = 0

    def __post_init__(self) -> None:
        counts = (self.steps, self.version, self.consumed, *self.since_publication)
        if min(counts) < 0 or max(counts) >= 2**63:
            raise ValueError("steps, version and groups are counts: never negative, and below 2**63")
        if min(self.record_bytes.values(), default=0) < 0:
            raise ValueError("`record_bytes` are lengths, and never negative")
        if any(group <= self.consumed for group in self.consumed_beyond):
            raise ValueError(f"`consumed_beyond` names a group before {self.consumed}, or that group itself")


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
