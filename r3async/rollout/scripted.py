"""An engine without a model, for tests and for rehearsing how runs fail
(`generator.engine = "scripted"`).

Answers come from a script, everything else from hashes. A token's log-prob and routes depend only
on its position, the version that sampled (or fed) it and the token itself: two engines agree, and a
test can compute the expected value of any number (`scripted_logprobs`, `scripted_route_rows`). With
weights of the scripted learner, a log-prob depends on the weights instead of their version number,
so that engine and learner can be compared as with a real model.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from r3async.data.model_shape import RoutingShape, read_moe_layers
from r3async.data.routes import route_dtype
from r3async.data.safetensors_header import decode_safetensors_header
from r3async.data.supports import SupportSets
from r3async.data.versions import VersionSpanRecorder, expand_version_spans
from r3async.rollout.engine import (
    EngineError,
    EngineLostError,
    Generation,
    GenerationRequest,
    InstallReport,
)
from r3async.untrusted import decode_python_json
from r3async.weights.manifest import TensorMismatch, WeightError, WeightManifest
from r3async.world import Files, World
from r3async.world.real import REAL_WORLD

AnswerScript = Callable[[GenerationRequest, int], Sequence[int]] | Sequence[Sequence[int]]
"""Function that returns the answer to a request, given the index of the call; or a table of
answers, which repeats."""


DIGEST_TENSOR = "scripted.digest"
"""Name of the scripted learner's weight tensor, whose checksum the engine reads from
the version's file."""

UINT32_MASK = 0xFFFFFFFF

LETTER_TOKEN_IDS = range(97, 123)
"""Token ids that exist in any vocabulary; a byte tokenizer decodes them as a to z."""

SCRIPTED_ROUTING = RoutingShape(layers=2, top_k=2, num_experts=8)


class _RunningCall:
    """A call that is being answered, with at most `token_count` tokens."""

    def __init__(self, version: int, token_count: int):
        self.spans = VersionSpanRecorder(version)
        self.token_count = token_count
        self.version = version
        self.sampled_count = 0
        self.prompt_version: int | None = None
        """Version under which the prompt was fed, which is the version of the first token."""
        self.started_at = self.duration_seconds = 0.0
        self.wake_event = asyncio.Event()

    def stamp_version(self, version: int) -> None:
        """Record that the next token is sampled by that version."""
        if version != self.version:
            self.version = version
            self.spans.stamp_version(self.sampled_count, version)

    def advance_to(self, now: float) -> None:
        """Update the number of tokens sampled by `now`, in an answer that takes
        `duration_seconds`."""
        share = (
            min(1.0, (now - self.started_at) / self.duration_seconds)
            if self.duration_seconds > 0
            else 1.0
        )
        self.sampled_count = max(self.sampled_count, int(share * self.token_count + 1e-6))
        if self.sampled_count and self.prompt_version is None:
            self.prompt_version = self.version


