"""Turn by turn, only what is new is encoded, sampled tokens stay, and the prompt is what the template writes."""

import re
from unittest.mock import Mock

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from r3async.envs import Message
from r3async.rollout.conversation import Conversation
from r3async.rollout.renderer import ChatRenderer, TemplateError
from r3async.tools.init_model import build_byte_tokenizer
from tests.helpers.serving import merging_renderer
from tests.helpers.templates import DEEPSEEK_R1, FAMILIES, GEMMA, LLAMA3, MISTRAL, QWEN3, renderer

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

# DeepSeek-R1's opens a thought for every answer, and leaves it out of every earlier one.
KEEP_HISTORY = [family for family in FAMILIES.values() if family is not DEEPSEEK_R1]


def user(text):
    return Message("user", text)


def prompt_of(conversation):
    return conversation.build_prompt().token_ids.tolist()


def answer_ids(chat, text, end=True):
    return [*chat.encode(text), *([chat.eos_token_id] if end else [])]


def spelled(chat):
    """An answer of two tokens, where the renderer writes one."""
    return [chat.encode("a")[0], chat.encode("b")[0], chat.eos_token_id]


def after(chat, answer, *asked):
    """A conversation with one answer so far."""
    conversation = Conversation(chat, [user(words) for words in asked])
    conversation.build_prompt()
    conversation.add_answer(answer)
    return conversation


def talk(chat, answers, asked, end=True):
    """Prompts before each answer, the tokens seen after it, and the last prompt."""
    conversation = Conversation(chat, [user(asked[0])])
    prompts, seen = [], []
    for answer, words in zip(answers, asked[1:], strict=True):
        prompts.append(prompt_of(conversation))
        seen.append(prompts[-1] + answer_ids(chat, answer, end))
        conversation.add_answer(answer_ids(chat, answer, end))
        conversation.add_messages([user(words)])
    return prompts, seen, prompt_of(conversation), conversation


@pytest.mark.parametrize(
    "template",
    [None, CHATML, LEADING_SYSTEM, STRIPS_THOUGHT, *KEEP_HISTORY],
    ids=["ours", "chatml", "leading-system", "thought-of-the-last", *(n for n in FAMILIES if n != "deepseek-r1")],
)
def test_the_prompt_is_what_the_template_writes_and_extends_what_was_seen(template):
    chat = renderer(template)
    prompts, seen, last, conversation = talk(chat, ["cba", "zyx"], ["abc", "xyz", "now"])
    assert prompts[1][: len(seen[0])] == seen[0]
    assert last[: len(seen[1])] == seen[1]
    whole = chat.render(conversation.messages)
    assert chat.decode(last).replace(" ", "") == whole.replace(" ", "")
    if template is not MISTRAL:  # which puts a blank before each answer that no model samples
        assert chat.decode(last) == whole
        assert last == chat.encode(whole)


@pytest.mark.parametrize("family", [LLAMA3, GEMMA], ids=["llama3", "gemma"])
def test_white_space_that_a_template_trims_stays_as_it_was_sampled(family):
    chat = renderer(family)
    _, seen, last, conversation = talk(chat, [" \n two  \n"], ["one", "three"])
    assert "two<" in chat.render(conversation.messages)
    assert last[: len(seen[0])] == seen[0]


@pytest.mark.parametrize("cut", ["half an answ", "half an ", "half an\n\n", " ", " a \n"])
def test_the_white_space_that_a_cut_answer_ends_in_is_not_shown_to_the_model_twice(cut):
    for family in KEEP_HISTORY:
        chat = renderer(family)
        _, seen, last, _ = talk(chat, [cut], ["one", "two"], end=False)
        assert last[: len(seen[0])] == seen[0]
        assert last[len(seen[0])] == chat.eos_token_id
    plain = renderer()
    _, seen, last, conversation = talk(plain, [cut], ["one", "two"], end=False)
    assert plain.decode(last) == plain.render(conversation.messages)


