"""Which of vLLM's engine arguments belong to r3async, and what to set in their place.

The engine takes what it sets itself from here (`ours`), so it cannot set a key that the configuration does not refuse, or name
as one that `generator.engine_args` may replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from r3async.config.section import ConfigError

_ONE_ENGINE = "a generator has one engine: set `generator.count`"
_FROM_DRAFTS = "log-probs, routes and versions must come from the forward pass that sampled the token, not from a draft"
_SAMPLING = "tokens are sampled with `episode.temperature` and nothing else, for that is what the learner computes"

OWNED = {
    "model": "set `model.path`",
    "dtype": "set `generator.dtype`",
    "seed": "set `seed`: each generator's engine has one of its own, made from it",
    "max_model_len": "set `episode.max_total_tokens`",
    "max_num_seqs": "set `generator.concurrency`",
    "enable_return_routed_experts": "routes are recorded for every MoE model; `routing.replay` says what is done with them",
    "logprobs_mode": "rollout log-probs must be those of the distribution that was sampled from, after temperature",
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "logits_processors": _SAMPLING,
    "skip_tokenizer_init": "the engine takes tokens and gives tokens; templates and text are `episode.template_args`'s",
    "worker_extension_cls": "weights are installed, and confirmed, by r3async's own",
    "weight_transfer_config": "set `weights.backend`",
    "distributed_executor_backend": "an engine's processes are children of its generator, and end with it",
    "pipeline_parallel_size": "set `generator.engine_args.tensor_parallel_size`: routes of pipeline stages are not put together",
    "data_parallel_size": _ONE_ENGINE,
    "data_parallel_backend": _ONE_ENGINE,
    "speculative_config": _FROM_DRAFTS,
    "spec_method": _FROM_DRAFTS,
    "spec_model": _FROM_DRAFTS,
    "spec_tokens": _FROM_DRAFTS,
    "enable_lora": "every version replaces all weights of the model",
}
"""Refused in `generator.engine_args`, with the setting to use instead or the reason."""

DEFAULTS = frozenset({"enforce_eager", "disable_log_stats", "use_tqdm_on_load", "kv_cache_memory_bytes"})
"""What r3async sets and `generator.engine_args` may replace."""


def ours(**values: Any) -> dict[str, Any]:
    """Arguments that the engine sets itself. Raises `KeyError` for one that is neither refused nor a default here."""
    for name in values:
        if name not in OWNED and name not in DEFAULTS:
            raise KeyError(f"{name} is not in r3async.config.engine_args")
    return values


def check_engine_args(args: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a key of `generator.engine_args` that is not the user's to set."""
    if refused := [f"`generator.engine_args.{name}` cannot be set: {OWNED[name]}" for name in args if name in OWNED]:
        raise ConfigError("; ".join(refused))
