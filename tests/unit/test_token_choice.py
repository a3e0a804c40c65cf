"""Choices of tokens in a minibatch, against their formulas token by token."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.learner.token_choice import TOKEN_CHOICES, compute_covariance
from tests.helpers.algorithms import algorithm


def make_columns(seed: int, tokens: int, drift: float = 0.3) -> dict[str, np.ndarray]:
    """Return the columns of episodes of four tokens, some of which have equal values, as certain tokens do."""
    rng = np.random.default_rng(seed)
    logprobs = np.where(rng.random(tokens) < 0.3, 0.0, -rng.exponential(1.0, tokens)).astype(np.float32)
    place = np.arange(tokens)
    return {
        "logprobs": logprobs,
        "rollout_logprobs": (logprobs - rng.normal(0, drift, tokens)).astype(np.float32),
        "old_logprobs": (logprobs - rng.normal(0, drift / 2, tokens)).astype(np.float32),
        "advantages": rng.normal(size=tokens // 4 + 1).repeat(4)[:tokens].astype(np.float32),
        "episode": place // 4,
        "turns": place // 2 % 2,
        "place": place,
    }


def choose(columns: dict[str, np.ndarray], seed: int = 0, **settings) -> set[int]:
    """Return the places of the chosen tokens."""
    config = algorithm(**settings)
    chosen = TOKEN_CHOICES[config.policy_loss](columns, config, np.random.default_rng(seed))
    assert len(set(chosen.tolist())) == len(chosen)
    return set(columns["place"][chosen].tolist())


columns = st.builds(make_columns, st.integers(0, 1000), st.integers(1, 40), st.sampled_from([0.0, 0.1, 1.0]))


def covariances(columns: dict[str, np.ndarray]) -> list[float]:
    logprobs, advantages = columns["logprobs"].tolist(), columns["advantages"].tolist()
    mean, middle = sum(logprobs) / len(logprobs), sum(advantages) / len(advantages)
    return [(p - mean) * (a - middle) for p, a in zip(logprobs, advantages, strict=True)]


@given(columns)
def test_the_mean_of_token_covariances_is_the_covariance(columns):
    made = compute_covariance(columns)
    assert made == pytest.approx(covariances(columns), abs=1e-12)
    want = np.cov(columns["logprobs"].astype(float), columns["advantages"].astype(float), bias=True)[0, 1]
    assert made.mean() == pytest.approx(want, abs=1e-9)


@given(columns, st.floats(0.01, 1.0), st.floats(0.0, 0.5), st.sampled_from(["rollout", "recomputed"]))
def test_clip_cov_draws_from_the_band_without_what_ppo_clips(columns, share, low, anchor):
    bounds = {"ppo": {"clip_low": 0.1, "clip_high": 0.2}, "clip_cov": {"share": share, "low": low, "high": low + 1}}
    anchors = columns["rollout_logprobs" if anchor == "rollout" else "old_logprobs"]
    ratios = np.exp(columns["logprobs"].astype(float) - anchors)
    allowed = {
        t
        for t, (cov, ratio, a) in enumerate(zip(covariances(columns), ratios, columns["advantages"], strict=True))
        if low < cov < low + 1 and not (a > 0 and ratio > 1.2) and not (a < 0 and ratio < 0.9)
    }
    chosen = choose(columns, policy_loss="clip_cov", anchor=anchor, **bounds)
    assert chosen <= allowed
    assert len(chosen) == min(max(int(share * len(ratios)), 1), len(allowed))


def test_clip_cov_draws_each_of_the_band_equally_often():
    columns = make_columns(3, 40)
    settings = {"policy_loss": "clip_cov", "clip_cov": {"share": 0.1, "low": 0.1}}
    counts = collections.Counter(t for seed in range(600) for t in choose(columns, seed, **settings))
    candidates = len(counts)
    assert candidates > 6
    assert sum(counts.values()) == 600 * 4
    assert all(abs(n - 2400 / candidates) < 5 * np.sqrt(2400 / candidates) for n in counts.values())


@given(columns, st.floats(0.01, 1.0))
def test_kl_cov_takes_the_largest(columns, share):
    chosen = choose(columns, policy_loss="kl_cov", kl_cov={"share": share})
    values = covariances(columns)
    assert len(chosen) == max(int(share * len(values)), 1)
    rest = [v for t, v in enumerate(values) if t not in chosen]
    assert not rest or min(values[t] for t in chosen) >= max(rest) - 1e-12


@given(columns, st.floats(1e-4, 2.0), st.sampled_from(["rollout", "recomputed"]))
def test_m2po_drops_the_furthest_until_the_mean_of_the_rest_is_within_the_limit(columns, limit, anchor):
    anchors = columns["rollout_logprobs" if anchor == "rollout" else "old_logprobs"].astype(float)
    log_ratios = columns["logprobs"].astype(float) - anchors
    left = {t: d * d for t, d in enumerate(log_ratios) if columns["advantages"][t] * d > 0}
    while left and sum(left.values()) / len(left) > limit:  # algorithm 1 of arXiv 2510.01161
        del left[max(left, key=left.__getitem__)]
    moving = {t for t, d in enumerate(log_ratios) if columns["advantages"][t] * d > 0}
    assert choose(columns, policy_loss="m2po", anchor=anchor, m2po={"limit": limit}) == moving - set(left)


@given(columns, st.sampled_from(sorted(TOKEN_CHOICES)), st.data())
def test_a_choice_does_not_depend_on_the_order_of_the_columns(columns, name, data):
    order = np.asarray(data.draw(st.permutations(range(len(columns["place"])))))
    settings = {"policy_loss": name, "clip_cov": {"share": 0.2, "low": 0.0}, "kl_cov": {"share": 0.2}}
    assert choose({k: v[order] for k, v in columns.items()}, **settings) == choose(columns, **settings)
