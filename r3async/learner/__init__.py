"""What other packages need of the learner without loading torch: its results, its errors, and how a backend is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from r3async.config import Config
from r3async.data.records import Trajectory
from r3async.world import Files
from r3async.world.real import REAL

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


class LearnerError(RuntimeError):
    """The backend cannot train this model or this batch; the message says why, and which setting to change."""


class Unsound(NamedTuple):
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

    `metrics`: see `figures.result_of`. By MoE layer of the whole model: `layer_agreement` float32 `[L]`, the share of
    recorded tokens whose own top-k set is the recorded one (0 if none is recorded); `expert_load` int64 `[L, experts]`,
    tokens sent to each expert, padding not counted. `traces`: of this rank, if they were asked for. `drift` float64 `[n, 2]`: see
    `figures.drift_sums`; of no row where nothing measured it.
    """

    metrics: dict[str, float]
    layer_agreement: np.ndarray
    expert_load: np.ndarray
    traces: list[RouteTrace] = []
    drift: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((0, 2)))


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
