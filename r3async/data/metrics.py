"""The catalogue of metrics: name, unit, meaning and view of each. All views read this table.

`metrics.jsonl` has one object per step; a row may lack some of these metrics, and may have others.
`python -m dev.pages.reference` writes the tables of docs/metrics.md from this one. A test checks
that a run writes exactly the metrics listed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, product
from typing import Any, Literal, NamedTuple

import msgspec

from r3async.data.stage_names import SINGLE_KIND_STAGES, STAGES_BY_ROLE


class CurveStyle(NamedTuple):
    """The way a metric is drawn in a chart.

    Attributes:
        chart: Title of the chart.
        is_scatter: Draw points instead of a line, and ignore them when the axis is scaled.
    """

    chart: str
    label: str
    color: str
    dash: str = ""
    is_scatter: bool = False


MetricCombination = Literal[
    "token_mean", "input_mean", "update_mean", "sum", "epoch_sum", "max", "min", "last"
]
"""How the value of a step follows from those of its updates, one for each minibatch and epoch.

`token_mean` weighs each update by its trained tokens, `input_mean` by all of its tokens,
`update_mean` all the same; `epoch_sum` is the sum over the minibatches of one epoch.
"""


class Metric(NamedTuple):
    """A metric of the catalogue.

    Attributes:
        desired: The better direction, `high` or `low`, or the desired value itself; empty if
            neither is better.
        combine: The value of a step from those of its updates; see `MetricCombination`.
        comparison_stats: Fields of `MetricStats` that a comparison of runs shows,
            separated by spaces.
        gauge: Its short name in a dashboard of last values; empty if it is not in one.
        part_stats: Fields of `MetricStats` that a report shows for each part of the run,
            separated by spaces.
    """

    name: str
    label: str
    unit: str
    desired: str
    description: str
    comparison_stats: str = ""
    curve: CurveStyle | None = None
    gauge: str = ""
    part_stats: str = ""
    combine: MetricCombination = "token_mean"

    @property
    def group(self) -> str:
        """The prefix of the name; `step` if the name has none."""
        return self.name.partition("/")[0] if "/" in self.name else "step"

    @property
    def is_main(self) -> bool:
        """True if a view shows the metric, and it is not of where a process's time goes."""
        is_shown = bool(self.curve or self.gauge or self.comparison_stats) or self.name == "lr"
        return is_shown and self.group not in PROCESS_TIME_GROUPS


PROCESS_TIME_GROUPS = ("cpu", "wall", "lag")
"""Groups of metrics that say where the time of processes goes."""
LINE_COLORS = ("blue", "orange", "green", "violet", "red", "amber")
"""Colors of a chart's lines, used in turn."""


def _iter_stage_metrics() -> Iterator[Metric]:
    for who, (of, stages) in STAGES_BY_ROLE.items():
        for (name, docs), (dash, color) in zip(
            stages.items(), cycle(product(("", "dash", "dot"), LINE_COLORS)), strict=False
        ):
            curve = CurveStyle(f"{who.capitalize()} stages", name, color, dash)
            if SINGLE_KIND_STAGES.get(name) != "wall":
                text = f"Processor time of {of}: {docs}."
                yield Metric(
                    f"cpu/{who}_{name}_seconds", f"{who} CPU, {name}", "s", "low", text, curve=curve
                )
            if SINGLE_KIND_STAGES.get(name) != "cpu":
                text = f"Wall time of the event loops of {of}: {docs}."
                yield Metric(f"wall/{who}_{name}_seconds", f"{who} wall, {name}", "s", "", text)


