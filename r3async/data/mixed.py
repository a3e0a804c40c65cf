"""Task seeds of a run with several environments: each encodes the number of an environment and the
seed given to it."""

from __future__ import annotations

ENV_SEED_BITS = 48
"""Number of low bits of a task seed that its environment is given; the bits above are the
environment's number."""


def join_seed(env_index: int, seed: int) -> int:
    """Return the task seed, in `0..2^63 - 1`, that stands for `seed` of environment
    number `env_index`."""
    return env_index << ENV_SEED_BITS | seed


def split_seed(task_seed: int, env_count: int) -> tuple[int, int]:
    """Return the environment's number, below `env_count`, and the seed that it is given, for any
    task seed of 63 bits.

    A single environment is given the task seed unchanged.
    """
    if env_count == 1:
        return 0, task_seed
    return (task_seed >> ENV_SEED_BITS) % env_count, task_seed & ((1 << ENV_SEED_BITS) - 1)
