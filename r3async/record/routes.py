"""Records of MoE routes: the experts that the engine returned, and those that the learner used.

Each writing process appends records to its own files, `run_dir/routes/NAME.N.routes`: a generator
(`engine-GENERATOR`) writes engine calls (`EngineCall`), the learner (`learner`) writes trained
samples (`TrainedRoutes`). A record (`container.py`) has a msgpack header that ends with a crc32,
followed by one frame per array. A file that a killed process left torn is read up to the tear, and
the problem is reported.

Size on disk, with L MoE layers and K experts per token (expert ids take one byte, two beyond 256
experts): the learner's record takes 29 bytes and 2 L K ids per token; the engine's takes 12 bytes
per sampled token, L K ids per fed token, and 4 bytes per prompt token of every call. With 48 layers
and 8 of 128 experts that is 0.8 + 0.4 kB per token, or 5 MB for a trajectory of 4,096 tokens.
"""

from __future__ import annotations

import re
import zlib
from bisect import insort
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.container import FramedRecord, RecordFormat, TornRecord, map_file
from r3async.data.routes import RoutingError, route_dtype
from r3async.data.tokens import Sample
from r3async.data.versions import expand_version_spans
from r3async.data.wire_frames import array_bytes, compute_checksum
from r3async.record.merged_traces import merge_traces
from r3async.rollout.engine import Engine, Generation, GenerationRequest
from r3async.untrusted import decode_msgpack, format_value
from r3async.world import EventReporter, File, Files, World
from r3async.world.appending import AppendFile, RecordFlusher
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.learner import MinibatchResult


ROUTES_CONTAINER = RecordFormat(b"r3route2")
_ARRAY_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIqQf"}
MAX_PENDING_BYTES = 64 * 2**20
"""Maximum bytes of records in memory that the disk has not taken yet; one record may take 5 MB."""
TRACE_EVERY_STEPS = 10
"""Steps between two of which `routing.trace` = "sample" keeps a trajectory."""
_EPISODE_ID = re.compile(r"(g(\d{1,18})e(\d{1,18}))(?:[ts](\d{1,18}))?")


class RouteFileError(ValueError):
    """A route file that cannot be read; the message names the file and the place in it."""


class EpisodeId(NamedTuple):
    """The parts of the id of a trajectory, a sample (`…s0`) or an engine request (`…t0`).

    Attributes:
        sample_or_turn: Index of the sample or turn; 0 if the id has none.
    """

    trajectory_id: str
    group_index: int
    episode_index: int
    sample_or_turn: int


def parse_episode_id(text: str) -> EpisodeId | None:
    """Parse an id; None if it is not the id of an episode."""
    found = _EPISODE_ID.fullmatch(text)
    return EpisodeId(found[1], int(found[2]), int(found[3]), int(found[4] or 0)) if found else None


class TraceFilter:
    """The choice of trajectories whose routes are kept (`routing.trace`).

    It depends on the id alone, so generators and learner agree.
    """

    def __init__(self, config: Config):
        self._mode = config.routing.trace
        self._groups = config.schedule.prompts_per_step * TRACE_EVERY_STEPS

    def should_trace(self, episode_id: str) -> bool:
        """Return True if the routes of this episode are kept.

        Mode `sample` keeps the first trajectory of every `TRACE_EVERY_STEPS`-th step, starting
        with the first step.
        """
        if self._mode == "off" or (which := parse_episode_id(episode_id)) is None:
            return False
        return self._mode == "all" or (
            which.episode_index == 0 and which.group_index % self._groups == 0
        )


class EngineCall(msgspec.Struct, frozen=True):
    """One engine call with the answer of the engine.

    Attributes:
        prompt_ids: int32 `[P]`.
        token_ids: Sampled tokens, int32 `[n]`.
        logprobs: Log-probs of the sampled tokens, float32 `[n]`.
        rows: Experts of the positions from `routes_from` on, `[m, L, K]`; empty if the
            engine returned none.
        policy_version: Version of the weights that sampled each token, int32 `[n]`.
    """

    trajectory_id: str
    turn: int
    time: float
    routes_from: int
    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    rows: np.ndarray
    policy_version: np.ndarray


