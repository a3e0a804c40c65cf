"""What the learner receives: checked on arrival, kept until a checkpoint has trained it, gathered into groups for a step, and
made ready for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from r3async.actors.delivery import announced
from r3async.actors.process import wait_until
from r3async.config import Config
from r3async.data.model_shape import RoutingShape
from r3async.data.records import Trajectory, is_name_in
from r3async.data.versions import Lineage
from r3async.learner import LearnerError, Unsound
from r3async.learner.losses.advantages import group_has_contrast
from r3async.rollout.episode import EpisodeTask, failed_trajectory
from r3async.schedule.admission import age_bound, most_groups, slots_of
from r3async.schedule.groups import GroupBuffer, largest_trajectory
from r3async.schedule.spool import Spool
from r3async.schedule.tasks import By, EpisodeEnd, Quarantine, TaskFailures
from r3async.schedule.validation import refused, validate_trajectories
from r3async.transport.intake import Ledger
from r3async.transport.receiver import Receiver, Refuse
from r3async.world import Lane, World
from r3async.world.keys import learner_keys

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""Between two looks, at most, at what has arrived."""
CLOSE_SECONDS = 5.0


class Reception:
    """Owns receiver, spool and quarantine. All methods belong to the event loop. `events`: a structlog logger.

    `buffer`: with what a resumed run has trained already. `routing`: of the routes that engines record. `vocab_size`: of the
    learner's model. `version()`: of its weights.
    """

    def __init__(
        self,
        world: World,
        run_id: str,
        config: Config,
        run_dir: Path,
        lineage: Lineage,
        events: Any,
        *,
        buffer: GroupBuffer,
        routing: RoutingShape | None,
        vocab_size: int,
        version: Callable[[], int],
    ):
        schedule = config.schedule
        self._world, self._config, self._lineage, self._events = world, config, lineage, events
        self.buffer, self.routing, self._vocab_size, self._version = buffer, routing, vocab_size, version
        self.age_bound = age_bound(schedule)
        self._slots = slots_of(schedule)
        self._quarantine = Quarantine(
            run_dir / "quarantine", config.buffer.quarantine_bytes, events.error, files=world.files
        )
        self.spool: Spool | None = None
        """None without durability."""
        if config.buffer.durability == "disk":
            self.spool = Spool(
                run_dir / "spool", config.buffer, report=events.warning, aside=self._quarantine.keep, world=world
            )
        self.keys, self.keys_for_generators = learner_keys(config.transport, world.files)
        self.receiver = Receiver(
            run_id,
            config.transport,
            self._arrive,
            keys=self.keys,
            claims=lambda group, name: is_name_in(group, name, schedule.samples_per_group),
            largest=largest_trajectory(config, routing),
            validate=self._validate,
            admit=self._admits,
            store=self.spool,
            # A step may wait for that many groups, counted from the oldest that is not trained.
            window=(self._slots if schedule.takes_more else schedule.groups_per_step) + schedule.window - 1,
            ledger=Ledger(buffer.taken),
            on_reject=self._rejected,
            world=world,
        )
        self._recovering = False
        """What is validated now was kept by the spool since before this start."""
        self._unsound = TaskFailures(
            config.supervise.max_failed_fraction, schedule.samples_per_group, self._slots + schedule.window
        )
        self._committing: list[asyncio.Task[int]] = []
        self._arrived = asyncio.Event()

    async def start(self) -> str:
        """Take back what the spool kept, and bind the socket. Returns where generators reach it."""
        self._recovering = True
        endpoint = announced(self._config, self._world, await self.receiver.start())
        self._recovering = False
        if self.receiver.recovered:
            self._events.info("spool_recovered", trajectories=self.receiver.recovered)
        return endpoint

    # -- called by the receiver ------------------------------------------------------------------------------------

    def _validate(self, trajectories: Sequence[Trajectory]) -> dict[int, str]:
        """Off the event loop, if they are long."""
        check = partial(
            validate_trajectories,
            vocab_size=self._vocab_size,
            learner_version=self._version(),
            max_tokens=self._config.learner.max_tokens_per_micro_batch,
            routing=self.routing,
            samples_per_group=self._config.schedule.samples_per_group,
            age_bound=self.age_bound,
            lineage=self._lineage,
            kept=self._recovering,
            masked=self._config.episode.keeps_mask,
        )
        return {at: str(error) for at, error in refused(trajectories, check).items()}

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
        elif self.buffer.complete(trajectory.group_index):
            self.wake()

    def _rejected(self, trajectory_id: str, reason: str) -> None:
        self._events.error("trajectory_refused", trajectory_id=trajectory_id, reason=reason)

    # -- called by a step ------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Who waits for groups looks again."""
        self._arrived.set()

    async def wait_for_groups(self, since: tuple[int, int], interrupted: asyncio.Event) -> list[int]:
        """The groups that the next step takes; none if `interrupted`. `since`: steps made and groups consumed since the last
        publication."""
        schedule = self._config.schedule
        at_least = at_most = schedule.groups_per_step
        if schedule.takes_more:
            steps, consumed = since
            at_most = most_groups(
                slots=self._slots,
                groups_per_step=at_least,
                steps_left=schedule.steps_per_publication - steps,
                consumed_since=consumed,
            )
        if replaced := schedule.replaced_groups:
            at_most = min(at_most, at_least + replaced)
        counts = self._has_contrast if replaced else None
        while not (indices := self.buffer.batch(at_least, at_most, schedule.tokens_per_step, counts)):
            if interrupted.is_set():
                return []
            self._arrived.clear()
            await wait_until(self._arrived, LOOK_SECONDS)
        return [] if interrupted.is_set() else indices

    def _has_contrast(self, group: Sequence[Trajectory]) -> bool:
        try:
            return group_has_contrast(group, self._config.algorithm, self._config.episode.max_new_tokens)
        except Exception:
            return True  # the step says what is wrong with it

    async def set_aside(self, unsound: Sequence[Unsound], groups: Sequence[Sequence[Trajectory]]) -> None:
        """A resume must not meet these again. Raises `LearnerError` if there are too many (`supervise.max_failed_fraction`)."""
        if self.spool is not None:
            await self.spool.remove({(t.group_index, t.trajectory_id): reason for t, reason in unsound})
        else:
            for t, reason in unsound:
                await self._world.threads.run(self._quarantine.keep, t, reason)
        failed = {t.trajectory_id for t, _ in unsound}
        for t in (t for group in groups for t in group):
            by: By | None = "learner" if t.trajectory_id in failed else None
            self._unsound.ended(EpisodeEnd(t.group_index, t.episode_index, t.task_seed, by))
        if unsound and self._unsound.too_many("learner"):
            trajectory, reason = unsound[0]
            raise LearnerError(
                f"trajectory {trajectory.trajectory_id} cannot be trained: {reason} ({self._unsound.describe('learner')})"
            )

    def stand_in(self, trajectory: Trajectory) -> Trajectory:
        """For one that cannot be trained: of its episode, and nothing of it is trained or compared. From any thread."""
        t = trajectory
        task = EpisodeTask(t.group_index, t.episode_index, t.task_seed)
        made = failed_trajectory(task, self.routing, 0, generator_id=t.generator_id, at=t.finished_at)
        return msgspec.structs.replace(made, lineage=t.lineage)

    def trained(self, indices: Sequence[int]) -> None:
        """These groups are over."""
        for index in indices:
            self.receiver.forget(index)

    def figures(self) -> dict[str, float]:
        """Metrics."""
        receiver = self.receiver
        return {
            "transport/received": receiver.received,
            "transport/duplicates": receiver.duplicates,
            "transport/rejected": receiver.rejected,
            "transport/damaged": receiver.damaged,
            "transport/strangers": receiver.refused.total(),
            "buffer/ready_groups": self.buffer.ready_groups(),
        }

    def status(self) -> dict[str, Any]:
        """See `LearnerActor.status`."""
        schedule = self._config.schedule
        return {
            "received": self.receiver.received,
            "ready_groups": self.buffer.ready_groups(),
            "lacking": self.buffer.lacking(max(schedule.groups_per_step, schedule.window)),
            "storing": self.spool.waits if self.spool is not None else None,
        }

    def missing(self, group_indices: Sequence[int]) -> dict[int, list[int]]:
        """Episodes of these groups that have not arrived."""
        return {g: self.buffer.missing(g) for g in group_indices}

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def commit(self) -> Callable[[], None]:
        """To be called when a checkpoint that is made now is on the disk: what it has trained need not be kept any more."""
        spool = self.spool
        if spool is None:
            return lambda: None
        groups = [group for group in spool.groups if group in self.buffer.taken]

        def commit() -> None:
            self._committing = [task for task in self._committing if not task.done()]
            self._committing.append(asyncio.get_running_loop().create_task(spool.commit(groups)))

        return commit

    async def close(self) -> None:
        """Receive nothing any more, and let go of the spool."""
        await self.receiver.close()
        if self.spool is not None:
            if self._committing:
                await asyncio.wait(self._committing, timeout=CLOSE_SECONDS)
            await self.spool.close()


