"""A turn that is rendered beside a part of its conversation is as beside the whole: token for token, for any template."""

import functools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3async.data.model_shape import RoutingShape
from r3async.envs import Message
from r3async.rollout.conversation import Conversation
from r3async.rollout.growing_text import GrowingText, TemplateAnalysis
from r3async.rollout.renderer import ChatRenderer, TemplateError
from tests.helpers.templates import FAMILIES, GROUPS_TOOLS, renderer

SHAPE = RoutingShape(layers=1, top_k=2, num_experts=8)

# Questions are numbered.
NUMBERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|end|>"
    "{% else %}<{{ loop.index }}>{{ m.content }}<|assistant|>{% endif %}{% endfor %}"
)
# Only what was said last is shown.
FORGETS = "{% for m in messages[-9:] %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
# How often somebody said so decides how everything is written.
SHOUTS = (
    "{% set ns = namespace(loud=0) %}{% for m in messages %}{% if 'LOUD' in m.content %}{% set ns.loud = ns.loud + 1 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content | upper if ns.loud > 2 else m.content }}"
    "<|end|>{% endfor %}<|assistant|>"
)
# There is no text behind the last message, and an answer is followed by a mark if a question follows.
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' and not loop.last %}<|end|>"
    "{% endif %}\n{% endfor %}"
)
TEMPLATES = {**FAMILIES, "qwen2-chat": GROUPS_TOOLS, "numbers": NUMBERS, "forgets": FORGETS}
TEMPLATES |= {"shouts": SHOUTS, "bare": BARE, "ours": None}

words = st.sampled_from(
    ["yes", " no\n", "a b", "", "<think>\nhm\n</think>\n\nfive", "</think>x", "LOUD", "<|end|>", " "]
)
message = st.builds(Message, st.sampled_from(["user", "user", "tool", "tool", "system", "assistant"]), words)
call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
events = st.fixed_dictionaries(
    {
        "answer": words,
        "ended": st.booleans(),
        "calls": st.sampled_from([False, False, False, True]),
        "then": st.one_of(
            st.just([Message("user", "more")]), st.just([Message("tool", "7")]), st.lists(message, max_size=3)
        ),
        "rewrites": st.sampled_from([False] * 15 + [True]),
    }
)
steady = st.lists(events, max_size=3).flatmap(lambda few: st.integers(1, 24).map(lambda n: few * n))
begins = st.one_of(st.just([Message("user", "go")]), st.lists(message, min_size=1, max_size=4))


@functools.cache
def renderers(name):
    return renderer(TEMPLATES[name]), renderer(TEMPLATES[name])


def two_of(name):
    """The second renders every conversation whole; neither has seen any."""
    for chat in renderers(name):
        chat.template_analysis = TemplateAnalysis(chat.tokenizer.chat_template)
    chat.template_analysis.require_full_render("the test compares with it")
    return renderers(name)


def prompt_of(talk):
    try:
        return talk.build_prompt().token_ids.tolist()
    except TemplateError as error:
        return str(error)


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=12)
@given(first=begins, played=st.one_of(steady, st.lists(events, max_size=12)), tools=st.booleans())
def test_every_prompt_is_that_of_the_whole_rendering(name, first, played, tools):
    part, whole = two_of(name)
    talks = [Conversation(chat, first, [call] if tools else ()) for chat in (part, whole)]
    for event in played:
        prompts = [prompt_of(talk) for talk in talks]
        assert prompts[0] == prompts[1]
        if isinstance(prompts[0], str):
            return
        ids = [*part.encode(event["answer"] or "x"), *([part.eos_token_id] if event["ended"] else [])]
        said = Message("assistant", "", tool_calls=[call]) if event["calls"] else None
        for talk in talks:
            talk.add_answer(ids, said)
            (talk.replace_messages if event["rewrites"] else talk.add_messages)(
                event["then"] or [Message("user", "on")]
            )
    assert prompt_of(talks[0]) == prompt_of(talks[1])


class Counts(ChatRenderer):
    rendered = 0

    def render(self, messages, tools=()):
        self.rendered += len(messages)
        return super().render(messages, tools)


