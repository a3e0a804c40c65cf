"""KL estimators: each claim by enumeration of a categorical."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.learner.drift import KL_ESTIMATORS, clamped_k3, k2, k3, tangent_k3
from r3async.learner.loss import compute_reference_kl
from tests.helpers.algorithms import algorithm


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
    value, exact = expected(KL_ESTIMATORS[name], logits, mu), kl(logits, mu)
    assert exact > 0.1
    assert torch.isclose(value, exact, rtol=1e-12)
    assert torch.allclose(gradient(value, logits), gradient(exact, logits), rtol=1e-12, atol=1e-14)


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

    assert variance(k2(delta)) < 0.01 * variance(KL_ESTIMATORS["k1"](delta))


def test_k3_and_abs_are_never_negative_and_k3_keeps_tiny_drift():
    delta = torch.linspace(-5, 5, 1001)
    assert (k3(delta) >= 0).all()
    assert (KL_ESTIMATORS["abs"](delta) == delta.abs()).all()
    assert torch.allclose(k3(delta.double()), torch.exp(delta.double()) - 1 - delta.double(), rtol=1e-7, atol=1e-15)
    tiny = torch.tensor([1e-4, -1e-6], dtype=torch.float32)
    assert torch.allclose(k3(tiny), torch.tensor([5e-9, 5e-13]), rtol=1e-3, atol=0)
    grad = torch.func.grad(lambda d: k3(d).sum())(torch.tensor([1e-9, -3e-8]))
    assert torch.allclose(grad, torch.tensor([1e-9, -3e-8]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("estimator", [k3, k2, lambda delta: tangent_k3(delta, 100.0)], ids=["k3", "k2", "bounded k3"])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 9.99e-3, 1.01e-2, 1.0, 19.0, 21.0, 1e10, 1.8e19, 2e19, 1e30])
def test_the_gradient_is_a_number_wherever_delta_is(estimator, size):
    """The branch of `where` that is not taken has one too: a square that overflowed made NaN of both."""
    delta = torch.tensor([-size, size], requires_grad=True)
    (gradient,) = torch.autograd.grad(estimator(delta).sum(), delta)
    assert gradient.isfinite().all()
    if estimator is k3 and size > 1:
        assert gradient[0] == pytest.approx(-1, abs=1e-6), "far below mu it is a line of slope -1"


def test_k3_goes_on_by_its_tangent_and_still_pulls_back():
    delta = torch.tensor([19.0, 20.0, 21.0, 1000.0, -1000.0], requires_grad=True)
    value = k3(delta)
    assert torch.isfinite(value).all()
    (grad,) = torch.autograd.grad(value.sum(), delta)
    at20 = math.exp(20) - 1
    want = [math.exp(19) - 20, math.exp(20) - 21, math.exp(20) - 21 + at20, math.exp(20) - 21 + 980 * at20, 999.0]
    assert value.tolist() == pytest.approx(want, rel=1e-6)
    assert grad.tolist() == pytest.approx([math.exp(19) - 1, at20, at20, at20, -1.0], rel=1e-6)


@settings(max_examples=60)
@given(st.floats(-30, 30), st.floats(0.01, 1e4))
def test_one_token_counts_no_more_than_its_limit_and_its_gradient_stays(delta, limit):
    """Against k3 in float64, cut and continued by hand."""
    exact = math.exp(delta) - 1 - delta if abs(delta) > 1e-3 else delta**2 / 2 + delta**3 / 6
    x = torch.tensor(delta, dtype=torch.float64, requires_grad=True)
    assert float(clamped_k3(x.detach(), limit)) == pytest.approx(min(exact, limit), rel=1e-6, abs=1e-12)
    value = tangent_k3(x, limit)
    value.backward()
    slope = float(x.grad)
    if delta < 0 or exact <= limit:
        assert float(value) == pytest.approx(exact, rel=1e-6, abs=1e-12)
        assert slope == pytest.approx(math.expm1(delta), rel=1e-3, abs=1e-6)
    else:
        edge = delta - (float(value) - limit) / slope
        assert math.exp(edge) - 1 - edge == pytest.approx(limit, rel=1e-5)
        assert slope == pytest.approx(math.expm1(edge), rel=1e-5)


def test_what_is_not_finite_is_not_hidden_by_the_limit():
    values = clamped_k3(torch.tensor([math.inf, -math.inf, math.nan, 60.0]), 100.0)
    assert values[:2].isinf().all()
    assert values[2].isnan()
    assert values[3] == 100


@pytest.mark.parametrize("stale", [0.0, 0.7])
def test_the_weighted_reference_term_is_kl_for_tokens_of_any_policy(stale):
    """By enumeration: the mean over mu of value and gradient are KL(pi || ref) and its gradient, and GRPO's are not."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    other, noise = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    mu = (logits.detach() + stale * noise).log_softmax(-1)
    reference = other.log_softmax(-1)
    exact = (logits.softmax(-1) * (logits.log_softmax(-1) - reference)).sum()
    (want,) = torch.autograd.grad(exact, logits)
    for weighted in (True, False):
        config = algorithm(reference_kl={"coef": 1.0, "weighted": weighted, "weight_cap": 1e6}).reference_kl
        mean = (mu.exp() * compute_reference_kl(logits.log_softmax(-1), mu, reference, config)).sum()
        (got,) = torch.autograd.grad(mean, logits)
        right = abs(float(mean - exact)) < 1e-9 and torch.allclose(got, want)
        assert right == weighted
