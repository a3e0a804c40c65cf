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

from r3async.untrusted import Malformed, decode_text
from r3async.weights.delta import Identity, apply, identity
from r3async.weights.host import HostFolder
from r3async.weights.manifest import WeightError, WeightManifest
from r3async.weights.publish import check_free, delta_path
from r3async.weights.relay import (
    ROOT,
    Chunk,
    Done,
    Get,
    Gone,
    Join,
    Place,
    Serving,
    Trees,
    chunks_of,
    decode,
    encode,
)
from r3async.world import File, MessageSocket, World
from r3async.world.files import write_aside
from r3async.world.keys import ClientKeys, ServerKeys, public_key, raw_key
from r3async.world.real import REAL

WINDOW = 16
"""Chunks that are asked for and not written yet."""
ASK_AGAIN_SECONDS = 1.0
"""Without a chunk for so long, what was asked for is asked for again: it may have been lost with a connection."""
SILENT_SECONDS = 5.0
"""Without a chunk for so long, a host asks for another place in the tree."""
DAMAGED = 3
"""So often a chunk may come damaged from one host; then another place is asked for."""
KEPT = 3
"""Streams that a host passes on: the newest ones."""
LOOK_SECONDS = 0.05
"""Between two looks at what another process of the host fetches."""


class Source(msgspec.Struct, frozen=True):
    """Where a version is. `nbytes`: of its file, on `host`. A delta of `delta_bytes` changes version `base`; None: there is
    none."""

    endpoint: str
    name: str
    nbytes: int
    base: Identity | None = None
    delta_bytes: int = 0
    host: str = ""


class TcpServer:
    """The learner's end: serves files that were written on its host. On one event loop. `announced(endpoint)`: where others reach
    what is bound there."""

    def __init__(
        self, host: str, keys: ServerKeys, world: World = REAL, announced: Callable[[str], str] = lambda bound: bound
    ):
        self._address, self._keys, self._files = f"tcp://{host}:*", keys, world.files
        self._announced, self._here = announced, world.processes.host
        self._sockets = world.sockets()
        self._sockets_open: list[MessageSocket] = []
        self._serving, self._trees = Serving(), Trees()
        self._paths: dict[str, Path] = {}
        self.refused: Counter[str] = Counter()
        """Peers without a known key, by reason."""

    @property
    def sent_bytes(self) -> int:
        """Of all chunks so far."""
        return self._serving.sent_bytes

    def offer(self, manifest: WeightManifest, base: Identity | None) -> Source:
        """Serve a version, and its delta from `base`, which is beside it. What was removed from the host is served no longer."""
        socket = self._socket()
        for name, path in list(self._paths.items()):
            if self._files.stat(path) is None:
                del self._paths[name]
                self._serving.forget(name)
                self._trees.forget(name)
        path, name = Path(manifest.path), f"{manifest.lineage}-{manifest.version}"
        nbytes = self._add(name, path)
        delta_bytes = self._add(f"{name}-delta", delta_path(path)) if base is not None else 0
        return Source(self._announced(socket.endpoint), name, nbytes, base, delta_bytes, self._here)

    def _add(self, name: str, path: Path) -> int:
        self._serving.forget(name)  # of a try before this one
        file = self._files.open(path)
        self._serving.offer(name, file)
        self._paths[name] = path
        return file.size()

    def _socket(self) -> MessageSocket:
        if not self._sockets_open:
            router = self._sockets.router(self._address, self._arrived, keys=self._keys, refused=self.refused)
            self._sockets_open.append(router)
        return self._sockets_open[0]

    def _arrived(self, frames: list[Any]) -> None:
        socket, peer = self._sockets_open[0], frames[0].bytes
        with contextlib.suppress(Malformed, IndexError):  # not one of ours, or damaged
            message = decode(frames[1].bytes)
            if isinstance(message, Join):
                known = message.stream in self._paths
                answer = self._trees.join(decode_text(peer), message) if known else Gone(message.stream)
                socket.send([peer, encode(answer)])
            elif isinstance(message, Done):
                self._trees.done(decode_text(peer), message)
            elif isinstance(message, Get):
                self._serving.answer(socket, peer, message)

    async def close(self) -> None:
        """Idempotent."""
        await self._sockets.close()
        for name in self._serving.names:
            self._serving.forget(name)


