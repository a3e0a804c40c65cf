"""Logits as float32 sums of products of bfloat16 numbers."""

import pytest
import torch

from r3async.config import load_config
from r3async.learner import build_learner
from r3async.learner.token_logprobs import token_logprobs
from r3async.rollout import build_engine
from r3async.tinker.engine_backend import EngineBackend
from tests.helpers import models as hm
from tests.helpers.learner import settings

TOKENS, HIDDEN, VOCABULARY = 37, 64, 500


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().requires_grad_()
    matrix = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16().requires_grad_()
    bias = torch.randn(VOCABULARY, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, matrix, bias, targets, torch.linspace(0.7, 1.3, TOKENS)


def score_exactly(hidden, matrix, bias, targets, temperatures):
    logits = (hidden.double() @ matrix.double().T + bias.double()) / temperatures[:, None]
    logs = logits.log_softmax(-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("chunk_rows", [5, 100])
def test_float32_logits_are_those_of_the_numbers(case, chunk_rows):
    hidden, matrix, bias, targets, temperatures = case
    expected = score_exactly(*case)

    def score(float32_head):
        return token_logprobs(
            matrix,
            hidden,
            targets,
            temperatures,
            bias=bias,
            chunk_elements=chunk_rows * VOCABULARY,
            entropy_gradient=True,
            float32_head=float32_head,
        )

    found, rounded = score(True), score(False)
    for ours, theirs, exact in zip(found, rounded, expected, strict=True):
        assert (ours - exact).abs().max() < 2e-5
        assert (theirs - exact).abs().max() > 1e-2
    leaves = [hidden, matrix, bias]
    gradients = torch.autograd.grad((found[0] + found[1]).sum(), leaves)
    for gradient, exact in zip(gradients, torch.autograd.grad(sum(expected).sum(), leaves), strict=True):
        # The gradient by a logit is rounded before it is multiplied.
        assert (gradient - exact).norm() < 0.01 * exact.norm()


def test_wider_numbers_are_not_narrowed(case):
    *numbers, targets, temperatures = case
    hidden, matrix, bias = (tensor.double() for tensor in numbers)
    one, other = (
        token_logprobs(matrix, hidden, targets, temperatures, bias=bias, float32_head=head) for head in (True, False)
    )
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_learner_takes_the_setting(tmp_path, backend):
    path = hm.make_hf_model(tmp_path / "m")
    scores = {}
    for head in ("float32", "model"):
        config = settings(learner__backend=backend, learner__dtype="bfloat16", model__head_dtype=head)
        learner = build_learner(config, path)
        scores[head] = torch.from_numpy(learner.score_sequence(torch.arange(1, 30).numpy()))
    assert 0 < (scores["float32"] - scores["model"]).abs().max() < 0.05


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"head_dtype": "float32"}),
        (["model.head_dtype=model"], None),
        (["generator.dtype=float32"], None),
        (["generator.engine_args.hf_overrides.rope_theta=2"], {"head_dtype": "float32", "rope_theta": 2}),
    ],
)
def test_an_engine_is_told(tiny_model, words, expected):
    words = [f"model.path={tiny_model}", "generator.dtype=bfloat16", *words]
    engine = build_engine(load_config("quickstart", words), str(tiny_model), seed=0)
    assert engine.engine_args.get("hf_overrides") == expected


@pytest.mark.parametrize(("head", "expected"), [("float32", {"head_dtype": "float32"}), ("model", None)])
def test_the_engine_of_the_tinker_server_is_told(tiny_model, tmp_path, head, expected):
    words = [f"model.path={tiny_model}", "generator.dtype=bfloat16", f"model.head_dtype={head}"]
    backend = EngineBackend(load_config("quickstart", words), tiny_model, "tiny/moe", (), tmp_path)
    assert backend._build_engine().engine_args.get("hf_overrides") == expected
