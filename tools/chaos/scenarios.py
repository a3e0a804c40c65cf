"""The scenarios of `r3async chaos`, by name."""

from __future__ import annotations

from tools.chaos.full_disk import FullDisk
from tools.chaos.kills import Kills
from tools.chaos.rewind import FirstCheckpoint, Rewind
from tools.chaos.sabotage import Saboteur

<<<<<<< HEAD
SCENARIOS: dict[str, type[Saboteur]] = {"full-disk": FullDisk, "kills": Kills}
=======
SCENARIOS: dict[str, type[Saboteur]] = {
    "kills": Kills,
    "rewind": Rewind,
    "first-checkpoint": FirstCheckpoint,
}
>>>>>>> cdebbe9 (Chaos: a run lost twice before it made up for it, and before its first checkpoint; lineages in inspect)
