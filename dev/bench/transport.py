"""The benchmark `bench transport`: the wire format alone, and the whole path (encode, socket,
validate, spool, decode) against raw ZeroMQ, side by side.

The generator is a separate process (`send_trajectories`); this one is the learner. Raw ZeroMQ is
DEALER to ROUTER with blocking sockets and the same frames, with nothing encoded, checked or
answered: the ceiling. `raw, CURVE` is the same, encrypted as every connection of a run is. All take
turns; a value is of one round, and shares are of raw in that round. The learner's lag beside `raw`
is that of an idle loop: what the machine itself causes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import zmq

from dev.bench.jobs import (
    BenchError,
    PrintLine,
    memory_mib,
    report_progress,
    reset_memory_peak,
    run_job,
)
from dev.bench.report import Measurements
from r3async.config import BufferConfig, TransportConfig
from r3async.data.packed_routes import RouteForm
from r3async.data.tokens import Sample, TokenTable, Trajectory, Turn
from r3async.data.wire import decode_trajectory, encode_trajectory
from r3async.transport import TrajectoryReceiver, TrajectorySender
from r3async.transport.spool import Spool
from r3async.world.curve_keys import ClientKeys, generate_keys
from r3async.world.zmq_sockets import apply_client_keys, apply_server_keys

SIZES = (10_000, 200_000, 5_000_000, 12_600_000)
MOVED = 600_000_000
"""Maximum number of bytes that one measurement moves."""
PATHS = ("raw", "raw, CURVE", "memory", "disk")
LIMIT = 240.0
"""Maximum seconds of one measurement."""
TICK = 0.001
DENSE_BELOW = 100_000
ROUTES = (48, 8)
"""Layers and top_k of the routes, of 128 experts."""
FORMS: tuple[RouteForm, ...] = ("plain", "bits")
TURNS = 8


# -- trajectories ----------------------------------------------------------------------------------


def sampled_table(tokens: int, routes: tuple[int, int] | None) -> TokenTable:
    """Return `tokens` of an episode of `TURNS` turns, as a generator sends them; the policy
    sampled half of them."""
    rng = np.random.default_rng(0)
    turn = np.full(tokens, -1, np.int32)
    rewards = np.zeros(tokens, np.float32)
    edges = np.linspace(0, tokens, TURNS + 1).astype(int)
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        turn[stop - round((stop - start) / 2) : stop] = i
        rewards[stop - 1] = rng.random()
    columns = {
        "token_ids": rng.integers(0, 150_000, tokens, dtype=np.int32),
        "loss_mask": turn >= 0,
        "rollout_logprobs": np.where(turn >= 0, -rng.exponential(0.5, tokens), 0).astype(
            np.float32
        ),
        "policy_version": np.where(turn >= 0, 17 + turn // 4, -1).astype(np.int32),
        "turn": turn,
        "rewards": rewards,
    }
    if routes is not None:
        columns["routed_experts"] = sampled_routes(rng, tokens, *routes)
        columns["routing_recorded"] = np.arange(tokens) < tokens - 1
    return TokenTable(columns)


def sampled_routes(
    rng: np.random.Generator, tokens: int, layers: int, top_k: int, experts: int = 128
) -> np.ndarray:
    """Return random routes, uint8 `[tokens, layers, top_k]`: distinct experts in any order. They
    come from a limited number of sets, each shifted by a random number of experts."""
    some = rng.random((4096, experts)).argsort(axis=1)[:, :top_k]
    rows = some[rng.integers(0, len(some), tokens * layers)] + rng.integers(
        0, experts, (tokens * layers, 1)
    )
    return (rows % experts).reshape(tokens, layers, top_k).astype(np.uint8)


def sampled_trajectory(tokens: int, routes: tuple[int, int] | None = None) -> Trajectory:
    turns = [Turn(i, 0, 1, tokens, 0.5, "eos") for i in range(TURNS)]
    return Trajectory(
        "t0",
        0,
        0,
        1,
        "g0",
        "eos",
        turns,
        [Sample("t0/0", sampled_table(tokens, routes), 1.0)],
        1.0,
        2.0,
    )


def make_trajectory(nbytes: int) -> Trajectory:
    """Return a trajectory of about `nbytes` on the wire: dense if it is small, with 48x8
    routes otherwise."""
    if nbytes < DENSE_BELOW:
        return sampled_trajectory(max(1, (nbytes - 1000) // 8))
    return sampled_trajectory(max(1, nbytes // 392), ROUTES)


# -- the learner's side ----------------------------------------------------------------------------


class TransportJob(msgspec.Struct, frozen=True):
    """A job that sends `count` trajectories of `nbytes` to `endpoint`, of which `inflight` may be
    unacknowledged. Its keys are those of one measurement, and protect nothing."""

    path: str
    endpoint: str
    nbytes: int
    count: int
    inflight: int
    server_public: bytes
    secret: bytes

    @property
    def client_keys(self) -> ClientKeys:
        return ClientKeys(self.secret, self.server_public)


class SideFigures(msgspec.Struct, frozen=True):
    """The figures of one side: wall and CPU seconds from the first to the last answer, the 99th
    percentile of the event loop's lag and of its own part of it in milliseconds, and the peak of
    resident memory beside what the process had before: imports, and what earlier measurements left,
    are not the transport's."""

    seconds: float
    cpu_seconds: float
    lag_ms: float | None = None
    own_lag_ms: float | None = None
    extra_mib: float | None = None


