"""Fetches published weights to an engine's host, from a file or over TCP, keeps one copy per host, and verifies it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import xxhash

from r3async.data.container import SAFETENSORS_DTYPES, decode_safetensors_header
from r3async.untrusted import MalformedError, decode_msgpack, decode_utf8
from r3async.weights.delta import VersionDigest, apply_delta, digest_version
from r3async.weights.manifest import TensorEntry, WeightError, WeightManifest
from r3async.weights.publish import LOCK_FILE, PublishedPart, check_free_space, claim_directory, delta_name
from r3async.world import MAX_FRAME, File, Files, MessageSocket, World
from r3async.world.real import REAL_WORLD
from r3async.world.sockets import ClientKeys, ServerKeys, decode_key, derive_public_key

if TYPE_CHECKING:
    import torch


# Reading the file of a published version on an engine's host: it is mapped, compared with its manifest, and verified.


class VersionFile:
    """The memory-mapped file of a published version, whose names, shapes and dtypes are those of the manifest.

    Checksums are not compared before `verify_checksums`. `content` are the file's bytes, uint8 `[n]`, if it is mapped
    already. Raises `WeightError` that names the file or the tensor.
    """

    def __init__(
        self, manifest: WeightManifest, content: torch.Tensor | None = None, *, files: Files = REAL_WORLD.files
    ):
        import torch

        self._label = f"weights version {manifest.version} ({manifest.path})"
        try:
            content = map_file_privately(manifest.path, files=files) if content is None else content
            found, begin = decode_safetensors_header(content.numpy())
        except (OSError, RuntimeError, ValueError) as error:
            raise WeightError(f"{self._label} cannot be read: {error}") from error
        self.header = content[:begin].numpy().tobytes()
        self.data = content[begin:]
        """Bytes of the tensors, uint8 `[nbytes]`."""
        if missing := sorted(set(manifest.tensors) - set(found)):
            raise WeightError(f"{self._label}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
        if unknown := sorted(set(found) - set(manifest.tensors)):
            raise WeightError(f"{self._label}: tensor {unknown[0]!r} is not in the manifest ({len(unknown)} in all)")
        widths = {dtype: getattr(torch, dtype).itemsize for dtype in SAFETENSORS_DTYPES}
        names = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}
        self._tensor_spans: list[tuple[str, TensorEntry, int, int]] = []
        for name, entry in manifest.tensors.items():
            this = found[name]
            start, stop = this.data_offsets
            if this.dtype != SAFETENSORS_DTYPES.get(entry.dtype) or this.shape != entry.shape:
                raise WeightError(
                    f"{self._label}: tensor {name!r} is {names.get(this.dtype, this.dtype)} {list(this.shape)}, "
                    f"the manifest says {entry.dtype} {list(entry.shape)}"
                )
            nbytes = math.prod(entry.shape) * widths[entry.dtype]
            if not 0 <= start <= stop <= len(self.data) or stop - start != nbytes:
                raise WeightError(
                    f"{self._label} cannot be read: tensor {name!r} is at bytes {start} to {stop} of {len(self.data)}"
                )
            self._tensor_spans.append((name, entry, start, stop))

    def iter_tensors(self, *, verify_checksums: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in the manifest's order, not copied. `verify_checksums` compares each just before."""
        view = memoryview(self.data.numpy())
        for name, entry, start, stop in self._tensor_spans:
            if verify_checksums:
                self._verify_checksum(view, name, entry, start, stop)
            yield name, view_as_tensor(self.data, start, stop, entry)

    def verify_checksums(self) -> None:
        """Compare all checksums. Blocking: about a second for 3 to 5 GB."""
        view = memoryview(self.data.numpy())
        for name, entry, start, stop in self._tensor_spans:
            self._verify_checksum(view, name, entry, start, stop)

    def _verify_checksum(self, view: memoryview, name: str, entry: TensorEntry, start: int, stop: int) -> None:
        if xxhash.xxh3_64_intdigest(view[start:stop]) != entry.checksum:
            raise WeightError(f"{self._label}: tensor {name!r} is corrupt: its checksum differs from the published one")


