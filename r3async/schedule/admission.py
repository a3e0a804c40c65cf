"""Which group may be leased, when, to whom, and which weights its tokens need: the bound on staleness.

A version of the weights is made by `K` steps, each of which consumes at least `P` groups, within a window of `W`
(`schedule.window`). There are `N = (S + 1) * P * K` **slots**. A group takes a slot when it is first leased, and its slot
is free again when weights trained from it are *published*: a group that was overtaken keeps its slot. Whoever is leased a group
may begin it at once, and samples its first token when its engine has the version that the lease names (`GroupLease.version`).
Environments and prompts are then ready when the weights arrive, and each generator goes on when its own engine has them.

Let `T(v)` be the groups that the weights of version `v` were trained from. A lease of group `g` names the oldest version `v`
for which `g < T(v) + N`. There is one, for `g` takes a slot.

No token trained is older than `worst_case_staleness(S, W, P * K)` versions. The versions of an engine only go up, so no token
of `g` is older than `v`. Say that of the `T(v)` groups that are part of `v`, `o` are behind `g`; so `T(v) - o` are before it.
Of the groups before `g`, `g - T(v) + o <= N - 1 + o` are not part of `v`. Of the groups behind `g`, at most `W - 1` are
consumed before it: each must be within the window while `g` or an older group is its head; `o` of them are part of `v`. So at
most `N + W - 2` groups are consumed between `v` and `g`. As every version consumes at least `P * K`, `g` is consumed at version
`v + (N + W - 2) // (P * K)` at the latest, and that is `v + S + ceil((W - 1) / (P * K))`. With `S = 0` nobody can be overtaken
into an older age: a version consumes all slots.

A step may take more than `P` groups (until it has enough tokens), but never so many that a later step of the same version
would have to wait for groups that cannot be leased yet: `max_groups_for_step`. That a version can always be made with what may be
in flight holds for every window: if everything in flight is complete, the window's head is, whatever was taken before. What is
in flight waits for published versions alone, which engines get whatever is played.

A lease stays its owner's until its group is trained: an owner that has finished a group may still die with trajectories
that the learner never got.

An owner that is silent (its process was stopped) is waited for by nobody: its leases return (`requeue_leases`) though it may
wake and play on. The argument needs nothing of it but that its engine has the version of the lease. So a token of `g`,
whoever plays it and however late it arrives, is not older than `v`. If `g` was trained meanwhile, what arrives is a
duplicate. If not, it is as young as what the next owner samples may be: a lease of `g` names the same version again.

Pure: no clock, no sockets. Owners are generators.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypedDict

import msgspec

from r3async.config import ScheduleConfig
from r3async.data.window import ConsumedGroups


class GroupLease(msgspec.Struct, frozen=True):
    """Play the episodes `episode_indices` of group `group_index`, all with `task_seed`, by weights of `version` or newer ones."""

    group_index: int
    task_seed: int
    episode_indices: tuple[int, ...]
    version: int = 0


def count_slots(schedule: ScheduleConfig) -> int:
    """`(S + 1) * P * K`: groups that may be leased and not yet be part of the published weights."""
    return (schedule.max_staleness + 1) * schedule.groups_per_step * schedule.steps_per_publication


def compute_staleness_bound(schedule: ScheduleConfig) -> int:
    """Versions that a trained token can be old at most under these settings; see `worst_case_staleness`."""
    per_version = schedule.groups_per_step * schedule.steps_per_publication
    return worst_case_staleness(schedule.max_staleness, schedule.window, per_version)


def worst_case_staleness(max_staleness: int, window: int, groups_per_version: int) -> int:
    """Versions that a trained token can be old at most: `S + ceil((W - 1) / (P * K))`, and 0 if `S = 0`.

    Tight: for every `S`, `P`, `K` and `W` there is an order of finishes that reaches it (`tests/unit/test_schedule_bound.py`).
    """
    if max_staleness == 0:
        return 0
    overtaken = -(-(window - 1) // groups_per_version)
    return max_staleness + overtaken


def max_groups_for_step(*, slots: int, groups_per_step: int, steps_left: int, consumed_since: int) -> int:
    """Groups that the next step may take at most without waiting for ever.

    `consumed_since`: groups that steps took since the last version was published. `steps_left`: steps until the next one,
    this one included: each of the others needs `groups_per_step`.
    """
    return slots - consumed_since - groups_per_step * (steps_left - 1)


_NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _AdmissionState(TypedDict):
    """What `AdmissionController.state_dict` gives."""

    version: _NonNegative
    next_group: _NonNegative
    uninstalled: list[tuple[_NonNegative, _NonNegative]]
    """Of versions that were not published."""
    waiting: list[tuple[_NonNegative, tuple[_NonNegative, ...]]]
    owners: list[tuple[_NonNegative, list[tuple[str, tuple[_NonNegative, ...]]]]]


class AdmissionController:
    """Slots and leases. `choose_task(group_index)` names the task of a group. `total_groups`: where leasing ends, if known.
    `on_change()` is called when there may be more to lease, or nothing any more.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        *,
        choose_task: Callable[[int], int],
        total_groups: int | None = None,
        on_change: Callable[[], object] = lambda: None,
    ):
        self.samples_per_group = schedule.samples_per_group
        self.slots = count_slots(schedule)
        self.total_groups = total_groups
        self.version = 0
        """That was published last, or is about to be: engines will have it."""
        self._split_mode, self._on_change = schedule.split, on_change
        self._choose_task = choose_task
        self._next_group = 0
        self._consumed = ConsumedGroups(schedule.window)
        self._unpublished: dict[int, int] = {}
        """By version that is not published yet: groups that it was trained from and its predecessors were not."""
        self._trained_by_version = [(0, 0)]
        """Versions, oldest first, and how many groups each was trained from: those that a lease may name."""
        self._waiting_episodes: dict[int, tuple[int, ...]] = {}
        """By group that has its slot: episodes that nobody plays."""
        self._leases_by_group: dict[int, dict[str, tuple[int, ...]]] = {}
        """By group: what each owner was leased of it."""

    @property
    def slots_taken(self) -> int:
        return self._next_group - self._published_count

    @property
    def _published_count(self) -> int:
        """Groups that are part of published weights."""
        return len(self._consumed) - sum(self._unpublished.values())

    @property
    def groups_leased(self) -> int:
        """Groups of which something was ever leased."""
        return self._next_group

    @property
    def oldest_group(self) -> int:
        """The first group that has not been trained."""
        return self._consumed.head

    @property
    def is_full(self) -> bool:
        """Every slot is taken, and nothing is left to lease of the groups that have them."""
        return self.slots_taken >= self.slots and not self._waiting_episodes

    @property
    def is_exhausted(self) -> bool:
        """Nothing is left to lease, now or later, whatever is lost."""
        return self.total_groups is not None and len(self._consumed) >= self.total_groups

    @property
    def _new_group_count(self) -> int:
        """Groups that may be leased and have no slot yet."""
        free = self.slots - self.slots_taken
        return free if self.total_groups is None else min(free, self.total_groups - self._next_group)

    def can_lease(self) -> bool:
        """There is something to play that nobody plays."""
        return bool(self._waiting_episodes) or self._new_group_count > 0

    def lease_group(
        self, owner: str, *, free_episodes: int, max_episodes: int | None = None, idle_owners: int = 1
    ) -> GroupLease | None:
        """Lease the oldest group that waits, or a part of it. None if there is nothing for this owner now.

        `free_episodes`: episodes it could begin now; `max_episodes`: those it plays when it is full (default:
        `free_episodes`). `idle_owners`: owners without work, and this one. A group is leased whole, for its episodes share a
        prompt; or in equal shares, if fewer groups than owners `idle_owners` can be had. An owner without free places for
        that waits until it has, unless it never will (`max_episodes`), the rest of the group is elsewhere, or `split` is
        `room`: then it gets what it has free.
        """
        if free_episodes < 1 or not self.can_lease():
            return None
        group = min(self._waiting_episodes, default=self._next_group)
        episodes = self._waiting_episodes.get(group, tuple(range(self.samples_per_group)))
        wanted = len(episodes)
        if len(self._waiting_episodes) + self._new_group_count < idle_owners:
            left = sum(map(len, self._waiting_episodes.values())) + self._new_group_count * self.samples_per_group
            wanted = min(wanted, -(-left // idle_owners))
        torn = len(episodes) < self.samples_per_group
        if (
            wanted > free_episodes
            and not torn
            and self._split_mode == "idle"
            and wanted <= (max_episodes or free_episodes)
        ):
            return None
        mine, rest = episodes[: min(wanted, free_episodes)], episodes[min(wanted, free_episodes) :]
        self._waiting_episodes.pop(group, None)
        if rest:
            self._waiting_episodes[group] = rest
        self._next_group = max(self._next_group, group + 1)
        owners = self._leases_by_group.setdefault(group, {})
        owners[owner] = (*owners.get(owner, ()), *mine)
        return GroupLease(group, self._choose_task(group), mine, self._oldest_allowed_version(group))

    def _oldest_allowed_version(self, group: int) -> int:
        """The oldest version that may sample tokens of it."""
        return next(version for version, trained in self._trained_by_version if group < trained + self.slots)

    def list_leased_groups(self, owner: str) -> list[int]:
        """Groups of which `owner` was leased episodes, and that are not trained yet."""
        return sorted(g for g, owners in self._leases_by_group.items() if owner in owners)

    def requeue_leases(self, owner: str, missing_episodes: Callable[[int], Sequence[int]]) -> list[int]:
        """The owner is lost, or silent: what it was leased returns, less what the learner has. Returns those groups.

        `missing_episodes(group)`: episodes of the group that the learner lacks; those of other owners stay theirs.
        """
        back = []
        for group in self.list_leased_groups(owner):
            lacking = set(missing_episodes(group)).intersection(self._leases_by_group[group].pop(owner))
            if lacking:
                self._waiting_episodes[group] = tuple(sorted(lacking.union(self._waiting_episodes.get(group, ()))))
                back.append(group)
        self._on_change()
        return back

    def requeue_after_resume(self, newest_group: int, missing_episodes: Callable[[int], Sequence[int]]) -> list[int]:
        """A resumed run begins: nobody who had leases lives on, and the learner kept trajectories of groups up to
        `newest_group` (-1: of none). Groups that were first leased after the checkpoint take their slots again. Returns the
        groups to be played, as a whole or in part; `missing_episodes(group)`: episodes of it that the learner lacks."""
        if self._new_group_count > 0:
            self._next_group = max(self._next_group, min(newest_group + 1, self._next_group + self._new_group_count))
        held = itertools.takewhile(lambda g: g < self._next_group, self._consumed.untrained_groups())
        self._leases_by_group = {}
        self._waiting_episodes = {group: lacking for group in held if (lacking := tuple(missing_episodes(group)))}
        return list(self._waiting_episodes)

    def step_trained(self, version: int, groups: Sequence[int]) -> None:
        """A step consumed `groups`, in this order; its weights are published as, or within, `version`.

        Raises `ValueError` if versions go backwards, or a group was not leased, was consumed before, or was beyond the
        window: the bound on age would not hold.
        """
        if version <= self.version or version < max(self._unpublished, default=0):
            raise ValueError(f"a step made version {version} after version {max((self.version, *self._unpublished))}")
        if max(groups, default=-1) >= self._next_group:
            raise ValueError(f"group {max(groups)} was consumed, but only {self._next_group} groups were leased")
        self._consumed.add_groups(groups)
        for group in groups:
            self._waiting_episodes.pop(group, None)  # lost with its owner, and yet arrived
            self._leases_by_group.pop(group, None)
        self._unpublished[version] = self._unpublished.get(version, 0) + len(groups)
        self._on_change()

    def version_published(self, version: int) -> None:
        """All steps of `version` are made, and engines will have it: the slots of the groups that it was trained from are free.

        Raises `ValueError` if versions go backwards, or no step made `version`.
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
                len(self._trained_by_version) > 1 and self._trained_by_version[0][1] + self.slots <= self.oldest_group
            ):
                del self._trained_by_version[0]
        self._on_change()

    # -- for a checkpoint ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data; `load_state_dict` reads it. Which groups were consumed is the learner's to say."""
        return {
            "version": self.version,
            "next_group": self._next_group,
            "uninstalled": sorted(self._unpublished.items()),
            "waiting": sorted(self._waiting_episodes.items()),
            "owners": [[group, sorted(owners.items())] for group, owners in sorted(self._leases_by_group.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any], head: int, beyond: Sequence[int] = ()) -> None:
        """Resume as the one that made the snapshot, whose settings must be this one's, when the groups before `head` and those
        `beyond` it were consumed. Leases stay with their owners: `requeue_leases` those that did not live on. Raises
        `ValueError` if the snapshot is of an older version than was published here, or if it is none: its groups do not add
        up."""
        saved = msgspec.convert(state, _AdmissionState)
        if saved["version"] < self.version:
            raise ValueError(f"a snapshot of version {saved['version']} cannot follow version {self.version}")
        consumed, unpublished = ConsumedGroups(self._consumed.window, head, beyond), dict(saved["uninstalled"])
        held, next_group = sum(unpublished.values()), saved["next_group"]
        taken = next_group - len(consumed) + held
        if held > len(consumed) or not 0 <= taken <= self.slots:
            raise ValueError(
                f"{taken} slots are taken, of {self.slots}: {next_group} groups were leased and {len(consumed)} "
                f"consumed, of which {held} hold their slots"
            )
        self.version, self._next_group = saved["version"], next_group
        self._consumed, self._unpublished = consumed, unpublished
        self._trained_by_version = [(self.version, self._published_count)]
        self._waiting_episodes = dict(saved["waiting"])
        self._leases_by_group = {group: dict(owners) for group, owners in saved["owners"]}
