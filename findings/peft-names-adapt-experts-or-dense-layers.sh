#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: gate_proj, up_proj, down_proj are the routed experts of one family and everything
# but them in another.
#
# Guess: `target_modules=["gate_proj", "up_proj", "down_proj"]` adapts each module of that name: dense layers, shared
# experts and routed experts.
# Behaviour: where peft knows that a family's experts are fused, it rewrites the names into the experts' parameters, and
# the dense layers and shared experts of the same names get no adapter (qwen3_moe, deepseek_v3, glm4_moe). Of qwen2_moe
# it is the reverse: dense layers and shared experts, no routed expert. Mixtral refuses the names. "all-linear" adapts
# the router, too, except of gpt_oss, where it adapts attention only. Nothing is said.
# Seen on Python 3.11, CPU: as asserted below, layer 0 dense, layer 1 a mixture.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "eos_token_id": 1, "bos_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "mlp_only_layers": [0]}
FAMILIES = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16),
    "deepseek_v3": DeepseekV3Config(
        **SIZES, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1,
        n_shared_experts=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=16),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, head_dim=16),
}


def adapted(family, targets):
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_config(FAMILIES[family]), LoraConfig(r=2, target_modules=targets))
    names = [name for name, _ in model.named_parameters() if "lora_A" in name and "self_attn" not in name]
    kinds = {"experts": ".experts.", "shared": "shared_expert", "dense": "layers.0.mlp", "router": "mlp.gate."}
    found = {kind for kind, part in kinds.items() if any(part in name for name in names)}
    print(family, targets, sorted(found))
    return found


MLP = ["gate_proj", "up_proj", "down_proj"]
assert adapted("qwen3_moe", MLP) == {"experts"}
assert adapted("deepseek_v3", MLP) == {"experts"}
assert adapted("qwen2_moe", MLP) == {"dense", "shared"}
assert adapted("deepseek_v3", "all-linear") == {"experts", "router"}
assert adapted("gpt_oss", "all-linear") == set()
PYTHON
