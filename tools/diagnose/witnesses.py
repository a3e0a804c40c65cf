"""Record what a real engine and a real learner compute of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from r3async.config import Config, ConfigError, ParallelConfig
from r3async.data.models import EXPERT_BIAS_SUFFIXES
from r3async.learner import LearnerError
from r3async.rollout.activations import ActivationRecorder
from r3async.rollout.engine import GenerationRequest
from r3async.weights.version_store import VersionStore

from .judge import SampledTokens, StageOutputs

PROMPT_TOKENS = 64
ANSWER_TOKENS = 16
"""Tokens of the prompt, and of the engine's answer. They are few, because all activations
of each are kept."""
INSTALL_TIMEOUT_SECONDS = 300.0


class EngineOutputs(NamedTuple):
    outputs: StageOutputs
    tokens: np.ndarray
    """int32 `[T]`: the prompt and the tokens that the engine sampled after it."""


def to_single_rank(config: Config) -> Config:
    """Return the configuration for one rank without training-only parts, and for an engine with
    observable stages."""
    if config.generator.engine != "vllm" or config.learner.backend == "scripted":
        raise ConfigError(
            "r3async diagnose needs vLLM and a learner with a model: neither generator.engine nor "
            "learner.backend may be scripted"
        )
    replace = msgspec.structs.replace
    args = {**config.generator.engine_args, "enforce_eager": True}
    config = replace(config, generator=replace(config.generator, concurrency=4, engine_args=args))
    config.algorithm.reference_kl.coef = 0.0  # otherwise a copy of the start model would be kept
    return replace(config, learner=replace(config.learner, parallel=ParallelConfig()))


def observe_learner(
    learner: Any, tokens: np.ndarray, stale_tensors: list[str], config: Config
) -> StageOutputs:
    """Record the stages and log-probs of the learner. Raises `LearnerError`.

    Args:
        stale_tensors: The tensors noted in `StageOutputs`.
    """
    stages = ActivationRecorder(
        learner.model.causal_lm if config.learner.backend == "torch" else learner.model
    )
    try:
        logprobs = learner.score_sequence(tokens)
    finally:
        seen = stages.finish_recording()
    return StageOutputs(
        "learner",
        torch.from_numpy(tokens.astype(np.int64)),
        seen,
        torch.from_numpy(logprobs),
        stages.dtype,
        config.learner.dtype,
        stale_tensors,
    )


def find_changed_tensors(tensors: Mapping[str, Tensor], directory: Path, dtype: str) -> list[str]:
    """Return the tensors of a learner that differ in any bit from those of the files in `dtype`."""
    from r3async.learner.model import open_model_files

    files = open_model_files(directory)
    found = []
    for name, tensor in tensors.items():
        if name not in files:
            continue
        written = files[name].get_tensor(name)
        kept = tensor.dtype if name.endswith(EXPERT_BIAS_SUFFIXES) else getattr(torch, dtype)
        if not torch.equal(written.to(kept), tensor.cpu().to(kept)):
            found.append(name)
    if not any(name in files for name in tensors):
        raise LearnerError(f"{directory}: none of its tensors has a name that the learner gives")
    return found


async def observe_engine(
    engine: Any,
    config: Config,
    tensors: Mapping[str, Tensor],
    prompt: np.ndarray,
    scratch: Path,
    *,
    print_line: Callable[[str], object] = lambda line: None,
    carried: Sequence[str] = (),
) -> EngineOutputs:
    """Record the stages, log-probs, samples and stale tensors of a started engine.

    The engine gets other weights before `tensors`, so that a tensor that is not
    delivered is noticed.

    Raises `EngineError` or `WeightError`. The engine must be restarted afterwards.
    """
    dtype = getattr(torch, config.generator.dtype)
    temperature = config.episode.temperature
    version = engine.version
    with VersionStore(scratch / "published") as publisher:
        print_line("other weights in vLLM, then these")
        # The elements of every tensor are reversed: no value is out of range, and none
        # stays in its place.
        others = {name: tensor.flip(tuple(range(tensor.ndim))) for name, tensor in tensors.items()}
        manifest = msgspec.structs.replace(
            publisher.write_tensors(version + 1, others, dtype), carried=tuple(carried)
        )
        await engine.install_version(manifest, INSTALL_TIMEOUT_SECONDS)
        # Its keys and values stay in the prefix cache.
        await engine.generate(GenerationRequest("before", prompt, 1, temperature))
        await engine.count_stale_cached_tokens(prompt)
        manifest = msgspec.structs.replace(
            publisher.write_tensors(version + 2, tensors, dtype), carried=tuple(carried)
        )
        await engine.install_version(manifest, INSTALL_TIMEOUT_SECONDS)
        cached = await engine.count_stale_cached_tokens(prompt)
        print_line("what vLLM computes")
        answer = await engine.generate(
            GenerationRequest("sampled", prompt, ANSWER_TOKENS, temperature)
        )
        tokens = np.concatenate([prompt, answer.token_ids]).astype(np.int32)
        path = scratch / f"engine-{version + 2}.safetensors"
        logprobs, computed = await engine.record_activations(tokens, path)
        stale = [
            each.tensor
            for each in await engine.find_weight_differences(manifest, INSTALL_TIMEOUT_SECONDS)
        ]
    routes = answer.routed_experts
    sampled = SampledTokens(
        torch.from_numpy(answer.logprobs.copy()),
        temperature,
        cached,
        None if routes is None or not len(routes) else torch.from_numpy(routes.astype(np.int64)),
    )
    witness = StageOutputs(
        "engine",
        torch.from_numpy(tokens.astype(np.int64)),
        load_file(path),
        torch.from_numpy(logprobs.copy()),
        computed,
        config.generator.dtype,
        stale,
        sampled,
    )
    return EngineOutputs(witness, tokens)
