"""Weights over TCP: from the file of the learner's host to one file on each other host, through a tree of hosts; see `relay`.

The learner's host has a version as one file, and beside it the delta from the version before, if that is shorter. On each other
host one generator fetches it for all: the delta if the host has the very version that it changes, else the whole file. Chunks
have checksums, blocks of a delta have those of what they make, and the engine compares each tensor with the manifest, which came
another way, before it pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import xxhash

from r3async.untrusted import MalformedError, decode_utf8
from r3async.weights.delta import VersionDigest, apply_delta, digest_version
from r3async.weights.host import HostVersionCache
from r3async.weights.manifest import WeightError, WeightManifest
from r3async.weights.publish import check_free_space, delta_path
from r3async.weights.relay import (
    ROOT_ADDRESS,
    Chunk,
    ChunkServer,
    Done,
    Get,
    Gone,
    Join,
    Place,
    RelayTrees,
    count_chunks,
    decode_relay_message,
    encode_relay_message,
)
from r3async.world import File, MessageSocket, World
from r3async.world.files import write_atomically
from r3async.world.keys import ClientKeys, ServerKeys, decode_key, derive_public_key
from r3async.world.real import REAL_WORLD

WINDOW_CHUNKS = 16
"""Chunks that are asked for and not written yet."""
RETRY_SECONDS = 1.0
"""Without a chunk for so long, what was asked for is asked for again: it may have been lost with a connection."""
MAX_SILENCE_SECONDS = 5.0
"""Without a chunk for so long, a host asks for another place in the tree."""
MAX_DAMAGED_CHUNKS = 3
"""So often a chunk may come damaged from one host; then another place is asked for."""
MAX_RELAYED_STREAMS = 3
"""Streams that a host passes on: the newest ones."""
CACHE_POLL_SECONDS = 0.05
"""Between two looks at what another process of the host fetches."""


class TcpSource(msgspec.Struct, frozen=True):
    """Where a version is. `nbytes`: of its file, on `host`. A delta of `delta_bytes` changes version `base`; None: there is
    none."""

    endpoint: str
    name: str
    nbytes: int
    base: VersionDigest | None = None
    delta_bytes: int = 0
    host: str = ""


class TcpServer:
    """The learner's end: serves files that were written on its host. On one event loop. `public_endpoint(endpoint)`: where
    others reach what is bound there."""

    def __init__(
        self,
        host: str,
        keys: ServerKeys,
        world: World = REAL_WORLD,
        public_endpoint: Callable[[str], str] = lambda bound: bound,
    ):
        self._address, self._keys, self._files = f"tcp://{host}:*", keys, world.files
        self._public_endpoint, self._host = public_endpoint, world.processes.host
        self._sockets = world.open_sockets()
        self._open_sockets: list[MessageSocket] = []
        self._chunk_server, self._trees = ChunkServer(), RelayTrees()
        self._paths: dict[str, Path] = {}
        self.refused_peers: Counter[str] = Counter()
        """Peers without a known key, by reason."""

    @property
    def sent_bytes(self) -> int:
        """Of all chunks so far."""
        return self._chunk_server.sent_bytes

    def offer_version(self, manifest: WeightManifest, base: VersionDigest | None) -> TcpSource:
        """Serve a version, and its delta from `base`, which is beside it. What was removed from the host is served no longer."""
        socket = self._ensure_socket()
        for name, path in list(self._paths.items()):
            if self._files.stat(path) is None:
                del self._paths[name]
                self._chunk_server.remove_stream(name)
                self._trees.forget_stream(name)
        path, name = Path(manifest.path), f"{manifest.lineage}-{manifest.version}"
        nbytes = self._serve_file(name, path)
        delta_bytes = self._serve_file(f"{name}-delta", delta_path(path)) if base is not None else 0
        return TcpSource(self._public_endpoint(socket.endpoint), name, nbytes, base, delta_bytes, self._host)

    def _serve_file(self, name: str, path: Path) -> int:
        self._chunk_server.remove_stream(name)  # of a try before this one
        file = self._files.open(path)
        self._chunk_server.add_complete_stream(name, file)
        self._paths[name] = path
        return file.size()

    def _ensure_socket(self) -> MessageSocket:
        if not self._open_sockets:
            router = self._sockets.bind_router(
                self._address, self._handle_message, keys=self._keys, refused_peers=self.refused_peers
            )
            self._open_sockets.append(router)
        return self._open_sockets[0]

    def _handle_message(self, frames: list[Any]) -> None:
        socket, peer = self._open_sockets[0], frames[0].bytes
        with contextlib.suppress(MalformedError, IndexError):  # not one of ours, or damaged
            message = decode_relay_message(frames[1].bytes)
            if isinstance(message, Join):
                known = message.stream in self._paths
                answer = self._trees.handle_join(decode_utf8(peer), message) if known else Gone(message.stream)
                socket.send([peer, encode_relay_message(answer)])
            elif isinstance(message, Done):
                self._trees.handle_received(decode_utf8(peer), message)
            elif isinstance(message, Get):
                self._chunk_server.answer_request(socket, peer, message)

    async def close(self) -> None:
        """Idempotent."""
        await self._sockets.close()
        for name in self._chunk_server.stream_names:
            self._chunk_server.remove_stream(name)


@dataclass
class IncomingStream:
    """A stream under way to this host. `written_chunks`: chunks that are in its file. `parent`: the address where it is asked
    for, once it is known."""

    name: str
    chunk_count: int
    written_chunks: int = 0
    parent: str | None = None
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.pending_chunks: deque[tuple[int, list[Any]]] = deque()
        """Chunks that follow on those: checksum, and frames."""
        self.activity = asyncio.Event()

    @property
    def next_chunk(self) -> int:
        """The first chunk that is not here."""
        return self.written_chunks + len(self.pending_chunks)

    @property
    def is_complete(self) -> bool:
        return self.written_chunks == self.chunk_count

    async def wait_for_activity(self) -> bool:
        """Whether something arrived in time."""
        self.activity.clear()
        try:
            await asyncio.wait_for(self.activity.wait(), RETRY_SECONDS)
        except TimeoutError:
            return False
        return True


class TcpReceiver:
    """A host's end, in each generator. `host`: where it passes weights on to other hosts (ZeroMQ's name of an interface; empty:
    it does not), which reach it at `name`. `folder`: what the generators of this run share on a host."""

    def __init__(
        self,
        directory: Path,
        folder: str,
        peer_id: str,
        keys: ClientKeys,
        *,
        host: str = "",
        name: str = "",
        world: World = REAL_WORLD,
    ):
        self._world, self._clock, self._files = world, world.clock.monotonic, world.files
        self._host_name = world.processes.host
        self._cache = HostVersionCache(directory, f"{folder}-{quote(self._host_name, safe='')}", world)
        self._peer_id = f"{peer_id}-{world.unique_id()[:8]}".encode()
        self._keys, self._host, self._name = keys, host, name
        self._sockets = world.open_sockets()
        self._root_sockets: list[MessageSocket] = []
        self._relay_sockets: list[MessageSocket] = []
        self._chunk_server = ChunkServer()
        self._address = ""
        self._incoming = IncomingStream("", 0)
        self.refused_peers: Counter[str] = Counter()
        self.received_bytes = self.damaged_chunks = self.parent_changes = 0
        """Bytes and chunks of streams, and how often this host asked for another place."""

    async def fetch_version(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        """See `WeightReceiver.fetch_version`. One process of the host fetches, and the others wait for its file."""
        source, wanted = parts[0], digest_version(manifest)
        if source.host == self._host_name and self._files.stat(Path(manifest.path)) is not None:
            return manifest  # the learner's host
        try:
            async with asyncio.timeout(timeout):
                while (path := await self._run_in_thread(self._cache.acquire_version, wanted)) is None:
                    with self._cache.claim_fetch() as mine:
                        if mine and self._files.stat(self._cache.version_path(wanted)) is None:
                            await self._fetch_to_cache(source, wanted, manifest)
                    if not mine:
                        await asyncio.sleep(CACHE_POLL_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(
                f"version {manifest.version} did not arrive within {timeout:g} s (weights.install_timeout)"
            ) from error
        return msgspec.structs.replace(manifest, path=str(path))

    async def discard_version(self, manifest: WeightManifest) -> None:
        """See `WeightReceiver.discard_version`. The learner's own file stays."""
        await self._run_in_thread(self._cache.discard_version, digest_version(manifest))

    async def close(self) -> None:
        """See `WeightReceiver.close`."""
        await self._sockets.close()
        for name in self._chunk_server.stream_names:
            self._chunk_server.remove_stream(name)
        await self._run_in_thread(self._cache.close)

    async def _run_in_thread(self, function: Any, *args: Any) -> Any:
        return await self._world.threads.run(function, *args)

    async def _fetch_to_cache(self, source: TcpSource, wanted: VersionDigest, manifest: WeightManifest) -> None:
        base = source.base if source.base is not None and self._has_version(source.base) else None
        await self._run_in_thread(self._cache.remove_unused_versions, base)
        beside = source.nbytes if base is not None else 0
        check_free_space(self._cache.path, source.nbytes, manifest.version, self._files, beside)
        self._connect_sockets(source.endpoint)
        path = self._cache.version_path(wanted)
        if base is not None:
            aside = path.with_name(f".{path.name}.delta")
            delta = await self._receive_stream(f"{source.name}-delta", source.delta_bytes, aside)
            self._files.remove(aside)  # what is passed on stays open
            if await self._run_in_thread(self._apply_delta, base, delta, path):
                return
        aside = path.with_name(f".{path.name}")
        await self._receive_stream(source.name, source.nbytes, aside)
        self._files.rename(aside, path)

    def _has_version(self, base: VersionDigest) -> bool:
        return self._files.stat(self._cache.version_path(base)) is not None

    def _apply_delta(self, base: VersionDigest, delta: File, path: Path) -> bool:
        """Whether the delta made the file. If not, it or the version that it changes is corrupt: the whole file is needed."""
        try:
            with self._files.open(self._cache.version_path(base)) as before:
                write_atomically(path, apply_delta(base, before, delta), fsync=False, files=self._files)
        except WeightError:
            return False
        return True

    # -- one stream ------------------------------------------------------------------------------------------------

    def _connect_sockets(self, endpoint: str) -> None:
        """Connect to the learner, and listen for other hosts, if that was not done."""
        if self._root_sockets:
            return
        if self._host:
            # A client's keys serve here too: the learner knows their public one, and so do all that have the same.
            known = frozenset([decode_key(derive_public_key(self._keys.secret_key))])
            server = ServerKeys(self._keys.secret_key, known)
            with contextlib.suppress(OSError):  # then it passes nothing on
                relay = self._sockets.bind_router(
                    f"tcp://{self._host}:*", self._handle_chunk_request, keys=server, refused_peers=self.refused_peers
                )
                self._relay_sockets.append(relay)
                self._address = f"tcp://{self._name}:{relay.endpoint.rpartition(':')[2]}"
        self._root_sockets.append(
            self._sockets.connect_dealer(endpoint, self._peer_id, self._handle_message, keys=self._keys)
        )

    def _handle_chunk_request(self, frames: list[Any]) -> None:
        with contextlib.suppress(MalformedError, IndexError):  # not one of ours, or damaged
            message = decode_relay_message(frames[1].bytes)
            if isinstance(message, Get):
                self._chunk_server.answer_request(self._relay_sockets[0], frames[0].bytes, message)

    def _handle_message(self, frames: list[Any]) -> None:
        expected = self._incoming
        try:
            message = decode_relay_message(frames[0].bytes)
        except MalformedError:
            return
        if message.stream != expected.name:
            return
        if isinstance(message, Place):
            expected.parent = message.parent
        elif isinstance(message, Gone):
            expected.is_gone = True
        elif isinstance(message, Chunk) and message.index == expected.next_chunk:
            expected.pending_chunks.append((message.checksum, frames[1:]))
        else:
            return
        expected.activity.set()

    async def _receive_stream(self, name: str, nbytes: int, path: Path) -> File:
        """Receive a stream into a new file, and pass it on meanwhile. Returns the file, which `ChunkServer` closes."""
        for old in [name, *self._chunk_server.stream_names[:-MAX_RELAYED_STREAMS]]:
            self._chunk_server.remove_stream(old)
        file = self._files.open(path, exclusive=True, mode=0o600)
        self._chunk_server.add_growing_stream(name, file, nbytes)
        expected = self._incoming = IncomingStream(name, count_chunks(nbytes))
        avoid: list[str] = []
        try:
            while not expected.is_complete:
                parent = await self._request_parent(expected, avoid)
                if await self._receive_from_parent(parent, expected, file):
                    self._root_sockets[0].send([encode_relay_message(Done(name, parent))])
                elif parent != ROOT_ADDRESS:
                    avoid.append(parent)
                    self.parent_changes += 1
        except BaseException:
            self._chunk_server.remove_stream(name)  # whoever asks for it here looks elsewhere
            raise
        return file

    async def _request_parent(self, expected: IncomingStream, avoid: Sequence[str]) -> str:
        """The address of a parent, from the learner. Raises `WeightError` if that one does not have the stream."""
        expected.parent, expected.is_gone = None, False
        while expected.parent is None:
            self._root_sockets[0].send([encode_relay_message(Join(expected.name, self._address, tuple(avoid)))])
            await expected.wait_for_activity()
            if expected.is_gone:
                raise WeightError(f"the learner does not keep {expected.name} of the weights any more")
        return expected.parent

    async def _receive_from_parent(self, parent: str, expected: IncomingStream, file: File) -> bool:
        """See `_receive_chunks`."""
        if parent == ROOT_ADDRESS:
            return await self._receive_chunks(expected, file, self._root_sockets[0])
        keys = ClientKeys(self._keys.secret_key, derive_public_key(self._keys.secret_key))
        try:
            socket = self._sockets.connect_dealer(parent, self._peer_id, self._handle_message, keys=keys)
        except OSError:  # that is no address
            return False
        try:
            return await self._receive_chunks(expected, file, socket)
        finally:
            socket.close()

    async def _receive_chunks(self, expected: IncomingStream, file: File, socket: MessageSocket) -> bool:
        """Chunks from one parent, until all are written, it is silent, or a chunk is damaged each time, for that is what it has.
        Returns whether all are."""
        asked, silent, damaged = expected.next_chunk, 0.0, Counter[int]()
        while not expected.is_complete:
            stop = min(expected.chunk_count, expected.next_chunk + WINDOW_CHUNKS)
            if stop > asked:
                socket.send([encode_relay_message(Get(expected.name, asked, stop))])
                asked = stop
            if expected.pending_chunks:
                if not await self._write_pending_chunks(expected, file, socket):
                    asked = expected.next_chunk
                    damaged[asked] += 1
            elif await expected.wait_for_activity():
                silent = 0.0
            else:
                silent += RETRY_SECONDS
                asked = expected.next_chunk
            if expected.is_gone or silent >= MAX_SILENCE_SECONDS or damaged[expected.next_chunk] >= MAX_DAMAGED_CHUNKS:
                return False
        return True

    async def _write_pending_chunks(self, expected: IncomingStream, file: File, socket: MessageSocket) -> bool:
        """Write what has arrived, and pass it on. False if a chunk was damaged on its way: it is asked for again."""
        batch = list(expected.pending_chunks)
        good = await self._run_in_thread(self._append_verified_chunks, file, batch)
        for _ in good:
            expected.pending_chunks.popleft()
        expected.written_chunks += len(good)
        self._chunk_server.add_chunks(expected.name, good, self._relay_sockets[0] if self._relay_sockets else socket)
        if len(good) == len(batch):
            return True
        self.damaged_chunks += 1
        expected.pending_chunks.clear()
        return False

    def _append_verified_chunks(self, file: File, batch: Sequence[tuple[int, list[Any]]]) -> list[int]:
        """Append chunks, up to the first that is damaged. Returns the checksums of those that were written."""
        good = []
        for checksum, frames in batch:
            digest = xxhash.xxh3_64()
            for frame in frames:
                digest.update(frame.buffer)
            if digest.intdigest() != checksum:
                break
            self.received_bytes += file.append([frame.buffer for frame in frames])
            good.append(checksum)
        return good
