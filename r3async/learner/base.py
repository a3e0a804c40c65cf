"""What the learner's actors and its backends tell each other. Loads no torch."""

from __future__ import annotations

import msgspec
import numpy as np


class LearnerError(RuntimeError):
    """The backend cannot train this model or this batch; the message says why, and which setting to change."""


class RouteTrace(msgspec.Struct, frozen=True):
    """What one rank's routers did with its tokens of one micro-batch, as they did it.

    The micro-batch is `sample_ids` laid end to end, sample `s` in rows `cu_seqlens[s]:cu_seqlens[s + 1]` (int32 `[S + 1]`).
    Of its rows this rank has `first .. first + n` and of its MoE layers `columns` (0-based). `own` uint16 `[n, R, K]`: the
    experts that each router would have chosen, in the order of their scores; `used`: those that it sent the token to.
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


class MinibatchResult(msgspec.Struct, frozen=True):
    """What training one minibatch did, over all ranks: one optimizer step.

    `metrics`: see `figures.result_of`. By MoE layer of the whole model: `layer_agreement` float32 `[L]`, the share of
    recorded tokens whose own top-k set is the recorded one (0 if none is recorded); `expert_load` int64 `[L, experts]`,
    tokens sent to each expert, padding not counted. `traces`: of this rank, if they were asked for.
    """

    metrics: dict[str, float]
    layer_agreement: np.ndarray
    expert_load: np.ndarray
    traces: list[RouteTrace] = []
