"""Means over independent runs or repeats, with intervals by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

from r3async.data.statistics import t_quantile


class Estimate(msgspec.Struct, frozen=True):
    """A mean over `count` values, with its 95 % interval.

    Attributes:
        low: Lower end of the interval; None for a single value.
        high: Upper end of the interval; None for a single value.
    """

    mean: float
    low: float | None
    high: float | None
    count: int


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Return the mean with its interval. Raises `ValueError` if there is no value."""
    if not values:
        raise ValueError("there is no value to take the mean of")
    mean = fmean(values)
    count = len(values)
    if count < 2:
        return Estimate(mean, None, None, count)
    half = t_quantile(count - 1) * stdev(values) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)
