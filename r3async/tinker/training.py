"""The training requests of all models: taken once, made in order, and made again after a loss.

A request is acknowledged when it is in a file (`request_files.py`), and its answer is in one before
it can be read. Of a model's weights, gradients and optimizer the backend has the only copy. It is
saved (`states`) between updates, as often as saving takes `SAVING_SHARE` of the time. So a model
that was lost, with the learner, with this process or in a call that failed, is its newest state and
the requests after it, which are made again without an answer; then the next one is made. Nothing is
applied twice, as a state says which request is the last in it.

A state after each step is dear for a large model; requests alone would have to be made again from
the first one on.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r3async.tinker import protocol
from r3async.tinker.backend import LossBatch, StateLostError
from r3async.tinker.losses import check_datum, check_loss
from r3async.tinker.parts import ServiceParts
from r3async.tinker.protocol import (
    Answer,
    ApiError,
    LoraConfig,
    ModelRequest,
    Result,
    decode_request,
    encode_result,
)
from r3async.tinker.request_files import RequestFiles, TakenRequest
from r3async.tinker.sampling import MAX_LOSSES, ModelSampling
from r3async.tinker.saved_weights import SavedWeights, WeightsKind
from r3async.tinker.sequencing import RequestSequence
from r3async.tinker.sessions import Sampler, Session, Snapshot

SAVING_SHARE = 0.05
MADE_AGAIN = frozenset({"create_model", "load_weights", "forward_backward", "optim_step"})
"""The kinds of requests that change a model."""


@dataclass
class TrainedModel:
    """A model that a client trains.

    Attributes:
        version: Counts its updates.
        is_lost: True if the backend does not have it, or may have half a request of it.
        has_gradient: True if it has a gradient, which no state has.
        unsaved_seconds: How long its requests since the newest state took.
        saving_seconds: How long that state took.
    """

    model_id: str
    session: Session
    files: RequestFiles
    used_at: float
    sequence: RequestSequence = field(default_factory=RequestSequence)
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    ready: deque[int] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    version: int = 0
    is_lost: bool = True
    has_gradient: bool = False
    unsaved_seconds: float = 0.0
    saving_seconds: float = 0.0

    @property
    def lora(self) -> LoraConfig | None:
        return self.session.models[self.model_id]


class ModelTraining:
    """The models of all clients. Methods belong to the event loop's thread."""

    def __init__(self, parts: ServiceParts, sampling: ModelSampling):
        self.models: dict[str, TrainedModel] = {}
        self._parts = parts
        self._sampling = sampling
        self._alone = asyncio.Lock()

    async def recover(self) -> None:
        """Continue the models of earlier processes, and remove those whose session has ended."""
        for session in self._parts.sessions.sessions.values():
            for model_id in session.models:
                model = self._add_model(model_id, session)
                await self._recover_model(model)
        for model_id in await self._parts.lane.run(self._list_directories):
            if model_id not in self.models:
                await self._parts.lane.run(self._remove_files, model_id)

    def _list_directories(self) -> list[str]:
        return self._parts.world.files.list_names(self._parts.directory / "requests")

    def _add_model(self, model_id: str, session: Session) -> TrainedModel:
        directory = self._parts.directory / "requests" / model_id
        files = RequestFiles(directory, files=self._parts.world.files)
        model = TrainedModel(model_id, session, files, self._parts.now)
        self.models[model_id] = model
        return model

    async def _recover_model(self, model: TrainedModel) -> None:
        state = await self._find_state(model)
        answered = await self._parts.lane.run(model.files.list_numbers, Answer)
        done = max([-1 if state is None else state.seq_id, *answered])
        model.version = 0 if state is None else state.version
        model.sequence.next_number = done + 1
        for number in answered:
            answer = await self._parts.lane.run(model.files.read, number, Answer)
            self._parts.futures.create(f"{model.model_id}:{number}", model.session.session_id)
            if answer is not None:
                self._parts.futures.resolve(f"{model.model_id}:{number}", answer)
        for number in await self._parts.lane.run(model.files.list_numbers, TakenRequest):
            if number > done:
                self._parts.futures.create(f"{model.model_id}:{number}", model.session.session_id)
                model.sequence.admit(number, 0)
        opened = {sampler.snapshot.name for sampler in model.session.samplers.values()}
        weights = self._parts.weights
        for saved in await self._parts.lane.run(weights.list_kind, model.model_id, "snapshots"):
            if saved.tinker_path not in opened:
                await self._parts.lane.run(weights.delete, saved.tinker_path)
        self.start_ready(model)

    def find_model(self, model_id: str) -> TrainedModel:
        model = self.models.get(model_id)
        if model is None:
            raise ApiError(f"there is no model {model_id!r}, or no more", status=404)
        model.used_at = self._parts.now
        self._parts.sessions.find_session(model.session.session_id, model.used_at)
        return model

    async def close_models(self, session: Session) -> None:
        """End the models of a session. The weights that their client saved stay."""
        for model_id in list(session.models):
            model = self.models.pop(model_id, None)
            if model is None:  # it could not be created
                continue
            model.ready.clear()
            if model.task is not None:
                await asyncio.wait([model.task])
            await self._parts.backend.close_model(model_id)
            await self._parts.lane.run(self._remove_files, model_id)

    def _remove_files(self, model_id: str) -> None:
        self._parts.weights.delete(f"{model_id}/states")
        self._parts.weights.delete(f"{model_id}/snapshots")
        self._parts.world.files.remove_tree(self._parts.directory / "requests" / model_id)

    async def close(self) -> None:
        """Stop what runs, as the end of the process would."""
        tasks = [model.task for model in self.models.values() if model.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- taking requests ---------------------------------------------------------------------------

    async def submit(self, kind: str, body: bytes, *, protobuf: bool) -> tuple[str, str]:
        """Take a request, if it is not taken already, and return the ids of its future and of its
        model. Whatever is wrong with it, but its number, is an answer of the future."""
        if protobuf:
            message = protocol.read_proto_training(body)
            kind = "forward" if message.forward_only else kind
            request = ModelRequest(message.model_id, message.seq_id)
        else:
            request = decode_request(body, ModelRequest)
        number = request.seq_id
        if request.model_id is not None and number:
            model = self.find_model(request.model_id)
        elif request.session_id is not None and request.model_seq_id is not None:
            number = 0
            model = await self._find_new_model(request.session_id, request.model_seq_id)
        else:
            raise ApiError("the request names neither a model and its number there nor a session")
        request_id = f"{model.model_id}:{number}"
        async with model.taking:
            if not model.sequence.is_known(number):
                model.sequence.check_room(number, len(body))
                taken = TakenRequest(kind, body, protobuf)
                try:
                    await self._parts.lane.run(model.files.write, number, taken)
                except OSError as error:
                    raise ApiError(f"the disk: {error}", status=503, category="server") from error
                self.find_model(model.model_id)  # its session may have ended meanwhile
                self._parts.futures.create(request_id, model.session.session_id)
                model.sequence.admit(number, len(body))
        self.start_ready(model)
        return request_id, model.model_id

    async def _find_new_model(self, session_id: str, number: int) -> TrainedModel:
        session = self._parts.sessions.find_session(session_id, self._parts.now)
        model_id = f"{session_id}:train:{number}"
        if model_id in self.models:
            return self.models[model_id]
        session.models[model_id] = None
        model = self._add_model(model_id, session)
        try:
            async with model.taking:
                await self._parts.write_session(session)
        except ApiError:
            del self.models[model_id], session.models[model_id]
            raise
        return model

    def start_ready(self, model: TrainedModel) -> None:
        """Make the requests whose turn has come."""
        model.ready.extend(model.sequence.pop_ready(self._parts.now))
        if model.ready and (model.task is None or model.task.done()):
            work = self._run_ready(model)
            model.task = asyncio.get_running_loop().create_task(work, name=model.model_id)

    # -- making requests ---------------------------------------------------------------------------

    async def _run_ready(self, model: TrainedModel) -> None:
        while model.ready:
            number = model.ready.popleft()
            taken = await self._parts.lane.run(model.files.read, number, TakenRequest)
            result: Result
            try:
                if taken is None:
                    raise RuntimeError("the request's file is not there any more")
                result = await self._make(model, number, taken)
            except ApiError as error:
                result = error
            except Exception as error:
                result = ApiError(f"{type(error).__name__}: {error}", category="server")
            answer = encode_result(result, protobuf=taken is not None and taken.protobuf)
            try:
                await self._parts.lane.run(model.files.write, number, answer)
            except OSError as error:
                self._parts.report_event("answer_not_kept", model=model.model_id, error=str(error))
            self._parts.futures.resolve(f"{model.model_id}:{number}", answer)
            if number == 0 and answer.failed:
                await self._drop_model(model)
            elif taken is not None and not answer.failed:
                await self._save_state_if_due(model, number, taken.kind)

    async def _drop_model(self, model: TrainedModel) -> None:
        """Forget a model that could not be created. Its client makes another one."""
        self.models.pop(model.model_id, None)
        model.session.models.pop(model.model_id, None)
        await self._parts.lane.run(self._parts.sessions.write, model.session)
        await self._parts.lane.run(self._remove_files, model.model_id)

    async def _make(self, model: TrainedModel, number: int, taken: TakenRequest) -> Result:
        """Make a request, again if the model was lost meanwhile."""
        for losses in range(MAX_LOSSES + 1):
            began = self._parts.now
            # What ran when a learner ended is made again alone: so who ends it is known.
            alone: AbstractAsyncContextManager[Any] = self._alone if losses else nullcontext()
            try:
                async with alone:
                    if model.is_lost:
                        await self._restore(model, number)
                    return await self._apply(model, taken)
            except ApiError:
                raise
            except Exception as error:
                # While the model is still lost, it was an earlier request that failed.
                own_failure = not (model.is_lost or isinstance(error, StateLostError))
                model.is_lost = True
                if own_failure or losses == MAX_LOSSES:
                    raise
            finally:
                model.unsaved_seconds += self._parts.now - began
        raise AssertionError

    async def _restore(self, model: TrainedModel, number: int) -> None:
        """Let the backend have the model as it was before request `number`."""
        state = await self._find_state(model)
        model.version = 0
        model.has_gradient = False
        first = 0
        if state is not None:
            await self._parts.backend.create_model(model.model_id, model.lora)
            directory = self._parts.weights.locate(state.tinker_path)
            await self._parts.backend.load_state(model.model_id, directory, with_optimizer=True)
            model.version = state.version
            first = state.seq_id + 1
        for earlier in range(first, number):
            taken = await self._parts.lane.run(model.files.read, earlier, TakenRequest)
            answer = await self._parts.lane.run(model.files.read, earlier, Answer)
            has_failed = answer is not None and answer.failed
            if taken is not None and taken.kind in MADE_AGAIN and not has_failed:
                await self._apply(model, taken)
        model.is_lost = False

    async def _find_state(self, model: TrainedModel) -> SavedWeights | None:
        weights = self._parts.weights
        states = await self._parts.lane.run(weights.list_kind, model.model_id, "states")
        return max(states, key=lambda state: state.seq_id, default=None)

    async def _save_state_if_due(self, model: TrainedModel, number: int, kind: str) -> None:
        due = model.unsaved_seconds * SAVING_SHARE >= model.saving_seconds or kind == "load_weights"
        if model.has_gradient or model.is_lost or kind == "create_model" or not due:
            return
        began = self._parts.now
        saved = self._describe(model, "states", str(number), protocol.SaveWeights(number))
        try:
            await self._write_weights(
                saved, lambda at: self._parts.backend.save_state(model.model_id, at)
            )
            await self._parts.lane.run(self._forget_before, model, number)
        except Exception as error:  # the requests since the state before are all there
            model.is_lost = model.is_lost or isinstance(error, StateLostError)
            self._parts.report_event("state_not_saved", model=model.model_id, error=repr(error))
        model.unsaved_seconds = 0.0
        model.saving_seconds = self._parts.now - began

    def _forget_before(self, model: TrainedModel, number: int) -> None:
        """Remove what a state makes superfluous: older ones, requests, and answers that nobody asks
        for any more."""
        for state in self._parts.weights.list_kind(model.model_id, "states"):
            if state.seq_id < number:
                self._parts.weights.delete(state.tinker_path)
        for done in model.files.list_numbers(TakenRequest):
            if done <= number:
                model.files.remove(done, TakenRequest)
        for done in model.files.list_numbers(Answer):
            if done <= number and f"{model.model_id}:{done}" not in self._parts.futures:
                model.files.remove(done, Answer)

    # -- what each request does --------------------------------------------------------------------

    async def _apply(self, model: TrainedModel, taken: TakenRequest) -> Result:
        match taken.kind:
            case "forward" | "forward_backward":
                return await self._train(model, taken)
            case "optim_step":
                return await self._step(model, decode_request(taken.body, protocol.OptimStep))
            case "create_model":
                return await self._create(model, decode_request(taken.body, protocol.CreateModel))
            case "load_weights":
                return await self._load(model, decode_request(taken.body, protocol.LoadWeights))
            case _:
                request = decode_request(taken.body, protocol.SaveWeights)
                return await self._save(model, taken.kind, request)

    async def _create(self, model: TrainedModel, request: protocol.CreateModel) -> Result:
        self._parts.check_base(request.base_model)
        lora = request.lora_config
        if lora is not None and lora.seed is None:
            lora.seed = zlib.crc32(model.model_id.encode())  # the same when it is made again
        await self._begin_model(model, lora)
        return {"type": "create_model", "model_id": model.model_id}

    async def _begin_model(self, model: TrainedModel, lora: LoraConfig | None) -> None:
        await self._parts.backend.create_model(model.model_id, lora)
        model.session.models[model.model_id] = lora
        await self._parts.write_session(model.session)

    async def _load(self, model: TrainedModel, request: protocol.LoadWeights) -> Result:
        self._parts.check_base(request.base_model)
        saved = self._parts.find_weights(request.path, "weights")
        if request.model_id is None:
            await self._begin_model(model, saved.lora)
        elif (saved.lora and saved.lora.rank) != (model.lora and model.lora.rank):
            raise ApiError(f"{request.path} has adapters of another rank than the model")
        with_optimizer = bool(request.optimizer)
        directory = self._parts.weights.locate(saved.tinker_path)
        await self._parts.backend.load_state(
            model.model_id, directory, with_optimizer=with_optimizer
        )
        model.version = saved.version if request.model_id is None else model.version + 1
        return {"type": "load_weights", "path": request.path, "model_id": model.model_id}

    async def _train(self, model: TrainedModel, taken: TakenRequest) -> Result:
        batch = await self._parts.lane.run(self._read_batch, model, taken)
        if taken.kind == "forward":
            return await self._parts.backend.forward(model.model_id, batch)
        result = await self._parts.backend.forward_backward(model.model_id, batch)
        model.has_gradient = True
        return result

    def _read_batch(self, model: TrainedModel, taken: TakenRequest) -> LossBatch:
        parse = protocol.parse_proto_training if taken.protobuf else protocol.parse_json_training
        request = parse(taken.body)
        settings = check_loss(request.loss_fn, request.loss_config)
        if not request.data:
            raise ApiError("there is no datum")
        served = self._parts.backend.served
        data = []
        for index, datum in enumerate(request.data):
            check_datum(index, datum, request.loss_fn, served.vocab_size, served.max_tokens)
            data.append(self._parts.kept.match_datum(index, datum, model.model_id))
        return LossBatch(request.loss_fn, settings, data, model.version)

    async def _step(self, model: TrainedModel, request: protocol.OptimStep) -> Result:
        params = request.adam_params or protocol.AdamParams()
        metrics = await self._parts.backend.optim_step(model.model_id, params)
        model.version += 1
        model.has_gradient = False
        return {"type": "optim_step", "metrics": protocol.drop_not_finite(metrics)}

    async def _save(self, model: TrainedModel, path: str, request: protocol.SaveWeights) -> Result:
        backend = self._parts.backend
        number = request.seq_id
        if path == "save_weights":
            saved = self._describe(model, "weights", request.path or f"step-{number}", request)
            await self._write_weights(saved, lambda at: backend.save_state(model.model_id, at))
            return {"type": path, "path": saved.tinker_path}
        kind: WeightsKind = "snapshots" if request.path is None else "sampler_weights"
        saved = self._describe(model, kind, request.path or str(number), request)
        snapshot = Snapshot(saved.tinker_path, model.model_id, model.version)
        await self._write_weights(saved, lambda at: backend.publish(snapshot, at))
        if request.path is not None:
            return {"type": path, "path": saved.tinker_path}
        await backend.open_snapshot(snapshot, self._parts.weights.locate(saved.tinker_path))
        counted = request.sampling_session_seq_id
        sampler_id = f"{model.model_id}:sample:{number if counted is None else counted}"
        await self._sampling.add_sampler(Sampler(sampler_id, model.session.session_id, snapshot))
        return {"type": path, "sampling_session_id": sampler_id}

    def _describe(
        self, model: TrainedModel, kind: WeightsKind, name: str, request: protocol.SaveWeights
    ) -> SavedWeights:
        now = self._parts.world.clock.time()
        return SavedWeights(
            model.model_id,
            kind,
            name,
            self._parts.backend.served.name,
            model.lora,
            model.version,
            request.seq_id,
            created_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
            user_metadata=request.user_metadata,
            overwrite=bool(request.overwrite),
        )

    async def _write_weights(
        self, saved: SavedWeights, write: Callable[[Path], Awaitable[None]]
    ) -> None:
        partial = await self._parts.lane.run(self._parts.weights.begin, saved)
        if partial is not None:
            await write(partial)
            await self._parts.lane.run(self._parts.weights.commit, saved, partial)
