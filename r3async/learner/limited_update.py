"""The update of a minibatch within the trust region: made, shortened, or left out.

With `rollout_kl.limit` the drift of the probed episodes (`served_drift.py`) is measured again after
every update. It says how far the step went, and so how far the next step's tokens will have drifted
(`compute_drift_carryover`). If that is too far, the step is shortened before anything is published
(`limit_update`). This is measured in every step, so the hard bound does not depend on an older
figure. The step trains these episodes like all others; how that changes the prediction was measured
(D-184 in docs/decisions/).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from r3async.learner.drift_metrics import (
    DRIFT_BINS,
    REPLAYED_DRIFT_METRIC,
    STALENESS_BINS,
    TOKEN_COUNT,
    compute_gap_variance,
    compute_served_gaps,
    count_served_tokens,
    estimate_served_drift,
)
from r3async.learner.loss_sums import LossSums
from r3async.learner.optimizer import OptimizerUpdate
from r3async.learner.served_drift import sum_served_drift

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend
    from r3async.learner.minibatch import MeasuredMinibatch


MIN_STEP_SHARE = 1 / 32
"""Least share of a step that is made, however far it goes: `rollout_kl.max` skips a step
before it is made."""
LINE_SEARCH_TRIES = 5
"""Shares of one step that are tried after the whole step: each takes one forward pass over the
probed episodes."""
LINE_SEARCH_MARGIN = 0.9
"""Factor of the share at which the drift would be at the limit, if it grew with the
square of the share."""


def update_in_trust_region(backend: LearnerBackend, measured: MeasuredMinibatch) -> OptimizerUpdate:
    """Clip and make the optimizer's step, unless there is a cause not to or the drift is beyond
    `rollout_kl.max`.

    Then shorten the step if the drift after it is beyond `rollout_kl.limit`. The coefficient of
    the next step follows from the drift measured in this one, unless this one has zero
    variance. Collective.
    """
    optimizer = backend.optimizer
    trust_region = backend.trust_region
    minibatch = measured.minibatch
    drift = measured.drift
    replayed = LossSums.compute_metrics(measured.loss_sums)[REPLAYED_DRIFT_METRIC]
    served = None
    extrapolated = None
    if count_served_tokens(drift):
        served = estimate_served_drift(drift)
    else:
        tokens_by_staleness = drift.trained[:STALENESS_BINS, TOKEN_COUNT].tolist()
        extrapolated = trust_region.extrapolate_served_drift(replayed, tokens_by_staleness)
    judged = trust_region.select_drift(replayed, extrapolated if served is None else served)
    if minibatch.skip_cause:
        cause = minibatch.skip_cause if math.isfinite(judged) else "not_finite"
        return replace(optimizer.skip_step(cause), served_drift_estimate=extrapolated)
    if trust_region.exceeds_max_drift(judged):
        update = optimizer.skip_step("trust_region")
    else:
        update = limit_update(backend, measured, optimizer.step())
    trust_region.update_coefficient(judged)
    if served is not None:
        trust_region.record_served_gaps(
            compute_served_gaps(drift), compute_gap_variance(drift, measured.gap_moments)
        )
    return replace(update, served_drift_estimate=extrapolated)


def limit_update(
    backend: LearnerBackend, measured: MeasuredMinibatch, update: OptimizerUpdate
) -> OptimizerUpdate:
    """Shorten the update that the optimizer has just made until the drift that it leads to is
    within the limit.

    The least share is made whatever its drift (`OptimizerUpdate.is_beyond_limit`). What is above
    the limit then is the drift of versions in flight, which no shorter step lowers; the moments
    move on, and so does a term of the loss that lowers drift.

    A step is first shortened to `TrustRegion.max_share` of it. Collective: the figures that decide
    are reduced over all ranks, so every rank makes the same share of the step.

    What was `measured` is from before the update. What is limited is the drift of the tokens of the
    next update, a share of the drift of these tokens under the new weights
    (`compute_drift_carryover`).
    """
    replayed = measured.drift.probed_replayed
    limit = backend.config.algorithm.rollout_kl.update_limit
    if (
        limit is None
        or update.cause
        or not measured.probes.micro_batches
        or not replayed[:, TOKEN_COUNT].any()
    ):
        return update
    carryover = compute_drift_carryover(replayed, backend.config.schedule.updates_per_version)
    max_share = backend.trust_region.max_share
    trial = TrialStep(backend, measured)
    predicted = shorten_to_limit(trial, limit / carryover, max_share)
    backend.trust_region.record_step_share(trial.share / max_share)
    ahead = predicted * carryover
    return replace(
        update,
        step_share=trial.share,
        predicted_drift=ahead,
        is_beyond_limit=not predicted <= limit / carryover,
    )


class TrialStep:
    """The update that the optimizer has just made, any share of which can be made instead. All
    methods are collective.

    Attributes:
        share: The share that the weights have now.
    """

    def __init__(self, backend: LearnerBackend, measured: MeasuredMinibatch):
        self._backend = backend
        self._measured = measured
        self._drift = measured.drift
        self.share = 1.0

    def set_share(self, share: float) -> None:
        """Make `share` of the update."""
        if share != self.share:
            self._backend.optimizer.shorten_step(self.share, share)
            self.share = share

    def predict_drift(self) -> float:
        """Return the served drift of this minibatch's tokens under the weights as they are."""
        served = sum_served_drift(self._backend, self._measured.minibatch, self._measured.probes)
        total = self._backend.ranks.all_reduce(served.reshape(-1), "sum").reshape(served.shape)
        return estimate_served_drift(self._drift._replace(probed_served=total[:DRIFT_BINS]))

    def drift_without_step(self) -> float:
        """Return the served drift before the update, which stays as it is."""
        if count_served_tokens(self._drift):
            return estimate_served_drift(self._drift)
        share = self.share
        self.set_share(0.0)
        drift = self.predict_drift()
        self.set_share(share)
        return drift


