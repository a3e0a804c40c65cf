"""vLLM's load, as it reports it: how full its KV cache is, what waits, what it had to preempt."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger


class EngineLoad(PrometheusStatLogger):
    """Keeps the newest figures and publishes nothing.

    vLLM makes one itself, from this class, and adds a logger to Prometheus of its own unless it is given one: hence the base
    class, of which nothing is used. `record` is called once a step, on the event loop.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None):
        self.kv_cache_usage = 0.0
        """Share of the blocks that hold anything of a running request: 0..1."""
        self.waiting = 0
        """Requests in the engine's queue."""
        self.preemptions = 0
        """Requests that were put back into the queue for want of blocks, since the start."""

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
            self.waiting = int(scheduler_stats.num_waiting_reqs)
        if iteration_stats is not None:
            self.preemptions += int(iteration_stats.num_preempted_reqs)

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {
            "kv_cache_usage": self.kv_cache_usage,
            "waiting": self.waiting,
            "preemptions": self.preemptions,
        }
