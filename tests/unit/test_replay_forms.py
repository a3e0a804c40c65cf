"""How routes travelled is not seen in one bit of what the learner makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3async.data import packed
from r3async.data.packed import PackedRoutes
from r3async.data.tokens import Sample, Trajectory
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.learner.batch import collate_samples
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.trainer import train_minibatch
from tests.helpers import learner as megatron
from tests.helpers import models
from tests.helpers import torch as plain

FORMS = ("plain", "bits", "dense")
TOP_K = 4
"""The sum of two is the same in either order."""


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(packed, "MIN_PACKED_BYTES", 1)


def sent(samples: list[Sample], form: packed.RouteForm) -> list[Sample]:
    """As the learner receives them."""
    frames = encode_trajectory(Trajectory("t", 0, 0, 1, "g0", "eos", [], samples), routes=form)
    received = decode_trajectory([bytes(frame) for frame in frames]).samples
    kept = [dict(sample.table.stored_items())["routed_experts"] for sample in received]
    assert all((rows.form if isinstance(rows, PackedRoutes) else "plain") == form for rows in kept)
    return received


def backwards(samples: list[Sample]) -> list[Sample]:
    """With the experts of each row in the opposite order."""
    return [megatron.replace_columns(s, routed_experts=s.table["routed_experts"][..., ::-1].copy()) for s in samples]


def of_four(samples: list[Sample]) -> list[Sample]:
    """With other routes: of `TOP_K` experts, in any order."""
    rng = np.random.default_rng(7)
    shapes = [s.table["routed_experts"].shape[:2] for s in samples]
    rows = [rng.random((*shape, models.EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.uint8) for shape in shapes]
    return [megatron.replace_columns(s, routed_experts=r) for s, r in zip(samples, rows, strict=True)]


def check_every_form(load, samples: list[Sample]) -> None:
    """`load()`: a fresh learner. The routes are random, so they replace nearly every choice of its routers."""
    made = []
    for variant in [*(sent(samples, form) for form in FORMS), backwards(samples)]:
        learner = load()
        result = train_minibatch(learner, [collate_samples(variant[:3]), collate_samples(variant[3:])])
        assert result.metrics["routing/agreement"] < 0.5
        made.append((result.metrics["loss/policy"], learner.export_weights()))
    (loss, weights), *others = made
    for other_loss, other_weights in others:
        assert other_loss == loss
        assert all(torch.equal(tensor, weights[name]) for name, tensor in other_weights.items())


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "olmoe"])
def test_a_step_of_the_torch_learner(tmp_path, family):
    path = plain.make_model(tmp_path / "model", family, num_experts_per_tok=TOP_K)
    samples = plain.recorded_samples(plain.moe_layers(family))
    check_every_form(lambda: TorchLearner.from_pretrained(plain.settings(), path), of_four(samples))


def test_a_step_of_the_megatron_learner(tmp_path):
    path = models.make_hf_model(tmp_path / "model", num_experts_per_tok=TOP_K)
    samples = megatron.fully_recorded(models.make_samples(3, megatron.LENGTHS))
    check_every_form(lambda: MegatronLearner.from_pretrained(megatron.settings(), path), of_four(samples))
