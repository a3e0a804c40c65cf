"""Plays an episode of a lease again until it ends well, within its budgets of retries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from r3async.config import EpisodeConfig
from r3async.data.mixed import split_seed
from r3async.data.tokens import Trajectory
from r3async.envs import EnvironmentFactory
from r3async.envs.errors import ErrorSummary, is_repeated_error, summarize_error
from r3async.envs.seeding import seed_global_generators
from r3async.rollout.engine import ENGINE_RETRIES, EngineError, EngineLostError
from r3async.rollout.episode import (
    EngineAbortError,
    EpisodeError,
    EpisodePlayer,
    EpisodeTask,
    PromptTooLongError,
    build_failed_trajectory,
)
from r3async.rollout.play_context import PlayContext
from r3async.schedule.task_failures import EpisodeEnd, FailureSource

MAX_REPORTED_TRACEBACKS = 1000
"""Number of different errors of one player whose tracebacks are reported."""


class PlayedEpisode(NamedTuple):
    """An episode that is over: its trajectory, and how it ended."""

    trajectory: Trajectory
    end: EpisodeEnd


class RetryingPlayer:
    """A player of episodes, which plays those that fail again.

    Args:
        context: What the episodes are played with. Its `report_event` gets failed attempts, too.
        factory: Makes the environment of each episode, unless `play_episode` is given.
        play_episode: Plays one attempt in place of an environment from `factory`.
        task_settings: Settings of the tasks of each environment of a mix, by its index; default:
            `settings` for all.
        raise_failures: True to raise what an episode failed with for good, False to return a
            trajectory without turns.
    """

    def __init__(
        self,
        context: PlayContext,
        settings: EpisodeConfig,
        factory: EnvironmentFactory | None,
        *,
        play_episode: Callable[[EpisodeTask], Awaitable[Trajectory]] | None = None,
        task_settings: Sequence[EpisodeConfig] = (),
        raise_failures: bool = True,
    ):
        self._retry_budgets: dict[FailureSource, int] = {
            "environment": settings.retries,
            "engine": ENGINE_RETRIES,
        }
        self._context = context
        self._factory = factory
        self._task_settings = task_settings or (settings,)
        self._raise_failures = raise_failures
        self.attempt_count = 0
        """Number of attempts at an episode that are over, failed or not."""
        self._reported_errors: set[tuple[str, str]] = set()
        """Errors (error and place) whose tracebacks were reported."""
        self._play_episode = play_episode or self._play_environment

    async def play(self, task: EpisodeTask) -> PlayedEpisode:
        """Play an episode, all its turns with this player's engine.

        An episode whose environment fails is played again from its beginning, up to
        `episode.retries` times, but not once more if the user's code raised twice at one place. A
        call that fails in the engine is repeated within the episode (`RetryingEngine`), up to
        `ENGINE_RETRIES` times. A first prompt that is too long fails at once. An episode
        that failed for good is returned as a trajectory without turns (`build_failed_trajectory`);
        or, with `raise_failures`, `EpisodeError` is raised with the last error's traceback. Without
        it, `EngineLostError` is raised if the engine is lost: the episode has not failed, and
        another engine can play it.
        """
        tries = dict.fromkeys(self._retry_budgets, 0)
        before = None
        while True:
            try:
                trajectory = await self._play_episode(task)
                return PlayedEpisode(
                    trajectory, EpisodeEnd(task.group_index, task.episode_index, task.task_seed)
                )
            except Exception as error:
                loss = find_cause(error, EngineLostError)
                if loss is not None and not self._raise_failures:
                    raise loss from None
                who: FailureSource = "engine" if is_engine_failure(error) else "environment"
                raised = summarize_error(error)
                allowed = self._retry_budgets[who]
                # The engine's retries are used up already: playing from the
                # beginning would not help.
                tries[who] += allowed + 1 if who == "engine" else 1
                again = tries[who] <= allowed and not isinstance(error, PromptTooLongError)
                if again and not is_repeated_error(error, raised, before):
                    self._report_failure("episode_failed", task, who, tries[who], raised)
                    before = raised
                    continue
                failure = (
                    f"{raised.line}; {_describe_budget(who, tries[who], allowed)}\n{raised.trace}"
                )
                if self._raise_failures:
                    self._report_failure("episode_failed", task, who, tries[who], raised)
                    if isinstance(error, PromptTooLongError):
                        raise
                    told = f"task seed {task.task_seed}, {task.trajectory_id}, {who}: {failure}"
                    raise EpisodeError(told) from error
                self._report_failure("episode_abandoned", task, who, tries[who], raised)
                instead = build_failed_trajectory(
                    task,
                    self._context.engine.routing,
                    self._context.renderer.eos_token_id,
                    generator_id=self._context.generator_id,
                    at=self._context.clock(),
                )
                end = EpisodeEnd(task.group_index, task.episode_index, task.task_seed, who, failure)
                return PlayedEpisode(instead, end)
            finally:
                self.attempt_count += 1

    def _report_failure(
        self,
        event: str,
        task: EpisodeTask,
        failed_by: FailureSource,
        attempts: int,
        raised: ErrorSummary,
    ) -> None:
        """Report a failed attempt at an episode. The traceback of each error is reported once, and
        of no further error after `MAX_REPORTED_TRACEBACKS`."""
        kind = (raised.error, raised.place)
        with_traceback = (
            kind not in self._reported_errors
            and len(self._reported_errors) < MAX_REPORTED_TRACEBACKS
        )
        if with_traceback:
            self._reported_errors.add(kind)
        self._context.report_event(
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
            self._task_settings[split_seed(task.task_seed, len(self._task_settings))[0]],
            self._context,
        ).play_episode()


def is_engine_failure(error: BaseException) -> bool:
    """Return True if the engine failed, and not the environment."""
    return find_cause(error, EngineError, EngineAbortError) is not None


def find_cause(error: BaseException | None, *kinds: type[BaseException]) -> BaseException | None:
    """Return the first of `error`, its cause, the cause of that and so on that is of one of
    `kinds`; else None. Of a group, each error is looked at."""
    while error is not None and not isinstance(error, kinds):
        if isinstance(error, BaseExceptionGroup):
            return next(
                (
                    found
                    for each in error.exceptions
                    if (found := find_cause(each, *kinds)) is not None
                ),
                None,
            )
        error = error.__cause__
    return error


def _describe_budget(failed_by: FailureSource, tries: int, retries: int) -> str:
    setting = "" if failed_by == "engine" else f" (episode.retries = {retries})"
    return f"{tries} {'try' if tries == 1 else 'tries'}{setting}"
