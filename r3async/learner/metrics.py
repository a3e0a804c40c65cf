"""Metrics of a step: sums over tokens, metrics of a minibatch over all ranks, and several minibatches combined."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from r3async.data.metrics import find_metric
from r3async.data.statistics import t_quantile
from r3async.learner.drift import clamped_k3, k2, k3
from r3async.learner.optimizer import OptimizerUpdate
from r3async.learner.policy_loss import bounded_exp, sum_by_episode
from r3async.learner.results import DriftSums, GapMoments, MinibatchResult

if TYPE_CHECKING:
    from r3async.learner.replay import RoutingReplay
    from r3async.learner.trainer import Minibatch

REPLAYED_DRIFT_METRIC = "rollout_kl/k3"
"""The metric that the trust region bounds: unbiased for KL(rollout || learner), and never negative."""


@dataclass
class LossSums:
    """The sums of a loss's terms and figures, as float64 scalars on the loss's device.

    All are sums, except those that `max_names` names, and `split_episode_parts`.
    """

    # Terms of the loss, each token's multiplied by its weight.
    policy: Tensor
    rollout_kl: Tensor
    reference_kl: Tensor
    entropy_bonus: Tensor
    # Over trained tokens.
    tokens: Tensor
    k1: Tensor
    k2: Tensor
    k3: Tensor
    reference_k3: Tensor
    abs_diff: Tensor
    abs_diff_max: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    entropy: Tensor
    clipped: Tensor
    clipped_high: Tensor
    masked: Tensor
    # Over episodes that have a trained token, without split ones whose parts are still open.
    episodes: Tensor
    episodes_masked: Tensor
    learner_perplexity: Tensor
    rollout_perplexity: Tensor
    perplexity_ratio: Tensor
    episode_ratio_squared: Tensor
    split_episode_parts: Tensor
    """float64 `[P, 5]`: parts of episodes that have tokens elsewhere too; `add_episodes` computes their figures when
    all parts are known. Columns: the episode's number (-1: all of it is here), its tokens here, those that are kept,
    sum(log pi), sum(log mu)."""

    def __add__(self, other: LossSums) -> LossSums:
        added = {name: getattr(self, name) + getattr(other, name) for name in self.sum_names()}
        added |= {name: torch.maximum(getattr(self, name), getattr(other, name)) for name in self.max_names()}
        return LossSums(**added, split_episode_parts=torch.cat([self.split_episode_parts, other.split_episode_parts]))

    @staticmethod
    def sum_names() -> list[str]:
        """Return the names of the sums in the order of `to_numpy`."""
        return [f.name for f in fields(LossSums) if f.name != "split_episode_parts"]

    @staticmethod
    def max_names() -> list[str]:
        """Return the names of the entries that combine by their maximum, not by their sum."""
        return ["ratio_max", "abs_diff_max"]

    @staticmethod
    def zeros(device: torch.device | str = "cpu") -> LossSums:
        """Return the sums of no tokens."""
        scalars = {name: torch.zeros((), dtype=torch.float64, device=device) for name in LossSums.sum_names()}
        return LossSums(**scalars, split_episode_parts=torch.zeros(0, 5, dtype=torch.float64, device=device))

    @staticmethod
    def from_micro_batch(
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        reference_logprobs: Tensor | None,
        entropies: Tensor,
        *,
        counted: Tensor,
        trained: Tensor,
        clipped: Tensor,
        clipped_high: Tensor,
        episode_index: Tensor,
        num_episodes: int,
        split_episode_ids: Tensor | None = None,
        token_limit: float = math.inf,
    ) -> LossSums:
        """Return the sums of one micro-batch; the terms of the loss are left 0.

        Columns are `[M]` without gradient; tokens count where `counted` is True.

        Args:
            counted: bool `[M]`: the tokens that count.
            trained: bool `[M]`: the counted tokens that the policy loss trains.
            clipped: bool `[M]`: the counted tokens that it clips.
            clipped_high: bool `[M]`: the counted tokens that it clips from above.
            split_episode_ids: See `TokenBatch`.
            token_limit: See `clamped_k3`.
        """
        sums = LossSums.zeros(logprobs.device)
        logprobs, rollout_logprobs, entropies = (
            torch.where(counted, x.double(), 0.0) for x in (logprobs, rollout_logprobs, entropies)
        )
        delta = logprobs - rollout_logprobs
        ratio = torch.where(counted, bounded_exp(delta), 0.0)
        sums.tokens = counted.sum(dtype=torch.float64)
        sums.k1, sums.k2, sums.k3 = (-delta).sum(), k2(delta).sum(), clamped_k3(delta, token_limit).sum()
        if reference_logprobs is not None:
            away = torch.where(counted, reference_logprobs.double(), 0.0) - logprobs
            sums.reference_k3 = k3(away).sum()
        sums.abs_diff, sums.abs_diff_max = delta.abs().sum(), delta.abs().max() if len(delta) else delta.sum()
        sums.ratio, sums.ratio_squared = ratio.sum(), ratio.square().sum()
        sums.ratio_max = ratio.max() if len(ratio) else ratio.sum()
        sums.entropy = entropies.sum(dtype=torch.float64)
        sums.clipped, sums.clipped_high = (x.sum(dtype=torch.float64) for x in (clipped, clipped_high))
        sums.masked = (counted & ~trained).sum(dtype=torch.float64)
        columns = (counted, trained, logprobs, rollout_logprobs)
        parts = torch.stack([sum_by_episode(x, episode_index, num_episodes) for x in columns], dim=1)
        if split_episode_ids is not None:
            sums.split_episode_parts = torch.cat([split_episode_ids.double()[:, None], parts], dim=1)
            parts = torch.where(split_episode_ids[:, None] < 0, parts, 0.0)  # selecting rows would wait for the device
        sums.add_episodes(parts)
        return sums

    def add_episodes(self, episodes: Tensor) -> None:
        """Add the figures of whole episodes: float64 `[E, 4]`, the columns of `split_episode_parts` after the first."""
        tokens, kept, learner, rollout = episodes.unbind(dim=1)
        trained = tokens > 0

        def total(values: Tensor) -> Tensor:
            return torch.where(trained, values, 0.0).sum()

        mean_learner, mean_rollout = (x / tokens.clamp(min=1) for x in (learner, rollout))
        self.episodes += trained.sum(dtype=torch.float64)
        self.episodes_masked += total((kept == 0).double())
        self.learner_perplexity += total((-mean_learner).exp())
        self.rollout_perplexity += total((-mean_rollout).exp())
        self.perplexity_ratio += total(bounded_exp(mean_rollout - mean_learner))
        self.episode_ratio_squared += total(bounded_exp(learner - rollout).square())

    def to_numpy(self) -> np.ndarray:
        """Return the sums, float64 `[n]`, on the host, by one transfer; without `split_episode_parts`."""
        return torch.stack([getattr(self, name) for name in self.sum_names()]).cpu().numpy()

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics of these sums alone, see `compute_metrics`."""
        return self.compute_metrics(self.to_numpy())

    @staticmethod
    def compute_metrics(values: np.ndarray) -> dict[str, float]:
        """Return the metrics from `values` combined over micro-batches and ranks. All are 0 if no token was trained.

        pi: the learner; mu: the rollout policy; `delta = log pi - log mu` and `r = e^clamp(delta, -20, 20)` at a token.
        Means over tokens are over the n trained ones, corrected or not; means over episodes are over the N that have a
        trained token.

        * `loss/*`: the terms of the loss, which is their sum (`loss/entropy` is the bonus, so negative).
        * `rollout_kl/k1`, `/k2`, `/k3`: means of the estimators of KL(mu || pi), see `drift`; `reference_kl/k3`: of
          KL(pi || reference), 0 without a reference model. `entropy/mean`: nats.
        * `rollout_logprob/abs_diff_mean`, `_max`: of |delta|, on which engine and learner should agree with the same
          weights.
        * `ratio/max`: the largest r. `ratio/ess`: `(sum r)^2 / (n sum r^2)`, the effective sample size by token, 1 when
          all ratios are equal.
        * `rollout_corr/*`, the vocabulary of verl's rollout correction, whose `kl`, `k3_kl` and `ess` are here
          `rollout_kl/k1`, `rollout_kl/k3` and `ratio/ess`: `chi2_token` = `mean(r^2) - 1` and `chi2_seq` = `mean over
          episodes of e^2clamp(sum(delta), -20, 20) - 1`, both estimates of chi^2(pi || mu); `training_ppl`,
          `rollout_ppl` = mean over episodes of `e^-mean(log pi)`, of `e^-mean(log mu)`; `ppl_ratio` = mean over
          episodes of `e^-mean(delta)`; `clipped_fraction`: the share of trained tokens that a bound of the policy loss
          clipped, and `clipped_high_fraction`, `clipped_low_fraction` by the side of the bound; `masked_fraction`: the
          share that `correction` left out of it, and `masked_sequence_fraction`: the share of episodes of which it left
          out every token.
        """
        s = dict(zip(LossSums.sum_names(), values.tolist(), strict=True))
        n, episodes = max(s["tokens"], 1.0), max(s["episodes"], 1.0)
        return {
            "loss/policy": s["policy"],
            "loss/rollout_kl": s["rollout_kl"],
            "loss/reference_kl": s["reference_kl"],
            "loss/entropy": s["entropy_bonus"],
            "rollout_kl/k1": s["k1"] / n,
            "rollout_kl/k2": s["k2"] / n,
            "rollout_kl/k3": s["k3"] / n,
            "reference_kl/k3": s["reference_k3"] / n,
            "rollout_logprob/abs_diff_mean": s["abs_diff"] / n,
            "rollout_logprob/abs_diff_max": s["abs_diff_max"],
            "ratio/max": s["ratio_max"],
            "ratio/ess": s["ratio"] ** 2 / (n * s["ratio_squared"]) if s["ratio_squared"] else 0.0,
            "entropy/mean": s["entropy"] / n,
            "rollout_corr/chi2_token": s["ratio_squared"] / n - 1 if s["tokens"] else 0.0,
            "rollout_corr/chi2_seq": s["episode_ratio_squared"] / episodes - 1 if s["episodes"] else 0.0,
            "rollout_corr/training_ppl": s["learner_perplexity"] / episodes,
            "rollout_corr/rollout_ppl": s["rollout_perplexity"] / episodes,
            "rollout_corr/ppl_ratio": s["perplexity_ratio"] / episodes,
            "rollout_corr/clipped_fraction": s["clipped"] / n,
            "rollout_corr/clipped_high_fraction": s["clipped_high"] / n,
            "rollout_corr/clipped_low_fraction": (s["clipped"] - s["clipped_high"]) / n,
            "rollout_corr/masked_fraction": s["masked"] / n,
            "rollout_corr/masked_sequence_fraction": s["episodes_masked"] / episodes,
        }


