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

from r3async.data.supports import SupportSets
from r3async.data.versions import VersionSpanRecorder
from r3async.rollout.engines import CorruptWeightsError, EngineError, InstallReport
from r3async.untrusted import decode_msgpack
from r3async.weights.manifest import TensorMismatch, WeightError, WeightManifest
from r3async.weights.reading import verify_version_file

CALL_TIMEOUT = 30.0
"""Seconds that vLLM may take for a call that does no work on the model."""


class RunningRequest:
    """A request inside vLLM, and what has left the engine of it: `tokens`; `logprobs`, `supports` and `routes` in pieces;
    `prompt_logprobs` float32 of the prompt's tokens after the first; `cached_tokens` positions from the prefix cache;
    `finish_reason` why it ended."""

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
        "version_spans",
    )

    def __init__(self, request_id: str, version: int):
        self.request_id = request_id
        self.version_spans = VersionSpanRecorder(version)
        self.tokens: list[int] = []
        self.logprobs: list[np.ndarray] = []
        self.routes: list[np.ndarray] = []
        self.supports: list[SupportSets] = []
        self.prompt_logprobs: np.ndarray | None = None
        self.cached_tokens = 0
        self.finish_reason = ""
        self.needs_restart = False
        self.finished_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add_output(self, output: Any) -> None:
        """An output of vLLM's engine core."""
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs.logprobs)
        if output.new_sampling_mask is not None:
            self.supports.append(SupportSets.decode(len(output.new_token_ids), output.new_sampling_mask.token_ids))
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = np.asarray(output.new_prompt_logprobs_tensors.logprobs[:, 0], np.float32)
        if output.prefill_stats is not None:
            self.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)

    def finish_request(self, error: Exception | None = None) -> None:
        """Its caller goes on, or gets the error. Idempotent."""
        if self.finished_future.done():
            return
        if error is None:
            self.finished_future.set_result(None)
        else:
            self.finished_future.set_exception(error)


class RequestRegistry:
    """All calls belong to one event loop. `core` is a `vllm_core.Core`, once it has started; `failure`, if not None, is what
    every call raises."""

    def __init__(self) -> None:
        self.core: Any = None
        self.failure: EngineError | None = EngineError("the engine has not been started")
        self.aborted_count = self.restarted_count = 0
        self._receive_error: Exception | None = None
        self._running_requests: dict[str, RunningRequest] = {}
        self._request_numbers = itertools.count()
        self._admission_open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._running_requests)

    def resume_admission(self) -> None:
        """Requests may enter."""
        self._admission_open.set()

    def pause_admission(self) -> None:
        """Requests have to wait, until `resume_admission` or until the engine fails."""
        self._admission_open.clear()

    async def wait_for_admission(self) -> None:
        """Wait until requests may enter. Raises what made the engine fail.

        No other task runs between its return and the caller's next suspension.
        """
        while self.failure is None and not self._admission_open.is_set():
            await self._admission_open.wait()
        if self.failure is not None:
            raise self.failure

    async def receive_outputs(self) -> None:
        """Take what leaves the engine, for as long as it lives: then every running and later request fails."""
        try:
            while True:
                ended = [
                    r
                    for output in await self.core.receive_outputs()
                    if (r := self._dispatch_output(output)) is not None
                ]
                for running in ended:
                    running.finish_request()
                    # Its caller validates, parses and asks again: one of them in a turn of the loop.
                    await asyncio.sleep(0)
        except Exception as error:
            self._receive_error = error
            for running in self._running_requests.values():
                running.finish_request(error)

    def _dispatch_output(self, output: Any) -> RunningRequest | None:
        """The request, if this was its last output. One that is not waited for any more is not known."""
        running = self._running_requests.get(output.request_id)
        if running is None or running.finished_future.done():
            return None
        running.add_output(output)
        return running if running.finish_reason else None

    def create_request(self, name: str, version: int) -> RunningRequest:
        """A request that enters under weights `version`; vLLM knows it by a name that it never saw before."""
        return RunningRequest(f"{name}#{next(self._request_numbers)}", version)

    async def run_request(
        self, request: RunningRequest, prompt_ids: list[int], params: Any, cache_salt: str | None
    ) -> bool:
        """Play a new request to its end. False if it has to start again under newer weights."""
        self._running_requests[request.request_id] = request
        self._idle.clear()
        try:
            if self._receive_error is not None:
                raise self._receive_error
            await self.core.add_request(request.request_id, prompt_ids, params, cache_salt)
            await request.finished_future
        except asyncio.CancelledError:
            self.aborted_count += 1
            if self.core is not None:
                await self.core.abort_requests([request.request_id])
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
        """End the running requests of that name, with what they have sampled so far."""
        if self.core is not None:
            await self.core.abort_requests([r for r in self._running_requests if r.rpartition("#")[0] == name])

    async def wait_until_idle(self) -> None:
        """Wait until no request runs: for ever, if further ones may enter."""
        await self._idle.wait()

    async def stamp_version(self, version: int) -> None:
        """Running requests continue under `version`; those without a token start again. Only while paused and counted."""
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
        await self.core.abort_requests(restart)

    async def fail_requests(self, failure: EngineError) -> None:
        """From now on every call raises `failure`, and so do those that are running."""
        self.failure = self.failure or failure
        self._admission_open.set()
        names = list(self._running_requests)
        for running in self._running_requests.values():
            running.finish_request()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CALL_TIMEOUT):
                await self.core.abort_requests(names)


