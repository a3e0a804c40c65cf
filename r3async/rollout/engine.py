"""The interface of a rollout engine for the episode loop and the actors."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from r3async.data.model_shape import RoutingShape
from r3async.data.supports import SupportSets
from r3async.data.versions import VersionSpan
from r3async.weights.manifest import TensorMismatch, WeightManifest
from r3async.weights.probe import SampledProbe, choose_probe_positions

ENGINE_RETRIES = 2
"""Times in an episode that a call is repeated after the engine failed. Earlier turns are kept."""
TENSOR_NAMES_FILE = "tensor-names.json"
"""File with a list of the model's tensor names, in a model directory without weights. An engine
then starts with dummy weights."""


class EngineError(RuntimeError):
    """The engine failed or returned something that cannot be trained on."""


class EngineLostError(EngineError):
    """The engine has failed for good: every call fails until it is restarted. No
    request is to blame."""


class CorruptWeightsError(EngineError):
    """A file that differs from what was published. The engine has not begun to load it
    and is unchanged."""


class TopTokens(NamedTuple):
    """The most likely tokens in each of n places, and their log-probs: int32 and float32 `[n, k]`,
    most likely first."""

    token_ids: np.ndarray
    logprobs: np.ndarray


class GenerationRequest(msgspec.Struct, frozen=True):
    """A request to continue `prompt_ids` (int32 `[P]`) by at most `max_tokens` tokens sampled
    at `temperature`.

    Attributes:
        routes_from: First position whose routes are wanted; earlier rows are known already and
            are not sent again.
        routes_version: If not None, the known rows come from a call that entered under this weight
            version. An engine that admits the request under another version computes the prompt
            again and returns its routes from position 0.
        top_p: Sampling filter, like `top_k` and `min_p`; see `EpisodeConfig`.
        needs_sampling_mask: True to get the support of each sampled token (the tokens that could
            have been sampled), from an engine that was built to record it.
        stop_strings: Strings that end the answer. The first one that appears ends it, with the
            token that completes it.
        version: The version of adapters to run under, which the engine must hold; by default the
            one that was installed last.
        seed: Seed of this request's sampling; by default it is part of the engine's.
        top_logprobs: Number of most likely tokens wanted in each sampled token's place, at most 20.
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
    version: int | None = None
    seed: int | None = None
    top_logprobs: int = 0

    def resolve_routes_from(self, version: int) -> int:
        """Return the first position whose routes a call that enters under weights
        `version` must return."""
        return self.routes_from if self.routes_version in (None, version) else 0


class Generation(msgspec.Struct, frozen=True):
    """The output of one generation call.

    Attributes:
        token_ids: Sampled tokens, int32 `[n]`.
        logprobs: Their log-probs, float32 `[n]`, under the distribution that they
            were sampled from.
        version_spans: Spans that cover `0..n`. The first span's version is the one under which the
            request entered.
        routed_experts: `[m, layers, top_k]` for positions `routes_from ..` of prompt and answer;
            None if the engine records none. The last sampled token has not been fed yet, so there
            are at most `P + n - 1 - routes_from` rows, and after an abort there may be fewer.
        routed_weights: float32, shaped as `routed_experts`: the gates by which their outputs were
            multiplied; None if the engine records none.
        routes_from: The position that the request wanted (`resolve_routes_from`), or a lower one if
            the engine cannot leave out known rows.
        stop_reason: `stop` (a stop token, which is the last token, or a stop string, which ends in
            it), `length`, or `abort`.
        supports: The support of each of `token_ids`, if the request wanted them
            (`needs_sampling_mask`). Each token is in its own support, and log-probs are of
            distributions over these supports.
        top_tokens: The most likely tokens, if the request wanted them (`top_logprobs`).
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: list[VersionSpan]
    routed_experts: np.ndarray | None
    routes_from: int
    stop_reason: str
    supports: SupportSets | None = None
    top_tokens: TopTokens | None = None
    routed_weights: np.ndarray | None = None


class InstallReport(msgspec.Struct, frozen=True):
    """The timings of one installation of weights.

    Attributes:
        update_seconds: The whole installation.
        pause_seconds: Time without engine steps, from the engine's confirmation that its last step
            is done until its confirmation that it continues.
        fetch_seconds: Time until the file was on this host.
        verify_seconds: Reading and checking the file.
        drain_seconds: Waiting for running requests.
        load_seconds: The part of `pause_seconds` spent loading.
    """

    version: int
    update_seconds: float
    pause_seconds: float
    fetch_seconds: float = 0.0
    verify_seconds: float = 0.0
    drain_seconds: float = 0.0
    load_seconds: float = 0.0


class Engine(Protocol):
    """An inference engine that generates while its weights change under it.

    `generate` may run many times at once on one event loop. Cancelling it aborts the request in
    the engine. It raises `EngineLostError`, for running requests too, once the engine has
    failed for good.
    """

    routing: RoutingShape | None
    """Shape of the routes; None for a dense model, or when routes are not recorded."""

    @property
    def version(self) -> int:
        """Version of the installed weights; -1 before the first `install_version`."""

    async def start(self) -> None: ...

    async def generate(self, request: GenerationRequest) -> Generation: ...

    async def install_version(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        """Install published weights without aborting running requests.

        Raises `CorruptWeightsError`, which leaves the engine unchanged, or another `EngineError`:
        then the old version cannot be trusted either, and the engine must be restarted.
        """
        ...

    async def score_tokens(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-prob of each token after the first, float32 `[T - 1]`.

        They are at temperature 1, without any prefix cache.
        """
        ...

    async def count_stale_cached_tokens(self, token_ids: np.ndarray) -> int:
        """Return how many positions of this text a new request would take from older weights'
        prefix cache; must be 0.

        Call it once per version, always with the same text: the next version must not find what
        this one left in the cache.
        """
        ...

    async def find_weight_differences(
        self, manifest: WeightManifest, timeout: float
    ) -> list[TensorMismatch]:
        """Return the tensors that the engine does not hold as they were published.

        If there are any, the engine must be restarted. If there are none, the loaded weights are
        not at fault and the engine continues.
        """
        ...

    def collect_stats(self) -> dict[str, float]:
        """Return counters since `start`, among them `generated_tokens` and `pause_seconds`."""
        ...

    async def stop(self) -> None: ...


async def sample_probe(engine: Engine, token_ids: np.ndarray, temperature: float) -> SampledProbe:
    """Sample one token after each of several prefixes of `token_ids` `[T]`, as an episode would,
    and score it again.

    Raises `EngineError`.
    """

    async def sample_at(position: int) -> tuple[int, float, float]:
        beginning = token_ids[:position].astype(np.int32)
        generation = await engine.generate(
            GenerationRequest(f"probe{position}", beginning, 1, temperature)
        )
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
