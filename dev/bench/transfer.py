"""The benchmark `bench transfer`: new weights from ranks to engines, in bytes, seconds and memory
of every process, whole and as deltas.

The processes are those of a run: ranks that each hold a part of the weights, the learner, which
serves their file, and engines' hosts. A second host is a folder on loopback that shares nothing
with the first. No engine loads anything: that is `bench weights`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dev.bench.jobs import BenchError, PrintLine
from dev.bench.report import Measurements
from r3async.weights.relay import CHUNK_BYTES
from r3async.weights.tcp import WINDOW_CHUNKS
from r3async.weights.version_store import DEFAULT_BUCKET_BYTES

SAMPLE_SECONDS = 0.002
ANSWER_SECONDS = 600.0
RUN = "bench"
LINEAGE = 1


class TransferJob(msgspec.Struct, frozen=True):
    """The size of the measurement: bf16 weights of `megabytes`, divided among `ranks`, which
    `versions` steps move by `lr` each.

    They go to each number of `engines`, on one host and on two, and to each number in `spread`,
    with a host for each engine.
    """

    megabytes: float = 256.0
    ranks: int = 2
    versions: int = 4
    lr: float = 3e-6
    engines: tuple[int, ...] = (1, 2, 4, 8)
    spread: tuple[int, ...] = (2, 4, 8)
    tensors: int = 64


class MemoryPeak:
    """The peak of this process's private memory since `begin_measuring`, beside
    what it had then."""

    def __init__(self) -> None:
        self._first = self._most = 0
        threading.Thread(target=self._update_peak, daemon=True).start()

    def begin_measuring(self) -> None:
        self._first = self._most = private_bytes()

    @property
    def extra_bytes(self) -> int:
        self._most = max(self._most, private_bytes())
        return self._most - self._first

    def _update_peak(self) -> None:
        while True:
            self._most = max(self._most, private_bytes())
            time.sleep(SAMPLE_SECONDS)


def private_bytes() -> int:
    """Return the anonymous memory of this process in bytes; mapped files are shared,
    and can be dropped."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _run_rank(pipe: Any, rank: int, job: TransferJob) -> None:
    """Run a rank's process: its part of a model in float32, stepped and copied."""
    import torch

    from r3async.weights.host_weights import HostWeights, SafetensorsEncoder
    from r3async.weights.sharded_store import ShareDescription, write_delta_part, write_share_region

    torch.set_num_threads(1)
    each = int(job.megabytes * 1e6 / 2 / job.ranks / job.tensors)
    rng = torch.Generator().manual_seed(rank)
    model = {
        f"rank{rank}.w{i}": torch.randn(each, generator=rng).mul_(0.02) for i in range(job.tensors)
    }
    tensors = {name: t.bfloat16() for name, t in model.items()}
    peak = MemoryPeak()
    memory = list[HostWeights]()
    peak.begin_measuring()
    version = -1
    while (call := pipe.recv()) is not None:
        name, args = call
        answer: Any = None
        if name == "snapshot_weights":
            (version,) = args
            for key, master in model.items() if version else ():
                master.add_(torch.randn(each, generator=rng).sign_(), alpha=job.lr)
                tensors[key].copy_(master)
            memory = memory or [HostWeights({n: t.to("meta") for n, t in tensors.items()})]
            memory[0].copy_in_buckets(tensors.items(), DEFAULT_BUCKET_BYTES)
        elif name == "describe_snapshot":
            answer = ShareDescription(version, memory[0].describe_tensors(torch.bfloat16))
        elif name == "write_snapshot":
            path, start = args
            answer = write_share_region(
                path,
                start,
                SafetensorsEncoder(version, memory[0], torch.bfloat16, DEFAULT_BUCKET_BYTES),
            )
        elif name == "write_delta_part":
            write_delta_part(*args)
        else:
            answer = peak.extra_bytes
        pipe.send(answer)


