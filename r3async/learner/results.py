"""The results of a learner's step, and its error; importing this module does not load torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from r3async.data.tokens import Trajectory


class LearnerError(RuntimeError):
    """An error for a model or batch that the backend cannot train; the message says why, and which
    setting to change."""


class RejectedTrajectory(NamedTuple):
    """A trajectory that arrived but that the step cannot train."""

    trajectory: Trajectory
    reason: str


class RouteTrace(msgspec.Struct, frozen=True):
    """The choices that one rank's routers made for its tokens of one micro-batch,
    as they were made.

    The micro-batch is `sample_ids` laid end to end; sample `s` is in rows
    `cu_seqlens[s]:cu_seqlens[s + 1]`.

    Attributes:
        cu_seqlens: int32 `[S + 1]`.
        first: This rank has rows `first .. first + n` of the micro-batch.
        columns: The MoE layers of this rank (0-based).
        own: uint16 `[n, R, K]`: the experts that each router would have chosen, in the order
            of their scores.
        used: uint16 `[n, R, K]`: the experts that each router sent the token to.
        logprobs: float32 `[N]` for all `N = cu_seqlens[-1]` rows, from a rank that computed the
            loss: the learner's log-prob of each trained token before the step, at its sample's
            temperature; NaN for other tokens.
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


class DriftSums(NamedTuple):
    """Drift summed over tokens, by bin or by episode: float64 `[n, 2]`, with the columns of
    `drift_metrics.sum_drift`.

    Attributes:
        trained: Of all trained tokens.
        probed_replayed: Of the probed ones, as they are trained.
        probed_served: Of the probed ones, with the routers' own choice; all 0 if that
            was not measured.
    """

    trained: np.ndarray
    probed_replayed: np.ndarray
    probed_served: np.ndarray

    @staticmethod
    def zeros(bins: int) -> DriftSums:
        """Return the sums of no tokens."""
        return DriftSums(*np.zeros((3, bins, 2)))


class GapMoments(NamedTuple):
    """Moments of the gap over the probed episodes, for an interval of served drift; they add up
    over minibatches.

    The gap of an episode is the sum of served less replayed k3 over its probed tokens.

    Attributes:
        episodes: The number of probed episodes.
        gap_squared: Sum of `gap^2`.
        gap_tokens: Sum of `gap * tokens`.
        tokens_squared: Sum of `tokens^2`.
        usual_variance: Sum of the variance that earlier measurements found, see
            `compute_gap_variance`.
    """

    episodes: float = 0.0
    gap_squared: float = 0.0
    gap_tokens: float = 0.0
    tokens_squared: float = 0.0
    usual_variance: float = 0.0


class MinibatchResult(msgspec.Struct, frozen=True):
    """The result of one optimizer step on one minibatch, over all ranks.

    Attributes:
        metrics: See `metrics.build_minibatch_result`.
        layer_agreement: float32 `[L]`, for each MoE layer of the whole model: the share of recorded
            tokens whose own top-k set is the recorded one (0 if none is recorded).
        expert_load: int64 `[L, experts]`: tokens sent to each expert of each MoE layer,
            padding not counted.
        traces: The traces of this rank, if tracing was requested.
        drift: Drift by age, turn and position, `[DRIFT_BINS, 2]`. It has no rows if
            nothing measured it.
        digests: A digest for each stage of the step, with `observe.record`.
    """

    metrics: dict[str, float]
    layer_agreement: np.ndarray
    expert_load: np.ndarray
    traces: list[RouteTrace] = []
    drift: DriftSums = msgspec.field(default_factory=lambda: DriftSums.zeros(0))
    gap_moments: GapMoments = GapMoments()
    digests: dict[str, int] = {}


def sum_stage_digests(digests: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return, for each stage, the sum modulo 2^64 of all ranks' digests
    (`MinibatchResult.digests`)."""
    return {stage: sum(each[stage] for each in digests) % 2**64 for stage in digests[0]}
