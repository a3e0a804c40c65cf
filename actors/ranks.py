"""The learner's ranks: one in this process or several as actors, called as one, with a log to do again after a loss."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from r3async.checkpoint import FileEntry, open_checkpoint
from r3async.config import Config, config_from_dict, config_to_dict
from r3async.data.models import UNKNOWN_SIZES, WriteSizes, read_write_sizes
from r3async.learner import LearnerError, MinibatchResult, sum_stage_digests
from r3async.learner.batch import MicroBatch
from r3async.weights.manifest import TensorEntry, WeightManifest
from r3async.weights.publish import (
    HostWeights,
    SafetensorsEncoder,
    ShardedVersionStore,
    ShareDescription,
    TransferOffer,
    WeightSender,
    copy_share_to_host,
    copy_to_host,
    write_delta_part,
    write_share_region,
)
from r3async.world import ActorLostError, ActorOptions, ActorRef, Actors, World
from r3async.world.cluster import find_interface, use_interface
from r3async.world.files import is_disk_error
from r3async.world.processes import pause_garbage_collector
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage

from .delivery import UnsetSender, build_weight_sender, get_weights_directory
from .placement import CHECKPOINT_LANE, WRITE_LANE, rank_placement
from .process import ActorNotLoaded, prepare_process

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import RankCopy, RankState
    from r3async.learner.backend import LearnerBackend


class LocalRank:
    """A backend and the sender of its weights. All calls must come from the thread that made it, but for `write_version` and
    `write_checkpoint`."""

    processes: Sequence[tuple[int, str]] = ()
    """Further ones, which compute for this one: process ids, and their hosts."""
    restarts = 0
    """Of these."""

    def __init__(
        self, config: Config, backend: LearnerBackend, world: World = REAL_WORLD, teacher: LearnerBackend | None = None
    ):
        """`teacher`: see `algorithm.distillation`."""
        import torch

        self._config, self._world, self.backend, self._teacher = config, world, backend, teacher
        self._sender: WeightSender = UnsetSender()
        self._dtype = getattr(torch, config.generator.dtype)
        self._snapshot: tuple[int, HostWeights] | None = None
        self._writes_share = False
        self._snapshot_memory: HostWeights | None = None
        """What snapshots are copied into; made by the first."""
        self._staged_checkpoint: RankState | None = None

    @classmethod
    def load(cls, config: Config, model_path: Path, world: World = REAL_WORLD) -> LocalRank:
        """Load the model, with the other ranks where there are any. Raises `LearnerError`."""
        with pause_garbage_collector():
            import torch

            torch.set_num_threads(config.learner.threads)
            from r3async.learner import build_learner
            from r3async.learner.distillation import load_teacher

            backend = build_learner(config, model_path, world.files)
        return cls(config, backend, world, load_teacher(config, model_path))

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    def list_gpus(self) -> list[str]:
        """The GPU that weights are sent from, by its uuid; empty without CUDA."""
        import torch

        return [str(torch.cuda.get_device_properties(0).uuid)] if torch.cuda.is_available() else []

    def train_minibatches(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """`trainer.train_minibatches` of minibatches that have micro-batches for one data-parallel rank: this one."""
        from r3async.learner.trainer import train_minibatches

        shares = [mine for (mine,) in minibatches]
        return train_minibatches(self.backend, shares, version=version, trace=trace, teacher=self._teacher)

    def train_supervised(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """`supervised.run_supervised_step` with the micro-batches of one data-parallel rank: this one."""
        from r3async.learner.supervised import run_supervised_step

        (mine,) = shares
        return run_supervised_step(self.backend, mine)

    def compute_supervised_loss(self, shares: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
        """`supervised.compute_supervised_loss` in the same way."""
        from r3async.learner.supervised import compute_supervised_loss

        (mine,) = shares
        return compute_supervised_loss(self.backend, mine)

    def count_updates(self) -> int:
        """Optimizer updates that made the weights, those before a resume included."""
        return self.backend.update_count

    def score_tokens(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """See `LearnerBackend.score_sequence`."""
        with stage("probe"):
            return self.backend.score_sequence(token_ids, temperature)

    def set_weight_transport(self, backend: str, write_together: bool = False) -> None:
        """Which transport `write_version` gives the weights to; see `delivery.build_weight_sender`. `write_together`: ranks
        of one host write one file."""
        self._sender, self._writes_share = build_weight_sender(self._config, backend, self._world), write_together

    def snapshot_weights(self, version: int) -> None:
        """Copy the weights to host memory as `version`, for `write_version`. Collective; later steps do not change the copy."""
        if self._snapshot is not None:
            raise LearnerError(
                f"version {self._snapshot[0]} has not been written: version {version} has to wait for it"
            )
        with stage("snapshot"):
            if self._writes_share:
                self._snapshot_memory = copy_share_to_host(
                    self.backend.iter_full_weights, self._snapshot_memory, self._config.weights.bucket_bytes
                )
            elif tensors := self.backend.export_weights(copy=False):  # one rank hands them in
                self._snapshot_memory = copy_to_host(tensors, self._snapshot_memory)
            self._snapshot = None if self._snapshot_memory is None else (version, self._snapshot_memory)

    def discard_snapshot(self) -> None:
        """Of the snapshot, if there is one: it is written already."""
        self._snapshot = None

    def write_version(self, versions_in_use: Sequence[int] = ()) -> TransferOffer:
        """Write the snapshot for the engines and let go of it; see `WeightSender.publish_tensors`. From any thread, beside a
        step. If it could not be written it stays, to be written again."""
        publication = self._sender.publish_tensors(*self._current_snapshot, self._dtype, versions_in_use)
        self._snapshot = None
        return publication

    def describe_snapshot(self) -> ShareDescription:
        """Of the snapshot: this rank's part, see `ShardedVersionStore`."""
        version, share = self._current_snapshot
        return ShareDescription(version, share.describe_tensors(self._dtype))

    def write_snapshot(self, path: str, start: int) -> dict[str, TensorEntry]:
        """Write the snapshot into its region of the file. It stays until all ranks have: `discard_snapshot`."""
        version, share = self._current_snapshot
        bucket_bytes = self._config.weights.bucket_bytes
        return (
            write_share_region(path, start, SafetensorsEncoder(version, share, self._dtype, bucket_bytes))
            if share
            else {}
        )

    def write_delta_part(
        self, before: WeightManifest, manifest: WeightManifest, first: int, last: int, path: str
    ) -> None:
        """A part of a delta; see `write_delta_part`."""
        write_delta_part(before, manifest, first, last, path, self._world)

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Have a version that the ranks wrote sent from this rank's GPU."""
        return self._sender.announce_version(manifest)

    @property
    def _current_snapshot(self) -> tuple[int, HostWeights]:
        if self._snapshot is None:
            raise LearnerError("there is no snapshot to write")
        return self._snapshot

    def stage_checkpoint(self) -> None:
        """Copy what a checkpoint needs to host memory, for `write_checkpoint`; see `LearnerBackend.capture_state`."""
        with stage("checkpoint"):
            self._staged_checkpoint = self.backend.capture_state()

    def write_checkpoint(self, directory: Path) -> list[FileEntry]:
        """Write what is held into `directory` and let go of it, whatever comes of it. From any thread, beside a step."""
        from r3async.checkpoint.tensors import write_rank_file

        held, self._staged_checkpoint = self._staged_checkpoint, None
        if held is None:
            raise LearnerError("nothing is held for a checkpoint")
        return [write_rank_file(directory, held, files=self._world.files)]

    def restore_checkpoint(self, checkpoint: Path) -> None:
        """Continue from a checkpoint that has been verified; see `LearnerBackend.restore_state`."""
        self.backend.restore_state(
            open_checkpoint(checkpoint, check_tensors=False, files=self._world.files).open_learner_state()
        )

    def estimate_copy_bytes(self) -> int:
        """About what `copy_for_recovery` takes: a weight and two moments in float32."""
        places = [place for held in self.backend.trained_slices() if held.is_writer for place in held.places]
        return sum(12 * math.prod(place.size) for place in places)

    def copy_for_recovery(self) -> RankCopy:
        """What `stage_checkpoint` copies, for ranks that are started in the place of this one and of the others."""
        from r3async.checkpoint.tensors import RankCopy

        with stage("checkpoint"):
            return RankCopy.from_state(self.backend.capture_state())

    def restore_from_copies(self, *parts: RankCopy) -> None:
        """Continue from what every rank copied after the same step."""
        from r3async.checkpoint.tensors import LearnerStateReader

        self.backend.restore_state(LearnerStateReader(parts, files=self._world.files))

    def save_model(self, directory: Path) -> None:
        """See `LearnerBackend.save_pretrained`."""
        self.backend.save_pretrained(directory)

    def close(self) -> None:
        """Release groups, and the published weights. Nothing must be being written."""
        self._sender.close()
        self.backend.close()


