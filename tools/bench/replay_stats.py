"""What `bench replay` reports, and the formulas behind it. Pure: NumPy and records only.

Samples come from the rollout policy μ (the engine). For a sampled token, `Δ = log π_learner - log μ_rollout`, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

HISTOGRAM_FLOOR = -6
"""log10 of the smallest |Δ| that has a bin of its own; smaller ones are in the first bin."""
HISTOGRAM_TOP = 1
BINS_PER_DECADE = 8


class Mismatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One learner, in one routing mode, against the engine that sampled. Over sampled tokens, in nats.

    `k3`: mean of `e^Δ - 1 - Δ`, and `k1`: mean of `-Δ`; both estimate KL(rollout ‖ learner) from rollout samples, and k3
    is never negative. `mean_abs`, `p99_abs` (99th percentile), `max_abs`: of |Δ|. `beyond_2x`: share of tokens with π/μ
    above 2 or below 1/2. `agreement`: share of (recorded token, MoE layer) whose own top-k set is the recorded one.
    `histogram`: tokens by log10 |Δ|, see `histogram`.

    `grad_error`: ‖g - g*‖ / ‖g*‖ over all parameters, where g* is the gradient of the float32 learner that replays the
    engine's routes: the gradient of the policy that sampled, without bf16's noise. `grad_error_own`: the same with the
    float32 learner that routes by itself as g*.
    """

    k3: float
    k1: float
    mean_abs: float
    p99_abs: float
    max_abs: float
    beyond_2x: float
    agreement: float
    grad_error: float
    grad_error_own: float
    histogram: list[int]


class Comparison(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The same learner with own routing and with replay. Ratios are own / replay: above 1, replay is nearer."""

    own: Mismatch
    replay: Mismatch
    kl_without: float
    kl_with: float
    kl_ratio: float
    max_abs_ratio: float


class StepTime(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """CPU and wall seconds of whole steps (pack, forward, backward, optimizer) of one learner on the same tokens, in pairs.

    `with`: the samples carry routes, which are replayed. `without`: the same samples without the routing columns.
    `ratio`: median with / median without, of the process's CPU time; `wall_ratio`: of wall time. `ratio_interval`: 95 %
    bootstrap interval of `ratio` over the pairs. `route_seconds`: CPU time of a step that is spent on taking routes in and
    choosing experts by them, above what a step without routes spends there: the direct measure of what `ratio` bounds.
    """

    dtype: str
    tokens: int
    micro_batches: int
    cpu_with: list[float]
    cpu_without: list[float]
    wall_with: list[float]
    wall_without: list[float]
    ratio: float
    wall_ratio: float
    ratio_interval: tuple[float, float]
    route_seconds: float


def mismatch(delta: np.ndarray, *, agreement: float, grad_error: float, grad_error_own: float) -> Mismatch:
    """`delta` float `[M]`: Δ of each sampled token. Raises `ValueError` if there is none, or one is not finite."""
    delta = np.asarray(delta, np.float64)
    if not delta.size or not np.isfinite(delta).all():
        raise ValueError(f"{delta.size} log-prob differences, {np.count_nonzero(~np.isfinite(delta))} not finite")
    size = np.abs(delta)
    return Mismatch(
        k3=float(np.mean(np.expm1(delta) - delta)),
        k1=float(-np.mean(delta)),
        mean_abs=float(size.mean()),
        p99_abs=float(np.quantile(size, 0.99)),
        max_abs=float(size.max()),
        beyond_2x=float(np.mean(size > np.log(2))),
        agreement=agreement,
        grad_error=grad_error,
        grad_error_own=grad_error_own,
        histogram=histogram(size),
    )


def compare(own: Mismatch, replay: Mismatch) -> Comparison:
    return Comparison(
        own=own,
        replay=replay,
        kl_without=own.k3,
        kl_with=replay.k3,
        kl_ratio=ratio(own.k3, replay.k3),
        max_abs_ratio=ratio(own.max_abs, replay.max_abs),
    )


def ratio(numerator: float, denominator: float) -> float:
    """0 where there is nothing to divide by: JSON has no infinity."""
    return numerator / denominator if denominator else 0.0


def histogram(size: np.ndarray) -> list[int]:
    """Counts of |Δ| by log10, `BINS_PER_DECADE` bins a decade from `HISTOGRAM_FLOOR` to `HISTOGRAM_TOP`; what is outside
    is in the first or last bin, so that the counts add up to the tokens."""
    bins = (HISTOGRAM_TOP - HISTOGRAM_FLOOR) * BINS_PER_DECADE
    with np.errstate(divide="ignore"):
        at = np.floor((np.log10(size) - HISTOGRAM_FLOOR) * BINS_PER_DECADE)
    return np.bincount(np.clip(at, 0, bins - 1).astype(np.int64), minlength=bins).tolist()


def relative_error(gradient: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """‖gradient - reference‖ / ‖reference‖, L2 over all tensors together."""
    pairs = list(zip(gradient, reference, strict=True))
    difference = sum(float(np.sum(np.square(g.astype(np.float64) - r))) for g, r in pairs)
    size = sum(float(np.sum(np.square(r.astype(np.float64)))) for _, r in pairs)
    return ratio(difference, size) ** 0.5


def step_time(
    dtype: str,
    tokens: int,
    micro_batches: int,
    *,
    cpu_with: list[float],
    cpu_without: list[float],
    wall_with: list[float],
    wall_without: list[float],
    route_seconds: float,
) -> StepTime:
    """Element i of each list belongs to pair i."""
    return StepTime(
        dtype=dtype,
        tokens=tokens,
        micro_batches=micro_batches,
        cpu_with=cpu_with,
        cpu_without=cpu_without,
        wall_with=wall_with,
        wall_without=wall_without,
        ratio=float(np.median(cpu_with) / np.median(cpu_without)),
        wall_ratio=float(np.median(wall_with) / np.median(wall_without)),
        ratio_interval=median_ratio_interval(cpu_with, cpu_without),
        route_seconds=route_seconds,
    )


def median_ratio_interval(over: Sequence[float], under: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of median(over) / median(under), where element i of both is one pair."""
    rng = np.random.default_rng(0)
    picked = rng.integers(0, len(over), (draws, len(over)))
    ratios = np.median(np.asarray(over)[picked], axis=1) / np.median(np.asarray(under)[picked], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
