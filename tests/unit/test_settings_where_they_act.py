"""Settings at the values that users have, where they act: what comes out is compared with a formula in plain Python."""

import dataclasses
import math

import pytest
import torch

from r3async.config import ScheduleConfig
from r3async.config.algorithm import MAX_COEFFICIENT, CorrectionConfig, ReferenceKLConfig, RolloutKLConfig
from r3async.config.schedule import DifficultyConfig
from r3async.learner.drift import MAX_TOKEN_K3, compute_correction_weights
from r3async.learner.loss import compute_reference_kl, compute_rollout_kl
from r3async.learner.trust_region import GAIN, GAIN_DOWN, TrustRegion
from r3async.schedule.difficulty import TaskHistory
from r3async.schedule.pace import PACE_SECONDS, PaceMonitor
from tests.helpers.algorithms import algorithm, make_samples, run


def k3(delta: float) -> float:
    return math.expm1(delta) - delta


def test_the_coefficient_rises_by_gain_and_falls_by_gain_down():
    config = RolloutKLConfig(target=0.02)
    region, coef, before = TrustRegion(config), config.coef, None
    for measured in (0.05, 0.06, 0.055, 0.01, 0.01, 0.03):
        error = measured / 0.02 - 1
        speed = 2 * error - (error if before is None else before)
        coef *= math.exp((GAIN if speed > 0 else GAIN_DOWN) * speed)
        before = error
        region.update_coefficient(measured)
        assert region.coef == pytest.approx(coef)
        assert config.coef < coef < MAX_COEFFICIENT


def test_of_one_token_no_more_than_token_limit_is_measured_and_its_loss_is_a_line_from_there():
    config = RolloutKLConfig(estimator="k3")
    low, high = 0.0, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if k3(middle) < MAX_TOKEN_K3 else (low, middle)
    deltas = torch.tensor([-30.0, 1.0, low - 0.1, low + 0.5, 12.0], dtype=torch.float64)
    expected = [k3(d) if d < low else MAX_TOKEN_K3 + math.expm1(low) * (d - low) for d in deltas.tolist()]
    assert compute_rollout_kl(deltas, config).tolist() == pytest.approx(expected)
    (sample,) = make_samples(1, [2], masked=0.0)
    wild = dataclasses.replace(sample, rollout=sample.logprobs - 12)
    assert run([[wild]], algorithm()).sums.to_metrics()["rollout_kl/k3"] == pytest.approx(MAX_TOKEN_K3)


def test_a_token_of_the_reference_term_weighs_no_more_than_weight_cap():
    config = ReferenceKLConfig()
    logprobs, ratios = torch.full([4], -1.0, dtype=torch.float64), (0.3, 2.0, 4.9, 9.0)
    rollout = logprobs - torch.tensor(ratios, dtype=torch.float64).log()
    expected = [min(ratio, config.weight_cap) * k3(-0.5) for ratio in ratios]
    assert compute_reference_kl(logprobs, rollout, logprobs - 0.5, config).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_a_correction_weighs_no_more_than_weight_cap(weight: str):
    config = CorrectionConfig(weight=weight, numerator="recomputed")
    deltas, episode = [0.2, 0.3, -0.4, 1.0, 0.1], [0, 0, 0, 1, 1]
    old = torch.full([5], -1.0, dtype=torch.float64)
    weights = compute_correction_weights(
        old, old - torch.tensor(deltas, dtype=torch.float64), torch.tensor(episode), 2, config
    )
    sums = [sum(d for d, e in zip(deltas, episode, strict=True) if e == of) for of in (0, 1)]
    at = deltas if weight == "token" else [sums[e] for e in episode]
    assert weights.tolist() == pytest.approx([min(math.exp(d), config.weight_cap) for d in at])
    assert config.weight_cap in weights.tolist()


def test_who_waits_is_said_when_it_has_lasted_for_pace_seconds():
    schedule, said = ScheduleConfig(), []
    now = 0.0
    pacing = PaceMonitor(schedule, lambda event, **facts: said.append((now, event)), lambda: now)
    step = PACE_SECONDS / 11.5  # more than eight, and sixteen at most, are looked at
    for number in range(14):
        pacing.record_step(number, 1, {"transport/received": number, "timing/wait_seconds": 0.9 * step})
        now += step
    assert said == [(pytest.approx(12 * step), "pace_generation_bound")]


def test_of_a_target_s_tasks_the_nearest_among_four_is_posed():
    settings = DifficultyConfig(groups=1, target=0.5)
    history = TaskHistory(settings, 0)
    rewards = {0: 0.1, 1: 0.9, 2: 0.2, 3: 0.6, 4: 0.5}
    history.record_scores([], rewards.items())
    assert history.choose_task(0, iter(range(5))) == 3
