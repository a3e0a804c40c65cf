"""The benchmark `bench transport`: the whole path (encode, socket, validate, spool, decode) against raw ZeroMQ, side by
side.

The generator is a separate process (`transport_sender.py`); this one is the learner. Raw ZeroMQ is DEALER to ROUTER
with blocking sockets and the same frames, with nothing encoded, checked or answered: the ceiling. `raw, CURVE` is the
same, encrypted as every connection of a run is. All take turns, `rounds` times, and the share is of the medians. The
learner's lag beside `raw` is that of an idle loop: what the machine itself causes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import zmq

from dev.bench.jobs import BenchError, Say, forget_peak, memory_mib, run_job, table
from dev.bench.transport_sender import LIMIT, Lag, Measured, TransportJob, specimen
from r3async.config import BufferConfig, TransportConfig
from r3async.data.tokens import Trajectory
from r3async.transport import TrajectoryReceiver, encode_trajectory
from r3async.transport.spool import Spool
from r3async.world.sockets import apply_server_keys, generate_keys

SIZES = (10_000, 200_000, 5_000_000, 12_600_000)
MOVED = 600_000_000
"""Maximum number of bytes that one measurement moves."""


class Rate(msgspec.Struct, frozen=True):
    """One way of sending: medians over the rounds.

    Lag is median, 99th percentile and maximum in ms, the worst round's, and own lag is the part of it that this program
    caused. Memory is the highest resident size during the measurement, MiB, in the highest round. `cpu_s_per_gb` is of
    both processes; raw's over it is `share_of_raw_cpu`, which a busy machine does not blur. `curve` is raw ZeroMQ that
    encrypts, as every connection of a run does.
    """

    gb_per_s: float
    messages_per_s: float
    share_of_raw: float
    cpu_s_per_gb: float
    share_of_raw_cpu: float
    share_of_curve: float
    share_of_curve_cpu: float
    generator_lag_ms: list[float]
    generator_own_lag_ms: list[float]
    learner_lag_ms: list[float]
    learner_own_lag_ms: list[float]
    generator_mib: float
    learner_mib: float


class Size(msgspec.Struct, frozen=True):
    nbytes: int
    tokens: int
    count: int
    paths: dict[str, Rate]


class Report(msgspec.Struct, frozen=True):
    """The report of `bench transport`; `disk` is a spool in the page cache of `scratch`'s file system, without
    fsync."""

    benchmark: str
    rounds: int
    load_average: float
    scratch: str
    sizes: list[Size]


PATHS = ("raw", "raw, CURVE", "memory", "disk")

Round = tuple[Measured, Measured]
"""One round's figures of the generator, and of the learner."""