def rendered_by(tokenizer, turns, answer, then):
    """Messages that so many turns render, and what the template's habits are then."""
    chat = Counts(tokenizer)
    talk = Conversation(chat, [Message("system", "be brief"), Message("user", "go")])
    for turn in range(turns):
        talk.build_prompt()
        talk.add_answer([*chat.encode(answer), chat.eos_token_id], turn=turn)
        talk.add_messages(then(turn))
    return chat.rendered, chat.template_analysis


def asks(turn):
    return [Message("user", f"and {turn}?")]


def results(turn):
    """Two results of tools; after every 25th turn the user speaks."""
    return asks(turn) if turn % 25 == 24 else [Message("tool", str(turn)), Message("tool", "ok")]


THOUGHT = "<think>\nhm\n</think>\n\nadd"


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "answer", "then"),
    [
        (None, "yes", asks),
        (FAMILIES["qwen2"], "yes", asks),
        (FAMILIES["qwen3"], "yes", asks),
        (FAMILIES["qwen3"], "yes", results),
        (FAMILIES["llama3"], " yes ", asks),
        (TEMPLATES["qwen2-chat"], "yes", results),
        (SHOUTS.replace("ns.loud + 1", "1"), "yes", asks),
    ],
)
def test_a_turn_renders_as_many_messages_late_as_early(template, answer, then):
    tokenizer = renderer(template).tokenizer
    (few, _), (many, habits) = (rendered_by(tokenizer, turns, answer, then) for turns in (100, 400))
    assert not habits.full_render_reason
    assert many < 5 * few
    assert many < 400 * 25


def test_thoughts_between_tool_calls_are_rendered_in_part_until_the_user_speaks():
    """The user's message takes them out of every earlier answer: then, and only then, the whole is rendered."""
    rendered, habits = rendered_by(renderer(FAMILIES["qwen3"]).tokenizer, 200, THOUGHT, results)
    assert not habits.full_render_reason
    assert rendered < 2 * sum(3 * 25 * spoken for spoken in range(1, 9)) + 200 * 30


@pytest.mark.parametrize(
    ("template", "reason"), [(NUMBERS, "depends on turns before"), (FORGETS, "compares with 9"), (SHOUTS, "it counts")]
)
def test_a_template_that_needs_the_whole_gets_it_and_the_reason_is_logged_once(template, reason, caplog):
    tokenizer = renderer(template).tokenizer
    with caplog.at_level(logging.WARNING, logger="r3async.rollout.growing_text"):
        caplog.clear()
        _, habits = rendered_by(tokenizer, 40, "yes", asks)
    assert reason in habits.full_render_reason
    assert [reason in record.message for record in caplog.records] == [True]


def test_the_tag_that_only_transformers_knows_is_no_reason():
    habits = TemplateAnalysis("{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% endfor %}")
    assert not habits.full_render_reason
    assert "cannot be read" in TemplateAnalysis("{% for m in messages %}").full_render_reason


def test_a_thought_of_long_ago_is_taken_out_as_from_the_whole():
    """Its turn alone has that shape, and stays in the window for it."""
    part, whole = two_of("qwen3")
    prompts = []
    for chat in (part, whole):
        talk = Conversation(chat, [Message("user", "go")])
        for turn in range(40):
            talk.build_prompt()
            talk.add_answer([*chat.encode(THOUGHT if turn == 3 else "add"), chat.eos_token_id])
            talk.add_messages([Message("user" if turn == 1 else "tool", "7")])
        assert "hm" in chat.decode(talk.build_prompt().token_ids)
        talk.add_answer([*chat.encode("add"), chat.eos_token_id])
        talk.add_messages([Message("user", "and now?")])
        prompts.append(talk.build_prompt().token_ids.tolist())
    assert prompts[0] == prompts[1]
    assert "hm" not in part.decode(prompts[0])


def test_what_no_window_shows_the_audit_finds():
    """A template that begins otherwise where there are more than 50 messages: seen when their number has doubled."""
    habits = TemplateAnalysis("{% for m in messages %}{{ m.content }}{% endfor %}")
    text = GrowingText(
        lambda messages: ("<many>" if len(messages) > 50 else "") + "".join(m.content for m in messages), habits
    )
    text.render_first([Message("user", "go")])
    extends = [
        text.render_next([Message("assistant", f"a{turn}"), Message("user", f"b{turn}")])[1] for turn in range(60)
    ]
    assert False in extends[25:50]
    assert "long before" in habits.full_render_reason
    assert text.text.startswith("<many>goa0b0")
