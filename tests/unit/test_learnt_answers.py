"""What is learnt of a conversation is what its chat template writes. A thought that a prompt opens is not opened again, an answer
has the end that the template gives it, and what the template changes is refused."""

import pytest

from r3async.envs import Message
from r3async.envs.row_tasks import MaskedAnswer
from r3async.rollout.demonstrations import build_demonstration
from r3async.rollout.renderer import ChatRenderer, TemplateError
from r3async.tools.init_model import build_byte_tokenizer


def renderer(template, end="<|im_end|>", special=(), stops=(), **template_args):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": end})
    tokenizer.add_tokens(["<|im_start|>", "<think>", "</think>", *special, *stops], special_tokens=True)
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)), template_args)


def learnt(chat, messages):
    """Text of the one row, and of what is trained in it."""
    ((ids, mask),) = build_demonstration(chat, messages).rows
    return chat.decode(ids), chat.decode([i for i, m in zip(ids, mask, strict=True) if m])


def written(chat, messages):
    return chat.tokenizer.apply_chat_template([m.to_template_dict() for m in messages], tokenize=False)


KEEPS_THOUGHTS = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set said = m.content -%}{%- set why = '' -%}
{%- if '</think>' in said -%}
{%- set why = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n<think>\\n' + why + '\\n</think>\\n\\n' + said + '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' + opens -}}{%- endif -%}"""
OPEN, EMPTY = "<think>\n", "<think>\n\n</think>\n\n"
THOUGHT = [Message("user", "Q"), Message("assistant", "<think>\nwhy\n</think>\n\nA")]
PLAIN = [Message("user", "Q"), Message("assistant", "A")]


@pytest.mark.parametrize("messages", [THOUGHT, PLAIN], ids=["thought", "plain"])
@pytest.mark.parametrize("opens", ["", OPEN, EMPTY], ids=["nothing", "open", "empty"])
def test_a_row_is_what_the_template_writes_whatever_a_prompt_opens(opens, messages):
    chat = renderer(KEEPS_THOUGHTS, opens=opens)
    assert learnt(chat, messages)[0] == written(chat, messages).rstrip("\n")


@pytest.mark.parametrize(
    ("opens", "messages", "trained", "unasked"),
    [
        (OPEN, THOUGHT, "why\n</think>\n\nA<|im_end|>", ""),
        (OPEN, PLAIN, "\n</think>\n\nA<|im_end|>", ""),
        ("", PLAIN, "<think>\n\n</think>\n\nA<|im_end|>", ""),
        (EMPTY, PLAIN, "A<|im_end|>", ""),
        (EMPTY, THOUGHT, "why\n</think>\n\nA<|im_end|>", "\n</think>\n\n"),
        ("<think>Hm.", PLAIN, "\n\n</think>\n\nA<|im_end|>", "Hm."),
    ],
)
def test_what_a_prompt_opens_is_no_part_of_what_is_learnt(opens, messages, trained, unasked):
    chat = renderer(KEEPS_THOUGHTS, opens=opens)
    assert learnt(chat, messages)[1] == trained
    assert build_demonstration(chat, messages).unwritten_prompt_end == unasked


def test_a_prompt_and_an_answer_part_between_tokens():
    """`<think>` and `<tool_call>` begin with the same character, which is no token of either."""
    template = KEEPS_THOUGHTS.replace(
        "'<|im_start|>assistant\\n<think>\\n' + why + '\\n</think>\\n\\n' + said", "'<|im_start|>assistant\\n' + said"
    )
    chat = renderer(template, special=["<tool_call>"], opens=OPEN)
    text, trained = learnt(chat, [Message("user", "Q"), Message("assistant", "<tool_call>{}")])
    assert trained == "<tool_call>{}<|im_end|>"
    assert text == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<tool_call>{}<|im_end|>"


LOOP = (
    "{%- for m in messages -%}{{- '<S>' + m.role + '\\n' + m.content + 'END\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<S>assistant\\n' -}}{%- endif -%}"
)
ENDS = {  # of the tokenizer, and what the template ends a turn with
    "same": ("<|im_end|>", "<|im_end|>"),
    "base model": ("<|endoftext|>", "<|im_end|>"),
    "gemma": ("<eos>", "<end_of_turn>"),
    "phi": ("<|endoftext|>", "<|end|>"),
}
TALK = [Message("user", "q"), Message("assistant", "a"), Message("user", "r"), Message("assistant", "b")]


@pytest.mark.parametrize("known", [True, False], ids=["in generation_config.json", "nowhere else"])
@pytest.mark.parametrize("case", ENDS)
def test_an_answer_is_learnt_and_sampled_to_the_end_that_the_template_writes(case, known):
    eos, end = ENDS[case]
    chat = renderer(LOOP.replace("END", end), eos, ["<S>", end], [end] if known else [])
    text, trained = learnt(chat, TALK)
    assert trained == f"a{end}b{end}"
    assert written(chat, TALK).startswith(text)
    assert chat.tokenizer.convert_tokens_to_ids(end) in chat.stop_token_ids


@pytest.mark.parametrize(("known", "end"), [([], "<|im_end|><e>"), (["<|im_end|>"], "<|im_end|>")])
def test_of_two_ends_the_first_that_an_episode_ends_at_is_learnt(known, end):
    chat = renderer(LOOP.replace("END", "<|im_end|><e>"), "<e>", ["<S>", "<|im_end|>"], known)
    text, trained = learnt(chat, TALK)
    assert trained == f"a{end}b{end}"
    assert written(chat, TALK).startswith(text)


CHATML = LOOP.replace("END", "<|im_end|>")
REFUSED = {
    "no end": (LOOP.replace("END", "").replace("<S>", "## "), "A", "writes no token that ends an answer"),
    "end in it": (CHATML, "A<|im_end|>B", "has '<|im_end|>' in it"),
    "cut": (CHATML.replace("m.content", "m.content.split('</think>')[-1]"), "<think>why</think>A", "leaves this out.*'why'"),
    "changed": (CHATML.replace("m.content", "m.content | upper"), "yes", "leaves this out.*'yes'"),
    "thought twice": (
        CHATML.replace("m.content", "('<think></think>' if m.role == 'assistant' else '') + m.content"),
        "<think>why</think>A",
        "give that as `reasoning_content`",
    ),
    "other history": (
        CHATML.replace("m.role + '", "m.role + ('!' if messages[-1].role == 'assistant' else '?') + '"),
        "A",
        "writes the messages before an answer otherwise",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_answer_that_the_template_would_not_write_is_refused(case):
    template, answer, message = REFUSED[case]
    with pytest.raises(TemplateError, match=message):
        build_demonstration(renderer(template, special=["<S>"]), [Message("user", "Q"), Message("assistant", answer)])


def test_an_answer_that_is_only_shown_stands_in_the_prompt():
    chat = renderer(CHATML, special=["<S>"])
    messages = [Message("user", "q"), MaskedAnswer("assistant", "BAD"), *TALK[2:]]
    text, trained = learnt(chat, messages)
    assert trained == "b<|im_end|>"
    assert text == written(chat, messages).rstrip("\n")
