"""Coordination of weight transfers from the learner's GPU to the engines' GPUs by NCCL.

The sending itself is in `rollout.vllm.worker`. A version is written to shared memory of the
learner's host, as with the other transports. For each generator one process beside the learner, on
its GPU, reads it there and is rank 0 of a group with that generator's workers. A collective
operation hangs if a peer is lost: only that process can hang, and it is killed after a timeout.
Neither the learner nor another generator waits for it.

A worker that is ready to receive, its engine paused, sends `Ready`. When all workers of the engine
have done so and the process is `Up`, they get an `Offer` and the process gets `Send`. So nobody
enters the operation before all participants are ready.
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

from r3async.config.serving import bracket_ipv6, strip_brackets
from r3async.config.supervise import TimeLimits
from r3async.config.weights import WeightsConfig
from r3async.untrusted import MalformedError, decode_msgpack
from r3async.weights.interfaces import TransferOffer
from r3async.weights.manifest import NcclSource, WeightError, WeightManifest
from r3async.weights.version_store import VersionStore

if TYPE_CHECKING:
    import torch

POLL_MILLISECONDS = 200
CLOSE_SECONDS = 5.0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A request of worker `rank` of a generator's `workers` workers, which waits for `version`."""

    generator: str
    receiver: str
    version: int
    rank: int
    workers: int


class Up(msgspec.Struct, frozen=True, tag=True):
    """A report that a sending process is ready."""

    link: str


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A report that a sending process has sent a version, and all workers have received it."""

    link: str
    version: int


class Offer(msgspec.Struct, frozen=True, tag=True):
    """An instruction to a worker to receive now, in group `link`, which is formed at `host` and
    `port` if it is new."""

    link: str
    host: str
    port: int
    bucket_bytes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An answer to a worker that nothing will be sent."""

    reason: str


class Send(msgspec.Struct, frozen=True, tag=True):
    """An instruction to a sending process to send the file at `path` to so many workers."""

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
    """Decode a message. Raises `MalformedError`."""
    return decode_msgpack(data, NcclMessage)


