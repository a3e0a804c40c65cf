"""Planted defects (mutants), which prove that the search finds what it is made for. Each
replaces methods of production classes while a simulation runs. A search that finds none of its
mutants proves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dev.simulation.disk import SimulatedFile, SimulatedFiles
from r3async.actors import trajectory_inbox
from r3async.actors.evaluator import Evaluator
from r3async.actors.fleet import Fleet, FleetGenerator
from r3async.actors.generator import GeneratorActor
from r3async.actors.learner import LearnerActor
from r3async.actors.lease_client import VersionGate
from r3async.actors.lease_dispatcher import LeaseDispatcher
from r3async.actors.rank_actor import LocalRank
from r3async.actors.trajectory_inbox import TrajectoryInbox
from r3async.actors.version_delivery import VersionDelivery
from r3async.actors.version_publisher import VersionPublisher
from r3async.checkpoint.directory import CheckpointDirectory
from r3async.checkpoint.writer import CheckpointWriter
from r3async.data import wire as wire_room
from r3async.data.versions import Lineage
from r3async.rollout.engine import EngineError, EngineLostError
from r3async.rollout.lease_player import RetryingPlayer
from r3async.rollout.scripted import ScriptedEngine
from r3async.schedule.difficulty import TaskHistory
from r3async.schedule.groups import GroupBuffer
from r3async.schedule.health import GeneratorHealth
from r3async.schedule.run_ahead import AdmissionController, GroupLease
from r3async.schedule.task_failures import TrajectoryQuarantine
from r3async.transport.memory_budget import MemoryBudget
from r3async.transport.outbox import Outbox
from r3async.transport.sender import TrajectorySender
from r3async.transport.spool import Spool
from r3async.untrusted import MalformedError
from r3async.weights import delta, relay, tcp
from r3async.weights.host_cache import HostVersionCache
from r3async.weights.tcp import IncomingStream, TcpReceiver
from r3async.weights.version_folder import VersionFolder
from r3async.world import disk_retries
from r3async.world.files import write_atomically


class PlantedMutant(NamedTuple):
    """A planted defect: its name, a sentence that says what is wrong, and the context
    manager that plants it."""

    name: str
    what: str
    plant: Callable[[], AbstractContextManager[None]]


MUTANTS: dict[str, PlantedMutant] = {}
"""All mutants by name; `register_mutant` and `register_combined` fill it."""


@contextlib.contextmanager
def replace_attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the attribute `name` of `owner` by the result of `make` for the original, and
    restore it at the end.

    Raises `TypeError` for a function that cannot be called as the original: a run that ends because
    of that shows no defect.
    """
    before = vars(owner)[name]
    after = make(before)
    if inspect.isfunction(before) and inspect.isfunction(after):
        for positional, keywords in (_build_call(before, optional) for optional in (False, True)):
            inspect.signature(after).bind(*positional, **keywords)
    setattr(owner, name, after)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _build_call(function: Any, optional: bool) -> tuple[list[None], dict[str, None]]:
    """Return arguments with which `function` can be called, with or without its optional ones."""
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        # Ray adds a parameter to the methods of a class of which this process has made an actor.
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "_ray_trace_ctx"
        if optional or p.default is p.empty
    ]
    keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    return [None] * (len(parameters) - len(keywords)), keywords


