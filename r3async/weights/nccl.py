"""Weights from the learner's GPU to the engines' by NCCL: who sends what to whom, and when. What sends is `engines.vllm_sender`.

A version is written into shared memory of the learner's host, as ever. For each generator one process beside the learner, on its
GPU, reads it there and is rank 0 of a group with that generator's workers. A collective operation hangs if a peer is lost: only
that process can hang, and it is killed after a time. Neither the learner nor another generator waits for it.

A worker that is ready to receive, its engine paused, asks with `Ready`. When all workers of the engine have asked and the process
is `Up`, they get an `Offer` and the process gets `Send`; so nobody enters the operation before everybody is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from r3async.untrusted import MalformedError, decode_msgpack
from r3async.weights.manifest import NcclSource, WeightError, WeightManifest
from r3async.weights.publish import TransferOffer, VersionStore

if TYPE_CHECKING:
    import torch

POLL_MILLISECONDS = 200
CLOSE_SECONDS = 5.0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker `rank` of `workers` of a generator waits for `version`."""

    generator: str
    receiver: str
    version: int
    rank: int
    workers: int


class Up(msgspec.Struct, frozen=True, tag=True):
    """A sending process is ready."""

    link: str


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A sending process has sent a version, and everybody has received it."""

    link: str
    version: int


class Offer(msgspec.Struct, frozen=True, tag=True):
    """To a worker: receive now, in group `link`, which meets at `host` and `port` if it has not met."""

    link: str
    host: str
    port: int
    bucket_bytes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """To a worker: nothing will come."""

    reason: str


class Send(msgspec.Struct, frozen=True, tag=True):
    """To a sending process: send the file at `path`, to so many workers."""

    path: str
    version: int
    host: str
    port: int
    workers: int
    bucket_bytes: int


NcclMessage = Ready | Up | Sent | Offer | Refused | Send


def encode_nccl_message(message: NcclMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_nccl_message(data: bytes) -> NcclMessage:
    """Raises `MalformedError`."""
    return decode_msgpack(data, NcclMessage)


class SenderProcess(Protocol):
    """What `NcclLinkTable` asks of a sending process."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


@dataclass
class NcclLink:
    """A generator's group. With `deadline` None it is idle. `waiting_workers`: workers that wait for `version`, by rank.
    `sending_version`: the version that is on its way, or -1."""

    name: str
    generator: str
    receiver: str
    worker_count: int
    port: int
    process: SenderProcess
    sender_id: bytes = b""
    version: int = -1
    deadline: float | None = None
    sending_version: int = -1
    waiting_workers: dict[int, bytes] = field(default_factory=dict)


