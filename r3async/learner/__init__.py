"""What other packages need of the learner without loading torch: its results, its errors, and how a backend is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.tokens import Trajectory
from r3async.world import Files
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


class LearnerError(RuntimeError):
    """The backend cannot train this model or this batch; the message says why, and which setting to change."""


class RejectedTrajectory(NamedTuple):
    """A trajectory that arrived, and that the step cannot train."""

    trajectory: Trajectory
    reason: str


class RouteTrace(msgspec.Struct, frozen=True):
    """What one rank's routers did with its tokens of one micro-batch, as they did it.

    The micro-batch is `sample_ids` laid end to end, sample `s` in rows `cu_seqlens[s]:cu_seqlens[s + 1]` (int32 `[S + 1]`).
    Of its rows this rank has `first .. first + n` and of its MoE layers `columns` (0-based). `own` uint16 `[n, R, K]`: the
    experts that each router would have chosen, in the order of their scores; `used`: those that it sent the token to.
    `prefixes`: of samples that share rows, see `MicroBatch`.
    `logprobs` float32 `[N]`, of all `N = cu_seqlens[-1]` rows, from a rank that computed the loss: the learner's of each
    trained token, before the step, at its sample's temperature; NaN for the others.
    """

    sample_ids: tuple[str, ...]
    cu_seqlens: np.ndarray
    first: int
    columns: list[int]
    own: np.ndarray
    used: np.ndarray
    logprobs: np.ndarray | None = None
    prefixes: np.ndarray | None = None


class MinibatchResult(msgspec.Struct, frozen=True):
    """What training one minibatch did, over all ranks: one optimizer step.

    `metrics`: see `metrics.build_minibatch_result`. By MoE layer of the whole model: `layer_agreement` float32 `[L]`, the
    share of recorded tokens whose own top-k set is the recorded one (0 if none is recorded); `expert_load` int64 `[L, experts]`,
    tokens sent to each expert, padding not counted. `traces`: of this rank, if they were asked for. `drift` float64 `[3, n, 2]`:
    `metrics.sum_drift` of all trained tokens, of the probed ones, and of these with the routers' own choice; of no row where
    nothing measured it. `gap_moments` float64 `[5]`: `metrics.compute_gap_moments`. `digests`: of its stages, with
    `observe.record`.
    """

    metrics: dict[str, float]
    layer_agreement: np.ndarray
    expert_load: np.ndarray
    traces: list[RouteTrace] = []
    drift: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((3, 0, 2)))
    gap_moments: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(5))
    digests: dict[str, int] = {}


def sum_stage_digests(digests: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Of all ranks (`MinibatchResult.digests`), modulo 2^64."""
    return {stage: sum(each[stage] for each in digests) % 2**64 for stage in digests[0]}


def build_learner(
    config: Config, model_path: Path, files: Files = REAL_WORLD.files, *, frozen: bool = False
) -> LearnerBackend:
    """Load the model with `learner.backend`; nothing of the other backend is imported. Collective; raises `LearnerError`.

    `files`: where the scripted one finds it. A `frozen` one is only asked for log-probs: it has no optimizer's memory.
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
    """From now on torch uses kernels that give the same bits at every call, in the whole process, and raises for an operator that
    has none. Before the first product on a GPU: cuBLAS reads its variable then (docs.nvidia.com/cuda/cublas, "Results
    reproducibility"). One that is set already stays."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # No kernel reads what it has not written; to fill it costs a pass over the memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
