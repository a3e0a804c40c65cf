"""KL estimators: each claim by enumeration of a categorical."""

from __future__ import annotations

import math

import pytest
import torch

from r3async.config import ConfigError, load_config
from r3async.learner.losses.drift import ESTIMATORS, k2, k3


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

    assert variance(k2(delta)) < 0.01 * variance(ESTIMATORS["k1"](delta))


def test_k3_and_abs_are_never_negative_and_k3_keeps_tiny_drift():
    delta = torch.linspace(-5, 5, 1001)
    assert (k3(delta) >= 0).all()
    assert (ESTIMATORS["abs"](delta) == delta.abs()).all()
    assert torch.allclose(k3(delta.double()), torch.exp(delta.double()) - 1 - delta.double(), rtol=1e-7, atol=1e-15)
    tiny = torch.tensor([1e-4, -1e-6], dtype=torch.float32)
    assert torch.allclose(k3(tiny), torch.tensor([5e-9, 5e-13]), rtol=1e-3, atol=0)
    grad = torch.func.grad(lambda d: k3(d).sum())(torch.tensor([1e-9, -3e-8]))
    assert torch.allclose(grad, torch.tensor([1e-9, -3e-8]), rtol=1e-3, atol=0)


def test_k3_goes_on_by_its_tangent_and_still_pulls_back():
    delta = torch.tensor([19.0, 20.0, 21.0, 1000.0, -1000.0], requires_grad=True)
    value = k3(delta)
    assert torch.isfinite(value).all()
    (grad,) = torch.autograd.grad(value.sum(), delta)
    at20 = math.exp(20) - 1
    want = [math.exp(19) - 20, math.exp(20) - 21, math.exp(20) - 21 + at20, math.exp(20) - 21 + 980 * at20, 999.0]
    assert value.tolist() == pytest.approx(want, rel=1e-6)
    assert grad.tolist() == pytest.approx([math.exp(19) - 1, at20, at20, at20, -1.0], rel=1e-6)


def test_reference_kl_is_unbiased_for_samples_of_the_learner():
    logits, reference = categorical()
    pi = torch.log_softmax(logits, -1)
    exact = (pi.exp() * (pi - reference)).sum()
    assert torch.isclose((pi.exp() * k3(reference - pi)).sum(), exact, rtol=1e-12)
    # The other sign is right for samples of the reference only.
    assert not torch.isclose((pi.exp() * k3(pi - reference)).sum(), exact, rtol=0.1)
    # The gradient that a loss over fixed samples of pi gets is that of KL(reference || pi).
    samples = pi.exp().detach()
    got = gradient((samples * k3(reference - torch.log_softmax(logits, -1))).sum(), logits)
    want = gradient((reference.exp() * (reference - torch.log_softmax(logits, -1))).sum(), logits)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)


def test_unknown_estimators_are_refused_when_the_config_is_read():
    with pytest.raises(ConfigError, match=r"algorithm.rollout_kl.estimator.*'k4'.*one of 'k1', 'abs', 'k2', 'k3'"):
        load_config("quickstart", ["algorithm.rollout_kl.estimator=k4"])
