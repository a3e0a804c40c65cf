"""Records of routes, and who writes them: what the engine returned and what the learner's routers did, in files of their own, so
that they can be compared.

Each process that writes has files of its own, `run_dir/routes/NAME.N.routes`, and appends records to them: engine calls
(`EngineCall`, of `engine-GENERATOR`) and trained samples (`TrainedRoutes`, of `learner`). A record (`container.py`) has a msgpack
header, with a crc32 at its end, and then a frame for each array. A file that a killed process left torn is read up to there, and
what is wrong with it is reported.

Bytes on disk, with L MoE layers and K experts a token (ids of one byte, two beyond 256 experts): the learner's record is
29 + 2 L K ids per token; the engine's is 12 per sampled token, L K ids per fed token, and 4 per token of every call's prompt.
48 layers with 8 of 128 experts: 0.8 + 0.4 kB per token, so 5 MB for one trajectory of 4,096 tokens.
"""

from __future__ import annotations

import re
import zlib
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.container import FramedRecord, RecordFormat, TornRecord, map_file
from r3async.data.records import Sample
from r3async.data.routes import RoutingError, route_dtype
from r3async.data.versions import expand_version_spans
from r3async.record.merging import merge_traces
from r3async.rollout.engines import Engine, Generation, GenerationRequest
from r3async.transport.codec import array_bytes, compute_checksum
from r3async.untrusted import decode_msgpack
from r3async.world import File, Files, World
from r3async.world.appending import AppendFile, RecordFlusher
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.learner import MinibatchResult


ROUTES_CONTAINER = RecordFormat(b"r3route2")
_ARRAY_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIqQf"}
MAX_PENDING_BYTES = 64 * 2**20
"""Of records that the disk has not taken yet: one may take 5 MB."""
_EPISODE_ID = re.compile(r"(g(\d+)e(\d+))(?:[ts](\d+))?")


class RouteFileError(ValueError):
    """A file of routes that cannot be read; the message names it and says where."""


class EpisodeId(NamedTuple):
    """What a trajectory's, a sample's (`…s0`) or an engine request's id (`…t0`) says. `index`: of the sample or turn."""

    trajectory_id: str
    group_index: int
    episode_index: int
    sample_or_turn: int


def parse_episode_id(text: str) -> EpisodeId | None:
    """None for an id of something else than an episode."""
    found = _EPISODE_ID.fullmatch(text)
    return EpisodeId(found[1], int(found[2]), int(found[3]), int(found[4] or 0)) if found else None


class TraceFilter:
    """Whose routes are kept (`routing.trace`): a question of the id alone, so generators and learner give one answer."""

    def __init__(self, config: Config):
        self._mode = config.routing.trace
        self._groups = config.schedule.groups_per_step * config.routing.trace_every

    def should_trace(self, episode_id: str) -> bool:
        """`sample`: the first trajectory of every `routing.trace_every`-th step, beginning with the first."""
        if self._mode == "off" or (which := parse_episode_id(episode_id)) is None:
            return False
        return self._mode == "all" or (which.episode_index == 0 and which.group_index % self._groups == 0)