class TrainedRoutes(msgspec.Struct, frozen=True):
    """One sample of an optimizer step, with `T` tokens and the routes that the learner's
    routers gave them.

    `token_ids`, `loss_mask`, `rollout_logprobs`, `policy_version`, `turn` and `rewards` are
    columns of the sample.

    Attributes:
        step: Number of the optimizer step, from 1.
        own: Experts that the learner's routers would have chosen, `[T, L, K]`.
        used: Experts that the learner's routers used, `[T, L, K]`.
        learner_logprobs: Log-probs of the trained tokens under the learner before the step, NaN for
            other tokens, float32 `[T]`; None if no rank kept them.
        advantages: Advantages that the loss used, float32 `[T]`; None in records written before
            advantages were kept.
    """

    step: int
    sample_id: str
    trajectory_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    policy_version: np.ndarray
    turn: np.ndarray
    rewards: np.ndarray
    own: np.ndarray
    used: np.ndarray
    learner_logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None


RouteRecord = TypeVar("RouteRecord", EngineCall, TrainedRoutes)


class _CallFacts(msgspec.Struct, forbid_unknown_fields=True):
    trajectory_id: str
    turn: int
    time: float
    routes_from: int


class _TrainedFacts(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    sample_id: str
    trajectory_id: str
    learner_logprobs: None = None
    advantages: None = None


class _ArrayShape(NamedTuple):
    """The dtypes (`np.dtype.kind`) of an array, and the names of its dimensions: equal names
    are equal lengths."""

    kinds: str
    dims: str


_INTEGERS = "iu"
_FACT_TYPES: dict[str, type] = {
    EngineCall.__name__: _CallFacts,
    TrainedRoutes.__name__: _TrainedFacts,
}
_ARRAY_SHAPES = {
    EngineCall.__name__: {
        "prompt_ids": _ArrayShape(_INTEGERS, "P"),
        "token_ids": _ArrayShape(_INTEGERS, "n"),
        "logprobs": _ArrayShape("f", "n"),
        "rows": _ArrayShape(_INTEGERS, "mLK"),
        "policy_version": _ArrayShape(_INTEGERS, "n"),
    },
    TrainedRoutes.__name__: {
        "token_ids": _ArrayShape(_INTEGERS, "T"),
        "loss_mask": _ArrayShape("b", "T"),
        "rollout_logprobs": _ArrayShape("f", "T"),
        "policy_version": _ArrayShape(_INTEGERS, "T"),
        "turn": _ArrayShape(_INTEGERS, "T"),
        "rewards": _ArrayShape("f", "T"),
        "own": _ArrayShape(_INTEGERS, "TLK"),
        "used": _ArrayShape(_INTEGERS, "TLK"),
        "learner_logprobs": _ArrayShape("f", "T"),
        "advantages": _ArrayShape("f", "T"),
    },
}


class RouteFile(AppendFile):
    """A new file `directory/NAME.N.routes` to append records to, created with the first one.
    Threads may share it."""

    terminator = b""

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        world: World = REAL_WORLD,
        keeper: RecordFlusher | None = None,
    ):
        super().__init__(
            directory / f"{name}.0.routes",
            world=world,
            flusher=keeper,
            max_waiting_bytes=MAX_PENDING_BYTES,
        )
        self._name = name

    def append(self, record: EngineCall | TrainedRoutes) -> bool:  # type: ignore[override]
        """Encode a record and append it. Implement `AppendFile.append`."""
        fields = msgspec.structs.asdict(record)
        arrays = {
            name: np.ascontiguousarray(a) for name, a in fields.items() if isinstance(a, np.ndarray)
        }
        bodies = [array_bytes(a) for a in arrays.values()]
        header = msgspec.msgpack.encode(
            {
                "kind": type(record).__name__,
                "facts": {name: value for name, value in fields.items() if name not in arrays},
                "arrays": [(name, a.dtype.str, a.shape) for name, a in arrays.items()],
                "checksum": compute_checksum(bodies),
            }
        )
        return super().append(
            b"".join(ROUTES_CONTAINER.encode_record([header + _header_checksum(header), *bodies]))
        )

    def _open_file(self) -> File:
        make_directory(self.path.parent, files=self._files)
        number = 0
        while True:
            try:
                self.path = self.path.with_name(f"{self._name}.{number}.routes")
                return self._files.open(self.path, exclusive=True)
            except FileExistsError:
                number += 1  # an earlier process of this name wrote the file


