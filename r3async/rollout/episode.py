"""Plays one episode, or one group of them: environment and engine in turns, every token recorded as it was seen."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

import msgspec

from r3async.config import EpisodeConfig
from r3async.data.models import RoutingShape
from r3async.data.tokens import Sample, Trajectory, format_trajectory_id
from r3async.envs import (
    Action,
    Environment,
    EnvironmentFactory,
    EnvironmentProtocolError,
    coerce_messages,
    refuse_repeated_messages,
    require_step_result,
    sum_episode_metrics,
)
from r3async.envs.errors import ErrorSummary, is_repeated_error, summarize_error
from r3async.rollout.chat import ChatRenderer, Conversation
from r3async.rollout.engine import Engine, EngineError, Generation, GenerationRequest
from r3async.rollout.samples import EpisodeSamples, PendingCall, SampleBuilder
from r3async.schedule.admission import GroupLease
from r3async.schedule.tasks import EpisodeEnd, FailureSource
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


# All episodes of one lease at once, with retry budgets; finished ones leave as they finish.


MAX_REPORTED_TRACEBACKS = 1000
"""Different errors of one player whose tracebacks are told."""


class GroupPlayer:
    """Plays leases. `deliver_trajectory` takes each finished trajectory; `report(event, **fields)` gets failed attempts.

    `play_episode` plays one episode in place of an environment that `factory` makes. `on_episode_end(end)` gets each episode
    that is over, and decides how many may fail for good; without it, the first one that does is raised. `clock`: unix seconds.
    `settings_of_task`: of a task, by its seed; the `settings` unless named.
    """

    def __init__(
        self,
        *,
        factory: EnvironmentFactory | None,
        engine: Engine,
        renderer: ChatRenderer,
        settings: EpisodeConfig,
        generator_id: str,
        deliver_trajectory: Callable[[Trajectory], Awaitable[None]],
        report: Callable[..., object],
        play_episode: Callable[[EpisodeTask], Awaitable[Trajectory]] | None = None,
        on_episode_end: Callable[[EpisodeEnd], None] | None = None,
        clock: Callable[[], float] = REAL_WORLD.clock.time,
        settings_of_task: Callable[[int], EpisodeConfig] | None = None,
    ):
        self._retry_budgets: dict[FailureSource, int] = {
            "environment": settings.retries,
            "engine": settings.engine_retries,
        }
        self._on_episode_end, self._clock, self._blocking_detector = (
            on_episode_end,
            clock,
            BlockingDetector(report, clock),
        )
        self._factory, self._engine, self._renderer, self._settings = factory, engine, renderer, settings
        self._settings_of_task = settings_of_task or (lambda task_seed: settings)
        self._generator_id, self._deliver_trajectory, self._report = generator_id, deliver_trajectory, report
        self.playing_count = 0
        """Episodes that have begun and not ended. One that waits to be sent has ended."""
        self.attempt_count = 0
        """Tries at an episode that are over, whether or not they failed."""
        self.active_episodes: set[tuple[int, int]] = set()
        """Group and index of each episode that has begun and was not handed over."""
        self._reported_errors: set[tuple[str, str]] = set()
        """Errors whose tracebacks were reported."""
        self._play_episode = play_episode or self._play_environment

    def play_lease(self, lease: GroupLease) -> Coroutine[Any, Any, None]:
        """Returns when every episode of the lease was delivered. All of its turns go to this player's engine. They count as
        `playing_count` from the call on, also before it is awaited.

        An episode in which the environment fails is played again from its beginning, `episode.retries` times, but not once more
        where the user's code raised twice at one place. What the engine fails at is asked again within the episode
        (`RetryingEngine`), `episode.engine_retries` times. A first prompt that is too long fails at once. Then a trajectory
        without turns stands for it (`build_failed_trajectory`); or, without `on_episode_end`, `EpisodeError` is raised with
        the last error's traceback, and the other episodes of the lease are cancelled.
        """
        tasks = [EpisodeTask(lease.group_index, index, lease.task_seed) for index in lease.episode_indices]
        for task in tasks:
            self._count_begun(task)
        return self._play_tasks(tasks)

    async def _play_tasks(self, tasks: Sequence[EpisodeTask]) -> None:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(self._play_and_deliver(task))

    async def play_task(self, task: EpisodeTask) -> None:
        """One episode of a lease, tried again if it fails; see `play_episode`."""
        self._count_begun(task)
        await self._play_and_deliver(task)

    def _count_begun(self, task: EpisodeTask) -> None:
        self.playing_count += 1
        self.active_episodes.add((task.group_index, task.episode_index))

    async def _play_and_deliver(self, task: EpisodeTask) -> None:
        try:
            try:
                trajectory = await self._play_with_retries(task)
            finally:
                self.playing_count -= 1
            await self._deliver_trajectory(trajectory)
        finally:
            self.active_episodes.discard((task.group_index, task.episode_index))

    async def _play_with_retries(self, task: EpisodeTask) -> Trajectory:
        tries, before = dict.fromkeys(self._retry_budgets, 0), None
        while True:
            try:
                trajectory = await self._play_episode(task)
                self._report_end(task)
                return trajectory
            except Exception as error:
                who: FailureSource = "engine" if is_engine_failure(error) else "environment"
                raised, allowed = summarize_error(error), self._retry_budgets[who]
                # The engine was asked again already: what it cannot answer now, it cannot from the beginning.
                tries[who] += allowed + 1 if who == "engine" else 1
                again = tries[who] <= allowed and not isinstance(error, PromptTooLongError)
                if again and not is_repeated_error(error, raised, before):
                    self._report_failure("episode_failed", task, who, tries[who], raised)
                    before = raised
                    continue
                failure = f"{raised.line}; {_describe_budget(who, tries[who], allowed)}\n{raised.trace}"
                if self._on_episode_end is None:
                    self._report_failure("episode_failed", task, who, tries[who], raised)
                    if isinstance(error, PromptTooLongError):
                        raise
                    told = f"task seed {task.task_seed}, {task.trajectory_id}, {who}: {failure}"
                    raise EpisodeError(told) from error
                self._report_failure("episode_abandoned", task, who, tries[who], raised)
                self._report_end(task, who, failure)
                return build_failed_trajectory(
                    task,
                    self._engine.routing,
                    self._renderer.eos_token_id,
                    generator_id=self._generator_id,
                    at=self._clock(),
                )
            finally:
                self.attempt_count += 1

    def _report_failure(
        self, event: str, task: EpisodeTask, failed_by: FailureSource, attempts: int, raised: ErrorSummary
    ) -> None:
        """A try at an episode failed. The traceback of each error is told once."""
        known = (raised.error, raised.place) in self._reported_errors
        if not known and len(self._reported_errors) < MAX_REPORTED_TRACEBACKS:
            self._reported_errors.add((raised.error, raised.place))
        self._report(
            event,
            task_seed=task.task_seed,
            group=task.group_index,
            by=failed_by,
            error=raised.error,
            **({"place": raised.place} if raised.place else {}),
            episode=task.trajectory_id,
            attempt=attempts,
            **({} if known else {"exception": raised.trace}),
        )

    def _report_end(self, task: EpisodeTask, failed_by: FailureSource | None = None, error: str = "") -> None:
        if self._on_episode_end is not None:
            self._on_episode_end(EpisodeEnd(task.group_index, task.episode_index, task.task_seed, failed_by, error))

    async def _play_environment(self, task: EpisodeTask) -> Trajectory:
        assert self._factory is not None
        return await EpisodePlayer(
            task,
            self._factory(),
            self._engine,
            self._renderer,
            self._settings_of_task(task.task_seed),
            generator_id=self._generator_id,
            clock=self._clock,
            report=self._report,
            blocking_detector=self._blocking_detector,
        ).play_episode()


def is_engine_failure(error: BaseException | None) -> bool:
    """Whether the engine is what failed, and not the environment."""
    while error is not None:
        if isinstance(error, (EngineError, EngineAbortError)):
            return True
        error = error.__cause__
    return False


def _describe_budget(failed_by: FailureSource, tries: int, retries: int) -> str:
    setting = "episode.engine_retries" if failed_by == "engine" else "episode.retries"
    return f"{tries} {'try' if tries == 1 else 'tries'} ({setting} = {retries})"


# Who holds up the event loop of a generator: an environment of `async def` that computes, or waits without `await`.


BLOCKING_SECONDS = 0.5
"""Between two waits of a call. All episodes of the generator, its leases and its heartbeat wait meanwhile."""

T = TypeVar("T")


class BlockingDetector:
    """Names environments that hold up the loop: `report(event, **fields)` gets the first time of each, and then each that took
    twice as long as any before."""

    def __init__(self, report: Callable[..., object], clock: Callable[[], float] = REAL_WORLD.clock.time):
        self._report, self._clock = report, clock
        self._longest_seconds: dict[str, float] = {}

    async def run(self, environment: object, method: str, call: Awaitable[T]) -> T:
        """What `call`, to `method` of `environment`, returns or raises."""
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
        self._report(
            "environment_blocks",
            environment=name,
            method=method,
            seconds=round(seconds, 2),
            remedy="make reset and step plain `def`, to be played in processes, or await what takes time",
        )


class _TimedAwaitable(Awaitable[T]):
    """A coroutine; `record_seconds` gets the seconds of each stretch in which it did not wait."""

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
            except SystemExit as error:  # which would end this process, and every episode in it
                raise EnvironmentProtocolError(f"the environment called sys.exit({error.code!r})") from error
            finally:
                self._record_seconds(self._clock() - began)
            try:
                given, go = (yield waits_for), inner.send
            except BaseException as error:  # a cancellation, which is the call's to handle
                given, go = error, inner.throw
