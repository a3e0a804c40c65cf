"""What an engine reports of tokens that it samples, for `weights.probe`."""

from __future__ import annotations

import asyncio

import numpy as np

from r3async.rollout.engines.base import Engine, EngineError, GenerationRequest
from r3async.weights.probe import SampledProbe, probe_positions


async def sample_probe(engine: Engine, token_ids: np.ndarray, temperature: float) -> SampledProbe:
    """Sample one token after each of several beginnings of `token_ids` `[T]`, as an episode would, and score it again.

    Raises `EngineError`.
    """

    async def one(position: int) -> tuple[int, float, float]:
        beginning = token_ids[:position].astype(np.int32)
        generation = await engine.generate(GenerationRequest(f"probe{position}", beginning, 1, temperature))
        if not len(generation.token_ids):
            raise EngineError(f"the engine aborted the probe after {position} tokens")
        score = await engine.score(np.concatenate([beginning, generation.token_ids]))
        return int(generation.token_ids[0]), float(generation.logprobs[0]), float(score[-1])

    positions = probe_positions(len(token_ids))
    sampled, reported, plain = zip(*await asyncio.gather(*map(one, positions)), strict=True)
    return SampledProbe(
        np.asarray(positions, np.int32),
        np.asarray(sampled, np.int32),
        np.asarray(reported, np.float32),
        np.asarray(plain, np.float32),
    )
