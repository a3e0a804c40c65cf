"""The objective against a token-by-token reference, its gradient under any packing, order and division over ranks, and the
means that loss weights make.
"""

import dataclasses
import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from r3async.config import AlgorithmConfig, RolloutKLConfig, config_from_dict
from r3async.learner.loss import compute_loss, compute_loss_weights
from r3async.learner.loss_sums import LossSums
from r3async.learner.micro_batches import pack_samples
from r3async.learner.minibatch import build_minibatch
from r3async.learner.policy_loss import POLICY_LOSSES
from r3async.learner.trust_region import TrustRegion
from tests.helpers import models as hm
from tests.helpers.algorithms import (
    REDUCTIONS,
    Tokens,
    algorithm,
    batch_of,
    by_hand,
    distance,
    kept_tokens,
    make_samples,
    run,
)
from tests.helpers.learner import replace_columns

TERMS = {
    "rollout_kl": {"estimator": "k3"},
    "reference_kl": {"coef": 0.2},
    "entropy_coef": 0.1,
    "correction": {"icepop_low": 0.5, "icepop_high": 2.0, "product_low": 0.05},
}
BACK = {"icepop_low": 0.7, "icepop_high": 1.4, "product_low": 0.2, "numerator": "recomputed"}
LOSSES: list[dict] = [
    *({"policy_loss": name} for name in POLICY_LOSSES),
    {"policy_loss": "ppo", "ppo": {"dual_clip": 1.3}},
    {"policy_loss": "gspo", "gspo": {"clip_low": 0.1, "clip_high": 0.1}},
    *(
        {"policy_loss": name, "anchor": "recomputed"}
        for name in ("truncated_pg", "ppo", "gspo", "sapo", "dppo", "cppo")
    ),
    {"policy_loss": "cppo", "cppo": {"threshold": 0.05, "weight_min": 0.3, "budget": 0.01}},
    {"policy_loss": "gspo", "gspo": {"noise": 0.1}},
    {"policy_loss": "tis", "tis": {"cap": 1.05, "dual_clip": 1.3}},
    *(
        {"policy_loss": name, "anchor": "recomputed", "correction": BACK | {"weight": weight, "weight_cap": 1.2}}
        for name, weight in (("ppo", "token"), ("gspo", "sequence"), ("truncated_pg", "sequence"))
    ),
    {"reference_kl": {"coef": 0.2, "weighted": False}},
    {"reference_kl": {"coef": 0.2, "weight_cap": 1.1}},
]


def reweighted(samples: list[Tokens], reduction: str, groups: list[int]) -> list[Tokens]:
    weights = compute_loss_weights([s.mask for s in samples], range(len(samples)), groups, reduction, norm_length=16)
    return [dataclasses.replace(s, weights=w.astype(np.float64)) for s, w in zip(samples, weights, strict=True)]


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_every_term_and_gradient_token_by_token(loss, estimator):
    config = algorithm(**TERMS | loss | {"rollout_kl": {"estimator": estimator}})
    samples = make_samples(1, [7, 1, 12, 5, 9], drift=0.5)
    kept = [kept_tokens(s, config) for s in samples]
    assert 0 < sum(map(sum, kept)) < sum(s.mask.sum() for s in samples), "some are left out, and some are not"
    want, got = by_hand(samples, config), run([samples], config, torch.float64)
    metrics = got.sums.to_metrics()
    terms = {k: v for k, v in want.items() if k.startswith("loss/")}
    assert {k: metrics[k] for k in terms} == pytest.approx(terms, rel=1e-9, abs=1e-15)
    assert got.loss == pytest.approx(sum(terms.values()), rel=1e-9)
    assert distance(got.logprob_grads, want["gradients"]) < 1e-9
    entropy = [-0.1 * np.where(k, s.weights, 0.0) for s, k in zip(samples, kept, strict=True)]
    assert distance(got.entropy_grads, entropy) < 1e-12


BOUNDS = st.floats(1e-3, 0.5)
DRAWN = {
    "cppo": st.fixed_dictionaries({"threshold": BOUNDS, "weight_min": st.floats(0.05, 1.0), "budget": BOUNDS}).map(
        lambda drawn: {"policy_loss": "cppo", "cppo": drawn}
    ),
    "sequence_truncated_pg": st.floats(0.1, 10.0).map(
        lambda cap: {"policy_loss": "sequence_truncated_pg", "truncated_pg": {"cap": cap}}
    ),
    "clip_cov": st.tuples(BOUNDS, BOUNDS).map(
        lambda drawn: {"policy_loss": "clip_cov", "ppo": dict(zip(("clip_low", "clip_high"), drawn, strict=True))}
    ),
    "kl_cov": st.floats(0.01, 3.0).map(lambda coef: {"policy_loss": "kl_cov", "kl_cov": {"coef": coef}}),
    "m2po": st.sampled_from(["rollout", "recomputed"]).map(lambda anchor: {"policy_loss": "m2po", "anchor": anchor}),
    "veto": st.tuples(st.floats(0.01, 1.0), st.floats(1.0, 4.0), st.sampled_from(["learner", "recomputed"])).map(
        lambda drawn: {"correction": dict(zip(("veto_low", "veto_high", "numerator"), drawn, strict=True))}
    ),
}
"""Settings of losses and masks in which a token depends on others."""


