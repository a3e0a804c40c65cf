"""The vLLM rollout engine, which installs new weights under running requests and keeps every
token's version exact.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import psutil

from r3async.config import Config
from r3async.config.generator import GeneratorConfig
from r3async.config.learner import find_served_rank
from r3async.config.vllm_arguments import UNWANTED_PACKAGES, declare_engine_args
from r3async.data.checkpoint_forms import list_weight_files, read_quantized_form
from r3async.data.model_shape import read_moe_layers, take_text_config
from r3async.data.routes import LOST_ROUTES_FIX, RoutingError, check_expert_ids
from r3async.data.supports import SupportSets
from r3async.rollout.engine import (
    TENSOR_NAMES_FILE,
    EngineError,
    EngineLostError,
    Generation,
    GenerationRequest,
    InstallReport,
    TopTokens,
)
from r3async.rollout.vllm.client import EngineCoreClient, is_cpu_vllm
from r3async.rollout.vllm.messages import (
    build_sampling_params,
)
from r3async.rollout.vllm.route_recording import join_routes
from r3async.rollout.vllm.running_requests import CALL_TIMEOUT, RequestRegistry, RunningRequest
from r3async.rollout.vllm.version_installer import VersionInstaller
from r3async.untrusted import decode_json, decode_msgpack, decode_python_json
from r3async.weights.manifest import BASE_VERSION, TensorMismatch, WeightManifest
from r3async.world.kept_programs import kill_processes
from r3async.world.stages import create_stage_task

COLLECTOR_THRESHOLD = 200_000
"""New objects after which the garbage collector looks at them, instead of 700 or 2,000. Reference
counts free what a generator makes: in 31 steps of the quickstart the collector took 3 % of its
time, and found nothing."""
SCORE_TIMEOUT = 120.0
MAX_LOADED_ADAPTERS = 64
"""Number of versions whose adapters are loaded besides those in slots."""
ExtraRecord = Literal["sampling_masks", "gates"]
CHECKED_TOKENS = 16
"""Tokens of the prompt, and of the answer, whose routes are recorded twice."""
MAX_REROUTED_SHARE = 0.5
"""Share of (token, layer) whose experts a second pass may choose otherwise. Rounding changes 1 to 5
% in bfloat16; of rows that a graph did not write, nearly all differ."""


class AdapterSettings(NamedTuple):
    """The adapters that an engine holds beside its weights (`learner.lora.deliver = "adapter"`).

    Attributes:
        rank: Rank of each adapter.
        modules: Ends of the names of the matrices that may have one.
        slots: Number of versions under which requests may run at once. Requests of a further
            version wait.
    """

    rank: int
    modules: Sequence[str]
    slots: int

    def build_engine_args(self) -> dict[str, Any]:
        """Return vLLM's arguments."""
        return declare_engine_args(
            enable_lora=True,
            max_loras=self.slots,
            # What is loaded is removed when no request needs it, and not when there is more of it.
            max_cpu_loras=self.slots + MAX_LOADED_ADAPTERS,
            max_lora_rank=find_served_rank(self.rank),
            lora_target_modules=[module.rpartition(".")[2] for module in self.modules],
        )


