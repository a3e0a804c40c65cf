"""`bench transport`: the whole path (encode, socket, validate, spool, decode) against raw ZeroMQ, side by side.

The generator is a process of its own (`transport_job.py`); this one is the learner. Raw ZeroMQ is DEALER to ROUTER with
blocking sockets and the same frames, nothing encoded, checked or answered: the ceiling; `raw, CURVE` is that, encrypted as
every connection of a run is. All take turns, `rounds` times,
and the share is of the medians. The learner's lag beside `raw` is that of a loop with nothing to do: what the machine
itself does to it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import zmq

from r3async.config import BufferConfig, TransportConfig
from r3async.data.records import Trajectory
from r3async.schedule.spool import Spool
from r3async.tools.bench.jobs import BenchError, Say, run_job
from r3async.tools.bench.transport_job import LIMIT, Keys, SenderDone, TransportJob
from r3async.tools.bench.transport_measure import Lag, high_water_mib, reset_high_water, specimen
from r3async.transport import Receiver, encode_trajectory
from r3async.transport.keys import ClientKeys, new_keys
from r3async.world.zeromq import apply_server_keys

SIZES = (10_000, 200_000, 5_000_000, 12_600_000)
MOVED = 600_000_000
"""Bytes that one measurement moves, at most."""


class Rate(msgspec.Struct, frozen=True):
    """One way of sending: medians over the rounds. Lag is median, 99th percentile and maximum in ms, the worst round's, and
    own lag the part of it that this program caused; memory is the highest resident size while it ran, MiB, in the highest
    round. `cpu_s_per_gb` is of both processes; raw's over it is `share_of_raw_cpu`, which a busy machine does not blur."""

    gb_per_s: float
    messages_per_s: float
    share_of_raw: float
    cpu_s_per_gb: float
    share_of_raw_cpu: float
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
    """`disk` is a spool in the page cache of `scratch`'s file system, without fsync."""

    benchmark: str
    rounds: int
    load_average: float
    scratch: str
    sizes: list[Size]


