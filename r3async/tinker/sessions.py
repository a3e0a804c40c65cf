"""What clients have open: sessions with their models and samplers.

A client that was dropped goes on with its heartbeats until its process ends, so heartbeats are no
use: a session ends by its client's word, or when nothing was asked of it for a while. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from r3async.tinker.protocol import ApiError, LoraConfig
from r3async.tinker.sequencing import RequestSequence

IDLE_SECONDS = 8 * 3600.0
MAX_SESSIONS = 1000
SNAPSHOTS_PER_MODEL = 4
"""Snapshots of a model that can still be sampled from. A loop makes one each step."""


@dataclass(frozen=True)
class Snapshot:
    """Weights to sample from: those of `model_id` after `version` updates; the base model's, with
    the empty id."""

    name: str
    model_id: str = ""
    version: int = 0


BASE_SNAPSHOT = Snapshot("base")


@dataclass
class TrainedModel:
    """A model that a client trains. `version` counts its updates."""

    model_id: str
    session_id: str
    lora: LoraConfig | None
    user_metadata: dict[str, Any] | None
    created_at: float
    used_at: float
    sequence: RequestSequence[str] = field(default_factory=RequestSequence)
    version: int = 0
    snapshots: OrderedDict[str, Snapshot] = field(default_factory=OrderedDict)


@dataclass(frozen=True)
class Sampler:
    """A sampling session. Its samples' numbers come in any order."""

    sampler_id: str
    session_id: str
    snapshot: Snapshot
    model_path: str | None = None


@dataclass
class Session:
    session_id: str
    used_at: float
    user_metadata: dict[str, Any] | None = None


class Sessions:
    """All that is open. Methods raise `ApiError` for what is not, or no more."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS):
        self._idle_seconds = idle_seconds
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, Sampler] = {}

    def open_session(self, session_id: str, now: float, metadata: dict[str, Any] | None) -> None:
        if len(self.sessions) >= MAX_SESSIONS:
            raise ApiError(f"{MAX_SESSIONS} sessions are open", status=429)
        self.sessions[session_id] = Session(session_id, now, metadata)

    def find_session(self, session_id: str, now: float | None = None) -> Session:
        """Return a session. With `now`, it is used."""
        session = self.sessions.get(session_id)
        if session is None:
            # After this status an SDK sends no more heartbeats.
            raise ApiError(f"the session {session_id!r} is not open: make a client", status=410)
        session.used_at = session.used_at if now is None else now
        return session

    def find_model(self, model_id: str, now: float) -> TrainedModel:
        model = self.models.get(model_id)
        if model is None:
            raise ApiError(f"there is no model {model_id!r}, or no more", status=404)
        self.find_session(model.session_id, now)
        model.used_at = now
        return model

    def find_sampler(self, sampler_id: str, now: float) -> Sampler:
        sampler = self.samplers.get(sampler_id)
        if sampler is None:
            raise ApiError(
                f"there is no sampler {sampler_id!r}, or no more: a model's last "
                f"{SNAPSHOTS_PER_MODEL} snapshots are kept, and those saved by path",
                status=404,
            )
        self.find_session(sampler.session_id, now)
        return sampler

    def add_snapshot(self, model: TrainedModel, sampler: Sampler) -> list[Snapshot]:
        """Add a sampler on a new snapshot of a model, and return the snapshots that are over."""
        self.samplers[sampler.sampler_id] = sampler
        model.snapshots[sampler.sampler_id] = sampler.snapshot
        over = []
        while len(model.snapshots) > SNAPSHOTS_PER_MODEL:
            oldest, snapshot = model.snapshots.popitem(last=False)
            del self.samplers[oldest]
            over.append(snapshot)
        return over

    def find_idle(self, now: float) -> list[str]:
        """Return the sessions that nothing was asked of for too long."""
        return [
            name for name, one in self.sessions.items() if now - one.used_at > self._idle_seconds
        ]

    def close_session(self, session_id: str) -> tuple[list[TrainedModel], list[Snapshot]]:
        """End a session. Returns its models, and the snapshots that nobody else samples from."""
        self.sessions.pop(session_id, None)
        models = [one for one in self.models.values() if one.session_id == session_id]
        samplers = [one for one in self.samplers.values() if one.session_id == session_id]
        for model in models:
            del self.models[model.model_id]
        for sampler in samplers:
            del self.samplers[sampler.sampler_id]
        used = {one.snapshot.name for one in self.samplers.values()} | {BASE_SNAPSHOT.name}
        over = {one.snapshot.name: one.snapshot for one in samplers}
        return models, [snapshot for name, snapshot in over.items() if name not in used]
