"""From scores to advantages: `algorithm.advantage`.

The scores `r` of a group's n members are compared with each other; each estimator is a baseline `b_i` and a scale `c`, and
gives the advantage `c (r_i - b_i)`:

| name                                | `b_i`                | `c`                 | source                             |
|-------------------------------------|----------------------|---------------------|------------------------------------|
| `grpo`                              | mean(r)              | 1 / (std(r) + 1e-3) | arXiv 2402.03300, section 4.1.2    |
| `dr_grpo`; `grpo` if not `normalize_std` | mean(r)         | 1                   | arXiv 2503.20783                   |
| `rloo`                              | mean of the others' r | 1                  | arXiv 2402.14740                   |
| `maxrl`, for `r >= 0`               | mean(r)              | 1 / mean(r)         | arXiv 2602.02710                   |
| `reinforce_pp_baseline`             | mean(r)              | 1, then batch       | arXiv 2501.03262, "w/ Baseline"    |
| `reinforce_pp`                      | 0                    | 1, then batch       | arXiv 2501.03262                   |

std has n - 1 in the denominator. "Then batch": from the advantages of all trained tokens of the step their mean is
subtracted, and they are divided by their standard deviation (`standardize`).

A group without contrast (fewer than two scores, or all equal) has nothing to compare: its advantages are exactly 0, except
under `reinforce_pp`, which compares with the whole batch. So a batch has contrast exactly where a trained token's advantage
is not 0: that is what decides whether an update is made (`learners.step`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_EPS = 1e-3
RESOLUTION = 4 * float(np.finfo(np.float32).eps)
"""Scores that differ by less than this share of the largest are equal: rewards are stored as float32, and sums of the same
rewards in another order (0.1 + 0.2, 0.3) differ by rounding. An advantage made of that would be noise, scaled to full size."""


def has_contrast(scores: Sequence[float] | np.ndarray) -> bool:
    """Whether there are two different scores, up to `RESOLUTION`."""
    if len(scores) < 2:
        return False
    low, high = float(np.min(scores)), float(np.max(scores))
    return high - low > RESOLUTION * max(abs(low), abs(high))


def baseline_and_scale(
    scores: Sequence[float] | np.ndarray, estimator: str, *, normalize_std: bool = True
) -> tuple[np.ndarray, float]:
    """float64 `[n]` baselines, and the scale, of `scores` `[n]`; see the table above."""
    values = np.asarray(scores, np.float64)
    n = len(values)
    if estimator == "reinforce_pp":
        return np.zeros(n), 1.0
    if not has_contrast(values):
        return np.zeros(n), 0.0
    if estimator == "rloo":
        return (values.sum() - values) / (n - 1), 1.0
    mean = np.full(n, values.mean())
    if estimator == "grpo":
        return mean, float(1 / (values.std(ddof=1) + STD_EPS)) if normalize_std else 1.0
    if estimator == "maxrl":
        if values.min() < 0:
            raise ValueError(f"`advantage` = 'maxrl' is for rewards >= 0, and there is one of {values.min():g}")
        return mean, float(1 / values.mean())
    if estimator in ("dr_grpo", "reinforce_pp_baseline"):
        return mean, 1.0
    raise ValueError(f"advantage {estimator!r} is not known")


def standardize(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """float32 `[T_i]`: `(a - mean) / std` with both over all tokens of the step where `masks` is True; 0 elsewhere, and
    everywhere if those are all equal."""
    trained = np.concatenate([a[m] for a, m in zip(advantages, masks, strict=True)] or [np.zeros(0)]).astype(np.float64)
    mean, scale = (float(trained.mean()), 1 / float(trained.std())) if has_contrast(trained) else (0.0, 0.0)
    return [
        np.where(m, (a.astype(np.float64) - mean) * scale, 0.0).astype(np.float32)
        for a, m in zip(advantages, masks, strict=True)
    ]
