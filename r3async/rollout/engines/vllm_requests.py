"""The requests inside vLLM, and new weights under them: the order of events that makes every token's version exact.

Verify (nothing is paused yet), wait for running requests if they are to be drained, pause (no step runs any more), load,
have every worker confirm, take every output that was produced before the pause, stamp all running requests with their
token counts, resume. A request that has not produced a token when the pause comes starts again, so its prompt is never half
old and half new.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.data.supports import Supports
from r3async.data.versions import SpanRecorder
from r3async.rollout.engines import CorruptWeights, EngineError, InstallReport
from r3async.untrusted import decode_msgpack
from r3async.weights.manifest import Difference, WeightError, WeightManifest
from r3async.weights.reading import verify

CALL_TIMEOUT = 30.0
"""Seconds that vLLM may take for a call that does no work on the model."""


class Running:
    """A request inside vLLM, and what has left the engine of it: `tokens`; `logprobs`, `supports` and `routes` in pieces;
    `prompt_logprobs` float32 of the prompt's tokens after the first; `cached` positions from the prefix cache; `reason` why it
    ended."""

    __slots__ = (
        "cached",
        "logprobs",
        "over",
        "prompt_logprobs",
        "reason",
        "request_id",
        "restart",
        "routes",
        "spans",
        "supports",
        "tokens",
    )

    def __init__(self, request_id: str, version: int):
        self.request_id = request_id
        self.spans = SpanRecorder(version)
        self.tokens: list[int] = []
        self.logprobs: list[np.ndarray] = []
        self.routes: list[np.ndarray] = []
        self.supports: list[Supports] = []
        self.prompt_logprobs: np.ndarray | None = None
        self.cached = 0
        self.reason = ""
        self.restart = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, output: Any) -> None:
        """An output of vLLM's engine core."""
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs.logprobs)
        if output.new_sampling_mask is not None:
            self.supports.append(Supports.decode(len(output.new_token_ids), output.new_sampling_mask.token_ids))
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = np.asarray(output.new_prompt_logprobs_tensors.logprobs[:, 0], np.float32)
        if output.prefill_stats is not None:
            self.cached = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            self.reason = str(output.finish_reason)

    def end(self, error: Exception | None = None) -> None:
        """Its caller goes on, or gets the error. Idempotent."""
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