def register_mutant(
    owner: Any, method: str
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Return a decorator that registers a mutant. The decorated function returns the replacement
    for the original method; its docstring says what is wrong."""

    def add_mutant(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        what = " ".join((make.__doc__ or "").split())
        MUTANTS[make.__name__] = PlantedMutant(
            make.__name__, what, lambda: replace_attribute(owner, method, make)
        )
        return make

    return add_mutant


def register_combined(
    name: str, what: str, *replacements: tuple[Any, str, Callable[[Any], Any]]
) -> None:
    """Register a mutant that replaces several methods. `what` says what is wrong."""

    @contextlib.contextmanager
    def plant_all() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, method, make in replacements:
                stack.enter_context(replace_attribute(owner, method, make))
            yield

    MUTANTS[name] = PlantedMutant(name, what, plant_all)


# Defects of tasks, leases, slots, steps, lineages and weights.


# -- tasks -----------------------------------------------------------------------------------------


@register_mutant(TaskHistory, "choose_task")
def part_plays_another_task(pose: Any) -> Any:
    """The task of a group is chosen again for every lease of a part of it."""
    leases = itertools.count()

    def choose_each_time(self: TaskHistory, group: int, tasks: Any) -> int:
        return int(next(itertools.islice(tasks, next(leases) % 3, None)))

    return choose_each_time


@register_mutant(trajectory_inbox.TrajectoryInbox, "_has_contrast")
def groups_replaced_for_nothing(has_contrast: Any) -> Any:
    """A step also replaces groups whose rewards differ."""

    def find_no_contrast(self: trajectory_inbox.TrajectoryInbox, group: Any) -> bool:
        return False

    return find_no_contrast


# -- leases and slots ------------------------------------------------------------------------------


@register_mutant(AdmissionController, "_oldest_allowed_version")
def slot_freed_early(oldest: Any) -> Any:
    """A lease names the version before the one that freed its slot."""

    def name_older_version(self: AdmissionController, group: int) -> int:
        return max(0, int(oldest(self, group)) - 1)

    return name_older_version


def _play_at_once(leased: Any) -> Any:
    def require_nothing(self: VersionGate, lease: GroupLease) -> None:
        pass

    return require_nothing


def _install_slowly(install: Any) -> Any:
    async def install_later(self: GeneratorActor, publication: Any) -> Any:
        await asyncio.sleep(5.0)
        return await install(self, publication)

    return install_later


register_combined(
    "stale_generator_leased",
    (
        "A generator plays what it is leased at once, with the weights that it has, and new "
        "ones come slowly."
    ),
    (VersionGate, "require_version", _play_at_once),
    (GeneratorActor, "install_version", _install_slowly),
)


@register_mutant(FleetGenerator, "is_current_process")
def earlier_process_believed(is_current: Any) -> Any:
    """An earlier process of a generator is believed, and leased something, when its
    call comes late."""
    return lambda self, pid, host: is_current(self, *self.process)


@register_mutant(LeaseDispatcher, "forget_generator")
def dead_call_answered(forget: Any) -> Any:
    """A waiting call of a process that has ended is answered when there is something to lease."""

    def forget_all_but_call(self: LeaseDispatcher, generator_id: str) -> None:
        waiting = self._waiting_calls.pop(generator_id, None)
        forget(self, generator_id)
        if waiting is not None and not self._fleet[generator_id].is_leaving:
            self._waiting_calls[generator_id] = waiting

    return forget_all_but_call


def _count_last_step(step_trained: Any) -> Any:
    def remember_count(self: AdmissionController, version: int, groups: Sequence[int]) -> None:
        step_trained(self, version, groups)
        self.last_count = len(groups)  # type: ignore[attr-defined]

    return remember_count


def _free_last_step(publish: Any) -> Any:
    def publish_last_step(self: AdmissionController, version: int) -> None:
        kept = sum(self._unpublished.values()) - getattr(self, "last_count", 0)
        self.kept_slots = getattr(self, "kept_slots", 0) + max(0, kept)  # type: ignore[attr-defined]
        publish(self, version)

    return publish_last_step


def _count_fewer(published_count: property) -> property:
    return property(lambda self: published_count.__get__(self) - getattr(self, "kept_slots", 0))


register_combined(
    "slots_of_the_newest_step_freed_only",
    "A version frees the slots of the newest step that made it, and not those of the steps before.",
    (AdmissionController, "step_trained", _count_last_step),
    (AdmissionController, "version_published", _free_last_step),
    (AdmissionController, "_published_count", _count_fewer),
)


@register_mutant(AdmissionController, "requeue_leases")
def lease_lost_with_its_generator(requeue: Any) -> Any:
    """The leases of a generator that ended are never leased again."""

    def requeue_nothing(self: AdmissionController, owner: str, missing: Any) -> list[int]:
        return requeue(self, owner, lambda group: ())

    return requeue_nothing


@register_mutant(AdmissionController, "requeue_leases")
def missing_not_subtracted(requeue: Any) -> Any:
    """All leases of a lost generator are taken back, even of episodes that have arrived."""

    def requeue_everything(self: AdmissionController, owner: str, missing: Any) -> list[int]:
        return requeue(self, owner, lambda group: range(self.group_size))

    return requeue_everything


@register_mutant(AdmissionController, "requeue_after_resume")
def kept_is_not_adopted(adopt: Any) -> Any:
    """A start without a checkpoint plays everything again, even what its spool kept."""

    def adopt_nothing(self: AdmissionController, newest: int, missing: Any) -> list[int]:
        return adopt(self, newest, missing) if self.version or self._next_group else []

    return adopt_nothing


@register_mutant(AdmissionController, "requeue_after_resume")
def resume_leases_what_was_kept(adopt: Any) -> Any:
    """A resumed run leases whole groups, even if the spool kept a part of them."""

    def adopt_whole_groups(self: AdmissionController, newest: int, missing: Any) -> list[int]:
        return adopt(self, newest, lambda group: range(self.group_size) if missing(group) else ())

    return adopt_whole_groups


@register_mutant(AdmissionController, "lease_group")
def group_passed_over(lease: Any) -> Any:
    """One group is skipped and never leased."""

    def skip_group(self: AdmissionController, owner: str, **facts: Any) -> GroupLease | None:
        if self._next_group == 5 and not self._waiting_episodes:
            self._next_group = 6
        return lease(self, owner, **facts)

    return skip_group


@register_mutant(AdmissionController, "lease_group")
def leased_twice(lease: Any) -> Any:
    """A part of a split group is leased to two generators."""

    def lease_twice(self: AdmissionController, owner: str, **facts: Any) -> GroupLease | None:
        leased = lease(self, owner, **facts)
        if leased is not None and leased.group_index in self._waiting_episodes:
            rest = {*self._waiting_episodes[leased.group_index], leased.episode_indices[0]}
            self._waiting_episodes[leased.group_index] = tuple(sorted(rest))
        return leased

    return lease_twice


# -- steps -----------------------------------------------------------------------------------------


@register_mutant(GroupBuffer, "choose_groups")
def younger_groups_first(batch: Any) -> Any:
    """A step takes the newest complete groups of the window."""

    def choose_youngest(
        self: GroupBuffer, at_least: int, at_most: int, tokens: int, counts_group: Any = None
    ) -> list[int]:
        window = [g for g in self._consumed.groups_in_window() if not self.missing_in_group(g)]
        if len(window) >= at_least:
            return sorted(window[-at_least:])
        return list(batch(self, at_least, at_most, tokens, counts_group))

    return choose_youngest


@register_mutant(GroupBuffer, "__init__")
def window_one_wider(init: Any) -> Any:
    """The learner's window is one group larger than the schedule says."""

    def init_wider(self: GroupBuffer, group_size: int, window: int = 1, **facts: Any) -> None:
        init(self, group_size, window + 1, **facts)

    return init_wider


@register_mutant(GroupBuffer, "__init__")
def resume_forgets_what_was_trained(init: Any) -> Any:
    """A resumed learner forgets which groups after the oldest untrained one its
    checkpoint has trained."""

    def init_forgetful(
        self: GroupBuffer, group_size: int, window: int = 1, *, head: int = 0, beyond: Any = ()
    ) -> None:
        init(self, group_size, window, head=head)

    return init_forgetful


register_combined(
    "no_dedupe",
    "A resumed learner does not know what was trained, and takes it again.",
    (
        GroupBuffer,
        "__init__",
        lambda init: lambda self, size, window=1, *, head=0, beyond=(): init(self, size, window),
    ),
)


@register_mutant(LearnerActor, "run_step")
def version_counted_twice(run_step: Any) -> Any:
    """A publication increases the version by two."""

    async def count_twice(self: LearnerActor, *args: Any, **facts: Any) -> Any:
        result = await run_step(self, *args, **facts)
        if result is not None and result.has_new_weights:
            self.model.counts.version += 1
        return result

    return count_twice


@register_mutant(LocalRank, "snapshot_weights")
def old_weights_under_a_new_number(snapshot: Any) -> Any:
    """The third version that a learner publishes has the weights of the second."""

    def snapshot_old(self: Any, version: int) -> None:
        before = getattr(self, "copies", [])
        snapshot(self, version)
        # The next snapshot takes the same memory.
        self.copies = [*before, copy.deepcopy(self._snapshot[1])]
        if len(self.copies) == 3:
            self._snapshot = version, self.copies[1]

    return snapshot_old


# -- lineages and weights --------------------------------------------------------------------------


def _unless_kept(validate: Any) -> Any:
    return lambda trajectories, **facts: (
        None if facts.get("is_recovered") else validate(trajectories, **facts)
    )


register_combined(
    "lineage_ignored",
    "A start takes back whatever its spool kept: also tokens of weights that the resume took back.",
    (
        Lineage,
        "rejection_reason",
        lambda refusal: lambda self, lineage, newest, learner, *, from_earlier_start=False: "",
    ),
    (trajectory_inbox, "validate_trajectories", _unless_kept),
)


@register_mutant(Lineage, "start_child")
def lineage_used_again(child: Any) -> Any:
    """A start ignores the lineage numbers that were taken before."""

    def start_again(self: Lineage, starts: Any, *args: Any) -> Any:
        return child(self, (), *args)

    return start_again


@register_mutant(VersionPublisher, "write_version")
def another_lineage_published(write: Any) -> Any:
    """A resumed learner publishes its weights under the first lineage."""

    async def write_first_lineage(self: VersionPublisher, reading: Any = ()) -> Any:
        published = await write(self, reading)
        manifest = msgspec.structs.replace(published.publication.manifest, lineage=1)
        return msgspec.structs.replace(
            published, publication=msgspec.structs.replace(published.publication, manifest=manifest)
        )

    return write_first_lineage


@register_mutant(LocalRank, "restore_checkpoint")
def checkpoint_not_loaded(restore: Any) -> Any:
    """A resumed learner begins with the weights of the start model."""
    return lambda self, path: None


# Defects of evaluations, failed episodes, and the handling of processes that are lost
# or lack resources.


# -- evaluations -----------------------------------------------------------------------------------


@register_mutant(Evaluator, "resume_evaluations")
def cut_off_evaluation_forgotten(start: Any) -> Any:
    """An evaluation that was being played when the run was stopped or lost is skipped."""

    def resume_nothing(self: Evaluator, step: int, version: int) -> None:
        self._last_step = step

    return resume_nothing


@register_mutant(CheckpointDirectory, "remove_later_evaluations")
def evaluations_of_lost_weights_count(remove: Any) -> Any:
    """A resume keeps the results of evaluations of the steps that it takes back."""
    return lambda self, resume: None


@register_mutant(Evaluator, "_read_row_steps")
def evaluation_played_again(written: Any) -> Any:
    """A resumed run does not know which evaluations its record contains."""
    return lambda self: set()


@register_mutant(Evaluator, "_wait_for_generator")
def evaluated_with_old_weights(player: Any) -> Any:
    """An evaluation is played with whatever weights a generator has."""
    return lambda self, version, left: player(self, 0, left)


# -- episodes --------------------------------------------------------------------------------------


@register_mutant(RetryingPlayer, "__init__")
def given_up_at_once(init: Any) -> Any:
    """An episode is dropped when its environment fails for the first time."""

    def init_without_retries(self: RetryingPlayer, *args: Any, **facts: Any) -> None:
        init(self, *args, **facts)
        self._retry_budgets["environment"] = 0

    return init_without_retries


# -- processes -------------------------------------------------------------------------------------


@register_mutant(disk_retries, "is_disk_error")
def full_process_not_waited_for(is_disk_trouble: Any) -> Any:
    """Writing weights is not retried when no file descriptor is free."""
    return lambda error: is_disk_trouble(error) and error.errno != errno.EMFILE


@register_mutant(HostVersionCache, "remove_unused_versions")
def tidied_while_it_is_used(tidy: Any) -> Any:
    """A process that fetches a version removes all other versions on its host."""

    def remove_everything(self: HostVersionCache, keep: Any) -> None:
        for name in self._files.list_names(self.path):
            path = self.path / name
            if name.startswith("version-") and (keep is None or path != self.version_path(keep)):
                self._files.remove(path)

    return remove_everything


# Defects of the transfer of weights, of delivery to the learner, and of waiting.


# -- versions --------------------------------------------------------------------------------------


@register_mutant(VersionFolder, "_remove_old_versions")
def old_versions_stay(remove: Any) -> Any:
    """The learner removes no version of the weights."""
    return lambda self, keep, versions_in_use: None


@register_mutant(VersionFolder, "_remove_old_versions")
def versions_in_use_unknown(remove: Any) -> Any:
    """Old versions are removed although engines are reading them."""
    return lambda self, keep, versions_in_use: remove(self, keep, ())


# -- streams ---------------------------------------------------------------------------------------


@register_mutant(TcpReceiver, "_append_verified_chunks")
def chunk_unchecked(write: Any) -> Any:
    """Chunks of weights are written without a check of their checksum."""

    def append_unchecked(
        self: TcpReceiver, file: Any, batch: Sequence[tuple[int, list[Any]]]
    ) -> list[int]:
        for _, frames in batch:
            self.received_bytes += file.append([frame.buffer for frame in frames])
        return [checksum for checksum, _ in batch]

    return append_unchecked


@register_mutant(TcpReceiver, "_handle_message")
def chunk_out_of_order(arrived: Any) -> Any:
    """Any chunk of weights is taken for the next one expected."""

    def take_any_chunk(self: TcpReceiver, frames: list[Any]) -> None:
        try:
            message = relay.decode_relay_message(frames[0].bytes)
        except MalformedError:
            return
        expected: IncomingStream = self._incoming
        if (
            isinstance(message, relay.Chunk)
            and message.stream == expected.name
            and expected.next_chunk < expected.chunk_count
        ):
            expected.pending_chunks.append((message.checksum, frames[1:]))
            expected.activity.set()
        else:
            arrived(self, frames)

    return take_any_chunk


register_combined("lost_chunk_never_asked_again", (
    "What of the weights was lost on its way is not asked for again."
), (
    tcp, "RETRY_SECONDS", lambda _: 1e6,
))  # fmt: skip
register_combined("silent_parent_waited_for", "A host that sends nothing any more is waited for.", (
    tcp, "MAX_SILENCE_SECONDS", lambda _: 1e6,
))  # fmt: skip


@register_mutant(relay.RelayTree, "place_node")
def failed_parent_given_again(place: Any) -> Any:
    """A host is assigned again to a parent that failed it."""
    return lambda self, name, address, avoid=(), excluded=(): place(self, name, address)


# -- deltas and hosts ------------------------------------------------------------------------------


def _version_files(receiver: TcpReceiver) -> list[Path]:
    """Return the files of the versions on the host."""
    folder = receiver._cache.path
    return [
        folder / name for name in receiver._files.list_names(folder) if name.startswith("version-")
    ]


def _apply_to_any(apply: Any) -> Any:
    def apply_to_last(
        self: TcpReceiver, base: Any, difference: Any, path: Path, *part: int
    ) -> bool:
        with self._files.open(_version_files(self)[-1]) as before:
            write_atomically(
                path,
                delta.apply_delta(base, before, difference, *part),
                fsync=False,
                files=self._files,
            )
        return True

    return apply_to_last


def _decode_unchecked(decode_block: Any) -> Any:
    def decode_block_unchecked(base: Any, record: Any) -> memoryview:
        kind, count, *lengths, _ = delta._RECORD.unpack_from(record)
        view = memoryview(record)
        at = delta.MIN_RECORD_BYTES
        planes = []
        for length in lengths:
            planes.append(view[at : at + length])
            at += length
        if kind == delta._SPARSE:
            return delta._apply_sparse(base, count, planes)
        return planes[0] if kind == delta._RAW else memoryview(base)

    return decode_block_unchecked


register_combined(
    "delta_of_any_base",
    (
        "A delta is applied to whichever version the host has, and what it makes of that "
        "is not compared."
    ),
    (TcpReceiver, "_has_version", lambda has: lambda self, base: bool(_version_files(self))),
    (TcpReceiver, "_apply_delta", _apply_to_any),
    (delta, "decode_delta_block", _decode_unchecked),
)


@register_mutant(TcpReceiver, "_has_version")
def delta_without_its_base(has: Any) -> Any:
    """A host fetches a delta although it does not have the version that it changes."""
    return lambda self, base: True


@register_mutant(HostVersionCache, "acquire_version")
def version_not_held(use: Any) -> Any:
    """A process that uses a version does not hold a lock on its file."""

    def acquire_unlocked(self: HostVersionCache, version: Any) -> Any:
        path = use(self, version)
        for file in self._locked_files:
            file.close()
        self._locked_files = []
        return path

    return acquire_unlocked


@register_mutant(ScriptedEngine, "_require_started")
def loss_looks_like_a_failure(require_started: Any) -> Any:
    """An engine that is lost fails as if a request were to blame."""

    def require_started_plainly(self: ScriptedEngine) -> None:
        try:
            require_started(self)
        except EngineLostError as error:
            raise EngineError(str(error)) from None

    return require_started_plainly


@register_mutant(ScriptedEngine, "_read_checked_key")
def weights_before_loaded(read: Any) -> Any:
    """An engine loads a version but continues with the one before."""

    def read_previous_key(self: ScriptedEngine, manifest: Any) -> int:
        key = int(read(self, manifest))
        return next(reversed(self._weights_keys.values()), key)

    return read_previous_key


# -- installations ---------------------------------------------------------------------------------


@register_mutant(GeneratorHealth, "mark_installed")
def old_weights_count_as_newest(installed: Any) -> Any:
    """A restarted generator plays with the version that it installed, though the others
    have newer weights."""
    return lambda self, version, current: installed(self, version, version)


@register_mutant(VersionDelivery, "_start_deliveries")
def slow_one_left_behind(start: Any) -> Any:
    """A generator that missed a version is given no other."""

    def start_unless_missed(self: VersionDelivery, version: int, reports: Any) -> Any:
        everyone = self.fleet
        self.fleet = [g for g in everyone if g.version >= version - 1]  # type: ignore[assignment]
        try:
            return start(self, version, reports)
        finally:
            self.fleet = everyone

    return start_unless_missed


@register_mutant(VersionDelivery, "_put_offer")
def first_version_given_for_ever(share: Any) -> Any:
    """Generators are given the first version for ever."""

    def put_first_offer(self: VersionDelivery, published: Any) -> Any:
        return share(self, published) if self._shared_offer is None else self._shared_offer[1]

    return put_first_offer


# -- waiting ---------------------------------------------------------------------------------------


@register_mutant(Fleet, "find_overdue")
def silent_one_keeps_its_leases(overdue: Any) -> Any:
    """The leases of a silent generator are given to no other generator."""
    return lambda self: []


# -- the spool -------------------------------------------------------------------------------------


@register_mutant(Spool, "_scan_directory")
def recovery_not_synced(scan: Any) -> Any:
    """A start does not sync what it finds in the spool, though its writer may have ended
    before it synced."""

    def scan_unsynced(self: Spool) -> Any:
        settings = self._settings
        self._settings = msgspec.structs.replace(settings, fsync=False)
        try:
            return scan(self)
        finally:
            self._settings = settings

    return scan_unsynced


@register_mutant(SimulatedFile, "fsync")
def trajectory_not_synced(sync: Any) -> Any:
    """A trajectory is acknowledged before it survives a power failure."""

    def not_these(self: SimulatedFile) -> None:
        if self._path.suffix != ".spool":
            sync(self)

    return not_these


@register_mutant(SimulatedFiles, "fsync_directory")
def spool_names_not_synced(sync_directory: Any) -> Any:
    """The names of the spool's files do not survive a power failure."""

    def not_this_one(self: SimulatedFiles, directory: Path) -> None:
        if directory.name != "spool":
            sync_directory(self, directory)

    return not_this_one


# Defects of delivery, the spool and checkpoints.


# -- delivery and the spool ------------------------------------------------------------------------


@register_mutant(Spool, "put_trajectory")
def ack_before_store(put: Any) -> Any:
    """A trajectory is acknowledged before it is in the spool."""

    async def put_later(self: Spool, trajectory: Any, frames: Any, *, spill: bool) -> None:
        async def store_trajectory() -> None:
            await asyncio.sleep(0.5)
            await put(self, trajectory, frames, spill=spill)

        self.late = [*getattr(self, "late", ()), asyncio.create_task(store_trajectory())]  # type: ignore[attr-defined]

    return put_later


@register_mutant(TrajectoryInbox, "release_trained")
def unlink_before_commit(trained: Any) -> Any:
    """The spool deletes groups when they are trained, not when a checkpoint has trained them."""

    def release_early(self: TrajectoryInbox, indices: Any) -> None:
        trained(self, indices)
        if self.spool is not None:
            self.early = asyncio.create_task(self.spool.delete_trained(list(indices)))  # type: ignore[attr-defined]

    return release_early


@register_mutant(CheckpointWriter, "_write_checkpoint")
def commit_before_the_checkpoint_is_durable(write: Any) -> Any:
    """The spool deletes what a checkpoint trained when the checkpoint is begun."""

    async def write_eagerly(
        self: CheckpointWriter, state: Any, parts: Any, then: Callable[[], object]
    ) -> Any:
        then()
        return await write(self, state, parts, lambda: None)

    return write_eagerly


@register_mutant(Spool, "_delete_files")
def spool_kept_after_commit(unlink: Any) -> Any:
    """Files of the spool are kept after a checkpoint has trained them."""
    return lambda self, groups: None


@register_mutant(SimulatedFile, "truncate")
def torn_tail_not_cut(truncate: Any) -> Any:
    """The remains of a failed write stay in a file of the spool, and the next
    record follows them."""

    def keep_tail(self: SimulatedFile, size: int) -> None:
        if self._path.suffix != ".spool":
            truncate(self, size)

    return keep_tail


@register_mutant(Spool, "recover_trajectories")
def recovery_forgets(recover: Any) -> Any:
    """A start recovers all but the last trajectory from the spool."""

    async def recover_some(self: Spool) -> Any:
        return (await recover(self))[:-1]

    return recover_some


@register_mutant(Spool, "free_bytes")
def disk_bytes_ignored(free_bytes: Any) -> Any:
    """Trajectories are accepted regardless of the size of the spool."""
    return property(lambda self: 10**12)


@register_mutant(MemoryBudget, "_fits_in_memory")
def memory_ignored(fits: Any) -> Any:
    """Every trajectory that arrives is accepted, regardless of how much memory is held."""
    return lambda self, nbytes: True


@register_mutant(MemoryBudget, "release_trajectory")
def memory_not_released(release: Any) -> Any:
    """Trained trajectories still count as held in memory."""
    return lambda self, trajectory_id: None


@register_mutant(MemoryBudget, "group_limit")
def closed_for_ever(until: Any) -> Any:
    """After one trajectory did not fit, only the groups of the next step are ever requested."""

    def limit_for_ever(self: MemoryBudget, disk: float = math.inf) -> int:
        short = self._first_refused_bytes
        limit = until(self, disk)
        self._first_refused_bytes = short
        return limit if short is None else self.oldest_group + self.window

    return limit_for_ever


@register_mutant(Outbox, "requeue_trajectory")
def not_taken_is_forgotten(requeue: Any) -> Any:
    """A sender does not resend trajectories for which the learner had no memory."""

    def settle_refused(self: Outbox, trajectory_id: str, now: float, *, damaged: bool) -> bool:
        return (
            requeue(self, trajectory_id, now, damaged=damaged)
            if damaged
            else bool(self.settle_trajectory(trajectory_id, now))
        )

    return settle_refused


@register_mutant(Outbox, "requeue_all")
def unacknowledged_forgotten(reset: Any) -> Any:
    """A sender that reconnects does not resend what was not acknowledged."""

    def drop_in_flight(self: Outbox) -> int:
        self.in_flight = {}
        return reset(self)

    return drop_in_flight


@register_mutant(TrajectorySender, "_send_ready")
def sent_is_settled(deliver: Any) -> Any:
    """A sender treats everything it has sent as acknowledged."""

    def settle_sent(self: TrajectorySender) -> None:
        deliver(self)
        for name in list(self._outbox.in_flight):
            self._settle_trajectory(name)

    return settle_sent


@register_mutant(wire_room, "compute_checksum")
def payload_unchecked(checksum: Any) -> Any:
    """The payload of a trajectory has no checksum."""
    return lambda buffers: 0


@register_mutant(TrajectoryQuarantine, "add_trajectory")
def refused_in_no_quarantine(add: Any) -> Any:
    """A trajectory that a start refuses is removed from the spool, and not kept
    in the quarantine."""
    return lambda self, trajectory, reason, frames=None: None


# -- checkpoints -----------------------------------------------------------------------------------


@register_mutant(SimulatedFiles, "fsync_directory")
def unsynced_rename(sync_directory: Any) -> Any:
    """The directory of checkpoints is not synced after a checkpoint was renamed."""

    def not_this_one(self: SimulatedFiles, directory: Path) -> None:
        if directory.name != "checkpoints":
            sync_directory(self, directory)

    return not_this_one


@register_mutant(SimulatedFile, "fsync")
def checkpoint_named_before_it_is_synced(sync: Any) -> Any:
    """The files of a checkpoint are not synced."""

    def not_these(self: SimulatedFile) -> None:
        if not self._path.parent.name.endswith(".partial"):
            sync(self)

    return not_these


@register_mutant(CheckpointDirectory, "recover_newest")
def resumed_from_an_older_one(newest: Any) -> Any:
    """A run resumes from the oldest checkpoint."""

    def recover_oldest(self: CheckpointDirectory) -> Any:
        while len(steps := self.list_steps()) > 1:
            self._set_aside(self.step_path(steps[-1]), "superseded")
        return newest(self)

    return recover_oldest


@register_mutant(CheckpointDirectory, "prune_old")
def pruned_too_much(prune: Any) -> Any:
    """Every second checkpoint is removed."""

    def prune_more(self: CheckpointDirectory) -> list[int]:
        removed = prune(self)
        steps = self.list_steps()
        if len(steps) % 2 == 0 and steps:
            self.files.remove_tree(self.step_path(steps[-1]))
        return removed

    return prune_more


@register_mutant(CheckpointWriter, "save_checkpoint")
def checkpoint_forgets_who_overtook(save: Any) -> Any:
    """A checkpoint does not record which groups overtook the oldest untrained one."""

    async def save_forgetful(self: CheckpointWriter, state: Any, *actions: Any) -> None:
        await save(self, msgspec.structs.replace(state, consumed_beyond=[]), *actions)

    return save_forgetful
