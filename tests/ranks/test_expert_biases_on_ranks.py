"""Biases of experts follow the tokens of all ranks, and are the same on each."""

import numpy as np
import pytest
import torch

from tests.helpers import architectures as ha
from tests.helpers.expert_biases import settings, step_on_rank
from tests.helpers.parity import batch

CASES = [
    ("megatron", "deepseek_v3", {"dp": 2}),
    ("megatron", "deepseek_v3", {"tp": 2, "ep": 2}),
    ("megatron", "glm4_moe", {"pp": 2}),
    ("torch", "glm4_moe", {"dp": 2}),
]


@pytest.mark.parametrize(("backend", "variant", "layout"), CASES, ids=[f"{b}-{'-'.join(p)}" for b, _, p in CASES])
def test_two_ranks_move_biases_as_one_does(two_ranks, tmp_path, backend, variant, layout):
    """Ranks have other micro-batches, other tokens or other layers; padding micro-batches are in none of the counts."""
    path = ha.make_model(tmp_path / "m", variant, num_hidden_layers=4)
    micro_batches = batch(layers=ha.mixtures(path))
    expected, load = step_on_rank(path, settings(backend), micro_batches)
    found: dict[str, torch.Tensor] = {}
    for biases, seen in two_ranks.call(step_on_rank, path, settings(backend, **layout), micro_batches):
        assert np.array_equal(seen, load)
        for name, tensor in biases.items():
            assert torch.equal(found.setdefault(name, tensor), tensor)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
