"""KL estimators, policy loss, advantages and the objective: each claim against enumeration or plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3async.algorithms.advantages import group_advantages, relative
from r3async.algorithms.kl import ESTIMATORS, k1, k2, k3
from r3async.algorithms.objective import ObjectiveSums, TokenBatch, objective
from r3async.algorithms.policy_loss import tis
from r3async.config import AlgorithmConfig, RolloutKLConfig
from r3async.records import Sample, TokenTable, Trajectory, Turn

# -- KL estimators, by enumeration of a categorical ------------------------------------------------------------------


def categorical(drift: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of pi (requires grad) and log-probs of mu over 6 tokens, float64."""
    generator = torch.Generator().manual_seed(3)
    mu = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)
    logits = (mu + drift * torch.randn(6, generator=generator, dtype=torch.float64)).requires_grad_()
    return logits, mu


def expected(estimator, logits: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """Mean of an estimator under mu, exactly: mu does not depend on the logits."""
    return (mu.exp() * estimator(torch.log_softmax(logits, -1) - mu)).sum()


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits)[0]


def kl(logits: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    return (mu.exp() * (mu - torch.log_softmax(logits, -1))).sum()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_value_and_gradient_are_unbiased(name):
    logits, mu = categorical()
    value, exact = expected(ESTIMATORS[name], logits, mu), kl(logits, mu)
    assert exact > 0.1
    assert torch.isclose(value, exact, rtol=1e-12)
    assert torch.allclose(gradient(value, logits), gradient(exact, logits), rtol=1e-12, atol=1e-14)


def test_the_opposite_sign_is_biased_here():
    logits, mu = categorical()
    other = expected(lambda delta: torch.expm1(-delta) + delta, logits, mu)
    assert not torch.isclose(other, kl(logits, mu), rtol=0.1)


def test_k2_is_right_to_second_order_and_calmer_than_k1():
    errors = []
    for drift in (0.1, 0.01):
        logits, mu = categorical(drift)
        value, exact = expected(k2, logits, mu), kl(logits, mu)
        errors.append(abs(float((value - exact).detach())) / float(exact.detach()))
        assert torch.allclose(gradient(value, logits), gradient(exact, logits), atol=10 * drift**2)
    # The relative error shrinks with the drift, so the error is of third order.
    assert errors[1] < 0.2 * errors[0] < 0.2 * 0.2
    logits, mu = categorical(0.05)
    delta = (torch.log_softmax(logits, -1) - mu).detach()

    def variance(values: torch.Tensor) -> float:
        mean = (mu.exp() * values).sum()
        return float((mu.exp() * (values - mean).square()).sum())

    assert variance(k2(delta)) < 0.01 * variance(k1(delta))


def test_k3_and_abs_are_never_negative_and_k3_keeps_tiny_drift():
    delta = torch.linspace(-5, 5, 1001)
    assert (k3(delta) >= 0).all()
    assert (ESTIMATORS["abs"](delta) == delta.abs()).all()
    assert torch.allclose(k3(delta.double()), torch.exp(delta.double()) - 1 - delta.double(), rtol=1e-7, atol=1e-15)
    tiny = torch.tensor([1e-4, -1e-6], dtype=torch.float32)
    assert torch.allclose(k3(tiny), torch.tensor([5e-9, 5e-13]), rtol=1e-3, atol=0)
    grad = torch.func.grad(lambda d: k3(d).sum())(torch.tensor([1e-9, -3e-8]))
    assert torch.allclose(grad, torch.tensor([1e-9, -3e-8]), rtol=1e-3, atol=0)


# -- policy loss and objective ---------------------------------------------------------------------------------------


def batch(n: int = 7) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(1)
    return {
        "logprobs": torch.from_numpy(rng.normal(-2, 1, n).astype(np.float32)).requires_grad_(),
        "entropies": torch.from_numpy(rng.random(n).astype(np.float32)),
        "rollout_logprobs": torch.from_numpy(rng.normal(-2, 1, n).astype(np.float32)),
        "advantages": torch.from_numpy(rng.normal(size=n).astype(np.float32)),
        "mask": torch.ones(n, dtype=torch.bool),
    }


def settings(**changes) -> AlgorithmConfig:
    kl_settings = {k: changes.pop(k) for k in ("estimator", "coef") if k in changes}
    return AlgorithmConfig(rollout_kl=RolloutKLConfig(**kl_settings), **changes)


def test_tis_gradient_is_the_capped_importance_weight():
    tokens = batch()
    loss = tis(tokens["logprobs"], tokens["rollout_logprobs"], tokens["advantages"], tokens["mask"], 1.5)
    grad = torch.autograd.grad(loss.sum(), tokens["logprobs"])[0]
    ratio = (tokens["logprobs"] - tokens["rollout_logprobs"]).exp().detach()
    assert (ratio > 1.5).any()
    assert (ratio < 1.5).any()
    assert torch.allclose(grad, -ratio.clamp(max=1.5) * tokens["advantages"], rtol=1e-6)


def run(tokens: dict[str, torch.Tensor], denominator: int, config: AlgorithmConfig):
    """`objective` with every token weighted by 1 / `denominator`."""
    m = len(tokens["logprobs"])
    token_batch = TokenBatch(
        rollout_logprobs=tokens["rollout_logprobs"],
        advantages=tokens["advantages"],
        weights=torch.full((m,), 1 / denominator),
        sequence=torch.zeros(m, dtype=torch.int64),
        sequences=1,
        ages=torch.zeros(m, dtype=torch.int32),
        mask=tokens["mask"],
    )
    return objective(
        token_batch, tokens["logprobs"], tokens["entropies"], config, rollout_kl_coef=config.rollout_kl.coef
    )


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_objective_against_numpy(estimator):
    tokens, config = batch(), settings(estimator=estimator, coef=0.3, ratio_cap=1.7)
    loss, sums = run(tokens, 20, config)
    logp, mu, adv = (
        tokens[k].detach().numpy().astype(np.float64) for k in ("logprobs", "rollout_logprobs", "advantages")
    )
    delta = logp - mu
    kls = {"k1": -delta, "abs": abs(delta), "k2": delta**2 / 2, "k3": np.exp(delta) - 1 - delta}
    policy = -np.minimum(np.exp(delta), 1.7) * adv * logp
    assert loss.item() == pytest.approx((policy + 0.3 * kls[estimator]).sum() / 20, rel=1e-5)
    metrics, w = sums.metrics(), np.exp(delta)
    want = {
        "loss/policy": policy.sum() / 20,
        "loss/rollout_kl": 0.3 * kls[estimator].sum() / 20,
        "rollout_kl/k1": kls["k1"].mean(),
        "rollout_kl/k2": kls["k2"].mean(),
        "rollout_kl/k3": kls["k3"].mean(),
        "ratio/max": w.max(),
        "ratio/ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
        "entropy/mean": tokens["entropies"].double().mean().item(),
    }
    assert {k: metrics[k] for k in want} == pytest.approx(want, rel=1e-5)
    assert set(metrics) == set(ObjectiveSums.zero().metrics())


def test_masked_tokens_may_hold_anything():
    tokens = batch()
    tokens["mask"] = torch.tensor([True, False] * 3 + [True])
    keep = tokens["mask"]
    clean, clean_sums = run({k: v[keep] for k, v in tokens.items()}, 4, settings(coef=0.5, estimator="k3"))
    for name, bad in (
        ("rollout_logprobs", float("nan")),
        ("rollout_logprobs", float("-inf")),
        ("advantages", float("nan")),
    ):
        dirty = dict(tokens)
        dirty[name] = torch.where(keep, tokens[name], bad)
        loss, sums = run(dirty, 4, settings(coef=0.5, estimator="k3"))
        grad = torch.autograd.grad(loss, tokens["logprobs"])[0]
        assert torch.isclose(loss, clean)
        assert torch.isfinite(grad).all()
        assert (grad[~keep] == 0).all()
        assert sums.metrics() == pytest.approx(clean_sums.metrics())


def test_pieces_add_up_to_the_whole():
    tokens, config = batch(9), settings(coef=0.2)
    whole, whole_sums = run(tokens, 9, config)
    parts = [run({k: v[s] for k, v in tokens.items()}, 9, config) for s in (slice(0, 2), slice(2, 9))]
    assert torch.isclose(whole, parts[0][0] + parts[1][0])
    assert (parts[0][1] + parts[1][1]).metrics() == pytest.approx(whole_sums.metrics())


def test_no_token_gives_a_zero_that_can_be_propagated_back():
    loss, sums = run({k: v[:0] for k, v in batch().items()}, 1, settings())
    loss.backward()
    assert loss == 0
    assert set(sums.metrics().values()) == {0.0}


# -- advantages ------------------------------------------------------------------------------------------------------


def episode(index: int, rewards: list[float], group: int = 0) -> Trajectory:
    """Each turn: two observed tokens, then two sampled ones."""
    turn = (
        np.concatenate([[-1, -1, j, j] for j in range(len(rewards))]).astype(np.int32)
        if rewards
        else np.zeros(0, np.int32)
    )
    sampled = turn >= 0
    table = TokenTable(
        {
            "token_ids": np.zeros(len(turn), np.int32),
            "loss_mask": sampled,
            "rollout_logprobs": np.zeros(len(turn), np.float32),
            "policy_version": np.where(sampled, 0, -1).astype(np.int32),
            "turn": turn,
            "rewards": np.zeros(len(turn), np.float32),
        }
    )
    turns = [Turn(j, 0, 4 * j + 2, 4 * j + 4, r, "stop") for j, r in enumerate(rewards)]
    return Trajectory(f"t{index}", group, index, 0, "g", "done", turns, [Sample(f"t{index}/0", table)])


def test_credit_by_turn_with_episodes_of_different_length():
    samples = group_advantages([episode(0, [1, 0.5]), episode(1, [0, 0.7]), episode(2, [0.5])], "turn", True)
    for index, sample in enumerate(samples):
        advantages, turn = sample.table["advantages"], sample.table["turn"]
        assert advantages.dtype == np.float32
        assert (advantages[turn < 0] == 0).all()
        first = np.array([1, 0, 0.5])
        want = (first - first.mean()) / (first.std(ddof=1) + 1e-3)
        assert advantages[turn == 0] == pytest.approx(want[index])
    second = np.array([0.5, 0.7])
    want = (second - second.mean()) / (second.std(ddof=1) + 1e-3)
    assert samples[0].table["advantages"][6:] == pytest.approx(want[0])
    assert samples[1].table["advantages"][6:] == pytest.approx(want[1])


def test_credit_by_trajectory_is_the_same_on_all_sampled_tokens():
    samples = group_advantages([episode(0, [1, 0]), episode(1, [0, 0]), episode(2, [])], "trajectory", False)
    assert samples[0].table["advantages"].tolist() == [0, 0, 0.25, 0.25, 0, 0, 0.25, 0.25]
    assert samples[1].table["advantages"].tolist() == [0, 0, -0.25, -0.25, 0, 0, -0.25, -0.25]
    assert len(samples[2].table) == 0


@pytest.mark.parametrize("credit", ["turn", "trajectory"])
def test_groups_without_contrast_are_exactly_zero(credit):
    for group in ([episode(0, [0.3, 0.9])], [episode(i, [0.1]) for i in range(3)]):
        for sample in group_advantages(group, credit, True):
            assert (sample.table["advantages"] == 0).all()
    assert (relative(np.full(7, 0.1), normalize_std=True) == 0).all()


def test_inconsistent_groups_are_refused():
    with pytest.raises(ValueError, match=r"groups \[0, 1\]"):
        group_advantages([episode(0, [1]), episode(1, [0], group=1)], "turn", True)
    broken = episode(0, [1, 0])
    broken.turns.pop()
    with pytest.raises(ValueError, match="t0/0: a token of turn 1"):
        group_advantages([broken, episode(1, [1, 1])], "turn", True)