class Ahead(Generic[T]):
    """The groups of the next step, made ready in a thread of their own while this step trains.

    It is a guess: nothing is taken from the buffer, and what was made is used by a step that takes these very groups only. So the
    choice of groups, what is consumed, and what a checkpoint or a crash keeps, are those of a step that makes all of it when it
    begins. `make(groups)` must follow from the groups alone. All methods belong to the event loop.
    """

    def __init__(self, reception: Reception, lane: Lane, make: Callable[[Sequence[Sequence[Trajectory]]], T]):
        self._reception, self._lane, self._make = reception, lane, make
        self._groups: list[int] = []
        self._making: asyncio.Task[T] | None = None

    async def look(self, since: tuple[int, int], interrupted: asyncio.Event) -> None:
        """Wait until the groups are there that a step after `since` would take now, and begin to make them ready. Whoever
        cancels it ends the waiting, not the making."""
        self._groups = await self._reception.wait_for_groups(since, interrupted)
        if self._groups:
            episodes = self._reception.buffer.episodes(self._groups)
            self._making = asyncio.create_task(self._lane.run(self._make, episodes))
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may ask for it

    async def made(self, indices: list[int], groups: Sequence[Sequence[Trajectory]]) -> T:
        """What `make` makes of these groups, which `indices` names. Raises what it raises."""
        making, self._making = self._making, None
        if making is not None and self._groups == indices:
            return await making
        if making is not None:
            making.cancel()
        return await self._lane.run(self._make, groups)