# fmt: off
_METRIC_TABLE = (
    Metric("step", "step", "", "", "Training step, from 1."),
    Metric("version", "version", "", "", "Version of the weights that this step made."),
    Metric("lineage", "lineage", "", "", "Start of the run in which versions are counted."),
    Metric("time", "time", "unix s", "",
           "When the row was written, at the step's end."),
    Metric("reward/mean", "reward", "", "high",
           "Mean reward of the step's episodes, each the sum of its turns; failed ones have "
           "none.",
           "first_mean last_mean max", curve=CurveStyle("Reward", "mean", "blue"), gauge="reward"),
    Metric("reward/max", "best reward", "", "high", "Highest reward of the step.",
           curve=CurveStyle("Reward", "best", "green", "dot")),
    Metric("reward/std", "reward spread", "", "",
           "Standard deviation over all the step's episodes.",
           curve=CurveStyle("Reward spread", "of all episodes", "violet")),
    Metric("reward/std_in_group", "reward spread in a group", "", "",
           "Standard deviation within a group, mean over groups.",
           curve=CurveStyle("Reward spread", "within a group", "orange")),
    Metric("response_length/mean", "response length", "tokens", "",
           "Tokens sampled per episode, over its turns: mean, 95th percentile, maximum.",
           comparison_stats="first_mean last_mean",
           curve=CurveStyle("Response length", "mean", "blue")),
    Metric("response_length/p95", "response length, p95", "tokens", "",
           "Tokens sampled per episode, over its turns: mean, 95th percentile, maximum.",
           curve=CurveStyle("Response length", "95th percentile", "orange")),
    Metric("response_length/max", "longest response", "tokens", "",
           "Tokens sampled per episode, over its turns: mean, 95th percentile, maximum.",
           curve=CurveStyle("Response length", "longest", "green", "dot")),
    Metric("response_length/clip_ratio", "truncated", "fraction", "low",
           "Share of episodes with an answer cut at its length limit, or a full context.",
           curve=CurveStyle("Truncated", "share of episodes", "orange")),
    Metric("episode/turns_mean", "turns", "", "", "Mean turns per episode."),
    Metric("episode/rows_mean", "samples", "", "1",
           "Mean samples per episode; 1 unless history is rewritten."),
    Metric("episode/ended_env_done", "done", "episodes", "high",
           "Episodes that the environment ended."),
    Metric("episode/ended_turns", "out of turns", "episodes", "low",
           "Episodes ended by `episode.max_turns`."),
    Metric("episode/ended_length", "out of context", "episodes", "low",
           "Episodes ended because the next prompt was too long."),
    Metric("episode/ended_stop", "stopped asking", "episodes", "",
           "Agents' episodes that ended by themselves."),
    Metric("episode/ended_timeout", "timed out", "episodes", "low",
           "Episodes ended by `episode.timeout`; rewarded turns are trained."),
    Metric("episode/ended_error", "failed", "episodes", "low",
           "Episodes that failed for good; not trained."),
    Metric("loss/policy", "policy loss", "", "", "Policy loss per trained token.",
           curve=CurveStyle("Policy loss", "policy loss", "blue")),
    Metric("loss/answers", "loss of answers", "nats", "low",
           "`r3async sft`: mean -log p of the step's answer tokens, before its update.",
           comparison_stats="first_mean last_mean", curve=CurveStyle("Answers", "trained", "blue")),
    Metric("loss/answers_held_out", "held-out loss", "nats", "low",
           "`r3async sft`: mean -log p over the rows of `data.eval`, after the step's update.",
           comparison_stats="last_value", curve=CurveStyle("Answers", "held out", "orange")),
    Metric("loss/rollout_kl", "drift loss", "", "low",
           "Rollout-KL term per trained token, before its coefficient."),
    Metric("rollout_kl/k1", "drift k1", "nats", "0",
           "Mean of -Δ, Δ = log π_learner - log μ_rollout. Unbiased; may be negative.",
           curve=CurveStyle("Drift", "k1", "orange", is_scatter=True), part_stats="mean"),
    Metric("rollout_kl/k2", "drift k2", "nats", "low", "Mean of Δ²/2: low variance.",
           curve=CurveStyle("Drift", "k2", "violet", "dash"), part_stats="mean"),
    Metric("rollout_kl/k3", "drift k3", "nats", "low",
           "Mean of e^Δ - 1 - Δ, at most 100 a token: estimates KL(rollout‖learner), never negative.",
           comparison_stats="last_mean max", curve=CurveStyle("Drift", "k3", "blue"), gauge="drift",
           part_stats="mean max"),
    Metric("rollout_kl/k3_last_epoch", "drift, last epoch", "nats", "low",
           "Drift k3 in the last of `schedule.epochs_per_step` passes; `rollout_kl/k3` is over "
           "all."),
    Metric("rollout_kl/served_k3", "served drift", "nats", "low",
           "Drift k3 with the routers' own choice, as engines serve the weights; on a sample, in "
           "some steps.",
           comparison_stats="last_mean max", curve=CurveStyle("Drift", "served", "green"),
           part_stats="mean max"),
    Metric("rollout_kl/served_k3_low", "served drift, at least", "nats", "low",
           "Ends of the interval for served drift of all trained tokens; need two probed "
           "episodes."),
    Metric("rollout_kl/served_k3_high", "served drift, at most", "nats", "low",
           "Ends of the interval for served drift of all trained tokens; need two probed "
           "episodes."),
    Metric("rollout_kl/served_k3_estimate", "served drift, estimated", "nats", "low",
           "Served drift, as estimated in a step that does not measure it."),
    Metric("rollout_kl/served_k3_predicted", "drift ahead", "nats", "low",
           "With `algorithm.rollout_kl.limit`: served drift of the probed episodes under the "
           "step's new weights.",
           combine="max"),
    Metric("rollout_kl/served_tokens", "probed tokens", "tokens", "",
           "Tokens on which served drift was measured."),
    Metric("rollout_kl/k3_staleness_0", "drift at staleness 0", "nats", "low",
           "Drift k3 at staleness 0; likewise `rollout_kl/k3_staleness_1` and so on, 7 for all "
           "older."),
    Metric("rollout_kl/k3_turn_0", "drift in turn 0", "nats", "low",
           "Drift k3 of an episode's first turn; likewise `_1` and so on, 15 for all later."),
    Metric("rollout_kl/k3_position_0", "drift at position 0", "nats", "low",
           "Drift k3 at positions 0 to 63, `_1` at 64 to 127, and so on. "
           "`rollout_kl/served_k3_staleness_0`, ... are of served drift."),
    Metric("loss/reference_kl", "reference loss", "", "low",
           "Weighted KL to the reference model."),
    Metric("loss/entropy", "entropy bonus", "", "",
           "Weighted negative entropy."),
    Metric("loss/router_aux", "router loss", "", "low",
           "Weighted load balance of the routers."),
    Metric("rollout_kl/coef", "drift coefficient", "", "",
           "Coefficient of the rollout-KL term.", part_stats="mean",
           combine="last"),
    Metric("reference_kl/k3", "distance to reference", "nats", "low",
           "KL(learner‖reference), k3, mean over trained tokens."),
    Metric("distillation/reverse_kl", "distance to teacher", "nats", "low",
           "KL(rollout‖teacher): mean of log μ_rollout - log teacher; may be negative.",
           comparison_stats="first_mean last_mean",
           curve=CurveStyle("Teacher", "reverse KL", "blue")),
    Metric("rollout_corr/chi2_token", "chi² by token", "", "low",
           "Mean squared ratio, less 1, of tokens and of whole episodes."),
    Metric("rollout_corr/chi2_seq", "chi² by episode", "", "low",
           "Mean squared ratio, less 1, of tokens and of whole episodes."),
    Metric("rollout_corr/training_ppl", "learner perplexity", "", "",
           "Perplexity of the learner and of the rollout policy: mean over episodes of e^-(mean "
           "log-prob)."),
    Metric("rollout_corr/rollout_ppl", "rollout perplexity", "", "",
           "Perplexity of the learner and of the rollout policy: mean over episodes of e^-(mean "
           "log-prob)."),
    Metric("rollout_corr/ppl_ratio", "perplexity ratio", "", "1",
           "Learner's perplexity over the rollout policy's, mean over episodes."),
    Metric("rollout_corr/clipped_fraction", "clipped", "fraction", "low",
           "Trained tokens held by a bound of the policy loss: any, upper, lower.",
           part_stats="mean"),
    Metric("rollout_corr/clipped_high_fraction", "clipped above", "fraction", "low",
           "Trained tokens held by a bound of the policy loss: any, upper, lower.",
           curve=CurveStyle("Clipped", "from above", "orange")),
    Metric("rollout_corr/clipped_low_fraction", "clipped below", "fraction", "low",
           "Trained tokens held by a bound of the policy loss: any, upper, lower.",
           curve=CurveStyle("Clipped", "from below", "blue")),
    Metric("rollout_corr/masked_fraction", "masked", "fraction", "low",
           "Trained tokens, and whole episodes, that a correction left out."),
    Metric("rollout_corr/masked_sequence_fraction", "masked episodes", "fraction", "low",
           "Trained tokens, and whole episodes, that a correction left out."),
    Metric("advantage/mean", "mean advantage", "", "",
           "Over trained tokens: mean, standard deviation, largest absolute value."),
    Metric("advantage/std", "advantage spread", "", "",
           "Over trained tokens: mean, standard deviation, largest absolute value."),
    Metric("advantage/abs_max", "largest advantage", "", "",
           "Over trained tokens: mean, standard deviation, largest absolute value."),
    Metric("advantage/zero_variance_groups", "groups with zero variance", "groups", "low",
           "Groups whose scores, without penalties, are all equal."),
    Metric("advantage/zero_variance_share", "share with zero variance", "fraction", "low",
           "Share of the step's groups whose scores, without penalties, are all equal.",
           gauge="zero variance"),
    Metric("advantage/overlong_samples", "overlong", "episodes", "low",
           "Episodes ended because an answer or the context was too long."),
    Metric("advantage/overlong_penalty", "overlong penalty", "", "",
           "Mean penalty for long answers."),
    Metric("advantage/filtered_tokens", "filtered", "tokens", "",
           "Tokens that a filter kept from training."),
    Metric("rollout_logprob/abs_diff_mean", "log-prob difference", "nats", "low",
           "Mean of |log π_learner - log μ_rollout| over trained tokens; staleness adds to it."),
    Metric("rollout_logprob/abs_diff_max", "largest log-prob difference", "nats", "low",
           "Largest |log π_learner - log μ_rollout| of a trained token.", combine="max"),
    Metric("ratio/max", "largest ratio", "", "low",
           "Largest π_learner/μ_rollout of a trained token.", part_stats="max",
           combine="max"),
    Metric("ratio/ess", "effective samples", "fraction", "high",
           "(Σw)²/(n Σw²) of the ratios: 1 if all weigh the same.",
           part_stats="mean"),
    Metric("entropy/mean", "entropy", "nats", "",
           "Mean entropy of the learner's distribution at trained tokens.",
           curve=CurveStyle("Entropy", "entropy", "blue")),
    Metric("staleness/mean", "mean staleness", "versions", "low",
           "Mean staleness of trained tokens.",
           comparison_stats="mean", curve=CurveStyle("Staleness", "mean", "blue"),
           gauge="staleness", part_stats="mean"),
    Metric("staleness/max", "oldest token", "versions", "low",
           "Staleness of the oldest trained token.",
           comparison_stats="max", curve=CurveStyle("Staleness", "oldest token", "orange")),
    Metric("staleness/bound", "staleness allowed", "versions", "",
           "Limit that the schedule guarantees."),
    Metric("staleness/masked_fraction", "too old", "fraction", "low",
           "Trained tokens older than `schedule.max_token_age`."),
    Metric("staleness/queue_seconds_mean", "queued", "s", "low",
           "From an episode's end to the step that trains it: mean, longest."),
    Metric("staleness/queue_seconds_max", "longest queued", "s", "low",
           "From an episode's end to the step that trains it: mean, longest."),
    Metric("staleness/tokens_0", "tokens at staleness 0", "tokens", "",
           "Trained tokens of staleness 0; likewise `staleness/tokens_1` and so on."),
    Metric("routing/recorded_fraction", "routes recorded", "fraction", "high",
           "Share of trained tokens' inputs with recorded routes.",
           comparison_stats="mean", curve=CurveStyle("Routing", "recorded", "green")),
    Metric("routing/recorded_fraction_fed", "routes recorded, all inputs", "fraction", "high",
           "The same of all tokens fed forward. A sample's last token has no route.",
           combine="input_mean"),
    Metric("routing/agreement", "routing agreement", "fraction", "high",
           "Share of (recorded token, MoE layer) pairs for which the learner would choose the "
           "recorded experts.",
           comparison_stats="mean", curve=CurveStyle("Routing", "agreement", "blue"),
           gauge="routing agreement",
           part_stats="mean"),
    Metric("routing/agreement_min", "lowest agreement", "fraction", "high",
           "Routing agreement of the worst MoE layer.", combine="min"),
    Metric("routing/load_imbalance", "load imbalance", "", "1",
           "Tokens of the busiest expert over its layer's mean, in the worst layer.",
           combine="max"),
    Metric("batch/groups", "groups", "groups", "",
           "Groups consumed, with those replaced by `schedule.replaced_groups`."),
    Metric("batch/quarantined", "quarantined", "trajectories", "0",
           "Untrainable trajectories, refused and replaced."),
    Metric("batch/tokens", "tokens", "tokens", "",
           "Tokens of the batch, prompts and observations included.",
           combine="epoch_sum"),
    Metric("batch/trained_tokens", "trained tokens", "tokens", "",
           "Sampled tokens that entered the loss.",
           combine="epoch_sum"),
    Metric("batch/micro_batches", "micro-batches", "", "low",
           "Forward and backward passes of the step.",
           combine="epoch_sum"),
    Metric("batch/split_episodes", "split episodes", "episodes", "low",
           "Episodes in several micro-batches, with a loss over whole episodes: one more forward "
           "pass.",
           combine="epoch_sum"),
    Metric("batch/shared_tokens", "shared tokens", "tokens", "",
           "Tokens not fed forward, because of `learner.share_prefixes`.",
           combine="epoch_sum"),
    Metric("batch/fill", "fill", "fraction", "high",
           "Tokens fed forward over the micro-batches' token budget."),
    Metric("tokens/dropped_non_finite", "dropped tokens", "tokens", "0",
           "Tokens left out for a log-prob that is not finite.",
           combine="epoch_sum"),
    Metric(
        "grad_norm",
        "gradient norm",
        "",
        "",
        "Global norm before clipping.",
        curve=CurveStyle("Gradient norm", "norm", "blue"),
    ),
    Metric("lr", "learning rate", "", "", "Learning rate.", combine="last"),
    Metric("optimizer/step_share", "share of the step", "fraction", "high",
           "Share of an update that was made, mean over updates: below 1 if "
           "`algorithm.rollout_kl.limit` shortened one, 0 if none was made.",
           combine="update_mean"),
    Metric("optimizer/beyond_limit", "beyond the limit", "updates", "0",
           "Updates made although they lead to more served drift than "
           "`algorithm.rollout_kl.limit`.",
           combine="sum"),
    Metric("optimizer/broken", "broken", "", "0",
           "1 if drift beyond `algorithm.rollout_kl.max` refused the update.",
           part_stats="max", combine="max"),
    Metric("optimizer/updates", "updates", "", "high",
           "Optimizer updates: at most one per minibatch and epoch.",
           combine="sum"),
    Metric("optimizer/skipped", "skipped", "", "0",
           "1 if an update was left out, for any reason.", combine="max"),
    Metric("optimizer/zero_variance", "zero variance", "", "0",
           "1 if no trained token had an advantage: weights and moments stay.",
           combine="min"),
    Metric("timing/wait_seconds", "learner waited", "s", "low",
           "Learner waits for a full batch.",
           curve=CurveStyle("Learner time", "waiting for data", "orange"), gauge="learner"),
    Metric("learner/idle_share", "learner idle", "fraction", "low",
           "Share of the last 16 steps' time in which the learner waited for groups.",
           curve=CurveStyle("Idle", "learner, for want of groups", "blue")),
    Metric("generator/idle_share", "generators idle", "fraction", "low",
           "Share of the episode places left empty because every slot was taken, last 16 steps.",
           curve=CurveStyle("Idle", "generators, for want of a slot", "orange")),
    Metric("generator/engine_idle_share", "engines idle", "fraction", "low",
           "Share of the step's time in which an engine had no request."),
    Metric("pace/ratio", "pace", "", "1",
           "Capacity of generation over that of training: below 1, generation is slower."),
    Metric("timing/step_seconds", "step time", "s", "low",
           "From the previous step's end to this one's.",
           curve=CurveStyle("Learner time", "whole step", "green")),
    Metric("timing/train_seconds", "training", "s", "low",
           "Forward, backward and optimizer.",
           curve=CurveStyle("Learner time", "training", "blue")),
    Metric("timing/between_seconds", "between steps", "s", "low",
           "From the previous step's end until the learner waits for this one's groups.",
           curve=CurveStyle("Learner time", "between steps", "violet", "dot")),
    *(Metric(f"cpu/{who}_seconds", f"{who} CPU", "s", "low",
             "Processor time of that kind of process: generators without engines, the learner "
             "without further ranks.",
             curve=CurveStyle("Processor time", who, color))
      for who,
      color in (("conductor", "violet"), ("engine", "green"), ("generator", "orange"),
                ("learner", "blue"))),
    *_iter_stage_metrics(),
    Metric("wall/engine_steps_seconds", "engine wall, steps", "s", "",
           "Wall time in which engines had requests and no new weights."),
    Metric("wall/engine_install_seconds", "engine wall, install", "s", "low",
           "Wall time in which engines were paused for new weights."),
    Metric("wall/engine_idle_seconds", "engine wall, idle", "s", "low",
           "Wall time in which engines had no request."),
    Metric("cpu/generated_token_us", "CPU a generated token", "µs", "low",
           "Processor time of conductor, generators and engines per sampled token."),
    Metric("cpu/trained_token_us", "CPU a trained token", "µs", "low",
           "Processor time of the learner's process per trained token."),
    Metric("throughput/generated_tokens_per_second", "generated", "tokens/s", "high",
           "Tokens sampled by all engines, per second.",
           comparison_stats="mean", curve=CurveStyle("Throughput", "generated", "green"),
           gauge="generated"),
    Metric("throughput/trained_tokens_per_second", "trained", "tokens/s", "high",
           "Trained tokens per second of the step.",
           comparison_stats="mean", curve=CurveStyle("Throughput", "trained", "blue"),
           gauge="trained"),
    Metric("throughput/generated_tokens_per_second_per_device", "generated a device", "tokens/s",
           "high",
           "The same per GPU of the engines, or per engine's worker on CPU."),
    Metric("throughput/trained_tokens_per_second_per_device", "trained a device", "tokens/s",
           "high",
           "The same per rank of the learner."),
    Metric("timing/snapshot_seconds", "snapshot", "s", "low",
           "Training pauses to copy the weights, and for earlier ones to be written."),
    Metric("timing/weight_write_seconds", "write", "s", "low",
           "Writing a version. Like the next four, in the row of the step during which it ended."),
    Metric("timing/weight_update_seconds", "weight update", "s", "low",
           "Delivering a version to all engines.",
           comparison_stats="mean", curve=CurveStyle("Weight updates", "delivery", "blue"),
           gauge="weights"),
    Metric("timing/weight_transfer_seconds", "transfer", "s", "low",
           "Longest fetch and check by a generator."),
    Metric("weights/bytes", "weights", "bytes", "", "Size of a version as engines get it."),
    Metric("timing/weight_load_seconds", "load", "s", "low",
           "Longest load by an engine."),
    Metric("weights/paused_share", "paused", "fraction", "low",
           "Share of the generators' time so far in which new weights stopped generation."),
    Metric("timing/engine_pause_seconds", "engine pause", "s", "low",
           "Longest pause of an engine for a delivery.",
           comparison_stats="mean", curve=CurveStyle("Weight updates", "engine pause", "orange")),
    Metric("transport/received", "received", "trajectories", "",
           "Trajectories accepted since the learner started.",
           gauge="arrived"),
    Metric("transport/duplicates", "duplicates", "trajectories", "low",
           "Trajectories that arrived again, and were ignored."),
    Metric("transport/rejected", "rejected", "trajectories", "0",
           "Messages that did not validate."),
    Metric("transport/damaged", "damaged", "trajectories", "0",
           "Deliveries damaged on their way, and sent again."),
    Metric("transport/strangers", "strangers", "connections", "0",
           "Refused connections to the port of the learner, and of its weights (`tcp`)."),
    Metric("weights/strangers", "strangers at weights", "connections", "0",
           "Refused connections to the port of the learner, and of its weights (`tcp`)."),
    Metric("buffer/ready_groups", "ready groups", "groups", "",
           "Complete groups that wait for the next step; 0: the learner waits for generators.",
           gauge="buffer"),
    Metric("slots/taken", "slots taken", "groups", "",
           "Groups leased and not yet in published weights; all taken: generators wait for the "
           "learner.", gauge="slots"),
    Metric("generator/concurrency", "concurrency", "episodes", "",
           "Episodes that generators may run at once now."),
    *(Metric(f"lag/{who}_{name}_ms", f"{who} lag, {name}", "ms", "low",
             "How late the event loop of that process (the slowest generator) ran: median, 99th "
             "percentile and largest of a minute.")
      for who, name in product(("conductor", "learner", "generator"), ("p50", "p99", "max"))),
    *(Metric(f"lag/{who}_own_{name}_ms", f"{who} own lag, {name}", "ms", "low",
             "At most how much of that lag the loop's thread was computing; otherwise it waited "
             "for a core.")
      for who, name in product(("conductor", "learner", "generator"), ("p99", "max"))),
    Metric("data/quarantined_tasks", "tasks quarantined", "", "0",
           "Tasks never sampled again: all their episodes failed."),
    Metric("data/easy_tasks", "easy tasks", "", "",
           "Tasks whose last groups scored `schedule.difficulty.easy` or more, or `hard` or "
           "less."),
    Metric("data/hard_tasks", "hard tasks", "", "",
           "Tasks whose last groups scored `schedule.difficulty.easy` or more, or `hard` or "
           "less."),
    Metric("data/replaced_tasks", "tasks replaced", "", "",
           "Groups so far that got another task than the next, by `schedule.difficulty`."),
    Metric("data/epochs", "epochs", "", "",
           "How often all tasks were leased, if the environment has a `size`."),
    Metric("learner/rank_restarts", "restarts of ranks", "", "0",
           "Restarts of the learner's ranks since the run last started."),
    Metric("generator/restarts", "restarts", "", "0",
           "Restarts of generators since the run last started.",
           gauge="generators"),
)
# fmt: on

