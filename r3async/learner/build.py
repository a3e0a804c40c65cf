"""The learner that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from r3async.config import Config
from r3async.world import Files
from r3async.world.real import REAL

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


def build_learner(config: Config, model_path: Path, files: Files = REAL.files) -> LearnerBackend:
    """Load the model with `learner.backend`; nothing of the other backend is imported. Collective; raises `LearnerError`.

    `files`: where the scripted one finds it.
    """
    if config.learner.backend == "torch":
        from r3async.learner.torch.backend import TorchLearner

        return TorchLearner.load(config, model_path)
    if config.learner.backend == "scripted":
        from r3async.learner.scripted import ScriptedLearner

        return ScriptedLearner.load(config, model_path, files)
    from r3async.learner.megatron.backend import MegatronLearner

    return MegatronLearner.load(config, model_path)
