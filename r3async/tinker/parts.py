"""What training, sampling and the service of the Tinker API share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from r3async.tinker.backend import TinkerBackend
from r3async.tinker.futures import ResultFutures
from r3async.tinker.kept_sequences import KeptSequences
from r3async.tinker.protocol import ApiError
from r3async.tinker.saved_weights import SavedWeights, WeightsDirectory, WeightsKind
from r3async.tinker.sessions import Session, Sessions
from r3async.world import EventReporter, WorkerThread, World


class ServiceParts(NamedTuple):
    """The state of a server. `lane` runs all work on its files, which are in `directory`."""

    backend: TinkerBackend
    directory: Path
    world: World
    lane: WorkerThread
    sessions: Sessions
    futures: ResultFutures
    weights: WeightsDirectory
    kept: KeptSequences
    report_event: EventReporter

    @property
    def now(self) -> float:
        return self.world.clock.monotonic()

    def find_weights(self, path: str, kind: WeightsKind) -> SavedWeights:
        """Return saved weights. Raises `ApiError` for a path that names none of that kind."""
        return self.weights.find(path, kind, self.world.clock.time())

    def check_base(self, name: str | None) -> None:
        served = self.backend.served.name
        if name not in (None, served):
            raise ApiError(f"base_model {name!r} is not served here: {served!r} is")

    async def write_session(self, session: Session) -> None:
        """Raises `ApiError`, after which an SDK tries again."""
        try:
            await self.lane.run(self.sessions.write, session)
        except OSError as error:
            raise ApiError(f"the disk: {error}", status=503, category="server") from error