def _header_checksum(header: bytes | memoryview) -> bytes:
    return zlib.crc32(header).to_bytes(4, "little")


class RouteEntry(NamedTuple):
    """The position and the header of a record.

    Attributes:
        offset: Byte offset of the record in the file.
        arrays: Name, dtype and shape of each array.
        checksum: Checksum of the arrays.
    """

    path: Path
    offset: int
    kind: str
    facts: dict[str, Any]
    arrays: list[tuple[str, str, list[int]]]
    checksum: int


def scan_route_file(
    path: Path, offset: int = 0, *, files: Files = REAL_WORLD.files
) -> tuple[list[RouteEntry], str]:
    """Scan the records of a file from byte `offset` on, without their arrays.

    Returns the entries, and a description of the problem if the file is torn or damaged, else "".
    """
    entries: list[RouteEntry] = []
    problem = ""
    try:
        view = map_file(path, files=files)
    except OSError as error:
        return entries, f"{path}: {error.strerror or error}"
    for record in ROUTES_CONTAINER.iter_records(view, offset):
        if isinstance(record, TornRecord):
            why = f"{record.reason} (its process was killed, or is still writing)"
            return entries, f"{path}: from byte {record.offset} on there is no record: {why}"
        sealed = record.frames[0] if record.frames else memoryview(b"")
        header = sealed[:-4]
        if sealed[-4:] != _header_checksum(header):
            return (
                entries,
                f"{path}: the record at byte {record.offset} is damaged; what follows is not read",
            )
        try:
            entry = RouteEntry(path, record.offset, **decode_msgpack(header, dict[str, Any]))
            _check_entry(entry)
        except (TypeError, ValueError) as error:
            problem = (
                problem
                or f"{path}: the record at byte {record.offset} is not of this release ({error})"
            )
            continue
        entries.append(entry)
    return entries, problem


def _check_entry(entry: RouteEntry) -> None:
    """Raise `ValueError` if a record has other facts or arrays than this release writes."""
    facts = _FACT_TYPES.get(entry.kind)
    if facts is None:
        raise ValueError(f"its kind is {format_value(entry.kind)}")
    msgspec.convert(entry.facts, facts)
    lengths: dict[str, int] = {}
    for name, dtype, shape in msgspec.convert(entry.arrays, list[tuple[str, str, list[int]]]):
        known = _ARRAY_SHAPES[entry.kind].get(name)
        if (
            known is None
            or dtype not in _ARRAY_DTYPES
            or _ARRAY_DTYPES[dtype].kind not in known.kinds
        ):
            raise ValueError(f"no record has {name} of type {dtype}")
        sizes = dict(zip(known.dims, shape, strict=False))
        if len(shape) != len(known.dims) or any(
            lengths.setdefault(dim, size) != size for dim, size in sizes.items()
        ):
            raise ValueError(f"{name} has the shape {shape}")