@pytest.mark.long
@pytest.mark.parametrize("drawn", DRAWN)
@settings(max_examples=40)
@given(data=st.data())
def test_value_and_gradient_with_any_settings(drawn, data):
    config = algorithm(**data.draw(DRAWN[drawn], label="settings"))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5), label="lengths")
    drift = data.draw(st.sampled_from([0.0, 0.02, 0.3, 2.0]), label="drift")
    samples = make_samples(data.draw(st.integers(0, 1000), label="seed"), lengths, drift=drift)
    want, got = by_hand(samples, config, coef=0.0), run([samples], config, torch.float64, coef=0.0)
    assert got.loss == pytest.approx(want["loss/policy"], rel=1e-9, abs=1e-15)
    assert distance(got.logprob_grads, want["gradients"]) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES, ids=str)
@settings(max_examples=8)
@given(data=st.data())
def test_gradients_do_not_depend_on_packing_order_or_ranks(loss, data):
    """In float64; the next test compares float32 with it. (In float32 `exp` differs by a bit with a token's place in a
    tensor, and terms of opposite sign that nearly cancel make more of that than 1e-6.)"""
    config = algorithm(**TERMS | loss)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=7), label="lengths")
    seed = data.draw(st.integers(0, 1000), label="seed")
    reduction = data.draw(st.sampled_from(list(REDUCTIONS)), label="reduction")
    groups = [i // 2 for i in range(len(lengths))]
    samples = reweighted(make_samples(seed, lengths), reduction, groups)
    whole = run([samples], config, torch.float64)

    order = data.draw(st.permutations(range(len(samples))), label="order")
    cuts = data.draw(st.lists(st.integers(0, len(samples)), max_size=4).map(sorted), label="cuts")
    edges = [0, *cuts, len(samples)]  # equal edges are a micro-batch without a sample
    parts = [order[a:b] for a, b in itertools.pairwise(edges)]
    padding = dataclasses.replace(samples[0], mask=np.zeros(len(samples[0]), bool))
    got: list[np.ndarray] = [np.zeros(0)] * len(samples)
    sums = LossSums.zeros()
    for rank in (parts[::2], parts[1::2]):
        outcome = run([*([samples[i] for i in part] for part in rank), [padding]], config, torch.float64)
        *gradients, of_padding = outcome.logprob_grads
        assert not np.any(of_padding)
        for i, gradient in zip(itertools.chain(*rank), gradients, strict=True):
            got[i] = gradient
        sums = sums + outcome.sums
    assert distance(got, whole.logprob_grads) < 1e-9
    assert sums.to_metrics() == pytest.approx(whole.sums.to_metrics(), rel=1e-9, abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_gradients_in_float32_are_those_in_float64(loss, reduction):
    config = algorithm(**TERMS | loss)
    samples = reweighted(make_samples(11, [40, 1, 25, 60, 3]), reduction, [0, 0, 1, 1, 2])
    got, want = run([samples[:2], samples[2:]], config), run([samples], config, torch.float64)
    assert distance(got.logprob_grads, want.logprob_grads) < 1e-6
    assert got.loss == pytest.approx(want.loss, rel=1e-5)
    assert got.sums.to_metrics() == pytest.approx(want.sums.to_metrics(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_nothing_to_train_is_a_zero_that_can_be_propagated_back(loss):
    config = algorithm(**TERMS | loss)
    masked = make_samples(0, [4, 1], masked=1.1)
    for micro_batches in ([[]], [masked], [[], masked]):
        outcome = run(micro_batches, config)
        assert outcome.loss == 0
        assert set(outcome.sums.to_metrics().values()) == {0.0}
        assert not any(np.any(g) for g in outcome.logprob_grads + outcome.entropy_grads)
    assert LossSums.zeros().to_metrics() == run([masked], config).sums.to_metrics()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", ["logprobs", "rollout"])
@pytest.mark.parametrize(
    "correction", [{}, TERMS["correction"] | {"kpop": 0.1, "geometric_high": 2.0, "max_token_kl": 1.0}]
)
def test_a_trained_token_without_a_finite_logprob_is_not_hidden(correction, column, bad):
    samples = make_samples(5, [6, 4], masked=0)
    getattr(samples[0], column)[2] = bad
    outcome = run([samples], algorithm(correction=correction))
    measured = outcome.sums.to_metrics()["rollout_kl/k3"]
    region = TrustRegion(RolloutKLConfig(max=10.0))
    assert not np.isfinite(outcome.loss)
    assert not np.isfinite(measured)
    assert region.exceeds_max_drift(measured)


def test_far_log_ratios_stay_finite():
    (sample,) = make_samples(5, [6], masked=0)
    sample.logprobs[:] = [-1e-3, -1e-3, -120, -120, -1, -1]
    sample.rollout[:] = sample.old[:] = [-120, -21, -1e-3, -99, -1, -60]
    sample.reference[:] = [-1, -200, -1, -1e-3, -1, -1]
    sample.advantages[:] = [1, -1, 1, -1, 0, -2]
    for loss in LOSSES:
        outcome = run([[sample]], algorithm(**TERMS | loss | {"correction": {}}))
        assert np.isfinite(outcome.loss)
        assert all(np.isfinite(g).all() for g in outcome.logprob_grads)
        assert all(np.isfinite(v) for v in outcome.sums.to_metrics().values())


def test_logprobs_that_the_configuration_needs_must_be_there():
    batch, logprobs, entropies = batch_of(make_samples(0, [3]))
    for changes, name in (
        ({"anchor": "recomputed"}, "old"),
        ({"policy_loss": "tis"}, "old"),
        ({"reference_kl": {"coef": 1.0}}, "reference"),
    ):
        lacking = dataclasses.replace(batch, **{f"{name}_logprobs": None})
        with pytest.raises(ValueError, match=f"needs `{name}_logprobs`"):
            compute_loss(lacking, logprobs, entropies, algorithm(**changes), rollout_kl_coef=0.0)


def test_tokens_that_a_loss_chooses_must_be_there():
    batch, logprobs, entropies = batch_of(make_samples(0, [3]))
    with pytest.raises(ValueError, match="needs `chosen`"):
        compute_loss(
            dataclasses.replace(batch, chosen=None),
            logprobs,
            entropies,
            algorithm(policy_loss="kl_cov"),
            rollout_kl_coef=0.0,
        )


def test_figures_against_single_tokens():
    config = algorithm(
        policy_loss="ppo", correction={"icepop_low": 0.6, "icepop_high": 1.6}, reference_kl={"coef": 0.1}
    )
    samples = make_samples(2, [9, 4, 1, 6], drift=0.5)
    samples[1].mask[:] = False
    got = run([samples[:1], samples[1:]], config, torch.float64).sums.to_metrics()

    tokens = [(s, t) for s in samples for t in range(len(s)) if s.mask[t]]
    deltas = [float(s.logprobs[t] - s.rollout[t]) for s, t in tokens]
    ratios = [math.exp(d) for d in deltas]
    n = len(tokens)
    kept = {id(s): kept_tokens(s, config) for s in samples}
    trained = [(s.advantages[t], r) for (s, t), r in zip(tokens, ratios, strict=True) if kept[id(s)][t]]
    above, below = sum(a > 0 and r > 1.2 for a, r in trained), sum(a < 0 and r < 0.8 for a, r in trained)
    own = [s for s in samples if s.mask.any()]

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values)

    want = {
        "rollout_kl/k1": -mean(deltas),
        "rollout_kl/k2": mean(d * d / 2 for d in deltas),
        "rollout_kl/k3": mean(math.exp(d) - 1 - d for d in deltas),
        "reference_kl/k3": mean(
            math.exp(s.reference[t] - s.logprobs[t]) - 1 - (s.reference[t] - s.logprobs[t]) for s, t in tokens
        ),
        "rollout_logprob/abs_diff_mean": mean(abs(d) for d in deltas),
        "rollout_logprob/abs_diff_max": max(abs(d) for d in deltas),
        "ratio/max": max(ratios),
        "ratio/ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "entropy/mean": mean(s.entropies[t] for s, t in tokens),
        "rollout_corr/chi2_token": mean(r * r for r in ratios) - 1,
        "rollout_corr/chi2_seq": mean(math.exp(2 * (s.logprobs - s.rollout)[s.mask].sum()) for s in own) - 1,
        "rollout_corr/training_ppl": mean(math.exp(-s.logprobs[s.mask].mean()) for s in own),
        "rollout_corr/rollout_ppl": mean(math.exp(-s.rollout[s.mask].mean()) for s in own),
        "rollout_corr/ppl_ratio": mean(math.exp((s.rollout - s.logprobs)[s.mask].mean()) for s in own),
        "rollout_corr/clipped_fraction": (above + below) / n,
        "rollout_corr/clipped_high_fraction": above / n,
        "rollout_corr/clipped_low_fraction": below / n,
        "rollout_corr/masked_fraction": 1 - mean(kept[id(s)][t] for s, t in tokens),
        "rollout_corr/masked_sequence_fraction": mean(not any(kept[id(s)]) for s in own),
    }
    assert min(above, below) > 0
    assert 0 < want["rollout_corr/masked_fraction"] < 1
    assert {k: got[k] for k in want} == pytest.approx(want, rel=1e-9)
    assert set(got) - set(want) == {"loss/policy", "loss/rollout_kl", "loss/reference_kl", "loss/entropy"}


def test_the_recorded_share_of_all_fed_rows_counts_prompts_and_no_padding():
    rng = np.random.default_rng(0)
    samples = [
        replace_columns(s, routing_recorded=rng.random(len(s.table)) < 0.6) for s in hm.make_samples(3, [6, 9, 4])
    ]
    recorded = sum(int(s.table["routing_recorded"].sum()) for s in samples)
    config = config_from_dict({"routing": {"min_recorded_fraction": 0.0}})
    for budget in (8, 16, 64):
        minibatch = build_minibatch(
            pack_samples(samples, budget + 8), config, needs_routes=True, version=0, rollout_kl_coef=0.0
        )
        assert minibatch.counts.total_recorded_fraction == pytest.approx(recorded / 19)


def test_names_values_and_maxima_fit_together():
    sums = run([make_samples(2, [5, 3])], algorithm()).sums
    values = dict(zip(LossSums.sum_names(), sums.to_numpy().tolist(), strict=True))
    assert sums.to_numpy().dtype == np.float64
    assert set(LossSums.max_names()) <= set(values)
    twice = dict(zip(LossSums.sum_names(), (sums + sums).to_numpy().tolist(), strict=True))
    for name, value in values.items():
        assert twice[name] == pytest.approx(value if name in LossSums.max_names() else 2 * value)


def test_the_coefficient_is_the_caller_s_and_zero_leaves_the_term_out():
    samples = make_samples(2, [5, 3])
    config = algorithm(rollout_kl={"coef": 7.0})
    none, one = run([samples], config, coef=0.0), run([samples], config, coef=1.0)
    assert none.sums.to_metrics()["loss/rollout_kl"] == 0
    assert none.sums.to_metrics()["rollout_kl/k3"] == one.sums.to_metrics()["rollout_kl/k3"] > 0
    assert one.sums.to_metrics()["loss/rollout_kl"] > 0


def test_entropies_need_no_gradient_without_a_bonus():
    batch, logprobs, entropies = batch_of(make_samples(2, [5, 3]))
    loss, _ = compute_loss(batch, logprobs, entropies, AlgorithmConfig(), rollout_kl_coef=0.1)
    loss.backward()
    assert entropies.grad is None


masks_strategy = st.lists(st.lists(st.booleans(), max_size=6), max_size=6)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def reduced(
    values: list[list[float]], episodes: list[int], groups: list[int], reduction: str, norm_length: int
) -> float:
    """The loss of trained tokens' values, by sample."""
    by_episode: dict[int, list[float]] = {}
    for v, episode in zip(values, episodes, strict=True):
        by_episode.setdefault(episode, []).extend(v)
    trained = [v for v in by_episode.values() if v]
    if reduction == "token_mean":
        return mean([x for v in trained for x in v])
    if reduction == "sequence_mean":
        return mean([mean(v) for v in trained])
    if reduction == "sequence_mean_token_sum_norm":
        return mean([sum(v) / norm_length for v in trained])
    by_group: dict[int, list[float]] = {}
    for v, group in zip(values, groups, strict=True):
        by_group.setdefault(group, []).extend(v)
    return mean([mean(v) for v in by_group.values() if v])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@settings(max_examples=60)
@given(data=st.data(), masks=masks_strategy)
def test_weights_against_means(reduction, data, masks):
    arrays = [np.asarray(m, bool) for m in masks]
    groups, episodes = (
        data.draw(st.lists(st.integers(-3, 3), min_size=len(masks), max_size=len(masks)), label=label)
        for label in ("groups", "episodes")
    )
    rng = np.random.default_rng(0)
    values = [rng.normal(size=len(m)) for m in arrays]
    weights = compute_loss_weights(arrays, episodes, groups, reduction, norm_length=5)
    assert [w.dtype for w in weights] == [np.float32] * len(arrays)
    assert all((w[~m] == 0).all() and (w[m] > 0).all() for w, m in zip(weights, arrays, strict=True))
    got = sum(float(w @ v) for w, v in zip(weights, values, strict=True))
    want = reduced([v[m].tolist() for v, m in zip(values, arrays, strict=True)], episodes, groups, reduction, 5)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
