"""Records of routes: what the engine returned, what the learner's routers did, merged over ranks and compared.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.container import FramedRecord, RecordFormat, TornRecord, map_file
from r3async.data.routes import RoutingError, route_dtype
from r3async.data.tokens import UNSAMPLED_VERSION, Sample
from r3async.data.versions import expand_version_spans
from r3async.data.wire import array_bytes, compute_checksum
from r3async.learner.batch import expand_prefixes
from r3async.rollout.engine import Engine, Generation, GenerationRequest
from r3async.untrusted import decode_msgpack
from r3async.world import File, Files, World
from r3async.world.appending import AppendFile, RecordFlusher
from r3async.world.files import make_directory
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.learner import MinibatchResult, RouteTrace


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
        self._directory, self.files = run_dir / "routes", files
        self._last: dict[str, int] = {}
        self.trained_entries: list[RouteEntry] = []
        self.call_entries: dict[str, list[RouteEntry]] = {}
        self.problems: list[str] = []
        self.read_new()

    def read_new(self) -> list[RouteEntry]:
        """Take in what was written since the last call; the samples among it."""
        self.problems, new = [], []
        for name in filter(lambda name: name.endswith(".routes"), self.files.list_names(self._directory)):
            last = self._last.get(name)
            entries, problem = scan_route_file(self._directory / name, last or 0, files=self.files)
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
            load_route_record(entry, EngineCall, files=self.files) for entry in self.call_entries.get(trajectory_id, ())
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


# Traces of what routers did, from all ranks that computed a micro-batch, put together.


def merge_traces(traces: Iterable[RouteTrace], layers: int) -> list[RouteTrace]:
    """The traces of all ranks, put together: one for each micro-batch, with all its `N` tokens and all `layers`.

    Parts may come in any order, and more than once if they are the same. Padding micro-batches are left out. Raises
    `RoutingError` for a part that is missing, and for parts that contradict each other.
    """
    parts: dict[tuple[str, ...], list[RouteTrace]] = {}
    for trace in traces:
        if trace.sample_ids:
            parts.setdefault(tuple(trace.sample_ids), []).append(trace)
    return [_merge_parts(of_one, layers) for of_one in parts.values()]


def _merge_parts(parts: list[RouteTrace], layers: int) -> RouteTrace:
    tokens, top_k = int(parts[0].cu_seqlens[-1]), max(part.own.shape[-1] for part in parts)
    merged = np.zeros((2, tokens, layers, top_k), np.uint16)
    have = np.zeros((tokens, layers), bool)
    for part in parts:
        if not part.columns:
            continue
        here = np.ix_(range(part.first, part.first + len(part.own)), part.columns)
        for whole, chosen in zip(merged, (part.own, part.used), strict=True):
            if (whole[here] != chosen)[have[here]].any():
                raise RoutingError(
                    f"traces of two ranks contradict each other in the micro-batch of {part.sample_ids[0]}"
                )
            whole[here] = chosen
        have[here] = True
    if not have.all():
        row, layer = np.argwhere(~have)[0]
        raise RoutingError(
            f"no trace has row {row} of MoE layer {layer} in the micro-batch of {parts[0].sample_ids[0]}: "
            "the traces of all its ranks are needed"
        )
    own, used = merged
    # Every rank that has them computed the same.
    logprobs = next((part.logprobs for part in parts if part.logprobs is not None), None)
    joined = msgspec.structs.replace(
        parts[0], first=0, columns=list(range(layers)), own=own, used=used, logprobs=logprobs
    )
    return joined if joined.prefixes is None else _unfold_prefixes(joined, joined.prefixes)


def _unfold_prefixes(trace: RouteTrace, prefixes: np.ndarray) -> RouteTrace:
    """With the rows of every sample, also those that it shares; these it does not train."""
    rows, edges = expand_prefixes(trace.cu_seqlens, prefixes)
    logprobs = trace.logprobs
    if logprobs is not None:
        shared = np.arange(len(rows)) - np.repeat(edges[:-1], np.diff(edges)) < np.repeat(
            prefixes[:, 1], np.diff(edges)
        )
        logprobs = np.where(shared, np.float32(np.nan), logprobs[rows])
    edges = edges.astype(np.int32)
    return msgspec.structs.replace(
        trace, cu_seqlens=edges, own=trace.own[rows], used=trace.used[rows], logprobs=logprobs, prefixes=None
    )


# Verifies that the routes used in training are the engine's own, from two records that were made apart.
#
# Nothing here asks the code that carried the routes. From the engine's record alone it is worked out again which call owns
# which position, and what that call returned is compared with what the learner's routers used.


class RouteDifference(msgspec.Struct, frozen=True):
    """A token that a router sent elsewhere. `expected`: the engine's experts; if the engine returned none for that
    position (`recorded` is False), the learner's own, which it then has to use."""

    step: int
    sample_id: str
    position: int
    layer: int
    recorded: bool
    expected: list[int]
    used: list[int]

    def to_text(self) -> str:
        whose = "the engine chose" if self.recorded else "the engine recorded nothing; the router itself chose"
        return (
            f"step {self.step}, sample {self.sample_id}, position {self.position}, MoE layer {self.layer}: "
            f"{whose} {self.expected}, training used {self.used}"
        )


