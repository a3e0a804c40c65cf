"""Leases of groups to generators under a bound on staleness.

A version of the weights is made by `K` steps, each of which consumes at least `P` groups, within a
window of `W` (`schedule.window`). There are `N = (S + 1) * P * K` **slots**. A group takes a slot
when it is first leased, and frees it when weights trained from it are *published*: a group that was
overtaken keeps its slot. The owner of a lease may begin the group at once, but samples its first
token only when its engine has the version that the lease names (`GroupLease.version`). Environments
and prompts are thus ready when the weights arrive, and each generator continues as soon as its own
engine has them.

Let `T(v)` be the number of groups that the weights of version `v` were trained from. A lease of
group `g` names the oldest version `v` for which `g < T(v) + N`. There always is one, because
`g` takes a slot.

No trained token is older than `worst_case_staleness(S, W, P * K)` versions. Proof: the versions of
an engine only go up, so no token of `g` is older than `v`. Let `o` be the number of groups after
`g` among the `T(v)` groups that are part of `v`; then `T(v) - o` of these are before `g`. Of all
groups before `g`, `g - T(v) + o <= N - 1 + o` are not part of `v`. Of the groups after `g`, at most
`W - 1` are consumed before it, because each must be within the window while `g` or an older group
is its head; `o` of them are part of `v`. So at most `N + W - 2` groups are consumed between `v` and
`g`. As every version consumes at least `P * K`, `g` is consumed at version
`v + (N + W - 2) // (P * K)` at the latest, which is `v + S + ceil((W - 1) / (P * K))`. With
`S = 0`, a version consumes all slots, so being overtaken cannot make a group's tokens older.

A step may take more than `P` groups (until it has enough tokens), but never so many that a later
step of the same version would have to wait for groups that cannot be leased yet:
`max_groups_for_step`. For every window, the groups that may be in flight are enough to make the
next version: if all of them are complete, so is the window's head, whatever was taken before. They
wait only for published versions, which engines receive whatever is being played.

A lease stays with its owner until its group is trained: an owner that has finished a group may
still die with trajectories that the learner never received.

The run does not wait for an owner that is silent (its process was stopped): its leases return
(`requeue_leases`), although it may wake up and play on. The proof requires only that its engine has
the version of the lease. So a token of `g`, whichever owner samples it and however late it arrives,
is not older than `v`. If `g` was trained meanwhile, the token is in a duplicate. If not, it is as
young as a token of the next owner may be, whose lease names the same version.

Pure: no sockets and no clock. Owners are generators.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypedDict

import msgspec

from r3async.config import ScheduleConfig
from r3async.data.consumed_groups import ConsumedGroups


class GroupLease(msgspec.Struct, frozen=True):
    """An order to play some episodes of a group with weights of `version` or newer.

    Attributes:
        group_index: Number of the group.
        task_seed: Seed of the task that all these episodes play.
        episode_indices: Numbers of the episodes within the group.
        version: Oldest version of the weights that may sample their tokens.
    """

    group_index: int
    task_seed: int
    episode_indices: tuple[int, ...]
    version: int = 0


def count_slots(schedule: ScheduleConfig) -> int:
    """Return `(S + 1) * P * K`: the number of groups that may be leased and not be part of
    published weights yet."""
    return (schedule.max_staleness + 1) * schedule.prompts_per_step * schedule.steps_per_publication


def compute_staleness_bound(schedule: ScheduleConfig) -> int:
    """Return the maximum age of a trained token, in versions, under these settings; see
    `worst_case_staleness`."""
    per_version = schedule.prompts_per_step * schedule.steps_per_publication
    return worst_case_staleness(schedule.max_staleness, schedule.window, per_version)


def count_served_versions(schedule: ScheduleConfig) -> int:
    """Return the number of versions under which an engine's requests may run at once, where each
    keeps the version that it began with."""
    return compute_staleness_bound(schedule) + 1


def worst_case_staleness(max_staleness: int, window: int, groups_per_version: int) -> int:
    """Return the maximum age of a trained token, in versions: `S + ceil((W - 1) / (P * K))`,
    and 0 if `S = 0`.

    The bound is tight: for every `S`, `P`, `K` and `W` there is an order of finishes that reaches
    it (`tests/unit/test_schedule_bound.py`).
    """
    if max_staleness == 0:
        return 0
    overtaken = -(-(window - 1) // groups_per_version)
    return max_staleness + overtaken


def max_groups_for_step(
    *, slots: int, prompts_per_step: int, steps_left: int, consumed_since: int
) -> int:
    """Return the maximum number of groups that the next step may take without a step
    waiting for ever.

    Args:
        slots: Number of slots (`count_slots`).
        prompts_per_step: Number of groups that each step needs.
        steps_left: Steps until the next version is published, including this one.
        consumed_since: Groups that steps took since the last version was published.
    """
    return slots - consumed_since - prompts_per_step * (steps_left - 1)


_NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _AdmissionState(TypedDict):
    """The state that `AdmissionController.state_dict` returns."""

    version: _NonNegative
    next_group: _NonNegative
    uninstalled: list[tuple[_NonNegative, _NonNegative]]
    """Versions that were not published, each with the number of groups that its predecessors were
    not trained from."""
    waiting: list[tuple[_NonNegative, tuple[_NonNegative, ...]]]
    owners: list[tuple[_NonNegative, list[tuple[str, tuple[_NonNegative, ...]]]]]


class AdmissionController:
    """Controller of slots and leases.

    Args:
        choose_task: Function that returns the task seed of a group.
        total_groups: Number of groups after which leasing ends, if known.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        *,
        choose_task: Callable[[int], int],
        total_groups: int | None = None,
    ):
        self.group_size = schedule.group_size
        self.slots = count_slots(schedule)
        self.total_groups = total_groups
        self.version = 0
        """Version that was published last, or is about to be: engines will have it."""
        self._split_mode = schedule.split
        self._choose_task = choose_task
        self._next_group = 0
        self._consumed = ConsumedGroups(schedule.window)
        self._unpublished: dict[int, int] = {}
        """Number of groups that a version was trained from and its predecessors were not, for
        unpublished versions."""
        self._trained_by_version = [(0, 0)]
        """Versions that a lease may name, oldest first, each with the number of groups that it
        was trained from."""
        self._waiting_episodes: dict[int, tuple[int, ...]] = {}
        """Episodes that nobody plays, by group; these groups have a slot."""
        self._leases_by_group: dict[int, dict[str, tuple[int, ...]]] = {}
        """Episodes that each owner was leased, by group."""

    @property
    def slots_taken(self) -> int:
        """The number of slots that are taken."""
        return self._next_group - self._published_count

    @property
    def _published_count(self) -> int:
        """The number of groups that are part of published weights."""
        return len(self._consumed) - sum(self._unpublished.values())

    @property
    def groups_leased(self) -> int:
        """The number of groups of which any episode was ever leased."""
        return self._next_group

    @property
    def oldest_group(self) -> int:
        """The first group that has not been trained."""
        return self._consumed.head

    @property
    def is_full(self) -> bool:
        """True if every slot is taken, and nothing is left to lease of the
        groups that have them."""
        return self.slots_taken >= self.slots and not self._waiting_episodes

    @property
    def is_exhausted(self) -> bool:
        """True if nothing is left to lease, now or later, whatever is lost."""
        return self.total_groups is not None and len(self._consumed) >= self.total_groups

    @property
    def _new_group_count(self) -> int:
        """The number of groups that may be leased and have no slot yet."""
        free = self.slots - self.slots_taken
        return (
            free if self.total_groups is None else min(free, self.total_groups - self._next_group)
        )

    def can_lease(self) -> bool:
        """Return whether anything can be leased now: episodes that nobody plays, or a new group."""
        return bool(self._waiting_episodes) or self._new_group_count > 0

    def lease_group(
        self,
        owner: str,
        *,
        free_episodes: int,
        max_episodes: int | None = None,
        idle_owners: int = 1,
    ) -> GroupLease | None:
        """Lease the oldest group that waits, or a part of it. Returns None if there is nothing
        for this owner now.

        A group is leased whole, because its episodes share a prompt; or in equal shares, if fewer
        than `idle_owners` groups are available. An owner with too few free places for that waits
        until it has them, unless it never will (`max_episodes`), the rest of the group is
        elsewhere, or `split` is `capacity`: then it gets what it has places for.

        Args:
            owner: Generator that asks for work.
            free_episodes: Episodes that it could begin now.
            max_episodes: Episodes that it plays when it is full (default: `free_episodes`).
            idle_owners: Number of owners without work, including this one.
        """
        if free_episodes < 1 or not self.can_lease():
            return None
        group = min(self._waiting_episodes, default=self._next_group)
        episodes = self._waiting_episodes.get(group, tuple(range(self.group_size)))
        wanted = len(episodes)
        if len(self._waiting_episodes) + self._new_group_count < idle_owners:
            left = (
                sum(map(len, self._waiting_episodes.values()))
                + self._new_group_count * self.group_size
            )
            wanted = min(wanted, -(-left // idle_owners))
        torn = len(episodes) < self.group_size
        if (
            wanted > free_episodes
            and not torn
            and self._split_mode == "idle"
            and wanted <= (max_episodes or free_episodes)
        ):
            return None
        mine = episodes[: min(wanted, free_episodes)]
        rest = episodes[min(wanted, free_episodes) :]
        self._waiting_episodes.pop(group, None)
        if rest:
            self._waiting_episodes[group] = rest
        self._next_group = max(self._next_group, group + 1)
        owners = self._leases_by_group.setdefault(group, {})
        owners[owner] = (*owners.get(owner, ()), *mine)
        return GroupLease(
            group, self._choose_task(group), mine, self._oldest_allowed_version(group)
        )

    def _oldest_allowed_version(self, group: int) -> int:
        """Return the oldest version that may sample tokens of a group."""
        return next(
            version for version, trained in self._trained_by_version if group < trained + self.slots
        )

    def list_leased_groups(self, owner: str) -> list[int]:
        """Return the groups of which `owner` was leased episodes, and that are not trained yet."""
        return sorted(g for g, owners in self._leases_by_group.items() if owner in owners)

    def requeue_leases(
        self, owner: str, missing_episodes: Callable[[int], Sequence[int]]
    ) -> list[int]:
        """Take back the leases of an owner that is lost or silent, and return the groups
        that wait again.

        Episodes that the learner has are not leased again. `missing_episodes(group)` returns the
        episodes of a group that the learner lacks; those of other owners stay with them.
        """
        back = []
        for group in self.list_leased_groups(owner):
            lacking = set(missing_episodes(group)).intersection(
                self._leases_by_group[group].pop(owner)
            )
            if lacking:
                self._waiting_episodes[group] = tuple(
                    sorted(lacking.union(self._waiting_episodes.get(group, ())))
                )
                back.append(group)
        return back

    def requeue_after_resume(
        self, newest_group: int, missing_episodes: Callable[[int], Sequence[int]]
    ) -> list[int]:
        """Restore the waiting groups when a resumed run begins, and return those to be played,
        whole or in part.

        No owner of a lease has survived. Groups that were first leased after the checkpoint take
        their slots again.

        Args:
            newest_group: Newest group of which the learner kept trajectories; -1 if it kept none.
            missing_episodes: Function that returns the episodes of a group that the learner lacks.
        """
        if self._new_group_count > 0:
            self._next_group = max(
                self._next_group, min(newest_group + 1, self._next_group + self._new_group_count)
            )
        held = itertools.takewhile(
            lambda g: g < self._next_group, self._consumed.untrained_groups()
        )
        self._leases_by_group = {}
        self._waiting_episodes = {
            group: lacking for group in held if (lacking := tuple(missing_episodes(group)))
        }
        return list(self._waiting_episodes)

    def step_trained(self, version: int, groups: Sequence[int]) -> None:
        """Record that a step consumed `groups`, in this order; its weights are published as, or
        within, `version`.

        Raises `ValueError` if versions go backwards, or a group was not leased, was consumed
        before, or was beyond the window: the bound on staleness would not hold.
        """
        if version <= self.version or version < max(self._unpublished, default=0):
            raise ValueError(
                f"a step made version {version} after version "
                f"{max((self.version, *self._unpublished))}"
            )
        if max(groups, default=-1) >= self._next_group:
            raise ValueError(
                f"group {max(groups)} was consumed, but only {self._next_group} groups were leased"
            )
        self._consumed.add_groups(groups)
        for group in groups:
            # Taken back from its owner, but arrived after all.
            self._waiting_episodes.pop(group, None)
            self._leases_by_group.pop(group, None)
        self._unpublished[version] = self._unpublished.get(version, 0) + len(groups)

    def version_published(self, version: int) -> None:
        """Free the slots of the groups that `version` was trained from.

        All steps of the version are made, and engines will have it. Raises `ValueError` if versions
        go backwards, or no step made `version`.
        """
        if version < self.version:
            raise ValueError(f"version {version} was published after version {self.version}")
        if version > max(self._unpublished, default=self.version):
            raise ValueError(f"version {version} was published, but no step has made it")
        if version > self.version:
            self.version = version
            for older in [v for v in self._unpublished if v <= version]:
                del self._unpublished[older]
            self._trained_by_version.append((version, self._published_count))
            while (
                len(self._trained_by_version) > 1
                and self._trained_by_version[0][1] + self.slots <= self.oldest_group
            ):
                del self._trained_by_version[0]

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data for `load_state_dict`. The learner records which
        groups were consumed."""
        return {
            "version": self.version,
            "next_group": self._next_group,
            "uninstalled": sorted(self._unpublished.items()),
            "waiting": sorted(self._waiting_episodes.items()),
            "owners": [
                [group, sorted(owners.items())]
                for group, owners in sorted(self._leases_by_group.items())
            ],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], head: int, beyond: Sequence[int] = ()
    ) -> None:
        """Restore the state of a controller with the same settings.

        Leases stay with their owners: call `requeue_leases` for those that did not survive. Raises
        `ValueError` if the snapshot is of an older version than was published here, or if it is
        invalid, because its groups do not add up.

        Args:
            state: Snapshot from `state_dict`.
            head: Group before which all groups were consumed.
            beyond: Consumed groups beyond `head`.
        """
        saved = msgspec.convert(state, _AdmissionState)
        if saved["version"] < self.version:
            raise ValueError(
                f"a snapshot of version {saved['version']} cannot follow version {self.version}"
            )
        consumed = ConsumedGroups(self._consumed.window, head, beyond)
        unpublished = dict(saved["uninstalled"])
        held = sum(unpublished.values())
        next_group = saved["next_group"]
        taken = next_group - len(consumed) + held
        if held > len(consumed) or not 0 <= taken <= self.slots:
            raise ValueError(
                f"{taken} slots are taken, of {self.slots}: {next_group} groups were leased and "
                f"{len(consumed)} consumed, of which {held} hold their slots"
            )
        self.version = saved["version"]
        self._next_group = next_group
        self._consumed = consumed
        self._unpublished = unpublished
        self._trained_by_version = [(self.version, self._published_count)]
        self._waiting_episodes = dict(saved["waiting"])
        self._leases_by_group = {group: dict(owners) for group, owners in saved["owners"]}
