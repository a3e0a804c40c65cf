"""Arguments of vLLM (`generator.engine_args`): those that r3async sets, and those it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3async.config.section import ConfigError, did_you_mean

_ONE_ENGINE_REASON = "a generator has one engine: set `generator.count`"
_DRAFT_REASON = (
    "log-probs, routes and versions must come from the forward pass that sampled the token, "
    "not from a draft"
)
_DTYPE_REASON = (
    "engines hold what the learner trains in `generator.dtype`: neither the plan nor the "
    "installation of weights knows of quantized ones"
)
_OFFLOAD_REASON = (
    "new weights are installed on the device: raise `generator.engine_args.tensor_parallel_size`"
)
_TRANSFER_REASON = (
    "keys, values and routes of older weights must end with them, and a store of "
    "others would keep them"
)
_SAMPLING_REASON = (
    "set `episode.temperature`, `top_p`, `top_k` or `min_p`: the learner computes the "
    "same distribution"
)
_ADAPTER_REASON = 'set `learner.lora.deliver` = "adapter": adapters are versions of the policy'

OWNED_ENGINE_ARGS = {
    "model": "set `model.path`",
    "dtype": "set `generator.dtype`",
    "language_model_only": (
        "text alone is generated and trained, and versions have no weights of other models"
    ),
    "seed": "set `seed`: each generator's engine has one of its own, made from it",
    "max_model_len": "set `episode.max_total_tokens`",
    "max_num_seqs": "set `generator.concurrency`",
    "enable_return_routed_experts": (
        "routes are recorded for every MoE model; `routing.replay` says what is done with them"
    ),
    "return_sampling_mask": "`episode.top_p`, `top_k` and `min_p` turn it on",
    "logprobs_mode": (
        "rollout log-probs must be those of the distribution that was sampled from, "
        "after temperature"
    ),
    "generation_config": _SAMPLING_REASON,
    "override_generation_config": _SAMPLING_REASON,
    "logits_processors": _SAMPLING_REASON,
    "skip_tokenizer_init": (
        "the engine takes tokens and gives tokens; templates and text are `episode.template_args`'s"
    ),
    "worker_extension_cls": "weights are installed, and confirmed, by r3async's own",
    "scheduler_cls": "answers leave the engine whole, by a scheduler of r3async's own",
    "disable_log_stats": "the engine's load is among the metrics of the run",
    "weight_transfer_config": "set `weights.backend`",
    "distributed_executor_backend": (
        "an engine's processes are children of its generator, and end with it"
    ),
    "pipeline_parallel_size": (
        "set `generator.engine_args.tensor_parallel_size`: routes of pipeline stages are "
        "not put together"
    ),
    "data_parallel_size": _ONE_ENGINE_REASON,
    "data_parallel_backend": _ONE_ENGINE_REASON,
    "speculative_config": _DRAFT_REASON,
    "spec_method": _DRAFT_REASON,
    "spec_model": _DRAFT_REASON,
    "spec_tokens": _DRAFT_REASON,
    "quantization": _DTYPE_REASON,
    "quantization_config": _DTYPE_REASON,
    "enable_lora": _ADAPTER_REASON,
    "max_loras": _ADAPTER_REASON,
    "max_cpu_loras": _ADAPTER_REASON,
    "max_lora_rank": _ADAPTER_REASON,
    "lora_target_modules": _ADAPTER_REASON,
    "cpu_offload_gb": _OFFLOAD_REASON,
    "offload_backend": _OFFLOAD_REASON,
    "kv_offloading_size": _TRANSFER_REASON,
    "kv_transfer_config": _TRANSFER_REASON,
    "num_gpu_blocks_override": (
        "set `generator.engine_args.kv_cache_memory_bytes`, which is planned"
    ),
    "enable_eplb": "weights are installed where the experts were at the start",
    "kv_sharing_fast_prefill": "log-probs of a prompt are needed, and it leaves them out",
    "decode_context_parallel_size": (
        "routes are recorded by workers that have all tokens: set `tensor_parallel_size`"
    ),
    "prefill_context_parallel_size": (
        "routes are recorded by workers that have all tokens: set `tensor_parallel_size`"
    ),
    "nnodes": "an engine's processes are on one host",
}
"""Arguments refused in `generator.engine_args`, each with the setting to use instead or the reason.
The engine takes what it sets itself from `declare_engine_args`, so it cannot set a key that is
neither refused here nor named in `DEFAULT_ENGINE_ARGS`."""

DEFAULT_ENGINE_ARGS = frozenset(
    {"enforce_eager", "use_tqdm_on_load", "kv_cache_memory_bytes", "block_size", "load_format"}
)
"""Arguments that r3async sets and `generator.engine_args` may replace."""

PLANNED_ENGINE_ARGS = frozenset(
    {
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "max_num_batched_tokens",
        "kv_cache_dtype",
        "enable_prefix_caching",
        "mamba_cache_mode",
        "mamba_ssm_cache_dtype",
        *DEFAULT_ENGINE_ARGS,
    }
)
"""Arguments whose memory is planned (`tools.memory`), and those of `DEFAULT_ENGINE_ARGS`."""

COMPUTING_ENGINE_ARGS = frozenset(
    """
    all2all_backend attention_backend attention_config compilation_config disable_cascade_attn disable_custom_all_reduce
    disable_sliding_window enable_expert_parallel enable_flashinfer_autotune gdn_prefill_backend hf_overrides
    ir_op_priority kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
    linear_backend mamba_backend mamba_cache_dtype mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm model_impl
    moe_backend optimization_level performance_mode sparse_indexer_topk_backend trust_remote_code use_replayssm
    """.split()  # noqa: SIM905
)
"""Arguments that change what the engine computes, or how. The learner does not know them: only
the probe compares."""

NEUTRAL_ENGINE_ARGS = frozenset(
    """
    additional_config async_scheduling code_revision cudagraph_capture_sizes cudagraph_metrics
    disable_hybrid_kv_cache_manager distributed_timeout_seconds download_dir enable_chunked_prefill
    enable_ep_weight_filter expert_placement_strategy fail_on_environ_validation hf_token
    ignore_patterns jit_monitor_mode kv_cache_metrics limit_mm_per_prompt
    long_prefill_token_threshold mamba_block_size max_cudagraph_capture_size max_logprobs
    max_num_scheduled_tokens max_parallel_loading_workers model_loader_extra_config numa_bind numa_bind_cpus
    numa_bind_nodes otlp_traces_endpoint prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo profiler_config pt_load_map_location revision safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl scheduling_policy
    shutdown_timeout skip_mm_profiling use_fp64_gumbel watermark
    """.split()  # noqa: SIM905
)
"""Arguments that schedule, load or observe, and change neither the planned memory nor
what is computed."""

UNWANTED_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM's CPU build brings. They often do not fit its torch, and then neither vLLM nor
transformers imports. `make install` removes them on CPU; see `rollout/vllm/engine_packages.py`."""

