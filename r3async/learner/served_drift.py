"""Served drift: that of the weights with the routers' own choice, as engines will serve them.

A step computes its tokens with the routes of the rollout (R3), so the drift that its loss sees,
`rollout_kl`, is that of the weights behind frozen routers. An engine that is given these weights
uses its routers' own choice. `rollout_kl/served_k3` is the drift then.

It is measured in one of `probe_every` steps on a sample, the *probed* episodes (column `probed`, by
`prepare.prepare_minibatches`), by one more forward pass without replay and without gradient. The
estimate for all trained tokens is `replayed + (served - replayed of the probed tokens)`: the
difference, whose mean is the effect of routes, scatters less than the drift of a few tokens, and
the estimate is unbiased. It has an interval: episodes are the sampled units. In the steps between,
nothing is published under the name of a measurement; the trust region is given an estimate, from
that difference as it was last measured at each age (`TrustRegion.extrapolate_served_drift`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from r3async.config import Config
from r3async.data.tokens import ROUTE_COLUMNS, Sample, TokenTable
from r3async.learner.micro_batches import MicroBatch, make_padding_batch, pack_samples
from r3async.learner.minibatch import Minibatch, ProbeBatches

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend


MIN_PROBED_TOKENS = 640
"""Minimum number of tokens probed in a step, prompts included. Among fewer, a single one would
dominate the mean."""
MAX_PROBED_SHARE = 1 / 4
"""Largest share of a step's tokens that are probed for `MIN_PROBED_TOKENS`."""


# -- choice of episodes: on the host, from the step's groups alone ---------------------------------


def needs_probes(config: Config) -> bool:
    """Return True if served drift has to be measured.

    It has to where replay makes it differ from the replayed drift, or if a limit is set.
    """
    region = config.algorithm.rollout_kl
    return region.probe_share > 0 and (
        config.routing.replay != "off" or region.update_limit is not None
    )


def choose_probes(names: Sequence[str], tokens: Sequence[int], config: Config) -> list[int]:
    """Return the indices of the episodes to probe, from their `names` and their
    `tokens` to compute.

    The choice is the same for the same names. In the order of a checksum of their names, as many
    episodes are probed as have no more than `rollout_kl.probe_share` of all tokens, or than the
    smaller of `MIN_PROBED_TOKENS` and a quarter of all, if that is more. If the first has more, it is
    probed in every step if a bound needs it; otherwise in such a fraction of all steps that the
    share is kept on average.
    """
    region = config.algorithm.rollout_kl
    if not needs_probes(config):
        return []
    keys = [zlib.crc32(name.encode()) for name in names]
    order = sorted(range(len(names)), key=lambda i: (keys[i], names[i]))
    budget = max(
        region.probe_share * sum(tokens), min(MIN_PROBED_TOKENS, MAX_PROBED_SHARE * sum(tokens))
    )
    ends = np.cumsum([tokens[i] for i in order])
    within = int(np.searchsorted(ends, budget, side="right"))
    if not within and order:
        first = order[0]
        # A fair draw needs another digest than the order's: a CRC of the name with a prefix differs
        # by a constant only.
        draw = (
            int.from_bytes(hashlib.blake2b(names[first].encode(), digest_size=4).digest()) / 2**32
        )
        within = int(region.needs_served_drift or draw < budget / max(tokens[first], 1))
    return sorted(order[:within])


def is_measurement_due(config: Config, version: int) -> bool:
    """Return True if served drift is measured before the update of weights of `version`.

    It is the same on every rank, and in a replay.
    """
    return version % config.algorithm.rollout_kl.measurement_interval == 0


def drop_probe_column(
    micro_batches: Sequence[MicroBatch], config: Config, version: int
) -> list[MicroBatch]:
    """Remove the column `probed` in a step that neither measures served drift nor predicts it."""
    if is_measurement_due(config, version) or config.algorithm.rollout_kl.update_limit is not None:
        return list(micro_batches)
    return [replace(m, table=m.table.without_columns("probed")) for m in micro_batches]


