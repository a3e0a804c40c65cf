"""LoRA on one rank: gradients, the start, what is trained, saved, resumed and exported."""

import functools
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from r3async.checkpoint.manifest import CheckpointError
from r3async.checkpoint.rank_files import TensorSlice
from r3async.checkpoint.resume_checks import check_resume_settings
from r3async.config import LoraConfig, config_from_dict, config_to_dict
from r3async.learner import LearnerError
from r3async.learner.lora import LoraAdapter
from tests.helpers import architectures as ha
from tests.helpers import checkpoint as hc
from tests.helpers import lora as hl
from tests.helpers import models as hm

BACKENDS = ["megatron", "torch"]
SHORT = [9, 5, 12]
"""Tokens of samples that are one micro-batch. Some architectures compute a state token by token."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[1])


@pytest.fixture
def build(learners, model_path):
    return lambda config: learners(config, model_path)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "mlp.gate", "experts"), ("layers.2",)])
def test_the_gradient_is_that_of_full_training_on_the_adapters_subspace(model_path, tmp_path, backend, targets):
    config = hl.with_lora(hl.settings(backend), *targets)
    found, norm, values = hl.adapter_gradients(model_path, config, tmp_path / "merged")
    expected = hl.projected(hl.full_gradients(tmp_path / "merged", config), values)
    assert all(g.norm() > 0 for n, g in expected.items() if "experts." not in n)
    hl.assert_close(found, expected)
    assert norm == pytest.approx(sum(float(g.square().sum()) for g in expected.values()) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_two_products_as_in_engines_have_the_gradient_of_full_training(model_path, tmp_path, recompute):
    """In float32, where their order does not matter."""
    config = hl.alone(hl.with_lora(hl.settings("torch"), "self_attn", recompute=recompute))
    found, norm, values = hl.adapter_gradients(model_path, config, tmp_path / "merged")
    assert norm > 0
    hl.assert_close(found, hl.projected(hl.full_gradients(tmp_path / "merged", config), values))


def test_a_bfloat16_learner_multiplies_in_the_order_of_engines(build):
    """Two products of rounded factors, and not one of a rounded sum."""
    config = hl.alone(hl.with_lora(hl.settings("torch", dtype="bfloat16"), "self_attn"), "bfloat16")
    learner = build(config)
    hl.randomize(learner)
    linear = learner.model.layers[0].self_attn.q_proj
    x = torch.randn(7, linear.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    served = learner.export_adapters()
    a, b = (served[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"] for side in "AB")
    with learner.use_start_weights():
        start = linear.weight.detach().clone()
        assert torch.equal(linear(x), x @ start.T)
    assert torch.equal(linear(x), x @ start.T + (x @ a.T) @ b.T)
    assert not torch.equal(linear(x), x @ linear.weight.T)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """Return the path of a variant's model, which is made once for both backends."""
    return functools.cache(lambda variant: ha.make_model(tmp_path_factory.mktemp("variant") / "m", variant))


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "backend"), [*((v, b) for v in ha.VARIANTS for b in BACKENDS), *((v, "torch") for v in ha.TORCH_ONLY)]
)
def test_every_architecture_can_be_adapted(path_of, tmp_path, variant, backend):
    path = path_of(variant)
    config = hl.with_lora(hl.settings(backend))
    config = msgspec.structs.replace(config, routing=msgspec.structs.replace(config.routing, replay="off"))
    found, _, values = hl.adapter_gradients(path, config, tmp_path / "merged", SHORT)
    assert found
    hl.assert_close(found, hl.projected(hl.full_gradients(tmp_path / "merged", config, SHORT), values))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_layers_have_the_same_gradient(model_path, backend, recompute):
    config = hl.with_lora(hl.settings(backend), "layers.2", "layers.3")
    plain, norm, _ = hl.adapter_gradients(model_path, config)
    again, _, _ = hl.adapter_gradients(model_path, hl.with_lora(config, "layers.2", "layers.3", recompute=recompute))
    assert norm > 0
    hl.assert_close(again, {n: g.double() for n, g in plain.items()})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_start_is_the_base_and_only_targets_move(build, backend, dtype):
    config = hl.settings(backend, dtype=dtype)
    start = build(config).export_weights()
    learner = build(hl.with_lora(config, "q_proj", "experts"))
    assert all(torch.equal(t, start[n]) for n, t in learner.export_weights().items())
    hc.train(learner, config, hc.batches(2))
    moved = {n for n, t in learner.export_weights().items() if not torch.equal(t, start[n])}
    assert all(".q_proj." in n or ".experts." in n for n in moved)
    assert sum(".q_proj." in n for n in moved) == 4
    # The optimizer has moments of adapters alone, and no weight keeps a gradient.
    names = {held.places[0].name for held in learner.trained_slices()}
    assert all(".lora_" in n for n in names)
    assert all(p.grad is None for p in learner.model.parameters())
    elements = sum(s["exp_avg"].numel() for s in learner.optimizer.iter_states() if "exp_avg" in s)
    assert 0 < elements < sum(t.numel() for t in start.values()) / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_routers_stay_frozen(build, backend):
    config = hl.settings(backend)
    config = msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, freeze_router=True))
    learner = build(config)
    start = learner.export_weights()
    hc.train(learner, config, hc.batches(1))
    still = {n for n, t in learner.export_weights().items() if torch.equal(t, start[n])}
    assert still == {n for n in start if n.endswith("mlp.gate.weight")}
    with pytest.raises(
        LearnerError, match=r"learner.lora.targets.*'mlp.gate'.*self_attn.q_proj.*learner.freeze_router"
    ):
        build(hl.with_lora(config, "mlp.gate", freeze_router=True))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_after_a_restart_are_those_without_it(build, model_path, tmp_path, backend, dtype):
    config = hl.with_lora(hc.settings(backend, dtype=dtype))
    straight, half, whole = (hc.fresh(tmp_path / name) for name in ("straight", "half", "whole"))
    learner = build(config)
    for first, out in ((0, half), (2, straight)):
        hc.train(learner, config, hc.batches(2, first=first))
        hc.write_rank_file(out, learner.capture_state())
    hc.continued(model_path, config, hc.paths(half), 2, 2, whole)
    hc.assert_same(hc.paths(straight), hc.paths(whole))
    saved = hc.contents(hc.paths(whole))
    assert all(".lora_" in name for name in saved)
    # As small as adapters are: nothing of the start model is in it.
    assert sum(t.numel() for t in saved.values()) < parameters_of(model_path)


