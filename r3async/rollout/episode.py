"""One episode: environment and engine in turns, every token recorded as it was seen."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from r3async.config import EpisodeConfig
from r3async.data.model_shape import RoutingShape
from r3async.data.records import Sample, Trajectory, format_trajectory_id
from r3async.envs import (
    Action,
    Environment,
    coerce_messages,
    refuse_repeated_messages,
    require_step_result,
    sum_episode_metrics,
)
from r3async.envs.raised import summarize_error
from r3async.rollout.chat import ChatRenderer, Conversation
from r3async.rollout.engines import Engine, EngineError, Generation, GenerationRequest
from r3async.rollout.held_up import BlockingDetector
from r3async.rollout.samples import EpisodeSamples, PendingCall, SampleBuilder
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage

STOP_REASONS = ("env_done", "turns", "length", "stop", "timeout", "error")
"""What `Trajectory.stop_reason` may be: the environment ended it, turns ran out, the context was full, an agent stopped asking,
time ran out, or it failed."""

ENV_CLOSE_SECONDS = 10.0


class EpisodeError(RuntimeError):
    """An episode that could not be played to its end."""


class EngineAbortError(EpisodeError):
    """The engine aborted an answer, or gave none."""


class PromptTooLongError(EpisodeError):
    """The first prompt leaves no capacity for an answer; none was asked for."""


class EpisodeTask(msgspec.Struct, frozen=True):
    """Which episode to play: `episode_index` of the G episodes of one group; all of them share `task_seed`."""

    group_index: int
    episode_index: int
    task_seed: int

    @property
    def trajectory_id(self) -> str:
        return format_trajectory_id(self.group_index, self.episode_index)

    def build_trajectory(self, **played: Any) -> Trajectory:
        """`played`: the fields of `Trajectory` that are not the task's."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_index=self.group_index,
            episode_index=self.episode_index,
            task_seed=self.task_seed,
            **played,
        )


def answer_capacity(prompt_tokens: int, settings: EpisodeConfig) -> int:
    """Tokens that may be sampled after a prompt of that length; 0 if the prompt itself is too long."""
    if prompt_tokens > settings.max_prompt_tokens:
        return 0
    return max(0, min(settings.max_new_tokens, settings.max_total_tokens - prompt_tokens))


class RetryingEngine:
    """Asks the engine for the answers of one episode. `report(event, **fields)` gets each call that failed.

    A call that the engine fails at, or aborts, is made again while the environment, or the agent, waits:
    `episode.engine_retries` times in the episode. Calls may overlap; all belong to one event loop.
    """

    def __init__(
        self,
        trajectory_id: str,
        engine: Engine,
        settings: EpisodeConfig,
        stop_token_ids: Sequence[int],
        report: Callable[..., object],
    ):
        self._trajectory_id, self._engine, self._settings = trajectory_id, engine, settings
        self._stop_token_ids, self._report = () if settings.ignore_eos else tuple(stop_token_ids), report
        self._attempt_count = self._failure_count = 0

    async def generate_answer(self, call: PendingCall, max_tokens: int, stop_strings: Sequence[str] = ()) -> Generation:
        """What is sampled behind the prompt of `call`: at least one token, at most `max_tokens`. `stop_strings`: strings that
        end it, beside those of `episode.stop`.

        Raises `EngineError` or `EngineAbortError` where the engine has failed too often. Cancelling it aborts the running
        request.
        """
        while True:
            try:
                return await self._try_generate(call, max_tokens, stop_strings)
            except (EngineError, EngineAbortError) as error:
                self._failure_count += 1
                self._report(
                    "call_failed",
                    episode=self._trajectory_id,
                    attempt=self._failure_count,
                    error=summarize_error(error).line,
                )
                if self._failure_count > self._settings.engine_retries:
                    raise

    async def _try_generate(self, call: PendingCall, max_tokens: int, stop: Sequence[str]) -> Generation:
        # Every attempt has a number of its own: a record of calls distinguishes them.
        name = f"{self._trajectory_id}t{self._attempt_count}"
        self._attempt_count += 1
        request = GenerationRequest(
            request_id=name,
            prompt_ids=call.prompt_ids,
            max_tokens=max_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            min_p=self._settings.min_p,
            needs_sampling_mask=self._settings.needs_sampling_mask,
            stop_strings=tuple(dict.fromkeys([*self._settings.stop, *stop])),
            stop_token_ids=self._stop_token_ids,
            routes_from=call.routes_from,
            routes_version=call.routes_version,
        )
        with stage("engine"):
            generation = await self._engine.generate(request)
        if generation.stop_reason == "abort" or not len(generation.token_ids):
            raise EngineAbortError(f"the engine aborted call {name} after {len(generation.token_ids)} tokens")
        return generation


