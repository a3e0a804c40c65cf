"""A rank of the learner: in this process, or an actor of its own. `ranked.py` drives several as one."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3async.actors.delivery import UnsetSender, build_weight_sender
from r3async.actors.process import ActorNotLoaded, prepare_process
from r3async.checkpoint import FileEntry, open_checkpoint
from r3async.config import Config, config_from_dict
from r3async.learner import LearnerError, MinibatchResult
from r3async.learner.batch.packing import MicroBatch
from r3async.weights.content import HostWeights, SafetensorsEncoder, copy_share_to_host, copy_to_host
from r3async.weights.manifest import TensorEntry, WeightManifest
from r3async.weights.publish import TransferOffer, WeightSender
from r3async.weights.sending import ShareDescription, write_delta_part, write_share_region
from r3async.world import World
from r3async.world.network import find_interface, use_interface
from r3async.world.processes import pause_garbage_collector
from r3async.world.real import REAL_WORLD
from r3async.world.stages import stage

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
