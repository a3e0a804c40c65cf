"""Supervised rows in the chat templates of published models: each is text that the template writes, or it is refused."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from r3async.config import DataConfig
from r3async.envs import REASONING_KEYS as THOUGHTS_BESIDE
from r3async.envs import Message
from r3async.envs.row_conversations import parse_conversation
from r3async.envs.row_tasks import NOT_SHOWN_OF_A_MESSAGE, parse_tools
from r3async.envs.rows import LocatedRow
from r3async.rollout.conversation import Conversation
from r3async.rollout.demonstrations import build_demonstration
from r3async.rollout.endpoint.protocol import parse_messages as parse_request
from r3async.rollout.renderer import ChatRenderer, TemplateError
from r3async.tools.init_model import build_byte_tokenizer

# Of the models behind it: the tokenizer's end of sequence, and further tokens that `eos_token_id` in its generation_config.json
# names.
NAMES_BY_ENDS = {
    ("<|END_OF_TURN_TOKEN|>",): "cohere cohere2",
    ("<｜end▁of▁sentence｜>",): "deepseek_r1_distill deepseek_r1_distill_training deepseekv3",
    ("<eos>",): "gemma",
    ("<eos>", "<end_of_turn>"): "gemma3",
    ("<eos>", "<turn|>", "<|tool_response>"): "gemma4 gemma4_v5",
    ("<|endoftext|>", "<|user|>", "<|observation|>"): "glm4moe",
    ("<|return|>", "<|call|>"): "gptoss",
    ("<|im_end|>",): "lfm2 lfm2_2_5 nemotron_3_5_lightning nemotron_3_nano qwen2_5_vl qwen3 qwen3_5_nothink \
qwen3_5_think qwen3_6 qwen3_8 qwen3_instruct_2507 template_minicpmv45",
    ("<|eot_id|>",): "llama3 llama3_1 llama3_2",
    ("<|eot|>",): "muse_glimmer",
    # Of qwen2_5 it is a base model's.
    ("<|endoftext|>",): "phi3 phi3_5 qwen2_5 template_basic template_chatml template_deepseek_vl2",
    ("<end_of_utterance>",): "smolvlm",
    ("</s>",): "llava_next",
}
ENDS = {name: ends for ends, names in NAMES_BY_ENDS.items() for name in names.split()}
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


def asked(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "id": "call_abcde", "function": {"name": "add", "arguments": '{"a": 2, "b": "two"}'}}
ADD = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
THOUGHTS = [asked("2+2?"), said("<think>\nwhy not\n</think>\n\nIt is 4.")]
THOUGHTS += [asked("and 3?"), said("<think>\nadd on\n</think>\n\nIt is 7.")]
PLAIN = [asked("2+2?"), said("It is 4.")]
CONVERSATIONS = {
    "plain": PLAIN,
    "turns": [{"role": "system", "content": "Be brief."}, *PLAIN, asked("and 3?"), said("It is 7.")],
    "thought": THOUGHTS[:2],
    "thoughts": THOUGHTS,
    "thought beside": [asked("2+2?"), said("It is 4.", reasoning_content="why not")],
    "call": [
        asked("2+2?"),
        said(None, tool_calls=[CALL]),
        {"role": "tool", "name": "add", "tool_call_id": "call_abcde", "content": "4"},
        said("It is 4."),
    ],
}
NO_THOUGHT_BESIDE = (
    "cohere cohere2 deepseek_r1_distill deepseek_r1_distill_training deepseekv3 gemma gemma3 gemma4 lfm2 llama3 \
llama3_1 llama3_2 phi3 phi3_5 qwen2_5 qwen2_5_vl qwen3_instruct_2507 template_chatml template_deepseek_vl2"
)
NO_CALLS = "cohere cohere2 deepseek_r1_distill deepseek_r1_distill_training gemma gemma3 lfm2 llama3 phi3 phi3_5 \
qwen2_5_vl template_chatml template_deepseek_vl2"
JOINS_TEXTS = "deepseekv3"
"""Templates that join a call's arguments, which must be a text, with what is around them."""
NO_TEXT = "smolvlm llava_next template_basic"
REFUSED = {
    **dict.fromkeys(CONVERSATIONS, NO_TEXT),
    "turns": f"{NO_TEXT} gemma",
    "thought": f"{NO_TEXT} deepseek_r1_distill deepseekv3 qwen3_8",
    "thoughts": f"{NO_TEXT} deepseek_r1_distill deepseekv3 qwen3_8",
    "thought beside": f"{NO_TEXT} {NO_THOUGHT_BESIDE}",
    "call": f"{NO_TEXT} {NO_CALLS}",
}
"""Templates that drop a thought or a call, know no system message, take no text, or end no answer."""
NEXT = {"glm4moe": "<|user|>", "template_chatml": "<|im_end|>"}
"""Where the template leaves the end of the last answer to the message behind it: what that begins with."""