@pytest.mark.parametrize("family", [QWEN3, DEEPSEEK_R1], ids=["qwen3", "deepseek-r1"])
def test_a_template_that_strips_thoughts_breaks_where_it_strips_and_not_before(family):
    chat = renderer(family)
    prompts, seen, last, conversation = talk(chat, ["<think>\nhm\n</think>\n\nfive"], ["2 + 3?", "2 + 4?"])
    assert last[: len(seen[0])] != seen[0]
    assert chat.decode(last) == chat.render(conversation.messages)
    assert "hm" not in chat.decode(last)
    asked = chat.decode(prompts[0]).index("2 + 3?")
    kept = chat.encode(chat.decode(prompts[0])[:asked])
    assert last[: len(kept)] == kept


def test_thoughts_between_tool_calls_stay_until_the_user_speaks_again():
    chat = renderer(QWEN3)
    conversation = Conversation(chat, [user("add")])
    seen = prompt_of(conversation) + answer_ids(chat, "<think>\nhm\n</think>\n\ncall")
    conversation.add_answer(seen[len(prompt_of(conversation)) :])
    conversation.add_messages([Message("tool", "7")])
    assert prompt_of(conversation)[: len(seen)] == seen


def test_variables_of_the_template_are_passed_on_and_may_break_the_prefix():
    chat = renderer(QWEN3, enable_thinking=False)
    assert chat.render([user("u")]).endswith("<think>\n\n</think>\n\n")
    _, seen, last, conversation = talk(chat, ["five"], ["2 + 3?", "2 + 4?"])
    assert last[: len(seen[0])] != seen[0]
    assert chat.decode(last) == chat.render(conversation.messages)


def test_a_late_system_message_that_is_merged_into_the_last_question_breaks():
    chat = renderer(MISTRAL)
    conversation = Conversation(chat, [Message("system", "be brief"), user("one")])
    seen = prompt_of(conversation) + answer_ids(chat, "1")
    conversation.add_answer(answer_ids(chat, "1"))
    conversation.add_messages([user("two")])
    assert prompt_of(conversation)[: len(seen)] != seen
    assert chat.decode(prompt_of(conversation)).count("be brief") == 1


def test_a_compacted_history_keeps_the_tokens_of_the_answers_it_repeats():
    """No byte-level tokenizer would ever encode them so: what stands there was sampled."""
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens(["ab"])
    chat = ChatRenderer(tokenizer)
    odd = [tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("b"), chat.eos_token_id]
    assert chat.encode("ab") != odd[:2]
    conversation = after(chat, odd, "one", "two")
    conversation.add_messages([user("three")])
    prompt_of(conversation)
    conversation.add_answer(answer_ids(chat, "no"))
    conversation.replace_messages(
        [user("in short"), Message("assistant", "ab"), user("four"), Message("assistant", "other"), user("x")]
    )
    prompt = prompt_of(conversation)
    at = next(i for i in range(len(prompt)) if prompt[i : i + 3] == odd)
    assert chat.decode(prompt[:at]) == "<|user|>in short<|assistant|>"
    assert chat.decode(prompt) == chat.render(conversation.messages)


ENDS_IN_THE_SAME = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize("template", [None, ENDS_IN_THE_SAME], ids=["ours", "each ends in the same token"])
@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["ab", "aa", "abab", "b"]), st.booleans(), st.sampled_from(["x", "so ab", "aa"])),
        min_size=1,
        max_size=6,
    ),
    dropped=st.integers(0, 3),
    after_each=st.booleans(),
)
def test_answers_keep_their_own_tokens_where_others_say_the_same(template, turns, dropped, after_each):
    """Of a history that is edited, or whose beginning is left out: whoever else said the same words, in whatever tokens."""
    chat = merging_renderer(template)
    (assistant,) = chat.encode("<|assistant|>")
    history, sampled = [user("ab")], []
    conversation = Conversation(chat, history)
    for text, spelled, then in turns:
        conversation.build_prompt()
        ids = [chat.encode(c)[0] for c in text] if spelled else chat.encode(text)
        conversation.add_answer([*ids, chat.eos_token_id])
        sampled.append([*ids, chat.eos_token_id])
        history += [Message("assistant", text), user(then)]
        conversation.add_messages(history[-1:])
        if after_each:
            history[0] = user(history[0].content + "!")
            conversation.replace_messages(history)
    kept = history[2 * min(dropped, len(turns) - 1) :]
    conversation.replace_messages([user("so far: ab"), *kept[1:]])
    prompt = prompt_of(conversation)
    assert chat.decode(prompt) == chat.render(conversation.messages)
    between = len(chat.encode("\n")) if template else 0
    starts = [i + 1 + between for i, token in enumerate(prompt) if token == assistant][:-1]
    answers = sampled[-len(starts) :]
    assert [prompt[at : at + len(ids)] for at, ids in zip(starts, answers, strict=True)] == answers