class RankActor:
    """One rank of several, in a process of its own."""

    def __init__(self, world: World, rank: int, config: dict[str, Any], model_path: str, run_dir: str):
        self.world, self._lock = world, prepare_process(world, Path(run_dir), f"learner-rank-{rank}")
        self._rank, self._config, self._model_path = rank, config_from_dict(config), Path(model_path)
        self._stores: list[Any] = []
        """Over which the ranks meet, if it was made here."""
        self._loaded: LocalRank | None = None

    @property
    def _learner(self) -> LocalRank:
        if self._loaded is None:
            raise ActorNotLoaded(f"rank {self._rank} of the learner has no model yet")
        return self._loaded

    def describe_process(self) -> tuple[int, str]:
        """Process id and host."""
        return self.world.processes.pid, self.world.processes.host

    def open_store(self, one_host: bool) -> tuple[str, int]:
        """Address and port of a store over which the ranks meet; it is made here. `one_host`: all of them are on this host."""
        import torch.distributed as dist

        interface = self._config.cluster.interface
        address = "127.0.0.1" if one_host and not interface else self.world.actors.host_address(interface)
        self._stores.append(dist.TCPStore(address, 0, is_master=True, wait_for_workers=False))
        return address, self._stores[0].port

    def load_model(self, address: str, port: int, one_host: bool) -> int:
        """Meet the other ranks at the store and load the model; returns the vocabulary's size."""
        import torch
        import torch.distributed as dist

        cuda, learner = torch.cuda.is_available(), self._config.learner
        self._choose_interface(one_host)
        timeout = datetime.timedelta(seconds=learner.collective_timeout)
        store = self._stores[0] if self._stores else dist.TCPStore(address, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=self._rank,
            world_size=learner.parallel.world_size,
            timeout=timeout,
        )
        self._loaded = LocalRank.load(self._config, self._model_path, self.world)
        return self._learner.vocab_size

    def _choose_interface(self, one_host: bool) -> None:
        """Collectives use the one that is configured; between hosts, else, that by which the cluster knows this host: what they
        would choose themselves may be one of the containers'."""
        chosen, actors = self._config.cluster.interface, self.world.actors
        if chosen:
            actors.host_address(chosen)  # it is there
        name = chosen or ("" if one_host else find_interface(actors.host_address()))
        if name:
            use_interface(name)

    def call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of this rank's learner: `write_version` in the lane `WRITE_LANE`, `write_checkpoint` in `CHECKPOINT_LANE`."""
        return getattr(self._learner, name)(*args, **kwargs)


