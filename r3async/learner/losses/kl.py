"""Estimators of KL(mu || pi) from samples of mu, the policy that generated the tokens.

With `delta = log pi(x) - log mu(x)` for tokens `x ~ mu` (pi: the learner, mu: the rollout policy):

| name  | value              | mean under mu | gradient under mu                                      |
|-------|--------------------|---------------|--------------------------------------------------------|
| `k1`  | `-delta`           | KL, unbiased  | unbiased; noisy, may be negative                       |
| `abs` | `|delta|`          | above `|KL|`  | of constant size: drift costs the same however small   |
| `k2`  | `delta^2 / 2`      | KL + O(delta^3) | low variance; equals KL's to first order             |
| `k3`  | `e^delta - 1 - delta` | KL, unbiased | unbiased; never negative                              |

Source: J. Schulman, "Approximating KL Divergence" (2020), with p = pi and q = mu, for KL(q, p) from samples of q.
There the ratio is p/q, so the sign of `delta` follows from who sampled. `e^-delta - 1 + delta` is right only for
samples of pi (the KL to a frozen reference), and is not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

TANGENT_FROM = 20.0


def k1(delta: Tensor) -> Tensor:
    """`-delta`. Unbiased for KL(mu || pi) in value and in gradient; single tokens may be negative."""
    return -delta


def absolute(delta: Tensor) -> Tensor:
    """`|delta|`. Not a KL estimate: a distance whose gradient does not shrink with the drift."""
    return delta.abs()


def k2(delta: Tensor) -> Tensor:
    """`delta^2 / 2`. Biased from the third order of delta on, low variance. (Elsewhere `(log ratio)^2`, which is 2 k2.)"""
    return 0.5 * delta.square()


def k3(delta: Tensor) -> Tensor:
    """`e^delta - 1 - delta`; beyond delta = 20, its tangent there. Unbiased in value and in gradient, never negative.

    Computed by `expm1`, and near 0 by its series up to the fourth order (relative error below 1e-7): there the two terms
    cancel, and in float32 would leave little of the value below 1e-5 and nothing of the gradient below 1e-7. The tangent
    keeps a token that mu would sample once in 5e8 from overflowing, and its gradient from vanishing as a clamp's would.
    """
    bounded = delta.clamp(max=TANGENT_FROM)
    tangent = torch.where(delta > TANGENT_FROM, math.expm1(TANGENT_FROM) * (delta - TANGENT_FROM), 0.0)
    series = 0.5 * delta.square() * (1 + delta / 3 * (1 + delta / 4))
    return torch.where(delta.abs() < 1e-2, series, torch.expm1(bounded) - bounded + tangent)


def reference_k3(delta: Tensor) -> Tensor:
    """`e^delta - 1 - delta` with `delta = log ref - log pi`, for tokens sampled from pi: KL(pi || ref), never negative.

    The term of GRPO (arXiv 2402.03300, eq. 4). For samples of pi its value is unbiased; its gradient is that of
    KL(ref || pi), which agrees with KL(pi || ref)'s to first order in the drift.
    """
    return k3(delta)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
"""By the names of `algorithm.rollout_kl.estimator`. Each maps a tensor of deltas to one of the same shape and dtype."""
