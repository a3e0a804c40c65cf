"""A step with zero variance, or with a number that is not finite, leaves weights, moments and trust region as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r3async.actors.ranks import LocalRank
from r3async.config import AlgorithmConfig, Config, ConfigError, config_from_dict
from r3async.data.tokens import Sample
from r3async.learner import build_learner
from r3async.learner.advantages import assign_advantages, has_variance
from r3async.learner.batch import MicroBatch, pack_for_ranks, pack_samples
from r3async.learner.metrics import combine_results
from r3async.learner.trainer import prepare_minibatches, train_minibatch
from tests.helpers import models as hm
from tests.helpers.learner import replace_columns
from tests.helpers.learner import settings as learner_settings
from tests.helpers.parity import of_rank
from tests.unit.test_buffer import make_trajectory
from tests.unit.test_trust_region_run import optimizer_state, same

LENGTHS = [9, 24, 5, 17]
BUDGET = 32
BACKENDS = ["megatron", "torch"]


def settings(backend: str, **changes: Any) -> Config:
    """Every other term of the loss is on. `changes`: of `algorithm`, but for `dp`."""
    algorithm = {
        "rollout_kl": {"coef": 0.01, "target": 0.01},
        "reference_kl": {"coef": 0.1},
        "entropy_coef": 0.01,
        "router_aux": {"coef": 0.01},
    }
    return learner_settings(
        learner__backend=backend,
        learner__weight_decay=0.1,
        learner__parallel={"dp": changes.pop("dp", 1)},
        **{f"algorithm__{name}": value for name, value in (algorithm | changes).items()},
    )


def with_reference(sample: Sample) -> Sample:
    """As the step before would have measured it."""
    return replace_columns(sample, reference_logprobs=sample.table["rollout_logprobs"])


def contrast() -> list[Sample]:
    return [with_reference(s) for s in hm.make_samples(1, LENGTHS)]


def flat(seed: int = 2) -> list[Sample]:
    """Every advantage is 0."""
    return [
        replace_columns(with_reference(s), advantages=np.zeros(len(s.table), np.float32))
        for s in hm.make_samples(seed, LENGTHS)
    ]


def state_of(learner: Any) -> tuple[Any, ...]:
    return (
        optimizer_state(learner),
        learner.optimizer.update_count,
        learner.optimizer.lr,
        learner.trust_region.state_dict(),
    )


def unchanged(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return same(before[0], after[0]) and before[1:] == after[1:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_with_zero_variance_leave_weights_moments_and_trust_region_bit_for_bit(model_path, backend):
    learner = build_learner(settings(backend), model_path)
    loaded = {name: tensor.clone() for name, tensor in learner.export_weights().items()}
    train_minibatch(learner, pack_samples(flat(), BUDGET))
    assert all((loaded[name] == tensor).all() for name, tensor in learner.export_weights().items())
    assert not learner.optimizer._adam.state, "the first update makes the moments"

    train_minibatch(learner, pack_samples(contrast(), BUDGET))
    before = state_of(learner)
    for seed in range(4):
        metrics = train_minibatch(learner, pack_samples(flat(seed), BUDGET)).metrics
        assert (metrics["optimizer/updates"], metrics["optimizer/skipped"]) == (0, 1)
        assert (metrics["optimizer/zero_variance"], metrics["optimizer/broken"]) == (1, 0)
        assert metrics["rollout_kl/k3"] > 0  # what is measured is measured all the same
    assert unchanged(before, state_of(learner))
    assert learner.update_count == 1
    assert train_minibatch(learner, pack_samples(contrast(), BUDGET)).metrics["optimizer/updates"] == 1
    assert not same(before[0], optimizer_state(learner))
    learner.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_two_minibatches_the_one_with_zero_variance_makes_no_update(model_path, backend):
    config = settings(backend)
    both, only = (LocalRank.load(config, model_path) for _ in range(2))
    good, bad = (pack_for_ranks(samples, BUDGET) for samples in (contrast(), flat()))
    results = both.train_minibatches([good, bad], version=0)
    only.train_minibatches([good], version=0)
    assert unchanged(state_of(only.backend), state_of(both.backend))
    metrics = combine_results(results).metrics
    assert (metrics["optimizer/updates"], metrics["optimizer/skipped"], metrics["optimizer/zero_variance"]) == (1, 1, 0)


def run_on_rank(path: Path, config: Config, good: list[MicroBatch], then: list[list[MicroBatch]]) -> list[Any]:
    """Return, for each batch of `then`, the metrics of two steps and True if the state is still that before them."""
    import torch.distributed as dist

    rank = dist.get_rank()
    learner = build_learner(config, path)
    try:
        train_minibatch(learner, of_rank(good, rank, 2))
        out = []
        for batch in then:
            before = state_of(learner)
            results = [train_minibatch(learner, of_rank(batch, rank, 2)).metrics for _ in range(2)]
            out.append((results, unchanged(before, state_of(learner))))
        return out
    finally:
        learner.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_agree_on_contrast_where_only_one_of_them_has_any(two_ranks, model_path, backend):
    good, none = pack_samples(contrast(), BUDGET), pack_samples(flat(), BUDGET)
    assert len(good) == len(none) > 1
    mixed = [g if i % 2 else n for i, (g, n) in enumerate(zip(good, none, strict=True))]  # rank 1 gets the odd ones
    first, second = two_ranks.call(run_on_rank, model_path, settings(backend, dp=2), good, [none, mixed])
    assert first == second
    updates = [([metrics["optimizer/updates"] for metrics in results], still) for results, still in first]
    assert updates == [([0, 0], True), ([1, 1], False)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments(model_path, backend):
    learner = build_learner(settings(backend, rollout_kl={"coef": 0.01}), model_path)
    train_minibatch(learner, pack_samples(contrast(), BUDGET))
    before = state_of(learner)
    for bad in (np.nan, np.inf, 3e38):
        with np.errstate(all="ignore"):
            spoilt = [replace_columns(s, advantages=s.table["advantages"] * np.float32(bad)) for s in contrast()]
        metrics = train_minibatch(learner, pack_samples(spoilt, BUDGET)).metrics
        assert unchanged(before, state_of(learner)), bad
        assert (metrics["optimizer/skipped"], metrics["optimizer/zero_variance"]) == (1, 0)
        assert metrics["optimizer/broken"] == 0
    learner.close()


def tokens_where(samples: list[Sample], name: str) -> np.ndarray:
    return np.concatenate([s.table[name][s.table["loss_mask"]] for s in samples])


@pytest.mark.parametrize("credit", ["trajectory", "turn", "token"])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl"])
def test_groups_of_equal_rewards_have_advantages_of_exactly_zero(advantage, credit):
    for reward in (0.0, 1.0, 0.1, 1 / 3):
        groups = [[make_trajectory(g, e, reward=reward) for e in range(7)] for g in range(3)]
        samples, figures = assign_advantages(groups, AlgorithmConfig(advantage=advantage, credit=credit))
        assert not tokens_where(samples, "advantages").any()
        assert figures["advantage/zero_variance_groups"] == 3
        assert figures["advantage/zero_variance_share"] == 1


def test_reinforce_pp_finds_contrast_between_groups_that_have_none_within():
    groups = [[make_trajectory(g, e, reward=float(g)) for e in range(2)] for g in range(2)]
    for advantage, contrast_there in (("reinforce_pp", True), ("grpo", False), ("reinforce_pp_baseline", False)):
        samples, figures = assign_advantages(groups, AlgorithmConfig(advantage=advantage))
        assert bool(tokens_where(samples, "advantages").any()) == contrast_there
        assert figures["advantage/zero_variance_share"] == 1


@pytest.mark.parametrize(
    ("scores", "differ"),
    [
        ([], False),
        ([1.0], False),
        ([0.1 + 0.2, 0.3], False),
        ([float(np.float32(0.1)) + float(np.float32(0.2)), float(np.float32(0.3))], False),
        ([0.0, 0.0], False),
        ([0.0, 1e-30], True),
        ([1.0, 1.0 + 1e-5], True),
        ([-1.0, 1.0], True),
        ([1e6, 1e6 + 1], True),
    ],
)
def test_scores_that_differ_by_rounding_have_zero_variance(scores, differ):
    assert has_variance(scores) == differ


def test_a_step_counts_its_groups_with_zero_variance():
    groups = [[make_trajectory(g, e, reward=float(g == 2 and e)) for e in range(2)] for g in range(4)]
    _, metrics = prepare_minibatches(groups, config_from_dict({}))
    assert metrics["advantage/zero_variance_groups"] == 3
    assert metrics["advantage/zero_variance_share"] == 0.75


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "maxrl"])
def test_groups_of_one_are_refused_where_they_are_compared_with_nobody(advantage):
    data = {"schedule": {"group_size": 1}, "algorithm": {"advantage": advantage}}
    with pytest.raises(ConfigError, match=r"`schedule\.group_size` = 1 .*`algorithm\.advantage`.*set .*2 or more"):
        config_from_dict(data)
    data["algorithm"]["advantage"] = "reinforce_pp"
    assert config_from_dict(data).schedule.group_size == 1
