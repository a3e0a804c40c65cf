"""Planted defects of weights on their way, of delivery to the learner, and of who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.fleet import Fleet
from r3async.actors.installer import Installer
from r3async.rollout.engines.scripted import ScriptedEngine
from r3async.schedule.health import Health
from r3async.schedule.spool import Spool
from r3async.tools.simulate.planting import mutant, plant
from r3async.transport.receiver import Receiver
from r3async.untrusted import Malformed
from r3async.weights import delta, relay, tcp
from r3async.weights.host import HostFolder
from r3async.weights.tcp import Expected, TcpReceiver
from r3async.world.files import write_aside
from r3async.world.simulated.disk import SimulatedFile, SimulatedFiles

# -- streams -----------------------------------------------------------------------------------------------------------


@mutant(TcpReceiver, "_write")
def chunk_unchecked(write: Any) -> Any:
    """Chunks of weights are written whatever their checksum."""

    def all_of_them(self: TcpReceiver, file: Any, batch: Sequence[tuple[int, list[Any]]]) -> list[int]:
        for _, frames in batch:
            self.received_bytes += file.append([frame.buffer for frame in frames])
        return [checksum for checksum, _ in batch]

    return all_of_them


@mutant(TcpReceiver, "_arrived")
def chunk_out_of_order(arrived: Any) -> Any:
    """A chunk of weights is taken for the one that is lacking, whichever it is."""

    def any_chunk(self: TcpReceiver, frames: list[Any]) -> None:
        try:
            message = relay.decode(frames[0].bytes)
        except Malformed:
            return
        expected: Expected = self._expected
        if isinstance(message, relay.Chunk) and message.stream == expected.name and expected.next < expected.count:
            expected.arrived.append((message.checksum, frames[1:]))
            expected.something.set()
        else:
            arrived(self, frames)

    return any_chunk


plant("lost_chunk_never_asked_again", "What of the weights was lost on its way is not asked for again.", (
    tcp, "ASK_AGAIN_SECONDS", lambda _: 1e6,
))  # fmt: skip
plant("silent_parent_waited_for", "A host that sends nothing any more is waited for.", (
    tcp, "SILENT_SECONDS", lambda _: 1e6,
))  # fmt: skip


@mutant(relay.Tree, "place")
def failed_parent_given_again(place: Any) -> Any:
    """A host is sent once more to the one that failed it."""
    return lambda self, name, address, avoid=(): place(self, name, address)


# -- deltas and hosts --------------------------------------------------------------------------------------------------


def _here(receiver: TcpReceiver) -> list[Path]:
    """Versions that the host has."""
    folder = receiver._folder.path
    return [folder / name for name in receiver._files.list(folder) if name.startswith("version-")]


def _apply_to_any(apply: Any) -> Any:
    def to_any(self: TcpReceiver, base: Any, difference: Any, path: Path) -> bool:
        with self._files.open(_here(self)[-1]) as before:
            write_aside(path, delta.apply(base, before, difference), sync=False, files=self._files)
        return True

    return to_any


def _unchecked(decode_block: Any) -> Any:
    def decode(base: Any, record: Any) -> memoryview:
        kind, count, *lengths, _ = delta._RECORD.unpack_from(record)
        view, at, planes = memoryview(record), delta.RECORD_BYTES, []
        for length in lengths:
            planes.append(view[at : at + length])
            at += length
        if kind == delta._SPARSE:
            return delta._applied(base, count, planes)
        return planes[0] if kind == delta._RAW else memoryview(base)

    return decode


plant(
    "delta_of_any_base",
    "A delta is applied to whichever version the host has, and what it makes of that is not compared.",
    (TcpReceiver, "_has", lambda has: lambda self, base: bool(_here(self))),
    (TcpReceiver, "_apply", _apply_to_any),
    (delta, "decode_block", _unchecked),
)


@mutant(HostFolder, "use")
def version_not_held(use: Any) -> Any:
    """Who uses a version does not hold its file."""

    def let_go(self: HostFolder, version: Any) -> Any:
        path = use(self, version)
        for file in self._used:
            file.close()
        self._used = []
        return path

    return let_go


@mutant(ScriptedEngine, "_read")
def weights_before_loaded(read: Any) -> Any:
    """An engine loads a version, and continues with the one before."""

    def before(self: ScriptedEngine, manifest: Any) -> int:
        key = int(read(self, manifest))
        return next(reversed(self._keys.values()), key)

    return before


# -- installations -----------------------------------------------------------------------------------------------------


@mutant(Health, "installed")
def old_weights_count_as_newest(installed: Any) -> Any:
    """A generator that was restarted plays with what it installed, though the others have newer weights."""
    return lambda self, version, current: installed(self, version, version)


@mutant(Installer, "behind")
def slow_one_left_behind(behind: Any) -> Any:
    """Once a generator has a version, nobody else is given it."""

    def unless_one_has_it(self: Installer) -> bool:
        if any(generator.version >= self.published.version for generator in self.fleet):
            return False
        return bool(behind.fget(self))

    return property(unless_one_has_it)


@mutant(Installer, "_share")
def first_version_given_for_ever(share: Any) -> Any:
    """Generators are given the version that they were given first."""

    def first(self: Installer, published: Any) -> Any:
        return share(self, published) if self._shared is None else self._shared[1]

    return first


# -- who waits for whom ------------------------------------------------------------------------------------------------


@mutant(Fleet, "overdue")
def silent_one_keeps_its_leases(overdue: Any) -> Any:
    """What a silent generator was leased is leased to nobody else."""
    return lambda self: []


@mutant(Receiver, "_known")
def old_session_counted(known: Any) -> Any:
    """What comes in a session that is over is taken, too."""

    def any_session(self: Receiver, identity: bytes, session: str) -> bool:
        peer = self._peers.get(identity)
        return bool(known(self, identity, session if peer is None else peer.session))

    return any_session


# -- the spool ---------------------------------------------------------------------------------------------------------


@mutant(Spool, "_scan")
def recovery_not_synced(scan: Any) -> Any:
    """What a start finds in the spool is not synced, though the process that wrote it may have ended before it did."""

    def unsynced(self: Spool) -> Any:
        settings = self._settings
        self._settings = msgspec.structs.replace(settings, fsync=False)
        try:
            return scan(self)
        finally:
            self._settings = settings

    return unsynced


@mutant(SimulatedFile, "sync")
def trajectory_not_synced(sync: Any) -> Any:
    """A trajectory is acknowledged before it outlives a power failure."""

    def not_these(self: SimulatedFile) -> None:
        if self._path.suffix != ".spool":
            sync(self)

    return not_these


@mutant(SimulatedFiles, "sync_directory")
def spool_names_not_synced(sync_directory: Any) -> Any:
    """The names of the spool's files do not outlive a power failure."""

    def not_this_one(self: SimulatedFiles, directory: Path) -> None:
        if directory.name != "spool":
            sync_directory(self, directory)

    return not_this_one
