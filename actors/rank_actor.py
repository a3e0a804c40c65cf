"""One rank of the learner, in this process or as an actor, and the actor that sends its weights."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from r3async.actors.weight_transport import (
    UnsetSender,
    build_part_server,
    build_weight_sender,
    get_weights_directory,
)
from r3async.checkpoint import FileEntry, open_checkpoint
from r3async.config import Config, config_from_dict, config_to_dict
from r3async.learner import LearnerError, MinibatchResult
from r3async.learner.micro_batches import MicroBatch
from r3async.weights.host_weights import (
    HostWeights,
    SafetensorsEncoder,
    copy_share_to_host,
    copy_to_host,
)
from r3async.weights.interfaces import TransferOffer, WeightSender
from r3async.weights.manifest import BASE_VERSION, TensorEntry, WeightManifest
from r3async.weights.sharded_store import (
    PartFolder,
    ShareDescription,
    write_delta_part,
    write_share_region,
)
from r3async.weights.tcp import PartServer
from r3async.world import ActorLostError, ActorOptions, ActorRef, World
from r3async.world.curve_keys import ServerKeys
from r3async.world.interfaces import find_interface, use_interface
from r3async.world.processes import pause_garbage_collector
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage

from .process import ActorNotLoaded, prepare_process

if TYPE_CHECKING:
    from r3async.checkpoint.rank_files import RankCopy, RankState
    from r3async.learner.backend import LearnerBackend
    from r3async.learner.distillation import Teacher


R = TypeVar("R")


class LocalRank:
    """A rank in this process: a backend and the sender of its weights. All calls must come from the
    thread that made it, except for `write_version` and `write_checkpoint`."""

    processes: Sequence[tuple[int, str]] = ()
    """Process id and host of each further process that computes for this one."""
    restarts = 0
    """Number of restarts of these processes."""

    def __init__(
        self,
        config: Config,
        backend: LearnerBackend,
        world: World = REAL_WORLD,
        teacher: Teacher | None = None,
    ):
        """Wrap a loaded `backend`. `teacher` is the teacher model of `algorithm.distillation`."""
        import torch

        self._config = config
        self._world = world
        self.backend = backend
        self._teacher = teacher
        self._sender: WeightSender = UnsetSender()
        self._dtype = getattr(torch, config.generator.dtype)
        self._snapshot: tuple[int, HostWeights] | None = None
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
        return cls(config, backend, world, load_teacher(config, model_path, backend.ranks))

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    def list_gpus(self) -> list[str]:
        """Return the uuid of the GPU from which weights are sent; an empty list without CUDA."""
        import torch

        return [str(torch.cuda.get_device_properties(0).uuid)] if torch.cuda.is_available() else []

    def list_carried_tensors(self) -> tuple[str, ...]:
        """Return `LearnerBackend.carried`."""
        return tuple(self.backend.carried)

    def run_minibatches(
        self,
        minibatches: Sequence[Sequence[Sequence[MicroBatch]]],
        *,
        version: int,
        trace: bool = False,
    ) -> list[MinibatchResult]:
        """Call `train_step.train_step` with minibatches whose micro-batches are for one
        data-parallel rank, this one."""
        from r3async.learner.train_step import train_step

        shares = [mine for (mine,) in minibatches]
        return train_step(self.backend, shares, version=version, trace=trace, teacher=self._teacher)

    def train_supervised(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """Call `supervised.run_supervised_step` with the micro-batches of one
        data-parallel rank, this one."""
        from r3async.learner.supervised import run_supervised_step

        (mine,) = shares
        return run_supervised_step(self.backend, mine)

    def compute_supervised_loss(
        self, shares: Sequence[Sequence[MicroBatch]]
    ) -> tuple[float, float]:
        """Call `supervised.compute_supervised_loss` with the micro-batches of one
        data-parallel rank, this one."""
        from r3async.learner.supervised import compute_supervised_loss

        (mine,) = shares
        return compute_supervised_loss(self.backend, mine)

    def call_verb(self, verb: Callable[[LearnerBackend], R]) -> R:
        """Return `verb(backend)`, which composes verbs of the learner (`train_step`) in a loop that
        is not a run's."""
        return verb(self.backend)

    def count_updates(self) -> int:
        """Return the number of optimizer updates that made the weights, including those
        before a resume."""
        return self.backend.update_count

    def score_tokens(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Call `LearnerBackend.score_sequence`."""
        with stage("probe"):
            return self.backend.score_sequence(token_ids, temperature)

    def set_weight_transport(
        self, backend: str, write_together: bool = False, sender_keys: ServerKeys | None = None
    ) -> None:
        """Set the transport to which `write_version` gives the weights; see
        `weight_transport.build_weight_sender`. With `write_together`, several ranks write a
        version. One alone needs no `sender_keys`: the learner serves it."""
        if not write_together or backend == "nccl":  # otherwise the learner offers what they wrote
            self._sender = build_weight_sender(self._config, backend, self._world)

    def snapshot_weights(self, version: int) -> None:
        """Copy the weights to host memory as `version`, for `write_version`; with
        `lora.deliver = "adapter"` the adapters alone, and the start model's weights as
        `BASE_VERSION`. Collective. Later steps do not change the copy."""
        if self._snapshot is not None:
            raise LearnerError(
                f"version {self._snapshot[0]} has not been written: version {version} "
                "has to wait for it"
            )
        with stage("snapshot"):
            if not self._config.learner.lora.delivers_adapters:
                self._snapshot_memory = self._copy_weights(self._snapshot_memory)
                self._snapshot = version, self._snapshot_memory
            elif version == BASE_VERSION:
                # Its memory is free again when it is written.
                with self.backend.use_start_weights():
                    self._snapshot = version, self._copy_weights(None)
            else:
                self._snapshot_memory = copy_to_host(
                    self.backend.export_adapters(), self._snapshot_memory
                )
                self._snapshot = version, self._snapshot_memory

    def _copy_weights(self, memory: HostWeights | None) -> HostWeights:
        return copy_share_to_host(
            self.backend.iter_full_weights, memory, self._config.weights.bucket_bytes
        )

    def discard_snapshot(self) -> None:
        """Drop the snapshot, if there is one: it is written already."""
        self._snapshot = None

    def write_version(self, versions_in_use: Sequence[int] = ()) -> TransferOffer:
        """Write the snapshot for the engines and drop it; see `WeightSender.publish_tensors`. May
        be called from any thread, beside a step. A snapshot that could not be written stays, so
        that it can be written again."""
        publication = self._sender.publish_tensors(
            *self._current_snapshot, self._dtype, versions_in_use
        )
        self._snapshot = None
        return publication

    def describe_snapshot(self) -> ShareDescription:
        """Describe this rank's part of the snapshot; see `ShardedVersionStore`."""
        version, share = self._current_snapshot
        return ShareDescription(version, share.describe_tensors(self._dtype))

    def write_snapshot(self, path: str, start: int) -> dict[str, TensorEntry]:
        """Write the snapshot into its region of the file. It stays until all ranks have written
        theirs; then `discard_snapshot` drops it."""
        version, share = self._current_snapshot
        bucket_bytes = self._config.weights.bucket_bytes
        return (
            write_share_region(
                path, start, SafetensorsEncoder(version, share, self._dtype, bucket_bytes)
            )
            if share
            else {}
        )

    def write_delta_part(
        self, before: str, path_now: str, first: int, last: int, path: str
    ) -> None:
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
        """Write the staged state into `directory`, and drop it even if that fails. May be called
        from any thread, beside a step."""
        from r3async.checkpoint.rank_files import write_rank_file

        held = self._staged_checkpoint
        self._staged_checkpoint = None
        if held is None:
            raise LearnerError("nothing is held for a checkpoint")
        return [write_rank_file(directory, held, files=self._world.files)]

    def restore_checkpoint(self, checkpoint: Path) -> None:
        """Continue from a checkpoint that has been verified; see `LearnerBackend.restore_state`."""
        self.backend.restore_state(
            open_checkpoint(
                checkpoint, check_tensors=False, files=self._world.files
            ).open_learner_state()
        )

    def estimate_copy_bytes(self) -> int:
        """Estimate the bytes of `take_recovery_copy`: a weight and two moments in float32."""
        places = [
            place
            for held in self.backend.trained_slices()
            if held.is_writer
            for place in held.places
        ]
        return sum(12 * math.prod(place.size) for place in places)

    def stage_recovery_copy(self) -> None:
        """Copy what `stage_checkpoint` copies, for `take_recovery_copy`."""
        from r3async.checkpoint.rank_files import RankCopy

        with stage("checkpoint"):
            self._staged_recovery_copy = RankCopy.from_state(self.backend.capture_state())

    def take_recovery_copy(self) -> RankCopy:
        """Hand over the copy, for ranks that are started in place of this one and the others. May
        be called from any thread, beside a step."""
        held = self._staged_recovery_copy
        self._staged_recovery_copy = None
        if held is None:
            raise LearnerError("nothing is held for a restart")
        return held

    def restore_from_copies(self, *parts: RankCopy) -> None:
        """Continue from the copies that every rank made after the same step."""
        from r3async.checkpoint.rank_files import LearnerStateReader

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

    def __init__(
        self, world: World, rank: int, config: dict[str, Any], model_path: str, run_dir: str
    ):
        self.world = world
        self._lock = prepare_process(world, Path(run_dir), f"learner-rank-{rank}")
        self._rank = rank
        self._config = config_from_dict(config)
        self._model_path = Path(model_path)
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
        """Make a store over which the ranks meet, and return its address and port. `one_host` is
        True if all ranks are on this host."""
        import torch.distributed as dist

        interface = self._config.cluster.interface
        address = (
            "127.0.0.1" if one_host and not interface else self.world.actors.host_address(interface)
        )
        self._stores.append(dist.TCPStore(address, 0, is_master=True, wait_for_workers=False))
        return address, self._stores[0].port

    def load_model(self, address: str, port: int, one_host: bool) -> int:
        """Meet the other ranks at the store and load the model. Returns the size
        of the vocabulary."""
        import torch
        import torch.distributed as dist

        cuda = torch.cuda.is_available()
        self._choose_interface(one_host)
        timeout = datetime.timedelta(seconds=self._config.supervise.limits.collective)
        store = (
            self._stores[0]
            if self._stores
            else dist.TCPStore(address, port, is_master=False, timeout=timeout)
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._config.learner.parallel.world_size,
            timeout=timeout,
        )
        self._loaded = LocalRank.load(self._config, self._model_path, self.world)
        return self._learner.vocab_size

    def _choose_interface(self, one_host: bool) -> None:
        """Set the network interface of collectives: the configured one or, between hosts, the
        one by which the cluster knows this host. The one that they would choose themselves may
        belong to a container."""
        chosen = self._config.cluster.interface
        actors = self.world.actors
        if chosen:
            actors.host_address(chosen)  # raises if there is no such interface
        name = chosen or ("" if one_host else find_interface(actors.host_address()))
        if name:
            use_interface(name)

    def call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this rank's `LocalRank`; see `RankCalls.call_local_ranks`.
        `write_version` has to be called in the lane `WRITE_LANE`, and `write_checkpoint` in
        `CHECKPOINT_LANE`."""
        return getattr(self._learner, name)(*args, **kwargs)

    def call_part_folder(self, name: str, *args: Any) -> Any:
        """Call a method of the folder of this host's parts, in the lane `WRITE_LANE`."""
        if self._folder is None:
            self._folder = PartFolder(get_weights_directory(self._config), self.world)
        return getattr(self._folder, name)(*args)

    def serve_parts(self, keys: ServerKeys, paths: dict[str, str]) -> str:
        """Have this host's sender serve files by the names of their streams, in the
        lane `WRITE_LANE`.

        A sender that does not answer is replaced by a new one, which does not serve what the other
        one did. Returns its address.
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
        return self._call_sender(paths, self._config.supervise.limits.start)

    def _call_sender(self, paths: dict[str, str], timeout: float) -> str:
        assert self._sender is not None
        actors = self.world.actors
        return actors.get(actors.begin_call(self._sender, "serve_files", paths), timeout)


SENDER_OPTIONS = ActorOptions(0, same_node=True)
"""The options of a sender, beside the rank that starts it."""
SENDER_ANSWER_SECONDS = 10.0
"""Seconds in which a sender has to answer: it opens files, and does nothing else at that time."""


class PartSenderActor:
    """The actor that sends a host's parts of versions to other hosts. It has them from
    files, and no model.

    It is a process of its own, so that sending neither waits for a step nor holds one up, and its
    loss is not a rank's.
    """

    def __init__(
        self, world: World, config: dict[str, Any], keys: ServerKeys, run_dir: str, rank: int
    ):
        self._world = world
        self._config = config_from_dict(config)
        self._keys = keys
        self._lock = prepare_process(world, Path(run_dir), f"learner-sender-{rank}")
        self._server: PartServer | None = None

    async def serve_files(self, paths: dict[str, str]) -> str:
        """Serve files by the names of their streams. Returns the address."""
        if self._server is None:
            self._server = build_part_server(self._config, self._keys, self._world)
        self._server.serve_files(paths)
        return self._server.bind_socket()
