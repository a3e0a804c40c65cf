"""`dataset`: rows of the user's own as tasks of one turn, and rewards for the answers (`data`, `reward` of a configuration)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from r3async.config import DATASET, ConfigError, DataConfig, EnvConfig, RewardConfig, data_config, rewards_of
from r3async.config.places import find_file
from r3async.envs import Action, EnvironmentFactory, Message, StepResult, WrongEnvironment
from r3async.envs.forms import MISSING, Task, task_of, tools_of
from r3async.envs.objects import hold, is_object, pickled
from r3async.envs.pool import pooled
from r3async.envs.rewards import Asked, Reward, check_row, judge, reward_of
from r3async.envs.rows import Found, read_rows, stamps_of
from r3async.untrusted import decode_json
from r3async.world.processes import run_on_shared_loop

_encoder = msgspec.json.Encoder(enc_hook=str)  # what columns of a parquet file may hold besides plain data

# -- the rows of a run -------------------------------------------------------------------------------------------------


def is_dataset(env: EnvConfig) -> bool:
    return env.name.partition(":")[0] == DATASET


def settings_of(env: EnvConfig) -> DataConfig:
    """Of an environment `dataset`, or `dataset:PATH`. Raises `ConfigError`."""
    args = env.arguments()
    if path := env.name.partition(":")[2]:
        if args.get("path"):
            raise ConfigError(f"`env.args.path`: {env.name!r} names the path already")
        args = {**args, "path": path}
    data = data_config(args)
    if not data.path:
        raise ConfigError(
            "`data` names no rows: set `data` = FILE, a directory, or the id of a dataset on the Hugging Face hub"
        )
    return data


def held_out(env: EnvConfig) -> EnvConfig:
    """The environment that poses the rows which `data.eval` keeps from training; the same if it keeps none."""
    if not is_dataset(env) or not settings_of(env).eval:
        return env
    return msgspec.structs.replace(env, args={**env.args, "part": "eval"})


def same_rows(one: EnvConfig, other: EnvConfig) -> bool:
    """Whether two datasets are rows of one source, and of the same part of it."""
    (here, mine), (there, theirs) = _source(settings_of(one)), _source(settings_of(other))
    places = find_file(here), find_file(there)
    same = places[0].samefile(places[1]) if all(place.exists() for place in places) else here == there
    return same and mine == theirs


def _source(data: DataConfig) -> tuple[str, str]:
    """Its path, and which rows of that."""
    if data.part == "train" or not isinstance(data.eval, str):
        return data.path, f"{data.split}, {data.part}"
    return (data.eval, "train, train") if find_file(data.eval).is_file() else (data.path, f"{data.eval}, train")


def shared_prompts(env: EnvConfig, other: EnvConfig) -> list[Task]:
    """The tasks of dataset `env` whose prompt a task of dataset `other` poses too. Raises `ConfigError` as `tasks_of` does."""
    posed = {_prompt_digest(task) for task in _posed(settings_of(other))}
    return [task for task in _posed(settings_of(env)) if _prompt_digest(task) in posed]


def _posed(data: DataConfig) -> Sequence[Task]:
    tasks = tasks_of(data)
    return tasks.train if data.part == "train" else tasks.eval


class Tasks:
    """The tasks of both parts. `repeated`: rows that were left out of training because evaluation poses the same prompt. `form`:
    makes them of rows."""

    def __init__(
        self,
        data: DataConfig,
        rewards: Sequence[Reward] = (),
        form: Callable[[Found, DataConfig], Task] = task_of,
    ):
        self._form = form
        self.train = self._tasks(data, rewards, data.path, data.split)[: data.limit or None]
        self.eval: list[Task] = []
        if isinstance(data.eval, str) and data.eval:
            path, split = (data.eval, DataConfig().split) if find_file(data.eval).is_file() else (data.path, data.eval)
            self.eval = self._tasks(data, rewards, path, split)
        elif data.eval:
            self.eval = _chosen(self.train, data.eval)
        posed = {_prompt_digest(task) for task in self.eval}
        before = len(self.train)
        self.train = [task for task in self.train if _prompt_digest(task) not in posed]
        self.repeated = before - len(self.train) - (0 if isinstance(data.eval, str) else len(self.eval))
        if not self.train:
            raise ConfigError(f"`data.eval` = {data.eval!r} leaves no row to train, of {before}")

    def _tasks(self, data: DataConfig, rewards: Sequence[Reward], path: str, split: str) -> list[Task]:
        tasks = [self._form(found, data) for found in read_rows(data, path, split)]
        for reward in rewards:
            for task in tasks:
                check_row(reward, task)
        return tasks

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over all rows, in their order, and which part each is of."""
        made = hashlib.sha256()
        for part in (self.train, self.eval):
            for task in part:
                made.update(_encoder.encode(task.row) + b"\n")
            made.update(b"\0")
        return made.hexdigest()[:32]