SERVED_DRIFT_METRIC = "rollout_kl/served_k3"
"""The drift with the routers' own choice, as engines will serve it; see `trust_region`. Only in steps that measure it."""
SERVED_ESTIMATE_METRIC = f"{SERVED_DRIFT_METRIC}_estimate"
"""The estimate that the trust region uses for served drift in a step that does not measure it."""
SERVED_PREDICTION_METRIC = f"{SERVED_DRIFT_METRIC}_predicted"
"""Served drift of the probed tokens under the weights that the step made; only with a limit."""
SERVED_BOUND_METRICS = (f"{SERVED_DRIFT_METRIC}_low", f"{SERVED_DRIFT_METRIC}_high")
INTERVAL_CONFIDENCE, UPPER_WIDENING = 0.99, 5.0
"""The confidence of Student's t, and the factor by which the upper half of the interval is wider. k3 has a long tail:
in one step, one of 128 episodes had 82 % of the gap. A sample lacks such episodes more often than it has them, so the
variance is also no less than that of recent measurements. For draws of 19 of 128 episodes such intervals held the true
value in 99.5 % or more, in each of six runs; without the factor and the memory, in 77 to 91 %."""
ROUNDING_DRIFT = 1e-12
"""k3 by which two computations of the same drift differ: float32 rounds a log-prob of 8 by half of 1e-6, in both policies.
Without it the interval of a step with the newest weights, whose drift is rounding alone, would have no width."""
STALENESS_BINS, TURN_BINS, POSITION_BINS = 8, 16, 8
"""Numbers of ages, turns and ranges of positions by which drift is reported; the last of each includes all above it."""
FIRST_POSITION_BIN = 64
"""Number of positions in the first range of a sample; each further range is as long as all before it."""
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

    Returns float64 `[DRIFT_BINS + episode_count, 2]`, without gradient. Positions are 0..63, 64..127, 128..255, ...

    Args:
        logprobs: float32 `[M]`; the other columns are int64 `[M]`, on the same device.
        token_limit: The most that a token counts, see `clamped_k3`.
        episodes: The number of each token's episode, below `episode_count`; None: episodes are not told apart.
    """
    drift = clamped_k3(logprobs.detach().double() - rollout_logprobs.double(), token_limit)
    counted = torch.stack([drift, torch.ones_like(drift)], dim=1)
    sums = torch.zeros(DRIFT_BINS + episode_count, 2, dtype=torch.float64, device=logprobs.device)
    sums.index_add_(0, staleness.clamp(0, STALENESS_BINS - 1), counted)
    sums.index_add_(0, STALENESS_BINS + turns.clamp(0, TURN_BINS - 1), counted)
    edges = FIRST_POSITION_BIN * 2 ** torch.arange(POSITION_BINS - 1, device=logprobs.device)
    sums.index_add_(0, STALENESS_BINS + TURN_BINS + torch.bucketize(positions, edges, right=True), counted)
    return sums if episodes is None else sums.index_add_(0, DRIFT_BINS + episodes, counted)


def estimate_served_drift(drift: DriftSums) -> float:
    """Return an unbiased estimate of served drift over all trained tokens; 0 if it is negative.

    It is `trained + (probed served - probed replayed)`, of means. Every token counts equally often in the rows.
    """
    trained, replayed, served = (k3 / max(tokens, 1.0) for k3, tokens in (sums.sum(axis=0) for sums in drift))
    return float(np.maximum(trained + served - replayed, 0.0))


def compute_served_gaps(drift: DriftSums) -> list[float | None]:
    """Return, for each age, how far served drift is above the replayed one over its probed tokens; None without any."""
    replayed, served = drift.probed_replayed[:STALENESS_BINS], drift.probed_served[:STALENESS_BINS]
    return [
        float((served_k3 - replayed_k3) / tokens) if tokens else None
        for (replayed_k3, _), (served_k3, tokens) in zip(replayed, served, strict=True)
    ]


def compute_gap_moments(by_episode: DriftSums, usual_variance: float = 0.0) -> GapMoments:
    """Return the moments of the probed episodes.

    Args:
        by_episode: `[episodes, 2]`, see `Minibatch.reduce_drift`.
        usual_variance: The mean `compute_gap_variance` of measurements before this one; 0 if there are none.
    """
    (replayed_k3, _), (served_k3, tokens) = by_episode.probed_replayed.T, by_episode.probed_served.T
    is_probed = tokens > 0
    gap, tokens = (served_k3 - replayed_k3)[is_probed], tokens[is_probed]
    return GapMoments(
        episodes=float(len(tokens)),
        gap_squared=float(gap @ gap),
        gap_tokens=float(gap @ tokens),
        tokens_squared=float(tokens @ tokens),
        usual_variance=len(tokens) * usual_variance,
    )


def compute_gap_variance(drift: DriftSums, moments: GapMoments, epochs: int = 1) -> float | None:
    """Return the variance over probed episodes of what each adds to the gap beyond its share, in squared nats.

    The gap is a ratio of sums over episodes: Cochran, Sampling Techniques, 1977, 6.9. None for fewer than two episodes.
    The arguments are those of `compute_served_interval`.
    """
    episodes = moments.episodes / epochs
    if episodes < 2:
        return None
    replayed_k3, _ = drift.probed_replayed[:STALENESS_BINS].sum(axis=0)
    served_k3, tokens = drift.probed_served[:STALENESS_BINS].sum(axis=0)
    gap = (served_k3 - replayed_k3) / tokens
    squares = moments.gap_squared - 2 * gap * moments.gap_tokens + gap**2 * moments.tokens_squared
    return max(float(squares / epochs / (episodes - 1)), 0.0)


def compute_served_interval(drift: DriftSums, moments: GapMoments, epochs: int = 1) -> tuple[float, float] | None:
    """Return the interval around `estimate_served_drift(drift)` for the served drift of all trained tokens.

    Episodes are the sampled units: the tokens of one drift together. Their variance is the larger of this sample's and
    the usual one. `INTERVAL_CONFIDENCE` sets the width. None for fewer than two episodes.

    Args:
        drift: The sums of the same episodes, by age and so on.
        epochs: How often each episode is in them.
    """
    sample_variance = compute_gap_variance(drift, moments, epochs)
    if sample_variance is None:
        return None
    variance = max(sample_variance, moments.usual_variance / moments.episodes)
    episodes, tokens = moments.episodes / epochs, count_served_tokens(drift) / epochs
    error = math.sqrt(variance * episodes) / tokens
    value, half = estimate_served_drift(drift), float(t_quantile(round(episodes) - 1, INTERVAL_CONFIDENCE) * error)
    return max(value - half - ROUNDING_DRIFT, 0.0), value + UPPER_WIDENING * half + ROUNDING_DRIFT


def count_served_tokens(drift: DriftSums) -> float:
    """Return the number of probed tokens whose served drift was measured."""
    return float(drift.probed_served[:STALENESS_BINS, TOKEN_COUNT].sum())


def compute_drift_metrics(drift: DriftSums, moments: GapMoments, epochs: int = 1) -> dict[str, float]:
    """Return drift by age, turn and position, for those that have tokens; and served drift, if there are probed tokens.

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
    if interval := compute_served_interval(drift, moments, epochs):
        metrics |= dict(zip(SERVED_BOUND_METRICS, interval, strict=True))
    return metrics


