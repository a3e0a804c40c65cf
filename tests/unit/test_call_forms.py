"""Tool calls in a history that the policy did not sample, in templates that take them in different forms."""

import json

import openai
import pytest

from r3async.config import DataConfig
from r3async.envs import Message
from r3async.envs.row_conversations import parse_conversation
from r3async.envs.rows import LocatedRow
from r3async.rollout.call_forms import CallForm, detect_call_form
from r3async.rollout.demonstrations import build_demonstration
from r3async.rollout.endpoint.protocol import parse_messages
from r3async.rollout.renderer import ChatRenderer, TemplateError
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers.serving import ADD, HERMES, ask, talking, user

HEAD = (
    "{%- for m in messages -%}{{- '<S>' + m.role + ':' + (m.content or '') -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '<C>' + c.function.name + ' ' -}}"
)
TAIL = "{%- endfor -%}{{- '<E>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<S>assistant:' -}}{%- endif -%}"
WRITTEN = {
    "joins": "{{- '```' + c.function.arguments + '```' -}}",
    "walks": "{%- for k, v in c.function.arguments.items() -%}{{- k + '=' + (v | string) -}}{%- endfor -%}",
    "json": "{{- c.function.arguments | tojson -}}",
    "prints": "{{- c.function.arguments -}}",
}
TEMPLATES = {name: HEAD + arguments + TAIL for name, arguments in WRITTEN.items()}
NULLS = (
    "{%- for m in messages -%}{{- '<S>' + m.role + ':' -}}{%- if m.role == 'assistant' and m.content is none -%}"
    "{%- for c in m.tool_calls -%}{{- '<C>' + c.function.name -}}{%- endfor -%}{%- else -%}{{- m.content -}}{%- endif -%}"
    "{{- '<E>' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<S>assistant:' -}}{%- endif -%}"
)
"""Template that writes calls only of messages whose `content` is null, as the models of one family do."""


def renderer(template):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<E>"})
    tokenizer.add_tokens(["<S>", "<C>"], special_tokens=True)
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


def history(*arguments, content=None):
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    return [user("q"), {"role": "assistant", "content": content, "tool_calls": calls}, *results]


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}], ids=["text", "object"])
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("joins", '```{"city": "Oslo"}```'),
        ("walks", "city=Oslo"),
        ("json", '{"city": "Oslo"}'),
        ("prints", '{"city": "Oslo"}'),
    ],
)
def test_arguments_are_given_in_the_form_that_the_template_writes(name, written, arguments):
    chat = renderer(TEMPLATES[name])
    assert f"<C>f {written}<E>" in chat.render(parse_messages(history(arguments)))
    other = chat.with_template_args({})
    assert f"<C>f {written}<E>" in other.render(parse_messages(history(arguments)))


@pytest.mark.parametrize("arguments", ["", None, "{}"])
@pytest.mark.parametrize("name", WRITTEN)
def test_no_arguments_are_an_empty_object(name, arguments):
    text = renderer(TEMPLATES[name]).render(parse_messages(history(arguments)))
    assert f"<C>f {'' if name == 'walks' else '```{}```' if name == 'joins' else '{}'}<E>" in text


