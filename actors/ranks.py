"""The learner's ranks: one in this process, or several, each an actor of its own, driven as one."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.delivery import sender
from actors.process import NotLoaded, begin
from r3async.batching.packing import MicroBatch
from r3async.checkpoint import FileRecord, open_checkpoint
from r3async.config import Config, config_from_dict, to_dict
from r3async.learners.base import LearnerError, StepResult
from r3async.weights.transport import Publication, WeightSender
from r3async.world import Placement, World
from r3async.world.real import REAL

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import LearnerState

WRITE, CHECKPOINT = "write", "checkpoint"
"""The threads of a rank's own for `write` and `write_state`. Another one makes every other call."""


def placement(threads: int, gpus: float = 0.0) -> Placement:
    """Of a rank."""
    return Placement(threads=threads, gpus=gpus, concurrency=1, lanes=(WRITE, CHECKPOINT), beside=True)


def with_column(micro_batches: Sequence[MicroBatch], name: str, values: Sequence[np.ndarray]) -> list[MicroBatch]:
    """The micro-batches with a column more."""
    return [replace(m, table=m.table.with_columns(**{name: v})) for m, v in zip(micro_batches, values, strict=True)]


class NoSender:
    """The `WeightSender` before `publish_through`."""

    def send(self, version: int, tensors: Mapping[str, Any], dtype: Any, reading: Collection[int] = ()) -> Publication:
        raise LearnerError(f"version {version} cannot be written: nobody has said by which transport")

    def close(self) -> None:
        pass