def build_minibatch_result(
    minibatch: Minibatch,
    total: np.ndarray,
    drift: DriftSums,
    moments: GapMoments,
    update: OptimizerUpdate,
    replay: RoutingReplay,
) -> MinibatchResult:
    """Build the result of a minibatch, over all ranks. Collective. Takes the counts of `replay`.

    `total`, `drift`: see `Minibatch.reduce_loss_sums`, `Minibatch.reduce_drift`; `moments`: `compute_gap_moments`.

    The catalogue (`data/metrics.py`) says what each metric is. Routing figures count a row of several samples once for
    each of them; `routing/agreement` is also there with replay off, and missing if nothing is recorded.
    """
    counts, cause, routing, layers = minibatch.counts, update.cause, replay.pop_counts(), replay.num_moe_layers
    mine = np.zeros((layers, 2 + replay.num_experts))
    if replay.moe_layer_indices:
        figures = torch.cat(
            [torch.stack([routing.agreeing_tokens, routing.compared_tokens], dim=1), routing.expert_load], dim=1
        )
        mine[replay.moe_layer_indices] = figures.cpu().numpy()
    by_layer = minibatch.ranks.all_reduce(mine.reshape(-1), "sum").reshape(mine.shape)
    auxiliary = float(minibatch.ranks.all_reduce(np.asarray([float(routing.aux_loss)]), "sum")[0])
    agreed, compared, load = by_layer[:, 0], by_layer[:, 1], by_layer[:, 2:]
    agreement = np.divide(agreed, compared, out=np.zeros(layers), where=compared > 0)
    budget = max(counts.micro_batches, 1.0) * minibatch.config.learner.max_tokens_per_micro_batch
    metrics = (
        LossSums.compute_metrics(total)
        | compute_drift_metrics(drift, moments)
        | {
            "loss/router_aux": auxiliary,
            "rollout_kl/coef": minibatch.rollout_kl_coef,
            "routing/recorded_fraction": counts.recorded_fraction,
            "routing/recorded_fraction_fed": counts.total_recorded_fraction,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "optimizer/updates": float(not cause),
            "optimizer/skipped": float(bool(cause)),
            "optimizer/zero_variance": float(cause == "zero_variance"),
            "optimizer/broken": float(cause == "trust_region"),
            "optimizer/beyond_limit": float(update.is_beyond_limit),
            "optimizer/step_share": 0.0 if cause else update.step_share,
            "tokens/dropped_non_finite": counts.dropped,
            "batch/tokens": counts.total,
            "batch/trained_tokens": counts.trained,
            "batch/micro_batches": counts.micro_batches,
            "batch/split_episodes": float(minibatch.split_episodes.sum()) if minibatch.needs_global_logprobs else 0.0,
            "batch/shared_tokens": counts.shared,
            "batch/fill": (counts.total - counts.shared) / budget,
        }
    )
    if update.predicted_drift is not None:
        metrics[SERVED_PREDICTION_METRIC] = update.predicted_drift
    if update.served_drift_estimate is not None:
        metrics[SERVED_ESTIMATE_METRIC] = update.served_drift_estimate
    if compared.any():
        metrics["routing/agreement"] = float(agreed.sum() / compared.sum())
        metrics["routing/agreement_min"] = float(agreement[compared > 0].min())
    if layers:
        worst = load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9)
        metrics["routing/load_imbalance"] = float(worst.max())
    return MinibatchResult(
        metrics, agreement.astype(np.float32), load.astype(np.int64), minibatch.collect_traces(), drift, moments
    )


