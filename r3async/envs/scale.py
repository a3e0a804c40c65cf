"""What an environment's rewards mean: the best and a blind policy, played."""

from __future__ import annotations

import random
from typing import Literal

from r3async.envs.base import Action, EnvironmentFactory, HasOracle, HasRandomAnswer


async def mean_reward(
    factory: EnvironmentFactory,
    policy: Literal["oracle", "random"],
    episodes: int = 100,
    seed: int = 0,
    max_turns: int = 64,
) -> float:
    """Mean reward of an episode under the environment's oracle, or under its random policy. Equal seeds give equal means.

    An episode is cut after `max_turns` turns. Raises `TypeError` if the environment has no such policy.
    """
    chance = random.Random(f"{policy} {seed}")
    total = 0.0
    for _ in range(episodes):
        env = factory()
        await env.reset(chance.getrandbits(63))
        for _ in range(max_turns):
            if policy == "oracle" and isinstance(env, HasOracle):
                answer = env.oracle()
            elif policy == "random" and isinstance(env, HasRandomAnswer):
                answer = env.random_answer(chance)
            else:
                raise TypeError(f"{type(env).__name__} has no {policy} policy")
            result = await env.step(Action(answer))
            total += result.reward
            if result.done:
                break
    return total / episodes
