"""The multi-turn rollout loop, token-in/token-out, and the function that builds its
configured engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from r3async.config import Config
from r3async.schedule.run_ahead import count_served_versions
from r3async.world import World
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.rollout.engine import Engine


def build_engine(config: Config, model_path: str, seed: int, world: World = REAL_WORLD) -> Engine:
    """Return the configured engine, not yet started. `seed` is the sampling seed.

    Raises `ValueError` for unknown `generator.engine_args`.
    """
    settings = config.generator
    # Imported here: each engine needs packages that the other does without.
    if settings.engine == "scripted":
        from r3async.rollout.scripted import build_scripted_engine

        gates = config.routing.gates == "rollout"
        return build_scripted_engine(model_path, world, has_gates=gates, **settings.engine_args)
    from r3async.rollout.vllm.engine import build_vllm_engine

    return build_vllm_engine(
        config,
        model_path,
        seed,
        adapter_slots=count_served_versions(config.schedule),
        record_sampling_masks=config.episode.truncates_sampling,
    )
