"""How long things take in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

Range = tuple[float, float]
"""Least and most seconds."""


def draw(between: Range, rng: Random) -> float:
    """Mostly near the least: half of all draws in the lowest eighth, one in eleven in the upper quarter."""
    least, most = between
    share = rng.random()
    return least + (most - least) * (share * share * share)  # without libm, whose last digit differs between machines


@dataclass(frozen=True)
class Delays:
    """How long things take, in seconds. `call`: one way. `start`: until a process has imported what it needs. `restart`: from a
    process's end until the next one is begun. `notice`: until a caller notices that no answer will come. `thread`: until a
    function that is handed to a thread runs. `message`: on its way over the network."""

    call: Range = (0.0002, 0.01)
    start: Range = (0.5, 5.0)
    restart: Range = (0.1, 2.0)
    notice: Range = (0.01, 2.0)
    thread: Range = (0.0001, 0.005)
    message: Range = (0.0002, 0.01)

    def times(self, factor: float) -> Delays:
        """Everything takes so many times as long."""
        stretched = {
            each.name: tuple(seconds * factor for seconds in getattr(self, each.name)) for each in fields(self)
        }
        return Delays(**stretched)


__all__ = ["Delays", "draw"]
