"""Checks of a plan before a start: settings that would fail late, during the run."""

from __future__ import annotations

import math

from r3async.config import Config, ConfigError
from r3async.data.model_shape import ModelShape
from r3async.schedule.groups import TRAJECTORY_HEADER_BYTES

from .layouts import recommend_layout
from .memory import GIB
from .plan import RunPlan, compute_free_kv_bytes, engine_memory_share


def check_routes(config: Config, shape: ModelShape) -> None:
    """Check that a model whose routes are replayed has routers."""
    if config.routing.replay != "off" and shape.routing_shape is None:
        raise ConfigError(
            f'{shape.name} has no MoE layer to replay routes in: set `routing.replay` = "off"'
        )


def check_positions(config: Config, shape: ModelShape) -> None:
    """Check that an episode may not be longer than the model has positions."""
    total = config.episode.max_total_tokens
    if shape.max_positions and total > shape.max_positions:
        raise ConfigError(
            f"`episode.max_total_tokens` = {total} is more than the {shape.max_positions} "
            f"positions of {shape.name}: set episode.max_total_tokens={shape.max_positions} "
            f"episode.max_prompt_tokens={shape.max_positions // 2}"
        )


def check_message_size(config: Config, plan: RunPlan) -> None:
    """Check that the longest trajectory fits into one message."""
    largest = config.episode.max_total_tokens * plan.wire_bytes_per_token + TRAJECTORY_HEADER_BYTES
    if largest > config.transport.max_message_bytes:
        raise ConfigError(
            f"`transport.max_message_bytes` = {config.transport.max_message_bytes} is less than a "
            f"trajectory may have: set it to at least {largest}"
        )


def _list_remedies(config: Config) -> str:
    """Return what makes a rank smaller, and is not set yet."""
    remedies = ["raise `learner.parallel`"]
    if config.learner.recompute != "full":
        remedies.append("set `learner.recompute` = full")
    remedies.append("lower `learner.max_tokens_per_micro_batch`")
    return f"{', '.join(remedies[:-1])}, or {remedies[-1]}"


def check_gpu_memory(config: Config, shape: ModelShape, plan: RunPlan) -> None:
    """Check that ranks and engines fit into GPUs of `cluster.gpu_gib`, by the plan's estimates."""
    if plan.device != "GPU":
        return
    capacity = config.cluster.gpu_gib * GIB
    if plan.shared:
        _check_shared_gpus(config, plan, capacity)
    if plan.rank.total_bytes > capacity:
        raise ConfigError(
            f"a rank of the learner needs {plan.rank.total_bytes / GIB:.0f} GiB (weights and "
            f"optimizer {(plan.rank.weights + plan.rank.optimizer) / GIB:.0f}, activations "
            f"{plan.rank.activations / GIB:.0f}"
            f"{f', teacher {plan.rank.teacher / GIB:.0f}' if plan.rank.teacher else ''}) of "
            f"`cluster.gpu_gib` = {config.cluster.gpu_gib:g}: {_list_remedies(config)}. "
            f"{recommend_layout(shape, config, plan.tokens_per_step)}"
        )
    engine = plan.engine
    cache = config.generator.engine_args.get("kv_cache_memory_bytes")
    if cache and (engine.bytes_beside_cache + int(cache) > capacity):
        raise ConfigError(
            f"`generator.engine_args.kv_cache_memory_bytes` = {int(cache) / GIB:.0f} GiB: an "
            f"engine takes {engine.bytes_beside_cache / GIB:.0f} GiB beside it, of a GPU of "
            f"`cluster.gpu_gib` = {config.cluster.gpu_gib:g}: lower it"
        )
    if compute_free_kv_bytes(config, engine) <= engine.kv_per_episode:
        held = engine.weights + engine.adapters
        what = "weights and adapters" if engine.adapters else "weights"
        raise ConfigError(
            f"an engine's {what} take {held / GIB:.0f} GiB of a GPU of "
            f"`cluster.gpu_gib` = {config.cluster.gpu_gib:g}, its steps and graphs "
            f"{(engine.step + engine.graphs) / GIB:.0f}, and there are no free bytes for one "
            "episode: raise `generator.engine_args.tensor_parallel_size`"
            + (
                ", or lower `max_num_batched_tokens` there"
                if "max_num_batched_tokens" in config.generator.engine_args
                else ""
            )
        )


def _check_shared_gpus(config: Config, plan: RunPlan, capacity: float) -> None:
    """Check that a rank and the engines on its GPU fit together."""
    ranks = config.learner.parallel.world_size
    engines = -(-config.generator.count // ranks)
    share = engine_memory_share(config)
    if plan.rank.total_bytes + engines * share * capacity > capacity:
        most = max(0.0, (1 - plan.rank.total_bytes / capacity) / engines)
        raise ConfigError(
            f"a rank of the learner needs {plan.rank.total_bytes / GIB:.0f} GiB of a GPU of "
            f"`cluster.gpu_gib` = {config.cluster.gpu_gib:g}, and {engines} engine(s) beside it "
            f"take {share:.0%} each: set `generator.engine_args.gpu_memory_utilization` to at most "
            f"{math.floor(100 * most) / 100:g}, or give engines GPUs of their own "
            '(`generator.colocate` = "off")'
        )
