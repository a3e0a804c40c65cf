"""The data of a training request as packed micro-batches, and their loss: what a rank of the learner
computes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from r3async.data.routes import route_dtype
from r3async.data.tokens import UNSAMPLED_VERSION, Sample, TokenTable
from r3async.learner.drift import k3
from r3async.learner.micro_batches import MicroBatch, pack_for_ranks
from r3async.learner.minibatch import TrainableMinibatch
from r3async.learner.train_step import forward_backward
from r3async.tinker.backend import LossBatch
from r3async.tinker.kept_sequences import RoutedDatum
from r3async.tinker.losses import POLICY_INPUTS, compute_token_losses
from r3async.tinker.protocol import TrainResult

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


class DatumRows(NamedTuple):
    """The next `targets` rows of a micro-batch are the targets of the request's datum `datum`."""

    datum: int
    targets: int


@dataclass
class DatumMinibatch(TrainableMinibatch):
    """The data of one training request.

    A datum becomes a sample of its tokens and its last target. Where its targets are not the tokens
    that follow, they are alternatives to them.
    """

    batch: LossBatch
    members: list[list[DatumRows]]
    """The data of each micro-batch, in the order of its rows."""
    replays_routes = True
    logprobs: dict[int, np.ndarray] = field(init=False, default_factory=dict)
    loss_sum: float = field(init=False, default=0.0)
    k3_sum: float = field(init=False, default=0.0)
    sampled_count: int = field(init=False, default=0)

    def compute_micro_batch_loss(self, index: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
        total = logprobs[:0].sum()  # of a rank that has no datum it is 0, with a gradient
        parts = logprobs.split([member.targets for member in self.members[index]])
        for member, part in zip(self.members[index], parts, strict=True):
            inputs = self.batch.data[member.datum].datum.inputs
            shape = inputs["target_tokens"].shape
            columns = {
                name: torch.tensor(values, dtype=torch.float32, device=part.device)
                for name, values in inputs.items()
                if name != "target_tokens"
            }
            of_datum = part.reshape(shape)
            loss = compute_token_losses(
                self.batch.loss_fn, self.batch.loss_settings, of_datum, columns
            ).sum()
            total = total + loss
            self.loss_sum += loss.item()
            self.logprobs[member.datum] = of_datum.detach().float().cpu().numpy()
            if POLICY_INPUTS[0] in columns:
                sampling = columns[POLICY_INPUTS[0]]
                sampled = sampling != 0  # tokens that nobody sampled have the log-prob 0
                delta = of_datum.detach()[sampled] - sampling[sampled]
                self.k3_sum += k3(delta).sum().item()
                self.sampled_count += int(sampled.sum())
        return total

    def collect_result(self, agreement: float | None) -> TrainResult:
        """Return the result of all ranks, after the loss of every micro-batch. Collective.

        Metrics that nothing was measured of are left out: drift needs log-probs of a sampling
        policy, age and agreement need kept sequences.
        """
        data = self.batch.data
        sums = np.asarray([self.loss_sum, self.k3_sum, self.sampled_count], np.float64)
        mine = (self.logprobs, sums) if self.ranks.is_loss_reporter else ({}, sums * 0)
        everyones = self.ranks.all_gather(mine)
        logprobs = {index: values for found, _ in everyones for index, values in found.items()}
        loss_sum, k3_sum, sampled = np.sum([sums for _, sums in everyones], axis=0).tolist()
        metrics = {"loss:sum": loss_sum}
        if self.batch.loss_fn != "cross_entropy":
            weights = [one.datum.inputs[POLICY_INPUTS[0]] != 0 for one in data]
        else:
            weights = [one.datum.inputs["weights"] != 0 for one in data]
        rows = [mask.reshape(len(mask), -1).any(axis=1) for mask in weights]
        trained = sum(int(mask.sum()) for mask in rows)
        recorded = sum(int(one.recorded[mask].sum()) for one, mask in zip(data, rows, strict=True))
        metrics["routes/recorded:mean"] = recorded / max(trained, 1)
        if agreement is not None:
            metrics["routes/agreement:mean"] = agreement
        if sampled:
            metrics["k3:mean"] = k3_sum / sampled
        versions = np.concatenate([one.versions for one in data])
        ages = self.batch.version - versions[versions != UNSAMPLED_VERSION]
        if len(ages):
            metrics["staleness:mean"] = float(ages.mean())
            metrics["staleness:max"] = float(ages.max())
        return TrainResult([logprobs[index] for index in range(len(data))], metrics)


def build_datum_minibatch(
    backend: LearnerBackend, batch: LossBatch, max_batch_tokens: int
) -> DatumMinibatch:
    """Pack the data into micro-batches of at most `max_batch_tokens` tokens, but of one datum at
    least, and return those of this rank."""
    samples = [_build_sample(backend, i, one) for i, one in enumerate(batch.data)]
    longest = max(len(sample.table) for sample in samples)
    micro_batches = []
    rows = []
    members = []
    parallel = backend.config.learner.parallel
    shares = pack_for_ranks(samples, max(max_batch_tokens, longest), ranks=parallel.dp)
    # Megatron's order of ranks: tp varies fastest, then cp, dp and pp.
    mine = shares[backend.ranks.rank // (parallel.tp * parallel.cp) % parallel.dp]
    for packed in backend.pad_for_parallel(mine):
        micro_batch, found, of_batch = _find_rows(packed, batch.data)
        micro_batches.append(micro_batch)
        rows.append(found)
        members.append(of_batch)
    total = float(sum(one.datum.inputs["target_tokens"].size for one in batch.data))
    return DatumMinibatch(backend.ranks, micro_batches, rows, total, None, False, batch, members)


def run_training(
    backend: LearnerBackend, batch: LossBatch, max_batch_tokens: int, *, forward_only: bool
) -> TrainResult:
    """Run the data forward with their routes, and back through the loss unless `forward_only`. The
    gradients add up until `train_step.optim_step`. Collective: all ranks have all data."""
    minibatch = build_datum_minibatch(backend, batch, max_batch_tokens)
    if not forward_only:
        before = _read_counts(backend)
        forward_backward(backend, minibatch)
        agreement = _compute_agreement(backend, before)
        return minibatch.collect_result(agreement)
    with backend.optimizer.gradients_aside(), backend.forward_only():
        before = _read_counts(backend)
        for index, _, logprobs, entropies in backend.iter_scores(
            minibatch.micro_batches, minibatch.trained_rows
        ):
            if logprobs is not None and entropies is not None:
                minibatch.compute_micro_batch_loss(index, logprobs, entropies)
        agreement = _compute_agreement(backend, before)
    return minibatch.collect_result(agreement)


def _read_counts(backend: LearnerBackend) -> tuple[int, int]:
    counts = backend.replay.counts
    return int(counts.agreeing_tokens.sum()), int(counts.compared_tokens.sum())


def _compute_agreement(backend: LearnerBackend, before: tuple[int, int]) -> float | None:
    counts = np.subtract(_read_counts(backend), before).astype(np.float64)
    agreeing, compared = backend.ranks.all_reduce(counts, "sum")
    return float(agreeing / compared) if compared else None


def _is_shifted(one: RoutedDatum) -> bool:
    """Return True if the targets are the tokens that follow in the datum."""
    targets = one.datum.inputs["target_tokens"]
    return targets.ndim == 1 and np.array_equal(targets[:-1], one.datum.tokens[1:])


def _build_sample(backend: LearnerBackend, index: int, one: RoutedDatum) -> Sample:
    tokens = one.datum.tokens
    if _is_shifted(one):
        tokens = np.append(tokens, one.datum.inputs["target_tokens"][-1]).astype(np.int32)
    table = TokenTable.from_tokens(tokens)
    replay = backend.replay
    if not replay.uses_records:
        return Sample(str(index), table)
    dtype = route_dtype(replay.num_experts)
    routes = np.empty((len(tokens), replay.num_moe_layers, replay.top_k), dtype)
    routes[:] = np.arange(replay.top_k, dtype=dtype)
    recorded = np.zeros(len(tokens), bool)
    length = len(one.datum.tokens)
    if one.routes is not None:
        routes[:length] = one.routes
        recorded[:length] = one.recorded
    return Sample(str(index), table.with_columns(routed_experts=routes, routing_recorded=recorded))


def _find_rows(
    micro_batch: MicroBatch, data: Sequence[RoutedDatum]
) -> tuple[MicroBatch, np.ndarray, list[DatumRows]]:
    """Return the micro-batch with its alternatives, the rows of all targets, and whose they are."""
    rows: list[np.ndarray] = [np.zeros(0, np.int64)]
    alternatives: list[np.ndarray] = []
    members = []
    at = 0
    for name, start in zip(micro_batch.sample_ids, micro_batch.cu_seqlens[:-1], strict=False):
        index = int(name)
        targets = data[index].datum.inputs["target_tokens"]
        count = targets.size
        if _is_shifted(data[index]):
            rows.append(int(start) + 1 + np.arange(count))
        else:
            before = np.repeat(int(start) + np.arange(len(targets)), count // len(targets))
            alternatives.append(np.stack([before, targets.reshape(-1)], axis=1).astype(np.int64))
            rows.append(-1 - (at + np.arange(count)))
            at += count
        members.append(DatumRows(index, count))
    if alternatives:
        micro_batch = replace(micro_batch, alternatives=np.concatenate(alternatives))
    return micro_batch, np.concatenate(rows), members
