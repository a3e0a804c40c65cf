"""The requests that run in vLLM's engine core: their tokens, and the version of each token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import numpy as np

from r3async.data.supports import SupportSets
from r3async.data.versions import VersionSpanRecorder
from r3async.rollout.engine import EngineError, EngineLostError, TopTokens
from r3async.rollout.vllm.client import EngineCoreClient
from r3async.rollout.vllm.messages import CoreAdapterRequest

CALL_TIMEOUT = 30.0
"""Seconds that vLLM may take for a call that does no work on the model."""


class RunningRequest:
    """A request inside vLLM, with its outputs so far.

    Attributes:
        version: Version under which it entered.
        tokens: Sampled tokens.
        logprobs: Log-probs, in pieces; so are `supports`, `routes`, and the most likely tokens
            `top_tokens`.
        prompt_logprobs: Log-probs of the prompt's tokens after the first, float32.
        top_prompt_tokens: The most likely tokens in their places.
        cached_tokens: Number of positions taken from the prefix cache.
        finish_reason: Why the request ended; "" while it runs.
    """

    __slots__ = (
        "cached_tokens",
        "finish_reason",
        "finished_future",
        "logprobs",
        "needs_restart",
        "prompt_logprobs",
        "request_id",
        "routes",
        "supports",
        "tokens",
        "top_prompt_tokens",
        "top_tokens",
        "version",
        "version_spans",
    )

    def __init__(self, request_id: str, version: int):
        self.request_id = request_id
        self.version = version
        self.version_spans = VersionSpanRecorder(version)
        self.tokens: list[int] = []
        self.logprobs: list[np.ndarray] = []
        self.routes: list[np.ndarray] = []
        self.supports: list[SupportSets] = []
        self.prompt_logprobs: np.ndarray | None = None
        self.top_tokens: list[TopTokens] = []
        self.top_prompt_tokens: TopTokens | None = None
        self.cached_tokens = 0
        self.finish_reason = ""
        self.needs_restart = False
        self.finished_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add_output(self, output: Any) -> None:
        """Add an output of vLLM's engine core."""
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            values = output.new_logprobs.logprobs
            if values.ndim == 2:  # the sampled token is the first of each row
                ids = output.new_logprobs.logprob_token_ids
                self.top_tokens.append(TopTokens(ids[:, 1:], values[:, 1:]))
                values = values[:, 0]
            self.logprobs.append(values)
        if output.new_sampling_mask is not None:
            self.supports.append(
                SupportSets.decode(len(output.new_token_ids), output.new_sampling_mask.token_ids)
            )
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)
        if output.new_prompt_logprobs_tensors is not None:
            scores = output.new_prompt_logprobs_tensors
            self.prompt_logprobs = np.asarray(scores.logprobs[:, 0], np.float32)
            ids = np.asarray(scores.logprob_token_ids[:, 1:], np.int32)
            self.top_prompt_tokens = TopTokens(ids, scores.logprobs[:, 1:])
        if output.prefill_stats is not None:
            self.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)

    def finish_request(self) -> None:
        """Let the request's caller continue. Idempotent."""
        if not self.finished_future.done():
            self.finished_future.set_result(None)


