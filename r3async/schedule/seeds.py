"""Which task is posed: every episode's seed follows from the run's, and training and evaluation never share one.

Training seeds are even and evaluation seeds odd, so they stay apart in any environment that uses a seed modulo a power of two.
"""

from __future__ import annotations

import random


def training_seed(seed: int, group_index: int) -> int:
    """Seed of the task that a group plays, in `0..2^63 - 1`."""
    return random.Random(f"{seed}/{group_index}").getrandbits(63) & ~1


def evaluation_seed(seed: int, index: int) -> int:
    """Seed of the task of an evaluation's episode `index`; `seed` is `evaluation.seed`."""
    return random.Random(f"evaluation/{seed}/{index}").getrandbits(63) | 1
