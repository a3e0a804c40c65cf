"""The benchmark `bench transfer`: new weights from ranks to engines, in bytes, seconds and memory of every process,
whole and as deltas.

The processes are those of a run: ranks that each hold a part of the weights, the learner, which serves their file, and
engines' hosts. A second host is a folder on loopback that shares nothing with the first. No engine loads anything: that
is `bench weights`.
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
from statistics import median
from typing import Any

import msgspec

from dev.bench.jobs import BenchError, Say, table
from r3async.weights.fetch import CHUNK_BYTES, WINDOW_CHUNKS
from r3async.weights.manifest import WeightManifest
from r3async.weights.publish import DEFAULT_BUCKET_BYTES

SAMPLE_SECONDS = 0.002
ANSWER_SECONDS = 600.0
RUN, LINEAGE = "bench", 1


class TransferJob(msgspec.Struct, frozen=True):
    """The size of the measurement: bf16 weights of `megabytes`, divided among `ranks`, which `versions` steps move by
    `lr` each.

    They go to each number of `engines`, on one host and on two, and to each number in `spread`, with a host for each
    engine.
    """

    megabytes: float = 256.0
    ranks: int = 2
    versions: int = 4
    lr: float = 3e-6
    engines: tuple[int, ...] = (1, 2, 4, 8)
    spread: tuple[int, ...] = (2, 4, 8)
    tensors: int = 64


class Case(msgspec.Struct, frozen=True):
    """The figures of one layout; `hosts` includes the learner's.

    Figures are medians over versions, of the slowest engine: `dense` of the first fetch, `delta` of the later ones.
    `*_sent_*` are the bytes sent by the learner. `*_extra` is the most private memory, in bytes, that an engine's
    process or the learner's took for it, beside what it had before.
    """

    engines: int
    hosts: int
    dense_seconds: float
    delta_seconds: float
    dense_bytes: int
    delta_bytes: int
    learner_sent_dense: int
    learner_sent_delta: int
    engine_extra: int
    learner_extra: int
    files: int
    equal: bool


class Report(msgspec.Struct, frozen=True):
    """The report of `bench transfer`.

    Attributes:
        rank_extra: the most private memory that a rank's process took beside its model, in bytes.
        rank_limit: the limit of `rank_extra`, in bytes.
    """

    benchmark: str
    job: TransferJob
    bytes: int
    write_seconds: float
    rank_share: int
    rank_extra: int
    rank_limit: int
    engine_limit: int
    cases: list[Case]


class Peak:
    """The peak of this process's private memory since `begin`, beside what it had then."""

    def __init__(self) -> None:
        self._first = self._most = 0
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self) -> None:
        self._first = self._most = private_bytes()

    @property
    def extra(self) -> int:
        self._most = max(self._most, private_bytes())
        return self._most - self._first

    def _look(self) -> None:
        while True:
            self._most = max(self._most, private_bytes())
            time.sleep(SAMPLE_SECONDS)


def private_bytes() -> int:
    """Return the anonymous memory of this process in bytes; mapped files are shared, and can be dropped."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _rank(pipe: Any, rank: int, job: TransferJob) -> None:
    """Run a rank's process: its part of a model in float32, stepped and copied."""
    import torch

    from r3async.weights.publish import (
        HostWeights,
        SafetensorsEncoder,
        ShareDescription,
        write_delta_part,
        write_share_region,
    )

    torch.set_num_threads(1)
    each = int(job.megabytes * 1e6 / 2 / job.ranks / job.tensors)
    rng = torch.Generator().manual_seed(rank)
    model = {f"rank{rank}.w{i}": torch.randn(each, generator=rng).mul_(0.02) for i in range(job.tensors)}
    held = {name: t.bfloat16() for name, t in model.items()}
    peak, memory = Peak(), list[HostWeights]()
    peak.begin()
    version = -1
    while (call := pipe.recv()) is not None:
        name, args = call
        answer: Any = None
        if name == "snapshot_weights":
            (version,) = args
            for key, master in model.items() if version else ():
                master.add_(torch.randn(each, generator=rng).sign_(), alpha=job.lr)
                held[key].copy_(master)
            memory = memory or [HostWeights({n: t.to("meta") for n, t in held.items()})]
            memory[0].copy_in_buckets(held.items(), DEFAULT_BUCKET_BYTES)
        elif name == "describe_snapshot":
            answer = ShareDescription(version, memory[0].describe_tensors(torch.bfloat16))
        elif name == "write_snapshot":
            path, start = args
            answer = write_share_region(
                path, start, SafetensorsEncoder(version, memory[0], torch.bfloat16, DEFAULT_BUCKET_BYTES)
            )
        elif name == "write_delta_part":
            write_delta_part(*args)
        else:
            answer = peak.extra
        pipe.send(answer)


