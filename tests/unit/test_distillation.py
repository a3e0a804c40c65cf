"""On-policy distillation: the gradient is that of the reverse KL, and a learner moves toward its teacher."""

import json
import math

import numpy as np
import pytest
import torch

from r3async.actors.rank_actor import LocalRank
from r3async.config import config_from_dict
from r3async.data.tokens import Sample, TokenTable
from r3async.learner import LearnerError, build_learner
from r3async.learner.distillation import add_teacher_advantages, check_same_vocabulary, load_teacher
from r3async.learner.micro_batches import pack_samples
from r3async.tools.memory import estimate_rank_memory, find_model_shape
from tests.helpers import models as hm
from tests.helpers import torch as ht

PROMPT = [3, 11, 5, 40, 2]
COLUMN = {"loss_mask": bool, "advantages": np.float32, "rollout_logprobs": np.float32, "loss_weights": np.float32}


def settings(backend, teacher, **changes):
    distillation = {"teacher": str(teacher), "rewards": False} | changes.pop("distillation", {})
    return config_from_dict(
        {
            "learner": {"dtype": "float32", "lr": 3e-3, "backend": backend, "max_grad_norm": 1e6} | changes,
            "routing": {"replay": "off"},
            "algorithm": {"distillation": distillation, "rollout_kl": {"coef": 0.0}},
        }
    )


def every_token(backend, advantage=0.0):
    """One sample for each token that may follow the prompt, with the probability that the learner gives it as its weight: their
    mean is the mean over what it would sample."""
    samples = []
    for token in range(hm.VOCAB):
        ids = np.asarray([*PROMPT, token], np.int32)
        samples.append(Sample(f"s{token}", TokenTable.from_tokens(ids)))
    told = backend.logprobs(pack_samples(samples, 4096), replay=False)
    by_id = {}
    for m, values in zip(pack_samples(samples, 4096), told, strict=True):
        for name, end in zip(m.sample_ids, m.cu_seqlens[1:], strict=True):
            by_id[name] = float(values[end - 1])
    out = []
    for sample in samples:
        n, logprob = len(sample.table), by_id[sample.sample_id]
        columns = {name: np.zeros(n, kind) for name, kind in COLUMN.items()}
        columns["loss_mask"][-1], columns["rollout_logprobs"][-1] = True, logprob
        columns["loss_weights"][-1], columns["advantages"][-1] = math.exp(logprob), advantage
        out.append(Sample(sample.sample_id, sample.table.with_columns(**columns)))
    return pack_samples(out, 4096), np.asarray([by_id[s.sample_id] for s in samples])


def reverse_kl(own, teachers):
    return float((np.exp(own) * (own - teachers)).sum())


def load_rank(config, student):
    """Return a rank and its teacher, loaded as `LocalRank.load` does."""
    backend = build_learner(config, student)
    teacher = load_teacher(config, student, backend.ranks)
    return LocalRank(config, backend, teacher=teacher), teacher


