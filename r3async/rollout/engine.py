"""What the episode loop and the actors ask of a rollout engine, and which engine the configuration names."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec
import numpy as np

from r3async.config import Config
from r3async.config.rollout import declare_engine_args
from r3async.data.models import RoutingShape
from r3async.data.supports import SupportSets
from r3async.data.versions import VersionSpan
from r3async.weights.manifest import TensorMismatch, WeightManifest
from r3async.weights.probe import SampledProbe, choose_probe_positions
from r3async.world import World
from r3async.world.real import REAL_WORLD

TENSOR_NAMES_FILE = "tensor-names.json"
"""In a model directory without weights: the names of its tensors, a list. An engine then begins with made-up weights."""


class EngineError(RuntimeError):
    """The engine failed or returned something that cannot be trained on."""


class CorruptWeightsError(EngineError):
    """A file is not what was published. The engine has not begun to load it, and is as it was."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """Continue `prompt_ids` (int32 `[P]`) by at most `max_tokens` tokens sampled at `temperature`.

    `routes_from`: first position whose routes are wanted; earlier rows are known already and are not sent again.
    `routes_version`: if not None, the rows known are those of a call that entered under this version. An engine that takes
    the request in under another version computes the prompt again, and returns its routes from position 0.
    `top_p`, `top_k`, `min_p`: see `EpisodeConfig`. `needs_sampling_mask`: which tokens could be sampled is wanted, of an
    engine that was built to record it. `stop_strings`: strings, of which the first that the answer has ends it, with the
    token that completes it.
    """

    request_id: str
    prompt_ids: np.ndarray
    max_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    routes_from: int = 0
    routes_version: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    needs_sampling_mask: bool = False
    stop_strings: tuple[str, ...] = ()

    def resolve_routes_from(self, version: int) -> int:
        """First position whose routes a call that enters under weights `version` has to return."""
        return self.routes_from if self.routes_version in (None, version) else 0


class Generation(msgspec.Struct, frozen=True):
    """What one call sampled.

    `token_ids` int32 `[n]`; `logprobs` float32 `[n]` of the distribution that was sampled from; `version_spans` cover
    `0..n`. `routed_experts` is `[m, layers, top_k]` for positions `routes_from ..` of prompt and answer (None if the
    engine has none): the last sampled token has not been fed yet, so at most `P + n - 1 - routes_from` rows; after an
    abort there may be fewer. `routes_from` is what the request wanted (`resolve_routes_from`), or lower if the engine cannot
    leave known rows out. The first span's version is the one that the request entered under. `supports`: of each of
    `token_ids`, if the request asked for one (`needs_sampling_mask`); each token is in its own, and log-probs are of
    distributions over these. `stop_reason`: `stop` (a stop token, which is the last token, or a stop string, which ends in
    it), `length`, or `abort`.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: list[VersionSpan]
    routed_experts: np.ndarray | None
    routes_from: int
    stop_reason: str
    supports: SupportSets | None = None


class InstallReport(msgspec.Struct, frozen=True):
    """`update_seconds`: the whole installation. `pause_seconds`: how long no step was made, from when the engine has confirmed
    that its last one is done until it has confirmed that it goes on; of that `load_seconds` for loading. `fetch_seconds`: until
    the file was on this host; `verify_seconds`: reading and checking it. `drain_seconds`: waiting for running requests."""

    version: int
    update_seconds: float
    pause_seconds: float
    fetch_seconds: float = 0.0
    verify_seconds: float = 0.0
    drain_seconds: float = 0.0
    load_seconds: float = 0.0


class Engine(Protocol):
    """An inference engine that generates while its weights change under it.

    `generate` may run many times at once on one event loop. Cancelling it aborts the request in the engine.
    """

    version: int
    """Version of the installed weights; -1 before the first `install_version`."""
    routing: RoutingShape | None
    """None for a dense model, or when routes are not recorded."""

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation: ...

    async def install_version(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        """Install published weights without aborting running requests. Raises `CorruptWeightsError`, and is as it was; or another
        `EngineError`: then the old version is not to be trusted and the engine must be restarted."""
        ...

    async def score_tokens(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[T - 1]`: log-prob of each token after the first, at temperature 1, without any prefix cache."""
        ...

    async def count_stale_cached_tokens(self, token_ids: np.ndarray) -> int:
        """How many positions of this text a new request would take from a prefix cache that older weights made; has to be 0.

        To be asked once a version, always for the same text: what one version left in the cache, the next must not find.
        """
        ...

    async def find_weight_differences(self, manifest: WeightManifest, timeout: float) -> list[TensorMismatch]:
        """Which tensors the engine does not hold as they were published. If there are any it must be restarted; if there are
        none, what it loads is not at fault, and it continues."""
        ...

    def collect_stats(self) -> dict[str, float]:
        """Counters since `start`: `generated_tokens` and `pause_seconds` among them."""
        ...

    async def stop(self) -> None: ...


def build_engine(config: Config, model_path: str, seed: int, world: World = REAL_WORLD) -> Engine:
    """Not started. `seed`: of what a model samples. Raises `ValueError` for `generator.engine_args` that it does not know."""
    settings = config.generator
    # Each takes what the other does without.
    if settings.engine == "scripted":
        from r3async.rollout.scripted import build_scripted_engine

        return build_scripted_engine(model_path, world, **settings.engine_args)
    from r3async.rollout.vllm.engine import VllmEngine

    return VllmEngine(
        model_path,
        dtype=settings.dtype,
        concurrency=settings.concurrency,
        max_model_len=config.episode.max_total_tokens,
        threads=settings.threads,
        kv_cache_gib=settings.kv_cache_gib,
        on_update=settings.on_update,
        record_sampling_masks=config.episode.needs_sampling_mask,
        engine_args=declare_engine_args(seed=seed) | settings.engine_args,
    )


async def sample_probe(engine: Engine, token_ids: np.ndarray, temperature: float) -> SampledProbe:
    """Sample one token after each of several beginnings of `token_ids` `[T]`, as an episode would, and score it again.

    Raises `EngineError`.
    """

    async def sample_at(position: int) -> tuple[int, float, float]:
        beginning = token_ids[:position].astype(np.int32)
        generation = await engine.generate(GenerationRequest(f"probe{position}", beginning, 1, temperature))
        if not len(generation.token_ids):
            raise EngineError(f"the engine aborted the probe after {position} tokens")
        score = await engine.score_tokens(np.concatenate([beginning, generation.token_ids]))
        return int(generation.token_ids[0]), float(generation.logprobs[0]), float(score[-1])

    positions = choose_probe_positions(len(token_ids))
    sampled, reported, plain = zip(*await asyncio.gather(*map(sample_at, positions)), strict=True)
    return SampledProbe(
        np.asarray(positions, np.int32),
        np.asarray(sampled, np.int32),
        np.asarray(reported, np.float32),
        np.asarray(plain, np.float32),
    )