@dataclass
class Expected:
    """A stream under way to this host. `written`: chunks that are in its file. `parent`: the address where it is asked for, once
    it is known."""

    name: str
    count: int
    written: int = 0
    parent: str | None = None
    gone: bool = False

    def __post_init__(self) -> None:
        self.arrived: deque[tuple[int, list[Any]]] = deque()
        """Chunks that follow on those: checksum, and frames."""
        self.something = asyncio.Event()

    @property
    def next(self) -> int:
        """The first chunk that is not here."""
        return self.written + len(self.arrived)

    @property
    def whole(self) -> bool:
        return self.written == self.count

    async def wait(self) -> bool:
        """Whether something arrived in time."""
        self.something.clear()
        try:
            await asyncio.wait_for(self.something.wait(), ASK_AGAIN_SECONDS)
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
        identity: str,
        keys: ClientKeys,
        *,
        host: str = "",
        name: str = "",
        world: World = REAL,
    ):
        self._world, self._clock, self._files = world, world.clock.monotonic, world.files
        self._here = world.processes.host
        self._folder = HostFolder(directory, f"{folder}-{quote(self._here, safe='')}", world)
        self._identity = f"{identity}-{world.unique()[:8]}".encode()
        self._keys, self._host, self._name = keys, host, name
        self._sockets = world.sockets()
        self._root: list[MessageSocket] = []
        self._relay: list[MessageSocket] = []
        self._serving = Serving()
        self._address = ""
        self._expected = Expected("", 0)
        self.refused: Counter[str] = Counter()
        self.received_bytes = self.damaged = self.moved = 0
        """Bytes and chunks of streams, and how often this host asked for another place."""

    async def fetch(self, manifest: WeightManifest, parts: Sequence[Any], timeout: float) -> WeightManifest:
        """See `WeightReceiver.fetch`. One process of the host fetches, and the others wait for its file."""
        source, wanted = parts[0], identity(manifest)
        if source.host == self._here and self._files.stat(Path(manifest.path)) is not None:
            return manifest  # the learner's host
        try:
            async with asyncio.timeout(timeout):
                while (path := await self._run(self._folder.use, wanted)) is None:
                    with self._folder.fetching() as mine:
                        if mine and self._files.stat(self._folder.place(wanted)) is None:
                            await self._fetch(source, wanted, manifest)
                    if not mine:
                        await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(
                f"version {manifest.version} did not arrive within {timeout:g} s (weights.install_timeout)"
            ) from error
        return msgspec.structs.replace(manifest, path=str(path))

    async def discard(self, manifest: WeightManifest) -> None:
        """See `WeightReceiver.discard`. The learner's own file stays."""
        await self._run(self._folder.discard, identity(manifest))

    async def close(self) -> None:
        """See `WeightReceiver.close`."""
        await self._sockets.close()
        for name in self._serving.names:
            self._serving.forget(name)
        await self._run(self._folder.close)

    async def _run(self, function: Any, *args: Any) -> Any:
        return await self._world.threads.run(function, *args)

    async def _fetch(self, source: Source, wanted: Identity, manifest: WeightManifest) -> None:
        base = source.base if source.base is not None and self._has(source.base) else None
        await self._run(self._folder.tidy, base)
        beside = source.nbytes if base is not None else 0
        check_free(self._folder.path, source.nbytes, manifest.version, self._files, beside)
        self._open(source.endpoint)
        path = self._folder.place(wanted)
        if base is not None:
            aside = path.with_name(f".{path.name}.delta")
            delta = await self._bring(f"{source.name}-delta", source.delta_bytes, aside)
            self._files.remove(aside)  # what is passed on stays open
            if await self._run(self._apply, base, delta, path):
                return
        aside = path.with_name(f".{path.name}")
        await self._bring(source.name, source.nbytes, aside)
        self._files.rename(aside, path)

    def _has(self, base: Identity) -> bool:
        return self._files.stat(self._folder.place(base)) is not None

    def _apply(self, base: Identity, delta: File, path: Path) -> bool:
        """Whether the delta made the file. If not, it or the version that it changes is corrupt: the whole file is needed."""
        try:
            with self._files.open(self._folder.place(base)) as before:
                write_aside(path, apply(base, before, delta), sync=False, files=self._files)
        except WeightError:
            return False
        return True

    # -- one stream ------------------------------------------------------------------------------------------------

    def _open(self, endpoint: str) -> None:
        """Connect to the learner, and listen for other hosts, if that was not done."""
        if self._root:
            return
        if self._host:
            # A client's keys serve here too: the learner knows their public one, and so do all that have the same.
            known = frozenset([raw_key(public_key(self._keys.secret))])
            server = ServerKeys(self._keys.secret, known)
            with contextlib.suppress(OSError):  # then it passes nothing on
                relay = self._sockets.router(f"tcp://{self._host}:*", self._asked, keys=server, refused=self.refused)
                self._relay.append(relay)
                self._address = f"tcp://{self._name}:{relay.endpoint.rpartition(':')[2]}"
        self._root.append(self._sockets.dealer(endpoint, self._identity, self._arrived, keys=self._keys))

    def _asked(self, frames: list[Any]) -> None:
        with contextlib.suppress(Malformed, IndexError):  # not one of ours, or damaged
            message = decode(frames[1].bytes)
            if isinstance(message, Get):
                self._serving.answer(self._relay[0], frames[0].bytes, message)

    def _arrived(self, frames: list[Any]) -> None:
        expected = self._expected
        try:
            message = decode(frames[0].bytes)
        except Malformed:
            return
        if message.stream != expected.name:
            return
        if isinstance(message, Place):
            expected.parent = message.parent
        elif isinstance(message, Gone):
            expected.gone = True
        elif isinstance(message, Chunk) and message.index == expected.next:
            expected.arrived.append((message.checksum, frames[1:]))
        else:
            return
        expected.something.set()

    async def _bring(self, name: str, nbytes: int, path: Path) -> File:
        """Receive a stream into a new file, and pass it on meanwhile. Returns the file, which `Serving` closes."""
        for old in [name, *self._serving.names[:-KEPT]]:
            self._serving.forget(old)
        file = self._files.open(path, new=True, mode=0o600)
        self._serving.begin(name, file, nbytes)
        expected = self._expected = Expected(name, chunks_of(nbytes))
        avoid: list[str] = []
        try:
            while not expected.whole:
                parent = await self._placed(expected, avoid)
                if await self._receive_from(parent, expected, file):
                    self._root[0].send([encode(Done(name, parent))])
                elif parent != ROOT:
                    avoid.append(parent)
                    self.moved += 1
        except BaseException:
            self._serving.forget(name)  # whoever asks for it here looks elsewhere
            raise
        return file

    async def _placed(self, expected: Expected, avoid: Sequence[str]) -> str:
        """The address of a parent, from the learner. Raises `WeightError` if that one does not have the stream."""
        expected.parent, expected.gone = None, False
        while expected.parent is None:
            self._root[0].send([encode(Join(expected.name, self._address, tuple(avoid)))])
            await expected.wait()
            if expected.gone:
                raise WeightError(f"the learner does not keep {expected.name} of the weights any more")
        return expected.parent

    async def _receive_from(self, parent: str, expected: Expected, file: File) -> bool:
        """See `_receive`."""
        if parent == ROOT:
            return await self._receive(expected, file, self._root[0])
        keys = ClientKeys(self._keys.secret, public_key(self._keys.secret))
        try:
            socket = self._sockets.dealer(parent, self._identity, self._arrived, keys=keys)
        except OSError:  # that is no address
            return False
        try:
            return await self._receive(expected, file, socket)
        finally:
            socket.close()

    async def _receive(self, expected: Expected, file: File, socket: MessageSocket) -> bool:
        """Chunks from one parent, until all are written, it is silent, or a chunk is damaged each time, for that is what it has.
        Returns whether all are."""
        asked, silent, damaged = expected.next, 0.0, Counter[int]()
        while not expected.whole:
            stop = min(expected.count, expected.next + WINDOW)
            if stop > asked:
                socket.send([encode(Get(expected.name, asked, stop))])
                asked = stop
            if expected.arrived:
                if not await self._take(expected, file, socket):
                    asked = expected.next
                    damaged[asked] += 1
            elif await expected.wait():
                silent = 0.0
            else:
                silent += ASK_AGAIN_SECONDS
                asked = expected.next
            if expected.gone or silent >= SILENT_SECONDS or damaged[expected.next] >= DAMAGED:
                return False
        return True

    async def _take(self, expected: Expected, file: File, socket: MessageSocket) -> bool:
        """Write what has arrived, and pass it on. False if a chunk was damaged on its way: it is asked for again."""
        batch = list(expected.arrived)
        good = await self._run(self._write, file, batch)
        for _ in good:
            expected.arrived.popleft()
        expected.written += len(good)
        self._serving.grow(expected.name, good, self._relay[0] if self._relay else socket)
        if len(good) == len(batch):
            return True
        self.damaged += 1
        expected.arrived.clear()
        return False

    def _write(self, file: File, batch: Sequence[tuple[int, list[Any]]]) -> list[int]:
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