def measure_transport(*, quick: bool, rounds: int, print_line: PrintLine) -> Measurements:
    """Measure the format, and every size on every path. Raises `BenchError`."""
    sizes, rounds, moved = ((10_000, 200_000), 1, MOVED // 100) if quick else (SIZES, rounds, MOVED)
    measured = Measurements()
    tokens = 256 if quick else 2048
    with tempfile.TemporaryDirectory(prefix="r3async-bench-") as scratch:
        for nbytes, _ in itertools.product(sizes, range(rounds)):
            actual = sum(map(len, encode_trajectory(make_trajectory(nbytes))))
            count = max(12, min(6000, moved // actual))
            sides = {}
            for path in PATHS:
                place = Path(tempfile.mkdtemp(dir=scratch))
                receive = _receive_raw if path.startswith("raw") else _receive_whole
                sides[path] = asyncio.run(receive(path, nbytes, count, place, print_line))
            for path in PATHS:
                measured.add_figures(
                    f"{path}, {actual:,} bytes",
                    _path_figures(path, sides, count * actual / 1e9, count),
                )
    # Last: the free heap that it leaves would hide memory that the learner's side takes.
    measure_format(tokens)  # warms up
    for _ in range(3 if quick else 20):
        for name, figures in measure_format(tokens).items():
            measured.add_figures(f"wire format, {name}", figures)
    return measured


def measure_format(tokens: int) -> dict[str, dict[str, float]]:
    """Return bytes and CPU time a token of the wire format. Decoding ends when every
    column is an array."""
    cases: list[tuple[str, Trajectory, RouteForm]] = [
        ("no routes", sampled_trajectory(tokens), "plain")
    ]
    cases += [(f"routes 48x8, {form}", sampled_trajectory(tokens, ROUTES), form) for form in FORMS]
    figures = {}
    for name, trajectory, form in cases:
        began = time.process_time()
        frames = [bytes(frame) for frame in encode_trajectory(trajectory, routes=form)]
        encoded = time.process_time()
        for sample in decode_trajectory(frames).samples:
            dict(sample.table.items())
        decoded = time.process_time()
        figures[name] = {
            "bytes a token": sum(map(len, frames)) / tokens,
            "encode, µs a token": 1e6 * (encoded - began) / tokens,
            "decode, µs a token": 1e6 * (decoded - encoded) / tokens,
        }
    return figures


def _path_figures(
    path: str, sides: dict[str, tuple[SideFigures, SideFigures]], gigabytes: float, count: int
) -> dict[str, float | None]:
    """Return the figures of one path in one round. CPU is of both processes; a busy machine does
    not blur its share."""
    speed = {name: gigabytes / generator.seconds for name, (generator, _) in sides.items()}
    cpu = {
        name: (g.cpu_seconds + learner.cpu_seconds) / gigabytes
        for name, (g, learner) in sides.items()
    }
    generator, learner = sides[path]
    return {
        "GB/s": speed[path],
        "messages/s": speed[path] * count / gigabytes,
        "of raw": speed[path] / speed["raw"],
        "of CURVE": speed[path] / speed["raw, CURVE"],
        "CPU s/GB": cpu[path],
        "raw's CPU / this": cpu["raw"] / cpu[path],
        "CURVE's CPU / this": cpu["raw, CURVE"] / cpu[path],
        "learner's lag p99, ms": learner.lag_ms,
        "its own": learner.own_lag_ms,
        "generator's lag p99, ms": generator.lag_ms,
        "its own part": generator.own_lag_ms,
        "generator's extra MiB": generator.extra_mib,
        "learner's extra MiB": learner.extra_mib,
    }


async def _start_sender(job: TransportJob, directory: Path, print_line: PrintLine) -> SideFigures:
    target = f"{__name__}:send_trajectories"
    return await asyncio.to_thread(
        run_job, target, job, SideFigures, directory, timeout=LIMIT + 30, print_line=print_line
    )


async def _receive_raw(
    path: str, nbytes: int, count: int, directory: Path, print_line: PrintLine
) -> tuple[SideFigures, SideFigures]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvhwm = max(4, 32 * 2**20 // nbytes) * 8
    router.rcvtimeo = int(LIMIT * 1000)
    server, client = generate_keys()
    if path != "raw":
        apply_server_keys(router, server)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def receive_all() -> None:
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, b"go"])
        marks.append((time.perf_counter(), time.process_time()))
        for _ in range(count):
            router.recv_multipart(copy=False)
        marks.append((time.perf_counter(), time.process_time()))
        router.send_multipart([identity, b"done"])

    marks: list[tuple[float, float]] = []
    thread = threading.Thread(target=receive_all, daemon=True)
    thread.start()
    async with LagMonitor() as lag:
        endpoint = f"tcp://127.0.0.1:{port}"
        job = TransportJob(
            path, endpoint, nbytes, count, 0, client.server_public_key, client.secret_key
        )
        done = await _start_sender(job, directory, print_line)
    thread.join(LIMIT)
    if thread.is_alive():
        raise BenchError("the raw receiver did not get everything")
    router.close()
    context.term()
    return done, _figures_between(marks, lag, None)


def _figures_between(
    marks: list[tuple[float, float]], lag: LagMonitor, extra_mib: float | None
) -> SideFigures:
    """Return the figures of the time from the first message to the last: while the generator's
    process starts, the loop idles."""
    began, computed = marks[0]
    ended, computed_then = marks[-1]
    return SideFigures(
        ended - began, computed_then - computed, *lag.percentiles_between(began, ended), extra_mib
    )


async def _receive_whole(
    path: str, nbytes: int, count: int, directory: Path, print_line: PrintLine
) -> tuple[SideFigures, SideFigures]:
    settings = TransportConfig(ack_timeout=30.0, credit_bytes=max(2**26, 4 * nbytes))
    spool = Spool(directory / "spool", BufferConfig(durability="disk")) if path == "disk" else None

    async def receive_trajectories() -> None:
        async for batch in receiver:
            for received in batch:
                await receiver.store(received)
                receiver.accept(received)
                receiver.release_trajectory(received.trajectory.trajectory_id)
                trained.append(received.trajectory.group_index)
                # The warm-up message, the first that counts, and the last: reading clocks
                # takes time, too.
                if next(numbers) in (0, 1, count):
                    marks.append((time.perf_counter(), time.process_time()))

    marks: list[tuple[float, float]] = []
    trained: list[int] = []
    numbers = itertools.count()
    server, client = generate_keys()
    receiver = TrajectoryReceiver("bench", settings, keys=server, store=spool)
    endpoint = await receiver.start()
    receiving = asyncio.create_task(receive_trajectories())
    resident_mib = reset_memory_peak()
    inflight = max(4, min(256, 2**25 // nbytes))
    async with contextlib.AsyncExitStack() as stack:
        if spool is not None:
            await stack.enter_async_context(_commit_trained(spool, trained, count))
        stack.push_async_callback(receiver.close)
        stack.callback(receiving.cancel)
        lag = await stack.enter_async_context(LagMonitor())
        job = TransportJob(
            path, endpoint, nbytes, count, inflight, client.server_public_key, client.secret_key
        )
        done = await _start_sender(job, directory, print_line)
        extra_mib = memory_mib("VmHWM") - resident_mib
    return done, _figures_between(marks[1:], lag, extra_mib)


@contextlib.asynccontextmanager
async def _commit_trained(spool: Spool, trained: list[int], count: int) -> AsyncIterator[None]:
    """Delete trained trajectories from the spool during the block, as checkpoints do, and all of
    them at the end."""

    async def commit_often() -> None:
        while True:
            await asyncio.sleep(0.2)
            groups = list(trained)
            trained[:] = []
            await spool.delete_trained(groups)

    committing = asyncio.create_task(commit_often())
    try:
        yield
    finally:
        committing.cancel()
        await spool.delete_trained(range(count + 1))
        await spool.close()


class LagMonitor:
    """A monitor of the event loop's lag: how late a sleep of one millisecond ends, over and over.

    That is how long anything else on this event loop must wait. Its own part is that in which the
    loop's own thread was computing, and not waiting for a processor that others had.
    """

    def __init__(self) -> None:
        self._ticks: list[tuple[float, float, float]] = []
        """When a sleep ended, and lag and own lag in seconds."""

    async def __aenter__(self) -> LagMonitor:
        self._task = asyncio.create_task(self._watch_loop())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch_loop(self) -> None:
        computed = time.thread_time()
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK)
            ended = time.perf_counter()
            before = computed
            computed = time.thread_time()  # once a tick: this clock can take 50 µs to read
            self._ticks.append((ended, ended - began - TICK, computed - before))

    def percentiles_between(self, began: float, ended: float) -> tuple[float | None, float | None]:
        """Return the 99th percentiles of lag and own lag of the ticks that ended in this time,
        in milliseconds."""
        chosen = [tick[1:] for tick in self._ticks if began <= tick[0] <= ended]
        if not chosen:
            return None, None
        lag, own_lag = 1e3 * np.percentile(chosen, 99, axis=0)
        return float(lag), float(own_lag)


# -- the generator's side, in the job's process ----------------------------------------------------


def send_trajectories(job: TransportJob, directory: Path) -> SideFigures:
    """Send on the path that the job names."""
    report_progress(directory, f"{job.path}: {job.count} x {job.nbytes:,} bytes")
    return send_raw(job) if job.path.startswith("raw") else asyncio.run(send_whole(job))


def send_raw(job: TransportJob) -> SideFigures:
    """Send the same frames over and over with blocking sockets and no protocol, and wait for one
    answer at the end."""
    frames = encode_trajectory(make_trajectory(job.nbytes))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = max(4, 32 * 2**20 // job.nbytes) * len(frames)
    socket.sndtimeo = socket.rcvtimeo = int(LIMIT * 1000)
    if job.path != "raw":
        apply_client_keys(socket, job.client_keys)
    socket.connect(job.endpoint)
    socket.send(b"begin")
    socket.recv()
    began = time.perf_counter()
    computed = time.process_time()
    for _ in range(job.count):
        socket.send_multipart(frames, copy=False)
    socket.recv()
    seconds = time.perf_counter() - began
    computed = time.process_time() - computed
    socket.close()
    context.term()
    return SideFigures(seconds, computed)


async def send_whole(job: TransportJob) -> SideFigures:
    """Send through `TrajectorySender` with `inflight` tasks that each encode and send, as if that
    many episodes ended at once."""
    settings = TransportConfig(ack_timeout=30.0, credit_bytes=max(2**28, 4 * job.nbytes))
    sender = TrajectorySender(job.endpoint, "bench", "bench", settings, keys=job.client_keys)
    await sender.start()
    trajectory = make_trajectory(job.nbytes)
    numbers = iter(range(job.count))

    async def feed_sender() -> None:
        for i in numbers:
            await sender.send(
                msgspec.structs.replace(trajectory, trajectory_id=f"t{i}", group_index=i)
            )

    await sender.send(
        msgspec.structs.replace(trajectory, trajectory_id="first", group_index=job.count)
    )
    await sender.flush(LIMIT)
    resident_mib = reset_memory_peak()
    async with asyncio.timeout(LIMIT), LagMonitor() as lag:
        began = time.perf_counter()
        computed = time.process_time()
        await asyncio.gather(*(feed_sender() for _ in range(job.inflight)))
        if await sender.flush(LIMIT):
            raise TimeoutError("not all was acknowledged")
        ended = time.perf_counter()
        computed = time.process_time() - computed
    extra_mib = memory_mib("VmHWM") - resident_mib
    await sender.close()
    return SideFigures(ended - began, computed, *lag.percentiles_between(began, ended), extra_mib)
