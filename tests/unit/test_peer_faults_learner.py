"""Faults of other frameworks between the batch and the routers, each as the behaviour that must not return."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3async.data.tokens import Sample
from r3async.learner.batch import collate_samples, make_padding_batch, pack_samples
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.replay import RoutingReplay
from r3async.learner.trainer import accumulate_gradients, begin_minibatch
from tests.helpers import models as hm
from tests.helpers.learner import LENGTHS, gradients, logits, replace_columns, with_routes
from tests.helpers.parity import config


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"))


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


def blanked(sample: Sample, fill: np.uint8) -> Sample:
    """The sample with every id of its unrecorded rows replaced by `fill`."""
    table = sample.table
    kept = table["routing_recorded"][:, None, None]
    return replace_columns(sample, routed_experts=np.where(kept, table["routed_experts"], fill))


def test_missing_rows_are_not_trained_as_expert_0(build):
    """A record of zeros, or of any ids, where nothing was recorded, changes nothing: these tokens route by themselves."""
    samples = hm.make_samples(1, LENGTHS)
    nothing = [replace_columns(s, routing_recorded=np.zeros(len(s.table), bool)) for s in samples]
    zeros = [replace_columns(s, routed_experts=np.zeros_like(s.table["routed_experts"])) for s in nothing]
    learner, off = build(), build(replay="off")
    exact = step_gradients(off, [collate_samples(samples)])
    load = off.replay.pop_counts().expert_load
    for unrecorded in (nothing, zeros):
        assert_bit_equal(step_gradients(learner, [collate_samples(unrecorded)]), exact)
        assert torch.equal(learner.replay.pop_counts().expert_load, load)
    assert load.sum() == hm.LAYERS * hm.TOP_K * sum(LENGTHS)

    # Where some rows are recorded, the others are what the model chooses after these: recorded as such, no bit changes.
    some = [replace_columns(s, routing_recorded=np.arange(len(s.table)) % 3 == 1) for s in samples]
    exact = step_gradients(learner, [collate_samples(some)])
    with torch.no_grad(), learner.replay.bind_routes(collate_samples(some), keep=True) as routes:
        logits(learner, collate_samples(some))
        used = routes.build_trace().used
    known = collate_samples(some).table["routing_recorded"]
    assert (np.sort(used[known]) == np.sort(collate_samples(samples).table["routed_experts"][known])).all()
    assert (used[~known] != 0).any(axis=(1, 2)).all()
    assert_bit_equal(step_gradients(learner, [collate_samples(with_routes(samples, used))]), exact)
    for fill in (0, 7):
        other = [blanked(s, np.uint8(fill)) for s in some]
        assert_bit_equal(step_gradients(learner, [collate_samples(other)]), exact)


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


@pytest.mark.parametrize("dense", [[0], [0, 1], [1], [0, 2]])
def test_dense_layers_do_not_shift_the_layer_index(tmp_path, dense):
    """Logits equal those of transformers under the same forced routes, whose columns are counted over MoE layers."""
    path = hm.make_hf_model(tmp_path / "m", num_hidden_layers=4, mlp_only_layers=dense)
    layers = 4 - len(dense)
    (sample,) = hm.make_samples(5, [24], layers=layers)
    sample = replace_columns(sample, routing_recorded=np.ones(24, bool))
    learner, model = MegatronLearner.from_pretrained(config(), path), hm.load_hf(path)
    with torch.no_grad(), learner.replay.bind_routes(collate_samples([sample])):
        ours = logits(learner, collate_samples([sample]))
    routes = sample.table["routed_experts"]
    ids = torch.from_numpy(sample.table["token_ids"].astype(np.int64))[None]
    with torch.no_grad(), hm.forced_routes(model, routes):
        exact = model(ids).logits[0]
    with torch.no_grad(), hm.forced_routes(model, np.roll(routes, 1, axis=1)):
        shifted = model(ids).logits[0]
    assert (ours - exact).abs().max() < 1e-4 * exact.abs().max()
    assert (ours - shifted).abs().max() > 1e-2 * exact.abs().max()


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
