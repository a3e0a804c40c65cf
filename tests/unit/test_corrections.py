"""Corrections: which tokens each mask leaves out, and what that leaves out of the loss."""

import numpy as np
import pytest
import torch

from r3async.config import CorrectionConfig
from r3async.learner.drift import binary_kl, compute_correction_mask
from tests.helpers.algorithms import algorithm, distance, kept_tokens, make_samples, run


def kept(
    ratios: list[list[float]],
    config: CorrectionConfig,
    mu: float = 0.3,
    ages: list[int] | None = None,
    max_token_age: int | None = None,
) -> list[bool]:
    """Of samples whose tokens have probability `mu`, and these ratios to it."""
    flat = torch.tensor([r for sample in ratios for r in sample], dtype=torch.float64)
    rollout = torch.full_like(flat, float(np.log(mu)))
    sequence = torch.tensor([i for i, sample in enumerate(ratios) for _ in sample], dtype=torch.int64)
    return compute_correction_mask(
        rollout + flat.log(),
        rollout,
        torch.tensor(ages if ages is not None else [0] * len(flat), dtype=torch.int32),
        sequence,
        len(ratios),
        config,
        max_token_age,
    ).tolist()


@pytest.mark.parametrize(
    ("settings", "ratios", "expected"),
    [
        ({}, [[1e-6, 1.0], [3.0]], [True] * 3),
        ({"icepop_low": 0.5, "icepop_high": 2.0}, [[0.4, 0.51, 1.0], [1.9, 2.1]], [False, True, True, True, False]),
        ({"icepop_high": 2.0}, [[0.1, 2.1]], [True, False]),
        ({"icepop_low": 0.5}, [[0.1, 2.1]], [False, True]),
        ({"geometric_high": 1.3}, [[2.0, 0.5], [1.2, 1.2, 1.2], [1.5]], [True] * 5 + [False]),
        ({"product_high": 1.6}, [[2.0, 0.5], [1.2, 1.2, 1.2], [1.5]], [True] * 2 + [False] * 3 + [True]),
        ({"geometric_low": 0.8}, [[0.9], [0.5, 1.0]], [True, False, False]),
        ({"product_low": 0.6}, [[0.9], [0.5, 1.0]], [True, False, False]),
        ({"veto_low": 0.5}, [[0.4, 1.0], [0.6, 3.0], [1.0]], [False] * 2 + [True] * 3),
        ({"veto_low": 0.5, "veto_high": 2.0}, [[0.5, 2.0], [1.0, 2.1], [1.0]], [True, True, False, False, True]),
        ({"max_token_kl": 0.2}, [[1.0, 1.0, 2.0], [1.5, 0.7]], [False] * 3 + [True] * 2),
    ],
    ids=str,
)
def test_a_band_is_on_the_ratio_of_a_token_or_of_its_sample(settings, ratios, expected):
    assert kept(ratios, CorrectionConfig(**settings), ages=[99, 0, 5, 0, 0, 0][: len(expected)]) == expected


def test_age_is_by_token():
    assert kept([[1.0] * 4], CorrectionConfig(), ages=[0, 2, 3, 9], max_token_age=2) == [True, True, False, False]


def test_kpop_is_narrow_for_likely_tokens_and_wide_for_rare_ones():
    config = CorrectionConfig(kpop=0.1)
    assert kept([[3.0, 0.3]], config, mu=0.001) == [True, True]
    assert kept([[1.1, 0.5]], config, mu=0.85) == [True, False]
    # Each direction alone would keep one of these: both must hold.
    p, q = torch.tensor([0.9997, 0.96]).log(), torch.tensor([0.96, 0.9997]).log()
    forward, backward = binary_kl(p, q).tolist()
    limit = (forward + backward) / 2
    assert min(forward, backward) < limit < max(forward, backward)
    where = torch.zeros(2, dtype=torch.int64)
    ages = torch.zeros(2, dtype=torch.int32)
    assert not compute_correction_mask(p, q, ages, where, 1, CorrectionConfig(kpop=limit)).any()
    assert compute_correction_mask(p, q, ages, where, 1, CorrectionConfig(kpop=1.01 * max(forward, backward))).all()


def test_certain_tokens_have_a_finite_binary_kl():
    logprobs, other = torch.tensor([0.0, -1e3, 0.0]), torch.tensor([-1e3, 0.0, 0.0])
    assert binary_kl(logprobs, other).tolist() == pytest.approx([13.8155, 13.8155, 0.0], rel=1e-4)


CORRECTIONS = [
    {"icepop_low": 0.8, "icepop_high": 1.3},
    {"kpop": 0.01},
    {"geometric_low": 0.9, "geometric_high": 1.1},
    {"product_low": 0.8, "product_high": 1.5},
    {"veto_low": 0.7, "veto_high": 1.5},
    {"max_token_kl": 0.05},
    {"max_token_age": 2},  # of the schedule
    {
        "kpop": 0.05,
        "icepop_high": 1.5,
        "max_token_age": 3,
        "product_low": 0.5,
        "geometric_high": 1.3,
        "max_token_kl": 0.3,
    },
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_what_is_left_out_leaves_the_policy_loss_only(correction):
    age = correction.get("max_token_age")
    config = algorithm(correction={k: v for k, v in correction.items() if k != "max_token_age"}, entropy_coef=0.1)
    samples = make_samples(6, [5, 8, 1, 6, 3, 7], drift=0.3)
    keeps = [np.asarray(kept_tokens(s, config, age)) for s in samples]
    lost = sum(int((s.mask & ~k).sum()) for s, k in zip(samples, keeps, strict=True))
    count = sum(int(s.mask.sum()) for s in samples)
    assert 0 < lost < count

    got = run([samples], config, torch.float64, max_token_age=age)
    assert got.sums.to_metrics()["rollout_corr/masked_fraction"] == pytest.approx(lost / count)
    for sample, keep, by_logprob, by_entropy in zip(samples, keeps, got.logprob_grads, got.entropy_grads, strict=True):
        out = sample.mask & ~keep
        pull = 0.3 * sample.weights * (sample.logprobs - sample.rollout)
        assert by_logprob[out] == pytest.approx(pull[out]), "the trust region pulls it back"
        assert not by_entropy[out].any()
        assert by_entropy[keep].all()
    whole = run([samples], algorithm(entropy_coef=0.1), torch.float64)
    assert got.sums.to_metrics()["loss/rollout_kl"] == pytest.approx(whole.sums.to_metrics()["loss/rollout_kl"])
    # Weights stay: what is kept has the gradient that it has without corrections.
    kept_before = [np.where(k, g, 0) for k, g in zip(keeps, whole.logprob_grads, strict=True)]
    kept_after = [np.where(k, g, 0) for k, g in zip(keeps, got.logprob_grads, strict=True)]
    assert distance(kept_after, kept_before) < 1e-12


def test_what_is_left_out_is_no_part_of_its_sample_s_ratio():
    config = algorithm(policy_loss="gspo", gspo={"clip_low": 0.5, "clip_high": 0.5}, correction={"icepop_high": 2.0})
    (sample,) = make_samples(6, [4], masked=0)
    sample.rollout[:] = sample.logprobs - np.log([1.1, 1.1, 1.1, 30.0])
    sample.advantages[:] = 1.0
    got = run([[sample]], config, torch.float64, coef=0.0)
    assert got.logprob_grads[0] == pytest.approx(-1.1 * sample.weights * [1, 1, 1, 0])
