"""The learner actor: receives trajectories, trains on complete groups in lease order or within a window, publishes weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from r3async.actors.delivery import Published
from r3async.actors.learning import Counts, Learning, Model
from r3async.actors.process import NotLoaded, begin, whereabouts
from r3async.actors.publishing import Publishing
from r3async.actors.ranks import LocalLearner, RankedLearner
from r3async.actors.reception import Reception
from r3async.checkpoint import CheckpointWriter, open_checkpoint
from r3async.checkpoint.state import ConductorState
from r3async.config import config_from_dict
from r3async.data.model_shape import RoutingShape
from r3async.data.versions import FIRST, Lineage
from r3async.learner.batch.cost import cost_model
from r3async.record.events import open_events
from r3async.record.timeline import LagMeter, Timeline
from r3async.schedule.groups import GroupBuffer
from r3async.world import World
from r3async.world.files import read_file

CLOSE_SECONDS = 5.0

T = TypeVar("T")


class LearnerActor:
    """Serves the conductor, which calls `start`, `listen` and `publish_through`, in that order, before anything else.

    The event loop receives; all torch work runs in one thread of its own. One thread and always the same one: Megatron keeps
    state per process, and torch keeps grad mode and function modes per thread. New weights are only copied there; another
    thread writes the copy while the next step runs.
    """

    receives: type[Reception] = Reception

    def __init__(
        self,
        world: World,
        run_id: str,
        config: dict[str, Any],
        model_path: str,
        run_dir: str,
        gpus_per_rank: float = 0.0,
        checkpoint: str = "",
        lineage: Lineage = FIRST,
    ):
        """`checkpoint`: what a resumed run begins from."""
        self.world, self._lock = world, begin(world, Path(run_dir), "learner")
        self.config = config_from_dict(config)
        self.run_id, self.model_path, self.run_dir, self.lineage = run_id, model_path, Path(run_dir), lineage
        self._gpus_per_rank, self._checkpoint = gpus_per_rank, Path(checkpoint) if checkpoint else None
        self.events = open_events(self.run_dir, "learner", world=world)
        self.timeline = Timeline(self.run_dir, "learner", enabled=self.config.observe.timeline, world=world)
        self.lag = LagMeter(world.processes)
        self._torch, self._writer = world.threads.lane("torch"), world.threads.lane("writer")
        self._interrupted = asyncio.Event()
        self.model: Model | None = None
        self.reception: Reception | None = None
        self.learning: Learning | None = None

    def _ready(self, part: T | None) -> T:
        if part is None:
            raise NotLoaded(f"the learner, process {self.world.processes.pid}, has not been told what that takes")
        return part

    async def start(self) -> dict[str, Any]:
        """Load the model, and the checkpoint if the run is resumed. Returns whereabouts."""
        self.lag.start()
        self.model = await self._torch.run(self._load)
        gpus = await self._torch.run(self.model.backend.gpus)
        self.events.info(
            "learner_started",
            pid=self.world.processes.pid,
            backend=self.config.learner.backend,
            step=self.model.counts.steps,
            lineage=self.lineage.number,
        )
        return {**whereabouts(self.world), "gpus": gpus}

    def _load(self) -> Model:
        path, schedule = Path(self.model_path), self.config.schedule
        cost = cost_model(json.loads(read_file(path / "config.json", files=self.world.files)))
        if self.config.learner.parallel.world == 1:
            backend: LocalLearner | RankedLearner = LocalLearner.load(self.config, path, self.world)
        else:
            backend = RankedLearner.load(self.config, path, self.run_dir, self._gpus_per_rank, self.world)
        if self._checkpoint is None:
            buffer = GroupBuffer(schedule.samples_per_group, schedule.window)
            return Model(backend, self._torch, cost, Counts(), buffer)
        state = open_checkpoint(self._checkpoint, check_tensors=False, files=self.world.files).state
        backend.restore(self._checkpoint)
        buffer = GroupBuffer(
            schedule.samples_per_group, schedule.window, head=state.consumed, beyond=state.consumed_beyond
        )
        return Model(backend, self._torch, cost, Counts(state.steps, state.version, state.since_publication), buffer)

    async def listen(self, routing: dict[str, int] | None) -> dict[str, Any]:
        """Take back what the spool kept, and bind the socket. `routing`: of the routes that engines record, which are checked
        on arrival. Returns the endpoint, the keys of those who may send there, and the newest group that something is here of
        (-1: none)."""
        model = self._ready(self.model)
        self.reception = reception = self.receives(
            self.world,
            self.run_id,
            self.config,
            self.run_dir,
            self.lineage,
            self.events,
            buffer=model.buffer,
            routing=RoutingShape(**routing) if routing else None,
            vocab_size=model.backend.vocab_size,
            version=lambda: model.counts.version,
        )
        endpoint = await reception.start()
        keys, newest = reception.keys_for_generators, reception.buffer.newest_group
        return {"endpoint": endpoint, "keys": keys, "newest_group": newest}

    async def publish_through(self, backend: str, watched: list[int] | None) -> None:
        """By which transport versions go out, and which text is scored with each of them; see `r3async.actors.delivery`."""
        model, reception = self._ready(self.model), self._ready(self.reception)
        await self._torch.run(model.backend.publish_through, backend)
        text = None if watched is None else np.asarray(watched, np.int32)
        publishing = Publishing(
            self.world, self.config, self.lineage, self.timeline, model.backend, self._torch, self._writer, text
        )
        path, world = Path(self.model_path), self.world
        checkpoints = CheckpointWriter(self.config, self.run_id, path, self.run_dir, self.events, world=world)
        self.learning = Learning(
            self.world,
            self.config,
            self.run_dir,
            self.lineage,
            self.events,
            self.timeline,
            self.lag,
            checkpoints,
            model,
            reception,
            publishing,
        )

    async def publish(self) -> Published:
        """Copy and write the current weights; see `write`."""
        learning = self._ready(self.learning)
        await learning.publishing.copy(learning.model.counts.version)
        return await self.write()

    async def write(self, reading: Sequence[int] = ()) -> Published:
        """Write the weights that were copied last where engines find them, beside whatever else the learner does.

        Versions that engines are `reading` stay.
        """
        return await self._ready(self.learning).publishing.write(reading)

    def status(self) -> dict[str, Any]:
        """For who watches whether anything moves; cheap. `writing`: a version that engines are to have is not written yet.
        `storing`: see `Spool.waits`."""
        learning = self._ready(self.learning)
        return {
            **whereabouts(self.world),
            "doing": learning.doing,
            "steps": learning.model.counts.steps,
            "writing": learning.publishing.writing,
            **learning.reception.status(),
        }

    async def dump_stacks(self, reason: str) -> str:
        """What this process is doing, to `stacks/learner.txt`; its ranks write what they do to their logs."""
        processes = self.world.processes
        for pid in self.model.backend.pids if self.model else ():
            processes.ask_for_stacks(pid, processes.host)
        return str(processes.dump_stacks(self.run_dir / "stacks" / "learner.txt", reason))

    def missing(self, group_indices: list[int]) -> dict[int, list[int]]:
        """Episodes of these groups that have not arrived."""
        return self._ready(self.reception).missing(group_indices)

    async def train_step(self, last: bool = False) -> dict[str, Any] | None:
        """Wait for the next groups, train one step on them; copy the new weights when it is time, or if it is the `last`.

        Returns metrics, whether there are new weights (then `write` has to be called), the groups consumed, and episode
        previews; None if interrupted while waiting, which has no end of its own (`actors/watch.py`). Raises `AgeError`, without
        training, if a token is older than the schedule allows.
        """
        return await self._ready(self.learning).train_step(last, self._interrupted)

    async def checkpoint(self, state: ConductorState) -> float:
        """Copy the state as it is between two steps, and begin to write the checkpoint of it. Returns how long the next step
        had to wait for that, in seconds. See `CheckpointWriter.save`, also for what it raises."""
        return await self._ready(self.learning).checkpoint(state)

    async def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is there. Raises `CheckpointError` if the last one failed."""
        await self._ready(self.learning).finish_checkpoint()

    async def save(self, directory: str) -> int:
        """Export the current weights as a Hugging Face model directory, if any update made them. Returns how many did."""
        backend = self._ready(self.model).backend
        updates = await self._torch.run(backend.updates)
        if updates:
            await self._torch.run(backend.save, Path(directory))
        return updates

    def interrupt(self) -> None:
        """A `train_step` that waits for groups returns None."""
        self._interrupted.set()
        if self.reception is not None:
            self.reception.wake()

    async def stop(self) -> None:
        self.interrupt()
        self.lag.stop()
        if self.reception is not None:
            await self.reception.close()
        # Published files that a running step keeps from being removed now go when the next run starts.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._writer.close()
                if self.model is not None:
                    await self._torch.run(self.model.backend.close)
                await self._torch.close()
        await self.world.keeper.finish(CLOSE_SECONDS)
