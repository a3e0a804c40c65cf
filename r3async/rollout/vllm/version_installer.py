"""How an engine gets versions of weights under its running requests, and which it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

import msgspec

from r3async.config.generator import UpdateHandling
from r3async.rollout.engine import (
    CorruptWeightsError,
    EngineError,
    EngineLostError,
    InstallReport,
)
from r3async.rollout.vllm.messages import CoreAdapterRequest, build_adapter_request
from r3async.rollout.vllm.running_requests import RequestRegistry
from r3async.weights.manifest import BASE_VERSION, WeightError, WeightManifest
from r3async.weights.version_reader import verify_version_file


class VersionInstaller:
    """Installs versions of weights, one at a time; see `Engine.install_version`.

    The order of events makes every token's version exact: verify (nothing is paused yet), wait
    for running requests if they are drained, pause (no step runs any more), load, have every
    worker confirm, receive every output that was produced before the pause, stamp all running
    requests with their token counts, resume. A request that has not produced a token before the
    pause starts again, so its prompt is never half old and half new.

    Adapters are loaded beside those of older versions, between two steps of the engine. Running
    requests keep theirs to the end, so nothing is stamped and nothing waits.

    Attributes:
        version: Version of the installed weights; -1 before the first.
        tensor_names: The tensors that a version must have.
        base: Weights to which versions of adapters are added; None before they are installed.
        kept_versions: Versions of adapters that stay while no request runs under them: the next
            installation removes others.
    """

    def __init__(self, requests: RequestRegistry, on_update: UpdateHandling):
        self.version = -1
        self.tensor_names: frozenset[str] = frozenset()
        self.base: WeightManifest | None = None
        self.kept_versions: set[int] = set()
        self.on_update = on_update
        self._held_versions: set[int] = set()
        self._requests = requests

    async def install_version(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        """Install published weights.

        Until the engine is paused, a failure leaves it unchanged on its old version:
        `CorruptWeightsError` then names the tensor, or `EngineError` the number of requests that
        did not end in time. If anything fails later, or the call is cancelled, the weights are in
        an unknown state: the engine stays paused, and every running and later request raises
        `EngineLostError`. A failure with adapters leaves the engine on its old version.
        """
        if self._requests.failure is not None:
            raise self._requests.failure
        if manifest.version == BASE_VERSION:
            return await self._install_base(manifest, timeout)
        if manifest.version < self.version:
            raise EngineError(
                f"version {manifest.version} is older than the installed version {self.version}"
            )
        if manifest.adapter is None:
            return await self._install_newer(manifest, timeout)
        return await self._install_adapters(manifest, timeout)

    def name_adapter(self, wanted: int | None = None) -> CoreAdapterRequest | None:
        """Return the adapters of a new request of the version that it wants; None if it has all
        weights.

        Raises `EngineError` for a version that the engine does not hold, and before the first one:
        vLLM's process would end with such a request.
        """
        if wanted is None:
            if self.base is None:
                return None
            if self.version == BASE_VERSION:
                raise EngineError("the engine has the start model, and no version of adapters yet")
            return build_adapter_request(self.version)
        if wanted not in self._held_versions:
            raise EngineError(f"the engine does not hold version {wanted} beside others")
        return build_adapter_request(wanted)

    async def _install_newer(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        requests = self._requests
        version = manifest.version
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + timeout
        # Verify the files while requests run: what is corrupt is not loaded.
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.to_thread(verify_manifest, manifest, self.tensor_names)
        except WeightError as error:
            raise CorruptWeightsError(str(error)) from error
        except TimeoutError as error:
            raise EngineError(
                f"verifying version {version} took longer than {timeout} s"
            ) from error
        encoded = msgspec.msgpack.encode(manifest)
        verified = time.perf_counter()
        # From here on no request enters, and a drained engine waits until none runs.
        requests.pause_admission()
        if self.on_update == "drain":
            await self._drain_requests(version, deadline, timeout)
        drained = time.perf_counter()
        try:
            async with asyncio.timeout_at(deadline):
                # To clear the cache vLLM drops the keys and values of running requests too. It
                # raises if a block is left, and computes them again, with the weights that it has
                # then, before these requests continue.
                await self._requests.running_core.pause_generation(
                    mode="keep", clear_cache=self.on_update == "recompute"
                )
                paused = time.perf_counter()  # until then the engine finished its current step
                # Every worker loads the weights, and says what it holds.
                confirm_installed(
                    await self._requests.running_core.collective_rpc(
                        "r3_install_version", args=(encoded,)
                    ),
                    manifest,
                )
                load = time.perf_counter() - paused
                # New requests begin under this version, and running ones continue under it.
                self.version = version
                await requests.stamp_version(version)
                await self._requests.running_core.resume_generation()
        except BaseException as error:
            what = (
                f"took longer than {timeout} s"
                if isinstance(error, TimeoutError)
                else f"failed: {error!r}"
            )
            failure = EngineError(
                f"installing version {version} {what}; the engine must be restarted"
            )
            await requests.fail_requests(EngineLostError(str(failure)))
            if isinstance(error, Exception):
                raise failure from error
            raise
        requests.resume_admission()
        now = time.perf_counter()
        return InstallReport(
            version,
            update_seconds=now - started,
            pause_seconds=now - paused,
            verify_seconds=verified - started,
            drain_seconds=drained - verified,
            load_seconds=load,
        )

    async def _install_base(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        """Install the weights to which versions of adapters are added, unless they are here."""
        if self.base is None or self.base.digest != manifest.digest:
            report = await self._install_newer(manifest, timeout)
            self.base = manifest
            return report
        return InstallReport(manifest.version, 0.0, 0.0)

    async def _install_adapters(self, manifest: WeightManifest, timeout: float) -> InstallReport:
        started = time.perf_counter()
        version = manifest.version
        assert manifest.adapter is not None
        if self.base is None or self.base.digest != manifest.adapter.base_digest:
            raise EngineError(
                f"version {version} has adapters alone, and the engine does not hold the weights "
                "that they are added to"
            )
        encoded = msgspec.msgpack.encode(manifest)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.to_thread(verify_version_file, manifest)
                verified = time.perf_counter()
                # Requests that enter until the workers have answered run under the old version.
                needed = self._requests.versions_in_use | {self.version}
                self._held_versions &= needed | self.kept_versions
                needed |= self._held_versions
                answers = await self._requests.running_core.collective_rpc(
                    "r3_install_adapters", args=(encoded, sorted(needed))
                )
        except WeightError as error:
            raise CorruptWeightsError(str(error)) from error
        except TimeoutError as error:
            raise EngineError(
                f"installing version {version} took longer than {timeout} s"
            ) from error
        confirm_installed([answer[:2] for answer in answers], manifest)
        self._held_versions.add(version)
        self.version = version
        paused = max(answer[2] for answer in answers)
        return InstallReport(
            version,
            update_seconds=time.perf_counter() - started,
            pause_seconds=paused,
            verify_seconds=verified - started,
            load_seconds=paused,
        )

    async def _drain_requests(self, version: int, deadline: float, timeout: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._requests.wait_until_idle()
        except BaseException as error:
            running = len(self._requests)
            self._requests.resume_admission()
            if not isinstance(error, TimeoutError):
                raise
            raise EngineError(
                f"version {version} waited {timeout} s (weights.install_timeout) for {running} "
                'running requests to end (generator.on_update = "drain"); allow more time, or set '
                'generator.on_update="keep"'
            ) from error


def verify_manifest(manifest: WeightManifest, tensor_names: Collection[str]) -> None:
    missing = sorted(set(tensor_names) - set(manifest.tensors) - set(manifest.carried))
    if missing:
        raise WeightError(
            f"weights version {manifest.version}: tensor {missing[0]!r} is missing "
            f"({len(missing)} in all)"
        )
    if manifest.source is None:
        verify_version_file(manifest)


def confirm_installed(answers: Sequence[Sequence[int]], manifest: WeightManifest) -> None:
    """Raise `EngineError` unless every worker reports that it holds this version
    with these contents."""
    digest = manifest.digest
    for worker, holds in enumerate(answers):
        if tuple(holds) != (manifest.version, digest):
            version = holds[0]
            raise EngineError(
                f"worker {worker} holds version {version} and not version {manifest.version}"
            )
