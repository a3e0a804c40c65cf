"""One optimizer step, whatever the backend: what it trains, what it refuses, and the figures it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from r3async.algorithms.objective import ObjectiveSums, TokenBatch, objective, takes_episodes
from r3async.algorithms.trust_region import TrustRegion
from r3async.batching.packing import MicroBatch
from r3async.config import Config
from r3async.learners.base import LearnerError, RouteTrace, StepResult
from r3async.learners.optimizer import Cause, MasterAdamW, StepReport
from r3async.learners.replay import MicroBatchRoutes, RoutingCounts
from r3async.learners.whole import Columns, Reduce, gathered, joined, of_episodes, sequences, spread

MEASURED_DRIFT = "rollout_kl/k3"
"""The metric that the trust region holds: unbiased for KL(rollout || learner), and never negative."""


def alone(values: np.ndarray, how: str) -> np.ndarray:
    """The `Reduce` of a single rank."""
    return values


@dataclass(frozen=True)
class TrainedTokens:
    """Which rows of one micro-batch are trained. `rows` int64 `[M]`: trained tokens; the logits of row `t` - 1 predict row
    `t`. `dropped`: tokens to be trained whose rollout log-prob is not finite. `recorded`: trained tokens whose input, row
    `t` - 1, has recorded routes. `credited`: trained tokens whose advantage is not 0."""

    rows: np.ndarray
    dropped: int
    recorded: int
    credited: int


def trained_tokens(micro_batch: MicroBatch) -> TrainedTokens:
    """Raises `LearnerError` if the first token of a sample, which nothing predicts, is to be trained, or if the column
    `advantages` is missing."""
    table = micro_batch.table
    wanted = table["loss_mask"]
    starts = micro_batch.cu_seqlens[: len(micro_batch.sample_ids)]
    if wanted[starts].any():
        sample = micro_batch.sample_ids[int(np.flatnonzero(wanted[starts])[0])]
        raise LearnerError(f"sample {sample}: its first token is to be trained, but nothing predicts a first token")
    if "advantages" not in table:
        raise LearnerError(f"sample {micro_batch.sample_ids[0]}: column 'advantages' is missing")
    finite = np.isfinite(table["rollout_logprobs"])
    rows = np.flatnonzero(wanted & finite)
    recorded = int(np.count_nonzero(table["routing_recorded"][rows - 1])) if "routing_recorded" in table else 0
    credited = int(np.count_nonzero(table["advantages"][rows]))
    return TrainedTokens(rows, int(np.count_nonzero(wanted & ~finite)), recorded, credited)


def recorded_rows(micro_batch: MicroBatch) -> int:
    """Tokens fed forward, trained or not, that have a recorded route; padding is none of them."""
    table = micro_batch.table
    if "routing_recorded" not in table:
        return 0
    return int(np.count_nonzero(table["routing_recorded"][: micro_batch.real_tokens]))


class Step:
    """The books of one optimizer step on one rank.

    Making it is a collective operation where there are several ranks: counts are summed over the data-parallel ranks, so
    that the loss's denominator is global and known before the first micro-batch. Every check is made before that.

    `routing`: MoE layers and experts of the model. `skip_untrained`: leave out micro-batches in which nothing is trained;
    only where no other rank waits for this one. `version`: of the weights that are trained, which tokens' ages count from.
    `rollout_kl_coef`: of the trust region. `is_first_copy`: whether this rank counts its micro-batches; exactly one of the
    ranks that are given the same ones does.

    Raises `LearnerError`, on every rank alike, if too few of the routes that replay needs were recorded, or if the ranks
    were given different numbers of micro-batches.
    """

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        config: Config,
        *,
        replays: bool,
        version: int,
        rollout_kl_coef: float,
        reduce: Reduce = alone,
        is_first_copy: bool = True,
        skip_untrained: bool = False,
        trace: bool = False,
        routing: tuple[int, int] = (0, 0),
    ):
        self._config, self._reduce, self.trace = config, reduce, trace
        self._version, self._coef = version, rollout_kl_coef
        self._total: np.ndarray | None = None
        self._traces: list[RouteTrace] = []
        self._scored: dict[int, Tensor] = {}
        """With `trace`: the log-probs of each micro-batch's trained rows."""
        self._chosen = [trained_tokens(m) for m in micro_batches]
        self._sums: ObjectiveSums | None = None
        counts = np.asarray(
            [
                sum(len(c.rows) for c in self._chosen),
                sum(c.recorded for c in self._chosen),
                sum(c.credited for c in self._chosen),
                sum(c.dropped for c in self._chosen),
                sum(m.real_tokens for m in micro_batches),
                sum(recorded_rows(m) for m in micro_batches),
                sum(bool(m.sample_ids) for m in micro_batches),
            ],
            np.float64,
        )
        totals = reduce(counts * is_first_copy, "sum").tolist()
        trained, recorded, self._credited, self._dropped, self._tokens, fed_recorded, self._real = totals
        episodes = [sequences(m, c.rows) for m, c in zip(micro_batches, self._chosen, strict=True)]
        places = [
            m.table["place"][c.rows] for m, c in zip(micro_batches, self._chosen, strict=True) if "place" in m.table
        ]
        largest = [max((int(x.max(initial=-1)) for x in numbers), default=-1) for numbers in (episodes, places)]
        most, least, last, place = reduce(
            np.asarray([len(micro_batches), -len(micro_batches), *largest], np.float64), "max"
        ).tolist()
        if most != -least:
            raise LearnerError(
                f"ranks were given between {-least:.0f} and {most:.0f} micro-batches, not the same number"
            )
        self.trained = int(trained)
        self.recorded_fraction = recorded / max(trained, 1.0)
        self.recorded_fraction_fed = fed_recorded / max(self._tokens, 1.0)
        floor = config.routing.min_recorded_fraction
        if self.trained and replays and self.recorded_fraction < floor:
            raise LearnerError(
                f"only {self.recorded_fraction:.3f} of the trained tokens have recorded routes, and "
                f"routing.min_recorded_fraction is {floor}: find out why the engine did not record them, lower that setting, "
                "or set routing.replay=off"
            )
        self._places, self._is_first_copy = int(place) + 1, is_first_copy
        self._spread = spread(episodes, int(last) + 1, reduce, is_first_copy=is_first_copy)
        self._everywhere: Columns | None = None
        self.needs_logprobs = bool(self._spread.any()) and takes_episodes(config.algorithm)
        """Whether `complete` has to be called before the first `loss`: alike on all ranks."""
        if self.needs_logprobs and not self._places:
            raise LearnerError(
                f"{config.algorithm.policy_loss!r} or a correction takes whole episodes, of which some are in several "
                "micro-batches, and the column 'place' is missing"
            )
        self.balance = self._balance(micro_batches, routing, is_first_copy)
        """float64 `[layers, experts]` for `RoutingReplay.balanced`: what a unit of a router's probability of an expert adds to
        the loss. None without `algorithm.router_aux`."""
        kept = [i for i, c in enumerate(self._chosen) if len(c.rows) or not skip_untrained]
        self.micro_batches = [micro_batches[i] for i in kept]
        self._chosen = [self._chosen[i] for i in kept]
        self._episodes = [episodes[i] for i in kept]

    def _balance(
        self, micro_batches: Sequence[MicroBatch], routing: tuple[int, int], is_first_copy: bool
    ) -> np.ndarray | None:
        """`coef * experts * f_i / tokens`: with the load known beforehand, the term is a plain sum over tokens."""
        coef, (layers, experts) = self._config.algorithm.router_aux.coef, routing
        if not coef or not layers:
            return None
        load = np.zeros((layers, experts))
        for m in micro_batches:
            if "routed_experts" in m.table and is_first_copy:
                rows = m.table["routed_experts"][m.table["routing_recorded"]]
                for layer in range(layers):
                    load[layer] += np.bincount(rows[:, layer].reshape(-1), minlength=experts)
        load = self._reduce(load.reshape(-1), "sum").reshape(load.shape)
        share = load / np.maximum(load.sum(axis=1, keepdims=True), 1.0)
        return coef * experts * share / max(self._tokens, 1.0)

    @property
    def cause(self) -> Cause:
        """Why this step is to make no update, whatever its gradient; every rank says the same. Empty: it may make one.

        Without an advantage the gradient of the policy loss is 0, and what the other terms leave is rounding noise, which
        Adam would scale to a full step."""
        if self._credited:
            return ""
        return "not_finite" if self._dropped and not self.trained else "no_contrast"

    def rows(self, index: int) -> np.ndarray:
        """int64 `[M]`: the trained rows of micro-batch `index`."""
        return self._chosen[index].rows

    def saw(self, routes: MicroBatchRoutes) -> None:
        """Keep the trace of a micro-batch that has been fed forward; its routes were bound with `keep = trace`."""
        if self.trace and routes.own:
            self._traces.append(routes.trace())

    def complete(self, logprobs: Sequence[np.ndarray]) -> None:
        """Take the learner's log-probs as they are now, `[N]` of each of `micro_batches`, and learn of every rank those of
        the episodes' tokens that it has. Collective."""
        rows = [c.rows for c in self._chosen]
        columns = [self._columns(i) | {"logprobs": logprobs[i][r]} for i, r in enumerate(rows)]
        places = [m.table["place"][r] for m, r in zip(self.micro_batches, rows, strict=True)]
        self._everywhere = gathered(places, columns, self._places, self._reduce, is_first_copy=self._is_first_copy)

    def _columns(self, index: int) -> Columns:
        """Of the trained rows of micro-batch `index`: what the loss takes. Without the column `loss_weights` every trained
        token of the step weighs the same (`token_mean`)."""
        table, rows = self.micro_batches[index].table, self.rows(index)
        names = ("rollout_logprobs", "advantages", "loss_weights", "old_logprobs", "reference_logprobs")
        columns = {name: table[name][rows] for name in names if name in table}
        columns.setdefault("loss_weights", np.full(len(rows), 1 / max(self.trained, 1), np.float32))
        return columns | {"ages": self._version - table["policy_version"][rows], "episode": self._episodes[index]}

    def loss(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """Scalar loss of micro-batch `index`, entered in the books. `logprobs`, `entropies`: float32 `[M]`, of `rows(index)`."""
        if self.trace and self.micro_batches[index].sample_ids:
            self._scored[index] = logprobs.detach()
        columns, device, own = self._columns(index), logprobs.device, None
        if self._everywhere is not None and self._is_spread(columns["episode"]).any():
            places = self.micro_batches[index].table["place"][self.rows(index)]
            columns, at = of_episodes(self._everywhere, columns["episode"], places)
            here = torch.from_numpy(at).to(device)
            own = torch.zeros(len(columns["episode"]), dtype=torch.bool, device=device).index_fill_(0, here, True)
            logprobs, entropies = joined(columns.pop("logprobs"), here, logprobs, entropies)
        episodes, sequence = np.unique(columns["episode"], return_inverse=True)

        def column(name: str) -> Tensor | None:
            return torch.from_numpy(columns[name]).to(device) if name in columns else None

        rollout_logprobs, advantages, weights = (
            torch.from_numpy(columns[name]).to(device) for name in ("rollout_logprobs", "advantages", "loss_weights")
        )
        batch = TokenBatch(
            rollout_logprobs=rollout_logprobs,
            advantages=advantages,
            weights=weights,
            sequence=torch.from_numpy(sequence).to(device),
            sequences=len(episodes),
            ages=torch.from_numpy(columns["ages"]).to(device),
            mask=torch.ones(len(sequence), dtype=torch.bool, device=device),
            old_logprobs=column("old_logprobs"),
            reference_logprobs=column("reference_logprobs"),
            own=own,
            open=torch.from_numpy(np.where(self._is_spread(episodes), episodes, -1)).to(device),
        )
        loss, sums = objective(
            batch,
            logprobs,
            entropies,
            self._config.algorithm,
            rollout_kl_coef=self._coef,
            max_token_age=self._config.schedule.max_token_age,
        )
        self._sums = sums if self._sums is None else self._sums + sums
        return loss

    def _is_spread(self, episodes: np.ndarray) -> np.ndarray:
        """bool, as `episodes`: those that other micro-batches have tokens of as well."""
        return np.isin(episodes, np.flatnonzero(self._spread))

    def update(self, optimizer: MasterAdamW, trust_region: TrustRegion, *, holds_loss: bool = True) -> StepReport:
        """Close the books and make the optimizer's step, unless there is a `cause` or the measured drift is beyond
        `rollout_kl.max`. Collective.

        The coefficient of the next step follows from the drift measured in this one, if this one has contrast. `holds_loss`:
        exactly one of the ranks that computed the same losses says so.
        """
        sums = self._sums if holds_loss and self._sums is not None else ObjectiveSums.zero()
        mine = sums.values()
        self._total = self._reduce(mine, "sum")
        maxima = [ObjectiveSums.names().index(name) for name in ObjectiveSums.maxima()]
        self._total[maxima] = self._reduce(mine[maxima], "max")
        self._total += self._finished(sums).values()
        drift = ObjectiveSums.metrics_of(self._total)[MEASURED_DRIFT]
        if self.cause:
            return optimizer.skip(self.cause if math.isfinite(drift) else "not_finite")
        report = optimizer.skip("trust_region") if trust_region.breaks(drift) else optimizer.step()
        trust_region.update(drift)
        return report

    def _finished(self, mine: ObjectiveSums) -> ObjectiveSums:
        """The figures of episodes that are in several micro-batches, from their parts on all ranks."""
        finished = ObjectiveSums.zero()
        if self._spread.any():
            parts = mine.open.cpu().numpy()
            whole = np.zeros((len(self._spread), 4))
            np.add.at(whole, parts[:, 0].astype(np.int64), parts[:, 1:])
            finished.finish(torch.from_numpy(self._reduce(whole.reshape(-1), "sum").reshape(whole.shape)))
        return finished

    def result(self, optimizer: StepReport, routing: RoutingCounts, columns: Sequence[int], layers: int) -> StepResult:
        """The figures of the step, over all ranks: collective. `columns`: which of the `layers` MoE layers this rank's
        routers are."""
        total = ObjectiveSums.zero().values() if self._total is None else self._total
        mine = np.zeros((layers, 2 + routing.load.shape[1]))
        if columns:
            figures = torch.cat([torch.stack([routing.agreed, routing.compared], dim=1), routing.load], dim=1)
            mine[list(columns)] = figures.cpu().numpy()
        by_layer = self._reduce(mine.reshape(-1), "sum").reshape(mine.shape)
        (auxiliary,) = self._reduce(np.asarray([float(routing.auxiliary)]), "sum").tolist()
        agreed, compared, load = by_layer[:, 0], by_layer[:, 1], by_layer[:, 2:]
        agreement = np.divide(agreed, compared, out=np.zeros(layers), where=compared > 0)
        budget = max(self._real, 1.0) * self._config.learner.max_tokens_per_micro_batch
        metrics = ObjectiveSums.metrics_of(total) | {
            "loss/router_aux": auxiliary,
            "rollout_kl/coef": self._coef,
            "routing/recorded_fraction": self.recorded_fraction,
            "routing/recorded_fraction_fed": self.recorded_fraction_fed,
            "routing/agreement": float(agreed.sum() / max(compared.sum(), 1.0)),
            "grad_norm": optimizer.grad_norm,
            "lr": optimizer.lr,
            "optimizer/updates": float(not optimizer.cause),
            "optimizer/skipped": float(bool(optimizer.cause)),
            "optimizer/no_contrast": float(optimizer.cause == "no_contrast"),
            "optimizer/broken": float(optimizer.cause == "trust_region"),
            "tokens/dropped_non_finite": self._dropped,
            "batch/tokens": self._tokens,
            "batch/trained_tokens": float(self.trained),
            "batch/micro_batches": self._real,
            "batch/split_episodes": float(self._spread.sum()) if self.needs_logprobs else 0.0,
            "batch/fill": self._tokens / budget,
        }
        if layers:
            worst = load.max(axis=1) / np.maximum(load.mean(axis=1), 1e-9)
            metrics |= {
                "routing/agreement_min": float(agreement.min()),
                "routing/load_imbalance": float(worst.max()),
            }
        return StepResult(metrics, agreement.astype(np.float32), load.astype(np.int64), self._with_logprobs())

    def _with_logprobs(self) -> list[RouteTrace]:
        """The traces, each with its micro-batch's log-probs where this rank has them. A last pipeline stage may have no MoE
        layer and so no trace of its own: its log-probs come with a trace of no layer."""
        logprobs: dict[tuple[str, ...], np.ndarray] = {}
        for index, values in self._scored.items():
            micro_batch = self.micro_batches[index]
            row = np.full(micro_batch.real_tokens, np.nan, np.float32)
            row[self.rows(index)] = values.float().cpu().numpy()
            logprobs[tuple(micro_batch.sample_ids)] = row
        traces = [msgspec.structs.replace(t, logprobs=logprobs.pop(tuple(t.sample_ids), None)) for t in self._traces]
        for index in self._scored:
            micro_batch = self.micro_batches[index]
            samples = tuple(micro_batch.sample_ids)
            if samples in logprobs:
                none = np.zeros((0, 0, 0), np.uint16)
                starts = micro_batch.cu_seqlens[: len(samples) + 1]
                traces.append(RouteTrace(samples, starts, 0, [], none, none, logprobs[samples]))
        return traces


def combined(results: Sequence[StepResult]) -> StepResult:
    """The figures of several optimizer steps as one: counts add up, extremes stay, the rest is averaged over trained tokens."""
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
    return StepResult(
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
"""How a metric of several optimizer steps becomes one, if not by its mean."""
