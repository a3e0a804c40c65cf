"""The code that runs in the engine core's process: extensions of vLLM's scheduler, its tool parsers
and CPU patches."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import (
    FINISH_REASON_STRINGS,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor import Executor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.request import RequestStatus
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW

from r3async.config.vllm_arguments import declare_engine_args
from r3async.data.supports import SupportSets
from r3async.rollout.engine import EngineError
from r3async.rollout.vllm import messages as vllm_messages
from r3async.rollout.vllm.cpu_patches import (
    CHOSEN_CACHE_KEY,
    patch_vllm_for_cpu,
    prefer_norm_kernels,
)
from r3async.rollout.vllm.names import SUPPORTED_VERSIONS
from r3async.rollout.vllm.route_recording import GATES_KEY, record_gates
from r3async.rollout.vllm.stop_strings import StopStringsMixin
from r3async.rollout.vllm.tool_parser_adapter import VllmToolParser
from r3async.world.processes import pause_garbage_collector

LOAD_INTERVAL_SECONDS = 0.1
"""Seconds between two reports of a busy engine's load."""
CPU_BLOCK_TOKENS = 32
"""Tokens per block of the KV cache on CPU, the fewest that its attention supports. Only whole
blocks are reused: with 128, vLLM's default there, each turn of a short conversation would feed
all of it again."""
SAMPLING_MASK_KEY = "r3async_masks"
"""Key in vLLM's `additional_config` whose value is True if supports are recorded."""
_NO_IDS = np.empty((0, 0), np.int32)
_POSITIONAL_TYPES: dict[type, type] = {
    EngineCoreRequest: vllm_messages.CoreRequest,
    LoRARequest: vllm_messages.CoreAdapterRequest,
    EngineCoreOutput: vllm_messages.CoreOutput,
    EngineCoreOutputs: vllm_messages.CoreOutputs,
    UtilityOutput: vllm_messages.CoreCallResult,
    LogprobsLists: vllm_messages.CoreLogprobs,
    SamplingMaskLists: vllm_messages.CoreSamplingMask,
}
"""Classes of vLLM whose fields travel by position, each with its counterpart on the other side."""
_EXPECTED_VALUES = (
    (tuple(map(str, vllm_messages.CoreFinishReason)), FINISH_REASON_STRINGS),
    (vllm_messages.PREEMPTED_EVENT, EngineCoreEventType.PREEMPTED.value),
    (vllm_messages.ADD_MESSAGE, EngineCoreRequestType.ADD.value),
    (vllm_messages.ABORT_MESSAGE, EngineCoreRequestType.ABORT.value),
    (vllm_messages.CALL_MESSAGE, EngineCoreRequestType.UTILITY.value),
    (vllm_messages.CORE_DEAD_MESSAGE, EngineCoreProc.ENGINE_CORE_DEAD),
    (vllm_messages.RAW_VIEW_CODE, CUSTOM_TYPE_RAW_VIEW),
)
"""Pairs of the value that the other side assumes and vLLM's value."""


def check_vllm_interface() -> None:
    """Raise `EngineError` if the installed vLLM has fields in another order, or other values,
    than are used here."""
    moved = [
        kind.__name__
        for kind, ours in _POSITIONAL_TYPES.items()
        if _field_names(kind)[: len(_field_names(ours))] != _field_names(ours)
    ]
    moved += [str(theirs) for assumed, theirs in _EXPECTED_VALUES if assumed != theirs]
    if moved:
        raise EngineError(
            f"vLLM {vllm.__version__} has another {', '.join(moved)}: r3async is made for vLLM "
            f"{SUPPORTED_VERSIONS}"
        )


def _field_names(kind: Any) -> tuple[str, ...]:
    """Return the field names of a msgspec structure or of a named tuple."""
    return tuple(getattr(kind, "__struct_fields__", ()) or kind._fields)