LAST_EPOCH_METRIC = f"{REPLAYED_DRIFT_METRIC}_last_epoch"
"""Mean drift in the last of several epochs: how far the updates of a step have moved away from the rollout policy."""


def combine_results(results: Sequence[MinibatchResult], epochs: int = 1) -> MinibatchResult:
    """Combine the results of several minibatches into one.

    The catalogue says how each metric combines (`Metric.combine`). `results` are those of the minibatches in
    each of `epochs`, one epoch after the other; their tokens and load count once.
    """
    if len(results) == 1:
        return results[0]
    weights = np.asarray([r.metrics["batch/trained_tokens"] for r in results])
    weights = weights if weights.any() else np.ones(len(results))
    metrics = {}
    drift = DriftSums(*np.sum([r.drift for r in results], axis=0))
    moments = GapMoments(*np.sum([r.gap_moments for r in results], axis=0).tolist())
    if epochs > 1:
        last = len(results) - len(results) // epochs
        metrics[LAST_EPOCH_METRIC] = _combine_metric(REPLAYED_DRIFT_METRIC, results[last:], epochs)
    for name in dict.fromkeys(name for r in results for name in r.metrics):
        # What was measured of drift follows from its sums.
        if name == SERVED_PREDICTION_METRIC or not name.startswith(BINNED_METRIC_PREFIXES):
            metrics[name] = _combine_metric(name, results, epochs)
    # A step that measured a part of its served drift has no estimate of it.
    if all(SERVED_ESTIMATE_METRIC in r.metrics for r in results):
        metrics[SERVED_ESTIMATE_METRIC] = _combine_metric(SERVED_ESTIMATE_METRIC, results, epochs)
    return MinibatchResult(
        metrics | compute_drift_metrics(drift, moments, epochs),
        np.average([r.layer_agreement for r in results], axis=0, weights=weights).astype(np.float32),
        np.sum([r.expert_load for r in results], axis=0) // epochs,
        [t for r in results for t in r.traces],
        drift,
        moments,
    )


def _combine_metric(name: str, results: Sequence[MinibatchResult], epochs: int) -> float:
    """Return the value of a metric over several updates, as the catalogue says, from those that have it.

    Not all have recorded routes, for example.
    """
    updates = [result.metrics for result in results if name in result.metrics]
    values = [metrics[name] for metrics in updates]
    match find_metric(name).combine:
        case "token_mean":
            return _weighted_mean(values, [metrics["batch/trained_tokens"] for metrics in updates])
        case "input_mean":
            return _weighted_mean(values, [metrics["batch/tokens"] for metrics in updates])
        case "update_mean":
            return statistics.fmean(values)
        case "sum":
            return float(sum(values))
        case "epoch_sum":
            return float(sum(values)) / epochs
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of `values`, or their mean if no weight is above 0."""
    return float(np.average(values, weights=weights if any(weights) else None))
