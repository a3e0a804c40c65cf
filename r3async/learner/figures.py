"""What a step reports: metrics of a minibatch, over all ranks, and of several minibatches as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from r3async.learner.base import MinibatchResult
from r3async.learner.losses.objective import ObjectiveSums
from r3async.learner.minibatch import Minibatch
from r3async.learner.optimizer import Update
from r3async.learner.replay import RoutingCounts

MEASURED_DRIFT = "rollout_kl/k3"
"""The metric that the trust region holds: unbiased for KL(rollout || learner), and never negative."""


def result_of(
    minibatch: Minibatch,
    total: np.ndarray,
    update: Update,
    routing: RoutingCounts,
    columns: Sequence[int],
    layers: int,
) -> MinibatchResult:
    """The figures of a minibatch, over all ranks: collective. `total`: see `Minibatch.total`. `columns`: which of the `layers`
    MoE layers this rank's routers are.

    Metrics (means are over trained tokens, log-probs in nats), besides those of `ObjectiveSums.metrics_of`:

    * `loss/router_aux`: with the other `loss/*` it adds up to the loss. `rollout_kl/coef`: of the trust region.
    * `routing/recorded_fraction`: share of trained tokens whose input position has recorded routes;
      `routing/recorded_fraction_fed`: share of all tokens fed forward that have.
    * `routing/agreement`: share of (recorded position, MoE layer) whose own top-k set is the recorded one, also with
      replay off; 0 if nothing is recorded. `routing/agreement_min`: of the layer where it is lowest.
    * `routing/load_imbalance`: tokens of the busiest expert over the layer's mean, in the worst layer.
    * `grad_norm` before clipping, `lr` used, `optimizer/updates` 1 or 0, `optimizer/skipped` 0 or 1;
      `optimizer/no_contrast` 1 if it was skipped because no trained token has an advantage, `optimizer/broken` because
      the drift was beyond `algorithm.rollout_kl.max`.
    * `tokens/dropped_non_finite`, `batch/tokens`, `batch/trained_tokens`, `batch/micro_batches`: counts.
    * `batch/split_episodes`: with a loss that takes whole episodes, how many are in several micro-batches. If any, the
      minibatch is fed forward once more, first.
    * `batch/fill`: tokens as a share of the micro-batches' token budget.
    """
    counts, cause = minibatch.counts, update.cause
    mine = np.zeros((layers, 2 + routing.load.shape[1]))
    if columns:
        figures = torch.cat([torch.stack([routing.agreed, routing.compared], dim=1), routing.load], dim=1)
        mine[list(columns)] = figures.cpu().numpy()
    by_layer = minibatch.ranks.reduce(mine.reshape(-1), "sum").reshape(mine.shape)
    (auxiliary,) = minibatch.ranks.reduce(np.asarray([float(routing.auxiliary)]), "sum").tolist()
    agreed, compared, load = by_layer[:, 0], by_layer[:, 1], by_layer[:, 2:]
    agreement = np.divide(agreed, compared, out=np.zeros(layers), where=compared > 0)
    budget = max(counts.micro_batches, 1.0) * minibatch.config.learner.max_tokens_per_micro_batch
    metrics = ObjectiveSums.metrics_of(total) | {
        "loss/router_aux": auxiliary,
        "rollout_kl/coef": minibatch.coef,
        "routing/recorded_fraction": counts.recorded_fraction,
        "routing/recorded_fraction_fed": counts.recorded_fraction_fed,
        "routing/agreement": float(agreed.sum() / max(compared.sum(), 1.0)),
        "grad_norm": update.grad_norm,
        "lr": update.lr,
        "optimizer/updates": float(not cause),
        "optimizer/skipped": float(bool(cause)),
        "optimizer/no_contrast": float(cause == "no_contrast"),
        "optimizer/broken": float(cause == "trust_region"),
        "tokens/dropped_non_finite": counts.dropped,
        "batch/tokens": counts.fed,
        "batch/trained_tokens": counts.trained,
        "batch/micro_batches": counts.micro_batches,
        "batch/split_episodes": float(minibatch.spread.sum()) if minibatch.needs_logprobs else 0.0,
        "batch/fill": counts.fed / budget,
    }
    if layers:
        worst = load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9)
        metrics |= {
            "routing/agreement_min": float(agreement.min()),
            "routing/load_imbalance": float(worst.max()),
        }
    return MinibatchResult(metrics, agreement.astype(np.float32), load.astype(np.int64), minibatch.traces())


def combined(results: Sequence[MinibatchResult]) -> MinibatchResult:
    """The figures of several minibatches as one: counts add up, extremes stay, the rest is averaged over trained tokens."""
    if len(results) == 1:
        return results[0]
    weights = np.asarray([r.metrics["batch/trained_tokens"] for r in results])
    weights = weights if weights.any() else np.ones(len(results))
    metrics = {}
    for name in results[0].metrics:
        values = [r.metrics[name] for r in results]
        if name in COMBINED:
            metrics[name] = float(COMBINED[name](values))
        elif name == "routing/recorded_fraction_fed":
            metrics[name] = float(np.average(values, weights=[max(r.metrics["batch/tokens"], 1) for r in results]))
        else:
            metrics[name] = float(np.average(values, weights=weights))
    return MinibatchResult(
        metrics,
        np.average([r.layer_agreement for r in results], axis=0, weights=weights).astype(np.float32),
        np.sum([r.expert_load for r in results], axis=0),
        [t for r in results for t in r.traces],
    )


COMBINED: dict[str, Callable[[list[float]], float]] = {
    "batch/tokens": sum,
    "batch/trained_tokens": sum,
    "batch/micro_batches": sum,
    "batch/split_episodes": sum,
    "tokens/dropped_non_finite": sum,
    "ratio/max": max,
    "rollout_logprob/abs_diff_max": max,
    "routing/agreement_min": min,
    "routing/load_imbalance": max,
    "optimizer/updates": sum,
    "optimizer/skipped": max,
    "optimizer/no_contrast": min,
    "optimizer/broken": max,
    "lr": lambda values: values[-1],
    "rollout_kl/coef": lambda values: values[-1],
}
"""How a metric of several minibatches becomes one, if not by its mean."""
