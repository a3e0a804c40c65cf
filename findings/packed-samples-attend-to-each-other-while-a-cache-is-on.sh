#!/usr/bin/env bash
# transformers 5.24.0: samples that are packed by restarting `position_ids` see each other, unless `use_cache` is False;
# in gpt_oss always.
#
# Guess: where `position_ids` begin again at 0 and no mask is given, attention keeps the samples apart, as it does
# with `use_cache=False`; a learner has only to pass the positions.
# Behaviour: the packed form is looked for only where there is no cache, and a call without `use_cache` makes one, in
# training mode too. A mask of ones that a collator adds turns it off as well. The second sample then attends to the
# first, and its log-probs are wrong, without an error. gpt_oss does not look for it at all: its masks
# are made without the positions. The Trainer sets `use_cache` to False; a loop of one's own has to.
# r3async is not affected: it passes `use_cache=False` and packs with attention of its own.
# Seen on Python 3.11, CPU, float32, torch 2.13.0, largest difference between the log-probs of the second sample, packed
# and alone: qwen3_moe as called 2, with use_cache=False 1e-06, with a mask of ones besides 2; mixtral 2, 5e-07, 2;
# gpt_oss 2, 2, 2.
# Date: 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None,
    "initializer_range": 0.1,
}
FAMILIES = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, head_dim=16),
}
texts = torch.randint(2, 64, (1, 22), generator=torch.Generator().manual_seed(1))
positions = torch.cat([torch.arange(13), torch.arange(9)])[None]


@torch.no_grad()
def score(model, ids, **arguments):
    return model(ids, **arguments).logits[0, -9:].log_softmax(-1)


for family, config in FAMILIES.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    alone = score(model, texts[:, 13:])
    packed = {
        "as called": score(model, texts, position_ids=positions),
        "use_cache=False": score(model, texts, position_ids=positions, use_cache=False),
        "and a mask of ones": score(
            model, texts, position_ids=positions, use_cache=False, attention_mask=torch.ones_like(texts)
        ),
    }
    differences = [(each - alone).abs().max().item() for each in packed.values()]
    print(family, ", ".join(f"{name}: {off:.1g}" for name, off in zip(packed, differences)))
    assert min(differences[0], differences[2]) > 0.01
    assert differences[1] > 0.01 if family == "gpt_oss" else differences[1] < 1e-5
PYTHON
