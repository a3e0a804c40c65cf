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
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from vllm.v1.metrics.loggers import PrometheusStatLogger

from r3async.data.versions import SpanRecorder
from r3async.rollout.engines import EngineError, InstallReport
from r3async.weights.publish import Difference, WeightError, WeightManifest, verify

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

    def new(self, name: str, version: int) -> Running:
        """A request that enters under weights `version`; vLLM knows it by a name that it never saw before."""
        return Running(f"{name}#{next(self._serial)}", version)

    async def run(self, running: Running, prompt: Any, params: Any) -> Any:
        """vLLM's final output, or None if the request has to start again under newer weights."""
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
        """Wait until no request runs: for ever, if further ones may enter."""
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
        """Running requests continue under `version`; those without a token start again. Only while paused and counted."""
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
        self._admitting.set()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CALL_TIMEOUT):
                await self.llm.abort([r.request_id for r in self._running])


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

    Until the engine is paused a failure leaves it as it was, on its old version: `EngineError` then names the tensor, or
    how many requests did not end in time. If anything fails later, or the call is cancelled, the weights are in an unknown
    state: the engine stays paused, and every running and later request fails.
    """
    started = time.perf_counter()
    deadline = asyncio.get_running_loop().time() + timeout
    version = manifest.version
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.to_thread(_verify, manifest, names)
    except WeightError as error:
        raise EngineError(str(error)) from error
    except TimeoutError as error:
        raise EngineError(f"verifying version {version} took longer than {timeout} s") from error
    verified = time.perf_counter()
    requests.hold()
    if on_update == "drain":
        await _drain(requests, version, deadline, timeout)
    paused = time.perf_counter()
    try:
        async with asyncio.timeout_at(deadline):
            # To clear the cache vLLM takes running requests' keys and values too. It raises if a block is left, and computes
            # them again, with the weights that it has then, before these requests continue.
            await requests.llm.pause_generation(mode="keep", clear_cache=on_update == "recompute")
            before = time.perf_counter()
            await requests.llm.collective_rpc("r3_install", args=(msgspec.msgpack.encode(manifest),))
            load = time.perf_counter() - before
            await _confirm(requests.llm, manifest)
            await requests.counted()
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
        drain_seconds=paused - verified,
        load_seconds=load,
    )


async def differences(requests: Requests, manifest: WeightManifest, timeout: float) -> list[Difference]:
    """Which tensors of an installed version the workers do not hold as they were published. Ends the engine: it must be
    restarted. Raises `EngineError`."""
    requests.hold()
    try:
        async with asyncio.timeout(timeout):
            await requests.llm.pause_generation(mode="keep", clear_cache=False)
            answers = await requests.llm.collective_rpc("r3_differences", args=(msgspec.msgpack.encode(manifest),))
    except Exception as error:
        raise EngineError(
            f"comparing what the engine holds with version {manifest.version} failed: {error!r}"
        ) from error
    finally:
        await requests.fail(EngineError("the engine's weights were compared and reloaded; it must be restarted"))
    found = [d for answer in answers for d in msgspec.msgpack.decode(answer, type=list[Difference])]
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


async def _confirm(llm: Any, manifest: WeightManifest) -> None:
    """Every worker reports what it has installed: it must be this version, with these contents."""
    async with asyncio.timeout(CALL_TIMEOUT):
        answers = await llm.collective_rpc("r3_installed")
    for worker, (version, digest) in enumerate(answers):
        if (version, digest) != (manifest.version, manifest.digest):
            raise EngineError(f"worker {worker} holds version {version} and not version {manifest.version}")


class EngineLoad(PrometheusStatLogger):
    """Keeps the newest figures and publishes nothing.

    vLLM makes one itself, from this class, and adds a logger to Prometheus of its own unless it is given one: hence the base
    class, of which nothing is used. `record` is called once a step, on the event loop.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None):
        self.kv_cache_usage = 0.0
        """Share of the blocks that hold anything of a running request: 0..1."""
        self.waiting = 0
        """Requests in the engine's queue."""
        self.preemptions = 0
        """Requests that were put back into the queue for want of blocks, since the start."""

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
            self.waiting = int(scheduler_stats.num_waiting_reqs)
        if iteration_stats is not None:
            self.preemptions += int(iteration_stats.num_preempted_reqs)

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {
            "kv_cache_usage": self.kv_cache_usage,
            "waiting": self.waiting,
            "preemptions": self.preemptions,
        }
