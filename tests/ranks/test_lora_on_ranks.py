"""Adapters whose weights are divided among ranks have the gradients of one rank, and are saved once."""

import pytest
import torch

from tests.helpers import checkpoint as hc
from tests.helpers import lora as hl
from tests.helpers import models as hm

LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "dp2-tp2-ep2": {"dp": 2, "tp": 2, "ep": 2},
}


@pytest.fixture
def ranks_of(request):
    return lambda world: None if world == 1 else request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])


CASES = [("megatron", name) for name in LAYOUTS] + [("torch", "dp2")]


@pytest.mark.parametrize("targets", [(), ("layers.3", "mlp.gate")])
@pytest.mark.parametrize(("backend", "layout"), CASES)
def test_ranks_have_the_gradients_of_one(ranks_of, model_path, backend, layout, targets):
    targets = targets or ("all-linear", "mlp.gate")
    alone, expected, _ = hl.adapter_gradients(model_path, hl.with_lora(hl.settings(backend), *targets))
    config = hl.with_lora(hl.settings(backend, **LAYOUTS[layout]), *targets, recompute="full")
    seen = set()
    for parts, norm in ranks_of(config.learner.parallel.world_size).call(hl.parts_of_rank, model_path, config):
        assert norm == pytest.approx(expected, rel=1e-5)
        for place, gradient in parts:
            whole = alone[place.name].double()
            part = whole[tuple(slice(o, o + n) for o, n in zip(place.offset, place.size, strict=True))]
            error = float((gradient.double() - part).norm())
            assert error <= 1e-5 * max(float(whole.norm()), 1e-6), place
            seen.add(place.name)
    assert seen == set(alone)


@pytest.mark.parametrize(("backend", "layout"), [("megatron", "dp2-tp2-ep2"), ("megatron", "pp2"), ("torch", "dp2")])
def test_the_first_rank_has_what_engines_get_alone(ranks_of, model_path, backend, layout):
    config = hl.alone(hl.with_lora(hl.settings(backend), "self_attn"))
    expected = hl.served_on_rank(model_path, config)
    divided = hl.alone(hl.with_lora(hl.settings(backend, **LAYOUTS[layout]), "self_attn"))
    first, *others = ranks_of(divided.learner.parallel.world_size).call(hl.served_on_rank, model_path, divided)
    assert not any(others)
    assert set(first) == set(expected)
    assert all(torch.equal(first[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("backend", "saved", "loaded"),
    [
        ("megatron", "dp2-tp2-ep2", {}),
        ("megatron", "pp2", {"tp": 2}),
        ("torch", "dp2", {}),
    ],
)
def test_another_layout_loads_the_same_adapters(ranks_of, model_path, tmp_path, backend, saved, loaded):
    first, second = hc.fresh(tmp_path / "first"), hc.fresh(tmp_path / "second")
    config = hl.with_lora(hl.settings(backend, **LAYOUTS[saved]))
    ranks_of(config.learner.parallel.world_size).call(hl.trained_and_saved, model_path, config, first, tmp_path / "a")
    config = hl.with_lora(hl.settings(backend, **loaded))
    world = config.learner.parallel.world_size
    hc.on_ranks(ranks_of(world), hc.continued, model_path, config, hc.paths(first), 2, 0, second)
    hc.assert_same(hc.paths(first), hc.paths(second))
    hc.on_ranks(ranks_of(world), hl.restored_and_saved, model_path, config, hc.paths(first), tmp_path / "b")
    one, two = (hm.load_weights(tmp_path / name) for name in "ab")
    assert set(one) == set(two)
    # Products of other shapes are rounded in another way.
    assert all(torch.allclose(one[n], t, rtol=0, atol=1e-6) for n, t in two.items())
