"""Sections for `data` and `reward`: the user's own rows, and the rewards of answers to them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from r3async.config.section import NumberRange, Section, SignedFloat

_WEIGHT_RANGE = NumberRange(-(10**9), 10**9)
PromptTemplate = str | list[dict[str, str]]


class RewardConfig(Section):
    """One of several rewards: `reward = [{ fn = "rewards:correct", weight = 1.0 }, …]`."""

    fn: str
    """Reward function, in the notation of `reward`."""
    weight: SignedFloat = 1.0
    name: str = ""
    """Name in the metrics, as `rewards/NAME/mean`. Empty: the name of the function."""


class DataConfig(Section):
    """Your own rows as tasks of one turn. `data=FILE` is short for `data.path=FILE`; `reward`
    is set beside `data`, at the top. In `config.toml` both are `env.name = "dataset"` and
    `env.args`."""

    path: str = ""
    """File, directory or dataset of rows: a `.jsonl`, `.json`, `.csv` or `.parquet` file, a
    directory of such files or of `datasets.save_to_disk`, or a dataset id on the Hugging Face
    hub. In a TOML file, relative to it. From Python also a list of dicts or a
    `datasets.Dataset`."""
    subset: str = ""
    """Subset of a dataset on the hub, such as `main`."""
    split: str = "train"
    """Split of a dataset on the hub, also as `train[:100]`. In a directory: the files whose names
    have it as a word (`gsm8k_train.jsonl`); without any such names, `train` is all files."""
    prompt: PromptTemplate = "prompt"
    """Column with a text or chat messages; or a template over columns, such as `"{question}"`,
    with dotted names for nested ones; or messages of such templates: `[{ role = "user", content =
    "{question}" }]`."""
    answer: str = ""
    """Column, or dotted name such as `extra_info.answer`. Empty: the first that a row has of
    `reward_model.ground_truth` (verl), `answer`, `solution` and `ground_truth`."""
    system: str = ""
    """System message before every prompt."""
    reward: Annotated[str | list[str | dict[str, Any]], _WEIGHT_RANGE] = "exact"
    """Reward function (docs/environments.md#your-own-data). A name, your own as `module:function`
    or `file.py:function`, or a list of these or of tables `{ fn, weight, name }`, whose weighted
    sum is the reward."""
    eval: str | float = 0.0
    """Rows that are evaluated and held out from training. A share below 1, a number of rows, a
    file, or another split of a directory or of the hub. 0: none."""
    limit: int = 0
    """Number of rows to use, from the first. 0: all."""
    part: Literal["train", "eval"] = "train"
    """Rows that this environment uses, the trained or the evaluated ones; set by evaluations."""
    digest: str = ""
    """Digest of the rows, recorded at the start, and compared on resume and on every host."""

    def check_values(self) -> None:
        if isinstance(self.eval, float | int) and self.eval >= 1 and self.eval != int(self.eval):
            raise ValueError(f"`eval` = {self.eval}: a share below 1, or a whole number of rows")


def parse_rewards(reward: str | list[str | dict[str, Any]]) -> list[RewardConfig]:
    """Return the rewards of the setting, each with its weight. Raises `ValueError`."""
    listed = [reward] if isinstance(reward, str) else reward
    out: list[RewardConfig] = []
    for at, item in enumerate(listed):
        try:
            given = {"fn": item} if isinstance(item, str) else item
            one = msgspec.convert(given, RewardConfig)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"`reward[{at}]` = {item!r}: {error}; it takes fn, weight and name"
            ) from error
        out.append(
            msgspec.structs.replace(
                one, name=one.name or one.fn.rpartition(":")[2].rpartition(".")[2]
            )
        )
    names = [one.name for one in out]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"`reward`: two are called {twice!r}; give each a `name` of its own")
    return out
