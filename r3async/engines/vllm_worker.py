"""What runs inside vLLM's worker processes: installing published weights, and not outliving the engine's owner.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by name. Everything
that crosses the process boundary is bytes, numbers or strings.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from r3async.weights.manifest import WeightManifest
from r3async.weights.publish import read_verified


def repack_cpu_experts(model: torch.nn.Module) -> int:
    """Bring reloaded expert weights into the layout that vLLM's CPU kernels compute with; returns how many layers.

    vLLM (0.30 to 0.32) packs experts for the CPU on the first load only; after a reload the kernels would read
    checkpoint layout as packed layout and give wrong outputs without an error. No layers on other devices.
    """
    repacked = 0
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        weight = getattr(module, "w13_weight", None)
        if kernel is not None and weight is not None and weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)
            repacked += 1
    return repacked


class WorkerExtension:
    """Methods that `VllmEngine` calls on every worker."""

    def r3_process(self) -> int:
        """Pid of the worker's process."""
        return os.getpid()

    def r3_install(self, manifest: bytes) -> float:
        """Load the published weights of a msgpack-encoded `WeightManifest` in place; returns the seconds it took.

        The owner has verified the checksums of the very file before it paused the engine, so only names, shapes and
        dtypes are checked again. Raises `WeightError` for those, or whatever vLLM's loader raises; the model then
        holds neither version and must not be run.
        """
        started = time.perf_counter()
        published = msgspec.msgpack.decode(manifest, type=WeightManifest)
        tensors = read_verified(published, checksums=False)
        self.model_runner.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]
        self.r3_after_load()
        return time.perf_counter() - started

    def r3_after_load(self) -> None:
        """Whatever vLLM itself leaves undone after a reload."""
        repack_cpu_experts(self.model_runner.model)  # type: ignore[attr-defined]


class OwnedConfig(dict[str, Any]):
    """vLLM's `additional_config`; every process that it is unpickled in ends with process `owner`.

    vLLM hands its whole configuration to each process it spawns, before that process does anything else. A hook in
    the worker would come too late: an owner that is killed during the start would leave its engine waiting.
    """

    def __init__(self, owner: int, values: Mapping[str, Any]):
        super().__init__(values)
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return _owned_config, (self.owner, dict(self))


def _owned_config(owner: int, values: dict[str, Any]) -> OwnedConfig:
    if owner != os.getpid():
        exit_with(owner)
    return OwnedConfig(owner, values)


def exit_with(owner: int) -> None:
    """Start a daemon thread that ends this process as soon as process `owner` has ended, however that happened.

    A worker sits in a subprocess of its own; if its owner is killed without a chance to clean up, nobody else would
    ever tell the worker to leave.
    """

    def watch() -> None:
        _wait_for_exit(owner)
        os._exit(1)

    threading.Thread(target=watch, name="r3async-owner-watch", daemon=True).start()


def _wait_for_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel or sandbox
        while _exists(pid):
            time.sleep(1.0)
        return
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not poller.poll(60_000):
        pass


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
