"""The requests inside vLLM, the gate that they pass on their way in, and what becomes of them when weights change."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

from r3async.data.versions import SpanRecorder
from r3async.rollout.engines.base import EngineError

CALL_TIMEOUT = 30.0
"""Seconds that vLLM may take for a call that does no work on the model."""
_OUTPUT_CHUNK = 128
"""Outputs of one step that vLLM hands on before it lets other tasks run (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)."""


class Running:
    """A request inside vLLM. `collector` is where vLLM puts its result; None until vLLM has taken the request."""

    __slots__ = ("collector", "request_id", "restart", "spans")

    def __init__(self, request_id: str, version: int):
        self.request_id = request_id
        self.spans = SpanRecorder(version)
        self.collector: Any = None
        self.restart = False


class Requests:
    """All calls belong to one event loop. `llm` is vLLM's `AsyncLLM`, once it has started; `failure`, if not None, is what
    every call raises."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.failure: EngineError | None = EngineError("the engine has not been started")
        self.aborted = self.restarted = 0
        self._running: set[Running] = set()
        self._serial = itertools.count()
        self._gate = asyncio.Event()
        self._none_running = asyncio.Event()
        self._none_running.set()

    def __len__(self) -> int:
        return len(self._running)

    def open_gate(self) -> None:
        """Requests may enter."""
        self._gate.set()

    def close_gate(self) -> None:
        """Requests have to wait, until the gate is opened or the engine fails."""
        self._gate.clear()

    async def admission(self) -> None:
        """Wait until the gate is open. Raises what made the engine fail.

        No other task runs between its return and the caller's next suspension.
        """
        while self.failure is None and not self._gate.is_set():
            await self._gate.wait()
        if self.failure is not None:
            raise self.failure

    def new(self, name: str, version: int) -> Running:
        """A request that enters under weights `version`; vLLM knows it by a name that it never saw before."""
        return Running(f"{name}#{next(self._serial)}", version)

    async def run(self, running: Running, prompt: Any, params: Any) -> Any:
        """vLLM's final output, or None if the request has to start afresh under newer weights."""
        self._running.add(running)
        self._none_running.clear()
        try:
            running.collector = await self.llm.add_request(running.request_id, prompt, params)
            if running.restart:
                await self.llm.abort(running.request_id)
            output = await running.collector.get()
        except asyncio.CancelledError:
            self.aborted += 1
            if self.llm is not None:
                await self.llm.abort(running.request_id)
            raise
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise EngineError(f"request {running.request_id}: {error or repr(error)}") from error
        finally:
            self._running.discard(running)
            if not self._running:
                self._none_running.set()
        if self.failure is not None:
            raise self.failure
        return None if running.restart else output

    async def abort(self, name: str) -> None:
        """End the running requests of that name, with what they have sampled so far."""
        if self.llm is not None:
            await self.llm.abort([r.request_id for r in self._running if r.request_id.rpartition("#")[0] == name])

    async def finished(self) -> None:
        """Wait until no request runs: for ever, if the gate is open."""
        await self._none_running.wait()

    async def counted(self) -> None:
        """Wait until every output that left the paused engine is counted by vLLM's output processor.

        Results of calls and outputs of steps come through one socket in order, so whatever was produced before the
        pause is in this process by now: in vLLM's queue, or being handed on in chunks.
        """
        while not self.llm.engine_core.outputs_queue.empty():  # noqa: ASYNC110 - vLLM offers nothing to wait on
            await asyncio.sleep(0)
        for _ in range(2 + len(self._running) // _OUTPUT_CHUNK):
            await asyncio.sleep(0)

    async def stamp(self, version: int) -> None:
        """Running requests go on under `version`; those without a token start afresh. Only while paused and counted."""
        restart = []
        states = self.llm.output_processor.request_states
        for running in self._running:
            if running.collector is None:
                count = 0
            elif (state := states.get(running.collector.request_id)) is None:
                continue  # It has finished already, its caller has only not been scheduled yet.
            else:
                count = state.detokenizer.num_output_tokens()
            if count:
                running.spans.stamp(count, version)
            else:
                running.restart = True
                restart.append(running.request_id)
        self.restarted += len(restart)
        await self.llm.abort(restart)

    async def fail(self, failure: EngineError) -> None:
        """From now on every call raises `failure`, and so do those that are running."""
        self.failure = self.failure or failure
        self._gate.set()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CALL_TIMEOUT):
                await self.llm.abort([r.request_id for r in self._running])