class ScriptedEngine:
    """An engine that answers from a script; see `Engine` for the contracts of its methods.

    An answer is cut at the first stop token (which it keeps) and at `max_tokens`; one that runs out
    without a stop token ends as if its last token were one. A version's file is compared with its
    manifest, if it is the scripted learner's.

    A test can hold back or fail what it replaces: `before_token`, which is awaited before each
    token, and `before_install`.

    Args:
        token_seconds: Seconds per token. If not 0, the engine waits once for the whole answer, and
            not for `before_token`.
        install_seconds: Seconds that weights take to install, at most: the first ones take anything
            up to that, later ones mostly much less.
        returned_routes: The share of the routes that is returned.
    """

    def __init__(
        self,
        script: AnswerScript,
        *,
        routing: RoutingShape | None = SCRIPTED_ROUTING,
        token_seconds: float = 0.0,
        install_seconds: float = 0.0,
        returned_routes: Literal["all", "half", "none"] = "all",
        keep_requests: bool = True,
        world: World = REAL_WORLD,
    ):
        self.version = -1
        self.routing = routing
        self.requests: list[GenerationRequest] = []
        """All requests in the order of the calls; empty unless `keep_requests`."""
        self._keep_requests = keep_requests
        self._request_count = 0
        self.installed_versions: list[int] = []
        """Versions in the order of their installation."""
        self._weights_keys: dict[int, int] = {}
        """Key of the weights of each version: the checksum that stands for its
        number in log-probs."""
        self._script = script
        self._world = world
        self._clock = world.clock.monotonic
        self._token_seconds = token_seconds
        self._install_seconds = install_seconds
        self._install_count = 0
        self._returned_routes = returned_routes
        self._running_calls: dict[str, list[_RunningCall]] = {}
        self._aborted_ids: set[str] = set()
        self._install_lock = asyncio.Lock()
        self._is_started = False
        self.generated_tokens = 0
        self._pause_seconds = 0.0

    async def start(self) -> None:
        self._is_started = True

    async def generate(self, request: GenerationRequest) -> Generation:
        self._require_started()
        answer, stop_reason = self._script_answer(request)
        call = _RunningCall(self.version, len(answer))
        self._running_calls.setdefault(request.request_id, []).append(call)
        try:
            await (
                self._wait_full_answer(request, call)
                if self._token_seconds
                else self._sample_tokens(request, call)
            )
            if request.request_id in self._aborted_ids:
                stop_reason = "abort"
        finally:
            self._remove_call(request.request_id, call)
        sampled = call.sampled_count
        prompt_version = call.prompt_version
        tokens = np.asarray(answer[:sampled], np.int32)
        version_spans = call.spans.finish_spans(sampled)
        versions = expand_version_spans(version_spans, sampled)
        first = len(request.prompt_ids)
        routes_from = request.resolve_routes_from(
            call.version if prompt_version is None else prompt_version
        )
        self.generated_tokens += sampled
        routes = self._derive_routes(request, tokens, versions, prompt_version, routes_from)
        return Generation(
            token_ids=tokens,
            logprobs=self._derive_logprobs(np.arange(first, first + sampled), versions, tokens)
            / (request.temperature or 1.0),
            version_spans=version_spans,
            routed_experts=routes,
            routed_weights=scripted_gates(routes)
            if routes is not None and self.routing is not None and self.routing.has_gates
            else None,
            routes_from=routes_from,
            stop_reason=stop_reason,
            supports=scripted_supports(tokens) if request.needs_sampling_mask else None,
        )

    async def _sample_tokens(self, request: GenerationRequest, call: _RunningCall) -> None:
        """Sample token by token."""
        await asyncio.sleep(0)
        while call.sampled_count < call.token_count:
            await self.before_token()
            await self._wait_for_install()
            self._require_started()
            if request.request_id in self._aborted_ids:
                return
            call.stamp_version(self.version)
            call.prompt_version = (
                self.version if call.prompt_version is None else call.prompt_version
            )
            call.sampled_count += 1

    async def _wait_full_answer(self, request: GenerationRequest, call: _RunningCall) -> None:
        """Wait once for the whole answer. An installation meanwhile prolongs it and splits it into
        several versions."""
        await self._wait_for_install()
        self._require_started()
        call.stamp_version(self.version)
        call.started_at = self._clock()
        call.duration_seconds = self._token_seconds * call.token_count
        while (
            left := call.started_at + call.duration_seconds - self._clock()
        ) > 1e-9 and request.request_id not in self._aborted_ids:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await call.wake_event.wait()
            await self._wait_for_install()
            self._require_started()
        call.advance_to(self._clock())

    async def before_token(self) -> None:
        """Return when the next token may be sampled."""

    async def before_install(self, manifest: WeightManifest) -> None:
        """Take the time that the weights take to install. What it raises is the installation's
        failure."""
        if not self._install_seconds:
            return
        key = zlib.crc32(self._world.unique_id().encode())
        share = scripted_hash(key, manifest.version, 0) / 2**32
        if self._install_count:
            share = share**3
        self._install_count += 1
        await asyncio.sleep(self._install_seconds * share)

    async def _wait_for_install(self) -> None:
        """Wait until no weights are being installed: nothing is produced while they change."""
        if self._install_lock.locked():
            async with self._install_lock:
                pass

    @property
    def _running_count(self) -> int:
        return sum(map(len, self._running_calls.values()))

    def _derive_logprobs(
        self, positions: np.ndarray, versions: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        keys = [
            self._weights_keys.get(version, version) & UINT32_MASK for version in versions.tolist()
        ]
        return scripted_logprobs(positions, np.asarray(keys, np.int64), tokens)

    async def abort_request(self, request_id: str) -> None:
        """Make running calls of that id return what they have, before their next token."""
        for call in self._running_calls.get(request_id, ()):
            self._aborted_ids.add(request_id)
            call.wake_event.set()

    async def install_version(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        self._require_started()
        async with self._install_lock:
            if manifest.version < self.version:
                raise EngineError(
                    f"version {manifest.version} is older than the installed version {self.version}"
                )
            started = self._clock()
            try:
                async with asyncio.timeout(timeout):
                    await self.before_install(manifest)
                if DIGEST_TENSOR in manifest.tensors:
                    self._weights_keys[manifest.version] = self._read_checked_key(manifest)
            except Exception as error:
                self._is_started = False
                raise EngineError(
                    f"installing version {manifest.version} failed: {error!r}"
                ) from error
            seconds = self._clock() - started
            self._apply_version(manifest, started, seconds)
            return InstallReport(manifest.version, update_seconds=seconds, pause_seconds=seconds)

    def _read_checked_key(self, manifest: WeightManifest) -> int:
        """Return the key of the weights in the version's file.

        Raises `WeightError` if it differs from the manifest's.
        """
        key = read_weights_key(Path(manifest.path), self._world.files)
        if key != manifest.tensors[DIGEST_TENSOR].checksum:
            raise WeightError(
                f"{manifest.path}: tensor {DIGEST_TENSOR!r} is corrupt: its checksum differs from "
                "the published one"
            )
        return key

    def _apply_version(self, manifest: WeightManifest, started_at: float, seconds: float) -> None:
        self.version = manifest.version
        self.installed_versions.append(manifest.version)
        self._pause_seconds += seconds
        for calls in self._running_calls.values() if self._token_seconds else ():
            for call in calls:
                if call.duration_seconds:  # else it has not begun
                    call.advance_to(started_at)
                    call.stamp_version(manifest.version)
                    call.started_at += seconds

    async def score_tokens(self, token_ids: np.ndarray) -> np.ndarray:
        self._require_started()
        await asyncio.sleep(0)
        at = np.arange(1, len(token_ids))
        return self._derive_logprobs(at, np.full(len(at), self.version), np.asarray(token_ids)[1:])

    async def count_stale_cached_tokens(self, token_ids: np.ndarray) -> int:
        return 0

    async def find_weight_differences(
        self, manifest: WeightManifest, timeout: float
    ) -> list[TensorMismatch]:
        return []

    def collect_stats(self) -> dict[str, float]:
        return {
            "generated_tokens": self.generated_tokens,
            "running": self._running_count,
            "pause_seconds": self._pause_seconds,
        }

    async def stop(self) -> None:
        self.lose_process()

    def lose_process(self) -> None:
        """End the engine, as if its process had ended: running and later calls raise
        `EngineLostError`."""
        self._is_started = False
        for calls in self._running_calls.values():
            for call in calls:
                call.wake_event.set()

    def _require_started(self) -> None:
        if not self._is_started:
            raise EngineLostError("the engine is not running")

    def _remove_call(self, request_id: str, call: _RunningCall) -> None:
        self._running_calls[request_id].remove(call)
        if not self._running_calls[request_id]:
            del self._running_calls[request_id]
            self._aborted_ids.discard(request_id)

    def _script_answer(self, request: GenerationRequest) -> tuple[list[int], str]:
        index = self._request_count
        self._request_count += 1
        if self._keep_requests:
            self.requests.append(request)
        full = (
            self._script(request, index)
            if callable(self._script)
            else self._script[index % len(self._script)]
        )
        answer = []
        for token in full[: request.max_tokens]:
            answer.append(int(token))
            if token in request.stop_token_ids:
                return answer, "stop"
        return answer, "stop" if len(full) < request.max_tokens else "length"

    def _derive_routes(
        self,
        request: GenerationRequest,
        tokens: np.ndarray,
        versions: np.ndarray,
        prompt_version: int | None,
        first: int,
    ) -> np.ndarray | None:
        if self.routing is None or self._returned_routes == "none":
            return None
        if prompt_version is None:
            shape = (0, self.routing.layers, self.routing.top_k)
            return np.empty(shape, route_dtype(self.routing.num_experts))
        # A token is fed by the step that samples the next one, under that step's version.
        fed = np.concatenate([request.prompt_ids, tokens[:-1]])[first:]
        fed_by = np.concatenate([np.full(len(request.prompt_ids), prompt_version), versions[1:]])[
            first:
        ]
        rows = scripted_route_rows(first + np.arange(len(fed)), fed_by, fed, self.routing)
        if self._returned_routes == "half":
            rows = rows[: len(rows) // 2]
        return rows.astype(route_dtype(self.routing.num_experts))


def read_weights_key(path: Path, files: Files) -> int:
    """Return the checksum of the scripted learner's weights in the file of a version.
    Raises `WeightError`."""
    try:
        with files.open(path) as file:
            content = file.map_bytes()
            found, begin = decode_safetensors_header(content)
            start, stop = found[DIGEST_TENSOR].data_offsets
            return xxhash.xxh3_64_intdigest(content[begin + start : begin + stop])
    except (OSError, ValueError, KeyError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from error


def build_scripted_engine(
    model_path: str,
    world: World = REAL_WORLD,
    token_seconds: float = 0.0,
    install_seconds: float = 0.0,
    *,
    has_gates: bool = False,
    **unknown: Any,
) -> ScriptedEngine:
    """Return an engine that answers in pseudo-random letters, with routes of the model's geometry.

    The same call of the same episode has the same answer, on every generator and at every attempt.
    Raises `ValueError` for `unknown` arguments.

    See `ScriptedEngine` for `token_seconds` and `install_seconds`.
    """
    if unknown:
        raise ValueError(
            f"`generator.engine_args` has {', '.join(map(repr, unknown))}: the scripted engine "
            "knows `token_seconds` and `install_seconds` only"
        )
    routing, _ = read_moe_layers(
        decode_python_json((Path(model_path) / "config.json").read_bytes())
    )
    if routing is not None and has_gates:
        routing = msgspec.structs.replace(routing, has_gates=True)
    return ScriptedEngine(
        lambda request, index: script_letters(request, zlib.crc32(request.request_id.encode())),
        routing=routing,
        token_seconds=token_seconds,
        install_seconds=install_seconds,
        keep_requests=False,
        world=world,
    )


def script_letters(request: GenerationRequest, seed: int) -> Sequence[int]:
    """Return pseudo-random letters, at least one and at most as many as fit, then a stop
    token if it fits.

    Equal `seed`s give equal letters.
    """
    length = 1 + scripted_hash(0, seed, len(request.prompt_ids)) % request.max_tokens
    letters = [
        LETTER_TOKEN_IDS[scripted_hash(i, seed, 1) % len(LETTER_TOKEN_IDS)] for i in range(length)
    ]
    return [*letters, *request.stop_token_ids[:1]]


def scripted_logprobs(
    positions: np.ndarray, versions: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Return the log-probs, float32 `[n]` in (-4, -0.01), of `tokens` sampled at
    `positions` by `versions`.

    Positions count prompt and answer together. With the scripted learner's weights, their checksum
    stands for the version.
    """
    return (-0.01 - 3.98 * (_hash_tokens(positions, versions, tokens) / 2**32)).astype(np.float32)


def scripted_supports(tokens: np.ndarray) -> SupportSets:
    """Return supports in which each token and the one before it, by token id, could be sampled."""
    ids = np.stack([np.maximum(tokens - 1, 0), np.maximum(tokens, 1)], axis=1)
    return SupportSets.from_id_lists(ids.reshape(-1), np.arange(0, ids.size + 1, 2))


def scripted_route_rows(
    positions: np.ndarray, versions: np.ndarray, tokens: np.ndarray, shape: RoutingShape
) -> np.ndarray:
    """Return the distinct experts, int64 `[n, layers, top_k]`, of `tokens` fed at `positions`
    under `versions`."""
    seeds = (_hash_tokens(positions, versions, tokens) >> 8).astype(np.int64)
    return (
        seeds[:, None, None] + 5 * np.arange(shape.layers)[:, None] + np.arange(shape.top_k)
    ) % shape.num_experts


def scripted_gates(rows: np.ndarray) -> np.ndarray:
    """Return the gates of routes `rows`, float32 of their shape: the larger an id, the larger."""
    weights = rows.astype(np.float32) + 1
    return weights / weights.sum(axis=2, keepdims=True)


def scripted_hash(position: int, version: int, token: int) -> int:
    """Return a 32-bit hash that is the same in every process, by the finaliser of MurmurHash3."""
    return _mix_bits(position * 0x9E3779B1 ^ (version + 2) * 0x85EBCA6B ^ token * 0xC2B2AE35)


def _hash_tokens(positions: np.ndarray, versions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the `scripted_hash` of `[n]` tokens; integers wrap as they do in 32 bits."""
    p, v, t = (np.asarray(numbers).astype(np.uint64) for numbers in (positions, versions, tokens))
    return _mix_bits(p * 0x9E3779B1 ^ (v + 2) * 0x85EBCA6B ^ t * 0xC2B2AE35)


def _mix_bits(x: Any) -> Any:
    x = x & UINT32_MASK
    x = (x ^ x >> 16) * 0x85EBCA6B & UINT32_MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & UINT32_MASK
    return x ^ x >> 16
