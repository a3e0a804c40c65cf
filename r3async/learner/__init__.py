"""What other packages need of the learner: its results, its error, and the function that
loads its backend.

Importing this module does not load torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from r3async.config import Config
from r3async.learner.results import (
    LearnerError,
    MinibatchResult,
    RejectedTrajectory,
    RouteTrace,
    sum_stage_digests,
)
from r3async.world import Files
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend

__all__ = [
    "LearnerError",
    "MinibatchResult",
    "RejectedTrajectory",
    "RouteTrace",
    "build_learner",
    "require_deterministic_kernels",
    "sum_stage_digests",
]


def build_learner(
    config: Config, model_path: Path, files: Files = REAL_WORLD.files, *, frozen: bool = False
) -> LearnerBackend:
    """Load the model with `learner.backend`, importing nothing of the other backends.

    Collective. Raises `LearnerError`.

    Args:
        files: The file system in which the scripted backend finds the model.
        frozen: The learner is used only for log-probs: its optimizer takes no memory.
    """
    if config.learner.deterministic:
        require_deterministic_kernels()
    if config.learner.backend == "torch":
        from r3async.learner.torch.backend import TorchLearner

        return TorchLearner.from_pretrained(config, model_path, frozen=frozen)
    if config.learner.backend == "scripted":
        from r3async.learner.scripted import ScriptedLearner

        return ScriptedLearner.from_pretrained(config, model_path, files)
    from r3async.learner.megatron.backend import MegatronLearner

    return MegatronLearner.from_pretrained(config, model_path, frozen=frozen)


def require_deterministic_kernels() -> None:
    """Make torch use kernels that give the same bits at every call, in the whole
    process from now on.

    Torch raises for an operator that has no such kernel. Call this before the first product on a
    GPU: cuBLAS reads its variable then (docs.nvidia.com/cuda/cublas, "Results reproducibility"). A
    variable that is already set keeps its value.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # No kernel reads memory that it has not written, and filling it costs a pass over the memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