class NcclLinkTable:
    """The groups of all generators. Nothing here waits; `now` are seconds of one clock.

    `start_process(name)` starts the process of a new link, `send_message(to, message)` sends a message, `find_path(version)`
    is the file of a version that is still there. A link is dropped, its process killed, if a delivery takes longer than
    `timeout` from the first worker's request, if the process ends, or if its generator restarts; the next request makes another.
    """

    def __init__(
        self,
        host: str,
        bucket_bytes: int,
        timeout: float,
        *,
        start_process: Callable[[str], SenderProcess],
        send_message: Callable[[bytes, NcclMessage], None],
        find_path: Callable[[int], str | None],
        find_port: Callable[[str], int],
    ):
        self._host, self._bucket_bytes, self._timeout = host, bucket_bytes, timeout
        self._start_process, self._send_message, self._find_path, self._find_port = (
            start_process,
            send_message,
            find_path,
            find_port,
        )
        self._links: dict[str, NcclLink] = {}
        """By generator."""

    def __len__(self) -> int:
        return len(self._links)

    def handle_message(self, sender: bytes, message: NcclMessage, now: float) -> None:
        """A message came from `sender`. Messages of a dropped process are ignored."""
        if isinstance(message, Ready):
            self._add_request(sender, message, now)
            return
        link = next((k for k in self._links.values() if k.name == getattr(message, "link", "")), None)
        if link is None:
            return
        if isinstance(message, Up):
            link.sender_id = sender
            self._send_if_ready(link)
        elif isinstance(message, Sent) and message.version == link.sending_version:
            link.sending_version = -1
            link.deadline = now + self._timeout if link.waiting_workers else None
            self._send_if_ready(link)

    def drop_overdue_links(self, now: float) -> None:
        """Drop what has ended or takes too long."""
        for link in list(self._links.values()):
            code = link.process.poll()
            if code is not None:
                self._drop_link(link, f"the process that sends from the learner's GPU ended with code {code}")
            elif link.deadline is not None and now > link.deadline:
                self._drop_link(link, f"it took longer than {self._timeout:g} s (weights.install_timeout)")

    def close(self) -> None:
        """Drop all."""
        for link in list(self._links.values()):
            self._drop_link(link, "the learner has closed")

    def _add_request(self, worker: bytes, message: Ready, now: float) -> None:
        if self._find_path(message.version) is None:
            self._send_message(worker, Refused(f"version {message.version} is not kept"))
            return
        link = self._links.get(message.generator)
        if link is not None and (
            (link.receiver, link.worker_count) != (message.receiver, message.workers)
            or link.sending_version == message.version
            or (link.waiting_workers and link.version != message.version)
        ):
            # It restarted, or what it asked for before has timed out.
            self._drop_link(link, "the generator has asked again")
            link = None
        if link is None:
            name = uuid.uuid4().hex
            port, process = self._find_port(self._host), self._start_process(name)
            link = NcclLink(name, message.generator, message.receiver, message.workers, port, process)
            self._links[message.generator] = link
        if link.deadline is None:
            link.deadline = now + self._timeout
        link.version = message.version
        link.waiting_workers[message.rank] = worker
        self._send_if_ready(link)

    def _send_if_ready(self, link: NcclLink) -> None:
        if not link.sender_id or link.sending_version >= 0 or len(link.waiting_workers) < link.worker_count:
            return
        path = self._find_path(link.version)
        if path is None:
            self._drop_link(link, "a newer one has taken its place")
            return
        for worker in link.waiting_workers.values():
            self._send_message(worker, Offer(link.name, self._host, link.port, self._bucket_bytes))
        link.waiting_workers.clear()
        link.sending_version = link.version
        self._send_message(
            link.sender_id, Send(path, link.version, self._host, link.port, link.worker_count, self._bucket_bytes)
        )

    def _drop_link(self, link: NcclLink, reason: str) -> None:
        del self._links[link.generator]
        link.process.kill()
        for worker in link.waiting_workers.values():
            self._send_message(worker, Refused(f"version {link.version} was not sent: {reason}"))


