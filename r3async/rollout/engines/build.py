"""The engine that the configuration names, for a generator."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from r3async.config import Config
from r3async.config.generation import ours
from r3async.data.model_shape import moe_geometry
from r3async.rollout.engines.base import Engine, GenerationRequest
from r3async.rollout.engines.scripted import ScriptedEngine, scripted_hash

LETTERS = range(97, 123)
"""Token ids that any vocabulary has; a byte tokenizer reads them as a to z."""


def build_engine(config: Config, model_path: str, seed: int, clock: Callable[[], float] = time.perf_counter) -> Engine:
    """Not started. `seed`: of what a model samples. Raises `ValueError` for `generator.engine_args` that it does not know."""
    settings = config.generator
    if settings.engine == "scripted":
        return scripted_engine(model_path, clock, **settings.engine_args)
    from r3async.rollout.engines.vllm import VllmEngine  # takes seconds, and the other one does without

    return VllmEngine(
        model_path,
        dtype=settings.dtype,
        concurrency=settings.concurrency,
        max_model_len=config.episode.max_total_tokens,
        threads=settings.threads,
        kv_cache_gib=settings.kv_cache_gib,
        on_update=settings.on_update,
        engine_args=ours(seed=seed) | settings.engine_args,
    )


def scripted_engine(
    model_path: str, clock: Callable[[], float] = time.perf_counter, token_seconds: float = 0.0, **unknown: Any
) -> ScriptedEngine:
    """Answers in letters that nobody thought about, with routes of the model's geometry; `token_seconds` a token. The same call
    of the same episode has the same answer, whoever plays it, and however often."""
    if unknown:
        raise ValueError(
            f"`generator.engine_args` has {', '.join(map(repr, unknown))}: the scripted engine knows `token_seconds` only"
        )
    routing, _ = moe_geometry(json.loads((Path(model_path) / "config.json").read_text()))

    return ScriptedEngine(
        lambda request, index: babble(request, zlib.crc32(request.request_id.encode())),
        routing=routing,
        seconds=(lambda tokens, running: token_seconds * tokens) if token_seconds else None,
        keep_calls=False,
        clock=clock,
    )


def babble(request: GenerationRequest, seed: int) -> Sequence[int]:
    """Letters, at least one and at most as many as fit, with a stop token at the end if it fits; the same for equal `seed`s."""
    length = 1 + scripted_hash(0, seed, len(request.prompt_ids)) % request.max_tokens
    letters = [LETTERS[scripted_hash(i, seed, 1) % len(LETTERS)] for i in range(length)]
    return [*letters, *request.stop_token_ids[:1]]
