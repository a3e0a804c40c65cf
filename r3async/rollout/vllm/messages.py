"""Messages to and from vLLM's engine core, declared without vLLM, whose import takes nine seconds
and half a gigabyte.

The classes here have the fields of vLLM's classes, in their order, as far as they are used.
`vllm.core.check_vllm_interface` compares them when the core starts.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec
import numpy as np

from r3async.rollout.engine import EngineError

ADD_MESSAGE = b"\x00"
ABORT_MESSAGE = b"\x01"
CALL_MESSAGE = b"\x03"
"""Kinds of messages to the core."""
CORE_DEAD_MESSAGE = b"ENGINE_CORE_DEAD"
"""The core's last message when it fails."""
RAW_VIEW_CODE = 3
"""Code of the msgpack extension for the bytes of a small array."""
MAX_TEMPERATURE = 2.0
"""Highest temperature that vLLM accepts."""


class CoreFinishReason(enum.IntEnum):
    """The reason for which a request ended."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class CoreLogprobs(msgspec.Struct, array_like=True, gc=False):
    """The log-probs of sampled tokens, `[n]`, or of those and of the most likely ones in their
    places, `[n, 1 + k]`, as of a prompt."""

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray


class CoreSamplingMask(msgspec.Struct, array_like=True, gc=False):
    """The supports of the new tokens.

    In place of token ids it has the bytes of `SupportSets`, with a set for each token.
    """

    token_ids: np.ndarray


class CorePrefillStats(msgspec.Struct, gc=False):
    num_cached_tokens: int = 0


class CoreEvent(msgspec.Struct, gc=False):
    type: int


STOP_STRINGS_KEY = "r3async_stop"
"""Key of the stop strings in a request's `extra_args`. vLLM's own stop strings need text, which the
core does not have."""

PREEMPTED_EVENT = 3
"""Event type of a preemption."""


class CoreOutput(msgspec.Struct, array_like=True, gc=False):
    """An output of one request that left the core; see `vllm.core.AnswerBuffer`."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: CoreLogprobs | None = None
    new_prompt_logprobs_tensors: CoreLogprobs | None = None
    pooling_output: Any = None
    finish_reason: CoreFinishReason | None = None
    stop_reason: Any = None
    events: list[CoreEvent] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: CorePrefillStats | None = None
    routed_experts: np.ndarray | None = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: CoreSamplingMask | None = None


class CoreSchedulerStats(msgspec.Struct, gc=False):
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0


class CoreCallResult(msgspec.Struct, array_like=True, gc=False):
    """The result of a call. `result` has the type, which is None, and then the value."""

    call_id: int
    failure_message: str | None = None
    result: Any = None


class CoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """A message from the core."""

    engine_index: int = 0
    outputs: list[CoreOutput] = []
    scheduler_stats: CoreSchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: CoreCallResult | None = None


class CoreSamplingParams(msgspec.Struct, omit_defaults=True, gc=False):
    """The fields of vLLM's `SamplingParams` that are set here; the core adds its own defaults."""

    temperature: float
    stop_token_ids: list[int]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int = 0
    routed_experts_prompt_start: int = 0
    detokenize: bool | None = None
    ignore_eos: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    extra_args: dict[str, Any] | None = None
    seed: int | None = None


class CoreAdapterRequest(msgspec.Struct, array_like=True, gc=False):
    """The adapters under which a request runs, in the form of vLLM's `LoRARequest`."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class CoreRequest(msgspec.Struct, array_like=True, gc=False):
    """A request in the form of vLLM's `EngineCoreRequest`."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: None
    sampling_params: CoreSamplingParams
    pooling_params: None
    arrival_time: float
    lora_request: CoreAdapterRequest | None
    cache_salt: str | None
    data_parallel_rank: None


class CoreReady(msgspec.Struct):
    """The message of a core that has started."""

    max_model_len: int
    block_size: int


class EngineLoad:
    """The newest figures of the engine's load.

    Attributes:
        kv_cache_usage: Share of the blocks that hold data of a running request, 0..1.
        waiting: Number of requests in the queue.
        preemptions: Number of requests that were put back into the queue for lack of blocks.
    """

    def __init__(self) -> None:
        self.kv_cache_usage = 0.0
        self.waiting = self.preemptions = 0

    def update_from(self, outputs: CoreOutputs) -> None:
        stats = outputs.scheduler_stats
        if stats is not None:
            self.kv_cache_usage = float(stats.kv_cache_usage)
            self.waiting = int(stats.num_waiting_reqs)
        for output in outputs.outputs:
            if output.events:
                self.preemptions += sum(event.type == PREEMPTED_EVENT for event in output.events)

    def as_metrics(self) -> dict[str, float]:
        return {
            "kv_cache_usage": self.kv_cache_usage,
            "waiting": self.waiting,
            "preemptions": self.preemptions,
        }


class CoreOutputDecoder:
    """A decoder of messages from the core. Arrays are views of the frames in which they arrived."""

    def __init__(self) -> None:
        self._frames: list[Any] = []
        self._decoder = msgspec.msgpack.Decoder(
            CoreOutputs, dec_hook=self._decode_array, ext_hook=_decode_raw_view
        )

    def decode(self, frames: list[Any]) -> CoreOutputs:
        """Decode a message. The first frame has the message, each further one an array."""
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._frames = []

    def _decode_array(self, kind: type, encoded: Any) -> np.ndarray:
        dtype, shape, data = encoded
        return np.frombuffer(self._frames[data] if isinstance(data, int) else data, dtype).reshape(
            shape
        )


def _decode_raw_view(code: int, data: memoryview) -> memoryview:
    if code != RAW_VIEW_CODE:
        raise EngineError(f"the engine sent a value of an unknown kind ({code})")
    return data


def build_sampling_params(
    max_tokens: int,
    temperature: float,
    stop_token_ids: tuple[int, ...] = (),
    *,
    routes_from: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop_strings: tuple[str, ...] = (),
    seed: int | None = None,
) -> CoreSamplingParams:
    """Return the sampling parameters of a request.

    Raises `EngineError` for an invalid value, which would end everything in the core.
    """
    if not (math.isfinite(temperature) and 0.0 <= temperature <= MAX_TEMPERATURE):
        raise EngineError(f"temperature must be in [0, {MAX_TEMPERATURE:g}], and is {temperature}")
    if not (0.0 < top_p <= 1.0 and top_k >= 0 and 0.0 <= min_p <= 1.0):
        raise EngineError(
            f"top_p = {top_p}, top_k = {top_k} and min_p = {min_p} have no meaning together"
        )
    return CoreSamplingParams(
        temperature,
        list(stop_token_ids),
        logprobs,
        prompt_logprobs,
        max_tokens,
        routes_from,
        detokenize=False,
        ignore_eos=True,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        extra_args={STOP_STRINGS_KEY: list(stop_strings)} if stop_strings else None,
        seed=seed,
    )


def build_adapter_request(version: int, path: str = "loaded") -> CoreAdapterRequest:
    """Return the adapters of a version of the policy. vLLM has loaded them before any request, so
    it does not read `path`."""
    return CoreAdapterRequest(f"version {version}", version + 1, path)
