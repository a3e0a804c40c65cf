"""An engine without a model, for tests and for rehearsing how runs fail (`generator.engine = "scripted"`).

Answers come from a script, everything else from hashes. A token's log-prob and routes depend on its position, the version that
sampled (or fed) it and the token itself, and on nothing else: two engines agree, and a test can say what any number must be
(`scripted_logprobs`, `scripted_route_rows`). With weights of the scripted learner, a log-prob depends on those in place of their
version's number, so that the two compare as a model's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from r3async.data.container import decode_header
from r3async.data.model_shape import RoutingShape, moe_geometry
from r3async.data.routes import route_dtype
from r3async.data.supports import Supports
from r3async.data.versions import SpanRecorder, expand
from r3async.rollout.engines import EngineError, Generation, GenerationRequest, InstallReport
from r3async.untrusted import decode_python_json
from r3async.weights.manifest import Difference, WeightError, WeightManifest
from r3async.world import Files, World
from r3async.world.real import REAL

Script = Callable[[GenerationRequest, int], Sequence[int]] | Sequence[Sequence[int]]
"""The answer to call number `call_index`, or a table of answers that is begun again at its end."""


DIGEST = "scripted.digest"
"""Tensor of the scripted learner: its weights, of which the engine reads the checksum from the version's file."""

MASK = 0xFFFFFFFF

LETTERS = range(97, 123)
"""Token ids that any vocabulary has; a byte tokenizer reads them as a to z."""

SCRIPTED_ROUTING = RoutingShape(layers=2, top_k=2, num_experts=8)


async def _no_pause() -> None:
    pass


class _Running:
    """A call that is being answered, with at most `tokens` tokens."""

    def __init__(self, version: int, tokens: int):
        self.spans, self.tokens, self.version = SpanRecorder(version), tokens, version
        self.sampled = 0
        self.prompt_version: int | None = None
        """Under which the prompt was fed: that of the first token."""
        self.began = self.seconds = 0.0
        self.woken = asyncio.Event()

    def stamp(self, version: int) -> None:
        """The next token is sampled by that version."""
        if version != self.version:
            self.version = version
            self.spans.stamp(self.sampled, version)

    def advance(self, now: float) -> None:
        """Of an answer that takes `seconds`: what has been sampled by now."""
        share = min(1.0, (now - self.began) / self.seconds) if self.seconds > 0 else 1.0
        self.sampled = max(self.sampled, int(share * self.tokens + 1e-6))
        if self.sampled and self.prompt_version is None:
            self.prompt_version = self.version


