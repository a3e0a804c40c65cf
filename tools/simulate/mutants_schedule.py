"""Planted defects of leases, slots, steps, lineages and weights."""

from __future__ import annotations

import asyncio
import copy
import itertools
from typing import Any

import msgspec

from r3async.actors import learner as reception
from r3async.actors.delivery import VersionWriter
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.actors.leasing import VersionGate
from r3async.actors.ranks import LocalRank
from r3async.data.versions import Lineage
from r3async.schedule.admission import AdmissionController, GroupLease
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.tasks import TaskHistory
from r3async.tools.simulate.planting import mutant, plant

# -- tasks -------------------------------------------------------------------------------------------------------------


@mutant(TaskHistory, "choose_task")
def part_plays_another_task(pose: Any) -> Any:
    """What a group poses is chosen for every lease of a part of it."""
    leases = itertools.count()

    def each(self: TaskHistory, group: int, tasks: Any) -> int:
        return int(next(itertools.islice(tasks, next(leases) % 3, None)))

    return each


@mutant(reception.TrajectoryInbox, "_has_contrast")
def groups_replaced_for_nothing(has_contrast: Any) -> Any:
    """A step replaces groups that have contrast, too."""

    def never(self: reception.TrajectoryInbox, group: Any) -> bool:
        return False

    return never


# -- leases and slots --------------------------------------------------------------------------------------------------


@mutant(AdmissionController, "_oldest_allowed_version")
def slot_freed_early(oldest: Any) -> Any:
    """A lease names the version before the one that freed its slot."""

    def older(self: AdmissionController, group: int) -> int:
        return max(0, int(oldest(self, group)) - 1)

    return older


def _at_once(leased: Any) -> Any:
    def unnoticed(self: VersionGate, lease: GroupLease) -> None:
        pass

    return unnoticed


def _slowly(install: Any) -> Any:
    async def slow(self: GeneratorActor, publication: Any) -> Any:
        await asyncio.sleep(5.0)
        return await install(self, publication)

    return slow


plant(
    "stale_generator_leased",
    "A generator plays what it is leased at once, with the weights that it has, and new ones come slowly.",
    (VersionGate, "require_version", _at_once),
    (GeneratorActor, "install_version", _slowly),
)


@mutant(AdmissionController, "requeue_leases")
def lease_lost_with_its_generator(lose: Any) -> Any:
    """What a generator that ended was leased is leased to nobody again."""

    def forget(self: AdmissionController, owner: str, missing: Any) -> list[int]:
        return lose(self, owner, lambda group: ())

    return forget


@mutant(AdmissionController, "requeue_leases")
def missing_not_subtracted(lose: Any) -> Any:
    """All that a generator was leased returns, also what has arrived."""

    def everything(self: AdmissionController, owner: str, missing: Any) -> list[int]:
        return lose(self, owner, lambda group: range(self.samples_per_group))

    return everything


@mutant(AdmissionController, "requeue_after_resume")
def kept_is_not_adopted(adopt: Any) -> Any:
    """A start without a checkpoint plays everything again, also what its spool kept."""

    def nothing(self: AdmissionController, newest: int, missing: Any) -> list[int]:
        return adopt(self, newest, missing) if self.version or self._next_group else []

    return nothing


@mutant(AdmissionController, "requeue_after_resume")
def resume_leases_what_was_kept(adopt: Any) -> Any:
    """A resumed run leases its groups whole, also what the spool kept of them."""

    def whole(self: AdmissionController, newest: int, missing: Any) -> list[int]:
        return adopt(self, newest, lambda group: range(self.samples_per_group) if missing(group) else ())

    return whole


@mutant(AdmissionController, "lease_group")
def group_passed_over(lease: Any) -> Any:
    """Now and then a group is never leased."""

    def skip(self: AdmissionController, owner: str, **facts: Any) -> GroupLease | None:
        if self._next_group == 5 and not self._waiting_episodes:
            self._next_group = 6
        return lease(self, owner, **facts)

    return skip