METRICS = {metric.name: metric for metric in _METRIC_TABLE}
"""All metrics by name, in the order in which people look at them."""
ROW_ID_COLUMNS = ("step", "version", "lineage", "time")
"""Columns that identify a row; no view draws them."""


RENAMED_METRICS = {
    r"env/([^/]+)_(mean|std)": r"env/\1/\2",
    r"env/([^/]+)/episode_tokens_(mean|p95)": r"env/\1/response_length_\2",
    r"env/([^/]+)/episode_truncated_share": r"env/\1/response_length_clip_ratio",
    r"env/([^/]+)/reward_(.+)_(mean|std)": r"env/\1/rewards/\2/\3",
    r"episode/tokens_(mean|p95|max)": r"response_length/\1",
    r"episode/truncated_share": r"response_length/clip_ratio",
    r"learner/step_seconds": r"timing/train_seconds",
    r"learner/(wait|between)_seconds": r"timing/\1_seconds",
    r"optimizer/no_contrast": r"optimizer/zero_variance",
    r"reward/(.+)_(mean|std)": r"rewards/\1/\2",
    r"rollout_corr/ess": r"ratio/ess",
    r"rollout_corr/k3_kl": r"rollout_kl/k3",
    r"rollout_corr/kl": r"rollout_kl/k1",
    r"rollout_kl/k3_age_(\d+)": r"rollout_kl/k3_staleness_\1",
    r"served_kl/k3_age_(\d+)": r"rollout_kl/served_k3_staleness_\1",
    r"served_kl/predicted": r"rollout_kl/served_k3_predicted",
    r"served_kl/(.+)": r"rollout_kl/served_\1",
    r"staleness/age_(\d+)": r"staleness/tokens_\1",
    r"weights/pause_seconds": r"timing/engine_pause_seconds",
    r"weights/snapshot_seconds": r"timing/snapshot_seconds",
    r"weights/(update|write|transfer|load)_seconds": r"timing/weight_\1_seconds",
}
"""Patterns of names that metrics no longer have, and the name that is written in its place. The
first match counts."""