def mark_probed_samples(
    samples: Sequence[Sample],
    trained: Sequence[np.ndarray],
    episodes: Sequence[int],
    config: Config,
) -> list[bool]:
    """Return, for each sample of a minibatch, True if its episode is probed.

    `choose_probes` chooses among the episodes that have trained tokens, by the name of
    their first sample.

    Args:
        trained: bool `[T_i]`: the trained tokens of each sample.
        episodes: The episode of each sample.
    """
    named: dict[int, str] = {}
    tokens: dict[int, int] = {}
    for sample, mask, episode in zip(samples, trained, episodes, strict=True):
        if mask.any():
            named.setdefault(episode, sample.sample_id)
        tokens[episode] = tokens.get(episode, 0) + len(sample.table)
    numbers = list(named)
    found = choose_probes([named[n] for n in numbers], [tokens[n] for n in numbers], config)
    chosen = {numbers[i] for i in found}
    return [episode in chosen for episode in episodes]


# -- on every rank ---------------------------------------------------------------------------------


def build_probes(
    backend: LearnerBackend, minibatch: Minibatch, all_micro_batches: Sequence[MicroBatch]
) -> ProbeBatches:
    """Build the probes from all of this rank's micro-batches, before any was left
    out. Collective."""
    if not all_micro_batches or "probed" not in all_micro_batches[0].table:
        return ProbeBatches([], [])
    samples = [sample for m in all_micro_batches for sample in _extract_probed_samples(m)]
    made = (
        pack_samples(samples, backend.config.learner.max_tokens_per_micro_batch) if samples else []
    )
    count = int(backend.ranks.all_reduce(np.asarray([len(made)], np.float64), "max")[0])
    made += [make_padding_batch(_without_routes(all_micro_batches[0]))] * (count - len(made))
    made = backend.pad_for_parallel(made)
    return ProbeBatches(made, [_find_measured_rows(m) for m in made])


def _find_measured_rows(micro_batch: MicroBatch) -> np.ndarray:
    table = micro_batch.table
    return np.flatnonzero(table["loss_mask"] & np.isfinite(table["rollout_logprobs"]))


def _without_routes(micro_batch: MicroBatch) -> MicroBatch:
    return replace(micro_batch, table=micro_batch.table.without_columns(*ROUTE_COLUMNS))


def _extract_probed_samples(micro_batch: MicroBatch) -> list[Sample]:
    """Return the probed samples, whole and without routes.

    A token that a sample shares with one before it is trained there.
    """
    bare = _without_routes(micro_batch)
    rows, edges = micro_batch.expanded_samples
    probed = bare.table["probed"]
    out = []
    for index, name in enumerate(micro_batch.sample_ids):
        start = int(micro_batch.cu_seqlens[index])
        stop = int(micro_batch.cu_seqlens[index + 1])
        if not probed[start:stop].any():
            continue
        taken = rows[edges[index] : edges[index + 1]]
        parts = np.split(taken, np.flatnonzero(np.diff(taken) != 1) + 1)
        table = TokenTable.concat(
            [bare.table.slice_rows(int(part[0]), int(part[-1]) + 1) for part in parts]
        )
        mask = np.array(table["loss_mask"])
        mask[: len(mask) - (stop - start)] = False
        out.append(
            Sample(name, table.with_columns(loss_mask=mask), float(micro_batch.temperatures[index]))
        )
    return out


def measure_served_drift(
    backend: LearnerBackend, minibatch: Minibatch, probes: ProbeBatches
) -> np.ndarray:
    """Return `sum_served_drift` before an update; 0 if that is not due, or does not differ from
    the replayed drift. Collective."""
    is_due = is_measurement_due(backend.config, minibatch.version)
    if is_due and backend.replay.uses_records and minibatch.num_trained and probes.trained_rows:
        return sum_served_drift(backend, minibatch, probes)
    return np.zeros((minibatch.drift_bin_count, 2))


def sum_served_drift(
    backend: LearnerBackend, minibatch: Minibatch, probes: ProbeBatches
) -> np.ndarray:
    """Return `sum_drift`, float64 `[drift_bin_count, 2]`, of this rank's probed tokens with the
    routers' own choice.

    It uses the weights as they are. It is 0 where another rank has them. Collective. With FSDP,
    gradients in progress are lost: there must be none.
    """
    found: list[Tensor] = [torch.zeros(minibatch.drift_bin_count, 2, dtype=torch.float64)]
    try:
        with torch.no_grad():
            for index, _, logprobs, _ in backend.iter_scores(
                probes.micro_batches, probes.trained_rows, replay=False
            ):
                if logprobs is not None:
                    drift = minibatch.measure_drift(
                        probes.micro_batches[index], probes.trained_rows[index], logprobs
                    )
                    found.append(drift.cpu())
    finally:
        backend.reset_forward_state()
    total = torch.stack(found).sum(dim=0).numpy()
    return total if backend.ranks.is_loss_reporter else np.zeros_like(total)
