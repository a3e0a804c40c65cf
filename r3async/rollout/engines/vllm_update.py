"""New weights under running requests: the order of events that makes every token's version exact.

Verify (nothing is paused yet), wait for running requests if they are to be drained, pause (no step runs any more), load,
have every worker confirm, take every output that was produced before the pause, stamp all running requests with their
token counts, resume. A request that has not produced a token when the pause comes starts afresh, so its prompt is never half
old and half new.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from r3async.rollout.engines.base import EngineError, InstallReport
from r3async.rollout.engines.vllm_requests import CALL_TIMEOUT, Requests
from r3async.weights.publish import Difference, WeightError, WeightManifest, verify


async def install(
    requests: Requests,
    manifest: WeightManifest,
    *,
    names: Collection[str],
    on_update: str,
    timeout: float,
    installed: Callable[[int], None],
) -> InstallReport:
    """Install a version that must have a tensor for each of `names`; `on_update` is the setting of that name.

    `installed` is told the version when the running requests are stamped with it, before any new one can enter.

    Until the engine is paused a failure leaves it as it was, on its old version: `EngineError` then names the tensor, or says
    how many requests did not end in time. If anything fails later, or the call is cancelled, the weights are in an unknown
    state: the engine stays paused, and every running and later request fails.
    """
    started = time.perf_counter()
    deadline = asyncio.get_running_loop().time() + timeout
    version = manifest.version
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.to_thread(_verify, manifest, names)
    except WeightError as error:
        raise EngineError(str(error)) from error
    except TimeoutError as error:
        raise EngineError(f"verifying version {version} took longer than {timeout} s") from error
    verified = time.perf_counter()
    requests.close_gate()
    if on_update == "drain":
        await _drain(requests, version, deadline, timeout)
    paused = time.perf_counter()
    try:
        async with asyncio.timeout_at(deadline):
            # To clear the cache vLLM takes running requests' keys and values too. It raises if a block is left, and computes
            # them anew, with the weights that it has then, before these requests go on.
            await requests.llm.pause_generation(mode="keep", clear_cache=on_update == "recompute")
            before = time.perf_counter()
            await requests.llm.collective_rpc("r3_install", args=(msgspec.msgpack.encode(manifest),))
            load = time.perf_counter() - before
            await _confirm(requests.llm, manifest)
            await requests.counted()
            installed(version)
            await requests.stamp(version)
            await requests.llm.resume_generation()
    except BaseException as error:
        what = f"took longer than {timeout} s" if isinstance(error, TimeoutError) else f"failed: {error!r}"
        failure = EngineError(f"installing version {version} {what}; the engine must be restarted")
        await requests.fail(failure)
        if isinstance(error, Exception):
            raise failure from error
        raise
    requests.open_gate()
    now = time.perf_counter()
    return InstallReport(
        version,
        update_seconds=now - started,
        pause_seconds=now - paused,
        verify_seconds=verified - started,
        drain_seconds=paused - verified,
        load_seconds=load,
    )


async def differences(requests: Requests, manifest: WeightManifest, timeout: float) -> list[Difference]:
    """Which tensors of an installed version the workers do not hold as they were published. Ends the engine: it must be
    restarted. Raises `EngineError`."""
    requests.close_gate()
    try:
        async with asyncio.timeout(timeout):
            await requests.llm.pause_generation(mode="keep", clear_cache=False)
            answers = await requests.llm.collective_rpc("r3_differences", args=(msgspec.msgpack.encode(manifest),))
    except Exception as error:
        raise EngineError(
            f"comparing what the engine holds with version {manifest.version} failed: {error!r}"
        ) from error
    finally:
        await requests.fail(EngineError("the engine's weights were compared and reloaded; it must be restarted"))
    found = [d for answer in answers for d in msgspec.msgpack.decode(answer, type=list[Difference])]
    return list({d.tensor: d for d in found}.values())


def _verify(manifest: WeightManifest, names: Collection[str]) -> None:
    if missing := sorted(set(names) - set(manifest.tensors)):
        raise WeightError(
            f"weights version {manifest.version}: tensor {missing[0]!r} is missing ({len(missing)} in all)"
        )
    if manifest.source is None:
        verify(manifest)


async def _drain(requests: Requests, version: int, deadline: float, timeout: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await requests.finished()
    except BaseException as error:
        running = len(requests)
        requests.open_gate()
        if not isinstance(error, TimeoutError):
            raise
        raise EngineError(
            f"version {version} waited {timeout} s (weights.install_timeout) for {running} running requests to end "
            '(generator.on_update = "drain"); allow more time, or set generator.on_update="keep"'
        ) from error


async def _confirm(llm: Any, manifest: WeightManifest) -> None:
    """Every worker says what it has installed: it must be this version, with these contents."""
    async with asyncio.timeout(CALL_TIMEOUT):
        answers = await llm.collective_rpc("r3_installed")
    for worker, (version, digest) in enumerate(answers):
        if (version, digest) != (manifest.version, manifest.digest):
            raise EngineError(f"worker {worker} holds version {version} and not version {manifest.version}")


def checkpoint_names(directory: Path) -> frozenset[str]:
    """Names of the tensors in a safetensors checkpoint."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return frozenset(names)