def _engine(pipe: Any, number: int) -> None:
    """Run an engine's process: fetch the requested versions, compare all checksums, and answer how long it took."""
    asyncio.run(_serve(pipe, number))


async def _serve(pipe: Any, number: int) -> None:
    import torch  # noqa: F401

    from r3async.weights.fetch import TcpReceiver, verify_version_file

    peak, receiver = Peak(), None
    while (call := await asyncio.to_thread(pipe.recv)) is not None:
        name, args = call
        answer: Any = None
        if name == "open":
            directory, keys = args
            receiver = TcpReceiver(directory, RUN, f"engine-{number}", keys, host="127.0.0.1", name="127.0.0.1")
            peak.begin()
        elif receiver is None:
            raise BenchError(f"{name} before open")
        elif name == "fetch":
            manifest, parts = args
            before, began = receiver.received_bytes, time.perf_counter()
            found = await receiver.fetch_version(manifest, parts, ANSWER_SECONDS)
            seconds = time.perf_counter() - began
            await asyncio.to_thread(verify_version_file, found)
            answer = seconds, receiver.received_bytes - before, peak.extra, found.path, found.digest
        else:
            await receiver.close()
        await asyncio.to_thread(pipe.send, answer)


class Crew:
    """A set of processes that answer calls."""

    def __init__(self, target: Any, given: Sequence[tuple[Any, ...]]):
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in given]
        self._pipes = [near for near, _ in pairs]
        self._processes = [
            context.Process(target=target, args=(far, *args), daemon=True)
            for (_, far), args in zip(pairs, given, strict=True)
        ]
        for process in self._processes:
            process.start()
        for _, far in pairs:
            far.close()

    def call(self, name: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call as many processes as there are arguments in `given`, and return their answers. Raises `BenchError` if
        one ends or takes too long."""
        pipes = self._pipes[: len(given)]
        for pipe, args in zip(pipes, given, strict=True):
            pipe.send((name, args))
        out = []
        for pipe in pipes:
            if not pipe.poll(ANSWER_SECONDS):
                raise BenchError(f"{name} took longer than {ANSWER_SECONDS:g} s")
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
def crew(target: Any, given: Sequence[tuple[Any, ...]]) -> Iterator[Crew]:
    made = Crew(target, given)
    try:
        yield made
    finally:
        made.close()


def run(job: TransferJob, say: Say) -> Report:
    """Measure all layouts. Raises `BenchError`."""
    most = max(*job.engines, *job.spread)
    layouts = [(n, hosts) for hosts in (1, 2) for n in job.engines] + [(n, n + 1) for n in job.spread]
    with (
        crew(_rank, [(rank, job) for rank in range(job.ranks)]) as ranks,
        crew(_engine, [(number,) for number in range(most)]) as engines,
        tempfile.TemporaryDirectory(prefix="r3async-bench-", dir=_memory()) as scratch,
    ):
        return asyncio.run(_measure(job, layouts, ranks, engines, Path(scratch), say))


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


async def _measure(
    job: TransferJob, layouts: Sequence[tuple[int, int]], ranks: Crew, engines: Crew, scratch: Path, say: Say
) -> Report:
    import torch  # noqa: F401

    from r3async.weights.fetch import TcpServer
    from r3async.weights.publish import ShardedVersionStore
    from r3async.world.sockets import generate_keys

    server_keys, client_keys = generate_keys()
    publisher = ShardedVersionStore(scratch / "learner", ranks.call, job.ranks, deltas=True)
    server, peak = TcpServer("127.0.0.1", server_keys), Peak()
    version, nbytes, writes, cases = 0, 0, list[float](), list[Case]()
    try:
        for count, hosts in layouts:
            where = [scratch / f"case{len(cases)}-host{1 + i % max(1, hosts - 1)}" for i in range(count)]
            await asyncio.to_thread(engines.call, "open", [(path, client_keys) for path in where])
            peak.begin()
            rows = []
            for _ in range(job.versions):
                await asyncio.to_thread(ranks.call, "snapshot_weights", [(version,)] * job.ranks)
                began = time.perf_counter()
                publication = await asyncio.to_thread(publisher.publish_shares)
                writes.append(time.perf_counter() - began)
                manifest = publication.manifest
                parts, before = [server.offer_version(manifest, *publication.transport_data)], server.sent_bytes
                given = msgspec.structs.replace(manifest, path=manifest.path if hosts == 1 else "/on another host")
                answers = await asyncio.to_thread(engines.call, "fetch", [(given, parts)] * count)
                rows.append((answers, server.sent_bytes - before))
                version, nbytes = version + 1, manifest.nbytes
            cases.append(_case(count, hosts, rows, manifest, peak.extra))
            say(
                f"transfer: {count} engines on {hosts} hosts: {cases[-1].dense_seconds:.2f} s, {cases[-1].delta_seconds:.2f} s"
            )
            await asyncio.to_thread(engines.call, "close", [()] * count)
        extra = max(await asyncio.to_thread(ranks.call, "extra", [()] * job.ranks))
    finally:
        await server.close()
        publisher.close()
    share, buckets = nbytes // job.ranks, 2 * DEFAULT_BUCKET_BYTES
    return Report("transfer", job, nbytes, median(writes), share, extra, int(1.2 * share) + buckets, buckets, cases)


def _case(count: int, hosts: int, rows: Sequence[tuple[list[Any], int]], last: WeightManifest, extra: int) -> Case:
    slowest = [max(answer[0] for answer in answers) for answers, _ in rows]
    received = [sum(answer[1] for answer in answers) for answers, _ in rows]
    final = rows[-1][0]
    return Case(
        engines=count,
        hosts=hosts,
        dense_seconds=slowest[0],
        delta_seconds=median(slowest[1:]),
        dense_bytes=received[0],
        delta_bytes=int(median(received[1:])),
        learner_sent_dense=rows[0][1],
        learner_sent_delta=int(median([sent for _, sent in rows[1:]])),
        engine_extra=max(answer[2] for answers, _ in rows for answer in answers),
        learner_extra=extra,
        files=len({answer[3] for answer in final}),
        equal=all(answer[4] == last.digest for answer in final),
    )


def render(report: Report) -> str:
    """Format the report as a table for people."""
    mb = 1e6
    rows = [
        (
            str(c.engines),
            str(c.hosts),
            str(c.files),
            f"{c.dense_bytes / mb:.1f}",
            f"{c.learner_sent_dense / mb:.1f}",
            f"{c.dense_seconds:.2f}",
            f"{c.delta_bytes / mb:.2f}",
            f"{c.learner_sent_delta / mb:.2f}",
            f"{c.delta_seconds:.2f}",
            f"{c.engine_extra / mb:.0f}",
            f"{c.learner_extra / mb:.0f}",
        )
        for c in report.cases
    ]
    head = (
        (
            "engines",
            "hosts",
            "files",
            "dense MB",
            "from learner",
            "s",
            "delta MB",
            "from learner",
            "s",
            "engine MB",
            "learner MB",
        ),
    )
    unequal = [f"{c.engines} engines on {c.hosts} hosts" for c in report.cases if not c.equal]
    lines = [
        f"{report.bytes / mb:.1f} MB in bf16 on {report.job.ranks} ranks, lr {report.job.lr:g}; written in "
        f"{report.write_seconds:.2f} s, the delta included",
        *table(*head, rows),
        f"a rank took {report.rank_extra / mb:.0f} MB beside its model, of {report.rank_limit / mb:.0f} MB; an engine may take "
        f"{report.engine_limit / mb:.0f} MB ({WINDOW_CHUNKS} chunks of {CHUNK_BYTES / 2**20:g} MiB are in flight)",
    ]
    last = report.job.versions - 1
    lines.append(
        f"after {last} deltas: {'not ' if unequal else ''}the learner's digest {', '.join(unequal) or 'everywhere'}"
    )
    return "\n".join(lines)