class ScriptedEngine:
    """Answers as scripted; see `Engine` for what the methods promise.

    An answer is cut at the first stop token (which it keeps) and at `max_tokens`; one that runs out without a stop
    token ends as if its last token were one. `pace` is awaited before each token: a test that holds it back can
    install new weights, abort or cancel in the middle of an answer. Or `seconds(tokens, running)` gives how long so many tokens
    take while so many calls run: one wait for the whole answer. `before_install` is awaited while installing, and
    what it raises is the installation's failure. Then the version's file is read from `files`, and compared with its manifest,
    if it is the scripted learner's. `rows` is how many of the routes come back. `clock`: in seconds.
    """

    def __init__(
        self,
        script: Script,
        *,
        routing: RoutingShape | None = SCRIPTED_ROUTING,
        pace: Callable[[], Awaitable[None]] | None = None,
        seconds: Callable[[int, int], float] | None = None,
        before_install: Callable[[WeightManifest], Awaitable[None]] | None = None,
        rows: Literal["all", "half", "none"] = "all",
        keep_calls: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        files: Files = REAL.files,
    ):
        self.version = -1
        self.routing = routing
        self.calls: list[GenerationRequest] = []
        """Every request, in the order of the calls; none unless `keep_calls`."""
        self._keep_calls, self._asked = keep_calls, 0
        self.installed: list[int] = []
        """Versions in the order of their installation."""
        self._keys: dict[int, int] = {}
        """By version: what stands for its weights."""
        self._script, self._clock, self._files = script, clock, files
        self._pace, self._seconds = pace, seconds
        self._before_install = before_install or (lambda manifest: _no_pause())
        self._rows = rows
        self._running: dict[str, list[_Running]] = {}
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
        call = _Running(self.version, len(answer))
        self._running.setdefault(request.request_id, []).append(call)
        try:
            await (self._wait(request, call) if self._seconds is not None else self._go(request, call))
            if request.request_id in self._aborted:
                stop_reason = "abort"
        finally:
            self._leave(request.request_id, call)
        sampled, prompt_version = call.sampled, call.prompt_version
        tokens = np.asarray(answer[:sampled], np.int32)
        version_spans = call.spans.finish(sampled)
        versions = expand(version_spans, sampled)
        first = len(request.prompt_ids)
        routes_from = request.routes_wanted(call.version if prompt_version is None else prompt_version)
        self.generated_tokens += sampled
        return Generation(
            token_ids=tokens,
            logprobs=self._logprobs(np.arange(first, first + sampled), versions, tokens) / (request.temperature or 1.0),
            version_spans=version_spans,
            routed_experts=self._routes(request, tokens, versions, prompt_version, routes_from),
            routes_from=routes_from,
            stop_reason=stop_reason,
            supports=scripted_supports(tokens) if request.mask else None,
        )

    async def _go(self, request: GenerationRequest, call: _Running) -> None:
        """Token by token."""
        if self._pace is None:
            await asyncio.sleep(0)
        while call.sampled < call.tokens:
            if self._pace is not None:
                await self._pace()
            await self._installed()
            self._require_started()
            if request.request_id in self._aborted:
                return
            call.stamp(self.version)
            call.prompt_version = self.version if call.prompt_version is None else call.prompt_version
            call.sampled += 1

    async def _wait(self, request: GenerationRequest, call: _Running) -> None:
        """For the whole answer. Who installs weights sees to it that it takes longer by that, and is of several versions."""
        await self._installed()
        self._require_started()
        assert self._seconds is not None
        call.stamp(self.version)
        call.began, call.seconds = self._clock(), self._seconds(call.tokens, self._calls_running)
        while (left := call.began + call.seconds - self._clock()) > 1e-9 and request.request_id not in self._aborted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await call.woken.wait()
            await self._installed()
            self._require_started()
        call.advance(self._clock())

    async def _installed(self) -> None:
        """Nothing is produced while weights change."""
        if self._installing.locked():
            async with self._installing:
                pass

    @property
    def _calls_running(self) -> int:
        return sum(map(len, self._running.values()))

    def _logprobs(self, positions: np.ndarray, versions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        keys = [self._keys.get(version, version) & MASK for version in versions.tolist()]
        return scripted_logprobs(positions, np.asarray(keys, np.int64), tokens)

    async def abort(self, request_id: str) -> None:
        """Running calls of that id return what they have, before their next token."""
        for call in self._running.get(request_id, ()):
            self._aborted.add(request_id)
            call.woken.set()

    async def install(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        self._require_started()
        async with self._installing:
            if manifest.version < self.version:
                raise EngineError(f"version {manifest.version} is older than the installed version {self.version}")
            started = self._clock()
            try:
                async with asyncio.timeout(timeout):
                    await self._before_install(manifest)
                if DIGEST in manifest.tensors:
                    self._keys[manifest.version] = self._read(manifest)
            except Exception as error:
                self._started = False
                raise EngineError(f"installing version {manifest.version} failed: {error!r}") from error
            seconds = self._clock() - started
            self._install(manifest, started, seconds)
            return InstallReport(manifest.version, update_seconds=seconds, pause_seconds=seconds)

    def _read(self, manifest: WeightManifest) -> int:
        """The key of the weights in the version's file. Raises `WeightError` if they are not those of the manifest."""
        key = weights_key(Path(manifest.path), self._files)
        if key != manifest.tensors[DIGEST].checksum:
            raise WeightError(
                f"{manifest.path}: tensor {DIGEST!r} is corrupt: its checksum differs from the published one"
            )
        return key

    def _install(self, manifest: WeightManifest, began: float, seconds: float) -> None:
        self.version = manifest.version
        self.installed.append(manifest.version)
        self._paused += seconds
        for calls in self._running.values() if self._seconds is not None else ():
            for call in calls:
                if call.seconds:  # else it has not begun
                    call.advance(began)
                    call.stamp(manifest.version)
                    call.began += seconds

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        self._require_started()
        await asyncio.sleep(0)
        at = np.arange(1, len(token_ids))
        return self._logprobs(at, np.full(len(at), self.version), np.asarray(token_ids)[1:])

    async def cached_from_older(self, token_ids: np.ndarray) -> int:
        return 0

    async def differences(self, manifest: WeightManifest, timeout: float) -> list[Difference]:
        return []

    def stats(self) -> dict[str, float]:
        return {
            "generated_tokens": self.generated_tokens,
            "running": self._calls_running,
            "pause_seconds": self._paused,
        }

    async def stop(self) -> None:
        """Running and later calls raise `EngineError`."""
        self._started = False
        for calls in self._running.values():
            for call in calls:
                call.woken.set()

    def _require_started(self) -> None:
        if not self._started:
            raise EngineError("the engine is not running")

    def _leave(self, request_id: str, call: _Running) -> None:
        self._running[request_id].remove(call)
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
        rows = scripted_route_rows(first + np.arange(len(fed)), fed_by, fed, self.routing)
        if self._rows == "half":
            rows = rows[: len(rows) // 2]
        return rows.astype(route_dtype(self.routing.num_experts))


def weights_key(path: Path, files: Files) -> int:
    """Checksum of the scripted learner's weights as they are in the file of a version. Raises `WeightError`."""
    try:
        with files.open(path) as file:
            content = file.map()
            found, begin = decode_header(content)
            start, stop = found[DIGEST].data_offsets
            return xxhash.xxh3_64_intdigest(content[begin + start : begin + stop])
    except (OSError, ValueError, KeyError) as error:
        raise WeightError(f"{path} cannot be read: {error}") from error


def scripted_engine(
    model_path: str, world: World = REAL, token_seconds: float = 0.0, install_seconds: float = 0.0, **unknown: Any
) -> ScriptedEngine:
    """Answers in letters that nobody thought about, with routes of the model's geometry; `token_seconds` a token. The same call
    of the same episode has the same answer, whoever plays it, and however often. Weights take up to `install_seconds` to
    install: the first ones anything up to that, later ones mostly much less."""
    if unknown:
        raise ValueError(
            f"`generator.engine_args` has {', '.join(map(repr, unknown))}: the scripted engine knows `token_seconds` and "
            "`install_seconds` only"
        )
    routing, _ = moe_geometry(decode_python_json((Path(model_path) / "config.json").read_bytes()))

    installed = itertools.count()

    async def install(manifest: WeightManifest) -> None:
        share = scripted_hash(zlib.crc32(world.unique().encode()), manifest.version, 0) / 2**32
        await asyncio.sleep(install_seconds * (share**3 if next(installed) else share))

    return ScriptedEngine(
        lambda request, index: babble(request, zlib.crc32(request.request_id.encode())),
        routing=routing,
        seconds=(lambda tokens, running: token_seconds * tokens) if token_seconds else None,
        before_install=install if install_seconds else None,
        keep_calls=False,
        clock=world.clock.monotonic,
        files=world.files,
    )


def babble(request: GenerationRequest, seed: int) -> Sequence[int]:
    """Letters, at least one and at most as many as fit, with a stop token at the end if it fits; the same for equal `seed`s."""
    length = 1 + scripted_hash(0, seed, len(request.prompt_ids)) % request.max_tokens
    letters = [LETTERS[scripted_hash(i, seed, 1) % len(LETTERS)] for i in range(length)]
    return [*letters, *request.stop_token_ids[:1]]


def scripted_logprobs(positions: np.ndarray, versions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float32 `[n]`: of `tokens` sampled at `positions` (in prompt and answer together) by `versions`, in (-4, -0.01). Of the
    scripted learner's weights the checksum stands for the version."""
    return (-0.01 - 3.98 * (_hashes(positions, versions, tokens) / 2**32)).astype(np.float32)


def scripted_supports(tokens: np.ndarray) -> Supports:
    """Each token and the one before it could be sampled."""
    ids = np.stack([np.maximum(tokens - 1, 0), np.maximum(tokens, 1)], axis=1)
    return Supports.of_lists(ids.reshape(-1), np.arange(0, ids.size + 1, 2))


def scripted_route_rows(
    positions: np.ndarray, versions: np.ndarray, tokens: np.ndarray, shape: RoutingShape
) -> np.ndarray:
    """int64 `[n, layers, top_k]`: distinct experts of `tokens` fed at `positions` under `versions`."""
    seeds = (_hashes(positions, versions, tokens) >> 8).astype(np.int64)
    return (seeds[:, None, None] + 5 * np.arange(shape.layers)[:, None] + np.arange(shape.top_k)) % shape.num_experts


def scripted_hash(position: int, version: int, token: int) -> int:
    """32 bits, the same in every process; the finaliser of MurmurHash3."""
    return _mixed(position * 0x9E3779B1 ^ (version + 2) * 0x85EBCA6B ^ token * 0xC2B2AE35)


def _hashes(positions: np.ndarray, versions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The same of `[n]` tokens; whole numbers wrap as they do in 32 bits."""
    p, v, t = (np.asarray(numbers).astype(np.uint64) for numbers in (positions, versions, tokens))
    return _mixed(p * 0x9E3779B1 ^ (v + 2) * 0x85EBCA6B ^ t * 0xC2B2AE35)


def _mixed(x: Any) -> Any:
    x = x & MASK
    x = (x ^ x >> 16) * 0x85EBCA6B & MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & MASK
    return x ^ x >> 16
