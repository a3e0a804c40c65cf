"""A file of a directory belongs to the split that its name has as a word. A split that no file has is refused."""

import json

import pytest

from r3async.config import ConfigError, DataConfig
from r3async.envs.rows import read_rows


def prompts(directory, names, split="train"):
    for name in names:
        (directory / name).write_text(json.dumps({"prompt": name, "answer": "1"}) + "\n")
    return [found.row["prompt"] for found in read_rows(DataConfig(path=str(directory)), str(directory), split)]


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["gsm8k_test.jsonl", "gsm8k_train.jsonl"], "train", ["gsm8k_train.jsonl"]),
        (["data.test.jsonl", "data.train.jsonl"], "train", ["data.train.jsonl"]),
        (["data.test.jsonl", "data.train.jsonl"], "test", ["data.test.jsonl"]),
        (["Test.jsonl", "Train.jsonl"], "train", ["Train.jsonl"]),
        (["test-00000-of-00001.jsonl", "testmini-00000-of-00001.jsonl"], "test", ["test-00000-of-00001.jsonl"]),
        (["test.jsonl", "train_0.jsonl", "train_1.jsonl"], "train", ["train_0.jsonl", "train_1.jsonl"]),
        (["test.jsonl", "train1.jsonl", "train2.jsonl"], "train", ["train1.jsonl", "train2.jsonl"]),
        (["a_train.jsonl", "b_train.jsonl", "b_test.jsonl"], "train", ["a_train.jsonl", "b_train.jsonl"]),
        (["train.jsonl", "train_prefs.jsonl"], "train", ["train.jsonl"]),
        (["train_prefs-00000.jsonl", "train_sft-00000.jsonl"], "train_sft", ["train_sft-00000.jsonl"]),
        (["test_data.jsonl", "train_data.jsonl"], "train", ["train_data.jsonl"]),
        (["hard.jsonl", "train.jsonl"], "hard", ["hard.jsonl"]),
        (["a.jsonl", "b.jsonl"], "train", ["a.jsonl", "b.jsonl"]),
        (["latest.jsonl", "contest.jsonl"], "train", ["contest.jsonl", "latest.jsonl"]),
    ],
)
def test_a_split_is_a_word_of_the_name(tmp_path, names, split, chosen):
    assert prompts(tmp_path, names, split) == chosen


@pytest.mark.parametrize(
    ("names", "split", "message"),
    [
        (
            ["test.jsonl", "validation.jsonl"],
            "train",
            r"has the split 'train' in its name; it has test.jsonl, validation",
        ),
        (["data.jsonl", "test.jsonl"], "train", r"name a file with `data.path`, or its split with `data.split`"),
        (["testmini.jsonl"], "train", r"it has testmini.jsonl"),
        (["train_test.jsonl"], "train", r"it has train_test.jsonl"),
        (["train.jsonl", "testmini.jsonl"], "test", r"has the split 'test' in its name"),
        (["train_prefs-0.jsonl", "train_sft-0.jsonl"], "train", r"is any of train_prefs, train_sft .*name one of them"),
        (["a.jsonl"], "test", r"has the split 'test' in its name; it has a.jsonl"),
    ],
)
def test_a_split_that_no_file_names_is_refused_with_the_names_found(tmp_path, names, split, message):
    with pytest.raises(ConfigError, match=message):
        prompts(tmp_path, names, split)
