"""A learner without a run around it."""

from __future__ import annotations

from pathlib import Path

from r3async.actors.places import take_places
from r3async.actors.ranked import RankedLearner, load_learner
from r3async.actors.ranks import LocalLearner
from r3async.actors.supervise import connect
from r3async.config import Config
from r3async.world import World


def load_learner_alone(config: Config, model_path: Path, run_dir: Path, world: World) -> LocalLearner | RankedLearner:
    """For who trains without engines: with several ranks, on a Ray cluster that is joined, or started."""
    if config.learner.parallel.world == 1:
        return load_learner(config, model_path, run_dir, world=world)
    connect(world, config)
    return load_learner(config, model_path, run_dir, take_places(world, config, engines=False).ranks, world)