class AnswerBuffer:
    """The tokens that one request has sampled since the last output that left the process."""

    __slots__ = (
        "_route_rows",
        "events",
        "first_output",
        "logprobs",
        "route_count",
        "supports",
        "tokens",
        "top_count",
        "top_rows",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.events: list[Any] = []
        self.supports: list[SupportSets] = []
        self.first_output: EngineCoreOutput | None = None
        self.top_count = 0
        """Most likely tokens that are wanted at each place."""
        self.top_rows: list[LogprobsLists] = []
        self.route_count = 0
        self._route_rows: np.ndarray | None = None

    def add_output(
        self, output: EngineCoreOutput, step_supports: SupportSets | None = None
    ) -> None:
        """Add the output of a step, copying what is needed, because vLLM may reuse the
        arrays of a step.

        `step_supports` are the supports of all requests (`extract_step_supports`).
        """
        self.first_output = self.first_output or output
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            # The sampled token is the first of each row.
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if self.top_count:
                # Where another request of the step wants more, there are more columns.
                wanted = slice(self.top_count + 1)
                ids, values = (part[:, wanted].copy() for part in output.new_logprobs[:2])
                self.top_rows.append(LogprobsLists(ids, values, _NO_IDS))
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

    def build_output(
        self, request_id: str, last_output: EngineCoreOutput | None
    ) -> EngineCoreOutput:
        """Return everything in the buffer as one output.

        `last_output` is vLLM's output with the finish reason; None if the request continues.
        """
        logprobs = None
        if self.top_rows:
            ids = np.concatenate([rows.logprob_token_ids for rows in self.top_rows])
            values = np.concatenate([rows.logprobs for rows in self.top_rows])
            logprobs = LogprobsLists(ids, values, _NO_IDS)
        elif self.logprobs:
            logprobs = LogprobsLists(_NO_IDS, np.asarray(self.logprobs, np.float32), _NO_IDS)
        return EngineCoreOutput(
            request_id,
            self.tokens,
            new_logprobs=logprobs,
            new_prompt_logprobs_tensors=self.first_output
            and self.first_output.new_prompt_logprobs_tensors,
            finish_reason=last_output and last_output.finish_reason,
            stop_reason=last_output and last_output.stop_reason,
            events=self.events or None,
            prefill_stats=self.first_output and self.first_output.prefill_stats,
            routed_experts=None
            if self._route_rows is None
            else self._route_rows[: self.route_count],
            new_sampling_mask=SamplingMaskLists(SupportSets.concat(self.supports).encode())
            if self.supports
            else None,
        )


def extract_step_supports(runner_output: ModelRunnerOutput, vocab_size: int) -> SupportSets | None:
    """Return the supports of the tokens that a step sampled, one per row; None if they
    are not recorded.

    In `runner_output` each request gets the number of its row in their place. vLLM's second model
    runner returns ids; the first one returns the bits that `sampling_masks.MaskRecordingSampler`
    put beside the sampled tokens.
    """
    masks = runner_output.sampling_masks
    logprobs = runner_output.logprobs
    if masks is not None:
        assert masks.offsets is not None, "of a whole step"
        step = SupportSets.from_ids(masks.token_ids, masks.offsets, vocab_size)
    elif logprobs is not None and logprobs.logprob_token_ids.shape[1] > 1:
        words = np.ascontiguousarray(logprobs.logprob_token_ids[:, 1:], np.int32)
        step = SupportSets.from_bitmaps(words.view(np.uint8)[:, : -(-vocab_size // 8)], vocab_size)
        runner_output.logprobs = logprobs._replace(
            logprob_token_ids=logprobs.logprob_token_ids[:, :1]
        )
    else:
        return None
    runner_output.sampling_masks = SamplingMaskLists(np.arange(len(step)), np.arange(len(step) + 1))
    return step


class AnswerBufferingMixin:
    """A mixin of vLLM's scheduler that keeps the outputs of a request until it ends, or until the
    engine is paused.

    When a pause is confirmed, everything that was sampled before it has left the process, so the
    client knows the tokens of every request. An aborted request sends what it has. One client
    receives all outputs.
    """

    vllm_config: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._answer_buffers: dict[str, AnswerBuffer] = {}
        self._aborted_outputs: list[EngineCoreOutput] = []
        self._load_sent_at = 0.0
        config = self.vllm_config
        self._support_vocab_size = 0
        """Number of tokens in the vocabulary if supports are recorded, else 0."""
        if config is not None and config.additional_config.get(SAMPLING_MASK_KEY):
            self._support_vocab_size = config.model_config.get_vocab_size()
            self.return_sampling_mask = True  # also if the model runner is not vLLM's second one

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        supports = (
            extract_step_supports(args[1], self._support_vocab_size)
            if self._support_vocab_size
            else None
        )
        steps: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        step = steps.setdefault(0, EngineCoreOutputs())
        leaving = self._aborted_outputs
        self._aborted_outputs = []
        for output in step.outputs:
            answer = self._answer_buffers.setdefault(output.request_id, AnswerBuffer())
            answer.add_output(output, supports)
            if output.finish_reason is not None:
                leaving.append(
                    self._answer_buffers.pop(output.request_id).build_output(
                        output.request_id, output
                    )
                )
        if self._is_paused():
            leaving += [
                answer.build_output(name, None) for name, answer in self._answer_buffers.items()
            ]
            self._answer_buffers.clear()
        step.outputs = leaving
        if not leaving and step.scheduler_stats is None:
            del steps[0]
        return steps

    def _update_request_with_output(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        top_count = request.sampling_params.logprobs
        if top_count:
            answer = self._answer_buffers.setdefault(request.request_id, AnswerBuffer())
            answer.top_count = top_count
        return super()._update_request_with_output(request, *args, **kwargs)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Finish requests, and send the last outputs of aborted ones.

        vLLM's client would create those outputs itself, but it does not have the tokens that
        are buffered here.
        """
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        if finished_status == RequestStatus.FINISHED_ABORTED:
            for request in finished:
                last = EngineCoreOutput(
                    request.request_id, [], finish_reason=request.get_finished_reason()
                )
                answer = self._answer_buffers.pop(request.request_id, None) or AnswerBuffer()
                self._aborted_outputs.append(answer.build_output(request.request_id, last))
        return finished

    def has_requests(self) -> bool:
        """Return True while outputs are still to be sent: until then the engine steps on and
        confirms no pause."""
        return super().has_requests() or bool(  # type: ignore[misc]
            self._aborted_outputs or (self._answer_buffers and self._is_paused())
        )

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Return the load, or None if the engine is busy and has sent it less than
        `LOAD_INTERVAL_SECONDS` ago."""
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


def run_core(
    args: dict[str, Any],
    address: str,
    additional_config: dict[str, Any],
    kv_cache_bytes: int | None = None,
) -> None:
    """Run the engine core for the client that waits at `address`, until this process is
    signalled to end.

    Must run in the main thread. Raises whatever vLLM raises.

    Args:
        args: Arguments of vLLM's `AsyncEngineArgs`; a scheduler class among them must have
            `AnswerBufferingMixin`.
        additional_config: What vLLM hands to each process that it spawns. The core
            adds its own values.
        kv_cache_bytes: Size of the KV cache on CPU; None if vLLM computes on GPUs.
    """
    check_vllm_interface()
    patch_vllm_for_cpu()
    additional_config[GATES_KEY] = args.pop("return_gates", False)
    if additional_config[GATES_KEY]:
        record_gates()
    additional_config[CHOSEN_CACHE_KEY] = "kv_cache_memory_bytes" in args
    if kv_cache_bytes is not None:
        args = (
            declare_engine_args(kv_cache_memory_bytes=kv_cache_bytes, block_size=CPU_BLOCK_TOKENS)
            | args
        )
    masks = args.pop("return_sampling_mask", False)
    with pause_garbage_collector():
        config = AsyncEngineArgs(**args).create_engine_config()
        executor = Executor.get_class(config)
    if kv_cache_bytes is not None and not args.keys() & {"ir_op_priority", "kernel_config"}:
        prefer_norm_kernels(config)
    gc.freeze()
    # vLLM's own check would refuse the supports that `MaskRecordingSampler` adds to the
    # first model runner.
    config.model_config.return_sampling_mask = masks and config.use_v2_model_runner
    additional_config.update({**config.additional_config, SAMPLING_MASK_KEY: masks})
    config.additional_config = additional_config
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = (
            BufferingAsyncScheduler if scheduler.async_scheduling else BufferingScheduler
        )
    EngineCoreProc.r3_tool_calls = VllmToolParser(args["model"])
    EngineCoreProc.run_engine_core(
        vllm_config=config,
        local_client=True,
        handshake_address=address,
        executor_class=executor,
        log_stats=True,
    )
