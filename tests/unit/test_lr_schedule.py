"""The learning rate: warm-up, then constant, a line or half a cosine; a function of the updates made alone."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3async.config import LearnerConfig
from r3async.learner.optimizer import compute_learning_rate


def rates(total: int, **settings) -> list[float]:
    config = LearnerConfig(lr=1.0, **settings)
    return [compute_learning_rate(config, made, total) for made in range(total)]


def test_by_hand():
    assert rates(4) == [1.0, 1.0, 1.0, 1.0]
    assert rates(5, lr_schedule="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(6, lr_schedule="linear", warmup_steps=2) == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(5, lr_schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    half = math.cos(math.pi / 4) / 2
    assert rates(5, lr_schedule="cosine") == pytest.approx([1.0, 0.5 + half, 0.5, 0.5 - half, 0.0])


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    total=st.integers(1, 200),
    warm_up=st.integers(0, 250),
    ratio=st.floats(0, 1),
)
def test_it_rises_to_lr_and_never_rises_after_or_falls_below_its_end(schedule, total, warm_up, ratio):
    config = LearnerConfig(lr=0.5, lr_schedule=schedule, warmup_steps=warm_up, min_lr_ratio=ratio)
    of = [compute_learning_rate(config, made, total) for made in range(max(total, warm_up) + 5)]
    top = max(0, warm_up - 1)
    assert of[top] == 0.5
    assert all(a <= b for a, b in itertools.pairwise(of[: top + 1]))
    after = of[max(1, warm_up) :]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert all(0.5 * ratio <= rate * (1 + 1e-12) for rate in after)
    if schedule != "constant" and total > top + 1:
        assert of[total - 1] == of[total] == 0.5 * ratio
