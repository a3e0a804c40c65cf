"""The rows of a run: which are trained, which are held out, and which prompts are in both."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence

import msgspec

from r3async.config import (
    DATASET_ENV,
    ConfigError,
    DataConfig,
    EnvConfig,
    parse_data_config,
    parse_rewards,
)
from r3async.config.paths import resolve_user_path
from r3async.envs.passed_objects import is_object_name
from r3async.envs.rewards import RewardFunction, check_reward_row, load_reward
from r3async.envs.row_tasks import DatasetTask, parse_task
from r3async.envs.rows import LocatedRow, collect_source_stamps, read_rows
from r3async.untrusted import decode_json


def is_dataset(env: EnvConfig) -> bool:
    return env.name.partition(":")[0] == DATASET_ENV


def resolve_data_config(env: EnvConfig) -> DataConfig:
    """Return the data settings of an environment `dataset` or `dataset:PATH`.
    Raises `ConfigError`."""
    args = env.reveal_args()
    path = env.name.partition(":")[2]
    if path:
        if args.get("path"):
            raise ConfigError(f"`env.args.path`: {env.name!r} names the path already")
        args = {**args, "path": path}
    data = parse_data_config(args)
    if not data.path:
        raise ConfigError(
            "`data` names no rows: set `data` = FILE, a directory, or the id of a dataset on the "
            "Hugging Face hub"
        )
    return data


def select_held_out_rows(env: EnvConfig) -> EnvConfig:
    """Return the environment that poses the rows which `data.eval` holds out from training, or
    `env` if there are none."""
    if not is_dataset(env) or not resolve_data_config(env).eval:
        return env
    return msgspec.structs.replace(env, args={**env.args, "part": "eval"})


def has_same_rows(one: EnvConfig, other: EnvConfig) -> bool:
    """Return True if two datasets are rows of the same source and of the same part of it."""
    here, mine = _identify_source(resolve_data_config(one))
    there, theirs = _identify_source(resolve_data_config(other))
    places = resolve_user_path(here), resolve_user_path(there)
    same = (
        places[0].samefile(places[1]) if all(place.exists() for place in places) else here == there
    )
    return same and mine == theirs


def _identify_source(data: DataConfig) -> tuple[str, str]:
    """Return the path of a dataset, and which of its rows are used."""
    if data.part == "train" or not isinstance(data.eval, str):
        return data.path, f"{data.split}, {data.part}"
    return (
        (data.eval, "train, train")
        if _is_own_source(data.eval)
        else (data.path, f"{data.eval}, train")
    )


def _is_own_source(evaluated: str) -> bool:
    """Return True if `data.eval` names rows of their own, and no split of `data.path`."""
    return is_object_name(evaluated) or resolve_user_path(evaluated).is_file()


def find_shared_prompts(env: EnvConfig, other: EnvConfig) -> list[DatasetTask]:
    """Return the tasks of dataset `env` whose prompt also occurs in dataset `other`. Raises
    `ConfigError` as `load_task_splits` does."""
    posed = {_digest_prompt(task) for task in load_part_tasks(resolve_data_config(other))}
    return [
        task for task in load_part_tasks(resolve_data_config(env)) if _digest_prompt(task) in posed
    ]


def load_part_tasks(data: DataConfig) -> Sequence[DatasetTask]:
    tasks = load_task_splits(data)
    return tasks.train if data.part == "train" else tasks.eval


class TaskSplits:
    """The training tasks and the evaluation tasks of a dataset.

    Args:
        parse_row: Function that makes the task of a row.

    Attributes:
        dropped_overlap: Number of rows left out of training because evaluation poses
            the same prompt.
    """

    def __init__(
        self,
        data: DataConfig,
        rewards: Sequence[RewardFunction] = (),
        parse_row: Callable[[LocatedRow, DataConfig], DatasetTask] = parse_task,
    ):
        self._parse_row = parse_row
        self.train = self._load_tasks(data, rewards, data.path, data.split)[: data.limit or None]
        self.eval: list[DatasetTask] = []
        if isinstance(data.eval, str) and data.eval:
            if _is_own_source(data.eval):
                path = data.eval
                split = DataConfig().split
            else:
                path = data.path
                split = data.eval
            self.eval = self._load_tasks(data, rewards, path, split)
        elif data.eval:
            self.eval = _choose_held_out(self.train, data.eval)
        posed = {_digest_prompt(task) for task in self.eval}
        before = len(self.train)
        self.train = [task for task in self.train if _digest_prompt(task) not in posed]
        self.dropped_overlap = (
            before - len(self.train) - (0 if isinstance(data.eval, str) else len(self.eval))
        )
        if not self.train:
            raise ConfigError(f"`data.eval` = {data.eval!r} leaves no row to train, of {before}")

    def _load_tasks(
        self, data: DataConfig, rewards: Sequence[RewardFunction], path: str, split: str
    ) -> list[DatasetTask]:
        tasks = [self._parse_row(found, data) for found in read_rows(data, path, split)]
        for reward in rewards:
            for task in tasks:
                check_reward_row(reward, task)
        return tasks

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 over all rows, in order, and the part that each belongs to."""
        made = hashlib.sha256()
        for part in (self.train, self.eval):
            for task in part:
                made.update(json.dumps(task.row).encode() + b"\n")
            made.update(b"\0")
        return made.hexdigest()[:32]


