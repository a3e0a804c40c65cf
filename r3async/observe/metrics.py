"""What was measured: `run_dir/metrics.jsonl`, one JSON object per optimizer step. `METRICS` says what each name means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.appending import AppendFile
from r3async.observe.jsonl import read_objects
from r3async.world import Files, World
from r3async.world.real import REAL


class Metric(NamedTuple):
    label: str
    unit: str
    docs: str


METRICS: dict[str, Metric] = {
    "step": Metric("step", "", "Optimizer step, from 1."),
    "version": Metric("version", "", "Policy version that this step made."),
    "time": Metric("time", "unix s", "When the row was written, after the step's weights were installed."),
    "reward/mean": Metric(
        "reward",
        "",
        "Mean reward of the step's trajectories (a trajectory's is the sum of its turns'; failed ones have none).",
    ),
    "reward/max": Metric("best reward", "", "Highest reward of the step's trajectories."),
    "episode/turns_mean": Metric("turns", "", "Mean number of turns per episode."),
    "episode/rows_mean": Metric(
        "rows", "", "Mean number of rows of training per episode; 1 where no history is rewritten."
    ),
    "episode/ended_env_done": Metric("done", "", "Episodes that the environment ended."),
    "episode/ended_turns": Metric("out of turns", "", "Episodes that ended by episode.max_turns."),
    "episode/ended_length": Metric("out of context", "", "Episodes that ended because the next prompt was too long."),
    "episode/ended_stop": Metric("stopped asking", "", "Episodes of agents that ended by themselves."),
    "episode/ended_timeout": Metric(
        "timed out", "", "Episodes that ended by episode.timeout; rewarded turns are trained."
    ),
    "episode/ended_error": Metric("failed", "", "Episodes that failed for good; nothing of them is trained."),
    "loss/policy": Metric("policy loss", "", "Policy loss per trained token."),
    "loss/rollout_kl": Metric(
        "drift loss", "", "Rollout-KL term of the loss per trained token, before its coefficient."
    ),
    "rollout_kl/k1": Metric(
        "drift k1", "nats", "Mean of -Δ, Δ = log π_learner - log μ_rollout. Unbiased; may be negative."
    ),
    "rollout_kl/k2": Metric("drift k2", "nats", "Mean of Δ²/2: low variance."),
    "rollout_kl/k3": Metric("drift k3", "nats", "Mean of e^Δ - 1 - Δ: unbiased for KL(μ‖π), never negative."),
    "loss/reference_kl": Metric(
        "reference loss", "", "KL to the frozen reference model, weighted: a term of the loss."
    ),
    "loss/entropy": Metric("entropy bonus", "", "Entropy, weighted and negative: a term of the loss."),
    "loss/router_aux": Metric("router loss", "", "Load balance of the routers, weighted: a term of the loss."),
    "rollout_kl/coef": Metric("drift coefficient", "", "Coefficient of the rollout-KL term in this step."),
    "reference_kl/k3": Metric("distance to reference", "nats", "KL(learner‖reference), k3, mean over trained tokens."),
    "rollout_corr/kl": Metric("rollout KL", "nats", "The same as drift k1."),
    "rollout_corr/k3_kl": Metric("rollout k3", "nats", "The same as drift k3."),
    "rollout_corr/ess": Metric("rollout ESS", "fraction", "The same as effective samples."),
    "rollout_corr/chi2_token": Metric("chi² by token", "", "Mean squared ratio of tokens, less 1."),
    "rollout_corr/chi2_seq": Metric("chi² by sample", "", "Mean squared ratio of whole samples, less 1."),
    "rollout_corr/training_ppl": Metric("learner perplexity", "", "Mean over samples of e^-(mean log-prob)."),
    "rollout_corr/rollout_ppl": Metric("rollout perplexity", "", "The same under the rollout policy."),
    "rollout_corr/ppl_ratio": Metric("perplexity ratio", "", "Learner over rollout, mean over samples."),
    "rollout_corr/clipped_fraction": Metric(
        "clipped", "fraction", "Trained tokens held by a bound of the policy loss."
    ),
    "rollout_corr/masked_fraction": Metric("masked", "fraction", "Trained tokens that a correction left out."),
    "rollout_corr/masked_sequence_fraction": Metric(
        "masked samples", "fraction", "Samples of which a correction left out every token."
    ),
    "advantage/mean": Metric("mean advantage", "", "Over trained tokens."),
    "advantage/std": Metric("advantage spread", "", "Standard deviation over trained tokens."),
    "advantage/abs_max": Metric("largest advantage", "", "By absolute value."),
    "advantage/zero_variance_groups": Metric("groups without contrast", "groups", "All of their scores are equal."),
    "advantage/zero_variance_share": Metric("share without contrast", "fraction", "Those groups over all of the step."),
    "advantage/overlong_samples": Metric(
        "overlong", "episodes", "Ended because an answer or the context was too long."
    ),
    "advantage/overlong_penalty": Metric("overlong penalty", "", "Mean penalty of long answers."),
    "advantage/filtered_tokens": Metric("filtered", "tokens", "Tokens that a filter kept from training."),
    "rollout_logprob/abs_diff_mean": Metric(
        "log-prob difference", "nats", "Mean of |log π_learner - log μ_rollout| over trained tokens."
    ),
    "rollout_logprob/abs_diff_max": Metric(
        "largest log-prob difference", "nats", "The same of the trained token where it is largest."
    ),
    "ratio/max": Metric("max ratio", "", "Largest π_learner/μ_rollout of a trained token."),
    "ratio/ess": Metric("effective samples", "fraction", "(Σw)²/(n Σw²) of the ratios: 1 when all weigh the same."),
    "entropy/mean": Metric("entropy", "nats", "Mean entropy of the learner's distribution at trained tokens."),
    "staleness/mean": Metric("mean age", "versions", "Mean age of trained tokens: version of the step less their own."),
    "staleness/max": Metric("max age", "versions", "Age of the oldest trained token."),
    "staleness/bound": Metric("age bound", "versions", "What the schedule promises: no trained token is older."),
    "staleness/masked_fraction": Metric(
        "too old", "fraction", "Trained tokens older than `schedule.max_token_age`: left out of the policy loss."
    ),
    "staleness/queue_seconds_mean": Metric(
        "queued", "s", "Mean time from an episode's end to the step that trains it."
    ),
    "staleness/queue_seconds_max": Metric("longest queued", "s", "Longest time from an episode's end to its step."),
    "staleness/age_0": Metric(
        "tokens of age 0", "tokens", "Trained tokens of that age; so `staleness/age_1`, and on to the bound."
    ),
    "routing/recorded_fraction": Metric(
        "routes recorded", "fraction", "Share of trained tokens' inputs with recorded routes."
    ),
    "routing/recorded_fraction_fed": Metric(
        "routes recorded, all rows",
        "fraction",
        "Share of all tokens that the learner feeds forward, prompts included, with recorded routes. The last token of a sample "
        "has none: the engine never fed it.",
    ),
    "routing/agreement": Metric(
        "routing agreement",
        "fraction",
        "Share of (recorded token, MoE layer) for which the learner would choose the recorded set of experts.",
    ),
    "routing/agreement_min": Metric(
        "lowest agreement", "fraction", "Routing agreement of the MoE layer where it is lowest."
    ),
    "routing/load_imbalance": Metric(
        "load imbalance", "", "Tokens of the busiest expert over its layer's mean, in the worst layer: 1 is even."
    ),
    "batch/groups": Metric("groups", "groups", "Groups that the step consumed."),
    "batch/tokens": Metric("tokens", "tokens", "Tokens of the batch, prompts and observations included."),
    "batch/trained_tokens": Metric(
        "trained tokens", "tokens", "Tokens that the policy sampled and that entered the loss."
    ),
    "batch/micro_batches": Metric("micro-batches", "", "Forward and backward passes of the step."),
    "batch/split_episodes": Metric(
        "split episodes",
        "episodes",
        "In several micro-batches, with a loss that takes whole episodes: then the step has one more forward pass.",
    ),
    "batch/fill": Metric("fill", "fraction", "Tokens over the token budget of the micro-batches."),
    "tokens/dropped_non_finite": Metric(
        "dropped tokens", "tokens", "Tokens left out for a log-prob that is not finite."
    ),
    "grad_norm": Metric("gradient norm", "", "Global norm before clipping."),
    "lr": Metric("learning rate", "", "Learning rate of the step."),
    "optimizer/broken": Metric("broken", "", "1 if the update was refused: drift beyond `algorithm.rollout_kl.max`."),
    "optimizer/updates": Metric("updates", "", "Optimizer updates that the step made: at most one a minibatch."),
    "optimizer/skipped": Metric(
        "skipped", "", "1 if an update was left out: see what follows, or `metric_not_finite`."
    ),
    "optimizer/no_contrast": Metric(
        "no contrast", "", "1 if no trained token of the step had an advantage: weights and moments stay."
    ),
    "learner/wait_seconds": Metric("learner waited", "s", "Time the learner waited for a full batch."),
    "learner/idle_share": Metric(
        "learner idle", "fraction", "Share of the last 16 steps' time in which the learner waited for groups."
    ),
    "generator/idle_share": Metric(
        "generators idle",
        "fraction",
        "Share of the generators' places for episodes that stood empty because every slot was taken, last 16 steps.",
    ),
    "generator/engine_idle_share": Metric(
        "engines idle", "fraction", "Share of the step's time in which an engine had no request at all."
    ),
    "pace/ratio": Metric(
        "pace", "", "Capacity of generation over capacity of training: below 1 generation is the slower side."
    ),
    "learner/step_seconds": Metric("learner step", "s", "Time of forward, backward and optimizer."),
    "throughput/generated_tokens_per_second": Metric("generated", "tokens/s", "Tokens sampled by all engines."),
    "throughput/trained_tokens_per_second": Metric(
        "trained", "tokens/s", "Trained tokens over the wall time of the step."
    ),
    "weights/snapshot_seconds": Metric(
        "snapshot", "s", "Time the learner stood still to copy the step's weights, and for those before to be written."
    ),
    "weights/write_seconds": Metric(
        "write", "s", "Time to write the step's weights for the engines, beside the next step."
    ),
    "weights/update_seconds": Metric("update", "s", "Time to deliver the step's weights to all engines."),
    "weights/transfer_seconds": Metric("transfer", "s", "Longest time for a generator to get and check the weights."),
    "weights/bytes": Metric("weights", "bytes", "Size of a version as engines get it."),
    "weights/load_seconds": Metric("load", "s", "Longest time for an engine to load them."),
    "weights/paused_share": Metric(
        "paused", "fraction", "Share of the generators' time so far in which new weights kept them from generating."
    ),
    "weights/pause_seconds": Metric("pause", "s", "Longest pause of an engine for that delivery."),
    "transport/received": Metric("received", "trajectories", "Trajectories accepted since the learner started."),
    "transport/duplicates": Metric(
        "duplicates", "trajectories", "Trajectories that arrived again and were not used again."
    ),
    "transport/rejected": Metric("rejected", "trajectories", "Messages refused because they did not validate."),
    "transport/damaged": Metric(
        "damaged", "trajectories", "Deliveries that changed on their way, and were sent again."
    ),
    "buffer/ready_groups": Metric("ready groups", "groups", "Complete groups that wait for the next step."),
    "slots/taken": Metric("slots taken", "groups", "Staleness slots in use."),
    "generator/concurrency": Metric("concurrency", "episodes", "Episodes that all generators may play at once now."),
    "lag/conductor_p50_ms": Metric(
        "conductor lag", "ms", "How late the conductor's event loop is, median of a minute; so `_p99_ms` and `_max_ms`."
    ),
    "lag/learner_p50_ms": Metric("learner lag", "ms", "The same of the learner's event loop."),
    "lag/generator_p50_ms": Metric(
        "generator lag", "ms", "The same of the generators' event loops, the worst of them."
    ),
    "data/quarantined_tasks": Metric(
        "tasks quarantined", "", "Tasks that are not posed again: all their episodes failed."
    ),
    "data/epochs": Metric("epochs", "", "How often all tasks were leased, where the environment says how many it has."),
    "generator/restarts": Metric("restarts", "", "Generator processes that were restarted since the run last started."),
}
"""Every metric, in the order in which people look at them. A row may lack some, and may hold more."""


def _number(value: Any) -> Any:
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a metric is a number, got {type(value).__name__}")
    return item()


_encoder = msgspec.json.Encoder(enc_hook=_number)


class MetricsWriter:
    """Appends rows to `metrics.jsonl`. One writer per run; a row is in the file when `write` returns, or kept."""

    def __init__(self, run_dir: Path, *, world: World = REAL):
        self._file = AppendFile(Path(run_dir) / "metrics.jsonl", world=world)

    def write(self, row: Mapping[str, Any]) -> list[str]:
        """Append one step. Non-finite values are written as null, and their names returned: they need attention.

        Raises `TypeError` for a value that is no number (nor text or None).
        """
        plain = {k: v if isinstance(v, (int, float, str, type(None))) else _number(v) for k, v in row.items()}
        odd = [name for name, value in plain.items() if isinstance(value, float) and not math.isfinite(value)]
        self._file.append(_encoder.encode({**plain, **dict.fromkeys(odd)}))
        return odd

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path, *, files: Files = REAL.files) -> list[dict[str, Any]]:
    """The rows in order. A torn last line (a writer that died) is left out; a missing file has no rows."""
    return list(read_objects(Path(path), files=files))