class Requests:
    """All calls belong to one event loop. `llm` is a `vllm_core.Core`, once it has started; `failure`, if not None, is what
    every call raises."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.failure: EngineError | None = EngineError("the engine has not been started")
        self.aborted = self.restarted = 0
        self._lost: Exception | None = None
        self._running: dict[str, Running] = {}
        self._serial = itertools.count()
        self._admitting = asyncio.Event()
        self._none_running = asyncio.Event()
        self._none_running.set()

    def __len__(self) -> int:
        return len(self._running)

    def admit(self) -> None:
        """Requests may enter."""
        self._admitting.set()

    def hold(self) -> None:
        """Requests have to wait, until `admit` or until the engine fails."""
        self._admitting.clear()

    async def admission(self) -> None:
        """Wait until requests may enter. Raises what made the engine fail.

        No other task runs between its return and the caller's next suspension.
        """
        while self.failure is None and not self._admitting.is_set():
            await self._admitting.wait()
        if self.failure is not None:
            raise self.failure

    async def receive(self) -> None:
        """Take what leaves the engine, for as long as it lives: then every running and later request fails."""
        try:
            while True:
                ended = [r for output in await self.llm.outputs() if (r := self._take(output)) is not None]
                for running in ended:
                    running.end()
                    # Its caller validates, parses and asks again: one of them in a turn of the loop.
                    await asyncio.sleep(0)
        except Exception as error:
            self._lost = error
            for running in self._running.values():
                running.end(error)

    def _take(self, output: Any) -> Running | None:
        """The request, if this was its last output. One that is not waited for any more is not known."""
        running = self._running.get(output.request_id)
        if running is None or running.over.done():
            return None
        running.take(output)
        return running if running.reason else None

    def new(self, name: str, version: int) -> Running:
        """A request that enters under weights `version`; vLLM knows it by a name that it never saw before."""
        return Running(f"{name}#{next(self._serial)}", version)

    async def run(self, running: Running, prompt_ids: list[int], params: Any, salt: str | None) -> bool:
        """Play a new request to its end. False if it has to start again under newer weights."""
        self._running[running.request_id] = running
        self._none_running.clear()
        try:
            if self._lost is not None:
                raise self._lost
            await self.llm.add(running.request_id, prompt_ids, params, salt)
            await running.over
        except asyncio.CancelledError:
            self.aborted += 1
            if self.llm is not None:
                await self.llm.abort([running.request_id])
            raise
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise EngineError(f"request {running.request_id}: {error or repr(error)}") from error
        finally:
            del self._running[running.request_id]
            if not self._running:
                self._none_running.set()
        if self.failure is not None:
            raise self.failure
        return not running.restart

    async def abort(self, name: str) -> None:
        """End the running requests of that name, with what they have sampled so far."""
        if self.llm is not None:
            await self.llm.abort([r for r in self._running if r.rpartition("#")[0] == name])

    async def finished(self) -> None:
        """Wait until no request runs: for ever, if further ones may enter."""
        await self._none_running.wait()

    async def stamp(self, version: int) -> None:
        """Running requests continue under `version`; those without a token start again. Only while paused and counted."""
        restart = []
        for running in self._running.values():
            if running.reason or running.over.done():
                continue  # It has finished already, its caller has only not been scheduled yet.
            if running.tokens:
                running.spans.stamp(len(running.tokens), version)
            else:
                running.restart = True
                restart.append(running.request_id)
                running.end()
        self.restarted += len(restart)
        await self.llm.abort(restart)

    async def fail(self, failure: EngineError) -> None:
        """From now on every call raises `failure`, and so do those that are running."""
        self.failure = self.failure or failure
        self._admitting.set()
        names = list(self._running)
        for running in self._running.values():
            running.end()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CALL_TIMEOUT):
                await self.llm.abort(names)


async def install(
    requests: Requests,
    manifest: WeightManifest,
    *,
    names: Collection[str],
    on_update: str,
    timeout: float,
    installed: Callable[[int], None],
) -> InstallReport:
    """Install a version that must have a tensor for each of `names`; `on_update` is the setting of that name.

    `installed` gets the version when the running requests are stamped with it, before any new one can enter.

    Until the engine is paused a failure leaves it as it was, on its old version: `CorruptWeights` then names the tensor, or
    `EngineError` says how many requests did not end in time. If anything fails later, or the call is cancelled, the weights are
    in an unknown state: the engine stays paused, and every running and later request fails.
    """
    started = time.perf_counter()
    deadline = asyncio.get_running_loop().time() + timeout
    version = manifest.version
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.to_thread(_verify, manifest, names)
    except WeightError as error:
        raise CorruptWeights(str(error)) from error
    except TimeoutError as error:
        raise EngineError(f"verifying version {version} took longer than {timeout} s") from error
    encoded = msgspec.msgpack.encode(manifest)
    verified = time.perf_counter()
    requests.hold()
    if on_update == "drain":
        await _drain(requests, version, deadline, timeout)
    drained = time.perf_counter()
    try:
        async with asyncio.timeout_at(deadline):
            # To clear the cache vLLM takes running requests' keys and values too. It raises if a block is left, and computes
            # them again, with the weights that it has then, before these requests continue.
            await requests.llm.pause_generation(mode="keep", clear_cache=on_update == "recompute")
            paused = time.perf_counter()  # until then the engine made the step that it was in
            _confirm(await requests.llm.collective_rpc("r3_install", args=(encoded,)), manifest)
            load = time.perf_counter() - paused
            installed(version)
            await requests.stamp(version)
            await requests.llm.resume_generation()
    except BaseException as error:
        what = f"took longer than {timeout} s" if isinstance(error, TimeoutError) else f"failed: {error!r}"
        failure = EngineError(f"installing version {version} {what}; the engine must be restarted")
        await requests.fail(failure)
        if isinstance(error, Exception):
            raise failure from error
        raise
    requests.admit()
    now = time.perf_counter()
    return InstallReport(
        version,
        update_seconds=now - started,
        pause_seconds=now - paused,
        verify_seconds=verified - started,
        drain_seconds=drained - verified,
        load_seconds=load,
    )


async def differences(requests: Requests, manifest: WeightManifest, timeout: float) -> list[Difference]:
    """Which tensors of an installed version the workers do not hold as they were published. If there are none, the engine
    continues with the same weights, to the bit. Otherwise, and if the comparison fails, it must be restarted. Raises
    `EngineError`."""
    ended = EngineError("the engine's weights were compared and reloaded; it must be restarted")
    requests.hold()
    try:
        async with asyncio.timeout(timeout):
            await requests.llm.pause_generation(mode="keep", clear_cache=False)
            answers = await requests.llm.collective_rpc("r3_differences", args=(msgspec.msgpack.encode(manifest),))
            found = [d for answer in answers for d in decode_msgpack(answer, list[Difference])]
            if not found:
                await requests.llm.resume_generation()
    except BaseException as error:
        await requests.fail(ended)
        if isinstance(error, Exception):
            raise EngineError(
                f"comparing what the engine holds with version {manifest.version} failed: {error!r}"
            ) from error
        raise
    if found:
        await requests.fail(ended)
    else:
        requests.admit()
    return list({d.tensor: d for d in found}.values())


def _verify(manifest: WeightManifest, names: Collection[str]) -> None:
    if missing := sorted(set(names) - set(manifest.tensors)):
        raise WeightError(
            f"weights version {manifest.version}: tensor {missing[0]!r} is missing ({len(missing)} in all)"
        )
    if manifest.source is None:
        verify(manifest)


async def _drain(requests: Requests, version: int, deadline: float, timeout: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await requests.finished()
    except BaseException as error:
        running = len(requests)
        requests.admit()
        if not isinstance(error, TimeoutError):
            raise
        raise EngineError(
            f"version {version} waited {timeout} s (weights.install_timeout) for {running} running requests to end "
            '(generator.on_update = "drain"); allow more time, or set generator.on_update="keep"'
        ) from error


def _confirm(answers: Sequence[Sequence[int]], manifest: WeightManifest) -> None:
    """What every worker says that it holds must be this version, with these contents."""
    digest = manifest.digest
    for worker, holds in enumerate(answers):
        if tuple(holds) != (manifest.version, digest):
            version = holds[0]
            raise EngineError(f"worker {worker} holds version {version} and not version {manifest.version}")
