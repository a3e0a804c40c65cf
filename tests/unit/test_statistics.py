"""Intervals of means, and the quantiles of Student's t that they are made with: against tables."""

import math

import numpy as np
import pytest

from dev.estimates import Estimate, estimate_mean
from r3async.data.statistics import t_quantile


@pytest.mark.parametrize(
    ("freedom", "level", "value"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.30265),
        (4, 0.95, 2.77645),
        (9, 0.95, 2.26216),
        (2, 0.99, 9.92484),
        (1e5, 0.95, 1.95999),
    ],
)
def test_t_quantiles_are_those_of_the_tables(freedom, level, value):
    assert t_quantile(freedom, level) == pytest.approx(value, rel=2e-5)


def test_a_quantile_between_two_whole_degrees_of_freedom_is_between_theirs():
    assert t_quantile(3) < t_quantile(2.5) < t_quantile(2)
    with pytest.raises(ValueError, match="no t interval"):
        t_quantile(0.5)


def test_five_seeds_by_hand():
    values = [0.8, 0.9, 0.85, 0.7, 0.95]
    found = estimate_mean(values)
    half = 2.77645 * np.std(values, ddof=1) / math.sqrt(5)
    assert found.mean == pytest.approx(0.84)
    assert (found.low, found.high) == pytest.approx((0.84 - half, 0.84 + half), rel=1e-5)
    assert found.count == 5


def test_one_run_has_no_interval_and_none_no_mean():
    assert estimate_mean([0.5]) == Estimate(0.5, None, None, 1)
    with pytest.raises(ValueError, match="no value"):
        estimate_mean([])