def _prompt_digest(task: Task) -> bytes:
    return hashlib.sha256(msgspec.json.encode(task.messages)).digest()


def _chosen(tasks: Sequence[Task], wanted: float) -> list[Task]:
    """One task of each of the prompts that are kept from training: by their digests, so neither order nor seed matter."""
    by_prompt = {_prompt_digest(task): task for task in reversed(tasks)}
    count = int(wanted) if wanted >= 1 else max(1, round(wanted * len(by_prompt)))
    if count >= len(by_prompt):
        raise ConfigError(
            f"`data.eval` = {wanted:g} leaves no row to train: there are {len(by_prompt)} different prompts"
        )
    chosen = sorted(by_prompt)[:count]
    return [by_prompt[digest] for digest in chosen]


@functools.lru_cache(maxsize=16)
def _loaded(settings: bytes, stamps: tuple[tuple[str, int, int], ...]) -> Tasks:
    """Rows are read once in a process, also where both parts are posed; again when a file has changed."""
    data = decode_json(settings, DataConfig)
    return Tasks(data, rewards_for(data))


def tasks_of(data: DataConfig) -> Tasks:
    """Raises `ConfigError` for what cannot be read, a row that does not fit, and rows that are not those of `data.digest`."""
    places = [find_file(place) for place in (data.path, data.eval) if isinstance(place, str)]
    settings = msgspec.json.encode(msgspec.structs.replace(data, part="train", digest=""))
    tasks = _loaded(settings, tuple(stamp for place in places for stamp in stamps_of(place)))
    if data.digest not in ("", tasks.digest):
        raise ConfigError(
            f"`data` = {data.path!r}: the rows are not those that the run began with (digest {tasks.digest}, not "
            f"{data.digest}): put them back, on every host, or begin a new run"
        )
    return tasks


def rewards_for(data: DataConfig) -> list[Reward]:
    """Raises `ConfigError`."""
    if not data.reward:
        raise ConfigError(
            "`reward` is empty: exact, contains, number, math, or `module:function` or `file.py:function`"
        )
    try:
        return [reward_of(each) for each in rewards_of(data.reward)]
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


# -- the environment ---------------------------------------------------------------------------------------------------


