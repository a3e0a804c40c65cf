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
from r3async.data.records import Sample, Trajectory, trajectory_name
from r3async.envs import Action, Environment, checked_messages, checked_result, refuse_told_again, sum_by_name
from r3async.envs.raised import describe_raised
from r3async.rollout.chat import ChatRenderer, Conversation
from r3async.rollout.engines import Engine, EngineError, Generation, GenerationRequest
from r3async.rollout.held_up import HeldUp
from r3async.rollout.samples import EngineCall, EpisodeSamples, SampleBuilder
from r3async.world.real import REAL
from r3async.world.stages import stage

ENDINGS = ("env_done", "turns", "length", "stop", "timeout", "error")
"""What `Trajectory.stop_reason` may be: the environment ended it, turns ran out, the context was full, an agent stopped asking,
time ran out, or it failed."""

CLOSE_SECONDS = 10.0


class EpisodeError(RuntimeError):
    """An episode that could not be played to its end."""


class EngineAborted(EpisodeError):
    """The engine aborted an answer, or gave none."""


class PromptTooLong(EpisodeError):
    """The first prompt leaves no capacity for an answer; none was asked for."""


class EpisodeTask(msgspec.Struct, frozen=True):
    """Which episode to play: `episode_index` of the G episodes of one group; all of them share `task_seed`."""

    group_index: int
    episode_index: int
    task_seed: int

    @property
    def trajectory_id(self) -> str:
        return trajectory_name(self.group_index, self.episode_index)

    def trajectory(self, **played: Any) -> Trajectory:
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


class EngineCalls:
    """Asks the engine for the answers of one episode. `report(event, **fields)` gets each call that failed.

    A call that the engine fails at, or aborts, is made again while the environment, or the agent, waits:
    `episode.engine_retries` times in the episode. Calls may overlap; all belong to one event loop.
    """

    def __init__(
        self,
        episode: str,
        engine: Engine,
        settings: EpisodeConfig,
        stop_token_ids: Sequence[int],
        report: Callable[..., object],
    ):
        self._episode, self._engine, self._settings = episode, engine, settings
        self._stop_token_ids, self._report = () if settings.ignore_eos else tuple(stop_token_ids), report
        self._asked = self._failed = 0

    async def answer(self, call: EngineCall, max_tokens: int, stop: Sequence[str] = ()) -> Generation:
        """What is sampled behind the prompt of `call`: at least one token, at most `max_tokens`. `stop`: strings that end it,
        beside those of `episode.stop`.

        Raises `EngineError` or `EngineAborted` where the engine has failed too often. Cancelling it aborts the running request.
        """
        while True:
            try:
                return await self._ask(call, max_tokens, stop)
            except (EngineError, EngineAborted) as error:
                self._failed += 1
                self._report(
                    "call_failed", episode=self._episode, attempt=self._failed, error=describe_raised(error).line
                )
                if self._failed > self._settings.engine_retries:
                    raise

    async def _ask(self, call: EngineCall, max_tokens: int, stop: Sequence[str]) -> Generation:
        # Every attempt has a number of its own: a record of calls distinguishes them.
        name = f"{self._episode}t{self._asked}"
        self._asked += 1
        request = GenerationRequest(
            request_id=name,
            prompt_ids=call.prompt_ids,
            max_tokens=max_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            min_p=self._settings.min_p,
            mask=self._settings.keeps_mask,
            stop=tuple(dict.fromkeys([*self._settings.stop, *stop])),
            stop_token_ids=self._stop_token_ids,
            routes_from=call.routes_from,
            routes_version=call.routes_version,
        )
        with stage("engine"):
            generation = await self._engine.generate(request)
        if generation.stop_reason == "abort" or not len(generation.token_ids):
            raise EngineAborted(f"the engine aborted call {name} after {len(generation.token_ids)} tokens")
        return generation


