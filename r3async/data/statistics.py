"""Means with intervals, and paired differences: all that commands, reports and benchmarks know of statistics. Pure.

**Runs.** A value comes of a run, which has a seed and an initial model. With one initial model (or one seed) the runs are
replicates: Student's t interval of their mean. So they are where each seed has a model of its own. With several of both, every
seed with every model, runs that share a model are not independent of each other. The table is then one of two crossed random
effects without replication, and its mean has the variance `(MS_seed + MS_model - MS_rest) / (seeds * models)`, with the degrees
of freedom of Satterthwaite (Biometrics Bulletin 2, 1946). It is never taken to be less than that of as many independent runs. So
an interval is about other seeds *and* other models.

**Differences** are paired: the same seed and the same initial model, once with each setting. What both runs have in common, the
tasks above all, is in no difference.

**Episodes** of an evaluation are many, and clustered by task: `mean_interval`, with the normal distribution.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

NORMAL_QUANTILE = 1.96
"""Standard errors on both sides of a mean that hold 95 % of a normal distribution."""
CONFIDENCE_LEVEL = 0.95
"""What an interval holds."""

RunKey = tuple[int, int]
"""Seed and initial model, each by its number."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean of runs. `low`, `high`: its 95 % interval; None of a single run. `runs`: how many it is the mean of, which have
    so many `seeds` and `models`."""

    mean: float
    low: float | None
    high: float | None
    runs: int
    seeds: int = 1
    models: int = 1

    @property
    def sign(self) -> int:
        """1 or -1 where the whole interval is on that side of 0, else 0."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None, float | None]:
    """The mean of one value a task, its standard error, and the 95 % confidence interval; None for all three of a single one."""
    data = np.asarray(values, np.float64)
    mean = float(data.mean())
    if len(data) < 2:
        return mean, None, None, None
    error = float(data.std(ddof=1) / math.sqrt(len(data)))
    return mean, error, mean - NORMAL_QUANTILE * error, mean + NORMAL_QUANTILE * error


@functools.lru_cache(maxsize=256)
def t_quantile(degrees_of_freedom: float, level: float = CONFIDENCE_LEVEL) -> float:
    """x such that `level` of Student's t distribution with `degrees_of_freedom` >= 1 degrees is within -x .. x.

    With t = sqrt(freedom) tan(a), the density of a is proportional to cos(a)^(freedom - 1): Abramowitz and Stegun, 26.7.
    """
    if degrees_of_freedom < 1 or not 0 < level < 1:
        raise ValueError(f"no t interval of {degrees_of_freedom:g} degrees of freedom that holds {level:g}")
    angle = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (degrees_of_freedom - 1)
    held = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(degrees_of_freedom) * math.tan(np.interp(level, held / held[-1], angle)))


def estimate_mean(values: Mapping[RunKey, float]) -> Estimate:
    """The mean over runs with its interval; see above. Where several models and seeds were not all combined, only the seeds that
    have every model count. Raises `ValueError` without a value."""
    if not values:
        raise ValueError("there is no run to take the mean of")
    models = sorted({model for _, model in values})
    seeds = [s for s in sorted({seed for seed, _ in values}) if all((s, m) in values for m in models)]
    table = np.array([[values[s, m] for m in models] for s in seeds], np.float64)
    if not seeds:  # no seed has every model: as many models as have a seed, each once
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
    """What the variance of the mean is, times the number of values; and its degrees of freedom."""
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
    """Of `values - base`, over the runs that both have; None where there is no such run."""
    both = {run: values[run] - baseline[run] for run in values if run in baseline}
    return estimate_mean(both) if both else None


def median_ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], draws: int = 2000
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of median(over) / median(under), where element i of both is one pair."""
    rng = np.random.default_rng(0)
    picked = rng.integers(0, len(numerators), (draws, len(numerators)))
    ratios = np.median(np.asarray(numerators)[picked], axis=1) / np.median(np.asarray(denominators)[picked], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
