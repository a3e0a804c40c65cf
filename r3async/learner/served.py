"""Served drift: how far the learner is from the rollout policy with the routers' own choice, as engines will serve it.

What a step trains, it feeds forward with the routes of the rollout (R3), so the drift that its loss sees, `rollout_kl`, is that
of the weights behind frozen routers. An engine that is given these weights routes by itself. `served_kl` is the drift then.

It is measured in one of `probe_every` steps on a sample, the *probed* episodes (column `probed`, by `preparation.prepare`), by a
forward pass more without replay and without gradient. The estimate for all trained tokens is `replayed + (served - replayed of
the probed tokens)`: the difference, whose mean is what routes do, scatters less than the drift of a few tokens, and the estimate
is unbiased, and has an interval: episodes are the sample. In the steps between, nothing is published under the name of a
measurement; the trust region is given an estimate, from that difference as it was last measured at each age
(`TrustRegion.estimate`).

With `rollout_kl.limit` the drift of the probed episodes is measured again after every update. It says how far the step went, and
so what the next step's tokens will have drifted (`met_again`). If that is too far, the step is shortened before anything is
published (`shortened`). This is measured in every step, so the hard bound does not depend on an older figure. The step trains
these episodes like all others; what that changes in the prediction was measured (docs/decisions.md, D-184).
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from r3async.config import Config
from r3async.data.records import Sample, TokenTable
from r3async.learner.batch.packing import MicroBatch, pack, padding_like
from r3async.learner.figures import AGES, DRIFT_ROWS, MEASURED_DRIFT, ObjectiveSums, age_gaps, estimated, gap_variance
from r3async.learner.optimizer import Update

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend
    from r3async.learner.minibatch import Minibatch

LARGEST = 1 / 4
"""Share of a step's tokens that are probed at most for `rollout_kl.probe_tokens`."""
LEAST = 1 / 32
"""Of a step that is made, however far it goes: one that is to be refused is refused before it is made (`rollout_kl.max`)."""
TRIES = 5
"""Shares of one step that are tried, after the whole of it: each is one forward pass over the probed episodes."""
MARGIN = 0.9
"""Of the share at which the drift would be at the limit, if it grew with the square of the share."""


# -- which episodes: on the host, from the step's groups alone ----------------------------------------------------------


def wants_probes(config: Config) -> bool:
    """Whether served drift has to be measured: where replay makes it another than the replayed one, or a limit is set."""
    region = config.algorithm.rollout_kl
    return region.probe_share > 0 and (config.routing.replay != "off" or region.bound is not None)


def chosen_probes(names: Sequence[str], tokens: Sequence[int], config: Config) -> list[int]:
    """Indices of the probed ones of some episodes, which have `names` and `tokens` to feed forward; the same for the same names.

    In the order of a checksum of their names, as many as have no more than `rollout_kl.probe_share` of all tokens, or than
    `probe_tokens` or a quarter of all, if that is more. If the first has more, it is probed where a bound needs it in every
    step; elsewhere in so many of all steps that the share is kept on average.
    """
    region = config.algorithm.rollout_kl
    if not wants_probes(config):
        return []
    keys = [zlib.crc32(name.encode()) for name in names]
    order = sorted(range(len(names)), key=lambda i: (keys[i], names[i]))
    budget = max(region.probe_share * sum(tokens), min(region.probe_tokens, LARGEST * sum(tokens)))
    ends = np.cumsum([tokens[i] for i in order])
    within = int(np.searchsorted(ends, budget, side="right"))
    if not within and order:
        first = order[0]
        # Of another digest than the order's (a CRC of the name with a prefix is the same but for a constant): no fair draw else.
        draw = int.from_bytes(hashlib.blake2b(names[first].encode(), digest_size=4).digest()) / 2**32
        within = int(region.bounds_served or draw < budget / max(tokens[first], 1))
    return sorted(order[:within])


def is_due(config: Config, version: int) -> bool:
    """Whether served drift is measured before the update of weights of `version`: the same on every rank, and in a replay."""
    return version % config.algorithm.rollout_kl.measured_every == 0


def looked_at(micro_batches: Sequence[MicroBatch], config: Config, version: int) -> list[MicroBatch]:
    """Without the column `probed` in a step that neither measures served drift nor predicts it."""
    if is_due(config, version) or config.algorithm.rollout_kl.bound is not None:
        return list(micro_batches)
    return [replace(m, table=m.table.without("probed")) for m in micro_batches]