def test_an_answer_that_is_repeated_twice_stands_once_and_what_only_quotes_it_is_others_text():
    chat = merging_renderer(ENDS_IN_THE_SAME)
    odd = spelled(chat)
    conversation = after(chat, odd, "x")
    conversation.replace_messages(
        [user("say ab"), Message("assistant", "ab"), user("x"), Message("assistant", "ab"), user("you said ab")]
    )
    prompt = prompt_of(conversation)
    (at,) = (i for i in range(len(prompt)) if prompt[i : i + 3] == odd)
    assert chat.decode(prompt[:at]).endswith("<|user|>\nx<|end|>\n<|assistant|>\n")


def test_where_the_template_does_not_show_the_place_of_an_answer_its_text_is_encoded():
    """It says how long each message is, so that it writes something else when a mark is behind one."""
    chat = merging_renderer(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | length }}:{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    )
    conversation = after(chat, spelled(chat), "x")
    conversation.replace_messages([user("y"), Message("assistant", "ab"), user("z")])
    assert prompt_of(conversation) == chat.encode(chat.render(conversation.messages))


def test_what_a_message_does_not_have_the_template_does_not_see():
    assert Message("user", "x").to_template_dict() == {"role": "user", "content": "x"}
    call = {"function": {"name": "add", "arguments": {}}}
    answer = Message("assistant", "", tool_calls=[call])
    assert answer.to_template_dict() == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_tokenizer_without_a_template_or_a_template_that_fails_is_refused_when_it_is_loaded():
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="no chat template"):
        ChatRenderer(tokenizer)
    with pytest.raises(TemplateError, match="roles user: no thanks"):
        renderer("{{ raise_exception('no thanks') }}")
    with pytest.raises(TemplateError, match="System role not supported"):
        Conversation(renderer(GEMMA), [Message("system", "s"), user("u")]).build_prompt()


def counted(template, monkeypatch):
    """A renderer, and what it asks for a template's text and for tokens from now on."""
    render = Mock(side_effect=jinja2.Template.render)
    monkeypatch.setattr(jinja2.Template, "render", lambda *args, **named: render(*args, **named))
    chat = renderer(template)
    render.reset_mock()
    chat.encode = Mock(wraps=chat.encode)
    return chat, render, chat.encode


OWN_TAGS = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ strftime_now('%Y') }}{{ messages|tojson }}"
NAMED = {"default": CHATML, "tool_use": "{{ tools|tojson }}" + CHATML}


class Shouted(str):
    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


