"""The relay of weights between hosts: its messages, and the tree in which hosts pass weights on.

A stream is a file of a version, or its delta, in chunks. A host that wants one joins at the
learner, and is placed under the learner, or under a host that has the stream or is receiving it,
which passes each chunk on as soon as it has it. No host serves more than `FANOUT` others at once,
so the depth of the tree grows with the logarithm of the number of hosts, and the learner sends a
stream `FANOUT` times, however many hosts there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from r3async.untrusted import decode_msgpack
from r3async.world import MAX_FRAME, File, MessageSocket

CHUNK_BYTES = 2**20
"""Bytes of a stream in one message."""
FANOUT = 2
"""Number of hosts to which one host sends a stream at once."""
MAX_PARENT_FAILURES = 2
"""Number of failures in a row after which a host gets no children in later streams either, and
number of parents that may fail a host before the learner serves it."""
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
    """The learner's answer to `Join`: the address that serves the stream, `ROOT_ADDRESS` for
    the learner itself.

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
    """The header of a chunk, whose bytes are in the frames that follow;
    `checksum` is their XXH3."""

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
    """The tree of hosts that pass on one stream. The name of a node is its host's; that of the root
    is `ROOT_ADDRESS`.

    `root_address` is the address of the host of the learner that has the stream, if it is not
    that of the tree.
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

    def place_node(
        self, name: str, address: str, avoid: Collection[str] = (), excluded: Collection[str] = ()
    ) -> str:
        """Place `name` near the top of the tree, where a place is free, and return the
        address of its parent.

        A node that asks again has left its place. What one node avoids gets no further children. If
        all other nodes serve enough or are avoided, or if `MAX_PARENT_FAILURES` parents failed this
        one, the learner serves one more.
        """
        self._failed_addresses.update(avoid)
        known = self._nodes.get(name)
        if known is not None:
            self._leave_parent(known)
            # A new process, which its predecessor's children have to look for.
            if known.address != address:
                for child in [node for node in self._nodes.values() if node.parent == name]:
                    self._leave_parent(child)
        below = self._find_descendants(name)
        free = [
            (node.depth, node.children, other)
            for other, node in self._nodes.items()
            if other not in below
            and node.children < FANOUT
            and (
                other == ROOT_ADDRESS
                or node.address not in {"", *excluded, *self._failed_addresses}
            )
        ]
        parent = min(free)[2] if free and len(avoid) < MAX_PARENT_FAILURES else ROOT_ADDRESS
        at = self._nodes[parent]
        at.children += 1
        kept = known.children if known is not None else 0
        self._nodes[name] = RelayNode(address, parent, at.depth + 1, kept)
        return at.address

    def finish_node(self, name: str) -> None:
        """Record that `name` has the whole stream, so that its parent may serve another
        node. Idempotent."""
        node = self._nodes.get(name)
        if node is not None:
            self._leave_parent(node)

    def _leave_parent(self, node: RelayNode) -> None:
        if not node.is_done:
            self._nodes[node.parent].children -= 1
            node.is_done = True

    def _find_descendants(self, name: str) -> set[str]:
        """Return `name` and all nodes that get the stream through it."""
        found = {name}
        for other in self._nodes:
            way = [other]
            at = other
            while at != ROOT_ADDRESS and at not in found:
                at = self._nodes[at].parent
                way.append(at)
            if at in found and at != ROOT_ADDRESS:
                found.update(way)
        return found


class RelayTrees:
    """The trees of the learner, one per stream. Hosts that failed others are avoided, for
    later streams too."""

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
        """Return True if the root of the stream has failed the sender, which asks
        for another place."""
        return bool(message.avoid) and message.avoid[-1] == self._roots.get(message.stream)

    def handle_join(self, name: str, message: Join) -> Place:
        """Return the place at which `name` gets the stream. A host asks again when a
        parent failed it."""
        for address in message.avoid[-1:]:
            self._failed[address] += 1
        excluded = {
            address for address, times in self._failed.items() if times >= MAX_PARENT_FAILURES
        }
        tree = self._trees.setdefault(
            message.stream, RelayTree(self._roots.get(message.stream, ROOT_ADDRESS))
        )
        address = tree.place_node(name, message.address, set(message.avoid), excluded)
        return Place(
            message.stream, address, address != ROOT_ADDRESS and address == tree.root_address
        )

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

    `checksums` has an entry for each chunk in the file; None if it is not computed yet. The stream
    begins at byte `start` of the file.
    """

    file: File
    nbytes: int
    checksums: list[int | None]
    start: int = 0


class ChunkServer:
    """A server of the streams on this host, which answers `Get`.

    Requested chunks that are not here yet are sent when they arrive. It runs on the event loop of
    `socket`, which is a router.
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
        """Add a stream of which nothing is here yet, and which will be in the file from
        byte `start` on.

        Its file stays open until `remove_stream`, even if its name is removed.
        """
        self._streams[name] = RelayStream(file, nbytes, [], start)

    def add_chunks(self, name: str, checksums: Sequence[int], socket: MessageSocket) -> None:
        """Record that the next chunks were written, and send them to the peers
        that wait for them."""
        stream = self._streams[name]
        stream.checksums += checksums
        waiting = self._pending_requests.get(name, {})
        for peer, index in [key for key in waiting if key[1] < len(stream.checksums)]:
            del waiting[peer, index]
            self._send_chunk(socket, peer, name, stream, index)

    def remove_stream(self, name: str) -> None:
        """Remove a stream and close its file. Idempotent."""
        self._pending_requests.pop(name, None)
        stream = self._streams.pop(name, None)
        if stream is not None:
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

    def _send_chunk(
        self, socket: MessageSocket, peer: bytes, name: str, stream: RelayStream, index: int
    ) -> None:
        start = index * CHUNK_BYTES
        data = stream.file.map_bytes(stream.start + start, min(CHUNK_BYTES, stream.nbytes - start))
        checksum = stream.checksums[index]
        if checksum is None:
            checksum = stream.checksums[index] = xxhash.xxh3_64_intdigest(data)
        frames: list[Any] = [data[at : at + MAX_FRAME] for at in range(0, len(data), MAX_FRAME)]
        # If the socket does not take a message, the peer asks for the chunk again.
        if not socket.send([peer, encode_relay_message(Chunk(name, index, checksum)), *frames]):
            self.sent_bytes += len(data)