def probed_samples(
    samples: Sequence[Sample], trained: Sequence[np.ndarray], episodes: Sequence[int], config: Config
) -> list[bool]:
    """Whether each sample of a minibatch is of a probed episode: `chosen_probes` of those that have trained tokens, by the name
    of their first sample. `trained` bool `[T_i]`: those tokens. `episodes`: of which each sample is."""
    named: dict[int, str] = {}
    tokens: dict[int, int] = {}
    for sample, mask, episode in zip(samples, trained, episodes, strict=True):
        if mask.any():
            named.setdefault(episode, sample.sample_id)
        tokens[episode] = tokens.get(episode, 0) + len(sample.table)
    numbers = list(named)
    found = chosen_probes([named[n] for n in numbers], [tokens[n] for n in numbers], config)
    chosen = {numbers[i] for i in found}
    return [episode in chosen for episode in episodes]


# -- on every rank -------------------------------------------------------------------------------------------------------


class Probes(NamedTuple):
    """The probed episodes of a minibatch on this rank: their own micro-batches, as many on every rank, and in each the rows int64
    `[M]` of trained tokens. Empty on all ranks, or on none."""

    micro_batches: list[MicroBatch]
    rows: list[np.ndarray]


def probes_of(backend: LearnerBackend, minibatch: Minibatch, given: Sequence[MicroBatch]) -> Probes:
    """Of `given`, all of this rank's micro-batches before any was left out. Collective."""
    if not given or "probed" not in given[0].table:
        return Probes([], [])
    samples = [sample for m in given for sample in _probed_samples(m)]
    made = pack(samples, backend.config.learner.max_tokens_per_micro_batch) if samples else []
    count = int(backend.ranks.reduce(np.asarray([len(made)], np.float64), "max")[0])
    made += [padding_like(_bare(given[0]))] * (count - len(made))
    made = backend.aligned(made)
    return Probes(made, [_measurable(m) for m in made])


def _measurable(micro_batch: MicroBatch) -> np.ndarray:
    table = micro_batch.table
    return np.flatnonzero(table["loss_mask"] & np.isfinite(table["rollout_logprobs"]))


def _bare(micro_batch: MicroBatch) -> MicroBatch:
    return replace(micro_batch, table=micro_batch.table.without("routed_experts", "routing_recorded"))


def _probed_samples(micro_batch: MicroBatch) -> list[Sample]:
    """Whole and without routes. A token that a sample shares with one before it is trained there."""
    bare = _bare(micro_batch)
    rows, edges = micro_batch.unfolded
    probed, out = bare.table["probed"], []
    for index, name in enumerate(micro_batch.sample_ids):
        own = int(micro_batch.cu_seqlens[index]), int(micro_batch.cu_seqlens[index + 1])
        if not probed[slice(*own)].any():
            continue
        taken = rows[edges[index] : edges[index + 1]]
        parts = np.split(taken, np.flatnonzero(np.diff(taken) != 1) + 1)
        table = TokenTable.concat([bare.table.slice(int(part[0]), int(part[-1]) + 1) for part in parts])
        mask = np.array(table["loss_mask"])
        mask[: len(mask) - (own[1] - own[0])] = False
        out.append(Sample(name, table.with_columns(loss_mask=mask), float(micro_batch.temperatures[index])))
    return out


def served_sums(backend: LearnerBackend, minibatch: Minibatch, probes: Probes) -> np.ndarray:
    """float64 `[drift_rows, 2]`: `drift_sums` of this rank's probed tokens with the weights as they are and the routers' own
    choice; 0 where another rank has them. Collective. Gradients under way are lost with FSDP: none may be."""
    found: list[Tensor] = [torch.zeros(minibatch.drift_rows, 2, dtype=torch.float64)]

    def finish(index: int, logprobs: Tensor, _: Tensor) -> None:
        found.append(minibatch.drift_of(probes.micro_batches[index], probes.rows[index], logprobs).cpu())

    try:
        with torch.no_grad():
            backend.feed(probes.micro_batches, probes.rows, finish, replay=False)
    finally:
        backend.settle()
    total = torch.stack(found).sum(dim=0).numpy()
    return total if backend.ranks.holds_loss else np.zeros_like(total)


