"""Weights between hosts: what is said, and who gets them from whom.

A stream is a file of a version, or its delta, in chunks. Whoever wants one joins at the learner, and is placed under the learner,
or under a host that has the stream or is receiving it, which passes each chunk on as soon as it has it. No host serves more than
`FANOUT` others at once, so the depth of the tree grows with the logarithm of the number of hosts, and the learner sends a stream
`FANOUT` times, however many there are.
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
"""Of a stream, in one message."""
FANOUT = 2
"""Hosts that one host sends a stream to at once."""
MAX_PARENT_FAILURES = 2
"""So often in a row a host may fail others; then nobody is placed under it any more."""
ROOT_ADDRESS = ""
"""The learner's place in a tree."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """To the learner: give me a place for this stream, under none of the addresses `avoid`, which failed me. `address`: where I
    pass it on; empty if I do not."""

    stream: str
    address: str
    avoid: tuple[str, ...] = ()


class Place(msgspec.Struct, frozen=True, tag=True):
    """Ask at this address; `ROOT_ADDRESS`: here."""

    stream: str
    parent: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """To the learner: I have all of it, from `parent`."""

    stream: str
    parent: str


class Get(msgspec.Struct, frozen=True, tag=True):
    """Send me the chunks `first` to `stop`, as you have them."""

    stream: str
    first: int
    stop: int


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """The frames that follow are this chunk; `checksum` is XXH3 of its bytes."""

    stream: str
    index: int
    checksum: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Nothing of this stream is here."""

    stream: str


RelayMessage = Join | Place | Done | Get | Chunk | Gone


def encode_relay_message(message: RelayMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_relay_message(data: bytes) -> RelayMessage:
    """Raises `MalformedError`."""
    return decode_msgpack(data, RelayMessage)


def count_chunks(nbytes: int) -> int:
    """How many chunks a stream of so many bytes has."""
    return -(-nbytes // CHUNK_BYTES)


@dataclass
class RelayNode:
    """A host in a tree. `children`: how many it is sending to."""

    address: str
    parent: str
    depth: int
    children: int = 0
    is_done: bool = False


class RelayTree:
    """Who gets one stream from whom. A node is named by whoever asks; the learner is `ROOT_ADDRESS`."""

    def __init__(self) -> None:
        self._nodes = {ROOT_ADDRESS: RelayNode(ROOT_ADDRESS, ROOT_ADDRESS, 0)}

    def place_node(self, name: str, address: str, avoid: Collection[str] = ()) -> str:
        """The address under which `name` is placed, near the top where a place is free. One that asks again has left its place.
        If all that are left serve enough, or are to be avoided, the learner serves one more."""
        known = self._nodes.get(name)
        if known is not None:
            self._leave_parent(known)
        below = self._find_descendants(name)
        free = [
            (node.depth, node.children, other)
            for other, node in self._nodes.items()
            if other not in below
            and node.children < FANOUT
            and (other == ROOT_ADDRESS or node.address not in ("", *avoid))
        ]
        parent = min(free)[2] if free else ROOT_ADDRESS
        at = self._nodes[parent]
        at.children += 1
        kept = known.children if known is not None and known.address == address else 0
        self._nodes[name] = RelayNode(address, parent, at.depth + 1, kept)
        return at.address

    def finish_node(self, name: str) -> None:
        """It has everything, and its parent may serve another one. Idempotent."""
        if (node := self._nodes.get(name)) is not None:
            self._leave_parent(node)

    def _leave_parent(self, node: RelayNode) -> None:
        if not node.is_done:
            self._nodes[node.parent].children -= 1
            node.is_done = True

    def _find_descendants(self, name: str) -> set[str]:
        """It, and those that get the stream through it."""
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
    """The learner's: one tree a stream. Hosts that failed others are avoided, for later streams too."""

    def __init__(self) -> None:
        self._trees: dict[str, RelayTree] = {}
        self._failed: Counter[str] = Counter()

    def handle_join(self, name: str, message: Join) -> Place:
        """Where `name` gets the stream from. It asks again when a parent failed it."""
        for address in message.avoid[-1:]:
            self._failed[address] += 1
        avoid = {*message.avoid, *(a for a, times in self._failed.items() if times >= MAX_PARENT_FAILURES)}
        tree = self._trees.setdefault(message.stream, RelayTree())
        return Place(message.stream, tree.place_node(name, message.address, avoid))

    def handle_received(self, name: str, message: Done) -> None:
        self._failed.pop(message.parent, None)
        if message.stream in self._trees:
            self._trees[message.stream].finish_node(name)

    def forget_stream(self, stream: str) -> None:
        self._trees.pop(stream, None)


@dataclass
class RelayStream:
    """A file that grows, or is complete. `checksums`: of the chunks that are there; None where they were not computed yet."""

    file: File
    nbytes: int
    checksums: list[int | None]


class ChunkServer:
    """Answers `Get` from the streams that are here. What is asked for and not here yet is sent when it comes. On the event loop
    of `socket`, which is a router's."""

    def __init__(self) -> None:
        self._streams: dict[str, RelayStream] = {}
        self._pending_requests: dict[str, dict[tuple[bytes, int], None]] = {}
        self.sent_bytes = 0

    def add_complete_stream(self, name: str, file: File) -> None:
        """All of `file`."""
        nbytes = file.size()
        self._streams[name] = RelayStream(file, nbytes, [None] * count_chunks(nbytes))

    def add_growing_stream(self, name: str, file: File, nbytes: int) -> None:
        """A file of which nothing is here yet. It stays open, even if its name goes, until `remove_stream`."""
        self._streams[name] = RelayStream(file, nbytes, [])

    def add_chunks(self, name: str, checksums: Sequence[int], socket: MessageSocket) -> None:
        """The next chunks were written."""
        stream = self._streams[name]
        stream.checksums += checksums
        waiting = self._pending_requests.get(name, {})
        for peer, index in [key for key in waiting if key[1] < len(stream.checksums)]:
            del waiting[peer, index]
            self._send_chunk(socket, peer, name, stream, index)

    def remove_stream(self, name: str) -> None:
        """Idempotent."""
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
        data = stream.file.map_bytes(start, min(CHUNK_BYTES, stream.nbytes - start))
        checksum = stream.checksums[index]
        if checksum is None:
            checksum = stream.checksums[index] = xxhash.xxh3_64_intdigest(data)
        frames: list[Any] = [data[at : at + MAX_FRAME] for at in range(0, len(data), MAX_FRAME)]
        # What is not taken, the peer asks for again.
        if not socket.send([peer, encode_relay_message(Chunk(name, index, checksum)), *frames]):
            self.sent_bytes += len(data)