def _run_engine(pipe: Any, number: int) -> None:
    """Run an engine's process: fetch the requested versions, compare all checksums, and answer
    how long it took."""
    asyncio.run(_serve_calls(pipe, number))


async def _serve_calls(pipe: Any, number: int) -> None:
    import torch  # noqa: F401

    from r3async.weights.tcp import TcpReceiver
    from r3async.weights.version_reader import verify_version_file

    peak = MemoryPeak()
    receiver = None
    while (call := await asyncio.to_thread(pipe.recv)) is not None:
        name, args = call
        answer: Any = None
        if name == "open":
            directory, keys = args
            receiver = TcpReceiver(
                directory, RUN, f"engine-{number}", keys, host="127.0.0.1", name="127.0.0.1"
            )
            peak.begin_measuring()
        elif receiver is None:
            raise BenchError(f"{name} before open")
        elif name == "fetch":
            manifest, parts = args
            before = receiver.received_bytes
            began = time.perf_counter()
            fetched = await receiver.fetch_version(manifest, parts, ANSWER_SECONDS)
            seconds = time.perf_counter() - began
            await asyncio.to_thread(verify_version_file, fetched)
            answer = (
                seconds,
                receiver.received_bytes - before,
                peak.extra_bytes,
                fetched.path,
                fetched.digest,
            )
        else:
            await receiver.close()
        await asyncio.to_thread(pipe.send, answer)


class ProcessPool:
    """A set of processes that answer calls."""

    def __init__(
        self,
        target: Any,
        arguments: Sequence[tuple[Any, ...]],
        answer_seconds: float = ANSWER_SECONDS,
    ):
        self._answer_seconds = answer_seconds
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in arguments]
        self._pipes = [near for near, _ in pairs]
        self._processes = [
            context.Process(target=target, args=(far, *args), daemon=True)
            for (_, far), args in zip(pairs, arguments, strict=True)
        ]
        for process in self._processes:
            process.start()
        for _, far in pairs:
            far.close()

    def call_processes(self, name: str, arguments: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        """Call as many processes as `arguments` has elements, except where they are None, and
        return their answers. Raises `BenchError` if one ends or takes too long."""
        called = list(zip(self._pipes, arguments, strict=False))
        for pipe, args in called:
            if args is not None:
                pipe.send((name, args))
        out = list[Any]()
        for pipe, args in called:
            if args is None:
                out.append(None)
                continue
            if not pipe.poll(self._answer_seconds):
                raise BenchError(f"{name} took longer than {self._answer_seconds:g} s")
            try:
                out.append(pipe.recv())
            except EOFError as error:
                raise BenchError(f"a process ended in {name}; its error is above") from error
        return out

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10)
            process.kill()


@contextlib.contextmanager
def start_processes(
    target: Any, arguments: Sequence[tuple[Any, ...]], answer_seconds: float = ANSWER_SECONDS
) -> Iterator[ProcessPool]:
    pool = ProcessPool(target, arguments, answer_seconds)
    try:
        yield pool
    finally:
        pool.close()


def measure_transfer(job: TransferJob, print_line: PrintLine) -> Measurements:
    """Measure all layouts. Raises `BenchError`."""
    most = max(*job.engines, *job.spread)
    layouts = [(n, hosts) for hosts in (1, 2) for n in job.engines] + [
        (n, n + 1) for n in job.spread
    ]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        start_processes(_run_rank, [(rank, job) for rank in range(job.ranks)]) as ranks,
        start_processes(_run_engine, [(number,) for number in range(most)]) as engines,
        tempfile.TemporaryDirectory(prefix="r3async-bench-", dir=memory) as scratch,
    ):
        return asyncio.run(
            _measure_layouts(job, layouts, ranks, engines, Path(scratch), print_line)
        )