class SenderProcess(Protocol):
    """The interface of a sending process that `NcclLinkTable` uses."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


@dataclass
class NcclLink:
    """The NCCL group of a generator.

    Attributes:
        version: The version for which workers wait.
        deadline: Time by which the delivery must be complete; None while the group is idle.
        sending_version: The version that is being sent, or -1.
        waiting_workers: The workers that wait for `version`, by rank.
    """

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


def find_free_port(host: str) -> int:
    with listen_at(host, 0) as probe:
        return int(probe.getsockname()[1])


class NcclLinkTable:
    """The groups of all generators. No method blocks; `now` are seconds of one clock.

    A link is dropped and its process killed if a delivery takes longer than `timeout` from the
    first worker's request, if the process ends, or if its generator restarts. The next request
    creates a new link.

    Args:
        paths: Paths of the files of versions that are kept now, by version. Others change it.
        start_process: `start_process(name)` starts the process of a new link.
        find_port: `find_port(host)` returns a free port.

    Attributes:
        outbox: Messages to send, each after the identity of the socket that it is for.
    """

    def __init__(
        self,
        host: str,
        bucket_bytes: int,
        timeout: float,
        *,
        paths: Mapping[int, str],
        start_process: Callable[[str], SenderProcess],
        find_port: Callable[[str], int] = find_free_port,
    ):
        self.outbox: list[tuple[bytes, NcclMessage]] = []
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._paths = paths
        self._start_process = start_process
        self._find_port = find_port
        self._links: dict[str, NcclLink] = {}
        """Links by generator."""

    def __len__(self) -> int:
        return len(self._links)

    def handle_message(self, sender: bytes, message: NcclMessage, now: float) -> None:
        """Handle a message from `sender`. Messages of a dropped process are ignored."""
        if isinstance(message, Ready):
            self._add_request(sender, message, now)
            return
        link = next(
            (k for k in self._links.values() if k.name == getattr(message, "link", "")), None
        )
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
        """Drop links whose process has ended, or whose delivery takes too long."""
        for link in list(self._links.values()):
            code = link.process.poll()
            if code is not None:
                self._drop_link(
                    link, f"the process that sends from the learner's GPU ended with code {code}"
                )
            elif link.deadline is not None and now > link.deadline:
                self._drop_link(
                    link, f"it took longer than {self._timeout:g} s (supervise.patience)"
                )

    def close(self) -> None:
        """Drop all links."""
        for link in list(self._links.values()):
            self._drop_link(link, "the learner has closed")

    def _add_request(self, worker: bytes, message: Ready, now: float) -> None:
        if message.version not in self._paths:
            self.outbox.append((worker, Refused(f"version {message.version} is not kept")))
            return
        link = self._links.get(message.generator)
        if link is not None and (
            (link.receiver, link.worker_count) != (message.receiver, message.workers)
            or link.sending_version == message.version
            or (link.waiting_workers and link.version != message.version)
        ):
            # The generator restarted, or its earlier request has timed out.
            self._drop_link(link, "the generator has asked again")
            link = None
        if link is None:
            name = uuid.uuid4().hex
            port = self._find_port(self._host)
            process = self._start_process(name)
            link = NcclLink(
                name, message.generator, message.receiver, message.workers, port, process
            )
            self._links[message.generator] = link
        if link.deadline is None:
            link.deadline = now + self._timeout
        link.version = message.version
        link.waiting_workers[message.rank] = worker
        self._send_if_ready(link)

    def _send_if_ready(self, link: NcclLink) -> None:
        if (
            not link.sender_id
            or link.sending_version >= 0
            or len(link.waiting_workers) < link.worker_count
        ):
            return
        path = self._paths.get(link.version)
        if path is None:
            self._drop_link(link, "a newer one has taken its place")
            return
        for worker in link.waiting_workers.values():
            offer = Offer(link.name, self._host, link.port, self._bucket_bytes)
            self.outbox.append((worker, offer))
        link.waiting_workers.clear()
        link.sending_version = link.version
        order = Send(
            path, link.version, self._host, link.port, link.worker_count, self._bucket_bytes
        )
        self.outbox.append((link.sender_id, order))

    def _drop_link(self, link: NcclLink, reason: str) -> None:
        del self._links[link.generator]
        link.process.kill()
        for worker in link.waiting_workers.values():
            refusal = Refused(f"version {link.version} was not sent: {reason}")
            self.outbox.append((worker, refusal))


class NcclSender:
    """The learner's end of the NCCL transport. It writes versions like `VersionStore`, and has them
    sent on request.

    See `NcclLinkTable`. A thread answers the generators, from the first `publish_tensors` on.

    Args:
        host: The interface for the generators' requests, at which they also form groups with the
            senders: an address, an IPv6 address with or without brackets, or a name.
        start: Starts the process that sends to one generator, given an endpoint and a link's name.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        settings: WeightsConfig,
        limits: TimeLimits,
        start: Callable[[str, str], SenderProcess] | None = None,
    ):
        self._settings = settings
        self._limits = limits
        self._store = VersionStore(directory, bucket_bytes=settings.bucket_bytes)
        self._host = strip_brackets(host)
        self._start_process = start or start_sender_process
        self._paths: dict[int, str] = {}
        """Paths of versions. The thread reads it."""
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
        """Implement `WeightSender.publish_tensors`. Raises `WeightError` also for scalars, which
        vLLM cannot pack."""
        for name, tensor in tensors.items():
            _refuse_scalar(name, tensor.dim())
        return self.announce_version(
            self._store.write_tensors(version, tensors, dtype, versions_in_use)
        )

    def announce_version(self, manifest: WeightManifest) -> TransferOffer:
        """Implement `WeightSender.announce_version`. Raises the errors of `publish_tensors`."""
        for name, entry in manifest.tensors.items():
            _refuse_scalar(name, len(entry.shape))
        self._paths[manifest.version] = manifest.path
        for version, path in list(self._paths.items()):
            if not Path(path).exists():
                del self._paths[version]
        if self._thread is None:
            timeout = self._limits.install(manifest.nbytes, first=True)
            self._start_listening(timeout)
        return TransferOffer(manifest, [self._endpoint])

    def close(self) -> None:
        """Kill the senders and remove the files. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        self._store.close()

    def _start_listening(self, timeout: float) -> None:
        address = f"tcp://{bracket_ipv6(self._host)}"
        router = open_nccl_socket(zmq.Context.instance(), zmq.ROUTER, address)
        self._endpoint = f"{address}:{router.bind_to_random_port(address)}"
        self._thread = threading.Thread(
            target=self._serve_requests, args=(router, timeout), name="nccl-links", daemon=True
        )
        self._thread.start()

    def _serve_requests(self, router: zmq.Socket[bytes], timeout: float) -> None:
        links = NcclLinkTable(
            self._host,
            self._settings.bucket_bytes,
            timeout,
            paths=self._paths,
            start_process=lambda name: self._start_process(self._endpoint, name),
        )
        with contextlib.closing(router):
            try:
                while not self._closing.is_set():
                    if router.poll(POLL_MILLISECONDS):
                        sender, *data = router.recv_multipart()
                        with contextlib.suppress(MalformedError):  # not one of ours
                            links.handle_message(
                                sender, decode_nccl_message(b"".join(data)), time.monotonic()
                            )
                    links.drop_overdue_links(time.monotonic())
                    _send_messages(router, links.outbox)
            finally:  # no process of a link outlives this thread, whatever ends it
                links.close()
                _send_messages(router, links.outbox)


def _send_messages(router: zmq.Socket[bytes], outbox: list[tuple[bytes, NcclMessage]]) -> None:
    """Send all messages. Nothing waits for a peer that is lost: ZeroMQ drops its messages."""
    while outbox:
        peer, message = outbox.pop(0)
        router.send_multipart([peer, encode_nccl_message(message)])


def _refuse_scalar(name: str, dimensions: int) -> None:
    if not dimensions:
        raise WeightError(f'tensor {name!r} is a scalar, which weights.backend="nccl" cannot send')


class NcclReceiver:
    """A generator's end of the NCCL transport.

    It fetches nothing: the workers receive the tensors while the engine is paused
    (`request_receive_offer`). Each start of a generator has a new receiver, and
    with it a new group.
    """

    def __init__(self, generator: str):
        self._generator = generator
        self._receiver = uuid.uuid4().hex

    async def fetch_version(
        self, manifest: WeightManifest, transport_data: Sequence[Any], timeout: float
    ) -> WeightManifest:
        source = NcclSource(transport_data[0], self._generator, self._receiver, timeout)
        return msgspec.structs.replace(manifest, source=source)

    async def discard_version(self, manifest: WeightManifest) -> None:
        pass

    async def close(self) -> None:
        pass


def request_receive_offer(manifest: WeightManifest, rank: int, workers: int) -> Offer:
    """Send a worker's request and wait for the offer; call it when the worker can
    receive. Blocking.

    Raises `WeightError` if the request is refused, or not answered in time.
    """
    source = manifest.source
    assert source is not None
    where = f"weights version {manifest.version} (weights.backend = nccl)"
    with contextlib.closing(
        open_nccl_socket(zmq.Context.instance(), zmq.DEALER, source.endpoint)
    ) as dealer:
        dealer.connect(source.endpoint)
        dealer.send(
            encode_nccl_message(
                Ready(source.generator, source.receiver, manifest.version, rank, workers)
            )
        )
        if not dealer.poll(int(source.timeout * 1000)):
            raise WeightError(
                f"{where}: no answer from the learner at {source.endpoint} within "
                f"{source.timeout:g} s"
            )
        answer = decode_nccl_message(dealer.recv())
    if not isinstance(answer, Offer):
        raise WeightError(f"{where}: {getattr(answer, 'reason', answer)}")
    return answer


def open_nccl_socket(context: zmq.Context[Any], kind: int, address: str) -> zmq.Socket[bytes]:
    """Open a socket to bind or connect at `address`, of IPv4 or IPv6, that drops unsent messages
    when it is closed."""
    opened: zmq.Socket[bytes] = context.socket(kind)
    opened.linger = 0
    opened.setsockopt(zmq.IPV6, "[" in address)
    return opened


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host`, an IPv4 or IPv6 address or a name. Port
    0 is a free one."""
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((host, port), family=family)


def start_sender_process(endpoint: str, link: str) -> SenderProcess:
    """Start a sending process, which has the import path of this process and ends with it."""
    boot = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from "
        "r3async.rollout.vllm.nccl_sender import main; main()"
    )
    command = [sys.executable, "-c", boot, json.dumps(sys.path), endpoint, link, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
