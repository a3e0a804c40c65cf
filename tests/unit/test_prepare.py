"""From groups to minibatches with weights; several optimizer steps of one batch, and their figures as one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3async.actors.rank_actor import LocalRank
from r3async.config import ConfigError, config_from_dict
from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.learner import MinibatchResult, build_learner
from r3async.learner.metrics import combine_results
from r3async.learner.micro_batches import pack_for_ranks
from r3async.learner.prepare import prepare_minibatches
from tests.helpers import models as hm
from tests.helpers.learner import settings
from tests.helpers.parity import batch
from tests.helpers.steps import train_minibatch
from tests.unit.test_buffer import make_trajectory


def groups():
    return [[make_trajectory(g, e, reward=float(e % 2)) for e in range(4)] for g in range(3)]


@given(
    sizes=st.lists(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=4), min_size=1, max_size=8),
    minibatches=st.integers(1, 5),
)
def test_a_group_is_in_one_minibatch_with_all_its_episodes_and_samples(sizes, minibatches):
    """`sizes`: the samples' lengths, of each episode of each group."""
    config = config_from_dict({"schedule": {"minibatches_per_step": minibatches}})
    parts, _ = prepare_minibatches(
        [[episode_of(g, e, n) for e, n in enumerate(group)] for g, group in enumerate(sizes)], config
    )
    found = [{s.sample_id[:9] for s in part} for part in parts]
    assert sum(map(len, found)) == len(set().union(*found)) == sum(bool(group) for group in sizes)
    held = [sum(int(s.table["loss_mask"].sum()) for s in part) for part in parts]
    if len(parts) == minibatches:
        assert max(held) - min(held) <= max(sum(map(sum, group)) for group in sizes)
    assert sorted(s.sample_id for part in parts for s in part) == sorted(
        f"g{g:08d}e{e}s{i}" for g, group in enumerate(sizes) for e, rows in enumerate(group) for i in range(len(rows))
    )


def episode_of(group: int, episode: int, lengths: list[int]) -> Trajectory:
    """One turn a sample, of so many tokens behind a prompt of one."""
    name, samples, turns = f"g{group:08d}e{episode}", [], []
    for index, n in enumerate(lengths):
        columns = {
            "loss_mask": np.arange(n + 1) > 0,
            "turn": np.where(np.arange(n + 1) > 0, index, -1).astype(np.int32),
        }
        samples.append(Sample(f"{name}s{index}", TokenTable.from_tokens(np.arange(n + 1)).with_columns(**columns)))
        turns.append(Turn(index, index, 1, n + 1, float(episode), "stop"))
    return Trajectory(name, group, episode, 0, "", "env_done", turns, samples)


def test_more_minibatches_than_groups_are_refused():
    with pytest.raises(
        ConfigError, match=r"`minibatches_per_step` = 3 is more than `prompts_per_step` = 2: a group is"
    ):
        config_from_dict({"schedule": {"prompts_per_step": 2, "group_size": 8, "minibatches_per_step": 3}})


@pytest.mark.parametrize("minibatches", [1, 3])
def test_weights_of_each_minibatch_are_one_over_its_own_denominator(minibatches):
    config = config_from_dict({"schedule": {"minibatches_per_step": minibatches}})
    parts, metrics = prepare_minibatches(groups(), config)
    assert len(parts) == minibatches
    assert sorted(s.sample_id for part in parts for s in part) == sorted(
        t.samples[0].sample_id for group in groups() for t in group
    )
    for part in parts:
        weights = np.concatenate([s.table["loss_weights"] for s in part])
        mask = np.concatenate([s.table["loss_mask"] for s in part])
        assert weights[mask] == pytest.approx(np.full(mask.sum(), 1 / mask.sum()))
        assert (weights[~mask] == 0).all()
        assert all("advantages" in s.table for s in part)
    assert all(np.isfinite(v) for v in metrics.values())


def test_a_token_whose_rollout_logprob_is_not_finite_is_in_no_denominator():
    bad = make_trajectory(0, 0, rollout_logprobs=np.array([-1, -1, np.nan, -1], np.float32))
    ((first, second),), _ = prepare_minibatches([[bad, make_trajectory(0, 1, reward=0.0)]], config_from_dict({}))
    assert first.table["loss_weights"].tolist() == pytest.approx([0, 0, 0, 1 / 3])
    assert second.table["loss_weights"].tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3])


