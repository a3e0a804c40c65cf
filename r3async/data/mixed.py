"""The task seeds of a run with several environments: each says which environment it is of, and what that is given."""

from __future__ import annotations

ENV_SEED_BITS = 48
"""Of a task's seed, those that its environment is given; above them is which environment that is."""


def join_seed(env_index: int, seed: int) -> int:
    """The task seed, in `0..2^63 - 1`, of `seed` of environment number `env_index`."""
    return env_index << ENV_SEED_BITS | seed


def split_seed(task_seed: int, env_count: int) -> tuple[int, int]:
    """The number of the environment, of so many, and what it is given: of any seed of 63 bits. The only environment is given the
    seed as it is."""
    if env_count == 1:
        return 0, task_seed
    return (task_seed >> ENV_SEED_BITS) % env_count, task_seed & ((1 << ENV_SEED_BITS) - 1)
