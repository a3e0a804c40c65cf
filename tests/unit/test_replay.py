"""Routing replay in learners of both backends: what it changes, every way it could go stale, and however routes travelled."""

import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from r3async.data import packed_routes
from r3async.data.model_shape import RoutingShape
from r3async.data.packed_routes import PackedRoutes
from r3async.data.routes import RoutingError, route_dtype
from r3async.data.tokens import Sample, Trajectory
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.learner import LearnerError
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.micro_batches import collate_samples, pack_samples
from r3async.learner.replay import RoutingReplay
from r3async.learner.torch.backend import TorchLearner
from tests.helpers import learner as megatron
from tests.helpers import models
from tests.helpers import models as hm
from tests.helpers import torch as plain
from tests.helpers.learner import LENGTHS, fully_recorded, replace_columns, with_routes
from tests.helpers.steps import train_minibatch


class Trained(NamedTuple):
    """A model, and how a backend trains it."""

    path: Path
    layers: int
    vocab: int
    helper: Any
    backend: Any

    def load(self, **changes: Any) -> Any:
        return self.backend.from_pretrained(self.helper.settings(**changes), self.path)

    def samples(self, seed: int = 3, lengths: list[int] = LENGTHS) -> list[Sample]:
        return fully_recorded(hm.make_samples(seed, lengths, layers=self.layers, vocab=self.vocab))

    def logits(self, learner: Any, samples: list[Sample], **options: Any) -> torch.Tensor:
        """Return logits of the samples, with their routes bound."""
        with learner.replay.bind_routes(collate_samples(samples), **options):
            return self.helper.logits(learner, collate_samples(samples))

    def plain_logits(self, learner: Any, samples: list[Sample]) -> torch.Tensor:
        return self.helper.logits(learner, collate_samples(samples))


@pytest.fixture(scope="module", params=["megatron", "qwen3", "mixtral", "olmoe"])
def trained(request, tmp_path_factory) -> Trained:
    """The last three are of the torch backend."""
    path = tmp_path_factory.mktemp("model") / "m"
    if request.param == "megatron":
        return Trained(hm.make_hf_model(path), hm.LAYERS, hm.VOCAB, megatron, MegatronLearner)
    layers = plain.moe_layers(request.param)
    return Trained(plain.make_model(path, request.param), layers, plain.VOCAB, plain, TorchLearner)


@pytest.fixture
def learner(trained):
    return trained.load()


def assert_nothing_is_bound(learner) -> None:
    assert learner.replay.current_routes is None
    with learner.replay.bind_pipelined():  # refused while anything is bound
        pass


