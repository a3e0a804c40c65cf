"""Plays episodes: environment and engine take turns, and every token is recorded as the engine saw it.

It plays one episode, or all episodes of a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from r3async.config import EpisodeConfig
from r3async.data.mixed import split_seed
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import Sample, Trajectory, format_trajectory_id
from r3async.envs import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentProtocolError,
    refuse_repeated_messages,
    sum_episode_metrics,
)
from r3async.envs.errors import ErrorSummary, is_repeated_error, summarize_error
from r3async.envs.returned import coerce_messages, require_step_result
from r3async.envs.seeding import seed_global_generators
from r3async.rollout.chat import ChatRenderer, Conversation
from r3async.rollout.engine import Engine, EngineError, EngineLostError, Generation, GenerationRequest
from r3async.rollout.samples import EpisodeSamples, PendingCall, SampleBuilder
from r3async.schedule.tasks import EpisodeEnd, FailureSource
from r3async.world import EventReporter, ignore_event
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage

STOP_REASONS = ("env_done", "turns", "length", "stop", "timeout", "error")
"""Values of `Trajectory.stop_reason`: the environment ended the episode, turns ran out, the context was full, an agent
stopped making requests, time ran out, or the episode failed."""

ENV_CLOSE_SECONDS = 10.0


class EpisodeError(RuntimeError):
    """An episode that could not be played to its end."""


class EngineAbortError(EpisodeError):
    """An answer that the engine aborted, or that is empty."""


class PromptTooLongError(EpisodeError):
    """A first prompt that leaves no capacity for an answer; no request was sent."""


class EpisodeTask(msgspec.Struct, frozen=True):
    """One episode to play: number `episode_index` of the G episodes of a group, which all share `task_seed`."""

    group_index: int
    episode_index: int
    task_seed: int

    @property
    def trajectory_id(self) -> str:
        return format_trajectory_id(self.group_index, self.episode_index)

    def build_trajectory(self, **played: Any) -> Trajectory:
        """Return the trajectory of this task. `played` holds the fields of `Trajectory` that are not the task's."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_index=self.group_index,
            episode_index=self.episode_index,
            task_seed=self.task_seed,
            **played,
        )


def answer_capacity(prompt_tokens: int, settings: EpisodeConfig) -> int:
    """Return the tokens that may be sampled after a prompt of that length; 0 if the prompt itself is too long."""
    if prompt_tokens > settings.max_prompt_tokens:
        return 0
    return max(0, min(settings.max_new_tokens, settings.max_total_tokens - prompt_tokens))


