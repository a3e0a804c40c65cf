"""Which samples make up which micro-batch, what plans cost, and what the packed rows are."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from dev.bench.packing import (
    LENGTH_CAPS,
    divide_then_pack,
    draw_lengths,
    fewest_bins,
    pack_then_deal,
    plan_efficiency,
    read_model_shape,
)
from r3async.data.tokens import Sample
from r3async.learner.micro_batch_plan import (
    CostModel,
    PackingError,
    build_cost_model,
    find_round_levels,
    plan_micro_batches,
)
from r3async.learner.micro_batches import collate_samples, make_padding_batch, pack_for_ranks, pack_samples
from tests.helpers.wire import make_table
from tests.unit.test_records import EXTRA

COSTS = [CostModel(), CostModel(1, 0.01), CostModel(1e-3, 5)]
costs = st.sampled_from(COSTS)
some_lengths = st.lists(st.integers(0, 100), max_size=60) | st.lists(st.sampled_from([3, 7, 50, 51, 99]), max_size=40)


def costs_of(planned, lengths, cost):
    """float `[ranks, micro-batches]`."""
    each = cost.estimate_costs(np.asarray(lengths))
    return np.asarray([[each[m].sum() for m in mine] for mine in planned])


@example([], 100, 3, COSTS[0])
@example([0, 0], 100, 3, COSTS[1])
@example([100], 100, 64, COSTS[1])
@example([100] * 7, 100, 3, COSTS[1])
@given(some_lengths, st.integers(100, 300), st.integers(1, 9), costs)
def test_every_sample_once_no_cap_exceeded_equal_counts_and_always_the_same(lengths, cap, ranks, cost):
    planned = plan_micro_batches(lengths, max_tokens=cap, ranks=ranks, cost=cost)
    assert sorted(i for mine in planned for m in mine for i in m) == list(range(len(lengths)))
    assert all(m == sorted(m) and sum(lengths[i] for i in m) <= cap for mine in planned for m in mine)
    assert len(planned) == ranks
    assert len({len(mine) for mine in planned}) == 1
    assert all(any(round_) for round_ in zip(*planned, strict=True))  # no round in which all ranks have padding
    costliest = costs_of(planned, lengths, cost).max(0, initial=0)
    assert (np.diff(costliest) <= 1e-9 * costliest[:1].sum()).all()  # first, so that memory is known to suffice
    assert planned == plan_micro_batches(lengths, max_tokens=cap, ranks=ranks, cost=cost)


@given(some_lengths, st.integers(1, 9), costs, st.randoms())
def test_the_order_of_samples_is_of_no_account(lengths, ranks, cost, chance):
    shuffled = lengths.copy()
    chance.shuffle(shuffled)
    one, other = (
        [
            [sorted(given[i] for i in m) for m in mine]
            for mine in plan_micro_batches(given, max_tokens=128, ranks=ranks, cost=cost)
        ]
        for given in (lengths, shuffled)
    )
    assert one == other


def every_plan(n, slots):
    return itertools.product(range(slots), repeat=n)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), costs, st.sampled_from([(2, 1), (2, 2), (3, 1)]))
def test_bounds_hold_for_every_plan_there_is(lengths, cost, shape):
    """By enumeration of all ways to put up to six samples in up to four micro-batches."""
    ranks, count = shape
    each, best, fewest = cost.estimate_costs(np.asarray(lengths)), np.inf, len(lengths)
    for places in every_plan(len(lengths), ranks * count):
        at = np.asarray(places)
        if np.bincount(at, lengths, ranks * count).max() > 128:
            continue
        fewest = min(fewest, len(set(places)))
        best = min(best, np.bincount(at, each, ranks * count).reshape(count, ranks).max(1).sum())
    assume(best < np.inf)
    bound = find_round_levels(
        np.asarray(lengths), max_tokens=128, ranks=ranks, count=count, cost=cost, total_cost=each.sum()
    ).sum()
    assert bound <= best * (1 + 1e-9)
    assert fewest_bins(np.asarray(lengths, np.int64), 128) <= fewest
    planned = plan_micro_batches(lengths, max_tokens=128, ranks=ranks, cost=cost)
    if len(planned[0]) == count:
        assert costs_of(planned, lengths, cost).max(0).sum() <= best * 4 / 3 * (1 + 1e-9)


def test_a_level_is_raised_where_most_micro_batches_can_follow():
    """Two rounds of two. Cost is length, the cap 10; 9 and 6 are alone, so the first round's level is at least 9."""
    lengths = np.asarray([9, 6, 2, 2, 2, 2])
    given = {"max_tokens": 10, "ranks": 2, "count": 2, "cost": CostModel()}
    assert find_round_levels(lengths, **given, total_cost=18.0).tolist() == [9, 0]
    assert find_round_levels(lengths, **given, total_cost=23.0).sum() == pytest.approx(9 + 5 / 2)
    assert find_round_levels(lengths, **given, total_cost=99.0).tolist() == [10, 10]


