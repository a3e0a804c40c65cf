"""The conductor's steps: made one after the other, their weights written and delivered beside those that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from r3async.actors.delivery import no_delivery
from r3async.actors.fleet import RPC_SECONDS
from r3async.actors.installer import Installer
from r3async.actors.process import RunFailed
from r3async.checkpoint import Due, RunState
from r3async.schedule.updates import Updates

if TYPE_CHECKING:
    from r3async.actors.conductor import Conductor


class Steps:
    """Belongs to `conductor`, once there are weights. `state`: of the checkpoint that the run goes on from."""

    def __init__(self, conductor: Conductor, installer: Installer, state: RunState | None):
        self._conductor, self._installer, self._config = conductor, installer, conductor.config
        self._learner, self._rows, self._events = conductor.learner, conductor.rows, conductor.events
        self._clock = conductor.world.clock.monotonic
        self.updates = Updates(self._config.supervise.max_skipped_steps, self._events.warning, self._events.info)
        self.made = state.steps if state else 0
        self.version = state.version if state else 0
        """That the last step made, or had a part in."""
        self._due = Due(self._config.checkpoint, self._clock)
        self._due.done(self.made)
        self._saved = self.made if state else -1
        """Steps made when the last checkpoint was begun."""

    async def train(self, background: list[asyncio.Task[None]]) -> None:
        """Until all are made or a stop is requested. Raises what a background task fails with.

        A version is written, and then delivered, beside the steps that follow it.
        """
        conductor, publishing = self._conductor, None
        while self.made < self._config.steps and not conductor.stopping:
            last = self.made + 1 == self._config.steps
            result = await while_well(self._learner.call("train_step", last=last), background)
            if result is None:
                break
            self._stepped(result)
            if result["new_weights"]:
                if publishing is not None:  # the learner has written it before it copied the next
                    await while_well(publishing, background)
                publishing = asyncio.create_task(self._publish(self.version))
                background.append(publishing)
                if self._due(self.made):
                    await while_well(self._save(), background)
        if publishing is not None:
            await publishing

    def _stepped(self, result: dict[str, Any]) -> None:
        conductor, metrics, groups = self._conductor, result["metrics"], result["groups"]
        self.made += 1
        self.version = result["version"]
        conductor.admission.trained(self.version, groups)
        metrics |= conductor.pacing.stepped(self.made, len(groups), metrics)
        self._rows.add(self.made, self.version, metrics, result["previews"])
        if reason := self.updates.stepped(self.made, metrics):
            raise RunFailed(reason)
        conductor.evaluator.after(self.made)

    async def save_last(self, background: list[asyncio.Task[None]]) -> None:
        """Begin a checkpoint of the last step, unless it has one."""
        if self.made and self._saved != self.made:
            await while_well(self._save(), background)

    async def _save(self) -> None:
        """Begin a checkpoint of the run as it is between two steps."""
        self._due.done(self.made)
        self._saved = self.made
        state = await self._conductor.state()
        with self._conductor.timeline.span("checkpoint", step=self.made):
            seconds = await self._learner.call("checkpoint", state)
        self._events.info("checkpoint_begun", step=self.made, training_waited_seconds=round(seconds, 4))

    async def _publish(self, version: int) -> None:
        """Have the copied weights written, and make them those that engines are to install.

        The learner may be several versions ahead of an engine: what is read now must stay, however many follow. What is read
        from here on is the newest version, which outlives the next one in any case.
        """
        published = await self._learner.call("write", self._installer.reading)
        self._rows.amend(version, {"weights/write_seconds": published.seconds})
        self._installer.published = published
        self._conductor.news.set()

    async def deliver_forever(self) -> None:
        """Install the newest weights in every generator that answers; free slots; write the rows of what was trained."""
        conductor, installer = self._conductor, self._installer
        while True:
            await conductor.news.wait()
            conductor.news.clear()
            version = installer.published.version
            if not installer.behind and not self._rows.waits_for(version):
                continue
            with conductor.timeline.span("deliver", version=version):
                figures = await installer.deliver()
            if figures is None:
                continue  # nobody answers: one that is restarted, or recovers, installs the newest version and wakes this
            conductor.admission.installed(version)
            conductor.delivered(version, figures)

    async def settle(self, delivering: asyncio.Task[None]) -> None:
        """Let the last weights be delivered, so that every step has its row. Raises what the delivery failed with."""
        deadline = self._clock() + RPC_SECONDS
        while not self._rows.empty and self._clock() < deadline:
            self._conductor.news.set()
            await while_well(asyncio.sleep(0.05), [delivering])
        self._conductor.delivered(self.version, no_delivery())


async def while_well(call: Awaitable[Any], background: list[asyncio.Task[None]]) -> Any:
    """What `call` returns. Raises what a background task failed with as soon as it has; those that end well are let go."""
    waiting = asyncio.ensure_future(call)
    while True:
        for task in background:
            if task.done() and (error := task.exception()) is not None:
                waiting.cancel()
                raise error
        background[:] = [t for t in background if not t.done()]
        if waiting.done():
            return waiting.result()
        await asyncio.wait([waiting, *background], timeout=RPC_SECONDS, return_when=asyncio.FIRST_COMPLETED)
