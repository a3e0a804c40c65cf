"""Seeds the random numbers that an environment draws without being asked which: those of
`random` and NumPy.

Many environments, and many libraries of them, use the generators of the whole process. Without a
seed, the episodes of a group would answer different tasks, and episodes that overlap in a process
would change each other's.
"""

from __future__ import annotations

import random

import numpy as np


def seed_global_generators(task_seed: int, call_index: int = 0) -> None:
    """Seed the global generators of `random` and NumPy for one call of an environment.

    A seed for each call, instead of a state that is kept for each episode, costs
    microseconds. It holds until the environment waits: where several share a process, another
    one's call may come then.

    Args:
        task_seed: The seed of the episode's task.
        call_index: Number of the call within its episode: 0 for making and resetting the
            environment, then its steps.
    """
    random.seed(f"{task_seed} {call_index}")
    np.random.seed(random.getrandbits(32))
