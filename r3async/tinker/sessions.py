"""What clients have open: sessions with their models and samplers, each session in a file.

A client that was dropped goes on with its heartbeats until its process ends, so heartbeats are no
use: a session ends by its client's word, or when nothing was asked of it for a while.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from r3async.tinker.protocol import ApiError, LoraConfig
from r3async.tinker.saved_weights import PREFIX
from r3async.untrusted import MalformedError, decode_json
from r3async.world import Files
from r3async.world.files import make_directory, read_file, write_atomically

IDLE_SECONDS = 8 * 3600.0
MAX_SESSIONS = 1000
SNAPSHOTS_PER_MODEL = 4
"""Snapshots of a model that can still be sampled from. A loop makes one each step."""
SAMPLERS_PER_SESSION = 256


@dataclass(frozen=True)
class Snapshot:
    """Weights to sample from: those of `model_id` after `version` updates; the base model's, with
    the empty id. The name of others is the path at which they are saved."""

    name: str
    model_id: str = ""
    version: int = 0


BASE_SNAPSHOT = Snapshot("base")


class Sampler(msgspec.Struct, frozen=True):
    """A sampling session. Its samples' numbers come in any order."""

    sampler_id: str
    session_id: str
    snapshot: Snapshot

    @property
    def model_path(self) -> str | None:
        """The path by which a client opened it."""
        return self.snapshot.name if "/sampler_weights/" in self.snapshot.name else None


class Session(msgspec.Struct):
    """A session. `used_at` is of this process's clock."""

    session_id: str
    used_at: float
    models: dict[str, LoraConfig | None] = {}
    samplers: dict[str, Sampler] = {}
    """The one that was used last comes last."""


class Sessions:
    """All that is open, also by earlier processes. Methods raise `ApiError` for what is not, or no
    more."""

    def __init__(
        self, directory: Path, now: float, *, files: Files, idle_seconds: float = IDLE_SECONDS
    ):
        self._directory = directory
        self._disk = files
        self._idle_seconds = idle_seconds
        self.sessions: dict[str, Session] = {}
        make_directory(directory, files=files)
        for name in files.list_names(directory):
            if name.endswith(".json"):
                self._load(directory / name, now)
            else:  # a process was killed while it wrote
                files.remove(directory / name)

    def _load(self, path: Path, now: float) -> None:
        try:
            session = decode_json(read_file(path, files=self._disk), Session)
        except MalformedError:  # a machine that lost its power may leave such a file
            return
        session.used_at = now
        self.sessions[session.session_id] = session

    def open(self, session_id: str, now: float) -> Session:
        if len(self.sessions) >= MAX_SESSIONS:
            raise ApiError(f"{MAX_SESSIONS} sessions are open", status=429)
        self.sessions[session_id] = Session(session_id, now)
        return self.sessions[session_id]

    def write(self, session: Session) -> None:
        """Let a session survive this process. Blocks."""
        path = self._directory / f"{session.session_id}.json"
        if session.session_id in self.sessions:
            write_atomically(path, [msgspec.json.encode(session)], fsync=False, files=self._disk)
        else:
            self._disk.remove(path)

    def find_session(self, session_id: str, now: float | None = None) -> Session:
        """Return a session. With `now`, it is used."""
        session = self.sessions.get(session_id)
        if session is None:
            # After this status an SDK sends no more heartbeats.
            raise ApiError(f"the session {session_id!r} is not open: make a client", status=410)
        session.used_at = session.used_at if now is None else now
        return session

    def find_sampler(self, sampler_id: str, now: float) -> Sampler:
        """Return a sampler, which is used."""
        session = self.sessions.get(sampler_id.split(":")[0])
        if session is None or sampler_id not in session.samplers:
            raise ApiError(
                f"there is no sampler {sampler_id!r}, or no more: a model's last "
                f"{SNAPSHOTS_PER_MODEL} snapshots are kept, and those saved by path",
                status=404,
            )
        session.used_at = now
        sampler = session.samplers.pop(sampler_id)
        session.samplers[sampler_id] = sampler
        return sampler

    def add_sampler(self, sampler: Sampler) -> list[Snapshot]:
        """Add a sampler to its session, and return the snapshots that are over with that."""
        session = self.sessions[sampler.session_id]
        session.samplers[sampler.sampler_id] = sampler
        of_model = f"{PREFIX}{sampler.snapshot.model_id}/snapshots/"
        snapshots = [
            one for one in session.samplers.values() if one.snapshot.name.startswith(of_model)
        ]
        over = sorted(snapshots, key=lambda one: one.snapshot.version)[:-SNAPSHOTS_PER_MODEL]
        over += list(session.samplers.values())[:-SAMPLERS_PER_SESSION]
        for old in over:
            session.samplers.pop(old.sampler_id, None)
        return self._find_unused(over)

    def find_idle(self, now: float) -> list[str]:
        """Return the sessions that nothing was asked of for too long."""
        return [
            name for name, one in self.sessions.items() if now - one.used_at > self._idle_seconds
        ]

    def close(self, session_id: str) -> list[Snapshot]:
        """End a session, and return the snapshots that nobody else samples from."""
        return self._find_unused(self.sessions.pop(session_id).samplers.values())

    def _find_unused(self, closed: Iterable[Sampler]) -> list[Snapshot]:
        used = {BASE_SNAPSHOT.name}
        for session in self.sessions.values():
            used |= {sampler.snapshot.name for sampler in session.samplers.values()}
        over = {one.snapshot.name: one.snapshot for one in closed}
        return [snapshot for name, snapshot in over.items() if name not in used]