def run(*, quick: bool, rounds: int, say: Say) -> Report:
    sizes = (10_000, 200_000) if quick else SIZES
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        paths = ["raw", "raw, CURVE", "memory", "disk"]
        measured = []
        for nbytes in sizes:
            frames = encode_trajectory(specimen(nbytes))
            actual = sum(map(len, frames))
            count = max(12, min(6000, (MOVED // 100 if quick else MOVED) // actual))
            seen: dict[str, list[dict[str, Any]]] = {path: [] for path in paths}
            for _ in range(1 if quick else rounds):
                for path in paths:
                    seen[path].append(_measure(path, nbytes, actual, count, Path(scratch), say))
            raw = median(r["gb_per_s"] for r in seen["raw"]), median(r["cpu"] for r in seen["raw"])
            tokens = specimen(nbytes).tokens
            measured.append(Size(actual, tokens, count, {p: _summary(rs, raw, actual) for p, rs in seen.items()}))
        return Report("transport", 1 if quick else rounds, os.getloadavg()[0], scratch, measured)


def _summary(rounds: list[dict[str, Any]], raw: tuple[float, float], nbytes: int) -> Rate:
    speed, cpu = median(r["gb_per_s"] for r in rounds), median(r["cpu"] for r in rounds)

    def worst(key: str) -> list[float]:
        rows = [r[key] for r in rounds if r[key]]
        return [float(x) for x in np.max(rows, axis=0)] if rows else []

    return Rate(
        speed,
        speed * 1e9 / nbytes,
        speed / raw[0],
        cpu,
        raw[1] / cpu,
        worst("generator_lag"),
        worst("generator_own_lag"),
        worst("learner_lag"),
        worst("learner_own_lag"),
        max(r["generator_mib"] for r in rounds),
        max(r["learner_mib"] for r in rounds),
    )


def _measure(path: str, nbytes: int, actual: int, count: int, scratch: Path, say: Say) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(dir=scratch))
    receive = _receive_raw if path.startswith("raw") else _receive_whole
    learner = asyncio.run(receive(path, nbytes, count, directory, say))
    done = msgspec.json.decode((directory / "done.json").read_bytes(), type=SenderDone)
    gigabytes = count * actual / 1e9
    return {
        "gb_per_s": gigabytes / done.seconds,
        "cpu": (done.cpu_seconds + learner.cpu_seconds) / gigabytes,
        "generator_lag": done.lag_ms,
        "generator_own_lag": done.own_lag_ms,
        "learner_lag": learner.lag_ms,
        "learner_own_lag": learner.own_lag_ms,
        "generator_mib": done.high_water_mib,
        "learner_mib": learner.high_water_mib,
    }


async def _generator(job: TransportJob, directory: Path, say: Say) -> None:
    (directory / "job.json").write_bytes(msgspec.json.encode(job))
    await asyncio.to_thread(run_job, "r3async.tools.bench.transport_job", directory, timeout=LIMIT + 30, say=say)


async def _receive_raw(path: str, nbytes: int, count: int, directory: Path, say: Say) -> SenderDone:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvhwm = max(4, 32 * 2**20 // nbytes) * 8
    router.rcvtimeo = int(LIMIT * 1000)
    server, client = new_keys()
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
        await _generator(TransportJob(path, f"tcp://127.0.0.1:{port}", nbytes, count, 0, _keys(client)), directory, say)
    thread.join(LIMIT)
    if thread.is_alive():
        raise BenchError("the raw receiver did not get everything")
    router.close()
    context.term()
    return _between(marks, lag, 0.0)


def _keys(client: ClientKeys) -> Keys:
    return Keys(client.server_public, client.secret)


def _between(marks: list[tuple[float, float]], lag: Lag, high: float) -> SenderDone:
    """Of the time from the first message to the last: while the generator's process starts, the loop idles."""
    (began, computed), (ended, computed_then) = marks[0], marks[-1]
    return SenderDone(ended - began, computed_then - computed, *lag.between(began, ended), high)


async def _receive_whole(path: str, nbytes: int, count: int, directory: Path, say: Say) -> SenderDone:
    settings = TransportConfig(ack_timeout=30.0, credit_bytes=max(2**26, 4 * nbytes))
    spool = Spool(directory / "spool", BufferConfig(durability="disk")) if path == "disk" else None

    def take(trajectory: Trajectory, size: int) -> None:
        receiver.release(trajectory.trajectory_id)
        trained.append(trajectory.group_index)
        taken = next(numbers)
        if taken in (
            0,
            1,
            count,
        ):  # the warming one, the first that counts, and the last: reading clocks takes time, too
            marks.append((time.perf_counter(), time.process_time()))

    marks: list[tuple[float, float]] = []
    trained: list[int] = []
    numbers = itertools.count()
    server, client = new_keys()
    receiver = Receiver("bench", settings, take, keys=server, store=spool)
    endpoint = await receiver.start()
    reset_high_water()
    inflight = max(4, min(256, 2**25 // nbytes))

    async def commit() -> None:
        """Checkpoints: what was trained is deleted."""
        assert spool is not None
        while True:
            await asyncio.sleep(0.2)
            groups, trained[:] = list(trained), []
            await spool.commit(groups)

    committing = asyncio.create_task(commit()) if spool is not None else None
    try:
        async with Lag() as lag:
            await _generator(TransportJob(path, endpoint, nbytes, count, inflight, _keys(client)), directory, say)
        high = high_water_mib()
    finally:
        if committing is not None:
            committing.cancel()
        await receiver.close()
        if spool is not None:
            await spool.commit(range(count + 1))
            await spool.close()
    return _between(marks[1:], lag, high)


def render(report: Report) -> str:
    head = f"{'bytes':>12}  {'path':<14}{'GB/s':>7}{'msg/s':>9}{'of raw':>8}{'CPU s/GB':>10}{'of raw':>8}"
    rows = [f"{head}  {'lag p99 (own), generator':>26}{'learner, ms':>20}{'MiB':>12}"]
    for size in report.sizes:
        for path, rate in size.paths.items():
            pairs = (
                (rate.generator_lag_ms, rate.generator_own_lag_ms),
                (rate.learner_lag_ms, rate.learner_own_lag_ms),
            )
            lags = [f"{lag[1]:.1f} ({own[1]:.1f})" if lag else "" for lag, own in pairs]
            memory = f"{rate.generator_mib:.0f}/{rate.learner_mib:.0f}" if rate.learner_mib else ""
            rows.append(
                f"{size.nbytes:>12,}  {path:<14}{rate.gb_per_s:>7.2f}{rate.messages_per_s:>9,.0f}"
                f"{rate.share_of_raw:>8.2f}{rate.cpu_s_per_gb:>10.2f}{rate.share_of_raw_cpu:>8.2f}"
                f"  {lags[0]:>26}{lags[1]:>20}{memory:>12}"
            )
    rows.append(f"{report.rounds} rounds; load average at the end {report.load_average:.1f}")
    return "\n".join(rows)
