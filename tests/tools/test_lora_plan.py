"""The memory that a plan says is that of the adapters that a learner makes."""

from __future__ import annotations

import pytest

from r3async.config import load_config
from r3async.learner import build_learner
from r3async.tools.adapted import count_adapters
from r3async.tools.memory import estimate_rank_memory, find_model_shape
from r3async.tools.plan import make_run_plan
from tests.helpers import models as hm
from tests.tools.test_plan_measured import SHAPES, peak


@pytest.mark.parametrize("backend", ["megatron", "torch"])
@pytest.mark.parametrize("targets", ['["all-linear"]', '["q_proj","o_proj","mlp.gate"]', '["experts"]', '["layers.1"]'])
def test_the_learner_makes_the_adapters_of_the_plan(tiny_model, backend, targets):
    lora = [f"learner.backend={backend}", f"model.path={tiny_model}", "learner.lora.rank=5", "routing.replay=off"]
    config = load_config("quickstart", [*lora, f"learner.lora.targets={targets}"])
    shape, _ = find_model_shape(config)
    planned = count_adapters(shape, config.learner)
    learner = build_learner(config, tiny_model)
    try:
        trained = learner._adapters.list_parameters()
        assert sum(t.parameter.numel() for t in trained) == planned.adapter_parameters
        assert all(t.parameter.nbytes == 4 * t.parameter.numel() for t in trained)
        weights = {id(t.candidate.parameter): t.candidate.parameter for t in trained}.values()
        named = sum(
            a.place.size[-1] * a.lora_b.shape[-2] * (a.lora_b.numel() // a.lora_b.shape[-1] // a.lora_b.shape[-2])
            for one in learner._adapters._adapted
            for a in one.adapters
            if a
        )
        assert named == planned.adapted_weights <= sum(p.numel() for p in weights)
        assert sum(s["master"].nbytes for s in learner.optimizer.iter_states()) == 4 * planned.adapter_parameters
    finally:
        learner.close()


def test_a_plan_with_adapters_needs_a_part_of_the_memory():
    full, lora = (load_config("moe_30b_r3", [f"learner.lora.rank={rank}"]) for rank in (0, 16))
    before, after = (estimate_rank_memory(find_model_shape(each)[0], each) for each in (full, lora))
    assert after.weights == before.weights
    assert after.optimizer < before.optimizer / 4
    assert any("learner.lora" in note and "host memory" in note for note in make_run_plan(lora).notes)
    assert not any("learner.lora" in note for note in make_run_plan(full).notes)


def test_to_merge_the_adapters_of_experts_takes_the_memory_of_the_plan(tmp_path):
    """No more is in float32 at once than a matrix."""
    path = hm.make_hf_model(tmp_path / "model", **SHAPES["mostly optimizer"])
    lora = [f"model.path={path}", "learner.lora.rank=4", 'learner.lora.targets=["experts"]', "routing.replay=off"]
    config = load_config("quickstart", [*lora, "learner.dtype=bfloat16"])
    planned = estimate_rank_memory(find_model_shape(config)[0], config)
    learner = build_learner(config, path)
    try:
        assert peak(learner._adapters.merge_weights) < planned.temporary
    finally:
        learner.close()
