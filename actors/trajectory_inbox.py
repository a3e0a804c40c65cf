"""The learner's inbox: trajectories on their way from arrival to a step.

`TrajectoryInbox.receive_trajectories` is the learner's loop over what arrives: trajectories are
checked, stored until a checkpoint has trained them, and gathered into groups. `NextStep` prepares
these for a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from r3async.actors.run_setup import RunSetup
from r3async.actors.step_counts import StepCounts
from r3async.actors.weight_transport import resolve_endpoint
from r3async.config import Config
from r3async.data.model_shape import RoutingShape
from r3async.data.tokens import Trajectory
from r3async.learner import LearnerError, RejectedTrajectory
from r3async.learner.advantages import group_has_variance
from r3async.rollout.episode import EpisodeTask, build_failed_trajectory
from r3async.schedule.groups import GroupBuffer, max_trajectory_bytes
from r3async.schedule.run_ahead import compute_staleness_bound, count_slots, max_groups_for_step
from r3async.schedule.task_failures import (
    EpisodeEnd,
    FailureSource,
    TaskFailures,
    TrajectoryQuarantine,
)
from r3async.schedule.validation import find_invalid, validate_trajectories
from r3async.transport.ledger import TrajectoryLedger
from r3async.transport.receiver import ReceivedTrajectory, TrajectoryReceiver
from r3async.transport.spool import Spool
from r3async.world import WorkerThread, World
from r3async.world.curve_keys import resolve_learner_keys
from r3async.world.stages import in_stage
from r3async.world.threads import run_off_loop

from .process import wait_for_event

T = TypeVar("T")

logger = logging.getLogger(__name__)

ARRIVAL_POLL_SECONDS = 1.0
"""Maximum seconds between two looks at what has arrived."""
CLOSE_SECONDS = 5.0
QUARANTINE_BYTES = 64 * 2**20
"""Maximum size of `quarantine/`. The oldest trajectories are dropped first."""


class TrajectoryInbox:
    """The trajectories that the learner has received. It owns the receiver, the spool and the
    quarantine. All methods belong to the event loop.

    Args:
        events: A structlog logger.
        buffer: Buffer of groups, which knows what a resumed run has trained already.
        routing: Shape of the routes that engines record.
        vocab_size: Size of the vocabulary of the learner's model.
        counts: What the learner counts; its version is that of the learner's weights.
    """

    def __init__(
        self,
        world: World,
        setup: RunSetup,
        config: Config,
        events: Any,
        *,
        buffer: GroupBuffer,
        routing: RoutingShape | None,
        vocab_size: int,
        counts: StepCounts,
    ):
        run_dir = Path(setup.run_dir)
        schedule = config.schedule
        self._world = world
        self._config = config
        self._lineage = setup.lineage
        self._events = events
        self.buffer = buffer
        self.routing = routing
        self._vocab_size = vocab_size
        self._counts = counts
        self.staleness_bound = compute_staleness_bound(schedule)
        self._slot_count = count_slots(schedule)
        self._quarantine = TrajectoryQuarantine(
            run_dir / "quarantine", QUARANTINE_BYTES, events.error, files=world.files
        )
        self.spool: Spool | None = None
        """The spool; None without durability."""
        if config.buffer.durability == "disk":
            self.spool = Spool(
                run_dir / "spool",
                config.buffer,
                report_event=events.warning,
                quarantine=self._quarantine.add_trajectory,
                world=world,
            )
        self.keys, self.keys_for_generators = resolve_learner_keys(config.transport, world.files)
        self.receiver = TrajectoryReceiver(
            setup.run_id,
            config.transport,
            keys=self.keys,
            group_size=schedule.group_size,
            max_trajectory_bytes=max_trajectory_bytes(config, routing),
            store=self.spool,
            # A step may wait for this many groups, counted from the oldest that is not trained.
            window=(self._slot_count if schedule.takes_extra_groups else schedule.prompts_per_step)
            + schedule.window
            - 1,
            ledger=TrajectoryLedger(buffer.consumed),
            report_event=events.error,
            world=world,
        )
        self._expects_steps = True
        """False when the last step is trained."""
        self._rejected_failures = TaskFailures(
            config.supervise.max_failed_fraction,
            schedule.group_size,
            self._slot_count + schedule.window,
        )
        self._commit_tasks: list[asyncio.Task[int]] = []
        self._arrival = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Recover the trajectories that the spool kept, bind the socket, and receive. Returns the
        endpoint at which generators reach it."""
        async for recovered in self.receiver.recover():
            await self._take_in([recovered])
        endpoint = resolve_endpoint(self._config, self._world, await self.receiver.start())
        if self.receiver.recovered:
            self._events.info("spool_recovered", trajectories=self.receiver.recovered)
        receiving = in_stage("intake", self.receive_trajectories())
        self._receiving = asyncio.create_task(receiving, name="receive-trajectories")
        return endpoint

    # -- what arrives ------------------------------------------------------------------------------

    async def receive_trajectories(self) -> None:
        """Take in trajectories as they arrive, until cancelled."""
        async for batch in self.receiver:
            try:
                await self._take_in(batch)
            except Exception:
                logger.exception("the learner continues to receive after an error")

    async def _take_in(self, batch: Sequence[ReceivedTrajectory]) -> None:
        """Answer each trajectory of a batch: reject it, or store it, add it to its group and
        acknowledge it. No trajectory ends the learner, whatever is wrong with it."""
        nbytes = sum(received.payload_bytes for received in batch)
        # Validate together what arrived together; off the event loop if that takes long.
        problems = await run_off_loop(self._world.threads, nbytes, self._find_problems, batch)
        for at, received in enumerate(batch):
            trajectory = received.trajectory
            try:
                # Of an invalid trajectory nothing is stored.
                problem = problems.get(at) or self._find_no_slot(trajectory)
                if isinstance(problem, Exception):
                    raise problem
                if problem:
                    await self.receiver.reject(received, problem)
                    continue
                # It may have been played twice, or its group may be trained.
                if not self.buffer.needs_trajectory(trajectory):
                    self.receiver.acknowledge_duplicate(received)
                    continue
                # On disk before it is acknowledged, if the spool is on.
                await self.receiver.store(received)
                # The group may have ended during the write.
                if not self.buffer.add(received.trajectory, received.nbytes):
                    self.receiver.acknowledge_duplicate(received)
                    continue
            except Exception as error:
                logger.exception("trajectory %r was not taken", trajectory.trajectory_id)
                reason = f"the learner failed to take it: {type(error).__name__}: {error}"
                await self.receiver.reject(received, reason)
                continue
            # Its sender forgets it.
            self.receiver.accept(received)
            if self.buffer.is_complete(trajectory.group_index):
                self.wake_waiters()

    def _find_problems(self, batch: Sequence[ReceivedTrajectory]) -> dict[int, str | Exception]:
        """Return, by index, why trajectories cannot be trained: the reason, or the error that
        `find_invalid` raised for that one alone."""
        trajectories = [received.trajectory for received in batch]
        try:
            return dict(self.find_invalid(trajectories, is_recovered=batch[0].is_recovered))
        except Exception as error:
            if len(batch) == 1:
                return {0: error}
        return {
            at: problem
            for at, received in enumerate(batch)
            for problem in self._find_problems([received]).values()
        }

    def find_invalid(
        self, trajectories: Sequence[Trajectory], *, is_recovered: bool = False
    ) -> dict[int, str]:
        """Return the reasons, by index, why trajectories cannot be trained. Called off the event
        loop if they are long.

        `is_recovered` says that the spool kept them from before this start.
        """
        check = partial(
            validate_trajectories,
            vocab_size=self._vocab_size,
            learner_version=self._counts.version,
            max_tokens=self._config.learner.max_tokens_per_micro_batch,
            routing=self.routing,
            group_size=self._config.schedule.group_size,
            staleness_bound=self.staleness_bound if self._expects_steps else None,
            lineage=self._lineage,
            is_recovered=is_recovered,
            needs_supports=self._config.episode.truncates_sampling,
        )
        return {at: str(error) for at, error in find_invalid(trajectories, check).items()}

    def _find_no_slot(self, trajectory: Trajectory) -> str:
        """Return why the group of a trajectory cannot have a slot; empty if it can."""
        beyond = len(self.buffer.consumed) + self._slot_count
        if trajectory.group_index < beyond:
            return ""
        # After a resume: it was made after steps that the resume took back.
        return f"group {trajectory.group_index} cannot have a slot: only groups before {beyond} can"

    # -- called by a step --------------------------------------------------------------------------

    def finish_training(self) -> None:
        """Take episodes of any age from now on: no step follows here that could train them. The
        last step makes its version early if `schedule.steps_per_publication` steps are not
        complete, so some that are still being played are older than the schedule expected. A resume
        with more steps checks them again."""
        self._expects_steps = False

    def wake_waiters(self) -> None:
        """Make those who wait for groups look again."""
        self._arrival.set()

    async def wait_for_groups(
        self, since: tuple[int, int], interrupted: asyncio.Event
    ) -> list[int]:
        """Wait for the groups that the next step takes, and return their indices; an empty list
        if `interrupted`.

        `since` is the number of steps made and of groups consumed since the last publication.
        """
        schedule = self._config.schedule
        at_least = at_most = schedule.prompts_per_step
        if schedule.takes_extra_groups:
            steps, consumed = since
            at_most = max_groups_for_step(
                slots=self._slot_count,
                prompts_per_step=at_least,
                steps_left=schedule.steps_per_publication - steps,
                consumed_since=consumed,
            )
        replaced = schedule.replaced_groups
        if replaced:
            at_most = min(at_most, at_least + replaced)
        counts = self._has_contrast if replaced else None
        while not (
            indices := self.buffer.choose_groups(
                at_least, at_most, schedule.tokens_per_step, counts
            )
        ):
            if interrupted.is_set():
                return []
            self._arrival.clear()
            await wait_for_event(self._arrival, ARRIVAL_POLL_SECONDS)
        return [] if interrupted.is_set() else indices

    def _has_contrast(self, group: Sequence[Trajectory]) -> bool:
        try:
            return group_has_variance(
                group, self._config.algorithm, self._config.episode.max_new_tokens
            )
        except Exception:
            return True  # the step reports what is wrong with it

    async def quarantine_rejected(
        self, rejected: Sequence[RejectedTrajectory], groups: Sequence[Sequence[Trajectory]]
    ) -> None:
        """Move rejected trajectories to the quarantine, so that a resume does not meet them again.

        Args:
            rejected: Trajectories that could not be trained, with the reasons.
            groups: All groups of the step; their episodes count for the share of failures.

        Raises `LearnerError` if too many were rejected (`supervise.max_failed_fraction`).
        """
        if self.spool is not None:
            await self.spool.remove_trajectories(
                {(t.group_index, t.trajectory_id): reason for t, reason in rejected}
            )
        else:
            for t, reason in rejected:
                await self._world.threads.run(self._quarantine.add_trajectory, t, reason)
        failed = {t.trajectory_id for t, _ in rejected}
        for t in (t for group in groups for t in group):
            by: FailureSource | None = "learner" if t.trajectory_id in failed else None
            self._rejected_failures.record_end(
                EpisodeEnd(t.group_index, t.episode_index, t.task_seed, by)
            )
        if rejected and self._rejected_failures.exceeds_limit("learner"):
            trajectory, reason = rejected[0]
            raise LearnerError(
                f"trajectory {trajectory.trajectory_id} cannot be trained: {reason} "
                f"({self._rejected_failures.describe_failures('learner')})"
            )

    def make_stand_in(self, trajectory: Trajectory) -> Trajectory:
        """Return a stand-in for a trajectory that cannot be trained. It has the same episode, and
        nothing of it is trained or compared. May be called from any thread."""
        t = trajectory
        task = EpisodeTask(t.group_index, t.episode_index, t.task_seed)
        made = build_failed_trajectory(
            task, self.routing, 0, generator_id=t.generator_id, at=t.finished_at
        )
        return msgspec.structs.replace(made, lineage=t.lineage)

    def release_trained(self, indices: Sequence[int]) -> None:
        """Release groups that have been trained: their ids and memory are not needed any more."""
        for index in indices:
            self.receiver.forget_group(index)

    def collect_metrics(self) -> dict[str, float]:
        """Return the metrics of the receiver and the buffer."""
        receiver = self.receiver
        return {
            "transport/received": receiver.received,
            "transport/duplicates": receiver.duplicates,
            "transport/rejected": receiver.rejected,
            "transport/damaged": receiver.damaged,
            "transport/strangers": receiver.refused_peers.total(),
            "buffer/ready_groups": self.buffer.count_ready_groups(),
        }

    def missing_in_next_groups(self) -> dict[int, list[int]]:
        """Return the episodes that the groups of the next step lack, by group."""
        schedule = self._config.schedule
        return self.buffer.missing_episodes(max(schedule.prompts_per_step, schedule.window))

    def missing_episodes(self, group_indices: Sequence[int]) -> dict[int, list[int]]:
        """Return the episodes of these groups that have not arrived, by group."""
        return {g: self.buffer.missing_in_group(g) for g in group_indices}

    # -- checkpoints -------------------------------------------------------------------------------

    def prepare_commit(self) -> Callable[[], None]:
        """Return a function to call once the checkpoint that is made now is on the disk.
        It deletes the spooled trajectories that the checkpoint has trained, which need not
        be kept any more."""
        spool = self.spool
        if spool is None:
            return lambda: None
        groups = [group for group in spool.groups if group in self.buffer.consumed]

        def commit() -> None:
            self._commit_tasks = [task for task in self._commit_tasks if not task.done()]
            self._commit_tasks.append(
                asyncio.get_running_loop().create_task(spool.delete_trained(groups))
            )

        return commit

    async def close(self) -> None:
        """Stop receiving and close the spool."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.wait([self._receiving], timeout=CLOSE_SECONDS)
        await self.receiver.close()
        if self.spool is not None:
            if self._commit_tasks:
                await asyncio.wait(self._commit_tasks, timeout=CLOSE_SECONDS)
            await self.spool.close()


class NextStep(Generic[T]):
    """The groups of the next step, prepared in a thread of their own while the current step trains.

    It is a guess: nothing is taken from the buffer, and the result is used only by a step that
    takes exactly these groups. So the choice of groups, what is consumed, and what a checkpoint or
    a crash keeps are the same as for a step that prepares everything when it begins. The result of
    `prepare(groups)` must depend on the groups alone. All methods belong to the event loop.
    """

    def __init__(
        self,
        inbox: TrajectoryInbox,
        lane: WorkerThread,
        prepare: Callable[[Sequence[Sequence[Trajectory]]], T],
    ):
        self._inbox = inbox
        self._lane = lane
        self._prepare = prepare
        self._groups: list[int] = []
        self._preparing: asyncio.Task[T] | None = None

    async def prefetch(self, since: tuple[int, int], interrupted: asyncio.Event) -> None:
        """Wait until the groups have arrived that a step after `since` would take now, and begin to
        prepare them. Cancelling this call ends the waiting, but not the preparation."""
        self._groups = await self._inbox.wait_for_groups(since, interrupted)
        if self._groups:
            episodes = self._inbox.buffer.episodes_of(self._groups)
            self._preparing = asyncio.create_task(self._lane.run(self._prepare, episodes))
            self._preparing.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # retrieve the error: it may be that nobody awaits the task

    async def get_result(self, indices: list[int], groups: Sequence[Sequence[Trajectory]]) -> T:
        """Return what `prepare` makes of `groups`, whose indices are `indices`.
        Raises what it raises."""
        making = self._preparing
        self._preparing = None
        if making is not None and self._groups == indices:
            return await making
        if making is not None:
            making.cancel()
        return await self._lane.run(self._prepare, groups)
