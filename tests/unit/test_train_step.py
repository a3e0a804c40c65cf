"""The verbs of a learner's step by themselves, and the way from a rank to a backward pass."""

import traceback

import numpy as np
import pytest
import torch

from r3async.actors.rank_actor import LocalRank
from r3async.learner.micro_batches import pack_samples
from r3async.learner.train_step import agree_on_counts, forward, forward_backward, load_state, optim_step, save_state
from tests.helpers import models as hm
from tests.helpers.learner import replace_columns, settings

BACKENDS = ["megatron", "torch"]
BUDGET = 64


def weighted_samples():
    """Samples whose denominators are known: the number of trained tokens of all of them."""
    samples = hm.make_samples(3, [20, 30, 25, 15])
    trained = sum(int(s.table["loss_mask"].sum()) for s in samples)
    return [replace_columns(s, loss_weights=np.full(len(s.table), 1 / trained, np.float32)) for s in samples]


def gradients_of(learner):
    """Return the gradients that have been accumulated, and leave them to the next verb."""
    state = learner.optimizer.take_state()
    found = [gradient.clone() for gradient in state.gradients if gradient is not None]
    learner.optimizer.put_state(state)
    return found


def run_verbs(learner, *parts):
    for part in parts:
        forward_backward(learner, agree_on_counts(learner, pack_samples(part, BUDGET)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_two_calls_are_those_of_one_call_with_both(learners, model_path, backend, dtype):
    samples = weighted_samples()
    one, two = (learners(settings(learner__backend=backend, learner__dtype=dtype), model_path) for _ in range(2))
    run_verbs(one, samples)
    run_verbs(two, samples[:2], samples[2:])
    whole, summed = gradients_of(one), gradients_of(two)
    assert len(whole) == len(summed) > 0
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for ours, theirs in zip(summed, whole, strict=True):
        assert float((ours - theirs).norm()) <= tolerance * float(theirs.norm())
    assert optim_step(two).grad_norm == pytest.approx(optim_step(one).grad_norm, rel=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_was_saved_is_continued_bit_by_bit(learners, model_path, tmp_path, backend):
    samples = weighted_samples()
    config = settings(learner__backend=backend)
    saved, resumed = learners(config, model_path), learners(config, model_path)
    run_verbs(saved, samples)
    assert optim_step(saved).cause == ""
    save_state(saved, tmp_path / "state")
    load_state(resumed, tmp_path / "state")
    for learner in (saved, resumed):
        run_verbs(learner, samples)
        optim_step(learner)
        assert learner.update_count == 2
    scores = [forward(learner, pack_samples(samples, BUDGET)) for learner in (saved, resumed)]
    assert all(np.array_equal(a, b) for a, b in zip(*scores, strict=True))


def test_a_verb_that_fails_discards_the_gradients_of_the_calls_before_it(learners, model_path, monkeypatch):
    samples = weighted_samples()
    learner = learners(settings(), model_path)
    run_verbs(learner, samples[:2])
    assert gradients_of(learner)
    minibatch = agree_on_counts(learner, pack_samples(samples[2:], BUDGET))
    monkeypatch.setattr(minibatch, "compute_micro_batch_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as failed:
        forward_backward(learner, minibatch)
    assert not gradients_of(learner)
    run_verbs(learner, samples)  # no routes are bound any more, although the traceback is held
    assert failed.tb is not None
    assert optim_step(learner).cause == ""


def test_an_update_without_a_measurement_leaves_the_trust_region_as_it_is(learners, model_path):
    learner = learners(settings(algorithm__rollout_kl={"coef": 0.1, "target": 1e-12, "max": 1e-11}), model_path)
    run_verbs(learner, weighted_samples())
    before = learner.trust_region.state_dict()
    assert optim_step(learner).cause == ""
    assert learner.trust_region.state_dict() == before
    assert not learner.replay.pop_counts().expert_load.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_is_three_frames_away_from_a_backward_pass(model_path, monkeypatch, backend):
    rank = LocalRank.load(settings(learner__backend=backend), model_path)
    stacks = []
    backward = torch.Tensor.backward

    def noting(self, *args, **options):
        stacks.append([f.name for f in traceback.extract_stack() if "/r3async/" in f.filename])
        return backward(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "backward", noting)
    rank.run_minibatches([[pack_samples(weighted_samples(), BUDGET)]], version=0)
    rank.backend.close()
    assert stacks
    assert all(frames == ["run_minibatches", "train_step", "forward_backward"] for frames in stacks)
