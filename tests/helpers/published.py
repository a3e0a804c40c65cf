"""Chat templates as models publish them, from files of the packages trl and vLLM.

Each has a byte-level tokenizer with its special tokens.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from r3async.rollout.chat import ChatRenderer
from r3async.tools.init_model import build_byte_tokenizer

# For each model: the tokenizer's end of sequence, and further tokens that `eos_token_id` in its generation_config.json
# names.
ENDS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>"],
    "deepseek_r1_distill_training": ["<｜end▁of▁sentence｜>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "gemma": ["<eos>"],
    "gemma3": ["<eos>", "<end_of_turn>"],
    "gemma4": ["<eos>", "<turn|>", "<|tool_response>"],
    "gemma4_v5": ["<eos>", "<turn|>", "<|tool_response>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "lfm2_2_5": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "llama3_1": ["<|eot_id|>"],
    "llama3_2": ["<|eot_id|>"],
    "muse_glimmer": ["<|eot|>"],
    "nemotron_3_5_lightning": ["<|im_end|>"],
    "nemotron_3_nano": ["<|im_end|>"],
    "phi3": ["<|endoftext|>"],
    "phi3_5": ["<|endoftext|>"],
    "qwen2_5": ["<|endoftext|>"],  # a base model's
    "qwen2_5_vl": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3_5_nothink": ["<|im_end|>"],
    "qwen3_5_think": ["<|im_end|>"],
    "qwen3_6": ["<|im_end|>"],
    "qwen3_8": ["<|im_end|>"],
    "qwen3_instruct_2507": ["<|im_end|>"],
    "smolvlm": ["<end_of_utterance>"],
    "llava_next": ["</s>"],
    "template_basic": ["<|endoftext|>"],
    "template_chatml": ["<|endoftext|>"],
    "template_deepseek_vl2": ["<|endoftext|>"],
    "template_minicpmv45": ["<|im_end|>"],
}
_FOLDERS = {"trl": "chat_templates", "vllm": "transformers_utils/chat_templates"}
_SPECIAL = re.compile(
    r"<\|[A-Za-z0-9_▁:/-]+\|>|<｜[^｜>]+｜>|</?think>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_[a-z]+>|</s>|\[gMASK\]|<sop>"
)


def published_names() -> list[str]:
    """Return the names of `ENDS` whose package is installed."""
    return [name for name in ENDS if _file(name) is not None]


def source_of(name: str) -> str:
    file = _file(name)
    assert file is not None, f"no chat template {name} in {', '.join(_FOLDERS)}"
    return file.read_text()


def published(name: str, **template_args: object) -> ChatRenderer:
    tokenizer, source = build_byte_tokenizer(), source_of(name)
    end, *others = ENDS[name]
    tokenizer.add_special_tokens({"eos_token": end, "bos_token": "<bos>"})
    tokenizer.add_tokens(sorted({*_SPECIAL.findall(source), *others} - {end}), special_tokens=True)
    tokenizer.chat_template = source
    return ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(others), template_args)


def _file(name: str) -> Path | None:
    for package, folder in _FOLDERS.items():
        spec = find_spec(package)
        file = Path(next(iter(spec.submodule_search_locations or ()), "")) / folder / f"{name}.jinja" if spec else None
        if file is not None and file.is_file():
            return file
    return None
