"""vLLM's engine core, driven directly: all that r3async knows of vLLM's inner classes, on both sides of the process boundary.

`AsyncLLM` works on every token of every request in the caller's process: it decodes, counts and copies it, and keeps statistics.
Here an answer stays in the engine's process until it ends (`WholeAnswers`), and crosses the boundary as arrays, in one message.
Made for vLLM 0.30: `check_names` says what another version lacks.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import numpy as np
import vllm
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from r3async.rollout.engines import EngineError

LOAD_SECONDS = 0.1
"""How often a busy engine sends its load."""
_NO_IDS = np.empty((0, 0), np.int32)
_USED: dict[type, str] = {
    EngineCoreClient: "make_async_mp_client",
    AsyncMPClient: (
        "add_request_async abort_requests_async get_output_async pause_scheduler_async resume_scheduler_async"
        " collective_rpc_async shutdown"
    ),
    AsyncScheduler: "update_from_output finish_requests set_pause_state pause_state has_requests make_stats",
    Executor: "get_class",
    EngineCoreRequest: (
        "request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time lora_request cache_salt"
        " data_parallel_rank"
    ),
    EngineCoreOutput: (
        "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors finish_reason stop_reason events prefill_stats"
        " routed_experts"
    ),
    EngineCoreOutputs: "outputs scheduler_stats",
    SchedulerStats: "num_waiting_reqs kv_cache_usage",
    PrefillStats: "num_cached_tokens",
    LogprobsLists: "logprob_token_ids logprobs sampled_token_ranks",
    SamplingParams: (
        "max_tokens temperature stop_token_ids logprobs prompt_logprobs routed_experts_prompt_start ignore_eos detokenize"
    ),
    EngineCoreEventType: "PREEMPTED",
    PauseState: "PAUSED_ALL",
    RequestStatus: "FINISHED_ABORTED",
}
"""Classes of vLLM, and the names of each that are used here."""


def check_names() -> None:
    """Raises `EngineError` with what the installed vLLM lacks of what is used here."""
    lacking = [
        f"{kind.__name__}.{name}" for kind, names in _USED.items() for name in names.split() if not _has(kind, name)
    ]
    if lacking:
        raise EngineError(f"vLLM {vllm.__version__} has no {', '.join(lacking)}: r3async is made for vLLM 0.30")


def _has(kind: type, name: str) -> bool:
    return hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", ())


# -- in the engine's process ---------------------------------------------------------------------------------------


class Answer:
    """What one request has sampled since the last output that left the process."""

    __slots__ = ("_rows", "events", "filled", "first", "logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.events: list[Any] = []
        self.first: EngineCoreOutput | None = None
        self.filled = 0
        self._rows: np.ndarray | None = None

    def add(self, output: EngineCoreOutput) -> None:
        """Copies what it needs: vLLM may use the arrays of a step again."""
        self.first = self.first or output
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # the sampled token is the first of each row
        if output.events:
            self.events += output.events
        if output.routed_experts is not None:
            self._add_rows(output.routed_experts)

    def _add_rows(self, rows: np.ndarray) -> None:
        needed = self.filled + len(rows)
        if self._rows is None or needed > len(self._rows):
            larger = np.empty((needed + needed // 2 + 32, *rows.shape[1:]), rows.dtype)
            if self._rows is not None:
                larger[: self.filled] = self._rows[: self.filled]
            self._rows = larger
        self._rows[self.filled : needed] = rows
        self.filled = needed

    def output(self, request_id: str, last: EngineCoreOutput | None) -> EngineCoreOutput:
        """All of it. `last`: the one that says how the request ended; None if it goes on."""
        logprobs = None
        if self.logprobs:
            logprobs = LogprobsLists(_NO_IDS, np.asarray(self.logprobs, np.float32), _NO_IDS)
        return EngineCoreOutput(
            request_id,
            self.tokens,
            new_logprobs=logprobs,
            new_prompt_logprobs_tensors=self.first and self.first.new_prompt_logprobs_tensors,
            finish_reason=last and last.finish_reason,
            stop_reason=last and last.stop_reason,
            events=self.events or None,
            prefill_stats=self.first and self.first.prefill_stats,
            routed_experts=None if self._rows is None else self._rows[: self.filled],
        )


class WholeAnswers:
    """Mixed into vLLM's scheduler: the outputs of a request stay here until it ends, or until the engine is paused.

    When a pause is confirmed, everything that was sampled before it has left: whoever pauses knows the tokens of every request.
    An aborted request leaves what it has. One client takes all outputs.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._answers: dict[str, Answer] = {}
        self._aborted: list[EngineCoreOutput] = []
        self._load_sent = 0.0

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        steps: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        step = steps.setdefault(0, EngineCoreOutputs())
        leaving, self._aborted = self._aborted, []
        for output in step.outputs:
            answer = self._answers.setdefault(output.request_id, Answer())
            answer.add(output)
            if output.finish_reason is not None:
                leaving.append(self._answers.pop(output.request_id).output(output.request_id, output))
        if self._paused():
            leaving += [answer.output(name, None) for name, answer in self._answers.items()]
            self._answers.clear()
        step.outputs = leaving
        if not leaving and step.scheduler_stats is None:
            del steps[0]
        return steps

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """vLLM's client makes the last output of an aborted request itself, but it does not have what is here."""
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        if finished_status == RequestStatus.FINISHED_ABORTED:
            for request in finished:
                last = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
                answer = self._answers.pop(request.request_id, None) or Answer()
                self._aborted.append(answer.output(request.request_id, last))
        return finished

    def has_requests(self) -> bool:
        """A pause is not confirmed, and the engine steps on, until this is False."""
        return super().has_requests() or bool(self._aborted or (self._answers and self._paused()))  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """None if the load was sent just now, and the engine is busy."""
        now = time.monotonic()
        if now < self._load_sent + LOAD_SECONDS and (self.running or self.waiting):  # type: ignore[attr-defined]
            return None
        self._load_sent = now
        return super().make_stats(*args, **kwargs)  # type: ignore[misc]

    def _paused(self) -> bool:
        return bool(self.pause_state == PauseState.PAUSED_ALL)  # type: ignore[attr-defined]


