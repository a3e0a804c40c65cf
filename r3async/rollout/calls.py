"""The engine calls of one episode: what the engine fails at is asked again, and nothing else of the episode is lost by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from r3async.config import EpisodeConfig
from r3async.rollout.engines.base import Engine, EngineError, Generation, GenerationRequest
from r3async.rollout.samples import EpisodeRows


class EpisodeError(RuntimeError):
    """An episode that could not be played to its end."""


class EngineAborted(EpisodeError):
    """The engine gave an answer up, or gave none."""


class EngineCalls:
    """Answers for one episode, each recorded in `rows`. `report(event, **fields)` is told of each call that failed.

    A call that the engine fails at, or aborts, leaves no trace in the rows and is made again while the environment, or the agent,
    waits: `episode.engine_retries` times in the episode. Calls may overlap; all belong to one event loop.
    """

    def __init__(
        self,
        episode: str,
        engine: Engine,
        rows: EpisodeRows,
        settings: EpisodeConfig,
        stop_token_ids: Sequence[int],
        report: Callable[..., object],
    ):
        self._episode, self._engine, self._rows, self._settings = episode, engine, rows, settings
        self._stop_token_ids, self._report = tuple(stop_token_ids), report
        self._asked = self._failed = 0

    async def answer(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, Generation]:
        """The turn and what was sampled: at least one token, at most `max_tokens`.

        Raises `PrefixBroken`, and `EngineError` or `EngineAborted` where the engine has failed too often. Cancelling it aborts
        the running request; its prompt may be asked again.
        """
        while True:
            try:
                return await self._ask(prompt, max_tokens)
            except (EngineError, EngineAborted) as error:
                self._failed += 1
                self._report("call_failed", episode=self._episode, attempt=self._failed, error=repr(error))
                if self._failed > self._settings.engine_retries:
                    raise

    async def _ask(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, Generation]:
        call = self._rows.begin(prompt)
        # Every try has a number of its own: a record of calls tells them apart.
        name = f"{self._episode}t{self._asked}"
        self._asked += 1
        try:
            generation = await self._engine.generate(
                GenerationRequest(
                    request_id=name,
                    prompt_ids=np.asarray(prompt, np.int32),
                    max_tokens=max_tokens,
                    temperature=self._settings.temperature,
                    stop_token_ids=self._stop_token_ids,
                    routes_from=call.routes_from,
                    routes_version=call.routes_version,
                )
            )
            if generation.stop_reason == "abort" or not len(generation.token_ids):
                raise EngineAborted(f"the engine aborted call {name} after {len(generation.token_ids)} tokens")
        except BaseException:
            self._rows.cancel(call)
            raise
        return self._rows.end(call, generation), generation
