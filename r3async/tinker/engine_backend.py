"""The backend of `r3async tinker`: one base model, in the learner's ranks and in a vLLM engine.

**Learner.** The ranks have the base weights once. Each client has its adapters with their moments
and gradients beside them, 16 bytes for each value of an adapter of `learner.lora.rank`. A client's
turn puts them into the model (`AdapterStates`), so requests of several clients run one after the
other, as they come, and have the results that they have alone.

**Engine.** It has the base weights once. A snapshot is a version of adapters, a file in the
directory under which it was saved. The engine holds those that were sampled from last, and loads
others again when they are. An engine that was lost is started again, and loads them in the same
way; requests that it lost are made again.

**Full training** (`learner.lora.rank = 0`) is for one client. A snapshot is a version of all
weights, and the newest one is the only one that can be sampled from.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from r3async.actors.driver import load_standalone_learner
from r3async.actors.rank_calls import RankLost
from r3async.checkpoint import CheckpointError
from r3async.config import Config
from r3async.learner import LearnerError
from r3async.rollout.engine import EngineLostError, Generation, GenerationRequest, TopTokens
from r3async.rollout.vllm.engine import VllmEngine, build_vllm_engine
from r3async.rollout.vllm.messages import MAX_TEMPERATURE
from r3async.tinker.backend import LossBatch, ServedModel, StateLostError
from r3async.tinker.protocol import (
    AdamParams,
    ApiError,
    LoraConfig,
    SampledSequence,
    SamplingParams,
    TopLogprobs,
    TrainResult,
)
from r3async.tinker.sessions import BASE_SNAPSHOT, Snapshot
from r3async.tinker.step_rows import StepRows
from r3async.untrusted import decode_json
from r3async.weights.manifest import BASE_VERSION, AdapterFormat, WeightManifest
from r3async.world import EventReporter, World, ignore_event
from r3async.world.files import read_file, write_atomically
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.actors.rank_actor import LocalRank
    from r3async.actors.ranks import RemoteRanks
    from r3async.learner.backend import LearnerBackend

LOADED_SNAPSHOTS = 32
"""Snapshots that the engine holds at most."""
ADAPTER_SLOTS = 4
"""Snapshots that can be sampled from in the same step of the engine; requests of others wait."""
ENGINE_STARTS = 3
"""Starts of an engine for a request before it fails."""
WEIGHTS_FILE = "weights.safetensors"
MANIFEST_FILE = "manifest.json"

T = TypeVar("T")


@dataclass
class _OpenSnapshot:
    """`number` is the engine's version of it; None if the engine does not hold it."""

    manifest: WeightManifest
    number: int | None = None


