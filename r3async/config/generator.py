"""The configuration section `generator`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from r3async.config.section import PositiveFloat, PositiveInt, Section

UpdateHandling = Literal["keep", "recompute", "drain"]


class GeneratorConfig(Section):
    count: PositiveInt = 1
    """Generators, each with an engine. `r3async scale` changes it while the run trains."""
    concurrency: PositiveInt = 64
    """Maximum number of episodes that one generator runs at once. Below it, the number follows
    the KV cache's fill."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """Rollout engine. `scripted`: random letters without a model; with `weights.probe=false` or
    `learner.backend="scripted"`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the engine's weights and computation."""
    threads: PositiveInt = 1
    """OpenMP threads of one engine on CPU: more are slower if they share cores with a learner."""
    kv_cache_gib: PositiveFloat = 1.0
    """Maximum KV cache of one engine on CPU, in GiB."""
    on_update: UpdateHandling = "keep"
    """What happens to running requests when new weights arrive
    (docs/weights.md#generatoron_update)."""
    colocate: Literal["off", "share"] = "off"
    """Where engines run. `off`: on their own GPUs. `share`: on the learner's if there are too
    few for both; `engine_args.gpu_memory_utilization` is an engine's part of one."""
    max_restarts: int = 8
    """Times a generator is restarted before the run continues without it."""
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments for vLLM's AsyncEngineArgs (docs/weights.md#generatorengine_args). The scripted
    engine takes `token_seconds` and `install_seconds`."""