class WholeScheduler(WholeAnswers, Scheduler):
    pass


class WholeAsyncScheduler(WholeAnswers, AsyncScheduler):
    pass


# -- in the generator's process ------------------------------------------------------------------------------------


class Load:
    """The newest figures of the engine's load. `kv_cache_usage`: share of the blocks that hold anything of a running request,
    0..1. `waiting`: requests in the queue. `preemptions`: requests that were put back into it for want of blocks."""

    def __init__(self) -> None:
        self.kv_cache_usage = 0.0
        self.waiting = self.preemptions = 0

    def take(self, outputs: EngineCoreOutputs) -> None:
        if (stats := outputs.scheduler_stats) is not None:
            self.kv_cache_usage, self.waiting = float(stats.kv_cache_usage), int(stats.num_waiting_reqs)
        for output in outputs.outputs:
            if output.events:
                self.preemptions += sum(event.type == EngineCoreEventType.PREEMPTED for event in output.events)

    def figures(self) -> dict[str, float]:
        return {"kv_cache_usage": self.kv_cache_usage, "waiting": self.waiting, "preemptions": self.preemptions}


class Core:
    """The engine's process, as this one sees it. Made in any thread; then all calls belong to one event loop.

    `config` is a vLLM configuration; a scheduler class that it names must have `WholeAnswers`. Raises what vLLM raises.
    """

    def __init__(self, config: Any):
        check_names()
        maybe_register_config_serialize_by_value()
        scheduler = config.scheduler_config
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = WholeAsyncScheduler if scheduler.async_scheduling else WholeScheduler
        self.vllm_config = config
        self.load = Load()
        self._client = EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=True)

    async def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams, salt: str | None) -> None:
        """Raises `EngineError` for a request that the engine could not serve. The id must be new."""
        limit = self.vllm_config.model_config.max_model_len
        if not 0 < len(prompt_ids) < limit:
            raise EngineError(f"a prompt of {len(prompt_ids)} tokens: it has to have 1 to {limit - 1}")
        if params.max_tokens is None or params.max_tokens < 1:
            raise EngineError(f"at most {params.max_tokens} tokens are asked for: it has to be 1 or more")
        if not 0 <= params.routed_experts_prompt_start <= len(prompt_ids):
            raise EngineError(
                f"routes from position {params.routed_experts_prompt_start} of a prompt of {len(prompt_ids)} tokens"
            )
        await self._client.add_request_async(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt_ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=salt,
                data_parallel_rank=None,
            )
        )

    async def abort(self, request_ids: list[str]) -> None:
        """Their last outputs come all the same. Nothing happens for those that have ended."""
        await self._client.abort_requests_async(request_ids)

    async def outputs(self) -> list[EngineCoreOutput]:
        """The next ones, in the order in which they left. Raises vLLM's error when the engine is lost."""
        outputs = await self._client.get_output_async()
        self.load.take(outputs)
        return outputs.outputs

    def drained(self) -> bool:
        """Whether `outputs` has returned everything that came before the last answer to a call."""
        return bool(self._client.outputs_queue.empty())

    async def pause_generation(self, *, mode: str = "keep", clear_cache: bool) -> None:
        await self._client.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        await self._client.resume_scheduler_async()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """What the method of that name returns in each worker."""
        answers: list[Any] = await self._client.collective_rpc_async(method, None, args)
        return answers

    def shutdown(self, timeout: float) -> None:
        """Blocking: up to `timeout` seconds for the engine's processes to end."""
        self._client.shutdown(timeout=timeout)


def sampling(
    max_tokens: int,
    temperature: float,
    stop_token_ids: tuple[int, ...] = (),
    *,
    routes_from: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What a request asks for. Raises `EngineError` for a value that has no meaning."""
    try:
        params = copy.copy(_sampling(temperature, stop_token_ids, logprobs, prompt_logprobs))
    except VLLMValidationError as error:
        raise EngineError(str(error)) from error
    params.max_tokens, params.routed_experts_prompt_start = max_tokens, routes_from
    return params


@functools.lru_cache(maxsize=64)
def _sampling(
    temperature: float, stop_token_ids: tuple[int, ...], logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Checking them costs vLLM as much as all the rest of a request."""
    return SamplingParams(
        temperature=temperature,
        stop_token_ids=list(stop_token_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        detokenize=False,
        ignore_eos=True,
    )
