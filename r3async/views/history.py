"""What befell a run in all its lives: counted from its events, which no resume cuts back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class History:
    """Grows by `take`, event by event, in the order of their writing. A life: from a conductor's start to the next."""

    lives: int = 0
    generators_lost: int = 0
    """Processes of generators that ended by themselves; each is started again."""
    run_restarts: int = 0
    """Lives that followed one which did not end by itself: a process was lost that the run cannot do without."""
    failed_episodes: int = 0
    """After their last try. Their groups were trained without them."""
    refused: int = 0
    """Trajectories that the learner will never train."""
    _ended: bool = False

    def take(self, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "conductor_started":
                self.run_restarts += bool(self.lives) and not self._ended
                self.lives += 1
                self._ended = False
            case "run_finished":
                self._ended = True
            case "generator_lost":
                self.generators_lost += 1
            case "episode_given_up":
                self.failed_episodes += 1
            case "trajectory_refused":
                self.refused += 1


def history_of(events: Iterable[dict[str, Any]]) -> History:
    history = History()
    for event in events:
        history.take(event)
    return history


def counted(values: Sequence[float]) -> int:
    """The total of a counter that is 0 when its process starts: its last value before each fall, and the last of all."""
    falls = zip(values, [*values[1:], -1.0], strict=True) if values else ()
    return int(sum(value for value, after in falls if after < value))