def find_new_name(name: str) -> str:
    """Return the name that a renamed metric has now; empty if `name` is no old name."""
    found = ((re.fullmatch(old, name), new) for old, new in RENAMED_METRICS.items())
    return next((match.expand(new) for match, new in found if match), "")


def find_metric(name: str) -> Metric:
    """Return the catalogue entry of a metric. An unknown metric, of another release, is
    labeled by its name."""
    staleness = re.fullmatch(r"staleness/tokens_(\d+)", name)
    if staleness:
        return METRICS["staleness/tokens_0"]._replace(
            name=name, label=f"tokens at staleness {staleness[1]}"
        )
    drift = re.fullmatch(r"rollout_kl/(served_)?k3_(staleness|turn|position)_(\d+)", name)
    if drift:
        label = (
            f"{'served ' if drift[1] else ''}drift {'in' if drift[2] == 'turn' else 'at'} "
            f"{drift[2]} {drift[3]}"
        )
        return METRICS[f"rollout_kl/k3_{drift[2]}_0"]._replace(name=name, label=label)
    if name in METRICS:
        return METRICS[name]
    reported = re.fullmatch(r"(?:rewards/(.+)|env/([^/]+))/(mean|std)", name)
    if reported:
        return _make_reported_metric(name, *reported.groups())
    own = re.fullmatch(r"env/([A-Za-z0-9_-]+)/(.+)", name)
    if own:
        return _make_environment_metric(name, own[1], own[2])
    return Metric(name, name, "", "", name)


