"""A row is the same from every kind of file, and from a program: the same prompt, the same learnt text, and the same values
at a reward, in a process of its own or not."""

import datetime
import decimal
import json
import math
import uuid

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from r3async.config import ConfigError, DataConfig, EnvConfig
from r3async.envs import Action
from r3async.envs.factory import build_environment_factory
from r3async.envs.passed_objects import extract_objects, register_objects
from r3async.envs.row_conversations import parse_conversation
from r3async.envs.row_tasks import parse_tools
from r3async.envs.row_values import to_plain_value
from r3async.envs.rows import read_rows
from r3async.rollout.demonstrations import build_demonstration
from r3async.rollout.renderer import ChatRenderer
from r3async.tools.init_model import build_byte_tokenizer

TEMPLATE = (
    "{%- if tools -%}{{- '[tools] ' + (tools | tojson) + '\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<S>' + m.role + '\n' + (m.content or '') -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '<C>' + (c.function | tojson) -}}{%- endfor -%}{{- '<E>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<S>assistant\n' -}}{%- endif -%}"
)


def call_row(name, arguments):
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [{"role": "user", "content": "do"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}],
    }


ROWS = [call_row("weather", {"city": "Oslo"}), call_row("open", {"path": "/a"}), call_row("open", {"path": "/b"})]


def save(folder, form, rows):
    """Write rows in a form, and return the `data.path` that names them."""
    path = folder / f"rows.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif form == "parquet with JSON columns":
        path = folder / "json.parquet"
        kinds = {name: next(type(row[name]) for row in rows if row[name] is not None) for name in rows[0]}
        columns = {str: datasets.Value("string"), float: datasets.Value("float64"), dict: datasets.Json()}
        columns[list] = datasets.List(datasets.Json())
        features = datasets.Features({name: columns[kind] for name, kind in kinds.items()})
        datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    elif form == "saved dataset":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif form == "saved splits":
        splits = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
        datasets.DatasetDict(splits).save_to_disk(path)
    else:
        value = rows if form == "list" else datasets.Dataset.from_list([*rows, *rows]).select(range(len(rows)))
        settings, objects = extract_objects({"data": value})
        register_objects(objects)
        return settings["data"]
    return str(path)


FORMS = ["json", "parquet", "parquet with JSON columns", "saved dataset", "saved splits", "list", "Dataset"]


def read(path):
    return read_rows(DataConfig(path=path), path, "train")


