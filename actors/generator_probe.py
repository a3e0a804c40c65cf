"""The probe: does an engine with new weights answer like the learner did with them?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.config import Config
from r3async.weights.probe import (
    ProbeResult,
    compare_probe,
    compare_sampled_probe,
    describe_mismatches,
    make_probe_pair,
)

from .process import RunFailed


class ProbeFailed(RunFailed):
    """An engine does not answer like the learner."""


async def probe_generator(
    call: Callable[..., Awaitable[Any]],
    generator: str,
    version: int,
    tokens: Sequence[int],
    scores: np.ndarray,
    tolerance: float,
    config: Config,
    events: Any,
) -> None:
    """Check that a generator's engine scores and samples like the learner did with
    the same weights.

    The second text is scored only if the first one differs and the engine has what was published:
    two experts whose scores are equal up to rounding make one text differ, and wrong weights both.
    Raises `ProbeFailed` with what differs.

    Args:
        call: `call(method, *args)` calls the generator.
        tokens: Tokens of the probe's text.
        scores: `[2, 2, T - 1]`: the learner's scores of `make_probe_pair(tokens)`, at temperature 1
            and at the run's.
        tolerance: Mean difference of log-probs at temperature 1 that passes
            (`resolve_probe_tolerance`).
        events: A structlog logger.
    """
    stale = await call("count_stale_cached_tokens", tokens)
    if stale:
        raise ProbeFailed(
            f"{generator}: a new request under version {version} took {stale} positions from a "
            "prefix cache that older weights made. Do not train on this engine."
        )
    examine = (
        f"`r3async diagnose {config.name or 'latest'}` names the layer that differs first, when "
        "the run has ended."
    )
    temperature = config.episode.temperature
    texts = [
        (text.tolist(), learner)
        for text, learner in zip(make_probe_pair(tokens), scores, strict=True)
    ]

    async def scored(text: list[int], learner: np.ndarray) -> ProbeResult:
        return compare_probe(text, learner[0], await call("score_tokens", text), tolerance)

    async def sampled(text: list[int], learner: np.ndarray) -> ProbeResult:
        return compare_sampled_probe(
            await call("sample_probe", text), learner, temperature, tolerance
        )

    def not_the_learners(result: ProbeResult) -> str:
        return (
            f"version {version} of the weights in {generator} does not answer like the learner's: "
            f"{result.describe_scored()}"
        )

    def not_the_samples(result: ProbeResult) -> str:
        reports = (
            f"{generator} under version {version} reports other log-probs than it samples with"
        )
        return f"{reports}: {result.describe_sampled(temperature)}"

    for event, compared, problem in (
        ("probe", scored, not_the_learners),
        ("probe_sampled", sampled, not_the_samples),
    ):
        result = await compared(*texts[0])
        facts = {"generator": generator, "version": version} | msgspec.structs.asdict(result)
        events.info(event, **facts)
        if result.passed:
            continue
        lacks, named = await _describe_differences(call)
        if lacks or not (await compared(*texts[1])).passed:
            raise ProbeFailed(f"{problem(result)} {named} {examine}")
        events.warning("probe_tie", **facts, differed=event)


async def _describe_differences(ask: Callable[..., Awaitable[Any]]) -> tuple[bool, str]:
    """Return whether an engine lacks published tensors, or may lack some, and which
    they are, in words."""
    try:
        found = await ask("find_weight_differences")
    except Exception as error:
        return True, f"Which tensors differ could not be found out: {error}."
    return bool(found), describe_mismatches(found)