SHOWN_BY_ROLES = {"end_turn"}
"""Fields of a message that templates read and that follow from the roles around it."""


def read_of_messages(source):
    """Names of the fields that a template reads of a variable that is called like a message."""
    named = r"(?:message|msg|m|follow|messages\[[^\]]+\])"
    forms = rf"\b{named}\.(?!get\b|items\b)(\w+)|\b{named}(?:\.get\(|\[)['\"](\w+)['\"]|['\"](\w+)['\"] in {named}\b"
    return {name for found in re.findall(forms, source) for name in found if name}


def test_what_a_template_reads_of_a_message_is_a_field_of_ours_or_refused_by_name():
    read = {field: name for name in published_names() for field in read_of_messages(source_of(name))}
    assert {"role", "content", "tool_calls", "thinking", "tool_responses"} <= read.keys()
    assert read.keys() <= {*Message.__struct_fields__, *THOUGHTS_BESIDE, *NOT_SHOWN_OF_A_MESSAGE, *SHOWN_BY_ROLES}


ARGUMENTS = {
    "object": {"a": 2, "b": "two"},
    "text": '{"a": 2, "b": "two"}',
    "quotes": {"a": 'é "x" \\ it\'s\nb', "b": ['é"', {"c": 1e-7}, True, None]},
    "empty": "",
    "null": None,
}
ONE_CALL = "llama3_1 llama3_2 gptoss"
"""Templates that write one call of a message."""
NULL_CONTENT = "deepseek_r1_distill deepseek_r1_distill_training"
"""Templates that write calls only of a message whose `content` is null."""