class EpisodePlayer:
    """Plays one episode. What it holds at any time (`trajectory`) is what has been played so far."""

    def __init__(
        self,
        task: EpisodeTask,
        env: Environment,
        engine: Engine,
        renderer: ChatRenderer,
        settings: EpisodeConfig,
        *,
        generator_id: str = "",
        clock: Callable[[], float] = REAL.clock.time,
        report: Callable[..., object] = lambda event, **fields: None,
        held_up: HeldUp | None = None,
    ):
        """`held_up`: of all episodes of this generator."""
        self.task, self.settings = task, settings
        self._env, self._renderer, self._held_up = env, renderer, held_up or HeldUp(report, clock)
        self._generator_id, self._clock = generator_id, clock
        self._samples = EpisodeSamples(engine.routing, settings.rows, settings.keeps_mask)
        name = task.trajectory_id
        self._calls = EngineCalls(name, engine, settings, renderer.stop_token_ids, report)
        self._preview: list[dict[str, str]] = []
        self._told: list[dict[str, float]] = []
        self._judged = 0
        """Turns whose answers have a reward. An answer that time ran out on is not trained: nobody knows what it is worth."""
        self._started = clock()

    async def play(self) -> Trajectory:
        """Until the environment is done, or turns, context or time run out.

        Raises `PromptTooLong` for the first prompt, `PrefixBroken` (see `EpisodeSamples`), `TemplateError`, `EpisodeError` if
        time runs out before the first turn is complete, what the engine failed with too often (`EngineCalls`), and whatever the
        environment raises. Cancelling it aborts the running request.
        """
        try:
            async with asyncio.timeout(self.settings.timeout) as limit:
                return self.trajectory(await self._turns())
        except TimeoutError as error:
            if not limit.expired():
                raise  # the environment's own
            if not self._judged:
                raise EpisodeError(
                    f"episode {self.task.trajectory_id} took longer than episode.timeout = {self.settings.timeout} s, and no "
                    "answer had a reward yet"
                ) from error
            return self.trajectory("timeout")
        finally:
            await close_environment(self._env)

    async def _turns(self) -> str:
        """Play; returns why it ended."""
        name, settings = self.task.trajectory_id, self.settings
        env, watched = self._env, self._held_up.watched
        messages = checked_messages(await watched(env, "reset", env.reset(self.task.task_seed)))
        talk = Conversation(self._renderer, messages, getattr(self._env, "tools", ()))
        for index in range(settings.max_turns):
            with stage("tokens"):
                prompt = talk.prompt()
            if not (capacity := answer_capacity(len(prompt.token_ids), settings)):
                if index == 0:
                    raise PromptTooLong(
                        f"the first prompt of episode {name} has {len(prompt.token_ids)} tokens, more than "
                        f"episode.max_prompt_tokens = {settings.max_prompt_tokens}: raise it (and "
                        "episode.max_total_tokens) or shorten the task"
                    )
                return "length"
            call = self._samples.begin(prompt.token_ids, prompt.turn, prompt.shared)
            generation = await self._calls.answer(call, capacity)
            turn = self._samples.end(call, generation)
            token_ids = generation.token_ids.tolist()
            with stage("tokens"):
                text = talk.answered(token_ids, turn=turn)
            told = token_ids if getattr(self._env, "takes_tokens", False) else []
            action = Action(text, generation.stop_reason, told, prompt.thinking)
            result = checked_result(await watched(env, "step", env.step(action)))
            self._samples.reward(turn, result.reward)
            self._told.append(result.metrics)
            self._judged = turn + 1
            if self.task.episode_index == 0:
                self._preview += [{"role": m.role, "content": m.content} for m in messages]
                self._preview.append({"role": "assistant", "content": text})
            if result.done:
                return "env_done"
            told, messages = messages, checked_messages(result.messages)
            if not result.rewrites:
                refuse_told_again(told, messages)
            with stage("tokens"):
                (talk.rewrite if result.rewrites else talk.observe)(messages)
        return "turns"

    def trajectory(self, stop_reason: str) -> Trajectory:
        """What was played. Raises `EpisodeError` if that is nothing."""
        name = self.task.trajectory_id
        samples, turns = self._samples.build(name, self.settings.temperature, self._judged)
        if not turns:
            raise EpisodeError(f"episode {name} ended without an answer")
        return self.task.trajectory(
            generator_id=self._generator_id,
            stop_reason=stop_reason,
            turns=turns,
            samples=samples,
            started_at=self._started,
            finished_at=self._clock(),
            preview=self._preview,
            metrics=sum_by_name(self._told),
        )


def failed_trajectory(
    task: EpisodeTask, routing: RoutingShape | None, token_id: int, *, generator_id: str = "", at: float = 0.0
) -> Trajectory:
    """What stands for an episode that failed for good, so that its group is complete: one token that nobody sampled, and no
    turn, so nothing that is trained or compared. `stop_reason` is `error`."""
    row = SampleBuilder(routing)
    row.observe([token_id])
    return task.trajectory(
        generator_id=generator_id,
        stop_reason="error",
        turns=[],
        samples=[Sample(f"{task.trajectory_id}s0", row.build())],
        started_at=at,
        finished_at=at,
    )


async def close_environment(env: Environment) -> None:
    """Call its `close()`, plain or `async def`, if it has one: an episode may end without the environment knowing."""
    close = getattr(env, "close", None)
    if close is not None and inspect.isawaitable(waiting := close()):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(waiting, CLOSE_SECONDS)
