"""What each request of the Tinker API does: on parsed requests, apart from HTTP. `training.py` has
the requests of models, `sampling.py` samples."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from r3async.tinker.backend import TinkerBackend
from r3async.tinker.futures import POLL_SECONDS, ResultFutures
from r3async.tinker.kept_sequences import KeptSequences
from r3async.tinker.parts import ServiceParts
from r3async.tinker.protocol import Answer, ApiError, Named, encode_result
from r3async.tinker.sampling import ModelSampling
from r3async.tinker.saved_weights import PREFIX, WeightsDirectory, WeightsKind
from r3async.tinker.sessions import Sessions
from r3async.tinker.training import ModelTraining
from r3async.world import EventReporter, World, ignore_event

KEPT_BYTES = 5 * 2**30
SWEEP_SECONDS = 5.0


class TinkerService:
    """The sessions of all clients, on one backend. Methods belong to the event loop's thread.

    Training requests of a model run one after the other, in the order of their numbers; those of
    several models, and samples, run at once. What was acknowledged survives the process: a service
    on the same directory, which one process uses at a time, continues it.

    Args:
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
        files = world.files
        self.parts = ServiceParts(
            backend,
            directory,
            world,
            world.threads.new_worker("tinker files"),
            Sessions(directory / "sessions", world.clock.monotonic(), files=files),
            ResultFutures(world.clock, poll_seconds=poll_seconds),
            WeightsDirectory(directory / "weights", files=files),
            KeptSequences(directory / "kept", max_bytes=kept_bytes, files=files),
            report_event,
        )
        self.sampling = ModelSampling(self.parts)
        self.training = ModelTraining(self.parts, self.sampling)

    async def sweep(self) -> None:
        """End idle sessions, forget old results, and give up missing numbers, for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.parts.futures.forget_expired()
            for session_id in self.parts.sessions.find_idle(self.parts.now):
                try:
                    await self.close_session(session_id)
                except Exception as error:  # the session is forgotten all the same
                    self.parts.report_event(
                        "session_not_closed", session=session_id, error=repr(error)
                    )
            for model in list(self.training.models.values()):
                self.training.start_ready(model)

    async def close(self) -> None:
        """Stop. What is not done yet, a later service does."""
        await self.training.close()
        for session_id in self.parts.sessions.sessions:
            self.parts.futures.forget_owner(session_id)
        await self.parts.lane.close()

    async def open_session(self, request: Named) -> dict[str, Any]:
        session_id = f"session-{self.parts.world.unique_id()}"
        session = self.parts.sessions.open(session_id, self.parts.now)
        await self.parts.write_session(session)
        return {"type": "create_session", "session_id": session_id}

    def see_heartbeat(self, request: Named) -> dict[str, Any]:
        self.parts.sessions.find_session(request.session_id)
        return {"type": "session_heartbeat"}

    async def close_session(self, session_id: str) -> None:
        session = self.parts.sessions.find_session(session_id)
        over = self.parts.sessions.close(session_id)
        self.parts.futures.forget_owner(session_id)
        await self.parts.write_session(session)
        await self.training.close_models(session)
        await self.sampling.close_snapshots(over)

    async def poll(self, request_id: str, *, protobuf: bool) -> Answer | None:
        """Return the answer of a request; None if there is none yet. Raises `ApiError`."""
        self.parts.sessions.find_session(request_id.split(":")[0], self.parts.now)
        result = await self.parts.futures.poll(request_id)
        if result is None or isinstance(result, Answer):
            return result
        return encode_result(result, protobuf=protobuf)

    def cancel(self, request: Named) -> dict[str, Any]:
        self.parts.futures.cancel(request.request_id)
        return {}

    # -- listings ----------------------------------------------------------------------------------

    def describe_model(self, request: Named) -> dict[str, Any]:
        model = self.training.find_model(request.model_id)
        served = self.parts.backend.served
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": served.name,
            "is_lora": model.lora is not None,
            "lora_rank": None if model.lora is None else model.lora.rank,
            "model_data": {
                "arch": "transformer",
                "model_name": served.name,
                "tokenizer_id": served.tokenizer,
            },
        }

    def describe_sampler(self, sampler_id: str) -> dict[str, Any]:
        sampler = self.parts.sessions.find_sampler(sampler_id, self.parts.now)
        return {
            "sampler_id": sampler_id,
            "base_model": self.parts.backend.served.name,
            "model_path": sampler.model_path,
        }

    def describe_run(self, model_id: str) -> dict[str, Any]:
        if model_id not in self.training.models:
            raise ApiError(f"there is no training run {model_id!r}, or no more", status=404)
        model = self.training.models[model_id]
        used_at = self.parts.world.clock.time() - (self.parts.now - model.used_at)
        return {
            "training_run_id": model.model_id,
            "base_model": self.parts.backend.served.name,
            "model_owner": "r3async",
            "is_lora": model.lora is not None,
            "lora_rank": None if model.lora is None else model.lora.rank,
            "last_request_time": _format_time(used_at),
        }

    def describe_session(self, session_id: str) -> dict[str, Any]:
        session = self.parts.sessions.find_session(session_id)
        return {"training_run_ids": [*session.models], "sampler_ids": [*session.samplers]}

    async def list_weights(self, model_id: str | None) -> list[dict[str, Any]]:
        now = self.parts.world.clock.time()
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
            for saved in await self.parts.lane.run(self.parts.weights.list_all, now, model_id)
        ]

    def describe_weights(self, request: Named) -> dict[str, Any]:
        path = request.tinker_path
        return self.parts.find_weights(path, _kind_of(path)).describe()

    async def delete_weights(self, model_id: str, checkpoint_id: str) -> None:
        path = f"{PREFIX}{model_id}/{checkpoint_id}"
        saved = self.parts.find_weights(path, _kind_of(path))
        await self.parts.lane.run(self.parts.weights.delete, saved.tinker_path)


def _kind_of(tinker_path: str) -> WeightsKind:
    return "sampler_weights" if "/sampler_weights/" in tinker_path else "weights"


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
