"""Plays one episode: environment and engine take turns, and every token is recorded as the engine
saw it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from r3async.config import EpisodeConfig
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import Sample, Trajectory, format_trajectory_id
from r3async.envs import Action, Environment, refuse_repeated_messages, sum_episode_metrics
from r3async.envs.errors import summarize_error
from r3async.envs.returned import coerce_messages, require_step_result
from r3async.envs.seeding import seed_global_generators
from r3async.rollout.conversation import Conversation
from r3async.rollout.engine import (
    ENGINE_RETRIES,
    EngineError,
    EngineLostError,
    Generation,
    GenerationRequest,
)
from r3async.rollout.play_context import PlayContext
from r3async.rollout.samples import EpisodeSamples, PendingCall, SampleBuilder
from r3async.world.stages import stage

STOP_REASONS = ("env_done", "turns", "length", "stop", "timeout", "error")
"""Values of `Trajectory.stop_reason`: the environment ended the episode, turns ran out, the context
was full, an agent stopped making requests, time ran out, or the episode failed."""

ENV_CLOSE_SECONDS = 10.0


class EpisodeError(RuntimeError):
    """An episode that could not be played to its end."""


class EngineAbortError(EpisodeError):
    """An answer that the engine aborted, or that is empty."""


class PromptTooLongError(EpisodeError):
    """A first prompt that leaves no capacity for an answer; no request was sent."""


class EpisodeTask(msgspec.Struct, frozen=True):
    """One episode to play: number `episode_index` of the G episodes of a group, which all
    share `task_seed`."""

    group_index: int
    episode_index: int
    task_seed: int

    @property
    def trajectory_id(self) -> str:
        return format_trajectory_id(self.group_index, self.episode_index)

    def build_trajectory(self, **played: Any) -> Trajectory:
        """Return the trajectory of this task. `played` holds the fields of `Trajectory` that
        are not the task's."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_index=self.group_index,
            episode_index=self.episode_index,
            task_seed=self.task_seed,
            **played,
        )


def answer_capacity(prompt_tokens: int, settings: EpisodeConfig) -> int:
    """Return the tokens that may be sampled after a prompt of that length; 0 if the prompt
    itself is too long."""
    if prompt_tokens > settings.max_prompt_tokens:
        return 0
    return max(0, min(settings.max_new_tokens, settings.max_total_tokens - prompt_tokens))


class RetryingEngine:
    """A wrapper of the engine that retries the calls of one episode, and reports each that failed.

    A call that fails in the engine, or is aborted, is repeated while the environment or the
    agent waits, up to `ENGINE_RETRIES` times per episode. Calls may overlap; all belong
    to one event loop.
    """

    def __init__(
        self,
        trajectory_id: str,
        settings: EpisodeConfig,
        context: PlayContext,
    ):
        self._trajectory_id = trajectory_id
        self._engine = context.engine
        self._settings = settings
        stop_token_ids = context.renderer.stop_token_ids
        self._stop_token_ids = () if settings.ignore_eos else tuple(stop_token_ids)
        self._report_event = context.report_event
        self._attempt_count = self._failure_count = 0

    async def generate_answer(
        self, call: PendingCall, max_tokens: int, stop_strings: Sequence[str] = ()
    ) -> Generation:
        """Sample the answer to the prompt of `call`: at least one token, at most `max_tokens`.

        `stop_strings` end the answer in addition to those of `episode.stop`. Raises `EngineError`
        or `EngineAbortError` if the engine has failed too often, and at once if it is lost.
        Cancelling aborts the running request.
        """
        while True:
            try:
                return await self._try_generate(call, max_tokens, stop_strings)
            except EngineLostError:
                raise
            except (EngineError, EngineAbortError) as error:
                self._failure_count += 1
                self._report_event(
                    "call_failed",
                    episode=self._trajectory_id,
                    attempt=self._failure_count,
                    error=summarize_error(error).line,
                )
                if self._failure_count > ENGINE_RETRIES:
                    raise

    async def _try_generate(
        self, call: PendingCall, max_tokens: int, stop: Sequence[str]
    ) -> Generation:
        # Every attempt has its own number, so that a record of calls can tell them apart.
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
            needs_sampling_mask=self._settings.truncates_sampling,
            stop_strings=tuple(dict.fromkeys([*self._settings.stop, *stop])),
            stop_token_ids=self._stop_token_ids,
            routes_from=call.routes_from,
            routes_version=call.routes_version,
        )
        with stage("engine"):
            generation = await self._engine.generate(request)
        if generation.stop_reason == "abort" or not len(generation.token_ids):
            raise EngineAbortError(
                f"the engine aborted call {name} after {len(generation.token_ids)} tokens"
            )
        return generation


