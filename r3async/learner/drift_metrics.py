"""Metrics of drift, replayed and served: by age, turn and position, with an interval."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from r3async.data.statistics import t_quantile
from r3async.learner.drift import clamped_k3
from r3async.learner.results import DriftSums, GapMoments

REPLAYED_DRIFT_METRIC = "rollout_kl/k3"
"""The metric that the trust region bounds: unbiased for KL(rollout || learner),
and never negative."""


SERVED_DRIFT_METRIC = "rollout_kl/served_k3"
"""The drift with the routers' own choice, as engines will serve it; see `trust_region`. Only in
steps that measure it."""
SERVED_ESTIMATE_METRIC = f"{SERVED_DRIFT_METRIC}_estimate"
"""The estimate that the trust region uses for served drift in a step that does not measure it."""
SERVED_PREDICTION_METRIC = f"{SERVED_DRIFT_METRIC}_predicted"
"""Served drift of the probed tokens under the weights that the step made; only with a limit."""
SERVED_BOUND_METRICS = (f"{SERVED_DRIFT_METRIC}_low", f"{SERVED_DRIFT_METRIC}_high")
INTERVAL_CONFIDENCE = 0.99
UPPER_WIDENING = 5.0
"""The confidence of Student's t, and the factor by which the upper half of the interval is wider.
k3 has a long tail: in one step, one of 128 episodes had 82 % of the gap. A sample lacks such
episodes more often than it has them, so the variance is also no less than that of recent
measurements. For draws of 19 of 128 episodes such intervals held the true value in 99.5 % or more,
in each of six runs; without the factor and the memory, in 77 to 91 %."""
ROUNDING_DRIFT = 1e-12
"""k3 by which two computations of the same drift differ: float32 rounds a log-prob of 8 by half of
1e-6, in both policies. Without it the interval of a step with the newest weights, whose drift is
rounding alone, would have no width."""
STALENESS_BINS = 8
TURN_BINS = 16
POSITION_BINS = 8
"""Numbers of ages, turns and ranges of positions by which drift is reported; the last of each
includes all above it."""
FIRST_POSITION_BIN = 64
"""Number of positions in the first range of a sample; each further range is as long
as all before it."""
DRIFT_BINS = STALENESS_BINS + TURN_BINS + POSITION_BINS
TOKEN_COUNT = 1
"""The column of `sum_drift` with the number of tokens, after the sum of k3."""
_BIN_NAMES = [
    *(f"staleness_{age}" for age in range(STALENESS_BINS)),
    *(f"turn_{turn}" for turn in range(TURN_BINS)),
    *(f"position_{place}" for place in range(POSITION_BINS)),
]
BINNED_METRIC_PREFIXES = (
    *(f"{REPLAYED_DRIFT_METRIC}_{kind}_" for kind in ("staleness", "turn", "position")),
    SERVED_DRIFT_METRIC,
    "rollout_kl/served_tokens",
)
"""Prefixes of the metrics that follow from `MinibatchResult.drift`."""


def sum_drift(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    staleness: Tensor,
    turns: Tensor,
    positions: Tensor,
    token_limit: float = math.inf,
    episodes: Tensor | None = None,
    episode_count: int = 0,
) -> Tensor:
    """Sum k3 over trained tokens, and count them, by age, turn, position in the sample and episode.

    Returns float64 `[DRIFT_BINS + episode_count, 2]`, without gradient. Positions are 0..63,
    64..127, 128..255, ...

    Args:
        logprobs: float32 `[M]`; the other columns are int64 `[M]`, on the same device.
        token_limit: The most that a token counts, see `clamped_k3`.
        episodes: The number of each token's episode, below `episode_count`; None: episodes
            are not told apart.
    """
    drift = clamped_k3(logprobs.detach().double() - rollout_logprobs.double(), token_limit)
    counted = torch.stack([drift, torch.ones_like(drift)], dim=1)
    sums = torch.zeros(DRIFT_BINS + episode_count, 2, dtype=torch.float64, device=logprobs.device)
    sums.index_add_(0, staleness.clamp(0, STALENESS_BINS - 1), counted)
    sums.index_add_(0, STALENESS_BINS + turns.clamp(0, TURN_BINS - 1), counted)
    edges = FIRST_POSITION_BIN * 2 ** torch.arange(POSITION_BINS - 1, device=logprobs.device)
    sums.index_add_(
        0, STALENESS_BINS + TURN_BINS + torch.bucketize(positions, edges, right=True), counted
    )
    return sums if episodes is None else sums.index_add_(0, DRIFT_BINS + episodes, counted)


def estimate_served_drift(drift: DriftSums) -> float:
    """Return an unbiased estimate of served drift over all trained tokens; 0 if it is negative.

    It is `trained + (probed served - probed replayed)`, of means. Every token counts equally
    often in the rows.
    """
    trained, replayed, served = (
        k3 / max(tokens, 1.0) for k3, tokens in (sums.sum(axis=0) for sums in drift)
    )
    return float(np.maximum(trained + served - replayed, 0.0))


def compute_served_gaps(drift: DriftSums) -> list[float | None]:
    """Return, for each age, how far served drift is above the replayed one over its probed tokens;
    None without any."""
    replayed = drift.probed_replayed[:STALENESS_BINS]
    served = drift.probed_served[:STALENESS_BINS]
    return [
        float((served_k3 - replayed_k3) / tokens) if tokens else None
        for (replayed_k3, _), (served_k3, tokens) in zip(replayed, served, strict=True)
    ]


def compute_gap_moments(by_episode: DriftSums, usual_variance: float = 0.0) -> GapMoments:
    """Return the moments of the probed episodes.

    Args:
        by_episode: `[episodes, 2]`, see `Minibatch.reduce_drift`.
        usual_variance: The mean `compute_gap_variance` of measurements before this one; 0
            if there are none.
    """
    replayed_k3, _ = by_episode.probed_replayed.T
    served_k3, tokens = by_episode.probed_served.T
    is_probed = tokens > 0
    gap = (served_k3 - replayed_k3)[is_probed]
    tokens = tokens[is_probed]
    return GapMoments(
        episodes=float(len(tokens)),
        gap_squared=float(gap @ gap),
        gap_tokens=float(gap @ tokens),
        tokens_squared=float(tokens @ tokens),
        usual_variance=len(tokens) * usual_variance,
    )


def compute_gap_variance(drift: DriftSums, moments: GapMoments, epochs: int = 1) -> float | None:
    """Return the variance over probed episodes of what each adds to the gap beyond its share,
    in squared nats.

    The gap is a ratio of sums over episodes: Cochran, Sampling Techniques, 1977, 6.9. None for
    fewer than two episodes. The arguments are those of `compute_served_interval`.
    """
    episodes = moments.episodes / epochs
    if episodes < 2:
        return None
    replayed_k3, _ = drift.probed_replayed[:STALENESS_BINS].sum(axis=0)
    served_k3, tokens = drift.probed_served[:STALENESS_BINS].sum(axis=0)
    gap = (served_k3 - replayed_k3) / tokens
    squares = moments.gap_squared - 2 * gap * moments.gap_tokens + gap**2 * moments.tokens_squared
    return max(float(squares / epochs / (episodes - 1)), 0.0)


def compute_served_interval(
    drift: DriftSums, moments: GapMoments, epochs: int = 1
) -> tuple[float, float] | None:
    """Return the interval around `estimate_served_drift(drift)` for the served drift of
    all trained tokens.

    Episodes are the sampled units: the tokens of one drift together. Their variance is the
    larger of this sample's and the usual one. `INTERVAL_CONFIDENCE` sets the width. None for
    fewer than two episodes.

    Args:
        drift: The sums of the same episodes, by age and so on.
        epochs: How often each episode is in them.
    """
    sample_variance = compute_gap_variance(drift, moments, epochs)
    if sample_variance is None:
        return None
    variance = max(sample_variance, moments.usual_variance / moments.episodes)
    episodes = moments.episodes / epochs
    tokens = count_served_tokens(drift) / epochs
    error = math.sqrt(variance * episodes) / tokens
    value = estimate_served_drift(drift)
    half = float(t_quantile(round(episodes) - 1, INTERVAL_CONFIDENCE) * error)
    return max(value - half - ROUNDING_DRIFT, 0.0), value + UPPER_WIDENING * half + ROUNDING_DRIFT


def count_served_tokens(drift: DriftSums) -> float:
    """Return the number of probed tokens whose served drift was measured."""
    return float(drift.probed_served[:STALENESS_BINS, TOKEN_COUNT].sum())


def compute_drift_metrics(
    drift: DriftSums, moments: GapMoments, epochs: int = 1
) -> dict[str, float]:
    """Return drift by age, turn and position, for those that have tokens; and served drift, if
    there are probed tokens.

    The arguments are those of `compute_served_interval`.
    """
    if not len(drift.trained):
        return {}
    metrics = {
        f"{REPLAYED_DRIFT_METRIC}_{part}": float(k3 / tokens)
        for part, (k3, tokens) in zip(_BIN_NAMES, drift.trained.tolist(), strict=True)
        if tokens
    }
    if not count_served_tokens(drift):
        return metrics
    for row, part in enumerate(_BIN_NAMES):
        if drift.probed_served[row, TOKEN_COUNT]:
            of_part = DriftSums(*(sums[row : row + 1] for sums in drift))
            metrics[f"{SERVED_DRIFT_METRIC}_{part}"] = estimate_served_drift(of_part)
    metrics[SERVED_DRIFT_METRIC] = estimate_served_drift(drift)
    metrics["rollout_kl/served_tokens"] = count_served_tokens(drift)
    interval = compute_served_interval(drift, moments, epochs)
    if interval:
        metrics |= dict(zip(SERVED_BOUND_METRICS, interval, strict=True))
    return metrics