# The learner's ranks, each an actor of its own, driven as one, and started again if one is lost.


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


# The actors of a learner's ranks: how they are started, and called.


LOSS_NOTICE_SECONDS = 10.0
"""A rank whose connection broke learns of it at once; that the process at its other end has ended is known a little later."""
COLLECTIVE_ERRORS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What a collective operation raises if another rank does not take part in it contains one of these."""


class RankLost(LearnerError, ActorLostError):
    """The process of a rank was lost, or stopped answering, and with it what all ranks had in memory."""


class RankCalls:
    """Calls on the ranks' actors. A rank that fails leaves the others waiting for it in a collective operation: the first failure
    ends all of them and is raised as `LearnerError`; as `RankLost` where ranks that are started again may do better."""

    def __init__(self, actors: Actors, ranks: Sequence[ActorRef]):
        self._actors, self.ranks = actors, ranks

    def begin_call(self, rank: int, method: str, *args: Any, lane: str = "", **kwargs: Any) -> Any:
        """Begin a method of the actor of `rank`."""
        return self._actors.begin_call(self.ranks[rank], method, *args, concurrency_group=lane, **kwargs)

    def call_all(
        self,
        method: str,
        *args: Any,
        lane: str = "",
        timeout: float | None = None,
        independent: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """What the actors' method returns, on every rank."""
        calls = [self.begin_call(rank, method, *args, lane=lane, **kwargs) for rank in range(len(self.ranks))]
        return self.wait_all(calls, timeout, independent=independent)

    def wait_all(self, calls: Sequence[Any], timeout: float | None = None, *, independent: bool = False) -> list[Any]:
        """What the calls return; the first is of rank 0, and so on. `independent`: they need no other rank, so one that fails
        ends nothing, and what it failed with is raised when all have ended; where its disk did not take something, as
        `OSError`."""
        waiting, failed = list(calls), list[Exception]()
        while waiting:
            ready, waiting = self._actors.wait_for_call(waiting, timeout)
            if not ready:
                self.kill_ranks()
                raise RankLost(f"{len(waiting)} ranks of the learner did not answer within {timeout:.0f} s")
            for call in ready:
                try:
                    self._actors.get(call)
                except Exception as error:
                    if independent and is_disk_error(error):
                        failed.append(error)
                        continue
                    cause = self._find_cause(calls.index(call), error, {calls.index(other): other for other in waiting})
                    if not independent or isinstance(cause, RankLost):
                        self.kill_ranks()
                        raise cause from error
                    failed.append(cause)
        if failed:
            raise failed[0]
        return [self._actors.get(call) for call in calls]

    def _find_cause(self, rank: int, error: Exception, waiting: dict[int, Any]) -> LearnerError:
        """Of the failure of `rank`: if that only lost its connection to another one, which of those still `waiting` was lost."""
        if not isinstance(error, ActorLostError):
            if not any(words in str(error) for words in COLLECTIVE_ERRORS):
                return LearnerError(f"rank {rank} of the learner failed: {error}")
            while waiting:
                ready, _ = self._actors.wait_for_call(list(waiting.values()), LOSS_NOTICE_SECONDS)
                if not ready:
                    break
                for other in [r for r, call in waiting.items() if call in ready]:
                    try:
                        self._actors.get(waiting.pop(other))
                    except ActorLostError as lost:
                        return RankLost(f"rank {other} of the learner was lost: {lost}")
                    except Exception:  # it lost its connection, too
                        continue
            return RankLost(f"rank {rank} of the learner waited in vain for another one: {error}")
        return RankLost(f"rank {rank} of the learner was lost: {error}")

    def put_shared(self, value: Any) -> Any:
        """A reference to `value`, which many calls may be given."""
        return self._actors.put(value)

    def kill_ranks(self) -> None:
        """End the ranks' processes."""
        for rank in self.ranks:
            self._actors.kill_actor(rank)