def own_routes(learner, samples: list[Sample]) -> np.ndarray:
    (recorded,) = learner.record_learner_routes([collate_samples(samples)])
    return recorded.table["routed_experts"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_replaying_own_routes_changes_no_bit(trained, dtype):
    learner, samples = trained.load(learner__dtype=dtype), trained.samples()
    unbound, routes = trained.plain_logits(learner, samples), own_routes(learner, samples)
    assert routes.dtype == np.uint8
    tokens = sum(LENGTHS)
    replayed = with_routes(samples, routes[:, :, ::-1])  # the order of a row's columns says nothing
    assert torch.equal(trained.logits(learner, replayed), unbound)
    counts = learner.replay.pop_counts()
    assert counts.agreeing_tokens.tolist() == counts.compared_tokens.tolist() == [tokens] * trained.layers
    every_other = [replace_columns(s, routing_recorded=np.arange(len(s.table)) % 2 == 0) for s in replayed]
    assert torch.equal(trained.logits(learner, every_other), unbound)
    counts = learner.replay.pop_counts()
    assert counts.agreeing_tokens.tolist() == counts.compared_tokens.tolist()
    assert max(counts.compared_tokens.tolist()) < tokens
    assert not torch.equal(trained.logits(learner, samples), unbound)


@torch.no_grad()
def test_unrecorded_rows_route_by_themselves(trained, learner):
    """A record of zeros, or of any ids, where nothing was recorded, changes nothing: they are not trained as expert 0."""
    samples = trained.samples()
    unbound = trained.plain_logits(learner, samples)
    nothing = [replace_columns(s, routing_recorded=np.zeros(len(s.table), bool)) for s in samples]
    for bare in (
        nothing,
        [replace_columns(s, routed_experts=np.zeros_like(s.table["routed_experts"])) for s in nothing],
        [Sample(s.sample_id, s.table.without_columns("routed_experts", "routing_recorded")) for s in samples],
    ):
        assert torch.equal(trained.logits(learner, bare), unbound)
        assert learner.replay.pop_counts().compared_tokens.tolist() == [0] * trained.layers

    # A record from position 4 on changes nothing before it, and something behind it.
    late = [replace_columns(s, routing_recorded=np.arange(len(s.table)) >= 4) for s in samples]
    with learner.replay.bind_routes(collate_samples(late), keep=True) as routes:
        mixed = trained.plain_logits(learner, late)
        trace = routes.build_trace()
    early = collate_samples(samples).positions < 4
    torch.testing.assert_close(mixed[early], unbound[early], rtol=1e-5, atol=1e-5)
    assert (mixed[~early] - unbound[~early]).abs().max() > 1e-2
    used, own, wanted = (
        np.sort(rows, -1) for rows in (trace.used, trace.own, collate_samples(late).table["routed_experts"])
    )
    assert np.array_equal(used[early], own[early])
    assert np.array_equal(used[~early], wanted[~early])
    # What is used of unrecorded rows, recorded as such, changes no bit, and neither do other ids in their place.
    assert torch.equal(trained.logits(learner, with_routes(late, trace.used)), mixed)
    for fill in (0, 7):
        rows = [np.where(s.table["routing_recorded"][:, None, None], s.table["routed_experts"], fill) for s in late]
        filled = [replace_columns(s, routed_experts=r.astype(np.uint8)) for s, r in zip(late, rows, strict=True)]
        assert torch.equal(trained.logits(learner, filled), mixed)


@pytest.mark.parametrize("mode", ["rollout", "off"])
def test_agreement_is_measured_with_replay_on_and_off(trained, mode):
    samples, learner = trained.samples(5, [12, 30]), trained.load(routing__replay=mode)
    own = own_routes(learner, samples)
    routes = own.copy()
    routes[:21, 0] = routes[:21, 0] + 1 & 7  # half of the 42 rows of one layer: some other set
    same = (np.sort(routes, -1) == np.sort(own, -1)).all(-1)[:, 0].sum()
    metrics = train_minibatch(learner, [collate_samples(with_routes(samples, routes))]).metrics
    share = (42 * (trained.layers - 1) + same) / (42 * trained.layers)
    if mode == "off":
        assert metrics["routing/agreement"] == pytest.approx(share)
    else:  # replaying other experts in the first layer changes what the later ones see
        assert metrics["routing/agreement"] <= share
    assert metrics["routing/recorded_fraction"] == 1.0


def test_nothing_is_left_behind_after_an_exception(trained):
    learner, samples = trained.load(learner__recompute="full"), trained.samples(6)
    unbound = learner.logprobs([collate_samples(samples)])[0]
    # The first micro-batch's forward pass and its recomputation, and the second one's forward pass.
    calls = iter([None, None, RuntimeError("broken expert")])

    def break_once(*_: Any) -> None:
        if error := next(calls):
            raise error

    layers = learner.model.decoder.layers if trained.backend is MegatronLearner else learner.model.layers
    handle = layers[-1].mlp.experts.register_forward_pre_hook(break_once)
    before = learner.export_weights()
    with pytest.raises(RuntimeError, match="broken expert"):
        train_minibatch(learner, pack_samples(samples, plain.BUDGET))
    handle.remove()
    assert_nothing_is_bound(learner)
    assert all(p.grad is None for p in learner.model.parameters())
    assert all(torch.equal(before[n], t) for n, t in learner.export_weights().items())
    assert np.array_equal(learner.logprobs([collate_samples(samples)])[0], unbound)
    assert learner.update_count == 0
    assert train_minibatch(learner, pack_samples(samples, plain.BUDGET)).metrics["optimizer/skipped"] == 0


def test_replay_can_not_outlive_or_overlap_its_micro_batch(trained, learner):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    samples = trained.samples(8)
    unbound = trained.plain_logits(learner, samples)
    with learner.replay.bind_routes(collate_samples(samples)):
        assert not torch.equal(trained.plain_logits(learner, samples), unbound)
        with pytest.raises(RoutingError, match="still bound"), learner.replay.bind_routes(collate_samples(samples)):
            pass
        assert not torch.equal(trained.plain_logits(learner, samples), unbound)
    assert torch.equal(trained.plain_logits(learner, samples), unbound)
    assert RouterReplay.global_router_replay_instances == []  # nothing that Megatron's class-wide calls could reach


@pytest.mark.parametrize("other", [[30], [5, 5]])
def test_more_or_fewer_rows_than_tokens_raise(trained, learner, other):
    bound, fed = (trained.samples(9, lengths) for lengths in ([20], other))
    said = rf"routes of 20 tokens .*(but {sum(other)} tokens are fed forward|the router chose \({sum(other)}, 2\))"
    with pytest.raises(RoutingError, match=said):
        with learner.replay.bind_routes(collate_samples(bound)):
            trained.plain_logits(learner, fed)
    assert_nothing_is_bound(learner)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[:, :1], r"expected .n, \d, 2"),
        (lambda rows: np.where(rows == rows[2, 1, 0], np.uint8(8), rows), "expert id 8"),
        (lambda rows: np.repeat(rows[..., :1], 2, axis=-1), "twice"),
    ],
    ids=["layers", "range", "duplicate"],
)
def test_invalid_records_are_refused_before_the_forward(trained, learner, spoil, message):
    (sample,) = trained.samples(10, [12])
    bad = collate_samples([replace_columns(sample, routed_experts=spoil(sample.table["routed_experts"].copy()))])
    with pytest.raises(RoutingError, match=message), learner.replay.bind_routes(bad):
        pytest.fail("entered")