async def install_version(
    requests: RequestRegistry,
    manifest: WeightManifest,
    *,
    tensor_names: Collection[str],
    on_update: str,
    timeout: float,
    on_installed: Callable[[int], None],
) -> InstallReport:
    """Install a version that must have a tensor for each of `tensor_names`; `on_update` is the setting of that name.

    `on_installed` gets the version when the running requests are stamped with it, before any new one can enter.

    Until the engine is paused a failure leaves it as it was, on its old version: `CorruptWeightsError` then names the tensor, or
    `EngineError` says how many requests did not end in time. If anything fails later, or the call is cancelled, the weights are
    in an unknown state: the engine stays paused, and every running and later request fails.
    """
    started = time.perf_counter()
    deadline = asyncio.get_running_loop().time() + timeout
    version = manifest.version
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.to_thread(_verify_manifest, manifest, tensor_names)
    except WeightError as error:
        raise CorruptWeightsError(str(error)) from error
    except TimeoutError as error:
        raise EngineError(f"verifying version {version} took longer than {timeout} s") from error
    encoded = msgspec.msgpack.encode(manifest)
    verified = time.perf_counter()
    requests.pause_admission()
    if on_update == "drain":
        await _drain_requests(requests, version, deadline, timeout)
    drained = time.perf_counter()
    try:
        async with asyncio.timeout_at(deadline):
            # To clear the cache vLLM takes running requests' keys and values too. It raises if a block is left, and computes
            # them again, with the weights that it has then, before these requests continue.
            await requests.core.pause_generation(mode="keep", clear_cache=on_update == "recompute")
            paused = time.perf_counter()  # until then the engine made the step that it was in
            _confirm_installed(await requests.core.collective_rpc("r3_install_version", args=(encoded,)), manifest)
            load = time.perf_counter() - paused
            on_installed(version)
            await requests.stamp_version(version)
            await requests.core.resume_generation()
    except BaseException as error:
        what = f"took longer than {timeout} s" if isinstance(error, TimeoutError) else f"failed: {error!r}"
        failure = EngineError(f"installing version {version} {what}; the engine must be restarted")
        await requests.fail_requests(failure)
        if isinstance(error, Exception):
            raise failure from error
        raise
    requests.resume_admission()
    now = time.perf_counter()
    return InstallReport(
        version,
        update_seconds=now - started,
        pause_seconds=now - paused,
        verify_seconds=verified - started,
        drain_seconds=drained - verified,
        load_seconds=load,
    )


async def find_weight_differences(
    requests: RequestRegistry, manifest: WeightManifest, timeout: float
) -> list[TensorMismatch]:
    """Which tensors of an installed version the workers do not hold as they were published. If there are none, the engine
    continues with the same weights, to the bit. Otherwise, and if the comparison fails, it must be restarted. Raises
    `EngineError`."""
    ended = EngineError("the engine's weights were compared and reloaded; it must be restarted")
    requests.pause_admission()
    try:
        async with asyncio.timeout(timeout):
            await requests.core.pause_generation(mode="keep", clear_cache=False)
            answers = await requests.core.collective_rpc(
                "r3_find_weight_differences", args=(msgspec.msgpack.encode(manifest),)
            )
            found = [d for answer in answers for d in decode_msgpack(answer, list[TensorMismatch])]
            if not found:
                await requests.core.resume_generation()
    except BaseException as error:
        await requests.fail_requests(ended)
        if isinstance(error, Exception):
            raise EngineError(
                f"comparing what the engine holds with version {manifest.version} failed: {error!r}"
            ) from error
        raise
    if found:
        await requests.fail_requests(ended)
    else:
        requests.resume_admission()
    return list({d.tensor: d for d in found}.values())


def _verify_manifest(manifest: WeightManifest, tensor_names: Collection[str]) -> None:
    if missing := sorted(set(tensor_names) - set(manifest.tensors)):
        raise WeightError(
            f"weights version {manifest.version}: tensor {missing[0]!r} is missing ({len(missing)} in all)"
        )
    if manifest.source is None:
        verify_version_file(manifest)


async def _drain_requests(requests: RequestRegistry, version: int, deadline: float, timeout: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await requests.wait_until_idle()
    except BaseException as error:
        running = len(requests)
        requests.resume_admission()
        if not isinstance(error, TimeoutError):
            raise
        raise EngineError(
            f"version {version} waited {timeout} s (weights.install_timeout) for {running} running requests to end "
            '(generator.on_update = "drain"); allow more time, or set generator.on_update="keep"'
        ) from error


def _confirm_installed(answers: Sequence[Sequence[int]], manifest: WeightManifest) -> None:
    """What every worker says that it holds must be this version, with these contents."""
    digest = manifest.digest
    for worker, holds in enumerate(answers):
        if tuple(holds) != (manifest.version, digest):
            version = holds[0]
            raise EngineError(f"worker {worker} holds version {version} and not version {manifest.version}")
