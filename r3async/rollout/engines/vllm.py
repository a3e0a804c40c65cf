"""vLLM as the rollout engine: token-in, token-out, with routes, and weights that change under running requests.

The model and vLLM's engine core run in child processes; this one drives them, and does not import vLLM: see `vllm_client`.
Which version sampled which token is known exactly: see `vllm_requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from r3async.config.generation import ours
from r3async.data.model_shape import moe_geometry
from r3async.data.routes import RoutingError, check_ids, route_dtype
from r3async.data.supports import Supports
from r3async.rollout.engines import NAMES, EngineError, Generation, GenerationRequest, InstallReport
from r3async.rollout.engines.vllm_client import Core
from r3async.rollout.engines.vllm_messages import sampling
from r3async.rollout.engines.vllm_requests import CALL_TIMEOUT, Requests, Running, differences, install
from r3async.untrusted import decode_json, decode_python_json
from r3async.weights.manifest import Difference, WeightManifest
from r3async.world.stages import begin_task

SCORE_TIMEOUT = 120.0
STOP_TIMEOUT = 10.0


class VllmEngine:
    """One vLLM engine; see `Engine` for what the methods promise. They all belong to one event loop.

    `model_path` is a local Hugging Face directory. `concurrency` requests run at once, more wait inside vLLM.
    `on_update` decides what becomes of running requests when weights change (the setting of that name). With `masks` it records
    which tokens could be sampled.
    `threads` and `kv_cache_gib` matter on CPU only. `engine_args` go to vLLM's `AsyncEngineArgs` as they are, over
    ours: what a person wrote of them was checked when it was read (`config.engine_args`). Nothing is loaded before `start`.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        concurrency: int,
        max_model_len: int,
        on_update: str = "keep",
        masks: bool = False,
        threads: int = 1,
        kv_cache_gib: float = 1.0,
        engine_args: Mapping[str, Any] | None = None,
    ):
        self.version = -1
        self.routing, self._moe_layers = moe_geometry(
            decode_python_json((Path(model_path) / "config.json").read_bytes())
        )
        self._threads = threads
        self._kv_cache_bytes = int(kv_cache_gib * 2**30)
        own = ours(
            model=model_path,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=concurrency,
            # A compiled graph returns all-zero routes on CPU.
            enforce_eager=True,
            enable_return_routed_experts=self.routing is not None,
            return_sampling_mask=masks,
            # After temperature: what was really sampled from.
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            worker_extension_cls="r3async.rollout.engines.vllm_worker.WorkerExtension",
        )
        if (Path(model_path) / NAMES).is_file():
            own |= ours(load_format="dummy")
        self._args: dict[str, Any] = own | dict(engine_args or {})
        if not self._args["enable_return_routed_experts"]:
            self.routing = None
        self.on_update = on_update
        self._requests = Requests()
        self._receiving: asyncio.Task[None] | None = None
        self._processes: list[psutil.Process] = []
        self.pids: list[int] = []
        """Of its processes; known after `start`."""
        self.gpus: list[str] = []
        """Of the workers, by uuid; none on CPU. Known after `start`."""
        self._parameter_names: frozenset[str] = frozenset()
        self._installing = asyncio.Lock()
        self._cache_checked = -1
        """Version under which the prefix cache was looked at last."""
        counters = ("generated_tokens", "finished", "aborted", "installs", "unrecorded_rows")
        self._counts = dict.fromkeys(counters, 0)
        self._pause_seconds = 0.0

    @property
    def _llm(self) -> Any:
        return self._requests.llm

    async def start(self) -> None:
        """Load the model: seconds to minutes. Raises `EngineError`. If it is cancelled, the engine is ended."""
        try:
            # Before anything else: its process imports vLLM meanwhile.
            core = self._requests.llm = Core(self._args, self._threads, self._kv_cache_bytes)
            self._parameter_names = await asyncio.to_thread(checkpoint_names, Path(self._args["model"]))
            await core.start()
            self._receiving = begin_task("answers", self._requests.receive())
            async with asyncio.timeout(CALL_TIMEOUT):
                pids = await core.collective_rpc("r3_process")
                self.gpus = [gpu for gpu in await core.collective_rpc("r3_gpu") if gpu]
                if self._args["return_sampling_mask"]:
                    await core.collective_rpc("r3_keep_masks")
            self._processes = [p for pid in pids for p in lineage(pid)]
        except BaseException as error:
            await self._end(0.0)
            if isinstance(error, Exception):
                raise EngineError(f"vLLM could not start with {self._args['model']}: {error}") from error
            raise
        # What was imported stays: a collection that walks all of it would hold up the event loop.
        gc.freeze()
        self.pids = [p.pid for p in self._processes]
        self._requests.failure = None
        self._requests.admit()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a continuation. Waits while weights are being installed.

        Only `request.stop_token_ids` and `request.stop` end it early: the model's own end-of-sequence token is not added.
        Cancelling it aborts the request in vLLM. Raises `EngineError` if the engine has failed, refuses the request, or returns
        something that cannot be trained on. There is no timeout here: the caller knows how long an answer may take.
        """
        if request.stop and not (Path(self._args["model"]) / "tokenizer.json").is_file():
            raise EngineError(f"{self._args['model']} has no tokenizer.json, which stop strings need")
        prompt_ids = request.prompt_ids.tolist()
        while True:
            await self._requests.admission()
            first = request.routes_wanted(self.version)
            params = sampling(
                request.max_tokens,
                request.temperature,
                request.stop_token_ids,
                routes_from=first,
                logprobs=0,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                stop=request.stop,
            )
            running = self._requests.new(request.request_id, self.version)
            if await self._requests.run(running, prompt_ids, params, self._cache_salt()):
                return self._generation(request, running, first)

    async def abort(self, request_id: str) -> None:
        """End the running requests of that id: their `generate` returns what was sampled so far, and may be nothing."""
        await self._requests.abort(request_id)

    async def install(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        """Install published weights under the running requests; see `Engine.install` and `vllm_requests.install`."""
        async with self._installing:
            if self._requests.failure is not None:
                raise self._requests.failure
            if manifest.version < self.version:
                raise EngineError(f"version {manifest.version} is older than the installed version {self.version}")
            report = await install(
                self._requests,
                manifest,
                names=self._parameter_names,
                on_update=self.on_update,
                timeout=timeout,
                installed=self._installed,
            )
            self._counts["installs"] += 1
            self._pause_seconds += report.pause_seconds
            return report

    def _installed(self, version: int) -> None:
        self.version = version

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[T - 1]`: log-prob of each token after the first, at temperature 1, without any prefix cache."""
        running = await self._alone("score", token_ids.tolist(), salted=False, prompt_logprobs=0)
        if running.prompt_logprobs is None or len(running.prompt_logprobs) != len(token_ids) - 1:
            raise EngineError("vLLM returned no prompt log-probs for a text that was to be scored")
        return running.prompt_logprobs

    async def cached_from_older(self, token_ids: np.ndarray) -> int:
        """See `Engine.cached_from_older`. The text is repeated until it fills blocks of the cache."""
        block = self._llm.block_size
        ids = np.resize(token_ids, min(max(len(token_ids), 2 * block + 1), self._args["max_model_len"] - 1)).tolist()
        running = await self._alone("cache", ids, salted=True)
        known, self._cache_checked = self._cache_checked == self.version, self.version
        return 0 if known else running.cached

    async def differences(self, manifest: WeightManifest, timeout: float) -> list[Difference]:
        """See `Engine.differences`."""
        async with self._installing:
            return await differences(self._requests, manifest, timeout)

    async def stages(self, token_ids: np.ndarray, path: Path) -> tuple[np.ndarray, str]:
        """Score a text as `score` does, alone in the engine, and write what its model computed of each stage to `path`
        (safetensors, see `stages.Stages`). Returns the log-probs and the dtype that it computes in. Raises `EngineError`; with
        CUDA graphs nothing is seen, so the engine must be eager."""
        if not self._args["enforce_eager"]:
            raise EngineError("stages of a model in CUDA graphs cannot be seen: set enforce_eager=true")
        async with self._installing:
            await self._llm.collective_rpc("r3_watch")
            logprobs = await self.score(token_ids)
            async with asyncio.timeout(CALL_TIMEOUT):
                dtypes = await self._llm.collective_rpc("r3_watched", args=(str(path),))
        return logprobs, dtypes[0]

    async def tool_calls(
        self, parser: str, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[str, str, str]]]:
        """The content of an answer, and its calls as `id, name, arguments`, by vLLM's parser of that name. Raises `EngineError`
        for a parser that there is not, or that does not fit the model's tokenizer."""
        if self._llm is None:
            raise EngineError("the engine is not running")
        async with asyncio.timeout(CALL_TIMEOUT):
            content, calls = await self._llm.tool_calls(parser, text, tools)
        return content, [tuple(call) for call in calls]

    def stats(self) -> dict[str, float]:
        """Counters since `start`, the number of requests in vLLM now, and its load (`vllm_core.Load`)."""
        requests = self._requests
        aborted = self._counts["aborted"] + requests.aborted
        now = {"aborted": aborted, "restarted": requests.restarted, "running": len(requests)}
        load = self._llm.load.figures() if self._llm is not None else {}
        return {**self._counts, **now, **load, "pause_seconds": self._pause_seconds}

    async def stop(self) -> None:
        """Fail what is running, shut vLLM down and make sure that its processes have ended. Idempotent."""
        if self._llm is None:
            return
        await self._requests.fail(EngineError("the engine was stopped"))
        gc.unfreeze()
        await self._end(STOP_TIMEOUT)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, timeout=STOP_TIMEOUT)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    async def _end(self, timeout: float) -> None:
        """The core's process, if there is one."""
        if self._llm is None:
            return
        llm, self._requests.llm = self._llm, None
        if self._receiving is not None:
            self._receiving.cancel()  # or it would report the end of the engine's process as a failure
        llm.close()
        await asyncio.to_thread(llm.end, timeout)

    def _cache_salt(self) -> str:
        """Of a new request. An older version's cached prefix has another one, so it is never hit."""
        return f"version {self.version}"

    async def _alone(self, name: str, ids: list[int], *, salted: bool, **params: Any) -> Running:
        """A text of ours in vLLM, all by one version, and one token after it."""
        try:
            async with asyncio.timeout(SCORE_TIMEOUT):
                while True:
                    await self._requests.admission()
                    running = self._requests.new(name, self.version)
                    salt = self._cache_salt() if salted else None
                    if await self._requests.run(running, ids, sampling(1, 0.0, **params), salt):
                        return running
        except TimeoutError as error:
            raise EngineError(f"the engine took longer than {SCORE_TIMEOUT} s to {name} a text") from error

    def _generation(self, request: GenerationRequest, running: Running, first: int) -> Generation:
        tokens = np.asarray(running.tokens, np.int32)
        logprobs = np.concatenate(running.logprobs) if running.logprobs else np.empty(0, np.float32)
        if len(logprobs) != len(tokens):
            raise EngineError(f"request {request.request_id}: {len(tokens)} tokens but {len(logprobs)} log-probs")
        if running.reason not in ("stop", "length", "abort"):
            raise EngineError(f"request {request.request_id}: vLLM ended it with {running.reason!r}")
        self._counts["generated_tokens"] += len(tokens)
        self._counts["aborted" if running.reason == "abort" else "finished"] += 1
        return Generation(
            token_ids=tokens,
            logprobs=logprobs,
            version_spans=running.spans.finish(len(tokens)),
            routed_experts=self._routes(request, running, first),
            routes_from=first,
            stop_reason=running.reason,
            supports=self._supports(request, running, tokens) if request.mask else None,
        )

    def _supports(self, request: GenerationRequest, running: Running, tokens: np.ndarray) -> Supports:
        supports = Supports.concat(running.supports)
        if len(supports) != len(tokens) or not supports.recorded.all():
            raise EngineError(f"request {request.request_id}: {len(tokens)} tokens but {len(supports)} supports")
        if not (inside := supports.contains(tokens)).all():
            at = int(inside.argmin())
            raise EngineError(f"request {request.request_id}: token {tokens[at]} at {at} is not in its own support")
        return supports

    def _routes(self, request: GenerationRequest, running: Running, first: int) -> np.ndarray | None:
        """Routes of the MoE layers from position `first`; of length 0 if vLLM returned none, or not as many as it must have fed.

        For a position that the prefix cache served, vLLM returns the row of the call that computed its keys and values. That call
        had the same salt, hence the same weights."""
        shape = self.routing
        if shape is None:
            return None
        sampled, returned = len(running.tokens), sum(map(len, running.routes))
        expected = len(request.prompt_ids) + sampled - 1 - first if sampled else 0
        if returned > expected or (returned < expected and running.reason != "abort"):
            returned = 0  # Which rows are missing is not known: rather none than one at a wrong position.
        self._counts["unrecorded_rows"] += expected - returned
        if not returned:
            return np.empty((0, shape.layers, shape.top_k), route_dtype(shape.num_experts))
        rows = running.routes[0] if len(running.routes) == 1 else np.concatenate(running.routes)
        if len(self._moe_layers) != rows.shape[1]:
            rows = rows[:, self._moe_layers]
        try:
            check_ids(rows, layers=shape.layers, top_k=shape.top_k, num_experts=shape.num_experts)
        except RoutingError as error:
            raise EngineError(f"request {request.request_id}: {error}") from error
        return rows


def lineage(pid: int) -> Iterator[psutil.Process]:
    """Process `pid` and its ancestors below this process."""
    process = psutil.Process(pid)
    while process is not None and process.pid != os.getpid():
        yield process
        process = process.parent()


def checkpoint_names(directory: Path) -> frozenset[str]:
    """Names of the tensors in a safetensors checkpoint, also one without its weights (`NAMES`)."""
    from safetensors import safe_open

    names: set[str] = set()
    if (directory / NAMES).is_file():
        names.update(decode_json((directory / NAMES).read_bytes(), list[str]))
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            names.update(file.keys())
    return frozenset(names)