def test_levels_of_one_round_by_hand():
    """Cost n + n², cap 10, two ranks: beside 9 (cost 90) the other is a full one of ones, of cost 20 at most."""
    given = {"max_tokens": 10, "ranks": 2, "count": 1, "cost": CostModel(1, 1)}
    assert find_round_levels(np.asarray([9, 1]), **given, total_cost=110.0).tolist() == [90]
    # Of one more, one of the two can follow.
    assert find_round_levels(np.asarray([9, 1]), **given, total_cost=111.0).tolist() == [91]
    # The costliest sample is somewhere.
    assert find_round_levels(np.asarray([4, 1]), **given, total_cost=22.0).tolist() == [20]


def test_totals_of_ranks_are_near_too():
    """Rounds (10, 9) and (8, 6): no rank is given both of the larger ones."""
    planned = plan_micro_batches([10, 9, 8, 6], max_tokens=10, ranks=2)
    assert sorted(costs_of(planned, [10, 9, 8, 6], CostModel()).sum(1)) == [16, 17]


def test_alike_samples_share_a_round():
    """Four long and twelve short ones on two ranks: long ones wait for long ones only."""
    lengths = [90, 10, 90, 10] * 2 + [10] * 8
    planned = plan_micro_batches(lengths, max_tokens=100, ranks=2, cost=CostModel(1, 1))
    found = costs_of(planned, lengths, CostModel(1, 1))
    assert found[0] == pytest.approx(found[1])
    assert found.shape == (2, 3)
    assert (np.diff(found[0]) <= 0).all()  # costliest first


def test_fewer_samples_than_ranks():
    assert sorted(plan_micro_batches([5, 9, 7], max_tokens=10, ranks=5)) == [[[]], [[]], [[0]], [[1]], [[2]]]


def test_one_giant_sample_is_alone_where_the_cost_is_quadratic():
    lengths = [10] * 40 + [1000]
    planned = plan_micro_batches(lengths, max_tokens=1000, ranks=4, cost=CostModel(1, 1))
    assert [len(mine) for mine in planned] == [1] * 4
    found = costs_of(planned, lengths, CostModel(1, 1))
    assert found.max() == CostModel(1, 1).estimate_costs(np.asarray(1000.0))
    assert sorted(found[:, 0])[:3] == [13 * 110, 13 * 110, 14 * 110]


@pytest.mark.parametrize(("samples", "seed", "fewest"), [(256, 0, 42), (1024, 2, 194)])
def test_gaps_are_filled_exactly_where_that_spares_a_micro_batch(samples, seed, fewest):
    """First-fit decreasing alone needs one more here."""
    lengths = draw_lengths("bimodal", samples, seed)
    assert len(plan_micro_batches(lengths.tolist(), max_tokens=32768)[0]) == fewest_bins(lengths, 32768) == fewest


