"""A supervised step of ranks is that of one rank, also where a rank has only padding."""

import pytest

from r3async.learner.micro_batches import pack_samples
from tests.helpers import lora as hl
from tests.helpers import models as hm
from tests.helpers.parity import BUDGET, LENGTHS


@pytest.mark.parametrize(
    ("backend", "parallel"),
    [("megatron", {"dp": 2}), ("megatron", {"tp": 2}), ("megatron", {"pp": 2}), ("torch", {"dp": 2})],
)
def test_ranks_take_the_step_of_one(two_ranks, tmp_path, backend, parallel):
    path = hm.make_hf_model(tmp_path / "model", num_hidden_layers=4, mlp_only_layers=[1])
    batches = pack_samples(hm.make_samples(3, LENGTHS, routes=False), BUDGET)
    alone, weights = hl.taught_on_rank(path, hl.settings(backend), batches)
    (first, trained), (second, _) = two_ranks.call(hl.taught_on_rank, path, hl.settings(backend, **parallel), batches)
    assert first == second
    assert set(first) == set(alone)
    for name in ("loss/answers", "grad_norm", "lr", "batch/trained_tokens", "batch/tokens"):
        assert first[name] == pytest.approx(alone[name], rel=1e-5), name
    assert first["after"] == pytest.approx(alone["after"], rel=1e-3)
    assert first["after"] < first["loss/answers"]
    # Adam's first step is lr * sign(gradient): where a gradient is almost nothing its sign may differ.
    assert all((trained[n] - t).abs().mean() < 1e-4 for n, t in weights.items())