class EpisodePlayer:
    """A player of one episode. `build_trajectory` returns what has been played so
    far, at any time."""

    def __init__(
        self,
        task: EpisodeTask,
        env: Environment,
        settings: EpisodeConfig,
        context: PlayContext,
    ):
        self.task = task
        self.settings = settings
        self._env = env
        self._context = context
        self._samples = EpisodeSamples(
            context.engine.routing, settings.rows, settings.truncates_sampling
        )
        self._retrying_engine = RetryingEngine(task.trajectory_id, settings, context)
        self._preview: list[dict[str, str]] = []
        self._env_metrics: list[dict[str, float]] = []
        self._rewarded_turns = 0
        """Number of turns whose answers have a reward. An answer that time ran out on has none
        and is not trained."""
        self._started_at = context.clock()

    async def play_episode(self) -> Trajectory:
        """Play until the environment is done, or turns, context or time run out.

        Raises `PromptTooLongError` for the first prompt, `PrefixMismatchError` (see
        `EpisodeSamples`), `TemplateError`, `EpisodeError` if time runs out before the first turn is
        complete, the engine's error if it failed too often (`RetryingEngine`), and whatever the
        environment raises. Cancelling aborts the running request.
        """
        try:
            async with asyncio.timeout(self.settings.timeout) as limit:
                return self.build_trajectory(await self._play_turns())
        except TimeoutError as error:
            if not limit.expired():
                raise  # the environment's own
            if not self._rewarded_turns:
                raise EpisodeError(
                    f"episode {self.task.trajectory_id} took longer than episode.timeout = "
                    f"{self.settings.timeout} s, and no answer had a reward yet"
                ) from error
            return self.build_trajectory("timeout")
        finally:
            await self._close_environment()

    async def _close_environment(self) -> None:
        """Close the environment. If that fails, what was played stays, and so does the error that is
        on its way."""
        try:
            await close_environment(self._env)
        except (Exception, SystemExit) as error:
            kind = type(self._env)
            self._context.report_event(
                "environment_close_failed",
                environment=f"{kind.__module__}:{kind.__name__}",
                episode=self.task.trajectory_id,
                error=summarize_error(error).line,
            )

    async def _play_turns(self) -> str:
        """Play all turns and return the stop reason."""
        name = self.task.trajectory_id
        settings = self.settings
        env = self._env
        run_watched = self._context.blocking_detector.run
        # The environment gives its task. Its calls draw the same random numbers in all
        # episodes of a group.
        seed_global_generators(self.task.task_seed)
        said = await run_watched(env, "reset", env.reset(self.task.task_seed))
        messages = coerce_messages(said, "reset()")
        conversation = Conversation(self._context.renderer, messages, getattr(env, "tools", ()))
        for index in range(settings.max_turns):
            # The prompt keeps the tokens of earlier turns: what was sampled is never
            # tokenized again.
            with stage("tokens"):
                prompt = conversation.build_prompt()
            # Without room for an answer the episode ends; without room for the first one, the
            # task is too long.
            capacity = answer_capacity(len(prompt.token_ids), settings)
            if not capacity:
                if index == 0:
                    raise PromptTooLongError(
                        f"the first prompt of episode {name} has {len(prompt.token_ids)} tokens, "
                        f"more than episode.max_prompt_tokens = {settings.max_prompt_tokens}: "
                        "raise it (and episode.max_total_tokens) or shorten the task"
                    )
                return "length"
            # Continue the sample that the prompt extends, or begin another one, and have
            # the engine answer.
            call = self._samples.start_call(
                prompt.token_ids, prompt.shared_turn, prompt.shared_tokens
            )
            generation = await self._retrying_engine.generate_answer(call, capacity)
            turn = self._samples.finish_call(call, generation)
            # The environment gets the answer as text, and as tokens only if it takes them.
            token_ids = generation.token_ids.tolist()
            with stage("tokens"):
                text = conversation.add_answer(token_ids, turn=turn)
            token_ids_for_env = token_ids if getattr(env, "takes_tokens", False) else []
            action = Action(text, generation.stop_reason, token_ids_for_env, prompt.opens_thought)
            seed_global_generators(self.task.task_seed, index + 1)
            result = require_step_result(await run_watched(env, "step", env.step(action)))
            # From here on the turn has a reward, so it is trained even if time runs
            # out in a later one.
            self._samples.add_reward(turn, result.reward)
            self._env_metrics.append(result.metrics)
            self._rewarded_turns = turn + 1
            # The first episode of a group is shown to people.
            if self.task.episode_index == 0:
                self._preview += [{"role": m.role, "content": m.content} for m in messages]
                self._preview.append({"role": "assistant", "content": text})
            if result.done:
                return "env_done"
            # The environment continues the conversation, or puts another one in its place.
            previous_messages = messages
            messages = coerce_messages(result.messages, "StepResult.messages")
            if not result.rewrites:
                refuse_repeated_messages(previous_messages, messages)
            with stage("tokens"):
                if result.rewrites:
                    conversation.replace_messages(messages)
                else:
                    conversation.add_messages(messages)
        return "turns"

    def build_trajectory(self, stop_reason: str) -> Trajectory:
        """Return the trajectory played so far. Raises `EpisodeError` if it has no answer."""
        name = self.task.trajectory_id
        samples, turns = self._samples.build_samples(
            name, self.settings.temperature, self._rewarded_turns
        )
        if not turns:
            raise EpisodeError(f"episode {name} ended without an answer")
        return self.task.build_trajectory(
            generator_id=self._context.generator_id,
            stop_reason=stop_reason,
            turns=turns,
            samples=samples,
            started_at=self._started_at,
            finished_at=self._context.clock(),
            preview=self._preview,
            metrics=sum_episode_metrics(self._env_metrics),
        )


def build_failed_trajectory(
    task: EpisodeTask,
    routing: RoutingShape | None,
    token_id: int,
    *,
    generator_id: str = "",
    at: float = 0.0,
) -> Trajectory:
    """Return the placeholder of an episode that failed for good, so that its group is complete.

    It has one token that was not sampled and no turn, so nothing of it is trained or compared.
    `stop_reason` is `error`.
    """
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
    """Call the environment's `close()`, plain or `async def`, if it has one.

    An episode may end without the environment knowing.
    """
    close = getattr(env, "close", None)
    if close is not None:
        waiting = close()
        if inspect.isawaitable(waiting):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting, ENV_CLOSE_SECONDS)
