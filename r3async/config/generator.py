"""The configuration section `generator`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from r3async.config.section import PositiveFloat, PositiveInt, Section

UpdateHandling = Literal["keep", "recompute", "drain"]


class GeneratorConfig(Section):
    count: PositiveInt = 1
    """Generators, each with an engine of its own. `r3async scale` changes it
    while the run trains."""
    concurrency: PositiveInt = 64
    """Maximum number of episodes that one generator plays at once."""
    concurrency_min: PositiveInt = 1
    """Minimum number of episodes that one generator plays at once. Between the two, the number
    follows the fill of the engine's KV cache. Set it to `concurrency` to keep the number fixed."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """Rollout engine. `scripted`: random letters without a model, for rehearsing failures; with
    `weights.probe=false` or `learner.backend="scripted"`. Nothing is learnt."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the engine's weights and arithmetic."""
    threads: PositiveInt = 1
    """OpenMP threads of one engine on CPU. More than one is slower beside a learner
    on the same cores."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache of one engine on CPU, in GiB."""
    on_update: UpdateHandling = "keep"
    """Handling of running requests when new weights arrive. `keep`: they continue with the keys
    and values of the old weights. `recompute`: keys and values are computed again; tokens,
    log-probs and routes so far stay. `drain`: the weights wait for them, and new requests wait
    for the weights."""
    colocate: Literal["off", "share"] = "off"
    """Placement of engines on GPUs. `off`: GPUs of their own. `share`: those of the learner's
    ranks where there are too few for both; `engine_args.gpu_memory_utilization` is an
    engine's part of one."""
    max_restarts: int = 8
    """Times a generator is restarted before the run continues without it. Without the last
    one the run stops."""
    start_timeout: PositiveFloat = 600.0
    """Seconds that a generator may take to load its engine."""
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments passed unchanged to vLLM's AsyncEngineArgs. Those are refused that r3async sets
    itself or relies on, and those whose effect on memory and log-probs is neither planned nor
    probed. The scripted engine knows `token_seconds` and `install_seconds`."""

    def check_values(self) -> None:
        if self.concurrency_min > self.concurrency:
            raise ValueError("`concurrency_min` must not be more than `concurrency`")
