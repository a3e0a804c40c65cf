"""Weights over TCP: from a file of the learner's host to a file on each other, through a tree.

The learner's host has a version as one file, and beside it the delta from the version before, if
that is shorter. On each other host one generator fetches it for all: the delta if the host has the
exact version that it changes, else the whole file. Chunks have checksums, records of a delta have
those of the resulting blocks, and the engine compares each tensor with the manifest, which arrived
separately, before it pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import xxhash

from r3async.config.serving import replace_host
from r3async.untrusted import MalformedError, decode_utf8
from r3async.weights.delta import VersionDigest, apply_delta, digest_version
from r3async.weights.host_cache import HostVersionCache
from r3async.weights.interfaces import PublishedPart, delta_name
from r3async.weights.manifest import WeightError, WeightManifest
from r3async.weights.relay import (
    ROOT_ADDRESS,
    Chunk,
    ChunkServer,
    Done,
    Get,
    Gone,
    Join,
    Place,
    RelayMessage,
    RelayTrees,
    count_chunks,
    decode_relay_message,
    encode_relay_message,
)
from r3async.weights.version_folder import check_free_space
from r3async.world import File, MessageSocket, World
from r3async.world.curve_keys import ClientKeys, ServerKeys, decode_key, derive_public_key
from r3async.world.real import REAL_WORLD

WINDOW_CHUNKS = 16
"""Maximum number of chunks that are requested and not written yet."""
RETRY_SECONDS = 1.0
"""Seconds without a chunk after which the request is repeated: it may have been lost
with a connection."""
MAX_SILENCE_SECONDS = 5.0
"""Seconds without a chunk after which a host asks for another place in the tree."""
MAX_DAMAGED_CHUNKS = 3
"""Number of damaged copies of a chunk from one host after which another place is requested."""
MAX_RELAYED_STREAMS = 3
"""Number of streams of each part of a version that a host passes on: the newest ones."""
CACHE_POLL_SECONDS = 0.05
"""Seconds between two checks of what another process of the host fetches."""


class TcpPart(msgspec.Struct, frozen=True):
    """A part of a version's file, which one of the learner's hosts has.

    Attributes:
        name: Name of the part's stream.
        nbytes: Size of the part.
        base: The version of which the delta changes this part; None if there is no delta.
        delta_bytes: Size of the delta.
    """

    name: str
    nbytes: int
    base: VersionDigest | None = None
    delta_bytes: int = 0


class TcpSource(msgspec.Struct, frozen=True):
    """The source of a version on the learner's hosts.

    Attributes:
        endpoint: Address of the learner's `TcpServer`.
        parts: The parts of the version's file, in order.
        host: The host that has the first part, which is the whole file if there is no other.
    """

    endpoint: str
    parts: tuple[TcpPart, ...]
    host: str = ""

    @property
    def nbytes(self) -> int:
        """The size of the version's file."""
        return sum(part.nbytes for part in self.parts)


