"""The learner's ranks: one in this process, or several actors that are called as one, with a log of what they have to
repeat after a loss."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np

from r3async.checkpoint import FileEntry, open_checkpoint
from r3async.config import Config, config_from_dict, config_to_dict
from r3async.data.write_sizes import UNKNOWN_SIZES, WriteSizes, read_write_sizes
from r3async.learner import LearnerError, MinibatchResult, sum_stage_digests
from r3async.learner.micro_batches import MicroBatch
from r3async.weights.host_weights import HostWeights, SafetensorsEncoder, copy_share_to_host, copy_to_host
from r3async.weights.manifest import TensorEntry, WeightManifest
from r3async.weights.sharded_store import (
    PartFolder,
    ShardedVersionStore,
    ShareDescription,
    write_delta_part,
    write_share_region,
)
from r3async.weights.tcp import PartServer
from r3async.weights.weight_transfer import PublishedPart, TransferOffer, WeightSender
from r3async.world import ActorLostError, ActorOptions, ActorRef, Actors, EventReporter, World, ignore_event
from r3async.world.curve_keys import ServerKeys
from r3async.world.disk_retries import is_disk_error
from r3async.world.interfaces import find_interface, use_interface
from r3async.world.processes import pause_garbage_collector
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage

from .delivery import UnsetSender, build_part_server, build_weight_sender, get_weights_directory
from .placement import CHECKPOINT_LANE, WRITE_LANE, rank_placement
from .process import ActorNotLoaded, prepare_process

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import RankCopy, RankState
    from r3async.learner.backend import LearnerBackend


class LocalRank:
    """A rank in this process: a backend and the sender of its weights. All calls must come from the thread that made
    it, except for `write_version` and `write_checkpoint`."""

    processes: Sequence[tuple[int, str]] = ()
    """Process id and host of each further process that computes for this one."""
    restarts = 0
    """Number of restarts of these processes."""

    def __init__(
        self, config: Config, backend: LearnerBackend, world: World = REAL_WORLD, teacher: LearnerBackend | None = None
    ):
        """Wrap a loaded `backend`. `teacher` is the teacher model of `algorithm.distillation`."""
        import torch

        self._config, self._world, self.backend, self._teacher = config, world, backend, teacher
        self._sender: WeightSender = UnsetSender()
        self._dtype = getattr(torch, config.generator.dtype)
        self._snapshot: tuple[int, HostWeights] | None = None
        self._writes_share = False
        self._snapshot_memory: HostWeights | None = None
        """Memory that snapshots are copied into; the first snapshot allocates it."""
        self._staged_checkpoint: RankState | None = None
        self._staged_recovery_copy: RankCopy | None = None

    @classmethod
    def load(cls, config: Config, model_path: Path, world: World = REAL_WORLD) -> LocalRank:
        """Load the model, together with the other ranks if there are any. Raises `LearnerError`."""
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
        """Return the uuid of the GPU from which weights are sent; an empty list without CUDA."""
        import torch

        return [str(torch.cuda.get_device_properties(0).uuid)] if torch.cuda.is_available() else []

    def train_minibatches(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """Call `trainer.train_minibatches` with minibatches whose micro-batches are for one data-parallel rank, this
        one."""
        from r3async.learner.trainer import train_minibatches

        shares = [mine for (mine,) in minibatches]
        return train_minibatches(self.backend, shares, version=version, trace=trace, teacher=self._teacher)

    def train_supervised(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """Call `supervised.run_supervised_step` with the micro-batches of one data-parallel rank, this one."""
        from r3async.learner.supervised import run_supervised_step

        (mine,) = shares
        return run_supervised_step(self.backend, mine)

    def compute_supervised_loss(self, shares: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
        """Call `supervised.compute_supervised_loss` with the micro-batches of one data-parallel rank, this one."""
        from r3async.learner.supervised import compute_supervised_loss

        (mine,) = shares
        return compute_supervised_loss(self.backend, mine)

    def count_updates(self) -> int:
        """Return the number of optimizer updates that made the weights, including those before a resume."""
        return self.backend.update_count

    def score_tokens(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Call `LearnerBackend.score_sequence`."""
        with stage("probe"):
            return self.backend.score_sequence(token_ids, temperature)

    def set_weight_transport(
        self, backend: str, write_together: bool = False, sender_keys: ServerKeys | None = None
    ) -> None:
        """Set the transport to which `write_version` gives the weights; see `delivery.build_weight_sender`. With
        `write_together`, several ranks write a version. One alone needs no `sender_keys`: the learner serves it."""
        self._writes_share = write_together
        if not write_together or backend == "nccl":  # otherwise the learner offers what they wrote
            self._sender = build_weight_sender(self._config, backend, self._world)

    def snapshot_weights(self, version: int) -> None:
        """Copy the weights to host memory as `version`, for `write_version`. Collective. Later steps do not change the
        copy."""
        if self._snapshot is not None:
            raise LearnerError(
                f"version {self._snapshot[0]} has not been written: version {version} has to wait for it"
            )
        with stage("snapshot"):
            if self._writes_share:
                self._snapshot_memory = copy_share_to_host(
                    self.backend.iter_full_weights, self._snapshot_memory, self._config.weights.bucket_bytes
                )
            else:
                self._snapshot_memory = copy_to_host(self.backend.export_weights(copy=False), self._snapshot_memory)
            self._snapshot = version, self._snapshot_memory

    def discard_snapshot(self) -> None:
        """Drop the snapshot, if there is one: it is written already."""
        self._snapshot = None

    def write_version(self, versions_in_use: Sequence[int] = ()) -> TransferOffer:
        """Write the snapshot for the engines and drop it; see `WeightSender.publish_tensors`. May be called from any
        thread, beside a step. A snapshot that could not be written stays, so that it can be written again."""
        publication = self._sender.publish_tensors(*self._current_snapshot, self._dtype, versions_in_use)
        self._snapshot = None
        return publication

    def describe_snapshot(self) -> ShareDescription:
        """Describe this rank's part of the snapshot; see `ShardedVersionStore`."""
        version, share = self._current_snapshot
        return ShareDescription(version, share.describe_tensors(self._dtype))

    def write_snapshot(self, path: str, start: int) -> dict[str, TensorEntry]:
        """Write the snapshot into its region of the file. It stays until all ranks have written theirs; then
        `discard_snapshot` drops it."""
        version, share = self._current_snapshot
        bucket_bytes = self._config.weights.bucket_bytes
        return (
            write_share_region(path, start, SafetensorsEncoder(version, share, self._dtype, bucket_bytes))
            if share
            else {}
        )

    def write_delta_part(self, before: str, path_now: str, first: int, last: int, path: str) -> None:
        """Write a part of a delta; see `sharded_store.write_delta_part`."""
        write_delta_part(before, path_now, first, last, path, self._world)

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Announce a version that the ranks wrote, to be sent from this rank's GPU."""
        return self._sender.announce_version(manifest)

    @property
    def _current_snapshot(self) -> tuple[int, HostWeights]:
        if self._snapshot is None:
            raise LearnerError("there is no snapshot to write")
        return self._snapshot

    def stage_checkpoint(self) -> None:
        """Copy the state for a checkpoint to host memory, for `write_checkpoint`; see
        `LearnerBackend.capture_state`."""
        with stage("checkpoint"):
            self._staged_checkpoint = self.backend.capture_state()

    def write_checkpoint(self, directory: Path) -> list[FileEntry]:
        """Write the staged state into `directory`, and drop it even if that fails. May be called from any thread,
        beside a step."""
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
        """Estimate the bytes of `take_recovery_copy`: a weight and two moments in float32."""
        places = [place for held in self.backend.trained_slices() if held.is_writer for place in held.places]
        return sum(12 * math.prod(place.size) for place in places)

    def stage_recovery_copy(self) -> None:
        """Copy what `stage_checkpoint` copies, for `take_recovery_copy`."""
        from r3async.checkpoint.tensors import RankCopy

        with stage("checkpoint"):
            self._staged_recovery_copy = RankCopy.from_state(self.backend.capture_state())

    def take_recovery_copy(self) -> RankCopy:
        """Hand over the copy, for ranks that are started in place of this one and the others. May be called from any
        thread, beside a step."""
        held, self._staged_recovery_copy = self._staged_recovery_copy, None
        if held is None:
            raise LearnerError("nothing is held for a restart")
        return held

    def restore_from_copies(self, *parts: RankCopy) -> None:
        """Continue from the copies that every rank made after the same step."""
        from r3async.checkpoint.tensors import LearnerStateReader

        self.backend.restore_state(LearnerStateReader(parts, files=self._world.files))

    def save_model(self, directory: Path) -> None:
        """Call `LearnerBackend.save_pretrained`."""
        self.backend.save_pretrained(directory)

    def close(self) -> None:
        """Release process groups and the published weights. No write may be in progress."""
        self._sender.close()
        self.backend.close()


