"""The benchmark `bench conductor`: CPU time and messages of the conductor per group, for fleets
of several sizes.

The conductor is a run's real one, and generators call it with a run's real code; their episodes and
the learner's steps only take time (`fleet.py`). There are two ways to measure. `simulated`: one
process in virtual time. The CPU time is that of the conductor's callbacks: its Python code alone,
for any size, without garbage collections. `ray`: real processes and real calls. The CPU time is
that of the conductor's process, including Ray's share.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from dev.bench.fleet import CallCounts, ConductorLoad, CountingLearner, GeneratorHost, HostedRef
from dev.bench.jobs import BenchError, PrintLine, report_progress, run_job
from dev.bench.report import Measurements
from dev.simulation.loop import CURRENT_PROCESS, VirtualHandle, VirtualLoop, VirtualTimer
from dev.simulation.network import DelayRanges
from dev.simulation.world import Simulation
from r3async.actors.conductor import Conductor
from r3async.actors.run_setup import RunSetup
from r3async.config import config_to_dict, load_config
from r3async.world import ActorOptions, ActorRef, World

TIMEOUT_SECONDS = 600.0
CONDUCTOR = "conductor"
STATUS_SECONDS = 0.5
"""Seconds between two status requests of the driver, as in a run."""
START_SECONDS = 300.0

MeasuringWay = Literal["simulated", "ray"]
MEASURING_WAYS: tuple[MeasuringWay, ...] = ("simulated", "ray")


class ConductorJob(msgspec.Struct, frozen=True):
    load: ConductorLoad
    way: MeasuringWay


class ConductorCounts(msgspec.Struct, frozen=True):
    """Raw figures of one measurement of `seconds`.

    Attributes:
        groups: number of groups whose episodes were played.
        leases: generators' calls to the conductor.
        asked: the conductor's calls to generators and learner.
        cpu_seconds: CPU seconds of the conductor.
        busy: share of the places that had an episode.
    """

    seconds: float
    groups: float
    steps: int
    leases: int
    asked: int
    cpu_seconds: float
    busy: float


def measure_conductor(
    load: ConductorLoad, sizes: Sequence[int], ways: Sequence[MeasuringWay], print_line: PrintLine
) -> Measurements:
    """Measure each size in each way, each in a separate process. Raises `BenchError`."""
    episodes = (
        f"{load.places} of {load.episode_seconds:g} s a generator, in groups of {load.group_size}"
    )
    measured = Measurements(facts={"episodes": episodes})
    for way in ways:
        for size in sizes:
            print_line(f"conductor: {size} generators, {way}")
            job = ConductorJob(msgspec.structs.replace(load, generators=size), way)
            with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
                m = run_job(
                    f"{__name__}:measure",
                    job,
                    ConductorCounts,
                    Path(scratch),
                    timeout=TIMEOUT_SECONDS,
                    print_line=print_line,
                )
            if not m.groups:
                raise BenchError(f"{size} generators played no group in {m.seconds:.0f} s")
            figures = {
                "groups/s": m.groups / m.seconds,
                "CPU ms a group": 1e3 * m.cpu_seconds / m.groups,
                "messages a group": (m.leases + m.asked) / m.groups,
                "share of a core": m.cpu_seconds / m.seconds,
                "places busy": m.busy,
            }
            measured.add_figures(f"{size} generators, {way}", figures)
    return measured


# -- in the job's process --------------------------------------------------------------------------


class MeasuredFleet:
    """The actors of a measurement, started as `RunLauncher` starts those of a run. `cpu(pid)`
    returns the conductor's CPU seconds."""

    def __init__(
        self, world: World, load: ConductorLoad, run_dir: Path, cpu: Callable[[int], float]
    ):
        self._world = world
        self._load = load
        self._cpu = cpu
        config = config_to_dict(load_config("quickstart", load.overrides))
        spawn = world.actors.spawn_actor
        few = ActorOptions(0, max_concurrency=10_000)
        self._learner = spawn(CountingLearner, config, load, name="learner", actor_options=few)
        self._hosts: list[ActorRef] = []
        generators: dict[str, HostedRef] = {}
        for index in range(min(load.processes, load.generators)):
            names = [f"generator-{i}" for i in range(index, load.generators, load.processes)]
            host = spawn(
                GeneratorHost,
                config,
                load,
                names,
                self._learner,
                name=f"host-{index}",
                actor_options=few,
            )
            self._hosts.append(host)
            generators |= {name: HostedRef(name, host) for name in names}
        leads = (
            RunSetup("bench", config, str(run_dir)),
            self._learner,
            {n: generators[n] for n in sorted(generators)},
        )
        self._conductor = spawn(
            Conductor, *leads, name=CONDUCTOR, actor_options=ActorOptions(max_concurrency=1000)
        )

    async def measure_load(self, print_line: PrintLine, way: Any) -> ConductorCounts:
        clock = self._world.clock.monotonic
        load = self._load
        running = asyncio.ensure_future(self._conductor.call("run"))
        deadline = clock() + START_SECONDS
        while (status := await self._request_status(running))["phase"] != "training":
            if clock() > deadline:
                raise TimeoutError(f"the conductor is {status['phase']} after {START_SECONDS:g} s")
        pid = status["processes"]["conductor"][0]
        await self._follow_run(running, load.warm_up)
        gc.collect()
        gc.freeze()
        if way == "simulated":
            # A collection in one of the conductor's callbacks would walk the episodes, which a run
            # has in other processes: a third of the conductor's time with 512 generators. With Ray,
            # the conductor's own collections are measured.
            gc.disable()
        print_line(f"{load.generators} generators play")
        before = await self._sum_counts()
        began = clock()
        cpu = self._cpu(pid)
        await self._follow_run(running, load.seconds)
        cpu = self._cpu(pid) - cpu
        ended = clock()
        after = await self._sum_counts()
        running.cancel()
        leases, asked, busy, episodes, steps = (b - a for a, b in zip(before, after, strict=True))
        places = load.generators * load.places * (ended - began)
        groups = episodes / load.group_size
        return ConductorCounts(
            ended - began, groups, int(steps), int(leases), int(asked), cpu, busy / places
        )

    async def _follow_run(self, running: asyncio.Future[Any], seconds: float) -> None:
        until = self._world.clock.monotonic() + seconds
        while self._world.clock.monotonic() < until:
            await self._request_status(running)

    async def _request_status(self, running: asyncio.Future[Any]) -> dict[str, Any]:
        """Request the status as the driver of a run does."""
        await asyncio.wait([running], timeout=STATUS_SECONDS)
        if running.done():
            raise RuntimeError(f"the conductor ended: {running.result()}")
        return await self._conductor.call("get_status", 0)

    async def _sum_counts(self) -> tuple[float, ...]:
        """Return leases, calls of the conductor, busy seconds, episodes and steps."""
        hosts: list[CallCounts] = [await host.call("collect_counts") for host in self._hosts]
        learner_calls, episodes, steps = await self._learner.call("collect_counts")
        return (
            sum(c.leases for c in hosts),
            learner_calls + sum(c.asked for c in hosts),
            sum(c.busy for c in hosts),
            episodes,
            steps,
        )


