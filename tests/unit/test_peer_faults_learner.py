"""Faults of other frameworks between the batch and the routers, each as the behaviour that must not return."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3async.learner.batch import collate_samples, make_padding_batch, pack_samples
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.replay import RoutingReplay
from r3async.learner.trainer import accumulate_gradients, begin_minibatch
from tests.helpers import models as hm
from tests.helpers.learner import LENGTHS, gradients, logits, replace_columns
from tests.helpers.parity import config


@pytest.fixture
def build(model_path):
    """Build learners of the model; none of their steps is taken, so the weights stay."""
    return lambda **options: MegatronLearner.from_pretrained(config(**options), model_path)


def step_gradients(learner: MegatronLearner, micro_batches) -> dict[str, torch.Tensor]:
    """Gradients of one step, which is not taken."""
    accumulate_gradients(learner, begin_minibatch(learner, micro_batches))
    taken = {n: g.clone() for n, g in gradients(learner).items()}
    learner.optimizer.zero_grad()
    return taken


def assert_bit_equal(found, exact) -> None:
    assert set(found) == set(exact)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_no_replay_is_stale_on_a_padding_micro_batch(build):
    """Not longer, not shorter than what came before it, and no trace of it in gradients or figures."""
    learner, real = build(), collate_samples(hm.make_samples(2, [20]))
    exact = step_gradients(learner, [real])
    alone = learner.replay.pop_counts()
    # As on one rank of several: padding is fed forward and back like everything else.
    learner.config.learner.parallel = config(dp=2).learner.parallel
    for tokens in (1, 20, 33):
        padding = make_padding_batch(real, tokens)
        minibatch = begin_minibatch(learner, [real, padding, real])
        assert minibatch.micro_batches[1] is padding
        accumulate_gradients(learner, minibatch)
        found = {n: g.clone() for n, g in gradients(learner).items()}
        learner.optimizer.zero_grad()
        counts = learner.replay.pop_counts()
        for name, gradient in exact.items():
            # The denominator is twice as large, and the same tokens are there twice.
            assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-8), name
        assert torch.equal(counts.expert_load, 2 * alone.expert_load)
        assert torch.equal(counts.compared_tokens, 2 * alone.compared_tokens)
        with learner.replay.bind_routes(padding):
            bound = logits(learner, padding)
        assert torch.equal(bound, logits(learner, padding))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_forward_only_pass_is_not_consumed_by_a_later_backward(build, recompute):
    """Scoring, recording and a forward pass without a backward, of other micro-batches, change no bit of the gradient."""
    micro_batches = pack_samples(hm.make_samples(3, LENGTHS), 48)
    learner = build(recompute=recompute)
    exact = step_gradients(learner, micro_batches)
    others = pack_samples(hm.make_samples(4, [31, 7, 40]), 48)
    learner.logprobs(others)
    learner.record_learner_routes(others)
    learner.score_sequence(np.arange(20))
    with learner.replay.bind_routes(others[0]):
        logits(learner, others[0])  # with gradients, and no backward
    found = step_gradients(learner, micro_batches)
    assert_bit_equal(found, exact)
    learner.logprobs(others)
    assert_bit_equal(step_gradients(learner, micro_batches), exact)


def test_ids_above_255_reach_the_router_unwrapped():
    replay = RoutingReplay(
        num_moe_layers=2,
        moe_layer_indices=[0, 1],
        top_k=2,
        num_experts=512,
        is_enabled=True,
        device=torch.device("cpu"),
    )
    rows = np.asarray([[[511, 256], [255, 300]], [[1, 257], [258, 2]]], np.uint16)
    (sample,) = hm.make_samples(6, [2], layers=2)
    sample = replace_columns(sample, routed_experts=rows, routing_recorded=np.ones(2, bool))
    own = torch.tensor([[0, 1], [2, 3]])
    with replay.bind_routes(collate_samples([sample])) as routes:
        for layer in range(2):
            assert routes.choose_experts(layer, own).tolist() == np.sort(rows[:, layer]).tolist()
    load = replay.pop_counts().expert_load
    assert load[0].nonzero()[:, 0].tolist() == [1, 256, 257, 511]


def test_routers_of_multi_token_prediction_are_not_replayed(build):
    """A layer beside the decoder, with experts of its own: it is in no record, so its router stays Megatron's."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import build_module

    from r3async.learner.megatron.layers import attach_replay, build_layer_spec

    learner = build()
    model = learner.model
    aside = build_module(
        build_layer_spec(model.config, learner.shape, moe=True), config=model.config, layer_number=hm.LAYERS + 1
    )
    assert isinstance(aside.mlp, MoELayer)
    model.mtp = torch.nn.ModuleList([aside])
    again = attach_replay(
        model,
        moe_layers=[1, 2, 3],
        shard=(0, 1),
        top_k=hm.TOP_K,
        num_experts=hm.EXPERTS,
        is_enabled=True,
        device=torch.device("cpu"),
    )
    assert again.moe_layer_indices == [0, 1, 2]
    assert aside.mlp.router.router_replay is None
    assert all(layer.mlp.router.router_replay is not None for layer in model.decoder.layers)
    torch.nn.init.normal_(aside.mlp.router.weight, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(7, 1, model.config.hidden_size)
    with torch.no_grad():
        plain = aside.mlp.router(hidden)
        with again.bind_routes(collate_samples(hm.make_samples(7, [7]))):
            bound = aside.mlp.router(hidden)
    assert all(torch.equal(a, b) for a, b in zip(plain, bound, strict=True))
