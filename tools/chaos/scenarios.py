"""The scenarios of `r3async chaos`, by name."""

from __future__ import annotations

from r3async.tools.chaos.frozen import Frozen
from r3async.tools.chaos.full_disk import FullDisk
from r3async.tools.chaos.kills import Kills
from r3async.tools.chaos.rewind import FirstCheckpoint, Rewind
from r3async.tools.chaos.sabotage import Saboteur

SCENARIOS: dict[str, type[Saboteur]] = {
    "first-checkpoint": FirstCheckpoint,
    "frozen": Frozen,
    "full-disk": FullDisk,
    "kills": Kills,
    "rewind": Rewind,
}
