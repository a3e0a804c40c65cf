"""The Megatron learner against transformers: logits, gradients, checkpoints, and whole training steps."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

from r3async.config import Config
from r3async.data.tokens import Sample
from r3async.learner import LearnerError
from r3async.learner.backend import LearnerBackend
from r3async.learner.batch import collate_samples, pack_samples
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.metrics import LossSums
from r3async.learner.trainer import train_minibatch
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers.equality import assert_equal_transformers
from tests.helpers.learner import (
    LENGTHS,
    fully_recorded,
    gradients,
    hf_gradients,
    logits,
    replace_columns,
    settings,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return hm.make_hf_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def learner(model_path):
    return MegatronLearner.from_pretrained(settings(), model_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"tie_word_embeddings": True},
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2, "num_key_value_heads": 4, "rope_theta": 1e6},
    ],
    ids=["normalised", "unnormalised", "tied", "dense-between", "sparse-step"],
)
def test_logits_and_all_gradients_equal_transformers(tmp_path, changes):
    path = hm.make_hf_model(tmp_path / "m", **changes)
    learner = MegatronLearner.from_pretrained(settings(), path)
    moe = sum(learner.shape.moe_pattern)
    assert moe == {"mlp_only_layers": 2, "decoder_sparse_step": 1}.get(next(iter(changes), ""), 3)
    samples = fully_recorded(hm.make_samples(1, LENGTHS, layers=moe))
    assert_equal_transformers(learner, ha.load_plain(path), samples, logits=logits, gradients=gradients)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_equals_transformers_with_own_routing(learner, model_path, temperature):
    ids = np.random.default_rng(0).integers(0, hm.VOCAB, 33)
    with torch.no_grad():
        theirs = torch.log_softmax(hm.load_hf(model_path)(torch.from_numpy(ids)[None]).logits[0] / temperature, -1)
    expected = theirs[:-1].gather(1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()
    got = learner.score_sequence(ids.astype(np.int32), temperature)
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() < 1e-4
    assert all(p.grad is None for p in learner.model.parameters())


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


def test_export_is_a_snapshot(learner):
    before = learner.export_weights()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    train_minibatch(learner, pack_samples(hm.make_samples(2, LENGTHS), 4096))
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    after = learner.export_weights()
    assert all(not torch.equal(after[name], kept[name]) for name in kept if "experts" not in name)


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


def test_metric_names_are_those_of_the_protocol(learner):
    backend: LearnerBackend = learner
    names = {
        "loss/policy", "loss/rollout_kl", "rollout_kl/k1", "rollout_kl/k2", "rollout_kl/k3", "ratio/max", "ratio/ess",
        "entropy/mean",
        "routing/recorded_fraction", "routing/recorded_fraction_fed",
        "routing/load_imbalance", "grad_norm", "lr", "optimizer/skipped",
        "tokens/dropped_non_finite", "batch/tokens", "batch/trained_tokens", "batch/micro_batches",
        "batch/split_episodes", "batch/shared_tokens", "batch/fill",
        "optimizer/updates", "optimizer/zero_variance", "optimizer/broken", "rollout_kl/coef", "loss/router_aux",
        "optimizer/step_share",
    }  # fmt: skip
    names |= set(LossSums.zeros().to_metrics())
    for batch in ([], pack_samples(hm.make_samples(0, [8]), 64)):
        metrics = train_minibatch(backend, batch).metrics
        in_parts = {f"rollout_kl/k3_{part}_0" for part in ("staleness", "turn", "position")} if batch else set()
        agreement = {"routing/agreement", "routing/agreement_min"} if batch else set()
        assert set(metrics) == names | in_parts | agreement
        assert all(type(value) is float and np.isfinite(value) for value in metrics.values())


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


def test_too_few_recorded_routes_stop_the_step_before_any_forward(model_path):
    learner = MegatronLearner.from_pretrained(settings(routing__min_recorded_fraction=0.9), model_path)
    learner.model.register_forward_pre_hook(lambda *a: pytest.fail("forward"))
    samples = [replace_columns(s, routing_recorded=np.arange(len(s.table)) < 5) for s in hm.make_samples(14, [12, 12])]
    with pytest.raises(
        LearnerError, match=r"only 0\.333 of the trained tokens .* routing\.min_recorded_fraction is 0\.9"
    ):
        train_minibatch(learner, pack_samples(samples, 64))
    off = MegatronLearner.from_pretrained(
        settings(routing__min_recorded_fraction=0.9, routing__replay="off"), model_path
    )
    assert train_minibatch(off, pack_samples(samples, 64)).metrics["routing/recorded_fraction"] == pytest.approx(1 / 3)


def test_recorded_fraction_is_that_of_the_inputs(model_path):
    """Tokens 3 to 11 are trained, so rows 2 to 10 must be recorded; row 11 is never used."""
    learner = MegatronLearner.from_pretrained(settings(routing__min_recorded_fraction=1.0), model_path)
    assert (
        train_minibatch(learner, pack_samples(hm.make_samples(15, [12]), 64)).metrics["routing/recorded_fraction"]
        == 1.0
    )


def test_a_step_without_trained_tokens_changes_nothing(learner):
    samples = [replace_columns(s, loss_mask=np.zeros(len(s.table), bool)) for s in hm.make_samples(16, [8, 8])]
    before = learner.export_weights()
    metrics = train_minibatch(learner, pack_samples(samples, 64)).metrics
    assert metrics["batch/trained_tokens"] == 0
    assert metrics["optimizer/skipped"] == 1
    assert all(np.isfinite(v) for v in metrics.values())
    assert learner.update_count == 0
    assert all(torch.equal(before[n], t) for n, t in learner.export_weights().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_changes_nothing(model_path, dtype):
    learner = MegatronLearner.from_pretrained(settings(learner__dtype=dtype), model_path)
    (sample,) = hm.make_samples(17, [12])
    advantages = sample.table["advantages"].copy()
    advantages[6] = np.inf
    before = learner.export_weights()
    metrics = train_minibatch(learner, [collate_samples([replace_columns(sample, advantages=advantages)])]).metrics
    assert metrics["optimizer/skipped"] == 1
    assert not np.isfinite(metrics["grad_norm"])
    assert learner.update_count == 0
    assert all(torch.equal(before[n], t) for n, t in learner.export_weights().items())
    assert train_minibatch(learner, [collate_samples([sample])]).metrics["optimizer/skipped"] == 0


def test_unusable_batches_name_the_sample(learner):
    (sample,) = hm.make_samples(18, [12])
    with pytest.raises(LearnerError, match="s0: column 'advantages' is missing"):
        train_minibatch(learner, [collate_samples([Sample("s0", sample.table.without_columns("advantages"))])])
    with pytest.raises(LearnerError, match="sample s0: its first token"):
        train_minibatch(learner, [collate_samples([replace_columns(sample, loss_mask=np.ones(12, bool))])])


def test_training_raises_the_probability_of_what_was_good(model_path):
    """Also from a thread that is not the main one, where grad mode and such have their own state."""
    learner = MegatronLearner.from_pretrained(settings(routing__replay="off"), model_path)
    (sample,) = hm.make_samples(19, [20])
    ids = sample.table["token_ids"]
    before = learner.score_sequence(ids)[2:].mean()

    def train() -> None:
        for _ in range(5):
            mu = np.concatenate([[0.0], learner.score_sequence(ids)]).astype(np.float32)
            train_minibatch(
                learner,
                [collate_samples([replace_columns(sample, rollout_logprobs=mu, advantages=np.ones(20, np.float32))])],
            )

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert learner.update_count == 5
    assert learner.score_sequence(ids)[2:].mean() > before + 0.5
