"""The gated delta rule and the convolution of packed samples on a GPU: the numbers of the CPU, and the host never waits."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from dev.gpu.library import load_library
from tests.helpers.emulated import need_emulated_device

LENGTHS = (40, 1, 130, 7, 70)


def _compute(device: torch.device) -> tuple[list[torch.Tensor], list[str]]:
    """Outputs and gradients, and where the host waited for the device."""
    from dev.gpu.device import wait_sites
    from r3async.learner.gated_delta_rule import gated_delta_rule
    from r3async.learner.packed_convolution import causal_convolution
    from r3async.learner.recurrent_layout import RecurrentLayout

    rng = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    sizes = [(total, 2, 8), (total, 2, 8), (total, 4, 8), (total, 4), (total, 4), (total, 12), (12, 4), (12,)]
    leaves = [torch.randn(size, generator=rng).to(device).requires_grad_() for size in sizes]
    wait_sites.clear()
    query, key, value, decay, beta, x, weight, bias = leaves
    layout = RecurrentLayout(np.cumsum([0, *LENGTHS]), device)
    out = gated_delta_rule(query, key, value, -decay.square(), beta.sigmoid(), layout)
    convolved = causal_convolution(x, weight, bias, layout)
    grads = torch.autograd.grad(out.square().sum() + convolved.square().sum(), leaves)
    return [out, convolved, *grads], list(wait_sites)


def _compute_on_both() -> tuple[list[bool], list[str]]:
    """Returns which tensors are equal, and where the host waited for the device."""
    from dev.gpu.device import DEVICE, install_device

    install_device()
    expected, _ = _compute(torch.device("cpu"))
    found, sites = _compute(DEVICE)
    return [torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True)], sites


@pytest.mark.timeout(300)
def test_they_compute_on_a_gpu_without_waiting_for_it():
    need_emulated_device()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), load_library) as process:
        equal, sites = process.submit(_compute_on_both).result(timeout=240)
    assert all(equal), equal
    assert not sites, sites