def task_of(messages):
    return parse_conversation(
        LocatedRow({"messages": messages}, "rows.jsonl", "line", 1), DataConfig(path="rows.jsonl")
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_a_row_with_calls_is_learnt_in_that_form(name):
    chat = renderer(TEMPLATES[name])
    task = task_of([*history('{"city": "Oslo"}'), {"role": "assistant", "content": "A"}])
    rows = build_demonstration(chat, task.messages).rows
    learnt = "".join(chat.decode([i for i, m in zip(ids, mask, strict=True) if m]) for ids, mask in rows)
    assert learnt.count("Oslo") == 1


def test_a_call_without_a_text_has_null_content_where_the_template_asks_for_that():
    chat = renderer(NULLS)
    assert "<S>assistant:<C>f<E>" in chat.render(parse_messages(history("{}")))
    assert "<S>assistant:<C>f<E>" in chat.render([user_message(), Message("assistant", "", tool_calls=[bare_call()])])
    with pytest.raises(TemplateError, match="writes calls only beside a `content` that is null: write the text as a"):
        chat.render(parse_messages(history("{}", content="so")))


def user_message():
    return Message("user", "q")


def bare_call():
    """A call as some rows and environments write it."""
    return {"name": "f", "arguments": {}}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_of_an_environment_or_a_row_may_be_bare(name):
    assert "<C>f " in renderer(TEMPLATES[name]).render(
        [user_message(), Message("assistant", "", tool_calls=[bare_call()])]
    )


FIRST_ONLY = TEMPLATES["json"].replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
LAST_ONLY = TEMPLATES["json"].replace(
    "in m.tool_calls or []", "in (m.tool_calls or [] if messages | length < 5 or loop.index0 > 2 else [])"
)
TOOLS_SHOWN = "{{- tools | tojson if tools else '' -}}" + HEAD.replace("in m.tool_calls or []", "in []") + TAIL
LEAVES_OUT = {
    "the second": (FIRST_ONLY, history("{}", "{}"), "write each call as a message of its own"),
    "an earlier": (LAST_ONLY, [*history("{}"), *history("{}")], "write it into `content`"),
    "all": (TOOLS_SHOWN, history("{}"), "writes no calls in any form"),
    "arguments": (HEAD + TAIL, history('{"a": "Oslo"}'), "'Oslo' is not in its text"),
}


@pytest.mark.parametrize("case", LEAVES_OUT)
def test_a_call_that_the_template_leaves_out_is_refused_with_the_fix(case):
    """Also one whose name the text has elsewhere, such as in the tools or in another call."""
    template, messages, fix = LEAVES_OUT[case]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(TemplateError, match=r"leaves the call of 'f' out of message 1 ") as caught:
        renderer(template).render(parse_messages(messages), tools)
    assert fix in str(caught.value)
    with pytest.raises(TemplateError, match=r"leaves the call of 'f' out of message 1 "):
        build_demonstration(renderer(template), [*task_of([*messages, {"role": "assistant", "content": "A"}]).messages])


def test_a_template_that_decides_by_names_is_taken_at_its_text():
    by_name = TEMPLATES["json"].replace("{{- '<C>'", "{%- if c.function.name in ('f', 'quokka') -%}{{- '<C>'")
    by_name = by_name.replace("{%- endfor -%}{{- '<E>'", "{%- else -%}?{%- endif -%}{%- endfor -%}{{- '<E>'")
    assert "<C>f {}" in renderer(by_name).render(parse_messages(history("{}")))


ODD_TEXTS = ['é "x"', "it's \\ \n", "<b>&amp;</b>", "\u2028", "a\tb  c"]


@pytest.mark.parametrize("text", ODD_TEXTS)
@pytest.mark.parametrize("name", WRITTEN)
def test_no_text_in_the_arguments_is_taken_for_one_that_was_left_out(name, text):
    chat = renderer(TEMPLATES[name])
    arguments = {text: text, "more": [text, {"x": text, "y": 1e-7, "z": None}]}
    for given in (arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)):
        assert "<C>f " in chat.render(parse_messages(history(given)))


def test_arguments_that_are_no_object_are_named_where_the_template_refuses_them():
    assert '```{"city": "Os```' in renderer(TEMPLATES["joins"]).render(parse_messages(history('{"city": "Os')))
    with pytest.raises(
        TemplateError, match=r"a call in message 1 are no JSON object, write them as one: '\{\"city\": \"Os'"
    ):
        renderer(TEMPLATES["walks"]).render(parse_messages(history('{"city": "Os')))


def test_each_template_is_asked_once_for_its_form(monkeypatch):
    found = []

    def detect(render):
        found.append(detect_call_form(render))
        return found[-1]

    monkeypatch.setattr("r3async.rollout.renderer.detect_call_form", detect)
    chat = renderer(TEMPLATES["joins"])
    assert not found
    for _ in range(3):
        chat.render(parse_messages(history("{}")))
    assert found == [CallForm(has_text_arguments=True)]


async def test_a_request_whose_call_is_left_out_is_a_400_and_no_turn():
    without = HERMES.replace("in m.tool_calls or []", "in []")
    async with talking(["a"], without) as (_, session, client):
        for content in (None, "so"):
            with pytest.raises(openai.BadRequestError, match="leaves the call of 'f' out of message 1") as caught:
                await ask(client, history("{}", content=content), tools=[ADD])
            assert caught.value.param == "messages"
        assert session.turn_count == 0