def load_route_record(
    entry: RouteEntry, kind: type[RouteRecord], *, files: Files = REAL_WORLD.files
) -> RouteRecord:
    """Load a record with its arrays (read-only). Raises `RouteFileError` if it is damaged or
    of another kind."""
    where = f"{entry.path}: the record at byte {entry.offset}"
    try:
        view = map_file(entry.path, files=files)
    except OSError as error:
        raise RouteFileError(f"{entry.path}: {error.strerror or error}") from error
    record = next(ROUTES_CONTAINER.iter_records(view, entry.offset), None)
    if (
        not isinstance(record, FramedRecord)
        or compute_checksum(record.frames[1:]) != entry.checksum
    ):
        raise RouteFileError(f"{where} is damaged")
    try:
        if entry.kind != kind.__name__:
            raise ValueError(f"it is a record of {entry.kind}")
        arrays: dict[str, Any] = {}
        for (name, dtype, shape), frame in zip(entry.arrays, record.frames[1:], strict=True):
            arrays[name] = np.frombuffer(frame, _ARRAY_DTYPES[dtype]).reshape(shape)
        return kind(**entry.facts, **arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise RouteFileError(f"{where} cannot be read: {error!r}") from error


def _get_sample_key(entry: RouteEntry) -> tuple[int, str]:
    return entry.facts["step"], entry.facts["sample_id"]


def _get_call_time(entry: RouteEntry) -> float:
    return entry.facts["time"]


class RouteIndex:
    """An index of the routes that a run kept.

    Attributes:
        trained_entries: Trained samples, in the order of their steps.
        call_entries: Engine calls by trajectory, in order of time.
        problems: Descriptions of what the last `read_new` could not read.
    """

    def __init__(self, run_dir: Path, *, files: Files = REAL_WORLD.files):
        self._directory = run_dir / "routes"
        self.files = files
        self._last: dict[str, int] = {}
        self.trained_entries: list[RouteEntry] = []
        self.call_entries: dict[str, list[RouteEntry]] = {}
        self.problems: list[str] = []
        self.read_new()

    def read_new(self) -> list[RouteEntry]:
        """Index the records written since the last call, and return those of trained samples."""
        self.problems = []
        new = []
        try:
            names = [
                name for name in self.files.list_names(self._directory) if name.endswith(".routes")
            ]
        except OSError as error:
            self.problems.append(f"{self._directory}: {error.strerror or error}")
            return []
        for name in names:
            last = self._last.get(name)
            entries, problem = scan_route_file(self._directory / name, last or 0, files=self.files)
            self.problems += [problem] if problem else []
            for entry in entries if last is None else entries[1:]:
                self._last[name] = entry.offset
                if entry.kind == TrainedRoutes.__name__:
                    new.append(entry)
                else:
                    insort(
                        self.call_entries.setdefault(entry.facts["trajectory_id"], []),
                        entry,
                        key=_get_call_time,
                    )
        self.trained_entries = (
            sorted(self.trained_entries + new, key=_get_sample_key) if new else self.trained_entries
        )
        return new

    def load_calls(self, trajectory_id: str) -> list[EngineCall]:
        """Load the engine calls of a trajectory, in order of time. Raises `RouteFileError`."""
        return [
            load_route_record(entry, EngineCall, files=self.files)
            for entry in self.call_entries.get(trajectory_id, ())
        ]


EXPERT_LOAD_EVERY = 10
"""Steps between two records of the load per expert."""


def record_engine_routes(
    engine: Engine, run_dir: Path, generator_id: str, config: Config, *, world: World = REAL_WORLD
) -> Engine:
    """Wrap `engine` to record its answers for the trajectories that `routing.trace` selects.

    Returns `engine` itself if it has no routing or nothing is traced.
    """
    if engine.routing is None or config.routing.trace == "off":
        return engine
    file = RouteFile(run_dir / "routes", f"engine-{generator_id}", world=world)
    return cast(Engine, _RouteRecordingEngine(engine, file, TraceFilter(config), world))


class _RouteRecordingEngine:
    """An engine whose `generate` records routes; every other attribute is the wrapped engine's."""

    def __init__(self, engine: Engine, file: RouteFile, plan: TraceFilter, world: World):
        self._engine = engine
        self._file = file
        self._plan = plan
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the engine's answer, recorded before any other code of r3async could
        change its rows.

        Aborted answers belong to no trajectory and are not recorded.
        """
        generation = await self._engine.generate(request)
        which = parse_episode_id(request.request_id)
        if (
            which is not None
            and generation.stop_reason != "abort"
            and self._plan.should_trace(request.request_id)
        ):
            rows = generation.routed_experts
            call = EngineCall(
                trajectory_id=which.trajectory_id,
                turn=which.sample_or_turn,
                time=self._world.clock.time(),
                routes_from=generation.routes_from,
                prompt_ids=request.prompt_ids,
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                rows=np.zeros((0, 0, 0), np.uint8) if rows is None else rows,
                policy_version=expand_version_spans(
                    generation.version_spans, len(generation.token_ids)
                ),
            )
            await self._world.threads.run(self._file.append, call)
        return generation


class RouteFileTracer:
    """A recorder of the learner's routing, step by step.

    `run_dir/routing.jsonl` gets one object per step, `{"step", "agreement": [L]}`, and on every
    `EXPERT_LOAD_EVERY`-th step also `"load": [[experts] * L]`, in tokens of that step. The load
    takes 30 kB for 48 layers of 128 experts, the agreement 0.4 kB. Routes of the trajectories that
    `routing.trace` selects go to `run_dir/routes`. Contradicting traces are reported with
    `report_event(event, **fields)`; they do not end the run.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        report_event: EventReporter,
        *,
        world: World = REAL_WORLD,
    ):
        self._plan = TraceFilter(config)
        self._lines = AppendFile(run_dir / "routing.jsonl", world=world)
        self._file = RouteFile(run_dir / "routes", "learner", world=world)
        self._report = report_event

    def should_trace(self, samples: Iterable[Sample]) -> bool:
        """Return True if the step that trains `samples` has to be traced."""
        return any(self._plan.should_trace(sample.sample_id) for sample in samples)

    def write_trace(self, step: int, samples: Sequence[Sample], result: MinibatchResult) -> None:
        """Record the routing of step `step` (from 1), which trained `samples`. Blocks as long
        as the disk does."""
        if not len(result.layer_agreement):
            return
        try:
            self._write_agreement(step, result)
            if result.traces:
                self._write_routes(step, samples, result)
        except RoutingError as error:
            self._report("routes_not_written", step=step, error=str(error))

    def _write_agreement(self, step: int, result: MinibatchResult) -> None:
        line: dict[str, Any] = {"step": step}
        if "routing/agreement" in result.metrics:
            line["agreement"] = [round(float(share), 5) for share in result.layer_agreement]
        if (step - 1) % EXPERT_LOAD_EVERY == 0:
            line["load"] = result.expert_load.tolist()
        self._lines.append(msgspec.json.encode(line))

    def _write_routes(self, step: int, samples: Sequence[Sample], result: MinibatchResult) -> None:
        layers, experts = result.expert_load.shape
        dtype = route_dtype(experts)
        tables = {sample.sample_id: sample.table for sample in samples}
        for trace in merge_traces(result.traces, layers):
            for index, sample_id in enumerate(trace.sample_ids):
                which = parse_episode_id(sample_id)
                if which is None or not self._plan.should_trace(sample_id):
                    continue
                table = tables[sample_id]
                rows = slice(trace.cu_seqlens[index], trace.cu_seqlens[index + 1])
                columns = (
                    "token_ids",
                    "loss_mask",
                    "rollout_logprobs",
                    "policy_version",
                    "turn",
                    "rewards",
                )
                self._file.append(
                    TrainedRoutes(
                        step,
                        sample_id,
                        which.trajectory_id,
                        **{name: table[name] for name in columns},
                        own=trace.own[rows].astype(dtype),
                        used=trace.used[rows].astype(dtype),
                        learner_logprobs=None if trace.logprobs is None else trace.logprobs[rows],
                        advantages=table["advantages"] if "advantages" in table else None,  # noqa: SIM401
                    )
                )
