"""Training with shared prefixes is training without: log-probs, gradients, metrics, routes and traces, of both backends."""

from __future__ import annotations

import numpy as np
import pytest

from r3async.config import Config
from r3async.learner import LearnerError, build_learner
from r3async.learner.backend import LearnerBackend
from r3async.learner.batch import MicroBatch, pack_samples
from r3async.learner.trainer import train_minibatch
from r3async.record.routes import merge_traces
from tests.helpers import models as hm
from tests.helpers import torch as ht
from tests.helpers.learner import replace_columns, settings
from tests.helpers.parity import gradients_of_rank

BUDGETS = [80, 4096]
ANOTHER = {"batch/micro_batches", "batch/shared_tokens", "batch/fill"}
"""Metrics of how the batch was packed."""


def config(backend: str = "megatron", replay: str = "rollout", recompute: str = "none") -> Config:
    return settings(
        learner__backend=backend,
        learner__recompute=recompute,
        algorithm__router_aux={"coef": 0.7 * (replay != "off")},
        algorithm__entropy_coef=0.1,
        routing__replay=replay,
    )


def both(budget: int = 4096, seed: int = 0) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Packed with shared prefixes, and without."""
    samples = hm.make_families(seed)
    shared, plain = (pack_samples(samples, budget, share_prefixes=share) for share in (True, False))
    assert sum(m.num_shared_tokens for m in shared) > (60 if budget > 100 else 20)
    assert len(shared) <= len(plain)
    return shared, plain


def assert_alike(metrics: dict[str, float], expected: dict[str, float]) -> None:
    assert set(metrics) == set(expected)
    for name in set(expected) - ANOTHER:
        assert metrics[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("replay", "recompute"), [("rollout", "none"), ("rollout", "full"), ("off", "selective")])
def test_megatron_has_the_same_gradient_and_figures(model_path, budget, replay, recompute):
    answers = [gradients_of_rank(str(model_path), config(replay=replay, recompute=recompute), m) for m in both(budget)]
    results = [a["result"] for a in answers]
    assert_alike(results[0].metrics, results[1].metrics)
    assert results[0].metrics["batch/shared_tokens"] > results[1].metrics["batch/shared_tokens"] == 0
    assert (results[0].expert_load == results[1].expert_load).all()
    assert (results[0].layer_agreement == results[1].layer_agreement).all()
    got, exact = (a["gradients"] for a in answers)
    for name, gradient in exact.items():
        assert np.linalg.norm(got[name] - gradient) <= 1e-5 * max(np.linalg.norm(gradient), 1e-6), name


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "olmoe"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_torch_has_the_same_gradient_and_figures(tmp_path, family, recompute):
    path = ht.make_model(tmp_path / "m", family)
    configured, results, taken = config("torch", recompute=recompute), [], []
    samples = hm.make_families(2, layers=ht.moe_layers(family))
    for share in (True, False):
        learner = build_learner(configured, path)
        result, gradients = ht.gradients_of_step(learner, pack_samples(samples, 4096, share_prefixes=share))
        results.append(result)
        taken.append(gradients)
    assert_alike(results[0].metrics, results[1].metrics)
    assert results[0].metrics["batch/shared_tokens"] > 60
    assert (results[0].expert_load == results[1].expert_load).all()
    error, name = ht.worst_error(*taken)
    assert error <= 1e-5, name


def by_sample(micro_batches: list[MicroBatch], values: list[np.ndarray]) -> dict[str, np.ndarray]:
    """`[T, ...]` of every whole sample."""
    out = {}
    for m, of_rows in zip(micro_batches, values, strict=True):
        whole, edges = m.expanded_samples
        for s, name in enumerate(m.sample_ids):
            out[name] = of_rows[whole[edges[s] : edges[s + 1]]]
    return out


@pytest.fixture(params=["megatron", "torch"])
def learner(request, model_path) -> LearnerBackend:
    return build_learner(config(request.param), model_path)


def trained_rows() -> dict[str, np.ndarray]:
    return {s.sample_id: s.table["loss_mask"] for s in hm.make_families(0)}


@pytest.mark.parametrize("budget", BUDGETS)
def test_log_probs_of_every_trained_token_are_the_same(learner, budget):
    ours, exact = (by_sample(m, learner.logprobs(m)) for m in both(budget))
    for name, mask in trained_rows().items():
        np.testing.assert_allclose(ours[name][mask], exact[name][mask], atol=2e-5)
        assert (exact[name][mask] != 0).all()


def test_own_routes_of_every_token_are_the_same(learner):
    shared, plain = both()
    ours, exact = (
        by_sample(m, [np.sort(r.table["routed_experts"], -1) for r in learner.record_learner_routes(m)])
        for m in (shared, plain)
    )
    for name, routes in exact.items():
        assert (ours[name] == routes).all()
    for m in learner.record_learner_routes(shared):
        assert m.prefixes is not None
        assert m.table["routing_recorded"].all()


def test_traces_have_whole_samples(learner):
    shared, plain = both()
    ours, exact = (
        merge_traces(train_minibatch(learner, m, version=0, trace=True).traces, hm.LAYERS) for m in (shared, plain)
    )
    samples = {s.sample_id: s for s in hm.make_families(0)}
    (one,), (other,) = ours, exact
    for s, name in enumerate(one.sample_ids):
        rows, table = slice(*one.cu_seqlens[s : s + 2]), samples[name].table
        again = other.sample_ids.index(name)
        recorded = table["routing_recorded"]
        assert rows.stop - rows.start == len(table)
        assert (np.sort(one.used[rows][recorded], -1) == np.sort(table["routed_experts"][recorded], -1)).all()
        assert (np.isnan(one.logprobs[rows]) == ~table["loss_mask"]).all()
        assert one.logprobs[rows].shape == other.logprobs[slice(*other.cu_seqlens[again : again + 2])].shape


def test_a_first_token_to_be_trained_is_refused_by_name_as_before(learner):
    samples = hm.make_families(0)
    at = next(i for i, s in enumerate(samples) if s.sample_id == "alone")
    samples[at] = replace_columns(samples[at], loss_mask=np.ones(len(samples[at].table), bool))
    with pytest.raises(LearnerError, match="sample alone: its first token"):
        train_minibatch(learner, pack_samples(samples, 4096, share_prefixes=True))


def test_two_steps_of_the_same_batch_are_the_same_to_the_last_bit(learner, model_path):
    again = build_learner(learner.config, model_path)
    for each in (learner, again):
        for _ in range(2):
            train_minibatch(each, both()[0], version=0)
    ours, other = learner.export_weights(), again.export_weights()
    assert all((ours[name] == other[name]).all() for name in ours)
