"""An engine without a model, for tests and for rehearsing how runs fail (`generator.engine = "scripted"`).

Answers come from a script, everything else from hashes. A token's log-prob and routes depend on its position, the version that
sampled (or fed) it and the token itself, and on nothing else: two engines agree, and a test can say what any number must be
(`scripted_logprob`, `scripted_routes`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import numpy as np

from r3async.engines.base import EngineError, Generation, GenerationRequest, InstallReport, RoutingShape
from r3async.routing import route_dtype
from r3async.versions import SpanRecorder, expand
from r3async.weights.manifest import Difference, WeightManifest

Script = Callable[[GenerationRequest, int], Sequence[int]] | Sequence[Sequence[int]]
"""The answer to call number `call_index`, or a table of answers that is begun again at its end."""


SCRIPTED_ROUTING = RoutingShape(layers=2, top_k=2, num_experts=8)


async def _no_pause() -> None:
    pass


class ScriptedEngine:
    """Answers as scripted; see `Engine` for what the methods promise.

    An answer is cut at the first stop token (which it keeps) and at `max_tokens`; one that runs out without a stop
    token ends as if its last token were one. `pace` is awaited before each token: a test that holds it back can
    install new weights, abort or cancel in the middle of an answer. `before_install` is awaited while installing, and
    what it raises is the installation's failure. `rows` is how many of the routes come back.
    """

    def __init__(
        self,
        script: Script,
        *,
        routing: RoutingShape | None = SCRIPTED_ROUTING,
        pace: Callable[[], Awaitable[None]] | None = None,
        before_install: Callable[[WeightManifest], Awaitable[None]] | None = None,
        rows: Literal["all", "half", "none"] = "all",
        keep_calls: bool = True,
    ):
        self.version = -1
        self.routing = routing
        self.calls: list[GenerationRequest] = []
        """Every request, in the order of the calls; none unless `keep_calls`."""
        self._keep_calls, self._asked = keep_calls, 0
        self.installed: list[int] = []
        """Versions in the order of their installation."""
        self._script = script
        self._pace = pace
        self._before_install = before_install or (lambda manifest: _no_pause())
        self._rows = rows
        self._running: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._installing = asyncio.Lock()
        self._started = False
        self.generated_tokens = 0
        self._paused = 0.0

    async def start(self) -> None:
        self._started = True

    async def generate(self, request: GenerationRequest) -> Generation:
        self._require_started()
        answer, stop_reason = self._answer(request)
        spans = SpanRecorder(self.version)
        version, sampled = self.version, 0
        prompt_version: int | None = None
        self._running[request.request_id] = self._running.get(request.request_id, 0) + 1
        try:
            if self._pace is None:
                await asyncio.sleep(0)
            while sampled < len(answer):
                if self._pace is not None:
                    await self._pace()
                if self._installing.locked():
                    async with self._installing:  # Nothing is produced while weights change.
                        pass
                self._require_started()
                if request.request_id in self._aborted:
                    stop_reason = "abort"
                    break
                if self.version != version:
                    version = self.version
                    spans.stamp(sampled, version)
                prompt_version = version if prompt_version is None else prompt_version
                sampled += 1
        finally:
            self._leave(request.request_id)
        tokens = np.asarray(answer[:sampled], np.int32)
        version_spans = spans.finish(sampled)
        versions = expand(version_spans, sampled)
        first = len(request.prompt_ids)
        routes_from = request.routes_wanted(version if prompt_version is None else prompt_version)
        self.generated_tokens += sampled
        return Generation(
            token_ids=tokens,
            logprobs=np.asarray(
                [
                    scripted_logprob(first + i, int(v), int(t))
                    for i, (v, t) in enumerate(zip(versions, tokens, strict=True))
                ],
                np.float32,
            ),
            version_spans=version_spans,
            routed_experts=self._routes(request, tokens, versions, prompt_version, routes_from),
            routes_from=routes_from,
            stop_reason=stop_reason,
        )

    async def abort(self, request_id: str) -> None:
        """Running calls of that id return what they have, before their next token."""
        if request_id in self._running:
            self._aborted.add(request_id)

    async def install(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        self._require_started()
        async with self._installing:
            if manifest.version < self.version:
                raise EngineError(f"version {manifest.version} is older than the installed version {self.version}")
            started = time.perf_counter()
            try:
                async with asyncio.timeout(timeout):
                    await self._before_install(manifest)
            except Exception as error:
                self._started = False
                raise EngineError(f"installing version {manifest.version} failed: {error!r}") from error
            self.version = manifest.version
            self.installed.append(manifest.version)
            seconds = time.perf_counter() - started
            self._paused += seconds
            return InstallReport(manifest.version, update_seconds=seconds, pause_seconds=seconds)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        self._require_started()
        await asyncio.sleep(0)
        return np.asarray([scripted_logprob(i, self.version, int(t)) for i, t in enumerate(token_ids) if i], np.float32)

    async def cached_from_older(self, token_ids: np.ndarray) -> int:
        return 0

    async def differences(self, manifest: WeightManifest, timeout: float) -> list[Difference]:
        return []

    def stats(self) -> dict[str, float]:
        return {
            "generated_tokens": self.generated_tokens,
            "running": sum(self._running.values()),
            "pause_seconds": self._paused,
        }

    async def stop(self) -> None:
        """Running and later calls raise `EngineError`."""
        self._started = False

    def _require_started(self) -> None:
        if not self._started:
            raise EngineError("the engine is not running")

    def _leave(self, request_id: str) -> None:
        self._running[request_id] -= 1
        if not self._running[request_id]:
            del self._running[request_id]
            self._aborted.discard(request_id)

    def _answer(self, request: GenerationRequest) -> tuple[list[int], str]:
        index = self._asked
        self._asked += 1
        if self._keep_calls:
            self.calls.append(request)
        full = self._script(request, index) if callable(self._script) else self._script[index % len(self._script)]
        answer = []
        for token in full[: request.max_tokens]:
            answer.append(int(token))
            if token in request.stop_token_ids:
                return answer, "stop"
        return answer, "stop" if len(full) < request.max_tokens else "length"

    def _routes(
        self,
        request: GenerationRequest,
        tokens: np.ndarray,
        versions: np.ndarray,
        prompt_version: int | None,
        first: int,
    ) -> np.ndarray | None:
        if self.routing is None or self._rows == "none":
            return None
        if prompt_version is None:
            shape = (0, self.routing.layers, self.routing.top_k)
            return np.empty(shape, route_dtype(self.routing.num_experts))
        # A token is fed by the step that samples the next one, under that step's version.
        fed = np.concatenate([request.prompt_ids, tokens[:-1]])[first:]
        fed_by = np.concatenate([np.full(len(request.prompt_ids), prompt_version), versions[1:]])[first:]
        rows = [
            scripted_routes(first + i, int(v), int(t), self.routing)
            for i, (v, t) in enumerate(zip(fed_by, fed, strict=True))
        ]
        if self._rows == "half":
            rows = rows[: len(rows) // 2]
        return np.asarray(rows, route_dtype(self.routing.num_experts)).reshape(
            -1, self.routing.layers, self.routing.top_k
        )


def scripted_logprob(position: int, version: int, token: int) -> float:
    """Log-prob of `token` sampled at `position` (in prompt and answer together) by `version`: in (-4, -0.01)."""
    return -0.01 - 3.98 * (scripted_hash(position, version, token) / 2**32)


def scripted_routes(position: int, version: int, token: int, shape: RoutingShape) -> list[list[int]]:
    """`[layers][top_k]` distinct experts of `token` fed at `position` under `version`."""
    seed = scripted_hash(position, version, token) >> 8
    return [
        [(seed + 5 * layer + choice) % shape.num_experts for choice in range(shape.top_k)]
        for layer in range(shape.layers)
    ]


def scripted_hash(position: int, version: int, token: int) -> int:
    """32 bits, the same in every process; the finaliser of MurmurHash3."""
    x = (position * 0x9E3779B1 ^ (version + 2) * 0x85EBCA6B ^ token * 0xC2B2AE35) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16