class TimedLoop(VirtualLoop):
    """A virtual loop that adds up the CPU time of callbacks that belong to the conductor."""

    cpu = 0.0

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        context = copy_context() if context is None else context
        if _is_conductor(context):
            return super().call_soon(self._time_callback, callback, *args, context=context)
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> VirtualTimer:
        context = copy_context() if context is None else context
        if _is_conductor(context):
            return super().call_at(when, self._time_callback, callback, *args, context=context)
        return super().call_at(when, callback, *args, context=context)

    def _time_callback(self, callback: Callable[..., object], *args: Any) -> None:
        began = time.thread_time()
        try:
            callback(*args)
        finally:
            self.cpu += time.thread_time() - began


def _is_conductor(context: Context) -> bool:
    process = context.get(CURRENT_PROCESS)
    return process is not None and process.name == CONDUCTOR


class TimedSimulation(Simulation):
    loop_class = TimedLoop


def measure_simulated(load: ConductorLoad, print_line: PrintLine) -> ConductorCounts:
    simulation = TimedSimulation(0, delays=DelayRanges(call=(0.0005, 0.002), start=(0.5, 0.5)))
    loop = simulation.loop
    assert isinstance(loop, TimedLoop)
    process = simulation.begin_process("driver", simulation.hosts["host-0"])

    async def measure_fleet() -> ConductorCounts:
        fleet = MeasuredFleet(process.world, load, Path("/run"), lambda pid: loop.cpu)
        return await fleet.measure_load(print_line, "simulated")

    try:
        return simulation.run(process, measure_fleet())
    finally:
        gc.enable()
        simulation.close()


def measure_with_ray(load: ConductorLoad, run_dir: Path, print_line: PrintLine) -> ConductorCounts:
    from r3async.world.real import REAL_WORLD

    async def measure_fleet() -> ConductorCounts:
        fleet = MeasuredFleet(
            REAL_WORLD, load, run_dir, lambda pid: sum(psutil.Process(pid).cpu_times()[:2])
        )
        return await fleet.measure_load(print_line, "ray")

    REAL_WORLD.actors.join_cluster(None, load.processes + 2)
    try:
        return asyncio.run(measure_fleet())
    finally:
        REAL_WORLD.actors.leave_cluster()


def measure(job: ConductorJob, directory: Path) -> ConductorCounts:
    """Measure in the job's way, `simulated` or `ray`."""

    def print_line(line: str) -> None:
        report_progress(directory, line)

    return (
        measure_simulated(job.load, print_line)
        if job.way == "simulated"
        else measure_with_ray(job.load, directory / "run", print_line)
    )
