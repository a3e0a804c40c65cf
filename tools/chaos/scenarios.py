"""The scenarios of `r3async chaos`, by name."""

from __future__ import annotations

from tools.chaos.full_disk import FullDisk
from tools.chaos.kills import Kills
from tools.chaos.sabotage import Saboteur

SCENARIOS: dict[str, type[Saboteur]] = {"full-disk": FullDisk, "kills": Kills}