class RequestRegistry:
    """The requests that run inside vLLM. All calls belong to one event loop.

    `core` is None while no core runs. `failure`, if not None, is raised by every call.
    """

    def __init__(self) -> None:
        self.core: EngineCoreClient | None = None
        self.failure: EngineError | None = EngineError("the engine has not been started")
        self.aborted_count = self.restarted_count = 0
        self._running_requests: dict[str, RunningRequest] = {}
        self._request_numbers = itertools.count()
        self._admission_open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._running_requests)

    @property
    def versions_in_use(self) -> set[int]:
        """The versions under which running requests have entered."""
        return {running.version for running in self._running_requests.values()}

    @property
    def running_core(self) -> EngineCoreClient:
        """The core. Raises `EngineError` while none runs."""
        if self.core is None:
            raise EngineError("the engine is not running")
        return self.core

    def resume_admission(self) -> None:
        """Let requests enter."""
        self._admission_open.set()

    def pause_admission(self) -> None:
        """Make new requests wait, until `resume_admission` or until the engine fails."""
        self._admission_open.clear()

    async def wait_for_admission(self) -> None:
        """Wait until requests may enter. Raises the engine's failure.

        No other task runs between its return and the caller's next suspension.
        """
        while self.failure is None and not self._admission_open.is_set():
            await self._admission_open.wait()
        if self.failure is not None:
            raise self.failure

    async def receive_outputs(self) -> None:
        """Receive the engine's outputs for as long as it lives; then make every running and later
        request raise `EngineLostError`."""
        try:
            while True:
                ended = [
                    r
                    for output in await self.running_core.receive_outputs()
                    if (r := self._dispatch_output(output)) is not None
                ]
                for running in ended:
                    running.finish_request()
                    # Its caller validates, parses and sends its next request: one caller per
                    # turn of the loop.
                    await asyncio.sleep(0)
        except EngineLostError as error:
            await self.fail_requests(error)
        except Exception as error:
            await self.fail_requests(EngineLostError(f"its outputs cannot be read: {error!r}"))

    def _dispatch_output(self, output: Any) -> RunningRequest | None:
        """Add an output to its request and return the request if this was its last
        output; else None.

        Outputs of requests that nobody waits for any more are dropped.
        """
        running = self._running_requests.get(output.request_id)
        if running is None or running.finished_future.done():
            return None
        running.add_output(output)
        return running if running.finish_reason else None

    def create_request(self, name: str, version: int) -> RunningRequest:
        """Return a request that enters under weights `version`, with an id that vLLM has
        not seen before."""
        return RunningRequest(f"{name}#{next(self._request_numbers)}", version)

    async def run_request(
        self,
        request: RunningRequest,
        prompt_ids: list[int],
        params: Any,
        cache_salt: str | None,
        adapter: CoreAdapterRequest | None = None,
    ) -> bool:
        """Run a new request to its end. Returns False if it must start again
        under newer weights."""
        if self.failure is not None:
            raise self.failure
        self._running_requests[request.request_id] = request
        self._idle.clear()
        try:
            await self.running_core.add_request(
                request.request_id, prompt_ids, params, cache_salt, adapter
            )
            await request.finished_future
        except asyncio.CancelledError:
            self.aborted_count += 1
            if self.core is not None:
                await self.core.abort_requests([request.request_id])
            raise
        except EngineLostError:
            raise
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise EngineError(f"request {request.request_id}: {error or repr(error)}") from error
        finally:
            del self._running_requests[request.request_id]
            if not self._running_requests:
                self._idle.set()
        if self.failure is not None:
            raise self.failure
        return not request.needs_restart

    async def abort_request(self, name: str) -> None:
        """End the running requests of that name, with the tokens sampled so far."""
        if self.core is not None:
            await self.core.abort_requests(
                [r for r in self._running_requests if r.rpartition("#")[0] == name]
            )

    async def wait_until_idle(self) -> None:
        """Wait until no request runs, possibly for ever if further ones may enter."""
        await self._idle.wait()

    async def stamp_version(self, version: int) -> None:
        """Continue running requests under `version`, and restart those without a token.

        Call it only while the engine is paused and all outputs are received.
        """
        restart = []
        for running in self._running_requests.values():
            if running.finish_reason or running.finished_future.done():
                continue  # It has finished already, its caller has only not been scheduled yet.
            if running.tokens:
                running.version_spans.stamp_version(len(running.tokens), version)
            else:
                running.needs_restart = True
                restart.append(running.request_id)
                running.finish_request()
        self.restarted_count += len(restart)
        await self.running_core.abort_requests(restart)

    async def fail_requests(self, failure: EngineError) -> None:
        """Make every running and later call raise `failure`."""
        self.failure = self.failure or failure
        self._admission_open.set()
        names = list(self._running_requests)
        for running in self._running_requests.values():
            running.finish_request()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CALL_TIMEOUT):
                await self.running_core.abort_requests(names)
