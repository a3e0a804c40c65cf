"""An engine whose weights are tampered with; a run names it in `generator.engine_args`."""

import threading
import time
from pathlib import Path

import msgspec

from r3async.rollout.vllm.worker import WorkerExtension
from r3async.weights.manifest import WeightManifest


def decode(manifest: bytes) -> WeightManifest:
    return msgspec.msgpack.decode(manifest, type=WeightManifest)


class FlipsABit(WorkerExtension):
    """A worker on whose host another process writes into the shared memory in which version 1 arrives."""

    def r3_install_version(self, manifest):
        published = decode(manifest)
        if not published.version:
            threading.Thread(
                target=self._flip, args=(Path(published.path).parent, published.nbytes), daemon=True
            ).start()
        return super().r3_install_version(manifest)

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