class RouteComparison(msgspec.Struct):
    """Counts are of rows: one position in one MoE layer. `unrecorded`: positions of which the engine returned no row in the
    call that first fed them (the last token, an aborted call); there the router's own choice is right."""

    samples: int = 0
    equal: int = 0
    different: int = 0
    unrecorded: int = 0
    unmatched: list[str] = []
    """Samples that no attempt in the engine's record sampled."""
    first: RouteDifference | None = None

    @property
    def is_verified(self) -> bool:
        return self.equal > 0 and not self.different and not self.unmatched

    def add(self, other: RouteComparison) -> None:
        self.samples += other.samples
        self.equal += other.equal
        self.different += other.different
        self.unrecorded += other.unrecorded
        self.unmatched = [*self.unmatched, *other.unmatched]
        self.first = self.first or other.first


def find_engine_routes(trained: TrainedRoutes, calls: Sequence[EngineCall]) -> tuple[np.ndarray, np.ndarray] | None:
    """`[T, L, K]` experts of the engine and bool `[T]`, where there are any; None if no attempt sampled these tokens.

    `calls`: of the sample's trajectory, in order of time. An episode that failed was tried again under the same ids; the
    attempt that was trained is the last one that sampled exactly these tokens with exactly these log-probs. A position belongs
    to the first call *of this sample* that fed it; what other calls returned for it does not count. Only what the sample's first
    call was not asked for comes from an earlier call: one that fed the same tokens under the same weights.
    """
    for attempt in reversed(list(_split_attempts(calls))):
        if _is_source_attempt(attempt, trained):
            return _assign_rows(attempt, trained)
    return None


def _split_attempts(calls: Sequence[EngineCall]) -> Iterator[list[EngineCall]]:
    # Calls are numbered as they are asked, and written as they are answered: those of an agent may overtake each other, but
    # only another attempt uses a number again.
    attempt: list[EngineCall] = []
    for call in calls:
        if any(call.turn == earlier.turn for earlier in attempt):
            yield attempt
            attempt = []
        attempt.append(call)
    if attempt:
        yield attempt


def _common_prefix_length(call: EngineCall, tokens: np.ndarray) -> int:
    """How many tokens the call has in common with the beginning of `tokens`."""
    mine = np.concatenate([call.prompt_ids, call.token_ids])
    n = min(len(mine), len(tokens))
    unlike = mine[:n] != tokens[:n]
    return int(unlike.argmax()) if unlike.any() else n


def _is_source_call(call: EngineCall, trained: TrainedRoutes) -> bool:
    """Whether this call sampled tokens of the sample; an algorithm may have left them out of its loss."""
    rows = slice(len(call.prompt_ids), len(call.prompt_ids) + len(call.token_ids))
    if not len(call.token_ids) or _common_prefix_length(call, trained.token_ids) != rows.stop:
        return False
    # By their bits: a NaN is itself.
    same = call.logprobs.view(np.int32) == trained.rollout_logprobs[rows].view(np.int32)
    return bool((same & _make_sampled_mask(trained)[rows]).all())


def _is_source_attempt(attempt: Sequence[EngineCall], trained: TrainedRoutes) -> bool:
    found, wanted = np.zeros(len(trained.token_ids), bool), _make_sampled_mask(trained)
    for call in attempt:
        if _is_source_call(call, trained):
            found[len(call.prompt_ids) : len(call.prompt_ids) + len(call.token_ids)] = True
    return bool(wanted.any() and found[wanted].all())


