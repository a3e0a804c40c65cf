"""Measurement of an environment's rewards."""

from __future__ import annotations

from r3async.config import EnvConfig, EvaluationConfig
from r3async.envs import EnvironmentFactory
from r3async.rollout.evaluation import BaselinePolicy, evaluate_without_model


async def mean_reward(factory: EnvironmentFactory, policy: BaselinePolicy, episodes: int) -> float:
    """Return the mean reward of an episode under the environment's oracle or its random policy."""
    env = EnvConfig(name="tested")
    made = await evaluate_without_model(env, factory, policy, EvaluationConfig(tasks=episodes), max_turns=64)
    return made.reward_mean
