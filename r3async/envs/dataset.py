"""The environment `dataset`: the user's rows as one-turn tasks, with rewards for the answers
(`data` and `reward` of a configuration)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from r3async.config import ConfigError, EnvConfig, RewardConfig, parse_rewards
from r3async.envs import Action, EnvironmentFactory, EnvironmentProtocolError, Message, StepResult
from r3async.envs.passed_objects import get_pickled_object, is_object_name, register_objects
from r3async.envs.pool import make_pooled_factory
from r3async.envs.rewards import RewardFunction, RewardInputs, compute_rewards, load_reward
from r3async.envs.row_tasks import MISSING, DatasetTask, parse_tools
from r3async.envs.task_splits import load_part_tasks, load_rewards, resolve_data_config
from r3async.untrusted import decode_json, decode_python_json
from r3async.world.processes import run_on_shared_loop


class DatasetEnvironment:
    """An environment that poses one row per episode; the task seed is the row's number. It is
    created by `data=FILE`, not named in a configuration.

    Args:
        make_worker: Factory of environments that judge answers in separate processes, with the
            rewards that may block.
    """

    def __init__(
        self,
        tasks: Sequence[DatasetTask],
        rewards: Sequence[RewardFunction],
        make_worker: EnvironmentFactory,
    ):
        self._tasks = tasks
        self._rewards = rewards
        self._make_worker = make_worker
        self._task = tasks[0]
        self.takes_tokens = any(reward.needs_token_ids for reward in rewards)

    @property
    def size(self) -> int:
        return len(self._tasks)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The row's tools, for the chat template."""
        return parse_tools(self._task)

    def __deepcopy__(self, memo: dict[int, Any]) -> DatasetEnvironment:
        other = type(self)(self._tasks, self._rewards, self._make_worker)
        other._task = self._task
        return other

    async def reset(self, task_seed: int) -> list[Message]:
        self._task = self._tasks[task_seed % self.size]
        return list(self._task.messages)

    def oracle(self) -> str:
        """Return the row's answer, or an empty text if it has none."""
        return "" if self._task.answer is MISSING else str(self._task.answer)

    async def step(self, action: Action) -> StepResult:
        """Return the weighted sum of the rewards; a reward that returns None is left out. Raises
        `EnvironmentProtocolError` if all return None."""
        asked = _build_reward_inputs(self._task, action)
        quick = [reward for reward in self._rewards if reward.is_nonblocking]
        told = await compute_rewards(quick, asked) if quick else {}
        if len(quick) < len(self._rewards):
            told |= await self._reward_in_pool(asked)
        worth = [
            reward.weight * told[reward.metric_name]
            for reward in self._rewards
            if reward.metric_name in told
        ]
        if not worth:
            raise EnvironmentProtocolError(
                f"{self._task.location}: no reward applies: all returned None"
            )
        return StepResult(sum(worth), done=True, metrics=told)

    async def _reward_in_pool(self, asked: RewardInputs) -> dict[str, float]:
        judging = self._make_worker()
        await judging.reset(0)
        # Python's JSON, because others have no NaN: a reward gets the same values here and there.
        return (await judging.step(Action(json.dumps(msgspec.to_builtins(asked))))).metrics


def _build_reward_inputs(task: DatasetTask, action: Action) -> RewardInputs:
    prompt: Any = (
        [m.to_template_dict() for m in task.messages] if task.is_chat else task.messages[0].content
    )
    answer = None if task.answer is MISSING else task.answer
    return RewardInputs(action.text, prompt, task.row, answer, action.token_ids)


class RewardWorker:
    """An environment, in a process of the pool, that judges one answer with the blocking rewards.
    The answer is `RewardInputs` in JSON; the rewards are returned as metrics.

    Args:
        objects: Pickled rewards that belong to no module, by name.
    """

    def __init__(self, rewards: list[dict[str, Any]], objects: dict[str, bytes]):
        register_objects(objects)
        self._rewards = _load_cached_rewards(msgspec.json.encode(rewards))

    def reset(self, task_seed: int) -> list[Message]:
        return []

    def step(self, action: Action) -> StepResult:
        asked = msgspec.convert(decode_python_json(action.text), RewardInputs)
        told = run_on_shared_loop(compute_rewards(self._rewards, asked))
        return StepResult(0.0, done=True, metrics=told)


@functools.lru_cache(maxsize=8)
def _load_cached_rewards(rewards: bytes) -> list[RewardFunction]:
    """Load reward functions, once per process."""
    return [load_reward(each) for each in decode_json(rewards, list[RewardConfig])]


class DatasetFactory:
    """A factory of environments for one part of the rows."""

    def __init__(self, config: EnvConfig):
        data = resolve_data_config(config)
        self._rewards = load_rewards(data)
        self._tasks = load_part_tasks(data)
        quick = {reward.name for reward in self._rewards if reward.is_nonblocking}
        slow = [
            msgspec.to_builtins(each)
            for each in parse_rewards(data.reward)
            if each.name not in quick
        ]
        objects = {
            fn.partition(":")[2]: get_pickled_object(fn, "reward")
            for each in slow
            if is_object_name(fn := each["fn"])
        }
        judging = {"rewards": slow, "objects": objects}
        self._make_worker = make_pooled_factory(
            "r3async.envs.dataset:RewardWorker", judging, config, has_oracle=False
        )

    def __call__(self) -> DatasetEnvironment:
        return DatasetEnvironment(self._tasks, self._rewards, self._make_worker)

    @property
    def size(self) -> int:
        return len(self._tasks)

    def drop_long_prompts(
        self,
        count_tokens: Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], int],
        max_tokens: int,
    ) -> int:
        """Keep the rows whose prompts have at most `max_tokens` tokens, and return the number
        of rows dropped.

        Raises `ConfigError` if all rows are dropped, or if `count_tokens` raises `ValueError`.

        Args:
            count_tokens: Function that returns the number of tokens of messages with their tools.
        """
        lengths = []
        for task in self._tasks:
            try:
                lengths.append(count_tokens(task.messages, parse_tools(task)))
            except ValueError as error:  # raised by the chat template
                raise ConfigError(f"{task.location}: {error}") from error
        kept = [
            task for task, tokens in zip(self._tasks, lengths, strict=True) if tokens <= max_tokens
        ]
        if not kept:
            raise ConfigError(
                f"all {self.size} prompts are longer than `episode.max_prompt_tokens` = "
                f"{max_tokens}; the shortest has {min(lengths)} tokens"
            )
        dropped = self.size - len(kept)
        self._tasks = kept
        return dropped


def make_dataset(target: str, config: EnvConfig) -> EnvironmentFactory:
    """Return a `DatasetFactory`. The path `target` is also part of `config.name`."""
    return DatasetFactory(config)