CACHE_DTYPE_BYTES = {"auto": 0, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of a key's or value's element by `kv_cache_dtype`; 0 stands for `generator.dtype`."""


def declare_engine_args(**values: Any) -> dict[str, Any]:
    """Return the arguments that the engine sets itself. Raises `KeyError` for one that is neither
    refused nor a default here."""
    for name in values:
        if name not in OWNED_ENGINE_ARGS and name not in DEFAULT_ENGINE_ARGS:
            raise KeyError(f"{name} is not in r3async.config.vllm_arguments")
    return values


def check_engine_args(args: Mapping[str, Any], probe: bool = True) -> None:
    """Raise `ConfigError` for a key of `generator.engine_args` that the user may not set.

    Args:
        probe: Whether log-probs of engine and learner are compared (`weights.probe`).
    """
    allowed = PLANNED_ENGINE_ARGS | COMPUTING_ENGINE_ARGS | NEUTRAL_ENGINE_ARGS
    refused = []
    for name in args:
        if name in OWNED_ENGINE_ARGS:
            refused.append(
                f"`generator.engine_args.{name}` cannot be set: {OWNED_ENGINE_ARGS[name]}"
            )
        elif name not in allowed:
            hint = did_you_mean(
                name, allowed, "r3async/config/vllm_arguments.py lists those that can", cutoff=0.7
            )
            refused.append(
                f"`generator.engine_args.{name}` cannot be set: what it changes in memory, "
                f"log-probs or routes is unknown; {hint}"
            )
        elif name in COMPUTING_ENGINE_ARGS and not probe:
            refused.append(
                f"`generator.engine_args.{name}` changes what an engine computes, and only the "
                "probe compares that with the learner: set weights.probe=true"
            )
    if "head_dtype" in (args.get("hf_overrides") or {}):
        refused.append(
            "`generator.engine_args.hf_overrides.head_dtype` cannot be set: it would change the "
            "engine's logits and not the learner's. `model.head_dtype` sets both"
        )
    dtype = str(args.get("kv_cache_dtype", "auto"))
    if dtype not in CACHE_DTYPE_BYTES:
        refused.append(
            f"`generator.engine_args.kv_cache_dtype` = {dtype!r}: its memory is not planned; these "
            f"are: {', '.join(CACHE_DTYPE_BYTES)}"
        )
    if refused:
        raise ConfigError("; ".join(refused))