class Dataset:
    """One row an episode: the task seed is its number. Not to be named in a configuration: `data=FILE` makes it.

    `blocking`: makes environments that judge, in processes of their own, with the rewards that are not quick.
    """

    def __init__(self, tasks: Sequence[Task], rewards: Sequence[Reward], blocking: EnvironmentFactory):
        self._tasks, self._rewards, self._blocking = tasks, rewards, blocking
        self._task = tasks[0]
        self.takes_tokens = any(reward.tokens for reward in rewards)

    @property
    def size(self) -> int:
        return len(self._tasks)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """For the chat template."""
        return tools_of(self._task)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dataset:
        other = type(self)(self._tasks, self._rewards, self._blocking)
        other._task = self._task
        return other

    async def reset(self, task_seed: int) -> list[Message]:
        self._task = self._tasks[task_seed % self.size]
        return list(self._task.messages)

    def oracle(self) -> str:
        """The row's answer; empty where it has none."""
        return "" if self._task.answer is MISSING else str(self._task.answer)

    async def step(self, action: Action) -> StepResult:
        """The weighted sum of what the rewards say; one that says None is left out. Raises `WrongEnvironment` if all do."""
        asked = _asked(self._task, action)
        quick = [reward for reward in self._rewards if reward.quick]
        told = await judge(quick, asked) if quick else {}
        if len(quick) < len(self._rewards):
            told |= await self._judged_elsewhere(asked)
        worth = [reward.weight * told[reward.metric] for reward in self._rewards if reward.metric in told]
        if not worth:
            raise WrongEnvironment(f"{self._task.where}: no reward applies: all returned None")
        return StepResult(sum(worth), done=True, metrics=told)

    async def _judged_elsewhere(self, asked: Asked) -> dict[str, float]:
        judging = self._blocking()
        await judging.reset(0)
        return (await judging.step(Action(_encoder.encode(asked).decode()))).metrics


def _asked(task: Task, action: Action) -> Asked:
    prompt: Any = [m.for_template() for m in task.messages] if task.chat else task.messages[0].content
    answer = None if task.answer is MISSING else task.answer
    return Asked(action.text, prompt, task.row, answer, action.token_ids)


class Judge:
    """In a process of the pool: what blocking rewards say of one answer, `Asked` in JSON, as metrics. `objects`: those of
    them that have no module, pickled."""

    def __init__(self, rewards: list[dict[str, Any]], objects: dict[str, bytes]):
        hold(objects)
        self._rewards = _rewards_here(msgspec.json.encode(rewards))

    def reset(self, task_seed: int) -> list[Message]:
        return []

    def step(self, action: Action) -> StepResult:
        told = run_on_shared_loop(judge(self._rewards, decode_json(action.text, Asked)))
        return StepResult(0.0, done=True, metrics=told)


@functools.lru_cache(maxsize=8)
def _rewards_here(rewards: bytes) -> list[Reward]:
    """Functions are loaded once in a process."""
    return [reward_of(each) for each in decode_json(rewards, list[RewardConfig])]


class DatasetFactory:
    """Makes environments of one part of the rows."""

    def __init__(self, config: EnvConfig):
        data = settings_of(config)
        self._rewards = rewards_for(data)
        self._tasks = _posed(data)
        quick = {reward.name for reward in self._rewards if reward.quick}
        slow = [msgspec.to_builtins(each) for each in rewards_of(data.reward) if each.name not in quick]
        objects = {fn.partition(":")[2]: pickled(fn, "reward") for each in slow if is_object(fn := each["fn"])}
        judging = {"rewards": slow, "objects": objects}
        self._blocking = pooled("r3async.envs.dataset:Judge", judging, config, has_oracle=False)

    def __call__(self) -> Dataset:
        return Dataset(self._tasks, self._rewards, self._blocking)

    @property
    def size(self) -> int:
        return len(self._tasks)

    def fit(self, length: Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], int], most: int) -> int:
        """Keep the rows whose prompts have at most `most` tokens; returns how many were dropped. `length`: of messages with their
        tools. Raises `ConfigError` if that is all of them, or `length` raises `ValueError`."""
        lengths = []
        for task in self._tasks:
            try:
                lengths.append(length(task.messages, tools_of(task)))
            except ValueError as error:  # of the template
                raise ConfigError(f"{task.where}: {error}") from error
        kept = [task for task, tokens in zip(self._tasks, lengths, strict=True) if tokens <= most]
        if not kept:
            raise ConfigError(
                f"all {self.size} prompts are longer than `episode.max_prompt_tokens` = {most}; the shortest has "
                f"{min(lengths)} tokens"
            )
        dropped, self._tasks = self.size - len(kept), kept
        return dropped


def make(target: str, config: EnvConfig) -> EnvironmentFactory:
    """See `DatasetFactory`. `target`: the path, which `config.name` has too."""
    return DatasetFactory(config)
