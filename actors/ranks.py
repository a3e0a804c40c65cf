"""The learner's ranks: one in this process, or several, each a Ray actor of its own, driven as one."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.delivery import sender
from actors.process import begin
from r3async.batching.packing import MicroBatch
from r3async.checkpoint import FileRecord, open_checkpoint
from r3async.config import Config, config_from_dict, to_dict
from r3async.learners.base import LearnerError, StepResult
from r3async.weights.transport import Publication, WeightSender
from r3async.world import Files, World
from r3async.world.processes import environment
from r3async.world.real import REAL

if TYPE_CHECKING:
    from r3async.checkpoint.tensors import LearnerState

RANK_THREADS: dict[str, Any] = {"max_concurrency": 1, "concurrency_groups": {"write": 1, "checkpoint": 1}}
"""Options of a rank's actor: one thread makes every call but `write` and `write_state`, which have their own."""


def with_column(micro_batches: Sequence[MicroBatch], name: str, values: Sequence[np.ndarray]) -> list[MicroBatch]:
    """The micro-batches with a column more."""
    return [replace(m, table=m.table.with_columns(**{name: v})) for m, v in zip(micro_batches, values, strict=True)]


class LocalLearner:
    """A backend and the sender of its weights. All calls must come from the thread that made it, but for `write` and
    `write_state`."""

    pids: Sequence[int] = ()
    """Of further processes, which compute for this one."""

    def __init__(self, config: Config, model_path: Path, *, files: Files = REAL.files):
        import torch

        torch.set_num_threads(config.learner.threads)
        from r3async.learners.build import build_learner

        self._config, self._files = config, files
        self._backend = build_learner(config, model_path)
        self._sender: WeightSender | None = None
        self._dtype = getattr(torch, config.generator.dtype)
        self._snapshot: tuple[int, dict[str, Any]] | None = None
        self._writing = threading.Lock()
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
        self._sender = sender(self._config, backend)

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
        with self._writing:
            if self._snapshot is None:
                raise LearnerError("there is no snapshot to write")
            assert self._sender is not None
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
        return [write_part(directory, held, files=self._files)]

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint that has been verified; see `LearnerBackend.restore`."""
        opened = open_checkpoint(checkpoint, check_tensors=False, files=self._files)
        self._backend.restore(opened.learner())

    def save(self, directory: Path) -> None:
        """See `LearnerBackend.save`."""
        self._backend.save(directory)

    def close(self) -> None:
        """Release groups, and the published weights, as soon as nothing is written any more."""
        with self._writing:
            if self._sender is not None:
                self._sender.close()
        self._backend.close()


class RankActor:
    """One rank of several, in a process of its own."""

    def __init__(self, world: World, rank: int, config: dict[str, Any], model_path: str, run_dir: str):
        self.world, self._lock = world, begin(world, Path(run_dir), f"learner-rank-{rank}")
        self._rank, self._config, self._model_path = rank, config_from_dict(config), Path(model_path)
        self._learner: LocalLearner | None = None
        self._store: Any = None

    def whereabouts(self) -> tuple[int, int]:
        """Process id, and the port of the store over which the ranks meet, which is made here."""
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.world.processes.pid, self._store.port

    def load(self, port: int) -> tuple[int, int]:
        """Meet the other ranks and load the model; returns the vocabulary's size, and this process's id."""
        import torch
        import torch.distributed as dist

        cuda = torch.cuda.is_available()
        world = self._config.learner.parallel.world
        store = self._store or dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=self._rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=self._config.learner.collective_timeout),
        )
        self._learner = LocalLearner(self._config, self._model_path, files=self.world.files)
        return self._learner.vocab_size, self.world.processes.pid

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of this rank's learner."""
        return getattr(self._learner, name)(*args, **kwargs)

    def write(self, reading: Sequence[int]) -> Publication:
        """See `LocalLearner.write`. Belongs to the concurrency group `write`, which has a thread of its own."""
        assert self._learner is not None
        return self._learner.write(reading)

    def write_state(self, directory: Path) -> list[FileRecord]:
        """See `LocalLearner.write_state`. Belongs to the concurrency group `checkpoint`."""
        assert self._learner is not None
        return self._learner.write_state(directory)


class RankedLearner:
    """The same calls as `LocalLearner`, made on all ranks at once. They are actors on this node.

    A rank that fails leaves the others waiting for it in a collective operation: the first failure ends all of them and
    is raised as `LearnerError`.
    """

    def __init__(self, config: Config, model_path: Path, run_dir: Path, gpus: float = 0.0):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._config, self._ray = config, ray
        learner = config.learner
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        kind = ray.remote(**RANK_THREADS)(RankActor).options(
            num_cpus=0 if not learner.threads else 1,
            num_gpus=gpus,
            scheduling_strategy=here,
            runtime_env={"env_vars": environment(learner.threads)},
        )
        plain = to_dict(config)
        self._ranks = [
            kind.remote(REAL, rank, plain, str(model_path), str(run_dir)) for rank in range(learner.parallel.world)
        ]
        (_, port), *_ = self._wait([self._ranks[0].whereabouts.remote()], learner.start_timeout)
        loaded = self._wait([r.load.remote(port) for r in self._ranks], learner.start_timeout)
        self.vocab_size: int = loaded[0][0]
        self.pids: Sequence[int] = [pid for _, pid in loaded]
        """Of the ranks' processes, which are on this host."""

    def _wait(self, calls: list[Any], timeout: float | None = None) -> list[Any]:
        ray, waiting = self._ray, list(calls)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=timeout)
            if not ready:
                self.close()
                raise LearnerError(f"{len(waiting)} ranks of the learner did not answer within {timeout:.0f} s")
            try:
                ray.get(ready)
            except ray.exceptions.RayError as error:
                rank = calls.index(ready[0])
                self.close()
                reason = getattr(error, "cause", None) or error
                raise LearnerError(f"rank {rank} of the learner failed: {reason}") from error
        return ray.get(calls)

    def _all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._wait([rank.call.remote(name, *args, **kwargs) for rank in self._ranks])

    def gpus(self) -> list[str]:
        """See `LocalLearner.gpus`: the first rank sends."""
        return self._all("gpus")[0]

    def train(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[StepResult]:
        """See `LocalLearner.train`; each minibatch has micro-batches for every data-parallel rank, as many for one as for
        another, and the traces are those of all ranks."""
        p = self._config.learner.parallel
        given = [self._ray.put([[m[rank]] for m in minibatches]) for rank in range(p.dp)]
        # Megatron's order of ranks: tp varies fastest, then dp, then pp.
        calls = [
            actor.call.remote("train", given[rank // p.tp % p.dp], version=version, trace=trace)
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
        write = self._ranks[0].write.options(concurrency_group="write")
        return self._wait([write.remote(reading)], self._config.weights.write_timeout)[0]

    def hold(self) -> None:
        """See `LocalLearner.hold`."""
        self._all("hold")

    def write_state(self, directory: Path) -> list[FileRecord]:
        """See `LocalLearner.write_state`: each rank writes its own file."""
        calls = [r.write_state.options(concurrency_group="checkpoint").remote(directory) for r in self._ranks]
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
            self._ray.kill(rank)
