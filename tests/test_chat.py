"""Turn by turn, only what is new is rendered, and it is what the template itself would have written."""

import pytest

from r3async.envs.base import Message
from r3async.episodes.chat import ChatRenderer, TemplateError
from tools.init_model import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LEADING_SYSTEM = (
    "<|system|>be brief<|end|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}<|assistant|>"
)
STRIPS_THOUGHT = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def renderer(template=None):
    tokenizer = byte_tokenizer()
    if template:
        tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


@pytest.mark.parametrize("template", [None, CHATML, LEADING_SYSTEM, STRIPS_THOUGHT])
def test_prompt_answer_and_following_equal_the_template_rendered_at_once(template):
    chat = renderer(template)
    first, answer, second = [Message("user", "abc")], "cba", [Message("user", "xyz"), Message("user", "now")]
    ids = chat.first(first)
    ids += [*chat.tokenizer.encode(answer, add_special_tokens=False), chat.end_id]
    ids += chat.following(second)
    whole = chat.first([*first, Message("assistant", answer), *second])
    assert chat.tokenizer.decode(ids) == chat.tokenizer.decode(whole)
    assert ids == whole


def test_the_text_of_an_answer_leaves_its_stop_token_out():
    chat = renderer()
    ids = chat.tokenizer.encode("dcba", add_special_tokens=False)
    assert chat.text([*ids, chat.end_id]) == chat.text(ids) == "dcba"


def test_a_message_may_contain_the_mark_that_the_template_is_rendered_around():
    chat = renderer()
    said = "r3async-answer-mark"
    assert said in chat.tokenizer.decode(chat.following([Message("user", f"what is {said}?")]))


@pytest.mark.parametrize(
    ("template", "message"), [("{{ messages[0]['content'] }}", "does not end an answer"), (None, "no chat template")]
)
def test_a_template_that_can_not_be_continued_is_refused_when_it_is_loaded(template, message):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(TemplateError, match=message):
        ChatRenderer(tokenizer)