class NcclSender:
    """The learner's end: writes versions as `VersionStore` does, and has them sent to whoever asks; see `NcclLinkTable`.

    `host`: the interface at which generators ask, and meet the senders. `timeout(nbytes)`: seconds that a delivery of so many may
    take. A thread answers them, from the first `publish_tensors` on.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        bucket_bytes: int,
        timeout: Callable[[int], float],
        start: Callable[[str, str], SenderProcess] | None = None,
    ):
        self._store = VersionStore(directory, bucket_bytes=bucket_bytes)
        self._host, self._bucket_bytes, self._timeout = host, bucket_bytes, timeout
        self._start_process = start or start_sender_process
        self._paths: dict[int, str] = {}
        self._endpoint = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def publish_tensors(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        versions_in_use: Collection[int] = (),
    ) -> TransferOffer:
        """See `WeightSender.publish_tensors`. Raises `WeightError` also for scalars, which vLLM cannot pack."""
        for name, tensor in tensors.items():
            _refuse_scalar(name, tensor.dim())
        return self.announce_version(self._store.write_tensors(version, tensors, dtype, versions_in_use))

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """See `WeightSender.announce_version`. Raises what `publish_tensors` raises."""
        for name, entry in manifest.tensors.items():
            _refuse_scalar(name, len(entry.shape))
        kept = {v: p for v, p in self._paths.items() if Path(p).exists()}
        self._paths = {**kept, manifest.version: manifest.path}
        if self._thread is None:
            self._start_listening(self._timeout(manifest.nbytes))
        return TransferOffer(manifest, [self._endpoint])

    def close(self) -> None:
        """Kill the senders and remove the files. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        self._store.close()

    def _start_listening(self, timeout: float) -> None:
        router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        router.linger = 0
        self._endpoint = f"tcp://{self._host}:{router.bind_to_random_port(f'tcp://{self._host}')}"
        self._thread = threading.Thread(
            target=self._serve_requests, args=(router, timeout), name="nccl-links", daemon=True
        )
        self._thread.start()

    def _serve_requests(self, router: zmq.Socket[bytes], timeout: float) -> None:
        def post(to: bytes, message: NcclMessage) -> None:
            router.send_multipart(
                [to, encode_nccl_message(message)]
            )  # nothing waits for one that is lost: ZeroMQ drops it

        links = NcclLinkTable(
            self._host,
            self._bucket_bytes,
            timeout,
            start_process=lambda name: self._start_process(self._endpoint, name),
            send_message=post,
            find_path=lambda version: self._paths.get(version),
            find_port=find_free_port,
        )
        with contextlib.closing(router), contextlib.closing(links):
            while not self._closing.is_set():
                if router.poll(POLL_MILLISECONDS):
                    sender, *data = router.recv_multipart()
                    with contextlib.suppress(MalformedError):  # not one of ours
                        links.handle_message(sender, decode_nccl_message(b"".join(data)), time.monotonic())
                links.drop_overdue_links(time.monotonic())


def _refuse_scalar(name: str, dimensions: int) -> None:
    if not dimensions:
        raise WeightError(f'tensor {name!r} is a scalar, which weights.backend="nccl" cannot send')


class NcclReceiver:
    """A generator's end. Nothing to bring: the workers receive the tensors when the engine is paused; see
    `request_receive_offer`.

    Each start of a generator has one of its own, and with it a group of its own.
    """

    def __init__(self, generator: str):
        self._generator, self._receiver = generator, uuid.uuid4().hex

    async def fetch_version(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        source = NcclSource(parts[0], self._generator, self._receiver, timeout)
        return msgspec.structs.replace(manifest, source=source)

    async def discard_version(self, manifest: WeightManifest) -> None:
        pass

    async def close(self) -> None:
        pass


def request_receive_offer(manifest: WeightManifest, rank: int, workers: int) -> Offer:
    """A worker's request, when it can receive. Blocking. Raises `WeightError` if it is refused, or not answered in time."""
    source = manifest.source
    assert source is not None
    where = f"weights version {manifest.version} (weights.backend = nccl)"
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with contextlib.closing(dealer):
        dealer.linger = 0
        dealer.connect(source.endpoint)
        dealer.send(encode_nccl_message(Ready(source.generator, source.receiver, manifest.version, rank, workers)))
        if not dealer.poll(int(source.timeout * 1000)):
            raise WeightError(f"{where}: no answer from the learner at {source.endpoint} within {source.timeout:g} s")
        answer = decode_nccl_message(dealer.recv())
    if not isinstance(answer, Offer):
        raise WeightError(f"{where}: {getattr(answer, 'reason', answer)}")
    return answer


def find_free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def start_sender_process(endpoint: str, link: str) -> SenderProcess:
    """A sending process, which finds what this one finds, and ends with it."""
    boot = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from r3async.rollout.vllm.worker import main; main()"
    )
    command = [sys.executable, "-c", boot, json.dumps(sys.path), endpoint, link, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
