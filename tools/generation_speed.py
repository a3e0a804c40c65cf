"""Estimate how many tokens an engine samples in a second, and how many engines the learner needs.

For each token of its running episodes, an engine reads its weights once and the KV cache of every
episode, reads and writes its states, and computes with the parameters that a token uses. Rates are shares of an H100's peaks
that engines usually reach, assumed: no engine was measured. Contexts have half of the allowed
length. All its episodes sample all the time: prefill, tools and new weights take none.
"""

from __future__ import annotations

import math

import msgspec

from r3async.config import Config
from r3async.data.model_shape import ModelShape
from r3async.schedule.run_ahead import count_slots

from .memory import EngineMemory

MEMORY_RATE = 0.6 * 3.35e12
"""Bytes a second that a GPU reads from its memory."""
COMPUTE_RATE = 0.5 * 989e12
"""Operations a second of a GPU."""
ENGINE_STEP_SECONDS = 0.004
"""Seconds of an engine's step that depend on neither weights nor episodes."""


class GenerationSpeed(msgspec.Struct, frozen=True):
    """The estimated speed of one engine.

    Attributes:
        episodes: Episodes that run on it at once: `generator.concurrency`, or fewer if the slots
            allow fewer.
        tokens_per_second: Tokens that it samples in a second.
    """

    episodes: float
    tokens_per_second: float

    def count_engines(self, trained_per_second: float) -> int:
        """Return the fewest engines that sample as many tokens as the learner trains."""
        return math.ceil(trained_per_second / self.tokens_per_second)


def estimate_generation(shape: ModelShape, config: Config, engine: EngineMemory) -> GenerationSpeed:
    """Estimate the speed of one of the run's engines."""
    generator = config.generator
    in_slots = count_slots(config.schedule) * config.schedule.group_size / generator.count
    episodes = min(generator.concurrency, in_slots)
    keys_and_values = engine.kv_per_token * config.episode.max_total_tokens / 2
    cached = episodes * (keys_and_values + engine.states)
    operations = 2 * shape.active_parameters * episodes / engine.devices
    seconds = (
        ENGINE_STEP_SECONDS + (engine.weights + cached) / MEMORY_RATE + operations / COMPUTE_RATE
    )
    return GenerationSpeed(episodes, episodes / seconds)