async def _measure_layouts(
    job: TransferJob,
    layouts: Sequence[tuple[int, int]],
    ranks: ProcessPool,
    engines: ProcessPool,
    scratch: Path,
    print_line: PrintLine,
) -> Measurements:
    """Publish `versions` in each layout. A value is of one version, of the slowest engine; the
    first is fetched whole."""
    import torch  # noqa: F401

    from r3async.weights.sharded_store import PartFolder, ShardedVersionStore
    from r3async.weights.tcp import TcpServer
    from r3async.world.curve_keys import generate_keys

    server_keys, client_keys = generate_keys()
    folder = PartFolder(scratch / "learner")

    def call_host(name: str, args_by_host: Sequence[tuple[Any, ...] | None]) -> list[Any]:
        return [args if args is None else getattr(folder, name)(*args) for args in args_by_host]

    publisher = ShardedVersionStore(
        call_host, ranks.call_processes, [list(range(job.ranks))], deltas=True
    )
    server = TcpServer("127.0.0.1", server_keys)
    peak = MemoryPeak()
    measured = Measurements()
    version = 0
    nbytes = 0
    memory = {"an engine": 0, "the learner": 0}
    try:
        for number, (count, hosts) in enumerate(layouts):
            name = f"{count} engines on {hosts} hosts"
            print_line(f"transfer: {name}")
            where = [
                scratch / f"case{number}-host{1 + i % max(1, hosts - 1)}" for i in range(count)
            ]
            await asyncio.to_thread(
                engines.call_processes, "open", [(path, client_keys) for path in where]
            )
            peak.begin_measuring()
            for form in ["whole", *["delta"] * (job.versions - 1)]:
                await asyncio.to_thread(
                    ranks.call_processes, "snapshot_weights", [(version,)] * job.ranks
                )
                began = time.perf_counter()
                publication = await asyncio.to_thread(publisher.publish_shares)
                measured.add_figures("a version, written", {"seconds": time.perf_counter() - began})
                manifest = publication.manifest
                parts = [server.offer_version(manifest, *publication.transport_data)]
                before = server.sent_bytes
                offered = msgspec.structs.replace(
                    manifest, path=manifest.path if hosts == 1 else "/on another host"
                )
                answers = await asyncio.to_thread(
                    engines.call_processes, "fetch", [(offered, parts)] * count
                )
                figures = {
                    "seconds": max(answer[0] for answer in answers),
                    "MB received": sum(answer[1] for answer in answers) / 1e6,
                    "MB out of the learner": (server.sent_bytes - before) / 1e6,
                    "files": len({answer[3] for answer in answers}),
                }
                measured.add_figures(f"{name}, {form}", figures)
                if any(answer[4] != manifest.digest for answer in answers):
                    measured.problems.append(
                        f"{name}: version {version} has not the learner's digest everywhere"
                    )
                version = version + 1
                nbytes = manifest.nbytes
            memory["an engine"] = max(memory["an engine"], *(answer[2] for answer in answers))
            memory["the learner"] = max(memory["the learner"], peak.extra_bytes)
            await asyncio.to_thread(engines.call_processes, "close", [()] * count)
        extra = max(await asyncio.to_thread(ranks.call_processes, "extra", [()] * job.ranks))
    finally:
        await server.close()
        folder.close()
    share = nbytes // job.ranks
    buckets = 2 * DEFAULT_BUCKET_BYTES
    limits = {
        "a rank": (extra, int(1.2 * share) + buckets),
        **{who: (most, buckets) for who, most in memory.items()},
    }
    for who, (most, limit) in limits.items():
        measured.add_figures(
            f"memory of {who}, beside what it had", {"MB": most / 1e6, "limit, MB": limit / 1e6}
        )
        if most > limit:
            measured.problems.append(f"{who} took {most / 1e6:.0f} MB, of {limit / 1e6:.0f}")
    in_flight = f"{WINDOW_CHUNKS} chunks of {CHUNK_BYTES / 2**20:g} MiB in flight"
    measured.facts["weights"] = (
        f"{nbytes / 1e6:.1f} MB in bf16 on {job.ranks} ranks, lr {job.lr:g}; {in_flight}"
    )
    return measured