@pytest.mark.parametrize("kind", ["lognormal", "bimodal", "pareto", "groups"])
def test_plans_of_the_benchmark_are_near_the_bounds(kind):
    cost, cap = build_cost_model(read_model_shape("Qwen3-30B-A3B")), 65536 if kind == "pareto" else 32768
    for n, ranks in [(256, 8), (1024, 8), (1024, 64)]:
        lengths = draw_lengths(kind, n, seed=0)
        each = cost.estimate_costs(lengths)
        found = costs_of(plan_micro_batches(lengths.tolist(), max_tokens=cap, ranks=ranks, cost=cost), lengths, cost)
        assert found.shape[1] == -(-fewest_bins(lengths, cap) // ranks)
        bound = find_round_levels(
            lengths, max_tokens=cap, ranks=ranks, count=found.shape[1], cost=cost, total_cost=each.sum()
        ).sum()
        assert found.max(0).sum() <= 1.08 * bound


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_sample_longer_than_the_cap_is_refused_with_the_setting(ranks):
    with pytest.raises(PackingError, match=r"sample 1 has 9 tokens.*learner\.max_tokens_per_micro_batch = 8"):
        plan_micro_batches([3, 9, 8], max_tokens=8, ranks=ranks)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="`ranks` must be 1 or more"):
        plan_micro_batches([1], max_tokens=8, ranks=0)
    with pytest.raises(ValueError, match="`linear`"):
        CostModel(0, 1)
    with pytest.raises(ValueError, match="`linear`"):
        CostModel(1, -1)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("kind", LENGTH_CAPS)
def test_no_plan_is_below_a_simpler_way(kind, ranks):
    """Of batches that the planner was not tuned on."""
    cost, cap = build_cost_model(read_model_shape("Qwen3-30B-A3B")), LENGTH_CAPS[kind]
    for n, seed in itertools.product([50, 200, 800], range(100, 103)):
        lengths = draw_lengths(kind, n, seed)
        each = cost.estimate_costs(lengths)
        found = plan_efficiency(plan_micro_batches(lengths.tolist(), max_tokens=cap, ranks=ranks, cost=cost), each)
        for simpler in (divide_then_pack, pack_then_deal):
            assert found >= plan_efficiency(simpler(lengths, cap, ranks, cost), each) * (1 - 1e-9)


def make_samples(lengths):
    return [Sample(f"s{i}", make_table(i, n, schema=EXTRA), 0.5 + i) for i, n in enumerate(lengths)]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(9, 30), st.integers(1, 5))
def test_packed_rows_are_the_samples_rows_with_positions_from_zero(lengths, cap, ranks):
    samples = make_samples(lengths)
    by_id = {s.sample_id: s for s in samples}
    divided = pack_for_ranks(samples, cap, ranks=ranks)
    assert len(divided) == ranks
    assert len({len(mine) for mine in divided}) == 1
    seen = []
    for batch in (m for mine in divided for m in mine):
        for s, name in enumerate(batch.sample_ids):
            start, stop = batch.cu_seqlens[s : s + 2]
            assert batch.table.slice_rows(start, stop) == by_id[name].table
            assert batch.positions[start:stop].tolist() == list(range(stop - start))
            assert np.allclose(batch.token_temperatures[start:stop], by_id[name].temperature)
            seen.append(name)
        assert batch.num_tokens <= cap
        assert batch.num_tokens == (batch.num_real_tokens or 1)
    assert sorted(seen) == sorted(by_id)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_runs_out_is_given_one_row_that_nothing_counts(ranks):
    divided = pack_for_ranks(make_samples([9]), 4096, ranks=ranks)
    assert [len(mine) for mine in divided] == [1] * ranks
    real, *padding = sorted((m for (m,) in divided), key=lambda m: -m.num_tokens)
    assert real.num_real_tokens == real.num_tokens == 9
    for m in padding:
        assert (m.num_tokens, m.num_real_tokens, m.sample_ids) == (1, 0, ())
        assert list(m.table) == list(real.table)
        assert m.cu_seqlens.tolist() == [0, 1]
        assert m.temperatures.tolist() == [1.0]
        assert not m.support.recorded_mask.any()
        for name, values in m.table.without_columns("support").items():
            fill = EXTRA.columns[name].fill
            assert (values == (np.arange(values.shape[-1]) if fill == "arange" else fill)).all(), name
            assert values.dtype == real.table[name].dtype