def _make_reported_metric(
    name: str, reward: str | None, figure: str | None, statistic: str
) -> Metric:
    """Build the entry of a statistic of what an environment reported: a reward, or a
    figure of its own."""
    of = "Standard deviation" if statistic == "std" else "Mean"
    what = (
        f"reward {reward!r}, before its weight"
        if reward
        else f"{figure!r}, which the environment reported"
    )
    return Metric(
        name,
        f"{reward or figure} {statistic}",
        "",
        "",
        f"{of} of {what}, over the episodes that have it.",
    )


def _make_environment_metric(name: str, label: str, figure: str) -> Metric:
    """Build the entry of `env/LABEL/FIGURE`, which a run with several environments has."""
    others = {known.replace("/", "_", 1): known for known in METRICS}
    reported = re.fullmatch(r"(?:rewards/(.+)|(.+))/(mean|std)", figure)
    if reported:
        known = _make_reported_metric(figure, *reported.groups())
    else:
        known = find_metric("data/epochs" if figure == "epochs" else others.get(figure, figure))
    docs = "Episodes of the step." if figure == "episodes" else known.description
    shown = figure if known.label == known.name else known.label
    return Metric(
        name, f"{label}: {shown}", known.unit, known.desired, f"Of the environment {label}: {docs}"
    )


