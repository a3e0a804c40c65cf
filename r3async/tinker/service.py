"""What each request of the Tinker API does: on parsed requests, apart from HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from r3async.tinker import protocol
from r3async.tinker.backend import LossBatch, TinkerBackend
from r3async.tinker.futures import POLL_SECONDS, ResultFutures
from r3async.tinker.kept_sequences import KeptSequence, KeptSequences, RoutedDatum
from r3async.tinker.losses import check_datum, check_loss
from r3async.tinker.protocol import (
    ApiError,
    Result,
    SampledSequence,
    SampleResult,
    TopLogprobs,
    TrainRequest,
)
from r3async.tinker.saved_weights import PREFIX, SavedWeights, WeightsDirectory, WeightsKind
from r3async.tinker.sessions import BASE_SNAPSHOT, Sampler, Sessions, Snapshot, TrainedModel
from r3async.world import EventReporter, World, ignore_event

KEPT_BYTES = 5 * 2**30
MAX_SAMPLES = 1024
MAX_TOP_K = 20
SWEEP_SECONDS = 5.0

Work = Callable[[], Coroutine[Any, Any, Result]]


class TinkerService:
    """The sessions of all clients, on one backend. Methods belong to the event loop's thread.

    Training requests of a model run one after the other, in the order of their numbers; those of
    several models, and samples, run at once.

    Args:
        directory: Saved weights and kept sequences.
        kept_bytes: Disk for sampled sequences.
    """

    def __init__(
        self,
        backend: TinkerBackend,
        directory: Path,
        world: World,
        *,
        kept_bytes: int = KEPT_BYTES,
        poll_seconds: float = POLL_SECONDS,
        report_event: EventReporter = ignore_event,
    ):
        self.backend = backend
        self.sessions = Sessions()
        self.futures = ResultFutures(world.clock, poll_seconds=poll_seconds)
        self.weights = WeightsDirectory(directory / "weights", files=world.files)
        self.kept = KeptSequences(directory / "kept", max_bytes=kept_bytes, files=world.files)
        self._world = world
        self._report_event = report_event
        self._lane = world.threads.new_worker("tinker files")
        self._works: dict[str, Work] = {}
        """Training requests whose turn has not come."""
        self._last_tasks: dict[str, asyncio.Task[None]] = {}
        """The last training request of each model that was started."""

    @property
    def _now(self) -> float:
        return self._world.clock.monotonic()

    async def sweep(self) -> None:
        """End idle sessions, forget old results, and give up missing numbers, for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.futures.forget_expired()
            for session_id in self.sessions.find_idle(self._now):
                try:
                    await self.close_session(session_id)
                except Exception as error:  # the session is forgotten all the same
                    self._report_event("session_not_closed", session=session_id, error=repr(error))
            for model in list(self.sessions.models.values()):
                self._start_ready(model)

    async def close(self) -> None:
        for session_id in list(self.sessions.sessions):
            self.futures.forget_owner(session_id)
        await self._lane.close()

    # -- sessions ----------------------------------------------------------------------------------

    def open_session(self, metadata: dict[str, Any] | None) -> str:
        session_id = f"session-{self._world.unique_id()}"
        self.sessions.open_session(session_id, self._now, metadata)
        return session_id

    async def close_session(self, session_id: str) -> None:
        models, snapshots = self.sessions.close_session(session_id)
        self.futures.forget_owner(session_id)
        for model in models:
            prefix = f"{model.model_id}:"
            for request_id in [name for name in self._works if name.startswith(prefix)]:
                del self._works[request_id]
            last = self._last_tasks.pop(model.model_id, None)
            if last is not None:
                await asyncio.wait([last])
            await self.backend.close_model(model.model_id)
        for snapshot in snapshots:
            await self.backend.close_snapshot(snapshot)

    # -- training ----------------------------------------------------------------------------------

    def create_model(self, request: protocol.CreateModel) -> tuple[str, str]:
        """Return the ids of the future and of the model. Identity is (session, number)."""
        self._check_base(request.base_model)
        optimizer = request.optimizer_config
        if optimizer is not None and optimizer.type != "adamw":
            raise ApiError(f"the optimizer {optimizer.type!r} is not supported: adamw is")
        if request.lora_config is not None and not 1 <= request.lora_config.rank <= 1024:
            raise ApiError("lora_config.rank must be from 1 to 1024")
        return self._add_model(request.session_id, request.model_seq_id, request, None)

    def _add_model(
        self,
        session_id: str,
        number: int,
        request: protocol.CreateModel | None,
        loaded: tuple[SavedWeights, bool] | None,
    ) -> tuple[str, str]:
        self.sessions.find_session(session_id, self._now)
        model_id = f"{session_id}:train:{number}"
        request_id = f"{model_id}:create"
        if model_id in self.sessions.models:
            return request_id, model_id
        if request is not None:
            lora, metadata = request.lora_config, request.user_metadata
        else:
            assert loaded is not None
            lora, metadata = loaded[0].lora, None
        wall_clock = self._world.clock.time()
        model = TrainedModel(model_id, session_id, lora, metadata, wall_clock, self._now)

        async def work() -> Result:
            try:
                await self.backend.create_model(model_id, lora)
                if loaded is None:
                    return {"type": "create_model", "model_id": model_id}
                saved, with_optimizer = loaded
                directory = self.weights.locate(saved)
                await self.backend.load_state(model_id, directory, with_optimizer=with_optimizer)
            except BaseException:
                self.sessions.models.pop(model_id, None)
                raise
            model.version = saved.version
            path = saved.tinker_path
            return {"type": "load_weights", "path": path, "model_id": model_id}

        self.futures.create(request_id, session_id)
        self.sessions.models[model_id] = model
        self._last_tasks[model_id] = self.futures.start(request_id, work())
        return request_id, model_id

    def train(self, request: TrainRequest) -> str:
        """Take a `forward` or `forward_backward`, and return the id of its future."""
        model = self.sessions.find_model(request.model_id, self._now)

        def check() -> Work:
            settings = check_loss(request.loss_fn, request.loss_config)
            if not request.data:
                raise ApiError("there is no datum")
            served = self.backend.served
            for index, datum in enumerate(request.data):
                check_datum(index, datum, request.loss_fn, served.vocab_size, served.max_tokens)

            async def work() -> Result:
                data = await self._lane.run(self._match_data, request)
                batch = LossBatch(request.loss_fn, settings, data, model.version)
                if request.forward_only:
                    return await self.backend.forward(model.model_id, batch)
                return await self.backend.forward_backward(model.model_id, batch)

            return work

        return self._submit(model, request.seq_id, check)

    def _match_data(self, request: TrainRequest) -> list[RoutedDatum]:
        return [
            self.kept.match_datum(index, datum, request.model_id)
            for index, datum in enumerate(request.data)
        ]

    def optim_step(self, request: protocol.OptimStep) -> str:
        model = self.sessions.find_model(request.model_id, self._now)

        def check() -> Work:
            if request.optimizer_params is not None:
                kind = request.optimizer_params.type
                raise ApiError(f"the optimizer {kind!r} is not supported: send adam_params")
            params = request.adam_params or protocol.AdamParams()
            params.check_values()

            async def work() -> Result:
                metrics = await self.backend.optim_step(model.model_id, params)
                model.version += 1
                return {"type": "optim_step", "metrics": protocol.drop_not_finite(metrics)}

            return work

        return self._submit(model, request.seq_id, check)

    def _submit(self, model: TrainedModel, seq_id: int | None, check: Callable[[], Work]) -> str:
        """Take a request of a model once, and return the id of its future. A repeated one gets the
        first answer; a refused one has used up its number."""
        known = model.sequence.find_answer(seq_id)
        if isinstance(known, ApiError):
            raise known
        if known is not None:
            return known
        try:
            work = check()
            request_id = f"{model.model_id}:{self._world.unique_id() if seq_id is None else seq_id}"
            self.futures.create(request_id, model.session_id)
            model.sequence.admit(seq_id, request_id)
        except ApiError as error:
            if error.status != 429:  # which is tried again
                model.sequence.refuse(seq_id, error)
                self._start_ready(model)
            raise
        self._works[request_id] = work
        self._start_ready(model)
        return request_id

    def refuse(self, number: protocol.RequestNumber, error: ApiError) -> None:
        """Take a request that could not be read: its number is used up."""
        model = self.sessions.models.get(number.model_id)
        if model is not None and model.sequence.find_answer(number.seq_id) is None:
            model.sequence.refuse(number.seq_id, error)
            self._start_ready(model)

    def _start_ready(self, model: TrainedModel) -> None:
        for request_id in model.sequence.pop_ready(self._now):
            before = self._last_tasks.get(model.model_id)
            work = _run_after(before, self._works.pop(request_id))
            self._last_tasks[model.model_id] = self.futures.start(request_id, work)

    # -- weights -----------------------------------------------------------------------------------

    def save_weights(self, request: protocol.SaveWeights) -> str:
        """Take a `save_weights`: weights and optimizer, under a path."""
        model = self.sessions.find_model(request.model_id, self._now)

        def check() -> Work:
            saved = self._describe(model, request, "weights", f"step-{request.seq_id}")

            async def work() -> Result:
                await self._write_weights(
                    saved, request, lambda path: self.backend.save_state(model.model_id, path)
                )
                return {"type": "save_weights", "path": saved.tinker_path}

            return work

        return self._submit(model, request.seq_id, check)

    def save_weights_for_sampler(self, request: protocol.SaveWeights) -> str:
        """Take a `save_weights_for_sampler`: under a path, or as a snapshot, of which a model has a
        few."""
        model = self.sessions.find_model(request.model_id, self._now)

        def check() -> Work:
            if request.kind not in (None, "snapshot"):
                raise ApiError(f"kind {request.kind!r} is not supported: snapshot is")
            if request.path is not None:
                return self._save_for_sampler(model, request)
            number = request.sampling_session_seq_id
            sampler_id = f"{model.model_id}:sample:{request.seq_id if number is None else number}"

            async def work() -> Result:
                snapshot = Snapshot(sampler_id, model.model_id, model.version)
                await self.backend.publish(snapshot, None)
                sampler = Sampler(sampler_id, model.session_id, snapshot)
                for over in self.sessions.add_snapshot(model, sampler):
                    await self.backend.close_snapshot(over)
                return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

            return work

        return self._submit(model, request.seq_id, check)

    def _save_for_sampler(self, model: TrainedModel, request: protocol.SaveWeights) -> Work:
        saved = self._describe(model, request, "sampler_weights", "")

        async def work() -> Result:
            snapshot = Snapshot(saved.tinker_path, model.model_id, model.version)
            await self._write_weights(
                saved, request, lambda path: self.backend.publish(snapshot, path)
            )
            return {"type": "save_weights_for_sampler", "path": saved.tinker_path}

        return work

    def _describe(
        self,
        model: TrainedModel,
        request: protocol.SaveWeights,
        kind: WeightsKind,
        default_name: str,
    ) -> SavedWeights:
        name = request.path or default_name
        now = self._world.clock.time()
        return SavedWeights(
            f"{PREFIX}{model.model_id}/{kind}/{name}",
            model.model_id,
            kind,
            name,
            self.backend.served.name,
            model.lora,
            model.version,
            request.seq_id,
            now,
            None if request.ttl_seconds is None else now + request.ttl_seconds,
            request.user_metadata,
        )

    async def _write_weights(
        self,
        saved: SavedWeights,
        request: protocol.SaveWeights,
        write: Callable[[Path], Awaitable[None]],
    ) -> None:
        def begin() -> Path | None:
            return self.weights.begin(saved, overwrite=bool(request.overwrite))

        partial = await self._lane.run(begin)
        if partial is not None:
            await write(partial)
            await self._lane.run(self.weights.commit, saved, partial)

    def load_weights(self, request: protocol.LoadWeights) -> tuple[str, str]:
        """Take a `load_weights`, into a model or, with a session, into a new one. Returns the ids
        of the future and of the model."""
        with_optimizer = bool(request.optimizer)
        if request.model_id is None:
            if request.session_id is None or request.model_seq_id is None:
                raise ApiError("load_weights names neither a model nor a session and its number")
            self._check_base(request.base_model)
            saved = self._find_weights(request.path, "weights")
            loaded = saved, with_optimizer
            return self._add_model(request.session_id, request.model_seq_id, None, loaded)
        model = self.sessions.find_model(request.model_id, self._now)

        def check() -> Work:
            saved = self._find_weights(request.path, "weights")
            if (saved.lora and saved.lora.rank) != (model.lora and model.lora.rank):
                raise ApiError(f"{request.path} has adapters of another rank than the model")

            async def work() -> Result:
                directory = self.weights.locate(saved)
                await self.backend.load_state(
                    model.model_id, directory, with_optimizer=with_optimizer
                )
                model.version += 1
                path = saved.tinker_path
                return {"type": "load_weights", "path": path, "model_id": model.model_id}

            return work

        return self._submit(model, request.seq_id, check), model.model_id

    def _find_weights(self, path: str, kind: WeightsKind) -> SavedWeights:
        return self.weights.find(path, kind, self._world.clock.time())

    def _check_base(self, name: str | None) -> None:
        served = self.backend.served.name
        if name not in (None, served):
            raise ApiError(f"base_model {name!r} is not served here: {served!r} is")

    # -- sampling ----------------------------------------------------------------------------------

    async def create_sampler(self, request: protocol.CreateSampler) -> str:
        """Return the id of a sampler on saved weights, or on the base model."""
        self.sessions.find_session(request.session_id, self._now)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id in self.sessions.samplers:
            return sampler_id
        self._check_base(request.base_model)
        snapshot = BASE_SNAPSHOT
        if request.model_path is not None:
            saved = self._find_weights(request.model_path, "sampler_weights")
            snapshot = Snapshot(saved.tinker_path, saved.model_id, saved.version)
            await self.backend.open_snapshot(snapshot, self.weights.locate(saved))
        sampler = Sampler(sampler_id, request.session_id, snapshot, request.model_path)
        self.sessions.samplers[sampler_id] = sampler
        return sampler_id

    def sample(self, request: protocol.SampleRequest) -> tuple[str, list[str]]:
        """Take an `asample`, and return the ids of its future and of its sequences."""
        if request.sampling_session_id is None:
            raise ApiError("asample names no sampling_session_id: make a sampling client")
        sampler = self.sessions.find_sampler(request.sampling_session_id, self._now)
        number = self._world.unique_id() if request.seq_id is None else request.seq_id
        request_id = f"{sampler.sampler_id}:{number}"
        prompt = self._check_sample(request)
        names = [f"{request_id}:{index}" for index in range(request.num_samples)]
        if request_id not in self.futures:
            self.futures.create(request_id, sampler.session_id, cancellable=True)
            work = self._sample(names, sampler.snapshot, prompt, request)
            self.futures.start(request_id, work)
        return request_id, names

    def find_sampler(self, sampler_id: str) -> Sampler:
        return self.sessions.find_sampler(sampler_id, self._now)

    def _check_sample(self, request: protocol.SampleRequest) -> np.ndarray:
        """Return the prompt. Raises `ApiError` for what cannot be sampled."""
        served = self.backend.served
        unsupported = {
            "target_prompt_logprobs": request.target_prompt_logprobs is not None,
            "prompt_alt_tokens_k": bool(request.prompt_alt_tokens_k),
            "record_stability_info": bool(request.record_stability_info),
        }
        for name, used in unsupported.items():
            if used:
                raise ApiError(f"{name} is not supported")
        request.sampling_params.check_values()
        prompt = request.prompt.to_tokens()
        if not 0 < len(prompt) < served.max_tokens:
            raise ApiError(f"the prompt has {len(prompt)} tokens, of 1 to {served.max_tokens - 1}")
        if int(prompt.max()) >= served.vocab_size:
            raise ApiError(f"a token of the prompt is not one of 0 .. {served.vocab_size - 1}")
        if not 1 <= request.num_samples <= MAX_SAMPLES:
            raise ApiError(f"num_samples must be from 1 to {MAX_SAMPLES}")
        for top_k in (request.topk_prompt_logprobs, request.topk_sample_logprobs):
            if not 0 <= (top_k or 0) <= MAX_TOP_K:
                raise ApiError(f"top-k log-probs must be of 0 to {MAX_TOP_K} tokens")
        last = request.prompt_logprobs_last_n
        if last is not None and not (request.prompt_logprobs and 1 <= last < len(prompt)):
            raise ApiError(
                "prompt_logprobs_last_n needs prompt_logprobs, and is from 1 to one below the "
                "prompt's length"
            )
        return prompt

    async def _sample(
        self,
        names: list[str],
        snapshot: Snapshot,
        prompt: np.ndarray,
        request: protocol.SampleRequest,
    ) -> Result:
        params = request.sampling_params
        room = self.backend.served.max_tokens - len(prompt)
        params.max_tokens = min(params.max_tokens or room, room)
        sequences = await self.backend.sample(
            snapshot,
            prompt,
            params,
            num_samples=request.num_samples,
            top_k=request.topk_sample_logprobs or 0,
        )
        prompt_logprobs = None
        top: TopLogprobs | None = None
        top_k = request.topk_prompt_logprobs or 0
        if request.prompt_logprobs or top_k:
            prompt_logprobs, top = await self.backend.compute_logprobs(
                snapshot, prompt, top_k=top_k
            )
            unscored = len(prompt) - (request.prompt_logprobs_last_n or len(prompt))
            prompt_logprobs[:unscored] = np.nan
            if top is not None:
                top.logprobs[:unscored] = np.nan
        # `compute_logprobs` of an SDK is a sample of one token, which nobody trains on.
        if not (request.prompt_logprobs and params.max_tokens == 1):
            for name, sequence in zip(names, sequences, strict=True):
                await self._keep(name, snapshot, prompt, sequence)
        return SampleResult(sequences, prompt_logprobs if request.prompt_logprobs else None, top)

    async def _keep(
        self, name: str, snapshot: Snapshot, prompt: np.ndarray, sequence: SampledSequence
    ) -> None:
        recorded = sequence.recorded
        if recorded is None:
            length = len(prompt) + len(sequence.tokens) - 1
            recorded = np.full(length, sequence.routes is not None)
        kept = KeptSequence(
            name,
            snapshot.model_id,
            snapshot.version,
            len(prompt),
            np.concatenate([prompt, sequence.tokens]),
            sequence.routes,
            recorded,
        )
        try:
            await self._lane.run(self.kept.put, kept)
        except OSError as error:
            # Its tokens will route by themselves, which `routes/recorded` shows.
            self._report_event("sequence_not_kept", sequence=name, error=str(error))

    # -- listings ----------------------------------------------------------------------------------

    def describe_model(self, model_id: str) -> dict[str, Any]:
        model = self.sessions.find_model(model_id, self._now)
        served = self.backend.served
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": served.name,
            "is_lora": model.lora is not None,
            "lora_rank": None if model.lora is None else model.lora.rank,
            "model_data": {
                "arch": "transformer",
                "model_name": served.name,
                "tokenizer_id": served.tokenizer,
            },
        }

    def describe_run(self, model: TrainedModel) -> dict[str, Any]:
        used_at = self._world.clock.time() - (self._now - model.used_at)
        return {
            "training_run_id": model.model_id,
            "base_model": self.backend.served.name,
            "model_owner": "r3async",
            "is_lora": model.lora is not None,
            "lora_rank": None if model.lora is None else model.lora.rank,
            "last_request_time": _format_time(used_at),
        }

    async def list_weights(self, model_id: str | None) -> list[dict[str, Any]]:
        now = self._world.clock.time()
        kinds = {"weights": "training", "sampler_weights": "sampler"}
        return [
            {
                "checkpoint_id": f"{saved.kind}/{saved.name}",
                "checkpoint_type": kinds[saved.kind],
                "time": _format_time(saved.created_at),
                "tinker_path": saved.tinker_path,
                "user_metadata": saved.user_metadata,
                "expires_at": None if saved.expires_at is None else _format_time(saved.expires_at),
            }
            for saved in await self._lane.run(self.weights.list_all, now, model_id)
        ]

    def describe_weights(self, tinker_path: str) -> dict[str, Any]:
        kind: WeightsKind = "sampler_weights" if "/sampler_weights/" in tinker_path else "weights"
        return self._find_weights(tinker_path, kind).describe()

    async def delete_weights(self, model_id: str, checkpoint_id: str) -> None:
        path = f"{PREFIX}{model_id}/{checkpoint_id}"
        kind: WeightsKind = "sampler_weights" if "sampler_weights/" in path else "weights"
        await self._lane.run(self.weights.delete, self._find_weights(path, kind))


async def _run_after(before: asyncio.Task[None] | None, work: Work) -> Result:
    if before is not None:
        await asyncio.wait([before])
    return await work()


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
