"""Routing replay in the Megatron learner: what it changes, and every way it could go stale."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from r3async.data.routes import RoutingError
from r3async.data.tokens import Sample
from r3async.learner.batch import collate_samples
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.trainer import train_minibatch
from tests.helpers import models as hm
from tests.helpers.learner import (
    LENGTHS,
    fully_recorded,
    logits,
    own_routes,
    replace_columns,
    settings,
    with_routes,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def learner(model_path):
    return MegatronLearner.from_pretrained(settings(), model_path)


def assert_nothing_is_bound(learner) -> None:
    assert learner.replay.current_routes is None
    assert learner.replay._open_routes == []


def test_replaying_own_routes_changes_no_bit(learner):
    samples = hm.make_samples(3, LENGTHS)
    plain = logits(learner, collate_samples(samples))
    routes = own_routes(learner, collate_samples(samples))
    replayed = collate_samples(with_routes(samples, routes[:, :, ::-1]))  # the order of a row's columns says nothing
    with learner.replay.bind_routes(replayed):
        assert torch.equal(logits(learner, replayed), plain)
    counts = learner.replay.pop_counts()
    assert counts.agreeing_tokens.tolist() == counts.compared_tokens.tolist() == [replayed.num_tokens] * hm.LAYERS
    every_other = [
        replace_columns(s, routing_recorded=np.arange(len(s.table)) % 2 == 0) for s in with_routes(samples, routes)
    ]
    with learner.replay.bind_routes(collate_samples(every_other)):
        assert torch.equal(logits(learner, collate_samples(every_other)), plain)
    counts = learner.replay.pop_counts()
    assert counts.agreeing_tokens.tolist() == counts.compared_tokens.tolist()
    assert max(counts.compared_tokens.tolist()) < replayed.num_tokens


def test_unrecorded_rows_route_by_themselves(learner):
    samples = hm.make_samples(4, LENGTHS)
    micro_batch = collate_samples(samples)
    plain = logits(learner, micro_batch)
    nothing = collate_samples([replace_columns(s, routing_recorded=np.zeros(len(s.table), bool)) for s in samples])
    with learner.replay.bind_routes(nothing):
        assert torch.equal(logits(learner, nothing), plain)
    assert learner.replay.pop_counts().compared_tokens.tolist() == [0] * hm.LAYERS
    without = collate_samples(
        [Sample(s.sample_id, s.table.without_columns("routed_experts", "routing_recorded")) for s in samples]
    )
    with learner.replay.bind_routes(without):
        assert torch.equal(logits(learner, without), plain)

    # A record from position 4 on changes nothing before it, and something behind it.
    late = [replace_columns(s, routing_recorded=np.arange(len(s.table)) >= 4) for s in samples]
    with learner.replay.bind_routes(collate_samples(late)):
        mixed = logits(learner, collate_samples(late))
    early = micro_batch.positions < 4
    assert torch.equal(mixed[early], plain[early])
    assert not torch.equal(mixed[~early], plain[~early])


def test_agreement_is_measured_with_replay_on_and_off(model_path):
    samples = fully_recorded(hm.make_samples(5, [12, 30]))
    for mode in ("rollout", "off"):
        learner = MegatronLearner.from_pretrained(settings(routing__replay=mode), model_path)
        routes = own_routes(learner, collate_samples(samples))
        routes[:21, 0] = routes[:21, 0] + 1 & 7  # half of the 42 rows of one of three layers: some other set
        same = (np.sort(routes, -1) == np.sort(own_routes(learner, collate_samples(samples)), -1)).all(-1)[:, 0].sum()
        metrics = train_minibatch(learner, [collate_samples(with_routes(samples, routes))]).metrics
        if mode == "off":
            assert metrics["routing/agreement"] == pytest.approx((42 * 2 + same) / 126)
        else:  # replaying other experts in the first layer changes what the later ones see
            assert metrics["routing/agreement"] <= (42 * 2 + same) / 126
        assert metrics["routing/recorded_fraction"] == 1.0


def test_nothing_is_left_behind_after_an_exception(learner):
    micro_batch = collate_samples(hm.make_samples(6, LENGTHS))
    plain = logits(learner, micro_batch)
    last = learner.model.decoder.layers[-1]
    calls = iter([None, RuntimeError("broken expert")])  # the second micro-batch's forward

    def break_once(*args) -> None:
        if error := next(calls):
            raise error

    handle = last.mlp.experts.register_forward_pre_hook(break_once)
    before = learner.export_weights()
    with pytest.raises(RuntimeError, match="broken expert"):
        train_minibatch(learner, [collate_samples(hm.make_samples(7, [8])), micro_batch])
    handle.remove()
    assert_nothing_is_bound(learner)
    assert all(p.grad is None for p in learner.model.parameters())
    assert torch.equal(logits(learner, micro_batch), plain)
    assert all(torch.equal(before[n], t) for n, t in learner.export_weights().items())
    assert learner.update_count == 0


def test_replay_can_not_outlive_or_overlap_its_micro_batch(learner):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    samples = hm.make_samples(8, LENGTHS)
    micro_batch = collate_samples(samples)
    plain = logits(learner, micro_batch)
    with learner.replay.bind_routes(micro_batch):
        assert not torch.equal(logits(learner, micro_batch), plain)
        with pytest.raises(RoutingError, match="still bound"), learner.replay.bind_routes(micro_batch):
            pass
        assert not torch.equal(logits(learner, micro_batch), plain)
    assert torch.equal(logits(learner, micro_batch), plain)
    assert RouterReplay.global_router_replay_instances == []  # nothing that Megatron's class-wide calls could reach


@pytest.mark.parametrize("other", [[30], [5, 5]])
def test_more_or_fewer_rows_than_tokens_raise(learner, other):
    bound, fed = collate_samples(hm.make_samples(9, [20])), collate_samples(hm.make_samples(9, other))
    with pytest.raises(RoutingError, match=rf"routes of 20 tokens are bound, but {sum(other)} tokens are fed forward"):
        with learner.replay.bind_routes(bound):
            logits(learner, fed)
    assert_nothing_is_bound(learner)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[:, :2], "expected .n, 3, 2"),
        (lambda rows: np.where(rows == rows[2, 1, 0], np.uint8(8), rows), "expert id 8"),
        (lambda rows: np.repeat(rows[..., :1], 2, axis=-1), "twice"),
    ],
    ids=["layers", "range", "duplicate"],
)
def test_invalid_records_are_refused_before_the_forward(learner, spoil, message):
    (sample,) = hm.make_samples(10, [12])
    rows = spoil(sample.table["routed_experts"].copy())
    bad = collate_samples([replace_columns(sample, routed_experts=rows)])
    with pytest.raises(RoutingError, match=message), learner.replay.bind_routes(bad):
        pytest.fail("entered")
