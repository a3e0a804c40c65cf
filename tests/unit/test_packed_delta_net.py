"""Gated-delta-net models of transformers on packed samples, with our rule, are themselves one sample at a time."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from r3async.learner.packed_attention import plan_attention
from r3async.learner.torch.model import ATTENTION_NAME
from r3async.learner.torch.packed_delta_net import use_packed_delta_rule

LENGTHS = [37, 1, 70, 5]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES = {
    "qwen3_next": {"head_dim": 16, **EXPERTS},
    "qwen3_5_text": {"head_dim": 16},
    "qwen3_5_moe_text": {"head_dim": 16, **EXPERTS},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
}


def build(family):
    torch.manual_seed(0)
    sizes = SIZES | FAMILIES[family]
    config = CONFIG_MAPPING[family](**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def score(logits, ids):
    return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).sum()


def gradients(model):
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_is_the_model_of_each_sample(family):
    model = build(family)
    assert len(use_packed_delta_rule(model)) == 1
    rng = torch.Generator().manual_seed(1)
    samples = [torch.randint(64, (n,), generator=rng) for n in LENGTHS]
    # Without a plan transformers' own functions run, also where they were replaced.
    alone = [model(ids[None], use_cache=False).logits[0] for ids in samples]
    sum(score(logits, ids) for logits, ids in zip(alone, samples, strict=True)).backward()
    theirs = gradients(model)

    model.set_attn_implementation(ATTENTION_NAME)
    assert use_packed_delta_rule(model) == use_packed_delta_rule(model)
    plan = plan_attention(np.cumsum([0, *LENGTHS]), torch.device("cpu"))
    packed = model(
        torch.cat(samples)[None],
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        attention_plan=plan,
        use_cache=False,
    ).logits[0]
    parts = packed.split(LENGTHS)
    sum(score(logits, ids) for logits, ids in zip(parts, samples, strict=True)).backward()
    largest = max(logits.abs().max() for logits in alone)
    for ours, their in zip(parts, alone, strict=True):
        assert (ours - their).abs().max() < 1e-5 * largest
    mine = gradients(model)
    assert mine.keys() == theirs.keys()
    largest = max(grad.abs().max() for grad in theirs.values())
    for name, grad in theirs.items():
        # Against float64, transformers' own sums of decays have the larger error.
        assert (mine[name] - grad).abs().max() <= 1e-5 * min(largest, 10 * grad.abs().max()), name


def test_other_models_have_no_such_layer():
    assert use_packed_delta_rule(torch.nn.Linear(2, 2)) == []
