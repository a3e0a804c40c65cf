#!/usr/bin/env bash
# transformers 5.24.0: a model that is loaded in bfloat16 keeps the bias by which it chooses experts in float32, or rounds
# it, by its family.
#
# Guess: `e_score_correction_bias` stays float32 in each family when the model is loaded in bfloat16, as it does in
# deepseek_v3 and glm4_moe.
# Behaviour: minimax_m2, laguna and longcat_flash round it. Eight biases between 1 and 1.007, in steps of 0.001 as
# balancing without a loss makes them, become two values there, without an error. The routers can choose other experts
# than an engine that keeps these biases in float32, as vLLM 0.30 does for MiniMax-M2.
# r3async is not affected: it keeps these biases in float32 for all families.
# Seen on Python 3.11, CPU, torch 2.13.0: deepseek_v3 and glm4_moe float32, 8 values; minimax_m2, laguna and longcat_flash
# bfloat16, 2 values.
# Date: 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "deepseek_v3": {**LATENT, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "glm4_moe": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "head_dim": 16},
    "minimax_m2": {"num_local_experts": 8, "head_dim": 16},
    "laguna": {"num_experts": 8, "head_dim": 16, "shared_expert_intermediate_size": 16},
    "longcat_flash": {
        **LATENT, "num_layers": 1, "n_routed_experts": 8, "zero_expert_num": 0, "moe_topk": 2, "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
    },
}
BIASES = torch.linspace(1, 1.007, 8)


def get_biases(model):
    named = [*model.named_buffers(), *model.named_parameters()]
    return [each for name, each in named if name.endswith("e_score_correction_bias")]


found = {}
for family, settings in FAMILIES.items():
    sizes = SIZES if family == "longcat_flash" else {**SIZES, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **settings}))
    for each in get_biases(model):
        each.data.copy_(BIASES)
    model.save_pretrained(family)
    loaded = get_biases(AutoModelForCausalLM.from_pretrained(family, dtype=torch.bfloat16))[-1]
    found[family] = str(loaded.dtype).removeprefix("torch."), len(loaded.unique())
    print(family, *found[family], flush=True)
for family, seen in found.items():
    assert seen == (("float32", 8) if family in ("deepseek_v3", "glm4_moe") else ("bfloat16", 2)), family
PYTHON