def test_figures_of_several_updates_become_one():
    def result(tokens, k3, largest, agreement, skipped=0.0):
        metrics = {
            "batch/trained_tokens": tokens,
            "rollout_kl/k3": k3,
            "ratio/max": largest,
            "routing/agreement_min": agreement,
            "optimizer/skipped": skipped,
            "lr": tokens,
            "optimizer/step_share": 1 / 32 if tokens == 10 else 1.0,
        }
        return MinibatchResult(metrics, np.asarray([agreement], np.float32), np.asarray([[tokens, 0]]), [])

    one = combine_results([result(30, 0.1, 2.0, 0.5), result(10, 0.5, 9.0, 0.7, skipped=1.0)])
    assert one.metrics == pytest.approx(
        {
            "batch/trained_tokens": 40,
            "rollout_kl/k3": 0.2,
            "ratio/max": 9.0,
            "routing/agreement_min": 0.5,
            "optimizer/skipped": 1.0,
            "lr": 10,
            "optimizer/step_share": 33 / 64,  # one of two updates was made whole
        }
    )
    assert one.layer_agreement.tolist() == pytest.approx([0.55])
    assert one.expert_load.tolist() == [[40, 0]]
    del (unrecorded := result(10, 0.5, 1.0, 0.0)).metrics["routing/agreement_min"]
    assert combine_results([result(30, 0.1, 2.0, 0.5), unrecorded]).metrics["routing/agreement_min"] == 0.5
    only = result(3, 0.1, 1.0, 1.0)
    assert combine_results([only]) is only


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_the_reference_model_stays_what_it_was_and_leaves_the_weights_alone(tmp_path, backend):
    learner = build_learner(
        settings(learner__backend=backend, algorithm__reference_kl={"coef": 0.5}, algorithm__rollout_kl={}),
        hm.make_hf_model(tmp_path / "m"),
    )
    before = learner.logprobs(batch())
    reference = learner.logprobs(batch(), use_reference=True)
    assert all(np.array_equal(a, b) for a, b in zip(before, reference, strict=True))
    given_ = []
    for m, of_reference in zip(batch(), reference, strict=True):
        weights = np.full(m.num_tokens, 1e-2, np.float32)
        given_.append(replace(m, table=m.table.with_columns(reference_logprobs=of_reference, loss_weights=weights)))
    assert train_minibatch(learner, given_).metrics["reference_kl/k3"] == pytest.approx(0, abs=1e-9)
    assert train_minibatch(learner, given_).metrics["reference_kl/k3"] > 1e-6
    weights = learner.export_weights()
    again = learner.logprobs(batch(), use_reference=True)
    assert all(np.array_equal(a, b) for a, b in zip(again, reference, strict=True))
    assert all(torch.equal(weights[name], tensor) for name, tensor in learner.export_weights().items())
    assert not np.array_equal(learner.logprobs(batch())[0], reference[0])
    learner.close()


def test_log_probs_before_the_first_update_are_the_anchor_of_every_minibatch(tmp_path):
    """The first minibatch's ratios are 1; the second's are not, because the first update came between."""
    changes = {"algorithm__policy_loss": "ppo", "algorithm__anchor": "recomputed"}
    config = settings(algorithm__rollout_kl={"coef": 0.0}, **changes)
    learner = LocalRank.load(config, hm.make_hf_model(tmp_path / "m"))
    samples = hm.make_samples(3, [20, 30, 25, 15])
    minibatches = [pack_for_ranks(samples[:2], 64), pack_for_ranks(samples[2:], 64)]
    first, second = learner.run_minibatches(minibatches, version=0)
    # With a ratio of exactly 1 the loss is minus the mean advantage.
    advantages = np.concatenate([s.table["advantages"][s.table["loss_mask"]] for s in samples[:2]])
    assert first.metrics["loss/policy"] == pytest.approx(-advantages.mean(), abs=1e-6)
    advantages = np.concatenate([s.table["advantages"][s.table["loss_mask"]] for s in samples[2:]])
    assert second.metrics["loss/policy"] != pytest.approx(-advantages.mean(), abs=1e-4)
    learner.close()
