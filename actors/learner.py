"""The learner actor: receives trajectories, trains on complete groups in lease order or within a window, publishes weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actors.delivery import Published
from actors.process import begin, whereabouts
from actors.ranks import LocalLearner, RankedLearner
from actors.saving import LEARNER_RECORDS, Books, Progress, Saver, Trained
from actors.training import StepOf
from r3async.appending import KEEPER, AppendFile
from r3async.batching.cost import Cost, cost_model
from r3async.buffer.groups import GroupBuffer, largest_trajectory
from r3async.buffer.quarantine import Quarantine
from r3async.buffer.spool import Spool
from r3async.buffer.validation import validate_trajectory
from r3async.checkpoint import RunState, open_checkpoint
from r3async.config import config_from_dict
from r3async.engines.base import RoutingShape
from r3async.episodes.loop import EpisodeTask, failed_trajectory
from r3async.learners.base import LearnerError
from r3async.learners.sound import Unsound
from r3async.lineage import FIRST, Lineage
from r3async.observe.events import open_events
from r3async.observe.lag import LagMeter
from r3async.observe.stacks import dump_stacks
from r3async.observe.timeline import Timeline
from r3async.observe.tracing import StepTracer
from r3async.observe.trained import FILE as TRAINED_FILE
from r3async.observe.trained import episode_metrics, previews, trained_step
from r3async.records import Trajectory, is_name_in
from r3async.scheduling.admission import age_bound, most_groups, slots_of
from r3async.scheduling.age import age_metrics, check_ages
from r3async.scheduling.failures import By, EpisodeEnd, TaskFailures
from r3async.transport.keys import learner_keys
from r3async.transport.ledger import Ledger
from r3async.transport.receiver import Receiver, Refuse
from r3async.world import World

CLOSE_SECONDS = 5.0


class LearnerActor:
    """Serves the conductor. The event loop receives; all torch work runs in one thread of its own.

    One thread and always the same one: Megatron keeps state per process, and torch keeps grad mode and function modes
    per thread. New weights are only copied there; another thread writes the copy while the next step runs.
    """

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
        self.world, self._lock = world, begin(world, Path(run_dir), "learner")
        self.config = config_from_dict(config)
        self.run_id, self.model_path, self.run_dir, self.lineage = run_id, model_path, Path(run_dir), lineage
        self.events = open_events(self.run_dir, "learner")
        self.timeline = Timeline(self.run_dir, "learner", enabled=self.config.observe.timeline)
        self.tracer = StepTracer(self.run_dir, self.config, self.events.warning)
        schedule = self.config.schedule
        self.buffer = GroupBuffer(schedule.samples_per_group, schedule.window)
        self._slots = slots_of(schedule.max_staleness, schedule.groups_per_step, schedule.steps_per_publication)
        self.age_bound = age_bound(schedule)
        self.lag = LagMeter()
        self.routing: RoutingShape | None = None
        self.backend: LocalLearner | RankedLearner | None = None
        self._gpus_per_rank = gpus_per_rank
        self.version = 0
        """Versions published. A step without an update (nothing to train, a gradient that is not finite) counts too: slots
        are freed by it, and generators see time pass."""
        self.steps = 0
        self._since = [0, 0]
        """Steps made, and groups consumed, since the last version was published."""
        self._checkpoint = Path(checkpoint) if checkpoint else None
        """Where a resumed run goes on from."""
        self._saver = Saver(self.config, run_id, Path(model_path), self.run_dir, self.events, world=world)
        self._spool: Spool | None = None
        self._quarantine = Quarantine(
            self.run_dir / "quarantine", self.config.buffer.quarantine_bytes, self.events.error
        )
        self._unsound = TaskFailures(self.config.supervise.max_failed_fraction, schedule.samples_per_group)
        self._recovering = False
        """What is validated now was kept by the spool since before this start."""
        self._trained = Trained()
        self._trained_file = AppendFile(self.run_dir / TRAINED_FILE)
        self._committing: set[asyncio.Task[None]] = set()
        self._vocab_size = 0
        self._cost = Cost()
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._nothing_to_write = asyncio.Event()
        self._nothing_to_write.set()
        self._watched: np.ndarray | None = None
        self._scores: np.ndarray | None = None
        self._arrived = asyncio.Event()
        self._interrupted = False
        self._doing = "between steps"

    async def _in_torch(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._torch, call, *args)

    async def start(self) -> dict[str, Any]:
        """Load the model, and the checkpoint if the run is resumed. Returns whereabouts."""
        self.lag.start()
        await self._in_torch(self._load)
        assert self.backend is not None
        gpus = await self._in_torch(self.backend.gpus)
        self.events.info(
            "learner_started",
            pid=self.world.processes.pid,
            backend=self.config.learner.backend,
            step=self.steps,
            lineage=self.lineage.number,
        )
        return {**whereabouts(self.world), "gpus": gpus}

    async def listen(self, routing: dict[str, int] | None) -> dict[str, Any]:
        """Take back what the spool kept, and bind the socket. `routing`: of the routes that engines record, which are checked
        on arrival. Returns the endpoint, the keys of those who may send there, and the newest group that something is here of
        (-1: none)."""
        self.routing = RoutingShape(**routing) if routing else None
        schedule, buffer = self.config.schedule, self.config.buffer
        if buffer.durability == "disk":
            self._spool = Spool(self.run_dir / "spool", buffer, report=self.events.warning, aside=self._quarantine.keep)
        taken = self.buffer.taken
        keys, for_generators = learner_keys(self.config.transport)
        self.receiver = Receiver(
            self.run_id,
            self.config.transport,
            self._arrive,
            keys=keys,
            claims=lambda group, name: is_name_in(group, name, schedule.samples_per_group),
            largest=largest_trajectory(self.config, self.routing),
            validate=self._validate,
            admit=self._admits,
            store=self._spool,
            # A step may wait for that many groups, counted from the oldest that is not trained.
            window=(self._slots if schedule.tokens_per_step else schedule.groups_per_step) + schedule.window - 1,
            ledger=Ledger.over(taken.head, sorted(taken.beyond)),
            on_reject=self._rejected,
        )
        self._recovering = True
        endpoint = await self.receiver.start()
        self._recovering = False
        if self.receiver.recovered:
            self.events.info("spool_recovered", trajectories=self.receiver.recovered)
        return {"endpoint": endpoint, "keys": for_generators, "newest_group": self.buffer.newest_group}

    def _load(self) -> None:
        path = Path(self.model_path)
        self._cost = cost_model(json.loads((path / "config.json").read_text()))
        if self.config.learner.parallel.world == 1:
            self.backend = LocalLearner(self.config, path, files=self.world.files)
        else:
            self.backend = RankedLearner(self.config, path, self.run_dir, self._gpus_per_rank)
        self._vocab_size = self.backend.vocab_size
        if self._checkpoint is not None:
            opened = open_checkpoint(self._checkpoint, check_tensors=False, files=self.world.files)
            self._go_on(opened.state)
            self.backend.restore(self._checkpoint)

    def _go_on(self, state: RunState) -> None:
        schedule = self.config.schedule
        self.steps, self.version, self._since = state.steps, state.version, list(state.since_publication)
        self.buffer = GroupBuffer(
            schedule.samples_per_group, schedule.window, head=state.consumed, beyond=state.consumed_beyond
        )

    def _validate(self, trajectory: Trajectory) -> None:
        """Off the event loop, if the trajectory is long."""
        try:
            validate_trajectory(
                trajectory,
                vocab_size=self._vocab_size,
                learner_version=self.version,
                max_tokens=self.config.learner.max_tokens_per_micro_batch,
                routing=self.routing,
                samples_per_group=self.config.schedule.samples_per_group,
                age_bound=self.age_bound,
                lineage=self.lineage,
                kept=self._recovering,
            )
        except ValueError as error:
            raise Refuse(str(error)) from error

    def _admits(self, trajectory: Trajectory) -> bool:
        """Whether the step waits for this episode; before it is stored."""
        beyond = len(self.buffer.taken) + self._slots
        if trajectory.group_index >= beyond:
            # After a resume: it was made when more steps had been, which are taken back.
            raise Refuse(f"group {trajectory.group_index} cannot have a slot: only groups before {beyond} can")
        return self.buffer.wants(trajectory)

    def _arrive(self, trajectory: Trajectory, nbytes: int) -> None:
        if not self.buffer.add(trajectory, nbytes):
            self.receiver.release(trajectory.trajectory_id)
        self._arrived.set()

    def _rejected(self, trajectory_id: str, reason: str) -> None:
        self.events.error("trajectory_refused", trajectory_id=trajectory_id, reason=reason)

    async def publish_through(self, backend: str, watched: list[int] | None) -> None:
        """By which transport versions go out, and which text is scored with each of them; see `actors.delivery`."""
        assert self.backend is not None
        self._watched = None if watched is None else np.asarray(watched, np.int32)
        await self._in_torch(self.backend.publish_through, backend)

    async def publish(self) -> Published:
        """Copy and write the current weights; see `write`."""
        await self._snapshot()
        return await self.write()

    async def _snapshot(self) -> None:
        """Copy the current weights, for `write`, as soon as the version before them is written: one copy waits at most."""
        assert self.backend is not None
        limit = self.config.weights.write_timeout
        try:
            await asyncio.wait_for(self._nothing_to_write.wait(), limit)
        except TimeoutError as error:
            raise TimeoutError(
                f"version {self.version} has to wait for version {self.version - 1}, which was not written within "
                f"{limit:g} s (weights.write_timeout)"
            ) from error
        await self._in_torch(self.backend.snapshot, self.version)
        self._nothing_to_write.clear()
        if self._watched is not None:
            plain, temperature = (
                await self._in_torch(self.backend.score, self._watched),
                self.config.episode.temperature,
            )
            same = temperature == 1.0
            tempered = plain if same else await self._in_torch(self.backend.score, self._watched, temperature)
            self._scores = np.stack([plain, tempered])

    async def write(self, reading: Sequence[int] = ()) -> Published:
        """Write the weights that were copied last where engines find them, beside whatever else the learner does.

        Versions that engines are `reading` stay.
        """
        assert self.backend is not None
        began, scores = time.monotonic(), self._scores
        try:
            with self.timeline.span("write", version=self.version):
                writing = asyncio.get_running_loop().run_in_executor(self._writer, self.backend.write, reading)
                publication = await asyncio.wait_for(writing, self.config.weights.write_timeout)
        finally:
            self._nothing_to_write.set()  # whatever became of it, no step waits for it any more
        named = msgspec.structs.replace(publication.manifest, lineage=self.lineage.number)
        return Published(msgspec.structs.replace(publication, manifest=named), scores, time.monotonic() - began)

    async def score(self, token_ids: list[int]) -> np.ndarray:
        assert self.backend is not None
        return await self._in_torch(self.backend.score, np.asarray(token_ids, np.int32))

    def status(self) -> dict[str, Any]:
        """For who watches whether anything moves; cheap. `writing`: a version that engines are to have is not written yet.
        `storing`: see `Spool.waits`."""
        schedule = self.config.schedule
        return {
            **whereabouts(self.world),
            "doing": self._doing,
            "steps": self.steps,
            "received": self.receiver.received,
            "ready_groups": self.buffer.ready_groups(),
            "lacking": self.buffer.lacking(max(schedule.groups_per_step, schedule.window)),
            "writing": not self._nothing_to_write.is_set(),
            "storing": self._spool.waits if self._spool is not None else None,
        }

    async def dump_stacks(self, reason: str) -> str:
        """What this process is doing, to `stacks/learner.txt`; its ranks write what they do to their logs."""
        for pid in self.backend.pids if self.backend else ():
            self.world.processes.ask_for_stacks(pid, self.world.processes.host)
        return str(dump_stacks(self.run_dir / "stacks" / "learner.txt", reason))

    def missing(self, group_indices: list[int]) -> dict[int, list[int]]:
        """Episodes of these groups that have not arrived."""
        return {g: self.buffer.missing(g) for g in group_indices}

    async def train_step(self, last: bool = False) -> dict[str, Any] | None:
        """Wait for the next groups, train one step on them; copy the new weights when it is time, or if it is the `last`.

        Returns metrics, whether there are new weights (then `write` has to be called), the groups consumed, and episode
        previews; None if interrupted while waiting, which has no end of its own (`actors.watch`). Raises `AgeError`, without
        training, if a token is older than the schedule allows.
        """
        self._doing = "waiting"
        try:
            return await self._train_step(last)
        finally:
            self._doing = "between steps"

    async def _train_step(self, last: bool) -> dict[str, Any] | None:
        waited_from = time.monotonic()
        with self.timeline.span("wait", step=self.steps + 1):
            indices = await self._wait_for_groups()
        if not indices:
            return None
        waited, self._doing = time.monotonic() - waited_from, "training"
        groups, _ = self.buffer.take(indices)
        trajectories = [t for g in groups for t in g]
        version = self.version
        check_ages(groups, version, self.age_bound)
        ages = age_metrics(groups, version, self.age_bound, time.time(), self.config.schedule.max_token_age)
        step_from = time.monotonic()
        with self.timeline.span("train", step=self.steps + 1):
            assert self.backend is not None
            step = StepOf(self.steps + 1, version, self.config, self._cost, self.tracer, self.events)
            metrics, groups, unsound = await self._in_torch(step.train, self.backend, groups, self._stand_in)
        trained = time.monotonic()
        await self._set_aside(unsound, groups)
        trajectories = [t for g in groups for t in g]
        self.steps += 1
        self._since = [self._since[0] + 1, self._since[1] + len(indices)]
        if metrics["optimizer/skipped"] and not metrics["optimizer/no_contrast"]:
            self.events.warning("step_skipped", step=self.steps, grad_norm=metrics["grad_norm"])
        for index in indices:
            self.receiver.forget(index)
        self._trained.add(indices)
        self._trained_file.append(msgspec.json.encode(trained_step(self.steps, version, groups, self.lineage.number)))
        due = last or self._since[0] == self.config.schedule.steps_per_publication
        if due:
            self.version += 1
            self._since = [0, 0]
            with self.timeline.span("snapshot", step=self.steps, version=self.version):
                await self._snapshot()
        metrics |= episode_metrics(trajectories) | ages
        metrics |= {f"lag/learner_{name}": value for name, value in self.lag.figures().items()}
        metrics |= {
            "transport/received": self.receiver.received,
            "transport/duplicates": self.receiver.duplicates,
            "transport/rejected": self.receiver.rejected,
            "transport/damaged": self.receiver.damaged,
            "learner/wait_seconds": waited,
            "learner/step_seconds": trained - step_from,
            "weights/snapshot_seconds": time.monotonic() - trained,
            "weights/write_seconds": 0.0,
            "buffer/ready_groups": self.buffer.ready_groups(),
            "batch/groups": len(indices),
            "lineage": self.lineage.number,
        }
        return {
            "metrics": metrics,
            "new_weights": due,
            "version": version + 1,
            "groups": indices,
            "previews": previews(trajectories),
        }

    def _stand_in(self, trajectory: Trajectory) -> Trajectory:
        """For one that cannot be trained: of its episode, and nothing of it is trained or compared."""
        t = trajectory
        task = EpisodeTask(t.group_index, t.episode_index, t.task_seed)
        made = failed_trajectory(task, self.routing, 0, generator_id=t.generator_id, at=t.finished_at)
        return msgspec.structs.replace(made, lineage=t.lineage)

    async def _set_aside(self, unsound: Sequence[Unsound], groups: Sequence[Sequence[Trajectory]]) -> None:
        """A resume must not meet these again. Raises `LearnerError` if there are too many (`supervise.max_failed_fraction`)."""
        if self._spool is not None:
            await self._spool.remove({(t.group_index, t.trajectory_id): reason for t, reason in unsound})
        else:
            for t, reason in unsound:
                await asyncio.to_thread(self._quarantine.keep, t, reason)
        failed = {t.trajectory_id for t, _ in unsound}
        for t in (t for group in groups for t in group):
            by: By | None = "learner" if t.trajectory_id in failed else None
            self._unsound.ended(EpisodeEnd(t.group_index, t.episode_index, t.task_seed, by))
        if unsound and self._unsound.too_many("learner"):
            trajectory, reason = unsound[0]
            raise LearnerError(
                f"trajectory {trajectory.trajectory_id} cannot be trained: {reason} ({self._unsound.describe('learner')})"
            )

    async def _wait_for_groups(self) -> list[int]:
        """The groups that the next step takes; none if interrupted."""
        schedule = self.config.schedule
        at_least = at_most = schedule.groups_per_step
        if schedule.tokens_per_step:
            steps, consumed = self._since
            at_most = most_groups(
                slots=slots_of(schedule.max_staleness, at_least, schedule.steps_per_publication),
                groups_per_step=at_least,
                steps_left=schedule.steps_per_publication - steps,
                consumed_since=consumed,
            )
        while not (indices := self.buffer.batch(at_least, at_most, schedule.tokens_per_step)):
            if self._interrupted:
                return []
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), 1.0)
        return [] if self._interrupted else indices

    async def checkpoint(self, books: Books) -> float:
        """Copy the state as it is between two steps, and begin to write the checkpoint of it. Returns how long the next step
        had to wait for that, in seconds. See `Saver.save`, also for what it raises."""
        assert self.backend is not None
        began, backend, groups = time.monotonic(), self.backend, self._trained.now()
        taken = self.buffer.taken
        progress = Progress(
            self.steps, self.version, taken.head, sorted(taken.beyond), (self._since[0], self._since[1]), self.lineage
        )

        def written() -> None:
            task = asyncio.get_running_loop().create_task(self._commit(groups))
            self._committing.add(task)
            task.add_done_callback(self._committing.discard)

        books = books.with_records(self.run_dir, LEARNER_RECORDS, keeper=self.world.keeper)
        await self._saver.save(lambda: self._in_torch(backend.hold), backend.write_state, books, progress, written)
        return time.monotonic() - began

    async def _commit(self, groups: list[int]) -> None:
        if self._spool is not None:
            await self._spool.commit(groups)
        self._trained.committed(groups)

    async def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is there. Raises `CheckpointError` if the last one failed."""
        await self._saver.finish()

    async def save(self, directory: str) -> int:
        """Export the current weights as a Hugging Face model directory, if any update made them. Returns how many did."""
        assert self.backend is not None
        updates = await self._in_torch(self.backend.updates)
        if updates:
            await self._in_torch(self.backend.save, Path(directory))
        return updates

    def interrupt(self) -> None:
        """A `train_step` that waits for groups returns None."""
        self._interrupted = True
        self._arrived.set()

    async def stop(self) -> None:
        self.interrupt()
        self.lag.stop()
        if hasattr(self, "receiver"):
            await self.receiver.close()
        if self._spool is not None:
            if self._committing:
                await asyncio.wait(self._committing, timeout=CLOSE_SECONDS)
            await self._spool.close()
        if self.backend is not None:
            # Published files that a running step keeps from being removed now go when the next run starts.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._in_torch(self.backend.close), CLOSE_SECONDS)
        await asyncio.to_thread(KEEPER.drain, CLOSE_SECONDS)
        self._torch.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
