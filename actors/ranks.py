"""The learner's ranks: one in this process, or several actors that are called as one, with a log of
what they have to repeat after a loss."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from r3async.actors.rank_actor import LocalRank, RankActor
from r3async.actors.rank_calls import RankCalls, RankLost, RankProcesses, start_ranks
from r3async.actors.rank_recovery import RankCall, RecoveryLog
from r3async.actors.run_placements import CHECKPOINT_LANE, WRITE_LANE
from r3async.actors.weight_transport import get_weights_directory
from r3async.checkpoint import FileEntry
from r3async.config import Config
from r3async.data.write_sizes import UNKNOWN_SIZES, WriteSizes, read_write_sizes
from r3async.learner import LearnerError, MinibatchResult, sum_stage_digests
from r3async.learner.micro_batches import MicroBatch
from r3async.weights.interfaces import PublishedPart, TransferOffer
from r3async.weights.sharded_store import PartFolder, ShardedVersionStore
from r3async.world import ActorOptions, EventReporter, World, ignore_event
from r3async.world.curve_keys import ServerKeys
from r3async.world.real import REAL_WORLD

if TYPE_CHECKING:
    from r3async.learner.backend import LearnerBackend

R = TypeVar("R")
MAX_CONSECUTIVE_RESTARTS = 3
"""Times in a row, without a step in between, that the ranks restart when one is lost."""


class RemoteRanks:
    """The ranks as actors, with the same calls as `LocalRank`, which are made on all ranks at once.
    The first rank answers for all; it is on this host.

    Ranks of one host are started again if one is lost. The caller waits meanwhile and notices
    nothing else. The ranks begin with the copies of their state that they made last
    (`supervise.copy_steps`), repeat the calls that came after these, and then the call during which
    one was lost. So the same weights follow, bit by bit, if the same computation gives the same
    bits. A call raises `RankLost` if they cannot be started again: ranks of several hosts,
    `weights.backend = "nccl"`, no copies, or one lost `MAX_CONSECUTIVE_RESTARTS` times without a
    step in between.
    """

    actor_class: type[RankActor] = RankActor

    def __init__(
        self,
        config: Config,
        ranks: RankProcesses,
        world: World = REAL_WORLD,
        start_ranks: Callable[[], RankProcesses] | None = None,
        report_event: EventReporter = ignore_event,
        write_sizes: WriteSizes = UNKNOWN_SIZES,
    ):
        """Wrap ranks that have loaded the model.

        Args:
            start_ranks: `start_ranks()` starts the ranks once more.
            write_sizes: Sizes of a version and a checkpoint; see `read_write_sizes`.
        """
        self._config = config
        self._world = world
        self._ranks = ranks
        self._start_ranks = start_ranks
        self._report_event = report_event
        limits = config.supervise.limits
        self._version_write_seconds = limits.version_write(write_sizes.version_bytes)
        self._checkpoint_write_seconds = limits.checkpoint_write(write_sizes.checkpoint_bytes)
        self._publisher: ShardedVersionStore | None = None
        self._folder: PartFolder | None = None
        """Folder of this host's parts of versions."""
        self._sender_keys: ServerKeys | None = None
        self._sender_ranks: dict[str, int] = {}
        """Rank that has started the sender with each address."""
        self._transport = ""
        self._recovery_log = RecoveryLog(
            config.supervise.copy_steps if start_ranks is not None and ranks.is_one_host else 0
        )
        self._lock = world.threads.new_lock()
        """Lock on the log and on the present ranks. It is held while the ranks start again: who
        waits for it has to wait for them."""
        self._begun_copies: list[Any] = []
        """The calls that hand over the ranks' copies, while these are not all here."""
        self._closed = self._writing_checkpoint = False
        """Flags; `_writing_checkpoint` is True while the state that the ranks staged for a
        checkpoint is being written."""
        self._consecutive_restarts = 0
        """Number of restarts without a step in between."""
        self.restarts = 0

    @classmethod
    def load(
        cls,
        config: Config,
        model_path: Path,
        run_dir: Path,
        placements: Sequence[ActorOptions] = (),
        world: World = REAL_WORLD,
        report_event: EventReporter = ignore_event,
    ) -> RemoteRanks:
        """Start the ranks at `placements`, or all of them beside this process. They meet and load
        the model. Blocking. Raises `LearnerError`."""
        start = partial(
            start_ranks, cls.actor_class, config, model_path, run_dir, placements, world
        )
        try:
            return cls(
                config,
                start(),
                world,
                start,
                report_event,
                read_write_sizes(config, model_path, files=world.files),
            )
        except RankLost as error:  # the same start would end in the same way
            raise LearnerError(str(error)) from error

    @property
    def vocab_size(self) -> int:
        return self._ranks.vocab_size

    @property
    def processes(self) -> Sequence[tuple[int, str]]:
        return self._ranks.processes

    @property
    def is_one_host(self) -> bool:
        return self._ranks.is_one_host

    # -- calls -------------------------------------------------------------------------------------

    def _call_with_restarts(
        self, call: Callable[[RankCalls], R], change: RankCall[Any] | None = None
    ) -> R:
        """Return the result of `call`, which is repeated if a rank was lost. A `change` of
        the ranks' state is also repeated if they were restarted meanwhile, and is then
        added to the log."""
        while True:
            ranks = self._ranks
            try:
                made = call(ranks.calls)
            except RankLost as lost:
                self._restart_ranks(ranks, lost)
                continue
            if change is None:
                return made
            with self._lock:
                if ranks is self._ranks:  # otherwise the ranks that made the change are gone
                    self._recovery_log.add(change)
                    return made

    def _call_all(self, method: Callable[..., R], *args: Any) -> R:
        return self._call_with_restarts(lambda calls: calls.call_local_ranks(method, *args)[0])

    def list_gpus(self) -> list[str]:
        return self._call_all(LocalRank.list_gpus)

    def list_carried_tensors(self) -> tuple[str, ...]:
        return self._call_all(LocalRank.list_carried_tensors)

    def call_verb(self, verb: Callable[[LearnerBackend], R]) -> R:
        return self._call_all(LocalRank.call_verb, verb)

    def count_updates(self) -> int:
        return self._call_all(LocalRank.count_updates)

    def score_tokens(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        return self._call_all(LocalRank.score_tokens, token_ids, temperature)

    def save_model(self, directory: Path) -> None:
        self._call_all(LocalRank.save_model, directory)

    def restore_checkpoint(self, checkpoint: Path) -> None:
        self._call_all(LocalRank.restore_checkpoint, checkpoint)
        with self._lock:
            self._recovery_log.set_checkpoint(checkpoint)

    def run_minibatches(
        self,
        minibatches: Sequence[Sequence[Sequence[MicroBatch]]],
        *,
        version: int,
        trace: bool = False,
    ) -> list[MinibatchResult]:
        """Implement `trainer.LearnerRanks.run_minibatches`."""
        shares = [
            [[m[rank]] for m in minibatches] for rank in range(self._config.learner.parallel.dp)
        ]
        answers = self._run_step(LocalRank.run_minibatches, shares, version=version, trace=trace)
        return [
            msgspec.structs.replace(
                results[0],
                traces=[t for result in results for t in result.traces],
                digests=sum_stage_digests([result.digests for result in results]),
            )
            for results in zip(*answers, strict=True)
        ]

    def train_supervised(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """Make a supervised step like `LocalRank.train_supervised`, with the micro-batches of every
        data-parallel rank."""
        return self._run_step(LocalRank.train_supervised, [[mine] for mine in shares])[0]

    def compute_supervised_loss(
        self, shares: Sequence[Sequence[MicroBatch]]
    ) -> tuple[float, float]:
        """Compute a supervised loss like `LocalRank.compute_supervised_loss`, with the
        micro-batches of every data-parallel rank."""
        call = self._divide_call(LocalRank.compute_supervised_loss, [[mine] for mine in shares])
        return self._call_with_restarts(lambda calls: self._make_call(calls, call))[0]

    def _divide_call(
        self, method: Callable[..., R], shares: Sequence[Any], **options: Any
    ) -> RankCall[R]:
        shared = tuple(self._ranks.calls.put_shared(each) for each in shares)
        return RankCall(method, shared, options, is_divided=True)

    def _make_call(self, calls: RankCalls, call: RankCall[R]) -> list[R]:
        """Make a call on every rank and return all results."""
        if not call.is_divided:
            return calls.call_local_ranks(call.method, *call.args)
        p = self._config.learner.parallel
        # Megatron's order of ranks: tp varies fastest, then cp, dp and pp.
        shares = [call.args[rank // (p.tp * p.cp) % p.dp] for rank in range(p.world_size)]
        begun = [
            calls.begin_local_rank(r, call.method, share, **call.options)
            for r, share in enumerate(shares)
        ]
        return calls.wait_all(begun)

    def _run_step(self, method: Callable[..., R], shares: Sequence[Any], **options: Any) -> list[R]:
        change = self._divide_call(method, shares, **options)
        answers = self._call_with_restarts(lambda calls: self._make_call(calls, change), change)
        self._consecutive_restarts = 0
        # A copy has waited for a step by now. If it waits for a checkpoint, that was given up
        # before any of it was written.
        if self._recovery_log.has_pending_copy and not self._writing_checkpoint:
            with self._lock:
                self._recovery_log.mark_written(LocalRank.stage_checkpoint, before_copy=True)
        self._finish_copy()
        if self._recovery_log.is_copy_due:
            self._begin_copy()
        return answers

    def snapshot_weights(self, version: int) -> None:
        change = RankCall(LocalRank.snapshot_weights, (version,))
        self._call_with_restarts(lambda calls: self._make_call(calls, change), change)

    def stage_checkpoint(self) -> None:
        change = RankCall(LocalRank.stage_checkpoint)
        self._call_with_restarts(lambda calls: self._make_call(calls, change), change)

    def set_weight_transport(self, backend: str, sender_keys: ServerKeys | None = None) -> None:
        """Set the transport of the weights like `LocalRank.set_weight_transport`. The ranks of
        each host write one file together. Those of other hosts than this one have them served
        with `sender_keys`."""
        self._transport = backend
        self._sender_keys = sender_keys
        if backend == "nccl":  # engines would wait for what lost ranks should have sent
            with self._lock:
                self._recovery_log.disable()
        self._call_all(LocalRank.set_weight_transport, backend, True)
        self._folder = PartFolder(get_weights_directory(self._config), self._world)
        self._publisher = ShardedVersionStore(
            self._call_hosts, self._call_writers, self._ranks.ranks_by_host, deltas=backend == "tcp"
        )

    def discard_snapshot(self) -> None:
        self._call_all(LocalRank.discard_snapshot)

    def write_version(self, versions_in_use: Sequence[int] = ()) -> TransferOffer:
        """Write a version like `LocalRank.write_version`: each rank writes its part. With NCCL, the
        first rank sends it from its GPU."""
        publication = self._call_with_restarts(
            lambda calls: self._write_version(calls, versions_in_use)
        )
        with self._lock:
            self._recovery_log.mark_written(LocalRank.snapshot_weights)
            with contextlib.suppress(LearnerError):  # a lost rank has lost its snapshot, too
                self._ranks.calls.call_local_ranks(LocalRank.discard_snapshot, lane=WRITE_LANE)
        return publication

    def _write_version(self, calls: RankCalls, versions_in_use: Sequence[int]) -> TransferOffer:
        if self._publisher is None:
            # The first rank refuses it: there is no transport yet.
            writing = calls.begin_local_rank(
                0, LocalRank.write_version, versions_in_use, lane=WRITE_LANE
            )
            return calls.wait_all([writing], self._version_write_seconds, independent=True)[0]
        publication = self._publisher.publish_shares(versions_in_use)
        if not self._ranks.is_one_host:
            publication = msgspec.structs.replace(
                publication, transport_data=self._serve_parts(publication)
            )
        if self._transport == "nccl":
            announcing = calls.begin_local_rank(
                0, LocalRank.announce_version, publication.manifest, lane=WRITE_LANE
            )
            (publication,) = calls.wait_all([announcing])
        return publication

    def _call_writers(self, name: str, args_by_rank: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call the method `name` of every rank with arguments, in its thread for writing; see
        `sharded_store.CallRanks`."""
        chosen = {
            rank: ("call_method", name, *args)
            for rank, args in enumerate(args_by_rank)
            if args is not None
        }
        answers = self._call_in_write_lane(chosen)
        return [answers.get(rank) for rank in range(len(args_by_rank))]

    def _call_hosts(self, name: str, args_by_host: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call the method `name` of the `PartFolder` of every host with arguments; see
        `sharded_store.CallHosts`. That of this host is in this process, and outlives a rank."""
        first_ranks = [ranks[0] for ranks in self._ranks.ranks_by_host]
        pairs = list(zip(first_ranks, args_by_host, strict=True))[1:]
        answers = self._call_in_write_lane(
            {r: ("call_part_folder", name, *args) for r, args in pairs if args is not None}
        )
        args = args_by_host[0]
        if args is not None:
            answers[first_ranks[0]] = getattr(self._folder, name)(*args)
        return [answers.get(rank) for rank in first_ranks]

    def _call_in_write_lane(self, calls_by_rank: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of the actors of some ranks, in their threads for writing, and return the
        results by rank."""
        calls = self._ranks.calls
        begun = [
            calls.begin_call(rank, *call, lane=WRITE_LANE) for rank, call in calls_by_rank.items()
        ]
        answers = calls.wait_all(begun, self._version_write_seconds, independent=True)
        return dict(zip(calls_by_rank, answers, strict=True))

    def _serve_parts(self, publication: TransferOffer) -> list[PublishedPart]:
        """Have the other hosts serve their parts, and return all parts with the addresses."""
        own, *others = publication.transport_data
        ranks = [ranks[0] for ranks in self._ranks.ranks_by_host[1:]]
        endpoints = self._call_in_write_lane(
            {
                rank: ("serve_parts", self._sender_keys, p.file_paths)
                for rank, p in zip(ranks, others, strict=True)
            }
        )
        self._sender_ranks |= {endpoint: rank for rank, endpoint in endpoints.items()}
        return [
            own,
            *(
                msgspec.structs.replace(p, endpoint=endpoints[r])
                for r, p in zip(ranks, others, strict=True)
            ),
        ]

    def revive_sender(self, parts: Sequence[PublishedPart]) -> tuple[str, str]:
        """Have the sender of one host, which serves these parts, replaced by a new one if it does
        not answer. Returns the host, and the sender's address."""
        rank = self._sender_ranks[parts[0].endpoint]
        paths = {name: path for part in parts for name, path in part.file_paths.items()}
        endpoint: str = self._call_in_write_lane({rank: ("serve_parts", self._sender_keys, paths)})[
            rank
        ]
        self._sender_ranks[endpoint] = rank
        return self.processes[rank][1], endpoint

    def join_parts(self, parts: Sequence[PublishedPart], path: Path) -> None:
        """Have all hosts write their parts of a version into one file, of a directory that they
        share. Raises `OSError` for a version that is not kept any more."""
        if not parts:
            raise FileNotFoundError("this version of the weights is not kept any more")
        *starts, nbytes = [0, *itertools.accumulate(part.nbytes for part in parts)]
        with self._world.files.open(path, exclusive=True) as file:
            file.truncate(nbytes)
        self._call_hosts(
            "copy_part",
            [(part.path, str(path), start) for part, start in zip(parts, starts, strict=True)],
        )

    def write_checkpoint(self, directory: Path) -> list[FileEntry]:
        """Write a checkpoint like `LocalRank.write_checkpoint`: each rank writes its own file."""
        timeout = self._checkpoint_write_seconds
        files = self._world.files

        def write(calls: RankCalls) -> list[FileEntry]:
            for name in files.list_names(directory):  # files that lost ranks began to write
                files.remove(directory / name)
            written = calls.call_local_ranks(
                LocalRank.write_checkpoint,
                directory,
                lane=CHECKPOINT_LANE,
                timeout=timeout,
                independent=True,
            )
            return [record for records in written for record in records]

        self._writing_checkpoint = True
        try:
            return self._call_with_restarts(write)
        finally:
            with self._lock:
                self._writing_checkpoint = False
                self._recovery_log.mark_written(LocalRank.stage_checkpoint)

    def close(self) -> None:
        """End the ranks' processes, and remove the versions from their hosts."""
        self._closed = True
        if self._publisher is not None:
            # What is left, the next run there removes.
            with contextlib.suppress(LearnerError, OSError):
                self._call_hosts("close", [()] * len(self._ranks.ranks_by_host))
        self._ranks.calls.kill_ranks()

    # -- after the loss of a rank ------------------------------------------------------------------

    def _begin_copy(self) -> None:
        """Have every rank copy its state, and hand the copy over beside the next steps to where it
        outlives the rank: the result of an actor's call belongs to the caller, and is in shared
        memory of the actor's host."""
        ranks = self._ranks
        calls = self._ranks.calls
        try:
            if not self._copies_fit(calls):
                return
            calls.call_local_ranks(LocalRank.stage_recovery_copy)
        except RankLost as lost:
            return self._restart_ranks(ranks, lost)  # the next step is followed by a copy
        with self._lock:
            if ranks is self._ranks:
                self._recovery_log.begin_copy()
                self._begun_copies = [
                    calls.begin_local_rank(rank, LocalRank.take_recovery_copy, lane=CHECKPOINT_LANE)
                    for rank in range(len(ranks.processes))
                ]

    def _finish_copy(self) -> None:
        """Keep the copies that are being handed over, if all of them are here."""
        ranks = self._ranks
        waiting = list(self._begun_copies)
        while waiting:
            ready, waiting = self._world.actors.wait_for_call(waiting, 0.0)
            if not ready:
                return
        try:
            ranks.calls.wait_all(self._begun_copies)
        except RankLost as lost:
            return self._restart_ranks(ranks, lost)
        with self._lock:
            if ranks is self._ranks and self._begun_copies:
                copies = self._begun_copies
                self._begun_copies = []
                self._recovery_log.set_copies(copies)

    def _copies_fit(self, calls: RankCalls) -> bool:
        """Return True if the host's object store can hold two copies. It is checked until
        there is a copy."""
        if not isinstance(self._recovery_log.base, tuple):
            nbytes = sum(calls.call_local_ranks(LocalRank.estimate_copy_bytes))
            host = self.processes[0][1]
            store = next(
                (
                    node.object_store_bytes
                    for node in self._world.actors.list_nodes()
                    if node.name == host
                ),
                math.inf,
            )
            if 2 * nbytes > store:
                self._report_event(
                    "ranks_not_copied", bytes=nbytes, store=int(store), hint=OBJECT_STORE_HINT
                )
                with self._lock:
                    self._recovery_log.disable()
        return bool(self._recovery_log.copy_steps)

    def _restart_ranks(self, lost_ranks: RankProcesses, lost: RankLost) -> None:
        """Start all ranks again, unless another thread has done so. Raises `RankLost` if that
        is not possible."""
        with self._lock:
            if self._ranks is not lost_ranks or self._closed:
                if self._closed:
                    raise lost
                return
            clock = self._world.clock.monotonic
            log = self._recovery_log
            began = clock()
            reason = str(lost).partition("\n")[0]
            pids = [pid for pid, _ in lost_ranks.processes]
            self._report_event("rank_lost", error=reason, pids=pids, restarts=self.restarts)
            while True:
                if (
                    not log.copy_steps
                    or self._start_ranks is None
                    or self._consecutive_restarts >= MAX_CONSECUTIVE_RESTARTS
                ):
                    raise lost
                for process in lost_ranks.processes:
                    self._world.processes.kill_process(
                        *process
                    )  # a paused process does not react to a request, and would keep its place
                self._consecutive_restarts += 1
                try:
                    ranks = self._restore_ranks(self._start_ranks())
                    break
                except LearnerError as error:
                    lost = RankLost(f"{reason}; and the ranks could not be started again: {error}")
            self._ranks = ranks
            self._begun_copies = []
            log.give_up_copy()
            self.restarts += 1
            self._report_event(
                "ranks_restarted",
                pids=[pid for pid, _ in ranks.processes],
                steps_again=log.repeated_steps,
                seconds=round(clock() - began, 3),
                restarts=self.restarts,
            )

    def _restore_ranks(self, ranks: RankProcesses) -> RankProcesses:
        """Give new ranks the state of the lost ones, and the copies that wait to be written.
        Returns `ranks`."""
        calls = ranks.calls
        log = self._recovery_log
        if self._transport:
            calls.call_local_ranks(LocalRank.set_weight_transport, self._transport, True)
        if isinstance(log.base, Path):
            calls.call_local_ranks(LocalRank.restore_checkpoint, log.base)
        elif log.base is not None:
            calls.call_local_ranks(LocalRank.restore_from_copies, *log.base)
        for change in log.calls:
            self._make_call(calls, change)
        return ranks


OBJECT_STORE_HINT = (
    "the host's object store of Ray cannot hold two copies of the ranks' state: if a rank is lost, "
    "the run restarts from its newest checkpoint. Start Ray with a larger --object-store-memory, "
    "or set supervise.copy_steps=0"
)


def load_learner(
    config: Config,
    model_path: Path,
    run_dir: Path,
    placements: Sequence[ActorOptions] = (),
    world: World = REAL_WORLD,
    report_event: EventReporter = ignore_event,
) -> LocalRank | RemoteRanks:
    """Load the learner: one rank in this process, or several as actors. See `LocalRank.load` and
    `RemoteRanks.load`."""
    if config.learner.parallel.world_size == 1:
        return LocalRank.load(config, model_path, world)
    return RemoteRanks.load(config, model_path, run_dir, placements, world, report_event)