class RankActor:
    """The actor of one rank of several, in a process of its own."""

    def __init__(self, world: World, rank: int, config: dict[str, Any], model_path: str, run_dir: str):
        self.world, self._lock = world, prepare_process(world, Path(run_dir), f"learner-rank-{rank}")
        self._rank, self._config, self._model_path = rank, config_from_dict(config), Path(model_path)
        self._stores: list[Any] = []
        """Store over which the ranks meet, if it was made here."""
        self._run_dir = run_dir
        self._folder: PartFolder | None = None
        """Folder of this host's parts of versions, if this rank is the first one of its host."""
        self._sender: ActorRef | None = None
        """The actor that serves these parts."""
        self._loaded: LocalRank | None = None

    @property
    def _learner(self) -> LocalRank:
        if self._loaded is None:
            raise ActorNotLoaded(f"rank {self._rank} of the learner has no model yet")
        return self._loaded

    def describe_process(self) -> tuple[int, str]:
        """Return the process id and host."""
        return self.world.processes.pid, self.world.processes.host

    def open_store(self, one_host: bool) -> tuple[str, int]:
        """Make a store over which the ranks meet, and return its address and port. `one_host` is True if all ranks are
        on this host."""
        import torch.distributed as dist

        interface = self._config.cluster.interface
        address = "127.0.0.1" if one_host and not interface else self.world.actors.host_address(interface)
        self._stores.append(dist.TCPStore(address, 0, is_master=True, wait_for_workers=False))
        return address, self._stores[0].port

    def load_model(self, address: str, port: int, one_host: bool) -> int:
        """Meet the other ranks at the store and load the model. Returns the size of the vocabulary."""
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
        """Set the network interface of collectives: the configured one or, between hosts, the one by which the cluster
        knows this host. The one that they would choose themselves may belong to a container."""
        chosen, actors = self._config.cluster.interface, self.world.actors
        if chosen:
            actors.host_address(chosen)  # raises if there is no such interface
        name = chosen or ("" if one_host else find_interface(actors.host_address()))
        if name:
            use_interface(name)

    def call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this rank's `LocalRank`; see `RankCalls.call_local_ranks`. `write_version` has to be called
        in the lane `WRITE_LANE`, and `write_checkpoint` in `CHECKPOINT_LANE`."""
        return getattr(self._learner, name)(*args, **kwargs)

    def call_part_folder(self, name: str, *args: Any) -> Any:
        """Call a method of the folder of this host's parts, in the lane `WRITE_LANE`."""
        if self._folder is None:
            self._folder = PartFolder(get_weights_directory(self._config), self.world)
        return getattr(self._folder, name)(*args)

    def serve_parts(self, keys: ServerKeys, paths: dict[str, str]) -> str:
        """Have this host's sender serve files by the names of their streams, in the lane `WRITE_LANE`.

        A sender that does not answer is replaced by a new one, which does not serve what the other one did. Returns its
        address.
        """
        actors = self.world.actors
        if self._sender is not None:
            try:
                return self._call_sender(paths, SENDER_ANSWER_SECONDS)
            except (ActorLostError, TimeoutError):
                actors.kill_actor(self._sender)
        self._sender = actors.spawn_actor(
            PartSenderActor,
            config_to_dict(self._config),
            keys,
            self._run_dir,
            self._rank,
            name=f"learner-sender-{self._rank}",
            actor_options=SENDER_OPTIONS,
        )
        return self._call_sender(paths, self._config.learner.start_timeout)

    def _call_sender(self, paths: dict[str, str], timeout: float) -> str:
        assert self._sender is not None
        actors = self.world.actors
        return actors.get(actors.begin_call(self._sender, "serve_files", paths), timeout)


