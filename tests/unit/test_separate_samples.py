"""Samples packed into one micro-batch stay apart in layers that carry a state, whatever these layers are called."""

import json

import numpy as np
import pytest
import torch

from r3async.learner import LearnerError
from r3async.learner.micro_batch_plan import build_cost_model
from r3async.learner.micro_batches import collate_samples, pack_for_ranks
from r3async.learner.torch import model as torch_model
from r3async.learner.torch.backend import TorchLearner
from r3async.learner.torch.model import PackedModel, load_model
from tests.helpers import architectures as ha
from tests.helpers import models as hm
from tests.helpers.torch import logits, settings

KINDS = {
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", 2),
    "jamba": ("JambaMambaMixer", 2),
    "minimax": ("MiniMaxLightningAttention", 2),
    "lfm2_moe": ("Lfm2MoeShortConv", 2),
    "kimi_linear": ("KimiLinearDeltaAttention", 2),
    "falcon_h1": ("FalconH1Mixer", 3),
    "qwen3_moe": ("", 0),
    "gpt_oss": ("", 0),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {kind: ha.make_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def samples_of(path, seed=1, lengths=(9, 1, 30, 12)):
    layers = ha.mixtures(path)
    return hm.make_samples(seed, lengths, layers=layers or 1, routes=layers > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_that_mix_samples_are_found_by_what_they_do(paths, kind):
    name, count = KINDS[kind]
    learner = TorchLearner.from_pretrained(settings(), paths[kind])
    assert [type(module).__name__ for module in learner.model._separator.modules] == [name] * count
    assert learner.model.keeps_state == bool(count)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "lfm2_moe"])
def test_a_sample_does_not_depend_on_what_is_packed_before_it(paths, kind):
    learner = TorchLearner.from_pretrained(settings(), paths[kind])
    samples, others = samples_of(paths[kind]), samples_of(paths[kind], seed=2)
    for before in ([], samples[:1], [*others, *samples[:2]]):
        with torch.no_grad():
            packed = logits(learner, collate_samples([*before, samples[2]]))[-30:]
            alone = logits(learner, collate_samples([samples[2]]))
        assert (packed - alone).abs().max() < 1e-5 * alone.abs().max()


def test_without_rows_of_their_own_samples_would_be_mixed(paths, monkeypatch):
    monkeypatch.setattr(torch_model.SampleSeparator, "separate", lambda self, module: None)
    with pytest.raises(LearnerError, match="layer 0 of Lfm2MoeForCausalLM mixes the samples of a micro-batch"):
        TorchLearner.from_pretrained(settings(), paths["lfm2_moe"])


def test_a_layer_that_mixes_samples_outside_its_parts_is_refused(paths):
    causal = load_model(paths["qwen3_moe"], torch.float32)
    layer = causal.base_model.layers[1]
    plain = layer.forward
    layer.forward = lambda hidden, **named: plain(hidden, **named) + hidden.roll(1, dims=1)
    described = json.loads((paths["qwen3_moe"] / "config.json").read_text())
    model = PackedModel(causal, described, max_total_tokens=64)
    with pytest.raises(LearnerError, match="layer 1 of Qwen3MoeForCausalLM mixes the samples"):
        model.find_routers(torch.device("cpu"))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_pass_that_is_recomputed_keeps_samples_apart_too(paths, recompute):
    micro_batch = collate_samples(samples_of(paths["granitemoehybrid"]))
    gradients = []
    for how in ("none", recompute):
        learner = TorchLearner.from_pretrained(settings(learner__recompute=how), paths["granitemoehybrid"])
        with learner.replay.bind_routes(micro_batch):
            logits(learner, micro_batch).square().sum().backward()
        gradients.append(ha.gradients_of(learner.model.causal_lm))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_samples_share_no_prefix_in_a_model_that_keeps_a_state(paths):
    sample = hm.make_samples(1, [20], layers=3)[0]
    twins = [sample, hm.make_samples(1, [20], layers=3)[0]]
    shared = {}
    for kind in ("qwen3_moe", "granitemoehybrid"):
        cost = build_cost_model(json.loads((paths[kind] / "config.json").read_text()))
        ((packed,),) = pack_for_ranks(twins, 64, ranks=1, cost=cost, share_prefixes=True)
        shared[kind] = packed.num_shared_tokens
    assert shared["qwen3_moe"] > 0 == shared["granitemoehybrid"]
    learner = TorchLearner.from_pretrained(settings(), paths["granitemoehybrid"])
    with pytest.raises(LearnerError, match=r"set learner\.share_prefixes = false"):
        logits(learner, collate_samples(twins, np.array([0, 19])))


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "nemotron_h", "minimax_m2", "ernie4_5_moe"])
def test_one_rank_computes_with_what_it_publishes(tmp_path, kind):
    """Some classes of transformers keep routers in float32, and MiniMax-M2's not even the bias of the choice."""
    path = ha.make_model(tmp_path / "m", kind)
    learner = TorchLearner.from_pretrained(settings(learner__dtype="bfloat16"), path)
    assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.bfloat16}
    source = hm.load_weights(path)
    biases = {name for name in source if name.endswith("e_score_correction_bias")}
    assert biases
    assert not any(name.endswith("e_score_correction_bias") for name, _ in learner.model.named_parameters())
    for name, tensor in learner.export_weights().items():
        assert torch.equal(tensor, source[name] if name in biases else source[name].to(torch.bfloat16)), name
