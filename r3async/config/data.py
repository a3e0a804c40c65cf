"""What `data` and `reward` say: rows of the user's own, and what answers to them are worth."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from r3async.config.section import NumberRange, Section, SignedFloat

_WEIGHT_RANGE = NumberRange(-(10**9), 10**9)
PromptTemplate = str | list[dict[str, str]]


class RewardConfig(Section):
    """One of several rewards: `reward = [{ fn = "rewards:correct", weight = 1.0 }, …]`."""

    fn: str
    """As `reward`."""
    weight: SignedFloat = 1.0
    name: str = ""
    """In the metrics, as `reward/NAME_mean`. Empty: that of the function."""


class DataConfig(Section):
    """Rows of your own as tasks of one turn. `data=FILE` is short for `data.path=FILE`; `reward` is set beside `data`, at the
    top. Both become `env.name = "dataset"` and `env.args`, and so they appear in a run's `config.toml`."""

    path: str = ""
    """A file `.jsonl`, `.json`, `.csv` or `.parquet`, a directory of such, or the id of a dataset on the Hugging Face hub.
    A relative path is one from where the run was started; in a TOML file, from that file."""
    subset: str = ""
    """Of a dataset on the hub, such as `main`."""
    split: str = "train"
    """Of a dataset on the hub, also in its notation `train[:100]`. Of a directory: the files whose names begin with it; for
    `train`, all if none does. A file has none."""
    prompt: PromptTemplate = "prompt"
    """A column with a text or with chat messages; or a template over columns, as `"{question}"`, whose dotted names look into
    nested ones; or messages of such: `[{ role = "user", content = "{question}" }]`."""
    answer: str = ""
    """A column, or a dotted name as `extra_info.answer`. Empty: the first of `reward_model.ground_truth` (rows of verl),
    `answer`, `solution` and `ground_truth` that a row has."""
    system: str = ""
    """A system message before every prompt."""
    reward: Annotated[str | list[str | dict[str, Any]], _WEIGHT_RANGE] = "exact"
    """`exact`, `contains`, `number`, `math`, or a function of yours, `module:function` or `file.py:function`; or a list of these,
    or of tables `{ fn, weight, name }`, whose weighted sum is the reward."""
    eval: str | float = 0.0
    """Rows that are evaluated and never trained: a share below 1, a number of them, a file, or another split of a directory or of
    the hub. 0: none."""
    limit: int = 0
    """Of the rows, the first so many. 0: all."""
    part: Literal["train", "eval"] = "train"
    """Which of the two this environment poses: set by evaluations."""
    digest: str = ""
    """Of the rows; noted when a run starts, and compared when it resumes and on every host."""

    def check_values(self) -> None:
        if isinstance(self.eval, float | int) and self.eval >= 1 and self.eval != int(self.eval):
            raise ValueError(f"`eval` = {self.eval}: a share below 1, or a whole number of rows")


def parse_rewards(reward: str | list[str | dict[str, Any]]) -> list[RewardConfig]:
    """Each reward of the setting, with its weight. Raises `ValueError`."""
    listed = [reward] if isinstance(reward, str) else reward
    out: list[RewardConfig] = []
    for at, item in enumerate(listed):
        try:
            given = {"fn": item} if isinstance(item, str) else item
            one = msgspec.convert(given, RewardConfig)
        except msgspec.ValidationError as error:
            raise ValueError(f"`reward[{at}]` = {item!r}: {error}; it takes fn, weight and name") from error
        out.append(msgspec.structs.replace(one, name=one.name or one.fn.rpartition(":")[2].rpartition(".")[2]))
    names = [one.name for one in out]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"`reward`: two are called {twice!r}; give each a `name` of its own")
    return out