@dataclass(frozen=True, eq=False)
class RankProcesses:
    """One start of the ranks. `processes`: id and host of each."""

    calls: RankCalls
    vocab_size: int
    processes: Sequence[tuple[int, str]]

    @property
    def is_one_host(self) -> bool:
        return len({host for _, host in self.processes}) == 1


def start_ranks(
    actor_class: type[RankActor],
    config: Config,
    model_path: Path,
    run_dir: Path,
    placements: Sequence[ActorOptions],
    world: World,
) -> RankProcesses:
    """At these `placements`, or all beside this process; they meet and load the model. Blocking. Raises `LearnerError`."""
    learner, plain = config.learner, config_to_dict(config)
    actors = [
        world.actors.spawn_actor(
            actor_class,
            rank,
            plain,
            str(model_path),
            str(run_dir),
            name=f"learner-rank-{rank}",
            actor_options=place,
        )
        for rank, place in enumerate(placements or [rank_placement(config)] * learner.parallel.world_size)
    ]
    calls = RankCalls(world.actors, actors)
    processes = calls.call_all("describe_process", timeout=learner.start_timeout)
    alone = len({host for _, host in processes}) == 1
    ((address, port),) = calls.wait_all([calls.begin_call(0, "open_store", alone)], learner.start_timeout)
    loaded = calls.call_all("load_model", address, port, alone, timeout=learner.start_timeout)
    return RankProcesses(calls, loaded[0], processes)


