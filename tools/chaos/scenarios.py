"""The scenarios of `r3async chaos`, by name."""

from __future__ import annotations

from tools.chaos.frozen import Frozen
from tools.chaos.full_disk import FullDisk
from tools.chaos.kills import Kills
from tools.chaos.rewind import FirstCheckpoint, Rewind
from tools.chaos.sabotage import Saboteur

SCENARIOS: dict[str, type[Saboteur]] = {
    "first-checkpoint": FirstCheckpoint,
    "frozen": Frozen,
    "full-disk": FullDisk,
    "kills": Kills,
    "rewind": Rewind,
}
