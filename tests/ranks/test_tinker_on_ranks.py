"""Requests of the Tinker API on several ranks: results, gradients and clients as on one."""

from pathlib import Path

import numpy as np
import pytest

from r3async.config import Config
from r3async.learner import build_learner
from r3async.learner import train_step as verbs
from r3async.tinker.backend import LossBatch
from r3async.tinker.datum_minibatch import run_training
from r3async.tinker.kept_sequences import RoutedDatum
from r3async.tinker.losses import check_loss
from r3async.tinker.protocol import Datum
from tests.helpers import lora as hl
from tests.helpers.models import VOCAB, make_hf_model, random_routes

LAYERS = 4
LENGTHS = [9, 14, 5, 11, 7]
LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "dp2-tp2-ep2": {"dp": 2, "tp": 2, "ep": 2},
}
CASES = [*(("megatron", name) for name in LAYOUTS), ("torch", "dp2")]
CLIENTS = {"a": 2, "b": hl.RANK}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def make_batch(loss: str, count: int) -> LossBatch:
    """Return `count` data with recorded routes, the last one with three targets in each place if the loss takes them."""
    rng = np.random.default_rng(count)
    data = []
    for length in LENGTHS[:count]:
        tokens = rng.integers(0, VOCAB, length + 1)
        if loss == "cross_entropy":
            shape = (length, 3) if length == LENGTHS[count - 1] else (length,)
            targets = rng.integers(0, VOCAB, shape) if len(shape) > 1 else tokens[1:]
            inputs = {"weights": rng.uniform(0, 1, shape).astype(np.float32)}
        else:
            targets = tokens[1:]
            sampled = np.arange(length) >= 2
            inputs = {
                "logprobs": np.where(sampled, rng.normal(-4, 0.4, length), 0).astype(np.float32),
                "advantages": np.where(sampled, rng.normal(size=length), 0).astype(np.float32),
            }
        inputs["target_tokens"] = targets.astype(np.int64)
        recorded = np.ones(length, bool)
        datum = Datum(tokens[:-1].astype(np.int32), inputs, [], [])
        data.append(RoutedDatum(datum, random_routes(rng, length, LAYERS), recorded, np.zeros(length, np.int32)))
    return LossBatch(loss, check_loss(loss, {}), data, 1)


def trained(path: Path, config: Config) -> list[tuple[dict[str, float], list[np.ndarray], float]]:
    """Run on a rank: two clients in turns, with a forward pass between a gradient and its step."""
    learner = build_learner(config, path)
    try:
        for name, rank in CLIENTS.items():
            learner.adapter_states.create(name, rank, rank)
        found = []
        for loss, count in (("importance_sampling", 5), ("cross_entropy", 3), ("ppo", 1)):
            batch = make_batch(loss, count)
            for name in CLIENTS:
                learner.adapter_states.use(name)
                result = run_training(learner, batch, 24, forward_only=False)
                scored = run_training(learner, batch, 24, forward_only=True)
                assert scored.metrics == pytest.approx(result.metrics)
                found.append([result.metrics, result.logprobs])
            for name, of_client in zip(CLIENTS, found[-2:], strict=True):
                learner.adapter_states.use(name)
                of_client.append(verbs.optim_step(learner).grad_norm)
        return found
    finally:
        learner.close()


@pytest.mark.parametrize(("backend", "layout"), CASES)
def test_results_and_gradients_of_ranks_are_those_of_one(ranks_of, path, backend, layout):
    config = hl.alone(hl.with_lora(hl.settings(backend, **LAYOUTS[layout]), "self_attn"))
    expected = trained(path, hl.alone(hl.with_lora(hl.settings(backend), "self_attn")))
    for found in ranks_of(config.learner.parallel.world_size).call(trained, path, config):
        for (metrics, logprobs, norm), (metrics_alone, logprobs_alone, norm_alone) in zip(found, expected, strict=True):
            assert metrics == pytest.approx(metrics_alone, rel=1e-4, abs=1e-6)
            assert norm == pytest.approx(norm_alone, rel=1e-4)
            assert norm > 0
            for mine, theirs in zip(logprobs, logprobs_alone, strict=True):
                assert np.abs(mine - theirs).max() < 1e-4
