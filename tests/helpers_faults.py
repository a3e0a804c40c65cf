"""Engines and schedulers that do wrong with weights, each in one way; a run names them in `generator.engine_args`."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
from vllm.v1.core.sched.scheduler import Scheduler

from r3async.engines.vllm_worker import WorkerExtension
from r3async.weights.manifest import WeightManifest

SKIPPED = "model.layers.1.mlp.experts.5.down_proj.weight"


def decode(manifest: bytes) -> WeightManifest:
    return msgspec.msgpack.decode(manifest, type=WeightManifest)


class SkipsATensor(WorkerExtension):
    """From version 1 on, one tensor does not get to vLLM's loader."""

    def r3_tensors(self, published):
        for name, tensor in super().r3_tensors(published):
            if not (published.version and name == SKIPPED):
                yield name, tensor


class MissesUpdates(WorkerExtension):
    """From version 1 on, nothing is installed, and that is all it says."""

    def r3_install(self, manifest):
        return 0.0 if decode(manifest).version else super().r3_install(manifest)


class PretendsToInstall(WorkerExtension):
    """From version 1 on, nothing is installed, but it says so."""

    def r3_install(self, manifest):
        published = decode(manifest)
        if not published.version:
            return super().r3_install(manifest)
        self.r3_holds = published.version, published.digest
        return 0.0


class FlipsABit(WorkerExtension):
    """Somebody on this host writes into the shared memory in which version 1 comes."""

    def r3_install(self, manifest):
        published = decode(manifest)
        if not published.version:
            threading.Thread(
                target=self._flip, args=(Path(published.path).parent, published.nbytes), daemon=True
            ).start()
        return super().r3_install(manifest)

    def _flip(self, directory: Path, nbytes: int) -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            for path in directory.glob("version-1.*"):
                try:
                    with path.open("r+b") as file:
                        if path.stat().st_size > nbytes // 2:
                            file.seek(nbytes // 2)
                            byte = file.read(1)[0]
                            file.seek(nbytes // 2)
                            file.write(bytes([byte ^ 1]))
                            return
                except OSError:
                    continue
            time.sleep(0.0005)


class ForgetsSalts(Scheduler):
    """Its prefix cache does not know which weights a request came with."""

    def add_request(self, request):
        request.cache_salt = None
        request.block_hashes.clear()
        request.update_block_hashes()
        super().add_request(request)
