"""Whether an engine that was given weights answers like the learner did with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from r3async.actors.process import RunFailed
from r3async.config import Config
from r3async.weights.probe import (
    ProbeResult,
    compare_probe,
    compare_sampled_probe,
    describe_mismatches,
    make_probe_pair,
    resolve_probe_tolerance,
)


class ProbeFailed(RunFailed):
    """An engine does not answer like the learner."""


async def probe_generator(
    call: Callable[..., Awaitable[Any]],
    generator: str,
    version: int,
    tokens: Sequence[int],
    scores: np.ndarray,
    config: Config,
    events: Any,
) -> None:
    """Does a generator's engine think, and sample, like the learner did with the same weights?

    Compare the engine of `generator`, which `call(method, *args)` reaches, with the learner's `scores` `[2, 2, T - 1]` of
    `make_probe_pair(tokens)`: at temperature 1 and at the run's. A second text is asked for only where the first one differs
    and the engine has what was published: two experts whose scores are equal up to rounding make one text differ, and wrong
    weights both. Raises `ProbeFailed` with what differs."""
    if stale := await call("count_stale_cached_tokens", tokens):
        raise ProbeFailed(
            f"{generator}: a new request under version {version} took {stale} positions from a prefix cache that older "
            "weights made. Do not train on this engine."
        )
    examine = (
        f"`r3async diagnose {config.name or 'latest'}` names the layer and the likely cause, when the run has ended."
    )
    temperature, tolerance = config.episode.temperature, resolve_probe_tolerance(config)
    texts = [(text.tolist(), learner) for text, learner in zip(make_probe_pair(tokens), scores, strict=True)]

    async def scored(text: list[int], learner: np.ndarray) -> ProbeResult:
        return compare_probe(text, learner[0], await call("score_tokens", text), tolerance)

    async def sampled(text: list[int], learner: np.ndarray) -> ProbeResult:
        return compare_sampled_probe(await call("sample_probe", text), learner, temperature, tolerance)

    def not_the_learners(result: ProbeResult) -> str:
        return f"version {version} of the weights in {generator} does not answer like the learner's: {result.describe_scored()}"

    def not_the_samples(result: ProbeResult) -> str:
        reports = f"{generator} under version {version} reports other log-probs than it samples with"
        return f"{reports}: {result.describe_sampled(temperature)}"

    for event, compared, problem in (("probe", scored, not_the_learners), ("probe_sampled", sampled, not_the_samples)):
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
    """Whether an engine lacks tensors that were published, or may, and which, in words."""
    try:
        found = await ask("find_weight_differences")
    except Exception as error:
        return True, f"Which tensors differ could not be found out: {error}."
    return bool(found), describe_mismatches(found)