class EngineBackend:
    """A `TinkerBackend` of a learner and an engine. All calls belong to one event loop.

    Args:
        model: The directory of the base model.
        name: The name by which clients ask for it.
        stop_token_ids: The tokens that end a sample by default.
        directory: That of metrics.jsonl (`StepRows`).
    """

    def __init__(
        self,
        config: Config,
        model: Path,
        name: str,
        stop_token_ids: tuple[int, ...],
        directory: Path,
        *,
        report_event: EventReporter = ignore_event,
        world: World = REAL_WORLD,
    ):
        self.served = ServedModel(name, str(model.resolve()), 0, config.episode.max_total_tokens)
        supervise = msgspec.structs.replace(config.supervise, copy_steps=0)
        config = msgspec.structs.replace(config, supervise=supervise)  # copies are of one client
        self._config = config
        self._model = model
        self._directory = directory
        self._stop_token_ids = stop_token_ids
        self._world = world
        self._report_event = report_event
        self._trains_adapters = bool(config.learner.lora.rank)
        self._rows = StepRows(directory, world)
        self._lane = world.threads.new_worker("tinker learner")
        self._ranks: LocalRank | RemoteRanks | None = None
        self._models: set[str] = set()
        self._is_started_anew = True
        """False once a client has trained all weights."""
        self._engine: VllmEngine | None = None
        self._engine_lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._base: WeightManifest | None = None
        self._zero_version = BASE_VERSION
        """Number of the file of adapters that are 0."""
        self._snapshots: dict[str, _OpenSnapshot] = {}
        """Open snapshots, those that were sampled from last at the end."""
        self._newest = BASE_SNAPSHOT.name
        """The snapshot that the engine has in full training."""

    async def start(self) -> None:
        """Load the model, in learner and engine. Raises `LearnerError` and `EngineError`."""
        engine = self._build_engine()
        starting = asyncio.create_task(engine.start())
        try:
            vocab_size = await self._lane.run(self._load_learner)
            await starting
        except BaseException:
            starting.cancel()
            await asyncio.wait([starting])
            await engine.stop()
            raise
        self._engine = engine
        self.served = replace(self.served, vocab_size=vocab_size)
        if self._trains_adapters:
            await self._lane.run(self._write_base)
            assert self._base is not None
            await self._install(engine, self._base)

    async def stop(self) -> None:
        """End the engine and release the learner."""
        if self._engine is not None:
            await self._engine.stop()
        if self._ranks is not None:
            await self._lane.run(self._ranks.close)
        await self._lane.close()
        self._rows.close()

    # -- training ----------------------------------------------------------------------------------

    def _load_learner(self) -> int:
        """Load the learner's ranks, and return the size of the vocabulary."""
        self._ranks = load_standalone_learner(
            self._config, self._model, self._directory, self._world
        )
        self._ranks.set_weight_transport("shared_memory")
        return self._ranks.vocab_size

    async def _run_on_ranks(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(ranks, *args)`, run in the learner's thread. Ranks of which one is lost
        start anew, without models."""
        ranks = self._ranks
        assert ranks is not None
        try:
            return await self._lane.run(function, ranks, *args)
        except RankLost as lost:
            if self._ranks is ranks:
                self._models.clear()
                self._report_event("rank_lost", error=str(lost))
                await self._lane.run(self._restart_learner, ranks)
            raise StateLostError(str(lost)) from lost

    def _restart_learner(self, old: LocalRank | RemoteRanks) -> None:
        """Load the learner anew, unless that was done. The file of the base model, which a new
        engine needs, is written again."""
        if self._ranks is old:
            old.close()
            self._load_learner()
            self._write_base()

    async def _call_ranks(self, verb: Callable[[LearnerBackend], T]) -> T:
        return await self._run_on_ranks(_call_verb, verb)

    async def _call_client(self, model_id: str, verb: Callable[[LearnerBackend], T]) -> T:
        if model_id not in self._models:
            raise StateLostError(model_id)
        return await self._call_ranks(verb)

    async def create_model(self, model_id: str, lora: LoraConfig | None) -> None:
        await self.close_model(model_id)
        self._rows.begin_model(model_id)
        if not self._trains_adapters:
            return await self._create_full_model(model_id)
        if lora is None:
            raise ApiError("all weights are trained by a server with learner.lora.rank=0")
        if lora.rank > self._config.learner.lora.rank:
            raise ApiError(
                f"lora_config.rank = {lora.rank} is more than the server has room for: "
                f"learner.lora.rank = {self._config.learner.lora.rank}"
            )
        if lora.rank < 1:
            raise ApiError("lora_config.rank must be 1 or more")
        trained = {"self_attn": lora.train_attn, "mlp": lora.train_mlp}
        untrained = frozenset(name for name, wanted in trained.items() if not wanted)
        seed = self._config.seed if lora.seed is None else lora.seed
        try:
            await self._call_ranks(partial(_create_client, model_id, lora.rank, seed, untrained))
        except LearnerError as error:
            raise ApiError(str(error)) from error
        self._models.add(model_id)

    async def _create_full_model(self, model_id: str) -> None:
        if self._models:
            raise ApiError(
                "the server trains all weights (learner.lora.rank=0), which is for one client at a "
                "time, and there is one"
            )
        self._models.add(model_id)
        if not self._is_started_anew:
            await self._run_on_ranks(self._restart_learner)
        self._is_started_anew = False

    async def close_model(self, model_id: str) -> None:
        if model_id in self._models and self._trains_adapters:
            await self._call_ranks(partial(_drop_client, model_id))
        self._models.discard(model_id)

    async def forward(self, model_id: str, batch: LossBatch) -> TrainResult:
        return await self._train(model_id, batch, forward_only=True)

    async def forward_backward(self, model_id: str, batch: LossBatch) -> TrainResult:
        result = await self._train(model_id, batch, forward_only=False)
        self._rows.add_training(model_id, batch, result)
        return result

    async def _train(self, model_id: str, batch: LossBatch, *, forward_only: bool) -> TrainResult:
        tokens = self._config.learner.max_tokens_per_micro_batch
        return await self._call_client(
            model_id, partial(_train_client, model_id, batch, tokens, forward_only)
        )

    async def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        if not params.eps:
            raise ApiError("adam_params.eps must be above 0: moments that are 0 are divided by it")
        update = await self._call_client(model_id, partial(_step_client, model_id, params))
        self._rows.write_step(model_id, params.learning_rate, update)
        return update

    async def save_state(self, model_id: str, directory: Path) -> None:
        await self._call_client(model_id, partial(_save_client, model_id, directory))

    async def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        try:
            await self._call_client(
                model_id, partial(_load_client, model_id, directory, with_optimizer)
            )
        except CheckpointError as error:
            raise ApiError(f"the saved weights do not fit this server: {error}") from error

    # -- snapshots ---------------------------------------------------------------------------------

    async def publish(self, snapshot: Snapshot, directory: Path) -> None:
        if snapshot.model_id not in self._models:
            raise StateLostError(snapshot.model_id)
        number = next(self._numbers)
        manifest = await self._run_on_ranks(self._write_version, number, snapshot.model_id)
        await self._lane.run(self._copy_version, manifest, directory)

    def _write_base(self) -> None:
        """Write the base model, and adapters that are 0, under which it is sampled from: in vLLM
        (0.30, on CPU) a request without adapters has those of another one in its step."""
        if self._trains_adapters:
            assert self._ranks is not None
            self._base = None
            self._base = self._write_version(self._ranks, BASE_VERSION)
            self._zero_version = next(self._numbers)
            zeros = self._write_version(self._ranks, self._zero_version)
            self._snapshots[BASE_SNAPSHOT.name] = _OpenSnapshot(zeros)

    def _write_version(
        self, ranks: LocalRank | RemoteRanks, number: int, model_id: str | None = None
    ) -> WeightManifest:
        """Write a client's weights, or else the base model's, where the engine finds them."""
        if model_id is not None:
            ranks.call_verb(partial(_use_client, model_id))
        ranks.snapshot_weights(number)
        try:
            manifest = ranks.write_version([BASE_VERSION, self._zero_version]).manifest
        except OSError:
            ranks.discard_snapshot()
            raise
        carried = ranks.list_carried_tensors()
        adapter = None
        if self._base is not None:
            adapter = AdapterFormat(self._config.learner.lora.rank, self._base.digest)
        return msgspec.structs.replace(manifest, carried=carried, adapter=adapter)

    def _copy_version(self, manifest: WeightManifest, directory: Path) -> None:
        disk = self._world.files
        with disk.open(Path(manifest.path)) as file:
            parts = [file.map_bytes()]
            write_atomically(directory / WEIGHTS_FILE, parts, fsync=True, files=disk)
        described = msgspec.json.encode(manifest)
        write_atomically(directory / MANIFEST_FILE, [described], fsync=True, files=disk)

    async def open_snapshot(self, snapshot: Snapshot, directory: Path) -> None:
        disk = self._world.files
        data = await self._lane.run(read_file, directory / MANIFEST_FILE, files=disk)
        manifest = msgspec.structs.replace(
            decode_json(data, WeightManifest),
            path=str(directory / WEIGHTS_FILE),
            version=BASE_VERSION,
        )
        digest = 0 if self._base is None else self._base.digest
        if (0 if manifest.adapter is None else manifest.adapter.base_digest) != digest:
            raise ApiError(f"{snapshot.name} was saved from another base model, or other settings")
        known = self._snapshots.get(snapshot.name)
        if known is None or known.manifest.digest != manifest.digest:
            self._snapshots[snapshot.name] = _OpenSnapshot(manifest)
        self._newest = snapshot.name

    async def close_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.pop(snapshot.name, None)

    # -- sampling ----------------------------------------------------------------------------------

    async def sample(
        self,
        snapshot: Snapshot,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        num_samples: int,
        top_k: int,
    ) -> list[SampledSequence]:
        if params.temperature > MAX_TEMPERATURE:
            raise ApiError(f"temperature must be at most {MAX_TEMPERATURE:g}")
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        request = GenerationRequest(
            "tinker",
            prompt,
            params.max_tokens or self.served.max_tokens - len(prompt),
            params.temperature,
            self._stop_token_ids
            if stops is None
            else tuple(stop for stop in stops if isinstance(stop, int)),
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            stop_strings=tuple(stop for stop in stops or () if isinstance(stop, str)),
            top_logprobs=top_k,
        )

        async def generate(engine: VllmEngine, version: int | None) -> list[Generation]:
            seed = params.seed
            requests = [
                msgspec.structs.replace(
                    request,
                    version=version,
                    seed=None if seed is None else (seed + index) % 2**63,
                )
                for index in range(num_samples)
            ]
            tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
            try:
                return await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                raise

        generations = await self._call_engine(snapshot, generate)
        self._rows.add_sampled(sum(len(each.token_ids) for each in generations))
        return [_to_sequence(prompt, generation) for generation in generations]

    async def compute_logprobs(
        self, snapshot: Snapshot, tokens: np.ndarray, *, top_k: int
    ) -> tuple[np.ndarray, TopLogprobs | None]:
        logprobs = np.full(len(tokens), np.nan, np.float32)
        top = TopTokens(
            np.zeros((len(tokens), top_k), np.int32),
            np.full((len(tokens), top_k), np.nan, np.float32),
        )
        if len(tokens) > 1:

            async def score(
                engine: VllmEngine, version: int | None
            ) -> tuple[np.ndarray, TopTokens]:
                return await engine.score_alternatives(tokens, version=version, top_logprobs=top_k)

            logprobs[1:], scored = await self._call_engine(snapshot, score)
            top.token_ids[1:] = scored.token_ids[:, :top_k]
            top.logprobs[1:] = scored.logprobs[:, :top_k]
        return logprobs, TopLogprobs(*top) if top_k else None

    async def _call_engine(
        self, snapshot: Snapshot, call: Callable[[VllmEngine, int | None], Awaitable[T]]
    ) -> T:
        """Return `call(engine, version)` with the engine's version of a snapshot, again with a new
        engine if it is lost."""
        for attempt in itertools.count(1):
            engine = self._engine
            try:
                engine, version = await self._load_snapshot(snapshot)
                return await call(engine, version)
            except EngineLostError as lost:
                if attempt == ENGINE_STARTS:
                    raise
                self._report_event("engine_lost", error=str(lost))
                await self._replace_engine(engine)
        raise AssertionError

    async def _load_snapshot(self, snapshot: Snapshot) -> tuple[VllmEngine, int | None]:
        """Return the engine, which holds the snapshot, and the version to name in requests."""
        async with self._engine_lock:
            engine = self._engine
            assert engine is not None
            opened = self._snapshots.pop(snapshot.name, None)
            if opened is None and snapshot.name != BASE_SNAPSHOT.name:
                raise StateLostError(snapshot.name)
            if opened is not None:
                self._snapshots[snapshot.name] = opened
            if not self._trains_adapters and snapshot.name != self._newest:
                raise ApiError(
                    "the server trains all weights (learner.lora.rank=0), of which the engine has "
                    "the newest version alone: make a new sampling client"
                )
            if opened is None:
                return engine, None
            if opened.number is None:
                number = next(self._numbers)
                await self._install(
                    engine, msgspec.structs.replace(opened.manifest, version=number)
                )
                opened.number = number
                self._choose_held(engine)
            return engine, opened.number if self._trains_adapters else None

    def _choose_held(self, engine: VllmEngine) -> None:
        """Have the engine keep what was sampled from last, and forget what is closed."""
        held = [each for each in self._snapshots.values() if each.number is not None]
        for each in held[:-LOADED_SNAPSHOTS]:
            each.number = None
        engine.installer.kept_versions = {each.number for each in held if each.number is not None}

    async def _install(self, engine: VllmEngine, manifest: WeightManifest) -> None:
        timeout = self._config.weights.resolve_install_timeout(manifest.nbytes, engine.version < 0)
        await engine.install_version(manifest, timeout)

    def _build_engine(self) -> VllmEngine:
        return build_vllm_engine(
            self._config, str(self._model), self._config.seed, adapter_slots=ADAPTER_SLOTS
        )

    async def _replace_engine(self, lost: VllmEngine | None) -> None:
        """Start an engine in place of a lost one, unless that was done."""
        async with self._engine_lock:
            if lost is None or self._engine is not lost:
                return
            await lost.stop()
            engine = self._build_engine()
            await engine.start()
            if self._base is not None:
                await self._install(engine, self._base)
            for each in self._snapshots.values():
                each.number = None
            self._engine = engine


def _to_sequence(prompt: np.ndarray, generation: Generation) -> SampledSequence:
    routes = generation.routed_experts
    fed = len(prompt) + len(generation.token_ids) - 1
    if routes is not None and len(routes) != fed:
        routes = None  # lost ones; its tokens will route by themselves
    top = generation.top_tokens
    if top is not None:
        excluded = np.isneginf(top.logprobs)  # by top-k or top-p
        top = TopTokens(top.token_ids, np.where(excluded, np.float32(math.nan), top.logprobs))
    return SampledSequence(
        generation.token_ids,
        generation.logprobs,
        generation.stop_reason == "stop",
        routes,
        None if routes is None else np.ones(fed, bool),
        None if top is None else TopLogprobs(*top),
    )


def _call_verb(ranks: LocalRank | RemoteRanks, verb: Callable[[LearnerBackend], T]) -> T:
    return ranks.call_verb(verb)


# Verbs of one client, on every rank. They import torch, which only a rank's process needs.


def _use_client(name: str, backend: LearnerBackend) -> None:
    if backend.adapter_states is not None:
        backend.adapter_states.use(name)


def _create_client(
    name: str, rank: int, seed: int, untrained: frozenset[str], backend: LearnerBackend
) -> None:
    assert backend.adapter_states is not None
    backend.adapter_states.create(name, rank, seed, untrained)


def _drop_client(name: str, backend: LearnerBackend) -> None:
    if backend.adapter_states is not None:
        backend.adapter_states.drop(name)


def _train_client(
    name: str,
    batch: LossBatch,
    max_batch_tokens: int,
    forward_only: bool,
    backend: LearnerBackend,
) -> TrainResult:
    from r3async.tinker.datum_minibatch import run_training

    _use_client(name, backend)
    return run_training(backend, batch, max_batch_tokens, forward_only=forward_only)


def _step_client(name: str, params: AdamParams, backend: LearnerBackend) -> dict[str, float]:
    from r3async.learner.optimizer import AdamSettings
    from r3async.learner.train_step import optim_step

    _use_client(name, backend)
    backend.optimizer.use_settings(
        AdamSettings(
            params.learning_rate,
            (params.beta1, params.beta2),
            params.eps,
            params.weight_decay,
            params.grad_clip_norm or math.inf,
        )
    )
    update = optim_step(backend)
    return {"grad_norm": update.grad_norm, "optimizer/skipped": float(bool(update.cause))}


def _save_client(name: str, directory: Path, backend: LearnerBackend) -> None:
    from r3async.learner.train_step import save_state

    _use_client(name, backend)
    save_state(backend, directory)


def _load_client(name: str, directory: Path, with_optimizer: bool, backend: LearnerBackend) -> None:
    from r3async.checkpoint.rank_files import LearnerStateReader

    _use_client(name, backend)
    paths = [path for path in sorted(directory.iterdir()) if path.name.startswith("learner-")]
    backend.restore_state(LearnerStateReader(paths), with_optimizer=with_optimizer)
