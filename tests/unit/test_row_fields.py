"""Columns and fields of rows that change what the model is shown, or what it learns: used, or the row is refused by name. A
supervised row and one of reinforcement learning have the same prompt."""

import asyncio
import json

import pytest

from r3async.config import ConfigError, DataConfig, EnvConfig, EpisodeConfig
from r3async.envs import Message
from r3async.envs.factory import build_environment_factory
from r3async.envs.row_conversations import parse_conversation
from r3async.envs.row_tasks import parse_task, parse_tools
from r3async.envs.rows import LocatedRow
from r3async.rollout.conversation import Conversation
from r3async.rollout.demonstrations import build_demonstration
from r3async.rollout.evaluation import drop_long_prompts
from r3async.rollout.renderer import ChatRenderer
from r3async.tools.init_model import build_byte_tokenizer

TEMPLATE = (
    "{%- if tools -%}{{- '[tools] ' + (tools | tojson) + '\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<S>' + m.role + '\\n' -}}"
    "{%- if m.reasoning_content -%}{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif -%}"
    "{{- m.content -}}{%- if m.tool_calls -%}{{- m.tool_calls | tojson -}}{%- endif -%}{{- '<E>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<S>assistant\\n' -}}{%- endif -%}"
)
USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


def renderer(template=TEMPLATE):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<E>"})
    tokenizer.add_tokens(["<S>"], special_tokens=True)
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


def found(row):
    return LocatedRow(row, "rows.jsonl", "line", 1)


def learnt(row):
    """Text of the conversation's one sample, and what is trained in it."""
    chat, task = renderer(), parse_conversation(found(row), DataConfig(path="rows.jsonl"))
    ((ids, mask),) = build_demonstration(chat, task.messages, parse_tools(task)).rows
    return chat.decode(ids), chat.decode([i for i, m in zip(ids, mask, strict=True) if m])


def environment(folder, row):
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return build_environment_factory(EnvConfig(name="dataset", args={"path": str(folder / "rows.jsonl")}))


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_beside_the_content_is_learnt_whatever_it_is_called(key):
    row = {"messages": [USER, {"role": "assistant", key: "because", "content": "A"}]}
    assert learnt(row)[1] == "<think>because</think>A<E>"


LEFT_OUT = [{name: 0} for name in ("weight", "train", "training", "trainable", "loss", "loss_mask")]


@pytest.mark.parametrize("mark", [*LEFT_OUT, {"masked": True}, {"train": False}])
def test_an_answer_that_is_not_to_be_learnt_is_shown(mark):
    text, trained = learnt({"messages": [USER, {"role": "assistant", "content": "BAD", **mark}, USER, ANSWER]})
    assert "BAD" in text
    assert trained == "A<E>"


@pytest.mark.parametrize("mark", [{"weight": 1}, {"train": True}, {"loss": None}, {"masked": False}, {"training": 1}])
def test_an_answer_that_is_to_be_learnt_is(mark):
    assert learnt({"messages": [USER, ANSWER | mark]})[1] == "A<E>"


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "JSON text"])
def test_tools_are_shown_to_both(tmp_path, tools):
    assert '"add"' in learnt({"tools": tools, "messages": [USER, ANSWER]})[0]
    env = environment(tmp_path, {"prompt": [USER], "answer": "A", "tools": tools})()
    asyncio.run(env.reset(0))
    assert env.tools == [TOOL]


def test_calls_have_arguments_as_objects():
    trained = learnt({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]})[1]
    assert '"arguments": {"a": 2}' in trained


def test_text_in_blocks_is_text():
    blocks = [{"type": "text", "text": "Q"}, {"type": "text", "text": "uestion"}]
    assert learnt({"messages": [{"role": "user", "content": blocks}, ANSWER]})[0].startswith("<S>user\nQuestion<E>")


