"""The jobs and the report of `bench replay`, and the formulas behind it. Pure: NumPy and records only.

Samples come from the rollout policy μ (the engine). For a sampled token, `Δ = log π_learner - log μ_rollout`, in nats.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from r3async.data.statistics import median_ratio_interval

HISTOGRAM_FLOOR = -6
"""The log10 of the smallest |Δ| with a separate bin; smaller ones are in the first bin."""
HISTOGRAM_TOP = 1
BINS_PER_DECADE = 8


class Mismatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Distance of one learner, in one routing mode, from the engine that sampled. Over sampled tokens, in nats.

    Attributes:
        k3: mean of `e^Δ - 1 - Δ`; estimates KL(rollout ‖ learner) from rollout samples, and is never negative.
        k1: mean of `-Δ`; estimates the same.
        mean_abs: mean of |Δ|.
        p99_abs: 99th percentile of |Δ|.
        max_abs: largest |Δ|.
        beyond_2x: share of tokens with π/μ above 2 or below 1/2.
        agreement: share of (recorded token, MoE layer) whose own top-k set is the recorded one.
        grad_error: ‖g - g*‖ / ‖g*‖ over all parameters, where g* is the gradient of the float32 learner that replays
            the engine's routes: the gradient of the policy that sampled, without bf16's noise.
        grad_error_own: the same, with the float32 learner that uses its own routing as g*.
        histogram: tokens by log10 |Δ|, as the function `histogram` counts them.
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
    """One learner with own routing and with replay. Ratios are own / replay: above 1, replay is nearer."""

    own: Mismatch
    replay: Mismatch
    kl_without: float
    kl_with: float
    kl_ratio: float
    max_abs_ratio: float


class StepTime(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """CPU and wall seconds of whole steps (pack, forward, backward, optimizer) of one learner on the same tokens, in
    pairs.

    In `*_with` the samples carry routes, which are replayed. In `*_without` the same samples lack the routing columns.

    Attributes:
        ratio: median with / median without, of the process's CPU time.
        wall_ratio: the same of wall time.
        ratio_interval: 95 % bootstrap interval of `ratio` over the pairs.
        route_seconds: CPU time per step spent on loading routes and choosing experts by them, above what a step without
            routes spends there: the direct measure of what `ratio` bounds.
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


class RandomModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Qwen3-MoE with random weights: matrices are normal with standard deviation `weight_std`, the routers' with
    `gate_std`, and norms are 1."""

    layers: int = 16
    experts: int = 64
    top_k: int = 8
    gate_std: float = 0.1
    weight_std: float = 0.08
    hidden_size: int = 128
    expert_hidden_size: int = 64
    seed: int = 0


class RolloutJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The input of the engine's jobs.

    `samples` random prompts of `prompt_tokens` tokens are continued by `new_tokens` tokens each at temperature 1. With
    `episodes` (a run's configuration file), as many episodes of that run's environment are played instead.

    Attributes:
        model: directory of the model to sample from.
        random: the model to make there first, or None.
    """

    model: str
    random: RandomModel | None = None
    episodes: str = ""
    samples: int = 48
    prompt_tokens: int = 32
    new_tokens: int = 160
    dtype: str = "bfloat16"
    seed: int = 0
    concurrency: int = 64


class Rollouts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A summary of the samples and their model; `gate_std` is measured over all router weights of the model.

    Bytes are per token of the samples, prompts included, as encoded for the wire.
    """

    tokens: int
    sampled_tokens: int
    seconds: float
    gate_std: float
    layers: int
    experts: int
    top_k: int
    route_bytes_per_token: float
    wire_bytes_per_token: float
    wire_bytes_per_token_without_routes: float


class LearnerJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The input of the learner's jobs.

    Attributes:
        dtypes: dtypes in which the learner is compared with the engine.
        step_dtypes: dtypes in which whole steps are timed.
        pairs: number of pairs of timed steps.
        step_samples: number of samples, from the first on, of a timed step.
    """

    model: str
    seed: int = 0
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    step_dtypes: tuple[str, ...] = ()
    pairs: int = 0
    step_samples: int = 24
    max_tokens_per_micro_batch: int = 4096