def shorten_to_limit(trial: TrialStep, limit: float, max_share: float = 1.0) -> float:
    """Shorten the step to `max_share` of it, and on until its drift is within `limit`.
    Returns that drift.

    It is a line search: drift grows with the square of a step, or more slowly, which gives the next
    share to try. After `LINE_SEARCH_TRIES`, or if the drift was beyond the limit before, only
    `MIN_STEP_SHARE` is made.
    """
    trial.set_share(max_share)
    drift = trial.predict_drift()
    if drift <= limit:
        return drift
    before = trial.drift_without_step()
    if drift <= before:  # the step lowers it
        return drift
    for _ in range(LINE_SEARCH_TRIES if before < limit else 0):
        growth = (
            (limit - before) / (drift - before) if math.isfinite(drift) and drift > before else 0.0
        )
        factor = LINE_SEARCH_MARGIN * math.sqrt(max(growth, 0.0))
        trial.set_share(
            max(MIN_STEP_SHARE, trial.share * min(max(factor, 0.1), LINE_SEARCH_MARGIN))
        )
        drift = trial.predict_drift()
        if drift <= limit or trial.share == MIN_STEP_SHARE:
            return drift
    trial.set_share(MIN_STEP_SHARE)
    return trial.predict_drift()


def compute_drift_carryover(replayed: np.ndarray, updates: int) -> float:
    """Return the share of the drift that tokens have after an update which the tokens of the next
    update will have.

    `replayed` are sums by age, as in `sum_drift`, and a version is made by `updates` updates.

    An update leaves these tokens up to a version older than tokens are when they are trained: with
    a mean age of a, those have been through a + 1 - 1/updates versions at most, these through
    a + 1. Drift grows about linearly with the updates between two policies (docs/trust-region.md),
    so the share is that of the versions. At an age below 1 a share of 1/2 is the least: a bound
    should bound a single step, too.
    """
    tokens = replayed[:STALENESS_BINS, TOKEN_COUNT]
    age = max(1.0, float(tokens @ np.arange(STALENESS_BINS)) / max(float(tokens.sum()), 1.0))
    return (age + 1 - 1 / updates) / (age + 1)