ROWS = {
    "text": {"prompt": "Q", "completion": "A"},
    "messages": {"prompt": [{"role": "system", "content": "S"}, USER], "completion": "A"},
    "blocks": {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}], "completion": "A"},
    "tools": {"prompt": [USER], "completion": "A", "tools": [TOOL]},
    "tools as text": {"prompt": [USER], "completion": "A", "tools": json.dumps([TOOL])},
    "thought": {"prompt": [USER, ANSWER | {"thinking": "because"}, USER], "completion": "A"},
    "calls": {
        "prompt": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2", "name": "add"}],
        "completion": "A",
        "tools": [TOOL],
    },
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_the_same_prompt_when_it_is_learnt_and_when_it_is_played(tmp_path, row):
    chat, row = renderer(), ROWS[row] | {"answer": "A"}
    env = environment(tmp_path, row)()
    played = Conversation(chat, asyncio.run(env.reset(0)), env.tools).build_prompt().token_ids.tolist()
    task = parse_conversation(found(row), DataConfig(path="rows.jsonl"))
    ids, mask = build_demonstration(chat, task.messages, parse_tools(task)).rows[-1]
    answer = chat.encode("A<E>")
    assert ids == [*played, *answer]
    assert mask[-len(answer) :] == [True] * len(answer)


def test_tools_count_where_long_prompts_are_dropped(tmp_path):
    factory = environment(tmp_path, {"prompt": "Q", "answer": "A", "tools": [TOOL]})
    with pytest.raises(ConfigError, match=r"longer than `episode.max_prompt_tokens` = 30"):
        drop_long_prompts(factory, renderer(), EpisodeConfig(max_prompt_tokens=30, max_new_tokens=8))


BAD_COLUMNS = [
    ({"tools": ["add"]}, "`tools` must be a list of JSON schemas"),
    ({"tools": "add"}, "`tools` must be a list of JSON schemas"),
    ({"tools": "[" * 5000}, "`tools` must be a list of JSON schemas"),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "'chat_template_kwargs' has no effect: .*`episode.template_args`",
    ),
    ({"images": ["a.png"]}, "'images' has no effect: only text is shown"),
    ({"tools": None, "tool_defs": json.dumps([TOOL])}, "'tool_defs' has no effect: write its tools into .* `tools`"),
    ({"functions": [TOOL]}, "'functions' has no effect: write its tools"),
    ({"tool_definitions": [TOOL]}, "'tool_definitions' has no effect: write its tools"),
    ({"system": "S"}, r"'system' has no effect: put it into the messages, .*\{system\}"),
    ({"system_prompt": "S"}, r"'system_prompt' has no effect: .*\{system_prompt\}"),
    ({"documents": [{"text": "T"}]}, "'documents' has no effect: put their texts into the messages"),
    ({"enable_thinking": False}, "'enable_thinking' has no effect: .*`episode.template_args`"),
    ({"history": [["Q", "A"]]}, "'history' has no effect"),
    ({"loss_mask": [0, 1]}, "'loss_mask' has no effect: rows are texts"),
    ({"assistant_masks": [0, 1]}, "'assistant_masks' has no effect"),
    ({"sample_weight": 0.5}, "'sample_weight' has no effect: every answer has the weight 1"),
]
BAD_FIELDS = [
    ({"content": [{"type": "image_url", "image_url": "a.png"}]}, "must be text, or blocks of text"),
    ({"function_call": {"name": "add"}}, "`function_call`, which is not shown: write it as one of `tool_calls`"),
    ({"tools": [TOOL]}, "`tools`, which is not shown: write them into the row's column `tools`"),
    ({"tool_responses": [{"response": "5"}]}, "`tool_responses`, .* the role `tool`"),
    ({"channel": "analysis"}, "`channel`, .* as `reasoning_content`"),
    ({"reasoning": "one", "thinking": "another"}, "different thoughts"),
    ({"reasoning_content": ["one"]}, "must have role and content"),
    ({"weight": 0.5}, "`weight` = 0.5 of a message"),
    ({"train": "no"}, "`train` = 'no' of a message"),
    ({"from": "gpt", "value": "A"}, "`from`, which is not shown: write it as `role`"),
    ({"mask": True}, "`mask`, which is neither shown nor decides what is learnt .*masked do"),
    ({"train_detail": [{"begin_offset": 0}]}, "`train_detail`, which is neither"),
    ({"loss_scale": 0.5}, "`loss_scale`, which is neither"),
]


