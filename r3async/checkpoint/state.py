"""The state of a run at one step, without tensors. Each part of it is declared once, by the
component that knows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, Self, TypedDict

import msgspec

from r3async.checkpoint.manifest import CheckpointError, IncompatibleCheckpoint
from r3async.data.versions import Lineage
from r3async.untrusted import MalformedError, decode_json
from r3async.world.appending import RecordFlusher

STATE_SCHEMA = 2
"""Schema version of the state, to be raised when the meaning of a field changes. New fields have
defaults and need no new schema."""

CONDUCTOR_RECORD_FILES = ("metrics.jsonl", "episodes.jsonl", "evaluation.jsonl")
LEARNER_RECORD_FILES = ("routing.jsonl", "trained.jsonl")
RECORD_FILES = CONDUCTOR_RECORD_FILES + LEARNER_RECORD_FILES
"""Record files of a run with an entry for each step: a resume takes back what came
after its checkpoint."""


class ConductorState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The conductor's part of a run's state between two steps."""

    admission: dict[str, Any] = {}
    """Slots and leases, from `AdmissionController.state_dict()`. No holder of a lease outlives the
    run; see `AdmissionController.requeue_after_resume`."""
    tasks: dict[str, Any] = {}
    """Scores of tasks, from `TaskHistory.state_dict()`, if they influence which tasks are posed."""
    record_bytes: dict[str, int] = {}
    """Length of each record in bytes, by file name, for example `metrics.jsonl`. `rewind_records`
    cuts off what came later."""
    record_kept: dict[str, list[str]] = {}
    """Lines behind these lengths that the disk had not taken yet, each with its line end.
    `rewind_records` writes them."""
    elapsed: float = 0.0
    """Seconds of running, summed over all processes that the run has had so far."""
    generated_tokens: int = 0

    async def with_record_positions(
        self, run_dir: Path, names: Sequence[str], *, keeper: RecordFlusher
    ) -> Self:
        """Return the state with the current positions of these records, which are then on the disk
        up to there. Only this process appends to the records."""
        positions = {name: keeper.file_position(run_dir / name) for name in names}
        await keeper.fsync_files(run_dir, names)
        kept = {
            name: [line.decode(errors="replace") for line in at.waiting_records]
            for name, at in positions.items()
            if at.waiting_records
        }
        return msgspec.structs.replace(
            self,
            record_bytes=self.record_bytes
            | {name: at.whole_bytes for name, at in positions.items()},
            record_kept=self.record_kept | kept,
        )


class TrainingState(ConductorState, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The state of a run's training: the conductor's part and what the learner adds.

    What the learner's ranks hold (optimizer steps and with them the learning rate, the trust
    region's controller, random number generators) is in their files, see `LearnerMetadata`.
    """

    steps: int
    """Steps made."""
    version: int
    """Version published last. Engines get the checkpoint's weights under this number again."""
    lineage: Lineage = Lineage()
    """Lineage in which `version` is counted, with its ancestors."""
    consumed: int
    """Data cursor: every group before this one has been trained."""
    consumed_beyond: list[int] = []
    """Groups beyond the cursor that have been trained too (`schedule.window`)."""
    since_publication: tuple[int, int] = (0, 0)
    """Steps made and groups consumed since `version` was published."""

    def __post_init__(self) -> None:
        counts = (self.steps, self.version, self.consumed, *self.since_publication)
        if min(counts) < 0 or max(counts) >= 2**63:
            raise ValueError(
                "steps, version and groups are counts: never negative, and below 2**63"
            )
        if min(self.record_bytes.values(), default=0) < 0:
            raise ValueError("`record_bytes` are lengths, and never negative")
        if any(group <= self.consumed for group in self.consumed_beyond):
            raise ValueError(
                f"`consumed_beyond` names a group before {self.consumed}, or that group itself"
            )


class TrustRegionState(TypedDict):
    """The state of the trust region's controller. `gaps`, `variances` and `reach` are missing where
    an older release wrote the state.

    Attributes:
        coef: Coefficient of the KL term.
        error: Error of the last step; None before the first.
        gaps: Gaps by age, see `TrustRegion.extrapolate_served_drift`; empty before they are known.
        variances: Variances of the last measurements, see `TrustRegion.record_served_gaps`.
        reach: See `TrustRegion.max_share`.
    """

    coef: float
    error: float | None
    gaps: NotRequired[list[float | None]]
    variances: NotRequired[list[float]]
    reach: NotRequired[float]


class RunState(TrainingState, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole content of `run.json`: the training state, and the run that it belongs to."""

    schema: int = STATE_SCHEMA
    run_id: str
    config: dict[str, Any]
    """Resolved configuration (`config_to_dict`)."""
    model_path: str
    """Start path, from which configuration, tokenizer and the reference model come."""
    model_fingerprint: str
    """Fingerprint of that directory, see `fingerprint_model`."""
    pending_rows: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """Rows of steps that are not in the record, in a checkpoint of an older release, which wrote a
    row when the step's weights were delivered. A resume writes them."""


class _SchemaOnly(msgspec.Struct):
    schema: int


def encode_state(state: RunState) -> bytes:
    return msgspec.json.format(msgspec.json.encode(state)) + b"\n"


def decode_state(data: bytes) -> RunState:
    """Decode the content of `run.json`. Raises `CheckpointError` that says what is wrong."""
    try:
        schema = decode_json(data, _SchemaOnly).schema
        if schema != STATE_SCHEMA:
            raise IncompatibleCheckpoint(
                f"run.json: it is of schema {schema}, and this version of r3async reads "
                f"{STATE_SCHEMA}: resume with the version that wrote it, or `r3async export` its "
                "model there and start from that"
            )
        return decode_json(data, RunState)
    except MalformedError as error:
        raise CheckpointError(f"run.json: {error}") from error