def _make_sampled_mask(trained: TrainedRoutes) -> np.ndarray:
    """bool `[T]`. The loss mask says less: an algorithm takes out groups without contrast, and episodes that were cut."""
    return trained.policy_version > UNSAMPLED_VERSION


def _assign_rows(attempt: Sequence[EngineCall], trained: TrainedRoutes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros_like(trained.used)
    recorded = np.zeros(len(rows), bool)
    own = [index for index, call in enumerate(attempt) if _is_source_call(call, trained)]
    first = attempt[own[0]]
    for call in attempt[: own[0]]:
        if _find_first_version(call) == _find_first_version(first):
            part, returned = _select_returned_rows(
                call, trained, 0, min(first.routes_from, _count_first_version_tokens(call))
            )
            # Two calls of the same weights may have fed the same tokens, in other batches: a row of either will do.
            new = ~recorded[part] | same_experts(returned, trained.used[part]).all(axis=-1)
            rows[part][new] = returned[new]
            recorded[part] = True
    done = 0
    for index in own:
        call = attempt[index]
        fed = len(call.prompt_ids) + len(call.token_ids) - 1  # the last sampled token was not fed
        part, returned = _select_returned_rows(call, trained, done, fed)
        rows[part] = returned
        recorded[part] = True
        done = fed
    return rows, recorded


def _find_first_version(call: EngineCall) -> int | None:
    """The version whose weights, and whose prefix cache, the call began with."""
    versions = call.policy_version
    return int(versions[0]) if len(versions) else None


def _count_first_version_tokens(call: EngineCall) -> int:
    """Positions that the call fed before newer weights came, if they did."""
    versions, fed = call.policy_version, len(call.prompt_ids) + len(call.token_ids) - 1
    if (versions == versions[:1]).all():
        return fed
    return len(call.prompt_ids) + int((versions != versions[0]).argmax()) - 1


def _select_returned_rows(call: EngineCall, trained: TrainedRoutes, start: int, stop: int) -> tuple[slice, np.ndarray]:
    """Those of the sample's positions `start..stop` that the call has rows for, and these. Raises `RouteFileError`."""
    first = max(start, call.routes_from)
    stop = min(stop, call.routes_from + len(call.rows), _common_prefix_length(call, trained.token_ids))
    if stop <= first:
        return slice(0, 0), trained.used[:0]
    if call.rows.shape[1:] != trained.used.shape[1:]:
        raise RouteFileError(
            f"the engine's rows for {trained.sample_id} have shape {call.rows.shape[1:]}, the learner's "
            f"{trained.used.shape[1:]} (layers, experts a token): they are of different models"
        )
    return slice(first, stop), call.rows[first - call.routes_from : stop - call.routes_from]


def same_experts(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """bool `[...]` for two `[..., K]`: the same experts, in any order."""
    return (np.sort(one, axis=-1) == np.sort(other, axis=-1)).all(axis=-1)


def compare_routes(trained: TrainedRoutes, calls: Sequence[EngineCall]) -> RouteComparison:
    """Compare what was used in training with what the engine chose, for every position and every MoE layer."""
    found = find_engine_routes(trained, calls)
    if found is None:
        return RouteComparison(samples=1, unmatched=[trained.sample_id])
    rows, recorded = found
    expected = np.where(recorded[:, None, None], rows, trained.own)
    same = same_experts(expected, trained.used)
    result = RouteComparison(
        samples=1,
        equal=int(same[recorded].sum()),
        different=int((~same).sum()),
        unrecorded=int(same[~recorded].sum()),
    )
    if result.different:
        at, layer = (int(i) for i in np.argwhere(~same)[0])
        chosen, used = expected[at, layer].tolist(), trained.used[at, layer].tolist()
        result.first = RouteDifference(trained.step, trained.sample_id, at, layer, bool(recorded[at]), chosen, used)
    return result


def verify_routes(index: RouteIndex) -> RouteComparison:
    """Compare all samples that the run kept, one at a time. Raises `RouteFileError` for a damaged record."""
    total = RouteComparison()
    for entry in index.trained_entries:
        trained = load_route_record(entry, TrainedRoutes, files=index.files)
        total.add(compare_routes(trained, index.load_calls(trained.trajectory_id)))
    return total
