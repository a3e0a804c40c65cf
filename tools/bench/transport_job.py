"""The generator's side of `bench transport`, in a process of its own: sends one size, raw or through the whole path."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import zmq

from r3async.config import TransportConfig
from r3async.tools.bench.jobs import job_main, progress
from r3async.tools.bench.transport_measure import Lag, high_water_mib, reset_high_water, specimen
from r3async.transport import Sender, encode_trajectory
from r3async.transport.keys import ClientKeys
from r3async.world.zeromq import apply_client_keys

LIMIT = 240.0


class Keys(msgspec.Struct, frozen=True):
    """Of one measurement, which has secrets of no worth."""

    server_public: bytes
    secret: bytes

    @property
    def client(self) -> ClientKeys:
        return ClientKeys(self.secret, self.server_public)


class TransportJob(msgspec.Struct, frozen=True):
    """`count` trajectories of `nbytes`, to `endpoint`; `inflight` is how many may be unacknowledged."""

    path: str
    endpoint: str
    nbytes: int
    count: int
    inflight: int
    keys: Keys


class SenderDone(msgspec.Struct, frozen=True):
    """Seconds from the first to the last answer, of the sender's clock, and of processor time; lag in milliseconds."""

    seconds: float
    cpu_seconds: float
    lag_ms: list[float]
    own_lag_ms: list[float]
    high_water_mib: float


def send_raw(job: TransportJob) -> SenderDone:
    """Blocking sockets, no protocol: the same frames over and over, and one answer at the end."""
    frames = encode_trajectory(specimen(job.nbytes))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.sndhwm = max(4, 32 * 2**20 // job.nbytes) * len(frames)
    socket.sndtimeo = socket.rcvtimeo = int(LIMIT * 1000)
    if job.path != "raw":
        apply_client_keys(socket, job.keys.client)
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
    return SenderDone(seconds, computed, [], [], 0.0)


async def send_whole(job: TransportJob) -> SenderDone:
    """`Sender` with `inflight` tasks that each encode and send: as many episodes end at once."""
    settings = TransportConfig(ack_timeout=30.0, credit_bytes=max(2**28, 4 * job.nbytes))
    sender = Sender(job.endpoint, "bench", "bench", settings, keys=job.keys.client)
    await sender.start()
    trajectory = specimen(job.nbytes)
    numbers = iter(range(job.count))

    async def feed() -> None:
        for i in numbers:
            await sender.send(msgspec.structs.replace(trajectory, trajectory_id=f"t{i}", group_index=i))

    await sender.send(msgspec.structs.replace(trajectory, trajectory_id="first", group_index=job.count))
    await sender.flush(LIMIT)
    reset_high_water()
    async with asyncio.timeout(LIMIT), Lag() as lag:
        began, computed = time.perf_counter(), time.process_time()
        await asyncio.gather(*(feed() for _ in range(job.inflight)))
        if await sender.flush(LIMIT):
            raise TimeoutError("not all was acknowledged")
        ended, computed = time.perf_counter(), time.process_time() - computed
    high = high_water_mib()
    await sender.close()
    return SenderDone(ended - began, computed, *lag.between(began, ended), high)


def main(directory: Path) -> None:
    job = msgspec.json.decode((directory / "job.json").read_bytes(), type=TransportJob)
    progress(directory, f"{job.path}: {job.count} x {job.nbytes:,} bytes")
    done = send_raw(job) if job.path.startswith("raw") else asyncio.run(send_whole(job))
    (directory / "done.json").write_bytes(msgspec.json.encode(done))


if __name__ == "__main__":
    job_main(main)
