"""Tokens that a policy loss chooses among all trained tokens of a minibatch, before its first
backward pass. Pure.

The choice depends on the learner's current log-probs of all of them, so it takes one more forward
pass (`minibatch.Minibatch.set_global_logprobs`). It does not depend on packing or ranks: tokens
with equal values are chosen in the order of episode and turn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from r3async.config import AlgorithmConfig
from r3async.learner.split_episodes import TokenColumns

TokenChoice = Callable[[TokenColumns, AlgorithmConfig, np.random.Generator], np.ndarray]
"""Returns the places in the columns of the chosen tokens, int64. The columns are `[N]`:
`LOSS_COLUMNS`, `logprobs` of the learner, `episode`, `turns` and `place`."""


def compute_covariance(columns: TokenColumns) -> np.ndarray:
    """Return float64 `[N]`: `(log pi - mean(log pi)) (A - mean(A))`, means over all N tokens.

    The mean of it is the covariance of log-probs and advantages, with which entropy falls ("The
    Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617,
    eq. 10).
    """
    logprobs = columns["logprobs"].astype(np.float64)
    advantages = columns["advantages"].astype(np.float64)
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def choose_clip_cov(
    columns: TokenColumns, config: AlgorithmConfig, generator: np.random.Generator
) -> np.ndarray:
    """Choose `share` of the tokens, at least one, at random among those whose covariance is between
    `low` and `high` (Clip-Cov, arXiv 2505.22617, eq. 11).

    As in its authors' code, tokens that `ppo` clips are not among them.
    """
    settings = config.clip_cov
    covariance = compute_covariance(columns)
    log_ratio = _compute_log_ratio(columns, config)
    advantages = columns["advantages"]
    clipped = (advantages > 0) & (log_ratio > np.log1p(config.ppo.clip_high))
    with np.errstate(divide="ignore"):
        clipped |= (advantages < 0) & (log_ratio < np.log(max(1 - config.ppo.clip_low, 0.0)))
    inside = (covariance > settings.low) & (covariance < settings.high) & ~clipped
    candidates = _sort_by(covariance, columns)
    candidates = candidates[inside[candidates]]
    count = min(_count_share(settings.share, len(covariance)), len(candidates))
    return generator.choice(candidates, count, replace=False)


def choose_kl_cov(
    columns: TokenColumns, config: AlgorithmConfig, generator: np.random.Generator
) -> np.ndarray:
    """Choose `share` of the tokens, at least one, those with the largest covariance (KL-Cov, arXiv
    2505.22617, eq. 13)."""
    covariance = compute_covariance(columns)
    return _sort_by(-covariance, columns)[: _count_share(config.kl_cov.share, len(covariance))]


def choose_m2po(
    columns: TokenColumns, config: AlgorithmConfig, generator: np.random.Generator
) -> np.ndarray:
    """Choose the tokens with the largest `(log r)^2` that move further away, `A log r > 0`, until
    its mean over those that are left is at most `limit` (M2PO, arXiv 2510.01161, algorithm 1)."""
    log_ratio = _compute_log_ratio(columns, config)
    moment = np.square(log_ratio)
    order = _sort_by(moment, columns)
    order = order[(columns["advantages"] * log_ratio > 0)[order]]
    means = np.cumsum(moment[order]) / np.arange(1, len(order) + 1)
    return order[np.count_nonzero(means <= config.m2po.limit) :]


TOKEN_CHOICES: dict[str, TokenChoice] = {
    "clip_cov": choose_clip_cov,
    "kl_cov": choose_kl_cov,
    "m2po": choose_m2po,
}
"""The choices, by the names of `algorithm.policy_loss`."""


def _count_share(share: float, tokens: int) -> int:
    return max(int(share * tokens), 1)


def _compute_log_ratio(columns: TokenColumns, config: AlgorithmConfig) -> np.ndarray:
    """Return float64 `[N]`: `log pi - log pi_a`."""
    anchor = columns["rollout_logprobs" if config.anchor == "rollout" else "old_logprobs"]
    return columns["logprobs"].astype(np.float64) - anchor


def _sort_by(values: np.ndarray, columns: TokenColumns) -> np.ndarray:
    """Return int64 `[N]`: the order by `values`, then by episode, turn and place."""
    return np.lexsort((columns["place"], columns["turns"], columns["episode"], values))