class VllmEngine:
    """One vLLM engine; see `Engine` for the contracts of its methods. All calls belong
    to one event loop.

    Nothing is loaded before `start`.

    Args:
        model_path: A local Hugging Face directory.
        settings: Its `engine_args` override ours; they were checked when the configuration was read
            (`config.vllm_arguments`). More requests than `concurrency` wait inside vLLM.
        max_model_len: Tokens of the longest context.
        seed: Seed of sampling; vLLM's own by default.
        extra_records: What is recorded beside log-probs and routes: which tokens could be sampled,
            and the gates of routes.
        adapters: What versions have in place of weights; None if they have weights.
        float32_head: Whether logits are float32 sums; else they are rounded to `settings.dtype`.
    """

    def __init__(
        self,
        model_path: str,
        settings: GeneratorConfig,
        *,
        max_model_len: int,
        seed: int | None = None,
        extra_records: Collection[ExtraRecord] = (),
        adapters: AdapterSettings | None = None,
        float32_head: bool = True,
    ):
        described = decode_python_json((Path(model_path) / "config.json").read_bytes())
        self.routing, self._moe_layers = read_moe_layers(described)
        self._threads = settings.threads
        self._kv_cache_bytes = int(settings.kv_cache_gib * 2**30)
        own = declare_engine_args(
            model=model_path,
            dtype=settings.dtype,
            max_model_len=max_model_len,
            max_num_seqs=settings.concurrency,
            # Compiled graphs lose routes on CPU. On GPUs they return all of them, and
            # decode in less time.
            enforce_eager=is_cpu_vllm(),
            enable_return_routed_experts=self.routing is not None,
            return_sampling_mask="sampling_masks" in extra_records,
            # Log-probs after temperature and truncation: the distribution that was
            # really sampled from.
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            worker_extension_cls="r3async.rollout.vllm.worker.WorkerExtension",
        )
        if "text_config" in described:
            # No version has anything for the other models, such as a vision tower.
            own |= declare_engine_args(language_model_only=True)
        if (Path(model_path) / TENSOR_NAMES_FILE).is_file():
            own |= declare_engine_args(load_format="dummy")
        if seed is not None:
            own |= declare_engine_args(seed=seed)
        if adapters is not None:
            own |= adapters.build_engine_args()
        self.engine_args: dict[str, Any] = own | settings.engine_args
        """vLLM's arguments: those of ours and of the settings."""
        if float32_head and settings.dtype != "float32":
            overrides = settings.engine_args.get("hf_overrides", {})
            self.engine_args["hf_overrides"] = {"head_dtype": "float32", **overrides}
        if not self.engine_args["enable_return_routed_experts"]:
            self.routing = None
        if self.routing is not None and "gates" in extra_records:
            self.routing = msgspec.structs.replace(self.routing, has_gates=True)
            self.engine_args["return_gates"] = True
        self._requests = RequestRegistry()
        self.installer = VersionInstaller(self._requests, settings.on_update)
        self._receive_task: asyncio.Task[None] | None = None
        self._processes: list[psutil.Process] = []
        self.process_ids: list[int] = []
        """Process ids of the engine; known after `start`."""
        self.gpu_uuids: list[str] = []
        """Uuids of the workers' GPUs; empty on CPU. Known after `start`."""
        self._install_lock = asyncio.Lock()
        self._cache_checked_version = -1
        """Version under which the prefix cache was checked last."""
        counters = ("generated_tokens", "finished", "aborted", "installs", "unrecorded_rows")
        self._counters = dict.fromkeys(counters, 0)
        self._pause_seconds = 0.0
        self._collector_threshold = gc.get_threshold()
        """Threshold of this process before `start`."""

    @property
    def version(self) -> int:
        """Version of the installed weights; -1 before the first."""
        return self.installer.version

    @property
    def core(self) -> EngineCoreClient:
        """The client of the engine's process. Raises `EngineError` while none runs."""
        return self._requests.running_core

    async def start(self) -> None:
        """Load the model, which takes seconds to minutes. Raises `EngineError`. Cancelling
        ends the engine."""
        try:
            # First, because its process imports vLLM meanwhile.
            core = self._requests.core = EngineCoreClient(
                self.engine_args, self._threads, self._kv_cache_bytes
            )
            self.installer.tensor_names = await asyncio.to_thread(
                read_tensor_names, Path(self.engine_args["model"])
            )
            await core.start()
            self._receive_task = create_stage_task("answers", self._requests.receive_outputs())
            async with asyncio.timeout(CALL_TIMEOUT):
                pids = await core.collective_rpc("r3_process_id")
                self.gpu_uuids = [gpu for gpu in await core.collective_rpc("r3_gpu_uuid") if gpu]
                if self.engine_args["return_sampling_mask"]:
                    await core.collective_rpc("r3_record_sampling_masks")
            self._processes = [p for pid in pids for p in iter_process_ancestors(pid)]
        except BaseException as error:
            await self._end_core()
            if isinstance(error, Exception):
                raise EngineError(
                    describe_start_failure(self.engine_args["model"], error)
                ) from error
            raise
        # Imported objects stay alive: a garbage collection over all of them would
        # block the event loop.
        gc.freeze()
        self._collector_threshold = gc.get_threshold()
        gc.set_threshold(COLLECTOR_THRESHOLD, *self._collector_threshold[1:])
        self.process_ids = [p.pid for p in self._processes]
        self._requests.failure = None
        self._requests.resume_admission()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a continuation. Waits while weights are being installed.

        Only `request.stop_token_ids` and `request.stop_strings` end it early: the model's
        own end-of-sequence token is not added. Cancelling aborts the request in vLLM. Raises
        `EngineError` if the engine has failed, refuses the request, or returns something
        that cannot be trained on. There is no timeout here: the caller knows how long an
        answer may take.
        """
        if (
            request.stop_strings
            and not (Path(self.engine_args["model"]) / "tokenizer.json").is_file()
        ):
            raise EngineError(
                f"{self.engine_args['model']} has no tokenizer.json, which stop strings need"
            )
        if request.top_logprobs and self.engine_args["return_sampling_mask"]:
            raise EngineError("an engine that records supports returns no most likely tokens")
        prompt_ids = request.prompt_ids.tolist()
        while True:
            await self._requests.wait_for_admission()
            version = self.version if request.version is None else request.version
            adapter = self.installer.name_adapter(request.version)
            first = request.resolve_routes_from(version)
            params = build_sampling_params(
                request.max_tokens,
                request.temperature,
                request.stop_token_ids,
                routes_from=first,
                logprobs=request.top_logprobs,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                stop_strings=request.stop_strings,
                seed=request.seed,
            )
            running = self._requests.create_request(request.request_id, version)
            if await self._requests.run_request(
                running, prompt_ids, params, self._build_cache_salt(version), adapter
            ):
                return self._build_generation(request, running, first)

    async def abort_request(self, request_id: str) -> None:
        """End the running requests of that id. Their `generate` returns the tokens sampled so
        far, possibly none."""
        await self._requests.abort_request(request_id)

    async def install_version(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        """Install published weights under the running requests; see `VersionInstaller`."""
        async with self._install_lock:
            report = await self.installer.install_version(manifest, timeout)
            if manifest.version == BASE_VERSION:
                return report
            # With dummy weights, before the first version, routers would choose by rounding alone.
            if not self._counters["installs"] and not self.engine_args["enforce_eager"]:
                await self._check_decoded_routes(manifest.version)
            self._counters["installs"] += 1
            self._pause_seconds += report.pause_seconds
            return report

    async def _check_decoded_routes(self, version: int) -> None:
        """Check that routes recorded while decoding are those of a second pass over
        the same tokens.

        An engine decodes in a CUDA graph and computes prompts outside of it. If the graph did not
        write routes, those of another step would be returned, which look like any others. Raises
        `EngineError`, also in every later call.
        """
        if self.routing is None:
            return
        length = min(CHECKED_TOKENS, (self.core.max_model_len - 1) // 2)
        prompt = np.arange(1, length + 1, dtype=np.int32)
        answer = await self.generate(GenerationRequest("decoded", prompt, length))
        whole = np.concatenate([prompt, answer.token_ids])
        again = await self._run_single_text(
            "again", whole.tolist(), use_cache=False, prompt_logprobs=0
        )
        first = answer.routed_experts
        second, _ = join_routes(again.routes, self.routing, self._moe_layers)
        if first is None or len(first) != len(whole) - 1 or len(second) != len(whole):
            problem = f"the engine did not record all routes of {len(whole)} tokens"
        else:
            decoded = slice(len(prompt), len(first))
            share = float((np.sort(first[decoded]) != np.sort(second[decoded])).any(-1).mean())
            if share <= MAX_REROUTED_SHARE:
                return
            problem = (
                f"{share:.0%} of the routes that were recorded while decoding are not those of a "
                f"second pass over the same tokens ({MAX_REROUTED_SHARE:.0%} may differ)"
            )
        failure = EngineError(f"with version {version} of the weights {problem}; {LOST_ROUTES_FIX}")
        await self._requests.fail_requests(EngineLostError(str(failure)))
        raise failure

    async def score_tokens(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-prob of each token after the first, float32 `[T - 1]`.

        They are at temperature 1, without any prefix cache.
        """
        running = await self._run_single_text(
            "score", token_ids.tolist(), use_cache=False, prompt_logprobs=0
        )
        return _take_scores(running, len(token_ids))[0]

    async def score_alternatives(
        self, token_ids: np.ndarray, *, version: int | None = None, top_logprobs: int = 0
    ) -> tuple[np.ndarray, TopTokens]:
        """Return what `score_tokens` does and the most likely tokens in the same places, at most
        20, under the version of `GenerationRequest.version`. There is no timeout here.
        """
        running = await self._run_text(
            "score",
            token_ids.tolist(),
            version,
            use_cache=False,
            prompt_logprobs=top_logprobs,
        )
        return _take_scores(running, len(token_ids))

    async def count_stale_cached_tokens(self, token_ids: np.ndarray) -> int:
        """Implement `Engine.count_stale_cached_tokens`, repeating the text until it fills
        blocks of the cache."""
        block = self.core.block_size
        ids = np.resize(
            token_ids,
            min(max(len(token_ids), 2 * block + 1), self.engine_args["max_model_len"] - 1),
        ).tolist()
        running = await self._run_single_text("cache", ids, use_cache=True)
        known = self._cache_checked_version == self.version
        self._cache_checked_version = self.version
        return 0 if known else running.cached_tokens

    async def find_weight_differences(
        self, manifest: WeightManifest, timeout: float
    ) -> list[TensorMismatch]:
        """Implement `Engine.find_weight_differences`.

        If no tensor differs, the engine continues with the same weights, to the bit. Otherwise, and
        if the comparison fails, it must be restarted. Raises `EngineError`.
        """
        # Not `EngineLostError`, for which the engine's owner would restart it, and lose the
        # answer of this call.
        ended = EngineError("the engine's weights were compared and reloaded; it must be restarted")
        requests = self._requests
        version = manifest.version
        mismatches: list[TensorMismatch] = []
        async with self._install_lock:
            requests.pause_admission()
            try:
                async with asyncio.timeout(timeout):
                    await self.core.pause_generation(mode="keep", clear_cache=False)
                    if manifest.adapter is not None:
                        mismatches = await self._compare_weights(
                            "r3_find_adapter_differences", manifest
                        )
                        manifest = self.installer.base or manifest
                    if not mismatches:
                        mismatches = await self._compare_weights(
                            "r3_find_weight_differences", manifest
                        )
                    if not mismatches:
                        await self.core.resume_generation()
            except BaseException as error:
                await requests.fail_requests(ended)
                if isinstance(error, Exception):
                    raise EngineError(
                        f"comparing what the engine holds with version {version} failed: {error!r}"
                    ) from error
                raise
            if mismatches:
                await requests.fail_requests(ended)
            else:
                requests.resume_admission()
            return list({m.tensor: m for m in mismatches}.values())

    async def _compare_weights(self, method: str, manifest: WeightManifest) -> list[TensorMismatch]:
        answers = await self.core.collective_rpc(method, args=(msgspec.msgpack.encode(manifest),))
        return [m for answer in answers for m in decode_msgpack(answer, list[TensorMismatch])]

    async def record_activations(self, token_ids: np.ndarray, path: Path) -> tuple[np.ndarray, str]:
        """Score a text as `score_tokens` does and write the model's activations at each
        stage to `path`.

        The text must be alone in the engine. The file is safetensors
        (`activations.ActivationRecorder`). Returns the log-probs and the dtype in which the model
        computes. Raises `EngineError`, also for an engine with CUDA graphs, in which stages cannot
        be recorded: it must be eager.
        """
        if not self.engine_args["enforce_eager"]:
            raise EngineError(
                "stages of a model in CUDA graphs cannot be seen: set "
                "generator.engine_args.enforce_eager=true"
            )
        async with self._install_lock:
            await self.core.collective_rpc("r3_record_activations")
            logprobs = await self.score_tokens(token_ids)
            async with asyncio.timeout(CALL_TIMEOUT):
                dtypes = await self.core.collective_rpc("r3_save_activations", args=(str(path),))
        return logprobs, dtypes[0]

    async def parse_tool_calls(
        self, parser: str, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[str, str, str]]]:
        """Parse an answer with vLLM's parser of that name into its content and its calls as
        `id, name, arguments`.

        Raises `EngineError` for an unknown parser, and for one that does not fit the
        model's tokenizer.
        """
        async with asyncio.timeout(CALL_TIMEOUT):
            content, calls = await self.core.parse_tool_calls(parser, text, tools)
        return content, [tuple(call) for call in calls]

    def collect_stats(self) -> dict[str, float]:
        """Return counters since `start`, the number of requests in vLLM now, and its
        load (`EngineLoad`)."""
        requests = self._requests
        core = self._requests.core
        aborted = self._counters["aborted"] + requests.aborted_count
        now = {"aborted": aborted, "restarted": requests.restarted_count, "running": len(requests)}
        load = core.load.as_metrics() if core is not None else {}
        return {**self._counters, **now, **load, "pause_seconds": self._pause_seconds}

    async def stop(self) -> None:
        """Fail running requests, shut vLLM down and make sure that its processes have
        ended. Idempotent."""
        if self._requests.core is None:
            return
        await self._requests.fail_requests(EngineError("the engine was stopped"))
        gc.unfreeze()
        gc.set_threshold(*self._collector_threshold)
        await self._end_core()
        await asyncio.to_thread(kill_processes, self._processes)

    async def _end_core(self) -> None:
        """End the core's process, if there is one."""
        core = self._requests.core
        self._requests.core = None
        if core is None:
            return
        if self._receive_task is not None:
            # Or it would report the end of the engine's process as a failure.
            self._receive_task.cancel()
        core.close()
        await asyncio.to_thread(core.end_process)

    def _build_cache_salt(self, version: int) -> str:
        """Return the cache salt of a new request.

        Prefixes cached under other versions have other salts, so they are never hit.
        """
        return f"version {version}"

    async def _run_single_text(
        self, name: str, ids: list[int], *, use_cache: bool, **params: Any
    ) -> RunningRequest:
        """Run a text through vLLM, all under one version, and sample one token after it."""
        try:
            async with asyncio.timeout(SCORE_TIMEOUT):
                return await self._run_text(name, ids, None, use_cache=use_cache, **params)
        except TimeoutError as error:
            raise EngineError(
                f"the engine took longer than {SCORE_TIMEOUT} s to {name} a text"
            ) from error

    async def _run_text(
        self, name: str, ids: list[int], wanted: int | None, *, use_cache: bool, **params: Any
    ) -> RunningRequest:
        while True:
            await self._requests.wait_for_admission()
            version = self.version if wanted is None else wanted
            adapter = self.installer.name_adapter(wanted)
            running = self._requests.create_request(name, version)
            salt = self._build_cache_salt(version) if use_cache else None
            sampling = build_sampling_params(1, 0.0, **params)
            if await self._requests.run_request(running, ids, sampling, salt, adapter):
                return running

    def _build_generation(
        self, request: GenerationRequest, running: RunningRequest, first: int
    ) -> Generation:
        tokens = np.asarray(running.tokens, np.int32)
        logprobs = np.concatenate(running.logprobs) if running.logprobs else np.empty(0, np.float32)
        if len(logprobs) != len(tokens):
            raise EngineError(
                f"request {request.request_id}: {len(tokens)} tokens but {len(logprobs)} log-probs"
            )
        if running.finish_reason not in ("stop", "length", "abort"):
            raise EngineError(
                f"request {request.request_id}: vLLM ended it with {running.finish_reason!r}"
            )
        self._counters["generated_tokens"] += len(tokens)
        self._counters["aborted" if running.finish_reason == "abort" else "finished"] += 1
        routes, gates = self._build_routes(request, running, first)
        return Generation(
            token_ids=tokens,
            logprobs=logprobs,
            version_spans=running.version_spans.finish_spans(len(tokens)),
            routed_experts=routes,
            routed_weights=gates,
            routes_from=first,
            stop_reason=running.finish_reason,
            supports=self._build_supports(request, running, tokens)
            if request.needs_sampling_mask
            else None,
            top_tokens=TopTokens(*map(np.concatenate, zip(*running.top_tokens, strict=True)))
            if running.top_tokens
            else None,
        )

    def _build_supports(
        self, request: GenerationRequest, running: RunningRequest, tokens: np.ndarray
    ) -> SupportSets:
        supports = SupportSets.concat(running.supports)
        if len(supports) != len(tokens) or not supports.recorded_mask.all():
            raise EngineError(
                f"request {request.request_id}: {len(tokens)} tokens but {len(supports)} supports"
            )
        inside = supports.contains_ids(tokens)
        if not inside.all():
            at = int(inside.argmin())
            raise EngineError(
                f"request {request.request_id}: token {tokens[at]} at {at} is not "
                "in its own support"
            )
        return supports

    def _build_routes(
        self, request: GenerationRequest, running: RunningRequest, first: int
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the routes of the MoE layers from position `first`, and their gates. None for what
        the engine does not record.

        They have length 0 if vLLM returned none, or not as many as it must have fed. For a position
        that the prefix cache served, vLLM returns the row of the call that computed its keys and
        values. That call had the same salt, hence the same weights.
        """
        shape = self.routing
        if shape is None:
            return None, None
        sampled = len(running.tokens)
        returned = sum(map(len, running.routes))
        expected = len(request.prompt_ids) + sampled - 1 - first if sampled else 0
        if returned > expected or (returned < expected and running.finish_reason != "abort"):
            # It is unknown which rows are missing: better none than one at a wrong position.
            returned = 0
        self._counters["unrecorded_rows"] += expected - returned
        pieces = running.routes if returned else []
        rows, gates = join_routes(pieces, shape, self._moe_layers)
        try:
            check_expert_ids(
                rows, layers=shape.layers, top_k=shape.top_k, num_experts=shape.num_experts
            )
        except RoutingError as error:
            raise EngineError(f"request {request.request_id}: {error}") from error
        return rows, gates


def _take_scores(running: RunningRequest, length: int) -> tuple[np.ndarray, TopTokens]:
    scores = running.prompt_logprobs
    if scores is None or running.top_prompt_tokens is None or len(scores) != length - 1:
        raise EngineError("vLLM returned no prompt log-probs for a text that was to be scored")
    return scores, running.top_prompt_tokens


def describe_start_failure(model: str, error: Exception) -> str:
    """Return what prevented vLLM from starting. If it is a package that does not fit its torch,
    `doctor` is named, which knows what to do about it: plain pip installs such packages with
    vLLM's CPU build."""
    unfit = any(package in str(error) for package in UNWANTED_PACKAGES)
    hint = "; `r3async doctor` names what to uninstall" if unfit else ""
    return f"vLLM could not start with {model}: {error}{hint}"


def iter_process_ancestors(pid: int) -> Iterator[psutil.Process]:
    """Yield process `pid` and its ancestors below this process."""
    process = psutil.Process(pid)
    while process is not None and process.pid != os.getpid():
        yield process
        process = process.parent()


def read_tensor_names(directory: Path) -> frozenset[str]:
    """Return the tensor names of a safetensors checkpoint, dequantized and with tied ones once;
    also of one without weights (`TENSOR_NAMES_FILE`)."""
    from safetensors import safe_open

    names: set[str] = set()
    if (directory / TENSOR_NAMES_FILE).is_file():
        names.update(decode_json((directory / TENSOR_NAMES_FILE).read_bytes(), list[str]))
    for path in list_weight_files(directory):
        with safe_open(path, framework="np") as file:
            names.update(file.keys())
    config = decode_python_json((directory / "config.json").read_bytes())
    form = read_quantized_form(config)
    if form is not None:
        names = set(form.list_dequantized_names(names))
    if take_text_config(config).get("tie_word_embeddings"):
        names.discard("lm_head.weight")
    return frozenset(names)


def build_vllm_engine(
    config: Config,
    model_path: str,
    seed: int,
    *,
    adapter_slots: int,
    record_sampling_masks: bool = False,
) -> VllmEngine:
    """Return the engine that a run's settings describe, not yet started.

    Args:
        seed: Seed of sampling.
        adapter_slots: See `AdapterSettings.slots`, if versions are adapters.
    """
    lora = config.learner.lora
    records: list[ExtraRecord] = ["sampling_masks"] if record_sampling_masks else []
    if config.routing.gates == "rollout":
        records.append("gates")
    adapters = None
    if lora.delivers_adapters:
        adapters = AdapterSettings(lora.rank, lora.list_served_modules(), adapter_slots)
    return VllmEngine(
        model_path,
        config.generator,
        max_model_len=config.episode.max_total_tokens,
        seed=seed,
        extra_records=records,
        adapters=adapters,
        float32_head=config.model.head_dtype == "float32",
    )
