"""Does a generator's engine think, and sample, like the learner did with the same weights?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from actors.deaths import RunFailed
from r3async.config import Config
from r3async.weights.probe import compare_probe, compare_sampled, name_differences, probe_tolerance


async def probe(
    ask: Callable[..., Awaitable[Any]],
    generator: str,
    version: int,
    tokens: Sequence[int],
    scores: np.ndarray,
    config: Config,
    events: Any,
) -> None:
    """Compare the engine of `generator`, which `ask(method, *args)` reaches, with the learner's `scores` `[2, T - 1]` of the text
    `tokens` `[T]`: at temperature 1 and at the run's. Raises `RunFailed` with what differs."""
    if stale := await ask("cached_from_older", tokens):
        raise RunFailed(
            f"{generator}: a new request under version {version} took {stale} positions from a prefix cache that older "
            "weights made. Do not train on this engine."
        )
    result = compare_probe(tokens, scores[0], await ask("score", tokens), probe_tolerance(config))
    events.info("probe", generator=generator, version=version, **msgspec.structs.asdict(result))
    if not result.passed:
        try:
            found = name_differences(await ask("differences"))
        except Exception as error:
            found = f"Which tensors differ could not be found out: {error}."
        raise RunFailed(
            f"version {version} of the weights in {generator} does not answer like the learner's: {result.describe()} {found}"
        )
    temperature = config.episode.temperature
    sampled = compare_sampled(await ask("sample_probe", tokens), scores, temperature, probe_tolerance(config))
    events.info("probe_sampled", generator=generator, version=version, **msgspec.structs.asdict(sampled))
    if not sampled.passed:
        raise RunFailed(
            f"{generator} under version {version} reports other log-probs than it samples with: "
            f"{sampled.describe_sampled(temperature)}"
        )
