"""One episode: environment and engine in turns, every token recorded as it was seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import numpy as np

from r3async.config import EpisodeConfig
from r3async.engines.base import Engine, EngineError, Generation, GenerationRequest, RoutingShape
from r3async.envs.base import Action, Environment
from r3async.episodes.chat import ChatRenderer
from r3async.records import SCHEMA, Sample, TokenTable, Trajectory, Turn
from r3async.routing import RoutingTrace
from r3async.versions import expand


class EpisodeError(RuntimeError):
    """An episode that could not be played to its end."""


class PromptTooLong(EpisodeError):
    """The first prompt leaves no room; no answer was asked for."""


class EpisodeTask(msgspec.Struct, frozen=True):
    """Which episode to play: `episode_index` of the G episodes of one group; all of them share `task_seed`."""

    group_index: int
    episode_index: int
    task_seed: int

    @property
    def trajectory_id(self) -> str:
        """The same for every try at this episode, so that a repeated one is recognised."""
        return f"g{self.group_index:08d}e{self.episode_index:04d}"


class SampleBuilder:
    """Grows one training row, token by token as the engine saw them.

    Observation tokens and injected end-of-sequence tokens are in the sequence with `loss_mask` False; sampled tokens
    carry log-prob, version and turn. Routes are kept by position (`RoutingTrace`).
    """

    def __init__(self, routing: RoutingShape | None):
        self.token_ids: list[int] = []
        self.trace = (
            RoutingTrace(layers=routing.layers, top_k=routing.top_k, num_experts=routing.num_experts)
            if routing
            else None
        )
        self._answers: list[tuple[int, int, Generation]] = []
        self._rewards: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def routes_from(self) -> int:
        return self.trace.fed if self.trace is not None else 0

    def observe(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)

    def answer(self, turn: int, generation: Generation) -> tuple[int, int]:
        """Append what the policy sampled when it was fed all tokens so far. Returns its rows `start, stop`.

        A call that sampled nothing (an abort) has fed what it returned rows for, and nothing else.
        """
        start = len(self)
        self.token_ids.extend(generation.token_ids.tolist())
        stop = len(self)
        self._answers.append((turn, start, generation))
        if self.trace is not None:
            rows, first = generation.routed_experts, generation.routes_from
            if stop > start:
                # The last sampled token has not been fed: its row belongs to the next call that feeds it.
                self.trace.record(first, rows, fed=stop - 1)
            elif rows is not None and len(rows):
                self.trace.record(first, rows, fed=min(start, first + len(rows)))
        return start, stop

    def branch(self, length: int) -> SampleBuilder:
        """A new row whose context is the first `length` tokens of this one, with their routes.

        For a context that is rewritten from there on, and for step-wise rows. None of the shared tokens is trained in
        the new row: the row that sampled them does that. Raises `ValueError` if there are not so many tokens.
        """
        if not 0 <= length <= len(self):
            raise ValueError(f"a branch can not share {length} of {len(self)} tokens")
        other = SampleBuilder(None)
        other.token_ids = self.token_ids[:length]
        other.trace = self.trace.branch(length) if self.trace is not None else None
        return other

    def reward(self, at: int, reward: float) -> None:
        self._rewards.append((at, reward))

    def build(self) -> TokenTable:
        n = len(self)
        columns = {name: column.filled(n) for name, column in SCHEMA.columns.items() if not column.optional}
        columns["token_ids"] = np.asarray(self.token_ids, np.int32)
        for turn, start, generation in self._answers:
            rows = slice(start, start + len(generation.token_ids))
            columns["loss_mask"][rows] = True
            columns["turn"][rows] = turn
            columns["rollout_logprobs"][rows] = generation.logprobs
            columns["policy_version"][rows] = expand(generation.version_spans, len(generation.token_ids))
        for at, reward in self._rewards:
            columns["rewards"][at] += reward
        if self.trace is not None:
            columns["routed_experts"], columns["routing_recorded"] = self.trace.materialise(n)
        return TokenTable(columns)


async def play_episode(
    task: EpisodeTask,
    env: Environment,
    engine: Engine,
    renderer: ChatRenderer,
    settings: EpisodeConfig,
    *,
    generator_id: str = "",
    clock: Callable[[], float] = time.time,
) -> Trajectory:
    """Play `env` with `engine` until it is done, the turns or the context run out; returns the trajectory.

    Ends with `stop_reason` `env_done`, `turns` or `length` (no context left for another answer). Raises
    `PromptTooLong` if the first prompt exceeds `episode.max_prompt_tokens`, `EpisodeError` on a time-out or an answer
    the engine aborted. Cancelling it aborts the running request.
    """
    started = clock()
    try:
        async with asyncio.timeout(settings.timeout):
            return await _play(task, env, engine, renderer, settings, generator_id, started, clock)
    except TimeoutError as error:
        raise EpisodeError(
            f"episode {task.trajectory_id} took longer than episode.timeout = {settings.timeout} s"
        ) from error


async def _play(
    task: EpisodeTask,
    env: Environment,
    engine: Engine,
    renderer: ChatRenderer,
    settings: EpisodeConfig,
    generator_id: str,
    started: float,
    clock: Callable[[], float],
) -> Trajectory:
    builder = SampleBuilder(engine.routing)
    messages = await env.reset(task.task_seed)
    builder.observe(renderer.first(messages))
    if len(builder) > settings.max_prompt_tokens:
        raise PromptTooLong(
            f"the first prompt of episode {task.trajectory_id} has {len(builder)} tokens, more than "
            f"episode.max_prompt_tokens = {settings.max_prompt_tokens}: "
            "raise it (and episode.max_total_tokens) or shorten the task"
        )
    turns: list[Turn] = []
    preview: list[dict[str, str]] = []
    stop_reason = "turns"
    for index in range(settings.max_turns):
        budget = min(settings.max_new_tokens, settings.max_total_tokens - len(builder))
        if budget <= 0:
            stop_reason = "length"
            break
        generation = await engine.generate(
            GenerationRequest(
                request_id=f"{task.trajectory_id}t{index}",
                prompt_ids=np.asarray(builder.token_ids, np.int32),
                max_tokens=budget,
                temperature=settings.temperature,
                stop_token_ids=renderer.stop_token_ids,
                routes_from=builder.routes_from,
            )
        )
        if generation.stop_reason == "abort" or not len(generation.token_ids):
            raise EpisodeError(f"the engine aborted turn {index} of episode {task.trajectory_id}")
        start, stop = builder.answer(index, generation)
        text = renderer.text(builder.token_ids[start:stop])
        result = await env.step(Action(text, generation.stop_reason))
        if not np.isfinite(result.reward):
            raise EpisodeError(
                f"the environment gave reward {result.reward} on turn {index} of episode {task.trajectory_id}"
            )
        builder.reward(stop - 1, result.reward)
        turns.append(Turn(index, 0, start, stop, float(result.reward), generation.stop_reason))
        if task.episode_index == 0:
            preview += [{"role": m.role, "content": m.content} for m in messages]
            preview.append({"role": "assistant", "content": text})
        if result.done:
            stop_reason = "env_done"
            break
        messages = result.messages
        following = renderer.following(messages)
        if builder.token_ids[-1] not in renderer.stop_token_ids:
            following = [renderer.end_id, *following]  # the answer was cut: end it, outside of the loss
        if len(builder) + len(following) >= settings.max_total_tokens:
            stop_reason = "length"
            break
        if index + 1 < settings.max_turns:
            builder.observe(following)
    if not turns:
        raise EngineError(f"episode {task.trajectory_id} ended without an answer")
    return Trajectory(
        trajectory_id=task.trajectory_id,
        group_index=task.group_index,
        episode_index=task.episode_index,
        task_seed=task.task_seed,
        generator_id=generator_id,
        stop_reason=stop_reason,
        turns=turns,
        samples=[Sample(f"{task.trajectory_id}s0", builder.build(), settings.temperature)],
        started_at=started,
        finished_at=clock(),
        preview=preview,
    )
