"""Planted defects of weights on their way, of delivery to the learner, and of who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from r3async.actors.fleet import Fleet
from r3async.actors.installer import VersionInstaller
from r3async.rollout.scripted import ScriptedEngine
from r3async.schedule.health import GeneratorHealth
from r3async.tools.simulate.planting import mutant, plant
from r3async.transport.receiver import TrajectoryReceiver
from r3async.transport.spool import Spool
from r3async.untrusted import MalformedError
from r3async.weights import delta
from r3async.weights import fetch as relay
from r3async.weights import fetch as tcp
from r3async.weights.fetch import HostVersionCache, IncomingStream, TcpReceiver
from r3async.world.files import write_atomically
from r3async.world.simulated.disk import SimulatedFile, SimulatedFiles

# -- streams -----------------------------------------------------------------------------------------------------------


@mutant(TcpReceiver, "_append_verified_chunks")
def chunk_unchecked(write: Any) -> Any:
    """Chunks of weights are written whatever their checksum."""

    def all_of_them(self: TcpReceiver, file: Any, batch: Sequence[tuple[int, list[Any]]]) -> list[int]:
        for _, frames in batch:
            self.received_bytes += file.append([frame.buffer for frame in frames])
        return [checksum for checksum, _ in batch]

    return all_of_them


@mutant(TcpReceiver, "_handle_message")
def chunk_out_of_order(arrived: Any) -> Any:
    """A chunk of weights is taken for the one that is lacking, whichever it is."""

    def any_chunk(self: TcpReceiver, frames: list[Any]) -> None:
        try:
            message = relay.decode_relay_message(frames[0].bytes)
        except MalformedError:
            return
        expected: IncomingStream = self._incoming
        if (
            isinstance(message, relay.Chunk)
            and message.stream == expected.name
            and expected.next_chunk < expected.chunk_count
        ):
            expected.pending_chunks.append((message.checksum, frames[1:]))
            expected.activity.set()
        else:
            arrived(self, frames)

    return any_chunk


plant("lost_chunk_never_asked_again", "What of the weights was lost on its way is not asked for again.", (
    tcp, "RETRY_SECONDS", lambda _: 1e6,
))  # fmt: skip
plant("silent_parent_waited_for", "A host that sends nothing any more is waited for.", (
    tcp, "MAX_SILENCE_SECONDS", lambda _: 1e6,
))  # fmt: skip


@mutant(relay.RelayTree, "place_node")
def failed_parent_given_again(place: Any) -> Any:
    """A host is sent once more to the one that failed it."""
    return lambda self, name, address, avoid=(): place(self, name, address)


# -- deltas and hosts --------------------------------------------------------------------------------------------------


def _here(receiver: TcpReceiver) -> list[Path]:
    """Versions that the host has."""
    folder = receiver._cache.path
    return [folder / name for name in receiver._files.list_names(folder) if name.startswith("version-")]


def _apply_to_any(apply: Any) -> Any:
    def to_any(self: TcpReceiver, base: Any, difference: Any, path: Path) -> bool:
        with self._files.open(_here(self)[-1]) as before:
            write_atomically(path, delta.apply_delta(base, before, difference), fsync=False, files=self._files)
        return True

    return to_any


def _unchecked(decode_block: Any) -> Any:
    def decode(base: Any, record: Any) -> memoryview:
        kind, count, *lengths, _ = delta._RECORD.unpack_from(record)
        view, at, planes = memoryview(record), delta.MIN_RECORD_BYTES, []
        for length in lengths:
            planes.append(view[at : at + length])
            at += length
        if kind == delta._SPARSE:
            return delta._apply_sparse(base, count, planes)
        return planes[0] if kind == delta._RAW else memoryview(base)

    return decode


plant(
    "delta_of_any_base",
    "A delta is applied to whichever version the host has, and what it makes of that is not compared.",
    (TcpReceiver, "_has_version", lambda has: lambda self, base: bool(_here(self))),
    (TcpReceiver, "_apply_delta", _apply_to_any),
    (delta, "decode_delta_block", _unchecked),
)


@mutant(HostVersionCache, "acquire_version")
def version_not_held(use: Any) -> Any:
    """Who uses a version does not hold its file."""

    def let_go(self: HostVersionCache, version: Any) -> Any:
        path = use(self, version)
        for file in self._locked_files:
            file.close()
        self._locked_files = []
        return path

    return let_go


@mutant(ScriptedEngine, "_read_checked_key")
def weights_before_loaded(read: Any) -> Any:
    """An engine loads a version, and continues with the one before."""

    def before(self: ScriptedEngine, manifest: Any) -> int:
        key = int(read(self, manifest))
        return next(reversed(self._weights_keys.values()), key)

    return before


# -- installations -----------------------------------------------------------------------------------------------------


@mutant(GeneratorHealth, "mark_installed")
def old_weights_count_as_newest(installed: Any) -> Any:
    """A generator that was restarted plays with what it installed, though the others have newer weights."""
    return lambda self, version, current: installed(self, version, version)


@mutant(VersionInstaller, "needs_delivery")
def slow_one_left_behind(behind: Any) -> Any:
    """Once a generator has a version, nobody else is given it."""

    def unless_one_has_it(self: VersionInstaller) -> bool:
        if any(generator.version >= self.newest_published.version for generator in self.fleet):
            return False
        return bool(behind.fget(self))

    return property(unless_one_has_it)


@mutant(VersionInstaller, "_put_offer")
def first_version_given_for_ever(share: Any) -> Any:
    """Generators are given the version that they were given first."""

    def first(self: VersionInstaller, published: Any) -> Any:
        return share(self, published) if self._shared_offer is None else self._shared_offer[1]

    return first


# -- who waits for whom ------------------------------------------------------------------------------------------------


@mutant(Fleet, "find_overdue")
def silent_one_keeps_its_leases(overdue: Any) -> Any:
    """What a silent generator was leased is leased to nobody else."""
    return lambda self: []


@mutant(TrajectoryReceiver, "_is_current_session")
def old_session_counted(known: Any) -> Any:
    """What comes in a session that is over is taken, too."""

    def any_session(self: TrajectoryReceiver, identity: bytes, session: str) -> bool:
        peer = self._sessions.get(identity)
        return bool(known(self, identity, session if peer is None else peer.session))

    return any_session


# -- the spool ---------------------------------------------------------------------------------------------------------


@mutant(Spool, "_scan_directory")
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


@mutant(SimulatedFile, "fsync")
def trajectory_not_synced(sync: Any) -> Any:
    """A trajectory is acknowledged before it outlives a power failure."""

    def not_these(self: SimulatedFile) -> None:
        if self._path.suffix != ".spool":
            sync(self)

    return not_these


@mutant(SimulatedFiles, "fsync_directory")
def spool_names_not_synced(sync_directory: Any) -> Any:
    """The names of the spool's files do not outlive a power failure."""

    def not_this_one(self: SimulatedFiles, directory: Path) -> None:
        if directory.name != "spool":
            sync_directory(self, directory)

    return not_this_one