def take_update(
    backend: LearnerBackend,
    minibatch: Minibatch,
    probes: Probes,
    total: np.ndarray,
    drift: np.ndarray,
    moments: np.ndarray,
) -> Update:
    """Clip and make the optimizer's step, unless there is a cause not to, or the measured drift is beyond `rollout_kl.max`; then
    shorten it if the drift after it is beyond `rollout_kl.limit`. Collective. `total`, `drift`: see `Minibatch.total`, `.drifts`;
    `moments`: `gap_moments`.

    The coefficient of the next step follows from the drift measured in this one, if this one has contrast.
    """
    optimizer, trust_region = backend.optimizer, backend.trust_region
    replayed = ObjectiveSums.metrics_of(total)[MEASURED_DRIFT]
    found = estimated(drift) if _is_measured(drift) else None
    served = trust_region.estimate(replayed, drift[0, :AGES, 1].tolist()) if found is None else None
    measured = trust_region.measured(replayed, served if found is None else found)
    if minibatch.cause:
        return replace(optimizer.skip(minibatch.cause if math.isfinite(measured) else "not_finite"), served=served)
    if trust_region.breaks(measured):
        update = optimizer.skip("trust_region")
    else:
        update = shortened(backend, minibatch, probes, drift, optimizer.step())
    trust_region.update(measured)
    if found is not None:
        trust_region.learn(age_gaps(drift), gap_variance(drift, moments))
    return replace(update, served=served)


def _is_measured(drift: np.ndarray) -> bool:
    """Whether served drift was measured before the update."""
    return bool(drift[2, :, 1].any())


def shortened(
    backend: LearnerBackend, minibatch: Minibatch, probes: Probes, drift: np.ndarray, update: Update
) -> Update:
    """Shorten the update that the optimizer has just made to `TrustRegion.reach` of it, and further until the drift that it leads
    to is within the limit. Collective: what decides is reduced over all ranks, so every rank makes the same share of the step.

    `drift` float64 `[3, DRIFT_ROWS, 2]`: from before the update, of all ranks. Predicted is the drift of the tokens of the next
    update: a share, `again`, of what these drift to under the new weights.
    """
    limit = backend.config.algorithm.rollout_kl.bound
    if limit is None or update.cause or not probes.micro_batches or not drift[1, :, 1].any():
        return update
    made, again = 1.0, met_again(drift[1], backend.config.schedule.updates_per_version)

    def make(share: float) -> None:
        nonlocal made
        if share != made:
            backend.optimizer.shorten(made, share)
            made = share

    def predicted(share: float) -> float:
        make(share)
        after = backend.ranks.reduce(served_sums(backend, minibatch, probes).reshape(-1), "sum")
        return estimated(np.stack([drift[0], drift[1], after.reshape(-1, 2)[:DRIFT_ROWS]]))

    def before() -> float:
        if _is_measured(drift):
            return estimated(drift)
        found = predicted(0.0)
        make(1.0)
        return found

    reach = backend.trust_region.reach
    share, value = shortest(predicted, limit / again, before, reach)
    backend.trust_region.went(share / reach)
    return replace(update, share=share, predicted=value * again)


def met_again(replayed: np.ndarray, updates: int) -> float:
    """What share of the drift that tokens have after an update the tokens of the next update will have, where a version is made
    by so many `updates`. `replayed`: sums by age, as `drift_sums`.

    An update leaves these tokens up to a version older than tokens are when they are trained: with ages of a in the mean, those
    have been through a + 1 - 1/updates versions at most, these through a + 1. Drift grows about linearly with the updates between
    two policies (docs/trust-region.md), so the share is that of the versions. At an age below 1 a share of 1/2 is the least: a
    bound is to bound a single step, too.
    """
    tokens = replayed[:AGES, 1]
    age = max(1.0, float(tokens @ np.arange(AGES)) / max(float(tokens.sum()), 1.0))
    return (age + 1 - 1 / updates) / (age + 1)


def shortest(
    predicted: Callable[[float], float], limit: float, before: Callable[[], float], reach: float = 1.0
) -> tuple[float, float]:
    """The share of a step to make, `reach` or less, and the drift that is predicted for it. `predicted` is called last with that
    share, but for what `before` does, which gives the drift without the step and leaves the step as it is. It is asked for only
    where `reach` of the step is beyond the limit.

    `reach` of the step if its drift is within `limit`, or no more than `before` it: a step that lowers the drift is not made
    shorter than that. Else a line search: drift grows with the square of a step, or more slowly, which gives the next share to
    try. After `TRIES`, or if it was beyond the limit before, only `LEAST` is made.
    """
    value = predicted(reach)
    if value <= limit:
        return reach, value
    start = before()
    if value <= start:
        return reach, value
    share = reach
    for _ in range(TRIES if start < limit else 0):
        growth = (limit - start) / (value - start) if math.isfinite(value) and value > start else 0.0
        share = max(LEAST, share * min(max(MARGIN * math.sqrt(max(growth, 0.0)), 0.1), MARGIN))
        value = predicted(share)
        if value <= limit or share == LEAST:
            return share, value
    return LEAST, predicted(LEAST)
