"""The learner's ranks: one in this process, or several, each an actor of its own, driven as one."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from r3async.actors.delivery import sender
from r3async.actors.process import NotLoaded, begin
from r3async.checkpoint import FileRecord, open_checkpoint
from r3async.config import Config, config_from_dict, to_dict
from r3async.learner import LearnerError, MinibatchResult
from r3async.learner.batch.packing import MicroBatch
from r3async.weights.publish import HostCopy, Publication, WeightSender
from r3async.world import ActorRef, Actors, Placement, World
from r3async.world.real import REAL
from r3async.world.stages import stage

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import LearnerState
    from r3async.learner.backend import LearnerBackend

WRITE, CHECKPOINT = "write", "checkpoint"
"""The threads of a rank's own for `write` and `write_state`. Another one makes every other call."""


def placement(threads: int, gpus: float = 0.0) -> Placement:
    """Of a rank."""
    return Placement(threads=threads, gpus=gpus, concurrency=1, lanes=(WRITE, CHECKPOINT), beside=True)


class NoSender:
    """The `WeightSender` before `publish_through`."""

    def send(self, version: int, tensors: Mapping[str, Any], dtype: Any, reading: Collection[int] = ()) -> Publication:
        raise LearnerError(f"version {version} cannot be written: its transport is not chosen yet")

    def close(self) -> None:
        pass


class LocalLearner:
    """A backend and the sender of its weights. All calls must come from the thread that made it, but for `write` and
    `write_state`."""

    pids: Sequence[int] = ()
    """Of further processes, which compute for this one."""

    def __init__(self, config: Config, backend: LearnerBackend, world: World = REAL):
        import torch

        self._config, self._world, self.backend = config, world, backend
        self._sender: WeightSender = NoSender()
        self._dtype = getattr(torch, config.generator.dtype)
        self._snapshot: tuple[int, HostCopy] | None = None
        self._memory: HostCopy | None = None
        """What snapshots are copied into; made by the first."""
        self._held: LearnerState | None = None

    @classmethod
    def load(cls, config: Config, model_path: Path, world: World = REAL) -> LocalLearner:
        """Load the model, with the other ranks where there are any. Raises `LearnerError`."""
        import torch

        torch.set_num_threads(config.learner.threads)
        from r3async.learner import build_learner

        return cls(config, build_learner(config, model_path, world.files), world)

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

        return train_share(self.backend, [mine for (mine,) in minibatches], version=version, trace=trace)

    def teach(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """`supervised.supervised_step` with the micro-batches of one data-parallel rank: this one."""
        from r3async.learner.supervised import supervised_step

        (mine,) = shares
        return supervised_step(self.backend, mine)

    def examine(self, shares: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
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

    def publish_through(self, backend: str) -> None:
        """Which transport `write` gives the weights to; see `delivery.sender`."""
        self._sender = sender(self._config, backend, self._world)

    def snapshot(self, version: int) -> None:
        """Copy the weights to host memory as `version`, for `write`. Collective; later steps do not change the copy."""
        if self._snapshot is not None:
            raise LearnerError(
                f"version {self._snapshot[0]} has not been written: version {version} has to wait for it"
            )
        with stage("snapshot"):
            tensors = self.backend.export(copy=False)
            if tensors:  # one rank hands them in
                if self._memory is None or not self._memory.fits(tensors):
                    self._memory = HostCopy(tensors)
                self._snapshot = version, self._memory.fill(tensors)

    def write(self, reading: Sequence[int] = ()) -> Publication:
        """Write the snapshot for the engines and let go of it; see `WeightSender.send`. From any thread, beside a step."""
        if self._snapshot is None:
            raise LearnerError("there is no snapshot to write")
        try:
            return self._sender.send(*self._snapshot, self._dtype, reading)
        finally:
            self._snapshot = None

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

    def whereabouts(self) -> tuple[int, int]:
        """Process id, and the port of the store over which the ranks meet, which is made here."""
        import torch.distributed as dist

        self._stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return self.world.processes.pid, self._stores[0].port

    def load(self, port: int) -> tuple[int, int]:
        """Meet the other ranks and load the model; returns the vocabulary's size, and this process's id."""
        import torch
        import torch.distributed as dist

        cuda = torch.cuda.is_available()
        world = self._config.learner.parallel.world
        store = self._stores[0] if self._stores else dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=self._rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=self._config.learner.collective_timeout),
        )
        self._loaded = LocalLearner.load(self._config, self._model_path, self.world)
        return self._learner.vocab_size, self.world.processes.pid

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of this rank's learner: `write` in the lane `WRITE`, `write_state` in `CHECKPOINT`."""
        return getattr(self._learner, name)(*args, **kwargs)


