"""Means with confidence intervals, and paired differences: all statistics of commands, reports and benchmarks. Pure.

**Runs.** Each value comes from a run, which has a seed and an initial model. With one initial model (or one seed), or
with a different model for each seed, the runs are replicates: their mean has Student's t interval. If there are several
of both, and every seed is combined with every model, runs that share a model are not independent of each other. The
table then has two crossed random effects without replication, and its mean has the variance
`(MS_seed + MS_model - MS_rest) / (seeds * models)`, with the degrees of freedom of Satterthwaite (Biometrics Bulletin
2, 1946). The variance is never taken to be less than that of as many independent runs. So an interval covers other
seeds *and* other models.

**Differences** are paired: the same seed and the same initial model, once with each setting. What both runs share,
above all the tasks, cancels out in a difference.

**Episodes** of an evaluation are many, and clustered by task: `mean_interval` uses the normal distribution.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

NORMAL_QUANTILE = 1.96
"""Standard errors on each side of a mean that hold 95 % of a normal distribution."""
CONFIDENCE_LEVEL = 0.95
"""Share of the distribution that an interval holds."""

RunKey = tuple[int, int]
"""Numbers of a run's seed and of its initial model."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean over runs, with its 95 % interval.

    Attributes:
        low: Lower end of the interval; None for a single run.
        high: Upper end of the interval; None for a single run.
        runs: Number of runs in the mean.
        seeds: Number of different seeds of these runs.
        models: Number of different initial models of these runs.
    """

    mean: float
    low: float | None
    high: float | None
    runs: int
    seeds: int = 1
    models: int = 1

    @property
    def sign(self) -> int:
        """The side of 0 on which the whole interval lies, 1 or -1; otherwise 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None, float | None]:
    """Return the mean of one value per task, its standard error, and the two ends of its 95 % confidence interval.

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
    """Return x such that `level` of Student's t distribution with `degrees_of_freedom` >= 1 lies within -x .. x.

    With t = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1): Abramowitz and Stegun,
    26.7. Raises `ValueError` for fewer degrees, or a level that is not between 0 and 1.
    """
    if degrees_of_freedom < 1 or not 0 < level < 1:
        raise ValueError(f"no t interval of {degrees_of_freedom:g} degrees of freedom that holds {level:g}")
    angle = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (degrees_of_freedom - 1)
    held = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(degrees_of_freedom) * math.tan(np.interp(level, held / held[-1], angle)))


def estimate_mean(values: Mapping[RunKey, float]) -> Estimate:
    """Return the mean over runs with its interval, by the method of the module docstring.

    Where several models and seeds were not all combined, only the seeds that have every model count. Raises
    `ValueError` if there is no value.
    """
    if not values:
        raise ValueError("there is no run to take the mean of")
    models = sorted({model for _, model in values})
    seeds = [s for s in sorted({seed for seed, _ in values}) if all((s, m) in values for m in models)]
    table = np.array([[values[s, m] for m in models] for s in seeds], np.float64)
    if not seeds:  # no seed has every model: take each model once
        firsts = [min(run for run in values if run[1] == m) for m in models]
        table = np.array([[values[run] for run in firsts]], np.float64)
        rows, columns = len({seed for seed, _ in firsts}), len(models)
    else:
        rows, columns = table.shape
    mean, runs = float(table.mean()), table.size
    if runs < 2:
        return Estimate(mean, None, None, runs)
    squares, freedom = _mean_variance(table)
    half = t_quantile(max(1.0, freedom)) * math.sqrt(squares / runs)
    return Estimate(mean, mean - half, mean + half, runs, rows, columns)


def _mean_variance(table: np.ndarray) -> tuple[float, float]:
    """Return the variance of the mean times the number of values, and its degrees of freedom."""
    rows, columns = table.shape
    alone = float(table.var(ddof=1))
    if rows == 1 or columns == 1:
        return alone, table.size - 1
    by_row, by_column = table.mean(axis=1), table.mean(axis=0)
    rest = table - by_row[:, None] - by_column[None, :] + table.mean()
    squares = (columns * by_row.var(ddof=1), rows * by_column.var(ddof=1), (rest**2).sum() / (rows - 1) / (columns - 1))
    freedoms = (rows - 1, columns - 1, (rows - 1) * (columns - 1))
    crossed = squares[0] + squares[1] - squares[2]
    if crossed <= alone:
        return alone, table.size - 1
    below = sum(each**2 / freedom for each, freedom in zip(squares, freedoms, strict=True))
    return float(crossed), float(crossed**2 / below)


def paired_difference(values: Mapping[RunKey, float], baseline: Mapping[RunKey, float]) -> Estimate | None:
    """Return the mean of `values - baseline` over the runs that both have; None if there is no such run."""
    both = {run: values[run] - baseline[run] for run in values if run in baseline}
    return estimate_mean(both) if both else None
