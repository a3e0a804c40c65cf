"""Shared prefixes on several ranks: the gradient and the figures of one rank that shares nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from r3async.config import Config, config_from_dict
from r3async.learner.micro_batches import MicroBatch, pack_for_ranks, pack_samples
from r3async.learner.torch.backend import TorchLearner
from tests.helpers import models as hm
from tests.helpers import torch as ht
from tests.helpers.parity import gradients_of_rank

LAYOUTS = {
    "dp2": {"dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
}
ANOTHER = {"batch/micro_batches", "batch/shared_tokens", "batch/fill"}
"""Metrics of how the batch was packed."""


def config(recompute: str = "none", backend: str = "megatron", **parallel: int) -> Config:
    return config_from_dict(
        {
            "learner": {
                "dtype": "float32", "lr": 1e-2, "backend": backend, "parallel": parallel, "recompute": recompute,
            },
            "algorithm": {"rollout_kl": {"coef": 0.1}, "router_aux": {"coef": 0.7}},
            "routing": {"min_recorded_fraction": 0.0},
        }
    )  # fmt: skip


def batches(**options: Any) -> list[MicroBatch]:
    """An odd number of rows among them, which sequence-parallel ranks have padding for."""
    shared = pack_samples(hm.make_families(0, **options), 84, share_prefixes=True)
    assert sum(m.num_shared_tokens for m in shared) > 60
    assert any(m.num_tokens % 2 for m in shared)
    return shared


def assert_same(answers: list[dict[str, Any]], exact: dict[str, Any]) -> None:
    for answer in answers:
        ours, expected = (a["result"] for a in (answer, exact))
        for name in set(expected.metrics) - ANOTHER:
            assert ours.metrics[name] == pytest.approx(expected.metrics[name], rel=2e-5, abs=1e-6), name
        assert ours.metrics["batch/shared_tokens"] > 60
        assert (ours.expert_load == expected.expert_load).all()
    got = answers[0]["gradients"]
    assert set(got) == set(exact["gradients"])
    for name, gradient in exact["gradients"].items():
        assert np.linalg.norm(got[name] - gradient) <= 1e-5 * max(np.linalg.norm(gradient), 1e-6), name


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    """Four layers, of which the first is dense."""
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[0])


@pytest.fixture(scope="module")
def exact(model_path):
    return gradients_of_rank(str(model_path), config(), pack_samples(hm.make_families(0), 4096))


@pytest.mark.parametrize(
    ("layout", "recompute"), [*((name, "none") for name in LAYOUTS), ("tp2", "full"), ("pp2", "selective")]
)
def test_two_ranks_have_the_gradient_of_one_that_shares_nothing(two_ranks, model_path, exact, layout, recompute):
    settings = config(recompute, **LAYOUTS[layout])
    assert_same(two_ranks.call(gradients_of_rank, str(model_path), settings, batches()), exact)


def step_of_torch(path: str, divided: list[list[MicroBatch]]) -> dict[str, Any]:
    learner = TorchLearner.from_pretrained(config(backend="torch", dp=2), Path(path))
    result, gradients = ht.gradients_of_step(learner, divided[dist.get_rank()])
    return {"result": result, "gradients": {n: g.numpy() for n, g in gradients.items()}}


def test_torch_ranks_have_the_gradient_of_one_that_shares_nothing(two_ranks, model_path):
    samples = hm.make_families(0)
    alone = TorchLearner.from_pretrained(config(backend="torch"), model_path)
    result, gradients = ht.gradients_of_step(alone, pack_samples(samples, 4096))
    divided = pack_for_ranks(samples, 4096, ranks=2, share_prefixes=True)
    answers = two_ranks.call(step_of_torch, str(model_path), divided)
    assert_same(answers, {"result": result, "gradients": {n: g.numpy() for n, g in gradients.items()}})
