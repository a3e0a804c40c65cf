"""Defects, planted to prove that the search finds what it is there for: each replaces one method of a production class while a
simulation runs. A search that finds none of its mutants proves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from r3async.actors import reception
from r3async.actors.delivery import Publishing
from r3async.actors.installer import Installer
from r3async.actors.learner import LearnerActor
from r3async.actors.ranks import LocalLearner
from r3async.actors.reception import Reception
from r3async.checkpoint.directory import Checkpoints
from r3async.checkpoint.writer import CheckpointWriter
from r3async.data.versions import Lineage
from r3async.schedule.admission import Admission, GroupLease
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.spool import Spool
from r3async.transport import wire as wire_room
from r3async.transport.accepted import Capacity
from r3async.transport.outbox import Outbox
from r3async.transport.sender import Sender
from r3async.world.simulated.disk import SimulatedFile, SimulatedFiles


class Mutant(NamedTuple):
    """`plant`: what is wrong as long as it is entered."""

    name: str
    what: str
    plant: Callable[[], AbstractContextManager[None]]


MUTANTS: dict[str, Mutant] = {}


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `make(what it was)` meanwhile."""
    before = vars(owner)[name]
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _mutant(owner: Any, method: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """The decorated function makes the replacement of a method from what it was; its docstring says what is wrong."""

    def add(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        what = " ".join((make.__doc__ or "").split())
        MUTANTS[make.__name__] = Mutant(make.__name__, what, lambda: replaced(owner, method, make))
        return make

    return add


def _plant(name: str, what: str, *replacements: tuple[Any, str, Callable[[Any], Any]]) -> None:
    """A mutant of several methods."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, method, make in replacements:
                stack.enter_context(replaced(owner, method, make))
            yield

    MUTANTS[name] = Mutant(name, what, plant)


# -- delivery and the spool --------------------------------------------------------------------------------------------


@_mutant(Spool, "put")
def ack_before_store(put: Any) -> Any:
    """A trajectory is acknowledged before it is in the spool."""

    async def later(self: Spool, trajectory: Any, frames: Any, *, spill: bool) -> None:
        async def store() -> None:
            await asyncio.sleep(0.5)
            await put(self, trajectory, frames, spill=spill)

        self.late = [*getattr(self, "late", ()), asyncio.create_task(store())]  # type: ignore[attr-defined]

    return later


@_mutant(Reception, "trained")
def unlink_before_commit(trained: Any) -> Any:
    """The spool lets go of groups when they are trained, not when a checkpoint has trained them."""

    def early(self: Reception, indices: Any) -> None:
        trained(self, indices)
        if self.spool is not None:
            self.early = asyncio.create_task(self.spool.commit(list(indices)))  # type: ignore[attr-defined]

    return early


@_mutant(CheckpointWriter, "_write")
def commit_before_the_checkpoint_is_durable(write: Any) -> Any:
    """The spool lets go of what a checkpoint trains when the checkpoint is begun."""

    async def eager(self: CheckpointWriter, state: Any, parts: Any, then: Callable[[], object]) -> Any:
        then()
        return await write(self, state, parts, lambda: None)

    return eager


@_mutant(Spool, "_unlink")
def spool_kept_after_commit(unlink: Any) -> Any:
    """Files of the spool stay when a checkpoint has trained them."""
    return lambda self, groups: None


@_mutant(SimulatedFile, "truncate")
def torn_tail_not_cut(truncate: Any) -> Any:
    """What a write that failed left in a file of the spool stays there, and the next record follows it."""

    def keep(self: SimulatedFile, size: int) -> None:
        if self._path.suffix != ".spool":
            truncate(self, size)

    return keep


@_mutant(Spool, "recover")
def recovery_forgets(recover: Any) -> Any:
    """Of what the spool kept, a start takes back all but the last."""

    async def some(self: Spool) -> Any:
        return (await recover(self))[:-1]

    return some


@_mutant(Spool, "free_bytes")
def disk_bytes_ignored(free_bytes: Any) -> Any:
    """Trajectories are taken whatever the spool holds."""
    return property(lambda self: 10**12)


@_mutant(Capacity, "_fits")
def memory_ignored(fits: Any) -> Any:
    """Every trajectory that arrives is taken, whatever is held."""
    return lambda self, nbytes: True


@_mutant(Capacity, "release")
def memory_not_released(release: Any) -> Any:
    """What is trained still counts as held."""
    return lambda self, trajectory_id: None


@_mutant(Capacity, "until")
def closed_for_ever(until: Any) -> Any:
    """Once a trajectory did not fit, only the groups of the next step are asked for."""

    def closed(self: Capacity, disk: float = math.inf) -> int:
        short = self._short
        told = until(self, disk)
        self._short = short
        return told if short is None else self.oldest + self.window

    return closed


@_mutant(Outbox, "again")
def not_taken_is_forgotten(again: Any) -> Any:
    """A sender does not send again what the learner had no memory for."""

    def forget(self: Outbox, trajectory_id: str, now: float, *, damaged: bool) -> bool:
        return again(self, trajectory_id, now, damaged=damaged) if damaged else bool(self.settle(trajectory_id, now))

    return forget


@_mutant(Outbox, "reset")
def unacknowledged_forgotten(reset: Any) -> Any:
    """A sender that connects again does not send again what was not acknowledged."""

    def forget(self: Outbox) -> int:
        self.in_flight = {}
        return reset(self)

    return forget


@_mutant(Sender, "_deliver")
def sent_is_settled(deliver: Any) -> Any:
    """A sender takes what it has sent for acknowledged."""

    def settle(self: Sender) -> None:
        deliver(self)
        for name in list(self._outbox.in_flight):
            self._settle(name)

    return settle


@_mutant(wire_room, "checksum")
def payload_unchecked(checksum: Any) -> Any:
    """The payload of a trajectory has no checksum."""
    return lambda buffers: 0


# -- leases and slots --------------------------------------------------------------------------------------------------


@_mutant(Admission, "trained")
def slot_freed_early(trained: Any) -> Any:
    """The slots of a step's groups are free when it is made, not when its weights are installed."""

    def early(self: Admission, version: int, groups: Any) -> None:
        trained(self, version, groups)
        self._uninstalled[version] = 0

    return early


def _whoever(lease: Any) -> Any:
    def whoever(self: Admission, owner: str, *, version: int, **facts: Any) -> Any:
        return lease(self, owner, version=max(version, self.version), **facts)

    return whoever


def _first_is_enough(give: Any) -> Any:
    def first(self: Installer, version: int, reports: Any) -> Any:
        awaited = give(self, version, reports)
        return [] if any(generator.version >= version for generator in self.fleet) else awaited[:1]

    return first


_plant(
    "stale_generator_leased",
    "A version counts as installed when one engine has it, and the others are leased work all the same.",
    (Admission, "lease", _whoever),
    (Installer, "_give", _first_is_enough),
)


@_mutant(Admission, "lose")
def lease_lost_with_its_generator(lose: Any) -> Any:
    """What a generator that ended was leased is leased to nobody again."""

    def forget(self: Admission, owner: str, missing: Any) -> list[int]:
        return lose(self, owner, lambda group: ())

    return forget


@_mutant(Admission, "lose")
def missing_not_subtracted(lose: Any) -> Any:
    """All that a generator was leased returns, also what has arrived."""

    def everything(self: Admission, owner: str, missing: Any) -> list[int]:
        return lose(self, owner, lambda group: range(self.samples_per_group))

    return everything


@_mutant(Admission, "adopt")
def kept_is_not_adopted(adopt: Any) -> Any:
    """A start without a checkpoint plays everything again, also what its spool kept."""

    def nothing(self: Admission, newest: int, missing: Any) -> list[int]:
        return adopt(self, newest, missing) if self.version or self._next_group else []

    return nothing


@_mutant(Admission, "adopt")
def resume_leases_what_was_kept(adopt: Any) -> Any:
    """A resumed run leases its groups whole, also what the spool kept of them."""

    def whole(self: Admission, newest: int, missing: Any) -> list[int]:
        return adopt(self, newest, lambda group: range(self.samples_per_group) if missing(group) else ())

    return whole


@_mutant(Admission, "lease")
def group_passed_over(lease: Any) -> Any:
    """Now and then a group is never leased."""

    def skip(self: Admission, owner: str, **facts: Any) -> GroupLease | None:
        if self._next_group == 5 and not self._waiting:
            self._next_group = 6
        return lease(self, owner, **facts)

    return skip


@_mutant(Admission, "lease")
def leased_twice(lease: Any) -> Any:
    """A part of a group that is split is leased to two generators."""

    def twice(self: Admission, owner: str, **facts: Any) -> GroupLease | None:
        found = lease(self, owner, **facts)
        if found is not None and found.group_index in self._waiting:
            rest = {*self._waiting[found.group_index], found.episode_indices[0]}
            self._waiting[found.group_index] = tuple(sorted(rest))
        return found

    return twice


# -- steps -------------------------------------------------------------------------------------------------------------


@_mutant(GroupBuffer, "batch")
def younger_groups_first(batch: Any) -> Any:
    """A step takes the youngest complete groups of the window."""

    def youngest(self: GroupBuffer, at_least: int, at_most: int, tokens: int) -> list[int]:
        window = [g for g in self._taken.within() if not self.missing(g)]
        return sorted(window[-at_least:]) if len(window) >= at_least else batch(self, at_least, at_most, tokens)

    return youngest


@_mutant(GroupBuffer, "__init__")
def window_one_wider(init: Any) -> Any:
    """The learner's window is one group wider than the schedule says."""

    def wider(self: GroupBuffer, samples_per_group: int, window: int = 1, **facts: Any) -> None:
        init(self, samples_per_group, window + 1, **facts)

    return wider


@_mutant(GroupBuffer, "__init__")
def resume_forgets_what_was_trained(init: Any) -> Any:
    """A resumed learner takes groups for untrained that its checkpoint has trained beyond the oldest."""

    def forget(self: GroupBuffer, samples_per_group: int, window: int = 1, *, head: int = 0, beyond: Any = ()) -> None:
        init(self, samples_per_group, window, head=head)

    return forget


_plant(
    "no_dedupe",
    "A resumed learner does not know what was trained, and takes it again.",
    (GroupBuffer, "__init__", lambda init: lambda self, size, window=1, *, head=0, beyond=(): init(self, size, window)),
)


@_mutant(LearnerActor, "train_step")
def version_counted_twice(train_step: Any) -> Any:
    """A publication counts for two versions."""

    async def twice(self: LearnerActor, *args: Any, **facts: Any) -> Any:
        result = await train_step(self, *args, **facts)
        if result is not None and result["new_weights"]:
            self.model.counts.version += 1
        return result

    return twice


@_mutant(LocalLearner, "snapshot")
def old_weights_under_a_new_number(snapshot: Any) -> Any:
    """The third version that a learner publishes has the weights of the one before."""

    def old(self: Any, version: int) -> None:
        before = getattr(self, "copies", [])
        snapshot(self, version)
        self.copies = [*before, self._snapshot[1]]
        if len(self.copies) == 3:
            self._snapshot = version, self.copies[1]

    return old


# -- lineages and weights ----------------------------------------------------------------------------------------------


def _unless_kept(validate: Any) -> Any:
    return lambda trajectory, **facts: None if facts.get("kept") else validate(trajectory, **facts)


_plant(
    "lineage_ignored",
    "A start takes back whatever its spool kept: also tokens of weights that the resume took back.",
    (Lineage, "refusal", lambda refusal: lambda self, lineage, newest, learner, *, kept=False: ""),
    (reception, "validate_trajectory", _unless_kept),
)


@_mutant(Lineage, "child")
def lineage_used_again(child: Any) -> Any:
    """A start does not look at the numbers that were taken before."""

    def again(self: Lineage, starts: Any, *args: Any) -> Any:
        return child(self, (), *args)

    return again


@_mutant(Publishing, "write")
def another_lineage_published(write: Any) -> Any:
    """A resumed learner names its weights after the first lineage."""

    async def first(self: Publishing, reading: Any = ()) -> Any:
        published = await write(self, reading)
        manifest = msgspec.structs.replace(published.publication.manifest, lineage=1)
        return msgspec.structs.replace(
            published, publication=msgspec.structs.replace(published.publication, manifest=manifest)
        )

    return first


@_mutant(LocalLearner, "restore")
def checkpoint_not_loaded(restore: Any) -> Any:
    """A resumed learner begins with the start model's weights."""
    return lambda self, path: None


# -- checkpoints -------------------------------------------------------------------------------------------------------


@_mutant(SimulatedFiles, "sync_directory")
def unsynced_rename(sync_directory: Any) -> Any:
    """The directory of a checkpoint that was given its name is not synced."""

    def not_this_one(self: SimulatedFiles, directory: Path) -> None:
        if directory.name != "checkpoints":
            sync_directory(self, directory)

    return not_this_one


@_mutant(SimulatedFile, "sync")
def checkpoint_named_before_it_is_synced(sync: Any) -> Any:
    """The files of a checkpoint are not synced."""

    def not_these(self: SimulatedFile) -> None:
        if not self._path.parent.name.endswith(".partial"):
            sync(self)

    return not_these


@_mutant(Checkpoints, "newest")
def resumed_from_an_older_one(newest: Any) -> Any:
    """A run resumes from the oldest checkpoint that is there."""

    def oldest(self: Checkpoints) -> Any:
        while len(steps := self.steps()) > 1:
            self._set_aside(self.path(steps[-1]), "superseded")
        return newest(self)

    return oldest


@_mutant(Checkpoints, "prune")
def pruned_too_much(prune: Any) -> Any:
    """No checkpoint is kept but every second one."""

    def more(self: Checkpoints) -> list[int]:
        removed = prune(self)
        if len(steps := self.steps()) % 2 == 0 and steps:
            self.files.remove_tree(self.path(steps[-1]))
        return removed

    return more


@_mutant(CheckpointWriter, "save")
def checkpoint_forgets_who_overtook(save: Any) -> Any:
    """A checkpoint does not say which groups overtook the oldest that is not trained."""

    async def forget(self: CheckpointWriter, state: Any, hold: Any, write: Any, then: Any) -> None:
        await save(self, msgspec.structs.replace(state, consumed_beyond=[]), hold, write, then)

    return forget
