"""Served drift where ranks divide model, tokens or experts: own routing is that of one rank, and so is what follows from it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3async.config import Config, config_from_dict
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.micro_batches import MicroBatch, pack_samples
from tests.helpers import models as hm
from tests.helpers.learner import fully_recorded, replace_columns
from tests.helpers.parity import LENGTHS, of_rank
from tests.helpers.steps import train_minibatch
from tests.ranks.test_parallel_parity import LARGE_LAYOUTS, LAYOUTS

PROBED = (1, 4, 5)
"""Of the samples: one alone in its micro-batch, and two that share one with others."""


def config(limit: float, **parallel: int) -> Config:
    return config_from_dict(
        {
            "learner": {"dtype": "float32", "lr": 1e-2, "parallel": parallel},
            "algorithm": {"rollout_kl": {"coef": 0.1, "limit": limit}},
            "routing": {"min_recorded_fraction": 0.0},
        }
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    """Four layers, of which the first is dense; the vocabulary does not divide by 2."""
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[0], vocab_size=97)


@pytest.fixture(scope="module")
def given(model_path) -> list[MicroBatch]:
    """Rollout log-probs are the model's own, with its own routing, a little off: drift is that of random routes and the step."""
    learner, rng, made = MegatronLearner.from_pretrained(config(1.0), model_path), np.random.default_rng(0), []
    for index, sample in enumerate(fully_recorded(hm.make_samples(3, LENGTHS, temperature=0.8))):
        (own,) = learner.logprobs(pack_samples([sample], 48), replay=False)
        mask, probed = sample.table["loss_mask"], np.full(len(sample.table), index in PROBED)
        columns = {
            "rollout_logprobs": np.where(mask, own + 0.1 * rng.standard_normal(len(own)), 0).astype(np.float32),
            "probed": probed,
            "loss_weights": np.where(mask & ~probed, np.float32(0.01), np.float32(0)),
            "advantages": np.where(probed, np.float32(0), sample.table["advantages"]),
        }
        made.append(replace_columns(sample, **columns))
    return pack_samples(made, 48)


def stepped(
    path: Path, settings: Config, micro_batches: list[MicroBatch]
) -> tuple[list[np.ndarray], list[dict[str, float]], dict[str, torch.Tensor]]:
    """Own-routing log-probs of all tokens, metrics of two steps, and the weights after them."""
    learner = MegatronLearner.from_pretrained(settings, path)
    try:
        own = learner.logprobs(micro_batches, replay=False)
        mine = of_rank(micro_batches, learner.ranks.dp_rank, settings.learner.parallel.dp)
        metrics = [train_minibatch(learner, mine, version=version).metrics for version in (4, 5)]
        return own, metrics, learner.export_weights()
    finally:
        learner.close()


@pytest.fixture(scope="module")
def limit(model_path, given) -> float:
    """Between the drift before the first step and after the whole of it."""
    _, (first, _), _ = stepped(model_path, config(1e6), given)
    start, whole = first["rollout_kl/served_k3"], first["rollout_kl/served_k3_predicted"]
    assert whole > start, "the step has to add drift"
    return start + 0.3 * (whole - start)


@pytest.fixture(scope="module")
def alone(model_path, given, limit):
    return stepped(model_path, config(limit), given)


def assert_as_alone(answers: list[Any], alone: Any) -> None:
    own, metrics, weights = alone
    first, second = metrics
    assert abs(first["rollout_kl/served_k3"] - first["rollout_kl/k3"]) > 1e-3, "random routes are not the routers' own"
    assert 0 < first["optimizer/step_share"] < 1
    assert "rollout_kl/served_tokens" not in second, "measured in one of four steps"
    difference = first["rollout_kl/served_k3"] - first["rollout_kl/k3"]
    assert second["rollout_kl/served_k3_estimate"] == pytest.approx(second["rollout_kl/k3"] + difference)
    assert second["rollout_kl/served_k3_predicted"] > 0
    names = [n for n in first if n.startswith(("optimizer/", "rollout_kl/"))]
    for theirs, both, _ in answers:
        for ours, expected in zip(theirs, own, strict=True):
            np.testing.assert_allclose(ours, expected, atol=2e-5)
        assert {n: both[0][n] for n in names} == pytest.approx({n: first[n] for n in names}, rel=2e-3, abs=1e-6)
        assert both[1]["rollout_kl/served_k3_predicted"] == pytest.approx(
            second["rollout_kl/served_k3_predicted"], rel=1e-2
        )
        assert both == answers[0][1], "every rank has the same figures, and makes the same share"
    for name, exact in weights.items():
        # Adam's first steps divide a gradient by its own size: of one that is nearly 0 only rounding is left.
        off = np.abs(np.asarray(answers[0][2][name]) - np.asarray(exact))
        assert np.mean(off > 2e-4) < 1e-3, name
        assert off.max() < 1e-3, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_serve_what_one_serves(two_ranks, model_path, given, limit, alone, layout):
    settings = config(limit, **LAYOUTS[layout])
    assert_as_alone(two_ranks.call(stepped, model_path, settings, given), alone)


@pytest.mark.parametrize("layout", LARGE_LAYOUTS)
def test_four_ranks_serve_what_one_serves(four_ranks, model_path, given, limit, alone, layout):
    settings = config(limit, **LARGE_LAYOUTS[layout])
    assert_as_alone(four_ranks.call(stepped, model_path, settings, given), alone)
