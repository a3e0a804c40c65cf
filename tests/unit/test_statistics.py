"""Intervals of means over runs, and paired differences: against tables, and against the truth of simulated runs."""

import math

import numpy as np
import pytest

from r3async.data.statistics import Estimate, estimate_mean, paired_difference, t_quantile


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
    found = estimate_mean({(seed, 0): value for seed, value in enumerate(values)})
    half = 2.77645 * np.std(values, ddof=1) / math.sqrt(5)
    assert found.mean == pytest.approx(0.84)
    assert (found.low, found.high) == pytest.approx((0.84 - half, 0.84 + half), rel=1e-5)
    assert (found.runs, found.seeds, found.models) == (5, 5, 1)


def test_one_run_has_no_interval_and_none_no_mean():
    assert estimate_mean({(3, 0): 0.5}) == Estimate(0.5, None, None, 1)
    assert estimate_mean({(3, 0): 0.5}).sign == 0
    with pytest.raises(ValueError, match="no run"):
        estimate_mean({})


def crossed(rng, seeds, models, *, seed_effect, model_effect, noise):
    by_seed, by_model = seed_effect * rng.normal(size=seeds), model_effect * rng.normal(size=models)
    return {(s, m): by_seed[s] + by_model[m] + noise * rng.normal() for s in range(seeds) for m in range(models)}


@pytest.mark.parametrize(("seed_effect", "model_effect"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.3, 3.0)])
@pytest.mark.long
def test_an_interval_holds_the_truth_of_other_seeds_and_other_models(seed_effect, model_effect, monkeypatch):
    """The truth is 0. With 15 runs of three models, a t interval that took them for independent would hold it in only 60 to 80 %
    of the cases where models differ."""
    # Of rounded degrees, so that most quantiles are computed once.
    monkeypatch.setattr("r3async.data.statistics.t_quantile", lambda freedom: t_quantile(round(freedom, 1)))
    rng = np.random.default_rng(0)
    drawn = [crossed(rng, 5, 3, seed_effect=seed_effect, model_effect=model_effect, noise=1.0) for _ in range(600)]
    found = [estimate_mean(values) for values in drawn]
    assert np.mean([each.low < 0 < each.high for each in found]) >= 0.93
    if model_effect >= 1:
        naive = [np.array(list(values.values())) for values in drawn]
        halves = [t_quantile(14) * each.std(ddof=1) / math.sqrt(15) for each in naive]
        assert np.mean([abs(each.mean()) < half for each, half in zip(naive, halves, strict=True)]) < 0.87


def test_runs_without_effects_of_seed_or_model_are_as_good_as_independent_ones():
    found = estimate_mean({(0, 0): 1, (0, 1): 2, (1, 0): 2, (1, 1): 1})
    alone = estimate_mean(dict(zip([(s, 0) for s in range(4)], [1, 2, 2, 1], strict=True)))
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high))


def test_only_seeds_that_have_every_model_count():
    values = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): 2.0, (1, 1): 2.0, (2, 0): 99.0}
    found = estimate_mean(values)
    assert (found.mean, found.runs, found.seeds, found.models) == (2.0, 4, 2, 2)
    apart = estimate_mean({(0, 0): 1.0, (1, 1): 3.0})
    assert (apart.mean, apart.runs, apart.seeds, apart.models) == (2.0, 2, 2, 2)


def test_what_both_runs_have_in_common_is_in_no_difference():
    rng = np.random.default_rng(1)
    base = {(seed, 0): 10 * rng.normal() for seed in range(5)}
    better = {run: value + 0.1 + 0.01 * rng.normal() for run, value in base.items()}
    found = paired_difference(better, base)
    assert found.low < 0.1 < found.high
    assert found.sign == 1
    assert paired_difference(base, better).sign == -1
    assert estimate_mean(better).sign == 0
    assert paired_difference({(7, 0): 1.0}, base) is None
    assert paired_difference({(0, 0): 1.0, (7, 0): 1.0}, base).runs == 1