def run(*, quick: bool, rounds: int, say: Say) -> Report:
    """Measure every size on every path. Raises `BenchError`."""
    sizes, rounds, moved = ((10_000, 200_000), 1, MOVED // 100) if quick else (SIZES, rounds, MOVED)
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        measured = []
        for nbytes in sizes:
            trajectory = specimen(nbytes)
            actual = sum(map(len, encode_trajectory(trajectory)))
            count = max(12, min(6000, moved // actual))
            seen: dict[str, list[Round]] = {path: [] for path in PATHS}
            for _ in range(rounds):
                for path in PATHS:
                    place = Path(tempfile.mkdtemp(dir=scratch))
                    receive = _receive_raw if path.startswith("raw") else _receive_whole
                    seen[path].append(asyncio.run(receive(path, nbytes, count, place, say)))
            gigabytes = count * actual / 1e9
            raw, curve = (_speed_and_cpu(seen[path], gigabytes) for path in PATHS[:2])
            paths = {path: _summary(each, raw, curve, gigabytes, count) for path, each in seen.items()}
            measured.append(Size(actual, trajectory.num_tokens, count, paths))
        return Report("transport", rounds, os.getloadavg()[0], scratch, measured)


def _speed_and_cpu(rounds: Sequence[Round], gigabytes: float) -> tuple[float, float]:
    """Return the medians of GB/s, and of both processes' CPU seconds per GB."""
    speed = median(gigabytes / generator.seconds for generator, _ in rounds)
    return speed, median((g.cpu_seconds + learner.cpu_seconds) / gigabytes for g, learner in rounds)


def _summary(
    rounds: Sequence[Round], raw: tuple[float, float], curve: tuple[float, float], gigabytes: float, count: int
) -> Rate:
    speed, cpu = _speed_and_cpu(rounds, gigabytes)
    generator, learner = zip(*rounds, strict=True)

    def worst(lags: list[list[float]]) -> list[float]:
        found = [lag for lag in lags if lag]
        return [float(x) for x in np.max(found, axis=0)] if found else []

    return Rate(
        speed,
        speed * count / gigabytes,
        speed / raw[0],
        cpu,
        raw[1] / cpu,
        speed / curve[0],
        curve[1] / cpu,
        worst([m.lag_ms for m in generator]),
        worst([m.own_lag_ms for m in generator]),
        worst([m.lag_ms for m in learner]),
        worst([m.own_lag_ms for m in learner]),
        max(m.high_water_mib for m in generator),
        max(m.high_water_mib for m in learner),
    )


async def _generator(job: TransportJob, directory: Path, say: Say) -> Measured:
    target = "dev.bench.transport_sender:send"
    return await asyncio.to_thread(run_job, target, job, Measured, directory, timeout=LIMIT + 30, say=say)


async def _receive_raw(path: str, nbytes: int, count: int, directory: Path, say: Say) -> Round:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvhwm = max(4, 32 * 2**20 // nbytes) * 8
    router.rcvtimeo = int(LIMIT * 1000)
    server, client = generate_keys()
    if path != "raw":
        apply_server_keys(router, server)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def receive() -> None:
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, b"go"])
        marks.append((time.perf_counter(), time.process_time()))
        for _ in range(count):
            router.recv_multipart(copy=False)
        marks.append((time.perf_counter(), time.process_time()))
        router.send_multipart([identity, b"done"])

    marks: list[tuple[float, float]] = []
    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    async with Lag() as lag:
        job = TransportJob(
            path, f"tcp://127.0.0.1:{port}", nbytes, count, 0, client.server_public_key, client.secret_key
        )
        done = await _generator(job, directory, say)
    thread.join(LIMIT)
    if thread.is_alive():
        raise BenchError("the raw receiver did not get everything")
    router.close()
    context.term()
    return done, _between(marks, lag, 0.0)


def _between(marks: list[tuple[float, float]], lag: Lag, high: float) -> Measured:
    """Return the figures of the time from the first message to the last: while the generator's process starts, the loop
    idles."""
    (began, computed), (ended, computed_then) = marks[0], marks[-1]
    return Measured(ended - began, computed_then - computed, *lag.between(began, ended), high)


async def _receive_whole(path: str, nbytes: int, count: int, directory: Path, say: Say) -> Round:
    settings = TransportConfig(ack_timeout=30.0, credit_bytes=max(2**26, 4 * nbytes))
    spool = Spool(directory / "spool", BufferConfig(durability="disk")) if path == "disk" else None

    def take(trajectory: Trajectory, size: int) -> None:
        receiver.release_trajectory(trajectory.trajectory_id)
        trained.append(trajectory.group_index)
        # The warm-up message, the first that counts, and the last: reading clocks takes time, too.
        if next(numbers) in (0, 1, count):
            marks.append((time.perf_counter(), time.process_time()))

    marks: list[tuple[float, float]] = []
    trained: list[int] = []
    numbers = itertools.count()
    server, client = generate_keys()
    receiver = TrajectoryReceiver("bench", settings, take, keys=server, store=spool)
    endpoint = await receiver.start()
    forget_peak()
    inflight = max(4, min(256, 2**25 // nbytes))
    async with contextlib.AsyncExitStack() as stack:
        if spool is not None:
            await stack.enter_async_context(_committed(spool, trained, count))
        stack.push_async_callback(receiver.close)
        lag = await stack.enter_async_context(Lag())
        job = TransportJob(path, endpoint, nbytes, count, inflight, client.server_public_key, client.secret_key)
        done = await _generator(job, directory, say)
        high = memory_mib("VmHWM")
    return done, _between(marks[1:], lag, high)


@contextlib.asynccontextmanager
async def _committed(spool: Spool, trained: list[int], count: int) -> AsyncIterator[None]:
    """Delete trained trajectories from the spool during the block, as checkpoints do, and all of them at the end."""

    async def commit() -> None:
        while True:
            await asyncio.sleep(0.2)
            groups, trained[:] = list(trained), []
            await spool.delete_trained(groups)

    committing = asyncio.create_task(commit())
    try:
        yield
    finally:
        committing.cancel()
        await spool.delete_trained(range(count + 1))
        await spool.close()


def render(report: Report) -> str:
    """Format the report as a table for people. Lag: the 99th percentile, and the part of it that this program
    caused."""
    rows = []
    for size in report.sizes:
        for path, rate in size.paths.items():
            lags = (
                (rate.generator_lag_ms, rate.generator_own_lag_ms),
                (rate.learner_lag_ms, rate.learner_own_lag_ms),
            )
            figures = (
                f"{rate.gb_per_s:.2f}",
                f"{rate.messages_per_s:,.0f}",
                f"{rate.share_of_raw:.2f} / {rate.share_of_curve:.2f}",
                f"{rate.cpu_s_per_gb:.2f}",
                f"{rate.share_of_raw_cpu:.2f} / {rate.share_of_curve_cpu:.2f}",
                *(f"{lag[1]:.1f} ({own[1]:.1f})" if lag else "" for lag, own in lags),
                f"{rate.generator_mib:.0f}/{rate.learner_mib:.0f}" if rate.learner_mib else "",
            )
            rows.append((path, f"{size.nbytes:,}", *figures))
    heads = (
        "path",
        "bytes",
        "GB/s",
        "msg/s",
        "of raw / CURVE",
        "CPU s/GB",
        "of raw / CURVE",
        "generator lag ms",
        "learner lag ms",
        "MiB",
    )
    lines = table(heads, rows)
    return "\n".join([*lines, f"{report.rounds} rounds; load average at the end {report.load_average:.1f}"])
