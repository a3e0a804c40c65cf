"""The optimizer at the settings that users have: its steps are those of AdamW as it was published, of gradients whose common norm
is at most `max_grad_norm`. In double precision, and without torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from r3async.config import LearnerConfig
from r3async.learner.optimizer import MasterAdamW

NORMS = (0.3, 5.0, 0.02, 40.0, 0.999, 1.001, 2.0)
"""Of the gradients of each step: below, about and far above the default of `max_grad_norm`."""


class AdamW:
    """arXiv 1711.05101, algorithm 2, behind a clipping of the global norm."""

    def __init__(self, values: list[np.ndarray], config: LearnerConfig):
        self.values, self._config, self._made = [v.astype(np.float64) for v in values], config, 0
        self._first = [np.zeros_like(v) for v in self.values]
        self._second = [np.zeros_like(v) for v in self.values]

    def step(self, gradients: list[np.ndarray]) -> None:
        config, self._made = self._config, self._made + 1
        norm = math.sqrt(sum(float(np.square(g).sum()) for g in gradients))
        beta1, beta2 = config.betas
        for i, gradient in enumerate(gradients):
            gradient = gradient * min(1.0, config.max_grad_norm / norm)
            self._first[i] = beta1 * self._first[i] + (1 - beta1) * gradient
            self._second[i] = beta2 * self._second[i] + (1 - beta2) * gradient**2
            first = self._first[i] / (1 - beta1**self._made)
            second = self._second[i] / (1 - beta2**self._made)
            decay = config.weight_decay if self.values[i].ndim >= 2 else 0.0
            self.values[i] -= config.lr * (first / (np.sqrt(second) + config.eps) + decay * self.values[i])


@pytest.mark.parametrize("scale", [1.0, 1e-8], ids=["usual gradients", "gradients as small as eps"])
@pytest.mark.parametrize(
    "changes", [{}, {"max_grad_norm": 0.25}, {"weight_decay": 0.1}, {"offload_moments": True}], ids=str
)
def test_steps_are_those_of_adamw_of_gradients_that_are_scaled_to_max_grad_norm(changes: dict, scale: float):
    config = LearnerConfig(lr=0.05, **changes)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (5,))]
    expected = AdamW(values, config)
    parameters = [Parameter(torch.from_numpy(v.copy())) for v in values]
    optimizer = MasterAdamW(parameters, config)
    for norm in NORMS:
        gradients = [rng.standard_normal(v.shape) for v in values]
        whole = math.sqrt(sum(float(np.square(g).sum()) for g in gradients))
        gradients = [g * (scale * norm / whole) for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.astype(np.float32))
        update = optimizer.step()
        expected.step(gradients)
        assert update.grad_norm == pytest.approx(scale * norm, rel=1e-5)
        for parameter, value in zip(parameters, expected.values, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=2e-5, atol=2e-6)
