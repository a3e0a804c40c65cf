"""Chat templates in the form that model families publish, and a byte-level tokenizer for each."""

from dataclasses import dataclass

from r3async.rollout.renderer import ChatRenderer
from r3async.tools.init_model import build_byte_tokenizer


@dataclass(frozen=True)
class Family:
    template: str
    end: str
    special: tuple[str, ...]


QWEN2 = Family(
    """{%- if messages[0]['role'] != 'system' -%}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "<|im_end|>",
    ("<|im_start|>",),
)

# Thoughts of answers before the last user message are left out; without thinking, an empty thought takes their place.
QWEN3 = Family(
    """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set said = m.content -%}{%- set thought = '' -%}
{%- if '</think>' in said -%}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
{{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + said.lstrip('\n') + '<|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>assistant\n' + said + '<|im_end|>\n' -}}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}""",
    "<|im_end|>",
    ("<|im_start|>",),
)

# Contents are trimmed.
LLAMA3 = Family(
    """{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}""",
    "<|eot_id|>",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
)

# There is no system role, the assistant is called model, and roles must alternate.
GEMMA = Family(
    """{{- '<bos>' -}}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}""",
    "<end_of_turn>",
    ("<bos>", "<start_of_turn>"),
)

# A system message is merged into the last user message (so history is rewritten), and a blank stands before every answer.
MISTRAL = Family(
    """{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0]['content'] -%}
{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set loop_messages = messages -%}{%- endif -%}
{{- '<s>' -}}
{%- for message in loop_messages -%}
{%- if message['role'] == 'user' -%}
{%- if loop.last and system is defined -%}{{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' -}}
{%- else -%}{{- '[INST] ' + message['content'] + '[/INST]' -}}{%- endif -%}
{%- elif message['role'] == 'assistant' -%}{{- ' ' + message['content'] | trim + '</s>' -}}{%- endif -%}
{%- endfor -%}""",
    "</s>",
    ("<s>", "[INST]", "[/INST]"),
)

# Everything before the end of the thought is left out of every earlier answer.
DEEPSEEK_R1 = Family(
    """{{- '<|begin|>' -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{- '<|User|>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{%- set said = message['content'] -%}
{%- if '</think>' in said -%}{%- set said = said.split('</think>')[-1] -%}{%- endif -%}
{{- '<|Assistant|>' + said + '<|end_of_sentence|>' -}}
{%- else -%}{{- message['content'] -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\n' -}}{%- endif -%}""",
    "<|end_of_sentence|>",
    ("<|begin|>", "<|User|>", "<|Assistant|>"),
)

# Consecutive tool results share a frame, as in Qwen2.5.
GROUPS_TOOLS = Family(
    """{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>' + m.content + '</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}{{- '<|im_start|>assistant\n' -}}""",
    "<|im_end|>",
    ("<|im_start|>",),
)

FAMILIES = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "deepseek-r1": DEEPSEEK_R1,
}


def renderer(family: Family | str | None = None, **template_args) -> ChatRenderer:
    """Return a renderer for a family's template, a template's text, or our own tiny model's template."""
    tokenizer = build_byte_tokenizer()
    if isinstance(family, Family):
        tokenizer.add_special_tokens({"eos_token": family.end})
        tokenizer.add_tokens(list(family.special), special_tokens=True)
        tokenizer.chat_template = family.template
    elif family is not None:
        tokenizer.chat_template = family
    return ChatRenderer(tokenizer, template_args=template_args)