def shown_and_learnt(path):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<E>"})
    tokenizer.add_tokens(["<S>", "<C>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    chat = ChatRenderer(tokenizer)
    for found in read(path):
        task = parse_conversation(found, DataConfig(path=path))
        ((ids, mask),) = build_demonstration(chat, task.messages, parse_tools(task)).rows
        yield chat.decode(ids), chat.decode([i for i, m in zip(ids, mask, strict=True) if m])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_shown_and_learnt_does_not_depend_on_the_form(tmp_path, form):
    found = list(shown_and_learnt(save(tmp_path, form, ROWS)))
    assert found == list(shown_and_learnt(save(tmp_path, "jsonl", ROWS)))
    assert [learnt for _, learnt in found if "null" in learnt] == []


NESTED = [
    {"prompt": "a", "info": {"deep": [{"x": 1}, {"y": [None, 2]}], "flag": True}, "level": 1.5, "answer": None},
    {"prompt": "b", "info": {"other": {"z": "é"}}, "level": float("nan"), "answer": "2"},
    {"prompt": "b", "info": None, "level": 2.0, "answer": "2"},
]


@pytest.mark.parametrize("form", FORMS)
def test_values_of_rows_do_not_depend_on_the_form(tmp_path, form):
    found = [each.row for each in read(save(tmp_path, form, NESTED))]
    assert repr(found) == repr(NESTED), "NaN differs from itself"


def test_every_type_of_a_parquet_column_is_plain_data(tmp_path):
    day = datetime.datetime(2024, 5, 1, 12, tzinfo=datetime.UTC)
    table = pyarrow.table(
        {
            "time": pyarrow.array([day], pyarrow.timestamp("ns", "UTC")),
            "day": [day.date()],
            "price": [decimal.Decimal("4.00")],
            "share": [decimal.Decimal("0.25")],
            "data": [b"\xff\x00"],
            "half": pyarrow.array([np.float16(0.5)]),
            "map": pyarrow.array([[("k", {"v": None, "w": 1}), ("l", None)]], pyarrow.map_(pyarrow.string(), MAPPED)),
            "pair": pyarrow.array([[1, 2]], pyarrow.list_(pyarrow.int64(), 2)),
            "word": pyarrow.array(["w"]).dictionary_encode(),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (found,) = read(str(tmp_path / "rows.parquet"))
    assert found.row == {
        "time": "2024-05-01T12:00:00+00:00",
        "day": "2024-05-01",
        "price": 4,
        "share": 0.25,
        "data": "/wA=",
        "half": 0.5,
        "map": {"k": {"w": 1}, "l": None},
        "pair": [1, 2],
        "word": "w",
    }
    assert isinstance(found.row["price"], int)


MAPPED = pyarrow.struct([("v", pyarrow.int64()), ("w", pyarrow.int64())])
SEEN = """
def of(row):
    return {name: f"{type(value).__name__} {value!r}" for name, value in row.items()}

def blocks(completion, row):
    return float(completion == repr(of(row)))

async def waits(completion, row):
    return float(completion == repr(of(row)))
"""


async def test_a_reward_that_blocks_and_one_that_waits_get_the_same_values(tmp_path, monkeypatch):
    monkeypatch.setenv("R3ASYNC_USER_PATH", str(tmp_path))
    (tmp_path / "seen.py").write_text(SEEN)
    row = {
        "prompt": "q",
        "nothing": float("nan"),
        "endless": math.inf,
        "when": datetime.datetime(2024, 1, 1),
        "price": decimal.Decimal("1.50"),
        "data": b"bytes",
        "big": 2**100,
        "pair": (1, 2),
        "array": np.arange(2),
    }
    path = save(tmp_path, "list", [row])
    seen: dict = {}
    exec(SEEN, seen)
    args = {"path": path, "reward": ["seen.py:blocks", "seen.py:waits"]}
    env = build_environment_factory(EnvConfig(name="dataset", args=args, workers=1))()
    await env.reset(0)
    result = await env.step(Action(repr(seen["of"]({name: to_plain_value(value) for name, value in row.items()}))))
    assert result.metrics == {"rewards/blocks": 1.0, "rewards/waits": 1.0}


def test_values_of_a_program_become_plain_data():
    value = uuid.UUID(int=1)
    given = {"a": np.float64(1.5), "b": np.str_("x"), "c": [np.int64(2)], "d": value, "e": decimal.Decimal("NaN")}
    plain = to_plain_value(given)
    assert repr(plain) == repr({"a": 1.5, "b": "x", "c": [2], "d": str(value), "e": float("nan")})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"prompt": object()}], r"`data`, row 1: a object is no value of a row"),
        ([{"prompt": {1: 2}}], r"`data`, row 1: the key 1 of an object is no text"),
        ([], r"`data` has no rows"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list([{"a": 1}])}), r"DatasetDict of the splits train"),
        (datasets.Dataset.from_list([{"a": 1}]).to_iterable_dataset(), r"is a stream, .*list\(rows.take\(1000\)\)"),
    ],
)
def test_what_a_program_gives_that_cannot_be_rows_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        extract_objects({"data": data})


@pytest.mark.parametrize(("split", "count"), [("train", 3), ("test", 1)])
def test_a_saved_dataset_has_its_splits(tmp_path, split, count):
    path = save(tmp_path, "saved splits", ROWS)
    assert len(read_rows(DataConfig(path=path), path, split)) == count
    with pytest.raises(ConfigError, match="has no split 'dev'; it has train, test"):
        read_rows(DataConfig(path=path), path, "dev")
    one = save(tmp_path, "saved dataset", ROWS)
    with pytest.raises(ConfigError, match=f"is one split and has no split {'dev'!r}"):
        read_rows(DataConfig(path=one), one, "dev")
