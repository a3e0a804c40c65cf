"""The health of generators.

Pure; the clock is injected.

    STARTING ──loaded──► STALE ──installed──► HEALTHY ◄─answer── SUSPECT
        ▲                  ▲                     │  │               │
        │                  └──published too far──┘  └─silent────────┘
        └──────────restart, after a back-off── LOST ◄──process ended, from any state

Only a HEALTHY generator takes leases. A STALE one has an engine but no current weights. A SUSPECT
one has been silent for a while, and keeps what it has. LOST is a process that has ended, or whose
connection broke.
"""

from __future__ import annotations

import enum
from collections.abc import Callable


class HealthState(enum.StrEnum):
    """State of a generator; the module docstring has the transitions."""

    STARTING = "starting"
    STALE = "stale"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    LOST = "lost"


class RestartsExhausted(RuntimeError):
    """Error for a process that was lost more often than it may be restarted."""


class GeneratorHealth:
    """Health of one generator. Times are in seconds of `clock`.

    Args:
        silence_seconds: Silence after which it is SUSPECT.
        backoff_seconds: Wait before the first restart; doubled for each further one.
        max_backoff_seconds: Maximum wait before a restart.
        forgive_seconds: Time healthy in one stretch after which the wait is that of the
            first restart again.
        max_restarts: Maximum number of restarts in all.
        on_change: Function that is called when the state changes.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        silence_seconds: float = 30.0,
        backoff_seconds: float = 1.0,
        max_backoff_seconds: float = 60.0,
        forgive_seconds: float = 600.0,
        max_restarts: int = 8,
        on_change: Callable[[], object] = lambda: None,
    ):
        if (
            min(silence_seconds, backoff_seconds, max_backoff_seconds, forgive_seconds) <= 0
            or max_restarts < 0
        ):
            raise ValueError(
                "silence, backoff, backoff_max and forgive must be positive, "
                "max_restarts not negative"
            )
        self._clock = clock
        self._silence_seconds = silence_seconds
        self._max_restarts = max_restarts
        self._backoff_seconds = backoff_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._forgive_seconds = forgive_seconds
        self._state = HealthState.STARTING
        self._on_change = on_change
        self.version = -1
        """Version of its weights; -1 while it has none."""
        self.restarts = 0
        self._recent_losses = 0
        """Losses that count for the back-off."""
        self._last_heartbeat = clock()
        self._healthy_since: float | None = None
        self._lost_at = 0.0

    @property
    def state(self) -> HealthState:
        return self._state

    @state.setter
    def state(self, state: HealthState) -> None:
        if state is not self._state:
            self._state = state
            self._on_change()

    @property
    def can_lease(self) -> bool:
        return self.state is HealthState.HEALTHY

    def mark_loaded(self) -> None:
        """Record that its engine is up, without usable weights yet. Raises `ValueError` unless
        it was STARTING."""
        self._require_state(HealthState.STARTING)
        self.state = HealthState.STALE
        self._last_heartbeat = self._clock()

    def mark_installed(self, version: int, newest_version: int) -> None:
        """Record that it installed `version`: HEALTHY if that is `newest_version`, else STALE.

        Raises `ValueError` if it is STARTING or LOST, or versions go backwards.
        """
        if self.state in (HealthState.STARTING, HealthState.LOST):
            raise ValueError(f"a generator that is {self.state} cannot install weights")
        if version < self.version:
            raise ValueError(
                f"version {version} installed after version {self.version}: versions only go up"
            )
        self.version = version
        self._last_heartbeat = self._clock()
        if version >= newest_version:
            if self.state is not HealthState.HEALTHY:
                self._healthy_since = self._last_heartbeat
            self.state = HealthState.HEALTHY
        else:
            self._change_state(HealthState.STALE)

    def note_answer(self) -> None:
        """Record that it sent something or answered. SUSPECT becomes HEALTHY again.

        Ignored while LOST: a late answer revives nothing.
        """
        if self.state is HealthState.LOST:
            return
        self._last_heartbeat = self._clock()
        if self.state is HealthState.SUSPECT:
            self.state, self._healthy_since = HealthState.HEALTHY, self._last_heartbeat

    def check_silence(self) -> bool:
        """Look at the clock, and return True if it has become SUSPECT just now."""
        if (
            self.state is HealthState.HEALTHY
            and self._clock() - self._last_heartbeat > self._silence_seconds
        ):
            self._change_state(HealthState.SUSPECT)
            return True
        return False

    @property
    def silent_seconds(self) -> float:
        """The seconds since its last heartbeat or answer."""
        return self._clock() - self._last_heartbeat

    def mark_lost(self) -> None:
        """Record that its process has ended, and that its weights are lost with it. Idempotent."""
        if self.state is HealthState.LOST:
            return
        self._change_state(HealthState.LOST)
        self._lost_at = self._clock()
        self.version = -1
        self._recent_losses += 1

    @property
    def seconds_to_restart(self) -> float:
        """The seconds until it should be restarted; 0 if now. Raises `ValueError`
        unless it is LOST."""
        self._require_state(HealthState.LOST)
        wait = min(
            self._backoff_seconds * 2.0 ** min(self._recent_losses - 1, 62),
            self._max_backoff_seconds,
        )
        return max(0.0, self._lost_at + wait - self._clock())

    def begin_restart(self) -> None:
        """Record that it is started again. Raises `RestartsExhausted`, or `ValueError`
        unless it is LOST."""
        self._require_state(HealthState.LOST)
        if self.restarts >= self._max_restarts:
            raise RestartsExhausted(
                f"lost {self.restarts + 1} times, {self._max_restarts} restarts are allowed"
            )
        self.restarts += 1
        self.state, self._last_heartbeat = HealthState.STARTING, self._clock()

    def undo_loss(self) -> None:
        """Take back a loss: the process that was taken for lost answers again, and
        was not restarted."""
        self._require_state(HealthState.STALE)
        self.restarts = self.restarts - 1
        self._recent_losses = self._recent_losses - 1

    def _change_state(self, state: HealthState) -> None:
        since = self._healthy_since
        self._healthy_since = None
        if since is not None and self._clock() - since >= self._forgive_seconds:
            self._recent_losses = 0
        self.state = state

    def _require_state(self, state: HealthState) -> None:
        if self.state is not state:
            raise ValueError(f"a generator that is {self.state} is not {state}")