class PartServer:
    """A server of files on one of the learner's hosts. It belongs to one event loop.

    Others reach it at `public_host`; by default, that is `host`.
    """

    def __init__(
        self,
        host: str,
        keys: ServerKeys,
        world: World = REAL_WORLD,
        public_host: str = "",
    ):
        self._address = f"tcp://{host}:*"
        self._keys = keys
        self._files = world.files
        self._public_host = public_host
        self._sockets = world.open_sockets()
        self._open_sockets: list[MessageSocket] = []
        self._chunk_server = ChunkServer()
        self._paths: dict[str, Path] = {}
        self.refused_peers: Counter[str] = Counter()
        """Number of peers refused for lack of a known key, by reason."""

    @property
    def sent_bytes(self) -> int:
        """The bytes of all chunks sent so far."""
        return self._chunk_server.sent_bytes

    def bind_socket(self) -> str:
        """Bind the server's socket, unless this was done before, and return the address at which
        others reach it."""
        if not self._open_sockets:
            router = self._sockets.bind_router(
                self._address,
                self._handle_message,
                keys=self._keys,
                refused_peers=self.refused_peers,
            )
            self._open_sockets.append(router)
        endpoint = self._open_sockets[0].endpoint
        return replace_host(endpoint, self._public_host) if self._public_host else endpoint

    def serve_files(self, paths: Mapping[str, str]) -> None:
        """Serve files by the names of their streams, and those no longer that were
        removed from the host."""
        for name, path in list(self._paths.items()):
            if self._files.stat(path) is None:
                self._forget_file(name)
        for name, served in paths.items():
            self._chunk_server.remove_stream(name)  # from an earlier attempt
            self._chunk_server.add_complete_stream(name, self._files.open(Path(served)))
            self._paths[name] = Path(served)

    def _forget_file(self, name: str) -> None:
        del self._paths[name]
        self._chunk_server.remove_stream(name)

    def _handle_message(self, frames: list[Any]) -> None:
        with contextlib.suppress(MalformedError, IndexError):  # not one of ours, or damaged
            self._handle_request(frames[0].bytes, decode_relay_message(frames[1].bytes))

    def _handle_request(self, peer: bytes, message: RelayMessage) -> None:
        if isinstance(message, Get):
            self._chunk_server.answer_request(self._open_sockets[0], peer, message)

    async def close(self) -> None:
        """Close the sockets and files. Idempotent."""
        await self._sockets.close()
        for name in self._chunk_server.stream_names:
            self._chunk_server.remove_stream(name)


class TcpServer(PartServer):
    """The learner's end of the TCP transport. It serves the files on its host, and knows who serves
    those of the others.

    Its other hosts serve their parts with a `PartServer` each.
    """

    def __init__(
        self,
        host: str,
        keys: ServerKeys,
        world: World = REAL_WORLD,
        public_host: str = "",
    ):
        super().__init__(host, keys, world, public_host)
        self._host = world.processes.host
        self._trees = RelayTrees()
        self._parts: dict[str, list[PublishedPart]] = {}
        """The parts of each version, by the name of the first one, which is on this host."""
        self._remote_streams: dict[str, PublishedPart] = {}
        """The other parts by the names of their streams."""
        self.silent_parts: asyncio.Queue[PublishedPart] = asyncio.Queue()
        """Parts of which an engine's host, which had asked for them, got nothing."""

    def offer_version(self, manifest: WeightManifest, *parts: PublishedPart) -> TcpSource:
        """Serve a version, and the deltas of its parts. Versions removed from the host are
        no longer served."""
        endpoint = self.bind_socket()
        first = parts[0]
        self.serve_files(first.file_paths)
        self._parts[first.name] = list(parts)
        for part in parts[1:]:
            self._set_root(part)
        described = tuple(
            TcpPart(part.name, part.nbytes, part.base, part.delta_bytes) for part in parts
        )
        return TcpSource(endpoint, described, self._host)

    def list_parts(self, manifest: WeightManifest) -> list[PublishedPart]:
        """Return the parts of a version that was offered, in order; none if it is not
        served any more."""
        return next((parts for parts in self._parts.values() if parts[0].path == manifest.path), [])

    def list_remote_parts(self, endpoint: str) -> list[PublishedPart]:
        """Return the parts of all versions that the host with that address serves."""
        return [
            part for parts in self._parts.values() for part in parts if part.endpoint == endpoint
        ]

    def move_parts(self, before: str, endpoint: str) -> None:
        """Set the address of a host at which a new process serves its parts."""
        for parts in self._parts.values():
            for index, part in enumerate(parts):
                if part.endpoint == before:
                    parts[index] = msgspec.structs.replace(part, endpoint=endpoint)
                    self._set_root(parts[index])

    def _set_root(self, part: PublishedPart) -> None:
        for stream in part.file_paths:
            self._remote_streams[stream] = part
            self._trees.set_root(stream, part.endpoint)

    def _forget_file(self, name: str) -> None:
        super()._forget_file(name)
        self._trees.forget_stream(name)
        for part in self._parts.pop(name, [])[1:]:
            for stream in part.file_paths:
                self._remote_streams.pop(stream, None)
                self._trees.forget_stream(stream)

    def _handle_request(self, peer: bytes, message: RelayMessage) -> None:
        if isinstance(message, Join):
            stream = message.stream
            if self._trees.has_failed_root(message):
                self.silent_parts.put_nowait(self._remote_streams[stream])
            known = stream in self._paths or stream in self._remote_streams
            answer = self._trees.handle_join(decode_utf8(peer), message) if known else Gone(stream)
            self._open_sockets[0].send([peer, encode_relay_message(answer)])
        elif isinstance(message, Done):
            self._trees.handle_received(decode_utf8(peer), message)
        else:
            super()._handle_request(peer, message)