def select_main_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row without the metrics of the catalogue that are not main ones.

    What an environment, a reward or an evaluation reported is in no catalogue, and stays.
    """
    return {
        name: value
        for name, value in row.items()
        if name in ROW_ID_COLUMNS or find_metric(name).is_main or _is_reported(name)
    }


def _is_reported(name: str) -> bool:
    return name.startswith(("rewards/", "env/", "evaluation"))


def sort_metrics(names: Iterable[str]) -> list[Metric]:
    """Return the metrics that are drawn: first in the table's order, then the others by name,
    each with its group."""
    order = {name: index for index, name in enumerate(METRICS)}
    drawn = sorted(
        {*names} - {*ROW_ID_COLUMNS}, key=lambda name: (order.get(name, len(order)), name)
    )
    groups = list(dict.fromkeys(find_metric(name).group for name in drawn))
    return sorted(map(find_metric, drawn), key=lambda found: groups.index(found.group))


FIRST_STEPS = 3
LAST_STEPS = 10
"""Maximum number of steps that are averaged for the beginning and for the end of a run."""


def compute_end_windows(steps: int) -> tuple[int, int]:
    """Return how many steps count as the beginning and as the end of a run of `steps` steps.

    No step counts as both, except in a run of one step.
    """
    last = min(LAST_STEPS, (steps + 1) // 2)
    return min(FIRST_STEPS, max(steps - last, 1)), last


class MetricStats(msgspec.Struct, frozen=True):
    """Statistics of one metric over the steps of a run, or of a part of it; None where no
    step has the metric."""

    count: int = 0
    """Number of steps that have the metric."""
    first_mean: float | None = None
    """Mean over the first of these steps (`compute_end_windows`)."""
    last_mean: float | None = None
    """Mean over the last of these steps (`compute_end_windows`)."""
    last_value: float | None = None
    """Value of the last of these steps."""
    mean: float | None = None
    min: float | None = None
    max: float | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, Any]], name: str) -> MetricStats:
        """Compute the statistics of metric `name`. Values that are not finite
        numbers are left out."""
        values = [float(row[name]) for row in rows if finite_or_none(row.get(name)) is not None]
        if not values:
            return cls()
        count = len(values)
        first, last = compute_end_windows(count)
        return cls(
            count=count,
            first_mean=sum(values[:first]) / first,
            last_mean=sum(values[-last:]) / last,
            last_value=values[-1],
            mean=sum(values) / count,
            min=min(values),
            max=max(values),
        )


def format_stat_label(metric: Metric, stat: str) -> str:
    """Return the label of a field of `MetricStats`: `reward, best step`; a mean is labeled as
    the metric itself."""
    if stat == "mean":
        return metric.label
    extreme = "best step" if (stat == "max") == (metric.desired == "high") else "worst step"
    of = {"first_mean": "first steps", "last_mean": "last steps", "last_value": "last"}
    return f"{metric.label}, {of.get(stat, extreme)}"


def finite_or_none(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None. A bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer that no float holds
        return None
