"""Confidence intervals of means, and quantiles of Student's t distribution."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

NORMAL_QUANTILE = 1.96
"""Standard errors on each side of a mean that hold 95 % of a normal distribution."""
CONFIDENCE_LEVEL = 0.95
"""Share of the distribution that an interval holds."""


def mean_interval(
    values: Sequence[float],
) -> tuple[float, float | None, float | None, float | None]:
    """Return the mean of one value per task, its standard error, and the two ends of its 95 %
    confidence interval.

    All but the mean are None for a single value.
    """
    data = np.asarray(values, np.float64)
    mean = float(data.mean())
    if len(data) < 2:
        return mean, None, None, None
    error = float(data.std(ddof=1) / math.sqrt(len(data)))
    return mean, error, mean - NORMAL_QUANTILE * error, mean + NORMAL_QUANTILE * error


@functools.lru_cache(maxsize=256)
def t_quantile(degrees_of_freedom: float, level: float = CONFIDENCE_LEVEL) -> float:
    """Return x such that `level` of Student's t distribution with `degrees_of_freedom` >= 1
    lies within -x .. x.

    With t = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1):
    Abramowitz and Stegun, 26.7. Raises `ValueError` for fewer degrees, or a level that is not
    between 0 and 1.
    """
    if degrees_of_freedom < 1 or not 0 < level < 1:
        raise ValueError(
            f"no t interval of {degrees_of_freedom:g} degrees of freedom that holds {level:g}"
        )
    angle = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (degrees_of_freedom - 1)
    held = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(degrees_of_freedom) * math.tan(np.interp(level, held / held[-1], angle)))
