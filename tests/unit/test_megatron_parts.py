"""Parts of the Megatron learner by themselves: norm, log-probs, attention plan, optimizer, checkpoint reading."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from r3async.config import ParallelConfig
from r3async.learner import LearnerError
from r3async.learner.attention import plan_buckets
from r3async.learner.logprobs import token_logprobs, whole_vocabulary
from r3async.learner.megatron import parallel
from r3async.learner.megatron.attention import TorchRMSNorm
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.optimizer import MasterAdamW
from r3async.learner.trained import read_model
from tests.helpers import models as hm
from tests.helpers.learner import settings


def test_rms_norm_and_its_gradient_equal_torch():
    x = torch.randn(37, 2, 24, generator=torch.Generator().manual_seed(1)) * 3 + 1
    norm = TorchRMSNorm(SimpleNamespace(params_dtype=torch.float64, sequence_parallel=False), 24, eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-1, 2, 24))
    results = []
    for dtype in (torch.float32, torch.float64):  # float64 takes torch's own path
        norm.to(dtype)
        given = x.to(dtype).requires_grad_()
        out = norm(given)
        results.append((out, *torch.autograd.grad(out.pow(3).sum(), [given, norm.weight])))
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).norm() < 1e-6 * exact.norm()


def test_process_groups_of_the_same_ranks_are_one():
    if torch.distributed.is_initialized():  # another module's learner was not closed
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    layout = parallel.start(ParallelConfig(), torch.device("cpu"))
    made = len(layout.made)
    layout.close()
    assert made == 1


def test_log_probs_in_chunks_equal_those_at_once():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(50, 16, generator=generator, requires_grad=True)
    hidden = torch.randn(23, 16, generator=generator, requires_grad=True)
    targets = torch.randint(50, (23,), generator=generator)
    temperatures = torch.rand(23, generator=generator) + 0.5
    results, rows = [], []

    def logits_of(some: torch.Tensor) -> torch.Tensor:
        rows.append(len(some))
        return some @ matrix.T

    for elements in (10**6, 200):
        logprobs, entropies = token_logprobs(logits_of, hidden, targets, temperatures, 50, chunk_elements=elements)
        results.append((logprobs, entropies, *torch.autograd.grad(logprobs.square().sum(), [hidden, matrix])))
    assert sorted(rows) == sorted([23] + 2 * [4, 4, 4, 4, 4, 3])  # the chunks once forward and once backward
    for at_once, chunked in zip(*results, strict=True):
        assert (at_once - chunked).norm() < 1e-5 * at_once.norm()
    exact = torch.distributions.Categorical(logits=(hidden @ matrix.T) / temperatures[:, None])
    assert torch.allclose(results[0][0], exact.log_prob(targets), atol=1e-5)
    assert torch.allclose(results[0][1], exact.entropy(), atol=1e-5)


def test_buckets_hold_every_sample_once_with_little_padding():
    lengths = np.random.default_rng(0).integers(1, 3000, 200)
    buckets = plan_buckets(lengths)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(200))
    for members in buckets:
        longest = lengths[members].max()
        assert lengths[members[0]] == longest
        assert (longest - lengths[members] <= max(16, longest // 4)).all()
    assert len(buckets) < 30


def test_master_weights_keep_small_updates():
    config = settings().learner
    config.lr, config.warmup_steps, config.max_grad_norm, config.weight_decay = 1e-4, 4, 1e9, 0.5
    start = torch.ones(2, 2)
    low, high = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.clone())
    norm = torch.nn.Parameter(torch.ones(3))
    optimizers = [MasterAdamW([low], config), MasterAdamW([high, norm], config)]
    assert optimizers[0].lr == pytest.approx(2.5e-5)
    for _ in range(40):
        for optimizer, parameter in zip(optimizers, (low, high), strict=True):
            for factor in (-1.0, 1.5):
                (factor * parameter.float()).sum().backward()
            norm.grad = torch.zeros(3)
            optimizer.step()
    assert torch.equal(low, high.bfloat16())
    assert high.max() < 0.997  # one step of 1e-4 is lost in bfloat16, forty are not
    assert torch.equal(norm, torch.ones(3))  # no weight decay without a gradient on one-dimensional parameters


def test_unsupported_models_are_refused_with_the_reason(tmp_path):
    path = hm.make_hf_model(tmp_path / "m")
    described = json.loads((path / "config.json").read_text())

    def rewrite(**changes) -> None:
        (path / "config.json").write_text(json.dumps(described | changes))

    for changes, message in [
        ({"model_type": "gpt_oss"}, "model type 'gpt_oss' is not supported"),
        ({"attention_bias": True}, "`attention_bias` = True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "`rope_type` = 'dynamic' .* only default, linear, yarn, llama3",
        ),
        ({"num_hidden_layers": 4}, "lacks model.layers.3.input_layernorm.weight, .* and "),
        ({"num_hidden_layers": 2}, "has tensors that are not of Qwen3-MoE: model.layers.2.input_layernorm.weight"),
        (
            {"moe_intermediate_size": 40},
            r"experts.0.gate_proj.weight: shape \(48, 64\), config.json means \(40, 64\)",
        ),
    ]:
        rewrite(**changes)
        with pytest.raises(LearnerError, match=message):
            MegatronLearner.load(settings(), path)
    with pytest.raises(LearnerError, match="has no config"):
        read_model(tmp_path)


def test_an_impossible_token_adds_nothing_to_the_entropy_and_has_no_gradient():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    logprobs, entropies = whole_vocabulary(logits, torch.tensor([1]), True)
    (logprobs + entropies).sum().backward()
    exact = torch.distributions.Categorical(logits=torch.tensor([0.0, 1.0]))
    assert entropies.item() == pytest.approx(exact.entropy().item())
    assert logits.grad[0, 2] == 0
    assert torch.isfinite(logits.grad).all()
