"""The generator's side of `bench transport`, in a separate process: it sends one size, raw or through the whole path.

It also has what both sides measure with: a trajectory of a given size, and the event loop's lag.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import msgspec
import numpy as np
import zmq

from dev.bench.jobs import forget_peak, memory_mib, progress
from dev.bench.wire import sampled_trajectory
from r3async.config import TransportConfig
from r3async.data.tokens import Trajectory
from r3async.transport import TrajectorySender, encode_trajectory
from r3async.world.sockets import ClientKeys, apply_client_keys

LIMIT = 240.0
"""Maximum seconds of one measurement."""
TICK = 0.001
ROUTES = (48, 8)
DENSE_BELOW = 100_000


class TransportJob(msgspec.Struct, frozen=True):
    """A job that sends `count` trajectories of `nbytes` to `endpoint`, of which `inflight` may be unacknowledged."""

    path: str
    endpoint: str
    nbytes: int
    count: int
    inflight: int
    server_public: bytes
    secret: bytes
    """Client's secret key of one measurement; its keys protect nothing."""

    @property
    def keys(self) -> ClientKeys:
        return ClientKeys(self.secret, self.server_public)


class Measured(msgspec.Struct, frozen=True):
    """The figures of one side: wall and CPU seconds from the first to the last answer, and lag in milliseconds."""

    seconds: float
    cpu_seconds: float
    lag_ms: list[float]
    own_lag_ms: list[float]
    high_water_mib: float


def specimen(nbytes: int) -> Trajectory:
    """Return a trajectory of about `nbytes` on the wire: dense if it is small, with 48x8 routes otherwise."""
    if nbytes < DENSE_BELOW:
        return sampled_trajectory(max(1, (nbytes - 1000) // 8))
    return sampled_trajectory(max(1, nbytes // 392), routes=ROUTES)


class Lag:
    """A monitor of the event loop's lag: how late a sleep of one millisecond ends, over and over.

    That is how long anything else on this event loop must wait. `own` is the part of it in which the loop's own thread
    was computing, and not waiting for a processor that others had.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.own: list[float] = []
        self.at: list[float] = []
        """Times at which the sleeps ended."""

    async def __aenter__(self) -> Lag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        computed = time.thread_time()
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK)
            self.at.append(time.perf_counter())
            self.seconds.append(self.at[-1] - began - TICK)
            before, computed = computed, time.thread_time()  # once a tick: this clock can take 50 µs to read
            self.own.append(computed - before)

    def between(self, began: float, ended: float) -> tuple[list[float], list[float]]:
        """Return lag and own lag of the ticks that ended in this time: median, 99th percentile and maximum, in
        milliseconds."""
        chosen = [i for i, at in enumerate(self.at) if began <= at <= ended]
        return _summary([self.seconds[i] for i in chosen]), _summary([self.own[i] for i in chosen])


def _summary(seconds: list[float]) -> list[float]:
    if not seconds:
        return []
    late = np.array(seconds) * 1e3
    return [float(np.median(late)), float(np.percentile(late, 99)), float(late.max())]


def send_raw(job: TransportJob) -> Measured:
    """Send the same frames over and over with blocking sockets and no protocol, and wait for one answer at the end."""
    frames = encode_trajectory(specimen(job.nbytes))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = max(4, 32 * 2**20 // job.nbytes) * len(frames)
    socket.sndtimeo = socket.rcvtimeo = int(LIMIT * 1000)
    if job.path != "raw":
        apply_client_keys(socket, job.keys)
    socket.connect(job.endpoint)
    socket.send(b"begin")
    socket.recv()
    began, computed = time.perf_counter(), time.process_time()
    for _ in range(job.count):
        socket.send_multipart(frames, copy=False)
    socket.recv()
    seconds, computed = time.perf_counter() - began, time.process_time() - computed
    socket.close()
    context.term()
    return Measured(seconds, computed, [], [], 0.0)


async def send_whole(job: TransportJob) -> Measured:
    """Send through `TrajectorySender` with `inflight` tasks that each encode and send, as if that many episodes ended
    at once."""
    settings = TransportConfig(ack_timeout=30.0, credit_bytes=max(2**28, 4 * job.nbytes))
    sender = TrajectorySender(job.endpoint, "bench", "bench", settings, keys=job.keys)
    await sender.start()
    trajectory = specimen(job.nbytes)
    numbers = iter(range(job.count))

    async def feed() -> None:
        for i in numbers:
            await sender.send(msgspec.structs.replace(trajectory, trajectory_id=f"t{i}", group_index=i))

    await sender.send(msgspec.structs.replace(trajectory, trajectory_id="first", group_index=job.count))
    await sender.flush(LIMIT)
    forget_peak()
    async with asyncio.timeout(LIMIT), Lag() as lag:
        began, computed = time.perf_counter(), time.process_time()
        await asyncio.gather(*(feed() for _ in range(job.inflight)))
        if await sender.flush(LIMIT):
            raise TimeoutError("not all was acknowledged")
        ended, computed = time.perf_counter(), time.process_time() - computed
    high = memory_mib("VmHWM")
    await sender.close()
    return Measured(ended - began, computed, *lag.between(began, ended), high)


def send(job: TransportJob, directory: Path) -> Measured:
    """Send on the path that the job names."""
    progress(directory, f"{job.path}: {job.count} x {job.nbytes:,} bytes")
    return send_raw(job) if job.path.startswith("raw") else asyncio.run(send_whole(job))
