"""The Megatron learner against transformers: logits, gradients, checkpoints, and whole training steps."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from r3async.config import Config
from r3async.data.tokens import Sample
from r3async.learner import LearnerError
from r3async.learner.batch import collate_samples, pack_samples
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.trainer import train_minibatch
from tests.helpers import models as hm
from tests.helpers.learner import (
    LENGTHS,
    fully_recorded,
    gradients,
    hf_gradients,
    replace_columns,
    settings,
)


@pytest.fixture
def learner(model_path):
    return MegatronLearner.from_pretrained(settings(), model_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_save_then_load_gives_the_same_bits(tmp_path, dtype, tied):
    from transformers import Qwen3MoeForCausalLM

    path = hm.make_hf_model(tmp_path / "m", tie_word_embeddings=tied, mlp_only_layers=[0])
    learner = MegatronLearner.from_pretrained(settings(learner__dtype=dtype), path)
    train_minibatch(learner, pack_samples(hm.make_samples(2, LENGTHS, layers=2), 64))
    assert learner.update_count == 1
    exported = learner.export_weights()
    for _ in range(2):  # the second replaces the first
        learner.save_pretrained(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == {"stand": "in"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype

    loaded, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == getattr(torch, dtype)
    again = MegatronLearner.from_pretrained(settings(learner__dtype=dtype), tmp_path / "out").export_weights()
    assert set(again) == set(exported)
    for name, tensor in exported.items():
        assert torch.equal(again[name], tensor), name
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    for parameter in loaded.parameters():
        parameter.grad = parameter.data
    for name, tensor in hf_gradients(loaded).items():
        assert torch.equal(
            tensor, exported["model.embed_tokens.weight" if tied and name == "lm_head.weight" else name]
        ), name


def reference_step(path, samples: list[Sample], config: Config) -> tuple[float, float, float]:
    """Policy loss, KL loss and gradient norm of a step, by transformers and NumPy-like code."""
    model = hm.load_hf(path)
    policy_sum = kl_sum = torch.zeros((), dtype=torch.float64)
    count = 0
    for s in samples:
        table = s.table
        with hm.forced_routes(model, table["routed_experts"]):
            out = model(torch.from_numpy(table["token_ids"].astype(np.int64))[None]).logits[0]
        logp = torch.log_softmax(out.double() / s.temperature, -1)
        for t in range(1, len(table)):
            if table["loss_mask"][t] and np.isfinite(table["rollout_logprobs"][t]):
                lp, mu = logp[t - 1, int(table["token_ids"][t])], float(table["rollout_logprobs"][t])
                ratio = min(float(torch.exp(lp.detach() - mu)), config.algorithm.truncated_pg.cap)
                policy_sum = policy_sum - ratio * float(table["advantages"][t]) * lp
                kl_sum = kl_sum + config.algorithm.rollout_kl.coef * (lp - mu) ** 2 / 2
                count += 1
    loss = (policy_sum + kl_sum) / count
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return policy_sum.item() / count, kl_sum.item() / count, norm.item()


def test_step_equals_the_reference(learner, model_path):
    samples = fully_recorded(hm.make_samples(12, LENGTHS, temperature=0.7))
    samples[1].temperature = 1.3
    rollout = samples[0].table["rollout_logprobs"].copy()
    rollout[[5, 7]] = np.nan, -np.inf
    samples[0] = replace_columns(samples[0], rollout_logprobs=rollout)
    policy, kl, norm = reference_step(model_path, samples, settings())
    metrics = train_minibatch(learner, pack_samples(samples, 64)).metrics
    assert metrics["loss/policy"] == pytest.approx(policy, rel=1e-4)
    assert metrics["loss/rollout_kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    tokens = sum(LENGTHS)
    assert metrics["tokens/dropped_non_finite"] == 2
    assert metrics["batch/tokens"] == tokens
    assert metrics["batch/trained_tokens"] == tokens - 3 * len(LENGTHS) - 2
    assert metrics["batch/micro_batches"] == 2
    assert metrics["batch/fill"] == pytest.approx(tokens / (2 * 16384))
    assert metrics["lr"] == pytest.approx(1e-2)
    assert metrics["optimizer/skipped"] == 0
    assert learner.update_count == 1


def test_gradient_does_not_depend_on_packing(model_path):
    samples = hm.make_samples(13, LENGTHS)
    results = []
    for budget in (4096, 64, 40):
        learner = MegatronLearner.from_pretrained(settings(), model_path)
        taken = {}
        learner.optimizer._adam.register_step_pre_hook(
            lambda *a, learner=learner, taken=taken: taken.update(gradients(learner))
        )
        metrics = train_minibatch(learner, pack_samples(samples, budget)).metrics
        results.append((metrics, {n: g.clone() for n, g in taken.items()}))
    assert [m["batch/micro_batches"] for m, _ in results] == [1, 2, 3]
    whole, whole_grads = results[0]
    for metrics, grads in results[1:]:
        for name, expected in whole_grads.items():
            assert (grads[name] - expected).norm() <= 2e-5 * expected.norm(), name
        for name in set(whole) - {"batch/micro_batches", "batch/fill"}:
            assert metrics[name] == pytest.approx(whole[name], rel=1e-4), name


def test_unusable_batches_name_the_sample(learner):
    (sample,) = hm.make_samples(18, [12])
    with pytest.raises(LearnerError, match="s0: column 'advantages' is missing"):
        train_minibatch(learner, [collate_samples([Sample("s0", sample.table.without_columns("advantages"))])])
    with pytest.raises(LearnerError, match="sample s0: its first token"):
        train_minibatch(learner, [collate_samples([replace_columns(sample, loss_mask=np.ones(12, bool))])])
