"""A rank of the learner: in this process, or an actor of its own. `ranked.py` drives several as one."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from r3async.actors.delivery import NoSender, sender
from r3async.actors.process import NotLoaded, begin
from r3async.checkpoint import FileRecord, open_checkpoint
from r3async.config import Config, config_from_dict
from r3async.learner import LearnerError, MinibatchResult
from r3async.learner.batch.packing import MicroBatch
from r3async.weights.content import EncodedWeights, HostCopy, copied, copied_share
from r3async.weights.manifest import TensorEntry, WeightManifest
from r3async.weights.publish import Publication, WeightSender
from r3async.weights.sending import Described, write_delta_part, write_region
from r3async.world import World
from r3async.world.network import interface_of, use_interface
from r3async.world.processes import collector_paused
from r3async.world.real import REAL
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import HeldPart, LearnerState
    from r3async.learner.backend import LearnerBackend


class LocalLearner:
    """A backend and the sender of its weights. All calls must come from the thread that made it, but for `write` and
    `write_state`."""

    processes: Sequence[tuple[int, str]] = ()
    """Further ones, which compute for this one: process ids, and their hosts."""
    restarts = 0
    """Of these."""

    def __init__(
        self, config: Config, backend: LearnerBackend, world: World = REAL, teacher: LearnerBackend | None = None
    ):
        """`teacher`: see `algorithm.distillation`."""
        import torch

        self._config, self._world, self.backend, self._teacher = config, world, backend, teacher
        self._sender: WeightSender = NoSender()
        self._dtype = getattr(torch, config.generator.dtype)
        self._snapshot: tuple[int, HostCopy] | None = None
        self._together = False
        self._memory: HostCopy | None = None
        """What snapshots are copied into; made by the first."""
        self._held: LearnerState | None = None

    @classmethod
    def load(cls, config: Config, model_path: Path, world: World = REAL) -> LocalLearner:
        """Load the model, with the other ranks where there are any. Raises `LearnerError`."""
        with collector_paused():
            import torch

            torch.set_num_threads(config.learner.threads)
            from r3async.learner import build_learner
            from r3async.learner.distillation import load_teacher

            backend = build_learner(config, model_path, world.files)
        return cls(config, backend, world, load_teacher(config, model_path))

    @property
    def vocab_size(self) -> int:
        return self.backend.vocab_size

    def gpus(self) -> list[str]:
        """The GPU that weights are sent from, by its uuid; empty without CUDA."""
        import torch

        return [str(torch.cuda.get_device_properties(0).uuid)] if torch.cuda.is_available() else []

    def train(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """`trainer.train_share` of minibatches that have micro-batches for one data-parallel rank: this one."""
        from r3async.learner.trainer import train_share

        shares = [mine for (mine,) in minibatches]
        return train_share(self.backend, shares, version=version, trace=trace, teacher=self._teacher)

    def train_supervised(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """`supervised.supervised_step` with the micro-batches of one data-parallel rank: this one."""
        from r3async.learner.supervised import supervised_step

        (mine,) = shares
        return supervised_step(self.backend, mine)

    def supervised_loss_of(self, shares: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
        """`supervised.supervised_loss` in the same way."""
        from r3async.learner.supervised import supervised_loss

        (mine,) = shares
        return supervised_loss(self.backend, mine)

    def updates(self) -> int:
        """Optimizer updates that made the weights, those before a resume included."""
        return self.backend.version

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """See `LearnerBackend.score`."""
        with stage("probe"):
            return self.backend.score(token_ids, temperature)

    def publish_through(self, backend: str, together: bool = False) -> None:
        """Which transport `write` gives the weights to; see `delivery.sender`. `together`: ranks of one host write one file."""
        self._sender, self._together = sender(self._config, backend, self._world), together

    def snapshot(self, version: int) -> None:
        """Copy the weights to host memory as `version`, for `write`. Collective; later steps do not change the copy."""
        if self._snapshot is not None:
            raise LearnerError(
                f"version {self._snapshot[0]} has not been written: version {version} has to wait for it"
            )
        with stage("snapshot"):
            if self._together:
                self._memory = copied_share(self.backend.share, self._memory, self._config.weights.bucket_bytes)
            elif tensors := self.backend.export(copy=False):  # one rank hands them in
                self._memory = copied(tensors, self._memory)
            self._snapshot = None if self._memory is None else (version, self._memory)

    def let_go(self) -> None:
        """Of the snapshot, if there is one: it is written already."""
        self._snapshot = None

    def write(self, reading: Sequence[int] = ()) -> Publication:
        """Write the snapshot for the engines and let go of it; see `WeightSender.send`. From any thread, beside a step. If it
        could not be written it stays, to be written again."""
        publication = self._sender.send(*self._taken, self._dtype, reading)
        self._snapshot = None
        return publication

    def describe_share(self) -> Described:
        """Of the snapshot: this rank's part, see `ShardedPublisher`."""
        version, share = self._taken
        return Described(version, share.described(self._dtype))

    def write_share(self, path: str, start: int) -> dict[str, TensorEntry]:
        """Write the snapshot into its region of the file. It stays until all ranks have: `let_go`."""
        version, share = self._taken
        bucket_bytes = self._config.weights.bucket_bytes
        return write_region(path, start, EncodedWeights(version, share, self._dtype, bucket_bytes)) if share else {}

    def write_delta(self, before: WeightManifest, manifest: WeightManifest, first: int, last: int, path: str) -> None:
        """A part of a delta; see `write_delta_part`."""
        write_delta_part(before, manifest, first, last, path, self._world)

    def announce(self, manifest: WeightManifest) -> Publication:
        """Have a version that the ranks wrote sent from this rank's GPU."""
        return self._sender.announce(manifest)

    @property
    def _taken(self) -> tuple[int, HostCopy]:
        if self._snapshot is None:
            raise LearnerError("there is no snapshot to write")
        return self._snapshot

    def hold(self) -> None:
        """Copy what a checkpoint needs to host memory, for `write_state`; see `LearnerBackend.state`."""
        with stage("checkpoint"):
            self._held = self.backend.state()

    def write_state(self, directory: Path) -> list[FileRecord]:
        """Write what is held into `directory` and let go of it, whatever comes of it. From any thread, beside a step."""
        from r3async.checkpoint.tensors import write_part

        held, self._held = self._held, None
        if held is None:
            raise LearnerError("nothing is held for a checkpoint")
        return [write_part(directory, held, files=self._world.files)]

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint that has been verified; see `LearnerBackend.restore`."""
        self.backend.restore(open_checkpoint(checkpoint, check_tensors=False, files=self._world.files).learner())

    def copy_bytes(self) -> int:
        """About what `copy` takes: a weight and two moments in float32."""
        places = [place for held in self.backend.places() if held.writes for place in held.places]
        return sum(12 * math.prod(place.size) for place in places)

    def copy(self) -> HeldPart:
        """What `hold` copies, for ranks that are started in the place of this one and of the others."""
        from r3async.checkpoint.tensors import HeldPart

        with stage("checkpoint"):
            return HeldPart.of(self.backend.state())

    def restore_copies(self, *parts: HeldPart) -> None:
        """Continue from what every rank copied after the same step."""
        from r3async.checkpoint.tensors import LearnerParts

        self.backend.restore(LearnerParts(parts, files=self._world.files))

    def save(self, directory: Path) -> None:
        """See `LearnerBackend.save`."""
        self.backend.save(directory)

    def close(self) -> None:
        """Release groups, and the published weights. Nothing must be being written."""
        self._sender.close()
        self.backend.close()


class RankActor:
    """One rank of several, in a process of its own."""

    def __init__(self, world: World, rank: int, config: dict[str, Any], model_path: str, run_dir: str):
        self.world, self._lock = world, begin(world, Path(run_dir), f"learner-rank-{rank}")
        self._rank, self._config, self._model_path = rank, config_from_dict(config), Path(model_path)
        self._stores: list[Any] = []
        """Over which the ranks meet, if it was made here."""
        self._loaded: LocalLearner | None = None

    @property
    def _learner(self) -> LocalLearner:
        if self._loaded is None:
            raise NotLoaded(f"rank {self._rank} of the learner has no model yet")
        return self._loaded

    def whereabouts(self) -> tuple[int, str]:
        """Process id and host."""
        return self.world.processes.pid, self.world.processes.host

    def open_store(self, alone: bool) -> tuple[str, int]:
        """Address and port of a store over which the ranks meet; it is made here. `alone`: all of them are on this host."""
        import torch.distributed as dist

        interface = self._config.cluster.interface
        address = "127.0.0.1" if alone and not interface else self.world.actors.address(interface)
        self._stores.append(dist.TCPStore(address, 0, is_master=True, wait_for_workers=False))
        return address, self._stores[0].port

    def load(self, address: str, port: int, alone: bool) -> int:
        """Meet the other ranks at the store and load the model; returns the vocabulary's size."""
        import torch
        import torch.distributed as dist

        cuda, learner = torch.cuda.is_available(), self._config.learner
        self._choose_interface(alone)
        timeout = datetime.timedelta(seconds=learner.collective_timeout)
        store = self._stores[0] if self._stores else dist.TCPStore(address, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=self._rank,
            world_size=learner.parallel.world,
            timeout=timeout,
        )
        self._loaded = LocalLearner.load(self._config, self._model_path, self.world)
        return self._learner.vocab_size

    def _choose_interface(self, alone: bool) -> None:
        """Collectives use the one that is configured; between hosts, else, that by which the cluster knows this host: what they
        would choose themselves may be one of the containers'."""
        chosen, actors = self._config.cluster.interface, self.world.actors
        if chosen:
            actors.address(chosen)  # it is there
        name = chosen or ("" if alone else interface_of(actors.address()))
        if name:
            use_interface(name)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of this rank's learner: `write` in the lane `WRITE`, `write_state` in `CHECKPOINT`."""
        return getattr(self._learner, name)(*args, **kwargs)
