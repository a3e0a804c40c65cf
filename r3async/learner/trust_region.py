"""The trust region of a run: the coefficient of its KL term, which follows the drift, and the limit
that refuses a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from r3async.checkpoint.state import TrustRegionState
from r3async.config import RolloutKLConfig
from r3async.config.algorithm import MAX_COEFFICIENT

MAX_SHARE_DECAY = 0.7
MAX_SHARE_GROWTH = 1.15
"""The least factor of `max_share` after a step that was shortened, and its factor after one that
was not. It settles where about one step in four is shortened."""
MAX_SHARE_FLOOR = 1 / 32
VARIANCE_HISTORY = 4
"""Number of measurements that define the usual variance of the gap. With more of them, intervals
hold the true value no more often, and are wider where drift falls."""
GAIN = 0.2
"""Rate at which the coefficient rises: e-folds per step when drift is twice its target."""
GAIN_DOWN = 0.1
"""Rate at which the coefficient falls, in the same unit."""
MAX_DRIFT_ERROR = 3.0
"""The largest error that counts: one wild step moves the coefficient no further than drift of 4
times the target."""


class TrustRegion:
    """The coefficient of one run's KL term, and the limit that refuses a step.

    The same measurements give the same coefficients.

    After each step, the mean of k3 over its trained tokens is measured, served or replayed
    (`measure`), whatever estimator the loss uses. With a `target`, after each step, for the error
    `e = min(measured / target - 1, 3)` and `v = e + e - e_before`:

        log coef += (GAIN if v > 0 else GAIN_DOWN) * v, within log of the configured coef .. 0

    This is a proportional-integral controller of log coef in velocity form, so that a bound does
    not wind it up. It has one side: the coefficient of the configuration is its floor, so calm
    steps do not disarm it. With a floor of 1e-4, a hundred calm steps lowered it by two decades,
    and a burst then ran unopposed for 30 to 40 steps. It rises faster than it falls. As single
    steps scatter by a factor of two, mostly upwards, the mean of the drift then settles below the
    target, at 0.7 to 0.95 of it: the target is a bound of the mean, not its value.

    Drift falls by a power (0 to 2, roughly) of the coefficient, some steps late: staleness delays
    what a step changes until its tokens are trained. (PPO's penalty, arXiv 1707.06347, eq. 8,
    doubles or halves its coefficient instead, and oscillates.)
    """

    def __init__(self, config: RolloutKLConfig):
        self._config = config
        self._last_error: float | None = None
        self._served_gaps: list[float | None] = []
        """The gap by which served drift exceeded the replayed one when it was last
        measured, by age."""
        self._gap_variances: list[float] = []
        """The variance of the gap over episodes, from the last measurements."""
        self.coef = config.coef
        """The coefficient of the next step."""
        self.max_share = 1.0
        """The share of the next step that is tried first, with a `limit`."""

    def record_step_share(self, share: float) -> None:
        """Record that this share of `max_share` was made; call once after each step with a `limit`.

        The tokens that a step is judged by are of versions before it, and the next ones of versions
        that are in flight. So a whole step after a short one is noticed too late: with step lengths
        that go up and down, an oscillation appeared. After a step that went too far, the share
        grows back step by step.
        """
        self.max_share = min(
            1.0,
            max(
                MAX_SHARE_FLOOR,
                self.max_share * (max(share, MAX_SHARE_DECAY) if share < 1 else MAX_SHARE_GROWTH),
            ),
        )

    def record_served_gaps(self, gaps: Sequence[float | None], variance: float | None) -> None:
        """Record a measurement of served drift, from which other steps are estimated; call
        once after each.

        Args:
            gaps: How far served drift is above the replayed one, by age; None for an age
                without probed tokens.
            variance: The result of `compute_gap_variance`; None if too few episodes were probed.
        """
        before = self._served_gaps or [None] * len(gaps)
        self._served_gaps = [
            new if new is not None and math.isfinite(new) else old
            for new, old in zip(gaps, before, strict=True)
        ]
        if variance is not None and math.isfinite(variance):
            self._gap_variances = [*self._gap_variances, variance][-VARIANCE_HISTORY:]

    @property
    def mean_gap_variance(self) -> float:
        """The mean of the last variances of the gap; 0 before the first measurement."""
        return sum(self._gap_variances) / max(len(self._gap_variances), 1)

    def update_coefficient(self, drift: float) -> None:
        """Update the coefficient from the measured drift, once after each step.

        A drift that is not finite changes nothing.
        """
        target = self._config.target
        if target is None or not math.isfinite(drift):
            return
        error = min(max(drift, 0.0) / target - 1, MAX_DRIFT_ERROR)
        speed = error + error - (error if self._last_error is None else self._last_error)
        gain = GAIN if speed > 0 else GAIN_DOWN
        self.coef = self._clamp_coefficient(self.coef * math.exp(gain * speed))
        self._last_error = error

    def select_drift(self, replayed: float, served: float | None) -> float:
        """Select which of a step's two drifts goes to `update_coefficient` and `exceeds_max_drift`.

        `served` is measured or estimated; None if it is unknown.
        """
        return replayed if served is None or self._config.measure == "replayed" else served

    def extrapolate_served_drift(
        self, replayed: float, tokens_by_staleness: Sequence[float]
    ) -> float | None:
        """Estimate the served drift of a step that did not measure it, from its replayed drift and
        its tokens' ages.

        At each age it is as far above the replayed drift as when that age, or the nearest measured
        one, was last measured. The measurement at age 0 is used for age 0 alone: there engine and
        learner have the same weights, so it says nothing about the effect of updates on routers.
        Returns None if the measurements do not cover all tokens.
        """
        measured = {age: gap for age, gap in enumerate(self._served_gaps) if gap is not None}
        if not measured:
            return None
        above = 0.0
        for age, tokens in enumerate(tokens_by_staleness):
            if not tokens:
                continue
            near = {
                abs(other - age): gap
                for other, gap in measured.items()
                if other == age or other > 0
            }
            if not near:
                return None
            above += tokens * near[min(near)]
        return max(replayed + above / max(sum(tokens_by_staleness), 1.0), 0.0)

    def exceeds_max_drift(self, measured: float) -> bool:
        """Return True if a step with that drift must make no optimizer update: above
        `max`, or not finite.

        Never without `max`.
        """
        limit = self._config.max
        return limit is not None and not (math.isfinite(measured) and measured <= limit)

    def state_dict(self) -> TrustRegionState:
        """Return the state that `load_state_dict` reads."""
        return {
            "coef": self.coef,
            "error": self._last_error,
            "gaps": self._served_gaps,
            "variances": self._gap_variances,
            "reach": self.max_share,
        }

    def load_state_dict(self, state: TrustRegionState) -> None:
        """Continue from a `state`, within the bounds of this configuration; without a `target`, its
        coefficient stays."""
        self._served_gaps, self.max_share = list(state.get("gaps", [])), state.get("reach", 1.0)
        self._gap_variances = list(state.get("variances", []))
        if self._config.target is not None:
            self.coef = self._clamp_coefficient(state["coef"])
            self._last_error = state["error"]

    def _clamp_coefficient(self, coef: float) -> float:
        return min(max(coef, self._config.coef), MAX_COEFFICIENT)