@mutant(AdmissionController, "lease_group")
def leased_twice(lease: Any) -> Any:
    """A part of a group that is split is leased to two generators."""

    def twice(self: AdmissionController, owner: str, **facts: Any) -> GroupLease | None:
        found = lease(self, owner, **facts)
        if found is not None and found.group_index in self._waiting_episodes:
            rest = {*self._waiting_episodes[found.group_index], found.episode_indices[0]}
            self._waiting_episodes[found.group_index] = tuple(sorted(rest))
        return found

    return twice


# -- steps -------------------------------------------------------------------------------------------------------------


@mutant(GroupBuffer, "choose_groups")
def younger_groups_first(batch: Any) -> Any:
    """A step takes the youngest complete groups of the window."""

    def youngest(self: GroupBuffer, at_least: int, at_most: int, tokens: int) -> list[int]:
        window = [g for g in self._consumed.groups_in_window() if not self.missing_in_group(g)]
        return sorted(window[-at_least:]) if len(window) >= at_least else batch(self, at_least, at_most, tokens)

    return youngest


@mutant(GroupBuffer, "__init__")
def window_one_wider(init: Any) -> Any:
    """The learner's window is one group wider than the schedule says."""

    def wider(self: GroupBuffer, samples_per_group: int, window: int = 1, **facts: Any) -> None:
        init(self, samples_per_group, window + 1, **facts)

    return wider


@mutant(GroupBuffer, "__init__")
def resume_forgets_what_was_trained(init: Any) -> Any:
    """A resumed learner takes groups for untrained that its checkpoint has trained beyond the oldest."""

    def forget(self: GroupBuffer, samples_per_group: int, window: int = 1, *, head: int = 0, beyond: Any = ()) -> None:
        init(self, samples_per_group, window, head=head)

    return forget


plant(
    "no_dedupe",
    "A resumed learner does not know what was trained, and takes it again.",
    (GroupBuffer, "__init__", lambda init: lambda self, size, window=1, *, head=0, beyond=(): init(self, size, window)),
)


@mutant(LearnerActor, "train_step")
def version_counted_twice(train_step: Any) -> Any:
    """A publication counts for two versions."""

    async def twice(self: LearnerActor, *args: Any, **facts: Any) -> Any:
        result = await train_step(self, *args, **facts)
        if result is not None and result["new_weights"]:
            self.model.counts.version += 1
        return result

    return twice


@mutant(LocalRank, "snapshot_weights")
def old_weights_under_a_new_number(snapshot: Any) -> Any:
    """The third version that a learner publishes has the weights of the one before."""

    def old(self: Any, version: int) -> None:
        before = getattr(self, "copies", [])
        snapshot(self, version)
        self.copies = [*before, copy.deepcopy(self._snapshot[1])]  # the next snapshot takes the same memory
        if len(self.copies) == 3:
            self._snapshot = version, self.copies[1]

    return old


# -- lineages and weights ----------------------------------------------------------------------------------------------


def _unless_kept(validate: Any) -> Any:
    return lambda trajectories, **facts: None if facts.get("kept") else validate(trajectories, **facts)


plant(
    "lineage_ignored",
    "A start takes back whatever its spool kept: also tokens of weights that the resume took back.",
    (Lineage, "rejection_reason", lambda refusal: lambda self, lineage, newest, learner, *, kept=False: ""),
    (reception, "validate_trajectories", _unless_kept),
)


@mutant(Lineage, "start_child")
def lineage_used_again(child: Any) -> Any:
    """A start does not look at the numbers that were taken before."""

    def again(self: Lineage, starts: Any, *args: Any) -> Any:
        return child(self, (), *args)

    return again


@mutant(VersionWriter, "write_version")
def another_lineage_published(write: Any) -> Any:
    """A resumed learner names its weights after the first lineage."""

    async def first(self: VersionWriter, reading: Any = ()) -> Any:
        published = await write(self, reading)
        manifest = msgspec.structs.replace(published.publication.manifest, lineage=1)
        return msgspec.structs.replace(
            published, publication=msgspec.structs.replace(published.publication, manifest=manifest)
        )

    return first


@mutant(LocalRank, "restore_checkpoint")
def checkpoint_not_loaded(restore: Any) -> Any:
    """A resumed learner begins with the start model's weights."""
    return lambda self, path: None
