"""The controller of the trust region: which coefficient the next step's KL term has, and which step is refused.

What is measured after each step is the mean of k3 over its trained tokens (`rollout_kl/k3`): unbiased for KL(rollout ||
learner), never negative, and the same whatever estimator the loss uses.
"""

from __future__ import annotations

import math

from r3async.checkpoint.state import TrustRegionState
from r3async.config import RolloutKLConfig

ERROR_LIMIT = 3.0
"""Errors that count: one wild step moves the coefficient no further than drift of 4 times the target does."""


class TrustRegion:
    """Coefficient of one run. No clock, no randomness: the same measurements give the same coefficients.

    With a `target`, after each step, for the error `e = min(measured / target - 1, 3)`:

        log coef += gain * (e + e - e_before), within log coef_min .. log coef_max

    A proportional-integral controller of log coef in velocity form, so that a bound does not wind it up. Drift falls by a
    power (0 to 2, roughly) of the coefficient, some steps late: staleness delays what a step changes until its tokens
    are trained. In logarithms that is a delay, and a gain of at most 2, for which a `gain` of 0.1 is stable up to a delay of
    8 steps. (PPO's penalty, arXiv 1707.06347, eq. 8, doubles or halves its coefficient instead, and oscillates.)

    Near the target the error is `log(measured / target)`. It is not that logarithm, since single steps scatter by a factor of
    two about their mean, upwards most: a controller of logarithms holds their geometric mean, and the mean is a quarter more.
    """

    def __init__(self, config: RolloutKLConfig):
        self._config = config
        self._coef = config.coef
        self._error: float | None = None

    @property
    def coef(self) -> float:
        """Of the next step."""
        return self._coef

    def update(self, measured: float) -> None:
        """Once after each step. A measurement that is not finite changes nothing."""
        target = self._config.target
        if target is None or not math.isfinite(measured):
            return
        error = min(max(measured, 0.0) / target - 1, ERROR_LIMIT)
        before = error if self._error is None else self._error
        step = self._config.gain * (error + error - before)
        self._coef, self._error = self._bounded(self._coef * math.exp(step)), error

    def breaks(self, measured: float) -> bool:
        """Whether a step with that drift must make no optimizer update: above `max`, or not finite. Never without `max`."""
        limit = self._config.max
        return limit is not None and not (math.isfinite(measured) and measured <= limit)

    def state(self) -> TrustRegionState:
        """What `restore` reads."""
        return {"coef": self._coef, "error": self._error}

    def restore(self, state: TrustRegionState) -> None:
        """Continue from a `state`, within the bounds of this configuration; without a `target` its coefficient holds."""
        if self._config.target is not None:
            self._coef, self._error = self._bounded(state["coef"]), state["error"]

    def _bounded(self, coef: float) -> float:
        return min(max(coef, self._config.coef_min), self._config.coef_max)