def _digest_prompt(task: DatasetTask) -> bytes:
    return hashlib.sha256(msgspec.json.encode(task.messages)).digest()


def _choose_held_out(tasks: Sequence[DatasetTask], count_or_share: float) -> list[DatasetTask]:
    """Return one task for each prompt that is held out from training. Prompts are chosen by their
    digests, so neither order nor seed matters."""
    by_prompt = {_digest_prompt(task): task for task in reversed(tasks)}
    count = (
        int(count_or_share)
        if count_or_share >= 1
        else max(1, round(count_or_share * len(by_prompt)))
    )
    if count >= len(by_prompt):
        raise ConfigError(
            f"`data.eval` = {count_or_share:g} leaves no row to train: there are {len(by_prompt)} "
            "different prompts"
        )
    chosen = sorted(by_prompt)[:count]
    return [by_prompt[digest] for digest in chosen]


@functools.lru_cache(maxsize=16)
def _load_splits(settings: bytes, stamps: tuple[tuple[str, int, int], ...]) -> TaskSplits:
    """Load the tasks of both parts. A process reads the rows once, even if both parts are posed,
    and again when a file has changed."""
    data = decode_json(settings, DataConfig)
    return TaskSplits(data, load_rewards(data))


def load_task_splits(data: DataConfig) -> TaskSplits:
    """Return the tasks of both parts. Raises `ConfigError` for a source that cannot be read, a row
    that does not fit, and rows that do not match `data.digest`."""
    sources = [source for source in (data.path, data.eval) if isinstance(source, str)]
    settings = msgspec.json.encode(msgspec.structs.replace(data, part="train", digest=""))
    tasks = _load_splits(
        settings, tuple(stamp for source in sources for stamp in collect_source_stamps(source))
    )
    if data.digest not in ("", tasks.digest):
        raise ConfigError(
            f"`data` = {data.path!r}: the rows are not those that the run began with (digest "
            f"{tasks.digest}, not {data.digest}): put them back, on every host, or begin a new run"
        )
    return tasks


def load_rewards(data: DataConfig) -> list[RewardFunction]:
    """Return the rewards that `data.reward` names. Raises `ConfigError`."""
    if not data.reward:
        raise ConfigError(
            "`reward` is empty: exact, contains, number, math, or `module:function` or "
            "`file.py:function`"
        )
    try:
        return [load_reward(each) for each in parse_rewards(data.reward)]
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
