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

from r3async.actors.delivery import directory
from r3async.actors.places import CHECKPOINT, WRITE
from r3async.actors.rank_calls import RankCalls, RankLost, Ranks, start_ranks
from r3async.actors.ranks import LocalLearner, RankActor
from r3async.actors.redo import HOLD, SNAPSHOT, Change, RedoLog
from r3async.checkpoint import FileRecord
from r3async.config import Config
from r3async.data.written import UNKNOWN, WrittenBytes, written_bytes
from r3async.learner import LearnerError, MinibatchResult, summed_stages
from r3async.learner.batch.packing import MicroBatch
from r3async.weights.publish import Publication
from r3async.weights.sending import ShardedPublisher
from r3async.world import Placement, World
from r3async.world.real import REAL

R = TypeVar("R")


class Tell(Protocol):
    """Reports an event."""

    def __call__(self, event: str, /, **facts: Any) -> object: ...


def _silent(event: str, /, **facts: Any) -> None:
    pass


class RankedLearner:
    """The same calls as `LocalLearner`, made on all ranks at once: actors. The first one answers for all; it is on this host.

    Ranks of one host are started again if one is lost, and whoever calls waits meanwhile, and sees nothing else of it: they begin
    with the copies of their state that they made last (`supervise.copy_steps`), make what came after those again, and then the
    call during which one was lost. So the same weights follow, bit by bit, where the same computation gives the same bits.
    Raises `RankLost` if they cannot be started again: ranks of several hosts, `weights.backend = "nccl"`, no copies, or one lost
    `supervise.max_rank_restarts` times without a step in between.
    """

    rank: type[RankActor] = RankActor

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        world: World = REAL,
        start: Callable[[], Ranks] | None = None,
        tell: Tell = _silent,
        written: WrittenBytes = UNKNOWN,
    ):
        """`start`: the ranks once more. `written`: see `written_bytes`."""
        self._config, self._world, self._ranks, self._start, self._tell = config, world, ranks, start, tell
        self._version_seconds = config.weights.write_seconds(written.version)
        self._state_seconds = config.checkpoint.write_seconds(written.checkpoint)
        self._publisher: ShardedPublisher | None = None
        self._transport = ""
        self._log = RedoLog(config.supervise.copy_steps if start is not None and ranks.one_host else 0)
        self._lock = world.threads.lock()
        """On the log, and which ranks there are. It is held while they start again: who waits for it has to wait for them."""
        self._closed = self._storing = False
        """`_storing`: what the ranks hold for a checkpoint is being written."""
        self._in_a_row = 0
        """Restarts without a step in between."""
        self.restarts = 0

    @classmethod
    def load(
        cls,
        config: Config,
        model_path: Path,
        run_dir: Path,
        places: Sequence[Placement] = (),
        world: World = REAL,
        tell: Tell = _silent,
    ) -> RankedLearner:
        """Start the ranks at these `places`, or all beside this process; they meet and load the model. Blocking. Raises
        `LearnerError`."""
        start = partial(start_ranks, cls.rank, config, model_path, run_dir, places, world)
        try:
            return cls(config, start(), world, start, tell, written_bytes(config, model_path, files=world.files))
        except RankLost as error:  # the same start would end in the same way
            raise LearnerError(str(error)) from error

    @property
    def vocab_size(self) -> int:
        return self._ranks.vocab_size

    @property
    def processes(self) -> Sequence[tuple[int, str]]:
        return self._ranks.processes

    # -- calls -----------------------------------------------------------------------------------------------------

    def _made(self, make: Callable[[RankCalls], R], change: Change | None = None) -> R:
        """What `make` returns, made by ranks none of which was lost meanwhile, if it is a `change`."""
        while True:
            ranks = self._ranks
            try:
                made = make(ranks.calls)
            except RankLost as lost:
                self._restart(ranks, lost)
                continue
            if change is None:
                return made
            with self._lock:
                if ranks is self._ranks:  # else those that have it are gone
                    self._log.add(change)
                    return made

    def _on_all(self, name: str, *args: Any) -> Any:
        return self._made(lambda calls: calls.on_all("call", name, *args)[0])

    def gpus(self) -> list[str]:
        return self._on_all("gpus")

    def updates(self) -> int:
        return self._on_all("updates")

    def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        return self._on_all("score", token_ids, temperature)

    def save(self, directory: Path) -> None:
        self._on_all("save", directory)

    def restore(self, checkpoint: Path) -> None:
        self._on_all("restore", checkpoint)
        with self._lock:
            self._log.restored(checkpoint)

    def train(
        self, minibatches: Sequence[Sequence[Sequence[MicroBatch]]], *, version: int, trace: bool = False
    ) -> list[MinibatchResult]:
        """See `trainer.Ranks.train`."""
        given = [[[m[rank]] for m in minibatches] for rank in range(self._config.learner.parallel.dp)]
        answers: list[list[MinibatchResult]] = self._step("train", given, version=version, trace=trace)
        return [
            msgspec.structs.replace(
                results[0],
                traces=[t for result in results for t in result.traces],
                digests=summed_stages([result.digests for result in results]),
            )
            for results in zip(*answers, strict=True)
        ]

    def train_supervised(self, shares: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """See `LocalLearner.train_supervised`: with the micro-batches of every data-parallel rank."""
        return self._step("train_supervised", [[mine] for mine in shares])[0]

    def supervised_loss_of(self, shares: Sequence[Sequence[MicroBatch]]) -> tuple[float, float]:
        """See `LocalLearner.supervised_loss_of`."""
        asked = self._divided("supervised_loss_of", [[mine] for mine in shares])
        return self._made(lambda calls: self._make(calls, asked))[0]

    def _divided(self, name: str, given: Sequence[Any], **options: Any) -> Change:
        return Change(name, tuple(self._ranks.calls.share(each) for each in given), options, divided=True)

    def _make(self, calls: RankCalls, change: Change) -> list[Any]:
        """What every rank returns."""
        if not change.divided:
            return calls.on_all("call", change.name, *change.given)
        p, given = self._config.learner.parallel, change.given
        # Megatron's order of ranks: tp varies fastest, then cp, dp and pp.
        return calls.wait(
            [
                calls.begin(r, "call", change.name, given[r // (p.tp * p.cp) % p.dp], **change.options)
                for r in range(p.world)
            ]
        )

    def _step(self, name: str, given: Sequence[Any], **options: Any) -> list[Any]:
        change = self._divided(name, given, **options)
        answers = self._made(lambda calls: self._make(calls, change), change)
        self._in_a_row = 0
        # A copy has waited for a step by now: if for a checkpoint, that was given up before anything of it was written.
        if self._log.waits and not self._storing:
            with self._lock:
                self._log.wrote(HOLD)
        if self._log.due:
            self._copy()
        return answers

    def snapshot(self, version: int) -> None:
        change = Change(SNAPSHOT, (version,))
        self._made(lambda calls: self._make(calls, change), change)

    def hold(self) -> None:
        change = Change(HOLD)
        self._made(lambda calls: self._make(calls, change), change)

    def publish_through(self, backend: str) -> None:
        """See `LocalLearner.publish_through`: ranks that are all on this host write one file together. Of ranks on several hosts
        the first gathers the whole, and writes it."""
        together = self._ranks.one_host
        self._transport = backend
        if backend == "nccl":  # engines would wait for what the lost ranks were to send
            with self._lock:
                self._log.stop()
        self._on_all("publish_through", backend, together)
        if together:
            folder, deltas = directory(self._config), backend == "tcp"
            self._publisher = ShardedPublisher(
                folder, self._each, len(self.processes), deltas=deltas, world=self._world
            )

    def write(self, reading: Sequence[int] = ()) -> Publication:
        """See `LocalLearner.write`: each rank writes what it hands in. By NCCL the first one sends it, from its GPU."""
        publication = self._made(lambda calls: self._write(calls, reading))
        with self._lock:
            self._log.wrote(SNAPSHOT)
            with contextlib.suppress(LearnerError):  # one that is lost has let go of it
                self._ranks.calls.on_all("call", "let_go", lane=WRITE)
        return publication

    def _write(self, calls: RankCalls, reading: Sequence[int]) -> Publication:
        if self._publisher is None:
            writing = calls.begin(0, "call", "write", reading, lane=WRITE)
            return calls.wait([writing], self._version_seconds, alone=True)[0]
        publication = self._publisher.send(reading)
        if self._transport == "nccl":
            (publication,) = calls.wait([calls.begin(0, "call", "announce", publication.manifest, lane=WRITE)])
        return publication

    def _each(self, name: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The method `name` of every rank, in its thread for writing, each with arguments of its own."""
        calls = self._ranks.calls
        begun = [calls.begin(rank, "call", name, *args, lane=WRITE) for rank, args in enumerate(given)]
        return calls.wait(begun, self._version_seconds, alone=True)

    def write_state(self, directory: Path) -> list[FileRecord]:
        """See `LocalLearner.write_state`: each rank writes its own file."""
        timeout, files = self._state_seconds, self._world.files

        def write(calls: RankCalls) -> list[FileRecord]:
            for name in files.list(directory):  # what ranks that were lost began to write
                files.remove(directory / name)
            written = calls.on_all("call", "write_state", directory, lane=CHECKPOINT, timeout=timeout, alone=True)
            return [record for records in written for record in records]

        self._storing = True
        try:
            return self._made(write)
        finally:
            with self._lock:
                self._storing = False
                self._log.wrote(HOLD)

    def close(self) -> None:
        """End the ranks' processes."""
        self._closed = True
        self._ranks.calls.kill()
        if self._publisher is not None:
            self._publisher.close()

    # -- if one is lost --------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        """Have every rank copy its state to where it outlives the rank: what an actor's call returns belongs to who called, and
        is in shared memory of the actor's host."""
        ranks, calls = self._ranks, self._ranks.calls
        try:
            if not self._fits(calls):
                return
            begun = [calls.begin(rank, "call", "copy") for rank in range(len(ranks.processes))]
            calls.wait(begun)
        except RankLost as lost:
            return self._restart(ranks, lost)  # the next step is followed by a copy
        with self._lock:
            if ranks is self._ranks:
                self._log.copied(begun)

    def _fits(self, calls: RankCalls) -> bool:
        """Whether two copies do; asked until there is one."""
        if not isinstance(self._log.base, tuple):
            nbytes, host = sum(calls.on_all("call", "copy_bytes")), self.processes[0][1]
            store = next((node.store for node in self._world.actors.nodes() if node.name == host), math.inf)
            if 2 * nbytes > store:
                self._tell("ranks_not_copied", bytes=nbytes, store=int(store), hint=STORE_HINT)
                with self._lock:
                    self._log.stop()
        return bool(self._log.every)

    def _restart(self, lost_ranks: Ranks, lost: RankLost) -> None:
        """Start all ranks again, unless another thread has. Raises `RankLost` if that is not possible."""
        with self._lock:
            if self._ranks is not lost_ranks or self._closed:
                if self._closed:
                    raise lost
                return
            clock, log = self._world.clock.monotonic, self._log
            began, reason = clock(), str(lost).partition("\n")[0]
            pids = [pid for pid, _ in lost_ranks.processes]
            self._tell("rank_lost", error=reason, pids=pids, restarts=self.restarts)
            while True:
                if not log.every or self._start is None or self._in_a_row >= self._config.supervise.max_rank_restarts:
                    raise lost
                for process in lost_ranks.processes:
                    self._world.processes.kill(*process)  # one that was paused gets no request, and keeps its place
                self._in_a_row += 1
                try:
                    ranks = self._again(self._start())
                    break
                except LearnerError as error:
                    lost = RankLost(f"{reason}; and the ranks could not be started again: {error}")
            self._ranks = ranks
            self.restarts += 1
            self._tell(
                "ranks_restarted",
                pids=[pid for pid, _ in ranks.processes],
                steps_again=log.steps,
                seconds=round(clock() - began, 3),
                restarts=self.restarts,
            )

    def _again(self, ranks: Ranks) -> Ranks:
        """With the state, and the copies that wait to be written, of those that were lost."""
        calls, log = ranks.calls, self._log
        if self._transport:
            calls.on_all("call", "publish_through", self._transport, True)
        if isinstance(log.base, Path):
            calls.on_all("call", "restore", log.base)
        elif log.base is not None:
            calls.on_all("call", "restore_copies", *log.base)
        for change in log.changes:
            self._make(calls, change)
        return ranks


STORE_HINT = (
    "the host's object store of Ray cannot hold two copies of the ranks' state: if a rank is lost, the run restarts from its "
    "newest checkpoint. Start Ray with a larger --object-store-memory, or set supervise.copy_steps=0"
)


def load_learner(
    config: Config,
    model_path: Path,
    run_dir: Path,
    places: Sequence[Placement] = (),
    world: World = REAL,
    tell: Tell = _silent,
) -> LocalLearner | RankedLearner:
    """One rank here, or several as actors; see their `load`."""
    if config.learner.parallel.world == 1:
        return LocalLearner.load(config, model_path, world)
    return RankedLearner.load(config, model_path, run_dir, places, world, tell)
