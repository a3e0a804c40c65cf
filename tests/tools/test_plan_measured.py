"""The memory that a plan says, component by component, against what a learner allocates in a step."""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from r3async.config import config_from_dict
from r3async.data.models import parse_model_shape
from r3async.learner import build_learner
from r3async.learner.batch import pack_samples
from r3async.learner.kernels import LOGIT_CHUNK_ELEMENTS, token_logprobs
from r3async.learner.optimizer import COLLECTIVE_BUCKET_ELEMENTS
from r3async.learner.trainer import train_minibatch
from r3async.tools import memory
from r3async.tools.layouts import find_fitting_layouts
from r3async.tools.memory import estimate_rank_memory
from tests.helpers import models as hm

TOKENS = 512
SHAPES = {
    "mostly vocabulary": {"vocab_size": 16384, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 64},
    "mostly activations": {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 8, "moe_intermediate_size": 128},
    "mostly optimizer": {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 3, "moe_intermediate_size": 512},
}


def peak(call) -> int:
    """Bytes that are allocated at once, at most, of those that were not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as taken:
        call()
    held = most = 0
    events = [e for e in taken.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > 0
    return most


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in SHAPES), ("mostly optimizer", "bfloat16")])
def test_a_step_takes_the_memory_of_the_plan(tmp_path, name, dtype):
    path = hm.make_hf_model(tmp_path / "model", max_position_embeddings=1024, **SHAPES[name])
    config = config_from_dict(
        {
            "learner": {"dtype": dtype, "max_tokens_per_micro_batch": TOKENS, "share_prefixes": False},
            "routing": {"min_recorded_fraction": 0.0},
            "episode": {"max_total_tokens": TOKENS, "max_prompt_tokens": 64},
        }
    )
    shape = parse_model_shape(json.loads((path / "config.json").read_text()))
    planned = estimate_rank_memory(shape, config)
    learner = build_learner(config, path)
    try:
        batches = pack_samples(
            hm.make_samples(1, [TOKENS] * 2, vocab=shape.vocab_size, layers=shape.num_layers), TOKENS
        )
        assert len(batches) == 2
        train_minibatch(learner, batches)
        held = {id(p): p for p in learner.model.parameters()}
        weights = sum(p.nbytes for p in held.values())
        kept = sum(
            t.nbytes for s in learner.optimizer.iter_states() for n, t in s.items() if n in ("exp_avg", "exp_avg_sq")
        )
        kept += sum(m.nbytes for m in learner.optimizer._masters if id(m) not in held)
        gradients = 4 * planned.parameters
        passing = peak(lambda: train_minibatch(learner, batches)) - gradients
    finally:
        learner.close()
    assert weights == planned.weights
    assert kept + gradients == planned.optimizer
    if dtype == "bfloat16":
        return  # torch's norms on CPU keep float32 copies then, which those on CUDA do not
    assert passing == pytest.approx(planned.activations + planned.logits, rel=0.1), planned
    assert weights + kept + gradients + passing == pytest.approx(planned.total_bytes, rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunks", [1, 5])
def test_log_probs_take_the_memory_of_the_plan(monkeypatch, dtype, chunks):
    columns, width = 4096, 32
    chunk = TOKENS * columns // chunks
    config = config_from_dict(
        {
            "learner": {"dtype": dtype, "max_tokens_per_micro_batch": TOKENS},
            "episode": {"max_total_tokens": TOKENS, "max_prompt_tokens": 64},
        }
    )
    shape = parse_model_shape(
        {"hidden_size": width, "vocab_size": columns, "num_hidden_layers": 1, "num_attention_heads": 1}, "head"
    )
    monkeypatch.setattr(memory, "CHUNK_ELEMENTS", chunk)
    hidden, matrix = (torch.randn(n, width).to(getattr(torch, dtype)).requires_grad_() for n in (TOKENS, columns))
    targets, temperatures = torch.randint(columns, (TOKENS,)), torch.ones(TOKENS)

    def call():
        logprobs, _ = token_logprobs(matrix, hidden, targets, temperatures, chunk_elements=chunk)
        logprobs.sum().backward()

    assert peak(call) == pytest.approx(memory._estimate_logits(shape, config), rel=0.1)


def test_the_plan_knows_the_buckets_and_chunks_of_the_learner():
    from r3async.learner import optimizer as offload

    assert memory.BUCKET_ELEMENTS == COLLECTIVE_BUCKET_ELEMENTS == offload.OFFLOAD_BUCKET_ELEMENTS
    assert memory.CHUNK_ELEMENTS == LOGIT_CHUNK_ELEMENTS


def test_what_is_recommended_fits_and_uses_all_gpus():
    from r3async.config import load_config

    config = load_config("moe_30b_r3")
    shape, _ = memory.find_model_shape(config)
    for gpus in (8, 16):
        found = list(find_fitting_layouts(shape, config, gpus))
        assert found
        for learner, planned in found:
            assert learner.parallel.world_size == gpus
            assert planned.total_bytes <= 80 * memory.GIB
        assert [learner.offload_moments for learner, _ in found] == sorted(
            learner.offload_moments for learner, _ in found
        )
