"""The memory that a plan says, component by component, against what a learner allocates in a step."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from r3async.config import config_from_dict, load_config
from r3async.data.model_shape import parse_model_shape
from r3async.learner import build_learner
from r3async.learner import token_logprobs as head
from r3async.learner.micro_batches import pack_samples
from r3async.learner.row_shares import COLLECTIVE_BUCKET_ELEMENTS
from r3async.learner.token_logprobs import token_logprobs
from r3async.tools import memory
from r3async.tools.adapted import count_adapters, list_adaptable_matrices
from r3async.tools.layouts import find_fitting_layouts
from r3async.tools.memory import estimate_rank_memory, find_model_shape
from r3async.tools.plan import make_run_plan
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers.steps import train_minibatch

TOKENS = 512
FEW_TOKENS = 8
"""Of samples whose activations are not measured."""
SHAPES = {
    "mostly vocabulary": {"vocab_size": 16384, "hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 64},
    "mostly activations": {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 8, "moe_intermediate_size": 128},
    "mostly optimizer": {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 3, "moe_intermediate_size": 512},
}


def peak(call) -> int:
    """Bytes that are allocated at once, at most, of those that were not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        call()
    held = most = 0
    events = [e for e in taken.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > 0
    return most


@pytest.mark.long
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
    # In bfloat16 torch's norms on CPU keep float32 copies, which those on CUDA do not: activations are not compared.
    measured = dtype == "float32"
    tokens = TOKENS if measured else FEW_TOKENS
    learner = build_learner(config, path)
    try:
        batches = pack_samples(
            hm.make_samples(1, [tokens] * 2, vocab=shape.vocab_size, layers=shape.num_layers), tokens
        )
        assert len(batches) == 2
        train_minibatch(learner, batches)
        held = {p.data_ptr(): p for p in learner.model.parameters()}
        weights = sum(p.nbytes for p in held.values())
        states = list(learner.optimizer.iter_states())
        kept = sum(t.nbytes for s in states for n, t in s.items() if n in ("exp_avg", "exp_avg_sq"))
        kept += sum(s["master"].nbytes for s in states if s["master"].data_ptr() not in held)
        gradients = 4 * planned.parameters
        if measured:
            passing = peak(lambda: train_minibatch(learner, batches)) - gradients
    finally:
        learner.close()
    assert weights == planned.weights
    assert kept + gradients == planned.optimizer
    if measured:
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

    planned = estimate_rank_memory(shape, config).logits
    assert peak(call) == pytest.approx(planned, rel=0.1)


def test_the_plan_knows_the_buckets_and_chunks_of_the_learner():
    from r3async.learner import host_moments

    assert memory.BUCKET_ELEMENTS == COLLECTIVE_BUCKET_ELEMENTS == host_moments.OFFLOAD_BUCKET_ELEMENTS
    assert memory.CHUNK_ELEMENTS == head.LOGIT_CHUNK_ELEMENTS
    assert memory.MAX_CHUNK_ELEMENTS == head.MAX_LOGIT_CHUNK_ELEMENTS
    assert memory.GPU_BYTES_PER_LOGIT == head.GPU_BYTES_PER_LOGIT


def test_what_is_recommended_fits_and_uses_all_gpus():
    config = load_config("moe_30b_r3")
    shape, _ = find_model_shape(config)
    for gpus in (8, 16):
        found = list(find_fitting_layouts(shape, config, gpus, tokens=10**6))
        assert found
        for each in found:
            assert each.learner.parallel.world_size == gpus
            assert each.memory.total_bytes <= config.cluster.gpu_gib * memory.GIB
        offloaded = [each.learner.offload_moments for each in found]
        assert offloaded == sorted(offloaded)


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["megatron", "torch"])
@pytest.mark.parametrize("targets", ['["all-linear"]', '["q_proj","o_proj","mlp.gate"]', '["experts"]', '["layers.1"]'])
def test_the_learner_makes_the_adapters_of_the_plan(tiny_model, backend, targets):
    lora = [f"learner.backend={backend}", f"model.path={tiny_model}", "learner.lora.rank=5", "routing.replay=off"]
    config = load_config("quickstart", [*lora, f"learner.lora.targets={targets}"])
    shape, _ = find_model_shape(config)
    planned = count_adapters(shape, config.learner)
    learner = build_learner(config, tiny_model)
    try:
        trained = learner.adapters.list_parameters()
        assert sum(t.parameter.numel() for t in trained) == planned.adapter_parameters
        assert all(t.parameter.nbytes == 4 * t.parameter.numel() for t in trained)
        weights = {id(t.candidate.parameter): t.candidate.parameter for t in trained}.values()
        pairs = zip(trained[::2], trained[1::2], strict=True)
        named = sum(a.parameter.numel() // 5 * b.parameter.shape[-2] for a, b in pairs)
        assert named == planned.adapted_weights <= sum(p.numel() for p in weights)
        assert sum(s["master"].nbytes for s in learner.optimizer.iter_states()) == 4 * planned.adapter_parameters
    finally:
        learner.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text", "nemotron_h"])
def test_matrices_of_attention_and_dense_layers_have_the_models_sizes(family):
    described = AutoConfig.for_model(family, **(ha.SHARED | ha.ALL[family]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described)
    shape = parse_model_shape(json.loads(described.to_json_string(use_diff=False)))
    attended = shape.attention_layers[0]
    counted = {
        m.name.partition("self_attn.")[2]: (m.rows, m.columns)
        for m in list_adaptable_matrices(shape, attended, fused_gate_up=True)
        if "self_attn" in m.name
    }
    mixer = model.get_submodule(f"model.layers.{attended}.{'mixer' if family == 'nemotron_h' else 'self_attn'}")
    assert {name: tuple(mixer.get_submodule(name).weight.shape) for name in counted} == counted
    assert len(counted) == 4
    for layer in set(range(shape.num_layers)) - set(shape.moe_layers) - set(shape.dense_layers):
        names = [m.name for m in list_adaptable_matrices(shape, layer, fused_gate_up=True)]
        assert not any(".mlp." in name for name in names)


def test_a_plan_with_adapters_needs_a_part_of_the_memory():
    full, lora = (load_config("moe_30b_r3", [f"learner.lora.rank={rank}"]) for rank in (0, 16))
    before, after = (estimate_rank_memory(find_model_shape(each)[0], each) for each in (full, lora))
    assert after.weights == before.weights
    assert after.optimizer < before.optimizer / 4
    assert any("learner.lora" in note and "host memory" in note for note in make_run_plan(lora).notes)
    assert not any("learner.lora" in note for note in make_run_plan(full).notes)


def test_to_merge_the_adapters_of_experts_takes_the_memory_of_the_plan(tmp_path):
    """No more is in float32 at once than a matrix."""
    path = hm.make_hf_model(tmp_path / "model", **SHAPES["mostly optimizer"])
    lora = [f"model.path={path}", "learner.lora.rank=4", 'learner.lora.targets=["experts"]', "routing.replay=off"]
    config = load_config("quickstart", [*lora, "learner.dtype=bfloat16"])
    planned = estimate_rank_memory(find_model_shape(config)[0], config)
    learner = build_learner(config, path)
    try:
        assert peak(learner.adapters.merge_weights) < planned.temporary
    finally:
        learner.close()