class EngineCall(msgspec.Struct, frozen=True):
    """One call of the engine, as it answered. `prompt_ids` int32 `[P]`; `token_ids` int32 and `logprobs` float32 `[n]`:
    what it sampled. `rows` `[m, L, K]`: the experts of positions `routes_from ..`, or of no position. `policy_version` int32
    `[n]`: the weights that sampled each token."""

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
    """One sample of optimizer step `step` (from 1), `[T]` tokens, and what the learner's routers did with them.

    `token_ids`, `loss_mask`, `rollout_logprobs`, `policy_version`, `turn`, `rewards`: columns of the sample. `own`, `used`
    `[T, L, K]`: the experts that the routers would have chosen, and those that they used. `learner_logprobs` float32 `[T]`: what
    the learner thought of the trained tokens before the step, NaN for the others; None if no rank kept it. `advantages` float32
    `[T]`: what the loss took; None in records of before they were kept.
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


class RouteFile(AppendFile):
    """Appends records to a new file `directory/NAME.N.routes`, made with the first one. Threads may share it."""

    terminator = b""

    def __init__(self, directory: Path, name: str, *, world: World = REAL_WORLD, keeper: RecordFlusher | None = None):
        super().__init__(
            directory / f"{name}.0.routes", world=world, flusher=keeper, max_waiting_bytes=MAX_PENDING_BYTES
        )
        self._name = name

    def append(self, record: EngineCall | TrainedRoutes) -> bool:  # type: ignore[override]
        """See `AppendFile.append`."""
        fields = msgspec.structs.asdict(record)
        arrays = {name: np.ascontiguousarray(a) for name, a in fields.items() if isinstance(a, np.ndarray)}
        bodies = [array_bytes(a) for a in arrays.values()]
        header = msgspec.msgpack.encode(
            {
                "kind": type(record).__name__,
                "facts": {name: value for name, value in fields.items() if name not in arrays},
                "arrays": [(name, a.dtype.str, a.shape) for name, a in arrays.items()],
                "checksum": compute_checksum(bodies),
            }
        )
        return super().append(b"".join(ROUTES_CONTAINER.encode_record([header + _header_checksum(header), *bodies])))

    def _open_file(self) -> File:
        make_directory(self.path.parent, files=self._files)
        number = 0
        while True:
            try:
                self.path = self.path.with_name(f"{self._name}.{number}.routes")
                return self._files.open(self.path, exclusive=True)
            except FileExistsError:
                number += 1  # of an earlier process of this name


def _header_checksum(header: bytes | memoryview) -> bytes:
    return zlib.crc32(header).to_bytes(4, "little")


class RouteEntry(NamedTuple):
    """Where a record is, and what its header says. `arrays`: name, dtype and shape of each. `checksum`: of them."""

    path: Path
    offset: int
    kind: str
    facts: dict[str, Any]
    arrays: list[tuple[str, str, list[int]]]
    checksum: int


def scan_route_file(path: Path, offset: int = 0, *, files: Files = REAL_WORLD.files) -> tuple[list[RouteEntry], str]:
    """All records of a file from byte `offset` on, without their arrays; and what is wrong with the file, "" if nothing is."""
    entries: list[RouteEntry] = []
    for record in ROUTES_CONTAINER.iter_records(map_file(path, files=files), offset):
        if isinstance(record, TornRecord):
            why = f"{record.reason} (its process was killed, or is still writing)"
            return entries, f"{path}: from byte {record.offset} on there is no record: {why}"
        sealed = record.frames[0] if record.frames else memoryview(b"")
        header = sealed[:-4]
        if sealed[-4:] != _header_checksum(header):
            return entries, f"{path}: the record at byte {record.offset} is damaged; what follows is not read"
        entries.append(RouteEntry(path, record.offset, **decode_msgpack(header, dict[str, Any])))
    return entries, ""


def load_route_record(entry: RouteEntry, kind: type[RouteRecord], *, files: Files = REAL_WORLD.files) -> RouteRecord:
    """The record with its arrays (read-only). Raises `RouteFileError` if they are damaged, or of another kind."""
    where = f"{entry.path}: the record at byte {entry.offset}"
    record = next(ROUTES_CONTAINER.iter_records(map_file(entry.path, files=files), entry.offset))
    if not isinstance(record, FramedRecord) or compute_checksum(record.frames[1:]) != entry.checksum:
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
    """What a run kept of its routes. `trained_entries`: samples in the order of their steps; `call_entries`: by trajectory,
    in order of time; `problems`: what could not be read."""

    def __init__(self, run_dir: Path, *, files: Files = REAL_WORLD.files):
        self._directory, self._files = run_dir / "routes", files
        self._last: dict[str, int] = {}
        self.trained_entries: list[RouteEntry] = []
        self.call_entries: dict[str, list[RouteEntry]] = {}
        self.problems: list[str] = []
        self.read_new()

    def read_new(self) -> list[RouteEntry]:
        """Take in what was written since the last call; the samples among it."""
        self.problems, new = [], []
        for name in filter(lambda name: name.endswith(".routes"), self._files.list_names(self._directory)):
            last = self._last.get(name)
            entries, problem = scan_route_file(self._directory / name, last or 0, files=self._files)
            self.problems += [problem] if problem else []
            for entry in entries if last is None else entries[1:]:
                self._last[name] = entry.offset
                if entry.kind == TrainedRoutes.__name__:
                    new.append(entry)
                else:
                    insort(self.call_entries.setdefault(entry.facts["trajectory_id"], []), entry, key=_get_call_time)
        self.trained_entries = sorted(self.trained_entries + new, key=_get_sample_key) if new else self.trained_entries
        return new

    def load_calls(self, trajectory_id: str) -> list[EngineCall]:
        """Raises `RouteFileError`."""
        return [
            load_route_record(entry, EngineCall, files=self._files)
            for entry in self.call_entries.get(trajectory_id, ())
        ]


EXPERT_LOAD_EVERY = 10
"""Steps from one record of the load per expert to the next."""


def record_engine_routes(
    engine: Engine, run_dir: Path, generator_id: str, config: Config, *, world: World = REAL_WORLD
) -> Engine:
    """`engine`, writing down what it returns for the trajectories that `routing.trace` asks for; or `engine` itself."""
    if engine.routing is None or config.routing.trace == "off":
        return engine
    file = RouteFile(run_dir / "routes", f"engine-{generator_id}", world=world)
    return cast(Engine, _RouteRecordingEngine(engine, file, TraceFilter(config), world))


class _RouteRecordingEngine:
    """Everything but `generate` is the engine's own."""

    def __init__(self, engine: Engine, file: RouteFile, plan: TraceFilter, world: World):
        self._engine, self._file, self._plan, self._world = engine, file, plan, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        """The engine's answer, recorded before anyone else has seen it: nothing of ours can have touched the rows. An aborted
        one is nobody's, and is not kept."""
        generation = await self._engine.generate(request)
        which = parse_episode_id(request.request_id)
        if which is not None and generation.stop_reason != "abort" and self._plan.should_trace(request.request_id):
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
                policy_version=expand_version_spans(generation.version_spans, len(generation.token_ids)),
            )
            await self._world.threads.run(self._file.append, call)
        return generation


