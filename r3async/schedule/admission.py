"""Leases of groups to generators under a bound on staleness, and the pace of a run.

A version of the weights is made by `K` steps, each of which consumes at least `P` groups, within a window of `W`
(`schedule.window`). There are `N = (S + 1) * P * K` **slots**. A group takes a slot when it is first leased, and frees
it when weights trained from it are *published*: a group that was overtaken keeps its slot. The owner of a lease may
begin the group at once, but samples its first token only when its engine has the version that the lease names
(`GroupLease.version`). Environments and prompts are thus ready when the weights arrive, and each generator continues as
soon as its own engine has them.

Let `T(v)` be the number of groups that the weights of version `v` were trained from. A lease of group `g` names the
oldest version `v` for which `g < T(v) + N`. There always is one, because `g` takes a slot.

No trained token is older than `worst_case_staleness(S, W, P * K)` versions. Proof: the versions of an engine only go
up, so no token of `g` is older than `v`. Let `o` be the number of groups after `g` among the `T(v)` groups that are
part of `v`; then `T(v) - o` of these are before `g`. Of all groups before `g`, `g - T(v) + o <= N - 1 + o` are not part
of `v`. Of the groups after `g`, at most `W - 1` are consumed before it, because each must be within the window while
`g` or an older group is its head; `o` of them are part of `v`. So at most `N + W - 2` groups are consumed between `v`
and `g`. As every version consumes at least `P * K`, `g` is consumed at version `v + (N + W - 2) // (P * K)` at the
latest, which is `v + S + ceil((W - 1) / (P * K))`. With `S = 0`, a version consumes all slots, so being overtaken
cannot make a group's tokens older.

A step may take more than `P` groups (until it has enough tokens), but never so many that a later step of the same
version would have to wait for groups that cannot be leased yet: `max_groups_for_step`. For every window, the groups
that may be in flight are enough to make the next version: if all of them are complete, so is the window's head,
whatever was taken before. They wait only for published versions, which engines receive whatever is being played.

A lease stays with its owner until its group is trained: an owner that has finished a group may still die with
trajectories that the learner never received.

The run does not wait for an owner that is silent (its process was stopped): its leases return (`requeue_leases`),
although it may wake up and play on. The proof requires only that its engine has the version of the lease. So a token of
`g`, whichever owner samples it and however late it arrives, is not older than `v`. If `g` was trained meanwhile, the
token is in a duplicate. If not, it is as young as a token of the next owner may be, whose lease names the same version.

Pure: no sockets; the clock is an argument. Owners are generators.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypedDict

import msgspec

from r3async.config import ScheduleConfig
from r3async.data.versions import ConsumedGroups
from r3async.world.real import REAL_WORLD


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
    """Return `(S + 1) * P * K`: the number of groups that may be leased and not be part of published weights yet."""
    return (schedule.max_staleness + 1) * schedule.prompts_per_step * schedule.steps_per_publication


def compute_staleness_bound(schedule: ScheduleConfig) -> int:
    """Return the maximum age of a trained token, in versions, under these settings; see `worst_case_staleness`."""
    per_version = schedule.prompts_per_step * schedule.steps_per_publication
    return worst_case_staleness(schedule.max_staleness, schedule.window, per_version)


def worst_case_staleness(max_staleness: int, window: int, groups_per_version: int) -> int:
    """Return the maximum age of a trained token, in versions: `S + ceil((W - 1) / (P * K))`, and 0 if `S = 0`.

    The bound is tight: for every `S`, `P`, `K` and `W` there is an order of finishes that reaches it
    (`tests/unit/test_schedule_bound.py`).
    """
    if max_staleness == 0:
        return 0
    overtaken = -(-(window - 1) // groups_per_version)
    return max_staleness + overtaken


def max_groups_for_step(*, slots: int, prompts_per_step: int, steps_left: int, consumed_since: int) -> int:
    """Return the maximum number of groups that the next step may take without a step waiting for ever.

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
    """Versions that were not published, each with the number of groups that its predecessors were not trained from."""
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
        """Number of groups that a version was trained from and its predecessors were not, for unpublished versions."""
        self._trained_by_version = [(0, 0)]
        """Versions that a lease may name, oldest first, each with the number of groups that it was trained from."""
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
        """True if every slot is taken, and nothing is left to lease of the groups that have them."""
        return self.slots_taken >= self.slots and not self._waiting_episodes

    @property
    def is_exhausted(self) -> bool:
        """True if nothing is left to lease, now or later, whatever is lost."""
        return self.total_groups is not None and len(self._consumed) >= self.total_groups

    @property
    def _new_group_count(self) -> int:
        """The number of groups that may be leased and have no slot yet."""
        free = self.slots - self.slots_taken
        return free if self.total_groups is None else min(free, self.total_groups - self._next_group)

    def can_lease(self) -> bool:
        """Return whether anything can be leased now: episodes that nobody plays, or a new group."""
        return bool(self._waiting_episodes) or self._new_group_count > 0

    def lease_group(
        self, owner: str, *, free_episodes: int, max_episodes: int | None = None, idle_owners: int = 1
    ) -> GroupLease | None:
        """Lease the oldest group that waits, or a part of it. Returns None if there is nothing for this owner now.

        A group is leased whole, because its episodes share a prompt; or in equal shares, if fewer than `idle_owners`
        groups are available. An owner with too few free places for that waits until it has them, unless it never will
        (`max_episodes`), the rest of the group is elsewhere, or `split` is `capacity`: then it gets what it has places for.

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
            left = sum(map(len, self._waiting_episodes.values())) + self._new_group_count * self.group_size
            wanted = min(wanted, -(-left // idle_owners))
        torn = len(episodes) < self.group_size
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
        """Return the oldest version that may sample tokens of a group."""
        return next(version for version, trained in self._trained_by_version if group < trained + self.slots)

    def list_leased_groups(self, owner: str) -> list[int]:
        """Return the groups of which `owner` was leased episodes, and that are not trained yet."""
        return sorted(g for g, owners in self._leases_by_group.items() if owner in owners)

    def requeue_leases(self, owner: str, missing_episodes: Callable[[int], Sequence[int]]) -> list[int]:
        """Take back the leases of an owner that is lost or silent, and return the groups that wait again.

        Episodes that the learner has are not leased again. `missing_episodes(group)` returns the episodes of a group
        that the learner lacks; those of other owners stay with them.
        """
        back = []
        for group in self.list_leased_groups(owner):
            lacking = set(missing_episodes(group)).intersection(self._leases_by_group[group].pop(owner))
            if lacking:
                self._waiting_episodes[group] = tuple(sorted(lacking.union(self._waiting_episodes.get(group, ()))))
                back.append(group)
        return back

    def requeue_after_resume(self, newest_group: int, missing_episodes: Callable[[int], Sequence[int]]) -> list[int]:
        """Restore the waiting groups when a resumed run begins, and return those to be played, whole or in part.

        No owner of a lease has survived. Groups that were first leased after the checkpoint take their slots again.

        Args:
            newest_group: Newest group of which the learner kept trajectories; -1 if it kept none.
            missing_episodes: Function that returns the episodes of a group that the learner lacks.
        """
        if self._new_group_count > 0:
            self._next_group = max(self._next_group, min(newest_group + 1, self._next_group + self._new_group_count))
        held = itertools.takewhile(lambda g: g < self._next_group, self._consumed.untrained_groups())
        self._leases_by_group = {}
        self._waiting_episodes = {group: lacking for group in held if (lacking := tuple(missing_episodes(group)))}
        return list(self._waiting_episodes)

    def step_trained(self, version: int, groups: Sequence[int]) -> None:
        """Record that a step consumed `groups`, in this order; its weights are published as, or within, `version`.

        Raises `ValueError` if versions go backwards, or a group was not leased, was consumed before, or was beyond the
        window: the bound on staleness would not hold.
        """
        if version <= self.version or version < max(self._unpublished, default=0):
            raise ValueError(f"a step made version {version} after version {max((self.version, *self._unpublished))}")
        if max(groups, default=-1) >= self._next_group:
            raise ValueError(f"group {max(groups)} was consumed, but only {self._next_group} groups were leased")
        self._consumed.add_groups(groups)
        for group in groups:
            self._waiting_episodes.pop(group, None)  # taken back from its owner, but arrived after all
            self._leases_by_group.pop(group, None)
        self._unpublished[version] = self._unpublished.get(version, 0) + len(groups)

    def version_published(self, version: int) -> None:
        """Free the slots of the groups that `version` was trained from.

        All steps of the version are made, and engines will have it. Raises `ValueError` if versions go backwards, or no
        step made `version`.
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

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data for `load_state_dict`. The learner records which groups were consumed."""
        return {
            "version": self.version,
            "next_group": self._next_group,
            "uninstalled": sorted(self._unpublished.items()),
            "waiting": sorted(self._waiting_episodes.items()),
            "owners": [[group, sorted(owners.items())] for group, owners in sorted(self._leases_by_group.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any], head: int, beyond: Sequence[int] = ()) -> None:
        """Restore the state of a controller with the same settings.

        Leases stay with their owners: call `requeue_leases` for those that did not survive. Raises `ValueError` if the
        snapshot is of an older version than was published here, or if it is invalid, because its groups do not add up.

        Args:
            state: Snapshot from `state_dict`.
            head: Group before which all groups were consumed.
            beyond: Consumed groups beyond `head`.
        """
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


# The balance of generation and training, and the number of episodes that a generator plays at once.
#
# It is measured over the last steps. The learner is idle while it waits for groups (the buffer ran dry). A generator's
# places are idle while they are empty because no slot is free (the buffer is full); places that slots could never fill
# (`useful_concurrency`) do not count. The throughput of a side that never waited would be its output over the share of
# time in which it worked:
#
# ratio = (episodes finished / (1 - idle share of generation)) / (episodes trained / (1 - idle share of training))
#
# Below 1, generation is the slower side; above 1, training is. Pure: time is observed, or comes from an injected clock.


PACE_STEPS = 16
"""Number of the latest steps that are evaluated together."""
IDLE_THRESHOLD = 0.3
"""Idle share from which a side counts as waiting."""
ONE_SIDED_RATIO = 2.0
"""Factor by which one side must be idle longer than the other to be waiting for it, and not both for a slot."""


def useful_concurrency(schedule: ScheduleConfig, generators: int) -> float:
    """Return how many episodes the slots let each generator play while the groups of one version are being trained.

    This is `max(S, 1) * P * K * G / generators`. Places beyond it cannot be filled for long, and do not count as idle.
    """
    groups = max(schedule.max_staleness, 1) * schedule.prompts_per_step * schedule.steps_per_publication
    return groups * schedule.group_size / generators


class StepPace(msgspec.Struct, frozen=True):
    """Report of one step. Times are in seconds, and for generation summed over all places for episodes."""

    seconds: float
    """Time from the end of the step before to the end of this one."""
    waited_seconds: float
    """Part of this time in which the learner waited for groups."""
    finished_episodes: int
    """Episodes that arrived."""
    trained_episodes: int
    """Episodes that were trained."""
    idle_share: float
    """Idle share of generation: places times time empty because no slot was free, over all places times time."""


class PaceVerdict(msgspec.Struct, frozen=True):
    """An event about the side that is waited for: its name, and figures and advice for the user."""

    event: str
    facts: dict[str, float | str]


class IdleShareMeter:
    """Meter of the idle share of something that every generator has (places for episodes, an engine)."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}
        self._idle = self._total = 0.0

    def add_counters(self, owner: str, idle: float, total: float) -> None:
        """Add the counters of an owner.

        They count seconds since its process began, times the number of places or engines. Counters that are smaller
        than before come from a new process.
        """
        before = self._seen.get(owner, (0.0, 0.0))
        if total < before[1]:
            before = (0.0, 0.0)
        self._idle += idle - before[0]
        self._total += total - before[1]
        self._seen[owner] = (idle, total)

    @property
    def has_reports(self) -> bool:
        """True if any counters were added since the last `take_share`."""
        return self._total > 0

    def take_share(self) -> float:
        """Return the share that was idle since the last call."""
        share = self._idle / self._total if self._total > 0 else 0.0
        self._idle = self._total = 0.0
        return min(1.0, max(0.0, share))


