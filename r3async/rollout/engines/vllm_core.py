"""vLLM's engine core, driven directly: what runs in its process. `vllm_client` has the other side.

`AsyncLLM` works on every token of every request in the caller's process: it decodes, counts and copies it, and keeps statistics.
Here an answer stays in the engine's process until it ends (`AnswerBufferingMixin`), and crosses the boundary as arrays, in
one message. Made for vLLM 0.30: `check_vllm_interface` says what another version lacks.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    FINISH_REASON_STRINGS,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW

from r3async.config.generation import declare_engine_args
from r3async.data.supports import SupportSets
from r3async.rollout.engines import EngineError, vllm_messages
from r3async.rollout.engines.vllm_client import is_cpu_vllm
from r3async.rollout.engines.vllm_cpu import patch_vllm_for_cpu
from r3async.rollout.engines.vllm_owner import OwnerBoundConfig
from r3async.rollout.engines.vllm_stops import StopStringsMixin
from r3async.rollout.engines.vllm_tools import VllmToolParser
from r3async.world.processes import pause_garbage_collector

LOAD_INTERVAL_SECONDS = 0.1
"""How often a busy engine sends its load."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a block of the cache on CPU, the fewest that its attention takes. Only whole blocks are found again: with 128, which
vLLM has there, each turn of a short conversation would feed all of it."""
SAMPLING_MASK_KEY = "r3async_masks"
"""In vLLM's `additional_config`: whether supports are recorded."""
_NO_IDS = np.empty((0, 0), np.int32)
_REQUIRED_NAMES: dict[type, str] = {
    EngineCoreProc: "run_engine_core pause_scheduler resume_scheduler collective_rpc ENGINE_CORE_DEAD",
    AsyncScheduler: "update_from_output _update_request_with_output finish_requests set_pause_state pause_state "
    "has_requests make_stats",
    Executor: "get_class",
    EngineCoreReadyResponse: "max_model_len block_size",
    SchedulerStats: "num_waiting_reqs kv_cache_usage",
    PrefillStats: "num_cached_tokens",
    SamplingParams: " ".join(vllm_messages.CoreSamplingParams.__struct_fields__),
    EngineCoreEventType: "PREEMPTED",
    PauseState: "PAUSED_ALL",
    ModelRunnerOutput: "logprobs sampling_masks",
    SamplingMaskLists: "slice_request",
    RequestStatus: "FINISHED_ABORTED",
}
"""Classes of vLLM, and the names of each that are used here."""
_POSITIONAL_TYPES: dict[type, type] = {
    EngineCoreRequest: vllm_messages.CoreRequest,
    EngineCoreOutput: vllm_messages.CoreOutput,
    EngineCoreOutputs: vllm_messages.CoreOutputs,
    UtilityOutput: vllm_messages.CoreCallResult,
    LogprobsLists: vllm_messages.CoreLogprobs,
    SamplingMaskLists: vllm_messages.CoreSamplingMask,
}
"""Classes of vLLM whose fields travel by position, and what stands for them on the other side."""
_EXPECTED_VALUES = (
    (tuple(map(str, vllm_messages.CoreFinishReason)), FINISH_REASON_STRINGS),
    (vllm_messages.PREEMPTED_EVENT, EngineCoreEventType.PREEMPTED.value),
    (vllm_messages.ADD_MESSAGE, EngineCoreRequestType.ADD.value),
    (vllm_messages.ABORT_MESSAGE, EngineCoreRequestType.ABORT.value),
    (vllm_messages.CALL_MESSAGE, EngineCoreRequestType.UTILITY.value),
    (vllm_messages.CORE_DEAD_MESSAGE, EngineCoreProc.ENGINE_CORE_DEAD),
    (vllm_messages.RAW_VIEW_CODE, CUSTOM_TYPE_RAW_VIEW),
)
"""What the other side takes for granted, and what vLLM says."""


