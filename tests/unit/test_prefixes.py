"""What samples share: every sample comes back from the packed rows, and training is that of samples that share nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.config import Config
from r3async.data.packed_routes import pack_routes
from r3async.data.tokens import Sample, TokenTable
from r3async.learner import LearnerError, build_learner
from r3async.learner.backend import LearnerBackend
from r3async.learner.micro_batch_plan import CostModel
from r3async.learner.micro_batches import MicroBatch, pack_for_ranks, pack_samples, pad_to_multiple
from r3async.learner.shared_prefixes import find_prefix_overlap
from r3async.record.merged_traces import merge_traces
from tests.helpers import models as hm
from tests.helpers import torch as ht
from tests.helpers.learner import replace_columns
from tests.helpers.learner import settings as learner_settings
from tests.helpers.parity import gradients_of_rank
from tests.helpers.steps import train_minibatch

LAYERS, TOP_K = 2, 3


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """Short samples of few tokens and few routes, so that many begin alike; some have the same routes in another order."""
    samples = []
    for number in range(draw(st.integers(1, 12))):
        ids = draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
        length, seed = len(ids), draw(st.integers(0, 2**16))
        rng = np.random.default_rng(seed)
        mask = np.arange(length) >= draw(st.integers(1, 10))
        odd = draw(st.integers(0, 14))
        routes = np.stack([rng.permutation([0, 1, 2 + (t == odd)]) for t in np.repeat(range(length), LAYERS)])
        columns = {
            "loss_mask": mask,
            "rewards": rng.normal(size=length).astype(np.float32),
            "routed_experts": routes.reshape(length, LAYERS, TOP_K).astype(np.uint8),
            "routing_recorded": np.arange(length) != draw(st.integers(0, 14)),
            "episode": np.full(length, draw(st.integers(0, 3)), np.int32),
        }
        table = TokenTable.from_tokens(np.asarray(ids)).with_columns(**columns)
        samples.append(Sample(f"s{number}", table, 0.5 + number))
    return samples


def seen(table: TokenTable) -> list[tuple]:
    """What reaches the model, row by row."""
    rows = []
    for token, recorded, routes in zip(
        table["token_ids"], table["routing_recorded"], np.sort(table["routed_experts"], -1), strict=True
    ):
        rows.append((int(token), bool(recorded), routes.tolist() if recorded else None))
    return rows


def check(m: MicroBatch, samples: dict[str, Sample]) -> None:
    """Against every sample, token by token."""
    packed = seen(m.table)
    whole, edges = m.expanded_samples
    counts = np.zeros(m.num_tokens, int)
    shared = np.zeros(len(m.segment_lengths), int) if m.prefixes is None else m.prefixes[:, 1]
    for s, name in enumerate(m.sample_ids):
        table, rows = samples[name].table, whole[edges[s] : edges[s + 1]]
        assert [packed[r] for r in rows] == seen(table)
        assert m.positions[rows].tolist() == list(range(len(table)))
        counts[rows] += 1
        own = slice(int(m.cu_seqlens[s]), int(m.cu_seqlens[s + 1]))
        assert rows[shared[s] :].tolist() == list(range(own.start, own.stop))
        assert own.stop > own.start
        assert m.table.slice_rows(own.start, own.stop) == table.slice_rows(int(shared[s]), len(table))
        assert not table["loss_mask"][: shared[s]].any()
        assert (m.token_temperatures[own] == np.float32(samples[name].temperature)).all()
        assert m.previous_rows(rows[max(1, shared[s]) :]).tolist() == rows[max(1, shared[s]) - 1 : -1].tolist()
        assert (own.start in m.first_rows) == (shared[s] == 0)
    if m.row_multiplicity is None:
        assert m.prefixes is None
        counts = np.minimum(counts, 1)
    else:
        assert m.row_multiplicity[: m.num_real_tokens].tolist() == counts[: m.num_real_tokens].tolist()
    assert m.num_real_tokens + m.num_shared_tokens == sum(len(samples[n].table) for n in m.sample_ids)


@settings(max_examples=60)
@given(batches(), st.integers(10, 60), st.integers(1, 4), st.booleans(), st.booleans())
def test_every_sample_comes_back_from_the_packed_rows(samples, cap, ranks, whole_episodes, long):
    cost = CostModel(1.0, 0.5) if long else CostModel()
    by_id = {s.sample_id: s for s in samples}
    options = {"ranks": ranks, "cost": cost, "whole_episodes": whole_episodes}
    divided = pack_for_ranks(samples, cap, **options, share_prefixes=True)
    assert len({len(mine) for mine in divided}) == 1
    names = []
    for m in (m for mine in divided for m in mine):
        assert m.num_tokens <= cap
        check(pad_to_multiple(m, 4), by_id)
        check(m, by_id)
        names += m.sample_ids
    assert sorted(names) == sorted(by_id)
    if whole_episodes:
        where = {n: (r, j) for r, mine in enumerate(divided) for j, m in enumerate(mine) for n in m.sample_ids}
        for episode in range(4):
            of = [s for s in samples if s.table["episode"][0] == episode]
            if sum(len(s.table) for s in of) <= cap:
                assert len({where[s.sample_id] for s in of}) <= 1


@settings(max_examples=100)
@given(batches())
def test_no_more_could_be_shared_with_any_sample_than_is(samples):
    """In one micro-batch, by the definition: of all samples that come before, the most rows that are alike."""
    plain = [Sample(s.sample_id, s.table.without_columns("routed_experts", "routing_recorded")) for s in samples]
    likeness = find_prefix_overlap(plain)
    everything = sorted(range(len(samples)), key=lambda i: plain[i].table["token_ids"].tobytes())
    order, best = everything, [0] * len(samples)
    if likeness is not None:
        order, best = likeness.sort_members(range(len(samples)))
    for place, index in enumerate(order):
        mask = samples[index].table["loss_mask"]
        limit = min(int(mask.argmax()) if mask.any() else len(mask), len(mask) - 1)
        mine, most = samples[index].table["token_ids"], 0
        for earlier in order[:place]:
            other = samples[earlier].table["token_ids"]
            n = min(limit, len(other))
            differs = np.flatnonzero(mine[:n] != other[:n])
            most = max(most, int(differs[0]) if len(differs) else n)
        assert best[place] == most


def test_samples_that_share_nothing_are_packed_as_without():
    samples = hm.make_samples(0, [9, 40, 5, 17, 33])
    for one, other in zip(pack_samples(samples, 48, share_prefixes=True), pack_samples(samples, 48), strict=True):
        assert one.prefixes is None
        assert one.sample_ids == other.sample_ids
        assert one.table == other.table


def test_routes_that_travel_packed_are_compared_as_sets():
    rng = np.random.default_rng(0)
    prompt = hm.make_sample(rng, 3000, prompt=3000, layers=4)
    samples = []
    for number in range(3):
        s = hm.continued(prompt, f"s{number}", 5, rng, at=2999)
        routes = s.table["routed_experts"][..., ::-1] if number == 1 else s.table["routed_experts"].copy()
        if number == 2:
            routes[2000, 1] = (routes[2000, 1] + 1) % hm.EXPERTS
        samples.append(Sample(s.sample_id, s.table.with_columns(routed_experts=pack_routes(routes, "bits"))))
    (m,) = pack_samples(samples, 16384, share_prefixes=True)
    assert sorted(m.prefixes[:, 1].tolist()) == sorted([0, 2999, 2000]) or m.prefixes[:, 1].tolist() == [0, 2000, 2000]
    check(m, {s.sample_id: s for s in samples})


def group(size: int, prompt: int, answer: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    start = hm.make_sample(rng, prompt, prompt=prompt, name=f"p{seed}", layers=1)
    start = Sample(start.sample_id, start.table.with_columns(routing_recorded=np.ones(prompt, bool)))
    return [hm.continued(start, f"g{seed}e{e}", answer, rng) for e in range(size)]


def test_a_family_that_does_not_fit_has_its_prefix_in_each_part():
    batches = pack_samples(group(8, 30, 10), 64, share_prefixes=True)
    assert sorted(len(m.sample_ids) for m in batches) == [2, 3, 3]
    assert all(m.num_tokens == 30 + 10 * len(m.sample_ids) for m in batches)


def test_a_family_is_divided_where_ranks_would_wait_for_it():
    one = pack_for_ranks(group(8, 10, 40), 4096, ranks=4, share_prefixes=True)
    assert [[len(m.sample_ids) for m in mine] for mine in one] == [[2]] * 4
    several = [s for seed in range(8) for s in group(8, 10, 40, seed)]
    for mine in pack_for_ranks(several, 4096, ranks=4, share_prefixes=True):
        assert sum(m.num_shared_tokens for m in mine) == 2 * 7 * 10


def test_the_keys_that_exist_at_once_are_bounded():
    """A long prompt and many short answers: few rows, but each answer attends to a copy of the prompt's keys."""
    batches = pack_samples(group(64, 100, 1), 128, share_prefixes=True)
    for m in batches:
        assert m.num_tokens + m.num_shared_tokens <= 8 * 128
    assert len(batches) == 7


BUDGETS = [80, 4096]
ANOTHER = {"batch/micro_batches", "batch/shared_tokens", "batch/fill"}
"""Metrics of how the batch was packed."""


def config(backend: str = "megatron", replay: str = "rollout", recompute: str = "none") -> Config:
    return learner_settings(
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