@dataclass
class IncomingStream:
    """A stream that this host is receiving.

    Attributes:
        written_chunks: Number of chunks in its file.
        place: The place at which it is served, once known.
        is_gone: True if the peer answered that it does not have the stream.
    """

    name: str
    chunk_count: int
    written_chunks: int = 0
    place: Place | None = None
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.pending_chunks: deque[tuple[int, list[Any]]] = deque()
        """Received chunks that follow the written ones: checksum and frames."""
        self.activity = asyncio.Event()

    @property
    def next_chunk(self) -> int:
        """The index of the first chunk that is not here."""
        return self.written_chunks + len(self.pending_chunks)

    @property
    def is_complete(self) -> bool:
        return self.written_chunks == self.chunk_count

    async def wait_for_activity(self) -> bool:
        """Wait up to `RETRY_SECONDS` and return True if something arrived."""
        self.activity.clear()
        try:
            await asyncio.wait_for(self.activity.wait(), RETRY_SECONDS)
        except TimeoutError:
            return False
        return True


class TcpReceiver:
    """A generator's end of the TCP transport.

    Args:
        folder: Name of the cache folder that the generators of this run share on a host.
        host: Interface (in ZeroMQ's notation) at which this host passes weights on to other hosts;
            empty if it does not.
        name: Host name at which other hosts reach it.
    """

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
        self._world = world
        self._clock = world.clock.monotonic
        self._files = world.files
        self._host_name = world.processes.host
        self._cache = HostVersionCache(
            directory, f"{folder}-{quote(self._host_name, safe='')}", world
        )
        self._peer_id = f"{peer_id}-{world.unique_id()[:8]}".encode()
        self._keys = keys
        self._host = host
        self._name = name
        self._sockets = world.open_sockets()
        self._root_sockets: list[MessageSocket] = []
        self._relay_sockets: list[MessageSocket] = []
        self._chunk_server = ChunkServer()
        self._address = ""
        self._incoming = IncomingStream("", 0)
        self._is_closed = False
        self._fetch: asyncio.Future[Path] | None = None
        self._relayed_streams = MAX_RELAYED_STREAMS
        self.refused_peers: Counter[str] = Counter()
        self.received_bytes = self.damaged_chunks = self.parent_changes = 0
        """Bytes received, chunks that arrived damaged, and number of times that this host asked
        for another place."""

    async def fetch_version(
        self, manifest: WeightManifest, transport_data: Sequence[Any], timeout: float
    ) -> WeightManifest:
        """Implement `WeightReceiver.fetch_version`.

        One process of the host fetches, and the others wait for its file. `close` ends both.
        """
        source = transport_data[0]
        wanted = digest_version(manifest)
        is_here = (
            source.host == self._host_name and self._files.stat(Path(manifest.path)) is not None
        )
        if is_here and len(source.parts) == 1:
            return manifest  # the learner's host, which has the whole version
        self._fetch = asyncio.ensure_future(self._fetch_within(source, wanted, manifest, timeout))
        if self._is_closed:
            self._fetch.cancel()
        try:
            path = await self._fetch
        except asyncio.CancelledError:
            if self._is_closed:
                raise WeightError(
                    f"{decode_utf8(self._peer_id)} stops, and fetches no version any more"
                ) from None
            raise
        return msgspec.structs.replace(manifest, path=str(path))

    async def _fetch_within(
        self, source: TcpSource, wanted: VersionDigest, manifest: WeightManifest, timeout: float
    ) -> Path:
        try:
            async with asyncio.timeout(timeout):
                while (
                    path := await self._run_in_thread(self._cache.acquire_version, wanted)
                ) is None:
                    with self._cache.claim_fetch() as mine:
                        if mine and self._files.stat(self._cache.version_path(wanted)) is None:
                            await self._fetch_to_cache(source, wanted, manifest)
                    if not mine:
                        await asyncio.sleep(CACHE_POLL_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(
                f"version {manifest.version} did not arrive within {timeout:g} s "
                "(supervise.patience)"
            ) from error
        return path

    async def discard_version(self, manifest: WeightManifest) -> None:
        """Implement `WeightReceiver.discard_version`. The learner's own file stays."""
        await self._run_in_thread(self._cache.discard_version, digest_version(manifest))

    async def close(self) -> None:
        """Implement `WeightReceiver.close`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._fetch is not None:
            self._fetch.cancel()
        await self._sockets.close()
        for name in self._chunk_server.stream_names:
            self._chunk_server.remove_stream(name)
        await self._run_in_thread(self._cache.close)

    async def _run_in_thread(self, function: Any, *args: Any) -> Any:
        return await self._world.threads.run(function, *args)

    async def _fetch_to_cache(
        self, source: TcpSource, wanted: VersionDigest, manifest: WeightManifest
    ) -> None:
        bases = {
            part.base
            for part in source.parts
            if part.base is not None and self._has_version(part.base)
        }
        base = bases.pop() if bases else None  # all parts change the same version
        await self._run_in_thread(self._cache.remove_unused_versions, base)
        beside = source.nbytes if base is not None else 0
        check_free_space(self._cache.path, source.nbytes, manifest.version, self._files, beside)
        self._connect_sockets(source.endpoint)
        path = self._cache.version_path(wanted)
        aside = path.with_name(f".{path.name}")
        start = 0
        self._relayed_streams = MAX_RELAYED_STREAMS * len(source.parts)
        for part in source.parts:
            await self._fetch_part(part, base if part.base == base else None, aside, start)
            start += part.nbytes
        self._files.rename(aside, path)

    async def _fetch_part(
        self, part: TcpPart, base: VersionDigest | None, path: Path, start: int
    ) -> None:
        """Append a part to the file of a version, which begins with the `start` bytes of
        those before it."""
        if base is not None:
            aside = path.with_name(f"{path.name}.delta")
            delta = await self._receive_stream(delta_name(part.name), part.delta_bytes, aside)
            self._files.remove(aside)  # the open file is still passed on
            if await self._run_in_thread(self._apply_delta, base, delta, path, start, part.nbytes):
                return
        await self._receive_stream(part.name, part.nbytes, path, start)

    def _has_version(self, base: VersionDigest) -> bool:
        return self._files.stat(self._cache.version_path(base)) is not None

    def _apply_delta(
        self, base: VersionDigest, delta: File, path: Path, start: int, nbytes: int
    ) -> bool:
        """Apply the delta of a part, append the result to the file, and return True
        if it is the part.

        If not, the delta or its base is corrupt, and the whole part is needed.
        """
        with (
            self._files.open(self._cache.version_path(base)) as before,
            self._files.open(path, create=True, mode=0o600) as file,
        ):
            try:
                for block in apply_delta(base, before, delta, start, nbytes):
                    file.append([block])
                    del block  # before the next one is made beside it
            except WeightError:
                file.truncate(start)
                return False
        return True

    # -- one stream --------------------------------------------------------------------------------

    def _connect_sockets(self, endpoint: str) -> None:
        """Connect to the learner, and listen for other hosts, unless this was done before."""
        if self._root_sockets:
            return
        if self._host:
            # The client's keys serve here too: their public key is known to the learner, and to all
            # hosts with the same keys.
            known = frozenset([decode_key(derive_public_key(self._keys.secret_key))])
            server = ServerKeys(self._keys.secret_key, known)
            with contextlib.suppress(OSError):  # then it passes nothing on
                relay = self._sockets.bind_router(
                    f"tcp://{self._host}:*",
                    self._handle_chunk_request,
                    keys=server,
                    refused_peers=self.refused_peers,
                )
                self._relay_sockets.append(relay)
                self._address = f"tcp://{self._name}:{relay.endpoint.rpartition(':')[2]}"
        self._root_sockets.append(
            self._sockets.connect_dealer(
                endpoint, self._peer_id, self._handle_message, keys=self._keys
            )
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
            expected.place = message
        elif isinstance(message, Gone):
            expected.is_gone = True
        elif isinstance(message, Chunk) and message.index == expected.next_chunk:
            expected.pending_chunks.append((message.checksum, frames[1:]))
        else:
            return
        expected.activity.set()

    async def _receive_stream(self, name: str, nbytes: int, path: Path, start: int = 0) -> File:
        """Receive a stream into a new file, or one of `start` bytes, and pass it on meanwhile.

        Returns the file, which `ChunkServer` closes.
        """
        for old in [name, *self._chunk_server.stream_names[: -self._relayed_streams]]:
            self._chunk_server.remove_stream(old)
        file = self._files.open(path, create=True, mode=0o600)
        self._chunk_server.add_growing_stream(name, file, nbytes, start)
        expected = self._incoming = IncomingStream(name, count_chunks(nbytes))
        avoid: list[str] = []
        try:
            while not expected.is_complete:
                place = await self._request_place(expected, avoid)
                if await self._receive_from_parent(place, expected, file):
                    self._root_sockets[0].send([encode_relay_message(Done(name, place.parent))])
                elif place.parent != ROOT_ADDRESS:
                    avoid.append(place.parent)
                    self.parent_changes += 1
        except BaseException:
            self._chunk_server.remove_stream(name)  # hosts that request it here then look elsewhere
            raise
        return file

    async def _request_place(self, expected: IncomingStream, avoid: Sequence[str]) -> Place:
        """Ask the learner for a parent and return where it is.

        Raises `WeightError` if the learner does not have the stream.
        """
        expected.place = None
        expected.is_gone = False
        while expected.place is None:
            self._root_sockets[0].send(
                [encode_relay_message(Join(expected.name, self._address, tuple(avoid)))]
            )
            await expected.wait_for_activity()
            if expected.is_gone:
                raise WeightError(
                    f"the learner does not keep {expected.name} of the weights any more"
                )
        return expected.place

    async def _receive_from_parent(
        self, place: Place, expected: IncomingStream, file: File
    ) -> bool:
        """Connect to a parent and receive from it as `_receive_chunks` does."""
        if place.parent == ROOT_ADDRESS:
            return await self._receive_chunks(expected, file, self._root_sockets[0])
        client_public = derive_public_key(self._keys.secret_key)
        keys = self._keys if place.is_learner else ClientKeys(self._keys.secret_key, client_public)
        try:
            socket = self._sockets.connect_dealer(
                place.parent, self._peer_id, self._handle_message, keys=keys
            )
        except OSError:  # that is no address
            return False
        try:
            return await self._receive_chunks(expected, file, socket)
        finally:
            socket.close()

    async def _receive_chunks(
        self, expected: IncomingStream, file: File, socket: MessageSocket
    ) -> bool:
        """Receive chunks from one parent and return True if all are written.

        Gives up when the parent is silent, or when a chunk arrives damaged every time because the
        parent's copy is damaged.
        """
        asked = expected.next_chunk
        silent = 0.0
        damaged = Counter[int]()
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
            if (
                expected.is_gone
                or silent >= MAX_SILENCE_SECONDS
                or damaged[expected.next_chunk] >= MAX_DAMAGED_CHUNKS
            ):
                return False
        return True

    async def _write_pending_chunks(
        self, expected: IncomingStream, file: File, socket: MessageSocket
    ) -> bool:
        """Write the chunks that have arrived and pass them on.

        Returns False if a chunk was damaged on its way and is requested again.
        """
        batch = list(expected.pending_chunks)
        good = await self._run_in_thread(self._append_verified_chunks, file, batch)
        for _ in good:
            expected.pending_chunks.popleft()
        expected.written_chunks += len(good)
        self._chunk_server.add_chunks(
            expected.name, good, self._relay_sockets[0] if self._relay_sockets else socket
        )
        if len(good) == len(batch):
            return True
        self.damaged_chunks += 1
        expected.pending_chunks.clear()
        return False

    def _append_verified_chunks(
        self, file: File, batch: Sequence[tuple[int, list[Any]]]
    ) -> list[int]:
        """Append chunks up to the first damaged one, and return the checksums of those
        that were written."""
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
