"""The line between clients and the server: requests and answers are delayed, lost and duplicated, and
a server that has ended answers nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from dev.simulation.invariants import InvariantViolated
from dev.simulation.processes import HostProcess
from dev.simulation.world import Simulation
from r3async.tinker.protocol import (
    ApiError,
    CreateSampler,
    Named,
    SampleRequest,
    decode_request,
)
from r3async.tinker.server import MODEL_PATHS
from r3async.tinker.service import TinkerService

HELD_SECONDS = (20.0, 45.0)
"""How long a poll without a result is to be held: the SDK asks again at once, and waits 45 s."""
MOST_TURNS = 4
"""Turns of another client while one waits: one by right, and those that were given before it came."""

Report = Callable[[InvariantViolated], None]
Reply = tuple[int, dict[str, Any]]


class LineFaults(NamedTuple):
    """Shares of requests whose request or answer is lost, or that come twice, and the longest
    delay."""

    lost: float
    duplicated: float
    delay: float


class TurnWatch:
    """A record of the samples that wait, and of how often each client was overtaken."""

    def __init__(self, report: Report):
        self._report = report
        self._waiting: dict[int, deque[int]] = {}
        self._overtaken: dict[int, Counter[int]] = {}

    def clear(self) -> None:
        self._waiting.clear()
        self._overtaken.clear()

    def sample_came(self, client: int, seed: int) -> None:
        self._waiting.setdefault(client, deque()).append(seed)

    def sample_began(self, client: int, seed: int) -> None:
        waiting = self._waiting.get(client, deque())
        if seed not in waiting:
            return  # drawn again, as its weights were lost
        waiting.remove(seed)
        self._overtaken[client] = Counter()
        for other, queue in self._waiting.items():
            if other != client and queue:
                counts = self._overtaken.setdefault(other, Counter())
                counts[client] += 1
                if counts[client] > MOST_TURNS:
                    reason = f"client {client} had {counts[client]} turns while {other} waited"
                    self._report(InvariantViolated("fair", reason))


class ServerLine:
    """The way from clients to the server that runs at the moment, if one does."""

    def __init__(self, simulation: Simulation, faults: LineFaults, report: Report):
        self.process: HostProcess | None = None
        self.service: TinkerService | None = None
        self.turns = TurnWatch(report)
        self.faults = faults
        self.counts: Counter[str] = Counter()
        self._loop = simulation.loop
        self._log = simulation.log
        self._rng = simulation.rng_for("line")
        self._report = report

    async def request(self, path: str, body: dict[str, Any]) -> Reply:
        """Return a status and the answer. Raises `ConnectionError`."""
        await asyncio.sleep(self._rng.uniform(0.0, self.faults.delay))
        if self._rng.random() < self.faults.duplicated:
            self.counts["duplicated"] += 1
            self._loop.create_task(self._deliver_late(path, body))
        if self._rng.random() < self.faults.lost:
            self.counts["lost requests"] += 1
            raise ConnectionError("lost on its way")
        reply = await self._deliver(path, body)
        await asyncio.sleep(self._rng.uniform(0.0, self.faults.delay))
        if self._rng.random() < self.faults.lost:
            self.counts["lost answers"] += 1
            if self._rng.random() < 0.5:
                raise ConnectionError("the answer is lost")
            return 500, {}
        return reply

    async def _deliver_late(self, path: str, body: dict[str, Any]) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 20.0))
        with contextlib.suppress(ConnectionError):
            await self._deliver(path, body)

    async def _deliver(self, path: str, body: dict[str, Any]) -> Reply:
        process, service = self.process, self.service
        if process is None or service is None or process.ended:
            raise ConnectionError("refused")
        answered = self._loop.create_future()

        def end() -> None:
            if not answered.done():
                answered.set_exception(ConnectionError("the server ended"))

        async def work() -> None:
            reply = await self._handle(service, path, body)
            self._log.log_detail(f"{path} {body} {reply}")
            if not answered.done():
                answered.set_result(reply)

        process.add_end_callback(end)
        self._loop.create_task(work(), context=process.context.copy())
        return await answered

    async def _handle(self, service: TinkerService, path: str, body: dict[str, Any]) -> Reply:
        """Do what `server.py` does with a request."""
        data = json.dumps(body).encode()
        try:
            if path in MODEL_PATHS:
                request_id, model_id = await service.training.submit(path, data, protobuf=False)
                return 200, {"request_id": request_id, "model_id": model_id}
            match path:
                case "create_session":
                    return 200, await service.open_session(Named())
                case "session_heartbeat":
                    return 200, service.see_heartbeat(decode_request(data, Named))
                case "finish":
                    await service.close_session(body["session_id"])
                    return 200, {}
                case "create_sampling_session":
                    return 200, await service.sampling.create_sampler(
                        decode_request(data, CreateSampler)
                    )
                case "asample":
                    return 200, self._sample(service, decode_request(data, SampleRequest))
                case _:
                    return await self._poll(service, body["request_id"])
        except ApiError as error:
            return error.status, {"error": str(error), "category": error.category}

    def _sample(self, service: TinkerService, request: SampleRequest) -> dict[str, Any]:
        before = len(service.parts.futures)
        answer = service.sampling.sample(request)
        if len(service.parts.futures) > before:
            prompt = request.prompt.to_tokens()
            self.turns.sample_came(int(prompt[0]), request.sampling_params.seed or 0)
        return answer

    async def _poll(self, service: TinkerService, request_id: str) -> Reply:
        began = self._loop.now
        answer = await service.poll(request_id, protobuf=False)
        held = self._loop.now - began
        if held > HELD_SECONDS[1] or (answer is None and held < HELD_SECONDS[0]):
            self._report(InvariantViolated("polls", f"a poll was held for {held:.1f} s"))
        if answer is None:
            return 200, {"type": "try_again"}
        return 200, json.loads(answer.body)
