"""The Megatron learner on one rank against transformers: gradients, checkpoints, whole training steps, and its parts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from r3async.config import ParallelConfig
from r3async.data.tokens import Sample
from r3async.learner import LearnerError
from r3async.learner.megatron import parallel
from r3async.learner.megatron.attention import TorchRMSNorm
from r3async.learner.megatron.backend import MegatronLearner
from r3async.learner.micro_batches import collate_samples, pack_samples
from r3async.learner.model import read_model_shape
from r3async.learner.optimizer import MasterAdamW
from r3async.learner.packed_attention import plan_buckets
from r3async.learner.token_logprobs import token_logprobs
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers.learner import LENGTHS, fully_recorded, replace_columns, settings
from tests.helpers.parity import assert_equal, batch, config, gradients_of_rank, reference
from tests.helpers.steps import train_minibatch
from tests.helpers.torch import reference_step
from tests.helpers.unheld import end_groups


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
    for name, tensor in ha.gradients_of(loaded).items():
        assert torch.equal(
            tensor, exported["model.embed_tokens.weight" if tied and name == "lm_head.weight" else name]
        ), name


def test_step_equals_the_reference(learner, model_path):
    samples = fully_recorded(hm.make_samples(12, LENGTHS, temperature=0.7))
    samples[1].temperature = 1.3
    rollout = samples[0].table["rollout_logprobs"].copy()
    rollout[[5, 7]] = np.nan, -np.inf
    samples[0] = replace_columns(samples[0], rollout_logprobs=rollout)
    losses, _ = reference_step(model_path, samples, settings())
    metrics = train_minibatch(learner, pack_samples(samples, 64)).metrics
    assert {name: metrics[name] for name in losses} == pytest.approx(losses, rel=1e-4)
    tokens = sum(LENGTHS)
    assert metrics["tokens/dropped_non_finite"] == 2
    assert metrics["batch/tokens"] == tokens
    assert metrics["batch/trained_tokens"] == tokens - 3 * len(LENGTHS) - 2
    assert metrics["batch/micro_batches"] == 2
    assert metrics["batch/fill"] == pytest.approx(tokens / (2 * 16384))
    assert metrics["lr"] == pytest.approx(1e-2)
    assert metrics["optimizer/skipped"] == 0
    assert learner.update_count == 1


def test_unusable_batches_name_the_sample(learner):
    (sample,) = hm.make_samples(18, [12])
    with pytest.raises(LearnerError, match="s0: column 'advantages' is missing"):
        train_minibatch(learner, [collate_samples([Sample("s0", sample.table.without_columns("advantages"))])])


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
    end_groups()
    layout = parallel.init_model_parallel(ParallelConfig(), torch.device("cpu"))
    made = len(layout.created_groups)
    layout.close()
    assert made == 1


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_log_probs_in_chunks_equal_those_at_once(entropy_gradient):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(50, 16, generator=generator, requires_grad=True)
    bias = torch.randn(50, generator=generator, requires_grad=True)
    hidden = torch.randn(23, 16, generator=generator, requires_grad=True)
    targets = torch.randint(50, (23,), generator=generator)
    temperatures = torch.rand(23, generator=generator) + 0.5

    def and_gradients(logprobs, entropies):
        loss = logprobs.square().sum() + (entropies.pow(3).sum() if entropy_gradient else 0)
        return logprobs, entropies, *torch.autograd.grad(loss, [hidden, matrix, bias])

    exact = torch.distributions.Categorical(logits=(hidden @ matrix.T + bias) / temperatures[:, None])
    expected = and_gradients(exact.log_prob(targets), exact.entropy())
    for elements in (10**6, 200, 1):
        scores = token_logprobs(
            matrix, hidden, targets, temperatures, bias=bias, chunk_elements=elements, entropy_gradient=entropy_gradient
        )
        for found, known in zip(and_gradients(*scores), expected, strict=True):
            assert (found - known).norm() < 1e-5 * known.norm()


def test_gradients_of_chunks_are_summed_in_float32():
    """One of a large chunk and two hundred small ones: in bfloat16 nothing of the small ones would be left."""
    count = 201
    hidden = torch.full((count, 8), 1 / 64).bfloat16().requires_grad_()
    matrix = torch.zeros(4, 8).bfloat16().requires_grad_()
    targets = torch.zeros(count, dtype=torch.int64)
    logprobs, _ = token_logprobs(matrix, hidden, targets, torch.ones(count), chunk_elements=4)
    weights = torch.ones(count)
    weights[0] = 1024
    (logprobs * weights).sum().backward()
    exact = 0.75 / 64 * (1024 + count - 1)
    assert matrix.grad[0].float() == pytest.approx(torch.full((8,), exact), rel=2**-8)
    assert (1 - 2**-4) * exact > 0.75 / 64 * 1024


def test_no_more_logits_exist_at_once_than_a_chunk_has():
    """Forward or backward, and no tensor of them is kept."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.numel())
            return out

    hidden, matrix = torch.randn(40, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    targets, temperatures = torch.randint(50, (40,)), torch.ones(40)
    with Sizes():
        logprobs, _ = token_logprobs(matrix, hidden, targets, temperatures, chunk_elements=400)
        logprobs.sum().backward()
    assert largest[0] == 400


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
            MegatronLearner.from_pretrained(settings(), path)
    with pytest.raises(LearnerError, match="has no config"):
        read_model_shape(tmp_path)


def test_an_impossible_token_adds_nothing_to_the_entropy_and_has_no_gradient():
    bias = torch.tensor([0.0, 1.0, -torch.inf], requires_grad=True)
    one = torch.ones(1, 1)
    logprobs, entropies = token_logprobs(
        torch.zeros(3, 1), one, torch.tensor([1]), one[0], bias=bias, entropy_gradient=True
    )
    (logprobs + entropies).sum().backward()
    exact = torch.distributions.Categorical(logits=torch.tensor([0.0, 1.0]))
    assert entropies.item() == pytest.approx(exact.entropy().item())
    assert bias.grad[2] == 0
    assert torch.isfinite(bias.grad).all()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Four layers, of which the first is dense."""
    return hm.make_hf_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4, mlp_only_layers=[0])


@pytest.fixture(scope="module")
def expected(model_path):
    return reference(model_path, batch(), config())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_rank_has_the_gradient_of_transformers(model_path, expected, recompute):
    assert_equal([gradients_of_rank(str(model_path), config(recompute=recompute), batch())], expected)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"dp": 2}, r"dp 2 x cp 1 x tp 1 x pp 1 = 2 ranks, but there is 1"),
        ({"tp": 4}, r"parallel\.tp = 4 does not divide the model's 2 key/value heads"),
        ({"cp": 3}, r"parallel\.cp = 3 does not divide the 4 heads of a rank"),
        ({"pp": 3}, r"parallel\.pp = 3 does not divide the model's 4 layers"),
        ({"dp": 3, "ep": 3}, r"parallel\.ep = 3 does not divide the model's 8 experts"),
    ],
)
def test_a_layout_that_can_not_hold_the_model_is_refused(model_path, layout, message):
    with pytest.raises(LearnerError, match=message):
        MegatronLearner.from_pretrained(config(**layout), model_path)


def test_experts_that_the_ranks_cannot_divide_are_refused_when_the_configuration_is_read():
    with pytest.raises(ValueError, match=r"`ep` = 4 must divide dp . cp . tp = 2"):
        config(dp=2, ep=4)