class RetryingEngine:
    """A wrapper of the engine that retries the calls of one episode. `report_event` gets each failed call.

    A call that fails in the engine, or is aborted, is repeated while the environment or the agent waits, up to
    `episode.engine_retries` times per episode. Calls may overlap; all belong to one event loop.
    """

    def __init__(
        self,
        trajectory_id: str,
        engine: Engine,
        settings: EpisodeConfig,
        stop_token_ids: Sequence[int],
        report_event: EventReporter,
    ):
        self._trajectory_id, self._engine, self._settings = trajectory_id, engine, settings
        self._stop_token_ids, self._report_event = () if settings.ignore_eos else tuple(stop_token_ids), report_event
        self._attempt_count = self._failure_count = 0

    async def generate_answer(self, call: PendingCall, max_tokens: int, stop_strings: Sequence[str] = ()) -> Generation:
        """Sample the answer to the prompt of `call`: at least one token, at most `max_tokens`.

        `stop_strings` end the answer in addition to those of `episode.stop`. Raises `EngineError` or `EngineAbortError`
        if the engine has failed too often, and at once if it is lost. Cancelling aborts the running request.
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
                if self._failure_count > self._settings.engine_retries:
                    raise

    async def _try_generate(self, call: PendingCall, max_tokens: int, stop: Sequence[str]) -> Generation:
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
    """A player of one episode. `build_trajectory` returns what has been played so far, at any time."""

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
        report_event: EventReporter = ignore_event,
        blocking_detector: BlockingDetector | None = None,
    ):
        """Prepare to play `task`. `blocking_detector` is shared by all episodes of this generator."""
        self.task, self.settings = task, settings
        self._env, self._renderer = env, renderer
        self._blocking_detector = blocking_detector or BlockingDetector(report_event, clock)
        self._generator_id, self._clock = generator_id, clock
        self._samples = EpisodeSamples(engine.routing, settings.rows, settings.needs_sampling_mask)
        name = task.trajectory_id
        self._retrying_engine = RetryingEngine(name, engine, settings, renderer.stop_token_ids, report_event)
        self._preview: list[dict[str, str]] = []
        self._env_metrics: list[dict[str, float]] = []
        self._rewarded_turns = 0
        """Number of turns whose answers have a reward. An answer that time ran out on has none and is not trained."""
        self._started_at = clock()

    async def play_episode(self) -> Trajectory:
        """Play until the environment is done, or turns, context or time run out.

        Raises `PromptTooLongError` for the first prompt, `PrefixMismatchError` (see `EpisodeSamples`), `TemplateError`,
        `EpisodeError` if time runs out before the first turn is complete, the engine's error if it failed too often
        (`RetryingEngine`), and whatever the environment raises. Cancelling aborts the running request.
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
        """Play all turns and return the stop reason."""
        name, settings, env = self.task.trajectory_id, self.settings, self._env
        run_watched = self._blocking_detector.run
        # The environment gives its task. Its calls draw the same random numbers in all episodes of a group.
        seed_global_generators(self.task.task_seed)
        said = await run_watched(env, "reset", env.reset(self.task.task_seed))
        messages = coerce_messages(said, "reset()")
        conversation = Conversation(self._renderer, messages, getattr(env, "tools", ()))
        for index in range(settings.max_turns):
            # The prompt keeps the tokens of earlier turns: what was sampled is never tokenized again.
            with stage("tokens"):
                prompt = conversation.build_prompt()
            # Without room for an answer the episode ends; without room for the first one, the task is too long.
            if not (capacity := answer_capacity(len(prompt.token_ids), settings)):
                if index == 0:
                    raise PromptTooLongError(
                        f"the first prompt of episode {name} has {len(prompt.token_ids)} tokens, more than "
                        f"episode.max_prompt_tokens = {settings.max_prompt_tokens}: raise it (and "
                        "episode.max_total_tokens) or shorten the task"
                    )
                return "length"
            # Continue the sample that the prompt extends, or begin another one, and have the engine answer.
            call = self._samples.start_call(prompt.token_ids, prompt.shared_turn, prompt.shared_tokens)
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
            # From here on the turn has a reward, so it is trained even if time runs out in a later one.
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
    """Return the placeholder of an episode that failed for good, so that its group is complete.

    It has one token that was not sampled and no turn, so nothing of it is trained or compared. `stop_reason` is
    `error`.
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
    if close is not None and inspect.isawaitable(waiting := close()):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(waiting, ENV_CLOSE_SECONDS)


# Playing all episodes of a lease concurrently, with retry budgets; each trajectory is delivered when it is finished.


MAX_REPORTED_TRACEBACKS = 1000
"""Number of different errors of one player whose tracebacks are reported."""


class PlayedEpisode(NamedTuple):
    """An episode that is over: its trajectory, and how it ended."""

    trajectory: Trajectory
    end: EpisodeEnd


class RetryingPlayer:
    """A player of episodes, which plays those that fail again.

    Args:
        factory: Makes the environment of each episode, unless `play_episode` is given.
        report_event: Gets failed attempts.
        play_episode: Plays one attempt in place of an environment from `factory`.
        clock: Returns unix seconds.
        task_settings: Settings of the tasks of each environment of a mix, by its index; default: `settings` for all.
        raise_failures: True to raise what an episode failed with for good, False to return a trajectory without turns.
    """

    def __init__(
        self,
        *,
        factory: EnvironmentFactory | None,
        engine: Engine,
        renderer: ChatRenderer,
        settings: EpisodeConfig,
        generator_id: str,
        report_event: EventReporter,
        play_episode: Callable[[EpisodeTask], Awaitable[Trajectory]] | None = None,
        clock: Callable[[], float] = REAL_WORLD.clock.time,
        task_settings: Sequence[EpisodeConfig] = (),
        raise_failures: bool = True,
    ):
        self._retry_budgets: dict[FailureSource, int] = {
            "environment": settings.retries,
            "engine": settings.engine_retries,
        }
        self._clock, self._blocking_detector = clock, BlockingDetector(report_event, clock)
        self._factory, self._engine, self._renderer = factory, engine, renderer
        self._task_settings = task_settings or (settings,)
        self._generator_id, self._report_event, self._raise_failures = generator_id, report_event, raise_failures
        self.attempt_count = 0
        """Number of attempts at an episode that are over, failed or not."""
        self._reported_errors: set[tuple[str, str]] = set()
        """Errors (error and place) whose tracebacks were reported."""
        self._play_episode = play_episode or self._play_environment

    async def play(self, task: EpisodeTask) -> PlayedEpisode:
        """Play an episode, all its turns with this player's engine.

        An episode whose environment fails is played again from its beginning, up to `episode.retries` times, but not
        once more if the user's code raised twice at one place. A call that fails in the engine is repeated within the
        episode (`RetryingEngine`), up to `episode.engine_retries` times. A first prompt that is too long fails at once.
        An episode that failed for good is returned as a trajectory without turns (`build_failed_trajectory`); or, with
        `raise_failures`, `EpisodeError` is raised with the last error's traceback. Without it, `EngineLostError` is
        raised if the engine is lost: the episode has not failed, and another engine can play it.
        """
        tries, before = dict.fromkeys(self._retry_budgets, 0), None
        while True:
            try:
                trajectory = await self._play_episode(task)
                return PlayedEpisode(trajectory, EpisodeEnd(task.group_index, task.episode_index, task.task_seed))
            except Exception as error:
                if (loss := find_cause(error, EngineLostError)) is not None and not self._raise_failures:
                    raise loss from None
                who: FailureSource = "engine" if is_engine_failure(error) else "environment"
                raised, allowed = summarize_error(error), self._retry_budgets[who]
                # The engine's retries are used up already: playing from the beginning would not help.
                tries[who] += allowed + 1 if who == "engine" else 1
                again = tries[who] <= allowed and not isinstance(error, PromptTooLongError)
                if again and not is_repeated_error(error, raised, before):
                    self._report_failure("episode_failed", task, who, tries[who], raised)
                    before = raised
                    continue
                failure = f"{raised.line}; {_describe_budget(who, tries[who], allowed)}\n{raised.trace}"
                if self._raise_failures:
                    self._report_failure("episode_failed", task, who, tries[who], raised)
                    if isinstance(error, PromptTooLongError):
                        raise
                    told = f"task seed {task.task_seed}, {task.trajectory_id}, {who}: {failure}"
                    raise EpisodeError(told) from error
                self._report_failure("episode_abandoned", task, who, tries[who], raised)
                instead = build_failed_trajectory(
                    task,
                    self._engine.routing,
                    self._renderer.eos_token_id,
                    generator_id=self._generator_id,
                    at=self._clock(),
                )
                end = EpisodeEnd(task.group_index, task.episode_index, task.task_seed, who, failure)
                return PlayedEpisode(instead, end)
            finally:
                self.attempt_count += 1

    def _report_failure(
        self, event: str, task: EpisodeTask, failed_by: FailureSource, attempts: int, raised: ErrorSummary
    ) -> None:
        """Report a failed attempt at an episode. The traceback of each error is reported once, and of no further error
        after `MAX_REPORTED_TRACEBACKS`."""
        kind = (raised.error, raised.place)
        with_traceback = kind not in self._reported_errors and len(self._reported_errors) < MAX_REPORTED_TRACEBACKS
        if with_traceback:
            self._reported_errors.add(kind)
        self._report_event(
            event,
            task_seed=task.task_seed,
            group=task.group_index,
            by=failed_by,
            error=raised.error,
            **({"place": raised.place} if raised.place else {}),
            episode=task.trajectory_id,
            attempt=attempts,
            **({"exception": raised.trace} if with_traceback else {}),
        )

    async def _play_environment(self, task: EpisodeTask) -> Trajectory:
        assert self._factory is not None
        seed_global_generators(task.task_seed)
        return await EpisodePlayer(
            task,
            self._factory(),
            self._engine,
            self._renderer,
            self._task_settings[split_seed(task.task_seed, len(self._task_settings))[0]],
            generator_id=self._generator_id,
            clock=self._clock,
            report_event=self._report_event,
            blocking_detector=self._blocking_detector,
        ).play_episode()


def is_engine_failure(error: BaseException) -> bool:
    """Return True if the engine failed, and not the environment."""
    return find_cause(error, EngineError, EngineAbortError) is not None


def find_cause(error: BaseException | None, *kinds: type[BaseException]) -> BaseException | None:
    """Return the first of `error`, its cause, the cause of that and so on that is of one of `kinds`; else None. Of a
    group, each error is looked at."""
    while error is not None and not isinstance(error, kinds):
        if isinstance(error, BaseExceptionGroup):
            return next((found for each in error.exceptions if (found := find_cause(each, *kinds)) is not None), None)
        error = error.__cause__
    return error


def _describe_budget(failed_by: FailureSource, tries: int, retries: int) -> str:
    setting = "episode.engine_retries" if failed_by == "engine" else "episode.retries"
    return f"{tries} {'try' if tries == 1 else 'tries'} ({setting} = {retries})"


# Detection of environments that block a generator's event loop: an `async def` that computes, or waits without `await`.


BLOCKING_SECONDS = 0.5
"""Seconds that a call may run between two waits before it is reported. Meanwhile all episodes of the generator, its
leases and its heartbeat wait."""

T = TypeVar("T")


class BlockingDetector:
    """A detector of environments that block the event loop.

    `report_event` gets each environment's first blocking stretch, and then each stretch that took twice as
    long as any before it.
    """

    def __init__(self, report_event: EventReporter, clock: Callable[[], float] = REAL_WORLD.clock.time):
        self._report_event, self._clock = report_event, clock
        self._longest_seconds: dict[str, float] = {}

    async def run(self, environment: object, method: str, call: Awaitable[T]) -> T:
        """Await `call`, a call of `method` of `environment`, and return its result or raise its exception."""
        if not asyncio.iscoroutine(call):
            return await call
        kind = type(environment)
        return await _TimedAwaitable(
            call, self._clock, lambda took: self._record_stretch(f"{kind.__module__}:{kind.__name__}", method, took)
        )

    def _record_stretch(self, name: str, method: str, seconds: float) -> None:
        if seconds < max(BLOCKING_SECONDS, 2 * self._longest_seconds.get(name, 0.0)):
            return
        self._longest_seconds[name] = seconds
        self._report_event(
            "environment_blocks",
            environment=name,
            method=method,
            seconds=round(seconds, 2),
            remedy="make reset and step plain `def`, so that they run in other processes, or await what takes time",
        )


class _TimedAwaitable(Awaitable[T]):
    """A coroutine with a timer: `record_seconds` gets the seconds of each stretch in which it did not wait."""

    def __init__(self, call: Any, clock: Callable[[], float], record_seconds: Callable[[float], None]):
        self._call, self._clock, self._record_seconds = call, clock, record_seconds

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._call.__await__()
        go, given = inner.send, None
        while True:
            began = self._clock()
            try:
                waits_for = go(given)
            except StopIteration as ended:
                return ended.value
            except SystemExit as error:  # it would end this process, and every episode in it
                raise EnvironmentProtocolError(f"the environment called sys.exit({error.code!r})") from error
            finally:
                self._record_seconds(self._clock() - began)
            try:
                given, go = (yield waits_for), inner.send
            except BaseException as error:  # a cancellation, which is the call's to handle
                given, go = error, inner.throw