def history(arguments, content=None, count=1):
    """Messages of a request whose policy made `count` calls of `add`."""
    calls = [{**CALL, "id": f"abcde123{i}", "function": {"name": "add", "arguments": arguments}} for i in range(count)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
    return parse_request([asked("2+2?"), said(content, tool_calls=calls), *results])


@pytest.mark.parametrize("name", published_names())
def test_plain_messages_are_rendered_as_by_the_tokenizer(name):
    if name in NO_TEXT:
        pytest.skip("it takes no text")
    chat = published(name)
    for messages in (PLAIN[:1], [*PLAIN, asked(" and <b>3</b>?\n"), said("It is 7.")]):
        asked_of = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = chat.render([Message(**message) for message in messages])
        assert text == asked_of
        assert chat.encode(text) == chat.tokenizer.encode(asked_of, add_special_tokens=False)


@pytest.mark.long
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", published_names())
def test_a_call_in_a_history_is_in_the_template_s_text_or_refused(name, arguments):
    chat = published(name)
    if name in f"{NO_TEXT} {NO_CALLS}".split() and name not in NULL_CONTENT.split():
        with pytest.raises(TemplateError, match=r"writes no calls in any form|chat template refuses"):
            chat.render(history(ARGUMENTS[arguments]))
        return
    before = chat.render([Message("user", "2+2?")])
    for tools in ([], [{"type": "function", "function": ADD}]):
        text = chat.render(history(ARGUMENTS[arguments]), tools)
        assert text.count("add") > chat.render([Message("user", "2+2?")], tools).count("add")
        assert arguments not in ("object", "text") or "two" in text
    assert before != text


@pytest.mark.parametrize("name", published_names())
def test_a_second_call_and_a_text_beside_a_call_are_written_or_refused(name):
    chat = published(name)
    if name in f"{NO_TEXT} {NO_CALLS}".split() and name not in NULL_CONTENT.split():
        pytest.skip("writes no calls")
    if name in ONE_CALL.split():
        with pytest.raises(TemplateError, match=r"each call as a message|single tool-calls"):
            chat.render(history({}, count=2))
    else:
        assert len(chat.render(history({}, count=2))) > len(chat.render(history({}))) + len("add")
    if name in NULL_CONTENT.split():
        with pytest.raises(TemplateError, match="writes calls only beside a `content` that is null"):
            chat.render(history({}, content="so"))
    else:
        assert "add" in chat.render(history({}, content="so"))


def task_of(name):
    row = {
        "messages": CONVERSATIONS[name],
        "tools": [{"type": "function", "function": ADD}] if name == "call" else None,
    }
    return parse_conversation(LocatedRow(row, "rows.jsonl", "line", 1), DataConfig(path="rows.jsonl"))


def learnt(chat, ids, mask):
    return chat.decode([i for i, m in zip(ids, mask, strict=True) if m])


@pytest.mark.long
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", published_names())
def test_a_row_is_the_beginning_of_the_template_s_own_text_or_refused(name, conversation):
    chat, task = published(name), task_of(conversation)
    if name in REFUSED[conversation].split():
        with pytest.raises(TemplateError, match=r"chat template (leaves|refuses|reads no|writes no|writes a thought)"):
            build_demonstration(chat, task.messages, parse_tools(task))
        return
    rows = build_demonstration(chat, task.messages, parse_tools(task)).rows
    given = [
        m.to_template_dict() | ({"thinking": thought, "reasoning": thought} if (thought := m.reasoning_content) else {})
        for m in task.messages
    ]
    for call in (call for message in given for call in message.get("tool_calls", ()) if name in JOINS_TEXTS.split()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    whole = chat.tokenizer.apply_chat_template(given, tools=parse_tools(task) or None, tokenize=False)
    assert (whole + NEXT.get(name, "")).startswith(chat.decode(rows[-1][0]))
    answers = [m for m in task.messages if m.role == "assistant"]
    trained = "".join(learnt(chat, *row) for row in rows)
    assert len(chat.stop_pattern.findall(trained)) == len(answers)
    assert chat.stop_pattern.search(trained[-25:])
    for words in ("It is 4.", *re.findall("why not|add on|It is 7.", str(answers))):
        assert trained.count(words) == 1


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize(
    "name", ["glm4moe", "qwen3", "qwen3_5_think", "qwen3_5_nothink", "template_minicpmv45", "nemotron_3_nano"]
)
def test_a_row_is_the_template_s_text_however_it_is_asked_to_think(name, thinks):
    chat, task = published(name, enable_thinking=thinks), task_of("thoughts")
    rows = build_demonstration(chat, task.messages).rows
    given = [m.to_template_dict() for m in task.messages]
    whole = chat.tokenizer.apply_chat_template(given, tokenize=False, enable_thinking=thinks)
    assert (whole + NEXT.get(name, "")).startswith(chat.decode(rows[-1][0]))


@pytest.mark.parametrize("name", published_names())
def test_an_answer_is_learnt_behind_the_prompt_that_an_episode_has(name):
    """Or the demonstration says what of the prompt the template does not write before it."""
    chat, task = published(name), task_of("plain")
    if name in REFUSED["plain"].split():
        pytest.skip("refused")
    demonstration = build_demonstration(chat, task.messages)
    ((ids, mask),) = demonstration.rows
    prompt = Conversation(chat, task.messages[:1]).build_prompt().token_ids.tolist()
    left_out = chat.encode(demonstration.unwritten_prompt_end)
    assert ids[: mask.index(True)] + left_out == prompt
    assert bool(left_out) == (
        name in ("deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3") or "nemotron" in name
    )


def test_an_episode_s_answer_ends_where_a_learnt_one_does():
    """Also with a base model, whose end of sequence is another than the template's."""
    for name in set(published_names()) - set(NO_TEXT.split()):
        chat = published(name)
        ((ids, _),) = build_demonstration(chat, task_of("plain").messages).rows
        assert ids[-1] in chat.stop_token_ids
    assert published("qwen2_5").stop_token_ids == tuple(
        published("qwen2_5").tokenizer.convert_tokens_to_ids([*ENDS["qwen2_5"], "<|im_end|>"])
    )