def test_too_few_recorded_routes_stop_the_step_before_any_forward(trained):
    learner = trained.load(routing__min_recorded_fraction=0.9)
    learner.model.register_forward_pre_hook(lambda *a: pytest.fail("forward"))
    samples = [replace_columns(s, routing_recorded=np.arange(12) < 5) for s in trained.samples(14, [12, 12])]
    with pytest.raises(
        LearnerError, match=r"only 0\.333 of the trained tokens .* routing\.min_recorded_fraction is 0\.9"
    ):
        train_minibatch(learner, pack_samples(samples, 64))
    off = trained.load(routing__min_recorded_fraction=0.9, routing__replay="off")
    assert train_minibatch(off, pack_samples(samples, 64)).metrics["routing/recorded_fraction"] == pytest.approx(1 / 3)


def test_recorded_fraction_is_that_of_the_inputs(trained):
    """Tokens 3 to 11 are trained, so rows 2 to 10 must be recorded; row 11 is never used."""
    learner, (sample,) = trained.load(routing__min_recorded_fraction=1.0), trained.samples(15, [12])
    samples = [replace_columns(sample, routing_recorded=np.arange(12) < 11)]
    assert train_minibatch(learner, pack_samples(samples, 64)).metrics["routing/recorded_fraction"] == 1.0


def test_training_raises_the_probability_of_what_was_good(trained):
    """Also from a thread that is not the main one, where grad mode and such have their own state."""
    (sample,) = trained.samples(19, [20])
    ids, gains = sample.table["token_ids"], []

    def train() -> None:
        learner = trained.load(routing__replay="off", learner__recompute="selective")
        before = learner.score_sequence(ids)[2:].mean()
        for _ in range(5):
            mu = np.concatenate([[0.0], learner.score_sequence(ids)]).astype(np.float32)
            good = replace_columns(sample, rollout_logprobs=mu, advantages=np.ones(20, np.float32))
            metrics = train_minibatch(learner, [collate_samples([good])]).metrics
            assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)
        gains.append(learner.score_sequence(ids)[2:].mean() - before)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert gains[0] > 0.5


FORMS = ("plain", "bits")
TOP_K = 4
"""The sum of two is the same in either order."""


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(packed_routes, "MIN_PACKED_BYTES", 1)


def sent(samples: list[Sample], form: packed_routes.RouteForm) -> list[Sample]:
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


def test_a_recomputed_pass_replays_what_the_forward_pass_did():
    """Also for a token without a record, whose router may find other scores when it computes them again."""
    replay = RoutingReplay(
        RoutingShape(hm.LAYERS, hm.TOP_K, hm.EXPERTS),
        range(hm.LAYERS),
        is_enabled=True,
        device=torch.device("cpu"),
        is_recomputed=True,
    )
    (sample,) = hm.make_samples(5, [9])  # its last token has no record
    first, again = (
        torch.from_numpy(hm.random_routes(np.random.default_rng(s), 9)[:, 1].astype(np.int64)) for s in (1, 2)
    )
    with replay.bind_routes(collate_samples([sample])) as routes:
        used = routes.choose_experts(1, first)
        assert torch.equal(used[-1], first[-1])
        routes.is_recomputing = True
        assert torch.equal(routes.choose_experts(1, again), used)
    load = replay.counts.expert_load
    assert load[1].tolist() == used.flatten().bincount(minlength=hm.EXPERTS).tolist()
    assert not load[[0, 2]].any()


@pytest.mark.parametrize("experts", [129, 257, 2**15 + 2])
def test_the_last_experts_of_any_number_are_replayed_and_recomputed(experts):
    replay = RoutingReplay(
        RoutingShape(1, 2, experts),
        [0],
        is_enabled=True,
        device=torch.device("cpu"),
        is_recomputed=True,
    )
    last = np.arange(experts - 6, experts).reshape(3, 1, 2)
    table = hm.make_samples(5, [3], routes=False)[0].table.with_columns(
        routed_experts=last.astype(route_dtype(experts)), routing_recorded=np.ones(3, bool)
    )
    preferred = torch.tensor([[0, 1], [1, 2], [2, 0]])
    with replay.bind_routes(collate_samples([Sample("s", table)])) as routes:
        used = routes.choose_experts(0, preferred)
        assert used.tolist() == last[:, 0].tolist()
        routes.is_recomputing = True
        assert torch.equal(routes.choose_experts(0, preferred), used)
    assert replay.counts.expert_load[0].nonzero()[:, 0].tolist() == last.reshape(-1).tolist()
