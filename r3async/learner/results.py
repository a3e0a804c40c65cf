"""The results of a learner's step, and its error; importing this module does not load torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from r3async.data.tokens import Trajectory


class LearnerError(RuntimeError):
    """An error for a model or batch that the backend cannot train; the message says why, and which setting to change."""


class RejectedTrajectory(NamedTuple):
    """A trajectory that arrived but that the step cannot train."""

    trajectory: Trajectory
    reason: str


class RouteTrace(msgspec.Struct, frozen=True):
    """The choices that one rank's routers made for its tokens of one micro-batch, as they were made.

    The micro-batch is `sample_ids` laid end to end; sample `s` is in rows `cu_seqlens[s]:cu_seqlens[s + 1]`.

    Attributes:
        cu_seqlens: int32 `[S + 1]`.
        first: This rank has rows `first .. first + n` of the micro-batch.
        columns: The MoE layers of this rank (0-based).
        own: uint16 `[n, R, K]`: the experts that each router would have chosen, in the order of their scores.
        used: uint16 `[n, R, K]`: the experts that each router sent the token to.
        logprobs: float32 `[N]` for all `N = cu_seqlens[-1]` rows, from a rank that computed the loss: the learner's
            log-prob of each trained token before the step, at its sample's temperature; NaN for other tokens.
        prefixes: Prefixes of samples that share rows, see `MicroBatch`.
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
    """The result of one optimizer step on one minibatch, over all ranks.

    Attributes:
        metrics: See `metrics.build_minibatch_result`.
        layer_agreement: float32 `[L]`, for each MoE layer of the whole model: the share of recorded tokens whose own
            top-k set is the recorded one (0 if none is recorded).
        expert_load: int64 `[L, experts]`: tokens sent to each expert of each MoE layer, padding not counted.
        traces: The traces of this rank, if tracing was requested.
        drift: float64 `[3, n, 2]`: `metrics.sum_drift` of all trained tokens, of the probed ones, and of the probed
            ones with the routers' own choice. It has no rows if nothing measured it.
        gap_moments: float64 `[5]`: `metrics.compute_gap_moments`.
        digests: A digest for each stage of the step, with `observe.record`.
    """

    metrics: dict[str, float]
    layer_agreement: np.ndarray
    expert_load: np.ndarray
    traces: list[RouteTrace] = []
    drift: np.ndarray = msgspec.field(default_factory=lambda: np.zeros((3, 0, 2)))
    gap_moments: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(5))
    digests: dict[str, int] = {}


def sum_stage_digests(digests: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return, for each stage, the sum modulo 2^64 of all ranks' digests (`MinibatchResult.digests`)."""
    return {stage: sum(each[stage] for each in digests) % 2**64 for stage in digests[0]}