def check_vllm_interface() -> None:
    """Raises `EngineError` with what the installed vLLM lacks of what is used here."""
    lacking = [
        f"{kind.__name__}.{name}"
        for kind, names in _REQUIRED_NAMES.items()
        for name in names.split()
        if not _has_name(kind, name)
    ]
    if lacking:
        raise EngineError(f"vLLM {vllm.__version__} has no {', '.join(lacking)}: r3async is made for vLLM 0.30")
    moved = [
        kind.__name__
        for kind, ours in _POSITIONAL_TYPES.items()
        if _field_names(kind)[: len(_field_names(ours))] != _field_names(ours)
    ]
    moved += [str(theirs) for assumed, theirs in _EXPECTED_VALUES if assumed != theirs]
    if moved:
        raise EngineError(f"vLLM {vllm.__version__} has another {', '.join(moved)}: r3async is made for vLLM 0.30")


def _has_name(kind: type, name: str) -> bool:
    return hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", ())


def _field_names(kind: Any) -> tuple[str, ...]:
    """Of a msgspec structure, or of a named tuple."""
    return tuple(getattr(kind, "__struct_fields__", ()) or kind._fields)


class AnswerBuffer:
    """What one request has sampled since the last output that left the process."""

    __slots__ = ("_route_rows", "events", "first_output", "logprobs", "route_count", "supports", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.events: list[Any] = []
        self.supports: list[SupportSets] = []
        self.first_output: EngineCoreOutput | None = None
        self.route_count = 0
        self._route_rows: np.ndarray | None = None

    def add_output(self, output: EngineCoreOutput, step_supports: SupportSets | None = None) -> None:
        """Copies what it needs: vLLM may use the arrays of a step again. `step_supports`: of all requests, see
        `extract_step_supports`."""
        self.first_output = self.first_output or output
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # the sampled token is the first of each row
        if step_supports is not None and output.new_sampling_mask is not None:
            (row,) = output.new_sampling_mask.token_ids.tolist()
            self.supports.append(step_supports[row : row + 1])
        if output.events:
            self.events += output.events
        if output.routed_experts is not None:
            self._append_routes(output.routed_experts)

    def _append_routes(self, rows: np.ndarray) -> None:
        needed = self.route_count + len(rows)
        if self._route_rows is None or needed > len(self._route_rows):
            larger = np.empty((needed + needed // 2 + 32, *rows.shape[1:]), rows.dtype)
            if self._route_rows is not None:
                larger[: self.route_count] = self._route_rows[: self.route_count]
            self._route_rows = larger
        self._route_rows[self.route_count : needed] = rows
        self.route_count = needed

    def build_output(self, request_id: str, last_output: EngineCoreOutput | None) -> EngineCoreOutput:
        """All of it. `last_output`: the one that says how the request ended; None if it goes on."""
        logprobs = None
        if self.logprobs:
            logprobs = LogprobsLists(_NO_IDS, np.asarray(self.logprobs, np.float32), _NO_IDS)
        return EngineCoreOutput(
            request_id,
            self.tokens,
            new_logprobs=logprobs,
            new_prompt_logprobs_tensors=self.first_output and self.first_output.new_prompt_logprobs_tensors,
            finish_reason=last_output and last_output.finish_reason,
            stop_reason=last_output and last_output.stop_reason,
            events=self.events or None,
            prefill_stats=self.first_output and self.first_output.prefill_stats,
            routed_experts=None if self._route_rows is None else self._route_rows[: self.route_count],
            new_sampling_mask=SamplingMaskLists(SupportSets.concat(self.supports).encode()) if self.supports else None,
        )


def extract_step_supports(runner_output: ModelRunnerOutput, vocab_size: int) -> SupportSets | None:
    """Of the tokens that a step sampled, by its rows; None if nobody recorded them. In their place each request gets the number
    of its row.

    vLLM's second model runner returns ids, and the first one what `vllm_masks` put beside the sampled tokens.
    """
    masks, logprobs = runner_output.sampling_masks, runner_output.logprobs
    if masks is not None:
        assert masks.offsets is not None, "of a whole step"
        step = SupportSets.from_ids(masks.token_ids, masks.offsets, vocab_size)
    elif logprobs is not None and logprobs.logprob_token_ids.shape[1] > 1:
        words = np.ascontiguousarray(logprobs.logprob_token_ids[:, 1:], np.int32)
        step = SupportSets.from_bitmaps(words.view(np.uint8)[:, : -(-vocab_size // 8)], vocab_size)
        runner_output.logprobs = logprobs._replace(logprob_token_ids=logprobs.logprob_token_ids[:, :1])
    else:
        return None
    runner_output.sampling_masks = SamplingMaskLists(np.arange(len(step)), np.arange(len(step) + 1))
    return step


class AnswerBufferingMixin:
    """Mixed into vLLM's scheduler: the outputs of a request stay here until it ends, or until the engine is paused.

    When a pause is confirmed, everything that was sampled before it has left: whoever pauses knows the tokens of every request.
    An aborted request leaves what it has. One client takes all outputs.
    """

    vllm_config: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._answer_buffers: dict[str, AnswerBuffer] = {}
        self._aborted_outputs: list[EngineCoreOutput] = []
        self._load_sent_at = 0.0
        config, self._support_vocab_size = self.vllm_config, 0
        """Tokens of it, if which of them could be sampled is recorded."""
        if config is not None and config.additional_config.get(SAMPLING_MASK_KEY):
            self._support_vocab_size = config.model_config.get_vocab_size()
            self.return_sampling_mask = True  # also where the model runner is not vLLM's second one

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        supports = extract_step_supports(args[1], self._support_vocab_size) if self._support_vocab_size else None
        steps: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        step = steps.setdefault(0, EngineCoreOutputs())
        leaving, self._aborted_outputs = self._aborted_outputs, []
        for output in step.outputs:
            answer = self._answer_buffers.setdefault(output.request_id, AnswerBuffer())
            answer.add_output(output, supports)
            if output.finish_reason is not None:
                leaving.append(self._answer_buffers.pop(output.request_id).build_output(output.request_id, output))
        if self._is_paused():
            leaving += [answer.build_output(name, None) for name, answer in self._answer_buffers.items()]
            self._answer_buffers.clear()
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
                answer = self._answer_buffers.pop(request.request_id, None) or AnswerBuffer()
                self._aborted_outputs.append(answer.build_output(request.request_id, last))
        return finished

    def has_requests(self) -> bool:
        """A pause is not confirmed, and the engine steps on, until this is False."""
        return super().has_requests() or bool(self._aborted_outputs or (self._answer_buffers and self._is_paused()))  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """None if the load was sent just now, and the engine is busy."""
        now = time.monotonic()
        if now < self._load_sent_at + LOAD_INTERVAL_SECONDS and (self.running or self.waiting):  # type: ignore[attr-defined]
            return None
        self._load_sent_at = now
        return super().make_stats(*args, **kwargs)  # type: ignore[misc]

    def _is_paused(self) -> bool:
        return bool(self.pause_state == PauseState.PAUSED_ALL)  # type: ignore[attr-defined]


class BufferingScheduler(AnswerBufferingMixin, StopStringsMixin, Scheduler):
    pass


class BufferingAsyncScheduler(AnswerBufferingMixin, StopStringsMixin, AsyncScheduler):
    pass


def run_core(args: dict[str, Any], address: str, owner_pid: int, kv_cache_bytes: int) -> None:
    """Be the core of process `owner_pid`, which waits at `address`, until this process is told to end. Of its main thread.

    `args` are those of vLLM's `AsyncEngineArgs`; a scheduler class that they name must have `AnswerBufferingMixin`. Raises
    what vLLM raises.
    """
    check_vllm_interface()
    patch_vllm_for_cpu()
    if is_cpu_vllm():
        args = declare_engine_args(kv_cache_memory_bytes=kv_cache_bytes, block_size=CPU_BLOCK_TOKENS) | args
    masks = args.pop("return_sampling_mask", False)
    with pause_garbage_collector():
        config = AsyncEngineArgs(**args).create_engine_config()
        executor = Executor.get_class(config)
    gc.freeze()
    # Its own check refuses what `vllm_masks` adds to the first model runner.
    config.model_config.return_sampling_mask = masks and config.use_v2_model_runner
    config.additional_config = OwnerBoundConfig(owner_pid, {**config.additional_config, SAMPLING_MASK_KEY: masks})
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = BufferingAsyncScheduler if scheduler.async_scheduling else BufferingScheduler
    EngineCoreProc.r3_tool_calls = VllmToolParser(args["model"])
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=address,
        executor_class=executor,
        log_stats=True,
    )
