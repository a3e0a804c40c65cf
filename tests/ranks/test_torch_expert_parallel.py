"""Experts divided among the ranks of the torch backend: everything is as on one rank, and each rank has its part."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.core_model_loading import revert_weight_conversion

from r3async.config import Config
from r3async.learner import LearnerError
from r3async.learner.micro_batches import MicroBatch
from r3async.learner.torch.backend import TorchLearner
from tests.helpers import architectures as ha
from tests.helpers import lora as hl
from tests.helpers import models as hm
from tests.helpers import torch as ht
from tests.helpers.models import EXPERTS
from tests.helpers.parity import LENGTHS, batch, of_rank, reference
from tests.helpers.steps import train_minibatch

CASES = [
    ("qwen3_moe", {"dp": 2, "ep": 2}, "none"),
    ("qwen3_moe", {"dp": 4, "ep": 2}, "selective"),
    ("deepseek_v3", {"dp": 4, "ep": 2}, "full"),
    ("glm4_moe", {"dp": 4, "ep": 4}, "none"),
    ("mixtral", {"dp": 2, "ep": 2}, "full"),
    ("gpt_oss", {"dp": 4, "ep": 2}, "none"),
    ("granitemoehybrid", {"dp": 4, "ep": 2}, "full"),
    ("qwen3_5_moe_text", {"dp": 2, "ep": 2}, "selective"),
]

STATE_TOLERANCE = 1e-4
"""Error of gradients against plain transformers in models that keep a state: its sums have other lengths."""


def _settings(recompute: str = "none", **parallel: int) -> Config:
    return ht.settings(learner__parallel=parallel, learner__recompute=recompute)


def _step(path: Path, config: Config, micro_batches: list[MicroBatch]) -> dict[str, Any]:
    learner = TorchLearner.from_pretrained(config, path)
    dp = config.learner.parallel.dp
    mine = of_rank(micro_batches, dist.get_rank() if dp > 1 else 0, dp)
    exported = {n: t.numpy() for n, t in learner.export_weights().items()}
    result, gradients = ht.gradients_of_step(learner, mine)
    gradients = dict(revert_weight_conversion(learner.model.causal_lm, gradients))
    held = [p.to_local() if hasattr(p, "to_local") else p for p in learner.model.parameters()]
    return {
        "metrics": result.metrics,
        "load": result.expert_load,
        "gradients": {n: g.numpy() for n, g in gradients.items()},
        "exported": exported,
        "after": {n: t.numpy() for n, t in learner.export_weights().items()},
        "held": sum(p.numel() for p in held),
        "scores": learner.score_sequence(np.arange(20)),
    }


@pytest.mark.parametrize(
    ("variant", "layout", "recompute"), CASES, ids=[f"{v}-{p['dp']}-{p['ep']}-{r}" for v, p, r in CASES]
)
def test_ranks_train_as_one_does(ranks_of, tmp_path, variant, layout, recompute):
    """Loss, every gradient, replayed routes, exported weights, and what the optimizer made of them."""
    path = ha.make_model(tmp_path / "m", variant)
    layers = ha.mixtures(path)
    micro_batches = batch(layers=layers)
    alone = _step(path, _settings(), micro_batches)
    ranks = ranks_of(layout["dp"]).call(_step, path, _settings(recompute, **layout), micro_batches)
    loss, plain = reference(path, micro_batches, _settings())
    assert alone["metrics"]["loss/policy"] + alone["metrics"]["loss/rollout_kl"] == pytest.approx(loss, rel=1e-5)
    for rank in ranks:
        gradients = {n: torch.from_numpy(g) for n, g in rank["gradients"].items()}
        for expected, bound in (
            (alone["gradients"], 1e-5),
            (plain, STATE_TOLERANCE if variant in hm.BY_TOPK else 1e-5),
        ):
            error, worst = ht.worst_error(gradients, {n: torch.from_numpy(g) for n, g in expected.items()})
            assert error < bound, worst
        for key in ("loss/policy", "loss/rollout_kl", "grad_norm", "routing/agreement"):
            assert rank["metrics"][key] == pytest.approx(alone["metrics"][key], rel=1e-5), key
        assert rank["metrics"] == ranks[0]["metrics"]
        assert np.array_equal(rank["load"], alone["load"])
        assert rank["load"].sum(axis=1).tolist() == [ht.TOP_K * sum(LENGTHS)] * layers
        assert np.array_equal(rank["scores"], ranks[0]["scores"])
    assert np.abs(ranks[0]["scores"] - alone["scores"]).max() < 1e-3
    for name, tensor in alone["exported"].items():
        assert np.array_equal(ranks[0]["exported"][name], tensor), name
    assert set(ranks[0]["after"]) == set(alone["after"])
    assert all(rank["after"] == {} for rank in ranks[1:])
    largest = max(np.abs(g).max() for g in alone["gradients"].values())
    for name, gradient in alone["gradients"].items():
        # Adam's first step is lr * sign(gradient): where a gradient is almost nothing its sign may differ.
        clear = np.abs(gradient) > 1e-5 * largest
        error = np.abs(ranks[0]["after"][name] - alone["after"][name])[clear].max(initial=0)
        assert error < 1e-5, name
    assert sum(rank["held"] for rank in ranks) == alone["held"]
    assert max(rank["held"] for rank in ranks) < 1.1 * alone["held"] / len(ranks)


def _all_to_one(path: Path, micro_batches: list[MicroBatch]) -> tuple[dict[str, float], list[float]]:
    """Train routes of the first experts alone: the ranks of the others compute nothing."""
    learner = TorchLearner.from_pretrained(_settings(dp=2, ep=2), path)
    result, gradients = ht.gradients_of_step(learner, of_rank(micro_batches, dist.get_rank(), 2))
    stacks = [g for n, g in gradients.items() if ".experts." in n]
    return result.metrics, [float(g[EXPERTS // 2 :].abs().max()) for g in stacks]


def test_a_rank_whose_experts_nobody_chose_takes_part(two_ranks, tmp_path):
    path = ha.make_model(tmp_path / "m", "mixtral")
    micro_batches = batch(layers=3)
    for each in micro_batches:
        each.table["routed_experts"][:] = [0, 3]
        each.table["routing_recorded"][:] = True
    alone = train_minibatch(TorchLearner.from_pretrained(_settings(), path), micro_batches).metrics
    for metrics, unused in two_ranks.call(_all_to_one, path, micro_batches):
        assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert metrics["loss/policy"] == pytest.approx(alone["loss/policy"], rel=1e-5)
        assert unused == [0.0] * len(unused)
        assert unused


def test_adapters_have_the_gradients_of_one_rank(two_ranks, model_path):
    """Those of experts are where the experts are."""
    alone, expected, _ = hl.adapter_gradients(model_path, hl.with_lora(hl.settings("torch")))
    config = hl.with_lora(hl.settings("torch", dp=2, ep=2))
    seen = set()
    for parts, norm in two_ranks.call(hl.parts_of_rank, model_path, config):
        assert norm == pytest.approx(expected, rel=1e-5)
        for place, gradient in parts:
            whole = alone[place.name].double()
            part = whole[tuple(slice(o, o + n) for o, n in zip(place.offset, place.size, strict=True))]
            assert float((gradient.double() - part).norm()) <= 1e-5 * max(float(whole.norm()), 1e-6), place
            seen.add(place.name)
    assert seen == set(alone)


def _refusal(path: Path, config: Config) -> str:
    with pytest.raises(LearnerError) as error:
        TorchLearner.from_pretrained(config, path)
    return str(error.value)


def test_experts_that_cannot_be_divided_are_refused(four_ranks, two_ranks, tmp_path):
    six = ha.make_model(tmp_path / "six", "mixtral", num_local_experts=6)
    assert (
        four_ranks.call(_refusal, six, _settings(dp=4, ep=4))
        == ["learner.parallel.ep = 4 does not divide the model's 6 experts"] * 4
    )
    dense = ha.make_model(tmp_path / "dense", "qwen3")
    (said, _) = two_ranks.call(_refusal, dense, _settings(dp=2, ep=2))
    assert "0 of the model's 0 mixtures" in said