class RouteFileTracer:
    """What the learner's routers did, step by step.

    `run_dir/routing.jsonl` gets an object a step, `{"step", "agreement": [L]}`, every `EXPERT_LOAD_EVERY`-th step also `"load":
    [[experts] * L]`, tokens of that step: 30 kB for 48 layers of 128 experts, where the agreement is 0.4 kB. Routes of the
    trajectories that `routing.trace` asks for go to `run_dir/routes`. Traces that contradict each other are reported to
    `report_event(event, **fields)`: they are no reason to end a run.
    """

    def __init__(
        self, run_dir: Path, config: Config, report_event: Callable[..., object], *, world: World = REAL_WORLD
    ):
        self._plan = TraceFilter(config)
        self._lines = AppendFile(run_dir / "routing.jsonl", world=world)
        self._file = RouteFile(run_dir / "routes", "learner", world=world)
        self._report = report_event

    def should_trace(self, samples: Iterable[Sample]) -> bool:
        """Whether the step that trains these has to be traced."""
        return any(self._plan.should_trace(sample.sample_id) for sample in samples)

    def write_trace(self, step: int, samples: Sequence[Sample], result: MinibatchResult) -> None:
        """Step `step`, from 1, trained `samples`. Blocks for as long as the disk does."""
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
                table, rows = tables[sample_id], slice(trace.cu_seqlens[index], trace.cu_seqlens[index + 1])
                columns = ("token_ids", "loss_mask", "rollout_logprobs", "policy_version", "turn", "rewards")
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