class EpisodePlayer:
    """Plays one episode. What it holds at any time (`build_trajectory`) is what has been played so far."""

    def __init__(
        self,
        task: EpisodeTask,
        env: Environment,
        engine: Engine,
        renderer: ChatRenderer,
        settings: EpisodeConfig,
        *,
        generator_id: str = "",
        clock: Callable[[], float] = REAL_WORLD.clock.time,
        report: Callable[..., object] = lambda event, **fields: None,
        blocking_detector: BlockingDetector | None = None,
    ):
        """`blocking_detector`: of all episodes of this generator."""
        self.task, self.settings = task, settings
        self._env, self._renderer, self._blocking_detector = (
            env,
            renderer,
            blocking_detector or BlockingDetector(report, clock),
        )
        self._generator_id, self._clock = generator_id, clock
        self._samples = EpisodeSamples(engine.routing, settings.rows, settings.needs_sampling_mask)
        name = task.trajectory_id
        self._retrying_engine = RetryingEngine(name, engine, settings, renderer.stop_token_ids, report)
        self._preview: list[dict[str, str]] = []
        self._env_metrics: list[dict[str, float]] = []
        self._rewarded_turns = 0
        """Turns whose answers have a reward. An answer that time ran out on is not trained: nobody knows what it is worth."""
        self._started_at = clock()

    async def play_episode(self) -> Trajectory:
        """Until the environment is done, or turns, context or time run out.

        Raises `PromptTooLongError` for the first prompt, `PrefixMismatchError` (see `EpisodeSamples`), `TemplateError`,
        `EpisodeError` if time runs out before the first turn is complete, what the engine failed with too often
        (`RetryingEngine`), and whatever the environment raises. Cancelling it aborts the running request.
        """
        try:
            async with asyncio.timeout(self.settings.timeout) as limit:
                return self.build_trajectory(await self._play_turns())
        except TimeoutError as error:
            if not limit.expired():
                raise  # the environment's own
            if not self._rewarded_turns:
                raise EpisodeError(
                    f"episode {self.task.trajectory_id} took longer than episode.timeout = {self.settings.timeout} s, and no "
                    "answer had a reward yet"
                ) from error
            return self.build_trajectory("timeout")
        finally:
            await close_environment(self._env)

    async def _play_turns(self) -> str:
        """Play; returns why it ended."""
        name, settings = self.task.trajectory_id, self.settings
        env, watched = self._env, self._blocking_detector.run
        messages = coerce_messages(await watched(env, "reset", env.reset(self.task.task_seed)))
        talk = Conversation(self._renderer, messages, getattr(self._env, "tools", ()))
        for index in range(settings.max_turns):
            with stage("tokens"):
                prompt = talk.build_prompt()
            if not (capacity := answer_capacity(len(prompt.token_ids), settings)):
                if index == 0:
                    raise PromptTooLongError(
                        f"the first prompt of episode {name} has {len(prompt.token_ids)} tokens, more than "
                        f"episode.max_prompt_tokens = {settings.max_prompt_tokens}: raise it (and "
                        "episode.max_total_tokens) or shorten the task"
                    )
                return "length"
            call = self._samples.start_call(prompt.token_ids, prompt.shared_turn, prompt.shared_tokens)
            generation = await self._retrying_engine.generate_answer(call, capacity)
            turn = self._samples.finish_call(call, generation)
            token_ids = generation.token_ids.tolist()
            with stage("tokens"):
                text = talk.add_answer(token_ids, turn=turn)
            told = token_ids if getattr(self._env, "takes_tokens", False) else []
            action = Action(text, generation.stop_reason, told, prompt.opens_thought)
            result = require_step_result(await watched(env, "step", env.step(action)))
            self._samples.add_reward(turn, result.reward)
            self._env_metrics.append(result.metrics)
            self._rewarded_turns = turn + 1
            if self.task.episode_index == 0:
                self._preview += [{"role": m.role, "content": m.content} for m in messages]
                self._preview.append({"role": "assistant", "content": text})
            if result.done:
                return "env_done"
            told, messages = messages, coerce_messages(result.messages)
            if not result.rewrites:
                refuse_repeated_messages(told, messages)
            with stage("tokens"):
                (talk.replace_messages if result.rewrites else talk.add_messages)(messages)
        return "turns"

    def build_trajectory(self, stop_reason: str) -> Trajectory:
        """What was played. Raises `EpisodeError` if that is nothing."""
        name = self.task.trajectory_id
        samples, turns = self._samples.build_samples(name, self.settings.temperature, self._rewarded_turns)
        if not turns:
            raise EpisodeError(f"episode {name} ended without an answer")
        return self.task.build_trajectory(
            generator_id=self._generator_id,
            stop_reason=stop_reason,
            turns=turns,
            samples=samples,
            started_at=self._started_at,
            finished_at=self._clock(),
            preview=self._preview,
            metrics=sum_episode_metrics(self._env_metrics),
        )


def build_failed_trajectory(
    task: EpisodeTask, routing: RoutingShape | None, token_id: int, *, generator_id: str = "", at: float = 0.0
) -> Trajectory:
    """What stands for an episode that failed for good, so that its group is complete: one token that nobody sampled, and no
    turn, so nothing that is trained or compared. `stop_reason` is `error`."""
    row = SampleBuilder(routing)
    row.append_context([token_id])
    return task.build_trajectory(
        generator_id=generator_id,
        stop_reason="error",
        turns=[],
        samples=[Sample(f"{task.trajectory_id}s0", row.build_table())],
        started_at=at,
        finished_at=at,
    )


async def close_environment(env: Environment) -> None:
    """Call its `close()`, plain or `async def`, if it has one: an episode may end without the environment knowing."""
    close = getattr(env, "close", None)
    if close is not None and inspect.isawaitable(waiting := close()):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(waiting, ENV_CLOSE_SECONDS)