@pytest.mark.parametrize(
    ("columns", "fields", "message"), [*((c, {}, m) for c, m in BAD_COLUMNS), *(({}, f, m) for f, m in BAD_FIELDS)]
)
def test_a_column_or_a_field_of_a_message_that_would_have_no_effect_is_refused_by_both(columns, fields, message):
    for form, row in (
        (parse_conversation, {"messages": [USER, ANSWER | fields]}),
        (parse_task, {"prompt": [USER, ANSWER | fields, USER], "answer": "A"}),
    ):
        with pytest.raises(ConfigError, match=f"rows.jsonl, line 1: .*{message}"):
            form(found(row | columns), DataConfig(path="rows.jsonl"))


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_question_that_is_to_be_learnt_is_refused(role):
    asked = [{"role": role, "content": "Q", "weight": 1}, USER, ANSWER]
    with pytest.raises(ConfigError, match=f"`weight` of a message of the role '{role}': only answers"):
        learnt({"messages": asked})
    assert learnt({"messages": [asked[0] | {"weight": 0}, USER, ANSWER]})[1] == "A<E>"


def test_columns_for_rewards_and_keys_that_say_where_a_message_is_from_have_no_effect():
    columns = {"answer": "x", "id": "x", "metadata": {"a": 1}, "difficulty": "x", "label": 3}
    row = {"messages": [USER | {"id": 1, "timestamp": "t", "language": "en"}, ANSWER | {"model": "m", "extra": None}]}
    assert learnt(row | columns) == learnt({"messages": [USER, ANSWER]})


def test_a_column_that_the_prompt_reads_is_shown():
    prompt = [{"role": "system", "content": "{system}"}, {"role": "user", "content": "{documents.first}"}]
    row = {"system": "S", "documents": {"first": "Q"}, "completion": "A"}
    task = parse_conversation(found(row), DataConfig(path="rows.jsonl", prompt=prompt))
    assert [message.content for message in task.messages] == ["S", "Q", "A"]
    row = {"instruction": "Q", "input": "more", "answer": "A"}
    with pytest.raises(ConfigError, match=r"its column 'input' is not shown: .*'\{instruction\} \{input\}'"):
        parse_task(found(row), DataConfig(path="rows.jsonl", prompt="instruction"))
    task = parse_task(found(row), DataConfig(path="rows.jsonl", prompt="{instruction} {input}"))
    assert task.messages == [Message("user", "Q more")]


@pytest.mark.parametrize("empty", [None, [], "", {}])
@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs", "images"])
def test_a_column_with_nothing_in_it_is_none(column, empty):
    assert learnt({"messages": [USER, ANSWER], column: empty})[1] == "A<E>"


def test_a_conversation_of_which_nothing_is_to_be_learnt_is_refused():
    with pytest.raises(ConfigError, match="no answer of the assistant is to be learnt"):
        learnt({"messages": [USER, ANSWER | {"weight": 0}]})


def test_a_thought_in_a_prompt_that_the_template_does_not_read_is_refused(tmp_path):
    factory = environment(tmp_path, {"prompt": [USER, ANSWER | {"reasoning_content": "because"}, USER], "answer": "A"})
    plain = renderer("{% for m in messages %}{{ m.content }}<E>{% endfor %}")
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 1: the chat template reads no `reasoning_content`"):
        drop_long_prompts(factory, plain, EpisodeConfig())


def test_templates_read_the_thought_under_their_own_name():
    for name in ("reasoning_content", "reasoning", "thinking"):
        chat = renderer("{% for m in messages %}{{ m.NAME }}|{{ m.content }}<E>{% endfor %}".replace("NAME", name))
        messages = [Message("user", "Q"), Message("assistant", "A", reasoning_content="because"), Message("user", "Q")]
        assert chat.render(messages) == "|Q<E>because|A<E>|Q<E>"