class LearnerDone(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The learner's results, by its dtype."""

    comparisons: dict[str, Comparison]
    steps: dict[str, StepTime]


class Case(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The results of one model.

    Attributes:
        varied: the setting that differs from the headline model, or empty.
        learners: comparisons by the learner's dtype.
    """

    label: str
    varied: str
    rollout_job: RolloutJob
    learner_job: LearnerJob
    rollouts: Rollouts
    learners: dict[str, Comparison]


class Summary(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The headline model over all seeds: means, except for `max_abs_*`, which are the largest. Fields that end in
    `_without` are of own routing, those in `_with` of replay.

    `kl_ratio` is the ratio of the means; `kl_ratio_by_seed` and `max_abs_ratio_by_seed` are own / replay within each
    seed.
    """

    kl_without: float
    kl_with: float
    kl_ratio: float
    kl_ratio_by_seed: list[float]
    mean_abs_without: float
    mean_abs_with: float
    p99_abs_without: float
    p99_abs_with: float
    max_abs_without: float
    max_abs_with: float
    max_abs_ratio: float
    max_abs_ratio_by_seed: list[float]
    beyond_2x_without: float
    beyond_2x_with: float
    agreement_without: float
    agreement_with: float
    grad_error_without: float
    grad_error_with: float
    grad_error_own_without: float
    grad_error_own_with: float


class Branches(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Turns that branch off, after an update, from turns of older weights. The learner has exactly the engine's new
    weights.

    The branches' sampled tokens are scored with the routes of their own call (`*_own`), and with those that the first
    turn recorded for the common prefix (`*_inherited`).

    Attributes:
        drift: KL(old ‖ new), k3, of the first turns.
        moved_routes: share of a branch's recorded (position, MoE layer) in which the two name different experts.
    """

    dtype: str
    branch_tokens: int
    drift: float
    k3_own: float
    k3_inherited: float
    max_abs_own: float
    max_abs_inherited: float
    moved_routes: float


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The report of `bench replay --json`.

    The headline figures come first: engine and learner both in bfloat16, `step_ratio` in CPU time of the bfloat16
    learner. A figure that was not measured (`--pairs 0`) is 0.
    """

    benchmark: str = "replay"
    step_ratio: float
    step_ratio_wall: float
    route_bytes_per_token: float
    wire_bytes_per_token: float
    wire_bytes_per_token_without_routes: float
    kl_without: float
    kl_with: float
    kl_ratio: float
    max_abs_ratio: float
    summary: dict[str, Summary]
    steps: dict[str, StepTime]
    headline: list[Case]
    table: list[Case]
    models: list[Case]
    machine: dict[str, str]
    seconds: float
    branches: Branches | None = None
    """The result for branches; None in the reports that are kept with the documentation."""


# -- formulas ----------------------------------------------------------------------------------------------------------


def mismatch(delta: np.ndarray, *, agreement: float, grad_error: float, grad_error_own: float) -> Mismatch:
    """Summarize `delta`, float `[M]`: Δ of each sampled token. Raises `ValueError` if it is empty or not finite."""
    delta = np.asarray(delta, np.float64)
    if not delta.size or not np.isfinite(delta).all():
        raise ValueError(f"{delta.size} log-prob differences, {np.count_nonzero(~np.isfinite(delta))} not finite")
    size = np.abs(delta)
    return Mismatch(
        k3=k3(delta),
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


def k3(delta: np.ndarray) -> float:
    """Return the mean of `e^Δ - 1 - Δ`."""
    return float(np.mean(np.expm1(delta) - delta))


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
    """Return the ratio, or 0 if the denominator is 0, because JSON has no infinity."""
    return numerator / denominator if denominator else 0.0


def histogram(size: np.ndarray) -> list[int]:
    """Count |Δ| by log10, in `BINS_PER_DECADE` bins per decade from `HISTOGRAM_FLOOR` to `HISTOGRAM_TOP`. Values
    outside are in the first or last bin, so that the counts add up to the tokens."""
    bins = (HISTOGRAM_TOP - HISTOGRAM_FLOOR) * BINS_PER_DECADE
    with np.errstate(divide="ignore"):
        at = np.floor((np.log10(size) - HISTOGRAM_FLOOR) * BINS_PER_DECADE)
    return np.bincount(np.clip(at, 0, bins - 1).astype(np.int64), minlength=bins).tolist()


def relative_error(gradient: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Return ‖gradient - reference‖ / ‖reference‖, L2 over all tensors together."""
    pairs = list(zip(gradient, reference, strict=True))
    difference = sum(float(np.sum(np.square(g.astype(np.float64) - r))) for g, r in pairs)
    size = sum(float(np.sum(np.square(r.astype(np.float64)))) for _, r in pairs)
    return ratio(difference, size) ** 0.5


def step_time(dtype: str, tokens: int, micro_batches: int, *, route_seconds: float, **seconds: list[float]) -> StepTime:
    """Summarize the pairs of steps. `seconds`: `cpu_with`, `cpu_without`, `wall_with` and `wall_without`; element i
    belongs to pair i."""
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    return StepTime(
        dtype=dtype,
        tokens=tokens,
        micro_batches=micro_batches,
        **seconds,
        ratio=medians["cpu_with"] / medians["cpu_without"],
        wall_ratio=medians["wall_with"] / medians["wall_without"],
        ratio_interval=median_ratio_interval(seconds["cpu_with"], seconds["cpu_without"]),
        route_seconds=route_seconds,
    )
