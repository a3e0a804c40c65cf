"""All planted defects; those of delivery, the spool and checkpoints are here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.learner import TrajectoryInbox
from r3async.checkpoint.directory import CheckpointDirectory, CheckpointWriter
from r3async.data import wire as wire_room
from r3async.tools.simulate import mutants_schedule as mutants_schedule  # fills MUTANTS
from r3async.tools.simulate import mutants_supervision as mutants_supervision
from r3async.tools.simulate import mutants_weights as mutants_weights
from r3async.tools.simulate.planting import MUTANTS as MUTANTS
from r3async.tools.simulate.planting import mutant
from r3async.transport.receiver import MemoryBudget
from r3async.transport.sender import Outbox, TrajectorySender
from r3async.transport.spool import Spool
from r3async.world.simulated.disk import SimulatedFile, SimulatedFiles

# -- delivery and the spool --------------------------------------------------------------------------------------------


@mutant(Spool, "put_trajectory")
def ack_before_store(put: Any) -> Any:
    """A trajectory is acknowledged before it is in the spool."""

    async def later(self: Spool, trajectory: Any, frames: Any, *, spill: bool) -> None:
        async def store() -> None:
            await asyncio.sleep(0.5)
            await put(self, trajectory, frames, spill=spill)

        self.late = [*getattr(self, "late", ()), asyncio.create_task(store())]  # type: ignore[attr-defined]

    return later


@mutant(TrajectoryInbox, "release_trained")
def unlink_before_commit(trained: Any) -> Any:
    """The spool lets go of groups when they are trained, not when a checkpoint has trained them."""

    def early(self: TrajectoryInbox, indices: Any) -> None:
        trained(self, indices)
        if self.spool is not None:
            self.early = asyncio.create_task(self.spool.delete_trained(list(indices)))  # type: ignore[attr-defined]

    return early


@mutant(CheckpointWriter, "_write_checkpoint")
def commit_before_the_checkpoint_is_durable(write: Any) -> Any:
    """The spool lets go of what a checkpoint trains when the checkpoint is begun."""

    async def eager(self: CheckpointWriter, state: Any, parts: Any, then: Callable[[], object]) -> Any:
        then()
        return await write(self, state, parts, lambda: None)

    return eager


@mutant(Spool, "_delete_files")
def spool_kept_after_commit(unlink: Any) -> Any:
    """Files of the spool stay when a checkpoint has trained them."""
    return lambda self, groups: None


@mutant(SimulatedFile, "truncate")
def torn_tail_not_cut(truncate: Any) -> Any:
    """What a write that failed left in a file of the spool stays there, and the next record follows it."""

    def keep(self: SimulatedFile, size: int) -> None:
        if self._path.suffix != ".spool":
            truncate(self, size)

    return keep


@mutant(Spool, "recover_trajectories")
def recovery_forgets(recover: Any) -> Any:
    """Of what the spool kept, a start takes back all but the last."""

    async def some(self: Spool) -> Any:
        return (await recover(self))[:-1]

    return some


@mutant(Spool, "free_bytes")
def disk_bytes_ignored(free_bytes: Any) -> Any:
    """Trajectories are taken whatever the spool holds."""
    return property(lambda self: 10**12)


@mutant(MemoryBudget, "_fits_in_memory")
def memory_ignored(fits: Any) -> Any:
    """Every trajectory that arrives is taken, whatever is held."""
    return lambda self, nbytes: True


@mutant(MemoryBudget, "release_trajectory")
def memory_not_released(release: Any) -> Any:
    """What is trained still counts as held."""
    return lambda self, trajectory_id: None


@mutant(MemoryBudget, "group_limit")
def closed_for_ever(until: Any) -> Any:
    """Once a trajectory did not fit, only the groups of the next step are asked for."""

    def closed(self: MemoryBudget, disk: float = math.inf) -> int:
        short = self._first_refused_bytes
        told = until(self, disk)
        self._first_refused_bytes = short
        return told if short is None else self.oldest_group + self.window

    return closed


@mutant(Outbox, "requeue_trajectory")
def not_taken_is_forgotten(again: Any) -> Any:
    """A sender does not send again what the learner had no memory for."""

    def forget(self: Outbox, trajectory_id: str, now: float, *, damaged: bool) -> bool:
        return (
            again(self, trajectory_id, now, damaged=damaged)
            if damaged
            else bool(self.settle_trajectory(trajectory_id, now))
        )

    return forget


@mutant(Outbox, "requeue_all")
def unacknowledged_forgotten(reset: Any) -> Any:
    """A sender that connects again does not send again what was not acknowledged."""

    def forget(self: Outbox) -> int:
        self.in_flight = {}
        return reset(self)

    return forget


@mutant(TrajectorySender, "_send_ready")
def sent_is_settled(deliver: Any) -> Any:
    """A sender takes what it has sent for acknowledged."""

    def settle(self: TrajectorySender) -> None:
        deliver(self)
        for name in list(self._outbox.in_flight):
            self._settle_trajectory(name)

    return settle


@mutant(wire_room, "compute_checksum")
def payload_unchecked(checksum: Any) -> Any:
    """The payload of a trajectory has no checksum."""
    return lambda buffers: 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


@mutant(SimulatedFiles, "fsync_directory")
def unsynced_rename(sync_directory: Any) -> Any:
    """The directory of a checkpoint that was given its name is not synced."""

    def not_this_one(self: SimulatedFiles, directory: Path) -> None:
        if directory.name != "checkpoints":
            sync_directory(self, directory)

    return not_this_one


@mutant(SimulatedFile, "fsync")
def checkpoint_named_before_it_is_synced(sync: Any) -> Any:
    """The files of a checkpoint are not synced."""

    def not_these(self: SimulatedFile) -> None:
        if not self._path.parent.name.endswith(".partial"):
            sync(self)

    return not_these


@mutant(CheckpointDirectory, "recover_newest")
def resumed_from_an_older_one(newest: Any) -> Any:
    """A run resumes from the oldest checkpoint that is there."""

    def oldest(self: CheckpointDirectory) -> Any:
        while len(steps := self.list_steps()) > 1:
            self._set_aside(self.step_path(steps[-1]), "superseded")
        return newest(self)

    return oldest


@mutant(CheckpointDirectory, "prune_old")
def pruned_too_much(prune: Any) -> Any:
    """No checkpoint is kept but every second one."""

    def more(self: CheckpointDirectory) -> list[int]:
        removed = prune(self)
        if len(steps := self.list_steps()) % 2 == 0 and steps:
            self.files.remove_tree(self.step_path(steps[-1]))
        return removed

    return more


@mutant(CheckpointWriter, "save_checkpoint")
def checkpoint_forgets_who_overtook(save: Any) -> Any:
    """A checkpoint does not say which groups overtook the oldest that is not trained."""

    async def forget(self: CheckpointWriter, state: Any, hold: Any, write: Any, then: Any) -> None:
        await save(self, msgspec.structs.replace(state, consumed_beyond=[]), hold, write, then)

    return forget
