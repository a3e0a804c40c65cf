"""The response of the trust region's controller to a burst of drift, on a simulated plant. Pure, no noise.

The plant is the simplest with the properties of a run: drift falls by a power of the coefficient, follows with inertia,
and does so with a delay of some steps, as staleness delays what a step changes. It leaves out `limit`, which bounds a
single step, whatever the coefficient.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from r3async.learner.drift import TrustRegion

WITHIN = 1.5
"""Multiple of the target up to which a step counts as within it."""
HELD, WINDOW = 5, 25
"""Number of successive steps within the target after which a burst counts as tamed, and number of steps of the windows
whose means are compared."""


ALL_OF_AGE_1 = (0.0, 1.0)
"""Shares of the trained tokens by age."""


class Plant(msgspec.Struct, frozen=True):
    """A simulated run. Drift follows `free / (1 + coef / half)^power`, `delay` steps late, 0.3 of the way a step.
    Served drift is `ratio` times the replayed drift, and `in_burst` times once the burst has begun."""

    power: float
    half: float
    delay: int
    ratio: float = 1.6
    in_burst: float = 2.4
    calm: float = 0.4
    """Drift without control before the burst, as a multiple of the target."""
    burst: float = 8.0
    """Drift without control from the burst on, as a multiple of the target."""


class Response(msgspec.Struct, frozen=True):
    """The response in the steps from the burst on.

    Attributes:
        above: number of steps with drift above 1.5 times the target.
        tamed: number of steps until five in a row are within it; None for never.
        worst: largest mean of 25 steps in a row, or of all if there are fewer, over the target.
    """

    above: int
    tamed: int | None
    worst: float


def respond(
    controller: TrustRegion, plant: Plant, target: float, *, every: int = 1, before: int = 100, after: int = 200
) -> Response:
    """Run the plant for `before` calm steps and `after` with the burst; served drift is measured in one of `every`
    steps."""
    coefs, drift, drifts = [controller.coef] * (plant.delay + 1), plant.calm * target, []
    for step in range(before + after):
        coefs.append(controller.coef)
        calm = step < before
        free = (plant.calm if calm else plant.burst) * target
        drift = 0.7 * drift + 0.3 * free / (1 + coefs[-1 - plant.delay] / plant.half) ** plant.power
        replayed = drift / (plant.ratio if calm else plant.in_burst)
        if step % every == 0:
            controller.update_coefficient(controller.select_drift(replayed, drift))
            controller.record_served_gaps([None, drift - replayed], None)
        else:
            controller.update_coefficient(
                controller.select_drift(replayed, controller.extrapolate_served_drift(replayed, ALL_OF_AGE_1))
            )
        drifts.append(drift)
    return response([drift / target for drift in drifts[before:]])


def response(drifts: Sequence[float]) -> Response:
    """Compute the response from `drifts`, multiples of the target for each step from the burst on."""
    within = [drift <= WITHIN for drift in drifts]
    begun = next((at for at, good in enumerate(within) if not good), 0)
    held = [at for at in range(begun, len(within) - HELD + 1) if all(within[at : at + HELD])]
    size = min(WINDOW, len(drifts))
    means = [fmean(drifts[at : at + size]) for at in range(len(drifts) - size + 1)]
    return Response(within.count(False), held[0] if held else None, max(means, default=0.0))