@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_the_gradient_is_that_of_the_reverse_kl_over_the_whole_vocabulary(tmp_path, coef):
    student, teacher = hm.make_hf_model(tmp_path / "s"), hm.make_hf_model(tmp_path / "t", seed=1)
    config = settings("torch", teacher, distillation={"coef": coef})
    backend = build_learner(config, student)
    batches, own = every_token(backend, advantage=5.0)
    judged, figures = add_teacher_advantages(
        load_teacher(config, student, backend.ranks), batches, config.algorithm.distillation, backend.ranks
    )
    _, gradients = ht.gradients_of_step(backend, judged)

    model, ids = hm.load_hf(student), torch.tensor([PROMPT])
    with torch.no_grad():
        teachers = hm.load_hf(teacher)(ids).logits[0, -1].log_softmax(-1)
    logprobs = model(ids).logits[0, -1].log_softmax(-1)
    (coef * (logprobs.exp() * (logprobs - teachers)).sum()).backward()
    for name, parameter in model.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-3, atol=2e-6)
    unweighted = float((logprobs.detach() - teachers).mean())
    assert figures["distillation/reverse_kl"] == pytest.approx(unweighted, rel=1e-4), "a sample counts once"
    np.testing.assert_allclose(own, logprobs.detach().numpy(), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_learner_moves_toward_a_teacher_of_another_size_without_any_reward(tmp_path, backend):
    student, path = hm.make_hf_model(tmp_path / "s"), hm.make_hf_model(tmp_path / "t", seed=1, num_hidden_layers=4)
    learner, teacher = load_rank(settings(backend, path), student)
    frozen = {name: tensor.clone() for name, tensor in teacher.export_weights().items()}
    distances = []
    for step in range(12):
        batches, own = every_token(learner.backend)
        said = np.concatenate(teacher.logprobs(batches, replay=False, trained_only=True))
        teachers = said[np.concatenate([m.table["loss_mask"] for m in batches])]
        order = [int(name[1:]) for m in batches for name in m.sample_ids]
        distances.append(reverse_kl(own[order], teachers))
        (result,) = learner.run_minibatches([[batches]], version=step)
        assert result.metrics["optimizer/updates"] == 1, "a reward with zero variance is no cause to make no update"
        assert "distillation/reverse_kl" in result.metrics
    assert distances[-1] < 0.3 * distances[0], distances
    assert all(torch.equal(frozen[name], tensor) for name, tensor in teacher.export_weights().items())


def test_rewards_and_the_teacher_add_up_and_tokens_that_are_not_trained_are_left_alone(tmp_path):
    student, path = hm.make_hf_model(tmp_path / "s"), hm.make_hf_model(tmp_path / "t", seed=1)
    config = settings("torch", path, distillation={"rewards": True, "coef": 2.0})
    backend = build_learner(config, student)
    teacher = load_teacher(config, student, backend.ranks)
    batches, _ = every_token(backend, advantage=5.0)
    batches[0].table["rollout_logprobs"][np.flatnonzero(batches[0].table["loss_mask"])[0]] = -np.inf
    judged, _ = add_teacher_advantages(teacher, batches, config.algorithm.distillation, backend.ranks)
    said = teacher.logprobs(batches, replay=False, trained_only=True)
    for before, after, teachers in zip(batches, judged, said, strict=True):
        trained = before.table["loss_mask"] & np.isfinite(before.table["rollout_logprobs"])
        wanted = np.where(trained, 2.0 * (teachers - np.where(trained, before.table["rollout_logprobs"], 0)), 0.0)
        np.testing.assert_allclose(after.table["advantages"], before.table["advantages"] + wanted, rtol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_the_plan_counts_what_a_rank_holds_of_its_teacher(tmp_path, backend):
    student, path = hm.make_hf_model(tmp_path / "s"), hm.make_hf_model(tmp_path / "t", num_hidden_layers=4)
    config = settings(backend, path, dtype="bfloat16")
    config.model.path = str(student)
    planned, teacher = estimate_rank_memory(find_model_shape(config)[0], config), load_rank(config, student)[1]
    assert planned.teacher == sum(p.nbytes for p in teacher.model.parameters())
    assert planned.teacher > planned.weights
    parts = (planned.weights, planned.optimizer, planned.activations, planned.logits, planned.teacher)
    assert planned.total_bytes == sum(parts)


def test_a_teacher_with_other_tokens_is_refused(tmp_path):
    made = [hm.make_hf_model(tmp_path / name) for name in ("s", "t")]
    check_same_vocabulary(*made)
    (made[1] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(LearnerError, match="has other tokens than"):
        LocalRank.load(settings("torch", made[1]), made[0])
    (made[1] / "tokenizer.json").unlink()
    with pytest.raises(LearnerError, match=r"algorithm\.distillation\.teacher = .*tokenizer\.json"):
        check_same_vocabulary(*made)
