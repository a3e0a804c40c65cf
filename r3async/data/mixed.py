"""The task seeds of a run with several environments: each says which environment it is of, and what that is given."""

from __future__ import annotations

INNER_BITS = 48
"""Of a task's seed, those that its environment is given; above them is which environment that is."""


def joint(entry: int, seed: int) -> int:
    """The task seed, in `0..2^63 - 1`, of `seed` of environment number `entry`."""
    return entry << INNER_BITS | seed


def parted(task_seed: int, entries: int) -> tuple[int, int]:
    """The number of the environment, of so many, and what it is given: of any seed of 63 bits. The only environment is given the
    seed as it is."""
    if entries == 1:
        return 0, task_seed
    return (task_seed >> INNER_BITS) % entries, task_seed & ((1 << INNER_BITS) - 1)