# What a learner's ranks did since a state of theirs that is kept elsewhere: ranks that are started again from that state, and do
# the same again, have the state that the lost ones had. Pure.


SNAPSHOT_CALL, STAGE_CALL = "snapshot_weights", "stage_checkpoint"
"""Calls after which every rank has a copy in its own memory, until it is written."""


@dataclass(frozen=True, eq=False)
class RankCall:
    """A call that every rank made. `is_divided`: of what is `args`, each data-parallel rank gets its own; otherwise all get
    all."""

    name: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    is_divided: bool = False

    @property
    def needs_write(self) -> bool:
        """What it copied is to be written."""
        return self.name in (SNAPSHOT_CALL, STAGE_CALL)


class RecoveryLog:
    """A base, and the changes since, in order.

    `base`: copies of their state that the ranks made, one each; the path of a checkpoint; None for the start model. `copy_steps`:
    steps between two copies; 0 keeps nothing. The base does not move past a change whose copy is to be written: ranks that are
    started again have to copy those very weights. The copy of the state waits then, and no other is due. So there are at most
    two.
    """

    def __init__(self, copy_steps: int):
        self.copy_steps = copy_steps
        self.base: Path | tuple[Any, ...] | None = None
        self.calls: list[RankCall] = []
        self._pending_copy: tuple[int, tuple[Any, ...]] | None = None
        """Of the state after so many of the changes."""

    @property
    def repeated_steps(self) -> int:
        """That ranks which are started again have to make again."""
        return sum(not change.needs_write for change in self.calls)

    @property
    def is_copy_due(self) -> bool:
        """The ranks are to copy their state, after the last change."""
        return bool(self.copy_steps) and self._pending_copy is None and self.repeated_steps >= self.copy_steps

    @property
    def has_pending_copy(self) -> bool:
        """There is a copy that the base cannot move to yet."""
        return self._pending_copy is not None

    def add(self, change: RankCall) -> None:
        if self.copy_steps:
            self.calls.append(change)

    def set_checkpoint(self, checkpoint: Path) -> None:
        """The ranks have the state of that checkpoint."""
        self.base, self._pending_copy = checkpoint, None
        self.calls.clear()

    def set_copies(self, copies: Sequence[Any]) -> None:
        """Of the state after all changes so far."""
        self._pending_copy = len(self.calls), tuple(copies)
        self._advance_base()

    def mark_written(self, name: str) -> None:
        """What the oldest change of that name copied is written, or never will be."""
        found = next((i for i, change in enumerate(self.calls) if change.name == name), None)
        if found is None:
            return
        del self.calls[found]
        if self._pending_copy is not None and found < self._pending_copy[0]:
            self._pending_copy = self._pending_copy[0] - 1, self._pending_copy[1]
        self._advance_base()

    def _advance_base(self) -> None:
        if self._pending_copy is None:
            return
        count, copies = self._pending_copy
        if not any(change.needs_write for change in self.calls[:count]):
            self.base, self._pending_copy = copies, None
            del self.calls[:count]

    def disable(self) -> None:
        """Keep nothing any more."""
        self.copy_steps, self.base, self._pending_copy = 0, None, None
        self.calls.clear()