def parameters_of(path: Path) -> int:
    return sum(t.numel() for t in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize(
    "config",
    [*(hl.with_lora(hl.settings(b)) for b in BACKENDS), hl.alone(hl.with_lora(hl.settings("torch"), "q_proj"))],
)
def test_the_reference_is_the_start_model(build, config):
    config.algorithm.reference_kl.coef = 0.1
    learner, (step,) = build(config), hc.batches(1)
    before = learner.logprobs(step)
    hl.randomize(learner)
    moved = learner.logprobs(step)
    assert max(abs(a - b).max() for a, b in zip(before, moved, strict=True)) > 1e-3
    assert all((a == b).all() for a, b in zip(before, learner.logprobs(step, use_reference=True), strict=True))
    assert all((a == b).all() for a, b in zip(moved, learner.logprobs(step), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_engines_get_alone_makes_the_weights_with_which_the_learner_scores(build, backend, dtype):
    """The scale is in B, both factors are rounded once, and what they are added to is the start model."""
    config = hl.alone(hl.with_lora(hl.settings(backend), "self_attn"), dtype)
    learner = build(config)
    hl.randomize(learner)
    served = learner.export_adapters()
    merged = {n: t.clone() for n, t in learner.export_weights().items()}
    with learner.use_start_weights():
        start = {n: t.clone() for n, t in learner.export_weights().items()}
    assert all(torch.equal(t, merged[n]) for n, t in learner.export_weights().items())
    assert {t.dtype for t in served.values()} == {getattr(torch, dtype)}
    adapted = {n.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for n in served if "lora_A" in n}
    assert {f"{n}.weight" for n in adapted} == {n for n in start if "_proj" in n and "self_attn" in n}
    for name, tensor in merged.items():
        module = name.removesuffix(".weight")
        delta = 0.0
        if module in adapted:
            a, b = (served[f"base_model.model.{module}.{side}.weight"].float() for side in ("lora_A", "lora_B"))
            assert torch.equal(b, (hl.ALPHA / hl.RANK * b_of(learner, module)).to(getattr(torch, dtype)).float())
            delta = b @ a
        assert torch.equal(tensor, start[name] + delta)


def b_of(learner, module):
    """The float32 values of the adapter's B."""
    name = f"{module}.lora_B.weight"
    (found,) = (p for p, held, *_ in learner.adapters.list_parameters() if held.places[0].name == name)
    return found.detach()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("targets", [("all-linear",), ("self_attn", "experts"), ("mlp.gate",)])
def test_adapters_that_engines_cannot_be_given_alone_are_refused_by_name(build, backend, targets):
    config = hl.alone(hl.with_lora(hl.settings(backend), *targets))
    with pytest.raises(LearnerError, match=r'deliver` = "adapter".*mlp\.(experts|gate).*targets` = .*= "merged"'):
        build(config)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", ["query_key_value", "embed_tokens", "lm_head"])
def test_a_target_that_names_nothing_is_refused_with_what_there_is(build, backend, target):
    with pytest.raises(LearnerError, match=rf"`learner.lora.targets`: '{target}' names no matrix.*self_attn.q_proj"):
        build(hl.with_lora(hl.settings(backend), "q_proj", target))


@pytest.mark.parametrize("change", [{"lora": {"rank": 4}}, {"freeze_router": True}])
def test_a_run_keeps_what_it_trains(change):
    saved = config_to_dict(config_from_dict({"learner": {"lora": {"rank": 2}}}))
    with pytest.raises(CheckpointError, match=rf"learner.{next(iter(change))}"):
        check_resume_settings(saved, config_from_dict({"learner": {"lora": {"rank": 2}} | change}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 5), (3, 6, 5)])
def test_gradients_of_either_dtype_are_projected_with_the_scale_and_add_up(dtype, shape):
    """Two micro-batches, of a matrix and of a stack of three."""
    config, cpu = LoraConfig(rank=2, alpha=6.0), torch.device("cpu")
    adapter = LoraAdapter.initialize(TensorSlice.full_tensor("layer.weight", shape), config, 0, cpu)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        adapter.lora_b.normal_(generator=generator)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    kept = [gradient.clone() for gradient in gradients]
    for gradient in gradients:
        adapter.project_gradient(gradient)
    total = sum(gradient.double() for gradient in kept)
    a, b = adapter.lora_a.detach().double(), adapter.lora_b.detach().double()
    torch.testing.assert_close(adapter.lora_a.grad.double(), 3.0 * b.mT @ total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(adapter.lora_b.grad.double(), 3.0 * total @ a.mT, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(mine, before) for mine, before in zip(gradients, kept, strict=True))