SENDER_OPTIONS = ActorOptions(0, same_node=True)
"""The options of a sender, beside the rank that starts it."""
SENDER_ANSWER_SECONDS = 10.0
"""Seconds in which a sender has to answer: it opens files, and does nothing else at that time."""


class PartSenderActor:
    """The actor that sends a host's parts of versions to other hosts. It has them from files, and no model.

    It is a process of its own, so that sending neither waits for a step nor holds one up, and its loss is not a rank's.
    """

    def __init__(self, world: World, config: dict[str, Any], keys: ServerKeys, run_dir: str, rank: int):
        self._world, self._config, self._keys = world, config_from_dict(config), keys
        self._lock = prepare_process(world, Path(run_dir), f"learner-sender-{rank}")
        self._server: PartServer | None = None

    async def serve_files(self, paths: dict[str, str]) -> str:
        """Serve files by the names of their streams. Returns the address."""
        if self._server is None:
            self._server = build_part_server(self._config, self._keys, self._world)
        self._server.serve_files(paths)
        return self._server.bind_socket()


# The learner's ranks as actors, which are called as one, and started again if one is lost.


R = TypeVar("R")


class RemoteRanks:
    """The ranks as actors, with the same calls as `LocalRank`, which are made on all ranks at once. The first rank
    answers for all; it is on this host.

    Ranks of one host are started again if one is lost. The caller waits meanwhile and notices nothing else. The ranks
    begin with the copies of their state that they made last (`supervise.copy_steps`), repeat the calls that came after
    these, and then the call during which one was lost. So the same weights follow, bit by bit, if the same computation
    gives the same bits. A call raises `RankLost` if they cannot be started again: ranks of several hosts,
    `weights.backend = "nccl"`, no copies, or one lost `supervise.max_rank_restarts` times without a step in between.
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
        """Lock on the log and on the present ranks. It is held while the ranks start again: who waits for it has to
        wait for them."""
        self._begun_copies: list[Any] = []
        """The calls that hand over the ranks' copies, while these are not all here."""
        self._closed = self._writing_checkpoint = False
        """Flags; `_writing_checkpoint` is True while the state that the ranks staged for a checkpoint is being
        written."""
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
        """Start the ranks at `placements`, or all of them beside this process. They meet and load the model. Blocking.
        Raises `LearnerError`."""
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

    @property
    def is_one_host(self) -> bool:
        return self._ranks.is_one_host

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call_with_restarts(self, call: Callable[[RankCalls], R], change: RankCall[Any] | None = None) -> R:
        """Return the result of `call`, which is repeated if a rank was lost. A `change` of the ranks' state is also
        repeated if they were restarted meanwhile, and is then added to the log."""
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

    def train_minibatches(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """Implement `trainer.LearnerRanks.train_minibatches`."""
        shares = [[[m[rank]] for m in minibatches] for rank in range(self._config.learner.parallel.dp)]
        answers = self._run_step(LocalRank.train_minibatches, shares, version=version, trace=trace)
        return [
            msgspec.structs.replace(
                results[0],
                traces=[t for result in results for t in result.traces],
                digests=sum_stage_digests([result.digests for result in results]),
            )
            for results in zip(*answers, strict=True)
        ]

    def train_supervised(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """Make a supervised step like `LocalRank.train_supervised`, with the micro-batches of every data-parallel
        rank."""
        return self._run_step(LocalRank.train_supervised, [[mine] for mine in shares])[0]

    def compute_supervised_loss(self, shares: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
        """Compute a supervised loss like `LocalRank.compute_supervised_loss`, with the micro-batches of every
        data-parallel rank."""
        call = self._divide_call(LocalRank.compute_supervised_loss, [[mine] for mine in shares])
        return self._call_with_restarts(lambda calls: self._make_call(calls, call))[0]

    def _divide_call(self, method: Callable[..., R], shares: Sequence[Any], **options: Any) -> RankCall[R]:
        shared = tuple(self._ranks.calls.put_shared(each) for each in shares)
        return RankCall(method, shared, options, is_divided=True)

    def _make_call(self, calls: RankCalls, call: RankCall[R]) -> list[R]:
        """Make a call on every rank and return all results."""
        if not call.is_divided:
            return calls.call_local_ranks(call.method, *call.args)
        p = self._config.learner.parallel
        # Megatron's order of ranks: tp varies fastest, then cp, dp and pp.
        shares = [call.args[rank // (p.tp * p.cp) % p.dp] for rank in range(p.world_size)]
        begun = [calls.begin_local_rank(r, call.method, share, **call.options) for r, share in enumerate(shares)]
        return calls.wait_all(begun)

    def _run_step(self, method: Callable[..., R], shares: Sequence[Any], **options: Any) -> list[R]:
        change = self._divide_call(method, shares, **options)
        answers = self._call_with_restarts(lambda calls: self._make_call(calls, change), change)
        self._consecutive_restarts = 0
        # A copy has waited for a step by now. If it waits for a checkpoint, that was given up before any of it was
        # written.
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
        """Set the transport of the weights like `LocalRank.set_weight_transport`. The ranks of each host write one file
        together. Those of other hosts than this one have them served with `sender_keys`."""
        self._transport, self._sender_keys = backend, sender_keys
        if backend == "nccl":  # engines would wait for what lost ranks should have sent
            with self._lock:
                self._recovery_log.disable()
        self._call_all(LocalRank.set_weight_transport, backend, True)
        self._folder = PartFolder(get_weights_directory(self._config), self._world)
        self._publisher = ShardedVersionStore(
            self._call_hosts, self._call_writers, self._ranks.ranks_by_host, deltas=backend == "tcp"
        )

    def write_version(self, versions_in_use: Sequence[int] = ()) -> TransferOffer:
        """Write a version like `LocalRank.write_version`: each rank writes its part. With NCCL, the first rank sends it
        from its GPU."""
        publication = self._call_with_restarts(lambda calls: self._write_version(calls, versions_in_use))
        with self._lock:
            self._recovery_log.mark_written(LocalRank.snapshot_weights)
            with contextlib.suppress(LearnerError):  # a lost rank has lost its snapshot, too
                self._ranks.calls.call_local_ranks(LocalRank.discard_snapshot, lane=WRITE_LANE)
        return publication

    def _write_version(self, calls: RankCalls, versions_in_use: Sequence[int]) -> TransferOffer:
        if self._publisher is None:
            # The first rank refuses it: there is no transport yet.
            writing = calls.begin_local_rank(0, LocalRank.write_version, versions_in_use, lane=WRITE_LANE)
            return calls.wait_all([writing], self._version_write_seconds, independent=True)[0]
        publication = self._publisher.publish_shares(versions_in_use)
        if not self._ranks.is_one_host:
            publication = msgspec.structs.replace(publication, transport_data=self._serve_parts(publication))
        if self._transport == "nccl":
            announcing = calls.begin_local_rank(0, LocalRank.announce_version, publication.manifest, lane=WRITE_LANE)
            (publication,) = calls.wait_all([announcing])
        return publication

    def _call_writers(self, name: str, args_by_rank: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call the method `name` of every rank with arguments, in its thread for writing; see `sharded_store.CallRanks`."""
        chosen = {rank: ("call_method", name, *args) for rank, args in enumerate(args_by_rank) if args is not None}
        answers = self._call_in_write_lane(chosen)
        return [answers.get(rank) for rank in range(len(args_by_rank))]

    def _call_hosts(self, name: str, args_by_host: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call the method `name` of the `PartFolder` of every host with arguments; see `sharded_store.CallHosts`. That of
        this host is in this process, and outlives a rank."""
        first_ranks = [ranks[0] for ranks in self._ranks.ranks_by_host]
        pairs = list(zip(first_ranks, args_by_host, strict=True))[1:]
        answers = self._call_in_write_lane(
            {r: ("call_part_folder", name, *args) for r, args in pairs if args is not None}
        )
        if (args := args_by_host[0]) is not None:
            answers[first_ranks[0]] = getattr(self._folder, name)(*args)
        return [answers.get(rank) for rank in first_ranks]

    def _call_in_write_lane(self, calls_by_rank: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of the actors of some ranks, in their threads for writing, and return the results by rank."""
        calls = self._ranks.calls
        begun = [calls.begin_call(rank, *call, lane=WRITE_LANE) for rank, call in calls_by_rank.items()]
        answers = calls.wait_all(begun, self._version_write_seconds, independent=True)
        return dict(zip(calls_by_rank, answers, strict=True))

    def _serve_parts(self, publication: TransferOffer) -> list[PublishedPart]:
        """Have the other hosts serve their parts, and return all parts with the addresses."""
        own, *others = publication.transport_data
        ranks = [ranks[0] for ranks in self._ranks.ranks_by_host[1:]]
        endpoints = self._call_in_write_lane(
            {rank: ("serve_parts", self._sender_keys, p.file_paths) for rank, p in zip(ranks, others, strict=True)}
        )
        self._sender_ranks |= {endpoint: rank for rank, endpoint in endpoints.items()}
        return [own, *(msgspec.structs.replace(p, endpoint=endpoints[r]) for r, p in zip(ranks, others, strict=True))]

    def revive_sender(self, parts: Sequence[PublishedPart]) -> tuple[str, str]:
        """Have the sender of one host, which serves these parts, replaced by a new one if it does not answer. Returns
        the host, and the sender's address."""
        rank = self._sender_ranks[parts[0].endpoint]
        paths = {name: path for part in parts for name, path in part.file_paths.items()}
        endpoint: str = self._call_in_write_lane({rank: ("serve_parts", self._sender_keys, paths)})[rank]
        self._sender_ranks[endpoint] = rank
        return self.processes[rank][1], endpoint

    def join_parts(self, parts: Sequence[PublishedPart], path: Path) -> None:
        """Have all hosts write their parts of a version into one file, of a directory that they share. Raises `OSError`
        for a version that is not kept any more."""
        if not parts:
            raise FileNotFoundError("this version of the weights is not kept any more")
        *starts, nbytes = [0, *itertools.accumulate(part.nbytes for part in parts)]
        with self._world.files.open(path, exclusive=True) as file:
            file.truncate(nbytes)
        self._call_hosts(
            "copy_part", [(part.path, str(path), start) for part, start in zip(parts, starts, strict=True)]
        )

    def write_checkpoint(self, directory: Path) -> list[FileEntry]:
        """Write a checkpoint like `LocalRank.write_checkpoint`: each rank writes its own file."""
        timeout, files = self._checkpoint_write_seconds, self._world.files

        def write(calls: RankCalls) -> list[FileEntry]:
            for name in files.list_names(directory):  # files that lost ranks began to write
                files.remove(directory / name)
            written = calls.call_local_ranks(
                LocalRank.write_checkpoint, directory, lane=CHECKPOINT_LANE, timeout=timeout, independent=True
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
            with contextlib.suppress(LearnerError, OSError):  # what is left, the next run there removes
                self._call_hosts("close", [()] * len(self._ranks.ranks_by_host))
        self._ranks.calls.kill_ranks()

    # -- after the loss of a rank ----------------------------------------------------------------------------------

    def _begin_copy(self) -> None:
        """Have every rank copy its state, and hand the copy over beside the next steps to where it outlives the rank:
        the result of an actor's call belongs to the caller, and is in shared memory of the actor's host."""
        ranks, calls = self._ranks, self._ranks.calls
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
        ranks, waiting = self._ranks, list(self._begun_copies)
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
                copies, self._begun_copies = self._begun_copies, []
                self._recovery_log.set_copies(copies)

    def _copies_fit(self, calls: RankCalls) -> bool:
        """Return True if the host's object store can hold two copies. It is checked until there is a copy."""
        if not isinstance(self._recovery_log.base, tuple):
            nbytes, host = sum(calls.call_local_ranks(LocalRank.estimate_copy_bytes)), self.processes[0][1]
            store = next(
                (node.object_store_bytes for node in self._world.actors.list_nodes() if node.name == host), math.inf
            )
            if 2 * nbytes > store:
                self._report_event("ranks_not_copied", bytes=nbytes, store=int(store), hint=OBJECT_STORE_HINT)
                with self._lock:
                    self._recovery_log.disable()
        return bool(self._recovery_log.copy_steps)

    def _restart_ranks(self, lost_ranks: RankProcesses, lost: RankLost) -> None:
        """Start all ranks again, unless another thread has done so. Raises `RankLost` if that is not possible."""
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
        """Give new ranks the state of the lost ones, and the copies that wait to be written. Returns `ranks`."""
        calls, log = ranks.calls, self._recovery_log
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
    "the host's object store of Ray cannot hold two copies of the ranks' state: if a rank is lost, the run restarts from its "
    "newest checkpoint. Start Ray with a larger --object-store-memory, or set supervise.copy_steps=0"
)


def load_learner(
    config: Config,
    model_path: Path,
    run_dir: Path,
    placements: Sequence[ActorOptions] = (),
    world: World = REAL_WORLD,
    report_event: EventReporter = ignore_event,
) -> LocalRank | RemoteRanks:
    """Load the learner: one rank in this process, or several as actors. See `LocalRank.load` and `RemoteRanks.load`."""
    if config.learner.parallel.world_size == 1:
        return LocalRank.load(config, model_path, world)
    return RemoteRanks.load(config, model_path, run_dir, placements, world, report_event)


# The actors of a learner's ranks: how they are started and called.


LOSS_NOTICE_SECONDS = 10.0
"""Seconds to wait, after a rank has lost a connection, for the news that the process at its other end has ended. A rank
notices a broken connection at once; the end of a process is known a little later."""
COLLECTIVE_ERRORS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Words by which an error of a collective operation shows that another rank did not take part: it contains one of
them."""


class RankLost(LearnerError, ActorLostError):
    """The process of a rank was lost, or stopped answering, and with it what all ranks had in memory."""


class RankCalls:
    """The calls on the ranks' actors. A rank that fails leaves the others waiting for it in a collective operation, so
    the first failure ends all of them. It is raised as `LearnerError`, or as `RankLost` if restarted ranks may do
    better."""

    def __init__(self, actors: Actors, ranks: Sequence[ActorRef]):
        self._actors, self.ranks = actors, ranks

    def begin_call(self, rank: int, method: str, *args: Any, lane: str = "", **kwargs: Any) -> Any:
        """Begin a call of a method on the actor of `rank`. Returns a reference for `wait_all`."""
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
        """Call a method of the actor of every rank, and return all results; see `wait_all`."""
        calls = [self.begin_call(rank, method, *args, lane=lane, **kwargs) for rank in range(len(self.ranks))]
        return self.wait_all(calls, timeout, independent=independent)

    def begin_local_rank(
        self, rank: int, method: Callable[..., object], *args: Any, lane: str = "", **kwargs: Any
    ) -> Any:
        """Begin a call of a method of `LocalRank` on `rank`. The method travels by its name."""
        return self.begin_call(rank, "call_method", method.__name__, *args, lane=lane, **kwargs)

    def call_local_ranks(
        self,
        method: Callable[..., R],
        *args: Any,
        lane: str = "",
        timeout: float | None = None,
        independent: bool = False,
    ) -> list[R]:
        """Call a method of `LocalRank` on every rank, and return all results; see `wait_all`."""
        begun = [self.begin_local_rank(rank, method, *args, lane=lane) for rank in range(len(self.ranks))]
        return self.wait_all(begun, timeout, independent=independent)

    def wait_all(self, calls: Sequence[Any], timeout: float | None = None, *, independent: bool = False) -> list[Any]:
        """Wait for all calls and return their results. The first call is that of rank 0, and so on.

        Args:
            timeout: Seconds after which ranks that have not answered count as lost.
            independent: The calls need no other rank. So one that fails ends nothing, and its error is raised when all
                have ended; an `OSError` if its disk did not take something.
        """
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
        """Return the cause of the failure of `rank`: if it only lost its connection to another rank, the loss of that
        one, which is among those still `waiting`."""
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
        """Return a reference to `value`, which can be passed to many calls."""
        return self._actors.put(value)

    def kill_ranks(self) -> None:
        """End the ranks' processes."""
        for rank in self.ranks:
            self._actors.kill_actor(rank)


@dataclass(frozen=True, eq=False)
class RankProcesses:
    """One start of the ranks. `processes` has the process id and host of each."""

    calls: RankCalls
    vocab_size: int
    processes: Sequence[tuple[int, str]]

    @property
    def ranks_by_host(self) -> list[list[int]]:
        """The ranks of each host, those of the first rank's host first."""
        by_host: dict[str, list[int]] = {}
        for rank, (_, host) in enumerate(self.processes):
            by_host.setdefault(host, []).append(rank)
        return list(by_host.values())

    @property
    def is_one_host(self) -> bool:
        return len(self.ranks_by_host) == 1


def start_ranks(
    actor_class: type[RankActor],
    config: Config,
    model_path: Path,
    run_dir: Path,
    placements: Sequence[ActorOptions],
    world: World,
) -> RankProcesses:
    """Start the ranks at `placements`, or all of them beside this process. They meet and load the model. Blocking.
    Raises `LearnerError`."""
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


# The log of what a learner's ranks did since a state that is kept elsewhere. Ranks that are started again from that
# state, and do the same again, have the state that the lost ones had. Pure.


COPYING_METHODS = LocalRank.snapshot_weights, LocalRank.stage_checkpoint
"""Methods after which every rank has a copy in its own memory, until it is written."""


@dataclass(frozen=True, eq=False)
class RankCall(Generic[R]):
    """A call of a method of `LocalRank` that every rank made. If it `is_divided`, each data-parallel rank gets its own
    item of `args`; otherwise all ranks get all of them."""

    method: Callable[..., R]
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    is_divided: bool = False

    @property
    def needs_write(self) -> bool:
        """True if the call makes a copy that has to be written."""
        return self.method in COPYING_METHODS


class RecoveryLog:
    """A base state, and the changes since, in order.

    The base does not move past a change whose copy has yet to be written, because ranks that are started again have to
    copy exactly those weights. The copy of the state waits then, and no other copy is due. So there are at most two.

    Attributes:
        base: Copies of their state that the ranks made, one each; the path of a checkpoint; or None for the start
            model.
        copy_steps: Steps between two copies; 0 keeps nothing.
        calls: Changes since the base.
    """

    def __init__(self, copy_steps: int):
        self.copy_steps = copy_steps
        self.base: Path | tuple[Any, ...] | None = None
        self.calls: list[RankCall[Any]] = []
        self._pending_copy: tuple[int, tuple[Any, ...] | None] | None = None
        """Number of changes after which a copy of the state was made, and that copy, while the base cannot move to it;
        None as long as it is not here."""

    @property
    def repeated_steps(self) -> int:
        """The number of steps that ranks which are started again have to repeat."""
        return sum(not change.needs_write for change in self.calls)

    @property
    def is_copy_due(self) -> bool:
        """True if the ranks should copy their state now, after the last change."""
        return bool(self.copy_steps) and self._pending_copy is None and self.repeated_steps >= self.copy_steps

    @property
    def has_pending_copy(self) -> bool:
        """True if there is a copy that the base cannot move to yet."""
        return self._pending_copy is not None

    def add(self, change: RankCall[Any]) -> None:
        if self.copy_steps:
            self.calls.append(change)

    def set_checkpoint(self, checkpoint: Path) -> None:
        """Begin the log anew: the ranks have the state of a checkpoint."""
        self.base, self._pending_copy = checkpoint, None
        self.calls.clear()

    def begin_copy(self) -> None:
        """Expect copies of the state after all changes so far."""
        self._pending_copy = len(self.calls), None

    def set_copies(self, copies: Sequence[Any]) -> None:
        """Add the copies that were expected, and move the base to them as soon as that is possible."""
        if self._pending_copy is not None:
            self._pending_copy = self._pending_copy[0], tuple(copies)
            self._advance_base()

    def give_up_copy(self) -> None:
        """Expect no copies any more, unless they are here."""
        if self._pending_copy is not None and self._pending_copy[1] is None:
            self._pending_copy = None

    def mark_written(self, method: Callable[..., object], *, before_copy: bool = False) -> None:
        """Remove the oldest call of a method that copies: its copy is written, or never will be. With `before_copy`,
        only if the pending copy of the state came after it."""
        index = next((i for i, call in enumerate(self.calls) if call.method == method), None)
        if index is None or (before_copy and (self._pending_copy is None or index >= self._pending_copy[0])):
            return
        del self.calls[index]
        if self._pending_copy is not None and index < self._pending_copy[0]:
            self._pending_copy = self._pending_copy[0] - 1, self._pending_copy[1]
        self._advance_base()

    def _advance_base(self) -> None:
        if self._pending_copy is None:
            return
        count, copies = self._pending_copy
        if copies is not None and not any(change.needs_write for change in self.calls[:count]):
            self.base, self._pending_copy = copies, None
            del self.calls[:count]

    def disable(self) -> None:
        """Forget everything, and keep nothing from now on."""
        self.copy_steps, self.base, self._pending_copy = 0, None, None
        self.calls.clear()