def test_nothing_to_train_is_no_micro_batch():
    assert pack_samples([], 8) == []
    assert pack_for_ranks([], 8, ranks=3) == [[], [], []]


def test_padding_of_padding_stays_padding():
    padding = make_padding_batch(make_padding_batch(collate_samples(make_samples([3, 4]))), 5)
    assert (padding.num_tokens, padding.num_real_tokens, padding.segment_lengths.tolist()) == (5, 0, [5])


@pytest.mark.parametrize("cap", [100, 3])
def test_a_batch_that_mixes_columns_names_the_sample(cap):
    """Also if no micro-batch does: ranks with different columns would run different passes."""
    whole, without = make_table(0, 3), make_table(0, 3).without_columns("routed_experts", "routing_recorded")
    with pytest.raises(PackingError, match="sample b"):
        pack_samples([Sample("a", whole), Sample("b", without)], cap)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def test_qwen3_30b_a3b_by_hand():
    per_layer = 2048 * 4096 * 2 + 2048 * 512 * 2 + 8 * 3 * 2048 * 768 + 2048 * 128
    cost = build_cost_model(read_model_shape("Qwen3-30B-A3B"))
    assert cost.linear == 2 * (48 * per_layer + 2048 * 151936)
    assert cost.quadratic == 48 * 32 * (128 + 128)
    assert cost.linear / 2 == pytest.approx(3.04e9, rel=0.01)  # the name says 3 B active


def by_matrices(config):
    """Twice the weights that one token meets, from the shapes of a model's own matrices."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = 0
    for name, p in model.named_parameters():
        if p.dim() < 2 or "embed_tokens" in name:
            continue
        share = config.num_experts_per_tok / p.shape[0] if ".experts." in name else 1
        total += int(p.numel() * share)
    return 2 * total


def test_mixture_with_a_dense_layer_is_what_its_matrices_say():
    config = Qwen3MoeConfig(**SMALL, head_dim=16, num_local_experts=8, mlp_only_layers=[1])
    assert build_cost_model(config.to_dict()).linear == by_matrices(config)
    assert build_cost_model(config.to_dict()).quadratic == 3 * 4 * 32


@pytest.mark.parametrize("q_rank", [12, None])
def test_latent_attention_and_a_shared_expert_are_what_their_matrices_say(q_rank):
    small = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    config = DeepseekV3Config(
        **small,
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=1,
        q_lora_rank=q_rank,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_group=1,
        topk_group=1,
    )
    assert build_cost_model(config.to_dict()).linear == by_matrices(config)
    assert build_cost_model(config.to_dict()).quadratic == 3 * 4 * (12 + 6)


def test_a_sliding_window_costs_its_width_and_linear_attention_nothing_quadratic():
    kinds = ["full_attention", "sliding_attention", "linear_attention"]
    plain = SMALL | {"num_experts": 8}
    mixed = build_cost_model(plain | {"layer_types": kinds, "sliding_window": 10})
    assert mixed.quadratic == build_cost_model(plain).quadratic / 3
    lightning, projections = 5 * 32 * 32 + 32, 32 * 32 * 2 + 32 * 16 * 2
    assert mixed.linear == build_cost_model(plain).linear + 2 * 4 * 16 * 10 + 2 * (lightning - projections)
    assert mixed.keeps_state
    assert not build_cost_model(plain).keeps_state


def test_dense_models_and_nested_configurations_are_counted_too():
    dense = build_cost_model(SMALL)
    assert dense.linear == 2 * (3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48) + 32 * 64)
    assert build_cost_model({"text_config": SMALL}) == dense
    assert build_cost_model({"d_model": 32, "n_layers": 3}) == CostModel()
    assert np.isfinite(dense.estimate_costs(np.asarray([1, 10**6]))).all()