class RankCalls:
    """Calls on the ranks' actors. A rank that fails leaves the others waiting for it in a collective operation: the first failure
    ends all of them and is raised as `LearnerError`."""

    def __init__(self, actors: Actors, ranks: Sequence[ActorRef]):
        self._actors, self.ranks = actors, ranks

    def begin(self, rank: int, method: str, *args: Any, lane: str = "", **kwargs: Any) -> Any:
        """Begin a method of the actor of `rank`."""
        return self._actors.begin(self.ranks[rank], method, *args, lane=lane, **kwargs)

    def on_all(self, method: str, *args: Any, lane: str = "", timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """What the actors' method returns, on every rank."""
        calls = [self.begin(rank, method, *args, lane=lane, **kwargs) for rank in range(len(self.ranks))]
        return self.wait(calls, timeout)

    def wait(self, calls: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """What the calls return; the first is of rank 0, and so on."""
        waiting = list(calls)
        while waiting:
            ready, waiting = self._actors.wait(waiting, timeout)
            if not ready:
                self.kill()
                raise LearnerError(f"{len(waiting)} ranks of the learner did not answer within {timeout:.0f} s")
            for call in ready:
                try:
                    self._actors.get(call)
                except Exception as error:
                    self.kill()
                    raise LearnerError(f"rank {calls.index(call)} of the learner failed: {error}") from error
        return [self._actors.get(call) for call in calls]

    def share(self, value: Any) -> Any:
        """A reference to `value`, which many calls may be given."""
        return self._actors.put(value)

    def kill(self) -> None:
        """End the ranks' processes."""
        for rank in self.ranks:
            self._actors.kill(rank)


def on_all(name: str) -> Callable[..., Any]:
    """The method `name` of `LocalLearner`, made on every rank: the first one's answer is that of all."""

    def method(self: RankedLearner, *args: Any) -> Any:
        return self.calls.on_all("call", name, *args)[0]

    return method


class RankedLearner:
    """The same calls as `LocalLearner`, made on all ranks at once: actors on this node. The first answers for all of them.

    `pids`: of the ranks' processes, which are on this host.
    """

    def __init__(self, config: Config, calls: RankCalls, vocab_size: int, pids: Sequence[int]):
        self._config, self.calls = config, calls
        self.vocab_size, self.pids = vocab_size, pids

    @classmethod
    def load(
        cls, config: Config, model_path: Path, run_dir: Path, gpus: float = 0.0, world: World = REAL
    ) -> RankedLearner:
        """Start the ranks, each with that many GPUs; they meet and load the model. Blocking. Raises `LearnerError`."""
        learner, plain = config.learner, to_dict(config)
        ranks = [
            world.actors.spawn(
                RankActor,
                rank,
                plain,
                str(model_path),
                str(run_dir),
                name=f"learner-rank-{rank}",
                placement=placement(learner.threads, gpus),
            )
            for rank in range(learner.parallel.world)
        ]
        calls = RankCalls(world.actors, ranks)
        ((_, port),) = calls.wait([calls.begin(0, "whereabouts")], learner.start_timeout)
        loaded = calls.on_all("load", port, timeout=learner.start_timeout)
        return cls(config, calls, loaded[0][0], [pid for _, pid in loaded])

    gpus, updates, score = on_all("gpus"), on_all("updates"), on_all("score")
    publish_through, snapshot, hold = on_all("publish_through"), on_all("snapshot"), on_all("hold")
    restore, save = on_all("restore"), on_all("save")

    def train(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """See `trainer.Ranks.train`."""
        given = [[[m[rank]] for m in minibatches] for rank in range(self._config.learner.parallel.dp)]
        answers: list[list[MinibatchResult]] = self._with_shares("train", given, version=version, trace=trace)
        return [
            msgspec.structs.replace(results[0], traces=[t for result in results for t in result.traces])
            for results in zip(*answers, strict=True)
        ]

    def _with_shares(self, name: str, given: Sequence[Any], **options: Any) -> list[Any]:
        """What the method `name` of every rank returns, each with what is `given` to its data-parallel rank."""
        p, shared = self._config.learner.parallel, [self.calls.share(each) for each in given]
        # Megatron's order of ranks: tp varies fastest, then dp, then pp.
        return self.calls.wait(
            [self.calls.begin(r, "call", name, shared[r // p.tp % p.dp], **options) for r in range(p.world)]
        )

    def teach(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """See `LocalLearner.teach`: with the micro-batches of every data-parallel rank."""
        return self._with_shares("teach", [[mine] for mine in shares])[0]

    def examine(self, shares: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
        """See `LocalLearner.examine`."""
        return self._with_shares("examine", [[mine] for mine in shares])[0]

    def write(self, reading: Sequence[int] = ()) -> Publication:
        """See `LocalLearner.write`: the first rank does it, on this host."""
        writing = self.calls.begin(0, "call", "write", reading, lane=WRITE)
        return self.calls.wait([writing], self._config.weights.write_timeout)[0]

    def write_state(self, directory: Path) -> list[FileRecord]:
        """See `LocalLearner.write_state`: each rank writes its own file."""
        timeout = self._config.checkpoint.write_timeout
        return [
            r
            for records in self.calls.on_all("call", "write_state", directory, lane=CHECKPOINT, timeout=timeout)
            for r in records
        ]

    def close(self) -> None:
        """End the ranks' processes."""
        self.calls.kill()
