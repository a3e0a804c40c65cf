"""Samples and the weights that they are drawn from.

A sample is nothing that its client could not draw again: an SDK sends it anew if the server does
not know it any more. Samplers survive the server, and their weights the engine, from which they are
opened again when it has lost them. Sessions take turns, so that none waits for all that another one
has asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np

from r3async.tinker import protocol
from r3async.tinker.backend import StateLostError
from r3async.tinker.kept_sequences import KeptSequence
from r3async.tinker.parts import ServiceParts
from r3async.tinker.protocol import ApiError, SampledSequence, SampleResult, encode_result
from r3async.tinker.sessions import BASE_SNAPSHOT, Sampler, Snapshot

MAX_LOSSES = 3
"""How often a request is made again because its model or weights were lost meanwhile."""
MAX_RUNNING = 2048
"""Sequences that the backend has to sample at once."""
MAX_WAITING = 8192
"""Requests of a session that wait for their turn."""


class FairTurns:
    """Turns of several owners, of which each has one after the other, while what runs has at most a
    size of `limit`, or is alone."""

    def __init__(self, limit: int):
        self._limit = limit
        self._running = 0
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def check_room(self, owner: str) -> None:
        if len(self._waiting.get(owner, ())) >= MAX_WAITING:
            raise ApiError(f"{MAX_WAITING} samples of this session wait already", status=429)

    async def take(self, owner: str, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((size, turn))
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size)
            raise

    def release(self, size: int) -> None:
        self._running -= size
        self._begin_next()

    def _is_full(self, size: int) -> bool:
        return self._running > 0 and self._running + size > self._limit

    def _begin_next(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            size, turn = self._waiting[owner][0]
            if not turn.cancelled() and self._is_full(size):
                return
            waiting = self._waiting.pop(owner)
            waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting  # after all others
            if not turn.cancelled():
                self._running += size
                turn.set_result(None)


class ModelSampling:
    """The samplers of all clients. Methods belong to the event loop's thread."""

    def __init__(self, parts: ServiceParts):
        self._parts = parts
        self._turns = FairTurns(MAX_RUNNING)
        self._openings: dict[str, asyncio.Task[None]] = {}
        """Snapshots that are being opened again."""

    async def create_sampler(self, request: protocol.CreateSampler) -> dict[str, str]:
        """Open a sampler on saved weights, or on the base model."""
        parts = self._parts
        session = parts.sessions.find_session(request.session_id, parts.now)
        sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler_id not in session.samplers:
            parts.check_base(request.base_model)
            snapshot = BASE_SNAPSHOT
            if request.model_path is not None:
                saved = parts.find_weights(request.model_path, "sampler_weights")
                snapshot = Snapshot(saved.tinker_path, saved.model_id, saved.version)
                await self._open(snapshot)
            await self.add_sampler(Sampler(sampler_id, request.session_id, snapshot))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def add_sampler(self, sampler: Sampler) -> None:
        """Add a sampler, which survives this process from then on."""
        over = self._parts.sessions.add_sampler(sampler)
        await self._parts.write_session(self._parts.sessions.find_session(sampler.session_id))
        await self.close_snapshots(over)

    async def close_snapshots(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            await self._parts.backend.close_snapshot(snapshot)
            if "/snapshots/" in snapshot.name:
                await self._parts.lane.run(self._parts.weights.delete, snapshot.name)

    def sample(self, request: protocol.SampleRequest) -> dict[str, Any]:
        """Take an `asample`, and return the ids of its future and of its sequences."""
        parts = self._parts
        sampler = parts.sessions.find_sampler(request.sampling_session_id, parts.now)
        request_id = f"{sampler.sampler_id}:{request.seq_id}"
        names = [f"{request_id}:{index}" for index in range(request.num_samples)]
        if request_id not in parts.futures:
            prompt = self._check_prompt(request)
            self._turns.check_room(sampler.session_id)
            parts.futures.create(request_id, sampler.session_id)
            work = self._run_sample(request_id, names, sampler, prompt, request)
            task = asyncio.get_running_loop().create_task(work, name=f"tinker {request_id}")
            # A task that is cancelled before it began leaves its work as it is.
            task.add_done_callback(lambda _: work.close())
            parts.futures.let_cancel(request_id, task)
        return {"request_id": request_id, "sample_sequence_ids": names}

    def _check_prompt(self, request: protocol.SampleRequest) -> np.ndarray:
        """Return the prompt. Raises `ApiError` for what cannot be sampled."""
        served = self._parts.backend.served
        prompt = request.prompt.to_tokens()
        if not 0 < len(prompt) < served.max_tokens:
            raise ApiError(f"the prompt has {len(prompt)} tokens, of 1 to {served.max_tokens - 1}")
        if int(prompt.max()) >= served.vocab_size:
            raise ApiError(f"a token of the prompt is not one of 0 .. {served.vocab_size - 1}")
        if request.record_stability_info:
            raise ApiError("record_stability_info is not supported")
        last = request.prompt_logprobs_last_n
        if last is not None and not (request.prompt_logprobs and last < len(prompt)):
            raise ApiError(
                "prompt_logprobs_last_n needs prompt_logprobs, and is from 1 to one below the "
                "prompt's length"
            )
        return prompt

    async def _run_sample(
        self,
        request_id: str,
        names: list[str],
        sampler: Sampler,
        prompt: np.ndarray,
        request: protocol.SampleRequest,
    ) -> None:
        parts = self._parts
        await self._turns.take(sampler.session_id, request.num_samples)
        try:
            result = await self._draw(sampler.snapshot, prompt, request)
            # `compute_logprobs` of an SDK is a sample of one token, which nobody trains on.
            if not (request.prompt_logprobs and request.sampling_params.max_tokens == 1):
                for name, sequence in zip(names, result.sequences, strict=True):
                    await self._keep(name, sampler.snapshot, prompt, sequence)
            parts.futures.resolve(request_id, result)
        except ApiError as error:
            parts.futures.resolve(request_id, encode_result(error, protobuf=False))
        except Exception as error:
            failed = ApiError(f"{type(error).__name__}: {error}", category="server")
            parts.futures.resolve(request_id, encode_result(failed, protobuf=False))
        finally:
            self._turns.release(request.num_samples)

    async def _draw(
        self, snapshot: Snapshot, prompt: np.ndarray, request: protocol.SampleRequest
    ) -> SampleResult:
        """Draw samples, again if their weights were lost meanwhile."""
        for _ in range(MAX_LOSSES):
            try:
                return await self._draw_once(snapshot, prompt, request)
            except StateLostError:
                await self._open(snapshot)
        return await self._draw_once(snapshot, prompt, request)

    async def _draw_once(
        self, snapshot: Snapshot, prompt: np.ndarray, request: protocol.SampleRequest
    ) -> SampleResult:
        backend = self._parts.backend
        params = request.sampling_params
        room = backend.served.max_tokens - len(prompt)
        params.max_tokens = min(params.max_tokens or room, room)
        top_k = request.topk_sample_logprobs or 0
        sequences = await backend.sample(
            snapshot, prompt, params, num_samples=request.num_samples, top_k=top_k
        )
        top_k = request.topk_prompt_logprobs or 0
        if not (request.prompt_logprobs or top_k):
            return SampleResult(sequences)
        logprobs, top = await backend.compute_logprobs(snapshot, prompt, top_k=top_k)
        unscored = len(prompt) - (request.prompt_logprobs_last_n or len(prompt))
        logprobs[:unscored] = np.nan
        if top is not None:
            top.logprobs[:unscored] = np.nan
        return SampleResult(sequences, logprobs if request.prompt_logprobs else None, top)

    async def _open(self, snapshot: Snapshot) -> None:
        """Open saved weights, once for all who wait for them."""
        if snapshot == BASE_SNAPSHOT:
            return
        opening = self._openings.get(snapshot.name)
        if opening is None:
            directory = self._parts.weights.locate(snapshot.name)
            work = self._parts.backend.open_snapshot(snapshot, directory)
            opening = asyncio.ensure_future(work)
            self._openings[snapshot.name] = opening
            opening.add_done_callback(lambda _: self._openings.pop(snapshot.name))
        await asyncio.shield(opening)

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
            await self._parts.lane.run(self._parts.kept.put, kept)
        except OSError as error:
            # Its tokens will route by themselves, which `routes/recorded` shows.
            self._parts.report_event("sequence_not_kept", sequence=name, error=str(error))
