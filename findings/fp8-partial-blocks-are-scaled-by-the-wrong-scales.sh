#!/usr/bin/env bash
# transformers 5.24.0, CPU: fp8 weights that do not end with a whole block are multiplied by the wrong scales, in silence.
#
# Guess: a matrix of 192 rows with `weight_block_size` [128, 128] has rows 0 to 127 times the first scale, the other 64
# times the second, as DeepSeek's files mean it.
# Behaviour: the size of a block is taken from the number of scales: 192 rows with 2 scales are two blocks of 96. Rows 96
# to 127 are multiplied by the second scale. `weight_block_size` is not read, and nothing is said. Where the number of
# scales does not divide that of the rows, as in DeepSeek-V3 (`kv_a_proj_with_mqa`: 576 rows, 5 scales), the model cannot
# be loaded.
# Seen on Python 3.11: 96 rows of 1, 96 of 2; 576 rows: RuntimeError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.12.0 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - <<'PYTHON' || { echo "the behaviour has changed" >&2; exit 1; }
import json
import os

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
FORM = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def load_up_proj(rows):
    """Return a matrix of 1s whose blocks have the scales 1, 2, 3 …, as it is loaded."""
    LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=rows)).save_pretrained("model")
    with open("model/config.json") as file:
        described = json.load(file)
    with open("model/config.json", "w") as file:
        json.dump(described | {"quantization_config": FORM}, file)
    tensors = load_file("model/model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        grid = [-(-size // 128) for size in tensors[name].shape]
        tensors[name] = torch.ones_like(tensors[name]).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.arange(1.0, 1 + grid[0] * grid[1]).reshape(grid)
    save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})
    model = LlamaForCausalLM.from_pretrained("model", dtype=torch.float32)
    return model.model.layers[0].mlp.up_proj.weight.detach()[:, 0]


assert load_up_proj(256).tolist() == 128 * [1.0] + 128 * [2.0]
partial = load_up_proj(192)
print("192 rows with 2 scales:", partial.unique_consecutive(return_counts=True))
assert partial.tolist() == 96 * [1.0] + 96 * [2.0], partial
try:
    load_up_proj(576)
except RuntimeError as error:
    print("576 rows with 5 scales:", error)
else:
    raise AssertionError("576 rows with 5 scales were loaded")
PYTHON
