"""Loss weights: each reduction is the mean that its name says, over the whole step."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from r3async.learner.loss import compute_loss_weights
from tests.helpers.algorithms import REDUCTIONS

masks_strategy = st.lists(st.lists(st.booleans(), max_size=6), max_size=6)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def reduced(
    values: list[list[float]], episodes: list[int], groups: list[int], reduction: str, norm_length: int
) -> float:
    """The loss of trained tokens' values, by sample."""
    by_episode: dict[int, list[float]] = {}
    for v, episode in zip(values, episodes, strict=True):
        by_episode.setdefault(episode, []).extend(v)
    trained = [v for v in by_episode.values() if v]
    if reduction == "token_mean":
        return mean([x for v in trained for x in v])
    if reduction == "sequence_mean":
        return mean([mean(v) for v in trained])
    if reduction == "sequence_mean_token_sum_norm":
        return mean([sum(v) / norm_length for v in trained])
    by_group: dict[int, list[float]] = {}
    for v, group in zip(values, groups, strict=True):
        by_group.setdefault(group, []).extend(v)
    return mean([mean(v) for v in by_group.values() if v])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=60)
@given(data=st.data(), masks=masks_strategy)
def test_weights_against_means(reduction, data, masks):
    arrays = [np.asarray(m, bool) for m in masks]
    groups, episodes = (
        data.draw(st.lists(st.integers(-3, 3), min_size=len(masks), max_size=len(masks)), label=label)
        for label in ("groups", "episodes")
    )
    rng = np.random.default_rng(0)
    values = [rng.normal(size=len(m)) for m in arrays]
    weights = compute_loss_weights(arrays, episodes, groups, reduction, norm_length=5)
    assert [w.dtype for w in weights] == [np.float32] * len(arrays)
    assert all((w[~m] == 0).all() and (w[m] > 0).all() for w, m in zip(weights, arrays, strict=True))
    got = sum(float(w @ v) for w, v in zip(weights, values, strict=True))
    want = reduced([v[m].tolist() for v, m in zip(values, arrays, strict=True)], episodes, groups, reduction, 5)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