class IdleTimeCounter:
    """Counter of a generator's idle time since the counter's creation.

    It counts places for episodes times seconds (all, and those empty because no slot was free), and seconds (all, and
    those in which the engine had no request).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._total = self._empty = self._seconds = self._engine_idle = 0.0
        self._at = clock()

    def add_interval(self, places: float, empty: float, running_requests: float) -> None:
        """Count the time since the last call, with the places, empty places and running requests there were in it."""
        now = self._clock()
        seconds, self._at = now - self._at, now
        self._total += places * seconds
        self._empty += empty * seconds
        self._seconds += seconds
        self._engine_idle += 0.0 if running_requests else seconds

    def read_counters(self, paused_seconds: float) -> dict[str, float]:
        """Return the counters, with metrics of the engine's wall time.

        `paused_seconds` is the time for which the engine was paused for new weights.
        """
        return {
            "places_all": self._total,
            "places_empty": self._empty,
            "engine_all": self._seconds,
            "engine_idle": self._engine_idle,
            "wall/engine_idle_seconds": self._engine_idle,
            "wall/engine_install_seconds": paused_seconds,
            "wall/engine_steps_seconds": max(0.0, self._seconds - self._engine_idle - paused_seconds),
        }


class PaceAnalyzer:
    """Analyzer of the last steps, which finds the side that is waited for.

    A verdict needs at least `patience` seconds of observed steps, and is given once until it changes.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._steps: deque[StepPace] = deque(maxlen=PACE_STEPS)
        self._last_event = ""

    def observe_step(self, step: StepPace) -> tuple[dict[str, float], PaceVerdict | None]:
        """Add a step, and return the metrics as of this step, and a verdict if there is a new one."""
        self._steps.append(step)
        metrics = self.compute_metrics()
        verdict = self._find_verdict(metrics)
        last, self._last_event = self._last_event, verdict.event if verdict else ""
        return metrics, verdict if verdict and verdict.event != last else None

    def compute_metrics(self) -> dict[str, float]:
        """Return `pace/ratio`, `learner/idle_share` and `generator/idle_share` over the latest steps."""
        seconds = max(sum(s.seconds for s in self._steps), 1e-9)
        learner = min(1.0, sum(s.waited_seconds for s in self._steps) / seconds)
        generator = min(1.0, sum(s.idle_share * s.seconds for s in self._steps) / seconds)
        generation = sum(s.finished_episodes for s in self._steps) / max(1 - generator, 1e-3)
        training = sum(s.trained_episodes for s in self._steps) / max(1 - learner, 1e-3)
        return {
            "pace/ratio": generation / max(training, 1e-9),
            "learner/idle_share": learner,
            "generator/idle_share": generator,
        }

    def _find_verdict(self, metrics: dict[str, float]) -> PaceVerdict | None:
        seconds = sum(s.seconds for s in self._steps)
        if len(self._steps) < PACE_STEPS // 2 or seconds < self._patience:
            return None
        ratio = metrics["pace/ratio"]
        learner, generator = metrics["learner/idle_share"], metrics["generator/idle_share"]
        if learner >= IDLE_THRESHOLD and learner >= ONE_SIDED_RATIO * generator:
            event, hint = (
                "pace_generation_bound",
                (
                    f"the learner waited for {learner:.0%} of the last {seconds:.0f} s: give generation more (generator.count, "
                    f"generator.concurrency, faster engines), about {1 / max(ratio, 1e-3):.1f} times what it has, or the "
                    "learner less"
                ),
            )
        elif generator >= IDLE_THRESHOLD and generator >= ONE_SIDED_RATIO * learner:
            event, hint = (
                "pace_training_bound",
                (
                    f"{generator:.0%} of the generators' places stood empty for the last {seconds:.0f} s because every slot was "
                    f"taken: give the learner more (learner.parallel, learner.threads), about {max(ratio, 1e-3):.1f} times what "
                    "it has, or generation less"
                ),
            )
        elif min(generator, learner) >= IDLE_THRESHOLD:
            event, hint = (
                "pace_slots_bound",
                (
                    f"the learner waited for {learner:.0%} of the last {seconds:.0f} s, and {generator:.0%} of the generators' "
                    "places stood empty because every slot was taken: more resources help neither; a larger "
                    "schedule.window (if single episodes are late) or schedule.max_staleness does"
                ),
            )
        else:
            return None
        numbers = {name: round(value, 3) for name, value in metrics.items()}
        return PaceVerdict(event, {**numbers, "seconds": round(seconds, 1), "hint": hint})