@pytest.mark.parametrize("template", [*FAMILIES.values(), CHATML, OWN_TAGS, NAMED, None])
def test_every_message_is_rendered_as_by_the_tokenizer_and_a_plain_one_without_it(template):
    tool = {"type": "function", "function": {"name": "add"}}
    plain = [user("hello\n <b> {{ x }}"), Message("assistant", "one"), user("")]
    for messages, tools, is_plain in (
        (plain[:1], [], True),
        (plain, [], True),
        (plain, [tool], False),
        ([user("hello"), Message("assistant", "x"), Message("tool", "2", name="add")], [], False),
    ):
        chat = renderer(template)
        theirs = chat.tokenizer.apply_chat_template
        chat.tokenizer.apply_chat_template = Mock(wraps=theirs)
        shown = [message.to_template_dict() for message in messages]
        try:
            text = theirs(shown, tools=tools or None, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            with pytest.raises(TemplateError, match=re.escape(str(error))):
                chat.render(messages, tools)
            continue
        assert chat.render(messages, tools) == text
        assert chat.tokenizer.apply_chat_template.called is not (is_plain and template is not NAMED)


@pytest.mark.parametrize(
    "args",
    [
        {"eos_token": "!"},
        {"n": [1, (2,)]},
        {"n": Shouted("word")},
        {"documents": [{"n": 1}]},
        {"add_generation_prompt": False},
    ],
)
def test_variables_reach_the_template_as_the_tokenizer_hands_them(args):
    template = "{{ eos_token }}{{ n }}{{ documents }}{{ add_generation_prompt }}{{ messages[0].content }}"
    chat = renderer(template, **args)
    asked = {"add_generation_prompt": True, **args}
    assert chat.render([user("x")]) == chat.tokenizer.apply_chat_template([asked_user("x")], tokenize=False, **asked)


class Backwards(PreTrainedTokenizerFast):
    def _encode_plus(self, text, **options):
        return super()._encode_plus(text[::-1], **options)

    def _decode(self, token_ids, **options):
        return super()._decode(token_ids, **options)[::-1]


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES.values(), None])
@given(text=st.text(max_size=30))
def test_text_has_the_tokens_that_the_tokenizer_gives_it_and_back(family, text):
    chat = renderer(family)
    tokenizer = chat.tokenizer
    for asked in (text, text + "<|im_start|>" + text + tokenizer.eos_token):
        token_ids = chat.encode(asked)
        assert token_ids == tokenizer.encode(asked, add_special_tokens=False)
        assert chat.decode(token_ids) == chat.decode(np.asarray(token_ids, np.int32)) == asked
        assert tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) == asked


def test_a_tokenizer_that_encodes_otherwise_is_asked_itself():
    tokenizer = build_byte_tokenizer()
    own = Backwards(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>", chat_template=CHATML)
    chat = ChatRenderer(own)
    assert chat.decode(chat.encode("abc")) == "abc"
    assert chat.encode("abc") == tokenizer.encode("cba")
    chat = ChatRenderer(tokenizer)
    tokenizer("abc", truncation=True, max_length=1, padding="max_length")
    assert chat.encode("abc") == tokenizer.encode("abc", add_special_tokens=False)
    tokenizer.split_special_tokens = True
    assert ChatRenderer(tokenizer).encode("<|end|>") == tokenizer.encode("<|end|>", add_special_tokens=False)


def asked_user(text):
    return user(text).to_template_dict()


def test_the_episodes_of_a_group_begin_with_one_prompt_which_is_rendered_and_encoded_once(monkeypatch):
    chat, render, encode = counted(QWEN3, monkeypatch)
    groups = [[Message("system", "be brief"), user(f"task {group}")] for group in range(4)]
    prompts = [[Conversation(chat, messages).build_prompt().token_ids for _ in range(8)] for messages in groups]
    assert (render.call_count, encode.call_count) == (4, 4)
    for same, other in zip(prompts, [Conversation(renderer(QWEN3), messages) for messages in groups], strict=True):
        assert {tuple(ids) for ids in same} == {tuple(other.build_prompt().token_ids)}
    assert not chat.encode_cached("task").flags.writeable


def test_a_template_that_tells_the_time_is_asked_each_time_and_so_is_what_is_not_plain(monkeypatch):
    chat, render, _ = counted("{% if false %}{{ strftime_now('%Y') }}{% endif %}" + CHATML, monkeypatch)
    for _ in range(3):
        chat.render([user("hello")])
    assert render.call_count == 3
    monkeypatch.undo()
    chat, render, _ = counted(QWEN3, monkeypatch)
    for _ in range(3):
        chat.render([user("hello"), Message("assistant", "add"), Message("tool", "2", tool_call_id="1")])
        chat.render([user("hello")], tools=[{"type": "function", "function": {"name": "add"}}])
        chat.render([user("new")])
    assert render.call_count == 3 + 3 + 1
