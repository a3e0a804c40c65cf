"""Several epochs over the groups of a step: the updates, what stays between them, and the figures."""

import numpy as np
import pytest
import torch

from r3async.actors.rank_actor import LocalRank
from r3async.config import config_from_dict, load_config
from r3async.learner import MinibatchResult, build_learner
from r3async.learner.metrics import LAST_EPOCH_METRIC, combine_results
from r3async.learner.micro_batches import pack_for_ranks
from r3async.learner.optimizer import count_updates
from r3async.learner.train_step import train_step
from tests.helpers import models as hm
from tests.helpers.steps import train_minibatch


def settings(epochs, lr=1e-2, **algorithm):
    return config_from_dict(
        {
            "learner": {"dtype": "float32", "lr": lr, "backend": "torch"},
            "schedule": {"epochs_per_step": epochs},
            "routing": {"min_recorded_fraction": 0.0},
            "algorithm": algorithm,
        }
    )


def minibatches():
    samples = hm.make_samples(3, [20, 30, 25, 15])
    return [pack_for_ranks(samples[:2], 64)[0], pack_for_ranks(samples[2:], 64)[0]]


def weights_of(learner):
    return {name: tensor.clone() for name, tensor in learner.export_weights().items()}


def same(one, other):
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_epochs_are_the_same_updates_as_the_minibatches_given_again(tmp_path):
    model = hm.make_hf_model(tmp_path / "m")
    two, by_hand = build_learner(settings(2), model), build_learner(settings(1), model)
    results = train_step(two, minibatches(), version=0)
    expected = [train_minibatch(by_hand, m, version=0) for _ in range(2) for m in minibatches()]
    assert len(results) == two.optimizer.update_count == 4
    assert [r.metrics for r in results] == [r.metrics for r in expected]
    assert same(weights_of(two), weights_of(by_hand))
    once = build_learner(settings(1), model)
    train_step(once, minibatches(), version=0)
    assert not same(weights_of(two), weights_of(once))


def test_the_anchor_is_of_before_the_first_epoch_in_all_of_them(tmp_path):
    """If it were computed again, every epoch's first ratios would be 1, and its loss minus the mean advantage."""
    algorithm = {"policy_loss": "ppo", "anchor": "recomputed", "rollout_kl": {"coef": 0.0}}
    learner = LocalRank.load(settings(2, **algorithm), hm.make_hf_model(tmp_path / "m"))
    samples = hm.make_samples(3, [20, 30, 25, 15])
    first, second = learner.run_minibatches([pack_for_ranks(samples, 128)], version=0, trace=True)
    mean = np.concatenate([s.table["advantages"][s.table["loss_mask"]] for s in samples]).mean()
    assert first.metrics["loss/policy"] == pytest.approx(-mean, abs=1e-6)
    assert second.metrics["loss/policy"] != pytest.approx(-mean, abs=1e-4)
    assert second.metrics["rollout_corr/clipped_fraction"] > first.metrics["rollout_corr/clipped_fraction"]
    assert first.traces
    assert not second.traces
    learner.close()


def test_an_epoch_that_would_go_too_far_makes_no_update(tmp_path):
    model = hm.make_hf_model(tmp_path / "m")
    free = build_learner(settings(3, lr=0.1), model)
    drifts = [r.metrics["rollout_kl/k3"] for r in train_step(free, minibatches()[:1], version=0)]
    assert drifts[0] < drifts[1]
    limit = (drifts[0] + drifts[1]) / 2
    held = build_learner(settings(3, lr=0.1, rollout_kl={"max": limit}), model)
    once = build_learner(settings(1, 0.1), model)
    results = train_step(held, minibatches()[:1], version=0)
    train_step(once, minibatches()[:1], version=0)
    assert [r.metrics["optimizer/broken"] for r in results] == [0, 1, 1]
    assert same(weights_of(held), weights_of(once))
    assert combine_results(results, epochs=3).metrics["optimizer/updates"] == 1


def test_tokens_are_counted_once_and_updates_every_time():
    def result(tokens, k3):
        metrics = {"batch/trained_tokens": tokens, "rollout_kl/k3": k3, "optimizer/updates": 1.0, "lr": k3}
        return MinibatchResult(metrics, np.asarray([1.0], np.float32), np.asarray([[tokens, 0]]), [])

    one = combine_results([result(30, 0.1), result(10, 0.1), result(30, 0.3), result(10, 0.5)], epochs=2)
    assert one.metrics == pytest.approx(
        {"batch/trained_tokens": 40, "rollout_kl/k3": 0.225, LAST_EPOCH_METRIC: 0.35, "optimizer/updates": 4, "lr": 0.5}
    )
    assert one.expert_load.tolist() == [[40, 0]]


def test_updates_combine_as_the_catalogue_says():
    """What no update of the step has stays away, and what one lacks follows from the others."""

    def result(trained, tokens, **more):
        metrics = {
            "batch/trained_tokens": trained,
            "batch/tokens": tokens,
            "rollout_kl/k3": 0.0,
            "ratio/max": trained,
            "optimizer/step_share": trained / 10,
            "routing/recorded_fraction_fed": trained / 10,
            "entropy/mean": trained / 10,
        }
        return MinibatchResult(metrics | more, np.asarray([1.0], np.float32), np.asarray([[trained, 0]]), [])

    one = combine_results(
        [
            result(1, 30, **{"routing/agreement_min": 0.9}),
            result(3, 10, **{"routing/agreement_min": 0.7}),
            result(0, 40),
        ]
    )
    assert one.metrics == pytest.approx(
        {
            "batch/trained_tokens": 4,
            "batch/tokens": 80,
            "rollout_kl/k3": 0.0,
            "ratio/max": 3,
            "optimizer/step_share": 0.4 / 3,
            "routing/recorded_fraction_fed": (0.1 * 30 + 0.3 * 10) / 80,
            "entropy/mean": (0.1 * 1 + 0.3 * 3) / 4,
            "routing/agreement_min": 0.7,
        }
    )


def test_the_learning_rate_falls_over_all_updates():
    more = ["steps=10", "schedule.minibatches_per_step=4", "schedule.epochs_per_step=3"]
    assert count_updates(load_config("quickstart", more)) == 120
