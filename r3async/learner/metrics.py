"""Metrics of a minibatch over all ranks, and of a step: several minibatches combined."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from r3async.data.metrics import find_metric
from r3async.learner.drift_metrics import (
    BINNED_METRIC_PREFIXES,
    REPLAYED_DRIFT_METRIC,
    SERVED_ESTIMATE_METRIC,
    SERVED_PREDICTION_METRIC,
    compute_drift_metrics,
)
from r3async.learner.loss import needs_whole_episodes
from r3async.learner.loss_sums import LossSums
from r3async.learner.optimizer import OptimizerUpdate
from r3async.learner.results import DriftSums, GapMoments, MinibatchResult

if TYPE_CHECKING:
    from r3async.learner.minibatch import MeasuredMinibatch
    from r3async.learner.replay import RoutingReplay


def build_minibatch_result(
    measured: MeasuredMinibatch, update: OptimizerUpdate, replay: RoutingReplay
) -> MinibatchResult:
    """Build the result of a minibatch, over all ranks. Collective. Takes the counts of `replay`.

    The catalogue (`data/metrics.py`) says what each metric is. Routing figures count a row of
    several samples once for each of them; `routing/agreement` is also there with replay off, and
    missing if nothing is recorded.
    """
    minibatch = measured.minibatch
    counts = minibatch.counts
    cause = update.cause
    routing = replay.pop_counts()
    layers = replay.num_moe_layers
    mine = np.zeros((layers, 2 + replay.num_experts))
    if replay.moe_layer_indices:
        figures = torch.cat(
            [
                torch.stack([routing.agreeing_tokens, routing.compared_tokens], dim=1),
                routing.expert_load,
            ],
            dim=1,
        )
        mine[replay.moe_layer_indices] = figures.cpu().numpy()
    by_layer = minibatch.ranks.all_reduce(mine.reshape(-1), "sum").reshape(mine.shape)
    auxiliary = float(minibatch.ranks.all_reduce(np.asarray([float(routing.aux_loss)]), "sum")[0])
    agreed = by_layer[:, 0]
    compared = by_layer[:, 1]
    load = by_layer[:, 2:]
    agreement = np.divide(agreed, compared, out=np.zeros(layers), where=compared > 0)
    budget = max(counts.micro_batches, 1.0) * minibatch.config.learner.max_tokens_per_micro_batch
    metrics = (
        LossSums.compute_metrics(measured.loss_sums)
        | compute_drift_metrics(measured.drift, measured.gap_moments)
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
            "batch/split_episodes": float(minibatch.split_episodes.sum())
            if needs_whole_episodes(minibatch.config.algorithm)
            else 0.0,
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
        metrics,
        agreement.astype(np.float32),
        load.astype(np.int64),
        minibatch.collect_traces(),
        measured.drift,
        measured.gap_moments,
    )


LAST_EPOCH_METRIC = f"{REPLAYED_DRIFT_METRIC}_last_epoch"
"""Mean drift in the last of several epochs: how far the updates of a step have moved away from
the rollout policy."""


def combine_results(results: Sequence[MinibatchResult], epochs: int = 1) -> MinibatchResult:
    """Combine the results of several minibatches into one.

    The catalogue says how each metric combines (`Metric.combine`). `results` are those of the
    minibatches in each of `epochs`, one epoch after the other; their tokens and load count once.
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
        np.average([r.layer_agreement for r in results], axis=0, weights=weights).astype(
            np.float32
        ),
        np.sum([r.expert_load for r in results], axis=0) // epochs,
        [t for r in results for t in r.traces],
        drift,
        moments,
    )


def _combine_metric(name: str, results: Sequence[MinibatchResult], epochs: int) -> float:
    """Return the value of a metric over several updates, as the catalogue says, from
    those that have it.

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
