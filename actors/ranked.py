"""The learner's ranks, each an actor of its own, driven as one, and started again if one is lost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from r3async.actors.delivery import get_weights_directory
from r3async.actors.places import CHECKPOINT_LANE, WRITE_LANE
from r3async.actors.rank_calls import RankCalls, RankLost, RankProcesses, start_ranks
from r3async.actors.ranks import LocalRank, RankActor
from r3async.actors.redo import SNAPSHOT_CALL, STAGE_CALL, RankCall, RecoveryLog
from r3async.checkpoint import FileEntry
from r3async.config import Config
from r3async.data.written import UNKNOWN_SIZES, WriteSizes, read_write_sizes
from r3async.learner import LearnerError, MinibatchResult, sum_stage_digests
from r3async.learner.batch.packing import MicroBatch
from r3async.weights.publish import TransferOffer
from r3async.weights.sending import ShardedVersionStore
from r3async.world import ActorOptions, World
from r3async.world.real import REAL_WORLD

R = TypeVar("R")


class EventReporter(Protocol):
    """Reports an event."""

    def __call__(self, event: str, /, **facts: Any) -> object: ...


def _ignore_event(event: str, /, **facts: Any) -> None:
    pass


class RemoteRanks:
    """The same calls as `LocalRank`, made on all ranks at once: actors. The first one answers for all; it is on this host.

    Ranks of one host are started again if one is lost, and whoever calls waits meanwhile, and sees nothing else of it: they begin
    with the copies of their state that they made last (`supervise.copy_steps`), make what came after those again, and then the
    call during which one was lost. So the same weights follow, bit by bit, where the same computation gives the same bits.
    Raises `RankLost` if they cannot be started again: ranks of several hosts, `weights.backend = "nccl"`, no copies, or one lost
    `supervise.max_rank_restarts` times without a step in between.
    """

    actor_class: type[RankActor] = RankActor

    def __init__(
        self,
        config: Config,
        ranks: RankProcesses,
        world: World = REAL_WORLD,
        start_ranks: Callable[[], RankProcesses] | None = None,
        report_event: EventReporter = _ignore_event,
        write_sizes: WriteSizes = UNKNOWN_SIZES,
    ):
        """`start_ranks`: the ranks once more. `write_sizes`: see `read_write_sizes`."""
        self._config, self._world, self._ranks, self._start_ranks, self._report_event = (
            config,
            world,
            ranks,
            start_ranks,
            report_event,
        )
        self._version_write_seconds = config.weights.resolve_write_timeout(write_sizes.version_bytes)
        self._checkpoint_write_seconds = config.checkpoint.resolve_write_timeout(write_sizes.checkpoint_bytes)
        self._publisher: ShardedVersionStore | None = None
        self._transport = ""
        self._recovery_log = RecoveryLog(
            config.supervise.copy_steps if start_ranks is not None and ranks.is_one_host else 0
        )
        self._lock = world.threads.new_lock()
        """On the log, and which ranks there are. It is held while they start again: who waits for it has to wait for them."""
        self._closed = self._writing_checkpoint = False
        """`_writing_checkpoint`: what the ranks hold for a checkpoint is being written."""
        self._consecutive_restarts = 0
        """Restarts without a step in between."""
        self.restarts = 0

    @classmethod
    def load(
        cls,
        config: Config,
        model_path: Path,
        run_dir: Path,
        placements: Sequence[ActorOptions] = (),
        world: World = REAL_WORLD,
        report_event: EventReporter = _ignore_event,
    ) -> RemoteRanks:
        """Start the ranks at these `placements`, or all beside this process; they meet and load the model. Blocking. Raises
        `LearnerError`."""
        start = partial(start_ranks, cls.actor_class, config, model_path, run_dir, placements, world)
        try:
            return cls(
                config, start(), world, start, report_event, read_write_sizes(config, model_path, files=world.files)
            )
        except RankLost as error:  # the same start would end in the same way
            raise LearnerError(str(error)) from error

    @property
    def vocab_size(self) -> int:
        return self._ranks.vocab_size

    @property
    def processes(self) -> Sequence[tuple[int, str]]:
        return self._ranks.processes

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call_with_restarts(self, call: Callable[[RankCalls], R], change: RankCall | None = None) -> R:
        """What `call` returns, made by ranks none of which was lost meanwhile, if it is a `change`."""
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
                if ranks is self._ranks:  # else those that have it are gone
                    self._recovery_log.add(change)
                    return made

    def _call_all(self, name: str, *args: Any) -> Any:
        return self._call_with_restarts(lambda calls: calls.call_all("call_method", name, *args)[0])

    def list_gpus(self) -> list[str]:
        return self._call_all("list_gpus")

    def count_updates(self) -> int:
        return self._call_all("count_updates")

    def score_tokens(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        return self._call_all("score_tokens", token_ids, temperature)

    def save_model(self, directory: Path) -> None:
        self._call_all("save_model", directory)

    def restore_checkpoint(self, checkpoint: Path) -> None:
        self._call_all("restore_checkpoint", checkpoint)
        with self._lock:
            self._recovery_log.set_checkpoint(checkpoint)

    def train_minibatches(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """See `trainer.RankGroup.train_minibatches`."""
        given = [[[m[rank]] for m in minibatches] for rank in range(self._config.learner.parallel.dp)]
        answers: list[list[MinibatchResult]] = self._run_step("train_minibatches", given, version=version, trace=trace)
        return [
            msgspec.structs.replace(
                results[0],
                traces=[t for result in results for t in result.traces],
                digests=sum_stage_digests([result.digests for result in results]),
            )
            for results in zip(*answers, strict=True)
        ]

    def train_supervised(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """See `LocalRank.train_supervised`: with the micro-batches of every data-parallel rank."""
        return self._run_step("train_supervised", [[mine] for mine in shares])[0]

    def compute_supervised_loss(self, shares: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
        """See `LocalRank.compute_supervised_loss`."""
        asked = self._make_divided_call("compute_supervised_loss", [[mine] for mine in shares])
        return self._call_with_restarts(lambda calls: self._make_call(calls, asked))[0]

    def _make_divided_call(self, name: str, shares: Sequence[Any], **options: Any) -> RankCall:
        return RankCall(name, tuple(self._ranks.calls.put_shared(each) for each in shares), options, is_divided=True)

    def _make_call(self, calls: RankCalls, change: RankCall) -> list[Any]:
        """What every rank returns."""
        if not change.is_divided:
            return calls.call_all("call_method", change.name, *change.args)
        p, given = self._config.learner.parallel, change.args
        # Megatron's order of ranks: tp varies fastest, then cp, dp and pp.
        return calls.wait_all(
            [
                calls.begin_call(r, "call_method", change.name, given[r // (p.tp * p.cp) % p.dp], **change.options)
                for r in range(p.world_size)
            ]
        )

    def _run_step(self, name: str, shares: Sequence[Any], **options: Any) -> list[Any]:
        change = self._make_divided_call(name, shares, **options)
        answers = self._call_with_restarts(lambda calls: self._make_call(calls, change), change)
        self._consecutive_restarts = 0
        # A copy has waited for a step by now: if for a checkpoint, that was given up before anything of it was written.
        if self._recovery_log.has_pending_copy and not self._writing_checkpoint:
            with self._lock:
                self._recovery_log.mark_written(STAGE_CALL)
        if self._recovery_log.is_copy_due:
            self._copy_state()
        return answers

    def snapshot_weights(self, version: int) -> None:
        change = RankCall(SNAPSHOT_CALL, (version,))
        self._call_with_restarts(lambda calls: self._make_call(calls, change), change)

    def stage_checkpoint(self) -> None:
        change = RankCall(STAGE_CALL)
        self._call_with_restarts(lambda calls: self._make_call(calls, change), change)

    def set_weight_transport(self, backend: str) -> None:
        """See `LocalRank.set_weight_transport`: ranks that are all on this host write one file together. Of ranks on several
        hosts the first gathers the whole, and writes it."""
        together = self._ranks.is_one_host
        self._transport = backend
        if backend == "nccl":  # engines would wait for what the lost ranks were to send
            with self._lock:
                self._recovery_log.disable()
        self._call_all("set_weight_transport", backend, together)
        if together:
            folder, deltas = get_weights_directory(self._config), backend == "tcp"
            self._publisher = ShardedVersionStore(
                folder, self._call_writers, len(self.processes), deltas=deltas, world=self._world
            )

    def write_version(self, versions_in_use: Sequence[int] = ()) -> TransferOffer:
        """See `LocalRank.write_version`: each rank writes what it hands in. By NCCL the first one sends it, from its GPU."""
        publication = self._call_with_restarts(lambda calls: self._write_version(calls, versions_in_use))
        with self._lock:
            self._recovery_log.mark_written(SNAPSHOT_CALL)
            with contextlib.suppress(LearnerError):  # one that is lost has let go of it
                self._ranks.calls.call_all("call_method", "discard_snapshot", lane=WRITE_LANE)
        return publication

    def _write_version(self, calls: RankCalls, versions_in_use: Sequence[int]) -> TransferOffer:
        if self._publisher is None:
            writing = calls.begin_call(0, "call_method", "write_version", versions_in_use, lane=WRITE_LANE)
            return calls.wait_all([writing], self._version_write_seconds, independent=True)[0]
        publication = self._publisher.publish_shares(versions_in_use)
        if self._transport == "nccl":
            (publication,) = calls.wait_all(
                [calls.begin_call(0, "call_method", "announce_version", publication.manifest, lane=WRITE_LANE)]
            )
        return publication

    def _call_writers(self, name: str, args_by_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The method `name` of every rank, in its thread for writing, each with arguments of its own."""
        calls = self._ranks.calls
        begun = [
            calls.begin_call(rank, "call_method", name, *args, lane=WRITE_LANE)
            for rank, args in enumerate(args_by_rank)
        ]
        return calls.wait_all(begun, self._version_write_seconds, independent=True)

    def write_checkpoint(self, directory: Path) -> list[FileEntry]:
        """See `LocalRank.write_checkpoint`: each rank writes its own file."""
        timeout, files = self._checkpoint_write_seconds, self._world.files

        def write(calls: RankCalls) -> list[FileEntry]:
            for name in files.list_names(directory):  # what ranks that were lost began to write
                files.remove(directory / name)
            written = calls.call_all(
                "call_method", "write_checkpoint", directory, lane=CHECKPOINT_LANE, timeout=timeout, independent=True
            )
            return [record for records in written for record in records]

        self._writing_checkpoint = True
        try:
            return self._call_with_restarts(write)
        finally:
            with self._lock:
                self._writing_checkpoint = False
                self._recovery_log.mark_written(STAGE_CALL)

    def close(self) -> None:
        """End the ranks' processes."""
        self._closed = True
        self._ranks.calls.kill_ranks()
        if self._publisher is not None:
            self._publisher.close()

    # -- if one is lost --------------------------------------------------------------------------------------------

    def _copy_state(self) -> None:
        """Have every rank copy its state to where it outlives the rank: what an actor's call returns belongs to who called, and
        is in shared memory of the actor's host."""
        ranks, calls = self._ranks, self._ranks.calls
        try:
            if not self._copies_fit(calls):
                return
            begun = [calls.begin_call(rank, "call_method", "copy_for_recovery") for rank in range(len(ranks.processes))]
            calls.wait_all(begun)
        except RankLost as lost:
            return self._restart_ranks(ranks, lost)  # the next step is followed by a copy
        with self._lock:
            if ranks is self._ranks:
                self._recovery_log.set_copies(begun)

    def _copies_fit(self, calls: RankCalls) -> bool:
        """Whether two copies do; asked until there is one."""
        if not isinstance(self._recovery_log.base, tuple):
            nbytes, host = sum(calls.call_all("call_method", "estimate_copy_bytes")), self.processes[0][1]
            store = next(
                (node.object_store_bytes for node in self._world.actors.list_nodes() if node.name == host), math.inf
            )
            if 2 * nbytes > store:
                self._report_event("ranks_not_copied", bytes=nbytes, store=int(store), hint=OBJECT_STORE_HINT)
                with self._lock:
                    self._recovery_log.disable()
        return bool(self._recovery_log.copy_steps)

    def _restart_ranks(self, lost_ranks: RankProcesses, lost: RankLost) -> None:
        """Start all ranks again, unless another thread has. Raises `RankLost` if that is not possible."""
        with self._lock:
            if self._ranks is not lost_ranks or self._closed:
                if self._closed:
                    raise lost
                return
            clock, log = self._world.clock.monotonic, self._recovery_log
            began, reason = clock(), str(lost).partition("\n")[0]
            pids = [pid for pid, _ in lost_ranks.processes]
            self._report_event("rank_lost", error=reason, pids=pids, restarts=self.restarts)
            while True:
                if (
                    not log.copy_steps
                    or self._start_ranks is None
                    or self._consecutive_restarts >= self._config.supervise.max_rank_restarts
                ):
                    raise lost
                for process in lost_ranks.processes:
                    self._world.processes.kill_process(
                        *process
                    )  # one that was paused gets no request, and keeps its place
                self._consecutive_restarts += 1
                try:
                    ranks = self._restore_ranks(self._start_ranks())
                    break
                except LearnerError as error:
                    lost = RankLost(f"{reason}; and the ranks could not be started again: {error}")
            self._ranks = ranks
            self.restarts += 1
            self._report_event(
                "ranks_restarted",
                pids=[pid for pid, _ in ranks.processes],
                steps_again=log.repeated_steps,
                seconds=round(clock() - began, 3),
                restarts=self.restarts,
            )

    def _restore_ranks(self, ranks: RankProcesses) -> RankProcesses:
        """With the state, and the copies that wait to be written, of those that were lost."""
        calls, log = ranks.calls, self._recovery_log
        if self._transport:
            calls.call_all("call_method", "set_weight_transport", self._transport, True)
        if isinstance(log.base, Path):
            calls.call_all("call_method", "restore_checkpoint", log.base)
        elif log.base is not None:
            calls.call_all("call_method", "restore_from_copies", *log.base)
        for change in log.calls:
            self._make_call(calls, change)
        return ranks


OBJECT_STORE_HINT = (
    "the host's object store of Ray cannot hold two copies of the ranks' state: if a rank is lost, the run restarts from its "
    "newest checkpoint. Start Ray with a larger --object-store-memory, or set supervise.copy_steps=0"
)


def load_learner(
    config: Config,
    model_path: Path,
    run_dir: Path,
    placements: Sequence[ActorOptions] = (),
    world: World = REAL_WORLD,
    report_event: EventReporter = _ignore_event,
) -> LocalRank | RemoteRanks:
    """One rank here, or several as actors; see their `load`."""
    if config.learner.parallel.world_size == 1:
        return LocalRank.load(config, model_path, world)
    return RemoteRanks.load(config, model_path, run_dir, placements, world, report_event)