def map_file_privately(path: str, *, files: Files = REAL_WORLD.files) -> torch.Tensor:
    """Return the memory-mapped bytes of a file, uint8 `[n]`. Writes to the tensor do not reach the file.

    Raises `OSError` and `RuntimeError`.
    """
    import torch

    found = files.stat(Path(path))
    if found is None:
        raise FileNotFoundError(path)
    return torch.from_file(path, shared=False, size=found.size, dtype=torch.uint8)


def view_as_tensor(data: torch.Tensor, start: int, stop: int, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor in `data[start:stop]`, copied only if its offset is not aligned for its dtype."""
    import torch

    dtype, piece = getattr(torch, entry.dtype), data[start:stop]
    if piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(entry.shape)


def iter_verified_tensors(
    manifest: WeightManifest, *, verify_checksums: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a published version in the manifest's order, mapped from the file rather than copied.

    Names, shapes and dtypes are checked before the first tensor is yielded, and the checksum of each tensor just before
    it. `verify_checksums=False` omits the checksums, for a reader whose caller has just verified the same file. Raises
    `WeightError` that names the file or the tensor.
    """
    yield from VersionFile(manifest).iter_tensors(verify_checksums=verify_checksums)


def verify_version_file(manifest: WeightManifest) -> None:
    """Check a whole published file; see `VersionFile.verify_checksums`. Raises `WeightError`."""
    VersionFile(manifest).verify_checksums()


# The cache of versions on a host: one file each, which one engine of the host fetches and all engines map.


LOCK_SECONDS = 5.0
"""Seconds to wait for a lock. Other processes hold these locks only for a moment."""


class HostVersionCache:
    """A folder of versions below `directory` that all processes of this host with the same `name` share.

    Each process holds a shared lock on the folder. If no process does, the next one to come removes it, as with a
    `VersionFolder`. A process that uses a version holds a shared lock on its file, so a killed process releases it.
    Blocking; raises `OSError`, and `WeightError` for a directory of another user.
    """

    def __init__(self, directory: Path, name: str, world: World = REAL_WORLD):
        self._files = world.files
        claim_directory(directory, world.files)
        self.path = directory / f"weights-{name}"
        while True:
            with contextlib.suppress(FileExistsError):
                self._files.create_directory(self.path, 0o700)
            with contextlib.suppress(FileNotFoundError):  # another process removes it, since nobody held it
                lock = self._files.open(self.path / LOCK_FILE, create=True)
                lock.lock(shared=True, timeout=LOCK_SECONDS)
                if self._files.stat(self.path / LOCK_FILE) is not None:
                    break
                lock.close()
        self._lock: File = lock
        self._locked_files: list[File] = []

    def version_path(self, version: VersionDigest) -> Path:
        """Return the path of a version's file, whether or not it exists."""
        return self.path / f"version-{version.version}-{version.digest:08x}.safetensors"

    def acquire_version(self, version: VersionDigest) -> Path | None:
        """Return the file of a version if it is here and complete, else None.

        The file stays until another version is acquired. The version acquired before may be removed.
        """
        path = self.version_path(version)
        try:
            file = self._files.open(path)
        except FileNotFoundError:
            return None
        try:
            file.lock(shared=True, timeout=LOCK_SECONDS)
            if self._files.stat(path) is None:  # removed in between
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            file.close()
            return None
        used, self._locked_files = self._locked_files, [file]
        for before in used:
            before.close()
        return path

    def discard_version(self, version: VersionDigest) -> None:
        """Remove the file of a version that differs from what was published. Processes that use it keep it."""
        self._files.remove(self.version_path(version))

    @contextlib.contextmanager
    def claim_fetch(self) -> Iterator[bool]:
        """Yield True in at most one process of the host at a time, else False.

        If True, files that a killed process has left behind are removed.
        """
        with self._files.open(self.path / "fetching", create=True) as lock:
            try:
                lock.lock()
            except BlockingIOError:
                yield False
                return
            for name in self._files.list_names(self.path):
                if name.startswith("."):
                    self._files.remove(self.path / name)
            yield True

    def remove_unused_versions(self, keep: VersionDigest | None) -> None:
        """Remove versions that nobody uses, except `keep`. For the process that is fetching."""
        for name in self._files.list_names(self.path):
            path = self.path / name
            if not name.startswith("version-") or (keep is not None and path == self.version_path(keep)):
                continue
            with contextlib.suppress(BlockingIOError, FileNotFoundError), self._files.open(path) as file:
                file.lock()
                self._files.remove(path)

    def close(self) -> None:
        """Release the folder; the last process removes it."""
        used, self._locked_files = self._locked_files, []
        for file in used:
            file.close()
        with contextlib.suppress(OSError):
            self._lock.unlock()
            self._lock.lock()
            self._files.remove_tree(self.path)
        self._lock.close()


# The relay of weights between hosts: its messages, and the tree in which hosts pass weights on.
#
# A stream is a file of a version, or its delta, in chunks. A host that wants one joins at the learner, and is placed
# under the learner, or under a host that has the stream or is receiving it, which passes each chunk on as soon as it
# has it. No host serves more than `FANOUT` others at once, so the depth of the tree grows with the logarithm of the
# number of hosts, and the learner sends a stream `FANOUT` times, however many hosts there are.


CHUNK_BYTES = 2**20
"""Bytes of a stream in one message."""
FANOUT = 2
"""Number of hosts to which one host sends a stream at once."""
MAX_PARENT_FAILURES = 2
"""Number of failures in a row after which a host gets no children in later streams either, and number of parents that
may fail a host before the learner serves it."""
ROOT_ADDRESS = ""
"""Address of the learner in a tree."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """A request to the learner for a place in the tree of a stream.

    Attributes:
        stream: Name of the stream.
        address: Address at which the sender passes the stream on; empty if it does not.
        avoid: Addresses that failed the sender, under which it is not to be placed.
    """

    stream: str
    address: str
    avoid: tuple[str, ...] = ()


class Place(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The learner's answer to `Join`: the address that serves the stream, `ROOT_ADDRESS` for the learner itself.

    `is_learner`: another host of the learner serves it, which has the learner's keys.
    """

    stream: str
    parent: str
    is_learner: bool = False


class Done(msgspec.Struct, frozen=True, tag=True):
    """A report to the learner that the sender has received the whole stream from `parent`."""

    stream: str
    parent: str


class Get(msgspec.Struct, frozen=True, tag=True):
    """A request for the chunks `first` to `stop`, each as soon as the receiver has it."""

    stream: str
    first: int
    stop: int


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """The header of a chunk, whose bytes are in the frames that follow; `checksum` is their XXH3."""

    stream: str
    index: int
    checksum: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """The answer of a host that has nothing of the stream."""

    stream: str


RelayMessage = Join | Place | Done | Get | Chunk | Gone


def encode_relay_message(message: RelayMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_relay_message(data: bytes) -> RelayMessage:
    """Decode a message. Raises `MalformedError`."""
    return decode_msgpack(data, RelayMessage)


def count_chunks(nbytes: int) -> int:
    """Return the number of chunks of a stream of so many bytes."""
    return -(-nbytes // CHUNK_BYTES)


@dataclass
class RelayNode:
    """A host in a tree. `children` is the number of hosts to which it is sending."""

    address: str
    parent: str
    depth: int
    children: int = 0
    is_done: bool = False


class RelayTree:
    """The tree of hosts that pass on one stream. The name of a node is its host's; that of the root is `ROOT_ADDRESS`.

    `root_address` is the address of the host of the learner that has the stream, if it is not that of the tree.
    """

    def __init__(self, root_address: str = ROOT_ADDRESS) -> None:
        self._nodes = {ROOT_ADDRESS: RelayNode(root_address, ROOT_ADDRESS, 0)}
        self._failed_addresses: set[str] = set()
        """Addresses that failed a host, which would fail the next ones too."""

    @property
    def root_address(self) -> str:
        return self._nodes[ROOT_ADDRESS].address

    def move_root(self, address: str) -> None:
        """Set the address of the root, which a new process serves."""
        self._nodes[ROOT_ADDRESS].address = address

    def place_node(self, name: str, address: str, avoid: Collection[str] = (), excluded: Collection[str] = ()) -> str:
        """Place `name` near the top of the tree, where a place is free, and return the address of its parent.

        A node that asks again has left its place. What one node avoids gets no further children. If all other nodes
        serve enough or are avoided, or if `MAX_PARENT_FAILURES` parents failed this one, the learner serves one more.
        """
        self._failed_addresses.update(avoid)
        known = self._nodes.get(name)
        if known is not None:
            self._leave_parent(known)
            if known.address != address:  # a new process, which its predecessor's children have to look for
                for child in [node for node in self._nodes.values() if node.parent == name]:
                    self._leave_parent(child)
        below = self._find_descendants(name)
        free = [
            (node.depth, node.children, other)
            for other, node in self._nodes.items()
            if other not in below
            and node.children < FANOUT
            and (other == ROOT_ADDRESS or node.address not in {"", *excluded, *self._failed_addresses})
        ]
        parent = min(free)[2] if free and len(avoid) < MAX_PARENT_FAILURES else ROOT_ADDRESS
        at = self._nodes[parent]
        at.children += 1
        kept = known.children if known is not None else 0
        self._nodes[name] = RelayNode(address, parent, at.depth + 1, kept)
        return at.address

    def finish_node(self, name: str) -> None:
        """Record that `name` has the whole stream, so that its parent may serve another node. Idempotent."""
        if (node := self._nodes.get(name)) is not None:
            self._leave_parent(node)

    def _leave_parent(self, node: RelayNode) -> None:
        if not node.is_done:
            self._nodes[node.parent].children -= 1
            node.is_done = True

    def _find_descendants(self, name: str) -> set[str]:
        """Return `name` and all nodes that get the stream through it."""
        found = {name}
        for other in self._nodes:
            way, at = [other], other
            while at != ROOT_ADDRESS and at not in found:
                at = self._nodes[at].parent
                way.append(at)
            if at in found and at != ROOT_ADDRESS:
                found.update(way)
        return found


class RelayTrees:
    """The trees of the learner, one per stream. Hosts that failed others are avoided, for later streams too."""

    def __init__(self) -> None:
        self._trees: dict[str, RelayTree] = {}
        self._roots: dict[str, str] = {}
        """Address of the root of each stream that another of the learner's hosts has."""
        self._failed: Counter[str] = Counter()

    def set_root(self, stream: str, address: str) -> None:
        """Set the address of the learner's host that has a stream."""
        self._roots[stream] = address
        if stream in self._trees:
            self._trees[stream].move_root(address)

    def has_failed_root(self, message: Join) -> bool:
        """Return True if the root of the stream has failed the sender, which asks for another place."""
        return bool(message.avoid) and message.avoid[-1] == self._roots.get(message.stream)

    def handle_join(self, name: str, message: Join) -> Place:
        """Return the place at which `name` gets the stream. A host asks again when a parent failed it."""
        for address in message.avoid[-1:]:
            self._failed[address] += 1
        excluded = {address for address, times in self._failed.items() if times >= MAX_PARENT_FAILURES}
        tree = self._trees.setdefault(message.stream, RelayTree(self._roots.get(message.stream, ROOT_ADDRESS)))
        address = tree.place_node(name, message.address, set(message.avoid), excluded)
        return Place(message.stream, address, address != ROOT_ADDRESS and address == tree.root_address)

    def handle_received(self, name: str, message: Done) -> None:
        self._failed.pop(message.parent, None)
        if message.stream in self._trees:
            self._trees[message.stream].finish_node(name)

    def forget_stream(self, stream: str) -> None:
        self._trees.pop(stream, None)
        self._roots.pop(stream, None)


@dataclass
class RelayStream:
    """A stream in a file that grows, or is complete.

    `checksums` has an entry for each chunk in the file; None if it is not computed yet. The stream begins at byte
    `start` of the file.
    """

    file: File
    nbytes: int
    checksums: list[int | None]
    start: int = 0


class ChunkServer:
    """A server of the streams on this host, which answers `Get`.

    Requested chunks that are not here yet are sent when they arrive. It runs on the event loop of `socket`, which is a
    router.
    """

    def __init__(self) -> None:
        self._streams: dict[str, RelayStream] = {}
        self._pending_requests: dict[str, dict[tuple[bytes, int], None]] = {}
        self.sent_bytes = 0

    def add_complete_stream(self, name: str, file: File) -> None:
        """Add a stream that is complete in `file`."""
        nbytes = file.size()
        self._streams[name] = RelayStream(file, nbytes, [None] * count_chunks(nbytes))

    def add_growing_stream(self, name: str, file: File, nbytes: int, start: int) -> None:
        """Add a stream of which nothing is here yet, and which will be in the file from byte `start` on.

        Its file stays open until `remove_stream`, even if its name is removed.
        """
        self._streams[name] = RelayStream(file, nbytes, [], start)

    def add_chunks(self, name: str, checksums: Sequence[int], socket: MessageSocket) -> None:
        """Record that the next chunks were written, and send them to the peers that wait for them."""
        stream = self._streams[name]
        stream.checksums += checksums
        waiting = self._pending_requests.get(name, {})
        for peer, index in [key for key in waiting if key[1] < len(stream.checksums)]:
            del waiting[peer, index]
            self._send_chunk(socket, peer, name, stream, index)

    def remove_stream(self, name: str) -> None:
        """Remove a stream and close its file. Idempotent."""
        self._pending_requests.pop(name, None)
        if (stream := self._streams.pop(name, None)) is not None:
            stream.file.close()

    @property
    def stream_names(self) -> list[str]:
        return list(self._streams)

    def answer_request(self, socket: MessageSocket, peer: bytes, request: Get) -> None:
        stream = self._streams.get(request.stream)
        if stream is None:
            socket.send([peer, encode_relay_message(Gone(request.stream))])
            return
        for index in range(max(0, request.first), min(request.stop, count_chunks(stream.nbytes))):
            if index < len(stream.checksums):
                self._send_chunk(socket, peer, request.stream, stream, index)
            else:
                self._pending_requests.setdefault(request.stream, {})[peer, index] = None

    def _send_chunk(self, socket: MessageSocket, peer: bytes, name: str, stream: RelayStream, index: int) -> None:
        start = index * CHUNK_BYTES
        data = stream.file.map_bytes(stream.start + start, min(CHUNK_BYTES, stream.nbytes - start))
        checksum = stream.checksums[index]
        if checksum is None:
            checksum = stream.checksums[index] = xxhash.xxh3_64_intdigest(data)
        frames: list[Any] = [data[at : at + MAX_FRAME] for at in range(0, len(data), MAX_FRAME)]
        # If the socket does not take a message, the peer asks for the chunk again.
        if not socket.send([peer, encode_relay_message(Chunk(name, index, checksum)), *frames]):
            self.sent_bytes += len(data)


# Weights over TCP: from the file of the learner's host to one file on each other host, through a tree of hosts.
#
# The learner's host has a version as one file, and beside it the delta from the version before, if that is shorter. On
# each other host one generator fetches it for all: the delta if the host has the exact version that it changes, else
# the whole file. Chunks have checksums, records of a delta have those of the resulting blocks, and the engine compares
# each tensor with the manifest, which arrived separately, before it pauses.


WINDOW_CHUNKS = 16
"""Maximum number of chunks that are requested and not written yet."""
RETRY_SECONDS = 1.0
"""Seconds without a chunk after which the request is repeated: it may have been lost with a connection."""
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

    `public_endpoint(endpoint)` returns the address at which others reach a bound endpoint.
    """

    def __init__(
        self,
        host: str,
        keys: ServerKeys,
        world: World = REAL_WORLD,
        public_endpoint: Callable[[str], str] = lambda bound: bound,
    ):
        self._address, self._keys, self._files = f"tcp://{host}:*", keys, world.files
        self._public_endpoint = public_endpoint
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
        """Bind the server's socket, unless this was done before, and return the address at which others reach it."""
        if not self._open_sockets:
            router = self._sockets.bind_router(
                self._address, self._handle_message, keys=self._keys, refused_peers=self.refused_peers
            )
            self._open_sockets.append(router)
        return self._public_endpoint(self._open_sockets[0].endpoint)

    def serve_files(self, paths: Mapping[str, str]) -> None:
        """Serve files by the names of their streams, and those no longer that were removed from the host."""
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
    """The learner's end of the TCP transport. It serves the files on its host, and knows who serves those of the others.

    Its other hosts serve their parts with a `PartServer` each.
    """

    def __init__(
        self,
        host: str,
        keys: ServerKeys,
        world: World = REAL_WORLD,
        public_endpoint: Callable[[str], str] = lambda bound: bound,
    ):
        super().__init__(host, keys, world, public_endpoint)
        self._host = world.processes.host
        self._trees = RelayTrees()
        self._parts: dict[str, list[PublishedPart]] = {}
        """The parts of each version, by the name of the first one, which is on this host."""
        self._remote_streams: dict[str, PublishedPart] = {}
        """The other parts by the names of their streams."""
        self.silent_parts: asyncio.Queue[PublishedPart] = asyncio.Queue()
        """Parts of which an engine's host, which had asked for them, got nothing."""

    def offer_version(self, manifest: WeightManifest, *parts: PublishedPart) -> TcpSource:
        """Serve a version, and the deltas of its parts. Versions removed from the host are no longer served."""
        endpoint, first = self.bind_socket(), parts[0]
        self.serve_files(first.file_paths)
        self._parts[first.name] = list(parts)
        for part in parts[1:]:
            self._set_root(part)
        described = tuple(TcpPart(part.name, part.nbytes, part.base, part.delta_bytes) for part in parts)
        return TcpSource(endpoint, described, self._host)

    def list_parts(self, manifest: WeightManifest) -> list[PublishedPart]:
        """Return the parts of a version that was offered, in order; none if it is not served any more."""
        return next((parts for parts in self._parts.values() if parts[0].path == manifest.path), [])

    def list_remote_parts(self, endpoint: str) -> list[PublishedPart]:
        """Return the parts of all versions that the host with that address serves."""
        return [part for parts in self._parts.values() for part in parts if part.endpoint == endpoint]

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
        host: Interface (in ZeroMQ's notation) at which this host passes weights on to other hosts; empty if it does
            not.
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
        self._is_closed = False
        self._fetch: asyncio.Future[Path] | None = None
        self._relayed_streams = MAX_RELAYED_STREAMS
        self.refused_peers: Counter[str] = Counter()
        self.received_bytes = self.damaged_chunks = self.parent_changes = 0
        """Bytes received, chunks that arrived damaged, and number of times that this host asked for another place."""

    async def fetch_version(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        """Implement `WeightReceiver.fetch_version`.

        One process of the host fetches, and the others wait for its file. `close` ends both.
        """
        source, wanted = parts[0], digest_version(manifest)
        is_here = source.host == self._host_name and self._files.stat(Path(manifest.path)) is not None
        if is_here and len(source.parts) == 1:
            return manifest  # the learner's host, which has the whole version
        self._fetch = asyncio.ensure_future(self._fetch_within(source, wanted, manifest, timeout))
        if self._is_closed:
            self._fetch.cancel()
        try:
            path = await self._fetch
        except asyncio.CancelledError:
            if self._is_closed:
                raise WeightError(f"{decode_utf8(self._peer_id)} stops, and fetches no version any more") from None
            raise
        return msgspec.structs.replace(manifest, path=str(path))

    async def _fetch_within(
        self, source: TcpSource, wanted: VersionDigest, manifest: WeightManifest, timeout: float
    ) -> Path:
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

    async def _fetch_to_cache(self, source: TcpSource, wanted: VersionDigest, manifest: WeightManifest) -> None:
        bases = {part.base for part in source.parts if part.base is not None and self._has_version(part.base)}
        base = bases.pop() if bases else None  # all parts change the same version
        await self._run_in_thread(self._cache.remove_unused_versions, base)
        beside = source.nbytes if base is not None else 0
        check_free_space(self._cache.path, source.nbytes, manifest.version, self._files, beside)
        self._connect_sockets(source.endpoint)
        path = self._cache.version_path(wanted)
        aside, start = path.with_name(f".{path.name}"), 0
        self._relayed_streams = MAX_RELAYED_STREAMS * len(source.parts)
        for part in source.parts:
            await self._fetch_part(part, base if part.base == base else None, aside, start)
            start += part.nbytes
        self._files.rename(aside, path)

    async def _fetch_part(self, part: TcpPart, base: VersionDigest | None, path: Path, start: int) -> None:
        """Append a part to the file of a version, which begins with the `start` bytes of those before it."""
        if base is not None:
            aside = path.with_name(f"{path.name}.delta")
            delta = await self._receive_stream(delta_name(part.name), part.delta_bytes, aside)
            self._files.remove(aside)  # the open file is still passed on
            if await self._run_in_thread(self._apply_delta, base, delta, path, start, part.nbytes):
                return
        await self._receive_stream(part.name, part.nbytes, path, start)

    def _has_version(self, base: VersionDigest) -> bool:
        return self._files.stat(self._cache.version_path(base)) is not None

    def _apply_delta(self, base: VersionDigest, delta: File, path: Path, start: int, nbytes: int) -> bool:
        """Apply the delta of a part, append the result to the file, and return True if it is the part.

        If not, the delta or its base is corrupt, and the whole part is needed.
        """
        with (
            self._files.open(self._cache.version_path(base)) as before,
            self._files.open(path, create=True, mode=0o600) as file,
        ):
            try:
                for block in apply_delta(base, before, delta, start, nbytes):
                    file.append([block])
            except WeightError:
                file.truncate(start)
                return False
        return True

    # -- one stream ------------------------------------------------------------------------------------------------

    def _connect_sockets(self, endpoint: str) -> None:
        """Connect to the learner, and listen for other hosts, unless this was done before."""
        if self._root_sockets:
            return
        if self._host:
            # The client's keys serve here too: their public key is known to the learner, and to all hosts with the same
            # keys.
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
        expected.place, expected.is_gone = None, False
        while expected.place is None:
            self._root_sockets[0].send([encode_relay_message(Join(expected.name, self._address, tuple(avoid)))])
            await expected.wait_for_activity()
            if expected.is_gone:
                raise WeightError(f"the learner does not keep {expected.name} of the weights any more")
        return expected.place

    async def _receive_from_parent(self, place: Place, expected: IncomingStream, file: File) -> bool:
        """Connect to a parent and receive from it as `_receive_chunks` does."""
        if place.parent == ROOT_ADDRESS:
            return await self._receive_chunks(expected, file, self._root_sockets[0])
        client_public = derive_public_key(self._keys.secret_key)
        keys = self._keys if place.is_learner else ClientKeys(self._keys.secret_key, client_public)
        try:
            socket = self._sockets.connect_dealer(place.parent, self._peer_id, self._handle_message, keys=keys)
        except OSError:  # that is no address
            return False
        try:
            return await self._receive_chunks(expected, file, socket)
        finally:
            socket.close()

    async def _receive_chunks(self, expected: IncomingStream, file: File, socket: MessageSocket) -> bool:
        """Receive chunks from one parent and return True if all are written.

        Gives up when the parent is silent, or when a chunk arrives damaged every time because the parent's copy is
        damaged.
        """
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
        """Write the chunks that have arrived and pass them on.

        Returns False if a chunk was damaged on its way and is requested again.
        """
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
        """Append chunks up to the first damaged one, and return the checksums of those that were written."""
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
