"""The conductor's evaluations: which generator plays them, when, and where the figures go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from actors.fleet import RPC_SECONDS, Fleet
from r3async.appending import AppendFile
from r3async.config import Config

FILE = "evaluation.jsonl"
POLL_SECONDS = 0.2


class Evaluator:
    """At most one evaluation at a time, beside training and never in its way: one that fails is an event.

    `run_dir/evaluation.jsonl` gets an object for each, `{"step", "time", "evaluation/reward_mean", …}`: the newest step when it
    began, and the versions of the weights that sampled it. `events`: a structlog logger. `fleet()` is asked for the generators
    anew each time.
    """

    def __init__(self, config: Config, run_dir: Path, events: Any, fleet: Callable[[], Fleet]):
        self.config, self.settings = config, config.evaluation
        self._file, self._events, self._fleet = AppendFile(run_dir / FILE), events, fleet
        self._task: asyncio.Task[None] | None = None
        self._evaluated = -1
        """The step after which the last one began."""

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def after(self, step: int) -> None:
        """Step `step` has been made (0: none yet). Begins an evaluation if one is due; returns at once."""
        every = self.settings.every
        if every and (step % every == 0 if step else self.settings.at_start):
            self._begin(step)

    def _begin(self, step: int) -> None:
        if self.running:
            self._events.warning("evaluation_skipped", step=step, running_since_step=self._evaluated)
            return
        self._evaluated = step
        self._task = asyncio.create_task(self._evaluate(step))

    async def _evaluate(self, step: int) -> None:
        generator = next((g for g in self._fleet() if g.state == "healthy"), None)
        if generator is None:
            self._events.warning("evaluation_failed", step=step, error="no generator is alive")
            return
        try:
            # The generator gives up first, and so is free of it.
            limit = self.settings.timeout + RPC_SECONDS
            result = await asyncio.wait_for(generator.handle.evaluate.remote(), limit)
            figures = {f"evaluation/{name}": value for name, value in result.items()}
            self._file.append(msgspec.json.encode({"step": step, "time": time.time(), **figures}))
            self._events.info("evaluation_finished", step=step, generator=generator.generator_id, **result)
        except Exception as error:
            self._events.warning(
                "evaluation_failed", step=step, generator=generator.generator_id, error=str(error)[-500:]
            )

    async def finish(self, step: int, stopping: Callable[[], bool]) -> None:
        """The run has made its last step: wait for what is running, then evaluate the last weights if that has not been done.

        A run that is stopped begins nothing, and waits `supervise.stop_grace_seconds` at most.
        """
        await self._wait(stopping)
        if self.settings.every and step and self._evaluated != step and not stopping():
            self._begin(step)
            await self._wait(stopping)

    async def _wait(self, stopping: Callable[[], bool]) -> None:
        deadline: float | None = None
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=POLL_SECONDS)
            if stopping() and deadline is None:
                deadline = time.monotonic() + self.config.supervise.stop_grace_seconds
            if deadline is not None and time.monotonic() > deadline:
                self._events.warning("evaluation_given_up", step=self._evaluated)
                await self.cancel()

    async def cancel(self) -> None:
        """Wait for nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
