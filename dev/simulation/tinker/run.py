"""A simulated run of the Tinker server: clients, the faults that befall it, and what must hold.

| invariant  | what must hold                                                                       |
|------------|--------------------------------------------------------------------------------------|
| `weights`  | each acknowledged request of a client is applied once, in the order of its numbers   |
| `one`      | calls for a model come one at a time                                                 |
| `lost`     | a request, result, model or sampler that was acknowledged is there                   |
| `refused`  | what is refused fails as the user's, what fails as the server's, and others go on    |
| `harmed`   | nothing fails but what is to blame                                                   |
| `stuck`    | every client comes to its end                                                        |
| `polls`    | a poll is held while there is no result, and answered before the SDK gives it up     |
| `sampled`  | a sample is drawn by the weights of its sampler                                      |
| `kept`     | a sample's tokens are trained with its routes and version, and others without        |
| `version`  | a model's version counts its updates                                                 |
| `memory`   | kept sequences take no more disk than they may                                       |
| `snapshots`| a model has a few snapshots, in the engine and on disk                               |
| `fair`     | a session that waits for samples is passed over by no other one twice                |
| `idle`     | a session ends when it is closed, or with heartbeats alone, and leaves no files      |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextvars import Context
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from dev.simulation.disk import WRITE_OPERATIONS
from dev.simulation.invariants import InvariantViolated
from dev.simulation.loop import DeadlockError, LimitReachedError
from dev.simulation.mutants import replace_attribute
from dev.simulation.processes import HostProcess
from dev.simulation.tinker.backend import ScriptedBackend
from dev.simulation.tinker.client import ClientPlan, SimulatedClient
from dev.simulation.tinker.line import LineFaults, ServerLine
from dev.simulation.world import Simulation
from r3async.tinker import sampling
from r3async.tinker.service import SWEEP_SECONDS, TinkerService
from r3async.tinker.sessions import IDLE_SECONDS, SNAPSHOTS_PER_MODEL

DIRECTORY = Path("/tinker")
FAULT_SECONDS = 90.0
"""When the last fault comes."""
MAX_RUNNING = 4
"""Sequences that the engine samples at once: so that clients have to wait."""
WATCH_SECONDS = 7.0


class TinkerPlan(msgspec.Struct, frozen=True):
    """The clients and faults of a run, drawn from a seed.

    Attributes:
        kills: Times at which the server is killed, and how long it is away.
        operations: Numbers of the file operations in the middle of which it is killed.
    """

    clients: tuple[ClientPlan, ...]
    line: LineFaults
    kills: tuple[tuple[float, float], ...]
    operations: tuple[int, ...]
    learner_losses: tuple[float, ...]
    engine_losses: tuple[float, ...]
    failures: tuple[float, ...]
    kept_bytes: int


def draw_plan(seed: int) -> TinkerPlan:
    """Return the plan of a seed. One seed in ten has no fault."""
    rng = Random(f"tinker/{seed}")
    calm = rng.random() < 0.1
    greedy = rng.random() < 0.3
    clients = []
    for index in range(rng.randint(1, 4)):
        steps = rng.randint(2, 8)
        vanishes = rng.randrange(steps) if index and rng.random() < 0.3 else -1
        samples = 40 if greedy and index == 0 else rng.randint(0, 4)
        plan = ClientPlan(index, rng.randint(1, 64), steps, samples, vanishes, rng.random() < 0.7)
        clients.append(plan)

    def draw_times(most: int) -> tuple[float, ...]:
        count = 0 if calm else rng.randint(0, most)
        return tuple(sorted(rng.uniform(1.0, FAULT_SECONDS) for _ in range(count)))

    rate = 0.0 if calm else 1.0
    return TinkerPlan(
        tuple(clients),
        LineFaults(rate * rng.uniform(0, 0.2), rate * rng.uniform(0, 0.2), rng.uniform(0.01, 1.0)),
        tuple((at, rng.uniform(0.5, 60.0)) for at in draw_times(3)),
        tuple(rng.randint(1, 300) for _ in draw_times(3)),
        draw_times(3),
        draw_times(3),
        draw_times(2),
        2**30 if rng.random() < 0.8 else 8_000,
    )


class TinkerResult(msgspec.Struct):
    """The result of a run. `virtual_seconds` is when its clients came to their end; `counts` has
    its faults."""

    seed: int
    violated: str
    reason: str
    steps: int
    virtual_seconds: float
    callbacks: int
    seconds: float
    counts: dict[str, int]
    digest: str


class TinkerRun:
    """One simulated run."""

    def __init__(self, seed: int):
        self.plan = draw_plan(seed)
        self.simulation = Simulation(
            f"tinker/{seed}", max_callbacks=5_000_000, max_seconds=6 * IDLE_SECONDS
        )
        self._seed = seed
        self._loop = self.simulation.loop
        self._host = self.simulation.hosts["host-0"]
        self._line = ServerLine(self.simulation, self.plan.line, self._report)
        self._backend: ScriptedBackend | None = None
        self._violation: InvariantViolated | None = None
        self._ended_at = 0.0
        self._operations = list(self.plan.operations)
        self._clients = [
            SimulatedClient(
                plan,
                self._line,
                self.simulation.rng_for(f"client/{plan.number}"),
                self._loop.time,
                keeps_all=self.plan.kept_bytes > 2**20,
            )
            for plan in self.plan.clients
        ]

    def _report(self, violation: InvariantViolated) -> None:
        self._violation = self._violation or violation
        self._loop.stop()

    def run(self) -> TinkerResult:
        """Run to the end, or to the first violation."""
        began = time.perf_counter()
        loop = self._loop
        try:
            with replace_attribute(sampling, "MAX_RUNNING", lambda before: MAX_RUNNING):
                root = loop.create_task(self._act(), name="root", context=Context())
                root.add_done_callback(lambda _: loop.stop())
                loop.run_forever()
            if self._violation is None:
                root.result()
            if self._violation is None and loop.failures:
                self._violation = InvariantViolated("unhandled", loop.failures[0])
        except InvariantViolated as violation:
            self._violation = violation
        except (DeadlockError, LimitReachedError) as error:
            self._violation = InvariantViolated("stuck", f"{type(error).__name__}: {error}")
        self.simulation.close()
        found = self._violation
        return TinkerResult(
            self._seed,
            "" if found is None else found.name,
            "" if found is None else found.reason,
            sum(client.steps for client in self._clients),
            self._ended_at or round(loop.now, 3),
            loop.callback_count,
            round(time.perf_counter() - began, 3),
            dict(sorted(self._line.counts.items())),
            self.simulation.log.compute_digest(),
        )

    # -- the server --------------------------------------------------------------------------------

    def _start_server(self) -> None:
        process = self.simulation.begin_process("server", self._host)
        rng = process.rng_for("backend")
        self._backend = ScriptedBackend(process.world.files, rng, self._report)
        self._watch_sampling(self._backend)
        self._line.process = process
        self._line.service = None
        self._line.turns.clear()
        self._loop.create_task(
            self._serve(process, self._backend), name="serve", context=process.context.copy()
        )

    async def _serve(self, process: HostProcess, backend: ScriptedBackend) -> None:
        service = TinkerService(backend, DIRECTORY, process.world, kept_bytes=self.plan.kept_bytes)
        await service.training.recover()
        self._line.service = service
        await service.sweep()

    def _watch_sampling(self, backend: ScriptedBackend) -> None:
        sample = backend.sample

        async def watched(snapshot: Any, prompt: Any, params: Any, **rest: Any) -> Any:
            self._line.turns.sample_began(int(prompt[0]), params.seed)
            return await sample(snapshot, prompt, params, **rest)

        backend.sample = watched  # type: ignore[method-assign]

    def _kill(self, restart_seconds: float) -> None:
        process = self._line.process
        if process is not None and not process.ended:
            self._line.counts["kills"] += 1
            self.simulation.end_process(process, "killed")
            self._loop.call_later(restart_seconds, self._start_server, context=Context())

    def _count_operation(self, process: Any, operation: str, path: Path) -> None:
        if operation in WRITE_OPERATIONS and self._operations and process is self._line.process:
            self._operations[0] -= 1
            if self._operations[0] <= 0:
                del self._operations[0]
                self._kill(2.0)

    def _lose(self, what: str) -> None:
        assert self._backend is not None
        if what == "learner":
            self._backend.lose_learner()
        elif what == "engine":
            self._backend.lose_engine()
        else:
            self._backend.failures_left += 1
        self._line.counts[what] += 1

    # -- the run -----------------------------------------------------------------------------------

    async def _act(self) -> None:
        self._host.disk.on_operation = self._count_operation
        self._start_server()
        for at, seconds in self.plan.kills:
            self._loop.call_at(at, self._kill, seconds)
        for what, times in (
            ("learner", self.plan.learner_losses),
            ("engine", self.plan.engine_losses),
            ("failure", self.plan.failures),
        ):
            for at in times:
                self._loop.call_at(at, self._lose, what)
        watching = asyncio.ensure_future(self._watch())
        tasks = [asyncio.ensure_future(client.run()) for client in self._clients]
        try:
            await asyncio.gather(*tasks)
            self._ended_at = round(self._loop.now, 3)
            await self._end_sessions()
        finally:
            for task in [watching, *tasks]:
                task.cancel()

    async def _watch(self) -> None:
        """Check now and then what must hold at any time."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for client in self._clients:
                self._check_snapshots(client.model_id)
            service = self._line.service
            most = self.plan.kept_bytes * 17 // 16 + 4096
            if service is not None and service.parts.kept.nbytes > most:
                used = service.parts.kept.nbytes
                self._report(InvariantViolated("memory", f"{used} bytes of sequences are kept"))

    def _check_snapshots(self, model_id: str) -> None:
        if self._backend is None or not model_id:
            return
        opened = self._backend.open_snapshots(model_id)
        # The new one is opened before the oldest is closed.
        if len(opened) > SNAPSHOTS_PER_MODEL + 1:
            self._report(InvariantViolated("snapshots", f"{model_id} has {opened}"))

    async def _end_sessions(self) -> None:
        """Let sessions that are not closed be idle, and check that nothing is left."""
        if self._line.counts["failed"] > len(self.plan.failures):
            reason = f"{self._line.counts['failed']} requests failed that nothing ailed"
            raise InvariantViolated("harmed", reason)
        await asyncio.sleep(max(0.0, FAULT_SECONDS + 120.0 - self._loop.now))
        beating = [
            asyncio.ensure_future(client.beat())
            for client in self._clients
            if client.session_id and not client.plan.closes
        ]
        # Also those are idle whose id was lost on its way to the client. A server that was killed
        # while it removed their files counts anew.
        process = None
        while process is not self._line.process:
            process = self._line.process
            await asyncio.sleep(IDLE_SECONDS + 2 * SWEEP_SECONDS + 60.0)
        for one in beating:
            one.cancel()
        reader = self.simulation.begin_process("reader", self._host)
        files = reader.world.files
        left = [
            str(path)
            for path in (DIRECTORY / "sessions", DIRECTORY / "requests")
            for path in (path / name for name in files.list_names(path))
        ]
        for model in files.list_names(DIRECTORY / "weights"):
            for kind in ("states", "snapshots"):
                left += files.list_names(DIRECTORY / "weights" / model / kind)
        self.simulation.end_process(reader, "it has read")
        if left:
            raise InvariantViolated("idle", f"sessions that are over left {left[:3]}")


def run_seed(seed: int, mutant: str = "") -> TinkerResult:
    """Simulate a seed, with a planted defect if one is named."""
    from dev.simulation.tinker.mutants import MUTANTS

    with MUTANTS[mutant].plant() if mutant else contextlib.nullcontext():
        return TinkerRun(seed).run()
