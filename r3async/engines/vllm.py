"""vLLM as the rollout engine: token-in, token-out, with routes, and weights that change under running requests.

vLLM's `AsyncLLM` lives in this process; the model runs in child processes of its own. Which version sampled which
token is known exactly, because of one order of events: pause (no step runs any more), load, take every output that
was produced before the pause, stamp all running requests with their token counts, resume. A request that has not
produced a token when the pause comes starts afresh, so its prompt is never half old and half new.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from r3async.engines.base import EngineError, Generation, GenerationRequest, InstallReport, moe_geometry
from r3async.engines.process import inherited_environment, lineage
from r3async.routing import RoutingError, route_dtype, validate_rows
from r3async.versions import SpanRecorder
from r3async.weights.manifest import WeightManifest
from r3async.weights.publish import WeightError, verify

SCORE_TIMEOUT = 120.0
CALL_TIMEOUT = 30.0
"""Seconds that vLLM may take for a call that does no work on the model."""
STOP_TIMEOUT = 10.0
_OUTPUT_CHUNK = 128
"""Outputs of one step that vLLM hands on before it lets other tasks run (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE)."""


class _Running:
    """A request inside vLLM. `collector` is where vLLM puts its result; None until vLLM has taken the request."""

    __slots__ = ("collector", "request_id", "restart", "spans")

    def __init__(self, request_id: str, version: int):
        self.request_id = request_id
        self.spans = SpanRecorder(version)
        self.collector: Any = None
        self.restart = False


class VllmEngine:
    """One vLLM engine; see `Engine` for what the methods promise. They all belong to one event loop.

    `model_path` is a local Hugging Face directory. `concurrency` requests run at once, more wait inside vLLM.
    `threads` and `kv_cache_gib` matter on CPU only. `engine_args` go to vLLM's `AsyncEngineArgs` as they are, over
    ours. Nothing is loaded, and vLLM is not imported, before `start`.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        concurrency: int,
        max_model_len: int,
        threads: int = 1,
        kv_cache_gib: float = 1.0,
        engine_args: Mapping[str, Any] | None = None,
    ):
        self.version = -1
        self.routing, self._moe_layers = moe_geometry(json.loads((Path(model_path) / "config.json").read_text()))
        self._threads = threads
        self._kv_cache_bytes = int(kv_cache_gib * 2**30)
        self._args: dict[str, Any] = {
            "model": model_path,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": concurrency,
            # A compiled graph returns all-zero routes on CPU.
            "enforce_eager": True,
            "enable_return_routed_experts": self.routing is not None,
            # After temperature: what was really sampled from.
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": "r3async.engines.vllm_worker.WorkerExtension",
            **(engine_args or {}),
        }
        if not self._args["enable_return_routed_experts"]:
            self.routing = None
        self._llm: Any = None
        self._vllm: Any = None
        self._processes: list[psutil.Process] = []
        self._parameter_names: frozenset[str] = frozenset()
        self._running: set[_Running] = set()
        self._serial = itertools.count()
        self._admitting = asyncio.Event()
        self._installing = asyncio.Lock()
        self._failure: EngineError | None = EngineError("the engine has not been started")
        counters = ("generated_tokens", "finished", "aborted", "restarted", "installs", "unrecorded_rows")
        self._counts = dict.fromkeys(counters, 0)

    async def start(self) -> None:
        """Load the model, in a thread: seconds to minutes. Raises `EngineError`.

        If it is cancelled, the engine is shut down as soon as it has come up.
        """
        starting = asyncio.create_task(asyncio.to_thread(self._start))
        try:
            await asyncio.shield(starting)
            async with asyncio.timeout(CALL_TIMEOUT):
                # What vLLM starts lazily, it starts here, and not under the first request.
                await self._llm.get_supported_tasks()
                pids = await self._llm.collective_rpc("r3_process")
            self._processes = [p for pid in pids for p in lineage(pid)]
        except asyncio.CancelledError:
            starting.add_done_callback(lambda done: done.exception() or self._llm.shutdown(timeout=0))
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not start with {self._args['model']}: {error}") from error
        self._failure = None
        self._admitting.set()

    def _start(self) -> None:
        defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with inherited_environment() as environment:
            environment.update({name: os.environ.get(name, value) for name, value in defaults.items()})
            # A forked child would share this process's threads' locks, and not read OMP_NUM_THREADS any more.
            environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
            import vllm
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            from r3async.engines.vllm_worker import OwnedConfig

            if current_platform.is_cpu():
                environment["OMP_NUM_THREADS"] = str(self._threads)
                environment["TORCH_COMPILE_DISABLE"] = "1"
                # The worker lives in the engine's one child process, and not in a pinned one of its own.
                environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
                environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
                self._args.setdefault("kv_cache_memory_bytes", self._kv_cache_bytes)
            self._vllm = vllm
            self._parameter_names = checkpoint_names(Path(self._args["model"]))
            config = AsyncEngineArgs(**self._args).create_engine_config()
            config.additional_config = OwnedConfig(os.getpid(), config.additional_config)
            self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=self._args["disable_log_stats"])

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a continuation. Waits while weights are being installed.

        Only `request.stop_token_ids` end it early: the model's own end-of-sequence token is not added. Cancelling it
        aborts the request in vLLM. Raises `EngineError` if the engine has failed, refuses the request, or returns
        something that can not be trained on. There is no timeout here: the caller knows how long an answer may take.
        """
        params = self._sampling_params(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            stop_token_ids=list(request.stop_token_ids),
            logprobs=0,
            routed_experts_prompt_start=request.routes_from,
        )
        prompt_ids = request.prompt_ids.tolist()
        while True:
            await self._admission()
            # An older version's cached prefix has another salt, so it is never hit.
            prompt = self._vllm.inputs.tokens_input(prompt_ids, cache_salt=f"version {self.version}")
            running = _Running(f"{request.request_id}#{next(self._serial)}", self.version)
            output = await self._run(running, prompt, params)
            if output is not None:
                return self._generation(request, running, output)

    async def abort(self, request_id: str) -> None:
        """End the running requests of that id: their `generate` returns what was sampled so far, and may be nothing."""
        if self._llm is None:
            return
        ids = [r.request_id for r in self._running if r.request_id.rpartition("#")[0] == request_id]
        await self._llm.abort(ids)

    async def install(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        """Install published weights under the running requests; see `Engine.install`.

        The file is verified before anything is paused: if that fails, `EngineError` names the tensor, and the engine
        still runs its old version. If anything later fails, or the call is cancelled, the weights are in an unknown
        state: the engine stays paused, and every running and later `generate` raises.
        """
        async with self._installing:
            if self._failure is not None:
                raise self._failure
            if manifest.version < self.version:
                raise EngineError(f"version {manifest.version} is older than the installed version {self.version}")
            started = time.perf_counter()
            deadline = asyncio.get_running_loop().time() + timeout
            try:
                async with asyncio.timeout_at(deadline):
                    await asyncio.to_thread(self._verify, manifest)
            except WeightError as error:
                raise EngineError(str(error)) from error
            except TimeoutError as error:
                raise EngineError(f"verifying version {manifest.version} took longer than {timeout} s") from error
            paused = time.perf_counter()
            self._admitting.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                    await self._llm.collective_rpc("r3_install", args=(msgspec.msgpack.encode(manifest),))
                    await self._drain()
                    await self._stamp(manifest.version)
                    await self._llm.resume_generation()
            except BaseException as error:
                what = f"took longer than {timeout} s" if isinstance(error, TimeoutError) else f"failed: {error!r}"
                failure = EngineError(f"installing version {manifest.version} {what}; the engine must be restarted")
                await self._fail(failure)
                if isinstance(error, Exception):
                    raise failure from error
                raise
            self._admitting.set()
            now = time.perf_counter()
            self._counts["installs"] += 1
            return InstallReport(manifest.version, update_seconds=now - started, pause_seconds=now - paused)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[T - 1]`: log-prob of each token after the first, at temperature 1, without any prefix cache."""
        params = self._sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        prompt = self._vllm.inputs.tokens_input(token_ids.tolist())
        output = None
        try:
            async with asyncio.timeout(SCORE_TIMEOUT):
                while output is None:
                    await self._admission()
                    output = await self._run(_Running(f"score#{next(self._serial)}", self.version), prompt, params)
        except TimeoutError as error:
            raise EngineError(f"scoring {len(token_ids)} tokens took longer than {SCORE_TIMEOUT} s") from error
        flat = output.prompt_logprobs
        if flat is None or len(flat) != len(token_ids):
            raise EngineError("vLLM returned no prompt log-probs for a text that was to be scored")
        return np.asarray([flat.logprobs[flat.start_indices[t]] for t in range(1, len(flat))], np.float32)

    def stats(self) -> dict[str, int]:
        """Counters since `start`, and the number of requests in vLLM now."""
        return {**self._counts, "running": len(self._running)}

    async def stop(self) -> None:
        """Fail what is running, shut vLLM down and make sure that its processes have ended. Idempotent."""
        if self._llm is None:
            return
        await self._fail(EngineError("the engine was stopped"))
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # or it would report the end of the engine's process as a failure
        await asyncio.to_thread(llm.shutdown, timeout=STOP_TIMEOUT)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, timeout=STOP_TIMEOUT)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _sampling_params(self, **values: Any) -> Any:
        """Outputs come once, at the end: vLLM then does no work of its own per token in this process."""
        if self._failure is not None:
            raise self._failure
        kind = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        return self._vllm.SamplingParams(
            output_kind=kind, detokenize=False, ignore_eos=True, flat_logprobs=True, skip_clone=True, **values
        )

    async def _admission(self) -> None:
        """Wait until no installation is going on. Raises what made the engine fail.

        No other task runs between its return and the caller's next suspension.
        """
        while not self._admitting.is_set():
            await self._admitting.wait()
        if self._failure is not None:
            raise self._failure

    async def _run(self, running: _Running, prompt: Any, params: Any) -> Any:
        """vLLM's final output, or None if the request has to start afresh under newer weights."""
        self._running.add(running)
        try:
            running.collector = await self._llm.add_request(running.request_id, prompt, params)
            if running.restart:
                await self._llm.abort(running.request_id)
            output = await running.collector.get()
        except asyncio.CancelledError:
            self._counts["aborted"] += 1
            if self._llm is not None:
                await self._llm.abort(running.request_id)
            raise
        except Exception as error:
            if self._failure is not None:
                raise self._failure from error
            raise EngineError(f"request {running.request_id}: {error or repr(error)}") from error
        finally:
            self._running.discard(running)
        if self._failure is not None:
            raise self._failure
        return None if running.restart else output

    def _generation(self, request: GenerationRequest, running: _Running, output: Any) -> Generation:
        completion = output.outputs[0]
        tokens = np.asarray(completion.token_ids, np.int32)
        logprobs = np.asarray(completion.logprobs.logprobs if completion.logprobs is not None else (), np.float32)
        if len(logprobs) != len(tokens):
            raise EngineError(f"request {request.request_id}: {len(tokens)} tokens but {len(logprobs)} log-probs")
        if completion.finish_reason not in ("stop", "length", "abort"):
            raise EngineError(f"request {request.request_id}: vLLM ended it with {completion.finish_reason!r}")
        self._counts["generated_tokens"] += len(tokens)
        self._counts["aborted" if completion.finish_reason == "abort" else "finished"] += 1
        return Generation(
            token_ids=tokens,
            logprobs=logprobs,
            version_spans=running.spans.finish(len(tokens)),
            routed_experts=self._routes(request, completion),
            routes_from=request.routes_from,
            stop_reason=completion.finish_reason,
        )

    def _routes(self, request: GenerationRequest, completion: Any) -> np.ndarray | None:
        """Rows of the MoE layers; of length 0 if vLLM returned none, or not as many as it must have fed."""
        shape = self.routing
        if shape is None:
            return None
        rows = completion.routed_experts
        sampled = len(completion.token_ids)
        expected = len(request.prompt_ids) + sampled - 1 - request.routes_from if sampled else 0
        returned = 0 if rows is None else len(rows)
        if returned > expected or (returned < expected and completion.finish_reason != "abort"):
            returned = 0  # Which rows are missing is not known: rather none than one at a wrong position.
        self._counts["unrecorded_rows"] += expected - returned
        if not returned:
            return np.empty((0, shape.layers, shape.top_k), route_dtype(shape.num_experts))
        if len(self._moe_layers) != rows.shape[1]:
            rows = rows[:, self._moe_layers]
        try:
            validate_rows(rows, layers=shape.layers, top_k=shape.top_k, num_experts=shape.num_experts)
        except RoutingError as error:
            raise EngineError(f"request {request.request_id}: {error}") from error
        return rows

    def _verify(self, manifest: WeightManifest) -> None:
        if missing := sorted(self._parameter_names - set(manifest.tensors)):
            raise WeightError(
                f"weights version {manifest.version}: tensor {missing[0]!r} is missing ({len(missing)} in all)"
            )
        verify(manifest)

    async def _drain(self) -> None:
        """Wait until every output that left the paused engine is counted by vLLM's output processor.

        Results of calls and outputs of steps come through one socket in order, so whatever was produced before the
        pause is in this process by now: in vLLM's queue, or being handed on in chunks.
        """
        while not self._llm.engine_core.outputs_queue.empty():  # noqa: ASYNC110 - vLLM offers nothing to wait on
            await asyncio.sleep(0)
        for _ in range(2 + len(self._running) // _OUTPUT_CHUNK):
            await asyncio.sleep(0)

    async def _stamp(self, version: int) -> None:
        """Running requests go on under `version`; those without a token start afresh. Only while paused and drained."""
        self.version = version
        restart = []
        states = self._llm.output_processor.request_states
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
        self._counts["restarted"] += len(restart)
        await self._llm.abort(restart)

    async def _fail(self, failure: EngineError) -> None:
        """From now on every call raises `failure`, and so do those that are running."""
        self._failure = self._failure or failure
        self._admitting.set()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CALL_TIMEOUT):
                await self._llm.abort([r.request_id for r in self._running])


def checkpoint_names(directory: Path) -> frozenset[str]:
    """Names of the tensors in a safetensors checkpoint."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return frozenset(names)