class PaceMonitor:
    """Monitor that gathers the reports of generators and steps, and finds the side that waits for the other.

    `report_warning(event, **facts)` is called if that lasts.
    """

    def __init__(
        self,
        schedule: ScheduleConfig,
        report_warning: Callable[..., object],
        clock: Callable[[], float] = REAL_WORLD.clock.monotonic,
    ):
        self._schedule, self._report_warning, self._clock = schedule, report_warning, clock
        self._places, self._engines, self._pace = (
            IdleShareMeter(),
            IdleShareMeter(),
            PaceAnalyzer(schedule.pace_seconds),
        )
        self._last_step_end: float | None = None
        self._idle_share = self._engine_idle_share = 0.0
        self._last_received = 0
        """Trajectories that the learner had received when the last step ended."""

    def report_generator(self, generator_id: str, stats: Mapping[str, float]) -> None:
        """Add the counters of a generator's places and of its engine."""
        self._places.add_counters(generator_id, stats["places_empty"], stats["places_all"])
        self._engines.add_counters(generator_id, stats["engine_idle"], stats["engine_all"])

    def record_step(self, step: int, groups: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record a step that has just ended, and return its metrics.

        The first step is left out, because it waited for the run to begin.

        Args:
            step: Number of the step.
            groups: Number of groups that it consumed.
            metrics: Metrics that the learner reported of it.
        """
        now, before = self._clock(), self._last_step_end
        received, known = int(metrics["transport/received"]), self._last_received
        self._last_step_end, self._last_received = now, received
        if self._places.has_reports:  # otherwise, between two reports, the last value stays
            self._idle_share = self._places.take_share()
        if self._engines.has_reports:
            self._engine_idle_share = self._engines.take_share()
        engines = {"generator/engine_idle_share": self._engine_idle_share}
        if before is None:
            return engines
        figures, verdict = self._pace.observe_step(
            StepPace(
                seconds=now - before,
                waited_seconds=metrics["learner/wait_seconds"],
                finished_episodes=received - known,
                trained_episodes=groups * self._schedule.group_size,
                idle_share=self._idle_share,
            )
        )
        # Without staleness the two sides take turns, as configured.
        expected = self._schedule.max_staleness == 0 and verdict is not None and verdict.event == "pace_slots_bound"
        if verdict is not None and not expected:
            self._report_warning(verdict.event, step=step, **verdict.facts)
        return figures | engines


HIGH_CACHE_USAGE = 0.95
"""Share of the KV cache above which the limit is lowered, if requests wait in the engine's queue."""
LOW_CACHE_USAGE = 0.85
"""Share of the KV cache below which the limit may rise."""
DECREASE_FACTOR = 0.75
INCREASE_SHARE = 1 / 16
"""Share of the maximum number of episodes by which the limit may rise at each look at the engine."""
MIN_CHANGE_SECONDS = 2.0
"""Minimum seconds between two changes, so that the last one has had its effect on the engine."""


class ConcurrencyLimiter:
    """Controller of the number of episodes that a generator plays at once.

    The limit is between `min_limit` and `max_limit`, and begins at `max_limit`. It follows additive increase,
    multiplicative decrease, as TCP finds the width of a path (Chiu and Jain 1989). An engine whose cache is full
    preempts requests and computes them again: the work is done twice, and answers grow old. An engine that reports no
    `kv_cache_usage` is left at `max_limit`.
    """

    def __init__(self, min_limit: int, max_limit: int, clock: Callable[[], float]):
        self.min_limit, self.max_limit, self.limit = min_limit, max_limit, max_limit
        self._clock = clock
        self._changed_at = clock()
        self._preemptions = 0.0
        self._has_preempted = False
        """True if requests were preempted since the last look that could change the limit."""

    def update_limit(self, stats: Mapping[str, float], playing: int) -> int:
        """Look at the engine while `playing` episodes run, and return the limit from now on.

        `stats` has `kv_cache_usage` (0..1), `preemptions` (a counter) and `waiting` (requests in the engine's queue).
        """
        usage, preemptions = stats.get("kv_cache_usage"), stats.get("preemptions", 0)
        if usage is None:
            return self.limit
        self._has_preempted |= preemptions > self._preemptions
        self._preemptions = preemptions
        now = self._clock()
        if now - self._changed_at < MIN_CHANGE_SECONDS:
            return self.limit
        pressed, self._has_preempted = self._has_preempted, False
        old = self.limit
        if playing > self.limit:
            pass  # the last cut has not taken effect yet
        elif pressed or (usage > HIGH_CACHE_USAGE and stats.get("waiting", 0) > 0):
            self.limit = max(self.min_limit, int(playing * DECREASE_FACTOR))
        elif usage < LOW_CACHE_USAGE and playing >= self.limit:
            self.limit = min(self.max_limit, self.limit + max(1, int(self.max_limit * INCREASE_SHARE)))
        if self.limit != old:
            self._changed_at = now
        return self.limit
