"""The routers' load-balance term: its value and gradient, whatever recomputes, packs or divides."""

import numpy as np
import pytest
import torch

from r3async.config import ConfigError, config_from_dict
from r3async.learner import build_learner
from r3async.learner.micro_batches import collate_samples, pack_samples
from tests.helpers import models as hm
from tests.helpers.learner import fully_recorded, replace_columns, settings
from tests.helpers.parity import LENGTHS, gradients_of_rank
from tests.helpers.steps import train_minibatch

COEF = 0.7


def config(backend: str = "megatron", recompute: str = "none", coef: float = COEF, **parallel: int):
    return settings(
        learner__backend=backend,
        learner__parallel=parallel,
        learner__recompute=recompute,
        algorithm__router_aux={"coef": coef},
        algorithm__rollout_kl={"coef": 0.0},
    )


def batch(budget: int = 64, advantage: float = 0.0):
    samples = fully_recorded(hm.make_samples(3, LENGTHS))
    given = [replace_columns(s, advantages=np.full(len(s.table), advantage, np.float32)) for s in samples]
    return pack_samples(given, budget)


@pytest.fixture(scope="module")
def expected(model_path):
    """Of plain transformers with forced routes: `coef * experts * sum_i f_i P_i` of each layer, and the routers' gradients.

    Advantages are 0, so the term is the whole loss.
    """
    model = hm.load_hf(model_path)
    logits: list[list[torch.Tensor]] = [[] for _ in range(hm.LAYERS)]
    whole = collate_samples(fully_recorded(hm.make_samples(3, LENGTHS)))
    routes = whole.table["routed_experts"]
    gates = [layer.mlp.gate for layer in model.model.layers]
    for start, stop in zip(whole.cu_seqlens, whole.cu_seqlens[1:], strict=False):
        with hm.forced_routes(model, routes[start:stop]):
            handles = [
                g.register_forward_hook(lambda m, i, out, seen=seen: seen.append(out[0]))
                for g, seen in zip(gates, logits, strict=True)
            ]
            model(torch.from_numpy(whole.table["token_ids"][start:stop].astype(np.int64))[None])
            for handle in handles:
                handle.remove()
    loss = torch.zeros(())
    for layer, seen in enumerate(logits):
        mean = torch.cat(seen).softmax(-1).mean(0)
        share = np.bincount(routes[:, layer].reshape(-1), minlength=hm.EXPERTS) / routes[:, layer].size
        loss = loss + COEF * hm.EXPERTS * (torch.from_numpy(share).float() * mean).sum()
    loss.backward()
    return loss.item(), {f"model.layers.{i}.mlp.gate.weight": g.weight.grad.numpy() for i, g in enumerate(gates)}


def assert_close(metrics, gradients, expected) -> None:
    assert metrics["loss/router_aux"] == pytest.approx(expected[0], rel=1e-5)
    assert metrics["loss/policy"] == 0
    for name, exact in expected[1].items():
        assert np.linalg.norm(gradients[name] - exact) <= 1e-5 * np.linalg.norm(exact), name


@pytest.mark.parametrize("budget", [64, 4096])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_value_and_gradient_are_those_of_the_formula(model_path, expected, recompute, budget):
    answer = gradients_of_rank(str(model_path), config(recompute=recompute), batch(budget))
    assert_close(answer["result"].metrics, answer["gradients"], expected)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"dp": 2, "ep": 2}], ids=["dp2", "tp2", "ep2"])
def test_it_does_not_depend_on_ranks(two_ranks, model_path, expected, layout, recompute):
    answer, _ = two_ranks.call(gradients_of_rank, str(model_path), config(recompute=recompute, **layout), batch())
    assert_close(answer["result"].metrics, answer["gradients"], expected)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_it_does_not_depend_on_pipeline_stages(two_ranks, tmp_path, recompute):
    path = hm.make_hf_model(tmp_path / "m", num_hidden_layers=4, mlp_only_layers=[0])
    alone = gradients_of_rank(str(path), config(recompute=recompute), batch())
    answer = two_ranks.call(gradients_of_rank, str(path), config(recompute=recompute, pp=2), batch())[0]
    assert alone["result"].metrics["loss/router_aux"] > COEF
    gates = {n: g for n, g in alone["gradients"].items() if n.endswith("mlp.gate.weight")}
    assert_close(answer["result"].metrics, answer["gradients"], (alone["result"].metrics["loss/router_aux"], gates))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_both_backends_train_the_same(model_path, recompute):
    steps = []
    for backend in ("megatron", "torch"):
        learner = build_learner(config(backend, recompute), model_path)
        # With an advantage, since a step with zero variance makes no update; so little that the term is the loss.
        steps.append([train_minibatch(learner, batch(advantage=1e-6)).metrics for _ in range(2)])
        learner.close()
    for ours, theirs in zip(*steps, strict=True):
        assert ours["loss/router_aux"] == pytest.approx(theirs["loss/router_aux"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    assert steps[0][1]["loss/router_aux"] < steps[0][0]["loss/router_aux"]


def test_without_replay_it_is_refused_when_the_configuration_is_read():
    with pytest.raises(ConfigError, match="router_aux"):
        config_from_dict({"algorithm": {"router_aux": {"coef": 0.1}}, "routing": {"replay": "off"}})