class LocalLearner:
    """A backend and the sender of its weights. All calls must come from the thread that made it, but for `write` and
    `write_state`."""

    pids: Sequence[int] = ()
    """Of further processes, which compute for this one."""

    def __init__(self, config: Config, model_path: Path, world: World = REAL):
        import torch

        torch.set_num_threads(config.learner.threads)
        from r3async.learners.build import build_learner

        self._config, self._world = config, world
        self._backend = build_learner(config, model_path, world.files)
        self._sender: WeightSender = NoSender()
        self._dtype = getattr(torch, config.generator.dtype)
        self._snapshot: tuple[int, dict[str, Any]] | None = None
        self._held: LearnerState | None = None

    @property
    def vocab_size(self) -> int:
        return self._backend.vocab_size

    def gpus(self) -> list[str]:
        """The GPU that weights are sent from, by its uuid; empty without CUDA."""
        import torch

        return [str(torch.cuda.get_device_properties(0).uuid)] if torch.cuda.is_available() else []

    def train(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[StepResult]:
        """One optimizer step for each minibatch, which has micro-batches for one data-parallel rank: this one. What is asked
        of the model as it is before the first of them comes first: its own routes (`routing.replay = learner`), its
        log-probs, those of the reference model."""
        from r3async.algorithms.policy_loss import needs_old_logprobs

        algorithm = self._config.algorithm
        batches = [list(mine) for (mine,) in minibatches]
        if self._config.routing.replay == "learner":
            batches = [self._backend.record_routes(b) for b in batches]
        if needs_old_logprobs(algorithm):
            batches = [with_column(b, "old_logprobs", self._backend.logprobs(b)) for b in batches]
        if algorithm.reference_kl.coef:
            values = [self._backend.logprobs(b, reference=True) for b in batches]
            batches = [with_column(b, "reference_logprobs", v) for b, v in zip(batches, values, strict=True)]
        return [self._backend.train_step(b, version=version, trace=trace) for b in batches]

    def updates(self) -> int:
        """Optimizer updates that made the weights, those before a resume included."""
        return self._backend.version

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """See `LearnerBackend.score`."""
        return self._backend.score(token_ids, temperature)

    def publish_through(self, backend: str) -> None:
        """Which transport `write` gives the weights to; see `delivery.sender`."""
        self._sender = sender(self._config, backend, self._world)

    def snapshot(self, version: int) -> None:
        """Copy the weights to host memory as `version`, for `write`. Collective; later steps do not change the copy."""
        if self._snapshot is not None:
            raise LearnerError(
                f"version {self._snapshot[0]} has not been written: version {version} has to wait for it"
            )
        tensors = {name: tensor.cpu() for name, tensor in self._backend.export().items()}
        if tensors:  # one rank hands them in
            self._snapshot = version, tensors

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
        self._held = self._backend.state()

    def write_state(self, directory: Path) -> list[FileRecord]:
        """Write what is held into `directory` and let go of it, whatever comes of it. From any thread, beside a step."""
        from r3async.checkpoint.tensors import write_part

        held, self._held = self._held, None
        if held is None:
            raise LearnerError("nothing is held for a checkpoint")
        return [write_part(directory, held, files=self._world.files)]

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint that has been verified; see `LearnerBackend.restore`."""
        self._backend.restore(open_checkpoint(checkpoint, check_tensors=False, files=self._world.files).learner())

    def save(self, directory: Path) -> None:
        """See `LearnerBackend.save`."""
        self._backend.save(directory)

    def close(self) -> None:
        """Release groups, and the published weights. Nothing must be being written."""
        self._sender.close()
        self._backend.close()


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
        self._loaded = LocalLearner(self._config, self._model_path, self.world)
        return self._learner.vocab_size, self.world.processes.pid

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of this rank's learner."""
        return getattr(self._learner, name)(*args, **kwargs)

    def write(self, reading: Sequence[int]) -> Publication:
        """See `LocalLearner.write`. Begun in the lane `WRITE`."""
        return self._learner.write(reading)

    def write_state(self, directory: Path) -> list[FileRecord]:
        """See `LocalLearner.write_state`. Begun in the lane `CHECKPOINT`."""
        return self._learner.write_state(directory)


class RankedLearner:
    """The same calls as `LocalLearner`, made on all ranks at once. They are actors on this node.

    A rank that fails leaves the others waiting for it in a collective operation: the first failure ends all of them and
    is raised as `LearnerError`.
    """

    def __init__(self, config: Config, model_path: Path, run_dir: Path, gpus: float = 0.0, world: World = REAL):
        self._config, self._actors = config, world.actors
        learner, plain = config.learner, to_dict(config)
        self._ranks = [
            self._actors.spawn(
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
        met = self._actors.begin(self._ranks[0], "whereabouts")
        ((_, port),) = self._wait([met], learner.start_timeout)
        loaded = self._wait([self._actors.begin(rank, "load", port) for rank in self._ranks], learner.start_timeout)
        self.vocab_size: int = loaded[0][0]
        self.pids: Sequence[int] = [pid for _, pid in loaded]
        """Of the ranks' processes, which are on this host."""

    def _wait(self, calls: Sequence[Any], timeout: float | None = None) -> list[Any]:
        waiting = list(calls)
        while waiting:
            ready, waiting = self._actors.wait(waiting, timeout)
            if not ready:
                self.close()
                raise LearnerError(f"{len(waiting)} ranks of the learner did not answer within {timeout:.0f} s")
            for call in ready:
                try:
                    self._actors.get(call)
                except Exception as error:
                    self.close()
                    raise LearnerError(f"rank {calls.index(call)} of the learner failed: {error}") from error
        return [self._actors.get(call) for call in calls]

    def _all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._wait([self._actors.begin(rank, "call", name, *args, **kwargs) for rank in self._ranks])

    def gpus(self) -> list[str]:
        """See `LocalLearner.gpus`: the first rank sends."""
        return self._all("gpus")[0]

    def train(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[StepResult]:
        """See `LocalLearner.train`; each minibatch has micro-batches for every data-parallel rank, as many for one as for
        another, and the traces are those of all ranks."""
        p = self._config.learner.parallel
        given = [self._actors.put([[m[rank]] for m in minibatches]) for rank in range(p.dp)]
        # Megatron's order of ranks: tp varies fastest, then dp, then pp.
        calls = [
            self._actors.begin(actor, "call", "train", given[rank // p.tp % p.dp], version=version, trace=trace)
            for rank, actor in enumerate(self._ranks)
        ]
        answers: list[list[StepResult]] = self._wait(calls)
        return [
            StepResult(r[0].metrics, r[0].layer_agreement, r[0].expert_load, [t for rank in r for t in rank.traces])
            for r in zip(*answers, strict=True)
        ]

    def updates(self) -> int:
        """See `LocalLearner.updates`."""
        return self._all("updates")[0]

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """See `LearnerBackend.score`."""
        return self._all("score", token_ids, temperature)[0]

    def publish_through(self, backend: str) -> None:
        """See `LocalLearner.publish_through`."""
        self._all("publish_through", backend)

    def snapshot(self, version: int) -> None:
        """See `LocalLearner.snapshot`."""
        self._all("snapshot", version)

    def write(self, reading: Sequence[int] = ()) -> Publication:
        """See `LocalLearner.write`: the first rank does it, on this host."""
        call = self._actors.begin(self._ranks[0], "write", reading, lane=WRITE)
        return self._wait([call], self._config.weights.write_timeout)[0]

    def hold(self) -> None:
        """See `LocalLearner.hold`."""
        self._all("hold")

    def write_state(self, directory: Path) -> list[FileRecord]:
        """See `LocalLearner.write_state`: each rank writes its own file."""
        calls = [self._actors.begin(rank, "write_state", directory, lane=CHECKPOINT) for rank in self._ranks]
        return [record for records in self._wait(calls, self._config.checkpoint.write_timeout) for record in records]

    def restore(self, checkpoint: Path) -> None:
        """See `LocalLearner.restore`."""
        self._all("restore", checkpoint)

    def save(self, directory: Path) -> None:
        """See `LearnerBackend.save`."""
        self._all("save", directory)

    def close(self) -> None:
        """End the ranks' processes."""
        for rank in self._ranks:
            self._actors.kill(rank)
