"""A learner without a run around it."""

from __future__ import annotations

from pathlib import Path

from r3async.actors.places import reserve_placements
from r3async.actors.ranked import RemoteRanks, load_learner
from r3async.actors.ranks import LocalRank
from r3async.actors.supervise import connect_cluster
from r3async.config import Config
from r3async.world import World


def load_standalone_learner(config: Config, model_path: Path, run_dir: Path, world: World) -> LocalRank | RemoteRanks:
    """For who trains without engines: with several ranks, on a Ray cluster that is joined, or started."""
    if config.learner.parallel.world_size == 1:
        return load_learner(config, model_path, run_dir, world=world)
    connect_cluster(world, config)
    return load_learner(config, model_path, run_dir, reserve_placements(world, config, with_engines=False).ranks, world)
